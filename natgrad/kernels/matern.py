"""The Matérn kernel as a function of the squared distance, with all its derivatives.

    k_ν(u) = 2^{1−ν}/Γ(ν) r^ν K_ν(r),   u = r²,   k_ν(0) = 1,   k_ν' = −k_{ν−1}/(4(ν − 1)) for ν > 1

As functions of u instead of r, the derivatives are kernels of smoothness ν − 1, and finite at u = 0 if ν is large
enough. Automatic differentiation through r = √u and K_ν would return NaN there. This kernel has no factor √(2ν),
unlike those of many Gaussian-process libraries: k_{3/2} = (1 + r)e^{−r}.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import in_nested_forward_mode
from natgrad.errors import NonFiniteError

# K_ν(r) in pure torch for every real order ν ≥ 0, scaled so that it neither overflows nor underflows at r = 0:
#
#     N_ν(u) = 2 (r/2)^ν K_ν(r) / Γ(1 + ν),   u = r² > 0
#
# Then ν N_ν is the Matérn kernel, with value 1 at r = 0, and −N_ν/4 is the derivative in u of the one of order ν + 1.
#
# Orders |μ| ≤ ½ and μ + 1 are computed directly: for r ≤ 2 by the series of Temme (1975), above by the trapezoidal rule
# for ∫ exp(−r cosh t) cosh(μt) dt, whose error decays exponentially in the number of nodes. Higher orders follow from
# the upward recurrence, whose terms are all positive. Everything is element-wise, without branches on data.


_TERMS = 17  # of Temme's series: the last is below 1/(16!)²
_NODES = 20  # of the trapezoidal rule: rounding is reached at 16
_FAR = 1e8  # exp(−r) underflows long before, for every order that the recurrence can reach

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

    The nodes cover the range where exp(−r(cosh t − 1)) > e⁻⁴⁶. Their distance shrinks as 1/√r, like the integrand.
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


_CLOSED = 10.5  # the polynomial of a half-integer above this would overflow in float32 before exp(−r) is zero
_FAR_APART = 1540.0  # exp(−r) times any of these polynomials is zero from here on, in float32 and in float64


def matern(nu: float, u: Tensor) -> Tensor:
    """k_ν(u) for u ≥ 0 and every real ν > 0, with the shape and dtype of u, differentiable in u.

    A derivative of order m in the points exists at r = 0 if and only if 2ν > m. First derivatives are set to 0 there
    for every ν, the only value that symmetry allows. Higher derivatives that do not exist raise an error.

    >>> matern(1.5, torch.tensor([0.0, 1.0]))  # (1 + r)e⁻ʳ
    tensor([1.0000, 0.7358])
    >>> u = torch.zeros(1, requires_grad=True)
    >>> torch.autograd.grad(matern(2.0, u), u)  # −1/(4(ν − 1))
    (tensor([-0.2500]),)
    """
    if in_nested_forward_mode():
        raise NotImplementedError(
            "a Sobolev kernel has one derivative in forward mode: take the other ones in reverse mode, by "
            "torch.func.jacrev or torch.autograd.grad"
        )
    value: Tensor = _Derivative.apply(u, nu, 0)  # type: ignore[no-untyped-call]
    return value


@final
class _Derivative(torch.autograd.Function):
    """The derivative of k_ν in u of order ``level``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, nu: float, level: int) -> Tensor:
        return _derivative(nu, level, u)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.nu, ctx.level = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * _next(ctx), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0] * _next(ctx)


def _next(ctx: Any) -> Tensor:
    """The next derivative, at the saved point."""
    (u,) = ctx.saved_tensors
    order = ctx.level + 1
    if order > 1 and 2 * ctx.nu <= order and bool((u == 0).any()):
        raise NonFiniteError(
            f"the derivative of order {order} of a Sobolev kernel of smoothness nu={ctx.nu:g} is infinite where two "
            f"points coincide. Use nu > {order / 2:g}, or points that differ"
        )
    value: Tensor = _Derivative.apply(u, ctx.nu, order)  # type: ignore[no-untyped-call]
    return value


def _derivative(nu: float, level: int, u: Tensor) -> Tensor:
    """(−¼)^j Γ(μ)/Γ(ν) k_μ with j = level, μ = ν − j > 0, and (−1)^j 4^{−ν} Γ(1 − μ)/Γ(ν) u^μ N_{−μ} for μ ≤ 0."""
    order = nu - level
    sign = (-1) ** level
    if order > 0:
        scale = math.exp(math.lgamma(order) - math.lgamma(nu) - level * math.log(4))  # 1 exactly for the kernel itself
        return sign * scale * torch.where(u == 0, 1, order * _scaled(order, torch.where(u == 0, 1, u)))
    scale = math.exp(math.lgamma(1 - order) - math.lgamma(nu) - nu * math.log(4))
    positive = torch.where(u == 0, 1, u)
    # It is infinite at u = 0, but only enters derivatives that multiply it by x − y = 0; those are zero.
    return torch.where(u == 0, 0, sign * scale * positive**order * _scaled(-order, positive))


def _scaled(nu: float, u: Tensor) -> Tensor:
    """N_ν(u) = k_ν/ν for u > 0 and ν ≥ 0; closed form at half-integers."""
    if nu % 1 == 0.5 and nu <= _CLOSED:
        r = u.sqrt()
        near = r.clamp(max=_FAR_APART)
        total = torch.zeros_like(r)
        for c in reversed(_polynomial(nu)):
            total = total * near + c
        return total * torch.exp(-r) / nu
    return log_scaled_bessel(nu, u).exp().to(u.dtype)


@cache
def _polynomial(nu: float) -> tuple[float, ...]:
    """Coefficients of e^r k_ν, lowest power first: p_{ν+1} = p_ν + r²/(4ν(ν − 1)) p_{ν−1}, p_½ = 1, p_{3/2} = 1 + r."""
    if nu <= 1.5:
        return (1.0,) * int(nu + 0.5)
    order = nu - 1
    last = (*_polynomial(order), 0.0)
    shifted = (0.0, 0.0, *_polynomial(order - 1))
    return tuple(a + b / (4 * order * (order - 1)) for a, b in zip(last, shifted, strict=True))
