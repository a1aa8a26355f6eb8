"""The second moment of the patches of a convolution, from correlations of its input with itself.

Write A[u, v] = Σ_r x(r + u) x(r + v)ᵀ for places u, v of the kernel. If r ran over all integers, it would depend on
v − u alone: A[u, v] = M[v − u] with M[δ] = Σ_p x(p) x(p + δ)ᵀ. Half of the δ are enough, M[−δ] = M[δ]ᵀ: 13 products for
a kernel of 3 × 3, in place of the 45 in the symmetric product of the patches, and no patch is ever copied.

What is left is to take away the outputs r that do not exist. Along one axis let L[u, v] be the moment of the inputs
that output 0 reads, and U[u, v] of those that output R would read. Then all r < 0 make Σ_{t ≥ 1} L[u − t, v − t], and
all r ≥ R make Σ_{t ≥ 0} U[u + t, v + t]. L and U are second moments of patches again, with one axis less, and padding
makes most of them vanish: a padded kernel of 3 × 3 leaves one row or column at each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.rules.patches import Axis, padded, patch_sum, positions, windows
from natgrad.rules.precision import single
from natgrad.rules.products import channels_last, output_moment, symmetric_product
from natgrad.rules.strips import strip_product


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
    x = single(x)
    return PatchMoment(_moment(x, axes, groups), patch_sum(x, axes, groups), positions(x, axes))


def _moment(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """A [c i i] by the way that is fastest for this input."""
    x, axes = _thinned(x, axes)
    if prod(axis.kernel for axis in axes) == 1:
        return output_moment(x.unsqueeze(0), groups)
    if not _correlates(x, axes, groups):
        return moment_by_patches(x, axes, groups)
    return moment_by_rows(x, axes) if _stacks(x, axes, groups) else moment_by_correlation(x, axes, groups)


def _correlates(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether correlations beat patches: where their saving outweighs a fixed cost for M and for every border."""
    if any(axis.stride > 1 for axis in axes):
        return False
    borders = sum((axis.before < axis.span) + (axis.after < axis.span) for axis in axes)
    i = x.shape[1] // groups * prod(axis.kernel for axis in axes)
    work = x.shape[0] * positions(x, axes) * groups * i**2
    return work > (1 + borders) * (2**24 if x.device.type == "cpu" else 2**31)


