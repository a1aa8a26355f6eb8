"""Patches and their moments, against ``unfold`` in two dimensions and a loop over places of the kernel in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.accelerate.patches import (
    Axis,
    autocorrelation_by_convolution,
    autocorrelation_by_shifts,
    moment_by_correlation,
    moment_by_patches,
    moment_by_rows,
    patch_mean,
    patch_moment,
    patch_sum,
    patches,
    positions,
)

PADDINGS = ((0, 0), (1, 1), (2, 2), (0, 2), (3, 1))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(a: Tensor, b: Tensor, x: Tensor, tol: float = 1e-12) -> None:
    """Equal relative to the largest sum of squares of x: differences of moments may vanish."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert float((a - b).abs().max()) <= tol * max(1.0, float(x.square().sum()))


def explicit(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """a [n r c i], one place of the kernel after the other."""
    x = functional.pad(x, [side for axis in reversed(axes) for side in (axis.before, axis.after)])
    columns = []
    for u in product(*(range(axis.kernel) for axis in axes)):
        at = [slice(None), slice(None)]
        for place, axis, size in zip(u, axes, x.shape[2:], strict=True):
            first, last = place * axis.dilation, (axis.kernel - 1 - place) * axis.dilation
            at.append(slice(first, size - last, axis.stride))
        columns.append(x[tuple(at)].flatten(2))
    a = torch.stack(columns, 2)  # [n (c ch) u r]
    return a.unflatten(1, (groups, -1)).flatten(2, 3).permute(0, 3, 1, 2)


def unfolded(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """a [n r c i] by torch's own unfold."""
    x = functional.pad(x, [side for axis in reversed(axes) for side in (axis.before, axis.after)])
    y, z = axes
    a = functional.unfold(x, (y.kernel, z.kernel), (y.dilation, z.dilation), 0, (y.stride, z.stride))
    return a.unflatten(1, (groups, -1)).permute(0, 3, 1, 2)


def fits(sizes: tuple[int, ...], axes: tuple[Axis, ...]) -> bool:
    return all(axis.before + axis.after + size > axis.span for axis, size in zip(axes, sizes, strict=True))


def lines() -> Iterator[tuple[tuple[int, ...], tuple[Axis, ...]]]:
    """One dimension, down to inputs that leave a single output."""
    for kernel, stride, dilation, padding, size in product((1, 2, 3, 5), (1, 2, 3), (1, 2), PADDINGS, (1, 2, 5, 9)):
        yield (size,), (Axis(kernel, stride, dilation, *padding),)


def planes() -> Iterator[tuple[tuple[int, ...], tuple[Axis, ...]]]:
    for k, stride, dilation, padding in product(((1, 1), (3, 3), (5, 5), (2, 3), (1, 3)), (1, 2, 3), (1, 2), PADDINGS):
        second = Axis(k[1], stride, dilation, *padding[::-1])
        yield (6, 9), (Axis(k[0], stride, dilation, *padding), second)
        yield (5, 4), (Axis(k[0], 1, dilation, *padding), second)
    yield (3, 3), (Axis(3), Axis(3))
    yield (1, 1), (Axis(5, 1, 1, 2, 2), Axis(3, 1, 1, 1, 1))


def volumes() -> Iterator[tuple[tuple[int, ...], tuple[Axis, ...]]]:
    for kernel, stride, dilation, padding in product((1, 2, 3), (1, 2), (1, 2), PADDINGS[:4]):
        yield (5, 4, 6), (Axis(kernel, stride, dilation, *padding), Axis(2, 1, dilation), Axis(3, stride, 1, 1, 1))


@pytest.mark.parametrize(
    ("table", "oracle", "ways"),
    [(lines, explicit, 1), (planes, unfolded, 2), (volumes, explicit, 1)],
    ids=["1-d", "2-d", "3-d"],
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_moments_of_patches_are_those_of_the_patches_written_out(
    table: Callable[[], Iterator[tuple[tuple[int, ...], tuple[Axis, ...]]]],
    oracle: Callable[[Tensor, tuple[Axis, ...], int], Tensor],
    ways: int,
    groups: int,
) -> None:
    seen = 0
    for sizes, axes in table():
        if not fits(sizes, axes):
            continue
        seen += 1
        x = normal(2, 4, *sizes, seed=seen)
        a = oracle(x, axes, groups)
        products = torch.einsum("nrci,nrcj->cij", a, a)
        near(patches(x, axes, groups), a, x)
        near(patch_mean(x, axes, groups), a.mean(1), x)
        moment = patch_moment(x, axes, groups)
        near(moment, products, x)
        near(patch_sum(x, axes, groups), a.sum((0, 1)), x)
        assert positions(x, axes) == a.shape[1]
        assert torch.equal(moment, moment.mT)
        near(moment_by_patches(x, axes, groups), products, x)
        if groups == 1 and len(axes) > 1 and all(axis.stride == 1 for axis in axes[1:]):
            near(moment_by_rows(x, axes), products, x)
        if all(axis.stride == 1 for axis in axes):
            A = moment_by_correlation(x, axes, groups)
            near(A, products, x)
            assert torch.equal(A, A.mT)
    assert seen > 40 * ways


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("way", [autocorrelation_by_convolution, autocorrelation_by_shifts])
def test_autocorrelations_are_sums_over_all_positions(
    way: Callable[[Tensor, tuple[Axis, ...], int], Tensor], groups: int, d: int
) -> None:
    x = normal(2, 4, *(5, 3, 4)[:d])
    for kernel, dilation in product((1, 2, 3), (1, 2)):
        axes = (Axis(kernel, 1, dilation), Axis(2), Axis(3, 1, dilation))[:d]
        wide = functional.pad(x, [side for axis in reversed(axes) for side in (axis.span, axis.span)])
        grid = list(product(*(range(-axis.span, axis.span + 1, axis.dilation) for axis in axes)))
        expected = []
        for delta in grid[len(grid) // 2 :]:  # rolling moves zeros alone over the edge
            moved = wide.roll([-step for step in delta], list(range(2, 2 + d)))
            split = [y.reshape(2, groups, 4 // groups, -1) for y in (wide, moved)]
            expected.append(torch.einsum("ncop,ncip->coi", *split))
        near(way(x, axes, groups), torch.stack(expected, -1), x)


def _by_rows(x: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """Every group by itself."""
    return torch.cat([moment_by_rows(part, axes) for part in x.chunk(groups, 1)])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("way", [moment_by_patches, _by_rows, moment_by_correlation, patch_moment])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_moments_do_not_depend_on_how_the_input_lies_in_memory(
    way: Callable[[Tensor, tuple[Axis, ...], int], Tensor], groups: int, n: int, dtype: torch.dtype
) -> None:
    x, axes = normal(n, 12, 7, 6, dtype=dtype), (Axis(3, 1, 1, 1, 1), Axis(5, 1, 1, 2, 1))
    a = unfolded(x, axes, groups)
    expected = torch.einsum("nrci,nrcj->cij", a, a)
    tol = 1e-12 if dtype == torch.float64 else 1e-6
    strided = torch.stack([x, x], -1)[..., 0]
    for form in (
        x,
        x.contiguous(memory_format=torch.channels_last),
        strided,
        x.transpose(2, 3).clone().transpose(2, 3),
    ):
        near(way(form, axes, groups), expected, x, tol)


@pytest.mark.parametrize(
    ("channels", "size", "n"), [(1, 28, 8), (3, 32, 16), (8, 16, 64), (16, 16, 8), (400, 4, 2)], ids=str
)
@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (3, 0), (5, 2)])
def test_single_precision_agrees_at_the_sizes_of_networks(
    channels: int, size: int, n: int, kernel: int, padding: int
) -> None:
    x = normal(n, channels, size, size, dtype=torch.float32).relu()
    axes = (Axis(kernel, 1, 1, padding, padding),) * 2
    if channels == 400 and kernel == 5:
        axes = (Axis(1), Axis(3, 1, 1, 1, 1))
    a = unfolded(x.double(), axes, 1).flatten(0, 2)
    near(patch_moment(x, axes).double(), (a.T @ a).unsqueeze(0), x, 1e-6)
    near(moment_by_correlation(x, axes, 1).double(), (a.T @ a).unsqueeze(0), x, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    x = torch.full((16, 2, 40, 40), 8.0, dtype=dtype)  # Σ x² is beyond float16
    axes = (Axis(3),) * 2
    moment = patch_moment(x, axes)
    assert torch.equal(moment, torch.full((1, 18, 18), 64.0 * 16 * 38**2))
    assert torch.equal(patch_sum(x, axes), torch.full((1, 18), 8.0 * 16 * 38**2))
    assert torch.equal(patch_mean(x, axes), torch.full((16, 1, 18), 8.0))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("limit", [1, 300, 900])
def test_patches_may_be_made_a_few_examples_at_a_time(limit: int, form: torch.memory_format) -> None:
    x, axes = normal(5, 2, 6, 7).contiguous(memory_format=form), (Axis(3, 2), Axis(2, 1, 2))
    near(moment_by_patches(x, axes, 1, limit), moment_by_patches(x, axes, 1), x)


def test_no_examples_have_the_moment_zero() -> None:
    axes = (Axis(3, 1, 1, 1, 1),) * 2
    moment = patch_moment(normal(0, 4, 5, 5), axes, 2)
    assert torch.equal(moment, torch.zeros(2, 18, 18, dtype=torch.float64))
    assert patches(normal(0, 4, 5, 5), axes, 2).shape == (0, 25, 2, 18)
    assert patch_mean(normal(0, 4, 5, 5), axes, 2).shape == (0, 2, 18)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("d", "layer"), [(1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)])
def test_a_convolution_is_its_weight_times_its_patches(d: int, layer: Callable[..., nn.Module], groups: int) -> None:
    module = layer(6, 9, 3, stride=2, padding=1, dilation=2, groups=groups, bias=False, dtype=torch.float64)
    x, axes = normal(2, 6, *range(6, 6 + d)), (Axis(3, 2, 2, 1, 1),) * d
    weight = next(module.parameters()).unflatten(0, (groups, -1)).flatten(2)  # [c o i]
    y = torch.einsum("coi,nrci->ncor", weight, patches(x, axes, groups))
    near(y.flatten(1, 2).detach(), module(x).flatten(2).detach(), x)


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dilation 2 spans 5 inputs, but there are 3 and 1 \+ 0 of padding: use a sm"):
        patch_moment(normal(1, 1, 3), (Axis(3, 1, 2, 1, 0),))


def test_the_number_of_positions_is_that_of_the_convolution() -> None:
    axes = (Axis(3, 2, 1, 1, 1), Axis(5, 3, 2, 4, 4))
    y = functional.conv2d(normal(1, 1, 11, 13), normal(1, 1, 3, 5), None, (2, 3), (1, 4), (1, 2))
    assert positions(normal(1, 1, 11, 13), axes) == prod(y.shape[2:])
