"""Refresh: when a metric is estimated and inverted, and how it is averaged over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.linalg import is_number
from natgrad.model import Model, check_slots, check_types
from natgrad.pullbacks.gradient import GradientSample
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback
from natgrad.structures.base import Operator, Structure

_EVERY_STEP = 16  # steps in which an early schedule estimates the metric every time


@final
@dataclass(frozen=True, repr=False)
class Refresh(Structure):
    """Estimate another structure now and then, and average it over time.

    The optimizers use this; ``estimate`` is that of the inner structure.

    Args:
        structure: The structure to average.
        every: Steps between estimates.
        decay: β of the moving average; 0 keeps the last estimate only.
        inverse: Steps between inverses. In between the last inverse is used, and a change of the damping has no effect.
            With 1 the metric is inverted whenever it or the damping has changed.
        early: In the beginning, when the metric changes fastest, it is also inverted in the steps 1, 2, 4, 8, … before
            the first period is over, and estimated in each of the first 16 of them.
        basis: A structure with eigenvectors (``EigenKronecker``) keeps them for this many steps, early ones excepted,
            and is inverted in them, which costs nothing; by default they are computed again whenever it is inverted.

    Method:
        The average is corrected for its start, Ḡ_t = Σ_s β^{t−s} G_s / Σ_s β^{t−s}, so that the first estimate has the
        full weight (Grosse 2021, (32)). Kronecker factors of one process are also weighted by their numbers of
        examples.

    Example:
        >>> from natgrad.structures import Dense, Diagonal
        >>> schedule = Refresh(Diagonal(), every=10, decay=0.95, inverse=20)
        >>> [step for step in range(1, 50) if schedule.inverse_due(step - 1)]
        [1, 2, 4, 8, 16, 21, 41]
        >>> Refresh(Dense(), every=10, decay=0.95)
        Refresh(structure=Dense(), every=10, decay=0.95, inverse=1)
    """

    structure: Structure
    every: int = 1
    decay: float = 0.0
    inverse: int = 1
    early: bool = field(default=True, kw_only=True)
    basis: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_slots(structure=(self.structure, Structure))
        if isinstance(self.structure, Refresh):
            raise ValueError(f"Refresh({self.structure!r}) has two schedules: give it {self.structure.structure!r}")
        check_types(early=(self.early, bool, "True or False"))
        for which, got in (("every", self.every), ("inverse", self.inverse), ("basis", self.basis)):
            if (got is not None or which != "basis") and not is_number(got, whole=True):
                raise TypeError(f"Refresh({which}=…) must be a whole number of steps, got {got!r}")
            if got is not None and got < 1:
                raise ValueError(f"Refresh({which}=…) must be at least 1, got {got}")
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise ValueError(f"Refresh(decay=…) must be in [0, 1), got {self.decay}")
        name = type(self.structure).__name__
        if self.basis is not None and not self.structure.has_basis:
            raise IncompatibleError(
                f"Refresh(basis={self.basis}) does not work with {name}, which has no eigenvectors to keep: leave "
                "it out, or use EigenKronecker"
            )
        if self.decay > 0 and not self.structure.bounded:
            raise IncompatibleError(
                f"Refresh(decay={self.decay}) does not work with {name}: every average would be larger than the last. "
                "Use decay=0, or LowRank, Diagonal, BlockDense or Dense"
            )
        if self.every > 1 and not self.structure.stored:
            raise IncompatibleError(
                f"Refresh(every={self.every}) does not work with {name}: it is never factored, so nothing is saved "
                "by keeping it, and its graph would be held. Use every=1"
            )

    @property
    def power(self) -> float:  # type: ignore[override]  # of the inner structure
        return self.structure.power

    @property
    def has_basis(self) -> bool:  # type: ignore[override]  # of the inner structure
        return self.structure.has_basis

    def elements(self, pullback: Pullback) -> int:
        return self.structure.elements(pullback)

    def estimate(self, pullback: Pullback, like: Operator | None = None) -> Operator:
        return self.structure.estimate(pullback, like)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> Operator | None:
        return self.structure.restore(model, blocks, tensors)

    def gradient_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        return self.structure.gradient_blocks(blocks)

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> Operator:
        return self.structure.of_gradient(sample, like)

    def metric_due(self, step: int) -> bool:
        """Whether the metric is estimated for the step number 0, 1, …"""
        return step % self.every == 0 or (step < _EVERY_STEP and self._beginning(step, self.inverse))

    def inverse_due(self, step: int) -> bool:
        """Whether a metric that has changed is inverted for the step number 0, 1, …"""
        return self._due(step, self.inverse)

    def basis_due(self, step: int) -> bool:
        """Whether a metric that is inverted for the step number 0, 1, … has its eigenvectors computed again."""
        return self.basis is None or self._due(step, self.basis)

    def basis_due_after(self, step: int) -> bool:
        """Whether eigenvectors are computed again after the step number 0, 1, … with an estimate (``renews_after``).

        They are after 1, 2, 4, … steps in the beginning, and if a period ends before the next estimate.

        >>> from natgrad.structures import EigenKronecker
        >>> schedule = Refresh(EigenKronecker(), basis=10)
        >>> [step + 1 for step in range(25) if schedule.basis_due_after(step)]
        [1, 2, 4, 8, 10, 20]
        >>> seldom = Refresh(EigenKronecker(), every=4, basis=10, early=False)
        >>> [step + 1 for step in range(0, 40, 4) if seldom.basis_due_after(step)]
        [9, 17, 29, 37]
        """
        if self.basis is None or (self._beginning(step, self.basis) and _doubled(step)):
            return True
        later = step + 1
        while later % self.basis and not self.metric_due(later):
            later += 1
        return later % self.basis == 0

    def _due(self, step: int, period: int) -> bool:
        return (self._beginning(step, period) and _doubled(step)) or step % period == 0

    def _beginning(self, step: int, period: int) -> bool:
        return self.early and step < period

    def weight(self, step: int) -> float:
        """The weight of the estimate number ``step`` = 1, 2, … in the corrected average: (1 − β)/(1 − β^t)."""
        return (1 - self.decay) / (1 - self.decay**step)


def _doubled(step: int) -> bool:
    """Whether the number of steps, ``step`` + 1, is a power of 2."""
    return (step + 1) & step == 0
