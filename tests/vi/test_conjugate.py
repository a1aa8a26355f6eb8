"""Conjugate models: one step of size 1 is the exact posterior, for every conjugate pair of the shipped families."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import DomainError
from tests.vi.pairs import PAIRS, Pair


def _same(pair: Pair, eta: Tensor, tolerance: float = 1e-10) -> None:
    """The log-density of η is that of the textbook's posterior."""
    z = _draws(pair, 50)
    expected = pair.posterior.log_prob(z)
    found = pair.conjugate.family.log_prob(eta, z)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def _draws(pair: Pair, count: int) -> Tensor:
    family = pair.conjugate.family
    return family.sample(family.from_distribution(pair.posterior), (count,), torch.Generator().manual_seed(0))


def _eta(pair: Pair) -> tuple[Tensor, Tensor]:
    """The prior and where the step starts."""
    family = pair.conjugate.family
    return family.from_distribution(pair.prior), family.from_distribution(pair.start)


@pytest.mark.parametrize("name", PAIRS)
def test_one_step_of_size_one_is_the_exact_posterior(name: str) -> None:
    pair = PAIRS[name]()
    prior, start = _eta(pair)
    move = ng.vi.Posterior(pair.conjugate.family, prior=prior, sites=pair.conjugate.sites(pair.x)).step(start)
    assert not bool(move.shortened.any())
    _same(pair, move.point)


@pytest.mark.parametrize("name", PAIRS)
def test_one_step_is_exact_from_samples_of_the_likelihood_alone(name: str) -> None:
    """The model is a black box here; ℓ is linear in t, which the regression finds without error."""
    pair = PAIRS[name]()
    prior, start = _eta(pair)
    posterior = ng.vi.Posterior(pair.conjugate.family, pair.log_likelihood, prior)
    _same(pair, posterior.step(start, generator=torch.Generator().manual_seed(0)).point)


@pytest.mark.parametrize("name", PAIRS)
def test_one_step_is_exact_from_samples_of_the_joint_density(name: str) -> None:
    pair = PAIRS[name]()
    _, start = _eta(pair)
    joint = ng.vi.Posterior(pair.conjugate.family, lambda z: pair.log_likelihood(z) + pair.prior.log_prob(z))
    _same(pair, joint.step(start, generator=torch.Generator().manual_seed(1)).point)


CONTINUOUS = [name for name in PAIRS if PAIRS[name]().start.has_rsample]


@pytest.mark.parametrize(
    ("name", "estimator"),
    [(name, ng.vi.Score(8)) for name in PAIRS] + [(name, ng.vi.Reparametrised(4)) for name in CONTINUOUS],
    ids=str,
)
def test_at_the_posterior_no_estimator_has_noise(name: str, estimator: ng.vi.Estimator) -> None:
    pair = PAIRS[name]()
    family = pair.conjugate.family
    posterior = ng.vi.Posterior(family, pair.log_likelihood, _eta(pair)[0])
    exact = family.from_distribution(pair.posterior)
    _same(pair, posterior.step(exact, estimator=estimator, generator=torch.Generator().manual_seed(0)).point, 1e-8)


