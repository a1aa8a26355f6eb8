"""K_ν(r) in pure torch, for every real order ν ≥ 0, as the quantity that neither overflows nor underflows at r = 0.

    N_ν(u) = 2 (r/2)^ν K_ν(r) / Γ(1 + ν),   u = r² > 0

so that ν N_ν is the Matérn kernel with value 1 at r = 0, and −N_ν/4 the derivative in u of the next one, ν + 1.

Orders |μ| ≤ ½ and μ + 1 are computed directly: Temme's series for r ≤ 2 (J. Comput. Phys. 19, 1975), the trapezoidal
rule for ∫ exp(−r cosh t) cosh(μt) dt above, whose error falls exponentially in the number of nodes. Higher orders come
from the upward recurrence, all of whose terms are positive. Everything is element-wise, without a branch on the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TERMS = 17  # of Temme's series: the last is below 1/(16!)²
_NODES = 20  # of the trapezoidal rule: rounding is reached at 16
_FAR = 1e8  # exp(−r) is zero long before, for every order that the recurrence can reach

# −a_k, k odd, of 1/Γ(1 + μ) = Σ a_k μ^k (Abramowitz & Stegun 6.1.34): a difference of two Γ would lose digits at μ = 0
_ODD = (
    -0.57721566490153286061,
    0.042002635034095235529,
    0.042197734555544336748,
    -0.0072189432466630995424,
    0.00021524167411495097282,
    0.000020134854780788238656,
    -1.1330272319816958824e-6,
    -6.1160951044814158179e-9,
    1.1812745704870201446e-9,
    -7.782263439905071254e-12,
)


def log_scaled_bessel(nu: float, u: Tensor) -> Tensor:
    """log N_ν(u), of the shape of u > 0, in float64.

    >>> u = torch.tensor([0.25, 4.0])
    >>> 0.5 * log_scaled_bessel(0.5, u).exp()  # exp(−r)
    tensor([0.6065, 0.1353], dtype=torch.float64)
    """
    r = u.double().sqrt().clamp(max=_FAR)
    above = math.floor(nu + 0.5)
    mu = nu - above
    low, high = _lowest(mu, r)
    if above == 0:
        return low
    # M_ν = ν N_ν obeys M_{ν+1} = M_ν + u/(4ν(ν − 1)) M_{ν−1}. As ratios, no power of r is ever formed.
    quarter, order, below = r.square() / 4, mu + 1, 1.0
    log_value = high + math.log(order)
    ratio = (log_value - low).exp()  # M_{μ+1}/N_μ, and M_ν/M_{ν−1} from then on
    for _ in range(above - 1):
        ratio = 1 + quarter / (order * below * ratio)
        log_value = log_value + ratio.log()
        below, order = order, order + 1
    return log_value - math.log(nu)


def _lowest(mu: float, r: Tensor) -> tuple[Tensor, Tensor]:
    """log N_μ and log N_{μ+1}, |μ| ≤ ½."""
    near = tuple(t.log() for t in _temme(mu, r.clamp(max=2.0)))
    far = _trapezoid(mu, r.clamp(min=2.0))
    low, high = (torch.where(r <= 2, n, f) for n, f in zip(near, far, strict=True))
    constant = math.log(2) - math.lgamma(1 + mu)
    return low + constant, high + constant - math.log1p(mu)


def _temme(mu: float, r: Tensor) -> tuple[Tensor, Tensor]:
    """(r/2)^μ K_μ(r) and (r/2)^{μ+1} K_{μ+1}(r) for 0 < r ≤ 2, by Temme's series."""
    half = r / 2
    log_half = half.log()
    power = (2 * mu * log_half).exp()  # (r/2)^{2μ}
    slope = -log_half if mu == 0 else torch.expm1(2 * mu * log_half) / (-2 * mu)
    reflection = 1.0 if mu == 0 else math.pi * mu / math.sin(math.pi * mu)
    odd = sum(c * mu ** (2 * k) for k, c in enumerate(_ODD))
    even = (1 / math.gamma(1 - mu) + 1 / math.gamma(1 + mu)) / 2
    f = reflection * (odd * (1 + power) / 2 + even * slope)
    p = torch.full_like(r, math.gamma(1 + mu) / 2)
    q = power * (math.gamma(1 - mu) / 2)
    c, square = torch.ones_like(r), half.square()
    low, high = f, p
    for i in range(1, _TERMS):
        f = (i * f + p + q) / (i * i - mu * mu)
        c = c * square / i
        p, q = p / (i - mu), q / (i + mu)
        low = low + c * f
        high = high + c * (p - i * f)
    return low, high


def _trapezoid(mu: float, r: Tensor) -> tuple[Tensor, Tensor]:
    """log (r/2)^μ K_μ(r) and log (r/2)^{μ+1} K_{μ+1}(r) for r ≥ 2.

    The nodes are spread over the range where exp(−r(cosh t − 1)) is above e⁻⁴⁶: their distance shrinks with 1/√r as
    the integrand does.
    """
    reach = torch.acosh(1 + 46 / r)
    width = reach / _NODES
    low = torch.full_like(r, 0.5)
    high = low
    for node in range(1, _NODES + 1):
        t = node * width
        weight = torch.exp(-2 * r * torch.sinh(t / 2).square())
        low = low + weight * torch.cosh(mu * t)
        high = high + weight * torch.cosh((mu + 1) * t)
    log_half = (r / 2).log()
    return (low * width).log() + mu * log_half - r, (high * width).log() + (mu + 1) * log_half - r
