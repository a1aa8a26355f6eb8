"""Every conjugate pair of the shipped families, with its posterior from the textbook as a torch distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributions as D

import natgrad as ng

Datum = Callable[[Tensor], D.Distribution]


@dataclass(frozen=True)
class Pair:
    """``likelihood(z)``: the distribution of a datum given z [s]; data x [n *event]."""

    conjugate: ng.vi.Conjugate
    prior: D.Distribution
    posterior: D.Distribution
    x: Tensor
    start: D.Distribution
    log_likelihood: Callable[[Tensor], Tensor]  # Σ_n log p(x_n | z) [s] of z [s *event]


def _t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _summed(x: Tensor, datum: Datum, event: int = 0) -> Callable[[Tensor], Tensor]:
    """Σ_n log p(x_n | z): z [s *event] gets an axis for n."""
    return lambda z: datum(z.unsqueeze(z.ndim - event)).log_prob(x).sum(-1)


def _beta(conjugate: ng.vi.Conjugate, x: Tensor, datum: Datum, a: float, b: float) -> Pair:
    return Pair(
        conjugate, D.Beta(_t(2.0)[0], _t(3.0)[0]), D.Beta(_t(2.0 + a)[0], _t(3.0 + b)[0]), x,
        D.Beta(_t(1.3)[0], _t(0.8)[0]), _summed(x, datum),
    )  # fmt: skip


def _gamma(conjugate: ng.vi.Conjugate, x: Tensor, datum: Datum, a: float, b: float) -> Pair:
    return Pair(
        conjugate, D.Gamma(_t(2.0)[0], _t(1.5)[0]), D.Gamma(_t(2.0 + a)[0], _t(1.5 + b)[0]), x,
        D.Gamma(_t(3.0)[0], _t(1.0)[0]), _summed(x, datum),
    )  # fmt: skip


class VonMises(D.VonMises):
    """As torch's, with I₀ to all digits: torch has eight of them."""

    def log_prob(self, value: Tensor) -> Tensor:
        κ = self.concentration
        return κ * ((value - self.loc).cos() - 1) - torch.special.i0e(κ).log() - math.log(2 * math.pi)


COUNTS, POSITIVE, REAL = _t(3, 0, 5, 2), _t(0.4, 1.7, 0.9), _t(-0.7, 0.2, 1.9)
POINTS = _t(1, 2, 0, -1, 0.5, 0.3).view(3, 2)


def _inverse_gaussian(z: Tensor) -> Tensor:
    log_p = 0.5 * (z / (2 * math.pi * POSITIVE**3)).log() - z * (POSITIVE - 0.8) ** 2 / (2 * 0.64 * POSITIVE)
    return log_p.sum(-1)


def _dirichlet() -> Pair:
    x = torch.tensor([0, 2, 2, 1, 2])
    prior, posterior = D.Dirichlet(_t(1.5, 2, 1)), D.Dirichlet(_t(2.5, 3, 4))
    return Pair(
        ng.vi.CategoricalProbabilities(3), prior, posterior, x, D.Dirichlet(_t(2, 2, 2)),
        lambda z: D.Categorical(probs=z.unsqueeze(-2)).log_prob(x).sum(-1),
    )  # fmt: skip


def _multinomial() -> Pair:
    x = _t(1, 0, 3, 2, 2, 0).view(2, 3)
    prior, posterior = D.Dirichlet(_t(1.5, 2, 1)), D.Dirichlet(_t(4.5, 4, 4))
    return Pair(
        ng.vi.MultinomialProbabilities(), prior, posterior, x, D.Dirichlet(_t(2, 2, 2)),
        lambda z: (x * z.log().unsqueeze(-2)).sum((-2, -1)),  # up to a constant
    )  # fmt: skip