@pytest.mark.parametrize("name", PAIRS)
def test_the_bound_at_the_posterior_is_the_evidence(name: str) -> None:
    """log p(x) = log p(x, z) − log p(z | x) at any z."""
    pair = PAIRS[name]()
    family = pair.conjugate.family
    z = _draws(pair, 1)
    evidence = pair.log_likelihood(z) + pair.prior.log_prob(z) - pair.posterior.log_prob(z)
    posterior = ng.vi.Posterior(family, pair.log_likelihood, _eta(pair)[0])
    exact = family.from_distribution(pair.posterior)
    bound = posterior.elbo(exact, samples=10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(bound, evidence.squeeze(0), rtol=1e-9, atol=1e-9)
    start = family.from_distribution(pair.start)
    assert float(posterior.elbo(start, samples=1000, generator=torch.Generator().manual_seed(0))) < float(bound)


def test_data_outside_the_support_are_refused_by_entry() -> None:
    with pytest.raises(DomainError, match=r"datum x\[1\] of PoissonRate lies outside its support"):
        ng.vi.PoissonRate().sites(torch.tensor([1.0, -1.0]))
    with pytest.raises(DomainError, match=r"datum x\[0\] of CategoricalProbabilities"):
        ng.vi.CategoricalProbabilities(2).sites(torch.tensor([2]))
    with pytest.raises(ValueError, match=r"GammaRate needs data \[n …\] with n ≥ 1"):
        ng.vi.GammaRate().sites(torch.zeros(0))


@pytest.mark.parametrize("pair", [ng.vi.NegativeBinomialProbability(2.5), ng.vi.GammaRate(1.5), ng.vi.PoissonRate()])
def test_integers_are_data_like_others(pair: ng.vi.Conjugate) -> None:
    """A known parameter such as 2.5 is not rounded to the type of the data."""
    x = torch.tensor([1, 4, 2])
    torch.testing.assert_close(pair.sites(x), pair.sites(x.float()))


def test_integers_are_not_rounded_before_they_are_counted() -> None:
    """2²⁴ + 1 is no number of single precision."""
    counted = ng.vi.CategoricalProbabilities(2**24 + 2).sites(torch.tensor([2**24 + 1]))
    assert counted.nonzero().tolist() == [[2**24 + 1]]


PARTS: list[tuple[ng.vi.Conjugate, torch.Size]] = [
    (ng.vi.GaussianMean(torch.tensor([[2.0, 0.5], [0.5, 1.0]])), torch.Size([3, 2])),
    (ng.vi.DiagonalGaussianMean(torch.tensor([0.5, 2.0])), torch.Size([3, 2])),
    (ng.vi.LogNormalMean(torch.tensor([0.5, 2.0])), torch.Size([3, 2])),
    (ng.vi.LinearWeights(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), 0.5), torch.Size([3])),
    (ng.vi.GaussianPrecisionMatrix(torch.tensor([1.0, 2.0])), torch.Size([3, 2])),
]


@pytest.mark.parametrize(("pair", "shape"), PARTS)
def test_the_sites_have_the_precision_of_the_data(pair: ng.vi.Conjugate, shape: torch.Size) -> None:
    """Numbers of this size have exact sums in both precisions; the parameters are in float32."""
    x = 1 + torch.arange(float(shape.numel())).view(shape)
    found = pair.sites(x.double())
    assert found.dtype is torch.float64
    torch.testing.assert_close(found.float(), pair.sites(x), rtol=1e-6, atol=1e-6)


WRONG_SHAPES: list[tuple[ng.vi.Conjugate, int]] = [
    (ng.vi.Alternative(), 3),
    (ng.vi.GaussianMean(torch.eye(2)), 3),
    (ng.vi.GaussianPrecisionMatrix(torch.zeros(2)), 1),
    (ng.vi.DiagonalGaussianMean(torch.ones(3)), 1),
]


@pytest.mark.parametrize(("pair", "size"), WRONG_SHAPES)
def test_data_of_another_size_than_the_parameters_are_refused(pair: ng.vi.Conjugate, size: int) -> None:
    with pytest.raises(ValueError, match=f"the data of {pair.name} must have the shape"):
        pair.sites(torch.ones(4, size))


@pytest.mark.parametrize(
    "pair", [ng.vi.GammaRate(), ng.vi.GaussianPrecision(), ng.vi.LaplaceRate(), ng.vi.DiagonalGaussianMean(1.0)]
)
def test_infinite_data_are_refused(pair: ng.vi.Conjugate) -> None:
    x = torch.tensor([1.0, math.inf])
    with pytest.raises(DomainError, match=rf"datum x\[1\] of {pair.name} lies outside its support"):
        pair.sites(x[:, None] if pair.name == "DiagonalGaussianMean" else x)


def test_known_parameters_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GammaRate\(shape=…\) must be positive and finite, got 0"):
        ng.vi.GammaRate(0.0)
    with pytest.raises(ValueError, match=r"WeibullRate\(shape=…\) must be positive"):
        ng.vi.WeibullRate(math.inf)
    with pytest.raises(ValueError, match=r"InverseGaussianShape\(mean=…\) must be positive"):
        ng.vi.InverseGaussianShape(-1.0)
    with pytest.raises(ValueError, match=r"VonMisesDirection\(concentration=…\) must be positive"):
        ng.vi.VonMisesDirection(0.0)
    with pytest.raises(ValueError, match=r"DiagonalGaussianMean\(variance=…\) must be positive"):
        ng.vi.DiagonalGaussianMean(torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="the covariance must be a symmetric matrix"):
        ng.vi.GaussianMean(torch.zeros(2, 3))
    with pytest.raises(DomainError, match="the covariance must be positive definite"):
        ng.vi.GaussianMean(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="need one datum per row"):
        ng.vi.LinearWeights(torch.zeros(3, 2), 1.0).sites(torch.zeros(2))
