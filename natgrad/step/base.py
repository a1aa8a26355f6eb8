"""Step rules: from the natural gradient to the move of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from torch import Tensor

from natgrad.geometry import Covector, Vector
from natgrad.operators.base import Operator


@final
@dataclass(frozen=True)
class Proposal:
    """All that a step rule may look at. Nothing in it changes the model.

    ``direction(ω, λ)`` is the move −lr·(G + λ)⁻¹ω, with momentum, that the optimizer would make by itself;
    ``loss(δ)`` and ``divergence(δ)`` evaluate the model where the step δ lands, at ``decayed`` + δ, on the current
    batch; ``acceleration(δ)`` is −Γ(δ, δ), the second derivative of the geodesic that starts with velocity δ.
    """

    params: Mapping[str, Tensor]
    decayed: Mapping[str, Tensor]  # the parameters after weight decay: what the step is added to
    differential: Covector
    operator: Operator
    damping: float
    direction: Callable[[Covector, float], Vector]
    loss: Callable[[Vector | None], float] | None
    divergence: Callable[[Vector], float]
    acceleration: Callable[[Vector], Vector]

    def natural(self) -> Vector:
        """The move at the current differential and damping."""
        return self.direction(self.differential, self.damping)

    def whole(self, δ: Vector) -> Vector:
        """From θ to where the step δ lands: the weight decay moves the parameters too."""
        return Vector({name: (self.decayed[name] - self.params[name]) + t for name, t in δ.items()})

    def with_differential(self, ω: Covector) -> Proposal:
        return replace(self, differential=ω)


@final
@dataclass(frozen=True)
class Step:
    """What a rule decided: the move δ (to be added), the damping from now on, and, in words, what happened.

    A step that is not ``accepted`` changes no parameter. ``landing`` are the exact values of parameters that a
    constraint has put somewhere: θ + (bound − θ) would round to either side of the bound.
    """

    displacement: Vector
    damping: float
    accepted: bool = True
    reason: str = ""
    ratio: float | None = None  # actual over predicted decrease, where a rule measured it
    landing: Mapping[str, Tensor] = field(default_factory=dict)


class StepRule(ABC):
    """Turns a proposal into a step. Rules hold no state: what adapts (the damping) lives with the optimizer."""

    @property
    @abstractmethod
    def needs_closure(self) -> bool:
        """Whether the rule evaluates the loss again, so that ``opt.step(closure)`` must be given one."""

    @abstractmethod
    def take(self, proposal: Proposal) -> Step:
        """The step from here."""
