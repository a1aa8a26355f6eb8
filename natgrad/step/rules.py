"""Trust regions, Levenberg–Marquardt, and the geodesic correction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch

from natgrad.errors import SingularMetricError
from natgrad.geometry import Vector
from natgrad.linalg import check_number_fields
from natgrad.step.base import Step, StepContext, StepRule
from natgrad.structures.dense import inverse_in_units

_AIM = 0.9  # the share of the radius that a shortened step aims at


@final
@dataclass(frozen=True)
class Backtracking:
    """Shorten a trust-region step until the outputs really change as little as asked.

    Args:
        shrink: The least factor by which a step is shortened at once.
        tries: The most times that it is shortened. ``opt.last.reason`` tells how short the step became.
        reverse: Measure KL(new‖old) (Grosse 2021, (9)) instead of KL(old‖new) (Schulman et al. 2015).
        improve: The loss itself must not rise either; ``opt.step`` then needs a closure.

    Method:
        Each time the step is multiplied by √(0.9 radius/D) for the true divergence D, after which a divergence that
        grows like the square of the step would be nine tenths of the radius, or by ``shrink``, whichever is larger.

        Both divergences have the metric as their Hessian, and differ in steps of finite length: on classes KL(new‖old)
        is at most −log of the least old probability, so that a large radius limits nothing.
    """

    shrink: float = 0.5
    tries: int = 20
    reverse: bool = field(default=False, kw_only=True)
    improve: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not 0 < self.shrink < 1 or self.tries < 1:
            raise ValueError(f"Backtracking needs 0 < shrink < 1 and tries ≥ 1, got {self}")

    def factor(self, divergence: float, radius: float) -> float:
        """What a step with this divergence is multiplied by; one within the radius is refused as the loss rises."""
        aim = math.sqrt(_AIM * radius / divergence) if divergence > radius else 0.0  # 0 also where it is NaN
        return max(self.shrink, aim)


@final
@dataclass(frozen=True)
class TrustRegion(StepRule):
    """Make every step as long as a bound on the change of the outputs allows.

    The step is along the natural gradient; ``natgrad.proximal.trust_region`` minimises the loss itself in the region.

    Args:
        radius: The largest ½ δᵀGδ, for Fisher the KL divergence to second order.
        backtracking: ``Backtracking()`` shortens the step until the *true* divergence is within the radius too.
        longest: The longest step, as a multiple of lr·v. With 1 the rule only clips; by default the learning rate does
            not matter.

    Method:
        Steepest descent in the ball ½ δᵀGδ ≤ radius: δ = −v·√(2 radius/vᵀGv). The true divergence is that between the
        current point and where the step lands, weight decay included. If it is never within the radius (the decay alone
        may be too much), the parameters stay.

    Example:
        >>> TrustRegion(radius=0.01, longest=1.0)
        TrustRegion(radius=0.01, backtracking=None, longest=1.0)
    """

    radius: float
    backtracking: Backtracking | None = None
    longest: float = math.inf

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not self.radius > 0 or not self.longest > 0:
            raise ValueError(f"TrustRegion needs a positive radius and longest, got {self.radius} and {self.longest}")

    @property
    def needs_closure(self) -> bool:  # type: ignore[override]
        return self.backtracking is not None and self.backtracking.improve

    def take(self, context: StepContext) -> Step:
        δ = context.natural()
        half = 0.5 * float(context.operator.flat(δ) @ δ)
        # A null direction, or a zero gradient: the ball does not limit it.
        reason = "no length in the metric" if half <= 0 else ""
        scale = min(1.0 if half <= 0 else math.sqrt(self.radius / half), self.longest)
        if self.backtracking is None:
            return Step(δ * scale, context.damping, reason=reason, numbers=_length(scale, half))
        look, start = self.backtracking, context.loss(None) if self.backtracking.improve else math.inf

        def tried(scale: float) -> tuple[float, str]:
            """The divergence at a scale, and what forbids it."""
            moved = context.divergence(δ * scale, reverse=look.reverse)
            if not moved <= self.radius:
                return moved, f"divergence {moved:.3g} over radius {self.radius:g}"
            return moved, "the loss rises" if look.improve and not context.loss(δ * scale) <= start else ""

        whole, (moved, wrong), tries = scale, tried(scale), 1
        while wrong and tries < look.tries:
            scale *= look.factor(moved, self.radius)
            (moved, wrong), tries = tried(scale), tries + 1
        if wrong:
            return Step(δ * 0.0, context.damping, accepted=False, reason=f"{wrong} after {tries} tries")
        numbers = _length(scale, half)
        if tries == 1:
            return Step(δ * scale, context.damping, reason=reason, numbers=numbers)
        reason = f"shortened to {scale / whole:.3g} in {tries} tries: divergence {moved:.3g} of radius {self.radius:g}"
        return Step(δ * scale, context.damping, reason=reason, numbers=numbers)


def _length(scale: float, half: float) -> dict[str, float]:
    """√(δᵀGδ) of a step with half that square, times its scale."""
    return {"clip_scale": scale, "step_length": scale * math.sqrt(max(2 * half, 0.0))}


@final
@dataclass(frozen=True)
class LevenbergMarquardt(StepRule):
    """Adapt the damping to how well the quadratic model predicts the loss.

    Needs ``opt.step(closure)``. A step that does not lower the loss is tried again with more damping.

    Args:
        poor: Below this ratio of actual to predicted decrease the damping is multiplied by ``factor``.
        good: Above this ratio it is divided by ``factor``.
        factor: How much the damping changes at once.
        tries: The most times that a step is tried again.
        smallest: The smallest damping.
        scaled: Damp by λ·diag G (Marquardt 1963) where G is a matrix (``Dense``, ``BlockDense``), which does not change
            with the units of the parameters: for models with a few parameters of different units. In a network,
            parameters with little curvature, such as the keys of an attention, would run away.
        ftol: Converged if a step was taken, and the decrease and its prediction are at most this times the loss.
        xtol: Converged if a step was taken, at most this times as long as the parameters.
        gtol: Converged if no step was taken, because even without damping the predicted decrease is below the rounding
            of the loss, or ``gtol``² times the loss ("stationary").

    Method:
        With the model m(u) = ⟨ω, u⟩ + ½ uᵀGu, ratio = (L(θ + u) − L(θ))/m(u), where u leads from θ to where the step
        lands, weight decay included (Moré 1978; Martens and Grosse 2015, section 6.5). A step for which G + damping is
        singular is tried again, too.

        Where the residuals are known (``ng.LeastSquares``), the step is that of a QR of their Jacobian, with λ·1.
        ``opt.last.converged`` says that a rule of convergence is met, and ``reason`` which. A step that is refused for
        another reason has not converged.

    Example:
        >>> LevenbergMarquardt(factor=3.0).needs_closure
        True
    """

    adapts_damping: ClassVar[bool] = True
    needs_closure: ClassVar[bool] = True

    poor: float = 0.25
    good: float = 0.75
    factor: float = 2.0
    tries: int = 8
    smallest: float = 1e-12
    scaled: bool = field(default=False, kw_only=True)
    ftol: float = field(default=1e-8, kw_only=True)
    xtol: float = field(default=1e-8, kw_only=True)
    gtol: float = field(default=1e-8, kw_only=True)

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not 0 < self.poor < self.good < 1 or not self.factor > 1 or self.tries < 1:
            raise ValueError(f"LevenbergMarquardt needs 0 < poor < good < 1, factor > 1 and tries ≥ 1, got {self}")
        if not all(0 <= tol < 1 for tol in (self.ftol, self.xtol, self.gtol)):
            raise ValueError(f"LevenbergMarquardt needs ftol, xtol and gtol in [0, 1), got {self}")

    def take(self, context: StepContext) -> Step:
        if context.operator.power != 1:
            context.operator.refuse(
                f"LevenbergMarquardt at the power {context.operator.power:g}",
                "it compares the loss with ½uᵀGu, and G^p does not predict it. Use power=1, or another step rule",
            )
        λ, start, ratio = max(context.damping, self.smallest), context.loss(None), 0.0
        flat = max(8 * torch.finfo(next(iter(context.params.values())).dtype).eps, self.gtol**2) * abs(start)
        δ, singular = None, None
        for _ in range(self.tries):
            try:
                δ = self._direction(context, λ)
            except SingularMetricError as error:
                singular = error
                λ = min(max(λ * self.factor**2, self._regular(context)), 1 / self.smallest)
                continue
            u, predicted = self._predicted(context, δ)
            actual = context.loss(δ) - start
            lower = actual < 0 and math.isfinite(actual)
            if abs(predicted) <= flat:
                if not self._stationary(context, flat):  # λ is too large to tell: the next step tries a longer one
                    λ = max(context.damping / self.factor**2, self.smallest)
                    reason = "no decrease in steps that are longer than rounding"
                    return Step(δ * 0.0, λ, accepted=False, reason=reason)
                if not lower:
                    return Step(δ * 0.0, λ, accepted=False, reason="stationary", converged=True)
                δ = self._direction(context, λ)  # again: momentum remembers the last one
            ratio = actual / predicted if predicted < 0 else 0.0
            if lower:
                reason = self._met(context, u, start, actual, predicted)
                numbers, λ = {"predicted_decrease": -predicted}, self._adapted(λ, ratio)
                return Step(δ, λ, ratio=ratio, reason=reason, converged=bool(reason), numbers=numbers)
            λ = min(λ * self.factor**2, 1 / self.smallest)  # never infinite, however often no step is found
        if δ is None:
            assert singular is not None
            raise singular
        reason = f"no decrease in {self.tries} tries"
        return Step(δ * 0.0, λ, accepted=False, reason=reason, ratio=ratio)

    def _direction(self, context: StepContext, λ: float) -> Vector:
        """The displacement with the damping λ."""
        if context.residuals is not None:
            return context.move(context.residuals.solve(context.residuals.value, λ))
        inverse = inverse_in_units(context.operator, λ) if self.scaled else None
        if inverse is None:
            return context.natural(λ)
        return context.move(context.zero_idle(inverse.sharp(context.smooth(context.differential))))

    def _regular(self, context: StepContext) -> float:
        """The least damping that rounding leaves something of."""
        diagonal = context.operator.diagonal()
        rounding = 64 * diagonal.numel() * torch.finfo(diagonal.dtype).eps
        return rounding if self.scaled else rounding * float(diagonal.amax())

    def _predicted(self, context: StepContext, δ: Vector) -> tuple[Vector, float]:
        u = context.whole(δ)
        return u, float(context.differential @ u + 0.5 * (context.operator.flat(u) @ u))

    def _stationary(self, context: StepContext, flat: float) -> bool:
        """Whether the predicted decrease is below rounding with the least damping too, under which it is largest."""
        try:
            return abs(self._predicted(context, self._direction(context, self.smallest))[1]) <= flat
        except SingularMetricError:
            return True  # what no damping can be left out of is as undamped as it can be

    def _met(self, context: StepContext, u: Vector, start: float, actual: float, predicted: float) -> str:
        """The rule that a step u, which is taken, meets."""
        if max(abs(actual), abs(predicted)) <= self.ftol * abs(start):
            return "ftol"
        size = math.sqrt(sum(float(p.square().sum()) for p in context.params.values()))
        length = math.sqrt(sum(float(t.square().sum()) for t in u.values()))
        return "xtol" if length <= self.xtol * (size + self.xtol) else ""

    def _adapted(self, λ: float, ratio: float) -> float:
        if ratio > self.good:
            return max(λ / self.factor, self.smallest)
        return λ * self.factor if ratio < self.poor else λ


@final
@dataclass(frozen=True)
class GeodesicCorrected(StepRule):
    """Follow the geodesic to second order instead of a straight line.

    Args:
        limit: The longest correction, as a multiple of the step in the metric. Where it is longer the step is taken
            uncorrected, and ``reason`` says so (Transtrum and Sethna 2012).

    Method:
        δ = w − ½ Γ(w, w), w = −lr·v: the exponential map to second order (Luk and Grosse 2018). The correction is the
        acceleration of the geodesic with velocity w.
    """

    limit: float = 0.75

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not self.limit > 0:
            raise ValueError(f"GeodesicCorrected(limit=…) must be positive, got {self.limit}")

    def take(self, context: StepContext) -> Step:
        w = context.natural()
        correction = context.acceleration(w) * 0.5
        long, short = (float(context.operator.flat(u) @ u) for u in (correction, w))
        if not long <= self.limit**2 * short:
            return Step(w, context.damping, reason=f"correction over {self.limit:g} of the step: not applied")
        return Step(w + correction, context.damping)
