"""Second moments in few launches, for a GPU, where small kernels wait for the processor that starts them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from natgrad.rules.patches import Axis, windows

_SMALL = 2**21  # numbers
_COPY = 2**24  # numbers; of patches at a time
_PANEL = 128  # channels, from which products of one offset with all later ones keep a GPU busy
_ALIGNED = 8  # numbers; rows of a product that start off a vector are read one number at a time


def affine_product(x: Tensor) -> Tensor:
    """Σ x̄ x̄ᵀ [i+1 i+1] of x [m i] with x̄ = (x, 1), written where it belongs: one product, one sum.

    >>> affine_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.,  4.],
            [14., 20.,  6.],
            [ 4.,  6.,  2.]])
    """
    m, i = x.shape
    if x.numel() <= _SMALL:  # a copy with a column of ones takes less than three launches
        ones = torch.nn.functional.pad(x, (0, 1), value=1.0)
        return ones.T @ ones
    out = x.new_empty(i + 1, i + 1)
    torch.mm(x.T, x, out=out[:i, :i])
    torch.sum(x, 0, out=out[i, :i])
    out[:i, i].copy_(out[i, :i])
    out[i:, i:].fill_(m)
    return out


def patch_product(x: Tensor, axes: Sequence[Axis], bias: bool) -> Tensor:
    """Σ_nr ā āᵀ [i i] of the patches of x [n ch *spatial], with the homogeneous 1 where there is a ``bias``.

    The patches are copied once, channels last, so that whole vectors are copied, and multiplied in that order; the
    product is brought into the order of the weight, channels first.

    >>> x = torch.arange(4.0).reshape(1, 1, 4)
    >>> patch_product(x, (Axis(kernel=2),), bias=True)
    tensor([[ 5.,  8.,  3.],
            [ 8., 14.,  6.],
            [ 3.,  6.,  3.]])
    """
    ch, d = x.shape[1], len(axes)
    w = windows(_last(x, axes).movedim(-1, 1), axes).movedim(1, -1)  # [n *out *kernel ch], a view
    positions, kernel = prod(w.shape[1 : 1 + d]), prod(w.shape[1 + d : -1])
    width = kernel * ch
    full = -(-(width + bias) // _ALIGNED) * _ALIGNED
    step = max(1, _COPY // (positions * full))
    a = x.new_empty(min(step, x.shape[0]) * positions, full)
    if full > width:
        a[:, width:].fill_(1.0)  # the homogeneous coordinate, and as often again as the row needs to be full
    G = x.new_zeros(full, full)
    for part in w.split(step):
        rows = a[: part.shape[0] * positions]
        rows[:, :width].unflatten(0, part.shape[: 1 + d]).unflatten(-1, part.shape[1 + d :]).copy_(part)
        _add_product(G, rows, ch if ch >= _PANEL else width)
    for start in range(ch, width if ch >= _PANEL else 0, ch):
        G[start : start + ch, :start].copy_(G[:start, start : start + ch].T)
    out = x.new_empty(width + bias, width + bias)
    inner = G[:width, :width].unflatten(0, (kernel, ch)).unflatten(2, (kernel, ch))
    out[:width, :width].unflatten(0, (ch, kernel)).unflatten(2, (ch, kernel)).copy_(inner.permute(1, 0, 3, 2))
    if bias:
        sums = G[:width, width].unflatten(0, (kernel, ch)).T
        out[width, :width].unflatten(0, (ch, kernel)).copy_(sums)
        out[:width, width].unflatten(0, (ch, kernel)).copy_(sums)
        out[width:, width:].fill_(x.shape[0] * positions)
    return out


def _add_product(G: Tensor, rows: Tensor, panel: int) -> None:
    """Add rowsᵀ rows to G, ``panel`` rows at a time, each from its diagonal on: half the work."""
    for start in range(0, G.shape[0], panel):
        if start + panel <= G.shape[0]:  # what is left is the homogeneous coordinate
            G[start : start + panel, start:].addmm_(rows[:, start : start + panel].T, rows[:, start:])


def _last(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """x [n ch *spatial] with its zeros around it, as [n *spatial ch] in memory."""
    last = x.movedim(1, -1)
    if not any(axis.before or axis.after for axis in axes):
        return last.contiguous()
    sizes = [size + axis.before + axis.after for size, axis in zip(x.shape[2:], axes, strict=True)]
    out = x.new_zeros(x.shape[0], *sizes, x.shape[1])
    inner = [slice(axis.before, axis.before + size) for size, axis in zip(x.shape[2:], axes, strict=True)]
    out[(slice(None), *inner)].copy_(last)
    return out
