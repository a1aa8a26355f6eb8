"""Gradient flow in function space: the path of the natural gradient in continuous time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from natgrad.show import brief
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
    """A path of functions, as ``gradient_flow`` returns it.

    Attributes:
        times: The times [m] at which the path was kept.
        losses: The losses [m] at these times.
        outputs: The outputs [m n *out] at these times.
        params: The parameters at the end.
        steps: The steps of the integrator that were accepted.
    """

    times: Tensor
    losses: Tensor
    outputs: Tensor
    params: dict[str, Tensor]
    steps: int  # of the integrator, accepted ones

    __repr__ = brief


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
    """Follow the natural gradient in continuous time: the path that small steps would take.

    Args:
        model: A module or a pure function f(params, x); it is not changed.
        x: The inputs.
        loss: A function of the outputs. Where the metric is on several heads, it takes a dict of them by their keys or
            places.
        metric: The metric on the outputs, or the loss.
        time: How long to integrate.
        points: At how many times, from 0 to ``time``, the path is kept.
        rtol: The error of a step in the outputs, relative to the largest output.
        max_steps: The most steps of the integrator; more raise an error.
        structure: How the metric is held; ``Dense()`` by default.
        solver: How it is inverted; ``Pinv()`` by default.
        damping: λ ≥ 0, added to the metric before it is inverted; ``Relative(ε)`` scales it with the metric.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.
        params: The parameters of a pure function, by name; a module has its own.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.

    Returns:
        The ``Flow``. With several heads its outputs are the heads side by side.

    Method:
        θ′ = −G(θ)⁺∇L. The outputs then follow y′ = −P(grad L), the gradient of the loss on functions, projected onto
        the tangent space of the model (Bai, Rosenberg and Xu 2022, lemma 1; with the sign of descent). It does not
        depend on the parametrisation. Gradient descent on the parameters is another flow, y′ = −JJᵀ∇L.

        A model that can move its outputs in all directions goes straight: for ½‖y − t‖² and ``Euclidean``, y(s) = t +
        e^−s (y(0) − t).

        The steps are those of Dormand and Prince (1980), with errors measured in the outputs: lengths of steps do not
        depend on the parametrisation either.

    Example:
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
    moving = Model.of(model, params, output, heads=metric.heads).copied()
    start = Vector({name: p.detach().clone() for name, p in moving.params.items()})
    chosen, keeper = solver or Pinv(), structure or Dense()

    def at(θ: Tensor) -> Model:
        return moving.at(unflatten(θ, start))

    def velocity(θ: Tensor) -> Tensor:
        v = natural_gradient(at(θ), x, loss, metric, structure=keeper, solver=chosen, damping=damping, target=target)
        return -v.flatten()

    def outputs(θ: Tensor) -> Tensor:
        with torch.no_grad():
            return at(θ)(None, x)

    times = torch.linspace(0, time, points, dtype=torch.float64)
    path, integrator = [outputs(start.flatten())], _Integrator(velocity, start.flatten(), time / (points - 1))
    size = float(path[0].abs().max())

    def excess(new: Tensor, error: Tensor) -> float:
        """How far the outputs at two candidates are from each other, over what is allowed."""
        y = outputs(new)
        allowed = rtol * max(size, float(y.abs().max()), float((y - path[0]).abs().max()))
        distance = float((y - outputs(new - error)).abs().max())
        return distance / allowed if allowed > 0 else 0.0

    for end in times[1:].tolist():
        while integrator.time < end:
            if integrator.steps == max_steps:
                raise NatgradError(
                    f"the gradient flow has reached the time {integrator.time:.3g} of {time:g} after "
                    f"max_steps={max_steps} steps: the metric is nearly singular on the way (give damping=, or "
                    "Pinv(rtol=…)), or rtol= is too small"
                )
            integrator.step(end, excess)
        path.append(outputs(integrator.θ))
    ys = torch.stack(path)
    with torch.no_grad():
        there = at(integrator.θ)
        shapes = there.evaluated(None, x)[1]
        losses = torch.stack([loss(there.given_to_loss(y, shapes)).reshape(()) for y in ys])
    return Flow(times, losses, ys, unflatten(integrator.θ, start), integrator.steps)


@final
class _Integrator:
    """θ′ = velocity(θ) by the rules of Dormand and Prince (1980), in steps h that are as long as the error allows."""

    def __init__(self, velocity: Callable[[Tensor], Tensor], θ: Tensor, h: float) -> None:
        self.θ, self.time, self.steps = θ, 0.0, 0
        self._velocity, self._slope, self._h = velocity, velocity(θ), h

    def step(self, end: float, excess: Callable[[Tensor, Tensor], float]) -> None:
        """Try one step, at most to ``end``; ``excess(θ, error)``, of what the step is and how wrong, is to be ≤ 1."""
        h, slopes = min(self._h, end - self.time), [self._slope]
        for row in _MATRIX:
            new = self.θ + h * _combined(row, slopes)
            slopes.append(self._velocity(new))
        ratio = excess(new, h * _combined(_DIFFERENCE, slopes))
        if ratio <= 1:
            self.time = end if h == end - self.time else self.time + h
            self.θ, self._slope, self.steps = new, slopes[-1], self.steps + 1
        self._h = h * _growth(ratio)


def _growth(ratio: float) -> float:
    """By how much the next step is longer: the error of order 5 over what is allowed, to the power −1/5, and bounds."""
    if not math.isfinite(ratio):
        return 0.2
    return 4.0 if ratio == 0 else min(4.0, max(0.2, 0.9 * ratio**-0.2))


def _combined(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    return torch.stack([w * k for w, k in zip(weights, slopes, strict=True) if w]).sum(0)
