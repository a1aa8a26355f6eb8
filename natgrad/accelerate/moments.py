"""Second moments: the products of a tall matrix with itself that every Kronecker factor is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

# Weights and biases side by side, the bias last: W̄ = [W b] (004 (26); ERRATA 51), for every group c by itself.


def matrices_shape(module: nn.Module, keys: Sequence[str], c: int = 1) -> tuple[int, int, int]:
    """(c, o, i) of weights [c·o *fan] and biases [c·o], side by side along i."""
    shapes = [module.get_parameter(key).shape for key in keys]
    return c, shapes[0][0] // c, sum(math.prod(shape[1:]) for shape in shapes)


def matrices(block: Mapping[str, Tensor], c: int = 1) -> dict[str, Tensor]:
    """Every weight [c·o *fan] and bias [c·o] as a matrix [c o fan] of its own."""
    return {key: t.reshape(c, t.shape[0] // c, -1) for key, t in block.items()}


def pack_matrices(block: Mapping[str, Tensor], c: int = 1) -> Tensor:
    """W [c o i] from weights [c·o *fan] and biases [c·o], in the order given."""
    parts = list(matrices(block, c).values())
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack_matrices(module: nn.Module, keys: Sequence[str], packed: Tensor) -> dict[str, Tensor]:
    """The inverse of ``pack_matrices``; leading axes before [c o i] are kept."""
    shapes = [module.get_parameter(key).shape for key in keys]
    parts = packed.split([math.prod(shape[1:]) for shape in shapes], dim=-1)
    lead = packed.shape[:-3]
    return {key: part.reshape(*lead, *shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def homogeneous(x: Tensor, weight: bool, bias: bool) -> Tensor:
    """ā = (x, 1), along the last axis, as far as weight and bias are trained."""
    if not weight:
        return x.new_ones(*x.shape[:-1], 1)
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1) if bias else x


def bordered(total: Tensor, sums: Tensor, count: int | Tensor) -> Tensor:
    """Σ ā āᵀ [c i+1 i+1] from Σ a aᵀ [c i i], Σ a [c i] and the number of terms."""
    c, i, _ = total.shape
    out = total.new_empty(c, i + 1, i + 1)
    out[:, :i, :i] = total
    return put_border(out, sums, count)


def put_border(out: Tensor, sums: Tensor, count: int | Tensor) -> Tensor:
    """The last row and column of Σ ā āᵀ [*c i+1 i+1], the rest of which is there, from Σ a [*c i]; nothing waits.

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


# The precisions of second moments: the one in which numbers are multiplied, and the one in which they are summed.
#
# The product of two numbers in half precision is exact in single precision, and is summed in it: tensor cores are given
# what a network computed in half precision as it is. Numbers in single precision are multiplied as such (in
# tf32 or not,
# as torch was told), unless ``torch.set_float32_matmul_precision("medium")`` allows bfloat16: torch makes no use of
# that on a GPU, the moments here do, where there is so much to multiply that it pays to round. A moment is a
# mean over a
# batch, with more noise than the rounding of its terms.


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
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
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
    return matmul.fp32_precision, matmul.allow_fp16_accumulation, bfloat16_allowed()


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


# Leading axes of a layer that are all alike.


def rows(x: Tensor, trailing: int = 1) -> Tensor:
    """x [* *rest] as [m *rest], for sums over all rows: in the order that they have in memory, so without a copy.

    A layer whose examples are on another axis than the first is seen through a view that has them there.

    >>> import torch
    >>> x = torch.arange(6.0).view(3, 2, 1)
    >>> rows(x.transpose(0, 1)).flatten()
    tensor([0., 1., 2., 3., 4., 5.])
    """
    lead = x.ndim - trailing
    if lead > 1 and not x.is_contiguous():
        order = sorted(range(lead), key=x.stride, reverse=True)
        x = x.permute(*order, *range(lead, x.ndim))
    return x.reshape(-1, *x.shape[lead:])


