"""Shapes of points, directions and data that do not fit each other are refused in words, by every call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions as D

from natgrad import families as f
from natgrad.families.base import broadcast
from tests.families.members import definite
from tests.output.table import close, normal

t = torch.tensor
PLANE = t([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
WISHART = t([1.0, 1.0, 0.0, 0.0, 1.0])
ZERO, EYE = torch.zeros(2), torch.eye(2)

DATA: list[tuple[Callable[[], Any], str]] = [
    (lambda: f.FullGaussian().log_prob(PLANE, torch.zeros(3)), r"data of FullGaussian must have .* \[\*batch, 2\]"),
    (
        lambda: f.GaussianKnownMean(ZERO).log_prob(EYE.flatten(), torch.zeros(1)),
        r"GaussianKnownMean must have the shape",
    ),
    (lambda: f.GaussianKnownMean(ZERO).fit(torch.zeros(5, 1)), r"data of GaussianKnownMean must have the shape"),
    (
        lambda: f.DiagonalGaussianKnownMean(ZERO).fit(torch.zeros(5, 1)),
        r"DiagonalGaussianKnownMean must have the shape",
    ),
    (lambda: f.Wishart().log_prob(WISHART, torch.eye(3)), r"data of Wishart must have the shape \[\*batch, 2, 2\]"),
    (lambda: f.Wishart().log_prob(WISHART, torch.ones(2)), r"a datum of Wishart has 2 axes: data must be .* \(2,\)"),
    (lambda: f.DiagonalGaussian().log_prob(t([1.0, 1.0]), t(1.0)), r"a datum of DiagonalGaussian has 1 axes"),
    (
        lambda: f.Dirichlet().log_prob(torch.ones(3), t([0.5, 0.5])),
        r"data of Dirichlet must have the .* got shape \(2,\)",
    ),
    (lambda: f.Gamma().fit(t(1.0)), r"Gamma.fit needs data along the first axis, \[n \*event\], got one datum"),
    (lambda: f.FullGaussian().fit(ZERO), r"FullGaussian.fit needs data along the first axis"),
]
POINTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: f.Gamma().contains(torch.ones(3)), r"eta of Gamma must have \(α − 1, −β\), 2 entries,"),
    (lambda: f.FullGaussian().margin(torch.ones(5)), r"eta of FullGaussian must have \(h, vec Λ\), d \+ d² entries,"),
    (lambda: f.Gamma().reach(t([1.0, -1.0]), t([1.0])), r"the direction of Gamma must have"),
    (
        lambda: f.Gamma().reach(t([1.0, -1.0]).expand(3, 2), torch.ones(2, 2)),
        r"the batch \(3,\) and the direction has \(2,\), which do not broadcast",
    ),
    (lambda: f.Bernoulli().kl(torch.zeros(3), torch.zeros(2)), r"Bernoulli has the batch \(3,\) and y2 has \(2,\)"),
    (lambda: f.Poisson().kl(torch.zeros(3), torch.zeros(2)), r"Poisson has the batch \(3,\) and y2 has \(2,\)"),
    (lambda: f.Categorical().kl(torch.zeros(3, 2), torch.zeros(3, 4)), r"has 2 entries on the last axis and y2 has 4"),
    (
        lambda: f.FullGaussian().from_covariance(torch.zeros(3), EYE),
        r"needs a vector .* a matrix .* \(3,\) and \(2, 2\)",
    ),
    (lambda: f.FullGaussian().from_information(torch.zeros(3), EYE), r"FullGaussian needs a vector \[\*batch d\]"),
    (lambda: f.DiagonalGaussian().from_covariance(ZERO, torch.ones(3)), r"and another \[\*batch d\] whose batches"),
    (
        lambda: f.DiagonalGaussian().from_information(torch.zeros(3, 2), torch.ones(4, 2)),
        r"shapes \(3, 2\) and \(4, 2\)",
    ),
    (lambda: f.GaussianKnownMean(t(0.0)), r"GaussianKnownMean\(m\) must be one vector \[d\] of .* shape \(\)"),
    (
        lambda: f.DiagonalGaussianKnownMean(torch.zeros(3, 2)),
        r"DiagonalGaussianKnownMean\(m\) must be one vector \[d\]",
    ),
    (lambda: f.GaussianKnownCovariance(EYE.expand(3, 2, 2)), r"must be one matrix \[d d\] .* got .* \(3, 2, 2\)"),
    (lambda: f.GaussianKnownCovariance(EYE.long()), r"of floating-point numbers, got torch.int64"),
    (
        lambda: f.Product((f.Gamma(), f.Poisson()), (2, -1)),
        r"Product needs a size ≥ 1 for every family, got 2 families",
    ),
]


@pytest.mark.parametrize(("call", "message"), DATA + POINTS)
def test_shapes_that_do_not_fit_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_distribution_without_an_axis_for_its_data_is_refused() -> None:
    """Normal(μ [3], …) may be three data or one: torch says which by Independent."""
    normal = D.Normal(torch.zeros(3), torch.ones(3))
    with pytest.raises(
        TypeError, match=r"which axis holds the numbers of one datum: wrap it, Independent\(Normal\(…\), 1\)"
    ):
        f.DiagonalGaussian().from_distribution(normal)
    assert f.DiagonalGaussian().from_distribution(D.Independent(normal, 1)).shape == (6,)


def test_one_covariance_serves_a_batch_of_means_and_one_mean_a_batch_of_covariances() -> None:
    full, μ, S = f.FullGaussian(), normal(4, 3), definite(4, d=3, seed=1)
    close(full.from_covariance(μ, S[0])[2], full.from_covariance(μ[2], S[0]), 1e-12)
    close(full.from_covariance(μ[0], S)[2], full.from_covariance(μ[0], S[2]), 1e-12)
    square = f.DiagonalGaussian().from_covariance(normal(3, 3), normal(3, 3, seed=1).exp())  # as many data as entries
    close(square[1], f.DiagonalGaussian().from_covariance(normal(3, 3)[1], normal(3, 3, seed=1).exp()[1]), 1e-12)


def test_two_vectors_are_told_from_a_vector_and_a_matrix() -> None:
    assert [part.shape for part in broadcast("x", torch.zeros(2), EYE, 1)] == [(2, 2), (2, 2)]
    assert [part.shape for part in broadcast("x", torch.zeros(2), EYE, 2)] == [(2,), (2, 2)]


EMPTY: list[tuple[f.ExponentialFamily, int]] = [
    (f.Gamma(), 2),
    (f.Dirichlet(), 3),
    (f.VonMises(), 2),
    (f.Categorical(), 3),
    (f.FullGaussian(), 6),
    (f.DiagonalGaussian(), 4),
    (f.Wishart(), 5),
    (f.InverseGaussian(), 2),
    (f.Product((f.Gamma(), f.Poisson(), f.FullGaussian()), (2, 1, 6)), 9),
]


@pytest.mark.parametrize(("family", "p"), EMPTY, ids=[type(family).__name__ for family, _ in EMPTY])
def test_a_batch_without_points_is_a_batch(family: f.ExponentialFamily, p: int) -> None:
    η = torch.zeros(0, p, dtype=torch.float64)
    assert family.mean(η).shape == family.natural(η).shape == (0, p)
    assert family.log_partition(η).shape == family.entropy(η).shape == family.kl(η, η).shape == (0,)
    assert family.contains(η).shape == family.margin(η).shape == family.reach(η, η).shape == (0,)
    assert family.fisher(η).dense().shape == (0, p, p)
    assert family.log_prob(η, family.sample(η)).shape == (0,)
    if not isinstance(family, f.Product):  # Poisson draws have no derivative
        assert family.rsample(η, (3,)).shape == family.sample(η, (3,)).shape
