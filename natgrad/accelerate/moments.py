"""Second moments: the products of a tall matrix with itself that every Kronecker factor is made of, and their moving
averages, in place and many in few launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.devices import can_read
from natgrad.accelerate.matrix_kernels import keep_rows, round_rows

# Precision: in which type numbers are multiplied, and in which they are summed.
#
# Half precision is multiplied as it is by tensor cores and summed in float32, which holds every product exactly.
# float32 is multiplied as such (in tf32 or not, as torch was told), unless the user allows bfloat16 with
# ``torch.set_float32_matmul_precision("medium")``. torch itself makes no use of that on a GPU; moments do, where the
# product is large enough to pay for the rounding. A moment is a mean over a batch, and its noise is larger.


_HALF = (torch.float16, torch.bfloat16)
_WORK = 2**29  # products of numbers, from which on an H200 they take longer in tf32 than to round in bfloat16


def single(t: Tensor) -> Tensor:
    """At least single precision: sums of products in half precision lose their small terms."""
    return t.float() if t.dtype in _HALF else t


def multiplied(x: Tensor, work: int) -> torch.dtype:
    """The type in which the entries of x are multiplied with one another, in so many products.

    >>> multiplied(torch.zeros(2), 4), multiplied(torch.zeros(2, dtype=torch.bfloat16), 4)
    (torch.float32, torch.float32)
    """
    if x.device.type != "cuda":
        return torch.float32 if x.dtype in _HALF else x.dtype
    if x.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return torch.float32  # torch would sum in float16, and refuses to write such sums in float32
    pays = x.dtype == torch.float32 and work >= _WORK and bfloat16_allowed() and _fast(x.device)
    return torch.bfloat16 if pays else x.dtype


def rounded(x: Tensor, work: int) -> Tensor:
    """x in that type. All that is summed beside its products is of these numbers too, or a moment would have λ < 0.

    >>> rounded(torch.ones(2, dtype=torch.bfloat16), 4)
    tensor([1., 1.])
    """
    return x.to(multiplied(x, work))


def in_half(x: Tensor) -> bool:
    """Whether products of x are sums of products in half precision."""
    return x.dtype in _HALF


def summed(dtype: torch.dtype) -> torch.dtype:
    """The type of a sum of products of such numbers."""
    return torch.float32 if dtype in _HALF else dtype


def bfloat16_allowed() -> bool:
    """Whether the user has said so, with ``torch.set_float32_matmul_precision``.

    >>> bfloat16_allowed()
    False
    """
    return _bfloat16_allowed(torch.backends.cuda.matmul.fp32_precision)


def _bfloat16_allowed(precision: str) -> bool:
    if precision != "tf32":
        return False
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:  # torch's newer switches were used, and torch refuses to put them in the older words
        return False


def _fast(device: torch.device) -> bool:
    """Whether its tensor cores know bfloat16: those of Ampere and later do."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def switches() -> tuple[str, bool, bool]:
    """What torch was told about products of matrices on a GPU: under other switches they are other computations."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    return precision, matmul.allow_fp16_accumulation, _bfloat16_allowed(precision)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a b of matrices into ``out``, which may have a wider type.

    >>> out = torch.empty(1, 1)
    >>> multiply(torch.ones(1, 3), torch.ones(3, 1), out)
    >>> out
    tensor([[3.]])
    """
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)


