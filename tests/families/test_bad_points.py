"""Bad input to an exponential family: every message says which entry, which bound, and what to do."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from natgrad import families as f
from natgrad.errors import DomainError, NatgradError
from natgrad.families.base import natural_by_newton
from tests.output.table import normal

t = torch.tensor
OUTSIDE: list[tuple[f.ExponentialFamily, Tensor, str]] = [
    (f.Exponential(), t([-1.0, 0.5]), r"Exponential: eta\[1\] = 0.5 must be below 0: start inside, or take shorter"),
    (f.Gamma(), t([[1.0, -1.0], [-2.0, -1.0]]), r"Gamma: eta\[1, 0\] = -2 must be above -1"),
    (f.Gamma(), t([1.0, 3.0]), r"Gamma: eta\[1\] = 3 must be below 0"),
    (f.Dirichlet(), t([1.0, -1.5, 0.0]), r"Dirichlet: eta\[1\] = -1.5 must be above -1"),
    (f.InverseGaussian(), t([-1.0, 0.0]), r"InverseGaussian: eta\[1\] = 0 must be below 0"),
    (f.DiagonalGaussian(), t([1.0, -3.0]), r"DiagonalGaussian: eta\[1\] = -3 must be above 0"),
    (f.FullGaussian(), t([0.0, 0.0, 1.0, 2.0, 2.0, 1.0]), r"FullGaussian: eta: the precision matrix must be positive"),
    (f.FullGaussian(), t([0.0, 0.0, 1.0, 2.0, 2.0, 1.0]), r"has the eigenvalue -1: start inside"),
    (
        f.GaussianKnownMean(torch.zeros(1)),
        t([[1.0], [-1.0]]),
        r"GaussianKnownMean: eta\[1\]: the precision matrix must",
    ),
    (f.Wishart(), t([-2.0, 1.0]), r"Wishart: eta \(block 0\)\[0\] = -2 must be above -1"),
    (f.Wishart(), t([1.0, -1.0]), r"Wishart: eta \(block 1\): the inverse scale matrix V⁻¹ must be positive definite"),
    (f.Poisson(), t(math.inf), r"Poisson: eta = inf must be finite"),
    (f.FullGaussian(), t([math.nan, 1.0]), r"FullGaussian: eta\[0\] = nan must be finite"),
    (f.FullGaussian(), t([0.0, math.nan]), r"the precision matrix\[0, 0\] = nan must be finite"),
]
OUTSIDE_MEANS: list[tuple[f.ExponentialFamily, Tensor, str]] = [
    (f.Bernoulli(), t([0.5, 1.5]), r"Bernoulli: xi\[1\] = 1.5 must be below 1"),
    (f.Binomial(3), t(3.0), r"Binomial: xi = 3 must be below 3"),
    (
        f.Categorical(),
        t([0.5, 0.6]),
        r"Categorical: xi sums to 1 \+ 0.1 over its last axis, and probabilities sum to",
    ),
    (f.Categorical(), t([1.5, -0.5]), r"Categorical: xi\[1\] = -0.5 must be above 0"),
    (f.Categorical(minimal=True), t([0.6, 0.6]), r"xi sums to 1.2 over its last axis, and must leave something"),
    (f.Categorical(minimal=True), t([0.6, -0.1]), r"Categorical: xi\[1\] = -0.1 must be above 0"),
    (f.DiagonalGaussian(), t([[0.0, 3.0, -1.0, -1.0]]), r"DiagonalGaussian: xi\[0, 1\] must satisfy variances"),
    (f.Gamma(), t([[0.0, 2.0], [1.0, 2.0]]), r"Gamma: xi\[1\] must satisfy E log x below log E x \(Jensen"),
    (f.Dirichlet(), t([-0.1, -0.1]), r"must satisfy Σ exp E log x below 1"),
    (f.InverseGaussian(), t([2.0, 0.4]), r"must satisfy E 1/x above 1/E x"),
    (f.VonMises(), t([1.0, 1.0]), r"must satisfy a mean resultant length below 1, and breaks it by 0.414"),
    (f.DiagonalGaussian(), t([2.0, -1.0]), r"variances −2ξ₂ − ξ₁² above 0"),
    (f.FullGaussian(), t([2.0, -1.0]), r"the covariance −2ξ₂ − ξ₁ξ₁ᵀ must be positive definite"),
    (f.GaussianKnownMean(torch.zeros(1)), t([1.0]), r"the covariance −2ξ must be positive definite"),
    (f.Wishart(), t([1.0, -1.0]), r"E log\|X\| below log\|E X\|"),
]
SUPPORT: list[tuple[f.ExponentialFamily, Tensor, Tensor, str]] = [
    (f.Poisson(), t([0.0]), t([0.5]), r"x\[0\] = 0.5 lies outside the support of Poisson"),
    (f.Binomial(2), t([0.0, 0.0]), t([1.0, 3.0]), r"x\[1\] = 3 lies outside the support of Binomial"),
    (f.Gamma(), t([1.0, -1.0]), t(-1.0), r"x = -1 lies outside the support of Gamma"),
    (f.Bernoulli(), t(0.0), t(0.5), r"outside the support of Bernoulli"),
    (f.VonMises(), t([1.0, 0.0]), t([0.0, math.inf]), r"VonMises: x\[1\] = inf must be finite"),
    (f.Gamma(), t([1.0, -1.0]), t(math.nan), r"Gamma: x = nan must be finite"),
    (
        f.Categorical(),
        t([0.0, 0.0]),
        t([0, 2]),
        r"x\[1\] = 2 is not one of the 2 classes of Categorical: count them from",
    ),
    (f.Categorical(minimal=True), t([0.0]), t(-1), r"x = -1 is not one of the 2 classes of Categorical"),
    (f.Dirichlet(), t([0.0, 0.0]), t([[0.5, 0.5], [0.5, 0.6]]), r"x\[1\] lies outside the support of Dirichlet"),
    (
        f.Product((f.Gamma(), f.Poisson()), (2, 1)),
        t([1.0, -1.0, 0.0]),
        t([2.0, 0.5]),
        r"outside the support of Poisson",
    ),
]


@pytest.mark.parametrize(("family", "eta", "message"), OUTSIDE)
def test_natural_parameters_outside_the_domain_name_the_entry_and_the_bound(
    family: f.ExponentialFamily, eta: Tensor, message: str
) -> None:
    for call in (family.log_partition, family.mean, family.fisher, family.distribution, family.entropy):
        with pytest.raises(DomainError, match=message):
            call(eta)
    assert not bool(family.contains(eta).all())


@pytest.mark.parametrize(("family", "xi", "message"), OUTSIDE_MEANS)
def test_mean_parameters_outside_the_domain_name_the_entry_and_the_bound(
    family: f.ExponentialFamily, xi: Tensor, message: str
) -> None:
    with pytest.raises(DomainError, match=message):
        family.natural(xi)
    assert not bool(family.mean_domain.contains(xi).all())


@pytest.mark.parametrize(("family", "eta", "x", "message"), SUPPORT)
def test_data_outside_the_support_are_named(family: f.ExponentialFamily, eta: Tensor, x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.log_prob(eta, x)


ONE: list[tuple[f.ExponentialFamily, Tensor]] = [
    (f.Gamma(), t([2.3])),
    (f.Beta(), t([0.3])),
    (f.Dirichlet(), t([[0.3, 0.7]])),
    (f.InverseGaussian(), t([2.3])),
    (f.VonMises(), t([2.3])),
    (f.DiagonalGaussian(), t([[2.3, 1.0]])),
    (f.LogNormal(), t([[2.3]])),
    (f.FullGaussian(), t([[2.3, 0.7]])),
    (f.GaussianKnownMean(torch.zeros(2)), t([[2.3, 0.7]])),
    (f.Wishart(), t([[[2.3, 0.3], [0.3, 1.0]]])),
    (f.Categorical(), t([[0.0, 1.0]])),
    (f.Bernoulli(), t([1.0])),
    (f.Poisson(), t([0.0])),
]


@pytest.mark.parametrize(("family", "x"), ONE)
def test_one_datum_has_no_maximum_of_the_likelihood_and_no_infinite_precision(
    family: f.ExponentialFamily, x: Tensor
) -> None:
    for data in (x, x.double()):
        with pytest.raises(DomainError, match=r"cannot be fitted to 1 datum: the likelihood has no maximum inside the"):
            family.fit(data)


def test_fewer_data_than_dimensions_have_singular_moments() -> None:
    with pytest.raises(DomainError, match=r"FullGaussian cannot be fitted to 4 data: .* Give more data, or start"):
        f.FullGaussian().fit(normal(4, 5))
    with pytest.raises(DomainError, match=r"Gamma cannot be fitted to 3 data"):
        f.Gamma().fit(torch.full((3,), 0.1, dtype=torch.float64))


def test_a_few_data_of_very_different_scales_are_enough() -> None:
    x = normal(9, 3) * torch.tensor([1e-8, 1.0, 1e8], dtype=torch.float64)
    assert bool(f.FullGaussian().fit(x).isfinite().all())
    assert bool(f.DiagonalGaussian().fit(x).isfinite().all())


def test_batches_that_do_not_broadcast_are_refused() -> None:
    gamma, η = f.Gamma(), t([1.0, -1.0])
    with pytest.raises(ValueError, match=r"has the batch \(3,\) and eta2 has \(2,\), which do not broadcast"):
        gamma.bregman(η.expand(3, 2), η.expand(2, 2))
    with pytest.raises(ValueError, match=r"has the batch \(3,\) and the data has \(2,\)"):
        gamma.log_prob(η.expand(3, 2), t([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"has 3 entries on the last axis and eta2 has 2: they must be of one size"):
        f.Dirichlet().bregman(torch.zeros(3), torch.zeros(2))


SHAPES: list[tuple[f.ExponentialFamily, int, str]] = [
    (f.Gamma(), 3, r"eta of Gamma must have \(α − 1, −β\), 2 entries, on the last axis, got shape \(3,\)"),
    (f.Beta(), 3, r"\(a − 1, b − 1\), 2 entries,"),
    (f.InverseGaussian(), 1, r"\(−λ/\(2μ²\), −λ/2\), 2 entries,"),
    (f.VonMises(), 3, r"κ \(cos μ, sin μ\), 2 entries,"),
    (f.Dirichlet(), 1, r"α − 1 of the classes, 2 entries or more,"),
    (f.Categorical(), 0, r"the logits of the classes"),
    (f.FullGaussian(), 5, r"\(h, vec Λ\), d \+ d² entries,"),
    (f.GaussianKnownMean(torch.zeros(2)), 5, r"vec Λ, 2² entries,"),
    (f.GaussianKnownCovariance(torch.eye(2)), 3, r"as many entries as the covariance has rows, 2,"),
    (f.DiagonalGaussian(), 3, r"\(h, λ\), 2d entries,"),
    (f.DiagonalGaussianKnownMean(torch.zeros(2)), 3, r"as many precisions as the mean has entries, 2,"),
    (f.Wishart(), 4, r"\(½\(ν − d − 1\), vec V⁻¹\), 1 \+ d² entries,"),
    (f.Product((f.Gamma(), f.Poisson()), (2, 3)), 4, r"the points of its blocks, 2 \+ 3 entries,"),
    (f.Product((f.Gamma(), f.Poisson()), (3, 3)), 6, r"\(α − 1, −β\), 2 entries,"),
]


@pytest.mark.parametrize(("family", "size", "message"), SHAPES)
def test_points_of_a_wrong_size_say_what_the_last_axis_holds(
    family: f.ExponentialFamily, size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        family.mean(torch.ones(size))


def test_points_that_are_no_points_are_refused() -> None:
    numbers: Any = [1.0, -2.0]
    with pytest.raises(TypeError, match=r"eta of Gamma must be a tensor, got a list: write torch\.tensor\(…\)"):
        f.Gamma().mean(numbers)
    with pytest.raises(TypeError, match=r"eta of Poisson must be floating-point numbers, got torch.int64"):
        f.Poisson().mean(t(1))
    with pytest.raises(
        ValueError, match=r"eta of Gamma must have its entries on the last axis, \[\*batch p\], got one"
    ):
        f.Gamma().mean(t(1.0))
    with pytest.raises(ValueError, match=r"Gamma needs outputs \[n … p\], got outputs of shape \(2,\)"):
        f.Gamma().check(t([1.0, -1.0]))
    with pytest.raises(DomainError, match=r"Gamma: y\[0, 1\] = 1 must be below 0"):
        f.Gamma().check(t([[1.0, 1.0]]))
    with pytest.raises(ValueError, match=r"the data of Product must have 1 \+ 1 entries on the last axis"):
        f.Product((f.Gamma(), f.Poisson()), (2, 1)).log_prob(t([1.0, -1.0, 0.0]), t([1.0]))


def test_families_refuse_what_they_are_built_from() -> None:
    with pytest.raises(ValueError, match=r"Binomial\(total_count=…\) must be an integer, 1 or more, got 0"):
        f.Binomial(0)
    with pytest.raises(ValueError, match=r"Binomial\(total_count=…\) must be an integer, 1 or more, got 2.5"):
        f.Binomial(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"NegativeBinomial\(total_count=…\) must be positive and finite, got inf"):
        f.NegativeBinomial(math.inf)
    with pytest.raises(ValueError, match=r"Weibull\(shape=…\) must be positive and finite, got inf"):
        f.Weibull(math.inf)
    with pytest.raises(ValueError, match=r"Laplace\(centre=…\) must be finite, got nan"):
        f.Laplace(math.nan)
    with pytest.raises(ValueError, match=r"NegativeBinomial\(total_count=…\) must be positive and finite, got 0"):
        f.NegativeBinomial(0.0)
    with pytest.raises(ValueError, match=r"Weibull\(shape=…\) must be positive and finite, got -1"):
        f.Weibull(-1.0)
    with pytest.raises(DomainError, match=r"GaussianKnownCovariance: the covariance Σ must be positive definite"):
        f.GaussianKnownCovariance(-torch.eye(2))
    with pytest.raises(ValueError, match=r"Product needs a size ≥ 1 for every family, got 1 families and .* \(2, 2\)"):
        f.Product((f.Gamma(),), (2, 2))


OTHERS: list[tuple[f.ExponentialFamily, D.Distribution, type[Exception], str]] = [
    (f.Gamma(), D.Poisson(t(1.0)), TypeError, r"Gamma.from_distribution needs a Gamma, got Poisson"),
    (f.Categorical(), D.Poisson(t(1.0)), TypeError, r"needs a OneHotCategorical or Categorical, got Poisson"),
    (f.Binomial(3), D.Binomial(4, t(0.5)), ValueError, r"Binomial\(total_count=3\) cannot hold a .* = 4"),
    (f.NegativeBinomial(3.0), D.NegativeBinomial(4, t(0.5)), ValueError, r"NegativeBinomial\(total_count=3\) cannot"),
    (f.Laplace(1.0), D.Laplace(t(0.0), t(1.0)), ValueError, r"Laplace\(centre=1\) cannot hold .* centre = 0: make a"),
    (
        f.Weibull(1.0),
        D.Weibull(t(1.0), t(2.0)),
        ValueError,
        r"Weibull\(shape=1\) cannot hold .* shape = 2: make a",
    ),
    (
        f.GaussianKnownMean(torch.zeros(1)),
        D.MultivariateNormal(torch.ones(1), torch.eye(1)),
        ValueError,
        r"GaussianKnownMean cannot hold a distribution with another mean",
    ),
    (
        f.GaussianKnownCovariance(torch.eye(1)),
        D.MultivariateNormal(torch.ones(1), 2 * torch.eye(1)),
        ValueError,
        r"GaussianKnownCovariance cannot hold a distribution with another covariance",
    ),
    (
        f.DiagonalGaussianKnownMean(torch.zeros(1)),
        D.Independent(D.Normal(torch.ones(1), torch.ones(1)), 1),
        ValueError,
        r"DiagonalGaussianKnownMean cannot hold a distribution with another mean",
    ),
]


@pytest.mark.parametrize(("family", "d", "error", "message"), OTHERS)
def test_distributions_of_another_family_are_refused(
    family: f.ExponentialFamily, d: D.Distribution, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        family.from_distribution(d)


def test_draws_that_cannot_be_differentiated_say_so() -> None:
    with pytest.raises(TypeError, match=r"draws of Poisson cannot be differentiated: use sample, and the score"):
        f.Poisson().rsample(t(1.0))


def test_a_newton_iteration_that_does_not_arrive_says_so() -> None:
    xi = t([1.0, 2.0])  # beyond the boundary, which `natural` would have refused
    with pytest.raises(NatgradError, match=r"no natural parameters of Gamma were found for these mean parameters in"):
        natural_by_newton(f.Gamma(), xi, t([0.0, -1.0]))
