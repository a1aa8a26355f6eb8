"""Conjugate likelihoods: log p(data | z) = ⟨λ, t(z)⟩ + constant, with t the statistics of the family of z.

With the prior η₀ the posterior is η₀ + λ; ``sites`` computes λ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import Constraint

from natgrad.errors import DomainError
from natgrad.families.base import ExponentialFamily, check_event
from natgrad.families.categorical import Categorical
from natgrad.families.circle import VonMises
from natgrad.families.diagonal_gaussian import DiagonalGaussian
from natgrad.families.dirichlet import Beta, Dirichlet
from natgrad.families.discrete import Bernoulli
from natgrad.families.gaussian import FullGaussian
from natgrad.families.positive import Gamma
from natgrad.families.wishart import Wishart
from natgrad.linalg import check_positive


class Conjugate(ABC):
    """p(x | z) with log p(x | z) = ⟨λ(x), t(z)⟩ + constant, for t of ``family``, the family of z."""

    positive: ClassVar[tuple[str, ...]] = ()  # known parameters that must be

    def __post_init__(self) -> None:
        for name in self.positive:
            check_positive(getattr(self, name), f"{type(self).__name__}({name}=…)")

    @property
    @abstractmethod
    def family(self) -> ExponentialFamily:
        """The family of prior and posterior."""

    @property
    @abstractmethod
    def support(self) -> Constraint:
        """Where a datum may lie."""

    @abstractmethod
    def _sites(self, x: Tensor) -> Tensor: ...

    def sites(self, x: Tensor) -> Tensor:
        """λ of all data x [n *batch *event], summed over n; of the shape of a point."""
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError(f"{type(self).__name__} needs data [n …] with n ≥ 1, got shape {tuple(x.shape)}")
        inside = self.support.check(x)
        infinite = x.isinf()  # real numbers, as torch has them, hold ±∞, of which no λ is a number
        wrong = ~inside | (infinite if infinite.ndim == inside.ndim else infinite.any(-1))
        if bool(wrong.any()):
            at = [int(i) for i in wrong.nonzero()[0]]
            raise DomainError(
                f"datum x{at} of {type(self).__name__} lies outside its support, {self.support}: remove it, or choose "
                "another likelihood"
            )
        if x.is_floating_point():
            return self._sites(x)
        return self._sites(x.double()).to(torch.get_default_dtype())  # no integer is rounded before the sum


# Probabilities z with a Beta prior, t = (log z, log(1 − z)): λ counts successes and failures.


@final
@dataclass(frozen=True)
class BernoulliProbability(Conjugate):
    """x ∈ {0, 1} with P(1) = z.

    >>> BernoulliProbability().sites(torch.tensor([1.0, 1.0, 0.0]))
    tensor([2., 1.])
    """

    family = Beta()
    support = constraints.boolean

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([x, 1 - x], -1).sum(0)


@final
@dataclass(frozen=True)
class BinomialProbability(Conjugate):
    """x of ``count`` trials succeed, each with probability z."""

    count: int
    positive = ("count",)
    family = Beta()

    @property
    def support(self) -> Constraint:
        return constraints.integer_interval(0, self.count)

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([x, self.count - x], -1).sum(0)


@final
@dataclass(frozen=True)
class NegativeBinomialProbability(Conjugate):
    """x successes, each of probability z, before ``count`` failures, as in torch.distributions."""

    count: float
    positive = ("count",)
    family = Beta()
    support = constraints.nonnegative_integer

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, self.count)], -1).sum(0)


@final
@dataclass(frozen=True)
class GeometricProbability(Conjugate):
    """x failures before the first success, which has probability z, as in torch.distributions."""

    family = Beta()
    support = constraints.nonnegative_integer

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(x), x], -1).sum(0)


@final
@dataclass(frozen=True)
class CategoricalProbabilities(Conjugate):
    """x is one of ``classes`` classes 0, 1, … with probabilities z, of a Dirichlet prior, t = log z; λ counts them.

    >>> CategoricalProbabilities(3).sites(torch.tensor([0, 2, 2]))
    tensor([1., 0., 2.])
    """

    classes: int
    family = Dirichlet()

    @property
    def support(self) -> Constraint:
        return constraints.integer_interval(0, self.classes - 1)

    def _sites(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(x.long(), self.classes).sum(0).to(x.dtype)


@final
@dataclass(frozen=True)
class MultinomialProbabilities(Conjugate):
    """x [c] are counts of classes with probabilities z, of a Dirichlet prior."""

    family = Dirichlet()
    support = constraints.independent(constraints.nonnegative_integer, 1)

    def _sites(self, x: Tensor) -> Tensor:
        return x.sum(0)


@final
@dataclass(frozen=True)
class VonMisesDirection(Conjugate):
    """Angles x around the direction z with a known concentration κ: log p = κ cos(x − z), t = (cos z, sin z)."""

    concentration: float
    positive = ("concentration",)
    family = VonMises()
    support = constraints.real

    def _sites(self, x: Tensor) -> Tensor:
        return self.concentration * torch.stack([x.cos(), x.sin()], -1).sum(0)


@final
@dataclass(frozen=True)
class MixtureComponent(Conjugate):
    """z is the component that all data come from: x [n c] holds log p(datum n | component c), t = one-hot z.

    >>> MixtureComponent().sites(torch.tensor([[-1.0, -2.0], [-1.0, -3.0]]))
    tensor([-2., -5.])
    """

    family = Categorical()
    support = constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        return x.sum(0)


@final
@dataclass(frozen=True)
class Alternative(Conjugate):
    """z ∈ {0, 1} says which of two models the data come from: x [n 2] holds log p(datum | z) for z = 0 and z = 1."""

    family = Bernoulli()
    support = constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        check_event("Alternative", (2,), x)
        return (x[..., 1] - x[..., 0]).sum(0)


# Conjugate likelihoods of a mean, or of linear weights: Gaussian priors.


@final
@dataclass(frozen=True)
class GaussianMean(Conjugate):
    """x [d] ~ N(z, Σ) with a known ``covariance`` Σ [d d], t = (z, −½vec zzᵀ): λ = (Σ⁻¹Σ_n x_n, n Σ⁻¹).

    >>> GaussianMean(torch.tensor([[0.5]])).sites(torch.tensor([[1.0], [2.0]]))
    tensor([6., 4.])
    """

    covariance: Tensor
    family = FullGaussian()
    support = constraints.real_vector

    def __post_init__(self) -> None:
        _check_covariance(self.covariance)

    def _sites(self, x: Tensor) -> Tensor:
        check_event("GaussianMean", (len(self.covariance),), x)
        Λ = torch.linalg.inv(self.covariance.to(x))
        Λ = 0.5 * (Λ + Λ.mT)
        return torch.cat([x @ Λ, Λ.flatten().expand(*x.shape[:-1], -1)], -1).sum(0)


@dataclass(frozen=True)
class DiagonalGaussianMean(Conjugate):
    """x [d] ~ N(z, diag σ²) with known ``variance`` σ² [d] or one for all, t = (z, −½z²): λ = (Σ x/σ², n/σ²)."""

    variance: float | Tensor
    positive = ("variance",)
    family = DiagonalGaussian()
    support: ClassVar[Constraint] = constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        σ2 = torch.as_tensor(self.variance, dtype=x.dtype, device=x.device)
        if σ2.ndim:
            check_event(type(self).__name__, tuple(σ2.shape), x)
        return torch.cat([x / σ2, torch.ones_like(x) / σ2], -1).sum(0)


@final
@dataclass(frozen=True)
class LogNormalMean(DiagonalGaussianMean):
    """log x [d] ~ N(z, diag σ²) with known ``variance`` of the logarithms."""

    support = constraints.independent(constraints.positive, 1)

    def _sites(self, x: Tensor) -> Tensor:
        return super()._sites(x.log())


@final
@dataclass(frozen=True)
class LinearWeights(Conjugate):
    """y_n ~ N(x_nᵀz, σ²): Bayesian linear regression at known inputs x [n d]. λ = (Σ x_n y_n/σ², Σ x_n x_nᵀ/σ²)."""

    inputs: Tensor
    variance: float
    positive = ("variance",)
    family = FullGaussian()
    support = constraints.real

    def _sites(self, x: Tensor) -> Tensor:
        if x.shape != self.inputs.shape[:1]:
            raise ValueError(f"inputs {tuple(self.inputs.shape)} need one datum per row, got shape {tuple(x.shape)}")
        inputs = self.inputs.to(x)
        return torch.cat([inputs.T @ x, (inputs.T @ inputs).flatten()]) / self.variance


def _check_covariance(covariance: Tensor) -> None:
    square = covariance.ndim == 2 and covariance.shape[0] == covariance.shape[1]
    if not square or not torch.allclose(covariance, covariance.mT):
        raise ValueError(f"the covariance must be a symmetric matrix [d d], got shape {tuple(covariance.shape)}")
    _, info = torch.linalg.cholesky_ex(covariance)
    if bool(info > 0):
        raise DomainError("the covariance must be positive definite: add a little to its diagonal, or drop a direction")


# Conjugate likelihoods of a rate, a precision or a precision matrix: Gamma and Wishart priors.


class Rate(Conjugate):
    """z > 0 with a Gamma prior, t = (log z, z), and log p(x | z) = u log z − w(x) z + constant: λ = Σ (u, −w)."""

    family = Gamma()
    support: ClassVar[Constraint] = constraints.positive

    @abstractmethod
    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        """u and w."""

    def _sites(self, x: Tensor) -> Tensor:
        u, w = self._terms(x)
        return torch.stack([u if isinstance(u, Tensor) else torch.full_like(w, u), -w], -1).sum(0)


@final
@dataclass(frozen=True)
class PoissonRate(Rate):
    """Counts x with mean z: u = x, w = 1.

    >>> PoissonRate().sites(torch.tensor([2.0, 0.0, 4.0]))
    tensor([ 6., -3.])
    """

    support = constraints.nonnegative_integer

    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        return x, torch.ones_like(x)


@final
@dataclass(frozen=True)
class GammaRate(Rate):
    """Gamma data of known ``shape`` k and rate z: u = k, w = x. With k = 1, exponential data."""

    shape: float = 1.0
    positive = ("shape",)

    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        return self.shape, x


@final
@dataclass(frozen=True)
class WeibullRate(Rate):
    """p(x | z) = k z x^{k−1} exp(−z xᵏ) with known ``shape`` k, z = scale^−k: u = 1, w = xᵏ."""

    shape: float
    positive = ("shape",)

    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        return 1.0, x.pow(self.shape)


@final
@dataclass(frozen=True)
class LaplaceRate(Rate):
    """p(x | z) = (z/2) exp(−z|x − c|) with a known ``centre`` c, z = 1/scale: u = 1, w = |x − c|."""

    centre: float = 0.0
    support = constraints.real

    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        return 1.0, (x - self.centre).abs()


@dataclass(frozen=True)
class GaussianPrecision(Rate):
    """N(m, 1/z) with a known ``mean`` m: u = ½, w = ½(x − m)²."""

    mean: float = 0.0
    support: ClassVar[Constraint] = constraints.real

    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        return 0.5, 0.5 * (x - self.mean).square()


@final
@dataclass(frozen=True)
class LogNormalPrecision(GaussianPrecision):
    """log x ~ N(m, 1/z) with a known ``mean`` m of the logarithm: u = ½, w = ½(log x − m)²."""

    support = constraints.positive

    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        return super()._terms(x.log())


@final
@dataclass(frozen=True)
class InverseGaussianShape(Rate):
    """p(x | z) = √(z/2πx³) exp(−z(x − m)²/2m²x) with a known ``mean`` m: u = ½, w = (x − m)²/2m²x."""

    mean: float = 1.0
    positive = ("mean",)

    def _terms(self, x: Tensor) -> tuple[float | Tensor, Tensor]:
        return 0.5, (x - self.mean).square() / (2 * self.mean**2 * x)


@final
@dataclass(frozen=True)
class GaussianPrecisionMatrix(Conjugate):
    """N(m, z⁻¹) with a known ``mean`` m [d] and a Wishart prior, t = (log|z|, −½vec z): λ = (n/2, Σ δδᵀ), δ = x − m."""

    mean: Tensor
    family = Wishart()
    support = constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        check_event("GaussianPrecisionMatrix", tuple(self.mean.shape), x)
        δ = x - self.mean.to(x)
        half = torch.full_like(δ[..., :1], 0.5).sum(0)
        return torch.cat([half, torch.einsum("n...d,n...e->...de", δ, δ).flatten(-2)], -1)
