"""Riemannian primal descent and mirror descent, with the decrease that each step promises (Bai, Rosenberg, Xu 2022)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError, GuaranteeError
from natgrad.linalg import check_finite
from natgrad.mirror.geometry import Everywhere, Region, RiemannianMetric
from natgrad.mirror.potentials import Potential
from natgrad.model import check_slots

# Proximities V_x(y): the square of a Riemannian norm, or the divergence of a potential


@final
@dataclass(frozen=True)
class Proposal:
    """y = Grad(x) and the decrease of f that it promises, Prog(x) []."""

    point: Tensor
    progress: Tensor


class Proximity(ABC):
    """V_x(y) ≥ 0, zero at y = x. The step from x with the differential ω and the constant α is

        Grad(x) = argmin_y m(y),   Prog(x) = −min_y m(y),   m(y) = ⟨ω, y − x⟩ + α V_x(y).

    α multiplies V, so that the step is proportional to 1/α. Where f(y) ≤ f(x) + m(y) for all y (f is α-smooth relative
    to V), f falls by at least Prog, whatever V is.
    """

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Refuse a point where V_x does not exist."""

    @abstractmethod
    def divergence(self, y: Tensor, x: Tensor) -> Tensor:
        """V_x(y) []."""

    @abstractmethod
    def proposals(self, x: Tensor, ω: Tensor) -> Callable[[float], Proposal]:
        """The step from x as a function of α; work that does not depend on α is done once."""

    @abstractmethod
    def budget(self, points: Sequence[Tensor], minimiser: Tensor) -> Tensor:
        """B [] with f(x_T) − f(x*) ≤ B / Σ_k 1/α_k for every convex f, over the points x_0 … x_T of a descent."""

    @abstractmethod
    def strong_budget(self, gap: Tensor, α: Tensor, start: Tensor, minimiser: Tensor) -> Tensor:
        """B [] with f(x_T) − f(x*) ≤ B Π_k (1 − μ/α_k), for f that is μ-strongly convex relative to V.

        ``gap``: f(x_0) − f(x*). ``α``: the last of the constants.
        """

    def surrogate(self, y: Tensor, x: Tensor, ω: Tensor, α: float) -> Tensor:
        """m(y) [], the proximal form of the step."""
        return (ω * (y - x)).sum() + α * self.divergence(y, x)


@final
@dataclass(frozen=True)
class RiemannianProximity(Proximity):
    """V_x(y) = ½‖y − x‖²_{g(x)}, over a convex set Q: natural gradient descent, x − ∇^g f/α."""

    metric: RiemannianMetric
    region: Region = field(default_factory=Everywhere)

    def check(self, x: Tensor) -> None:
        self.region.check(x)
        self.metric.check(x)

    def divergence(self, y: Tensor, x: Tensor) -> Tensor:
        return 0.5 * self.metric.at(x).squared(y - x)

    def proposals(self, x: Tensor, ω: Tensor) -> Callable[[float], Proposal]:
        g = self.metric.at(x)
        return lambda α: Proposal(*self.region.step(g, x, ω, α))

    def budget(self, points: Sequence[Tensor], minimiser: Tensor) -> Tensor:
        """2R², R = max_k ‖x_k − x*‖ in the metric at x_k.

        D_k = f(x_k) − f(x*) ≤ R‖∇^g f‖ and D_k − D_{k+1} ≥ ‖∇^g f‖²/2α_k give 1/D_{k+1} − 1/D_k ≥ 1/(2α_k R²). The
        same follows over any convex Q, from y = x + t(x* − x) in the definition of Prog.
        """
        return 2 * torch.stack([2 * self.divergence(minimiser, x) for x in points[:-1]]).max()

    def strong_budget(self, gap: Tensor, α: Tensor, start: Tensor, minimiser: Tensor) -> Tensor:
        """f(x_0) − f(x*): strong convexity gives Prog(x_k) ≥ (μ/α_k)(f(x_k) − f(x*))."""
        return gap


