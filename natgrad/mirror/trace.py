"""The record of a descent, the promise that every step made, and what follows from a broken one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError, GuaranteeError
from natgrad.mirror.proximity import Proximity


@final
@dataclass(frozen=True)
class Trial:
    """One step with its constant α: where it leads, what f is there and was before, what was promised."""

    constant: float
    before: Tensor
    point: Tensor
    value: Tensor
    differential: Tensor
    progress: Tensor
    slack: Tensor  # what rounding may take from the decrease

    @property
    def holds(self) -> Tensor:
        """Whether f(x) − f(y) ≥ Prog(x), up to rounding; false where either is not a number."""
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
            f"α = CL = {self.constant:g} is too small for this f and this metric (000 corollary 14): raise lipschitz "
            "or C (for mirror descent, alpha), or let policy=Doubling() find it"
        )


class Policy(ABC):
    """What follows when a step breaks its promise f(x) − f(y) ≥ Prog(x)."""

    @abstractmethod
    def take(self, step: int, α: float, attempt: Callable[[float], Trial]) -> Trial:
        """The step that is taken, tried with α first."""


@final
@dataclass(frozen=True)
class Refuse(Policy):
    """Raise ``GuaranteeError`` with the step, the promise and the remedy."""

    def take(self, step: int, α: float, attempt: Callable[[float], Trial]) -> Trial:
        trial = attempt(α)
        if not bool(trial.holds):
            raise GuaranteeError(trial.refusal(step))
        return trial


@final
@dataclass(frozen=True)
class Report(Policy):
    """Take the step all the same: ``trace.violations`` names it."""

    def take(self, step: int, α: float, attempt: Callable[[float], Trial]) -> Trial:
        return attempt(α)


@final
@dataclass(frozen=True)
class Doubling(Policy):
    """Double α until the promise holds and the step stays in the domain; the next step starts from that α.

    α then is at most twice the smallest constant that would do: the rates lose a factor of two at most.
    """

    most: int = 60

    def __post_init__(self) -> None:
        if not isinstance(self.most, int) or self.most < 1:
            raise ValueError(f"Doubling(most={self.most!r}) must be a positive integer")

    def take(self, step: int, α: float, attempt: Callable[[float], Trial]) -> Trial:
        failure = ""
        for k in range(self.most + 1):
            try:
                trial = attempt(α * 2.0**k)
            except DomainError as error:
                failure = str(error)
                continue
            if bool(trial.holds):
                return trial
            failure = trial.refusal(step)
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
        """What convexity promises of f(x_T) − f(x*) []: B / Σ_k 1/α_k.

        For the Riemannian descent B = 2R², so that it is 2LCR²/T at a constant α = CL (000 lemma 16; R in the metric at
        x_k, ERRATA 22); for mirror descent B = V_{x_0}(x*), and α V_{x_0}(x*)/T. It holds if f is convex and no promise
        was broken.
        """
        return self.proximity.budget(self.points, minimiser) / self.constants.reciprocal().sum()

    def linear_bound(self, minimiser: Tensor, convexity: float) -> Tensor:
        """What strong convexity promises of f(x_T) − f(x*) []: B Π_k (1 − μ/α_k).

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
