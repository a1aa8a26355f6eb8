"""Conjugate likelihoods of a rate, a precision or a precision matrix: Gamma and Wishart priors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import Constraint

from natgrad.families import Gamma, Wishart
from natgrad.vi.conjugate import Conjugate, check_positive


class Rate(Conjugate):
    """z > 0 with a Gamma prior, t = (log z, z), and log p(x | z) = u(x) log z − w(x) z + constant: λ = Σ (u, −w)."""

    @property
    def family(self) -> Gamma:
        return Gamma()

    @property
    def support(self) -> Constraint:
        return constraints.positive


@final
@dataclass(frozen=True)
class PoissonRate(Rate):
    """Counts x with mean z: u = x, w = 1.

    >>> PoissonRate().sites(torch.tensor([2.0, 0.0, 4.0]))
    tensor([ 6., -3.])
    """

    @property
    def support(self) -> Constraint:
        return constraints.nonnegative_integer

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([x.sum(0), -torch.ones_like(x).sum(0)], -1)


@final
@dataclass(frozen=True)
class GammaRate(Rate):
    """Gamma data of known ``shape`` k and rate z: u = k, w = x. With k = 1, exponential data."""

    shape: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "shape", self.shape)

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x, self.shape).sum(0), -x.sum(0)], -1)


@final
@dataclass(frozen=True)
class WeibullRate(Rate):
    """p(x | z) = k z x^{k−1} exp(−z xᵏ) with known ``shape`` k, z = scale^−k: u = 1, w = xᵏ."""

    shape: float

    def __post_init__(self) -> None:
        check_positive(self, "shape", self.shape)

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(x).sum(0), -x.pow(self.shape).sum(0)], -1)


@final
@dataclass(frozen=True)
class LaplaceRate(Rate):
    """p(x | z) = (z/2) exp(−z|x − c|) with a known ``centre`` c, z = 1/scale: u = 1, w = |x − c|."""

    centre: float = 0.0

    @property
    def support(self) -> Constraint:
        return constraints.real

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(x).sum(0), -(x - self.centre).abs().sum(0)], -1)


@final
@dataclass(frozen=True)
class GaussianPrecision(Rate):
    """N(m, 1/z) with a known ``mean`` m: u = ½, w = ½(x − m)²."""

    mean: float = 0.0

    @property
    def support(self) -> Constraint:
        return constraints.real

    def _sites(self, x: Tensor) -> Tensor:
        return 0.5 * torch.stack([torch.ones_like(x).sum(0), -(x - self.mean).square().sum(0)], -1)


@final
@dataclass(frozen=True)
class LogNormalPrecision(Rate):
    """log x ~ N(m, 1/z) with a known ``mean`` m of the logarithm: u = ½, w = ½(log x − m)²."""

    mean: float = 0.0

    def _sites(self, x: Tensor) -> Tensor:
        return GaussianPrecision(self.mean).sites(x.log())


@final
@dataclass(frozen=True)
class InverseGaussianShape(Rate):
    """p(x | z) = √(z/2πx³) exp(−z(x − m)²/2m²x) with a known ``mean`` m: u = ½, w = (x − m)²/2m²x."""

    mean: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "mean", self.mean)

    def _sites(self, x: Tensor) -> Tensor:
        w = (x - self.mean).square() / (self.mean**2 * x)
        return 0.5 * torch.stack([torch.ones_like(x).sum(0), -w.sum(0)], -1)


@final
@dataclass(frozen=True)
class GaussianPrecisionMatrix(Conjugate):
    """N(m, z⁻¹) with a known ``mean`` m [d] and a Wishart prior, t = (log|z|, −½vec z): λ = (n/2, Σ δδᵀ), δ = x − m."""

    mean: Tensor

    @property
    def family(self) -> Wishart:
        return Wishart()

    @property
    def support(self) -> Constraint:
        return constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        δ = x - self.mean
        half = torch.full_like(δ[..., :1], 0.5).sum(0)
        return torch.cat([half, torch.einsum("n...d,n...e->...de", δ, δ).flatten(-2)], -1)