@final
@dataclass(frozen=True)
class BregmanProximity(Proximity):
    """V_x(y) = ψ(y) − ψ(x) − ⟨∇ψ(x), y − x⟩: mirror descent, ∇ψ(y) = ∇ψ(x) − ω/α (Grosse 2021).

    Prog(x) = α V_y(x), with the arguments swapped, since V_x(y) + V_y(x) = ⟨∇ψ(x) − ∇ψ(y), x − y⟩ = ⟨ω, x − y⟩/α.
    """

    potential: Potential

    def check(self, x: Tensor) -> None:
        self.potential.domain.check(x, "x")

    def divergence(self, y: Tensor, x: Tensor) -> Tensor:
        return self.potential.bregman(y, x)

    def proposals(self, x: Tensor, ω: Tensor) -> Callable[[float], Proposal]:
        z = self.potential.gradient(x)

        def proposal(α: float) -> Proposal:
            y = self.potential.inverse_gradient(z - ω / α)
            return Proposal(y, α * self.potential.bregman(x, y))

        return proposal

    def budget(self, points: Sequence[Tensor], minimiser: Tensor) -> Tensor:
        """V_{x_0}(x*): f(x_{k+1}) − f(x*) ≤ α_k (V_{x_k}(x*) − V_{x_{k+1}}(x*)), summed over k with weights 1/α_k."""
        return self.divergence(minimiser, points[0])

    def strong_budget(self, gap: Tensor, α: Tensor, start: Tensor, minimiser: Tensor) -> Tensor:
        """α V_{x_0}(x*): V_{x_{k+1}}(x*) ≤ (1 − μ/α_k) V_{x_k}(x*), and the last step bounds f."""
        return α * self.divergence(minimiser, start)


# The record of a descent, the promise of every step, and policies for a broken one


@final
@dataclass(frozen=True)
class Attempt:
    """One step with its constant α: its end point, f before and after, and the promised decrease."""

    constant: float
    before: Tensor
    point: Tensor
    value: Tensor
    differential: Tensor
    progress: Tensor
    slack: Tensor  # by how much rounding may reduce the decrease

    @property
    def holds(self) -> Tensor:
        """Whether f(x) − f(y) ≥ Prog(x), up to rounding; False where either is NaN."""
        return self.before - self.value >= self.progress - self.slack

    def refusal(self, step: int) -> str:
        return Violation(step, float(self.before - self.value), float(self.progress), self.constant).message


@final
@dataclass(frozen=True)
class Violation:
    """A step whose decrease is below its Prog."""

    step: int
    decrease: float
    promised: float
    constant: float

    @property
    def message(self) -> str:
        return (
            f"step {self.step}: f fell by {self.decrease:.6g}, and Prog promised {self.promised:.6g}. The constant "
            f"α = {self.constant:g} is too small for this f and this metric, and the step 1/α too long: raise "
            "lipschitz or C (PrimalDescent) or smoothness (BregmanDescent), or let policy=Doubling() find it"
        )


class Policy(ABC):
    """What to do when a step breaks its promise f(x) − f(y) ≥ Prog(x)."""

    @abstractmethod
    def take(self, step: int, α: float, attempt: Callable[[float], Attempt]) -> Attempt:
        """The step to take; try α first."""


@final
@dataclass(frozen=True)
class Refuse(Policy):
    """Raise ``GuaranteeError`` with the step, the promise and the remedy."""

    def take(self, step: int, α: float, attempt: Callable[[float], Attempt]) -> Attempt:
        taken = attempt(α)
        if not bool(taken.holds):
            raise GuaranteeError(taken.refusal(step))
        return taken


@final
@dataclass(frozen=True)
class Report(Policy):
    """Take the step anyway; ``trace.violations`` names it."""

    def take(self, step: int, α: float, attempt: Callable[[float], Attempt]) -> Attempt:
        return attempt(α)


@final
@dataclass(frozen=True)
class Doubling(Policy):
    """Double α until the promise holds and the step stays in the domain; the next step starts from that α.

    α is then at most twice the smallest constant that works, so that the rates lose a factor of two at most.
    """

    most: int = 60

    def __post_init__(self) -> None:
        if not isinstance(self.most, int) or self.most < 1:
            raise ValueError(f"Doubling(most={self.most!r}) must be a positive integer")

    def take(self, step: int, α: float, attempt: Callable[[float], Attempt]) -> Attempt:
        failure = ""
        for k in range(self.most + 1):
            try:
                taken = attempt(α * 2.0**k)
            except DomainError as error:
                failure = str(error)
                continue
            if bool(taken.holds):
                return taken
            failure = taken.refusal(step)
        raise GuaranteeError(
            f"α was doubled {self.most} times and no step kept its promise: f is not smooth here, or its differential "
            f"is wrong. The last failure: {failure}"
        )


