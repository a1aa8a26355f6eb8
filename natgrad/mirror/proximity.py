"""What a step pays for its length: V_x(y), the square of a Riemannian norm or the divergence of a potential."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from natgrad.mirror.metrics import RiemannianMetric
from natgrad.mirror.potentials import Potential
from natgrad.mirror.regions import Everywhere, Region


@final
@dataclass(frozen=True)
class Proposal:
    """y = Grad(x) and the decrease of f that it promises, Prog(x) []."""

    point: Tensor
    progress: Tensor


class Proximity(ABC):
    """V_x(y) ≥ 0, zero at y = x. The step from x with the differential ω and the constant α is (000 definition 12)

        Grad(x) = argmin_y m(y),   Prog(x) = −min_y m(y),   m(y) = ⟨ω, y − x⟩ + α V_x(y).

    α multiplies V: the length of the step goes with 1/α (ERRATA 23). Where f(y) ≤ f(x) + m(y) for all y (f is
    α-smooth relative to V), f falls by Prog at least, whatever V is (corollaries 14 and 15).
    """

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Refuse a point where V_x does not exist."""

    @abstractmethod
    def divergence(self, y: Tensor, x: Tensor) -> Tensor:
        """V_x(y) []."""

    @abstractmethod
    def proposals(self, x: Tensor, ω: Tensor) -> Callable[[float], Proposal]:
        """The step from x as a function of α; what does not depend on α is done once."""

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
    """V_x(y) = ½‖y − x‖²_{g(x)}, over a convex set Q: natural gradient descent, x − ∇^g f/α (000 lemma 13, (56))."""

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
        """2R², R = max_k ‖x_k − x*‖ in the metric at x_k (000 lemma 16, ERRATA 22).

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
    """V_x(y) = ψ(y) − ψ(x) − ⟨∇ψ(x), y − x⟩: mirror descent, ∇ψ(y) = ∇ψ(x) − ω/α (000 (51), 002 section 2).

    Prog(x) = α V_y(x), with the arguments the other way round: V_x(y) + V_y(x) = ⟨∇ψ(x) − ∇ψ(y), x − y⟩ = ⟨ω, x − y⟩/α.
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
