"""The patches that a convolution reads, in any number of dimensions, and their second moments.

``patch_moment`` is the one entry point: on a processor it correlates the input with itself, on a GPU it copies patches
or strips of them into rows for tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.accelerate.moments import (
    aligned_rows,
    aligned_size,
    aligned_square,
    channels_last,
    image_moment,
    in_half,
    multiply,
    multiply_add,
    put_border,
    rounded,
    single,
    summed,
    symmetric_product,
)

_FEW = 2  # examples
_FEWER = 4  # times fewer patches than numbers in one


@final
@dataclass(frozen=True)
class Axis:
    """One spatial axis: output r reads the inputs r·stride + u·dilation − before for u < kernel, zeros outside.

    >>> Axis(kernel=3, stride=2, before=1, after=1).outputs(32)
    16
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """The distance from the first input of a patch to its last."""
        return (self.kernel - 1) * self.dilation

    def outputs(self, size: int) -> int:
        """How many outputs an axis of ``size`` inputs gives."""
        room = size + self.before + self.after - self.span - 1
        if room < 0:
            raise ValueError(
                f"a kernel of {self.kernel} with dilation {self.dilation} spans {self.span + 1} inputs, but there are "
                f"{size} and {self.before} + {self.after} of padding: use a smaller kernel or pad more"
            )
        return room // self.stride + 1


def patches(x: Tensor, axes: Sequence[Axis], groups: int = 1) -> Tensor:
    """a [n r c i]: what output position r of a convolution sees of x [n (c ch) *spatial].

    i is channel-major, as the weight [o ch *kernel] flattens; the homogeneous coordinate is not among them.

    >>> patches(torch.arange(4.0).reshape(1, 1, 4), (Axis(kernel=2),)).squeeze()
    tensor([[0., 1.],
            [1., 2.],
            [2., 3.]])
    """
    d = len(axes)
    w = windows(padded(x, axes), axes).unflatten(1, (groups, -1))  # [n c ch *out *kernel]
    a = w.movedim((1, 2), (1 + d, 2 + d))  # [n *out c ch *kernel]
    return a.reshape(x.shape[0], prod(a.shape[1 : 1 + d]), groups, prod(a.shape[2 + d :]))


def patch_mean(x: Tensor, axes: Sequence[Axis], groups: int = 1) -> Tensor:
    """ā [n c i] = (1/R) Σ_r a[n r c i], the mean patch of every example, without its patches.

    A sum over a box of positions is a sum along one axis after the other. Half precision is summed in float32.

    >>> x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    >>> axes = (Axis(kernel=3, before=1, after=1),) * 2
    >>> torch.allclose(patch_mean(x, axes), patches(x, axes).mean(1))
    True
    """
    s = single(x)
    if len(x) <= _FEW and x.device.type == "cuda":  # few numbers, and few launches
        return _window_sums(s, axes).view(len(x), groups, -1) / positions(x, axes)
    for axis in axes:  # the axis at place 2 leaves, its kernel goes to the end
        s = s.movedim(2, -1) @ _reads(axis, s.shape[2], s)
    return s.flatten(1).unflatten(1, (groups, -1)) / positions(x, axes)


def patch_sum(x: Tensor, axes: Sequence[Axis], groups: int = 1) -> Tensor:
    """Σ_{n,r} a[n r c i] as [c i], from the sum of the examples."""
    wide = summed(x.dtype)
    total = x.movedim(1, -1).sum(0, dtype=wide).movedim(-1, 0) if channels_last(x) else x.sum(0, dtype=wide)
    return _window_sums(total.unsqueeze(0), axes).view(groups, -1)


