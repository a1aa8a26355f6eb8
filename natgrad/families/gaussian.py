"""Gaussians with a full covariance: mean and precision, precision alone, mean alone.

A symmetric matrix inside a point is packed as vec, row by row, and only its symmetric part is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.accelerate.devices import can_read
from natgrad.families.base import ExponentialFamily, broadcast, check_event, check_vector, expect
from natgrad.families.domains import Cone, Domain, Space, refuse_indefinite, refuse_non_finite
from natgrad.families.information import Information
from natgrad.show import brief


def side(p: int, vectors: int) -> int:
    """d such that p = d·vectors + d², or 0 if there is none.

    >>> side(6, 1), side(9, 0), side(7, 1)
    (2, 3, 0)
    """
    d = (math.isqrt(vectors * vectors + 4 * p) - vectors) // 2
    return d if d * (d + vectors) == p else 0


def symmetric(A: Tensor) -> Tensor:
    """½(A + Aᵀ)."""
    return 0.5 * (A + A.mT)


def square(vec: Tensor) -> Tensor:
    """vec [*batch d²] → its symmetric part [*batch d d]."""
    d = math.isqrt(vec.shape[-1])
    return symmetric(vec.unflatten(-1, (d, d)))


def cholesky_checked(A: Tensor, what: str, word: str) -> Tensor:
    """L with LLᵀ = A [*batch d d]. On a CPU an indefinite or infinite A raises; a GPU is not waited for."""
    if can_read(A):
        refuse_non_finite(A.detach(), f"{what}: {word}")
    L, info = torch.linalg.cholesky_ex(A)
    if can_read(A):
        refuse_indefinite(A, info, what, word)
    return L


def inverse_of(L: Tensor) -> Tensor:
    """(LLᵀ)⁻¹ [*batch d d]. The derivative of ``torch.cholesky_inverse`` in forward mode is wrong (torch 2.13).

    >>> inverse_of(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    tensor([[0.2500, 0.0000],
            [0.0000, 1.0000]])
    """
    return symmetric(torch.cholesky_solve(torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L), L))


def _pack(vector: Tensor, matrix: Tensor) -> Tensor:
    """(v, vec A) [*batch d + d²]."""
    return torch.cat([vector, matrix.flatten(-2)], -1)


def _unpack(point: Tensor) -> tuple[Tensor, Tensor]:
    """A vector [*batch d] and a symmetric matrix [*batch d d]."""
    d = side(point.shape[-1], 1)
    return point[..., :d], square(point[..., d:])


def _moment_matrix(xi: Tensor) -> Tensor:
    """E (1, x)(1, x)ᵀ [*batch 1+d 1+d]: positive definite if and only if the covariance is."""
    μ, m = _unpack(xi)
    top = torch.cat([torch.ones_like(μ[..., :1]), μ], -1).unsqueeze(-2)
    return torch.cat([top, torch.cat([μ.unsqueeze(-1), -2 * m], -1)], -2)


@final
@dataclass(frozen=True)
class FullGaussian(ExponentialFamily):
    """Normal vectors with unknown mean and unknown covariance.

    Method:
        N(μ, Σ) in d dimensions: t = (x, −½ vec xxᵀ), η = (h, vec Λ), points [*batch d + d²], data [*batch d].

        Information form Λ = Σ⁻¹, h = Λμ. log Z = ½(d log 2π − log|Λ| + hᵀΛ⁻¹h) depends on the symmetric part ½(Λ + Λᵀ)
        alone: F is singular along antisymmetric directions, and ``sharp`` returns symmetric ones. No d² × d² matrix is
        formed.

    Example:
        >>> gaussian = FullGaussian()
        >>> eta = gaussian.from_covariance(torch.tensor([1.0, 2.0]), 2 * torch.eye(2))
        >>> gaussian.information_form(eta)[0]
        tensor([0.5000, 1.0000])
    """

    natural_domain: ClassVar[Domain] = Cone(lambda eta: _unpack(eta)[1], "the precision matrix")
    mean_domain: ClassVar[Domain] = Cone(_moment_matrix, "the matrix of moments E (1, x)(1, x)ᵀ", 2.0)
    support: ClassVar[C.Constraint] = C.real_vector

    def statistics(self, x: Tensor) -> Tensor:
        return _pack(x, -0.5 * x.unsqueeze(-1) * x.unsqueeze(-2))

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (side(p, 1),)

    def from_covariance(self, μ: Tensor, Σ: Tensor) -> Tensor:
        """η of the covariance form (μ, Σ)."""
        μ, Σ = broadcast("FullGaussian", μ, Σ, 2)
        L = cholesky_checked(symmetric(Σ), "FullGaussian", "the covariance")
        Λ = inverse_of(L)
        return _pack((Λ @ μ.unsqueeze(-1)).squeeze(-1), Λ)

    def from_information(self, h: Tensor, Λ: Tensor) -> Tensor:
        """η of the information form (h, Λ)."""
        h, Λ = broadcast("FullGaussian", h, Λ, 2)
        return _pack(h, symmetric(Λ))

    def covariance_form(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """(μ, Σ)."""
        h, _, L = self._split(self._inside(eta, self.natural_domain, "eta"))
        Σ = inverse_of(L)
        return (Σ @ h.unsqueeze(-1)).squeeze(-1), Σ

    def information_form(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """(h, Λ), with a symmetric Λ."""
        return _unpack(self._inside(eta, self.natural_domain, "eta"))

    def _distribution(self, eta: Tensor) -> D.Distribution:
        μ, Σ = self.covariance_form(eta)
        return D.MultivariateNormal(μ, covariance_matrix=Σ)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.MultivariateNormal)
        return self.from_covariance(d.loc, d.covariance_matrix)

    def _wrong_size(self, p: int) -> str:
        return "" if side(p, 1) else "(h, vec Λ), d + d² entries,"

    def _inside(self, point: Tensor, domain: Domain, what: str) -> Tensor:
        self._check_shape(point, what)
        return point  # the factorisation will tell whether the matrix is positive definite

    def _split(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [*batch d], Λ and its Cholesky factor [*batch d d]."""
        h, Λ = _unpack(eta)
        if can_read(h):
            refuse_non_finite(h.detach(), "FullGaussian: eta")
        return h, Λ, cholesky_checked(Λ, "FullGaussian: eta", "the precision matrix")

    def _log_partition(self, eta: Tensor) -> Tensor:
        h, _, L = self._split(eta)
        white = torch.linalg.solve_triangular(L, h.unsqueeze(-1), upper=False).squeeze(-1)
        log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (h.shape[-1] * math.log(2 * math.pi) + white.square().sum(-1)) - log_det

    def _mean(self, eta: Tensor) -> Tensor:
        μ, Σ = self.covariance_form(eta)
        return _pack(μ, -0.5 * (Σ + μ.unsqueeze(-1) * μ.unsqueeze(-2)))

    def _natural(self, xi: Tensor) -> Tensor:
        μ, m = _unpack(xi)
        Σ = -2 * m - μ.unsqueeze(-1) * μ.unsqueeze(-2)
        Λ = inverse_of(cholesky_checked(Σ, "FullGaussian: xi", "the covariance −2ξ₂ − ξ₁ξ₁ᵀ"))
        return _pack((Λ @ μ.unsqueeze(-1)).squeeze(-1), Λ)

    def _fisher(self, eta: Tensor) -> Information:
        """δμ = Σ(δh − δΛ μ), δΣ = −Σ δΛ Σ, and ξ = (μ, −½(Σ + μμᵀ)).

        In closed form: ``sharp`` takes products with Λ alone, which is several times faster than differentiating two
        factorisations, and does not subtract μμᵀ from E xxᵀ.
        """
        h, Λ, L = self._split(eta)
        column, d = h.unsqueeze(-1), h.shape[-1]
        μ = torch.cholesky_solve(column, L)

        def flat(v: Tensor) -> Tensor:
            Σ, δΛ = inverse_of(L), square(v[..., d:])
            δμ = Σ @ (v[..., :d].unsqueeze(-1) - δΛ @ μ)
            outer = δμ @ μ.mT
            return _pack(δμ.squeeze(-1), 0.5 * (Σ @ δΛ @ Σ - outer - outer.mT))

        def sharp(w: Tensor) -> Tensor:
            W = w[..., d:].unflatten(-1, (d, d))
            Λδμ = Λ @ w[..., :d].unsqueeze(-1)
            # Λ(W + Wᵀ + δμ μᵀ + μ δμᵀ)Λ with Λμ = h: the rank-two term is added after the large products.
            rank_two = torch.cat([Λδμ, column.expand_as(Λδμ)], -1) @ torch.cat([column.expand_as(Λδμ), Λδμ], -1).mT
            δΛ = Λ @ (W + W.mT) @ Λ + rank_two
            return _pack((Λδμ + δΛ @ μ).squeeze(-1), δΛ)

        return Information(eta, 1, flat, sharp, divides=False)


@final
@dataclass(frozen=True, eq=False)
class GaussianKnownMean(ExponentialFamily):
    """Normal vectors with known mean and unknown covariance.

    Args:
        m: The known mean [d].

    Method:
        N(m, Σ) with known m [d]: t = −½ vec (x − m)(x − m)ᵀ, η = vec Λ, points [*batch d²].

    Example:
        >>> GaussianKnownMean(torch.zeros(1)).mean(torch.tensor([4.0]))
        tensor([-0.1250])
    """

    m: Tensor

    natural_domain: ClassVar[Domain] = Cone(square, "the precision matrix")
    mean_domain: ClassVar[Domain] = Cone(lambda xi: -2 * square(xi), "the covariance −2ξ", 2.0)
    support: ClassVar[C.Constraint] = C.real_vector

    __repr__ = brief

    def __post_init__(self) -> None:
        check_vector(self.m, "GaussianKnownMean(m)")

    def statistics(self, x: Tensor) -> Tensor:
        check_event("GaussianKnownMean", tuple(self.m.shape), x)
        e = x - self.m.to(x)
        return (-0.5 * e.unsqueeze(-1) * e.unsqueeze(-2)).flatten(-2)

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (side(p, 0),)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        Σ = inverse_of(self._factor(eta))
        return D.MultivariateNormal(self.m.to(Σ).expand(Σ.shape[:-1]), covariance_matrix=Σ)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.MultivariateNormal)
        if not bool((d.loc == self.m.to(d.loc)).all()):
            raise ValueError(
                "GaussianKnownMean cannot hold a distribution with another mean: make a family with that mean, or use "
                "FullGaussian"
            )
        return d.precision_matrix.flatten(-2)

    def _wrong_size(self, p: int) -> str:
        d = self.m.shape[-1]
        return "" if p == d * d else f"vec Λ, {d}² entries,"

    def _inside(self, point: Tensor, domain: Domain, what: str) -> Tensor:
        self._check_shape(point, what)
        return point  # the factorisation will tell whether the matrix is positive definite

    def _factor(self, eta: Tensor) -> Tensor:
        return cholesky_checked(square(eta), "GaussianKnownMean: eta", "the precision matrix")

    def _log_partition(self, eta: Tensor) -> Tensor:
        L = self._factor(eta)
        return 0.5 * L.shape[-1] * math.log(2 * math.pi) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return (-0.5 * inverse_of(self._factor(eta))).flatten(-2)

    def _natural(self, xi: Tensor) -> Tensor:
        L = cholesky_checked(-2 * square(xi), "GaussianKnownMean: xi", "the covariance −2ξ")
        return inverse_of(L).flatten(-2)

    def _fisher(self, eta: Tensor) -> Information:
        """δξ = ½ Σ δΛ Σ; in closed form, since ``sharp`` needs products with Λ alone."""
        Λ, L = square(eta), self._factor(eta)

        def flat(v: Tensor) -> Tensor:
            Σ = inverse_of(L)
            return (0.5 * Σ @ square(v) @ Σ).flatten(-2)

        return Information(eta, 1, flat, lambda w: (2 * Λ @ square(w) @ Λ).flatten(-2), divides=False)


