"""Proximal steps: exact, linearised and quadratic, with any dissimilarity (Grosse 2021, section 2).

All three move from w to where J(u) + λρ(u, w) is small; they differ in which terms they expand. With ρ the divergence
of the outputs, pulled back to the parameters (``pulled_back``), the quadratic form without H is the natural gradient.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import NatgradError, SingularMetricError
from natgrad.geometry import Vector, unflatten
from natgrad.isolation import unfused
from natgrad.lanczos import residual
from natgrad.linalg import eigvalsh
from natgrad.model import Inputs, Model
from natgrad.musical import sharp
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.implicit import HessianOperator

Params = Mapping[str, Tensor]
Objective = Callable[[Params], Tensor]
Dissimilarity = Callable[[Params, Params], Tensor]
_STRIDE = math.log(8.0)  # of log λ, in the search for a multiplier
_LARGEST = 2048  # parameters whose Hessian is formed to explain a failure
_NEGLIGIBLE = 1e-9  # a multiplier below which the region does not limit the minimum


def point(
    objective: Objective,
    rho: Dissimilarity,
    w: Params,
    strength: float,
    *,
    tol: float | None = None,
    max_steps: int = 200,
) -> dict[str, Tensor]:
    """The proximal point: the minimum of the loss plus a distance from the present parameters.

    Args:
        objective: J, a function of named parameters that returns one number.
        rho: ρ(u, w), the dissimilarity of two such parameters; ``pulled_back`` makes one of a metric.
        w: The present parameters by name.
        strength: λ > 0; large numbers make short steps.
        tol: The gradient must get below it, relative to 1 + its norm at w; ε^⅔ by default, 4·10⁻¹¹ in double precision.
        max_steps: The most Newton steps of the inner solver.

    Returns:
        argmin_u J(u) + λρ(u, w), by name.

    Method:
        Newton with conjugate gradients in a trust region. With ρ = ½‖u − w‖² it is implicit gradient descent.

    Example:
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
    tol: float | None = None,
    max_steps: int = 200,
) -> dict[str, Tensor]:
    """The proximal step with a linear model of the loss: mirror descent.

    Args:
        objective: J, a function of named parameters that returns one number.
        rho: ρ(u, w), the dissimilarity of two such parameters.
        w: The present parameters by name.
        strength: λ > 0; large numbers make short steps.
        tol: The gradient must get below it, relative to 1 + its norm at w.
        max_steps: The most Newton steps of the inner solver.

    Returns:
        argmin_u ⟨∇J(w), u⟩ + λρ(u, w), by name.

    Method:
        At the minimum ∇_uρ(u, w) = −∇J(w)/λ. If ρ does not change along a direction in which J falls, as the divergence
        of the outputs need not along parameters that they do not see, there is no minimum, and an error says so.
    """
    _check(strength)
    fixed = {name: p.detach() for name, p in w.items()}
    ω = HessianOperator.at(objective, w).differential

    def surrogate(u: Params) -> Tensor:
        linear = torch.stack([(ω[name] * u[name]).sum() for name in u]).sum()
        return linear + strength * rho(u, fixed)

    try:
        return minimise(surrogate, w, tol=tol, max_steps=max_steps)
    except NatgradError as error:
        G = HessianOperator.at(lambda u: rho(u, fixed), w)
        if G.layout.size > _LARGEST:
            raise
        values = eigvalsh(G.dense(), "the Hessian of ρ").abs()
        null = int((values <= G.layout.size * torch.finfo(values.dtype).eps * values.max()).sum())
        if not null:
            raise
        outside = residual(G.product, ω.flatten(), G.layout.size)
        raise SingularMetricError(
            f"the linearised problem is unbounded: ρ has {null} null directions at w, along which it does not change, "
            f"and the linear model of J falls without end where it keeps ρ (the part of ∇J along them is {outside:.2g} "
            "of its norm). Add a multiple of ½‖u − w‖² to ρ, or use point, which keeps J itself, or trust_region"
        ) from error


def quadratic(
    objective: Objective, rho: Dissimilarity, w: Params, strength: float, *, solver: Solver | None = None
) -> dict[str, Tensor]:
    """The proximal step with quadratic models of the loss and of the distance.

    Args:
        objective: J, a function of named parameters that returns one number.
        rho: ρ(u, w), the dissimilarity of two such parameters.
        w: The present parameters by name.
        strength: λ > 0; large numbers make short steps.
        solver: How the sum of the Hessians is inverted; ``Cholesky()`` by default.

    Returns:
        w − (H + λG)⁻¹∇J(w) by name, with G = ∂²ρ/∂u² at u = w.

    Method:
        With ρ = ½‖u − w‖² it is the damped Newton step.
    """
    _check(strength)
    fixed = {name: p.detach() for name, p in w.items()}
    ω = HessianOperator.at(objective, w).differential
    both = HessianOperator.at(lambda u: objective(u) + strength * rho(u, fixed), w)
    return fixed + -sharp(both, ω, solver or Cholesky())


