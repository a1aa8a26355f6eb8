"""The Fisher information of Gaussians and Wishart matrices, by products of d × d matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.families.information import Information, by_basis
from natgrad.families.packing import joined, square


@final
@dataclass(frozen=True, eq=False)
class GaussianInformation(Information):
    """F of N(μ, Σ) in (h, Λ), L the factor of Λ: δμ = Σ(δh − δΛ μ), δΣ = −Σ δΛ Σ, and ξ = (μ, −½(Σ + μμᵀ)).

    ♯ needs products with Λ alone. In dense form it is ¼(1 + K)(Σ ⊗ Σ) for μ = 0, K the commutation (ERRATA 32).
    """

    h: Tensor
    Λ: Tensor
    L: Tensor

    @cached_property
    def Σ(self) -> Tensor:
        return torch.cholesky_inverse(self.L)

    @cached_property
    def μ(self) -> Tensor:
        return torch.cholesky_solve(self.h.unsqueeze(-1), self.L)

    @property
    def divides(self) -> bool:
        return False

    def flat(self, v: Tensor) -> Tensor:
        d = self.h.shape[-1]
        δΛ = square(v[..., d:])
        δμ = self.Σ @ (v[..., :d].unsqueeze(-1) - δΛ @ self.μ)
        outer = δμ @ self.μ.mT
        return joined(δμ.squeeze(-1), 0.5 * (self.Σ @ δΛ @ self.Σ - outer - outer.mT))

    def sharp(self, w: Tensor) -> Tensor:
        d = self.h.shape[-1]
        W, h = w[..., d:].unflatten(-1, (d, d)), self.h.unsqueeze(-1)
        Λδμ = self.Λ @ w[..., :d].unsqueeze(-1)
        # Λ(W + Wᵀ + δμ μᵀ + μ δμᵀ)Λ, where Λμ = h: what has rank two is added when the large products are done.
        pair = torch.cat([Λδμ, h], -1) @ torch.cat([h, Λδμ], -1).mT
        δΛ = self.Λ @ (W + W.mT) @ self.Λ + pair
        return joined((Λδμ + δΛ @ self.μ).squeeze(-1), δΛ)

    def dense(self) -> Tensor:
        d = self.h.shape[-1]
        return by_basis(self, d + d * d, torch.cat([self.h, self.Λ.flatten(-2)], -1))


@final
@dataclass(frozen=True, eq=False)
class PrecisionInformation(Information):
    """F of N(m, Σ) with known m in vec Λ: δξ = ½ Σ δΛ Σ."""

    Λ: Tensor
    L: Tensor

    @cached_property
    def Σ(self) -> Tensor:
        return torch.cholesky_inverse(self.L)

    @property
    def divides(self) -> bool:
        return False

    def flat(self, v: Tensor) -> Tensor:
        return (0.5 * self.Σ @ square(v) @ self.Σ).flatten(-2)

    def sharp(self, w: Tensor) -> Tensor:
        return (2 * self.Λ @ square(w) @ self.Λ).flatten(-2)

    def dense(self) -> Tensor:
        return by_basis(self, self.Λ.shape[-1] ** 2, self.Λ.flatten(-2))


@final
@dataclass(frozen=True, eq=False)
class WishartInformation(Information):
    """F in (a, Λ): δξ₁ = f δa − tr(V δΛ), δξ₂ = −V δa + ½ν V δΛ V, with V = Λ⁻¹, f = Σ ψ'((ν + 1 − j)/2)."""

    ν: Tensor
    f: Tensor
    Λ: Tensor
    L: Tensor

    @cached_property
    def V(self) -> Tensor:
        return torch.cholesky_inverse(self.L)

    def flat(self, v: Tensor) -> Tensor:
        a, δΛ = v[..., :1], square(v[..., 1:])
        first = self.f * v[..., 0] - (self.V * δΛ).sum((-2, -1))
        second = -self.V * a.unsqueeze(-1) + 0.5 * self.ν[..., None, None] * self.V @ δΛ @ self.V
        return torch.cat([first.unsqueeze(-1), second.flatten(-2)], -1)

    def sharp(self, w: Tensor) -> Tensor:
        W, d = square(w[..., 1:]), self.Λ.shape[-1]
        a = (w[..., 0] + 2 / self.ν * (self.Λ * W).sum((-2, -1))) / (self.f - 2 * d / self.ν)
        δΛ = (2 / self.ν)[..., None, None] * (self.Λ @ W @ self.Λ + a[..., None, None] * self.Λ)
        return torch.cat([a.unsqueeze(-1), δΛ.flatten(-2)], -1)

    def dense(self) -> Tensor:
        return by_basis(self, 1 + self.Λ.shape[-1] ** 2, torch.cat([self.ν.unsqueeze(-1), self.Λ.flatten(-2)], -1))
