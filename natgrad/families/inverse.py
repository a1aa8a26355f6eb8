"""The way from the mean chart to the natural one, where it has no closed form: a safeguarded Newton iteration."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from natgrad.errors import UnsolvedError
from natgrad.families.exponential import ExponentialFamily

_STEPS = 200
_HALVINGS = 40
_QUADRATIC = 1e-6  # below this squared decrement a full step squares it
_POLISHING = 3  # full steps from there


def solved(family: ExponentialFamily, xi: Tensor, start: Tensor) -> Tensor:
    """η with ∇log Z(η) = ξ, from a start inside the domain; ∂η/∂ξ = F⁻¹ by the implicit function theorem.

    η minimises the convex log Z(η) − ⟨ξ, η⟩. Newton steps −F⁻¹(∇log Z − ξ) are kept to nine tenths of the way to the
    boundary and halved until the function falls, every point of a batch by itself, in double precision.
    """
    with torch.no_grad():
        eta = _newton(family, xi.detach().double(), start.detach().double()).to(xi.dtype)
    found: Tensor = _Implicit.apply(xi, eta, family)  # type: ignore[no-untyped-call]
    return found


def _newton(family: ExponentialFamily, xi: Tensor, eta: Tensor) -> Tensor:
    left = _POLISHING
    for _ in range(_STEPS):
        residual = family._mean(eta) - xi
        δ = -family._fisher(eta).sharp(residual)
        decrement = -family.pair(residual, δ)
        near, lost = decrement.abs() < _QUADRATIC, decrement.isnan()
        δ = torch.where(lost.unsqueeze(-1) if family.axes else lost, 0.0, δ)  # such a member stays, and is named below
        t = (0.9 * family.reach(eta, δ)).clamp(max=1.0)
        if bool((near | lost).all()):
            if left == 0 or bool(lost.any()):
                break
            left -= 1
        eta = eta + _halved(family, xi, eta, δ, t, near | lost)
    if not bool(near.all()):
        raise UnsolvedError(
            f"no natural parameters of {type(family).__name__} were found for these mean parameters in {_STEPS} Newton "
            "steps: they lie too near the boundary of their domain for this precision. Use float64, or moments of more "
            "data",
            near,
        )
    return eta


def _halved(family: ExponentialFamily, xi: Tensor, eta: Tensor, δ: Tensor, t: Tensor, near: Tensor) -> Tensor:
    """The step, halved until the function falls; near the minimum its values are rounding, and are not asked."""
    here = family._log_partition(eta) - family.pair(xi, eta)
    slope = family.pair(family._mean(eta) - xi, δ)
    for _ in range(_HALVINGS):
        step = t.unsqueeze(-1) * δ if family.axes else t * δ
        there = family._log_partition(eta + step) - family.pair(xi, eta + step)
        falls = near | (there <= here + 1e-4 * t * slope)
        if bool(falls.all()):
            break
        t = torch.where(falls, t, 0.5 * t)
    return step


@final
class _Implicit(torch.autograd.Function):
    """ξ ↦ η, of which only the value was found: the backward pass is F(η)⁻¹, which may be differentiated again."""

    @staticmethod
    def forward(xi: Tensor, eta: Tensor, family: ExponentialFamily) -> Tensor:
        return eta.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, ExponentialFamily], output: Tensor) -> None:
        ctx.family = inputs[2]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *covectors: Tensor) -> tuple[Tensor, None, None]:
        (eta,) = ctx.saved_tensors
        return ctx.family._fisher(eta).sharp(covectors[0]), None, None