def newton(objective: Objective, w: Params, *, damping: float = 0.0, solver: Solver | None = None) -> Vector:
    """The direction of Newton's method, with the Hessian in place of a metric; it may ascend.

    Args:
        objective: J, a function of named parameters that returns one number.
        w: The parameters by name.
        damping: λ ≥ 0, added to the Hessian before it is inverted.
        solver: How the Hessian is inverted; ``Cholesky()`` by default, which raises where it is not positive.

    Returns:
        (H + λ)⁻¹∇J, a ``Vector``.
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
    reverse: bool = False,
) -> Dissimilarity:
    """The divergence of a model's outputs, as a dissimilarity of its parameters.

    Args:
        model: A module or a pure function f(params, x).
        x: The inputs at which the outputs are compared.
        metric: The metric whose divergence it is, or the loss.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.
        params: The parameters to use, by name, or all that require a gradient.
        reverse: Swap old and new outputs: for Fisher the divergence is KL(p_w‖p_u), and with True KL(p_u‖p_w).

    Returns:
        A function ρ(u, w) = (1/N) Σ_n ρ(y_n(u), y_n(w)).
    """
    metric = metric_of(metric)
    if reverse:
        metric.check_everywhere("the divergence from the new outputs")
    wrapped = Model.of(model, params, heads=metric.heads)

    def rho(u: Params, w: Params) -> Tensor:
        (new, shapes), old = wrapped.evaluated(u, x), wrapped(w, x)
        at = metric.shaped(shapes)
        return (at.divergence(old, new, target) if reverse else at.divergence(new, old, target)).mean()

    return rho


def trust_region(
    objective: Objective,
    rho: Dissimilarity,
    w: Params,
    radius: float,
    *,
    tol: float = 1e-8,
    max_steps: int = 200,
) -> dict[str, Tensor]:
    """The minimum of the loss itself within a given divergence from the present parameters.

    Args:
        objective: J, a function of named parameters that returns one number.
        rho: ρ(u, w), the dissimilarity of two such parameters.
        w: The present parameters by name.
        radius: η, the largest ρ.
        tol: The relative precision to which ρ reaches the radius.
        max_steps: The most Newton steps of the inner solver.

    Returns:
        argmin_u J(u) subject to ρ(u, w) ≤ η (Grosse 2021, (6)), by name.

    Method:
        It is the proximal point whose multiplier λ puts ρ onto the boundary, to the relative precision ``tol``, or the
        minimum of J where that lies inside. λ is found by regula falsi in logarithms: ρ at the proximal point falls
        where λ rises.

        Where J is not convex, ρ may jump over the boundary; the result is then the proximal point inside.

    Example:
        >>> J = lambda u: (u["w"] - torch.tensor([3.0, 4.0])).square().sum()
        >>> ρ = lambda u, w: 0.5 * (u["w"] - w["w"]).square().sum()
        >>> w = {"w": torch.zeros(2, dtype=torch.float64)}
        >>> trust_region(J, ρ, w, radius=0.5)["w"]  # the unit disk
        tensor([0.6000, 0.8000], dtype=torch.float64)
    """
    if not radius > 0:
        raise ValueError(f"the radius η of the region must be positive, got {radius}")
    fixed = {name: p.detach() for name, p in w.items()}
    here = dict(fixed)

    def distance(u: Params) -> float:
        with torch.no_grad():
            return float(rho(u, fixed))

    def proximal_point(log_strength: float) -> dict[str, Tensor]:
        strength = math.exp(log_strength)
        return minimise(lambda u: objective(u) + strength * rho(u, fixed), here, tol=None, max_steps=max_steps)

    def excess(u: Params) -> float:
        return math.log(max(distance(u), sys.float_info.min) / radius)

    high = 0.0
    while (below := excess(inside := proximal_point(high))) > 0:
        high += _STRIDE
    here, low = inside, high - _STRIDE
    while (above := excess(u := proximal_point(low))) <= 0:
        here, inside, high, below = u, u, low, above
        if low < math.log(_NEGLIGIBLE):
            return minimise(objective, inside, tol=None, max_steps=max_steps)
        low -= _STRIDE
    # The Illinois rule: a chord, whose old end counts half where it stays.
    reached = below
    while reached < -tol and high - low > 1e-14 * max(1.0, abs(high)):
        middle = high - below * (high - low) / (below - above)
        there = excess(u := proximal_point(middle))
        if there > 0:
            low, above, below = middle, there, 0.5 * below
        else:
            here, inside, high, above = u, u, middle, 0.5 * above
            reached = below = there
    return inside


def minimise(objective: Objective, start: Params, *, tol: float | None, max_steps: int) -> dict[str, Tensor]:
    """A local minimum of a function of named parameters, by Newton steps in a trust region.

    Args:
        objective: J, a function of named parameters that returns one number.
        start: The parameters to start from, by name.
        tol: The gradient must get below it, relative to 1 + its norm at the start; ε^⅔ by default.
        max_steps: The most Newton steps.

    Returns:
        The parameters at the minimum, by name.

    Method:
        Each step by truncated conjugate gradients (Steihaug 1983).
    """
    like = {name: p.detach() for name, p in start.items()}
    x = torch.cat([p.reshape(-1) for p in like.values()])
    ε = torch.finfo(x.dtype).eps
    tol = ε ** (2 / 3) if tol is None else tol

    def value(x: Tensor) -> float:
        with torch.no_grad(), unfused(None, x.device):
            return float(objective(unflatten(x, like)))

    here, f = HessianOperator.at(objective, like), value(x)
    g = here.differential.flatten()
    norm = float(g.norm())
    scale, radius = 1.0 + norm, 1.0 + float(x.norm())
    for _ in range(max_steps):
        if norm <= tol * scale or radius < ε:
            break
        # Few products far from the minimum, and still superlinear (Dembo, Eisenstat and Steihaug 1982).
        δ, predicted = _truncated(here.product, g, radius, min(0.5, (norm / scale) ** 0.5) * norm)
        there = value(x + δ)
        ratio, length = (there - f) / predicted, float(δ.norm())
        unseen = -predicted <= 256 * ε * (1 + abs(f))  # below the rounding of f: the gradient must fall instead
        if unseen or ratio > 1e-4:
            new = HessianOperator.at(objective, unflatten(x + δ, like))
            after = new.differential.flatten()
            if unseen and not float(after.norm()) < norm:
                break
            x, f, here, g, norm = x + δ, there, new, after, float(after.norm())
        if unseen or 0.25 <= ratio <= 0.75:
            continue
        # Also where it is NaN, outside of the domain of the objective.
        radius = max(radius, 2 * length) if ratio > 0.75 else 0.25 * length
    if not norm <= tol * scale:
        raise NatgradError(
            f"the inner solver stopped after at most {max_steps} steps with a gradient of norm {norm:.3g}, over "
            f"tol={tol:g} times {scale:.3g}: raise max_steps or the strength, relax tol, or start closer. The minimum "
            "may also lie at a kink (ReLU), where there is no gradient"
        )
    return unflatten(x, like)


def _truncated(product: Callable[[Tensor], Tensor], g: Tensor, radius: float, tol: float) -> tuple[Tensor, float]:
    """δ near argmin m(δ) = ⟨g, δ⟩ + ½δᵀHδ over ‖δ‖ ≤ radius, and m(δ) < 0; H need not be positive (Steihaug 1983).

    Conjugate gradients from 0, until the gradient of m is within tol, or up to the boundary: along a direction of
    negative curvature, or where the next iterate lies beyond.
    """
    δ, r, p, slope = torch.zeros_like(g), g, -g, torch.dot(g, g)

    def model(δ: Tensor, r: Tensor) -> float:  # r = g + Hδ
        return 0.5 * float(torch.dot(g, δ) + torch.dot(r, δ))

    for _ in range(2 * g.numel()):
        Hp = product(p)
        curvature, inside, square = torch.dot(p, Hp), torch.dot(δ, p), torch.dot(p, p)
        α = slope / curvature
        if not bool(curvature > 0) or float((δ + α * p).norm()) >= radius:
            room = radius**2 - torch.dot(δ, δ)
            τ = room / (inside + (inside.square() + square * room).sqrt())  # ‖δ + τp‖ = radius
            return δ + τ * p, model(δ + τ * p, r + τ * Hp)
        δ, r = δ + α * p, r + α * Hp
        new = torch.dot(r, r)
        if float(new.sqrt()) <= tol:
            break
        p, slope = (new / slope) * p - r, new
    return δ, model(δ, r)


def _check(strength: float) -> None:
    if not strength > 0:
        raise ValueError(f"the strength λ of the proximity must be positive, got {strength}")
