"""Line searches along the natural gradient, or along its geodesic: a grid of lengths, and Armijo's rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch

from natgrad.geometry import Vector
from natgrad.linalg import check_number_fields
from natgrad.step.base import Step, StepContext, StepRule


@final
@dataclass(frozen=True)
class GridSearch(StepRule):
    """Try several lengths of the step and take the one with the least loss.

    Needs ``opt.step(closure)``. Where no length lowers the loss, the parameters stay.

    Args:
        tries: The number of lengths on the grid, each half of the one before.

    Method:
        δ = −η·lr·v with η = 1, ½, ¼, …, 2^−(tries − 1), from the longest on. The search ends where the loss has fallen
        below that of the start and rises again. Müller and Zeinhofer (2023) take it for residuals of differential
        equations: the loss is far from quadratic at the start, where the best η is small.

    Example:
        >>> GridSearch(tries=20)
        GridSearch(tries=20)
    """

    needs_closure: ClassVar[bool] = True

    tries: int = 30

    def __post_init__(self) -> None:
        check_number_fields(self)
        if self.tries < 1:
            raise ValueError(f"GridSearch(tries=…) must be at least 1, got {self.tries}")

    def take(self, context: StepContext) -> Step:
        return self.along(context, context.natural())

    def along(self, context: StepContext, δ: Vector) -> Step:
        """The step along a displacement δ that is given."""
        start = context.loss(None)
        _, there, step = _searched(context, lambda η: δ * η, start, self.tries)
        if there < start:
            return Step(step, context.damping)
        return Step(δ * 0.0, context.damping, accepted=False, reason=no_decrease(context, δ, start, self.tries))


@final
@dataclass(frozen=True)
class Armijo(StepRule):
    """Shorten the step until the loss has fallen enough.

    Needs ``opt.step(closure)``. Where no length does, the parameters stay.

    Args:
        slope: How much of the decrease that the gradient promises is enough.
        shrink: c, by which a step that is too long is multiplied.
        tries: The most lengths to try.

    Method:
        δ = −η·lr·v with the first η = 1, c, c², … for which L(θ + δ) ≤ L(θ) + slope·⟨ω, δ⟩ (Armijo 1966).

    Example:
        >>> Armijo()
        Armijo(slope=0.0001, shrink=0.5, tries=30)
    """

    needs_closure: ClassVar[bool] = True

    slope: float = 1e-4
    shrink: float = 0.5
    tries: int = 30

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not 0 < self.slope < 1 or not 0 < self.shrink < 1 or self.tries < 1:
            raise ValueError(f"Armijo needs 0 < slope < 1, 0 < shrink < 1 and tries ≥ 1, got {self}")

    def take(self, context: StepContext) -> Step:
        return self.along(context, context.natural())

    def along(self, context: StepContext, δ: Vector) -> Step:
        """The step along a displacement δ that is given."""
        start, fall, scale = context.loss(None), float(context.differential @ context.whole(δ)), 1.0
        for _ in range(self.tries):
            there = context.loss(δ * scale)
            if there <= start + min(self.slope * scale * fall, 0.0) and there < start:
                return Step(δ * scale, context.damping)
            scale *= self.shrink
        return Step(δ * 0.0, context.damping, accepted=False, reason=no_decrease(context, δ, start, self.tries))


def no_decrease(context: StepContext, δ: Vector, start: float, tries: int) -> str:
    """Why no step was found: the loss cannot fall by more than its rounding, or it does not fall."""
    fall = abs(float(context.differential @ δ))
    rounding = 8 * torch.finfo(next(iter(context.params.values())).dtype).eps * abs(start)
    return "stationary" if fall <= rounding else f"no decrease in {tries} tries"


@final
@dataclass(frozen=True)
class GeodesicSearch(StepRule):
    """Search for the best step along a parabola that follows the geodesic; for least squares.

    It is the default of ``LeastSquares``. Needs ``opt.step(closure)`` in other optimizers.

    Args:
        factor: What λ is divided by after a long step, and multiplied by after a short one.
        tries: The most lengths to try.
        smallest: The smallest λ.

    Method:
        δ(η) = η·w + ½η²·a with w = −lr·v and a = −Γ(w, w), the geodesic acceleration (Transtrum and Sethna 2012): of
        least squares −(JᵀJ + λ)⁻¹Jᵀr″, with the second derivative r″ of the residuals along w.

        η = 1, ½, ¼, … as in ``GridSearch``. The η that is found says how far the model holds, and sets λ for the next
        step: from ½ on λ is divided by ``factor``, below ⅛ it is multiplied by it. Where the parabola does not descend,
        the straight line is searched.

    Example:
        >>> GeodesicSearch()
        GeodesicSearch(factor=10.0, tries=30, smallest=1e-14)
    """

    adapts_damping: ClassVar[bool] = True
    needs_closure: ClassVar[bool] = True

    factor: float = 10.0
    tries: int = 30
    smallest: float = 1e-14

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not self.factor > 1 or self.tries < 1 or not self.smallest > 0:
            raise ValueError(f"GeodesicSearch needs factor > 1, tries ≥ 1 and smallest > 0, got {self}")

    def take(self, context: StepContext) -> Step:
        λ, start = max(context.damping, self.smallest), context.loss(None)
        w = context.natural(λ)
        bend = context.acceleration(w) * 0.5
        more = min(λ * self.factor, 1 / self.smallest)  # never infinite
        if bool(bend.flatten().isfinite().all()):
            η, there, δ = _searched(context, lambda η: w * η + bend * η**2, start, self.tries)
            if there < start:
                less = max(λ / self.factor, self.smallest)
                return Step(δ, less if η >= 0.5 else more if η < 0.125 else λ)
        step = GridSearch(self.tries).along(context, w)
        return replace(step, damping=more)


def _searched(
    context: StepContext, path: Callable[[float], Vector], start: float, tries: int
) -> tuple[float, float, Vector]:
    """The length η = 1, ½, ¼, … at which the loss on a path is least, the loss there, and the step."""
    best = (1.0, math.inf, path(1.0))
    for k in range(tries):
        η = 0.5**k
        δ = path(η)
        there = context.loss(δ)
        if there < best[1]:
            best = (η, there, δ)
        elif best[1] < start:
            break
    return best
