"""Proximal steps: exact, linearised and quadratic, with any dissimilarity (Grosse 2021, section 2).

All three move from w to where J(u) + λρ(u, w) is small; they differ in which terms they expand. With ρ the divergence
of the outputs, pulled back to the parameters (``pulled_back``), the quadratic form without H is the natural gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import NatgradError, SingularMetricError
from natgrad.geometry import Vector, unflatten
from natgrad.linalg import newton as damped_newton
from natgrad.model import Inputs, Model
from natgrad.natural import sharp
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.solve.cg import CG
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.implicit import HessianOperator

Params = Mapping[str, Tensor]
Objective = Callable[[Params], Tensor]
Dissimilarity = Callable[[Params, Params], Tensor]
_LARGEST = 1e12  # damping over the norm of the first gradient, beyond which no Hessian is indefinite


def point(
    objective: Objective,
    rho: Dissimilarity,
    w: Params,
    strength: float,
    *,
    tol: float = 1e-10,
    max_steps: int = 200,
) -> dict[str, Tensor]:
    """argmin_u J(u) + λρ(u, w), exactly: implicit gradient descent if ρ = ½‖u − w‖².

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
    """argmin_u ⟨∇J(w), u⟩ + λρ(u, w): mirror descent, ∇_uρ(u, w) = −∇J(w)/λ."""
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
    """w − (H + λG)⁻¹∇J(w), G = ∂²ρ/∂u² at u = w: both J and ρ to second order.

    With ρ = ½‖u − w‖² it is the damped Newton step.
    """
    _check(strength)
    fixed = {name: p.detach() for name, p in w.items()}
    ω = HessianOperator.at(objective, w).differential
    both = HessianOperator.at(lambda u: objective(u) + strength * rho(u, fixed), w)
    return fixed + -sharp(both, ω, solver or Cholesky())


def newton(objective: Objective, w: Params, *, damping: float = 0.0, solver: Solver | None = None) -> Vector:
    """The Newton direction (H + λ)⁻¹∇J. Unlike a natural gradient it may ascend: where H is not positive, the default
    solver raises.
    """
    H = HessianOperator.at(objective, w)
    return sharp(H, H.differential, solver or Cholesky(), damping)


def pulled_back(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    metric: OutputMetric | Criterion,
    *,
    target: Any = None,
    params: Params | None = None,
) -> Dissimilarity:
    """ρ(u, w) = (1/N) Σ_n ρ(y_n(u), y_n(w)): the divergence of the outputs as one of the parameters."""
    wrapped, metric = Model.of(model, params), metric_of(metric)

    def rho(u: Params, w: Params) -> Tensor:
        return metric.divergence(wrapped(u, x), wrapped(w, x), target).mean()

    return rho


def minimise(objective: Objective, start: Params, *, tol: float, max_steps: int) -> dict[str, Tensor]:
    """A local minimum by Newton steps with conjugate gradients, damped where the Hessian is not positive."""
    like = {name: p.detach() for name, p in start.items()}
    here = HessianOperator.at(objective, like)
    scale, damping = 1.0 + float(here.differential.flatten().norm()), 0.0

    def gradient(x: Tensor) -> Tensor:
        nonlocal here
        here = HessianOperator.at(objective, unflatten(x, like))
        return here.differential.flatten()

    def direction(x: Tensor, ω: Tensor) -> Tensor:
        nonlocal damping
        while float(ω.norm()) > tol * scale and damping < _LARGEST * scale:
            try:
                δ = -sharp(here, here.differential, CG(tol=1e-12, max_steps=4 * here.layout.size + 20), damping)
            except SingularMetricError:
                damping = max(10 * damping, 1e-6 * scale)
                continue
            damping /= 10
            return δ.flatten()
        return torch.full_like(x, torch.nan)  # stop

    def value(x: Tensor) -> Tensor:
        with torch.no_grad():
            return objective(unflatten(x, like)).reshape(())

    flat = torch.cat([p.reshape(-1) for p in like.values()])
    x, _ = damped_newton(flat, value=value, gradient=gradient, direction=direction, max_steps=max_steps)
    residual = float(gradient(x).norm())
    if not residual <= tol * scale:
        raise NatgradError(
            f"the inner solver stopped after at most {max_steps} steps with a gradient of norm {residual:.3g}, over "
            f"tol={tol:g} times {scale:.3g}: raise max_steps or the strength, relax tol, or start closer"
        )
    return unflatten(x, like)


def _check(strength: float) -> None:
    if not strength > 0:
        raise ValueError(f"the strength λ of the proximity must be positive, got {strength}")
