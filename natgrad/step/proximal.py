"""Proximal steps: exact, linearised and quadratic, with any dissimilarity (Grosse 2021).

All three move from w to where J(u) + λρ(u, w) is small; they differ in what they expand. With ρ the divergence of the
outputs, pulled back to the parameters (``pulled_back``), the quadratic form without H is the natural gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import NatgradError, SingularMetricError
from natgrad.geometry import Vector
from natgrad.model import Inputs, Model
from natgrad.natural import sharp
from natgrad.output.metric import OutputMetric
from natgrad.solve.cg import CG
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.implicit import HessianOperator, SumOperator

Params = Mapping[str, Tensor]
Objective = Callable[[Params], Tensor]
Dissimilarity = Callable[[Params, Params], Tensor]


def point(
    objective: Objective,
    rho: Dissimilarity,
    w: Params,
    strength: float,
    *,
    tol: float = 1e-10,
    max_steps: int = 200,
) -> dict[str, Tensor]:
    """argmin_u J(u) + λρ(u, w), exactly: implicit gradient descent where ρ = ½‖u − w‖² (Grosse 2021).

    The inner solver is Newton with conjugate gradients; it raises if it does not reach ``tol``.

    >>> J = lambda u: 0.5 * u["w"] ** 2
    >>> ρ = lambda u, w: 0.5 * (u["w"] - w["w"]) ** 2
    >>> point(J, ρ, {"w": torch.tensor(1.0, dtype=torch.float64)}, strength=1.0)["w"]
    tensor(0.5000, dtype=torch.float64)
    """
    _check(strength)
    fixed = {name: p.detach() for name, p in w.items()}
    return minimise(lambda u: objective(u) + strength * rho(u, fixed), w, tol=tol, max_steps=max_steps)


def linearised(
    objective: Objective,
    rho: Dissimilarity,
    w: Params,
    strength: float,
    *,
    tol: float = 1e-10,
    max_steps: int = 200,
) -> dict[str, Tensor]:
    """argmin_u ⟨∇J(w), u⟩ + λρ(u, w): mirror descent, ∇_uρ(u, w) = −∇J(w)/λ (Grosse 2021)."""
    _check(strength)
    fixed = {name: p.detach() for name, p in w.items()}
    ω = HessianOperator.at(objective, w).differential

    def surrogate(u: Params) -> Tensor:
        linear = torch.stack([(ω[name] * u[name]).sum() for name in u]).sum()
        return linear + strength * rho(u, fixed)

    return minimise(surrogate, w, tol=tol, max_steps=max_steps)


def quadratic(
    objective: Objective, rho: Dissimilarity, w: Params, strength: float, *, solver: Solver | None = None
) -> dict[str, Tensor]:
    """w − (H + λG)⁻¹∇J(w), G = ∂²ρ/∂u² at u = w (Grosse 2021): both J and ρ to second order.

    With ρ = ½‖u − w‖² it is the damped Newton step.
    """
    _check(strength)
    fixed = {name: p.detach() for name, p in w.items()}
    H = HessianOperator.at(objective, w)
    G = HessianOperator.at(lambda u: rho(u, fixed), w)
    both = SumOperator(H.layout, ((1.0, H), (strength, G)))
    return fixed + -sharp(both, H.differential, solver or Cholesky())


def newton(objective: Objective, w: Params, *, damping: float = 0.0, solver: Solver | None = None) -> Vector:
    """The Newton direction (H + λ)⁻¹∇J (Johnson 2017): unlike a natural gradient it may ascend; where H is not positive
    the default solver refuses it.
    """
    H = HessianOperator.at(objective, w)
    return sharp(H, H.differential, solver or Cholesky(), damping)


def pulled_back(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    metric: OutputMetric,
    *,
    target: Any = None,
    params: Params | None = None,
) -> Dissimilarity:
    """ρ(u, w) = (1/N) Σ_n ρ(y_n(u), y_n(w)): the divergence of the outputs as one of parameters."""
    wrapped = Model.of(model, params)

    def rho(u: Params, w: Params) -> Tensor:
        return metric.divergence(wrapped(u, x), wrapped(w, x), target).mean()

    return rho


def minimise(objective: Objective, start: Params, *, tol: float, max_steps: int) -> dict[str, Tensor]:
    """A local minimum by Newton steps with conjugate gradients, damped where the Hessian is not positive."""
    θ = {name: p.detach() for name, p in start.items()}
    here = HessianOperator.at(objective, θ)
    value, damping = float(objective(θ)), 0.0
    scale = 1.0 + float(here.differential.flatten().norm())
    for _ in range(max_steps):
        ω = here.differential
        if float(ω.flatten().norm()) <= tol * scale:
            return θ
        try:
            δ = -sharp(here, ω, CG(tol=1e-12, max_steps=4 * here.layout.size + 20), damping)
        except SingularMetricError:
            damping = max(10 * damping, 1e-6 * scale)
            continue
        damping /= 10
        θ, value, here = _descend(objective, θ, δ, value, here)
    residual = float(here.differential.flatten().norm())
    raise NatgradError(
        f"the inner solver stopped after {max_steps} steps with a gradient of norm {residual:.3g}, over tol={tol:g} "
        f"times {scale:.3g}: raise max_steps or the strength, or start closer"
    )


def _descend(
    objective: Objective, θ: dict[str, Tensor], δ: Vector, value: float, here: HessianOperator
) -> tuple[dict[str, Tensor], float, HessianOperator]:
    """Back-track until the objective falls, or, where it is flat to rounding, until the gradient does."""
    slope = float(here.differential @ δ)
    norm = float(here.differential.flatten().norm())
    for _ in range(60):
        moved = θ + δ
        with torch.no_grad():
            new = float(objective(moved))
        if new <= value + 1e-4 * slope:
            return moved, new, HessianOperator.at(objective, moved)
        if abs(new - value) <= 1e-12 * (1 + abs(value)):
            there = HessianOperator.at(objective, moved)
            if float(there.differential.flatten().norm()) < norm:
                return moved, new, there
        δ, slope = 0.5 * δ, 0.5 * slope
    raise NatgradError(f"the inner solver cannot descend further; its gradient has norm {norm:.3g}: relax tol")


def _check(strength: float) -> None:
    if not strength > 0:
        raise ValueError(f"the strength λ of the proximity must be positive, got {strength}")
