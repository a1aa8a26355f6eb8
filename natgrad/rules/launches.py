"""Second moments in few launches, for a GPU, where small kernels wait for the processor that starts them.

Tensor cores read single precision fastest where both factors are contiguous along the index that is summed, and where
rows start at multiples of a vector: factors are copied so where that pays, and products have rows of such a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from natgrad.rules.patches import Axis, padded, patch_sum, positions, windows
from natgrad.rules.strips import strip_product

_SMALL = 2**21  # numbers
_COPY = 2**24  # numbers; of patches at a time
_ALIGNED = 8  # numbers; rows of a product that start off a vector are read one number at a time
_FEW = 2**10  # positions, up to which passes over the moment cost more than they save
_WORK = 2**33  # products of numbers, up to which launches cost more than they save


def affine_product(x: Tensor) -> Tensor:
    """Σ x̄ x̄ᵀ [i+1 i+1] of x [m i] with x̄ = (x, 1), written where it belongs: one product, one sum.

    >>> affine_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.,  4.],
            [14., 20.,  6.],
            [ 4.,  6.,  2.]])
    """
    m, i = x.shape
    if x.numel() <= _SMALL:  # a copy with ones takes less than three launches
        rows = _rows(x, i, m, True)
        rows[:i, :m].copy_(x.T)
        return (rows @ rows.T)[: i + 1, : i + 1]
    out = _square(x, i + 1)
    torch.mm(x.T, x, out=out[:i, :i])
    return _bordered(out, x.new_ones(1, m) @ x, m)


def patch_product(x: Tensor, axes: Sequence[Axis], bias: bool) -> Tensor:
    """Σ_nr ā āᵀ [i i] of the patches of x [n ch *spatial], with the homogeneous 1 where there is a ``bias``.

    >>> x = torch.arange(4.0).reshape(1, 1, 4)
    >>> patch_product(x, (Axis(kernel=2),), bias=True)
    tensor([[ 5.,  8.,  3.],
            [ 8., 14.,  6.],
            [ 3.,  6.,  3.]])
    """
    width = x.shape[1] * prod(axis.kernel for axis in axes)
    count = x.shape[0] * positions(x, axes)
    saved = width**2 * (count - _FEW)
    if axes[0].stride > 1 or axes[0].kernel == 1 or saved < _WORK:
        return product_by_patches(x, axes, bias)
    return product_by_strips(x, axes, bias)


def product_by_strips(x: Tensor, axes: Sequence[Axis], bias: bool) -> Tensor:
    """The same where the first stride is 1: a third of the patches and of the products, but more passes over them."""
    A = strip_product(x, axes)
    side, width = A.shape[: A.ndim // 2], x.shape[1] * prod(axis.kernel for axis in axes)
    out = x.new_empty(width + bias, width + bias)
    out[:width, :width].unflatten(1, side).unflatten(0, side).copy_(A)
    return _bordered(out, patch_sum(x, axes), x.shape[0] * positions(x, axes)) if bias else out


def product_by_patches(x: Tensor, axes: Sequence[Axis], bias: bool, limit: int = _COPY) -> Tensor:
    """The same from all patches, with a row of ones among them: copied once, and nothing after the product."""
    d, w = len(axes), windows(padded(x, axes), axes)  # [n ch *out *kernel], a view
    w = w.permute(1, *range(2 + d, 2 + 2 * d), 0, *range(2, 2 + d))  # [ch *kernel n *out]
    width, count = prod(w.shape[: 1 + d]), prod(w.shape[2 + d :])
    step = max(1, limit // (width * max(1, count)))
    total: Tensor | None = None
    for part in w.split(step, 1 + d):
        rows = _rows(x, width, part.shape[1 + d] * count, bias)
        inner = rows[:width, : part.shape[1 + d] * count]
        inner.unflatten(1, part.shape[1 + d :]).unflatten(0, part.shape[: 1 + d]).copy_(part)
        total = rows @ rows.T if total is None else total.addmm_(rows, rows.T)
    assert total is not None
    return total[: width + bias, : width + bias]


def _rows(x: Tensor, width: int, count: int, ones: bool) -> Tensor:
    """Room for ``width`` rows of ``count`` numbers; after them ones, as rows, and zeros, as columns, until all fit."""
    out = x.new_empty(_fitting(width + ones), _fitting(count))
    if out.shape[0] > width:
        out[width:].fill_(1.0)
    if out.shape[1] > count:
        out[:, count:].zero_()
    return out


def _square(x: Tensor, size: int) -> Tensor:
    """Room for a matrix of this size, whose rows start at multiples of a vector."""
    return x.new_empty(size, _fitting(size))[:, :size]


def _fitting(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _bordered(out: Tensor, sums: Tensor, count: int) -> Tensor:
    """The row and column of the homogeneous coordinate, from the sums [1 i] of all others."""
    i = out.shape[0] - 1
    out[i:, :i].copy_(sums)
    out[:i, i:].copy_(sums.T)
    out[i:, i:].fill_(count)
    return out
