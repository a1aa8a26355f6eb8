"""Gradient flow in function space: the path of the natural gradient in continuous time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import NatgradError
from natgrad.geometry import Vector, unflatten
from natgrad.linalg import Damping
from natgrad.model import Inputs, Model
from natgrad.musical import natural_gradient
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.solve.solvers import Pinv, Solver
from natgrad.structures.base import Structure
from natgrad.structures.dense import Dense

# The pair of Runge–Kutta rules of orders 5 and 4 of Dormand and Prince (1980): the matrix, the weights of order 5, and
# those of order 5 less those of order 4. The last row of the matrix is the weights.
_MATRIX = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_DIFFERENCE = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@final
@dataclass(frozen=True)
class Flow:
    """A path of functions: times [m], losses [m], outputs [m n *out], and the parameters at the end."""

    times: Tensor
    losses: Tensor
    outputs: Tensor
    params: dict[str, Tensor]
    steps: int  # of the integrator, accepted ones


def gradient_flow(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    loss: Callable[[Any], Tensor],
    metric: OutputMetric | Criterion,
    time: float,
    *,
    points: int = 11,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    structure: Structure | None = None,
    solver: Solver | None = None,
    damping: Damping = 0.0,
    target: Any = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Flow:
    """θ′ = −G(θ)⁺∇L from the model's parameters, integrated for so long a ``time``; the model is not changed.

    The outputs then follow y′ = −P(grad L), the gradient of the loss on functions, projected onto the tangent space of
    the model: the gradient flow of the loss on the image of the model (Bai, Rosenberg and Xu 2022, lemma 1; with the
    sign of descent). It does not depend on the parametrisation. Gradient descent on the parameters is another flow,
    y′ = −JJᵀ∇L. A model that can move its outputs in all directions goes straight: for ½‖y − t‖² and ``Euclidean``,
    y(s) = t + e^−s (y(0) − t).

    The steps are those of Dormand and Prince (1980), chosen so that the error of each in the outputs is at most
    ``rtol`` of the largest output: lengths of steps do not depend on the parametrisation either. ``points``: at how
    many times, from 0 to ``time``, the path is kept. ``structure`` and ``solver`` are those of the natural gradient, by
    default ``Dense`` and ``Pinv``. Where the metric is on several heads, ``loss`` takes a dict of them by their keys or
    places, and the outputs of the path are the heads side by side.

    >>> import torch, natgrad as ng
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    >>> x = torch.tensor([[-1.0], [0.0], [2.0]], dtype=torch.float64)
    >>> flow = ng.functionspace.gradient_flow(
    ...     model, x, lambda y: (y - x).square().sum() / 6, ng.Euclidean(), time=1.0, solver=ng.Pinv(rtol=1e-10)
    ... )
    >>> bool(((flow.outputs[-1] - x) / (flow.outputs[0] - x) - torch.e**-1).abs().max() < 1e-5)
    True
    """
    metric = metric_of(metric)
    if not 0 < time < math.inf or points < 2 or not 0 < rtol < 1 or max_steps < 1:
        raise ValueError(
            f"gradient_flow needs a finite time > 0, points ≥ 2, 0 < rtol < 1 and max_steps ≥ 1, got time={time}, "
            f"points={points}, rtol={rtol}, max_steps={max_steps}"
        )
    moving = _Moving.of(Model.of(model, params, output, heads=metric.heads))
    θ = Vector({name: p.detach() for name, p in moving.model.params.items()}).flatten()
    chosen, keeper = solver or Pinv(), structure or Dense()

    def velocity(θ: Tensor) -> Tensor:
        at = moving.at(θ)
        v = natural_gradient(at, x, loss, metric, structure=keeper, solver=chosen, damping=damping, target=target)
        return -v.flatten()

    def outputs(θ: Tensor) -> Tensor:
        with torch.no_grad():
            return moving.at(θ)(None, x)

    times = torch.linspace(0, time, points, dtype=torch.float64)
    path, slope, now, steps = [outputs(θ)], velocity(θ), 0.0, 0
    h, size = time / (points - 1), float(path[0].abs().max())
    for end in times[1:].tolist():
        while now < end:
            if steps == max_steps:
                raise NatgradError(
                    f"the gradient flow has reached the time {now:.3g} of {time:g} after max_steps={max_steps} steps: "
                    "the metric is nearly singular on the way (give damping=, or Pinv(rtol=…)), or rtol= is too small"
                )
            h = min(h, end - now)
            slopes = [slope]
            for row in _MATRIX:
                slopes.append(velocity(new := θ + h * _combined(row, slopes)))
            y = outputs(new)
            error = float((y - outputs(new - h * _combined(_DIFFERENCE, slopes))).abs().max())
            allowed = rtol * max(size, float(y.abs().max()), float((y - path[0]).abs().max()))
            ratio = error / allowed if allowed > 0 else 0.0
            if ratio <= 1:
                θ, slope, now, steps = new, slopes[-1], end if h == end - now else now + h, steps + 1
            h *= min(4.0, max(0.2, 0.9 * ratio**-0.2)) if 0 < ratio < torch.inf else (4.0 if ratio == 0 else 0.2)
        path.append(outputs(θ))
    ys = torch.stack(path)
    with torch.no_grad():
        at = moving.at(θ)
        shapes = at.evaluated(None, x)[1]
        losses = torch.stack([loss(at.given_to_loss(y, shapes)).reshape(()) for y in ys])
    return Flow(times, losses, ys, unflatten(θ, moving.like), steps)


def _combined(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    return torch.stack([w * k for w, k in zip(weights, slopes, strict=True) if w]).sum(0)


@final
@dataclass(frozen=True)
class _Moving:
    """The model at any parameters: a copy of the module whose layers have their rules, or the pure function."""

    model: Model
    like: dict[str, Tensor]

    @staticmethod
    def of(model: Model) -> _Moving:
        if model.module is not None:
            model = Model.of(copy.deepcopy(model.module), None, model.output, model.examples, model.heads)
        return _Moving(model, {name: p.detach().clone() for name, p in model.params.items()})

    def at(self, θ: Tensor) -> Model:
        placed = unflatten(θ, self.like)
        if self.model.module is None:
            return replace(self.model, params=placed)
        with torch.no_grad():
            for name, p in self.model.params.items():
                p.copy_(placed[name])
        return self.model
