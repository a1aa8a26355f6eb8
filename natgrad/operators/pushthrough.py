"""The inverse of a metric that couples the examples by K⁻¹, in the push-through form: K is inverted nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from natgrad.linalg import check_finite, refuse_lost_damping
from natgrad.operators.base import Inverse, Layout
from natgrad.operators.gram import KernelMatrix, root_or_nan

if TYPE_CHECKING:
    from natgrad.operators.kernel import KernelOperator

_REFINED = 2  # times


@final
@dataclass(frozen=True)
class PushThrough:
    """z ↦ (λK + BBᵀ)⁻¹, for the rows B [(k n) p] of a metric BᵀK⁻¹B and K [n n] for every column k (ERRATA 13):

        (BᵀK⁻¹B + λ)⁻¹BᵀK⁻¹v = Bᵀ(λK + BBᵀ)⁻¹v

    It holds for a singular K too, with K⁺ for K⁻¹ and what K sees of B and v. Equal examples are rows that are equal:
    they count once.
    """

    rows: KernelOperator  # B, in float64
    K: KernelMatrix
    damping: float
    factor: Tensor  # of λK' + QᵀBBᵀQ [(k n) (l m)]

    @staticmethod
    def of(rows: KernelOperator, K: KernelMatrix, damping: float) -> PushThrough:
        double = rows.to(torch.float64)
        matrix = K.restrict_gram(double.gram())
        check_finite(matrix, "the kernel")
        n = K.whole.shape[0]
        k = matrix.shape[0] // n
        matrix.view(k, n, k, n).diagonal(dim1=0, dim2=2).add_(damping * K.inner.unsqueeze(2))
        # λK may be less than the rounding of BBᵀ. Up to this rounding the factor is that of a positive matrix, and
        # refinement with B itself takes out again what was added.
        diagonal = matrix.diagonal()
        diagonal.add_(matrix.shape[0] * torch.finfo(matrix.dtype).eps * diagonal.amax())
        return PushThrough(double, K, damping, root_or_nan(matrix))

    def solve(self, v: Tensor) -> Tensor:
        """(λK + BBᵀ)⁻¹v [k n], of what K sees of v [k n]."""
        inside = self.K.restrict(v.double())
        z = self._apply(inside)
        for _ in range(_REFINED):
            z = z + self._apply(inside - self._product(z))
        return self.K.extend(z)

    def _apply(self, t: Tensor) -> Tensor:
        return torch.cholesky_solve(t.reshape(-1, 1), self.factor).view_as(t)

    def _product(self, z: Tensor) -> Tensor:
        through = self.rows.push(self.rows.pull(self.K.extend(z)))
        return self.damping * (z @ self.K.inner) + self.K.restrict(through)


@final
@dataclass(frozen=True)
class PushThroughInverse(Inverse):
    """(BᵀK⁻¹B + λ)⁻¹ω = (ω − Bᵀ(λK + BBᵀ)⁻¹Bω)/λ, which for ω = Bᵀe is Bᵀ(λK + BBᵀ)⁻¹K e (ERRATA 13)."""

    layout: Layout
    dual: PushThrough

    @staticmethod
    def of(layout: Layout, dual: PushThrough) -> PushThroughInverse:
        """Refused where dividing by the damping would leave rounding. No eigenvalue of K is above its trace."""
        diagonal = dual.factor.square().sum(-1) / dual.K.whole.diagonal().sum()
        refuse_lost_damping(dual.damping, diagonal, "the metric coupled by a kernel")
        return PushThroughInverse(layout, dual)

    def solve(self, ω: Tensor) -> Tensor:
        rows, exact = self.dual.rows, ω.double()
        return ((exact - rows.pull(self.dual.solve(rows.push(exact)))) / self.dual.damping).to(ω.dtype)