def _window_sums(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """[n (c ch) *kernel]: for every place of the kernel, the sum over all positions."""
    w = windows(padded(x, axes), axes)  # [n (c ch) *out *kernel]
    return w.sum(tuple(range(2, 2 + len(axes)))).contiguous()


def positions(x: Tensor, axes: Sequence[Axis]) -> int:
    """R, the number of outputs of one example."""
    return prod(axis.outputs(size) for axis, size in zip(axes, x.shape[2:], strict=True))


def padded(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """x with its zero padding."""
    pads = [side for axis in reversed(axes) for side in (axis.before, axis.after)]
    return functional.pad(x, pads) if any(pads) else x


def windows(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """All windows of x, which is padded already, as a view [n ch *out *kernel]."""
    for place, axis in enumerate(axes, start=2):
        x = x.unfold(place, axis.span + 1, axis.stride)[..., :: axis.dilation]
    return x


def _reads(axis: Axis, size: int, like: Tensor) -> Tensor:
    """[size kernel]: 1 where some output reads this input through this place of the kernel."""
    inputs = torch.arange(axis.before, axis.before + size, device=like.device).unsqueeze(1)
    steps = inputs - torch.arange(0, axis.span + 1, axis.dilation, device=like.device)
    outputs = axis.outputs(size)
    hit = (steps >= 0) & (steps % axis.stride == 0) & (steps < outputs * axis.stride)
    return hit.to(like.dtype)


# The second moment of the patches of a convolution, from correlations of its input with itself.
#
# Write A[u, v] = Σ_r x(r + u) x(r + v)ᵀ for places u, v of the kernel. If r ran over all integers, it would depend on
# v − u alone: A[u, v] = M[v − u] with M[δ] = Σ_p x(p) x(p + δ)ᵀ. Half of the δ are enough, M[−δ] = M[δ]ᵀ: 13 products
# for a kernel of 3 × 3, instead of the 45 in the symmetric product of the patches, and no patch is ever copied. This is
# 2 to 5 times faster than the product of the patches on a processor.
#
# What is left is to take away the outputs r that do not exist. Along one axis let L[u, v] be the moment of the inputs
# that output 0 reads, and U[u, v] of those that output R would read. Then all r < 0 make Σ_{t ≥ 1} L[u − t, v − t], and
# all r ≥ R make Σ_{t ≥ 0} U[u + t, v + t]. L and U are second moments of patches again, with one axis less, and padding
# makes most of them vanish: a padded kernel of 3 × 3 leaves one row or column at each side.


def patch_moment(x: Tensor, axes: Sequence[Axis], groups: int = 1, ones: bool | Tensor = False) -> Tensor:
    """Σ_{n,r} ā āᵀ [c i i] of the patches a [n r c i] of x [n (c ch) *spatial]; ā = (a, 1) with ``ones``, or (a, u_n).

    Zero patches at the padding are part of it. Symmetric to the last bit, on a GPU up to rounding: launches to
    symmetrise would show, and what inverts it reads one triangle. Half precision is summed in float32.

    >>> x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    >>> axes = (Axis(kernel=3, before=1, after=1),) * 2
    >>> a = patches(x, axes)
    >>> torch.allclose(patch_moment(x, axes), torch.einsum("nrci,nrcj->cij", a, a))
    True
    """
    if ones is False and all(axis == Axis(1) for axis in axes):
        return image_moment(x, groups)
    on_gpu = groups == 1 and x.device.type == "cuda"
    A = patch_product(x, axes, ones is True).unsqueeze(0) if on_gpu else _moment(single(x), axes, groups)
    if ones is False or (on_gpu and ones is True):
        return A
    i = A.shape[-1]
    out = A.new_empty(groups, i + 1, i + 1)
    out[:, :i, :i] = A
    if isinstance(ones, bool):
        return put_border(out, patch_sum(x, axes, groups), len(x) * positions(x, axes))
    u = ones.to(A.dtype)
    mixed = torch.einsum("n,n...->...", u, x.to(A.dtype)).unsqueeze(0)
    return put_border(out, patch_sum(mixed, axes, groups), positions(x, axes) * u.square().sum())


def few_patches(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether a moving average on a CPU had better take all patches: their moment is several times as large."""
    if groups > 1 or x.device.type != "cpu":
        return False
    count, width = _size(x, axes)
    return _FEWER * count <= width


def _moment(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """A [c i i] by the method that is fastest for this input."""
    x, axes = _thinned(x, axes)
    if x.numel() == 0:  # no example, or an axis of which every output reads padding alone
        i = x.shape[1] // groups * prod(axis.kernel for axis in axes)
        return x.new_zeros(groups, i, i)
    if prod(axis.kernel for axis in axes) == 1:
        return image_moment(x, groups)
    if not _correlates(x, axes, groups):
        return moment_by_patches(x, axes, groups)
    return moment_by_rows(x, axes) if _stacks(x, axes, groups) else moment_by_correlation(x, axes, groups)


def _correlates(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether correlation is faster than patches: its saving must outweigh a fixed cost for M and for every border."""
    if any(axis.stride > 1 for axis in axes):
        return False
    borders = sum((axis.before < axis.span) + (axis.after < axis.span) for axis in axes)
    i = x.shape[1] // groups * prod(axis.kernel for axis in axes)
    work = x.shape[0] * positions(x, axes) * groups * i**2
    return work > (1 + borders) * (2**24 if x.device.type == "cpu" else 2**31)


def _stacks(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether rows can be treated as channels: few large products then beat many small ones, though some are unused."""
    few = x.shape[1] * x.shape[2] <= 28 * axes[-1].kernel
    return few and groups == 1 and len(axes) > 1 and x.device.type == "cpu"


def _convolves(x: Tensor, axes: Sequence[Axis], groups: int) -> bool:
    """Whether M is computed as the weight gradient of a convolution, rather than product by product.

    Measured on one AVX-512 core: oneDNN has no double precision, and is behind in one dimension and for few or very
    many channels.
    """
    return x.device.type != "cpu" or (x.dtype == torch.float32 and len(axes) > 1 and 4 < x.shape[1] // groups < 384)


def _thinned(x: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, list[Axis]]:
    """Along axes with a kernel of 1, keep only the inputs that are read, so that no padding and no stride is left."""
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
    """A [c i i] as the symmetric product of the patches, at most ``limit`` numbers (or one example) at a time."""
    i = x.shape[1] // groups * prod(axis.kernel for axis in axes)
    size = max(1, limit // (positions(x, axes) * groups * i))
    first, *others = x.split(size)
    A = _product_of_patches(first, axes, groups)
    for chunk in others:
        A += _product_of_patches(chunk, axes, groups)
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
    """A [1 i i] from the moment G of all rows h as channels: A[u, v] = Σ_r G[r + u, r + v] along the first axis.

    Of two axes or more; strides are 1 but along the first. G is a product of strips: there are many channels, and a
    border is one small product. This halves the time of LeNet's first layer.
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
    sizes = [first.kernel, *(2 * axis.kernel - 1 for axis in others)]
    weight = x.new_empty(x.shape[1], ch, *sizes)  # only its shape is read
    padding, dilation = [0, *(axis.span for axis in others)], [axis.dilation for axis in axes]
    M = torch.ops.aten.convolution_backward(
        x, below, weight, None, [1] * d, padding, dilation, False, [0] * d, groups, [False, True, False]
    )[1]
    return M.reshape(groups, ch, ch, -1)[..., prod(sizes[1:]) // 2 :]


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


def convolve(x: Tensor, axes: Sequence[Axis], w: Tensor) -> Tensor:
    """a·w [n r p] of the patches a [n r i] of x [n ch *spatial], one group, with filters w [p i].

    >>> convolve(torch.arange(4.0).view(1, 1, 4), (Axis(kernel=2),), torch.tensor([[1.0, 10.0]])).flatten()
    tensor([10., 21., 32.])
    """
    if all(axis == Axis(1) for axis in axes):
        return x.flatten(2).mT @ w.T
    d, x = len(axes), padded(x, axes)
    if d == 2 and x.device.type == "cuda":  # the fast kernels want it so, and what comes out is wanted so
        x = x.contiguous(memory_format=torch.channels_last)
    filters = w.reshape(len(w), x.shape[1], *(axis.kernel for axis in axes))
    stride, dilation = [axis.stride for axis in axes], [axis.dilation for axis in axes]
    return torch.convolution(x, filters, None, stride, [0] * d, dilation, False, [0] * d, 1).flatten(2).mT


# On a GPU: second moments in few launches.
#
# Tensor cores read single precision fastest where both factors are contiguous along the index that is summed, and where
# rows start at multiples of a vector. Factors are copied into that layout where it pays, and products have such rows.


_COPY = 2**24  # numbers; of patches at a time
_WORK = 2**34  # products of numbers, from which a row of tiles more, for one of ones, costs more than sums do


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
    """Whether strips are faster than patches: fewer products, but more launches and more passes over the moment.

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
    """The same by strips, where the first stride is 1: a third of the copies and of the products, but more passes."""
    A, (count, width) = strip_product(x, axes), _size(x, axes)
    side = A.shape[: A.ndim // 2]
    out = A.new_empty(width + bias, width + bias)
    out[:width, :width].unflatten(1, side).unflatten(0, side).copy_(A)
    return put_border(out, patch_sum(x, axes).squeeze(0), count) if bias else out


def product_by_patches(x: Tensor, axes: Sequence[Axis], bias: bool, limit: int = _COPY, work: int = _WORK) -> Tensor:
    """The same from all patches, copied as rows, at most ``limit`` numbers (or one example) at a time.

    Below this much ``work`` the copy has rows of ones, and the border of the bias is part of the product.
    """
    d, w = len(axes), windows(padded(x, axes), axes)  # [n ch *out *kernel], a view
    w = w.permute(1, *range(2 + d, 2 + 2 * d), 0, *range(2, 2 + d))  # [ch *kernel n *out]
    width, count = prod(w.shape[: 1 + d]), prod(w.shape[2 + d :])
    alone = width**2 * x.shape[0] * count > (4 * work if in_half(x) else work)
    out = aligned_square(x, width + bias if alone else aligned_size(width + bias))
    inner = out[:width, :width] if alone else out
    for place, chunk in enumerate(w.split(max(1, limit // (width * max(1, count))), 1 + d)):
        examples = chunk.shape[1 + d]
        rows = aligned_rows(x, width, inner.shape[0] - width, examples * count)
        target = rows[:width, : examples * count].unflatten(1, chunk.shape[1 + d :]).unflatten(0, chunk.shape[: 1 + d])
        target.copy_(chunk)
        if place:
            multiply_add(inner, rows, rows.T, inner)
        else:
            multiply(rows, rows.T, inner)
    if bias and alone:
        put_border(out, patch_sum(x, axes).squeeze(0), x.shape[0] * count)
    return out[: width + bias, : width + bias]


# The second moment of the patches of a convolution from products of strips: few products, and large ones.
#
# A strip f(p) [m q] is what the outputs n, r' along all axes but the first read at place p of the first: m runs over
# channels and places w of the kernel along the other axes, q over n and r'. The patch of output (r, r') is made of the
# strips r + u, so with places u, v of the kernel along the first axis
#
#     A[u, v] = Σ_r f(r + u) f(r + v)ᵀ = Σ_p f(p) f(p + v − u)ᵀ,  start(u, v) ≤ p < stop(u, v).
#
# Places with one v − u differ by few p at the borders: one long product is enough for all of them, 3 instead of 9 for
# a kernel of 3 × 3. Strips lie side by side in memory, [m p q], so that every such sum is one product of two matrices
# whose rows are contiguous, which tensor cores read fastest, and only a third of the patches is copied.


_STRIPS = 2**25  # numbers; of strips at a time
_ROUND = 8  # times the span: so many strips, and cuBLAS is faster for one round number of them and some zeros


@final
@dataclass(frozen=True)
class Span:
    """The p, from ``start`` to before ``stop``, at which two places of the kernel, ``shift`` apart, both see input.

    >>> Span.of(Axis(kernel=3, before=1, after=1), size=8, u=2, v=2)  # the last place sees all but the first input
    Span(start=1, stop=8, shift=0)
    """

    start: int
    stop: int
    shift: int

    @staticmethod
    def of(axis: Axis, size: int, u: int, v: int) -> Span:
        """Of places u ≤ v, on ``size`` inputs; the stride is 1."""
        shift = (v - u) * axis.dilation
        first, end = u * axis.dilation - axis.before, max(size - shift, 0)
        return Span(min(max(first, 0), end), min(max(first + axis.outputs(size), 0), end), shift)

    def beyond(self, other: Span) -> tuple[tuple[Span, float], ...]:
        """The spans by which a sum over this span differs from one over ``other``, with the sign of each."""
        differences = []
        for mine, its, sign in ((self.start, other.start, 1.0), (self.stop, other.stop, -1.0)):
            if mine != its:
                differences.append((Span(min(mine, its), max(mine, its), self.shift), sign if mine < its else -sign))
        return tuple(differences)

    @property
    def count(self) -> int:
        """How many p."""
        return self.stop - self.start


def strip_product(x: Tensor, axes: Sequence[Axis], limit: int = _STRIPS) -> Tensor:
    """Σ_nr a aᵀ as a view [ch *kernel ch *kernel] of what is in memory [u v (ch w) (ch w)]; the first stride is 1.

    Examples are taken so few at a time that their strips are no more than ``limit`` numbers, if it can be.

    >>> import torch
    >>> strip_product(torch.arange(4.0).reshape(1, 1, 4), (Axis(kernel=2),)).squeeze()
    tensor([[ 5.,  8.],
            [ 8., 14.]])
    """
    first, *rest = axes
    ch, kernels = x.shape[1], [axis.kernel for axis in rest]
    numbers = ch * prod(kernels) * x.shape[2]
    numbers *= prod(axis.outputs(size) for axis, size in zip(rest, x.shape[3:], strict=True))
    head, *others = x.split(max(1, limit // max(1, numbers)))
    A = _products(head, first, rest)
    for chunk in others:
        A += _products(chunk, first, rest)
    d = len(axes)
    A = A.unflatten(3, (ch, *kernels)).unflatten(2, (ch, *kernels))  # [u v ch *w ch *w]
    return A.permute(2, 0, *range(3, 2 + d), 2 + d, 1, *range(3 + d, 2 + 2 * d))


def strips(x: Tensor, rest: Sequence[Axis], zeros: int = 0) -> Tensor:
    """f [(ch w) p (n r')] of x [n ch p *others], whose axes from the second on are read as ``rest`` says.

    ``zeros`` strips of zeros come after the others.
    """
    d, size, axes = len(rest), x.shape[2], (Axis(1), *rest)
    w = windows(padded(x, axes), axes)  # [n ch p *out 1 *kernel], a view
    w = w.permute(1, *range(3 + d, 4 + 2 * d), 2, 0, *range(3, 3 + d))
    f = x.new_empty(prod(w.shape[: 2 + d]), size + zeros, prod(w.shape[3 + d :]))
    f[:, size:].zero_()
    f[:, :size].unflatten(2, w.shape[3 + d :]).unflatten(0, w.shape[: 2 + d]).copy_(w)
    return f


def _products(x: Tensor, axis: Axis, rest: Sequence[Axis]) -> Tensor:
    """A [u v m m] from the strips of all examples at once."""
    size = x.shape[2]
    zeros = axis.span if axis.span * _ROUND <= size else 0
    f = strips(x, rest, zeros)
    m, _, q = f.shape
    rows = f.flatten(1)
    A = f.new_empty(axis.kernel, axis.kernel, m, m, dtype=summed(f.dtype))
    for shift in range(axis.kernel):
        spans = [Span.of(axis, size, u, u + shift) for u in range(axis.kernel - shift)]
        longest = max(range(len(spans)), key=lambda u: spans[u].count)
        end = size if zeros and spans[longest].stop == size - shift * axis.dilation else spans[longest].stop
        multiply(*_factors(rows, q, replace(spans[longest], stop=end)), A[longest, longest + shift])
        for u in (*range(longest - 1, -1, -1), *range(longest + 1, len(spans))):
            near = u + 1 if u < longest else u - 1
            _moved(A[u, u + shift], A[near, near + shift], spans[u], spans[near], rows, q)
        if shift:
            A.diagonal(-shift).copy_(A.diagonal(shift).transpose(0, 1))
    return A


def _moved(out: Tensor, base: Tensor, span: Span, near: Span, rows: Tensor, q: int) -> None:
    """Σ_p f(p) f(p + shift)ᵀ over a span, from the sum ``base`` over a span ``near`` it where that is less work."""
    spans = span.beyond(near)
    if sum(chunk.count for chunk, _ in spans) > span.count:
        multiply(*_factors(rows, q, span), out)
        return
    if not spans:
        out.copy_(base)
    for chunk, sign in spans:
        multiply_add(base, *_factors(rows, q, chunk), out, sign)
        base = out


def _factors(rows: Tensor, q: int, span: Span) -> tuple[Tensor, Tensor]:
    """f(p) [m (p q)] and f(p + shift)ᵀ [(p q) m] for the p of a span."""
    start, stop, shift = span.start * q, span.stop * q, span.shift * q
    return rows[:, start:stop], rows[:, start + shift : stop + shift].T
