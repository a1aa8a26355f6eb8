"""Conjugate likelihoods of a mean, or of linear weights: Gaussian priors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import Constraint

from natgrad.errors import DomainError
from natgrad.families import DiagonalGaussian, FullGaussian
from natgrad.vi.conjugate import Conjugate, check_positive


@final
@dataclass(frozen=True)
class GaussianMean(Conjugate):
    """x [d] ~ N(z, Σ) with a known ``covariance`` Σ [d d], t = (z, −½vec zzᵀ): λ = (Σ⁻¹Σ_n x_n, n Σ⁻¹).

    >>> GaussianMean(torch.tensor([[0.5]])).sites(torch.tensor([[1.0], [2.0]]))
    tensor([6., 4.])
    """

    covariance: Tensor

    def __post_init__(self) -> None:
        _check_covariance(self.covariance)

    @property
    def family(self) -> FullGaussian:
        return FullGaussian()

    @property
    def support(self) -> Constraint:
        return constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        Λ = torch.linalg.inv(self.covariance)
        Λ = 0.5 * (Λ + Λ.mT)
        each = torch.cat([x @ Λ, Λ.flatten().expand(*x.shape[:-1], -1)], -1)
        return each.sum(0)


@dataclass(frozen=True)
class DiagonalMean(Conjugate):
    """Coordinates by themselves, around a mean z [d], with known ``variance`` σ² [d] or one for all; t = (z, −½z²)."""

    variance: float | Tensor

    def __post_init__(self) -> None:
        check_positive(self, "variance", self.variance)

    @property
    def family(self) -> DiagonalGaussian:
        return DiagonalGaussian()


@final
@dataclass(frozen=True)
class DiagonalGaussianMean(DiagonalMean):
    """x [d] ~ N(z, diag σ²): λ = (Σ x/σ², n/σ²)."""

    @property
    def support(self) -> Constraint:
        return constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        return torch.cat([x / self.variance, torch.ones_like(x) / self.variance], -1).sum(0)


@final
@dataclass(frozen=True)
class LogNormalMean(DiagonalMean):
    """log x [d] ~ N(z, diag σ²) with known ``variance`` of the logarithms."""

    @property
    def support(self) -> Constraint:
        return constraints.independent(constraints.positive, 1)

    def _sites(self, x: Tensor) -> Tensor:
        return DiagonalGaussianMean(self.variance).sites(x.log())


@final
@dataclass(frozen=True)
class LinearWeights(Conjugate):
    """y_n ~ N(x_nᵀz, σ²): Bayesian linear regression at known inputs x [n d]. λ = (Σ x_n y_n/σ², Σ x_n x_nᵀ/σ²)."""

    inputs: Tensor
    variance: float

    def __post_init__(self) -> None:
        check_positive(self, "variance", self.variance)

    @property
    def family(self) -> FullGaussian:
        return FullGaussian()

    @property
    def support(self) -> Constraint:
        return constraints.real

    def _sites(self, x: Tensor) -> Tensor:
        if x.shape != self.inputs.shape[:1]:
            raise ValueError(f"inputs {tuple(self.inputs.shape)} need one datum a row, got shape {tuple(x.shape)}")
        return torch.cat([self.inputs.T @ x, (self.inputs.T @ self.inputs).flatten()]) / self.variance


def _check_covariance(covariance: Tensor) -> None:
    square = covariance.ndim == 2 and covariance.shape[0] == covariance.shape[1]
    if not square or not torch.allclose(covariance, covariance.mT):
        raise ValueError(f"the covariance must be a symmetric matrix [d d], got shape {tuple(covariance.shape)}")
    _, info = torch.linalg.cholesky_ex(covariance)
    if bool(info > 0):
        raise DomainError("the covariance must be positive definite: add a little to its diagonal, or drop a direction")
