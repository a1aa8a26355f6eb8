"""Riemannian primal descent and mirror descent, with the decrease that each step promises (Bai, Rosenberg, Xu 2022)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.errors import DomainError, GuaranteeError
from natgrad.geometry import value_and_differential
from natgrad.linalg import check_finite, check_positive, is_number
from natgrad.mirror.geometry import Everywhere, Region, RiemannianMetric
from natgrad.mirror.potentials import Potential
from natgrad.model import check_slots
from natgrad.show import brief

Objective = Callable[[Tensor], Tensor]
_ROUNDING = 4096  # units in the last place of f and of ⟨ω, x⟩


# One step with its promise, and policies for a broken one


@final
@dataclass(frozen=True)
class Attempt:
    """Step number ``step`` with its constant α: its end point, f before and after, and the promised decrease."""

    step: int
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

    @property
    def message(self) -> str:
        """Of a step that breaks its promise: the decrease, the promise and the remedy."""
        return (
            f"step {self.step}: f fell by {float(self.before - self.value):.6g}, and Prog promised "
            f"{float(self.progress):.6g}. The constant α = {self.constant:g} is too small for this f and this metric, "
            "and the step 1/α too long: raise lipschitz or C (PrimalDescent) or smoothness (BregmanDescent), or let "
            "policy=Doubling() find it"
        )


# What to do when a step breaks its promise f(x) − f(y) ≥ Prog(x): given α and the step as a function of α, the step to
# take.
Policy: TypeAlias = Callable[[float, Callable[[float], Attempt]], Attempt]


@final
@dataclass(frozen=True)
class Refuse:
    """Raise ``GuaranteeError`` with the step, the promise and the remedy."""

    def __call__(self, α: float, attempt: Callable[[float], Attempt]) -> Attempt:
        taken = attempt(α)
        if not bool(taken.holds):
            raise GuaranteeError(taken.message)
        return taken


@final
@dataclass(frozen=True)
class Report:
    """Take the step anyway; ``trace.violations`` names it."""

    def __call__(self, α: float, attempt: Callable[[float], Attempt]) -> Attempt:
        return attempt(α)


@final
@dataclass(frozen=True)
class Doubling:
    """Try shorter steps until one keeps its promise and stays in the domain.

    Args:
        most: The largest number of trials in one step.

    Method:
        α is doubled, and the next step starts from that α. It is at most twice the smallest constant that works, so
        that the rates lose a factor of two at most.
    """

    most: int = 60

    def __post_init__(self) -> None:
        if not is_number(self.most, whole=True) or self.most < 1:
            raise ValueError(f"Doubling(most={self.most!r}) must be a positive integer")

    def __call__(self, α: float, attempt: Callable[[float], Attempt]) -> Attempt:
        failure = ""
        for k in range(self.most + 1):
            try:
                taken = attempt(α * 2.0**k)
            except DomainError as error:
                failure = str(error)
                continue
            if bool(taken.holds):
                return taken
            failure = taken.message
        raise GuaranteeError(
            f"α was doubled {self.most} times and no step kept its promise: f is not smooth here, or its differential "
            f"is wrong. The last failure: {failure}"
        )


@final
@dataclass(frozen=True)
class Trace:
    """The record of a descent: points, values, and what every step promised.

    Attributes:
        objective: f.
        descent: The method that took the steps.
        start: The first point x_0.
        attempts: The T steps that were taken.
    """

    objective: Objective
    descent: ProximalDescent
    start: Tensor
    attempts: tuple[Attempt, ...]

    __repr__ = brief

    @property
    def points(self) -> tuple[Tensor, ...]:
        """x_0 … x_T."""
        return (self.start, *(taken.point for taken in self.attempts))

    @property
    def point(self) -> Tensor:
        """x_T."""
        return self.attempts[-1].point

    @property
    def values(self) -> Tensor:
        """f(x_k) [T+1]."""
        return torch.stack([self.attempts[0].before, *(taken.value for taken in self.attempts)])

    @property
    def progress(self) -> Tensor:
        """Prog(x_k) of every step [T]."""
        return torch.stack([taken.progress for taken in self.attempts])

    @property
    def constants(self) -> Tensor:
        """α_k of every step [T]."""
        return self.values.new_tensor([taken.constant for taken in self.attempts])

    @property
    def decrease(self) -> Tensor:
        """f(x_k) − f(x_{k+1}) [T], promised to be at least ``progress``."""
        return self.values[:-1] - self.values[1:]

    @property
    def violations(self) -> tuple[Attempt, ...]:
        """The steps that broke their promise, in order; ``message`` says of each by how much, and what to do."""
        return tuple(taken for taken in self.attempts if not bool(taken.holds))

    def bound(self, minimiser: Tensor) -> Tensor:
        """An upper bound on f(x_T) − f(x*) [] for convex f: B / Σ_k 1/α_k.

        For the Riemannian descent B = 2R² with R in the metric at x_k, that is 2LCR²/T at a constant α = CL; for mirror
        descent B = V_{x_0}(x*), that is α V_{x_0}(x*)/T. It holds if no promise was broken.
        """
        return self.descent.budget(self.points, minimiser) / self.constants.reciprocal().sum()

    def linear_bound(self, minimiser: Tensor, convexity: float) -> Tensor:
        """An upper bound on f(x_T) − f(x*) [] for strongly convex f: B Π_k (1 − μ/α_k).

        ``convexity`` μ: f(y) ≥ f(x) + df(y − x) + μV_x(y) for all x and y. B is f(x_0) − f(x*) for the Riemannian
        descent, αV_{x_0}(x*) for mirror descent.
        """
        α = self.constants
        if not 0 < convexity <= float(α.min()):
            raise ValueError(
                f"convexity={convexity!r} must be positive and at most α = {float(α.min()):g}: no function is more "
                "convex than it is smooth"
            )
        with torch.no_grad():
            gap = self.values[0] - self.objective(minimiser)
        return self.descent.strong_budget(gap, α[-1], self.start, minimiser) * (1 - convexity / α).prod()


# Descents: the square of a Riemannian norm, or the divergence of a potential, for the proximity V


class ProximalDescent(ABC):
    """Descent by steps with respect to a proximity V_x(y) ≥ 0, zero at y = x.

    The step from x with the differential ω and the constant α is

        Grad(x) = argmin_y m(y),   Prog(x) = −min_y m(y),   m(y) = ⟨ω, y − x⟩ + α V_x(y).

    α multiplies V, so that the step is proportional to 1/α; it is one constant until the policy changes it. Where
    f(y) ≤ f(x) + m(y) for all y (f is α-smooth relative to V), f falls by at least Prog, whatever V is.
    """

    policy: Policy

    @property
    @abstractmethod
    def constant(self) -> float:
        """α of the first step."""

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Refuse a point where V_x does not exist."""

    @abstractmethod
    def divergence(self, y: Tensor, x: Tensor) -> Tensor:
        """V_x(y) []."""

    @abstractmethod
    def proposals(self, x: Tensor, ω: Tensor) -> Callable[[float], tuple[Tensor, Tensor]]:
        """Grad(x) and Prog(x) [] as a function of α; work that does not depend on α is done once."""

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

    def grad(self, objective: Objective, x: Tensor) -> Tensor:
        """Grad(x), of the shape of x: the next point. As in ``run``, the policy decides about a broken promise."""
        return self.run(objective, x, steps=1).point

    def prog(self, objective: Objective, x: Tensor) -> Tensor:
        """Prog(x) []: the promised decrease."""
        self.check(x)
        with torch.no_grad():
            return self.proposals(x.detach(), value_and_differential(objective, x, "the objective", "x")[1])(
                self.constant
            )[1]

    def run(self, objective: Objective, x: Tensor, steps: int) -> Trace:
        """``steps`` steps from x."""
        if not is_number(steps, whole=True) or steps < 1:
            raise ValueError(f"steps={steps!r} must be a positive integer")
        start = x = x.detach().clone()
        self.check(x)
        α, (value, ω) = self.constant, value_and_differential(objective, x, "the objective", "x")
        check_finite(torch.stack([value, ω.sum()]), "the objective, or its differential, at the start")
        attempts: list[Attempt] = []
        with torch.no_grad():
            for k in range(steps):
                taken = self.policy(α, self._attempts(objective, k, x, value, ω))
                x, value, ω, α = taken.point, taken.value, taken.differential, taken.constant
                attempts.append(taken)
        trace = Trace(objective, self, start, tuple(attempts))
        check_finite(trace.values, "the objective on the way (α is too small)")
        return trace

    def _attempts(
        self, objective: Objective, step: int, x: Tensor, value: Tensor, ω: Tensor
    ) -> Callable[[float], Attempt]:
        """The step from x as a function of α, tried out."""
        propose = self.proposals(x, ω)
        # f is known only up to the rounding of its value and of x.
        rounding = _ROUNDING * torch.finfo(x.dtype).eps
        size = value.abs() + (ω * x).abs().sum()

        def attempt(α: float) -> Attempt:
            point, progress = propose(α)
            self.check(point)
            there, differential = value_and_differential(objective, point, "the objective", "x")
            return Attempt(step, α, value, point, there, differential, progress, rounding * (size + there.abs()))

        return attempt