def multiply_add(base: Tensor, a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """base + alpha a b into ``out``, likewise; the base may be ``out``.

    >>> out = torch.ones(1, 1)
    >>> multiply_add(out, torch.ones(1, 3), torch.ones(3, 1), out, alpha=-1.0)
    >>> out
    tensor([[-2.]])
    """
    if a.dtype == out.dtype:
        torch.addmm(base, a, b, alpha=alpha, out=out)
    else:
        torch.addmm(base, a, b, out.dtype, alpha=alpha, out=out)


_WIDE = 1024  # columns, from which a product on a GPU is worth its panels
_PANEL_WORK = 2**33  # multiplications, likewise
_TILE = 128  # columns that a GPU multiplies as one
_PANEL_ROWS = 256  # of a Gram matrix that are multiplied at once
_LEAF = 96  # columns, up to which a processor gains nothing from computing one triangle
_PAGE = 4096  # bytes
_LITTLE = 2**24  # multiplications, likewise
_COUNTED = 2**31  # numbers, from which some kernels of torch overflow
_COPIED = 2**24  # numbers, up to which a copy with a column of ones is faster than five more launches
_ALIGNED = 8  # numbers; a GPU reads rows that start off a vector one number at a time


def rows(x: Tensor, trailing: int = 1) -> Tensor:
    """x [* *rest] as [m *rest], for sums over all rows: in the order that they have in memory, so without a copy.

    A layer whose examples are on another axis than the first is seen through a view that has them there.

    >>> x = torch.arange(6.0).view(3, 2, 1)
    >>> rows(x.transpose(0, 1)).flatten()
    tensor([0., 1., 2., 3., 4., 5.])
    """
    lead = x.ndim - trailing
    if lead > 1 and not x.is_contiguous():
        order = sorted(range(lead), key=x.stride, reverse=True)
        x = x.permute(*order, *range(lead, x.ndim))
    return x.reshape(x.shape[:lead].numel(), *x.shape[lead:])


def rows_and_mask(x: Tensor, mask: Tensor, trailing: int = 1) -> tuple[Tensor, Tensor]:
    """x [* *rest] as ``rows`` [m *rest], and a mask of its rows, which has as many entries, as [m]."""
    lead = x.ndim - trailing
    order = sorted(range(lead), key=x.stride, reverse=True)
    mask = mask.reshape(x.shape[:lead]).permute(order).reshape(-1)
    return x.permute(*order, *range(lead, x.ndim)).reshape(len(mask), *x.shape[lead:]), mask


def second_moment(x: Tensor, ones: bool | Tensor = False) -> Tensor:
    """Σ x̄ x̄ᵀ [d d] over all rows of x [*k n r i]; x̄ = (x, 1) with ``ones``, or (x, u_n) where they are u [n].

    Symmetric up to rounding. Half precision is summed in float32.

    >>> second_moment(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), ones=True)
    tensor([[10., 14.,  4.],
            [14., 20.,  6.],
            [ 4.,  6.,  2.]])
    """
    if ones is False:
        return symmetric_product(rows(x))
    i = x.shape[-1]
    if ones is True and i and x.device.type == "cuda":
        return affine_product(rows(x))
    wide = single(x)
    out = wide.new_empty(i + 1, i + 1)
    inner = out[:i, :i]
    inner.copy_(symmetric_product(rows(x))) if x.device.type == "cuda" else _symmetric_on_cpu(rows(wide), inner)
    if isinstance(ones, bool):
        return put_border(out, rows(wide).sum(0), x.shape[:-1].numel())
    u = ones.to(wide.dtype)
    return put_border(out, torch.einsum("n,...nri->i", u, wide), x.shape[-2] * u.square().sum())


def counted_moment(x: Tensor, ones: bool, counted: Tensor) -> tuple[Tensor, Tensor]:
    """``second_moment`` of x [n r i] over the rows with ``counted`` [n r], and their number [1].

    The other rows may hold anything.

    >>> counted_moment(torch.tensor([[[2.0], [torch.nan]]]), True, torch.tensor([[True, False]]))
    (tensor([[4., 2.],
            [2., 1.]]), tensor([1]))
    """
    if x.device.type == "cuda" and x.shape[2]:
        return counted_product(x, ones, counted)
    total, count = second_moment(x.where(counted.unsqueeze(-1), 0), ones), counted.sum().view(1)
    if ones:
        total[-1, -1:] = count
    return total, count


def counted_product(x: Tensor, ones: bool, counted: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a GPU: rows are masked, rounded and put beside their ones in one pass.

    The ones of rows that do not count are zero, so that the product of this column with itself is the count.
    """
    i = x.shape[2]
    with_ones = ones and x.numel() <= _COPIED
    flat, mask = rows_and_mask(x, counted)
    copy = keep_rows(flat, mask, multiplied(x, x.numel() * i), aligned_size(i + 1) if with_ones else i)
    if with_ones:
        total = _product_with_ones(copy, i)
        return total, total[-1, -1:]
    count = counted.sum().view(1)
    return (_bordered_product(copy, count.view(())) if ones else _symmetric_on_gpu(copy)), count


def accumulate_second_moment(out: Tensor, x: Tensor, ones: bool, *, keep: float, weight: float) -> None:
    """out ← keep·out + weight·Σ x̄ x̄ᵀ, in place, for ``second_moment``: on a processor no product is formed beside it.

    >>> average = torch.eye(2)
    >>> accumulate_second_moment(average, torch.tensor([[[1.0], [3.0]]]), ones=True, keep=0.5, weight=0.25)
    >>> average
    tensor([[3., 1.],
            [1., 1.]])
    """
    if x.device.type == "cuda" or x.dtype != out.dtype:
        out.mul_(keep).add_(second_moment(x, ones), alpha=weight)
        return
    flat = rows(x)
    m, i = flat.shape
    _by_halves(_off_pages(flat), out[:i, :i], keep, weight)
    if ones:
        border = out[i]
        border[:i].mul_(keep).add_(flat.sum(0), alpha=weight)
        border[i:].mul_(keep).add_(weight * m)
        out[:i, i] = border[:i]


def symmetric_product(x: Tensor) -> Tensor:
    """xᵀx [*b d d] of x [*b m d]: both Kronecker factors are made of it.

    Symmetric to the last bit, on a GPU up to rounding. Half precision is summed in float32. On a GPU float32 may be
    multiplied in bfloat16.

    >>> symmetric_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.],
            [14., 20.]])
    """
    x = rounded(x, x.numel() * x.shape[-1])
    if x.device.type == "cuda":
        return _symmetric_on_gpu(x)
    out = x.new_empty(*x.shape[:-2], x.shape[-1], x.shape[-1])
    return _symmetric_on_cpu(x, out)


def _symmetric_on_cpu(x: Tensor, out: Tensor) -> Tensor:
    """xᵀx of x [*b m d] into ``out``. No torch function reaches BLAS' syrk: one triangle is computed by halves."""
    m, d = x.shape[-2:]
    if d <= _LEAF or m * d * d < _LITTLE:
        square = x.mT @ x
        return torch.add(square, square.mT, out=out).mul_(0.5)  # see ``_symmetrised``
    for one, into in zip(x.reshape(-1, m, d), out.unsqueeze(0).flatten(0, -3), strict=True):
        _by_halves(_off_pages(one), into, 0.0, 1.0, exact=True)
    return out


