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

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from natgrad.accelerate.inverses import batch_by_size, stacked
from natgrad.accelerate.roots import products_in

Factorisation: TypeAlias = Literal["auto", "householder", "cholesky"]
Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_STACKS = 2  # for one of a root by products: a dozen stacks of single precision are held
_LEAF = 128  # rows of a Cholesky factorisation by the library; larger blocks are multiplied
_ROUNDING = 16  # times the precision and the largest column of FQ: τ
_CORRECTIONS = 2  # of X, by products
_TOLERANCE = 1e-4  # for ‖XᵀX − 1‖_F/√d


def followed_all(
    factors: Sequence[Tensor], bases: Sequence[Tensor], *, doubtful: bool = False
) -> tuple[list[Tensor], Tensor | None]:
    """``followed`` of factors and bases [c d d] of many sizes, and how many failed [], None where none can.

    ``doubtful``: Householder's method is used on a GPU too.
    """
    out, failures = list(bases), list[Tensor]()
    for batch in batch_by_size(factors, lambda d: _STACKS, roots=True):
        F, Q = (stacked([side[at] for at in batch]) for side in (factors, bases))
        new, failed = followed(F, Q, "householder" if doubtful else "auto")
        failures += [] if failed is None else [failed]
        for at, q in zip(batch, new.split([len(factors[at]) for at in batch]), strict=True):
            out[at] = q
    return out, torch.stack(failures).sum() if failures else None


@torch.no_grad()
def followed(F: Tensor, Q: Tensor, method: Factorisation = "auto") -> tuple[Tensor, Tensor | None]:
    """The Q of FQ [b d d], for symmetric F and orthogonal Q, its columns sorted by qᵀFq, the largest first.

    On a GPU, in single precision, the second is the number [] of matrices whose columns were not orthogonal, and which
    are what they were before; nothing waits for the device. None, where Householder's method leaves no doubt.

    >>> F = torch.diag_embed(torch.tensor([[1.0, 4.0]]))
    >>> followed(F, torch.eye(2)[None], "cholesky")
    (tensor([[[0., 1.],
             [1., 0.]]]), tensor(0.))
    """
    if method == "auto":
        method = "cholesky" if Q.device.type == "cuda" and Q.dtype == torch.float32 else "householder"
    with products_in("single", Q.device) as product:
        moved = product(F, Q)
        order = (Q * moved).sum(1).argsort(dim=1, descending=True).unsqueeze(1).expand_as(Q)
        moved = moved.gather(2, order)
        if method == "householder":
            return torch.linalg.qr(moved).Q, None
        columns, before = moved.double(), Q.gather(2, order)
        largest = torch.linalg.vector_norm(columns, dim=1, keepdim=True).amax(2, keepdim=True)
        τ = torch.where(largest > 0, _ROUNDING * torch.finfo(Q.dtype).eps * largest, 1.0)
        X = _triangularised(columns.addcmul_(before, τ)).to(Q.dtype)
        for _ in range(_CORRECTIONS):
            Φ = _defect(X, product).triu_()
            Φ.diagonal(dim1=1, dim2=2).mul_(0.5)
            X = X - product(X, Φ)
        error = torch.linalg.matrix_norm(_defect(X, product)) / math.sqrt(Q.shape[-1])
    good = error <= _TOLERANCE
    return torch.where(good[:, None, None], X, Q), (~good).sum().float()


def _defect(X: Tensor, product: Product) -> Tensor:
    """XᵀX − 1."""
    E = product(X.mT, X)
    E.diagonal(dim1=1, dim2=2).sub_(1.0)
    return E


def _triangularised(M: Tensor) -> Tensor:
    """MR⁻¹ [b d d], RᵀR = MᵀM, in the memory of M; not finite where MᵀM is singular."""
    M /= torch.linalg.vector_norm(M, dim=1, keepdim=True)  # which changes R only, and the condition number of MᵀM
    return torch.bmm(M, lower_inverse(torch.bmm(M.mT, M)).mT)


def lower_inverse(G: Tensor, leaf: int = _LEAF) -> Tensor:
    """L⁻¹ [b d d] of LLᵀ = G, for positive G, which is overwritten; not finite where G is not positive.

    Block by block: L_kk and its inverse V_kk, the column of L below it, and the row V_kk L_kj V_ji of the inverse.

    >>> lower_inverse(torch.tensor([[[4.0, 2.0], [2.0, 2.0]]]), leaf=1)
    tensor([[[ 0.5000,  0.0000],
             [-0.5000,  1.0000]]])
    """
    d, V = G.shape[-1], torch.zeros_like(G)
    for start in range(0, d, leaf):
        stop = min(start + leaf, d)
        block, below = slice(start, stop), slice(stop, d)
        corner, info = torch.linalg.cholesky_ex(G[:, block, block])
        corner = torch.where((info == 0)[:, None, None], corner, torch.nan)
        one = torch.eye(stop - start, dtype=G.dtype, device=G.device).expand_as(corner)
        inverse = torch.linalg.solve_triangular(corner, one, upper=False)
        V[:, block, block] = inverse
        if start:  # the blocks of L that were computed before lie below the diagonal of G
            V[:, block, :start] = torch.bmm(inverse, torch.bmm(G[:, block, :start], V[:, :start, :start])).neg_()
        if stop < d:
            column = torch.bmm(G[:, below, block], inverse.mT)
            G[:, below, block] = column
            G[:, below, below].baddbmm_(column, column.mT, alpha=-1)
    return V