@final
@dataclass(frozen=True)
class PrimalDescent(ProximalDescent):
    """Natural gradient descent in a given Riemannian metric, with a guarantee that is checked.

    Args:
        metric: The Riemannian metric g.
        lipschitz: L, the Lipschitz constant of the Euclidean gradient of f.
        C: The constant of ‖v‖_E ≤ √C‖v‖_g, which ``compatibility`` measures. Only the product of C and ``lipschitz``
            matters.
        policy: What happens if a step breaks its promise: ``Refuse()`` raises, ``Doubling()`` tries shorter steps.
        region: The convex set Q that steps may not leave: ``Everywhere()`` or a ``Box``.

    Method:
        x ← Grad(x) = x − ∇^g f(x)/CL, which lowers f by at least Prog(x) = ‖∇^g f‖²_g/2CL (Bai, Rosenberg, Xu 2022).

        It is natural gradient descent, with V_x(y) = ½‖y − x‖²_{g(x)}. Smoothness relative to g is enough: f(y) ≤ f(x)
        + df(y − x) + (CL/2)‖y − x‖²_{g,x}. For convex f, f(x_T) − f(x*) ≤ 2LCR²/T: ``trace.bound(x*)``.

    Example:
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
        check_slots(metric=(self.metric, RiemannianMetric), region=(self.region, Region))
        _check_policy(self.policy)
        check_positive(self.lipschitz, "lipschitz")
        check_positive(self.C, "C")

    @property
    def constant(self) -> float:
        return self.C * self.lipschitz

    def check(self, x: Tensor) -> None:
        self.region.check(x)
        self.metric.check(x)

    def divergence(self, y: Tensor, x: Tensor) -> Tensor:
        return 0.5 * self.metric.at(x).squared(y - x)

    def proposals(self, x: Tensor, ω: Tensor) -> Callable[[float], tuple[Tensor, Tensor]]:
        g = self.metric.at(x)
        return lambda α: self.region.step(g, x, ω, α)

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
class BregmanDescent(ProximalDescent):
    """Mirror descent with a given potential, with a guarantee that every step is checked for.

    ``ng.MirrorDescent`` is the optimizer for members of exponential families.

    Args:
        potential: ψ, which defines distances between points.
        smoothness: α such that f(y) ≤ f(x) + df(y − x) + αV_x(y). The step is 1/α, so a small α is a long step.
        policy: What happens if a step breaks its promise: ``Refuse()`` raises, ``Doubling()`` tries shorter steps.

    Method:
        Mirror descent: x ← argmin_y ⟨∇f(x), y − x⟩ + αV_x(y), that is ∇ψ(x) ← ∇ψ(x) − ∇f(x)/α.

        V_x(y) = ψ(y) − ψ(x) − ⟨∇ψ(x), y − x⟩ (Grosse 2021). f falls by at least Prog(x) = αV_y(x) in every step, and
        f(x_T) − f(x*) ≤ αV_{x_0}(x*)/T if f is convex.

        It is natural gradient descent of f∘∇ψ* in the dual chart, with the metric ∇²ψ* and the step 1/α (Raskutti and
        Mukherjee 2015). With ψ = ½‖y‖²_{g(x_k)}, made anew at every step, it is that of f with the metric g.

    Example:
        >>> from natgrad.mirror import SimplexEntropy
        >>> loss = torch.tensor([1.0, 0.0])  # of two experts
        >>> BregmanDescent(SimplexEntropy(), smoothness=1.0).grad(lambda x: (loss * x).sum(), torch.tensor([0.5, 0.5]))
        tensor([0.2689, 0.7311])
    """

    potential: Potential
    smoothness: float
    policy: Policy = field(default_factory=Refuse)

    def __post_init__(self) -> None:
        check_slots(potential=(self.potential, Potential))
        _check_policy(self.policy)
        check_positive(self.smoothness, "smoothness")

    @property
    def constant(self) -> float:
        return self.smoothness

    def check(self, x: Tensor) -> None:
        self.potential.domain.check(x, "x")

    def divergence(self, y: Tensor, x: Tensor) -> Tensor:
        return self.potential.bregman(y, x)

    def proposals(self, x: Tensor, ω: Tensor) -> Callable[[float], tuple[Tensor, Tensor]]:
        """Prog(x) = α V_y(x), with the arguments swapped.

        V_x(y) + V_y(x) = ⟨∇ψ(x) − ∇ψ(y), x − y⟩ = ⟨ω, x − y⟩/α.
        """
        z = self.potential.gradient(x)

        def proposal(α: float) -> tuple[Tensor, Tensor]:
            y = self.potential.inverse_gradient(z - ω / α)
            return y, α * self.potential.bregman(x, y)

        return proposal

    def budget(self, points: Sequence[Tensor], minimiser: Tensor) -> Tensor:
        """V_{x_0}(x*): f(x_{k+1}) − f(x*) ≤ α_k (V_{x_k}(x*) − V_{x_{k+1}}(x*)), summed over k with weights 1/α_k."""
        return self.divergence(minimiser, points[0])

    def strong_budget(self, gap: Tensor, α: Tensor, start: Tensor, minimiser: Tensor) -> Tensor:
        """α V_{x_0}(x*): V_{x_{k+1}}(x*) ≤ (1 − μ/α_k) V_{x_k}(x*), and the last step bounds f."""
        return α * self.divergence(minimiser, start)


def in_dual_chart(objective: Objective, potential: Potential) -> Objective:
    """The same objective as a function of the dual coordinates.

    Args:
        objective: f, a function of x.
        potential: ψ, whose gradient maps x to z.

    Returns:
        F = f∘∇ψ*, a function of z.

    Example:
        >>> from natgrad.mirror import NegativeEntropy
        >>> in_dual_chart(lambda x: x.sum(), NegativeEntropy())(torch.zeros(2))  # e⁰ + e⁰
        tensor(2.)
    """
    return lambda z: objective(potential.inverse_gradient(z))


def _check_policy(policy: Policy) -> None:
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(f"policy must be Refuse(), Report(), Doubling(), or a function as they are, got {policy!r}")
