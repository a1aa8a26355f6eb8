"""Eigenvectors that follow a matrix: Q ← QR(FQ), a step of the orthogonal iteration, for many matrices at once.

On a processor the QR factorisation is Householder's. On a GPU that is thousands of small steps one after the other.
There it is made of products and of one Cholesky factorisation (Yamamoto et al. 2015):

    M = FQ,   MᵀM = RᵀR,   X = MR⁻¹,      then  X ← X(1 − Φ(E)),  E = XᵀX − 1,  Φ(E) + Φ(E)ᵀ = E, Φ upper triangular.

The second line is Newton's iteration for a triangular factor: E becomes O(E²). All factors on the right are upper
triangular with a positive diagonal, and so X is the Q of the factorisation, up to the signs of its columns. MᵀM has the
square of the condition number of M, and single precision would lose what is below 10⁻⁴ of the largest eigenvalue. The
products and the Cholesky factors before X are therefore in double precision, which GPUs for training have at the same
speed. What is below the rounding of F in single precision has no direction: F + τ is taken in its place, with τ of that
size, so that these columns stay where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision
from natgrad.accelerate.inverses import batch_by_size, stacked
from natgrad.accelerate.roots import Precision, products_in, residual_of, suited_precision

Factorisation: TypeAlias = Literal["auto", "householder", "cholesky"]

_CHUNK_BYTES = 2**27  # of matrices that are factored side by side; a dozen times as much is held besides
_LEAF = 128  # rows of a Cholesky factorisation by the library; larger blocks are multiplied
_ROUNDING = 16  # times the precision and the largest column of FQ: τ
_TOLERANCE = 1e-4  # for ‖XᵀX − 1‖_F/√d, as it is measured


def iterate_bases(
    factors: Sequence[Tensor], bases: Sequence[Tensor], method: Factorisation = "auto", sort: bool = True
) -> tuple[list[Tensor], Tensor | None]:
    """The Q of FQ for factors F and orthogonal Q [c d d] of many sizes, its columns sorted by qᵀFq, the largest first.

    Without ``sort`` they stay in their order.

    On a GPU, in single precision, the second is the number [] of matrices whose columns were not orthogonal, and which
    are what they were before; nothing waits for the device. None, where Householder's method leaves no doubt. All sizes
    are factored side by side: the blocks of a Cholesky factor come one after the other, and a GPU that factors one
    alone is idle.

    >>> F = torch.diag_embed(torch.tensor([[1.0, 4.0]]))
    >>> iterate_bases([F], [torch.eye(2)[None]], "cholesky")
    ([tensor([[[0., 1.],
             [1., 0.]]])], tensor(0.))
    """
    out, failures = list(bases), list[Tensor]()
    by_size = batch_by_size(factors, roots=True)
    chunks = [[batch] for batch in by_size]
    if bases and _by_cholesky(bases[0], method):
        chunks = _filled(by_size, [sum(factors[at].nbytes for at in batch) for batch in by_size])
    for batches in chunks:
        sides = (([stacked([side[at] for at in batch]) for batch in batches]) for side in (factors, bases))
        news, failed = _iterate_together(next(sides), next(sides), method, sort)
        failures += [] if failed is None else [failed]
        for batch, new in zip(batches, news, strict=True):
            for at, q in zip(batch, new.split([len(factors[at]) for at in batch]), strict=True):
                out[at] = q
    return out, torch.stack(failures).sum() if failures else None


def _filled(batches: Sequence[list[int]], sizes: Sequence[int]) -> list[list[list[int]]]:
    """The batches in as few chunks as their sizes in bytes allow, the largest first."""
    chunks: list[list[list[int]]] = []
    room = 0
    for batch, size in sorted(zip(batches, sizes, strict=True), key=lambda pair: -pair[1]):
        if size > room:
            chunks.append([])
            room = _CHUNK_BYTES
        chunks[-1].append(batch)
        room -= size
    return chunks


def _by_cholesky(like: Tensor, method: Factorisation) -> bool:
    return method == "cholesky" or (method == "auto" and like.device.type == "cuda" and like.dtype == torch.float32)


@torch.no_grad()
def _iterate_together(
    factors: Sequence[Tensor], bases: Sequence[Tensor], method: Factorisation, sort: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``iterate_bases`` of stacks F and Q of several sizes."""
    out: list[Tensor] = []
    failures: list[Tensor] = []
    with products_in("single", bases[0].device) as product:
        moved: list[Tensor] = []
        for F, Q in zip(factors, bases, strict=True):
            M = product(F, Q)
            if sort:
                order = (Q * M).sum(1).argsort(dim=1, descending=True).unsqueeze(1).expand_as(Q)
                M, Q = M.gather(2, order), Q.gather(2, order)
            moved.append(_bounded(M, Q) if _by_cholesky(Q, method) else M)
        if not _by_cholesky(bases[0], method):
            return [torch.linalg.qr(M).Q for M in moved], None
        inverses = lower_inverses([torch.bmm(M.mT, M) for M in moved])
    for M, V, Q in zip(moved, inverses, bases, strict=True):
        X = _corrected(torch.bmm(M, V.mT).to(Q.dtype))
        good = residual_of([X.mT, X]) <= _TOLERANCE
        out.append(torch.where(good[:, None, None], X, Q))
        failures.append((~good).sum().float())
    return out, torch.stack(failures).sum()


