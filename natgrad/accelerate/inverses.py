"""One factor of a Kronecker product: a symmetric matrix a group [c d d], or only its diagonal [c d]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.flags import to_host_async
from natgrad.accelerate.replay import GraphCache, Scalar
from natgrad.errors import FactorisationError, SingularMetricError
from natgrad.linalg import refuse_singular

# Inverses of large triangular matrices by products: few launches, where a solve on a GPU has a thousand.


_LEAF = 128  # rows that are solved for; above them there are products only
_PANELS = 4


def invert_upper(U: Tensor, leaf: int = _LEAF) -> None:
    """U⁻¹ in the memory of U [d d], upper triangular with zeros below and with rows that are contiguous.

    [[A, B], [0, C]]⁻¹ = [[A⁻¹, −A⁻¹ B C⁻¹], [0, C⁻¹]]: blocks on the diagonal are inverted, and joined two by two, all
    pairs of one size in one product. Beside U a quarter of it is held.

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
    """V Vᵀ [d d] of an upper triangular V: (U Uᵀ)⁻¹-like products, without most of the zeros, mirrored.

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
    """−A⁻¹ B C⁻¹ in the place of B, of so many pairs of blocks with a and c rows, one pair after the other."""
    if not count:
        return
    A = _blocks(U, start, start, (a, a), a + c, count)
    B = _blocks(U, start, start + a, (a, c), a + c, count)
    C = _blocks(U, start + a, start + a, (c, c), a + c, count)
    torch.baddbmm(B, A, torch.bmm(B, C), beta=0, alpha=-1, out=B)


Factor: TypeAlias = Tensor  # [c d d], or [c d] where it is diagonal
_ALIGNED = 8  # numbers
_LARGE = 1024  # rows, from which the many small kernels of a triangular solve cost more than products
_BATCHED = {"cuda": 768, "cpu": 256}  # above these sizes one matrix at a time is as fast, and takes less memory
_ROOM = {"cuda": 2**24, "cpu": 2**22}  # bytes of a stack of matrices that are worked on at once


def full(factor: Factor) -> bool:
    """Whether all of the matrix is kept."""
    return factor.ndim == 3


def matrix(factor: Factor) -> Tensor:
    """[c d d]."""
    return factor if full(factor) else torch.diag_embed(factor)


def diagonal(factor: Factor) -> Tensor:
    """[c d]."""
    return factor.diagonal(dim1=-2, dim2=-1) if full(factor) else factor


def mean_diagonal(factor: Factor) -> Tensor:
    """tr/d [c], the mean of its eigenvalues."""
    return diagonal(factor).mean(-1)


def balance(a: Sequence[Factor], s: Sequence[Factor]) -> Tensor:
    """π = √((tr A/dim A)/(tr S/dim S)) of every group of every layer, one after the other; 1 where a factor is zero."""
    means = [torch.cat([mean_diagonal(factor) for factor in side]) for side in (a, s)]
    ratio = means[0] / means[1]
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0).sqrt()


def aligned(factor: Factor) -> Factor:
    """On a GPU a full factor with rows of whole vectors, zeros added: products of odd sizes are slow."""
    more = -factor.shape[-1] % _ALIGNED
    if not full(factor) or not more or factor.device.type != "cuda":
        return factor
    return torch.nn.functional.pad(factor, (0, more, 0, more))


def two_sided(left: Factor, w: Tensor, right: Factor, out: Tensor | None = None) -> Tensor:
    """L W Rᵀ [c o i], for W [c o i] (004 (38), ERRATA 51); R is symmetric where it is a metric.

    ``out``: memory of the shape of W for the result, W itself where that is not needed any more.
    """
    o, i = w.shape[-2:]
    more = (0, right.shape[-1] - i, 0, left.shape[-1] - o)  # where the factors are aligned
    if any(more):
        w = out = torch.nn.functional.pad(w, more)
    half = left @ w if full(left) else left.unsqueeze(-1) * w
    w = torch.matmul(half, right.mT, out=out) if full(right) else half.mul_(right.unsqueeze(-2))
    return w[..., :o, :i] if any(more) else w


def two_sided_columns(left: Tensor, parts: Sequence[Tensor], right: Tensor) -> list[Tensor]:
    """L W R part by part, for the W [c o i] whose parts [c o j] lie side by side, without putting them there.

    Left and right may be aligned, with zeros. R is symmetric, and is read by its rows: tensor cores want both factors
    contiguous along the index that is summed.

    >>> L, W, R = torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 2 * torch.eye(2)[None]
    >>> two_sided_columns(L, W.split(1, -1), R)[1]
    tensor([[[4.],
             [8.]]])
    """
    c, o = parts[0].shape[:2]
    half, at = left.new_empty(c, o, right.shape[-1]), 0
    spans = []
    for part in parts:
        spans.append(slice(at, at := at + part.shape[-1]))
        torch.bmm(left[:, :o, :o], part.to(left.dtype), out=half[..., spans[-1]])
    half[..., at:].zero_()
    return [torch.bmm(half, right[:, span].mT) for span in spans]


def room(factor: Factor) -> int:
    """The bytes of a stack that a factor may be in; one that is larger than that is alone."""
    alone = factor.shape[-1] > _BATCHED.get(factor.device.type, _BATCHED["cuda"])
    return 0 if alone else room_on(factor.device)


def room_on(device: torch.device, rooms: Mapping[str, int] = _ROOM) -> int:
    """The bytes of a stack that is worth being worked on at once; of devices that are not listed as on a GPU."""
    return rooms.get(device.type, rooms["cuda"])


def by_size(factors: Sequence[Factor], held: Callable[[int], int] = lambda size: 1) -> list[list[int]]:
    """The positions of full factors that are worked on at once: of one size, and as many as there is room for.

    ``held``: how many stacks are held where one of matrices of this size is worked on, over those of Cholesky.
    """
    stacks: dict[int, list[list[int]]] = defaultdict(list)
    used: dict[int, int] = {}
    for at, factor in enumerate(factors):
        d = factor.shape[-1]
        used[d] = used.get(d, 0) + factor.nbytes
        if not stacks[d] or used[d] * held(d) > room(factor):
            stacks[d].append([])
            used[d] = factor.nbytes
        stacks[d][-1].append(at)
    return [stack for of_size in stacks.values() for stack in of_size]


def stacked(factors: Sequence[Factor]) -> Factor:
    """[b·c …]; a single one is itself, no copy."""
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))


def spectrum(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues [b d] and eigenvectors [b d d] of symmetric matrices [b d d].

    The routines for GPUs sometimes fail to converge: once more, in double precision.
    """
    if factor.shape[-1] == 1:  # numbers: a normalisation has one a channel
        return factor.squeeze(-1), torch.ones_like(factor)
    symmetric = 0.5 * (factor + factor.mT)
    try:
        values, vectors = torch.linalg.eigh(symmetric)
    except RuntimeError:
        try:
            values, vectors = torch.linalg.eigh(symmetric.double())
        except RuntimeError as error:
            raise FactorisationError(
                f"the eigenvalues of a factor of size {factor.shape[-1]} cannot be found, in double precision neither: "
                "raise the damping, lower the learning rate, or use a larger batch"
            ) from error
    return values.to(factor.dtype), vectors.to(factor.dtype)


