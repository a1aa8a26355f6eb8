"""Random covariances: the Wishart family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.base import ExponentialFamily, expect, natural_by_newton, seeded
from natgrad.families.domains import Concave, Cone, Domain, DomainProduct, OpenBox
from natgrad.families.gaussian import cholesky_checked, inverse_of, side, square, symmetric
from natgrad.families.information import Information
from natgrad.families.special import trigamma, trigamma_excess
from natgrad.linalg import least_eigenvalue


def _mean_slacks(xi: Tensor) -> Tensor:
    M = -2 * square(xi[..., 1:])
    least = least_eigenvalue(M)
    return torch.stack([least, torch.linalg.slogdet(M).logabsdet - xi[..., 0]], -1)


@final
@dataclass(frozen=True)
class Wishart(ExponentialFamily):
    """The Wishart distributions of a positive definite matrix, such as a sample covariance.

    Method:
        X = Σ xxᵀ of ν vectors x ~ N(0, V): t = (log|X|, −½ vec X), η = (½(ν − d − 1), vec V⁻¹), points [*batch 1 + d²].

        log Z = ½νd log 2 − ½ν log|V⁻¹| + log Γ_d(½ν), a function of the symmetric part of V⁻¹; ν > d − 1, X [*batch d
        d].

    Example:
        >>> Wishart().mean(torch.tensor([1.0, 2.0]))[1]  # d = 1, ν = 4, V = ½: −½ E X = −½ ν V
        tensor(-1.)
    """

    natural_domain: ClassVar[Domain] = DomainProduct(
        (OpenBox(-1.0), Cone(square, "the inverse scale matrix V⁻¹")), (1, -1)
    )
    mean_domain: ClassVar[Domain] = Concave(
        _mean_slacks,
        ("a positive definite E X = −2ξ₂", "E log|X| below log|E X| (Jensen; equal if all data are the same)"),
    )
    support: ClassVar[C.Constraint] = C.positive_definite

    def statistics(self, x: Tensor) -> Tensor:
        log_det = torch.linalg.slogdet(x).logabsdet.unsqueeze(-1)
        return torch.cat([log_det, (-0.5 * symmetric(x)).flatten(-2)], -1)

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (side(p - 1, 0), side(p - 1, 0))

    def _distribution(self, eta: Tensor) -> D.Distribution:
        ν, _, L = self._split(eta)
        return D.Wishart(ν, covariance_matrix=inverse_of(L))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.Wishart)
        Λ = d.precision_matrix
        a = 0.5 * (d.df - Λ.shape[-1] - 1)
        return torch.cat([a.unsqueeze(-1), Λ.flatten(-2)], -1)

    def rsample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """Bartlett (1933): X = CCᵀ, C = L⁻ᵀA for V⁻¹ = LLᵀ; A lower triangular, normal below χ of ν, ν − 1, … degrees.

        ``D.Wishart`` is not used: it warns about and redraws samples that are not singular.
        """
        ν, _, L = self._split(self._inside(eta, self.natural_domain, "eta"))
        d = L.shape[-1]
        half = _halves(ν, d).expand(*shape, *ν.shape, d)
        with seeded(generator, eta.device):
            χ = (2 * D.Gamma(half, torch.ones_like(half), validate_args=False).rsample()).sqrt()
            z = torch.randn(*half.shape, d, dtype=L.dtype, device=L.device)
        A = z.tril(-1) + torch.diag_embed(χ)
        root = torch.linalg.solve_triangular(L.mT.expand(A.shape), A, upper=True)
        return root @ root.mT

    def sample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.rsample(eta, shape, generator)

    def _wrong_size(self, p: int) -> str:
        return "" if p > 1 and side(p - 1, 0) else "(½(ν − d − 1), vec V⁻¹), 1 + d² entries,"

    def _split(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ν [*batch], Λ = V⁻¹ and its Cholesky factor [*batch d d]."""
        Λ = square(eta[..., 1:])
        L = cholesky_checked(Λ, "Wishart: eta", "the inverse scale matrix V⁻¹")
        return 2 * eta[..., 0] + Λ.shape[-1] + 1, Λ, L

    def _log_partition(self, eta: Tensor) -> Tensor:
        ν, Λ, L = self._split(eta)
        d = Λ.shape[-1]
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * ν * (d * math.log(2) - log_det) + torch.mvlgamma(0.5 * ν, d)

    def _mean(self, eta: Tensor) -> Tensor:
        ν, Λ, L = self._split(eta)
        d = Λ.shape[-1]
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        first = d * math.log(2) - log_det + torch.digamma(_halves(ν, d)).sum(-1)
        second = -0.5 * ν[..., None, None] * inverse_of(L)
        return torch.cat([first.unsqueeze(-1), second.flatten(-2)], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        M = -2 * square(xi[..., 1:])
        d = M.shape[-1]
        s = torch.linalg.slogdet(M).logabsdet - xi[..., 0]  # d log ½ν − Σ ψ((ν + 1 − j)/2) ≈ ½d(d + 1)/ν
        ν = d - 1 + 0.5 * d * (d + 1) / s
        Λ = ν[..., None, None] * inverse_of(cholesky_checked(M, "Wishart: xi", "E X = −2ξ₂"))
        return natural_by_newton(self, xi, torch.cat([0.5 * (ν - d - 1).unsqueeze(-1), Λ.flatten(-2)], -1))

    def _fisher(self, eta: Tensor) -> Information:
        """δξ₁ = f δa − tr(V δΛ), δξ₂ = −V δa + ½ν V δΛ V, with V = Λ⁻¹, f = Σ ψ'((ν + 1 − j)/2).

        In closed form, since ``natural`` has none, and a dense F would have d⁴ entries. With xψ'(x) = 1 + e(x),
        f − 2d/ν is a sum of positive terms; the difference would cancel at large ν.
        """
        ν, Λ, L = self._split(eta)
        d, V = Λ.shape[-1], inverse_of(L)
        halves = _halves(ν, d)
        f, ν_ = trigamma(halves).sum(-1), ν[..., None, None]
        fewer = torch.arange(d, dtype=ν.dtype, device=ν.device) / ν.unsqueeze(-1)
        gap = ((trigamma_excess(halves) + fewer) / halves).sum(-1).to(ν)  # f − 2d/ν

        def flat(v: Tensor) -> Tensor:
            δa, δΛ = v[..., 0], square(v[..., 1:])
            first = f * δa - (V * δΛ).sum((-2, -1))
            second = -V * δa[..., None, None] + 0.5 * ν_ * V @ δΛ @ V
            return torch.cat([first.unsqueeze(-1), second.flatten(-2)], -1)

        def sharp(w: Tensor) -> Tensor:
            W = square(w[..., 1:])
            δa = (w[..., 0] + 2 / ν * (Λ * W).sum((-2, -1))) / gap
            δΛ = 2 / ν_ * (Λ @ W @ Λ + δa[..., None, None] * Λ)
            return torch.cat([δa.unsqueeze(-1), δΛ.flatten(-2)], -1)

        return Information(eta, 1, flat, sharp)


def _halves(ν: Tensor, d: int) -> Tensor:
    """(ν + 1 − j)/2 [*batch d]."""
    return 0.5 * (ν.unsqueeze(-1) - torch.arange(d, dtype=ν.dtype, device=ν.device))
