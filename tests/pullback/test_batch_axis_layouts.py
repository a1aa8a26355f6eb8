"""Models whose batch axis is not the first one inside, such as torch's own transformers and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate.moments import rows as leading_rows
from natgrad.model import Model
from natgrad.operators import Operator
from natgrad.pullbacks.pullback import Batch, Observer, layers_of
from natgrad.pullbacks.row_examples import BatchAxis
from natgrad.pullbacks.tape import record
from natgrad.rules import EmbeddingRule
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.pulled import close, covered, normal, oracle_rows, pull, random_roots, rows

N, T, D, H, V = 5, 4, 6, 2, 7


class Layers(nn.Module):
    """What is between the first layer of a model and its last, with examples first or second."""

    def __init__(self, body: nn.Module, embedding: nn.Module, head: nn.Linear, first: bool) -> None:
        super().__init__()
        self.embedding, self.body, self.head, self.first = embedding, body, head, first

    def forward(self, x: Tensor) -> Tensor:
        """[n t …] to [n t V]."""
        y = self.body(self.embedding(x if self.first else x.transpose(0, 1)))
        z = self.head(y[0] if isinstance(y, tuple) else y)
        return z if self.first else z.transpose(0, 1)


class Language(nn.Module):
    """Tokens, a table of positions, a recurrence, and a head with the weight of the tokens."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D, padding_idx=2), nn.Embedding(T + 1, D)
        self.norm, self.rnn = nn.RMSNorm(D), nn.GRU(D, D, batch_first=first)
        self.head, self.first = nn.Linear(D, V), first
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """[n t] to [n t V]."""
        where = torch.arange(x.shape[1])
        x, where = (x, where) if self.first else (x.T, where.unsqueeze(1))
        z = self.head(self.rnn(self.norm(self.tokens(x) + self.positions(where)))[0])
        return z if self.first else z.transpose(0, 1)


class Last(nn.Module):
    """The last state of a recurrence: the graph does not say where the examples of its inputs are."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(V, D), nn.LSTM(D, D, batch_first=first)
        self.head, self.first = nn.Linear(D, 2), first

    def forward(self, x: Tensor) -> Tensor:
        """[n t] to [n 2]."""
        z: Tensor = self.head(self.rnn(self.tokens(x if self.first else x.T))[1][0][-1])
        return z


class Ends(nn.Module):
    """The last token of every sequence, which are of several lengths: gathered by an index, which nobody can follow."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.tokens, self.body, self.norm = nn.Embedding(V, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.head, self.first = nn.Linear(D, 2), first

    def forward(self, x: Tensor) -> Tensor:
        """[n t] to [n 2]."""
        z = torch.tanh(self.norm(self.body(self.tokens(x if self.first else x.T)).cumsum(1 if self.first else 0)))
        example, end = torch.arange(len(x)), x[:, 0] % T
        return self.head(z[example, end] if self.first else z[end, example])


class Stack(nn.Module):
    """Linear layers and norms on inputs [n 3 T D] that are seen in another form."""

    def __init__(self, to: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2)
        self.to_, self.back = to, back

    def forward(self, x: Tensor) -> Tensor:
        """[n 3 T D] to [n 3 T 2]."""
        return self.back(self.b(torch.tanh(self.norm(torch.tanh(self.a(self.to_(x)))))))


def _encoder(first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=first)
    return Layers(layer, nn.Linear(D, D), nn.Linear(D, V), first)


def _lstm(first: bool) -> nn.Module:
    return Layers(nn.LSTM(D, D, 2, batch_first=first), nn.Embedding(V, D), nn.Linear(D, V), first)


def _second(first: bool) -> nn.Module:
    return Stack(_same, _same) if first else Stack(lambda x: x.transpose(0, 1), lambda z: z.transpose(0, 1))


def _third(first: bool) -> nn.Module:
    return Stack(_same, _same) if first else Stack(lambda x: x.permute(2, 1, 0, 3), lambda z: z.permute(2, 1, 0, 3))


def _folded(first: bool) -> nn.Module:
    if first:
        return Stack(_same, _same)
    return Stack(lambda x: x.reshape(-1, D), lambda z: z.view(-1, 3, T, 2))