def _off_pages(x: Tensor) -> Tensor:
    """x [m d], copied where its rows are whole pages apart: they would share the same few lines of a cache."""
    m, d = x.shape
    if d <= _LEAF or x.stride(0) * x.element_size() % _PAGE:
        return x
    return x.new_empty(m, d + _ALIGNED)[:, :d].copy_(x)


def _by_halves(x: Tensor, out: Tensor, keep: float, weight: float, *, exact: bool = False) -> None:
    """out ← keep·out + weight·xᵀx for x [m d]: the two squares on the diagonal, and one of the two rectangles.

    Symmetric up to rounding, or to the last bit where it is ``exact``.
    """
    d = x.shape[1]
    if d <= _LEAF:
        out.addmm_(x.T, x, beta=keep, alpha=weight)
        if exact:
            out.copy_(_symmetrised(out))
        return
    half = -(-d // 32) * 16
    left, right = x[:, :half], x[:, half:]
    _by_halves(left, out[:half, :half], keep, weight, exact=exact)
    _by_halves(right, out[half:, half:], keep, weight, exact=exact)
    out[:half, half:].addmm_(left.T, right, beta=keep, alpha=weight)
    out[half:, :half] = out[:half, half:].T


def _symmetric_on_gpu(x: Tensor) -> Tensor:
    """Launches to symmetrise would show; what inverts it reads one triangle, or symmetrises."""
    d, wider = x.shape[-1], summed(x.dtype)
    if x.ndim == 2:
        return panel_product(x, aligned_square(x, d))
    if x.dtype == wider:
        return x.mT @ x
    stack = x.flatten(0, -3)
    return torch.bmm(stack.mT, stack, out_dtype=wider).unflatten(0, x.shape[:-2])


def panel_product(x: Tensor, out: Tensor) -> Tensor:
    """xᵀx of x [m d] into ``out`` [d d], for a GPU: of wide matrices, three panels from their diagonals on, mirrored.

    In half precision products are so fast that to mirror them would take longer.

    >>> panel_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(2, 2))
    tensor([[10., 14.],
            [14., 20.]])
    """
    m, d = x.shape
    if d < _WIDE or m * d**2 < _PANEL_WORK or x.dtype != out.dtype:
        multiply(x.T, x, out)
        return out
    width = -(-d // (3 * _TILE)) * _TILE
    for start in range(0, d, width):
        stop = min(start + width, d)
        multiply(x[:, start:stop].T, x[:, start:], out[start:stop, start:])
        if stop < d:
            out[stop:, start:stop].copy_(out[start:stop, stop:].T)
    return out


def add_gram_(out: Tensor, x: Tensor) -> None:
    """out ← out + x xᵀ [m m] of x [m p], of which only the blocks on and below the diagonal are right: see ``mirror_``.

    No torch function reaches syrk of BLAS. With eight panels of rows nine sixteenths of the products are formed.

    >>> out, x = torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> add_gram_(out, x)
    >>> mirror_(out)
    tensor([[ 5., 11.],
            [11., 25.]])
    """
    for panel in _panels(len(x)):
        out[panel, : panel.stop].addmm_(x[panel], x[: panel.stop].T)


def mirror_(out: Tensor) -> Tensor:
    """The blocks above the diagonal from those below it."""
    for panel in _panels(len(out)):
        out[: panel.start, panel] = out[panel, : panel.start].T
    return out


def _panels(m: int) -> list[slice]:
    """Up to eight, of as many rows as a product is worth its launch for."""
    step = max(_PANEL_ROWS, -(-m // (8 * _TILE)) * _TILE)
    return [slice(start, min(start + step, m)) for start in range(0, m, step)]


def affine_product(x: Tensor) -> Tensor:
    """Σ x̄ x̄ᵀ [i+1 i+1] of x [m i] with x̄ = (x, 1): one product of a copy or, where x is large, a product and a sum."""
    m, i = x.shape
    x = rounded(x, m * i**2)
    if x.numel() > _COPIED:
        return _bordered_product(x, m)
    return _product_with_ones(torch.cat([x, one_like(x).expand(m, aligned_size(i + 1) - i)], 1), i)


def _product_with_ones(copy: Tensor, i: int) -> Tensor:
    """Σ x̄ x̄ᵀ of a copy of x [m i] with ones beside it, up to whole vectors."""
    out = copy.new_empty(copy.shape[1], copy.shape[1], dtype=summed(copy.dtype))
    multiply(copy.T, copy, out)
    return out[: i + 1, : i + 1]


def _bordered_product(x: Tensor, count: int | Tensor) -> Tensor:
    """Σ x̄ x̄ᵀ of x [m i] without a copy, where ``count`` of its rows count and the others are zero."""
    i = x.shape[1]
    out = aligned_square(x, i + 1)
    panel_product(x, out[:i, :i])
    return put_border(out, column_sums(x), count)


_ones: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def one_like(x: Tensor) -> Tensor:
    """1 [1 1] where x lies and in its type, to be read only: one launch less than a new one."""
    key = x.device, x.dtype
    if key in _ones:
        return _ones[key]
    one = x.new_ones(1, 1)
    # A capture would fill it only when it is replayed, and a fake tensor has no value.
    if type(one) is Tensor and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        _ones[key] = one
    return one


def aligned_rows(x: Tensor, width: int, ones: int, count: int) -> Tensor:
    """Memory for ``width`` rows of ``count`` numbers, with ``ones`` rows of ones below them, and zeros to the right."""
    out = x.new_empty(width + ones, aligned_size(count))
    if ones:
        out[width:].fill_(1.0)
    if out.shape[1] > count:
        out[:, count:].zero_()
    return out


def aligned_square(x: Tensor, size: int) -> Tensor:
    """Memory for a matrix of this size, sums of products of x, whose rows start at multiples of a vector."""
    return x.new_empty(size, aligned_size(size), dtype=summed(x.dtype))[:, :size]


def over_count(total: Tensor, count: Tensor) -> Tensor:
    """total/count, with rows that are as far apart in memory as those of the total."""
    *_, d, width = total.shape
    if total.ndim != 3 or total.stride(2) != 1 or total.stride(1) <= width:
        return total / count
    out = total.new_empty(len(total), d, total.stride(1))[..., :width]
    return torch.div(total, count, out=out)


def aligned_size(size: int) -> int:
    """Rounded up to whole vectors."""
    return -(-size // _ALIGNED) * _ALIGNED


def put_border(out: Tensor, sums: Tensor, count: int | Tensor) -> Tensor:
    """The last row and column of Σ x̄ x̄ᵀ [*c i+1 i+1], the rest of which is there, from Σ x [*c i] and Σ 1.

    >>> put_border(torch.zeros(3, 3), torch.tensor([4.0, 6.0]), 2)
    tensor([[0., 0., 4.],
            [0., 0., 6.],
            [4., 6., 2.]])
    """
    out[..., :-1, -1].copy_(sums)
    out[..., -1, :-1].copy_(sums)
    corner = out[..., -1, -1]
    corner.copy_(count) if isinstance(count, Tensor) else corner.fill_(count)
    return out


def image_moment(x: Tensor, groups: int = 1) -> Tensor:
    """Σ_{n,r} x xᵀ [c d d] of images x [n (c d) *spatial]: S of a convolution, before its division by n.

    Channels-last images are read where they lie.

    >>> image_moment(torch.ones(2, 3, 4, 4)).unique()
    tensor([32.])
    """
    pixels = x.shape[2:].numel()
    if channels_last(x):
        flat = x.movedim(1, -1).flatten(0, -2)  # a view [(n r) (c d)]
    elif pixels == 1:
        flat = x.flatten(1)
    elif 4 * x.shape[1] <= pixels * groups:  # one small product an image costs less than to bring them together
        images = single(x).flatten(2).unflatten(1, (groups, -1))
        return _symmetrised((images @ images.mT).sum(0))
    else:
        flat = x.transpose(0, 1).flatten(1).mT  # a copy of whole images, which is cheaper than one of single pixels
    return symmetric_product(flat.unflatten(-1, (groups, -1)).transpose(0, 1))


def entry_moments(x: Tensor, ones: bool | Tensor = False) -> tuple[Tensor, Tensor | None]:
    """Σ x² [c] and, with ``ones``, Σ x [c] over all but the last axis of x [*k n r c]; Σ u_n x_n where ones are u [n].

    >>> entry_moments(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), ones=True)
    (tensor([10., 20.]), tensor([4., 6.]))
    """
    axes = tuple(range(x.ndim - 1))
    at_once = x.device.type == "cuda" and x.stride(-1) == 1
    squares, sums = column_moments(rows(x)) if at_once else (x.square().sum(axes), None)
    if isinstance(ones, Tensor):
        return squares, torch.einsum("n,...nrc->c", ones.to(x.dtype), x)
    if not ones:
        return squares, None
    return squares, x.sum(axes) if sums is None else sums


def column_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_m x² and Σ_m x, both [d], of x [m d].

    On a GPU in one pass: the backward pass of a batch normalisation sums g and g (x − μ), here with g = x and μ = 0. It
    cannot count very many.

    >>> column_moments(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    (tensor([10., 20.]), tensor([4., 6.]))
    """
    if x.device.type != "cuda":
        return x.square().sum(0), x.sum(0)
    if not 0 < x.numel() < _COUNTED:
        return torch.linalg.vector_norm(x, dim=0).square(), x.sum(0)
    zeros = x.new_zeros(x.shape[1])
    sums, squares, *_ = torch.batch_norm_backward_reduce(x, x, zeros, zeros, None, True, False, False)
    return squares, sums


def column_sums(x: Tensor) -> Tensor:
    """Σ_m x [d] of x [m d], in single precision at least; a GPU multiplies faster than it sums columns.

    >>> column_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([4., 6.])
    """
    if x.device.type != "cuda":
        return single(x).sum(0)
    ones = x.new_ones(1, x.shape[0])
    if x.dtype == summed(x.dtype):
        return torch.mv(x.mT, ones.squeeze(0))
    sums = x.new_empty(1, x.shape[1], dtype=summed(x.dtype))
    multiply(ones, x, sums)
    return sums.squeeze(0)


def mean_and_variance(x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance over some axes; torch's fused function is slow on a processor.

    >>> mean_and_variance(torch.tensor([[1.0, 3.0]]), [1])
    (tensor([2.]), tensor([1.]))
    """
    if not axes:
        return x, torch.zeros_like(x)
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(x, axes, correction=0)
        return mean, variance
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square_().mean(axes)
    return mean.view_as(variance), variance


def channels_last(x: Tensor) -> bool:
    """Whether x [n ch *spatial] lies in memory as [n *spatial ch], and not as it is written."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _symmetrised(square: Tensor) -> Tensor:
    """BLAS may sum (i, j) and (j, i) in different orders; addition commutes, so this is symmetric exactly."""
    return (square + square.mT).mul_(0.5)


# Which rows have anything in them.


def nonzero_rows(x: Tensor) -> Tensor | None:
    """Where x [k n r d] is not all zero in k and d, [n r]; None where a look shows that it is so nowhere.

    A GPU is not looked at. On a processor one number of every row is, which is enough for the cotangents of most
    layers.

    >>> nonzero_rows(torch.tensor([[[[0.0, 2.0], [0.0, 0.0]]]]))
    tensor([[ True, False]])
    """
    if not can_read(x):
        return x.any((0, -1))  # one launch
    if x.numel() and bool(x[0, ..., 0].all()):
        return None
    there = ((x.amax(-1) != 0) | (x.amin(-1) != 0)).any(0)
    return None if bool(there.all()) else there


def marked_moment(x: Tensor, nonzero: Tensor) -> Tensor:
    """``second_moment`` of x [1 n r d]; ``nonzero`` [n r] is set to where a row is not all zero.

    >>> nonzero = torch.empty(1, 2, dtype=torch.bool)
    >>> marked_moment(torch.tensor([[[[0.0, 2.0], [0.0, 0.0]]]]), nonzero)
    tensor([[0., 0.],
            [0., 4.]])
    >>> nonzero
    tensor([[ True, False]])
    """
    if not (x.is_contiguous() and nonzero.is_contiguous()):
        torch.any(x[0], -1, out=nonzero)
        return second_moment(x)
    flat = x.view(x.shape[:-1].numel(), x.shape[-1])
    return symmetric_product(round_rows(flat, multiplied(x, x.numel() * x.shape[-1]), nonzero.view(-1)))


_WAITING = 2**22  # bytes that wait to be averaged together on a GPU, at least: a launch of few takes as long as of many
_SHARE = 8  # or this part of all factors
_LAUNCH = 320 * 2**16  # numbers that torch's fused kernels take in one launch
_LINE = 16  # numbers of a cache line
_NARROW = 128  # columns, up to which it does not matter where rows begin
_VECTOR = 4  # numbers that they read at once, where a tensor starts at such a multiple


@final
class PendingAverages:
    """Ā ← (1 − w) Ā + w total/count of factors that arrive one by one (Martens and Grosse 2015, section 5).

    They wait for others, and all leave their averages alone where one is not finite.

    >>> average = torch.ones(1, 1, 1)
    >>> averages = PendingAverages([average])
    >>> averages.add(average, torch.full((1, 1, 1), 6.0), count=2, weight=0.5)
    >>> averages.flush()
    >>> average.item()
    2.0
    """

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._most = max(_WAITING, sum(factor.nbytes for factor in factors) // _SHARE)
        self._waiting: list[Pending] = []
        self._bytes = 0

    def add(self, factor: Tensor, total: Tensor, *, count: int | Tensor, weight: float | Tensor) -> None:
        """Average a factor [c d d], or a diagonal [c d], now or at the next ``flush``.

        Where the count is a tensor [], of single precision and above zero, the total is overwritten.
        """
        assert factor.shape == total.shape
        count = count if isinstance(count, Tensor) else max(count, 1)
        self._waiting.append(Pending.of(factor, total, weight, count))
        self._bytes += total.numel() * total.element_size()
        if self._bytes > self._most:
            self.flush()

    def flush(self) -> None:
        """Average all that waits."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            average_together(waiting)


def lay_out(factor: Tensor) -> Tensor:
    """A factor with rows that start at whole vectors, as moments write them; itself where it is so.

    On a processor rows are also not whole pages apart, where they would share the same few lines of a cache.
    """
    if factor.ndim != 3 or factor.shape[0] != 1:
        return factor.contiguous()
    if factor.device.type == "cuda" and not factor.is_contiguous():
        return factor if _padded(factor) else factor.contiguous()
    d = factor.shape[1]
    width = _row_length(factor, d)
    if factor.stride()[1:] == (width, 1):
        return factor
    return factor.new_zeros(1, d, width)[..., :d].copy_(factor)


def gram(x: Tensor, count: int) -> Tensor:
    """x xᵀ/count [b d d] of matrices [b d n], with the rows that ``lay_out`` gives to factors.

    >>> gram(torch.ones(1, 2, 3), 6)
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]])
    """
    b, d, _ = x.shape
    out = x.new_empty(b, d, _row_length(x, d))[..., :d]
    return out.baddbmm_(x, x.mT, beta=0, alpha=1 / count)


def _row_length(like: Tensor, d: int) -> int:
    return aligned_size(d) if like.device.type == "cuda" else _cache_line_size(d, like.element_size())


def _cache_line_size(d: int, size: int) -> int:
    """The distance of the rows of a matrix with d columns, of numbers of ``size`` bytes, on a processor."""
    width = -(-d // _LINE) * _LINE if d > _NARROW else d
    return width + _LINE * (width * size % _PAGE == 0)


@final
@dataclass(frozen=True)
class Pending:
    """A factor and a total that goes into it, both as numbers in a row, and numbers that show whether it is finite."""

    factor: Tensor
    total: Tensor
    diagonal: Tensor | None  # None where the whole total is looked at
    weight: float | Tensor
    count: int | Tensor

    @property
    def scale(self) -> tuple[int, int]:
        """Weight and count: averages that have the same ones are computed at once."""
        return id(self.weight), id(self.count) if isinstance(self.count, Tensor) else self.count

    @staticmethod
    def of(factor: Tensor, total: Tensor, weight: float | Tensor, count: int | Tensor) -> Pending:
        """In the memory of the factor; what lies between the rows of a matrix may be anything."""
        if not _padded(factor):
            on_diagonal = total.diagonal(dim1=-2, dim2=-1) if total.ndim == 3 else None
            return Pending(factor.view(-1), total.contiguous().view(-1), on_diagonal, weight, count)
        if total.stride()[1:] != factor.stride()[1:]:
            like = torch.empty_strided(factor.shape, factor.stride(), dtype=total.dtype, device=total.device)
            total = like.copy_(total)
        length = (factor.shape[1] - 1) * factor.stride(1) + factor.shape[2]
        row = total.as_strided((length,), (1,))
        return Pending(factor.as_strided((length,), (1,)), row, total.diagonal(dim1=-2, dim2=-1), weight, count)


def average_together(pending: Sequence[Pending]) -> None:
    """(1 − w) x + w y/count of all of them in few launches; nothing, if one of the y is not finite."""
    gate = _not_finite(pending)
    for scale in dict.fromkeys(one.scale for one in pending):
        alike = [one for one in pending if one.scale == scale]
        for launch in _launches(alike):
            factors, totals = zip(*launch, strict=True)
            fused.average_(factors, totals, alike[0].weight, count=alike[0].count, gate=gate)


def _launches(pending: Sequence[Pending], most: int = _LAUNCH) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Factors and totals that are averaged at once: a large one in equal parts, as a small rest would take as long.

    >>> x = torch.zeros(22)
    >>> [[len(part) for part, _ in launch] for launch in _launches([Pending(x, x, None, 1.0, 1)], most=16)]
    [[12], [10]]
    """
    small = [(one.factor, one.total) for one in pending if len(one.factor) <= most]
    if small:
        yield small
    for one in pending:
        if len(one.factor) > most:
            size = _divided(_divided(len(one.factor), _divided(len(one.factor), most)), _VECTOR) * _VECTOR
            yield from ([pair] for pair in zip(one.factor.split(size), one.total.split(size), strict=True))


def _divided(count: int, by: int) -> int:
    """Rounded up."""
    return -(-count // by)


def _padded(factor: Tensor) -> bool:
    """Whether a matrix [1 d d] has rows that are longer in memory."""
    return factor.ndim == 3 and factor.shape[0] == 1 and not factor.is_contiguous() and factor.stride(2) == 1


def _not_finite(pending: Sequence[Pending]) -> Tensor:
    """1 where one of the totals is not finite, on the device: second moments are finite where their diagonals are."""
    whole = [one.total for one in pending if one.diagonal is None]
    diagonals = [one.diagonal.flatten() for one in pending if one.diagonal is not None]
    return fused.nonfinite([*whole, torch.cat(diagonals)] if diagonals else whole)
