"""Least-squares problems as triangles: thousands of small ones beside each other, and their damped solutions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.temporaries import by_columns
from natgrad.linalg import svd

_SINGULAR = 256  # in units of the machine epsilon: a pivot that says nothing, of a column of length 1


@final
@dataclass
class TriangularLeastSquares:
    """min ‖Jp + r‖² for J [* m n] and r [* m], as ‖Rp + z‖² plus a constant, with the QR factors of J = QR and z = Qᵀr.

    JᵀJ, whose condition number is that of J squared, is formed nowhere (Björck 1996). R [* k n] and z [* k] have
    k = min(m, n) rows, so that any number of damped steps costs n³ each, whatever m is. More unknowns than residuals
    and columns of zeros need damping, and nothing else.

    >>> J, r = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), torch.tensor([-2.0, -4.0, 5.0])
    >>> TriangularLeastSquares.of(J, r).damped(torch.full((2,), 1e-3))  # of all minima, nearly the shortest
    tensor([1.5000, 1.5000])
    """

    R: Tensor
    z: Tensor

    @staticmethod
    def of(J: Tensor, r: Tensor) -> TriangularLeastSquares:
        """One QR of [J r]: its last column is z, so that Q is not formed either."""
        m, n = J.shape[-2:]
        if J.ndim == 3 and m >= n and by_columns(len(J), n):
            triangle = _gram_schmidt(torch.cat([J.movedim(-1, 0), r.unsqueeze(0)]))
        else:
            triangle = torch.linalg.qr(torch.cat([J, r.unsqueeze(-1)], -1), mode="r").R
        return TriangularLeastSquares._of_rows(triangle, min(m, n))

    @staticmethod
    def _of_rows(triangle: Tensor, k: int) -> TriangularLeastSquares:
        """From the first rows of [R z] [* ≥k n+1]."""
        rows, n = triangle.narrow(-2, 0, k), triangle.shape[-1] - 1
        return TriangularLeastSquares(rows.narrow(-1, 0, n), rows.select(-1, n))

    @cached_property
    def lengths(self) -> Tensor:
        """The norms of the columns of J, which are those of R [* n]."""
        return torch.linalg.vector_norm(self.R, dim=-2)

    def below(self, d: Tensor) -> TriangularLeastSquares:
        """‖Jp + r‖² + ‖d ∘ p‖² for d [* n] or [* 1], again as a triangle."""
        n = self.R.shape[-1]
        weights = d.unsqueeze(-1) * torch.eye(n, n + 1, dtype=d.dtype, device=d.device)
        both = torch.cat([torch.cat([self.R, self.z.unsqueeze(-1)], -1), weights], -2)
        return TriangularLeastSquares._of_rows(torch.linalg.qr(both, mode="r").R, n)

    def damped(self, d: Tensor) -> Tensor:
        """p = argmin ‖Jp + r‖² + ‖d ∘ p‖² for d [* n]: Levenberg–Marquardt with λ where d = √λ·D (Moré 1978)."""
        return self.below(d).undamped()

    def undamped(self) -> Tensor:
        """p = −R⁻¹z, the Gauss–Newton step: not finite where R is singular, and with m < n there is none."""
        return torch.linalg.solve_triangular(self.R, self.z.unsqueeze(-1), upper=True).squeeze(-1).neg()

    def regular(self) -> Tensor:
        """Whether no pivot is rounding, beside its column, and no column has the square zero [*]."""
        (k, n), number = self.R.shape[-2:], torch.finfo(self.z.dtype)
        pivots, lengths = self.R.diagonal(dim1=-2, dim2=-1).abs(), self.lengths if k == n else self.lengths[..., :k]
        regular = (pivots.sub(lengths, alpha=_SINGULAR * number.eps) > number.tiny**0.5).all(-1)
        return regular if k == n else torch.zeros_like(regular)

    def back(self, p: Tensor) -> Tensor:
        """R⁻ᵀp."""
        return torch.linalg.solve_triangular(self.R.mT, p.unsqueeze(-1), upper=False).squeeze(-1)

    def diagonal(self, D: Tensor) -> tuple[TriangularLeastSquares, Tensor]:
        """R [* k n] = U diag(s) Vᵀ D as k problems of one unknown each, for q = VᵀDp [* k 1], and V [* n k].

        q is 0 where s is rounding, so that p is the shortest of all minima. Where R is not finite, z is not.
        """
        R = self.R / D.unsqueeze(-2)
        U, s, Vt = svd(R.nan_to_num(), "the Jacobian")
        z, null = (self.z.unsqueeze(-2) @ U).squeeze(-2), s <= _SINGULAR * torch.finfo(s.dtype).eps * s[..., :1]
        z = torch.where(null, 0.0, z) + 0 * R.sum((-2, -1)).unsqueeze(-1)
        return TriangularLeastSquares(torch.where(null, 1.0, s)[..., None, None], z.unsqueeze(-1)), Vt.mT

    def shortest(self, D: Tensor) -> Tensor:
        """Of all minima the one with the shortest Dp, also where R is singular [* n]."""
        problems, V = self.diagonal(D)
        return (V @ problems.undamped()).squeeze(-1) / D

    def push(self, p: Tensor) -> Tensor:
        """Rp [* k]."""
        return (self.R @ p.unsqueeze(-1)).squeeze(-1)

    def decrease(self, p: Tensor) -> Tensor:
        """‖r‖² − ‖Jp + r‖² = −⟨Rp, 2z + Rp⟩ [*]."""
        pushed = self.push(p)
        return torch.linalg.vecdot(pushed, torch.add(pushed, self.z, alpha=2)).neg()

    def __getitem__(self, rows: Tensor) -> TriangularLeastSquares:
        """Some of the problems."""
        return TriangularLeastSquares(self.R[rows], self.z[rows])


def _gram_schmidt(columns: Tensor) -> Tensor:
    """R [b k k] of the QR of b matrices from their columns [k b m], which are used up, in all of them at once.

    Modified Gram–Schmidt on [J r] finds least-squares solutions as accurately as Householder's QR (Björck 1996).
    """
    k, b, _ = columns.shape
    R = columns.new_zeros(k, k, b)
    for i, column in enumerate(columns.unbind(0)):
        R[i, i] = norm = torch.linalg.vector_norm(column, dim=-1)
        q = column / torch.where(norm > 0, norm, 1.0).unsqueeze(-1)
        R[i, i + 1 :] = along = (columns[i + 1 :] * q).sum(-1)
        columns[i + 1 :] -= along.unsqueeze(-1) * q
    return R.permute(2, 1, 0).contiguous().mT  # by columns, as that of LAPACK