@final
@dataclass(frozen=True, eq=False)
class GaussianKnownCovariance(ExponentialFamily):
    """Normal vectors with unknown mean and known covariance.

    Args:
        Σ: The known covariance [d d], positive definite.

    Method:
        N(μ, Σ) with known Σ [d d]: t = x, η = h = Σ⁻¹μ, base measure exp(−½ xᵀΣ⁻¹x), F = Σ; points and data [*batch d].

        log Z = ½(d log 2π + log|Σ| + hᵀΣh), with a plus, so that ∇log Z = Σh = μ.

    Example:
        >>> GaussianKnownCovariance(2 * torch.eye(2)).mean(torch.tensor([1.0, 0.0]))
        tensor([2., 0.])
    """

    Σ: Tensor

    natural_domain: ClassVar[Domain] = Space()
    mean_domain: ClassVar[Domain] = Space()
    support: ClassVar[C.Constraint] = C.real_vector

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.Σ.ndim != 2 or self.Σ.shape[0] != self.Σ.shape[1] or not self.Σ.is_floating_point():
            raise ValueError(
                f"GaussianKnownCovariance(Σ) must be one matrix [d d] of floating-point numbers, got {self.Σ.dtype} "
                f"of shape {tuple(self.Σ.shape)}"
            )
        _ = self._L

    @cached_property
    def _L(self) -> Tensor:
        # In double precision: it serves points of every precision, and Σ itself is not rounded there.
        return cholesky_checked(symmetric(self.Σ.double()), "GaussianKnownCovariance", "the covariance Σ")

    def log_base(self, x: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(self._L.to(x), x.unsqueeze(-1), upper=False)
        return -0.5 * white.square().sum((-2, -1))

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p,)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.MultivariateNormal(self.mean(eta), scale_tril=self._L.to(eta))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.MultivariateNormal)
        if not torch.allclose(d.covariance_matrix, self.Σ.to(d.loc)):
            raise ValueError(
                "GaussianKnownCovariance cannot hold a distribution with another covariance: make a family with that "
                "one, or use FullGaussian"
            )
        return self._natural(d.loc)

    def _wrong_size(self, p: int) -> str:
        d = self.Σ.shape[-1]
        return "" if p == d else f"as many entries as the covariance has rows, {d},"

    def _log_partition(self, eta: Tensor) -> Tensor:
        log_det = self._L.to(eta).diagonal().log().sum()
        return 0.5 * (eta.shape[-1] * math.log(2 * math.pi) + self.pair(eta, self._mean(eta))) + log_det

    def _mean(self, eta: Tensor) -> Tensor:
        return eta @ symmetric(self.Σ.to(eta))

    def _natural(self, xi: Tensor) -> Tensor:
        L = self._L.to(xi)
        return torch.cholesky_solve(xi.unsqueeze(-1), L).squeeze(-1)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return -0.5 * (eta.shape[-1] + self.pair(eta, self._mean(eta)))
