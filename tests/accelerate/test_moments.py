"""Products of a matrix with itself, against the product written out, at sizes on both sides of every block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from natgrad.accelerate.moments import (
    column_moments,
    column_sums,
    entry_moments,
    image_moment,
    panel_product,
    second_moment,
    symmetric_product,
)
from tests.pulled import normal


def close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    largest = float(b.abs().max()) if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=0.0, atol=tol * max(1.0, largest))


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 3), (0, 3), (4, 0), (700, 320), (512, 577), (300, 512), (2, 900, 300), (3, 1, 7, 2)]
)
def test_the_symmetric_product_is_the_product_and_symmetric_to_the_last_bit(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    A = symmetric_product(x)
    close(A, torch.einsum("...mi,...mj->...ij", x, x))
    assert torch.equal(A, A.mT)


@pytest.mark.parametrize(("m", "i"), [(1, 1), (5, 3), (0, 3), (4, 0), (700, 320), (512, 577)])
def test_the_affine_moment_is_the_product_with_ones_and_symmetric_to_the_last_bit(m: int, i: int) -> None:
    x = normal(m, i)
    A, ones = second_moment(x.unsqueeze(0), ones=True), torch.cat([x, x.new_ones(m, 1)], 1)
    close(A, ones.T @ ones)
    assert torch.equal(A, A.mT)


@pytest.mark.parametrize("shape", [(7, 3), (1, 1), (0, 3), (4, 0), (300, 65)])
def test_sums_over_columns_are_those_of_the_matrix(shape: tuple[int, int]) -> None:
    x = normal(*shape)
    close(column_sums(x), x.sum(0))
    squares, sums = column_moments(x)
    close(squares, (x * x).sum(0))
    close(entry_moments(x.unsqueeze(0))[0], (x * x).sum(0))
    close(sums, x.sum(0))


@pytest.mark.parametrize(("m", "d"), [(1, 1), (0, 3), (5, 0), (9, 1030), (8300, 1025)])
def test_the_product_of_panels_is_the_product(m: int, d: int) -> None:
    x = normal(m, d).float() if m > 1000 else normal(m, d)
    out = panel_product(x, x.new_full((d, d), float("nan")))
    close(out, x.T @ x, 1e-12 if m < 1000 else 1e-5)


@pytest.mark.parametrize("shape", [(9, 4), (700, 320)])
def test_the_symmetric_product_does_not_depend_on_how_the_matrix_lies_in_memory(shape: tuple[int, int]) -> None:
    x = normal(*shape)
    close(symmetric_product(x.T.contiguous().T), symmetric_product(x))
    close(symmetric_product(torch.stack([x, x], -1)[..., 0]), symmetric_product(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    x = torch.full((5000, 2), 8.0, dtype=dtype)  # the sum, 320000, is beyond float16
    assert torch.equal(symmetric_product(x), torch.full((2, 2), 320000.0))
    assert torch.equal(image_moment(x.T.reshape(1, 2, 5000)), torch.full((1, 2, 2), 320000.0))


@pytest.mark.parametrize("spatial", [(), (5,), (4, 3), (1, 1), (2, 3, 2)])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 3), (2, 3)])
def test_the_moment_of_images_sums_over_columns_examples_and_positions(
    spatial: tuple[int, ...], groups: int, k: int, n: int
) -> None:
    g = normal(k, n, 6, *spatial)
    split = g.reshape(k, n, groups, 6 // groups, -1)
    expected = torch.einsum("kncor,kncpr->cop", split, split)
    g = g.flatten(0, 1)
    close(image_moment(g, groups), expected)
    last = g.movedim(1, -1).contiguous().movedim(-1, 1)  # channels last
    close(image_moment(last, groups), expected)
    assert torch.equal(image_moment(g, groups), image_moment(g, groups).mT)
