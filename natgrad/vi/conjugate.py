"""Conjugate likelihoods: log p(data | z) = ⟨λ, t(z)⟩ + constant, with t the statistics of the family of z.

With the prior η₀ the posterior is η₀ + λ; ``sites`` computes λ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

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

_COUNTS, _REAL, _POSITIVE = constraints.nonnegative_integer, constraints.real, constraints.positive
_VECTORS = constraints.real_vector


@final
@dataclass(frozen=True)
class Conjugate:
    """A likelihood that is conjugate to an exponential family, so that posteriors are exact.

    Args:
        name: Its name, for messages.
        family: The family of prior and posterior.
        support: Where a datum may lie.
        total: A function of data x [n *batch *event] inside the support that returns Σ_n λ(x_n), of the shape of a
            point.

    Method:
        log p(x | z) = ⟨λ(x), t(z)⟩ + constant, for the statistics t of ``family``.

    Example:
        >>> λ = lambda x: torch.stack([torch.full_like(x, 0.5), -0.5 * x.square()], -1).sum(0)
        >>> half = Conjugate("HalfNormalPrecision", Gamma(), constraints.positive, λ)  # |x| of x ~ N(0, 1/z)
        >>> half.sites(torch.tensor([2.0, 4.0]))
        tensor([  1., -10.])
    """

    name: str
    family: ExponentialFamily
    support: Constraint
    total: Callable[[Tensor], Tensor]

    def sites(self, x: Tensor) -> Tensor:
        """λ of all data x [n *batch *event], summed over n; of the shape of a point."""
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError(f"{self.name} needs data [n …] with n ≥ 1, got shape {tuple(x.shape)}")
        inside = self.support.check(x)
        infinite = x.isinf()  # real numbers, as torch has them, hold ±∞, of which no λ is a number
        wrong = ~inside | (infinite if infinite.ndim == inside.ndim else infinite.any(-1))
        if bool(wrong.any()):
            index = [int(i) for i in wrong.nonzero()[0]]
            raise DomainError(
                f"datum x{index} of {self.name} lies outside its support, {self.support}: remove it, or choose another "
                "likelihood"
            )
        if x.is_floating_point():
            return self.total(x)
        return self.total(x.double()).to(torch.get_default_dtype())  # no integer is rounded before the sum


def _sum(*entries: float | Tensor) -> Tensor:
    """Σ_n of the entries of λ, each [n *batch] or one number for all data, side by side; the last is a tensor."""
    like = entries[-1]
    assert isinstance(like, Tensor)
    return torch.stack([e if isinstance(e, Tensor) else torch.full_like(like, e) for e in entries], -1).sum(0)


# Probabilities z with a Beta prior, t = (log z, log(1 − z)): λ counts successes and failures.


def BernoulliProbability() -> Conjugate:
    """The likelihood of coin tosses with an unknown probability, which has a Beta prior.

    Method:
        x ∈ {0, 1} with P(1) = z.

    Example:
        >>> BernoulliProbability().sites(torch.tensor([1.0, 1.0, 0.0]))
        tensor([2., 1.])
    """
    return Conjugate("BernoulliProbability", Beta(), constraints.boolean, lambda x: _sum(x, 1 - x))


def BinomialProbability(count: int) -> Conjugate:
    """x of ``count`` trials succeed, each with probability z."""
    check_positive(count, "BinomialProbability(count=…)")
    trials = constraints.integer_interval(0, count)
    return Conjugate("BinomialProbability", Beta(), trials, lambda x: _sum(x, count - x))


def NegativeBinomialProbability(count: float) -> Conjugate:
    """x successes, each of probability z, before ``count`` failures, as in torch.distributions."""
    check_positive(count, "NegativeBinomialProbability(count=…)")
    return Conjugate("NegativeBinomialProbability", Beta(), _COUNTS, lambda x: _sum(x, torch.full_like(x, count)))


def GeometricProbability() -> Conjugate:
    """x failures before the first success, which has probability z, as in torch.distributions."""
    return Conjugate("GeometricProbability", Beta(), _COUNTS, lambda x: _sum(1.0, x))


def CategoricalProbabilities(classes: int) -> Conjugate:
    """The likelihood of class labels with unknown probabilities, which have a Dirichlet prior.

    Args:
        classes: The number of classes; a datum is one of 0, 1, …

    Method:
        t = log z for the probabilities z; λ counts the classes.

    Example:
        >>> CategoricalProbabilities(3).sites(torch.tensor([0, 2, 2]))
        tensor([1., 0., 2.])
    """

    def counts(x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(x.long(), classes).sum(0).to(x.dtype)

    labels = constraints.integer_interval(0, classes - 1)
    return Conjugate("CategoricalProbabilities", Dirichlet(), labels, counts)


def MultinomialProbabilities() -> Conjugate:
    """x [c] are counts of classes with probabilities z, of a Dirichlet prior."""
    counts = constraints.independent(_COUNTS, 1)
    return Conjugate("MultinomialProbabilities", Dirichlet(), counts, lambda x: x.sum(0))


def VonMisesDirection(concentration: float) -> Conjugate:
    """The likelihood of angles around an unknown direction.

    Args:
        concentration: The known concentration κ of the data.

    Method:
        log p = κ cos(x − z) for the direction z, t = (cos z, sin z).
    """
    check_positive(concentration, "VonMisesDirection(concentration=…)")
    return Conjugate("VonMisesDirection", VonMises(), _REAL, lambda x: concentration * _sum(x.cos(), x.sin()))


def MixtureComponent() -> Conjugate:
    """The likelihood of the mixture component that all data come from.

    Method:
        z is the component that all data come from: x [n c] holds log p(datum n | component c), t = one-hot z.

    Example:
        >>> MixtureComponent().sites(torch.tensor([[-1.0, -2.0], [-1.0, -3.0]]))
        tensor([-2., -5.])
    """
    return Conjugate("MixtureComponent", Categorical(), _VECTORS, lambda x: x.sum(0))


def Alternative() -> Conjugate:
    """The likelihood of a choice between two models, given what each says of the data.

    Method:
        z ∈ {0, 1} says which of two models the data come from: x [n 2] holds log p(datum | z) for z = 0 and z = 1.
    """

    def evidence(x: Tensor) -> Tensor:
        check_event("Alternative", (2,), x)
        return (x[..., 1] - x[..., 0]).sum(0)

    return Conjugate("Alternative", Bernoulli(), _VECTORS, evidence)


# Conjugate likelihoods of a mean, or of linear weights: Gaussian priors.


def GaussianMean(covariance: Tensor) -> Conjugate:
    """The likelihood of normal vectors with known covariance, for an unknown mean.

    Args:
        covariance: The known covariance Σ [d d], positive definite.

    Method:
        x [d] ~ N(z, Σ), t = (z, −½vec zzᵀ): λ = (Σ⁻¹Σ_n x_n, n Σ⁻¹).

    Example:
        >>> GaussianMean(torch.tensor([[0.5]])).sites(torch.tensor([[1.0], [2.0]]))
        tensor([6., 4.])
    """
    square = covariance.ndim == 2 and covariance.shape[0] == covariance.shape[1]
    if not square or not torch.allclose(covariance, covariance.mT):
        raise ValueError(f"the covariance must be a symmetric matrix [d d], got shape {tuple(covariance.shape)}")
    _, info = torch.linalg.cholesky_ex(covariance)
    if bool(info > 0):
        raise DomainError("the covariance must be positive definite: add a little to its diagonal, or drop a direction")

    def total(x: Tensor) -> Tensor:
        check_event("GaussianMean", (len(covariance),), x)
        Λ = torch.linalg.inv(covariance.to(x))
        Λ = 0.5 * (Λ + Λ.mT)
        return torch.cat([x @ Λ, Λ.flatten().expand(*x.shape[:-1], -1)], -1).sum(0)

    return Conjugate("GaussianMean", FullGaussian(), _VECTORS, total)


def DiagonalGaussianMean(variance: float | Tensor) -> Conjugate:
    """The likelihood of normal vectors with known variances, for an unknown mean.

    Args:
        variance: The known variances σ² [d], or one for all.

    Method:
        x [d] ~ N(z, diag σ²), t = (z, −½z²): λ = (Σ x/σ², n/σ²).
    """
    total = _diagonal_total("DiagonalGaussianMean", variance)
    return Conjugate("DiagonalGaussianMean", DiagonalGaussian(), _VECTORS, total)


def LogNormalMean(variance: float | Tensor) -> Conjugate:
    """log x [d] ~ N(z, diag σ²) with known ``variance`` of the logarithms."""
    total, positive = _diagonal_total("LogNormalMean", variance), constraints.independent(_POSITIVE, 1)
    return Conjugate("LogNormalMean", DiagonalGaussian(), positive, lambda x: total(x.log()))


def _diagonal_total(name: str, variance: float | Tensor) -> Callable[[Tensor], Tensor]:
    check_positive(variance, f"{name}(variance=…)")

    def total(x: Tensor) -> Tensor:
        σ2 = torch.as_tensor(variance, dtype=x.dtype, device=x.device)
        if σ2.ndim:
            check_event(name, tuple(σ2.shape), x)
        return torch.cat([x / σ2, torch.ones_like(x) / σ2], -1).sum(0)

    return total


def LinearWeights(inputs: Tensor, variance: float) -> Conjugate:
    """The likelihood of Bayesian linear regression at known inputs.

    Args:
        inputs: The known inputs x [n d].
        variance: The known variance σ² of the noise.

    Method:
        y_n ~ N(x_nᵀz, σ²): λ = (Σ x_n y_n/σ², Σ x_n x_nᵀ/σ²).
    """
    check_positive(variance, "LinearWeights(variance=…)")

    def total(y: Tensor) -> Tensor:
        if y.shape != inputs.shape[:1]:
            raise ValueError(f"inputs {tuple(inputs.shape)} need one datum per row, got shape {tuple(y.shape)}")
        x = inputs.to(y)
        return torch.cat([x.T @ y, (x.T @ x).flatten()]) / variance

    return Conjugate("LinearWeights", FullGaussian(), _REAL, total)


# Conjugate likelihoods of a rate or a precision z > 0 with a Gamma prior, t = (log z, z): where
# log p(x | z) = u log z − w(x) z + constant, λ = Σ (u, −w).


def PoissonRate() -> Conjugate:
    """The likelihood of counts with an unknown mean, which has a gamma prior.

    Method:
        Counts x with mean z: λ = (Σ x, −Σ 1).

    Example:
        >>> PoissonRate().sites(torch.tensor([2.0, 0.0, 4.0]))
        tensor([ 6., -3.])
    """
    return Conjugate("PoissonRate", Gamma(), _COUNTS, lambda x: _sum(x, -torch.ones_like(x)))


def GammaRate(shape: float = 1.0) -> Conjugate:
    """The likelihood of gamma data with an unknown rate, which has a gamma prior.

    Args:
        shape: The known shape k of the data; with 1 they are exponential.

    Method:
        λ = (Σ k, −Σ x).
    """
    check_positive(shape, "GammaRate(shape=…)")
    return Conjugate("GammaRate", Gamma(), _POSITIVE, lambda x: _sum(shape, -x))


def WeibullRate(shape: float) -> Conjugate:
    """The likelihood of Weibull data with known shape, for an unknown rate.

    Args:
        shape: The known exponent k.

    Method:
        p(x | z) = k z x^{k−1} exp(−z xᵏ), z = scale^−k: λ = (Σ 1, −Σ xᵏ).
    """
    check_positive(shape, "WeibullRate(shape=…)")
    return Conjugate("WeibullRate", Gamma(), _POSITIVE, lambda x: _sum(1.0, -x.pow(shape)))


def LaplaceRate(centre: float = 0.0) -> Conjugate:
    """The likelihood of Laplace data with known centre, for an unknown inverse scale.

    Args:
        centre: The known centre c.

    Method:
        p(x | z) = (z/2) exp(−z|x − c|), z = 1/scale: λ = (Σ 1, −Σ |x − c|).
    """
    return Conjugate("LaplaceRate", Gamma(), _REAL, lambda x: _sum(1.0, -(x - centre).abs()))


def GaussianPrecision(mean: float = 0.0) -> Conjugate:
    """The likelihood of normal data with known mean, for an unknown precision with gamma prior.

    Args:
        mean: The known mean m.

    Method:
        N(m, 1/z): λ = (Σ ½, −Σ ½(x − m)²).
    """
    return Conjugate("GaussianPrecision", Gamma(), _REAL, lambda x: _sum(0.5, -0.5 * (x - mean).square()))


def LogNormalPrecision(mean: float = 0.0) -> Conjugate:
    """The likelihood of log-normal data with known mean of the logarithm, for its precision.

    Args:
        mean: The known mean m of log x.

    Method:
        log x ~ N(m, 1/z): λ = (Σ ½, −Σ ½(log x − m)²).
    """
    return Conjugate("LogNormalPrecision", Gamma(), _POSITIVE, lambda x: _sum(0.5, -0.5 * (x.log() - mean).square()))


def InverseGaussianShape(mean: float = 1.0) -> Conjugate:
    """The likelihood of inverse Gaussian data with known mean, for an unknown shape.

    Args:
        mean: The known mean m.

    Method:
        p(x | z) = √(z/2πx³) exp(−z(x − m)²/2m²x): λ = (Σ ½, −Σ (x − m)²/2m²x).
    """
    check_positive(mean, "InverseGaussianShape(mean=…)")
    name = "InverseGaussianShape"
    return Conjugate(name, Gamma(), _POSITIVE, lambda x: _sum(0.5, -(x - mean).square() / (2 * mean**2 * x)))


def GaussianPrecisionMatrix(mean: Tensor) -> Conjugate:
    """The likelihood of normal vectors with known mean, for an unknown precision matrix.

    Args:
        mean: The known mean m [d].

    Method:
        N(m, z⁻¹), t = (log|z|, −½vec z): λ = (n/2, Σ δδᵀ), δ = x − m.
    """

    def total(x: Tensor) -> Tensor:
        check_event("GaussianPrecisionMatrix", tuple(mean.shape), x)
        δ = x - mean.to(x)
        half = torch.full_like(δ[..., :1], 0.5).sum(0)
        return torch.cat([half, torch.einsum("n...d,n...e->...de", δ, δ).flatten(-2)], -1)

    return Conjugate("GaussianPrecisionMatrix", Wishart(), _VECTORS, total)
