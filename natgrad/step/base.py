"""Step rules: from the natural gradient to the displacement of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.fused import pairing, scale_, scale_each_
from natgrad.geometry import Covector, Vector
from natgrad.linalg import check_number_fields
from natgrad.show import brief
from natgrad.step.queries import BatchQueries
from natgrad.structures.base import Operator

Rates: TypeAlias = Sequence[tuple[Sequence[str], float | Tensor]]  # names of parameters, and their learning rate
Scale: TypeAlias = Tensor | Mapping[str, Tensor] | None  # a number [], one for each parameter by name, or None for 1
Loss: TypeAlias = Callable[[Mapping[str, Tensor] | None], float]


@final
@dataclass(frozen=True)
class Step:
    """What a step rule decided: where to go, and why.

    Attributes:
        displacement: δ, to be added to the parameters.
        damping: The damping from now on.
        accepted: Whether the step is taken; if not, no parameter changes.
        reason: What happened, in words.
        ratio: Actual over predicted decrease, where a rule measured it.
        landing: The exact values of parameters that a constraint has put somewhere: θ + (bound − θ) would round to
            either side of the bound.
        velocity: The momentum from now on, where the rule decides it.
        converged: Whether a rule of convergence is met, which ``reason`` names, by this step or, if it is not accepted,
            at this point.
        numbers: What else the rule has computed, by the names that ``opt.metrics()`` gives them, such as
            "predicted_decrease".
    """

    displacement: Vector
    damping: float
    accepted: bool = True
    reason: str = ""
    ratio: float | None = None  # actual over predicted decrease, where a rule measured it
    landing: Mapping[str, Tensor] = field(default_factory=dict)
    velocity: Vector | None = None
    converged: bool = False
    numbers: Mapping[str, float | Tensor] = field(default_factory=dict)

    __repr__ = brief

    def __post_init__(self) -> None:
        """A covector is no displacement: a metric has to turn it into a vector."""
        for name, value in (("displacement", self.displacement), ("velocity", self.velocity)):
            if not isinstance(value, Vector) and not (name == "velocity" and value is None):
                raise TypeError(
                    f"the {name} of a step must be a Vector, got {type(value).__name__}: context.sharp(ω, damping) "
                    "turns a Covector into a Vector, and context.move makes a displacement of it"
                )


@final
@dataclass(frozen=True)
class ResidualSpace:
    """The residuals of a least-squares loss and their Jacobian, for step rules.

    Attributes:
        value: The residuals r [m] of the loss ½‖r(θ)‖².
        solve: ``solve(t, λ)`` is (JᵀJ + λ)⁻¹Jᵀt, the damped least-squares solution of J v = t; t need not be formed
            from a covector, which would square the condition number.
        push: ``push(v)`` is J v [m].
        second: ``second(v)`` is the second derivative of r along v [m].
    """

    value: Tensor
    solve: Callable[[Tensor, float], Vector]
    push: Callable[[Vector], Tensor]
    second: Callable[[Vector], Tensor]

    __repr__ = brief


@final
@dataclass(frozen=True)
class StepContext:
    """All that a step rule may look at.

    Nothing in it changes the model, and what is not asked for is not computed.

    Attributes:
        step: The number of steps before this one.
        params: The parameters by name.
        differential: ω, the differential of the loss.
        operator: G, the metric in its structure.
        damping: λ.
        rates: The learning rates.
        decay: A function that returns the parameters after weight decay, (1 − lr·wd)θ, by name.
        smooth: ``smooth(ω)`` is μm + (1 − μ)ω where momentum is on gradients; else ω.
        sharp: ``sharp(ω, λ)`` is (G + λ)⁻¹ω.
        move: ``move(v)`` is the displacement −lr·(μm + v) that the optimizer would make of v by itself; v is
            overwritten. With momentum on gradients it is −lr·v.
        velocity: A function that returns the momentum that the last step left, or None.
        acceleration: ``acceleration(δ)`` is −Γ(δ, δ), the second derivative of the geodesic with velocity δ.
        queries: A function that returns the ``BatchQueries`` of the batch, on all passes of the step together.
        loss_at: ``loss_at(θ)`` is the loss of the closure at θ (None: here), if there is a closure.
        residuals: Of a loss of least squares, where the residuals are known.
        zero_idle: ``zero_idle(v)`` is v with zeros for parameters that are not to move.
    """

    step: int  # the number of steps before this one
    params: Mapping[str, Tensor]
    differential: Covector
    operator: Operator
    damping: float
    rates: Rates
    decay: Callable[[], Mapping[str, Tensor]]
    smooth: Callable[[Covector], Covector]
    sharp: Callable[[Covector, float], Vector]
    move: Callable[[Vector], Vector]
    velocity: Callable[[], Vector | None]
    acceleration: Callable[[Vector], Vector]
    queries: Callable[[], BatchQueries]
    loss_at: Loss | None = None
    residuals: ResidualSpace | None = None
    zero_idle: Callable[[Vector], Vector] = lambda v: v  # v, with zeros for parameters that are not to move

    __repr__ = brief

    @cached_property
    def decayed(self) -> Mapping[str, Tensor]:
        """The parameters after weight decay, (1 − lr·wd)θ: what the displacement is added to."""
        return self.decay()

    def natural(self, damping: float | None = None) -> Vector:
        """The displacement of the natural gradient, with momentum; by default with the current damping."""
        λ = self.damping if damping is None else damping
        if self.residuals is not None:
            return self.move(self.residuals.solve(self.residuals.value, λ))
        return self.move(self.sharp(self.smooth(self.differential), λ))

    def loss(self, δ: Vector | None) -> float:
        """The loss of the closure where the step δ lands (None: here)."""
        if self.loss_at is None:
            raise TypeError(
                "the step rule asks for the loss, and opt.step() was called without a closure: call opt.step(closure), "
                "and let needs_closure of the rule be True"
            )
        return self.loss_at(None if δ is None else self.landing(δ))

    def divergence(self, δ: Vector, *, reverse: bool = False) -> float:
        """The mean divergence of the outputs where the step δ lands from the outputs here, or of these from those."""
        return self.queries().divergence(self.landing(δ), reverse=reverse)

    def curvature(self, vectors: Sequence[Vector], fraction: float) -> Tensor:
        """⟨v, G w⟩ [v w] with the exact metric, on a fraction of the batch, by products with the Jacobian."""
        return self.queries().curvature(vectors, fraction)

    def landing(self, δ: Vector) -> dict[str, Tensor]:
        """Where the step δ lands: (1 − lr·wd)θ + δ."""
        return dict(self.decayed) + δ

    def whole(self, δ: Vector) -> Vector:
        """From θ to where the step δ lands: the weight decay moves the parameters too."""
        return Vector({name: (self.decayed[name] - self.params[name]) + t for name, t in δ.items()})


@final
@dataclass(frozen=True)
class SharpMap:
    """ω ↦ ω♯ with the metric of a step. ``identity``: it is the identity, and changes no number."""

    solve: Callable[[Covector], Vector]
    identity: bool = False

    def __call__(self, ω: Covector) -> Vector:
        return self.solve(ω)


class StepRule(ABC):
    """Turns the natural gradient into a step: ``take`` is all that a rule must write.

    Rules hold no state, which no checkpoint would keep: the optimizer keeps ``damping`` and ``velocity`` of a ``Step``,
    and ``context.step`` counts. A rule that only scales a direction is a ``PlainRule``.
    """

    # Class variables, or properties of rules in which a field decides.
    adapts_damping: ClassVar[bool] = False  # changes λ, and computes with it as with a number that is added to G
    needs_closure: ClassVar[bool] = False  # evaluates the loss again: ``opt.step(closure)`` must be given one
    has_momentum: ClassVar[bool] = False  # has a momentum of its own, so that parameter groups must have none
    schedule: ClassVar[tuple[int, int]] = (10, 100)  # steps after which presets estimate the metric, and invert it
    power_share: ClassVar[float] = 1.0  # s: ``sharp`` is (G + λ)^-sp for a metric with the power p

    def admit(self, params: Mapping[str, Tensor]) -> None:  # noqa: B027 - most rules take all
        """Refuse, by name, parameters that the rule has no step for."""

    @abstractmethod
    def take(self, context: StepContext) -> Step:
        """The step from here."""


class PlainRule(StepRule):
    """The base class of step rules that only scale the natural gradient.

    Such a step is taken in place, without memory for δ, and on a GPU it is captured in a CUDA graph: ``scale`` and
    ``direction`` must not read values of tensors on the host.

    Method:
        δ = −lr·(μm + c·v).

        Two flags save work. ``bounded = True``: c·v is finite whenever v and c are, and is not checked again.
        ``measured = False``: ``scale`` does not read ``square``, which is then not computed on a GPU. The check for NaN
        then sees c only, if ``scale`` returns a dict: its numbers must be NaN where v is not finite.
    """

    bounded: ClassVar[bool] = False
    measured: ClassVar[bool] = True

    def direction(self, ω: Covector, sharp: SharpMap) -> Vector:
        """v, in memory of its own: by default the natural gradient."""
        return sharp(ω)

    @abstractmethod
    def scale(self, v: Vector, square: Tensor) -> Scale:
        """c from v and ``square`` = ⟨lr·ω, lr·v⟩ []: a tensor [], one for each parameter by name, or None for 1."""

    def take(self, context: StepContext) -> Step:
        ω = context.smooth(context.differential)
        v = self.direction(ω, SharpMap(lambda ω: context.sharp(ω, context.damping)))
        rescale_(v, self.scale(v, squared_length(pairings(ω, v, context.rates), context.rates)))
        return Step(context.move(v), context.damping)


@final
@dataclass(frozen=True)
class Fixed(PlainRule):
    """Step by the learning rate times the natural gradient, as torch's optimizers do.

    Method:
        δ = −lr·v (Amari 1998).
    """

    bounded: ClassVar[bool] = True

    def scale(self, v: Vector, square: Tensor) -> None:
        return None


@final
@dataclass(frozen=True)
class KLClip(PlainRule):
    """Shorten steps that would change the predictions too much.

    Args:
        radius: About twice the largest KL divergence of a step.

    Method:
        v ← v·min(1, √(radius/⟨lr·ω, lr·v⟩)), before it enters the momentum. ⟨ω, v⟩ = vᵀ(G + λ)v is, for Fisher and
        without damping, twice the KL divergence of a step v to second order; with damping it is more (Ba, Grosse and
        Martens 2017). It stays on the device: nothing waits for a GPU.

    Example:
        >>> KLClip()
        KLClip(radius=0.001)
    """

    bounded: ClassVar[bool] = True
    radius: float = 1e-3

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not self.radius > 0:
            raise ValueError(f"KLClip(radius=…) must be positive, got {self.radius}")

    def scale(self, v: Vector, square: Tensor) -> Tensor:
        # 1 where the square is at most the radius: also for a zero gradient, and for rounding below zero.
        # NaN where it has overflowed, which must not look like a step of zero.
        return (self.radius / square.clamp(min=self.radius)).sqrt() + (square - square)


def pairings(ω: Covector, v: Vector, rates: Rates) -> list[Tensor]:
    """⟨ω, v⟩ [] of every group."""
    return [pairing([(ω[name], v[name]) for name in names]) for names, _ in rates]


def squared_length(terms: Sequence[Tensor], rates: Rates) -> Tensor:
    """⟨lr·ω, lr·v⟩ [] from ⟨ω, v⟩ of every group, each with its learning rate."""
    return sum((term * lr**2 for term, (_, lr) in zip(terms, rates, strict=True)), start=torch.zeros(()))


def rescale_(v: Vector, scale: Scale) -> None:
    """v ← c·v, in place."""
    if scale is None:
        return
    if isinstance(scale, Tensor):
        scale_(list(v.values()), scale)
        return
    if not isinstance(scale, Mapping):
        raise TypeError(
            f"scale of a PlainRule returns a tensor [], a dict with one for each parameter, or None, got {scale!r}"
        )
    if scale.keys() != v.keys():
        odd = ", ".join(sorted(scale.keys() ^ v.keys()))
        raise ValueError(f"scale of a PlainRule returns a number for each parameter: it differs from these in {odd}")
    scale_each_([v[name] for name in scale], list(scale.values()))