def refuse_singular_factor(factor: Tensor, what: str) -> None:
    """Raise if one of the matrices [b d d] is singular, as ``natgrad.linalg.cholesky`` does for a whole metric."""
    found = factor.amin(0) if factor.shape[-1] == 1 else torch.linalg.eigvalsh(factor.double())
    for values in found.reshape(-1, factor.shape[-1]):
        refuse_singular(values, factor.shape[-1] * torch.finfo(factor.dtype).eps, False, 0.0, what)


def inverse(M: Tensor) -> tuple[Tensor, Tensor]:
    """The inverses of positive matrices [b d d] by Cholesky, and which succeeded [b]. M is used up.

    At most two stacks are held at a time. A GPU is not waited for.

    >>> found, good = inverse(torch.tensor([[[2.0, 0.0], [0.0, 4.0]], [[1.0, 2.0], [2.0, 1.0]]]))
    >>> found[0].diagonal(), good
    (tensor([0.5000, 0.2500]), tensor([ True, False]))
    """
    if M.shape[-1] == 1:
        return M.reciprocal(), (M > 0).flatten()
    return inverse_in_place(M) if M.device.type == "cpu" else inverse_by_products(M)


def inverse_in_place(M: Tensor) -> tuple[Tensor, Tensor]:
    """In the memory of M, by LAPACK."""
    lower, info = _cholesky_in_place(M)
    good = info == 0
    if not bool(good.all()):
        M[~good] = torch.eye(M.shape[-1], dtype=M.dtype)  # nothing that the second routine could complain of
    torch.cholesky_inverse(lower, out=lower)
    return M, good


