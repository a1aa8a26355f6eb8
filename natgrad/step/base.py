"""Step rules: from the natural gradient to the move of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.fused import scale_, scaled
from natgrad.errors import NatgradError
from natgrad.geometry import Covector, Vector
from natgrad.structures.base import Operator

Rates: TypeAlias = Sequence[tuple[Sequence[str], float | Tensor]]  # names of parameters, and their learning rate
Trial: TypeAlias = Callable[[Mapping[str, Tensor] | None], float]


@final
@dataclass(frozen=True)
class Proposal:
    """All that a step rule may look at. Nothing in it changes the model.

    ``sharp(ω, λ)`` is (G + λ)⁻¹ω; ``move(v)`` the step −lr·(μm + v) that the optimizer would make of it by itself, and
    ``direction(ω, λ)`` both; ``plain(v)`` is that step where nobody has to look at it. v is used up. ``loss(δ)``
    evaluates the closure where the step δ lands, at ``decayed`` + δ. What a rule does not ask for is not computed.
    """

    params: Mapping[str, Tensor]
    decay: Callable[[], Mapping[str, Tensor]]  # the parameters after weight decay
    differential: Covector
    operator: Operator
    damping: float
    solve: Solve
    model: Look

    @cached_property
    def decayed(self) -> Mapping[str, Tensor]:
        """(1 − lr·wd)θ: what the step is added to."""
        return self.decay()

    @property
    def rates(self) -> Rates:
        """Names of parameters, and their learning rate."""
        return self.solve.rates()

    def sharp(self, ω: Covector, damping: float) -> Vector:
        """(G + λ)⁻¹ω."""
        return self.solve.sharp(ω, damping)

    def move(self, v: Vector) -> Vector:
        """−lr·(μm + v)."""
        return self.solve.move(v)

    def plain(self, v: Vector) -> Step:
        """The step −lr·(μm + v), without memory for it beside v."""
        return Step(self.solve.along(v), self.damping)

    def shrunk(self, v: Vector, shrink: Tensor, sign: Tensor) -> Step:
        """The step −lr·(μm + shrink·v), in as few passes as can be; the number ``sign`` is finite only if v is."""
        ahead = self.solve.ahead(v, shrink, sign)
        if ahead is not None:
            return Step(ahead, self.damping)
        scale_(list(v.values()), shrink)  # v is ours: memory for one more is not taken
        return self.plain(v)

    def direction(self, ω: Covector, damping: float) -> Vector:
        """−lr·(μm + (G + λ)⁻¹ω)."""
        return self.move(self.sharp(ω, damping))

    def loss(self, δ: Vector | None) -> float:
        """Of the closure, where the step δ lands (None: here)."""
        assert self.model.trial is not None
        # Landing first: without decay, ``decayed`` are the parameters themselves.
        return self.model.trial(None if δ is None else dict(self.decayed) + δ)

    def natural(self) -> Vector:
        """The move at the current differential and damping."""
        return self.direction(self.differential, self.damping)

    def whole(self, δ: Vector) -> Vector:
        """From θ to where the step δ lands: the weight decay moves the parameters too."""
        return Vector({name: (self.decayed[name] - self.params[name]) + t for name, t in δ.items()})

    def with_differential(self, ω: Covector) -> Proposal:
        return replace(self, differential=ω)

    def with_trial(self, trial: Trial) -> Proposal:
        """Another loss."""
        return replace(self, model=replace(self.model, trial=trial))


class Solve(Protocol):
    """The solves of a step."""

    def rates(self) -> Rates: ...

    def sharp(self, ω: Covector, damping: float) -> Vector: ...

    def move(self, v: Vector) -> Vector: ...

    def along(self, v: Vector) -> Along: ...

    def ahead(self, v: Vector, shrink: Tensor, sign: Tensor) -> Ahead | None: ...


@final
@dataclass(frozen=True)
class Look:
    """What a rule may ask the model, on the current batch.

    ``divergence(δ)`` of the outputs where the step δ lands from those here; ``acceleration(δ)`` = −Γ(δ, δ), the second
    derivative of the geodesic with velocity δ; ``curvature(vs)`` = ⟨v, G w⟩ [v w] with the exact metric of the batch,
    by products with the Jacobian; ``velocity()``, the momentum that the last step left; ``trial(θ)``, the loss of the
    closure at θ (None: here), where there is a closure.
    """

    step: int  # since the first
    divergence: Callable[[Vector], float]
    acceleration: Callable[[Vector], Vector]
    curvature: Callable[[Sequence[Vector], float], Tensor]
    velocity: Callable[[], Vector | None]
    trial: Trial | None


@final
@dataclass(frozen=True)
class Along:
    """δ = −lr·m, with the lr of every group of parameters, for a velocity m; what is in no group stays.

    Where m is the momentum itself, δ is that of the last step only: the ``versions`` of the tensors tell.

    >>> Along(Vector({"a": torch.ones(1), "b": torch.ones(1)}), [(["a"], 0.5)]).displacement()
    Vector(a: (1,), b: (1,))
    """

    velocity: Vector
    rates: Rates
    versions: tuple[int, ...] = ()

    def displacement(self) -> Vector:
        """δ, in memory of its own."""
        if self.versions and self.versions != self._seen:
            raise NatgradError(
                "the momentum has changed since this step: read opt.last.displacement before the next step"
            )
        moved: dict[str, Tensor] = {}
        for names, rate in self.rates:
            moved.update(zip(names, scaled([self.velocity[name] for name in names], -rate), strict=True))
        return Vector(
            {name: moved[name] if name in moved else torch.zeros_like(t) for name, t in self.velocity.items()}
        )

    def stamped(self) -> Along:
        """The same, for as long as the velocity is what it is now; a schedule may change a rate that is a tensor."""
        rates = [(names, rate.clone() if isinstance(rate, Tensor) else rate) for names, rate in self.rates]
        return replace(self, rates=rates, versions=self._seen)

    @property
    def numbers(self) -> Vector:
        """What is finite where δ is, and only there: m, unless lr·m may be beyond the range of its precision."""
        longer = [rate for _, rate in self.rates if not isinstance(rate, Tensor) and abs(rate) > 1]
        half = [t for t in self.velocity.values() if t.dtype is torch.float16]
        return self.displacement() if longer or half else self.velocity

    @property
    def _seen(self) -> tuple[int, ...]:
        return tuple(t._version for t in self.velocity.values())


@final
@dataclass(frozen=True)
class Ahead:
    """δ = −lr·(μm + shrink·v) that is not formed: it is added, and the momentum m made, in one pass over them.

    ``shrink`` and ``sign``, a number that is finite only if v is, are on the device.
    """

    v: Vector
    shrink: Tensor
    sign: Tensor
    momentum: Vector
    rates: Rates
    persistence: Mapping[str, float]  # μ, by the name of the parameter

    @property
    def velocity(self) -> Vector:
        """μm + shrink·v, in memory of its own; before the pass."""
        made = {name: t * self.persistence[name] + self.v[name] * self.shrink for name, t in self.momentum.items()}
        return Vector(made)

    def displacement(self) -> Vector:
        """δ, in memory of its own."""
        return Along(self.velocity, self.rates).displacement()

    def made(self) -> Along:
        """After the pass: the move along the momentum, as it is then."""
        return Along(self.momentum, self.rates)

    @property
    def numbers(self) -> Vector:
        """What is finite where δ is."""
        return Vector({"⟨ω, v⟩": self.sign})


@final
@dataclass(frozen=True)
class Step:
    """What a rule decided: the move δ (to be added), the damping from now on, and, in words, what happened.

    The move is a vector, or ``Along`` a velocity (``proposal.plain``), which takes no memory for the move itself, or
    ``Ahead``. A step that is not ``accepted`` changes no parameter. ``landing`` are the exact values of parameters that
    a constraint has put somewhere: θ + (bound − θ) would round to either side of the bound.
    """

    way: Vector | Along | Ahead
    damping: float
    accepted: bool = True
    reason: str = ""
    ratio: float | None = None  # actual over predicted decrease, where a rule measured it
    landing: Mapping[str, Tensor] = field(default_factory=dict)
    velocity: Vector | None = None  # what the momentum is from now on, where the rule decides

    @property
    def displacement(self) -> Vector:
        """δ."""
        return self.way if isinstance(self.way, Vector) else self.way.displacement()

    @property
    def numbers(self) -> Vector:
        """What is finite where δ is, and only there."""
        return self.way if isinstance(self.way, Vector) else self.way.numbers

    def stamped(self) -> Step:
        """The same, and its displacement can be read until its velocity changes."""
        return replace(self, way=self.way.stamped()) if isinstance(self.way, Along) else self


class StepRule(ABC):
    """Turns a proposal into a step. Rules hold no state: what adapts (the damping) lives with the optimizer."""

    @property
    def needs_closure(self) -> bool:
        """Whether the rule evaluates the loss again, so that ``opt.step(closure)`` must be given one."""
        return False

    @property
    def capturable(self) -> bool:
        """Whether the rule looks at no number, so that its kernels can be recorded and replayed."""
        return False

    @abstractmethod
    def take(self, proposal: Proposal) -> Step:
        """The step from here."""
