"""Damped inverses (F + shift)⁻ᵖ of many symmetric factors: in place, batched by size, refreshed, retried in double.

A Kronecker-factored metric has two symmetric factors for every layer, which change slowly and are inverted every few
steps. ``BatchedInverse`` keeps the inverses in fixed memory and computes them again in place. Matrices of one size are
inverted as one batch. On a GPU small ones are replayed from a captured graph, and the host reads later whether one of
them failed. Powers p < 1 are made by ``natgrad.accelerate.roots``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import in_transform, is_asynchronous
from natgrad.accelerate.fused import to_host_async
from natgrad.accelerate.replay import GraphCache, Scalar
from natgrad.accelerate.roots import (
    NOISE,
    STACKS,
    by_eigenvalues,
    inverse_powers,
    suited_precision,
)
from natgrad.errors import FactorisationError, SingularMetricError

SymFactor: TypeAlias = Tensor  # symmetric matrices [c d d], or only their diagonals [c d]

_ALIGNED = 8  # numbers; a GPU multiplies rows of whole vectors faster
_BATCHED = 768, 256  # rows, on a GPU and on a CPU, above which single matrices are as fast and take less memory
_BATCH_BYTES = 2**24, 2**22  # of matrices that are inverted at once
_LAYER_BYTES = 2**26, 2**22  # of layers that are solved at once: products of one layer leave a GPU half idle
_LARGE = 1024  # rows, from which products are faster on a GPU than the many small kernels of a triangular solve
_CAPTURED = 2048  # rows, from which the kernels take longer than their launches, and a graph would hold much memory
_ROOTS_BATCHED = 2048  # rows, as above, for roots by products on a GPU, which one matrix leaves half idle
_ROOTS_BYTES = 2**28
_ROOT_ERROR = 0.1  # the largest residual of a root that is used
_NOT_POSITIVE = (
    "{} is not positive after damping, in double precision neither: raise the damping, or use a larger batch"
)


# Symmetric factors.


def is_dense(factor: SymFactor) -> bool:
    """Whether the factor is a matrix, and not only a diagonal."""
    return factor.ndim == 3


def diagonal(factor: SymFactor) -> Tensor:
    """[c d]."""
    return factor.diagonal(dim1=-2, dim2=-1) if is_dense(factor) else factor


def mean_eigenvalues(factors: Sequence[SymFactor]) -> Tensor:
    """[f]: the mean eigenvalue of every factor, over all of its groups; of diagonals, which are not negative, at once.

    >>> mean_eigenvalues([torch.tensor([[1.0, 3.0]]), torch.eye(2)[None]])
    tensor([2., 1.])
    """
    flat = [factor for factor in factors if not is_dense(factor)]
    sums = iter(torch._foreach_div(torch._foreach_norm(flat, 1), [float(t.numel()) for t in flat]) if flat else ())
    return torch.stack([diagonal(factor).mean() if is_dense(factor) else next(sums) for factor in factors])


def relative_shifts(epsilon: Scalar, means: Tensor) -> Tensor:
    """ε·mean, and 0 where that is below the smallest normal number: what is so small has no inverse, as zero has none.

    >>> relative_shifts(0.5, torch.tensor([2.0, 1e-40]))
    tensor([1., 0.])
    """
    shifts = epsilon * means
    return torch.threshold(shifts, torch.finfo(shifts.dtype).tiny, 0.0)  # NaN stays


def balance(a: Sequence[SymFactor], s: Sequence[SymFactor]) -> Tensor:
    """π = √((tr A/dim A)/(tr S/dim S)) [Σc] of every group of every layer; 1 where a factor is zero."""
    means = [torch.cat([diagonal(factor).mean(-1) for factor in side]) for side in (a, s)]
    ratio = means[0] / means[1]
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0).sqrt()


def aligned(factor: SymFactor) -> SymFactor:
    """On a GPU a matrix padded with zeros to whole vectors; else the factor itself."""
    missing = -factor.shape[-1] % _ALIGNED
    if not is_dense(factor) or not missing or not is_asynchronous(factor.device):
        return factor
    return torch.nn.functional.pad(factor, (0, missing, 0, missing))


def stacked(factors: Sequence[Tensor]) -> Tensor:
    """[Σc …]; those that lie one after the other in memory, and a single one, are not copied.

    >>> one, other = torch.arange(4.0).view(2, 2).split(1)
    >>> stacked([one, other]).data_ptr() == one.data_ptr()
    True
    """
    if len(factors) == 1:
        return factors[0]
    first = factors[0]
    if not all(follows(one, other) for one, other in pairwise(factors)):
        return torch.cat(list(factors))
    # The first stride of a contiguous tensor [1 …] may be anything.
    strides = first.shape[1:].numel(), *first.stride()[1:]
    return first.as_strided((sum(map(len, factors)), *first.shape[1:]), strides)


def follows(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors [c …] lie one after the other in memory."""
    if in_transform() or one.shape[1:] != other.shape[1:] or not (one.is_contiguous() and other.is_contiguous()):
        return False
    at = one.storage_offset() + one.numel()
    return other.storage_offset() == at and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def two_sided(left: SymFactor | None, w: Tensor, right: SymFactor | None, out: Tensor | None = None) -> Tensor:
    """L W Rᵀ [c o i], for W [c o i]; the factors may be ``aligned``. ``out``: memory for the result, possibly W.

    Where there are fewer factors than groups, consecutive groups share them. None is the identity.

    >>> two_sided(torch.tensor([[2.0]]), torch.ones(2, 1, 1), torch.tensor([[[3.0]]])).flatten()
    tensor([6., 6.])
    """
    o, i = w.shape[-2:]
    padding = (0, 0 if right is None else right.shape[-1] - i, 0, 0 if left is None else left.shape[-1] - o)
    if any(padding):
        w = out = torch.nn.functional.pad(w, padding)
    factors = [len(factor) for factor in (left, right) if factor is not None]
    if w.ndim == 3 and factors and w.shape[0] > factors[0]:
        return _two_sided_shared(left, w, right, factors[0])[..., :o, :i]
    product = torch.bmm if w.ndim == 3 else torch.matmul  # which dispatches several operations for one
    half = w
    if left is not None:
        half = product(left, w) if is_dense(left) else left.unsqueeze(-1) * w
    if right is None:
        w = half if out is None else out.copy_(half)
    elif is_dense(right):
        w = product(half, right.mT, out=out)
    else:
        w = half * right.unsqueeze(-2) if half is w else half.mul_(right.unsqueeze(-2))
    return w[..., :o, :i] if any(padding) else w