def inverse_by_products(M: Tensor, large: int = _LARGE) -> tuple[Tensor, Tensor]:
    """L⁻ᵀL⁻¹: L⁻¹ by a solve in the memory of a unit matrix or, of one ``large`` matrix, by products; and a product."""
    stack = M[0] if M.shape[0] == 1 else M  # a batch of one would go to slower routines
    lower, info = _cholesky_in_place(stack)
    if stack.ndim == 2 and stack.shape[-1] >= large:
        invert_upper(stack)  # whose rows are the columns of L
        return gram_of_upper(stack).unsqueeze(0), (info == 0).view(-1)
    root = torch.zeros_like(stack)
    root.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    torch.linalg.solve_triangular(lower, root, upper=False, out=root)
    torch.matmul(root.mT, root, out=stack)
    return M, (info == 0).view(-1)


def _cholesky_in_place(M: Tensor) -> tuple[Tensor, Tensor]:
    """L in the memory of contiguous M, and whether it failed: LAPACK works on columns, the rows of a symmetric M."""
    columns, info = M.mT, torch.empty(M.shape[:-2], dtype=torch.int32, device=M.device)
    torch.linalg.cholesky_ex(columns, out=(columns, info))
    return columns, info


# Inverses refreshed by Newton's iteration: matrix products only, from an inverse that is nearly right.


_LONGEST = 64  # refreshes


