"""The modified Bessel function K_ν against SciPy and its asymptotic series, in the scaling that is finite at zero."""

import math

import pytest
import torch
from scipy import special

from natgrad.kernels.matern import log_scaled_bessel, matern
from tests.pulled import close

RADII = torch.tensor([1e-6, 1e-3, 0.1, 0.7, 1.9, 1.999999, 2.000001, 2.5, 7.0, 31.0, 120.0, 650.0], dtype=torch.float64)
ORDERS = [0.0, 1e-8, 0.1, 0.3, 0.499999, 0.5, 0.500001, 0.75, 1.0, 1.2, 1.5, 2.0, 3.3, 7.5, 12.0]


@pytest.mark.parametrize("nu", ORDERS)
def test_scaled_bessel_is_that_of_scipy_for_every_order(nu: float) -> None:
    scaled = torch.as_tensor(special.kve(nu, RADII.numpy()))  # e^r K_ν(r)
    expected = math.log(2) + nu * (RADII / 2).log() + scaled.log() - RADII - math.lgamma(1 + nu)
    close(log_scaled_bessel(nu, RADII.square()), expected, 3e-14)


@pytest.mark.parametrize("nu", [0.2, 0.5, 1.0, 2.7, 30.5])
def test_scaled_bessel_tends_to_one_over_its_order_where_r_is_next_to_nothing(nu: float) -> None:
    u = torch.tensor([1e-300], dtype=torch.float64)
    close(log_scaled_bessel(nu, u).exp() * nu, torch.ones_like(u), 1e-14)


def test_scaled_bessel_of_order_zero_grows_as_the_logarithm() -> None:
    u = torch.tensor([1e-200], dtype=torch.float64)
    close(log_scaled_bessel(0.0, u).exp(), 2 * (math.log(2) - 0.57721566490153286 - u.log() / 2), 1e-14)


@pytest.mark.parametrize("nu", [0.1, 1.5, 40.0, 250.3])
def test_scaled_bessel_is_finite_in_the_logarithm_where_it_underflows_and_zero_at_infinity(nu: float) -> None:
    r = torch.tensor([3e3, 1e5], dtype=torch.float64)
    log_value = log_scaled_bessel(nu, r.square())
    tail = 0.5 * math.log(math.pi / 2) + (nu - 0.5) * r.log() - r + (1 - nu) * math.log(2) - math.lgamma(1 + nu)
    correction = torch.log1p((4 * nu**2 - 1) / (8 * r) * (1 + (4 * nu**2 - 9) / (16 * r)))  # Hankel's series
    assert log_value.isfinite().all()
    torch.testing.assert_close(log_value[1:], (tail + correction)[1:], rtol=1e-6, atol=0)
    assert log_scaled_bessel(nu, torch.tensor([math.inf])).exp() == 0


def test_a_second_derivative_in_forward_mode_is_refused_instead_of_being_zero() -> None:
    curvature = torch.func.jacfwd(torch.func.jacfwd(lambda u: matern(4.5, u)))
    with pytest.raises(NotImplementedError, match="one derivative in forward mode: take the other ones in reverse"):
        curvature(torch.tensor(0.7))
