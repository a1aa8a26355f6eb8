"""Models that move, share, skip or replace the output of a layer: the numbers are right on every path."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import natgrad as ng
from tests import oracle, zoo
from tests.pulled import close, covered, normal, oracle_rows, pull, random_roots, rows


class Net(nn.Module):
    """Two layers, and what happens to examples and positions around them."""

    def __init__(self, forward: Callable[[nn.Linear, nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.body, self.head, x)


class TiedWithoutBias(nn.Module):
    """Two modules that share all they have: one layer with two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Unused(nn.Module):
    """A layer that is never called, and one whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.thrown = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.thrown(x)
        return self.used(x)


class Table(nn.Module):
    """A layer applied to a table of as many rows as there are examples: its first axis is not theirs."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, 3))
        self.keys, self.queries = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.queries(x) @ self.keys(self.table).T


class Recurrent(nn.Module):
    """A fused recurrent layer and a head on all steps."""

    def __init__(self, kind: type[nn.RNNBase], **options: bool | int) -> None:
        super().__init__()
        self.cell = kind(3, 2, batch_first=True, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(4 if self.cell.bidirectional else 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def _fused(*ends: str) -> set[str]:
    """The parameters of a fused recurrence."""
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return {f"cell.{kind}{end}" for kind in kinds for end in ends or ("_l0",)}


def _swapped(body: nn.Linear, head: nn.Linear, x: Tensor) -> Tensor:
    return head(torch.tanh(body(x.transpose(0, 1)))).transpose(0, 1)


def _swapped_and_averaged(body: nn.Linear, head: nn.Linear, x: Tensor) -> Tensor:
    return head(torch.tanh(body(x.transpose(0, 1)))).mean(0)


def _swapped_far(body: nn.Linear, head: nn.Linear, x: Tensor) -> Tensor:
    return head(torch.tanh(body(x.permute(2, 1, 0, 3)))).permute(2, 1, 0, 3)


def _swapped_and_merged(body: nn.Linear, head: nn.Linear, x: Tensor) -> Tensor:
    n, h, t, f = x.shape
    z = head(torch.tanh(body(x.permute(2, 0, 1, 3).reshape(t, n * h, f))))
    return z.reshape(t, n, h, -1).permute(1, 2, 0, 3)


def _sorted(body: nn.Linear, head: nn.Linear, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return head(torch.tanh(body(x[order]))[order.argsort()])


def _flipped(body: nn.Linear, head: nn.Linear, x: Tensor) -> Tensor:
    return head(torch.tanh(body(x.flip(0)).flip(0)))


def _hooked() -> nn.Module:
    model = zoo.mlp(3, 4, 2)
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def _pre_hooked() -> nn.Module:
    model = zoo.mlp(3, 4, 2)
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    return model


def _pruned() -> nn.Module:
    model = zoo.mlp(3, 4, 2)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


def _patched() -> nn.Module:
    model = zoo.mlp(3, 4, 2)
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    layer.forward = lambda input: F.linear(input, 2 * layer.weight, layer.bias)  # type: ignore[method-assign]
    return model


def _spectral() -> nn.Module:
    """The old spectral norm keeps the type nn.Linear and puts another parameter in."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)).eval(), nn.Tanh(), nn.Linear(4, 2))


@dataclass(frozen=True)
class Odd:
    """A model, the shape of its inputs, and the parameters that layer rules cover."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    covered: set[str]


BODY, HEAD = {"body.weight", "body.bias"}, {"head.weight", "head.bias"}
KEYS = {"keys.weight", "keys.bias", "table"}
ODD = {
    "tied_without_bias": Odd(TiedWithoutBias, (5, 3), {"first.weight"}),
    "time_major_square": Odd(lambda: Net(_swapped), (4, 4, 3), BODY | HEAD),
    "time_major": Odd(lambda: Net(_swapped), (4, 3, 3), BODY | HEAD),
    "time_major_mean": Odd(lambda: Net(_swapped_and_averaged), (4, 4, 3), BODY | HEAD),
    "swapped_with_third": Odd(lambda: Net(_swapped_far), (4, 2, 4, 3), BODY | HEAD),
    "swapped_and_merged": Odd(lambda: Net(_swapped_and_merged), (4, 2, 4, 3), BODY | HEAD),
    "sorted_and_back": Odd(lambda: Net(_sorted), (5, 3), BODY | HEAD),
    "flipped_and_back": Odd(lambda: Net(_flipped), (5, 3), BODY | HEAD),
    "table_of_n_rows": Odd(
        lambda: Table(5), (5, 3), {"queries.weight", "queries.bias", "keys.weight", "keys.bias", "table"}
    ),
    "unused": Odd(Unused, (5, 3), {"used.weight", "used.bias"}),
    "hook_changes_output": Odd(_hooked, (5, 3), {"0.weight", "0.bias", "2.weight", "2.bias"}),
    "hook_changes_input": Odd(_pre_hooked, (5, 3), {"0.weight", "0.bias", "2.weight", "2.bias"}),
    "pruned": Odd(_pruned, (5, 3), {"0.weight_orig", "0.bias", "2.weight", "2.bias"}),
    "patched_forward": Odd(_patched, (5, 3), {"0.weight", "0.bias", "2.weight", "2.bias"}),
    "spectral_norm": Odd(_spectral, (5, 3), {"0.weight_orig", "0.bias", "2.weight", "2.bias"}),
    "rnn": Odd(lambda: Recurrent(nn.RNN), (4, 3, 3), HEAD | _fused()),
    "lstm": Odd(lambda: Recurrent(nn.LSTM), (4, 3, 3), HEAD | _fused()),
    "gru": Odd(lambda: Recurrent(nn.GRU), (4, 3, 3), HEAD | _fused()),
    "lstm_both_ways": Odd(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        (4, 3, 3),
        HEAD | _fused("_l0", "_l0_reverse", "_l1", "_l1_reverse"),
    ),
}


def problem_of(name: str) -> zoo.Problem:
    odd = ODD[name]
    return zoo.Case(name, lambda: zoo.Problem(odd.build(), torch.randn(odd.shape, dtype=torch.float64))).make()


@pytest.mark.parametrize("name", ODD)
def test_numbers_are_right_whatever_the_model_does_to_its_axes(name: str) -> None:
    problem = problem_of(name)
    metric = random_roots(problem)
    pb = pull(problem, metric)
    expected = oracle_rows(problem, metric.s)
    close(rows(pb), expected)
    R = expected.flatten(0, 1)
    close(ng.Dense().estimate(pb).dense(), R.T @ R)
    assert covered(pb) == ODD[name].covered


def test_tied_layer_has_two_uses() -> None:
    pb = pull(problem_of("tied_without_bias"), ng.Euclidean())
    assert [f.a.shape[1] for f in pb.collect()] == [2]


@pytest.mark.parametrize("before", [True, False])
def test_tokens_may_become_examples(before: bool) -> None:
    """A model that flattens [n t] has n·t examples on its first output axis, and G is their mean."""

    def run(body: nn.Linear, head: nn.Linear, x: Tensor) -> Tensor:
        return head(torch.tanh(body(x.flatten(0, 1)))) if before else head(torch.tanh(body(x))).flatten(0, 1)

    model, x = Net(run).double(), normal(4, 3, 3)
    J = oracle.module_jacobian(model, x).reshape(12, 2, -1)
    pb = ng.pullback(model, x, ng.Euclidean())
    assert pb.n == 12
    close(ng.Dense().estimate(pb).dense(), oracle.dense(J, torch.eye(2).double().expand(12, 2, 2)))
    assert covered(pb) == BODY | HEAD
    for bound in (400, 2000):
        bounded = ng.pullback(model, x, ng.Euclidean(), memory=bound)
        close(bounded.square(), pb.square())


def test_inputs_with_time_first_are_not_mistaken_for_examples_where_their_numbers_agree() -> None:
    model, x = Net(lambda body, head, x: head(torch.tanh(body(x))).mean(0)).double(), normal(4, 4, 3)
    alone = [oracle.differential(model, model(x[:, n : n + 1])[0, d]) for n in range(4) for d in range(2)]
    expected = torch.stack(alone).view(4, 2, -1)
    pb = ng.pullback(model, x, ng.Euclidean())
    close(ng.Dense().estimate(pb).dense(), oracle.dense(expected, torch.eye(2).double().expand(4, 2, 2)))


def test_positions_are_looked_for_anew_when_shapes_change() -> None:
    """The answer is remembered by shapes: one batch with t ≠ n must not decide for one with t = n."""
    model = Net(_swapped).double()
    for t in (3, 4, 5, 4):
        problem = zoo.Problem(model, normal(4, t, 3, seed=t))
        metric = random_roots(problem)
        close(rows(pull(problem, metric)), oracle_rows(problem, metric.s))


def test_a_metric_that_is_a_class_is_refused() -> None:
    with pytest.raises(TypeError, match=r"metric must be a natgrad OutputMetric, .*write Euclidean\(…\)"):
        ng.pullback(torch.nn.Linear(2, 2), torch.ones(3, 2), ng.Euclidean)  # type: ignore[arg-type]


def test_inputs_on_another_device_than_the_parameters_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"an input is on meta and the parameters are on cpu: move it there, x.to\('cpu'"
    ):
        ng.pullback(torch.nn.Linear(2, 2), torch.ones(3, 2, device="meta"), ng.Euclidean())