@final
class Newton:
    """X ← X(2 − MX), ``steps`` times: the error E = 1 − MX is squared in every step (Schulz 1933).

    It converges where ‖E‖ < 1, that is where M has changed little since X was its inverse. The guard is the norm of E
    before the last step, ‖E‖_F ≤ ``tolerance``, so that ‖E‖² is left after it. Where it fails, Cholesky inverts: at
    once on a CPU. A GPU is not waited for: there the last inverse is kept, and Cholesky inverts as soon as the host
    has heard of it (``failed``), a step or two later. After a failure the next refresh is Cholesky's, after another one
    the next two, then four, up to 64: where the metric moves too far between two refreshes, attempts are wasted.
    Matrices with fewer than ``smallest`` rows, or more than ``largest``, are left to Cholesky: a GPU makes small ones
    from a recording, and for large ones Newton's four products take as long as Cholesky does, and more memory.

    >>> M = torch.tensor([[[2.0, 0.0], [0.0, 4.0]]])
    >>> X, error = Newton(smallest=1).refreshed(M, 0.9 * torch.linalg.inv(M))
    >>> X.diagonal(dim1=-2, dim2=-1), bool(error < 0.05)
    (tensor([[0.4999, 0.2500]]), True)
    """

    def __init__(self, steps: int = 2, tolerance: float = 0.05, smallest: int = 2048, largest: int = 4096) -> None:
        self.steps, self.tolerance, self.smallest, self.largest = steps, tolerance, smallest, largest
        if steps < 1 or not 0 < tolerance < 1 or not 1 <= smallest <= largest:
            raise ValueError(f"Newton needs steps ≥ 1, 0 < tolerance < 1 and 1 ≤ smallest ≤ largest, got {self}")
        self._errors: list[Tensor] = []  # of the last refresh, on the host or on their way there
        self._resting, self._rest = 0, 1  # refreshes that are Cholesky's from now on, and after the next failure

    def __repr__(self) -> str:
        sizes = f"smallest={self.smallest}, largest={self.largest}"
        return f"Newton(steps={self.steps}, tolerance={self.tolerance}, {sizes})"

    def takes(self, size: int) -> bool:
        """Whether it refreshes inverses of matrices with so many rows."""
        return self.smallest <= size <= self.largest

    def failed(self) -> bool:
        """Whether the guard has said no in the last refresh, as far as the host has heard."""
        return any(float(error) > self.tolerance for error in self._errors)

    def trusted(self) -> bool:
        """Whether to go on from the last inverse; asked once before each refresh, which begins anew."""
        failed, tried, self._errors = self.failed(), bool(self._errors), []
        if failed:
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST)
            return False
        if tried:
            self._rest = 1
        self._resting -= 1
        return self._resting < 0

    def refreshed(self, M: Tensor, last: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """X [b d d] from M + shift, shift [b], and the last inverse, and the norm of E before the last step [b].

        Beside M and the last inverse three of their size are held, or on a GPU, where they are not ``aligned``, four.
        M and X are symmetric and read by their rows: tensor cores want both factors contiguous along the index that is
        summed, and rows of whole vectors.
        """
        d, norm = M.shape[-1], M.new_zeros(len(M))
        N, X = aligned(M), aligned(last)
        E, made = torch.empty_like(N), torch.empty_like(N)
        spare = X if X is not last else torch.empty_like(N)
        for step in range(self.steps):
            if shift is None:
                torch.baddbmm(E, X, N.mT, beta=0, alpha=-1, out=E)
            else:
                torch.mul(X, -shift[:, None, None], out=E).baddbmm_(X, N.mT, alpha=-1)
            E.diagonal(dim1=-2, dim2=-1)[:, :d].add_(1.0)  # E is zero where X is no more than aligned
            if step == self.steps - 1:
                norm = torch.linalg.vector_norm(E, dim=(-2, -1))
            torch.baddbmm(X, E, X.mT, out=made)
            X, made, spare = made, spare, made
        return torch.add(X, X.mT, out=E).mul_(0.5)[:, :d, :d], norm

    def inverse(self, M: Tensor, last: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The inverses of M + shift [b d d], every matrix by itself, and which succeeded [b]; by Cholesky where the
        guard says no and the host may know it.
        """
        X, error = self.refreshed(M, last, shift)
        good = error <= self.tolerance
        if M.device.type != "cuda":
            if not bool(good.all()):
                damped = M[~good]
                damped.diagonal(dim1=-2, dim2=-1).add_(shift[~good].unsqueeze(-1))
                X[~good], good[~good] = inverse(damped)
            return X, good
        self._errors.append(to_host_async(error.amax()))
        return X, good


# Damped inverses of many factors, made into memory that is already there, a stack of one size at a time.


_NEWTON = 4  # stacks that it holds, for one of Cholesky's
_NOT_POSITIVE = (
    "{} is not positive after damping, in double precision neither: raise the damping, or use a larger batch"
)


@final
@dataclass(frozen=True)
class Task:
    """(F + shift)⁻¹ of layers of one shape, one after the other into ``into`` [b·c d d], or [b·c d] of diagonals.

    >>> task = Task([torch.tensor([[3.0, 1.0]])], [torch.tensor([1.0])], torch.empty(1, 2))
    >>> invert([task])
    []
    >>> task.into
    tensor([[0.2500, 0.5000]])
    """

    factors: Sequence[Factor]  # F [c d d], or [c d], of every layer
    shifts: Sequence[Tensor]  # [c] of every layer
    into: Factor
    titles: Sequence[str] = ()  # of the factor of every layer, for those who must be told

    def runs(self, held: int = 1) -> Iterator[Task]:
        """The task, cut where there is no room for all of its layers at once, ``held`` times over."""
        c, factor = self.factors[0].shape[0], self.factors[0]
        several = max(1, room(factor) // (held * factor.nbytes))
        for at in range(0, len(self.factors), several):
            to = at + several
            yield Task(self.factors[at:to], self.shifts[at:to], self.into[at * c : to * c], self.titles[at:to])

    @property
    def each(self) -> list[str]:
        """The titles of all matrices."""
        groups, size = self.factors[0].shape[0], self.into.shape[-1]
        titles = self.titles or [f"a factor of size {size} of the metric"] * len(self.factors)
        return [title for title in titles for _ in range(groups)]


def invert(tasks: Sequence[Task], warm: bool = False, newton: Newton | None = None, wait: bool = False) -> list[Tensor]:
    """Do the tasks. What is held beside their results is one damped stack and, on a GPU, its triangular inverse.

    A matrix that Cholesky cannot invert is tried in double precision. ``warm``: the last inverses are there, and that
    of a matrix which cannot be inverted stays; all others are made, and then it raises. Without one it raises at once.
    A GPU is not waited for, unless it is to be: there nothing is tried again, and what comes back are numbers on it,
    above 0 if there is such a matrix, whose inverse stays, or is NaN. With ``newton`` inverses are refreshed where the
    last is near enough. Every stack is looked at before it is written.
    """
    for task in tasks:
        if not full(task.into):
            torch.add(stacked(task.factors), torch.cat(list(task.shifts)).unsqueeze(-1), out=task.into).reciprocal_()
    refresh = newton if warm else None

    def held(size: int) -> int:
        return _NEWTON if refresh is not None and refresh.takes(size) else 1

    runs = [run for task in tasks if full(task.into) for run in task.runs(held(task.into.shape[-1]))]
    failed: list[str] = []
    flags: list[Tensor] = []
    for stack in by_size([run.into for run in runs], held):
        failed += _invert([runs[at] for at in stack], warm, refresh, None if wait else flags)
    if failed:
        raise FactorisationError(_NOT_POSITIVE.format(", ".join(failed)))
    return [torch.stack(flags).sum().float()] if flags else []


def _invert(runs: Sequence[Task], warm: bool, newton: Newton | None, flags: list[Tensor] | None) -> list[str]:
    """Invert a stack; the titles of matrices that could not be. On a GPU a flag is added, above 0 if there are any.

    ``flags``: None where a GPU is waited for.
    """
    found, good, certain = _inverses(runs, newton)
    failed: list[str] = []
    if found.device.type == "cpu" or flags is None:
        _try_again(runs, found, good)
    if found.device.type != "cpu" and flags is not None:
        flags += [] if certain else [(~good).sum()]
    elif not bool(good.all()):
        titles = [title for run in runs for title in run.each]
        failed = [title for title, ok in zip(titles, good.tolist(), strict=True) if not ok]
        if not warm:
            raise SingularMetricError(_NOT_POSITIVE.format(", ".join(failed)))
    _write(runs, found, good, warm)
    return failed


def _inverses(runs: Sequence[Task], newton: Newton | None) -> tuple[Tensor, Tensor, bool]:
    """The inverses [b d d], which succeeded [b], and whether somebody else looks after those that did not."""
    d = runs[0].into.shape[-1]
    refreshed = newton is not None and newton.takes(d)
    if newton is not None and refreshed:
        factors = stacked([factor for run in runs for factor in run.factors])
        found, good = newton.inverse(factors, stacked([run.into for run in runs]), _shifts(runs))
    else:
        found, good = inverse(_damped(runs))
        found = found[:, :d, :d]
    return found, good, refreshed


def _try_again(runs: Sequence[Task], found: Tensor, good: Tensor) -> None:
    """Those that could not be inverted, in double precision."""
    if found.dtype == torch.float64 or bool(good.all()):
        return
    again, better = inverse(_damped(runs, torch.float64)[~good])
    found[~good], good[~good] = again[:, : found.shape[-1], : found.shape[-1]].to(found.dtype), better


def _write(runs: Sequence[Task], found: Tensor, good: Tensor, warm: bool) -> None:
    counts, certain = [run.into.shape[0] for run in runs], found.device.type == "cpu" and bool(good.all())
    for run, new, ok in zip(runs, found.split(counts), good.split(counts), strict=True):
        if certain:
            run.into.copy_(new)
        else:  # without a last inverse there is nothing to go on with, and a step with NaN is not made
            last = run.into if warm else torch.full_like(run.into[:, :1, :1], torch.nan)
            torch.where(ok[:, None, None], new, last, out=run.into)


def _shifts(runs: Sequence[Task]) -> Tensor:
    return torch.cat([shift for run in runs for shift in run.shifts])


def _damped(runs: Sequence[Task], dtype: torch.dtype | None = None) -> Tensor:
    """F + shift [b d d] in memory of its own; where it is ``aligned``, with a unit matrix below."""
    factors = [factor for run in runs for factor in run.factors]
    stack = stacked(factors).to(dtype or factors[0].dtype)
    M, d = aligned(stack), stack.shape[-1]
    M = M.clone(memory_format=torch.contiguous_format) if M is factors[0] else M
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    diagonal[:, :d].add_(_shifts(runs).unsqueeze(-1))
    if M.shape[-1] > d:
        diagonal[:, d:].fill_(1.0)
    return M


# Inverses that are made again and again in the same memory: on a GPU most of them from a recording.


_RECORDED = 2048  # rows; of larger ones the kernels take longer than to start them, and what they need is much memory

Sides: TypeAlias = Sequence[Sequence[Factor]]  # S of every layer, and A
Chosen: TypeAlias = Callable[[Factor], bool]
Make: TypeAlias = Callable[[Sides, Scalar, Chosen], list[Task]]


@final
class Remade:
    """The inverses of factors that change, and stay where they are, with a damping that may change too.

    To invert one small matrix is a dozen kernels, and a network has dozens of them: a GPU waits for the processor to
    start them. Where factors and inverses lie where they lay before, all are started at once.
    """

    def __init__(self) -> None:
        self.graphs = GraphCache[None]()
        self._flag: Tensor | None = None
        self.failures: list[Tensor] = []  # above 0 if a matrix could not be inverted; on their way to the host

    def first(self, tasks: Sequence[Task]) -> None:
        """Do the tasks, where there are no inverses yet: a GPU is waited for, as without them there is no step."""
        self.failures = []
        invert(tasks, wait=True)

    def mend(self, tasks: Sequence[Task]) -> None:
        """Do the tasks again, after a failure, and with an eye on each."""
        self.failures = []
        invert(tasks, warm=True, wait=True)

    def again(self, make: Make, sides: Sides, damping: float, newton: Newton | None, places: Hashable) -> None:
        """Do the tasks that ``make`` finds, for the factors that it is asked about; the last inverses are there.

        ``places``: where the inverses lie.
        """
        self.failures = []  # also where it raises
        self.failures = [to_host_async(count) for count in self._again(make, sides, damping, newton, places)]

    def _again(self, make: Make, sides: Sides, damping: float, newton: Newton | None, places: Hashable) -> list[Tensor]:
        like = sides[0][0]
        if not recordable(like):
            return invert(make(sides, damping, lambda _: True), True, newton)
        flag = self._flag = like.new_zeros(()) if self._flag is None else self._flag

        def small(factor: Factor) -> bool:
            d = factor.shape[-1]
            return not full(factor) or (d < _RECORDED and (newton is None or not newton.takes(d)))

        def compute(sources: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            here = sources[: len(sides[0])], sources[len(sides[0]) :]
            flag.copy_(sum(invert(make(here, scalars[0], small), True), torch.zeros_like(flag)))

        self.graphs.run(compute, [*sides[0], *sides[1]], [damping], (places, repr(newton)))
        return [flag, *invert(make(sides, damping, lambda factor: not small(factor)), True, newton)]


def recordable(like: Factor) -> bool:
    """Whether kernels on such factors are recorded: on a GPU, and in single precision, as recordings have the damping.

    >>> recordable(torch.zeros(1, 2, 2))
    False
    """
    return like.device.type == "cuda" and like.dtype != torch.float64
