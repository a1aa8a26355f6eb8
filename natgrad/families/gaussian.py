"""Gaussians with a full covariance: mean and precision, precision alone, mean alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.base import broadcast, check_event, check_vector
from natgrad.families.domains import Box, Cone, Domain, check_finite
from natgrad.families.exponential import ExponentialFamily, expect
from natgrad.families.information import (
    GaussianInformation,
    Information,
    Matrix,
    PrecisionInformation,
    factored,
    joined,
    looked_at,
    moment_matrix,
    side,
    square,
    symmetric,
)


@final
@dataclass(frozen=True)
class FullGaussian(ExponentialFamily):
    """N(μ, Σ) in d dimensions: t = (x, −½ vec xxᵀ), η = (h, vec Λ), points [*batch d + d²], data [*batch d].

    Information form Λ = Σ⁻¹, h = Λμ. log Z = ½(d log 2π − log|Λ| + hᵀΛ⁻¹h), with a plus (ERRATA 30), of the symmetric
    part ½(Λ + Λᵀ), on which alone Z depends (ERRATA 32): F is singular along antisymmetric directions, and ♯ returns
    symmetric ones. No d² × d² matrix is made.

    >>> gaussian = FullGaussian()
    >>> eta = gaussian.from_covariance(torch.tensor([1.0, 2.0]), 2 * torch.eye(2))
    >>> gaussian.information_form(eta)[0]
    tensor([0.5000, 1.0000])
    """

    @property
    def natural_domain(self) -> Domain:
        return Cone(lambda eta: _split(eta)[1], "the precision matrix")

    @property
    def mean_domain(self) -> Domain:
        return Cone(lambda xi: moment_matrix(*_split(xi)), "the matrix of moments E (1, x)(1, x)ᵀ", 2.0)

    @property
    def support(self) -> C.Constraint:
        return C.real_vector

    def statistics(self, x: Tensor) -> Tensor:
        return joined(x, -0.5 * x.unsqueeze(-1) * x.unsqueeze(-2))

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., 0])

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (side(p, 1),)

    def from_covariance(self, μ: Tensor, Σ: Tensor) -> Tensor:
        """η of the covariance form (μ, Σ)."""
        μ, Σ = broadcast("FullGaussian", μ, Σ, 2)
        L = factored(symmetric(Σ), "FullGaussian", "the covariance")
        Λ = torch.cholesky_inverse(L)
        return joined((Λ @ μ.unsqueeze(-1)).squeeze(-1), Λ)

    def from_information(self, h: Tensor, Λ: Tensor) -> Tensor:
        """η of the information form (h, Λ)."""
        h, Λ = broadcast("FullGaussian", h, Λ, 2)
        return joined(h, symmetric(Λ))

    def covariance_form(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """(μ, Σ)."""
        h, L = self._factored(self._inside(eta, self.natural_domain, "eta"))
        Σ = torch.cholesky_inverse(L)
        return (Σ @ h.unsqueeze(-1)).squeeze(-1), Σ

    def information_form(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """(h, Λ), with a symmetric Λ."""
        return _split(self._inside(eta, self.natural_domain, "eta"))

    def distribution(self, eta: Tensor) -> D.Distribution:
        μ, Σ = self.covariance_form(eta)
        return D.MultivariateNormal(μ, covariance_matrix=Σ)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.MultivariateNormal)
        assert isinstance(d, D.MultivariateNormal)
        return self.from_covariance(d.loc, d.covariance_matrix)

    def _width(self, p: int) -> str:
        return "" if side(p, 1) else "(h, vec Λ), d + d² entries,"

    def _inside(self, point: Tensor, domain: Domain, what: str) -> Tensor:
        self._check_shape(point, what)
        return point  # whether the matrix is positive definite, its factorisation tells

    def _factored(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        h, Λ = _split(eta)
        if looked_at(h):
            check_finite(h.detach(), "FullGaussian: eta")
        return h, factored(Λ, "FullGaussian: eta", "the precision matrix")

    def _log_partition(self, eta: Tensor) -> Tensor:
        h, L = self._factored(eta)
        white = torch.linalg.solve_triangular(L, h.unsqueeze(-1), upper=False).squeeze(-1)
        log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (h.shape[-1] * math.log(2 * math.pi) + white.square().sum(-1)) - log_det

    def _mean(self, eta: Tensor) -> Tensor:
        μ, Σ = self.covariance_form(eta)
        return joined(μ, -0.5 * (Σ + μ.unsqueeze(-1) * μ.unsqueeze(-2)))

    def _natural(self, xi: Tensor) -> Tensor:
        μ, m = _split(xi)
        Σ = -2 * m - μ.unsqueeze(-1) * μ.unsqueeze(-2)
        Λ = torch.cholesky_inverse(factored(Σ, "FullGaussian: xi", "the covariance −2ξ₂ − ξ₁ξ₁ᵀ"))
        return joined((Λ @ μ.unsqueeze(-1)).squeeze(-1), Λ)

    def _fisher(self, eta: Tensor) -> Information:
        h, L = self._factored(eta)
        return GaussianInformation(h, _split(eta)[1], L)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])


@final
@dataclass(frozen=True, eq=False)
class GaussianKnownMean(ExponentialFamily):
    """N(m, Σ) with known m [d]: t = −½ vec (x − m)(x − m)ᵀ, η = vec Λ, points [*batch d²].

    >>> GaussianKnownMean(torch.zeros(1)).mean(torch.tensor([4.0]))
    tensor([-0.1250])
    """

    m: Tensor

    def __post_init__(self) -> None:
        check_vector(self.m, "GaussianKnownMean(m)")

    @property
    def natural_domain(self) -> Domain:
        return Cone(square, "the precision matrix")

    @property
    def mean_domain(self) -> Domain:
        return Cone(lambda xi: -2 * square(xi), "the covariance −2ξ", 2.0)

    @property
    def support(self) -> C.Constraint:
        return C.real_vector

    def statistics(self, x: Tensor) -> Tensor:
        check_event("GaussianKnownMean", tuple(self.m.shape), x)
        e = x - self.m.to(x)
        return (-0.5 * e.unsqueeze(-1) * e.unsqueeze(-2)).flatten(-2)

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., 0])

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (side(p, 0),)

    def distribution(self, eta: Tensor) -> D.Distribution:
        Σ = torch.cholesky_inverse(self._factored(self._inside(eta, self.natural_domain, "eta")))
        return D.MultivariateNormal(self.m.to(Σ).expand(Σ.shape[:-1]), covariance_matrix=Σ)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.MultivariateNormal)
        assert isinstance(d, D.MultivariateNormal)
        if not bool((d.loc == self.m.to(d.loc)).all()):
            raise ValueError(
                "GaussianKnownMean cannot hold a distribution with another mean: make a family with that mean, or use "
                "FullGaussian"
            )
        return d.precision_matrix.flatten(-2)

    def _width(self, p: int) -> str:
        d = self.m.shape[-1]
        return "" if p == d * d else f"vec Λ, {d}² entries,"

    def _inside(self, point: Tensor, domain: Domain, what: str) -> Tensor:
        self._check_shape(point, what)
        return point  # whether the matrix is positive definite, its factorisation tells

    def _factored(self, eta: Tensor) -> Tensor:
        return factored(square(eta), "GaussianKnownMean: eta", "the precision matrix")

    def _log_partition(self, eta: Tensor) -> Tensor:
        L = self._factored(eta)
        return 0.5 * L.shape[-1] * math.log(2 * math.pi) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return (-0.5 * torch.cholesky_inverse(self._factored(eta))).flatten(-2)

    def _natural(self, xi: Tensor) -> Tensor:
        L = factored(-2 * square(xi), "GaussianKnownMean: xi", "the covariance −2ξ")
        return torch.cholesky_inverse(L).flatten(-2)

    def _fisher(self, eta: Tensor) -> Information:
        return PrecisionInformation(square(eta), self._factored(eta))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])


@final
@dataclass(frozen=True, eq=False)
class GaussianKnownCovariance(ExponentialFamily):
    """N(μ, Σ) with known Σ [d d]: t = x, η = h = Σ⁻¹μ, base measure exp(−½ xᵀΣ⁻¹x), F = Σ; points and data [*batch d].

    log Z = ½(d log 2π + log|Σ| + hᵀΣh): the paper prints a minus, with which ∇log Z would be −μ (ERRATA 30).

    >>> GaussianKnownCovariance(2 * torch.eye(2)).mean(torch.tensor([1.0, 0.0]))
    tensor([2., 0.])
    """

    Σ: Tensor

    def __post_init__(self) -> None:
        if self.Σ.ndim != 2 or self.Σ.shape[0] != self.Σ.shape[1] or not self.Σ.is_floating_point():
            raise ValueError(
                f"GaussianKnownCovariance(Σ) must be one matrix [d d] of floating-point numbers, got {self.Σ.dtype} "
                f"of shape {tuple(self.Σ.shape)}"
            )
        _ = self._L

    @property
    def natural_domain(self) -> Domain:
        return Box()

    @property
    def mean_domain(self) -> Domain:
        return Box()

    @property
    def support(self) -> C.Constraint:
        return C.real_vector

    @cached_property
    def _L(self) -> Tensor:
        return factored(symmetric(self.Σ), "GaussianKnownCovariance", "the covariance Σ")

    def log_base(self, x: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(self._L.to(x), x.unsqueeze(-1), upper=False)
        return -0.5 * white.square().sum((-2, -1))

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p,)

    def distribution(self, eta: Tensor) -> D.Distribution:
        return D.MultivariateNormal(self.mean(eta), scale_tril=self._L.to(eta))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.MultivariateNormal)
        assert isinstance(d, D.MultivariateNormal)
        if not torch.allclose(d.covariance_matrix, self.Σ.to(d.loc)):
            raise ValueError(
                "GaussianKnownCovariance cannot hold a distribution with another covariance: make a family with that "
                "one, or use FullGaussian"
            )
        return self._natural(d.loc)

    def _width(self, p: int) -> str:
        d = self.Σ.shape[-1]
        return "" if p == d else f"as many entries as the covariance has rows, {d},"

    def _log_partition(self, eta: Tensor) -> Tensor:
        log_det = self._L.to(eta).diagonal().log().sum()
        return 0.5 * (eta.shape[-1] * math.log(2 * math.pi) + self.pair(eta, self._mean(eta))) + log_det

    def _mean(self, eta: Tensor) -> Tensor:
        return eta @ symmetric(self.Σ).to(eta)

    def _natural(self, xi: Tensor) -> Tensor:
        return torch.cholesky_solve(xi.unsqueeze(-1), self._L.to(xi)).squeeze(-1)

    def _fisher(self, eta: Tensor) -> Information:
        return Matrix(symmetric(self.Σ).to(eta).expand(*eta.shape, eta.shape[-1]))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return -0.5 * (eta.shape[-1] + self.pair(eta, self._mean(eta)))


def _split(point: Tensor) -> tuple[Tensor, Tensor]:
    """h [*batch d] and the symmetric part of Λ [*batch d d], or their means."""
    d = side(point.shape[-1], 1)
    return point[..., :d], square(point[..., d:])
