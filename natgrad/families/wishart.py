"""Random covariances: the Wishart family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints

from natgrad.families.domains import Box, Concave, Cone, Domain, Parts
from natgrad.families.exponential import ExponentialFamily, expect, solved
from natgrad.families.information import Information, WishartInformation, factored, side, square, symmetric
from natgrad.families.special import trigamma


@final
@dataclass(frozen=True)
class Wishart(ExponentialFamily):
    """X = Σ xxᵀ of ν vectors x ~ N(0, V): t = (log|X|, −½ vec X), η = (½(ν − d − 1), vec V⁻¹), points [*batch 1 + d²].

    log Z = ½νd log 2 − ½ν log|V⁻¹| + log Γ_d(½ν), of the symmetric part of V⁻¹ (ERRATA 32); ν > d − 1, X [*batch d d].

    >>> Wishart().mean(torch.tensor([1.0, 2.0]))[1]  # d = 1, ν = 4, V = ½: −½ E X = −½ ν V
    tensor(-1.0000)
    """

    @property
    def natural_domain(self) -> Domain:
        return Parts((Box((-1.0,)), Cone(square, "the inverse scale matrix V⁻¹")), (1, -1))

    @property
    def mean_domain(self) -> Domain:
        return Concave(
            _slacks,
            ("a positive definite E X = −2ξ₂", "E log|X| below log|E X| (Jensen; equal if all data are the same)"),
        )

    @property
    def support(self) -> constraints.Constraint:
        return constraints.positive_definite

    def statistics(self, x: Tensor) -> Tensor:
        log_det = torch.linalg.slogdet(x).logabsdet.unsqueeze(-1)
        return torch.cat([log_det, (-0.5 * symmetric(x)).flatten(-2)], -1)

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., 0, 0])

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (side(p - 1, 0), side(p - 1, 0))

    def distribution(self, eta: Tensor) -> D.Distribution:
        ν, _, L = self._parts(self._inside(eta, self.natural_domain, "eta"))
        return D.Wishart(ν, covariance_matrix=torch.cholesky_inverse(L))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Wishart)
        assert isinstance(d, D.Wishart)
        Λ = d.precision_matrix
        a = 0.5 * (d.df - Λ.shape[-1] - 1)
        return torch.cat([a.unsqueeze(-1), Λ.flatten(-2)], -1)

    def rsample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """Bartlett: X = CCᵀ, C = L⁻ᵀA for V⁻¹ = LLᵀ; A lower triangular, normal below χ of ν, ν − 1, … degrees.

        torch draws every sample again that is not singular, and warns: not by ``D.Wishart``.
        """
        ν, _, L = self._parts(self._inside(eta, self.natural_domain, "eta"))
        d = L.shape[-1]
        half = _halves(ν, d).expand(*shape, *ν.shape, d)
        χ = (2 * torch._standard_gamma(half, generator=generator)).sqrt()
        z = torch.randn(*half.shape, d, dtype=L.dtype, device=L.device, generator=generator)
        A = z.tril(-1) + torch.diag_embed(χ)
        C = torch.linalg.solve_triangular(L.mT.expand(A.shape), A, upper=True)
        return C @ C.mT

    def sample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.rsample(eta, shape, generator)

    def _width(self, p: int) -> str:
        return "" if p > 1 and side(p - 1, 0) else "(½(ν − d − 1), vec V⁻¹), 1 + d² entries,"

    def _parts(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ν [*batch], Λ = V⁻¹ and its factor [*batch d d]."""
        Λ = square(eta[..., 1:])
        L = factored(Λ, "Wishart: eta", "the inverse scale matrix V⁻¹")
        return 2 * eta[..., 0] + Λ.shape[-1] + 1, Λ, L

    def _log_partition(self, eta: Tensor) -> Tensor:
        ν, Λ, L = self._parts(eta)
        d = Λ.shape[-1]
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * ν * (d * math.log(2) - log_det) + torch.mvlgamma(0.5 * ν, d)

    def _mean(self, eta: Tensor) -> Tensor:
        ν, Λ, L = self._parts(eta)
        d = Λ.shape[-1]
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        first = d * math.log(2) - log_det + torch.digamma(_halves(ν, d)).sum(-1)
        second = -0.5 * ν[..., None, None] * torch.cholesky_inverse(L)
        return torch.cat([first.unsqueeze(-1), second.flatten(-2)], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        M = -2 * square(xi[..., 1:])
        d = M.shape[-1]
        s = torch.linalg.slogdet(M).logabsdet - xi[..., 0]  # d log ½ν − Σ ψ((ν + 1 − j)/2) ≈ ½d(d + 1)/ν
        ν = d - 1 + 0.5 * d * (d + 1) / s
        Λ = ν[..., None, None] * torch.cholesky_inverse(factored(M, "Wishart: xi", "E X = −2ξ₂"))
        return solved(self, xi, torch.cat([0.5 * (ν - d - 1).unsqueeze(-1), Λ.flatten(-2)], -1))

    def _fisher(self, eta: Tensor) -> Information:
        ν, Λ, L = self._parts(eta)
        return WishartInformation(ν, trigamma(_halves(ν, Λ.shape[-1])).sum(-1), Λ, L)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])


def _halves(ν: Tensor, d: int) -> Tensor:
    """(ν + 1 − j)/2 [*batch d]."""
    return 0.5 * (ν.unsqueeze(-1) - torch.arange(d, dtype=ν.dtype, device=ν.device))


def _slacks(xi: Tensor) -> Tensor:
    M = -2 * square(xi[..., 1:])
    least = torch.linalg.eigvalsh(M)[..., 0]
    return torch.stack([least, torch.linalg.slogdet(M).logabsdet - xi[..., 0]], -1)
