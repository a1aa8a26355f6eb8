"""Second moments in few launches, for a GPU, where small kernels wait for the processor that starts them.

Tensor cores read single precision fastest where both factors are contiguous along the index that is summed, and where
rows start at multiples of a vector: factors are copied so where that pays, and products have rows of such a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from natgrad.rules.packing import put_border
from natgrad.rules.patches import Axis, padded, patch_sum, positions, windows
from natgrad.rules.precision import in_half, multiply, multiply_add, rounded, summed
from natgrad.rules.products import column_sums, panel_product
from natgrad.rules.strips import strip_product

_SMALL = 2**21  # numbers
_COPY = 2**24  # numbers; of patches at a time
_WORK = 2**34  # products of numbers, from which a row of tiles more, for one of ones, costs more than sums do
_ALIGNED = 8  # numbers; rows of a product that start off a vector are read one number at a time


def affine_product(x: Tensor) -> Tensor:
    """Σ x̄ x̄ᵀ [i+1 i+1] of x [m i] with x̄ = (x, 1), written where it belongs: one product, one sum.

    >>> affine_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.,  4.],
            [14., 20.,  6.],
            [ 4.,  6.,  2.]])
    """
    m, i = x.shape
    x = rounded(x, m * i**2)
    if x.numel() <= _SMALL:  # a copy with ones takes less than three launches
        rows = _rows(x, i, _fitting(i + 1) - i, m)
        rows[:i, :m].copy_(x.T)
        return _product(rows)[: i + 1, : i + 1]
    out = _square(x, i + 1)
    panel_product(x, out[:i, :i])
    return put_border(out, column_sums(x), m)


def _product(rows: Tensor) -> Tensor:
    """rows rowsᵀ."""
    out = _square(rows, rows.shape[0])
    multiply(rows, rows.T, out)
    return out


def patch_product(x: Tensor, axes: Sequence[Axis], bias: bool) -> Tensor:
    """Σ_nr ā āᵀ [i i] of the patches of x [n ch *spatial], with the homogeneous 1 where there is a ``bias``.

    Symmetric up to rounding: launches to symmetrise would show, and what inverts it reads one triangle.

    >>> x = torch.arange(4.0).reshape(1, 1, 4)
    >>> patch_product(x, (Axis(kernel=2),), bias=True)
    tensor([[ 5.,  8.,  3.],
            [ 8., 14.,  6.],
            [ 3.,  6.,  3.]])
    """
    count, width = _size(x, axes)
    x = rounded(x, count * width**2)
    return product_by_strips(x, axes, bias) if _strips_pay(x, axes) else product_by_patches(x, axes, bias)


def _size(x: Tensor, axes: Sequence[Axis]) -> tuple[int, int]:
    """How many patches there are, and how many numbers in one."""
    return x.shape[0] * positions(x, axes), x.shape[1] * prod(axis.kernel for axis in axes)


def _strips_pay(x: Tensor, axes: Sequence[Axis]) -> bool:
    """Whether fewer products are worth passes over the moment, which few positions are not, and launches.

    The bounds were found on an H200; without tf32 products cost more, and the passes pay for less work.
    """
    if axes[0].stride > 1 or axes[0].kernel == 1:
        return False
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    tensor_cores = tf32 or in_half(x)
    few, work = (3 * 2**10, 2**33) if tensor_cores else (3 * 2**7, 2**30)
    count, width = _size(x, axes)
    return width**2 * (count - few) > work


def product_by_strips(x: Tensor, axes: Sequence[Axis], bias: bool) -> Tensor:
    """The same where the first stride is 1: a third of the patches and of the products, but more passes over them."""
    A, (count, width) = strip_product(x, axes), _size(x, axes)
    side = A.shape[: A.ndim // 2]
    out = A.new_empty(width + bias, width + bias)
    out[:width, :width].unflatten(1, side).unflatten(0, side).copy_(A)
    return put_border(out, patch_sum(x, axes).squeeze(0), count) if bias else out


def product_by_patches(x: Tensor, axes: Sequence[Axis], bias: bool, limit: int = _COPY, work: int = _WORK) -> Tensor:
    """The same from all patches, copied as rows, no more than ``limit`` numbers at a time if it can be.

    Up to so much ``work`` there are rows of ones among them, and nothing is left to do after the product.
    """
    d, w = len(axes), windows(padded(x, axes), axes)  # [n ch *out *kernel], a view
    w = w.permute(1, *range(2 + d, 2 + 2 * d), 0, *range(2, 2 + d))  # [ch *kernel n *out]
    width, count = prod(w.shape[: 1 + d]), prod(w.shape[2 + d :])
    alone = width**2 * x.shape[0] * count > (4 * work if in_half(x) else work)
    out = _square(x, width + bias if alone else _fitting(width + bias))
    inner = out[:width, :width] if alone else out
    for place, part in enumerate(w.split(max(1, limit // (width * max(1, count))), 1 + d)):
        examples = part.shape[1 + d]
        rows = _rows(x, width, inner.shape[0] - width, examples * count)
        places = rows[:width, : examples * count].unflatten(1, part.shape[1 + d :]).unflatten(0, part.shape[: 1 + d])
        places.copy_(part)
        if place:
            multiply_add(inner, rows, rows.T, inner)
        else:
            multiply(rows, rows.T, inner)
    if bias and alone:
        put_border(out, patch_sum(x, axes).squeeze(0), x.shape[0] * count)
    return out[: width + bias, : width + bias]


def _rows(x: Tensor, width: int, ones: int, count: int) -> Tensor:
    """Room for ``width`` rows of ``count`` numbers, with ``ones`` rows of ones, and zeros."""
    out = x.new_empty(width + ones, _fitting(count))
    if ones:
        out[width:].fill_(1.0)
    if out.shape[1] > count:
        out[:, count:].zero_()
    return out


def _square(x: Tensor, size: int) -> Tensor:
    """Room for a matrix of this size, sums of products of x, whose rows start at multiples of a vector."""
    return x.new_empty(size, _fitting(size), dtype=summed(x.dtype))[:, :size]


def _fitting(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