def _stacks(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether all rows are few enough to be channels: then fewer and larger products make up for needless ones."""
    few = x.shape[1] * x.shape[2] <= 28 * axes[-1].kernel
    return few and groups == 1 and len(axes) > 1 and x.device.type == "cpu"


def _convolves(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether M is best taken from the weight gradient of a convolution, and not product by product.

    Measured on one AVX-512 core: oneDNN has no double precision, and is behind in one dimension and for few or very
    many channels.
    """
    return x.device.type != "cpu" or (x.dtype == torch.float32 and len(axes) > 1 and 4 < x.shape[1] // groups < 384)


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


def moment_by_patches(x: Tensor, axes: Sequence[Axis], groups: int, limit: int = 2**26) -> Tensor:
    """A [c i i] as the symmetric product of the patches, of no more numbers than ``limit`` at a time if it can be."""
    i = x.shape[1] // groups * prod(axis.kernel for axis in axes)
    size = max(1, limit // (positions(x, axes) * groups * i))
    first, *others = x.split(size)
    A = _product_of_patches(first, axes, groups)
    for part in others:
        A += _product_of_patches(part, axes, groups)
    return A


def _product_of_patches(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """A [c i i] from all the patches at once, copied in the order in which x lies in memory."""
    d = len(axes)
    w = windows(padded(x, axes), axes).unflatten(1, (groups, -1))  # [n c ch *out *kernel]
    ch, kernel = w.shape[2], w.shape[3 + d :].numel()
    if groups == 1 and channels_last(x):
        a = w.squeeze(1).movedim(1, -1).flatten(0, d).flatten(1)  # [(n r) (*kernel ch)]
        A = symmetric_product(a).reshape(kernel, ch, kernel, ch)
        return A.permute(1, 0, 3, 2).reshape(1, ch * kernel, ch * kernel)
    order = (1, 2, *range(3 + d, 3 + 2 * d), 0, *range(3, 3 + d))  # [c ch *kernel n *out]
    return symmetric_product(w.permute(order).reshape(groups, ch * kernel, -1).mT)


def moment_by_rows(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """A [1 i i] from the moment of all rows h as channels: A[u, v] = Σ_r G[r + u, r + v] along the first axis.

    Of two axes or more; strides are 1 but along the first. G is a product of strips (``natgrad.rules.strips``): there
    are many channels, and a border is one small product.
    """
    first, *rest = axes
    kernel, size = prod(axis.kernel for axis in rest), x.shape[2]
    read = first.stride * torch.arange(first.outputs(size)) - first.before
    read = read[:, None] + first.dilation * torch.arange(first.kernel)  # [r u], the row at this place of the kernel
    hit = (read[..., None] == torch.arange(size)).to(x)  # [r u h]
    pairs = torch.einsum("ruh,rvg->hguv", hit, hit).flatten(2).flatten(0, 1)
    side = (x.shape[1], size, kernel)
    G = strip_product(x.flatten(1, 2), rest).reshape(*side, *side).movedim((1, 4), (-2, -1))
    A = (G.flatten(-2) @ pairs).unflatten(-1, (first.kernel, first.kernel)).movedim((-2, -1), (1, 4))
    i = side[0] * first.kernel * kernel
    A = A.reshape(1, i, i)
    return (A + A.mT) / 2


def moment_by_correlation(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """A [c i i] as M[v − u] less the outputs that do not exist; all strides must be 1."""
    convolve = _convolves(x, axes, groups)
    autocorrelation = autocorrelation_by_convolution if convolve else autocorrelation_by_shifts
    A = _toeplitz(autocorrelation(x, axes, groups), axes)  # [c ch *kernel ch *kernel]
    for place, axis in enumerate(axes):
        count = axis.kernel - 1 - min(axis.before, axis.after) // axis.dilation  # places that may read no padding
        if count <= 0:
            continue
        L, U = _borders(x, axes, place, count, groups)
        blocks = A.movedim((2 + place, 3 + len(axes) + place), (-2, -1))  # a view with u and v of this axis last
        for t in range(count):
            last = slice(axis.kernel - count + t, None)  # L[u, v] counts its places from kernel − 1 − count on
            blocks[..., last, last] -= L[..., : count - t, : count - t]
            blocks[..., : count - t, : count - t] -= U[..., t:, t:]
    i = prod(A.shape[1 : 2 + len(axes)])
    return A.reshape(groups, i, i)


def autocorrelation_by_convolution(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """M[δ] = Σ_{n,p} x(p) x(p + δ)ᵀ as [c ch ch δ]: δ from 0 to the last of the grid |δ| ≤ span in steps of dilation.

    It is the weight gradient of a convolution of x whose cotangent is x itself.
    """
    first, *others = axes
    d, ch = len(axes), x.shape[1] // groups
    below = functional.pad(x, [0, 0] * len(others) + [0, first.span])  # the first axis needs no offset below zero
    places = [first.kernel, *(2 * axis.kernel - 1 for axis in others)]
    weight = x.new_empty(x.shape[1], ch, *places)  # only its shape is read
    padding, dilation = [0, *(axis.span for axis in others)], [axis.dilation for axis in axes]
    M = torch.ops.aten.convolution_backward(
        x, below, weight, None, [1] * d, padding, dilation, False, [0] * d, groups, [False, True, False]
    )[1]
    return M.reshape(groups, ch, ch, -1)[..., prod(places[1:]) // 2 :]


def autocorrelation_by_shifts(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """The same M[δ], a product for every δ, of one flat buffer with itself shifted.

    Zeros after every row, column and example keep what a shift moves beyond its end from meeting anything.
    """
    sizes = [size + axis.span for size, axis in zip(x.shape[2:], axes, strict=True)]
    strides = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    length = x.shape[0] * prod(sizes)
    tail = sum(axis.span * stride for axis, stride in zip(axes, strides, strict=True))
    flat = x.new_zeros(x.shape[1], length + tail)
    flat[:, :length].unflatten(1, (x.shape[0], *sizes))[(..., *map(slice, x.shape[2:]))] = x.transpose(0, 1)
    flat = flat.unflatten(0, (groups, -1))
    grid = list(product(*(range(1 - axis.kernel, axis.kernel) for axis in axes)))
    M = []
    for delta in grid[len(grid) // 2 :]:
        shift = sum(u * axis.dilation * stride for u, axis, stride in zip(delta, axes, strides, strict=True))
        M.append(flat[..., :length] @ flat[..., shift : shift + length].mT)
    return torch.stack(M, -1)


def _toeplitz(half: Tensor, axes: Sequence[Axis]) -> Tensor:
    """A[u, v] = M[v − u] as [c ch *u ch *v], from M[δ] for δ ≥ 0."""
    groups, ch, _, count = half.shape
    middle, after = half[..., :1], half[..., 1:]
    M = torch.cat([(middle + middle.transpose(1, 2)) / 2, after, after.transpose(1, 2)], -1)  # 0, 1, …, −1, …
    # [u v], the place of v − u in the grid of offsets, from its middle
    delta = torch.zeros(1, 1, dtype=torch.long, device=half.device)
    for axis in axes:
        u = torch.arange(axis.kernel, device=half.device)
        finer = (2 * axis.kernel - 1) * delta[:, None, :, None] + (u - u[:, None])[:, None, :]
        delta = finer.flatten(2).flatten(0, 1)
    column = torch.where(delta < 0, count - 1 - delta, delta)
    channel = M.shape[-1] * torch.arange(ch, device=half.device)
    place = channel[:, None] + column[:, None]  # [u ch v]
    A = M.reshape(groups * ch, -1).index_select(1, place.flatten())  # one gather is far faster than copies of blocks
    kernel = [axis.kernel for axis in axes]
    return A.reshape(groups, ch, *kernel, ch, *kernel)


def _borders(x: Tensor, axes: Sequence[Axis], place: int, count: int, groups: int) -> Tensor:
    """L (its last ``count`` places) and U (its first) along one axis, as [2 c ch *rest ch *rest u v].

    The places are channels of a convolution along the other axes: inside its outputs along those before this axis, over
    all integers along those after it, so that no output is taken away twice. L and U are groups of one convolution.
    """
    axis, rest = axes[place], [*axes[:place], *axes[place + 1 :]]
    length, end = count * axis.dilation, x.shape[2 + place] + axis.after
    starts = (axis.span - length - axis.before, end - axis.span)
    rows = torch.stack([_extended(x, 2 + place, start, start + length) for start in starts], 1)
    rows = (
        rows.movedim(3 + place, 3).unflatten(3, (count, axis.dilation)).movedim(4, 1)
    )  # [n dilation 2 (c ch) u *rest]
    rest[place:] = [replace(other, before=other.span, after=other.span) for other in rest[place:]]
    A = _moment(rows.flatten(2, 4).flatten(0, 1), rest, 2 * groups)
    side = [x.shape[1] // groups, count, *(other.kernel for other in rest)]
    return A.reshape(2, groups, *side, *side).movedim((3, 3 + len(side)), (-2, -1))


def _extended(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """x[start:stop] along ``dim``, with zeros where it leaves the input."""
    size = x.shape[dim]
    low, high = min(max(start, 0), size), min(max(stop, 0), size)
    inside = x.narrow(dim, low, high - low)
    before = min(max(-start, 0), stop - start)
    after = stop - start - before - inside.shape[dim]
    return functional.pad(inside, [0, 0] * (x.ndim - 1 - dim) + [before, after]) if before or after else inside


def example_gradients(x: Tensor, axes: Sequence[Axis], g: Tensor) -> Tensor:
    """Σ_r g[n r o] a[n r i] [n o i] of every example: the weight gradient of a convolution with a group an example.

    >>> x, g, axes = torch.randn(2, 3, 5, 5), torch.randn(2, 4, 4, 4), (Axis(kernel=2),) * 2
    >>> from natgrad.rules.patches import patches
    >>> expected = torch.einsum("nor,nri->noi", g.flatten(2), patches(x, axes).squeeze(2))
    >>> torch.allclose(example_gradients(x, axes, g), expected, atol=1e-5)
    True
    """
    x = padded(x, axes)
    x = x.narrow(2, 0, _read(axes[0], g.shape[2])).narrow(3, 0, _read(axes[1], g.shape[3]))
    n, ch, o = x.shape[0], x.shape[1], g.shape[1]
    stride, dilation = ([axis.stride for axis in axes], [axis.dilation for axis in axes])
    like = x.new_empty(n * o, ch, *(axis.kernel for axis in axes))
    wanted = [False, True, False]
    one, of = g.reshape(1, n * o, *g.shape[2:]), x.reshape(1, n * ch, *x.shape[2:])
    found = torch.ops.aten.convolution_backward(one, of, like, None, stride, [0, 0], dilation, False, [0, 0], n, wanted)
    return found[1].view(n, o, -1)


def _read(axis: Axis, outputs: int) -> int:
    """How many inputs, padded, these outputs read."""
    return (outputs - 1) * axis.stride + axis.span + 1