def _gaussian_mean() -> Pair:
    Σ, x = _t(0.5, 0.2, 0.2, 0.4).view(2, 2), POINTS
    Λ = torch.eye(2, dtype=torch.float64) / 2 + 3 * torch.linalg.inv(Σ)
    μ = torch.linalg.solve(Λ, torch.linalg.solve(Σ, x.sum(0)))
    return Pair(
        ng.vi.GaussianMean(Σ), D.MultivariateNormal(_t(0, 0), 2 * torch.eye(2, dtype=torch.float64)),
        D.MultivariateNormal(μ, precision_matrix=Λ), x, D.MultivariateNormal(_t(1, 0), torch.eye(2).double()),
        lambda z: D.MultivariateNormal(z.unsqueeze(-2), Σ).log_prob(x).sum(-1),
    )  # fmt: skip


def _normal(mean: Tensor, variance: Tensor) -> D.Distribution:
    return D.Independent(D.Normal(mean, variance**0.5), 1)


def _diagonal_mean(conjugate: ng.vi.Conjugate, x: Tensor, logs: Tensor) -> Pair:
    λ = 0.5 + 3 / _t(0.3, 2)
    μ = logs.sum(0) / _t(0.3, 2) / λ
    return Pair(
        conjugate, _normal(_t(0, 0), _t(2, 2)), _normal(μ, 1 / λ), x, _normal(_t(1, 0), _t(1, 0.5)),
        lambda z: _normal(z.unsqueeze(-2), _t(0.3, 2)).log_prob(logs).sum(-1),  # log-normal: up to a constant
    )  # fmt: skip


def _linear() -> Pair:
    inputs, x = _t(1, 2, 1, 0, 1, -1).view(3, 2), _t(0.3, 1.1, -0.4)
    Λ = torch.eye(2, dtype=torch.float64) + inputs.T @ inputs / 0.2
    return Pair(
        ng.vi.LinearWeights(inputs, 0.2), D.MultivariateNormal(_t(0, 0), torch.eye(2).double()),
        D.MultivariateNormal(torch.linalg.solve(Λ, inputs.T @ x / 0.2), precision_matrix=Λ), x,
        D.MultivariateNormal(_t(1, 0), torch.eye(2).double()),
        lambda z: D.Normal(z @ inputs.T, 0.2**0.5).log_prob(x).sum(-1),
    )  # fmt: skip


def _wishart() -> Pair:
    m, x = _t(0.5, -0.5), POINTS
    V = _t(1, 0.3, 0.3, 2).view(2, 2)
    S = (x - m).T @ (x - m)
    return Pair(
        ng.vi.GaussianPrecisionMatrix(m), D.Wishart(_t(4)[0], V),
        D.Wishart(_t(7)[0], torch.linalg.inv(torch.linalg.inv(V) + S)), x, D.Wishart(_t(5)[0], torch.eye(2).double()),
        lambda z: D.MultivariateNormal(m, precision_matrix=z.unsqueeze(-3)).log_prob(x).sum(-1),
    )  # fmt: skip


def _von_mises() -> Pair:
    x = _t(0.3, 1.2, -0.5)
    c, s = 2.0 * x.cos().sum() + math.cos(0.4) * 1.5, 2.0 * x.sin().sum() + math.sin(0.4) * 1.5
    return Pair(
        ng.vi.VonMisesDirection(2.0), VonMises(_t(0.4)[0], _t(1.5)[0]),
        VonMises(torch.atan2(s, c), torch.hypot(s, c)), x,
        VonMises(_t(0)[0], _t(1)[0]), lambda z: (2.0 * (x - z.unsqueeze(-1)).cos()).sum(-1),
    )  # fmt: skip


def _mixture() -> Pair:
    x = _t(-1, -2, -0.5, -0.7, -0.1, -3).view(2, 3)
    prior = _t(0.2, 0.5, 0.3)
    posterior = prior * x.sum(0).exp()
    return Pair(
        ng.vi.MixtureComponent(), D.OneHotCategorical(prior), D.OneHotCategorical(posterior), x,
        D.OneHotCategorical(_t(1, 1, 1)), lambda z: z @ x.sum(0),
    )  # fmt: skip