def _folded_behind(first: bool) -> nn.Module:
    if first:
        return Stack(_same, _same)
    return Stack(lambda x: x.movedim(0, 2).reshape(-1, D), lambda z: z.view(3, T, -1, 2).movedim(2, 0))


def _same(x: Tensor) -> Tensor:
    return x


@final
@dataclass(frozen=True)
class Layout:
    """One model in two layouts, with its inputs of n examples."""

    make: Callable[[bool], nn.Module]
    inputs: Callable[[int], Tensor]

    def problem(self, first: bool, n: int) -> zoo.Problem:
        """The same weights in either layout, in float64."""
        return zoo.Case("layout", lambda: zoo.Problem(self.make(first), self.inputs(n))).make()


def _tokens(n: int) -> Tensor:
    return torch.randint(V, (n, T), generator=torch.Generator().manual_seed(0))


def _vectors(n: int) -> Tensor:
    return normal(n, T, D)


def _grids(n: int) -> Tensor:
    return normal(n, 3, T, D)


LAYOUTS = {
    "encoder layer": Layout(_encoder, _vectors),
    "lstm": Layout(_lstm, _tokens),
    "positions and a tied head": Layout(Language, _tokens),
    "last state": Layout(Last, _tokens),
    "ends of sequences": Layout(Ends, _tokens),
    "second of three": Layout(_second, _grids),
    "third of three": Layout(_third, _grids),
    "folded": Layout(_folded, _grids),
    "folded behind positions": Layout(_folded_behind, _grids),
}


@pytest.mark.parametrize("n", [1, 3, T, N])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_rows_are_gradients_and_every_layer_has_its_rule_wherever_the_examples_are(kind: str, n: int) -> None:
    of = LAYOUTS[kind].problem(False, n)
    metric = random_roots(of, 2)
    pb = pull(of, metric)
    close(rows(pb), oracle_rows(of, metric.s))
    assert covered(pb) == set(pb.model.params)


@pytest.mark.parametrize("k", [1, 2])  # one column is used while the backward pass runs
@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.Kronecker(sharing="reduce")], ids=repr)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_factors_do_not_depend_on_where_the_examples_are(kind: str, structure: ng.Kronecker, k: int) -> None:
    expected, got = (operator.tensors() for operator in in_both(kind, structure, k))
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        close(got[name], t, 1e-12)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_eigenvalues_do_not_depend_on_where_the_examples_are(kind: str) -> None:
    expected, got = (operator.dense() for operator in in_both(kind, ng.EigenKronecker(), 2))
    close(got, expected, 1e-12)


def in_both(kind: str, structure: Structure, k: int) -> list[Operator]:
    """A structure with examples first, and elsewhere, from k columns of a root."""
    problems = [LAYOUTS[kind].problem(first, N) for first in (True, False)]
    return [structure.estimate(pull(of, random_roots(of, k))) for of in problems]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_are_left_out_wherever_the_examples_are(frozen: str) -> None:
    for kind in ("encoder layer", "second of three"):
        of = LAYOUTS[kind].problem(False, N)
        for name, p in of.module.named_parameters():
            p.requires_grad_(not name.endswith(frozen))
        metric = random_roots(of, 2)
        pb = pull(of, metric)
        close(rows(pb), oracle_rows(of, metric.s))
        assert covered(pb) == set(pb.model.params)


def test_a_coupling_of_examples_finds_them_wherever_they_are() -> None:
    found = []
    for first in (True, False):
        of = LAYOUTS["encoder layer"].problem(first, N)
        found.append(ng.Kronecker().estimate(pull(of, ng.Sobolev(lengthscale=1.0))).tensors())
    for name, t in found[0].items():
        close(found[1][name], t, 1e-9)