def _two_sided_shared(left: SymFactor | None, w: Tensor, right: SymFactor | None, b: int) -> Tensor:
    """L W Rᵀ [b·k o i], for W [b·k o i] and factors [b …]: one product with W [b o k·i], and one with W [b o·k i]."""
    groups, o, i = w.shape
    half = w.unflatten(0, (b, groups // b)).transpose(1, 2).reshape(b, o, -1)
    if left is not None:
        half = torch.bmm(left, half) if is_dense(left) else left.unsqueeze(-1) * half
    whole = half.view(b, -1, i)
    if right is not None:
        whole = torch.bmm(whole, right.mT) if is_dense(right) else whole * right.unsqueeze(-2)
    return whole.view(b, o, -1, i).transpose(1, 2).reshape(groups, o, i)


def two_sided_columns(left: Tensor, columns: Sequence[Tensor], right: Tensor) -> list[Tensor]:
    """L W R for a W [c o i] given by blocks of columns [c o j] (weight, bias), which are not packed.

    Left and right may be ``aligned``. R is symmetric, and read by its rows: tensor cores want both factors contiguous
    along the index that is summed.

    >>> L, W, R = torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 2 * torch.eye(2)[None]
    >>> two_sided_columns(L, W.split(1, -1), R)[1]
    tensor([[[4.],
             [8.]]])
    """
    if not is_asynchronous(left.device):
        # Blocks of R: products of contiguous matrices are faster than packing W, and results are contiguous.
        widths = [column.shape[-1] for column in columns]
        halves = [torch.bmm(left, column) for column in columns]
        out = []
        for blocks in right.split(widths, dim=-1):
            first, *others = blocks.split(widths, dim=-2)
            product = torch.bmm(halves[0], first)
            for half, block in zip(halves[1:], others, strict=True):
                product.baddbmm_(half, block)
            out.append(product)
        return out
    c, o = columns[0].shape[:2]
    half, at = left.new_empty(c, o, right.shape[-1]), 0
    spans = []
    for column in columns:
        spans.append(slice(at, at := at + column.shape[-1]))
        torch.bmm(left[:, :o, :o], column.to(left.dtype), out=half[..., spans[-1]])
    if at < half.shape[-1]:
        half[..., at:].zero_()
    return [torch.bmm(half, right[:, span].mT) for span in spans]


def layers_at_once(device: torch.device, layer_bytes: int) -> int:
    """How many layers of this size are worth being solved in one batch."""
    return max(1, _of_device(_LAYER_BYTES, device) // max(1, layer_bytes))


def batch_by_size(factors: Sequence[Tensor], *, stacks: int = 1, roots: bool = False) -> list[list[int]]:
    """The positions of matrices [c d d] that are worked on at once: of one size, and as many as memory allows.

    ``stacks``: how many stacks are held. ``roots``: they are for roots by products.
    """
    batches: dict[int, list[list[int]]] = defaultdict(list)
    used: dict[int, int] = {}
    for at, factor in enumerate(factors):
        d = factor.shape[-1]
        nbytes = len(factor) * d * d * factor.element_size()
        used[d] = used.get(d, 0) + nbytes
        if not batches[d] or used[d] * stacks > batch_bytes(factor, roots=roots):
            batches[d].append([])
            used[d] = nbytes
        batches[d][-1].append(at)
    return [batch for of_size in batches.values() for batch in of_size]


def batch_bytes(factor: Tensor, *, roots: bool = False) -> int:
    """The bytes of a batch that a matrix may be in; 0 where it is worked on alone."""
    if roots and is_asynchronous(factor.device):
        return 0 if factor.shape[-1] > _ROOTS_BATCHED else _ROOTS_BYTES
    alone = factor.shape[-1] > _of_device(_BATCHED, factor.device)
    return 0 if alone else _of_device(_BATCH_BYTES, factor.device)


def _of_device(constants: tuple[int, int], device: torch.device) -> int:
    return constants[0] if is_asynchronous(device) else constants[1]


# One batch of matrices, by Cholesky.


def inverse(M: Tensor) -> tuple[Tensor, Tensor]:
    """The inverses of positive matrices [b d d] and which succeeded [b]. M is overwritten; a GPU is not waited for.

    At most two stacks are held at a time.

    >>> inverses, good = inverse(torch.tensor([[[2.0, 0.0], [0.0, 4.0]], [[1.0, 2.0], [2.0, 1.0]]]))
    >>> inverses[0].diagonal(), good
    (tensor([0.5000, 0.2500]), tensor([ True, False]))
    """
    if M.shape[-1] == 1:
        return M.reciprocal(), (M > 0).flatten()
    return inverse_by_products(M) if is_asynchronous(M.device) else inverse_by_lapack(M)


def inverse_by_lapack(M: Tensor) -> tuple[Tensor, Tensor]:
    """In the memory of M."""
    lower, info = _cholesky_(M)
    good = info == 0
    if not bool(good.all()):
        M[~good] = torch.eye(M.shape[-1], dtype=M.dtype)  # nothing that the second routine could complain about
    torch.cholesky_inverse(lower, out=lower)
    return M, good


def inverse_by_products(M: Tensor, large: int = _LARGE) -> tuple[Tensor, Tensor]:
    """L⁻ᵀL⁻¹, where L⁻¹ comes from a triangular solve or, for one ``large`` matrix, from products."""
    stack = M[0] if M.shape[0] == 1 else M  # a batch of one would go to slower routines
    lower, info = _cholesky_(stack)
    if stack.ndim == 2 and stack.shape[-1] >= large:
        invert_upper(stack)  # whose rows are the columns of L
        return gram_of_upper(stack).unsqueeze(0), (info == 0).view(-1)
    root = torch.zeros_like(stack)
    root.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    torch.linalg.solve_triangular(lower, root, upper=False, out=root)
    torch.matmul(root.mT, root, out=stack)
    return M, (info == 0).view(-1)


def _cholesky_(M: Tensor) -> tuple[Tensor, Tensor]:
    """L in the memory of M, and whether it failed: LAPACK works on columns, the rows of a symmetric M."""
    columns, info = M.mT, torch.empty(M.shape[:-2], dtype=torch.int32, device=M.device)
    torch.linalg.cholesky_ex(columns, out=(columns, info))
    return columns, info


# Inverses of large triangular matrices by products.


_LEAF = 128  # rows of a triangular solve; larger blocks are multiplied
_PANELS = 4


def invert_upper(U: Tensor, leaf: int = _LEAF) -> None:
    """U⁻¹ in the memory of U [d d], upper triangular with zeros below and with rows that are contiguous.

    [[A, B], [0, C]]⁻¹ = [[A⁻¹, −A⁻¹ B C⁻¹], [0, C⁻¹]]: blocks on the diagonal are inverted and then joined two by two,
    all pairs of one size in one product. This needs few launches, where a solve on a GPU has a thousand. A quarter of U
    is held besides.

    >>> U = torch.tensor([[2.0, 1.0, 0.0], [0.0, 4.0, 2.0], [0.0, 0.0, 1.0]])
    >>> V = U.clone()
    >>> invert_upper(V, leaf=1)
    >>> torch.allclose(U @ V, torch.eye(3))
    True
    """
    d = U.shape[-1]
    sizes = [leaf] * (d // leaf) + ([d % leaf] if d % leaf else [])
    _invert_leaves(U, leaf, d // leaf)
    while len(sizes) > 1:
        alike = next((at for at, size in enumerate(sizes) if size != sizes[0]), len(sizes)) // 2  # pairs of one size
        _join(U, 0, sizes[0], sizes[0], alike)
        start, merged = alike * 2 * sizes[0], [2 * sizes[0]] * alike
        rest = sizes[2 * alike :]
        for at in range(0, len(rest) - 1, 2):
            _join(U, start, rest[at], rest[at + 1], 1)
            merged.append(rest[at] + rest[at + 1])
            start += merged[-1]
        sizes = merged + ([rest[-1]] if len(rest) % 2 else [])


def gram_of_upper(V: Tensor) -> Tensor:
    """V Vᵀ [d d] of an upper triangular V, in panels that leave out most of the zeros.

    >>> gram_of_upper(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[5., 6.],
            [6., 9.]])
    """
    d = V.shape[-1]
    out, width = torch.empty_like(V), -(-d // _PANELS)
    for start in range(0, d, max(1, width)):
        stop = min(start + width, d)
        torch.mm(V[start:stop, start:], V[:stop, start:].T, out=out[start:stop, :stop])
        out[:start, start:stop].copy_(out[start:stop, :start].T)
    return out


def _blocks(U: Tensor, row: int, column: int, shape: tuple[int, int], step: int, count: int) -> Tensor:
    """[count *shape]: blocks of U, each ``step`` rows and columns after the one before."""
    ld = U.stride(0)
    return U.as_strided((count, *shape), (step * (ld + 1), ld, 1), U.storage_offset() + row * ld + column)


def _invert_leaves(U: Tensor, leaf: int, count: int) -> None:
    d, eye = U.shape[-1], torch.eye(leaf, dtype=U.dtype, device=U.device)
    if count:
        leaves = _blocks(U, 0, 0, (leaf, leaf), leaf, count)
        leaves.copy_(torch.linalg.solve_triangular(leaves, eye.expand(count, leaf, leaf), upper=True))
    if d > count * leaf:
        last = U[count * leaf :, count * leaf :]
        last.copy_(torch.linalg.solve_triangular(last, eye[: len(last), : len(last)], upper=True))


def _join(U: Tensor, start: int, a: int, c: int, count: int) -> None:
    """−A⁻¹ B C⁻¹ in place of B, for ``count`` pairs of blocks with a and c rows that follow each other."""
    if not count:
        return
    A = _blocks(U, start, start, (a, a), a + c, count)
    B = _blocks(U, start, start + a, (a, c), a + c, count)
    C = _blocks(U, start + a, start + a, (c, c), a + c, count)
    torch.baddbmm(B, A, torch.bmm(B, C), beta=0, alpha=-1, out=B)


# Many factors.


@final
@dataclass(frozen=True)
class Inversion:
    """(F + shift)⁻ᵖ into ``out``.

    >>> job = Inversion(torch.tensor([[3.0, 1.0]]), torch.tensor([1.0]), torch.empty(1, 2))
    >>> invert([job])
    >>> job.out
    tensor([[0.2500, 0.5000]])
    """

    factor: SymFactor  # F [c d d], or [c d]
    shift: Tensor  # [c]
    out: SymFactor  # of the shape of F
    title: str = "a factor of the metric"


def rows_of(diagonals: Sequence[Tensor]) -> Tensor:
    """In which row of these tensors [c d], counted over all of them, every number is.

    >>> rows_of([torch.zeros(1, 2), torch.zeros(2, 1)])
    tensor([0, 0, 1, 2], dtype=torch.int32)
    """
    lengths = torch.tensor([t.shape[1] for t in diagonals for _ in range(len(t))], device="cpu")
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
    total = sum(t.numel() for t in diagonals)
    return torch.repeat_interleave(numbers, lengths, output_size=total).to(diagonals[0].device)


def invert(
    jobs: Sequence[Inversion],
    *,
    power: float = 1.0,
    epsilon: float | None = None,
    warm: bool = False,
    wait: bool = False,
    rows: Callable[[Sequence[Tensor]], Tensor] = rows_of,
) -> Tensor | None:
    """Compute all inverses. One damped batch and, on a GPU, its triangular inverse are held besides.

    A matrix that Cholesky cannot invert is tried again in double precision. ``warm``: ``out`` holds the last inverses.
    A matrix that cannot be inverted keeps its last one, the others are computed, and then FactorisationError is raised;
    without a last one SingularMetricError is raised at once. A GPU is not waited for unless ``wait`` is set: nothing is
    tried again, and the number of failures comes back as a tensor [] on the device; what failed keeps its last inverse,
    or becomes NaN.

    ``power``: p < 1 is made by products on a GPU, and by eigenvalues on a processor
    or in double precision. A root whose residual is too large has failed, as a matrix has that Cholesky cannot invert.
    ``epsilon``: the shifts are at least this share of the mean eigenvalue, and no condition number is above
    (c·d + ε)/ε; a factor whose shift is zero is zero itself, and so are its inverses. ``rows``: ``rows_of``, with
    a cache of those that captured graphs read.
    """
    roots = power != 1
    if diagonals := [job for job in jobs if not is_dense(job.out)]:
        _invert_diagonals(diagonals, power, dead=epsilon is not None, rows=rows)
    dense = [job for job in jobs if is_dense(job.out)]
    failures: list[Tensor] = []
    titles: list[str] = []
    for batch in batch_by_size([job.factor for job in dense], stacks=STACKS if roots else 1, roots=roots):
        alike = [dense[at] for at in batch]
        failed = _invert_batch(alike, power, epsilon, warm, wait)
        if isinstance(failed, Tensor):
            failures.append(failed)
        else:
            titles += failed
    if titles:
        raise FactorisationError(_NOT_POSITIVE.format(", ".join(titles)))
    return torch.stack(failures).sum().float() if failures else None


def _invert_diagonals(
    jobs: Sequence[Inversion], power: float, dead: bool, rows: Callable[[Sequence[Tensor]], Tensor]
) -> None:
    """All of them as one vector: a network has dozens of diagonals, and they may be inverted in every step."""
    factors = [job.factor for job in jobs]
    damped = torch.cat([factor.reshape(-1) for factor in factors])
    shifts = torch.cat([job.shift for job in jobs])
    if dead:  # the inverse of zero is zero
        shifts.masked_fill_(shifts == 0, torch.inf)
    damped.add_(shifts.index_select(0, rows(factors)))
    flat = damped.split([factor.numel() for factor in factors])
    each = [t.view(factor.shape) for t, factor in zip(flat, factors, strict=True)]
    damped.reciprocal_() if power == 1 else damped.pow_(-power)
    torch._foreach_copy_([job.out for job in jobs], each)


def _invert_batch(
    jobs: Sequence[Inversion], power: float, epsilon: float | None, warm: bool, wait: bool
) -> Tensor | list[str]:
    """Invert matrices of one size; how many failed, on the device, or the titles of those that did."""
    d = jobs[0].out.shape[-1]
    shifts = torch.cat([job.shift for job in jobs])
    dead = None if epsilon is None else shifts == 0
    shifts = shifts if dead is None else shifts + dead.to(shifts.dtype)  # else nothing could be inverted
    roots = power != 1
    if roots:
        inverses, good = _roots(_padded(jobs), shifts, jobs, power, epsilon, wait)
    else:
        inverses, good = inverse(_damped(jobs, shifts))
        inverses = inverses[:, :d, :d]
    looks = not is_asynchronous(inverses.device) or wait
    if looks:
        _retry(jobs, shifts, power, inverses, good)
    if dead is not None:
        inverses.masked_fill_(dead[:, None, None], 0.0)
    if not looks:
        _write(jobs, inverses, good, warm)
        return (~good).sum()
    titles = [job.title for job in jobs for _ in range(job.factor.shape[0])]
    failed = [title for title, ok in zip(titles, good.tolist(), strict=True) if not ok]
    if failed and not warm:
        raise SingularMetricError(_NOT_POSITIVE.format(", ".join(failed)))
    _write(jobs, inverses, good if failed else None, warm)
    return failed


def _roots(
    M: Tensor,
    shifts: Tensor,
    jobs: Sequence[Inversion],
    power: float,
    epsilon: float | None,
    wait: bool,
) -> tuple[Tensor, Tensor]:
    """(M + shift)⁻ᵖ [b d d], and which succeeded [b]."""
    d, most = jobs[0].factor.shape[1], max(math.prod(job.factor.shape[:2]) for job in jobs)
    (X,), residual = inverse_powers(
        M,
        [power],
        shift=shifts,
        condition=1e6 if epsilon is None else most / epsilon + 1,
        error=None if wait else NOISE,
        precision="single" if wait else suited_precision(M),
    )
    return X[:, :d, :d], residual <= _ROOT_ERROR


def _damped(jobs: Sequence[Inversion], shifts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """F + shift [b d d] in memory of its own; where it is ``aligned``, with a unit matrix in the padding."""
    factors = [job.factor for job in jobs]
    stack = stacked(factors).to(dtype or factors[0].dtype)
    M, d = aligned(stack), stack.shape[-1]
    shared = M.data_ptr() == factors[0].data_ptr()
    M = M.clone(memory_format=torch.contiguous_format) if shared else M
    on_diagonal = M.diagonal(dim1=-2, dim2=-1)
    on_diagonal[:, :d].add_(shifts.to(M.dtype).unsqueeze(-1))
    on_diagonal[:, d:].fill_(1.0)
    return M


def _padded(jobs: Sequence[Inversion], dtype: torch.dtype | None = None) -> Tensor:
    """F [b d d], ``aligned``, with an eigenvalue between the others in the padding.

    That is the mean of the diagonal, with the zeros of the padding: the bound of the condition numbers stays.
    """
    stack = stacked([job.factor for job in jobs])
    stack = stack if dtype is None else stack.to(dtype)
    M, d = aligned(stack), stack.shape[-1]
    if M is not stack:
        on_diagonal = M.diagonal(dim1=-2, dim2=-1)
        on_diagonal[:, d:] = on_diagonal.mean(1, keepdim=True)
    return M


def _retry(jobs: Sequence[Inversion], shifts: Tensor, power: float, inverses: Tensor, good: Tensor) -> None:
    """Invert again, in double precision, what failed in single."""
    if inverses.dtype == torch.float64 or bool(good.all()):
        return
    d, dtype = inverses.shape[-1], inverses.dtype
    if power == 1:
        again, better = inverse(_damped(jobs, shifts, torch.float64)[~good])
        inverses[~good], good[~good] = again[:, :d, :d].to(dtype), better
        return
    M = _padded(jobs, torch.float64)[~good]
    again, better = _roots(M, shifts[~good].double(), jobs, power, None, True)
    inverses[~good] = again.to(dtype)
    good[~good] = better


def _write(jobs: Sequence[Inversion], inverses: Tensor, good: Tensor | None, warm: bool) -> None:
    """Copy the inverses to ``out``; where one is not ``good`` the last one stays, or there is NaN."""
    counts = [job.out.shape[0] for job in jobs]
    goods = [None] * len(jobs) if good is None else good.split(counts)
    for job, new, ok in zip(jobs, inverses.split(counts), goods, strict=True):
        out = job.out
        new = new[:, : out.shape[-1], : out.shape[-1]]
        if ok is None:
            out.copy_(new)
            continue
        last = out if warm else torch.full_like(out[:, :1, :1], torch.nan)
        torch.where(ok[:, None, None], new, last, out=out)


Jobs: TypeAlias = Callable[[Sequence[SymFactor], Scalar], list[Inversion]]  # from the factors and the damping


@final
class BatchedInverse:
    """Inverses that stay at one place in memory and are computed again as their factors change.

    Inverting one small matrix takes a dozen kernels, and a network has dozens of matrices: a GPU would wait for the
    host to launch them. Where factors and inverses lie where they lay before, a captured graph is replayed.
    """

    def __init__(self) -> None:
        self.graphs: GraphCache[None] = GraphCache[None]()
        self._count: Tensor | None = None  # of failures in the graph
        self._rows: dict[tuple[torch.Size, ...], Tensor] = {}  # which graphs read: they live as long as these
        self.failures: list[Tensor] = []  # numbers of failures, on their way to the host

    def compute_(
        self, jobs: Sequence[Inversion], *, power: float = 1.0, epsilon: float | None = None, warm: bool = False
    ) -> None:
        """Compute the inverses and wait for the device. ``warm``: the last inverses stay where it fails."""
        self.clear()
        invert(jobs, power=power, epsilon=epsilon, warm=warm, wait=True)

    def refresh_(
        self,
        jobs: Jobs,
        factors: Sequence[SymFactor],
        damping: float,
        key: Hashable,
        *,
        power: float = 1.0,
        relative: bool = False,
    ) -> None:
        """Compute the inverses again, without waiting for a GPU. ``key``: where they and the factors lie.

        ``relative``: the damping is a share of the mean eigenvalue of every factor.
        """
        self.clear()
        # A power of two, so that a schedule of the damping seldom needs another graph.
        epsilon = 2.0 ** math.floor(math.log2(damping)) if relative else None
        if not self.graphs.possible(factors):
            every = jobs(factors, damping)
            self._send(invert(every, power=power, epsilon=epsilon, warm=True, rows=self._rows_of))
            return
        count = self._count = factors[0].new_zeros(()) if self._count is None else self._count

        def in_graph(factor: SymFactor) -> bool:
            if not is_dense(factor):
                return True
            if power != 1 and by_eigenvalues(factor):
                return False
            return factor.shape[-1] < _CAPTURED

        def small(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            chosen = [job for job in jobs(tensors, scalars[0]) if in_graph(job.factor)]
            failures = invert(chosen, power=power, epsilon=epsilon, warm=True, rows=self._rows_of)
            if failures is not None:
                count.copy_(failures)

        self.graphs.run(small, factors, [damping], (key, power, epsilon), placed=True)
        dense = [factor for factor in factors if is_dense(factor)]
        if any(map(in_graph, dense)):  # else nothing in it can fail
            self._send(count)
        if not all(map(in_graph, dense)):
            large = [job for job in jobs(factors, damping) if not in_graph(job.factor)]
            self._send(invert(large, power=power, epsilon=epsilon, warm=True))

    def failed(self) -> bool:
        """Whether a matrix could not be inverted, as far as the host has read."""
        self.failures = [failure for failure in self.failures if float(failure) != 0]  # NaN has not arrived
        return any(float(failure) > 0 for failure in self.failures)

    def _rows_of(self, diagonals: Sequence[Tensor]) -> Tensor:
        """Kept at one address, where graphs read it. What is captured has run before, so that it is there by then."""
        shapes = tuple([t.shape for t in diagonals])
        if shapes not in self._rows:
            self._rows[shapes] = rows_of(diagonals)
        return self._rows[shapes]

    def adopt_failures(self, other: BatchedInverse) -> None:
        """Take over the failures of the inverses that these were copied from."""
        self.failures = list(other.failures)

    def clear(self) -> None:
        """Forget failures that have been handled."""
        self.failures = []

    def _send(self, count: Tensor | None) -> None:
        if count is not None:
            self.failures.append(to_host_async(count))
