"""Lengthscales that are measured on the points: what they promise, whatever the points are."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import natgrad as ng
from natgrad.errors import MemoryBoundError
from natgrad.functionspace import Alike, Lengthscale, Median, SobolevKernel
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


@pytest.mark.parametrize("rule", [Alike(), Median()], ids=repr)
def test_no_points_have_no_lengthscale(rule: Lengthscale) -> None:
    for x in (torch.empty(0, 3), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"a lengthscale on points \[n d\], at least one, and got \(.*give"):
            rule.of(x)


WORDS: dict[str, Callable[[Any], Any]] = {
    r"Median\(divisor=…\)": Median,
    r"Alike\(value=…\)": Alike,
    r"Alike\(nu=…\)": lambda word: Alike(0.1, word),
}


@pytest.mark.parametrize("word", ["a", None, True, 1j], ids=repr)
@pytest.mark.parametrize("where", WORDS)
def test_what_is_no_number_is_refused(where: str, word: Any) -> None:
    with pytest.raises(TypeError, match=rf"{where} got .*: give a real number"):
        WORDS[where](word)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16, Fraction], ids=lambda kind: kind.__name__)
def test_real_numbers_of_every_kind_are_alike(number: Callable[[float], Any]) -> None:
    x = normal(5, 2)
    half, quarter = number(0.5), number(0.25)
    close(SobolevKernel(half, quarter)(x), SobolevKernel(0.5, 0.25)(x), 0)
    close(SobolevKernel(quarter, half)(x, x[:2]), SobolevKernel(0.25, 0.5)(x, x[:2]), 0)
    close(Median(half).of(x), Median(0.5).of(x), 0)
    close(Alike(half, quarter).of(x), Alike(0.5, 0.25).of(x), 0)
    metric = ng.Sobolev(nu=half, lengthscale=quarter, jitter=number(0.125))
    close(metric.coupling(x, 5), ng.Sobolev(nu=0.5, lengthscale=0.25, jitter=0.125).coupling(x, 5), 0)


def test_distances_that_do_not_fit_are_refused_before_they_are_made() -> None:
    x = torch.zeros(20_000, 1, dtype=torch.float64)
    for rule in (Median(), Alike()):
        with pytest.raises(MemoryBoundError, match=r"the distances of 20,000 points, over .*kernel.at\(x\[:1000\]\)"):
            rule.of(x)


@pytest.mark.parametrize("rule", [Median(), Alike(0.3)], ids=repr)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("grad", [False, True])
def test_points_whose_squares_leave_single_precision_have_the_kernel_of_points_that_do_not(
    rule: Lengthscale, scale: float, grad: bool
) -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]])
    expected = SobolevKernel(1.5, rule)(x)
    found = SobolevKernel(1.5, rule)((scale * x).requires_grad_(grad))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach(), expected)
    given = SobolevKernel(1.5, float(rule.of(scale * x)))((scale * x).requires_grad_(grad))
    torch.testing.assert_close(given.detach(), expected)


def test_a_lengthscale_that_is_zero_in_single_precision_keeps_points_apart() -> None:
    x = torch.tensor([0.0, 1.0])
    for nu in (0.3, 1.5, 40.0):
        assert torch.equal(SobolevKernel(nu, 1e-46)(x), torch.eye(2))
        assert torch.equal(SobolevKernel(nu, 1e-46)(x, x), torch.eye(2))


@pytest.mark.parametrize("rule", [Median(), Alike(0.3)], ids=repr)
def test_points_whose_squares_leave_double_precision_are_refused(rule: Lengthscale) -> None:
    x = torch.tensor([[0.0], [1e160], [3e160]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cannot measure points that are 3e\+160 apart in a coordinate: .*Scale the"):
        rule.of(x)