_WIDE = 1024  # columns, from which a product on a GPU is worth its panels
_PANEL_WORK = 2**33  # products of numbers, likewise
_TILE = 128  # columns that a GPU multiplies as one
_PAGE = 4096  # bytes
_ROW = 16  # numbers
_WHOLE = 128  # columns, up to which there is nothing to gain from one triangle, or from where rows begin
_LITTLE = 2**24  # products of numbers, likewise
_COUNTED = 2**31  # numbers, from which some kernels of torch lose count
_BLOCK = 256  # rows of xᵀx that a processor makes at a time
_PANEL = 96  # of those at its diagonal


def symmetric_product(x: Tensor) -> Tensor:
    """xᵀx [*b d d] of x [*b m d]. Both factors of 004 (37) are made of it.

    Symmetric to the last bit, but on a GPU up to rounding. Half precision is summed in float32: squares and long sums
    leave its range and its precision. On a GPU float32 may be multiplied in bfloat16 (``natgrad.accelerate.moments``).

    >>> symmetric_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.],
            [14., 20.]])
    """
    x = rounded(x, x.numel() * x.shape[-1])
    return _on_gpu(x) if x.device.type == "cuda" else _on_cpu(x, _room(x, x.shape[-1]))


def affine_moment(x: Tensor) -> Tensor:
    """Σ x̄ x̄ᵀ [i+1 i+1] of x [m i] with x̄ = (x, 1), for a processor: the product is written where it belongs.

    >>> affine_moment(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.,  4.],
            [14., 20.,  6.],
            [ 4.,  6.,  2.]])
    """
    x = single(x)
    m, i = x.shape
    out = _room(x, i + 1)
    _on_cpu(x, out[:i, :i])
    return put_border(out, x.sum(0), m)


def absorb_product(x: Tensor, average: Tensor, keep: float, weight: float) -> None:
    """keep·Ā + weight·xᵀx in place of Ā [d d], for x [m d], on a processor: no product is formed beside it.

    No torch function reaches BLAS' syrk: blocks of rows are made one by one, each from its diagonal on, the part at the
    diagonal in panels likewise, and mirrored. Symmetric up to rounding.

    >>> average = torch.ones(2, 2)
    >>> absorb_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), average, 0.0, 0.5)
    >>> average
    tensor([[ 5.,  7.],
            [ 7., 10.]])
    """
    m, d = x.shape
    if _little(m, d):
        average.addmm_(x.T, x, beta=keep, alpha=weight)
        return
    if x.stride(0) * x.element_size() % _PAGE == 0:
        x = x.new_empty(m, d + _ROW)[:, :d].copy_(x)  # see ``_distance``: here it is worth a copy
    for start in range(0, d, _BLOCK):
        stop = min(start + _BLOCK, d)
        rows, own = average[start:stop], x[:, start:stop]
        rows[:, stop:].addmm_(own.T, x[:, stop:], beta=keep, alpha=weight)
        rows[:, :start] = average[:start, start:stop].T  # rows are written, which pages like
        _absorb_panels(own, rows[:, start:stop], keep, weight)


def _absorb_panels(x: Tensor, average: Tensor, keep: float, weight: float) -> None:
    """The same for few columns, whose panels are too small for products at full speed."""
    for start in range(0, x.shape[1], _PANEL):
        rows, own = average[start : start + _PANEL], x[:, start : start + _PANEL]
        rows[:, start:].addmm_(own.T, x[:, start:], beta=keep, alpha=weight)
        if start:
            rows[:, :start] = average[:start, start : start + _PANEL].T


def spaced(factor: Tensor) -> Tensor:
    """A matrix [*b d d] for a processor to add products to, with rows as far apart as theirs; itself where it is so.

    >>> spaced(torch.zeros(1, 1024, 1024)).stride()
    (1064960, 1040, 1)
    """
    d = factor.shape[-1]
    if factor.stride()[-2:] == (_distance(d, factor.element_size()), 1):
        return factor
    return _room(factor, d).copy_(factor)