def _bounded(M: Tensor, Q: Tensor) -> Tensor:
    """M + τQ in double precision, with columns of length one: this changes R only, and the condition of MᵀM."""
    M, eps = M.double(), torch.finfo(M.dtype).eps
    largest = torch.linalg.vector_norm(M, dim=1, keepdim=True).amax(2, keepdim=True)
    M.addcmul_(Q, torch.where(largest > 0, _ROUNDING * eps * largest, 1.0))
    return M.div_(torch.linalg.vector_norm(M, dim=1, keepdim=True))


def _corrected(X: Tensor) -> Tensor:
    """X ← X(1 − Φ(E)), twice. Φ is small, and its product may be in tf32; only the last E needs single precision."""
    quick = suited_precision(X)
    precisions: tuple[Precision, ...] = quick, "single"
    for precision in precisions:
        with products_in(precision, X.device) as product:
            Φ = product(X.mT, X)
        Φ.diagonal(dim1=1, dim2=2).sub_(1.0).mul_(0.5)
        with full_precision(X.device), products_in(quick, X.device):
            X = torch.baddbmm(X, X, Φ.triu_(), alpha=-1.0)
    return X


def lower_inverses(stacks: Sequence[Tensor], leaf: int = _LEAF) -> list[Tensor]:
    """L⁻¹ of LLᵀ = G for stacks of positive G [b d d], which are overwritten; not finite where G is not positive.

    Block by block: L_kk and its inverse V_kk, of all stacks in one batch; then the column of L below it, and the row
    −V_kk L_kj V_ji of the inverse.

    >>> lower_inverses([torch.tensor([[[4.0, 2.0], [2.0, 2.0]]])], leaf=1)
    [tensor([[[ 0.5000,  0.0000],
             [-0.5000,  1.0000]]])]
    """
    inverses = [torch.zeros_like(G) for G in stacks]
    sizes = [G.shape[-1] for G in stacks]
    leaf = min(leaf, max(sizes))
    one = torch.eye(leaf, dtype=stacks[0].dtype, device=stacks[0].device)
    for start in range(0, max(sizes), leaf):
        going = [(G, V, min(start + leaf, d)) for G, V, d in zip(stacks, inverses, sizes, strict=True) if d > start]
        corners = [_padded(G[:, start:stop, start:stop], one) for G, _, stop in going]
        L, info = torch.linalg.cholesky_ex(torch.cat(corners))
        W = torch.linalg.solve_triangular(L, one.expand_as(L), upper=False)
        W = torch.where((info == 0)[:, None, None], W, torch.nan)
        for (G, V, stop), of_stack in zip(going, W.split([len(corner) for corner in corners]), strict=True):
            inverse = of_stack[:, : stop - start, : stop - start]
            V[:, start:stop, start:stop] = inverse
            if start:  # the blocks of L that were computed before lie below the diagonal of G
                row = V[:, start:stop, :start]
                torch.baddbmm(
                    row, inverse, torch.bmm(G[:, start:stop, :start], V[:, :start, :start]), beta=0, alpha=-1, out=row
                )
            if stop < G.shape[-1]:
                column = torch.bmm(G[:, stop:, start:stop], inverse.mT)
                G[:, stop:, start:stop] = column
                G[:, stop:, stop:].baddbmm_(column, column.mT, alpha=-1)
    return inverses


def _padded(corner: Tensor, one: Tensor) -> Tensor:
    """A matrix as large as this unit matrix, with ones on the rest of the diagonal."""
    d = corner.shape[-1]
    if d == len(one):
        return corner
    out = one.expand(len(corner), -1, -1).clone()
    out[:, :d, :d] = corner
    return out
