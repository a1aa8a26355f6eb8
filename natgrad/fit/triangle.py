"""Least-squares problems as triangles: thousands of small ones beside each other, and their damped solutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.temporaries import by_columns

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
            triangle = torch.linalg.qr(torch.cat([J.mT, r.unsqueeze(-2)], -2).mT, mode="r").R  # LAPACK goes by columns
        rows = triangle.narrow(-2, 0, min(m, n))
        return TriangularLeastSquares(rows.narrow(-1, 0, n), rows.select(-1, n))

    def below(self, d: Tensor) -> TriangularLeastSquares:
        """‖Jp + r‖² + ‖d ∘ p‖² for d [* n], again as a triangle."""
        k, n = self.R.shape[-2:]
        both = self.R.new_zeros(*self.z.shape[:-1], k + n, n + 1)
        both[..., :k, :n], both[..., :k, n] = self.R, self.z
        both[..., k:, :n].diagonal(dim1=-2, dim2=-1).copy_(d)
        triangle = torch.linalg.qr(both, mode="r").R
        return TriangularLeastSquares(triangle[..., :n, :n], triangle[..., :n, n])

    def damped(self, d: Tensor) -> Tensor:
        """p = argmin ‖Jp + r‖² + ‖d ∘ p‖² for d [* n]: Levenberg–Marquardt with λ where d = √λ·D (Moré 1978)."""
        return self.below(d).undamped()

    def undamped(self) -> Tensor:
        """p = −R⁻¹z, the Gauss–Newton step: not finite where R is singular, and with m < n there is none."""
        return -torch.linalg.solve_triangular(self.R, self.z.unsqueeze(-1), upper=True).squeeze(-1)

    def shortest(self) -> Tensor:
        """p of any R [b k n]: where a pivot is rounding, or a column has no square, the shortest of all minima."""
        (k, n), number = self.R.shape[-2:], torch.finfo(self.z.dtype)
        lengths, rounding = torch.linalg.vector_norm(self.R, dim=-2)[..., :k], _SINGULAR * number.eps
        pivots = self.R.diagonal(dim1=-2, dim2=-1).abs()
        regular = (pivots > rounding * lengths.where(lengths > number.tiny**0.5, torch.inf)).all(-1) & (k == n)
        if bool(regular.all()):
            return self.undamped()
        rows = (~regular).nonzero().squeeze(-1)
        R, z = self.R[rows], self.z[rows].unsqueeze(-1)
        p = -(torch.linalg.pinv(R.nan_to_num(), rtol=rounding) @ z).squeeze(-1)
        p = p + 0 * R.sum((-2, -1)).unsqueeze(-1)  # what is not finite stays so
        return p if len(rows) == len(regular) else self.undamped().index_copy(0, rows, p)

    def decrease(self, p: Tensor) -> Tensor:
        """½‖r‖² − ½‖Jp + r‖² = −⟨Rp, z + ½Rp⟩ [*]."""
        pushed = (self.R @ p.unsqueeze(-1)).squeeze(-1)
        return -torch.linalg.vecdot(pushed, torch.add(self.z, pushed, alpha=0.5))

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
