"""The second moment of the patches of a convolution, from correlations of its input with itself.

Write A[u, v] = Σ_r x(r + u) x(r + v)ᵀ for places u, v of the kernel. If r ran over all integers, it would depend on
v − u alone: A[u, v] = M[v − u], where M[δ] = Σ_p x(p) x(p + δ)ᵀ is the weight gradient of a convolution of x whose
cotangent is x. One half of the δ is enough, M[−δ] = M[δ]ᵀ: 13 products for a kernel of 3 × 3 in place of the 45 of the
symmetric product of patches, and no patch is copied.

What is left is to take away the outputs r that do not exist. Along one axis let L[u, v] be the moment of the inputs
that output 0 reads, and U[u, v] of those that output R would read. Then outputs r < 0 have Σ_{t ≥ 1} L[u − t, v − t]
and outputs r ≥ R have Σ_{t ≥ 0} U[u + t, v + t]. Both are second moments of patches again, with one axis less, and
padding makes most of them vanish: a padded kernel of 3 × 3 leaves one row and one column at each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.rules.patches import Axis, padded, patch_sum, windows
from natgrad.rules.products import output_moment, symmetric_product


class PatchMoment(NamedTuple):
    """Σ a aᵀ [c i i] and Σ a [c i] over examples and positions, and the number of positions of one example."""

    products: Tensor
    sums: Tensor
    positions: int


def patch_moment(x: Tensor, axes: Sequence[Axis], groups: int = 1) -> PatchMoment:
    """Σ_{n,r} a aᵀ, Σ_{n,r} a and R of the patches a [n r c i] of x [n (c ch) *spatial].

    The first factor of 003 (4.5) before its division by n·R; the sums are its row of the homogeneous coordinate. Zero
    patches at the padding are part of it. The products are symmetric to the last bit; half precision is summed in
    float32.

    >>> from natgrad.rules.patches import patches
    >>> x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    >>> axes = (Axis(kernel=3, before=1, after=1),) * 2
    >>> moment = patch_moment(x, axes)
    >>> a = patches(x, axes)
    >>> torch.allclose(moment.products, torch.einsum("nrci,nrcj->cij", a, a)), moment.positions
    (True, 64)
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    positions = prod(axis.outputs(size) for axis, size in zip(axes, x.shape[2:], strict=True))
    sums = patch_sum(x.sum(0, keepdim=True), axes, groups).squeeze(0)
    return PatchMoment(_moment(x, axes, groups), sums, positions)


