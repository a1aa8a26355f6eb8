"""The kernels that a GPU uses for second moments, run on the CPU, against patches written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from natgrad.accelerate import moments as products
from natgrad.accelerate import patches as launches
from natgrad.accelerate.moments import affine_product, counted_product
from natgrad.accelerate.patches import (
    Axis,
    Span,
    patch_product,
    product_by_patches,
    product_by_strips,
    strip_product,
    strips,
)
from tests.accelerate.test_patches import explicit, fits, lines, near, normal, planes, volumes

Table = Callable[[], Iterator[tuple[tuple[int, ...], tuple[Axis, ...]]]]


def moment(x: Tensor, axes: tuple[Axis, ...], bias: bool) -> Tensor:
    """Σ_nr ā āᵀ of the patches written out."""
    a = explicit(x, axes, 1).flatten(0, 2)
    a = torch.cat([a, a.new_ones(a.shape[0], 1)], 1) if bias else a
    return a.T @ a


@pytest.mark.parametrize("table", [lines, planes, volumes], ids=["1-d", "2-d", "3-d"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_patches_and_of_strips_are_those_of_the_patches_written_out(table: Table, bias: bool) -> None:
    seen = striped = 0
    for sizes, axes in table():
        if not fits(sizes, axes):
            continue
        seen += 1
        x = normal(3, 2, *sizes, seed=seen)
        expected = moment(x, axes, bias)
        near(product_by_patches(x, axes, bias), expected, x)
        near(product_by_patches(x, axes, bias, work=0), expected, x)
        near(patch_product(x, axes, bias), expected, x)
        if axes[0].stride == 1:
            striped += 1
            near(product_by_strips(x, axes, bias), expected, x)
    assert seen > 40
    assert striped > 20


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("limit", [1, 400, 2000])
def test_patches_and_strips_may_be_made_a_few_examples_at_a_time(limit: int, form: torch.memory_format) -> None:
    axes = (Axis(3, 1, 1, 1, 1), Axis(5, 2, 1, 2, 0))
    x = normal(5, 2, 7, 6).contiguous(memory_format=form)
    expected = moment(x, axes, True)
    near(product_by_patches(x, axes, True, limit), expected, x)
    near(strip_product(x, axes, limit).reshape(30, 30), expected[:30, :30], x)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("axis", [Axis(3), Axis(3, 1, 1, 1, 1), Axis(5, 1, 1, 2, 1), Axis(2, 1, 3, 3, 0)])
def test_a_span_is_where_two_places_both_see_input(axis: Axis, size: int) -> None:
    if not fits((size,), (axis,)):
        return
    for u in range(axis.kernel):
        for v in range(u, axis.kernel):
            read = [
                (r + u * axis.dilation - axis.before, r + v * axis.dilation - axis.before)
                for r in range(axis.outputs(size))
            ]
            both = [p for p, q in read if p >= 0 and q < size]
            span = Span.of(axis, size, u, v)
            assert list(range(span.start, span.stop)) == both
            assert span.shift == (v - u) * axis.dilation


def test_a_span_is_another_with_what_is_beyond_it() -> None:
    for mine in (Span(0, 9, 1), Span(2, 9, 1), Span(2, 5, 1), Span(0, 7, 1)):
        for other in (Span(0, 9, 1), Span(1, 8, 1), Span(3, 6, 1)):
            weights = torch.zeros(10)
            weights[other.start : other.stop] += 1
            for part, sign in mine.beyond(other):
                weights[part.start : part.stop] += sign
            expected = torch.zeros(10)
            expected[mine.start : mine.stop] = 1
            assert torch.equal(weights, expected)


def test_strips_are_the_patches_along_the_other_axes() -> None:
    x, axis = normal(2, 3, 4, 6), Axis(3, 2, 1, 1, 1)
    f = strips(x, (axis,)).reshape(3, 3, 4, 2, 3)  # [ch w p n r]
    a = explicit(x, (Axis(1), axis), 1).reshape(2, 4, 3, 3, 3)  # [n p r ch w]
    assert torch.equal(f.permute(3, 2, 4, 0, 1), a)


def test_no_examples_have_the_moment_zero() -> None:
    x, axes = normal(0, 2, 5, 5), (Axis(3, 1, 1, 1, 1),) * 2
    for way in (product_by_patches, product_by_strips, patch_product):
        assert torch.equal(way(x, axes, True), torch.zeros(19, 19, dtype=torch.float64))


@pytest.mark.parametrize(("m", "i"), [(1, 1), (5, 3), (0, 4), (8, 7), (17, 30), (4200, 511)])
def test_the_affine_product_is_that_with_a_column_of_ones(m: int, i: int) -> None:
    x = normal(m, i)
    ones = torch.cat([x, x.new_ones(m, 1)], 1)
    near(affine_product(x), ones.T @ ones, x)
    assert affine_product(x).stride(0) % 8 == 0


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("ones", [False, True])
def test_the_product_of_the_rows_that_count_is_that_of_them_alone(
    ones: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the others hold."""
    if large:
        monkeypatch.setattr(products, "_COPIED", 0)
    x, counted = normal(6, 4, 3).transpose(0, 1), normal(4, 6) > 0
    alone = x[counted]
    alone = torch.cat([alone, alone.new_ones(len(alone), 1)], 1) if ones else alone
    x = x.masked_fill(~counted.unsqueeze(-1), torch.nan)
    near(counted_product(x, ones, counted)[0], alone.T @ alone, alone)


def test_rows_of_a_product_start_at_multiples_of_a_vector() -> None:
    x, axes = normal(2, 3, 6, 6), (Axis(3, 1, 1, 1, 1),) * 2
    assert product_by_patches(x, axes, True).stride(0) == 32


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where single precision may be multiplied in bfloat16, and is summed in single."""

    def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
        assert a.dtype == b.dtype == torch.bfloat16
        out.copy_(a.float() @ b.float())

    def multiply_add(base: Tensor, a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        out.copy_(base + alpha * (a.float() @ b.float()))

    for module in (launches, products):
        for name, pretended in (("multiply", multiply), ("multiply_add", multiply_add)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, pretended)
    for module in (launches, products):
        monkeypatch.setattr(module, "rounded", lambda x, work: x.bfloat16())


@pytest.mark.usefixtures("tensor_cores")
def test_a_moment_of_rounded_inputs_has_no_negative_eigenvalue() -> None:
    """Where inputs are constant, as at the borders of pictures, sums that were not rounded would make one."""
    axes, x = (Axis(3),) * 2, torch.full((6, 2, 30, 9), -0.4242)
    found = [patch_product(x, axes, True), product_by_strips(x.bfloat16(), axes, True)]
    found += [product_by_patches(x.bfloat16(), axes, True, work=0), affine_product(torch.full((2**19, 5), -0.4242))]
    for A in found:
        assert A.dtype == torch.float32
        assert float(A[0, 0] / A[-1, -1]) == pytest.approx(0.4242**2, rel=2**-8)
        λ = torch.linalg.eigvalsh(A.double())
        assert λ[0] > -1e-5 * λ[-1]
