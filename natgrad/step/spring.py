"""SPRING: momentum that is corrected by what the residuals of today already say about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch

from natgrad.geometry import Vector
from natgrad.linalg import check_number_fields
from natgrad.step.base import Step, StepContext, StepRule
from natgrad.step.line_search import Armijo, GridSearch


@final
@dataclass(frozen=True)
class Spring(StepRule):
    """Keep what earlier batches said where this one is silent: momentum for wave functions.

    Args:
        decay: μ, by which the last step is shrunk.
        norm: Steps are shortened to this length at most.
        search: A line search for the length of the step along φ (Guzmán-Cordero et al. 2025); without one the length is
            the learning rate.

    Method:
        φ = μφ' + (G + λ)⁻¹(ω − μGφ'), δ = −lr·φ: the step that is nearest to the last one (Goldshlager et al. 2024).

        With residuals r and their Jacobian J, φ is the minimum of ‖J φ − r‖² + λ‖φ − μφ'‖²: a batch decides φ where it
        has rows, and elsewhere the last step does; that is Kaczmarz's projection.

    Example:
        >>> Spring(decay=0.9, search=GridSearch())
        Spring(decay=0.9, norm=None, search=GridSearch(tries=30))
    """

    has_momentum: ClassVar[bool] = True

    decay: float = 0.95
    norm: float | None = None
    search: GridSearch | Armijo | None = None

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not 0 <= self.decay < 1:
            raise ValueError(f"Spring(decay=…) must be in [0, 1), got {self.decay}")
        if self.norm is not None and not self.norm > 0:
            raise ValueError(f"Spring(norm=…) must be positive, got {self.norm}")

    @property
    def needs_closure(self) -> bool:  # type: ignore[override]
        return self.search is not None

    def take(self, context: StepContext) -> Step:
        φ = self._direction(context)
        rates = {name: lr for names, lr in context.rates for name in names}
        δ = Vector({name: -rates[name] * t if name in rates else torch.zeros_like(t) for name, t in φ.items()})
        if self.norm is not None:
            δ = δ * (self.norm / max(float(δ.flatten().norm()), self.norm))
        if self.search is None:
            return Step(δ, context.damping, velocity=φ)
        return replace(self.search.along(context, δ), velocity=φ)

    def _direction(self, context: StepContext) -> Vector:
        last, space, λ = context.velocity(), context.residuals, context.damping
        if last is None:
            return context.sharp(context.differential, λ) if space is None else space.solve(space.value, λ)
        shrunk = last * self.decay
        if space is not None:
            return shrunk + space.solve(space.value - space.push(shrunk), λ)
        return shrunk + context.sharp(context.differential - context.operator.flat(shrunk), λ)
