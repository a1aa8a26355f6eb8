"""Rows are averaged without forming their product, and as if it had been formed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate.moments import spaced
from natgrad.operators import KroneckerOperator
from natgrad.rules import LinearRule
from natgrad.rules.base import Call, Keys, Rows, RowsRule
from tests.pulled import close, normal

SIZES = [(5, 3), (0, 3), (4, 0), (4, 1), (9, 129), (1100, 130), (300, 257), (40, 1024)]


@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize(("m", "i"), SIZES)
def test_rows_are_absorbed_as_their_product_is(m: int, i: int, homogeneous: bool) -> None:
    x = normal(m, i)
    ones = torch.cat([x, x.new_ones(m, 1)], 1) if homogeneous else x
    rows, d = Rows(x, homogeneous), ones.shape[1]
    assert rows.size == d
    close(rows.product(), ones.T @ ones)
    before = normal(d + 2, d, seed=1)
    average = spaced(before.T @ before)
    rows.absorb(average, 0.7, 0.2)
    close(average, 0.7 * (before.T @ before) + 0.2 * (ones.T @ ones))
    close(average, average.mT)


def test_what_a_product_could_not_hold_is_not_bounded() -> None:
    """‖x‖² bounds every number of the product: where it is too large the product itself has to tell."""
    assert Rows(torch.full((2, 2), 1e18)).bounded
    for wrong in (1e20, float("inf"), float("nan")):
        assert not Rows(torch.tensor([[1.0, wrong]])).bounded
    assert Rows(torch.tensor([[1.0, 1e20]]).double()).bounded


@pytest.mark.parametrize("size", [3, 128, 129, 512, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_an_average_are_no_whole_pages_apart_and_its_numbers_stay(size: int, dtype: torch.dtype) -> None:
    factor = normal(1, size, size).to(dtype)
    found = spaced(factor)
    assert torch.equal(found, factor)
    assert found.stride(1) * found.element_size() % 4096 != 0
    assert size <= 128 or found.stride(1) % 16 == 0
    assert spaced(found) is found


def test_an_average_that_was_restored_has_the_rows_of_one_that_was_not() -> None:
    """So that a run that goes on rounds as one that was never stopped."""
    pb = ng.pullback(nn.Linear(255, 130), torch.randn(4, 255), ng.Euclidean())
    average = ng.Kronecker().estimate(pb)
    tensors = {key: t.clone(memory_format=torch.contiguous_format) for key, t in average.tensors().items()}
    restored = ng.Kronecker().restore(pb.model, average.blocks, tensors)
    assert isinstance(restored, KroneckerOperator)
    for one, other in zip((*average.left, *average.right), (*restored.left, *restored.right), strict=True):
        assert one.stride() == other.stride()
        assert one.stride(1) % 16 == 0


class Short(RowsRule):
    """A rule of the user's that loses a number of every row, or a group."""

    def __init__(self, side: str) -> None:
        self.side, self.rule = side, LinearRule()

    def covers(self, module: nn.Module) -> bool:
        return self.rule.covers(module)

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        return self.rule.inputs(module, keys, call)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return self.rule.cotangents(module, keys, g)

    def input_rows(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        rows = self.rule.input_rows(module, keys, call)
        return Rows(rows.x[:, :-1], rows.homogeneous) if self.side == "input_rows" else rows

    def output_rows(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        rows = self.rule.output_rows(module, keys, g)
        return Rows(rows.x[:, :-1]) if self.side == "output_rows" else rows


@pytest.mark.parametrize(("side", "got", "asked"), [("input_rows", 3, 4), ("output_rows", 1, 2)])
def test_rows_of_another_length_than_was_promised_are_refused(side: str, got: int, asked: int) -> None:
    pb = ng.pullback(nn.Linear(3, 2), torch.randn(5, 3), ng.Euclidean(), rules=[Short(side)])
    with pytest.raises(
        ValueError,
        match=rf"Short.{side} returns rows of {got} numbers for weight \+ bias: there must be {asked} in each",
    ):
        ng.Kronecker().estimate(pb)