@final
@dataclass(frozen=True)
class Trace:
    """A descent x_0 … x_T: points, f(x_k) [T+1], and of every step Prog(x_k), its slack and its α_k [T]."""

    objective: Callable[[Tensor], Tensor]
    proximity: Proximity
    points: tuple[Tensor, ...]
    values: Tensor
    progress: Tensor
    slack: Tensor
    constants: Tensor

    @property
    def point(self) -> Tensor:
        """x_T."""
        return self.points[-1]

    @property
    def decrease(self) -> Tensor:
        """f(x_k) − f(x_{k+1}) [T], promised to be at least ``progress``."""
        return self.values[:-1] - self.values[1:]

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The steps that broke their promise, in order."""
        broken = ~(self.decrease >= self.progress - self.slack)
        return tuple(
            Violation(k, float(self.decrease[k]), float(self.progress[k]), float(self.constants[k]))
            for k in broken.nonzero().flatten().tolist()
        )

    def bound(self, minimiser: Tensor) -> Tensor:
        """An upper bound on f(x_T) − f(x*) [] for convex f: B / Σ_k 1/α_k.

        For the Riemannian descent B = 2R² with R in the metric at x_k, that is 2LCR²/T at a constant α = CL; for mirror
        descent B = V_{x_0}(x*), that is α V_{x_0}(x*)/T. It holds if no promise was broken.
        """
        return self.proximity.budget(self.points, minimiser) / self.constants.reciprocal().sum()

    def linear_bound(self, minimiser: Tensor, convexity: float) -> Tensor:
        """An upper bound on f(x_T) − f(x*) [] for strongly convex f: B Π_k (1 − μ/α_k).

        ``convexity`` μ: f(y) ≥ f(x) + df(y − x) + μV_x(y) for all x and y. B is f(x_0) − f(x*) for the Riemannian
        descent, αV_{x_0}(x*) for mirror descent.
        """
        if not 0 < convexity <= float(self.constants.min()):
            raise ValueError(
                f"convexity={convexity!r} must be positive and at most α = {float(self.constants.min()):g}: no "
                "function is more convex than it is smooth"
            )
        with torch.no_grad():
            gap = self.values[0] - self.objective(minimiser)
        B = self.proximity.strong_budget(gap, self.constants[-1], self.points[0], minimiser)
        return B * (1 - convexity / self.constants).prod()


Objective = Callable[[Tensor], Tensor]
_ROUNDING = 4096  # units in the last place of f and of ⟨ω, x⟩


class ProximalDescent(ABC):
    """Descent by steps Grad(x) with respect to a proximity, with one constant α until the policy changes it."""

    policy: Policy

    @property
    @abstractmethod
    def proximity(self) -> Proximity:
        """V_x(y)."""

    @property
    @abstractmethod
    def constant(self) -> float:
        """α of the first step."""

    def grad(self, objective: Objective, x: Tensor) -> Tensor:
        """Grad(x), of the shape of x: the next point. As in ``run``, the policy decides about a broken promise."""
        return self.run(objective, x, steps=1).point

    def prog(self, objective: Objective, x: Tensor) -> Tensor:
        """Prog(x) []: the promised decrease."""
        self.proximity.check(x)
        with torch.no_grad():
            propose = self.proximity.proposals(x.detach(), _value_and_differential(objective, x)[1])
            return propose(self.constant).progress

    def run(self, objective: Objective, x: Tensor, steps: int) -> Trace:
        """``steps`` steps from x."""
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps={steps!r} must be a positive integer")
        x, α, proximity = x.detach().clone(), self.constant, self.proximity
        proximity.check(x)
        value, ω = _value_and_differential(objective, x)
        check_finite(torch.stack([value, ω.sum()]), "the objective, or its differential, at the start")
        points, attempts = [x], []
        with torch.no_grad():
            for k in range(steps):
                taken = self.policy.take(k, α, _attempts(objective, proximity, x, value, ω))
                x, value, ω, α = taken.point, taken.value, taken.differential, taken.constant
                points.append(x)
                attempts.append(taken)
        values = torch.stack([attempts[0].before, *(taken.value for taken in attempts)])
        check_finite(values, "the objective on the way (α is too small)")
        return Trace(
            objective,
            proximity,
            tuple(points),
            values,
            torch.stack([taken.progress for taken in attempts]),
            torch.stack([taken.slack for taken in attempts]),
            values.new_tensor([taken.constant for taken in attempts]),
        )


@final
@dataclass(frozen=True)
class PrimalDescent(ProximalDescent):
    """x ← Grad(x) = x − ∇^g f(x)/CL, which lowers f by at least Prog(x) = ‖∇^g f‖²_g/2CL (Bai, Rosenberg, Xu 2022).

    ``lipschitz`` L: of the Euclidean gradient of f. ``C``: ‖v‖_E ≤ √C‖v‖_g, which ``compatibility`` measures. Only
    their product matters, and smoothness relative to g is enough: f(y) ≤ f(x) + df(y − x) + (CL/2)‖y − x‖²_{g,x}. Every
    step is checked against its promise; ``policy`` decides what happens to a broken one. ``region``: the set Q that
    steps may not leave. For convex f, f(x_T) − f(x*) ≤ 2LCR²/T: ``trace.bound(x*)``.

    >>> from natgrad.mirror import MatrixMetric
    >>> g = MatrixMetric(lambda x: torch.diag(torch.tensor([1.0, 100.0])))
    >>> f = lambda x: 0.5 * (x[0] ** 2 + 100 * x[1] ** 2)
    >>> trace = PrimalDescent(g, lipschitz=1.0).run(f, torch.tensor([3.0, 1.0]), steps=1)
    >>> trace.point, trace.progress
    (tensor([0., 0.]), tensor([54.5000]))
    """

    metric: RiemannianMetric
    lipschitz: float
    C: float = 1.0
    policy: Policy = field(default_factory=Refuse)
    region: Region = field(default_factory=Everywhere)

    def __post_init__(self) -> None:
        check_slots(metric=(self.metric, RiemannianMetric), policy=(self.policy, Policy), region=(self.region, Region))
        _check_positive("lipschitz", self.lipschitz)
        _check_positive("C", self.C)

    @property
    def proximity(self) -> Proximity:
        """½‖y − x‖²_{g(x)}."""
        return RiemannianProximity(self.metric, self.region)

    @property
    def constant(self) -> float:
        return self.C * self.lipschitz


@final
@dataclass(frozen=True)
class BregmanDescent(ProximalDescent):
    """Mirror descent: x ← argmin_y ⟨∇f(x), y − x⟩ + αV_x(y), that is ∇ψ(x) ← ∇ψ(x) − ∇f(x)/α.

    ``smoothness`` α: f(y) ≤ f(x) + df(y − x) + αV_x(y), f is α-smooth relative to ψ. The step is 1/α, so that a small α
    is a long step. Then f falls by at least Prog(x) = αV_y(x), which every step is checked for, and
    f(x_T) − f(x*) ≤ αV_{x_0}(x*)/T if it is convex. It is natural gradient descent of f∘∇ψ* in the dual chart, with the
    metric ∇²ψ* and the step 1/α (Raskutti and Mukherjee 2015). With ψ = ½‖y‖²_{g(x_k)}, made anew at every step, it is
    that of f with the metric g. ``ng.MirrorDescent`` is the optimizer for members of exponential families.

    >>> from natgrad.mirror import SimplexEntropy
    >>> loss = torch.tensor([1.0, 0.0])  # of two experts
    >>> BregmanDescent(SimplexEntropy(), smoothness=1.0).grad(lambda x: (loss * x).sum(), torch.tensor([0.5, 0.5]))
    tensor([0.2689, 0.7311])
    """

    potential: Potential
    smoothness: float
    policy: Policy = field(default_factory=Refuse)

    def __post_init__(self) -> None:
        check_slots(potential=(self.potential, Potential), policy=(self.policy, Policy))
        _check_positive("smoothness", self.smoothness)

    @property
    def proximity(self) -> Proximity:
        """The divergence of ψ."""
        return BregmanProximity(self.potential)

    @property
    def constant(self) -> float:
        return self.smoothness


def in_dual_chart(objective: Objective, potential: Potential) -> Objective:
    """F = f∘∇ψ*, the same objective as a function of z.

    >>> from natgrad.mirror import NegativeEntropy
    >>> in_dual_chart(lambda x: x.sum(), NegativeEntropy())(torch.zeros(2))  # e⁰ + e⁰
    tensor(2.)
    """
    return lambda z: objective(potential.inverse_gradient(z))


def _attempts(
    objective: Objective, proximity: Proximity, x: Tensor, value: Tensor, ω: Tensor
) -> Callable[[float], Attempt]:
    """The step from x as a function of α, tried out."""
    propose = proximity.proposals(x, ω)
    # f is known only up to the rounding of its value and of x.
    rounding = _ROUNDING * torch.finfo(x.dtype).eps
    size = value.abs() + (ω * x).abs().sum()

    def attempt(α: float) -> Attempt:
        proposal = propose(α)
        proximity.check(proposal.point)
        there, differential = _value_and_differential(objective, proposal.point)
        slack = rounding * (size + there.abs())
        return Attempt(α, value, proposal.point, there, differential, proposal.progress, slack)

    return attempt


def _value_and_differential(objective: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) [] and df(x), of the shape of x."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value = objective(leaf)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the objective returned {shape}: it must be one number, a function of x")
    if not value.requires_grad:
        raise ValueError("the objective does not depend on x: it must be a differentiable function of it")
    (ω,) = torch.autograd.grad(value, leaf)
    return value.detach().reshape(()), ω


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a positive, finite number")
