"""Parameters that must stay in a domain: back-projection, clipping and penalty, around any step rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.geometry import Vector, differential
from natgrad.linalg import check_number_fields
from natgrad.step.base import Step, StepContext, StepRule


class Constraint:
    """How a step is kept in the domain of the parameters (van Oostrum, Müller and Ay 2023)."""

    def before(self, context: StepContext) -> StepContext:
        """Change what the rule sees."""
        return context

    def after(self, context: StepContext, step: Step) -> Step:
        """Change what the rule decided."""
        return step


@final
@dataclass(frozen=True)
class Constrained(StepRule):
    """Any step rule with a constraint on the parameters around it.

    Args:
        rule: The step rule.
        constraint: ``BackProjection``, ``Clipping`` or ``Penalty``. The first two move what the rule decided: its
            divergence, loss and ratio are those of the step before it was projected or clipped. ``Penalty`` is part of
            what the rule judges.

    Example:
        >>> from natgrad.step.base import Fixed
        >>> Constrained(Fixed(), Clipping({"w": (0.0, 1.0)})).needs_closure
        False
    """

    rule: StepRule
    constraint: Constraint

    @property
    def adapts_damping(self) -> bool:  # type: ignore[override]
        return self.rule.adapts_damping

    @property
    def needs_closure(self) -> bool:  # type: ignore[override]
        return self.rule.needs_closure

    @property
    def has_momentum(self) -> bool:  # type: ignore[override]
        return self.rule.has_momentum

    @property
    def schedule(self) -> tuple[int, int]:  # type: ignore[override]
        return self.rule.schedule

    @property
    def power_share(self) -> float:  # type: ignore[override]
        return self.rule.power_share

    def admit(self, params: Mapping[str, Tensor]) -> None:
        self.rule.admit(params)

    def take(self, context: StepContext) -> Step:
        step = self.rule.take(self.constraint.before(context))
        return self.constraint.after(context, step) if step.accepted else step


@final
@dataclass(frozen=True)
class BackProjection(Constraint):
    """Keep parameters in a set by projecting them back after every step.

    Args:
        project: Π, a function from a dict of all parameters by name to those that it changes.

    Method:
        θ ← Π(θ + δ).

    Example:
        >>> from natgrad.step.base import Fixed
        >>> unit = BackProjection(lambda p: {"w": p["w"] / p["w"].norm()})
        >>> Constrained(Fixed(), unit).needs_closure
        False
    """

    project: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

    def after(self, context: StepContext, step: Step) -> Step:
        moved = _arrival(context, step)
        with torch.no_grad():
            inside = self.project({name: t.clone() for name, t in moved.items()})  # it may work in place
        if set(inside) != set(moved):
            raise ValueError(f"BackProjection must return all parameters, {sorted(moved)}, got {sorted(inside)}")
        return _moved(context, step, inside, moved, "projected back")


@final
@dataclass(frozen=True)
class Clipping(Constraint):
    """Every entry of the named parameters kept in [low, high] (weight clipping)."""

    bounds: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        for name, (low, high) in self.bounds.items():
            if not low < high:
                raise ValueError(f"Clipping: the bounds of {name} must satisfy low < high, got ({low}, {high})")

    def before(self, context: StepContext) -> StepContext:
        unknown = sorted(set(self.bounds) - set(context.params))
        if unknown:
            raise ValueError(f"Clipping names {', '.join(unknown)}, and the parameters are {list(context.params)}")
        return context

    def after(self, context: StepContext, step: Step) -> Step:
        moved = _arrival(context, step)
        inside = {n: t.clamp(*self.bounds[n]) if n in self.bounds else t for n, t in moved.items()}
        return _moved(context, step, inside, moved, "clipped")


@final
@dataclass(frozen=True)
class Penalty(Constraint):
    """Keep parameters near a set by adding a smooth penalty to the loss.

    Not for ``LeastSquares``, whose steps are made of residuals: there a penalty is a class of residuals.

    Args:
        penalty: q(θ), a function of a dict of all parameters by name that returns one number.
        weight: What q is multiplied by.

    Method:
        L + weight·q(θ): the differential of the penalty is added before the metric turns it into a step.

    Example:
        >>> Penalty(lambda p: p["w"].square().sum(), weight=0.1).weight
        0.1
    """

    penalty: Callable[[Mapping[str, Tensor]], Tensor]
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_number_fields(self)

    def before(self, context: StepContext) -> StepContext:
        if context.residuals is not None:  # rules take their step from these, and would leave the penalty out
            raise IncompatibleError(
                "Penalty does not work with LeastSquares: its steps are made of residuals, and a penalty has none. "
                "Add a class of residuals with ½‖r‖² = weight·q(θ), or use NaturalGradient"
            )
        leaves = {name: p.detach().clone().requires_grad_() for name, p in context.params.items()}
        with torch.enable_grad():
            # Adding 0·θ gives every parameter a derivative, also those the penalty does not look at.
            value = self.penalty(leaves) + sum((0 * p).sum() for p in leaves.values())
            ω = differential(leaves, value) * self.weight
        inner = context.loss_at

        def penalised(landing: Mapping[str, Tensor] | None) -> float:
            assert inner is not None
            return inner(landing) + self.weight * float(self.penalty(landing or dict(context.params)))

        loss_at = None if inner is None else penalised
        return replace(context, differential=context.differential + ω, loss_at=loss_at)


def _arrival(context: StepContext, step: Step) -> dict[str, Tensor]:
    return {**context.landing(step.displacement), **step.landing}


def _moved(
    context: StepContext, step: Step, inside: Mapping[str, Tensor], moved: Mapping[str, Tensor], what: str
) -> Step:
    changed = [name for name, t in moved.items() if not torch.equal(inside[name], t)]
    if not changed:
        return step
    δ = Vector({name: inside[name] - p for name, p in context.decayed.items()})
    landing = {**step.landing, **{name: inside[name] for name in changed}}
    reason = "; ".join(filter(None, [step.reason, f"{what}: {', '.join(changed)}"]))
    return replace(step, displacement=δ, reason=reason, landing=landing)
