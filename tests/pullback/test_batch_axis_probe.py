"""The batch axis found by probing cotangents: all examples are told apart; an ambiguous pass is not cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.model import Model
from natgrad.pullbacks.pullback import Batch, Observer, layers_of
from tests.oracle import flatten
from tests.pulled import close, normal


def metric(model: nn.Module, x: Tensor) -> Tensor:
    """JᵀJ/n of the batch as a whole, in which the outputs of one example may depend on the others."""
    params = list(model.parameters())
    rows = [flatten(torch.autograd.grad(y, params, retain_graph=True)) for y in model(x).flatten()]
    J = torch.stack(rows)
    return J.T @ J / len(x)


@final
class Between(nn.Module):
    """Two layers and what is done between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(3, 3), nn.Linear(3, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a, x))


MIXED = {
    "swapped halves": lambda a, x: a(x).tanh().roll(len(x) // 2, 0),
    "the next but seven": lambda a, x: a(x).tanh().roll(8, 0),
    "the next but sixty-three": lambda a, x: a(x).tanh().roll(64, 0),
    "a mixture": lambda a, x: 0.7 * a(x).atan() + 0.3 * a(x).atan().roll(len(x) // 2, 0),
    "positions like examples": lambda a, x: a(x.expand(len(x), *x.shape)).atan()[
        (torch.arange(len(x)) + 8) % len(x), torch.arange(len(x))
    ],
}


@pytest.mark.parametrize("n", [2, 8, 9, 16, 72, 128])
@pytest.mark.parametrize("kind", MIXED)
def test_examples_that_change_places_are_seen_however_many_there_are(kind: str, n: int) -> None:
    torch.manual_seed(0)
    model, x = Between(MIXED[kind]).double(), normal(n, 3)
    pb = ng.pullback(model, x, ng.Euclidean())
    close(ng.Dense().estimate(pb).dense(), metric(model, x), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MIXED)
def test_examples_that_change_places_are_seen_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """With the wrong examples G would be another."""
    torch.manual_seed(0)
    model, x = Between(MIXED[kind]).to(dtype), normal(128, 3).to(dtype)
    G = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense().double()
    exact = metric(model.double(), x.double())
    assert (G - exact).norm() < 0.02 * exact.norm()


def test_a_pass_that_shows_the_examples_on_two_axes_teaches_nothing_about_the_next() -> None:
    """As many positions as examples, and only the first of both alive: row 0 is row 0 on either axis."""
    torch.manual_seed(0)
    model = Between(lambda a, x: a(x.transpose(0, 1)).relu().atan().sum(0)).double()
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(3))
        model.a.bias.zero_()
    wrapped = Model.of(model)
    view = Observer(wrapped, ng.Euclidean(), layers_of(wrapped), None)
    first, second = -torch.ones(3, 3, 3, dtype=torch.float64), normal(3, 3, 3).abs()
    first[0, 0] = 1.0
    view.of(Batch(wrapped, first))
    close(ng.Dense().estimate(view.of(Batch(wrapped, second))).dense(), metric(model, second), 1e-10)
