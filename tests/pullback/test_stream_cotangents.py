"""Cotangents consumed during the backward pass, one by one or together, are those of a whole pass."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NatgradError
from natgrad.model import Model
from natgrad.pullbacks.layer import Sharing
from natgrad.pullbacks.layer_factors import FactorList, LayerFactors, factors_of
from natgrad.pullbacks.pullback import layers_of
from natgrad.pullbacks.tape import Cotangents, record, stream_cotangents
from tests import kronecker_oracle, zoo
from tests.pulled import close, normal, oracle_rows, pull, random_roots


@pytest.mark.parametrize("room", [0, 200, 1000, 10**9])
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "called_twice", "tied_embedding"])
def test_the_factors_do_not_depend_on_how_many_cotangents_wait(name: str, room: int) -> None:
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem, k=1))
    blocks = [block for block in pb.layers if block.rule is not None]
    expected, _ = factors_of(pb, blocks, Sharing())
    layers = LayerFactors(tuple(blocks), Sharing(), pb.y.dtype, pb.n, frozenset())
    sink, tape = FactorList(), pb.tape
    calls: list[list[int]] = []

    def serve(numbers: Sequence[int], g: Cotangents) -> None:
        calls.append(list(numbers))
        for b in numbers:
            layers.put_outputs(b, tape, g, sink)

    for b in range(len(blocks)):
        layers.put_inputs(b, tape, sink)
    stream_cotangents(tape, blocks, pb.root, serve, room)
    assert sorted(b for numbers in calls for b in numbers) == list(range(len(blocks)))
    for (s, a), (right_s, right_a) in zip(sink.pairs(), expected, strict=True):
        close(s, right_s)
        close(a, right_a)


class Half(torch.autograd.Function):
    """The sum of two, of which the second has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return g[0], None


class Idle(nn.Module):
    """The outputs of the second layer are used, and no cotangent comes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = self.layers
        x = one(x)
        found: Tensor = four(Half.apply(three(x), two(x)))  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("room", [0, 200, 10**9])
def test_a_layer_that_no_cotangent_comes_to_has_zeros(room: int) -> None:
    model = Model.of(Idle().double())
    blocks = layers_of(model)
    tape = record(model, blocks, normal(4, 4))
    found: dict[int, Tensor] = {}

    def serve(numbers: Sequence[int], g: Cotangents) -> None:
        found.update({b: g.outer[at][0] for b in numbers for at in tape.use_ids(blocks[b])})

    stream_cotangents(tape, blocks, torch.ones(1, 4, 4, dtype=torch.float64), serve, room)
    zero = [not bool(found[b].any()) for b in range(4)]
    assert zero == [False, True, False, False]


class Twice(nn.Module):
    """A hook on the outputs runs a pass of its own through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            seen.append(x)
        low, high = seen[0], seen[2]
        if x.requires_grad:
            x.register_hook(lambda g: g + 0 * torch.autograd.grad(high, low, g, retain_graph=True)[0])
        return x


def test_a_pass_inside_the_pass_is_refused_by_name() -> None:
    model = Twice().double()
    pb = ng.pullback(model, normal(4, 4), ng.Fisher(ng.Gaussian(), samples=1))
    with pytest.raises(NatgradError, match=r"came twice to the outputs of Linear\(in_features=4.*autograd\.Function"):
        ng.Kronecker().estimate(pb)


class Prompts(nn.Module):
    """Learned prompts, which pass through layers before they are compared with the data: [n 5] → [n 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.randn(3, 4))
        self.norm, self.key, self.query, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(5, 4), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(torch.tanh(self.norm(self.prompts.expand(len(x), 3, 4))))
        return self.head(torch.tanh(torch.einsum("nd,nkd->nk", self.query(x), keys)))


def test_a_parameter_that_is_pulled_through_layers_below_leaves_their_cotangents_alone() -> None:
    """S ⊗ A of every layer, and the diagonal of the prompts."""
    torch.manual_seed(0)
    problem = zoo.Problem(Prompts().double(), normal(6, 5))
    metric = random_roots(problem, k=1)
    R = oracle_rows(problem, metric.s).flatten(0, 1)
    layers = kronecker_oracle.layers(problem.module, problem.x, metric.s)
    close(ng.Kronecker().estimate(pull(problem, metric)).dense(), kronecker_oracle.kfac(layers, "expand", R.T @ R))


def test_what_has_been_used_is_forgotten_before_the_rest_is_made() -> None:
    problem = zoo.Problem(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).double(), normal(4, 8))
    pb = pull(problem, random_roots(problem, k=1))
    tape = pb.tape
    most = 0

    def serve(numbers: Sequence[int], g: Cotangents) -> None:
        nonlocal most
        most = max(most, len(g.outer))

    stream_cotangents(tape, pb.layers, pb.root, serve, 2 * 4 * 8 * 8 - 1)
    assert most == 2
