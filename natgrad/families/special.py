"""Special functions: those that torch lacks in double precision, and expectations of log x and log x!."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_STEP = 1 / 16  # of the trapezoidal rule. The integrands are analytic in log s: its error is e^(−2π·½π/step)
_LOWER, _UPPER = -40.0, 60.0
_LARGE = 1e3  # from here on three terms of the series of ψ' are exact in float64
_GONE = 80.0  # e^−s vanishes from here on


def trigamma(x: Tensor) -> Tensor:
    """ψ'(x) = ζ(2, x), accurate to rounding; ``torch.polygamma(1, x)`` has a relative error of 5e-10.

    >>> trigamma(torch.tensor(1.0))
    tensor(1.6449)
    """
    rough = torch.polygamma(1, x)  # for its derivatives: those of ζ do not exist in forward mode, which geodesics need
    return rough + (torch.special.zeta(torch.full_like(x, 2.0), x.detach()) - rough).detach()


def trigamma_excess(x: Tensor) -> Tensor:
    """x ψ'(x) − 1 > 0, about 1/(2x) for large x, where the difference would have no digits; in double precision.

    >>> trigamma_excess(torch.tensor([1.0, 1e9]))
    tensor([6.4493e-01, 5.0000e-10], dtype=torch.float64)
    """
    x = x.double()
    u = x.clamp(min=_LARGE).reciprocal()
    series = u * (1 / 2 + u * (1 / 6 - u.square() / 30))
    return torch.where(x < _LARGE, x * trigamma(x) - 1, series)


def log1mexp(eta: Tensor) -> Tensor:
    """log(1 − e^η) for η < 0, accurate at both ends.

    >>> log1mexp(torch.tensor(-0.5)) + log1mexp(torch.tensor(-20.0))
    tensor(-0.9328)
    """
    near = eta > -math.log(2)
    small = torch.where(near, eta, torch.full_like(eta, -0.5))  # neither branch may overflow
    large = torch.where(near, torch.full_like(eta, -1.0), eta)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-large.exp()))


def _integrated(f: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """∫₀^∞ f(s) ds/s for f on [*batch s], by the trapezoidal rule in log s."""
    axis = torch.arange(_LOWER, _UPPER, _STEP, dtype=like.dtype, device=like.device)
    return _STEP * f(axis.exp()).sum(-1)


def expected_log_factorial(log_generating: Callable[[Tensor], Tensor], mean: Tensor, shift: float = 0.0) -> Tensor:
    """E log Γ(x + 1 + shift) of counts x with E (1 − w)ˣ = exp log_generating(w) and mean [*batch].

    Takes the expectation inside Binet's integral log Γ(z + 1) = ∫₀^∞ (z − (1 − e^{−zs})/(1 − e^{−s})) e^{−s} ds/s.

    >>> rate = torch.tensor([3.0], dtype=torch.float64)
    >>> expected_log_factorial(lambda w: -3 * w, rate)
    tensor([2.2273], dtype=torch.float64)
    """
    z = (mean + shift).unsqueeze(-1)

    def integrand(s: Tensor) -> Tensor:
        s = s.clamp(max=_GONE)
        w = -torch.expm1(-s)
        return (z + torch.expm1(log_generating(w) - shift * s) / w) * (-s).exp()

    return _integrated(integrand, z)


def expected_log(log_laplace: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """E log x = ∫ (e^{−s} − E e^{−sx}) ds/s (Frullani), for x > 0 of mean about 1 with E e^{−sx} = exp log_laplace(s).

    >>> expected_log(lambda s: -s * 2.718281828459045, torch.zeros((), dtype=torch.float64))
    tensor(1., dtype=torch.float64)
    """
    return _integrated(lambda s: (-s).exp() - log_laplace(s).exp(), like)
