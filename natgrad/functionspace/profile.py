"""The Matérn kernel as a function of the squared distance, with all its derivatives.

    k_ν(u) = 2^{1−ν}/Γ(ν) r^ν K_ν(r),   u = r²,   k_ν(0) = 1,   k_ν' = −k_{ν−1}/(4(ν − 1)) for ν > 1

In u rather than r the derivatives are kernels again, of a smoothness lower by one, and finite at u = 0 as long as ν
allows: automatic differentiation through r = √u and K_ν would return NaN there. There is no √(2ν) in this kernel
(ERRATA 7): k_{3/2} = (1 + r)e^{−r}.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.functionspace.bessel import log_scaled_bessel

_CLOSED = 10.5  # the polynomial of a half-integer above this would overflow in float32 before exp(−r) is zero
_FAR = 1540.0  # exp(−r) times any of these polynomials is zero from here on, in float32 and in float64


def matern(nu: float, u: Tensor) -> Tensor:
    """k_ν(u), of the shape and type of u ≥ 0 (000 (23), (34); ERRATA 6): every real ν > 0, differentiable in u.

    A derivative of order m in the points exists at r = 0 if and only if 2ν > m. First derivatives are 0 there for every
    ν, the one value that symmetry allows; of higher order, those that do not exist are refused.

    >>> matern(1.5, torch.tensor([0.0, 1.0]))  # (1 + r)e⁻ʳ
    tensor([1.0000, 0.7358])
    >>> u = torch.zeros(1, requires_grad=True)
    >>> torch.autograd.grad(matern(2.0, u), u)  # −1/(4(ν − 1))
    (tensor([-0.2500]),)
    """
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
    """The derivative of one order more, at the point of the context."""
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
    # Infinite at u = 0, where it is only ever multiplied by x − y = 0, in derivatives that are zero.
    return torch.where(u == 0, 0, sign * scale * positive**order * _scaled(-order, positive))


def _scaled(nu: float, u: Tensor) -> Tensor:
    """N_ν(u) = k_ν/ν for u > 0 and ν ≥ 0 (of ``bessel``), in closed form at half-integers."""
    if nu % 1 == 0.5 and nu <= _CLOSED:
        r = u.sqrt()
        near = r.clamp(max=_FAR)
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
