"""Lengthscales that are measured on the points: what they promise, whatever the points are."""

from __future__ import annotations

import pytest
import torch

import natgrad as ng
from natgrad.functionspace import Alike, Median, SobolevKernel
from tests.pulled import close, normal


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.2])
@pytest.mark.parametrize("value", [0.01, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_kernel_has_the_mean_that_was_asked_for(nu: float, value: float, scale: float) -> None:
    x = scale * torch.cat([normal(12, 3), 50 + normal(5, 3, seed=1)])  # two clusters
    K = SobolevKernel(nu, Alike(value, nu))(x)
    close(K[~torch.eye(17, dtype=torch.bool)].mean(), torch.tensor(value, dtype=torch.float64), 1e-6)


def test_points_that_are_equal_are_left_out() -> None:
    x = normal(9, 2)
    close(Alike(0.3).of(torch.cat([x, x, x])), Alike(0.3).of(x), 1e-6)


def test_one_lengthscale_of_two_points_is_exact() -> None:
    """k(d/ℓ) = value: e^{−2/ℓ} = 0.1."""
    ℓ = Alike(0.1, nu=0.5).of(torch.tensor([[1.0], [3.0]]).double())
    close(ℓ, -2 / torch.tensor(0.1, dtype=torch.float64).log(), 1e-12)


@pytest.mark.parametrize("x", [normal(1, 3), torch.ones(4, 3).double()], ids=["one", "copies"])
def test_points_that_are_all_equal_have_the_lengthscale_one(x: torch.Tensor) -> None:
    assert Alike().of(x) == Median().of(x) == 1
    assert (SobolevKernel(1.5, Alike())(x) == 1).all()


def test_lengthscales_follow_the_points() -> None:
    x = normal(20, 4)
    for rule in (Alike(0.2), Median()):
        close(rule.of(7 * x), 7 * rule.of(x), 1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, float("nan")])
def test_a_mean_that_no_kernel_has_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="the mean of a kernel between 0 and 1 lies between 0 and 1"):
        Alike(value)


@pytest.mark.parametrize("nu", [0.0, -1.5, float("inf")])
def test_a_smoothness_that_is_not_positive_is_refused(nu: float) -> None:
    with pytest.raises(ValueError, match="the smoothness of the kernel is a positive number"):
        Alike(nu=nu)


def test_a_rule_that_keeps_the_mean_of_another_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"another smoothness than ν = 2.5: give Alike\(0.1, nu=2.5\)"):
        ng.Sobolev(nu=2.5, lengthscale=Alike(0.1))