def _alternative() -> Pair:
    x = _t(-1, -2, -0.5, -0.3).view(2, 2)
    odds = 0.25 / 0.75 * (x[:, 1] - x[:, 0]).sum().exp()
    return Pair(
        ng.vi.Alternative(), D.Bernoulli(_t(0.25)[0]), D.Bernoulli(odds / (1 + odds)), x, D.Bernoulli(_t(0.5)[0]),
        lambda z: torch.where(z == 1, x[:, 1].sum(), x[:, 0].sum()),
    )  # fmt: skip


PAIRS: dict[str, Callable[[], Pair]] = {
    "beta-bernoulli": lambda: _beta(
        ng.vi.BernoulliProbability(), _t(1, 1, 0, 1), lambda z: D.Bernoulli(z), 3, 1
    ),
    "beta-binomial": lambda: _beta(ng.vi.BinomialProbability(6), COUNTS, lambda z: D.Binomial(6, z), 10, 14),
    "beta-negative-binomial": lambda: _beta(
        ng.vi.NegativeBinomialProbability(2.5), COUNTS, lambda z: D.NegativeBinomial(_t(2.5), z), 10, 10
    ),
    "beta-geometric": lambda: _beta(ng.vi.GeometricProbability(), COUNTS, lambda z: D.Geometric(z), 4, 10),
    "dirichlet-categorical": _dirichlet,
    "dirichlet-multinomial": _multinomial,
    "gamma-poisson": lambda: _gamma(ng.vi.PoissonRate(), COUNTS, lambda z: D.Poisson(z), 10, 4),
    "gamma-exponential": lambda: _gamma(ng.vi.GammaRate(), POSITIVE, lambda z: D.Exponential(z), 3, 3.0),
    "gamma-gamma": lambda: _gamma(ng.vi.GammaRate(2.5), POSITIVE, lambda z: D.Gamma(_t(2.5), z), 7.5, 3.0),
    "gamma-weibull": lambda: _gamma(
        ng.vi.WeibullRate(1.5), POSITIVE, lambda z: D.Weibull(z ** (-1 / 1.5), _t(1.5)), 3, float((POSITIVE**1.5).sum())
    ),
    "gamma-laplace": lambda: _gamma(
        ng.vi.LaplaceRate(0.5), REAL, lambda z: D.Laplace(_t(0.5), 1 / z), 3, float((REAL - 0.5).abs().sum())
    ),
    "gamma-gaussian": lambda: _gamma(
        ng.vi.GaussianPrecision(0.5), REAL, lambda z: D.Normal(_t(0.5), z**-0.5), 1.5,
        float((REAL - 0.5).square().sum()) / 2,
    ),
    "gamma-log-normal": lambda: _gamma(
        ng.vi.LogNormalPrecision(0.5), POSITIVE, lambda z: D.LogNormal(_t(0.5), z**-0.5), 1.5,
        float((POSITIVE.log() - 0.5).square().sum()) / 2,
    ),
    "gamma-inverse-gaussian": lambda: Pair(
        ng.vi.InverseGaussianShape(0.8), D.Gamma(_t(2.0)[0], _t(1.5)[0]),
        D.Gamma(_t(3.5)[0], 1.5 + ((POSITIVE - 0.8) ** 2 / (1.28 * POSITIVE)).sum()), POSITIVE,
        D.Gamma(_t(3.0)[0], _t(1.0)[0]), lambda z: _inverse_gaussian(z.unsqueeze(-1)),
    ),
    "gaussian-gaussian": _gaussian_mean,
    "diagonal-gaussian": lambda: _diagonal_mean(
        ng.vi.DiagonalGaussianMean(_t(0.3, 2)), POINTS, POINTS
    ),
    "diagonal-log-normal": lambda: _diagonal_mean(
        ng.vi.LogNormalMean(_t(0.3, 2)), POINTS.exp(), POINTS
    ),
    "linear-regression": _linear,
    "wishart-gaussian": _wishart,
    "von-mises": _von_mises,
    "categorical-mixture": _mixture,
    "bernoulli-alternative": _alternative,
}  # fmt: skip
