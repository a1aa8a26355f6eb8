"""Exact quadratic forms of the metric, by products with the Jacobian."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.model import Model
from natgrad.pullback.pullback import Batch
from natgrad.step.queries import quadratic_forms
from tests import oracle
from tests.optim.tasks import seeded
from tests.pulled import close, normal
from tests.zoo import Problem, case


def _lstm() -> Problem:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            """The head of the last output."""
            hidden: Tensor = self.lstm(x)[0][:, -1]
            out: Tensor = self.head(hidden)
            return out

    return Problem(seeded(lambda: Last().double()), normal(5, 4, 2))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    **{name: case(name).make for name in ("mlp_tanh", "conv", "layer_norm", "attention", "tied_embedding", "sequence")},
    "lstm": _lstm,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_quadratic_forms_are_those_of_the_dense_metric(name: str) -> None:
    problem = PROBLEMS[name]()
    y = problem.outputs()
    h = oracle.categorical(y.reshape(-1, y.shape[-1]))
    if y.ndim > 2:  # every token is a distribution of its own
        h = torch.stack([torch.block_diag(*h[n * y.shape[1] : (n + 1) * y.shape[1]]) for n in range(len(y))])
    G = oracle.dense(problem.jacobian(), h)
    flat = [normal(len(G), seed=seed) for seed in (1, 2)]
    vectors = [ng.Vector(oracle.unflatten(v, problem.parameters())) for v in flat]
    batch = Batch(Model.of(problem.module, output=problem.output), problem.x)
    V = torch.stack(flat)
    close(quadratic_forms(batch, ng.Fisher(ng.Categorical()), vectors), V @ G @ V.T, 1e-9)


@pytest.mark.parametrize(("n", "m"), [(6, 6), (300, 256), (600, 300), (1000, 500)])
def test_quadratic_forms_of_a_part_of_the_batch_are_those_of_different_examples_256_at_least(n: int, m: int) -> None:
    """⟨v, Gv⟩ of y = wx at v = 1 is the mean of x² over the examples that the model was called with."""
    seen: list[Tensor] = []
    model = nn.Linear(1, 1, bias=False).double()
    model.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    batch = Batch(Model.of(model), torch.arange(n, dtype=torch.float64).unsqueeze(1))
    found = quadratic_forms(batch, ng.Euclidean(), [ng.Vector({"weight": torch.ones(1, 1).double()})], 0.5)
    chosen = seen[-1].flatten()
    assert len(chosen) == len(chosen.unique()) == m
    close(found, chosen.square().mean().view(1, 1))


@pytest.mark.parametrize("order", ["sorted", "in turns"])
@pytest.mark.parametrize("n", [1438, 2000, 4096])
def test_a_part_of_the_batch_has_every_class_as_often_as_the_batch_has(n: int, order: str) -> None:
    """With one-hot inputs the diagonal of the forms is the share of every class; the first quarter has but three."""
    label = torch.arange(n) * 10 // n if order == "sorted" else torch.arange(n) % 10
    model = Model.of(nn.Linear(10, 10, bias=False).double())
    batch = Batch(model, torch.nn.functional.one_hot(label, 10).double())
    of_class = [ng.Vector({"weight": e.expand(10, 10) / 10**0.5}) for e in torch.eye(10, dtype=torch.float64)]
    share = quadratic_forms(batch, ng.Euclidean(), of_class, 0.25).diagonal()
    assert float((share - label.bincount() / n).abs().max()) < 0.01


def test_where_the_first_axis_is_not_that_of_the_examples_all_of_the_batch_is_taken() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            """From [t n 2] to [n 3]."""
            out: Tensor = self.rnn(x)[0][-1]
            return out

    problem = Problem(seeded(lambda: TimeFirst().double()), normal(600, 6, 2))
    model = Model.of(problem.module)
    v = ng.Vector({name: torch.ones_like(p) for name, p in model.params.items()})
    batch = Batch(model, problem.x)
    whole, part = (quadratic_forms(batch, ng.Euclidean(), [v], fraction) for fraction in (1.0, 0.5))
    close(part, whole)