def _moment(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """A [c i i] by the way that is fastest for this input."""
    x, axes = _thinned(x, axes)
    if prod(axis.kernel for axis in axes) == 1:
        return output_moment(x.unsqueeze(0), groups)
    if _correlates(x, axes, groups):
        return _by_correlation(x, axes, groups)
    return _by_patches(x, axes, groups)


def _correlates(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether correlations beat patches. All that depends on the machine is decided here."""
    return all(axis.stride == 1 for axis in axes)


def _thinned(x: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, list[Axis]]:
    """Where the kernel is 1 wide, the inputs that are read, with no padding and no stride left."""
    rest = []
    for place, axis in enumerate(axes, start=2):
        if axis.kernel > 1:
            rest.append(axis)
            continue
        skipped = -(-axis.before // axis.stride)  # outputs that read padding alone
        start = skipped * axis.stride - axis.before
        stop = (axis.outputs(x.shape[place]) - 1) * axis.stride - axis.before + 1
        x = x[(slice(None),) * place + (slice(start, max(stop, start), axis.stride),)]
        rest.append(Axis(1))
    return x, rest


def _by_patches(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """The symmetric product of the patches themselves, copied in the order in which x lies in memory."""
    d = len(axes)
    w = windows(padded(x, axes), axes).unflatten(1, (groups, -1))  # [n c ch *out *kernel]
    ch, kernel = w.shape[2], w.shape[3 + d :]
    if groups == 1 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous():
        a = w.squeeze(1).movedim(1, -1).flatten(0, d).flatten(1)  # [(n r) (*kernel ch)]
        A = symmetric_product(a).reshape(kernel.numel(), ch, kernel.numel(), ch)
        return A.permute(1, 0, 3, 2).reshape(1, ch * kernel.numel(), -1)
    order = (1, 2, *range(3 + d, 3 + 2 * d), 0, *range(3, 3 + d))  # [c ch *kernel n *out]
    return symmetric_product(w.permute(order).reshape(groups, ch * kernel.numel(), -1).mT)


def _by_correlation(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """M[v − u] less the outputs that do not exist; strides are 1."""
    A = _toeplitz(_autocorrelation(x, axes, groups), axes)  # [c ch *kernel ch *kernel]
    for place, axis in enumerate(axes):
        blocks = A.movedim((2 + place, 3 + len(axes) + place), (-2, -1))  # a view with u and v of this axis last
        first = axis.before // axis.dilation  # the places u before it read padding
        L = _slab(x, axes, place, first * axis.dilation - axis.before, axis.kernel - 1 - first, groups)
        for t in range(1, 1 + L.shape[-1]):
            blocks[..., first + t :, first + t :] -= L[..., : axis.kernel - first - t, : axis.kernel - first - t]
        count = axis.kernel - 1 - axis.after // axis.dilation  # the places u from here on read padding
        U = _slab(x, axes, place, x.shape[2 + place] + axis.after - axis.span, count, groups)
        for t in range(U.shape[-1]):
            blocks[..., : count - t, : count - t] -= U[..., t:, t:]
    i = prod(A.shape[1 : 2 + len(axes)])
    return A.reshape(groups, i, i)


def _autocorrelation(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """M[δ] = Σ_{n,p} x(p) x(p + δ)ᵀ as [c ch ch δ], |δ| < kernel in steps of the dilation: 0, …, D, then −1, …, −D.

    δ counts places of the grid of all offsets, from its middle on: M[−δ] = M[δ]ᵀ is the other half of it.
    """
    first, *others = axes
    d, ch = len(axes), x.shape[1] // groups
    below = functional.pad(x, [0, 0] * len(others) + [0, first.span])  # the first axis needs no offset below zero
    places = [first.kernel, *(2 * axis.kernel - 1 for axis in others)]
    weight = x.new_empty(x.shape[1], ch, *places)  # only its shape is read
    padding, dilation = [0, *(axis.span for axis in others)], [axis.dilation for axis in axes]
    half = torch.ops.aten.convolution_backward(
        x, below, weight, None, [1] * d, padding, dilation, False, [0] * d, groups, [False, True, False]
    )[1]
    half = half.reshape(groups, ch, ch, -1)[..., prod(places[1:]) // 2 :]
    middle, after = half[..., :1], half[..., 1:]
    return torch.cat([(middle + middle.transpose(1, 2)) / 2, after, after.transpose(1, 2)], -1)


def _toeplitz(M: Tensor, axes: Sequence[Axis]) -> Tensor:
    """A[u, v] = M[v − u] as [c ch *u ch *v]."""
    groups, ch, _, offsets = M.shape
    delta = torch.zeros(1, 1, dtype=torch.long, device=M.device)  # [u v], the place of v − u counted from the middle
    for axis in axes:
        u = torch.arange(axis.kernel, device=M.device)
        finer = (2 * axis.kernel - 1) * delta[:, None, :, None] + (u - u[:, None])[:, None, :]
        delta = finer.flatten(2).flatten(0, 1)
    column = torch.where(delta < 0, offsets // 2 - delta, delta)
    place = offsets * torch.arange(ch, device=M.device)[:, None] + column[:, None]  # [u ch v]
    A = M.reshape(groups * ch, ch * offsets).index_select(1, place.flatten())
    kernel = [axis.kernel for axis in axes]
    return A.reshape(groups, ch, *kernel, ch, *kernel)


def _slab(x: Tensor, axes: Sequence[Axis], place: int, start: int, count: int, groups: int) -> Tensor:
    """The moment [c ch *rest ch *rest u v] of the inputs that begin at ``start`` along one axis, for u, v < count.

    They are the channels of a convolution along the other axes: inside its outputs along those before this axis, over
    all integers along those after it, so that no output is taken away twice.
    """
    if count <= 0:
        return x.new_empty(0)
    dilation, kernels = axes[place].dilation, [axis.kernel for n, axis in enumerate(axes) if n != place]
    rows = _extended(x, 2 + place, start, start + count * dilation)
    rows = rows.movedim(2 + place, 2).unflatten(2, (count, dilation)).movedim(3, 1)  # [n dilation (c ch) count *rest]
    free = [replace(axis, before=axis.span, after=axis.span) for axis in axes[place + 1 :]]
    A = _moment(rows.flatten(0, 1).flatten(1, 2), [*axes[:place], *free], groups)
    side = [x.shape[1] // groups, count, *kernels]
    return A.reshape(groups, *side, *side).movedim((2, 2 + len(side)), (-2, -1))


def _extended(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """x[start:stop] along ``dim``, with zeros where it leaves the input."""
    low, high = min(max(start, 0), x.shape[dim]), max(min(stop, x.shape[dim]), 0)
    inside = x.narrow(dim, low, max(high - low, 0))
    if inside.shape[dim] == stop - start:
        return inside
    before = max(low - start, 0) if high > low else 0
    pads = [0, 0] * (x.ndim - 1 - dim) + [before, stop - start - before - inside.shape[dim]]
    return functional.pad(inside, pads)