@pytest.mark.parametrize("kind", ["encoder layer", "lstm"])
def test_training_does_not_depend_on_where_the_examples_are(kind: str) -> None:
    ends = []
    for first in (True, False):
        of = LAYOUTS[kind].problem(first, N)
        opt = ng.KFAC(
            of.module, ng.Fisher(ng.Categorical(axis=-1)), strict=True, metric_every=1, inverse_every=1, lr=0.1
        )
        for _ in range(3):
            opt.zero_grad()
            y = of.module(of.x)
            nn.functional.cross_entropy(y.flatten(0, 1), _tokens(N).flatten()).backward()
            opt.step()
        assert all(row.rule for row in opt.plan().rows)
        ends.append(torch.cat([p.detach().flatten() for p in of.module.parameters()]))
    close(ends[1], ends[0], 1e-9)


def test_a_table_of_positions_is_an_embedding_with_positions_first_too() -> None:
    for n in (3, T, N):
        of = LAYOUTS["positions and a tied head"].problem(False, n)
        pb = pull(of, random_roots(of))
        assert {layer.names[0]: type(layer.rule) for layer in pb.layers}["positions.weight"] is EmbeddingRule


def test_a_layer_that_is_turned_is_a_view() -> None:
    of = LAYOUTS["lstm"].problem(False, N)
    model = Model.of(of.module)
    tape = record(model, layers_of(model), of.x)
    at = next(at for at, use in enumerate(tape.uses) if use.module is of.module.head)
    use, turned = tape.uses[at], tape.with_batch_first({at: BatchAxis(1)}).uses[at]
    assert turned.call.x.shape[0] == turned.shape[0] == N
    assert turned.call.x.data_ptr() == use.call.x.data_ptr() == leading_rows(turned.call.x).data_ptr()
    g = normal(2, *use.shape)
    assert turned.batch_first(g).shape == (2, *turned.shape)
    assert turned.batch_first(g).data_ptr() == g.data_ptr()


def test_sums_over_rows_do_not_depend_on_the_order_of_the_axes() -> None:
    x = normal(3, 4, 2, 5)
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)):
        found = leading_rows(x.permute(*order, 3))
        assert found.data_ptr() == x.data_ptr()
        assert torch.equal(found, x.reshape(-1, 5))
    spread = x[:1].expand(6, -1, -1, -1).transpose(0, 1)
    close(leading_rows(spread).sum(0), spread.sum((0, 1, 2)))


def test_a_pass_without_cotangents_teaches_nothing_about_the_next() -> None:
    """A head that starts at zero: as many positions as examples could be either, and the pass does not show which."""
    of = LAYOUTS["last state"].problem(False, T)
    head = of.module.head
    assert isinstance(head, nn.Linear)
    start, metric, model = head.weight.detach().clone(), random_roots(of), Model.of(of.module)
    view = Observer(model, metric, layers_of(model), None)
    for scale in (0.0, 1.0):
        with torch.no_grad():
            head.weight.copy_(scale * start)
        pb = view.of(Batch(model, of.x))
        assert covered(pb) == set(model.params)
        close(rows(pb), oracle_rows(of, metric.s))


class OneByOne(nn.Module):
    """Calls a layer with one example at a time, without a batch axis."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(each).sin().flatten() for each in x])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv1d(2, 2, 2), (2, 4)),
        (lambda: nn.Conv1d(1, 1, 2), (1, 4)),
        (lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2), (2, 3, 3)),
        (lambda: nn.ConvTranspose1d(2, 2, 2), (2, 3)),
        (lambda: nn.ConvTranspose1d(1, 1, 2), (1, 3)),
        (lambda: nn.LayerNorm((2, 3)), (2, 3)),
        (lambda: nn.RMSNorm((1, 3)), (1, 3)),
        (lambda: nn.InstanceNorm1d(2, affine=True), (2, 3)),
    ],
)
def test_the_channels_of_a_single_example_are_not_taken_for_examples(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], n: int
) -> None:
    torch.manual_seed(0)
    model, x = OneByOne(layer().double()), normal(n, *shape)
    J = oracle.module_jacobian(model, x)
    G = oracle.dense(J, oracle.euclidean(model(x)))
    for structure in (ng.Dense(), ng.Kernel()):
        close(structure.estimate(ng.pullback(model, x, ng.Euclidean())).dense(), G)
    trace = ng.EigenKronecker().estimate(ng.pullback(model, x, ng.Euclidean())).dense().trace()
    close(trace, G.trace())
