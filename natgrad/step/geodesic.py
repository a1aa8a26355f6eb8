"""Geodesics of the pulled-back metric: their acceleration, and the exponential map for small models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.accelerate.devices import outside_inference_mode
from natgrad.errors import IncompatibleError, NonFiniteError
from natgrad.geometry import Covector, Vector, check_tangent, unflatten
from natgrad.model import Inputs, Model
from natgrad.musical import sharp
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.pullbacks.pullback import Batch, Pullback, at, pullback
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.dense import Dense


def christoffel(pb: Pullback, v: Vector) -> Covector:
    """The acceleration of a geodesic of the metric, with the index lowered and negated.

    Args:
        pb: The pullback, with an exact metric.
        v: The velocity.

    Returns:
        Γ♭(v, v)_p = v^q v^r (∂_q G_pr − ½ ∂_p G_qr), a ``Covector``.

    Method:
        With the energy E(θ, v) = ½ vᵀG(θ)v of the exact metric, Γ♭ = ∂_t ∂_v E(θ + tv, v) − ∂_θ E(θ, v): the
        Euler–Lagrange equation of E, by automatic differentiation, without a Christoffel symbol.
    """
    return christoffel_at(pb.batch, pb.metric, v)


@outside_inference_mode()
def christoffel_at(batch: Batch, metric: OutputMetric, v: Vector) -> Covector:
    """``christoffel`` without a pullback: a sampled metric draws no numbers."""
    model, x = batch.model, batch.x
    metric.check_everywhere("a geodesic")
    with torch.no_grad():
        n = model(None, x).shape[0]
    if metric.coupling(x, n) is not None:
        raise ValueError(
            f"{metric!r} couples the examples, and its geodesics are not implemented: use a metric that does not "
            "couple them (Fisher, Euclidean), or a step rule without a geodesic (TrustRegion, LevenbergMarquardt)"
        )
    check_tangent(model.params, v)
    names = list(model.params)
    point = {name: model.params[name].detach() for name in names}
    velocity = {name: v[name].detach() for name in names}

    def energy(θ: dict[str, Tensor], w: dict[str, Tensor]) -> Tensor:
        y, jw = torch.func.jvp(lambda a: model(a, x), (θ,), (w,))[:2]
        return 0.5 * (metric.flat(y, jw, batch.target) * jw).sum() / n

    def momentum(θ: dict[str, Tensor]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = torch.func.grad(energy, argnums=1)(θ, velocity)
        return out

    try:
        change = torch.func.jvp(momentum, (point,), (velocity,))[1]
        force = torch.func.grad(energy, argnums=0)(point, velocity)
    except RuntimeError as error:
        first, *_ = str(error).splitlines()
        if "forward AD" not in first and "is not implemented" not in first:
            raise
        raise IncompatibleError(
            "the acceleration of a geodesic is a second derivative of the model in forward mode, and an operation of "
            f"the model has none ({first}): write the operation otherwise, or use a step rule without a geodesic "
            "(TrustRegion, LevenbergMarquardt)"
        ) from error
    return Covector({name: change[name] - force[name] for name in names})


def exponential(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    metric: OutputMetric | Criterion,
    v: Vector,
    *,
    steps: int = 20,
    target: Any = None,
    solver: Solver | None = None,
    damping: float = 0.0,
    params: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Follow a geodesic of the metric for unit time; for small models.

    Args:
        model: A module or a pure function f(params, x).
        x: The inputs at which the metric is taken.
        metric: The metric on the outputs, or the loss.
        v: The velocity at the start, a ``Vector``.
        steps: The number of steps of the integrator.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.
        solver: How the metric is inverted; ``Cholesky()`` by default.
        damping: λ ≥ 0, added to the metric before it is inverted; ``Relative(ε)`` scales it with the metric.
        params: The parameters of a pure function, by name; a module has its own.

    Returns:
        The parameters at the end, Exp_θ(v), by name.

    Method:
        θ″ = −G⁻¹Γ♭(θ′, θ′) is integrated by the classical Runge–Kutta rule (Luk and Grosse 2018). Each step solves with
        the dense metric, so the model must be small. To first order the end is θ + v, to second ``GeodesicCorrected``.

    Example:
        >>> import natgrad as ng
        >>> f = lambda θ, x: torch.stack([θ["r"] * θ["a"].cos(), θ["r"] * θ["a"].sin()])[None]
        >>> θ = {"r": torch.tensor(1.0, dtype=torch.float64), "a": torch.tensor(0.0, dtype=torch.float64)}
        >>> v = ng.Vector({"r": torch.tensor(0.0), "a": torch.tensor(1.0)}).map(torch.Tensor.double)
        >>> end = exponential(f, None, ng.Euclidean(), v, params=θ)  # a straight line, (1, 0) to (1, 1)
        >>> f"{end['r']:.4f} {end['a']:.4f}"
        '1.4142 0.7854'
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    metric = metric_of(metric)
    wrapped = Model.of(model, params, heads=metric.heads)
    check_tangent(wrapped.params, v)
    base = pullback(wrapped, x, metric, target=target)
    like = {name: p.detach() for name, p in wrapped.params.items()}
    chosen = solver or Cholesky()

    def acceleration(θ: Tensor, w: Tensor) -> Tensor:
        pb = at(base, unflatten(θ, like))
        lowered = christoffel(pb, Vector(unflatten(w, like)))
        return -sharp(Dense().estimate(pb), lowered, chosen, damping).flatten()

    θ, w = Vector(like).flatten(), torch.cat([v[name].reshape(-1) for name in like]).to(base.y)
    h = 1.0 / steps
    for _ in range(steps):
        a1 = acceleration(θ, w)
        a2 = acceleration(θ + h / 2 * w, w + h / 2 * a1)
        a3 = acceleration(θ + h / 2 * w + h * h / 4 * a1, w + h / 2 * a2)
        a4 = acceleration(θ + h * w + h * h / 2 * a2, w + h * a3)
        θ = θ + h * w + h * h / 6 * (a1 + a2 + a3)
        w = w + h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
    if not bool(torch.isfinite(θ).all()):
        raise NonFiniteError("the geodesic left the domain of the model: use a shorter vector or more steps")
    return unflatten(θ, like)