def _room(x: Tensor, d: int) -> Tensor:
    """For products [*b d d] of x [*b m i] with itself."""
    return x.new_empty(*x.shape[:-2], d, _distance(d, x.element_size()))[..., :d]


def _distance(d: int, size: int) -> int:
    """Of the rows of products [d d] of numbers of ``size`` bytes.

    Those of large ones begin at whole vectors, and not whole pages apart, where they would meet in the same few lines
    of a cache.
    """
    wide = -(-d // _ROW) * _ROW if d > _WHOLE else d
    return wide + _ROW * (wide > 0 and wide * size % _PAGE == 0)


def _little(m: int, d: int) -> bool:
    return d <= _WHOLE or m * d * d < _LITTLE


def _on_cpu(x: Tensor, out: Tensor) -> Tensor:
    """xᵀx into ``out``."""
    m, d = x.shape[-2:]
    if _little(m, d):
        square = x.mT @ x
        return torch.add(square, square.mT, out=out).mul_(0.5)  # see ``_symmetrised``
    for one, into in zip(x.reshape(-1, m, d), out.unsqueeze(0).flatten(0, -3), strict=True):
        absorb_product(one, into, 0.0, 1.0)
    for block in range(0, d, _BLOCK):
        for start in range(block, min(block + _BLOCK, d), _PANEL):
            stop = min(start + _PANEL, block + _BLOCK)
            corner = out[..., start:stop, start:stop]
            corner.copy_(_symmetrised(corner))
    return out


def _on_gpu(x: Tensor) -> Tensor:
    """Launches to symmetrise would show; what inverts it reads one triangle, or symmetrises."""
    d, wider = x.shape[-1], summed(x.dtype)
    if x.ndim == 2:
        return panel_product(x, x.new_empty(d, d, dtype=wider))
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


def output_moment(g: Tensor, groups: int = 1) -> Tensor:
    """S [c o o] = Σ_{k,n,r} g gᵀ of cotangents g [k n (c o) *spatial], with a channel axis and none after it or more.

    The second factor of 003 (4.5), before its division by n. Channels-last cotangents are read where they lie.

    >>> output_moment(torch.ones(1, 2, 3, 4, 4)).unique()
    tensor([32.])
    """
    flat = g.flatten(0, 1)  # [(k n) (c o) *spatial]
    pixels = flat.shape[2:].numel()
    if channels_last(flat):
        rows = flat.movedim(1, -1).flatten(0, -2)  # a view [(k n r) (c o)]
    elif pixels == 1:
        rows = flat.flatten(1)
    elif 4 * flat.shape[1] <= pixels * groups:  # one small product an image costs less than to bring them together
        images = single(flat).flatten(2).unflatten(1, (groups, -1))
        return _symmetrised((images @ images.mT).sum(0))
    else:
        rows = flat.transpose(0, 1).flatten(1).mT  # a copy of whole images, which is cheaper than one of single pixels
    return symmetric_product(rows.unflatten(-1, (groups, -1)).transpose(0, 1))


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


def column_squares(x: Tensor) -> Tensor:
    """Σ_m x² [d] of x [m d]; on a GPU in one pass.

    >>> column_squares(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([10., 20.])
    """
    return column_moments(x)[0] if x.device.type == "cuda" else x.square().sum(0)


def column_sums(x: Tensor) -> Tensor:
    """Σ_m x [d] of x [m d], in single precision at least; a GPU has a faster way than its sums of columns.

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


def channels_last(x: Tensor) -> bool:
    """Whether x [n ch *spatial] lies in memory as [n *spatial ch], and not as it is written."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _symmetrised(square: Tensor) -> Tensor:
    """BLAS may sum (i, j) and (j, i) in different orders; addition commutes, so this is symmetric exactly."""
    return (square + square.mT).mul_(0.5)
