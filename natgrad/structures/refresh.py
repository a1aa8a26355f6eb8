"""Refresh: when a metric is estimated and inverted, and how it is averaged over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.model import Model, check_slots
from natgrad.pullback.gradient import GradientSample
from natgrad.pullback.layer import Block
from natgrad.pullback.pullback import Pullback
from natgrad.structures.base import Operator, Structure


@final
@dataclass(frozen=True)
class Refresh(Structure):
    """Another structure, estimated every ``every`` steps and averaged over time with ``decay`` (Grosse 2021, (32)).

    It is inverted every ``inverse`` steps; in between the last inverse is used, and a change of the damping waits. With
    ``inverse=1`` it is inverted whenever the metric or the damping has changed. The average is corrected for its start,
    Ḡ_t = Σ_s β^{t−s} G_s / Σ_s β^{t−s}, so that the first estimate has the full weight. Kronecker factors of one
    process are also weighted by their numbers of examples. The optimizers use this; ``estimate`` is that of the inner
    structure.

    >>> from natgrad.structures import Diagonal
    >>> Refresh(Diagonal(), every=10, decay=0.95)
    Refresh(structure=Diagonal(), every=10, decay=0.95, inverse=1)
    """

    structure: Structure
    every: int = 1
    decay: float = 0.0
    inverse: int = 1

    def __post_init__(self) -> None:
        check_slots(structure=(self.structure, Structure))
        if isinstance(self.structure, Refresh):
            raise ValueError(f"Refresh({self.structure!r}) has two schedules: give it {self.structure.structure!r}")
        if self.every < 1 or self.inverse < 1:
            which, got = ("every", self.every) if self.every < 1 else ("inverse", self.inverse)
            raise ValueError(f"Refresh({which}=…) must be at least 1, got {got}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"Refresh(decay=…) must be in [0, 1), got {self.decay}")
        name = type(self.structure).__name__
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
        return step % self.every == 0

    def inverse_due(self, step: int) -> bool:
        """Whether a metric that has changed is inverted for the step number 0, 1, …"""
        return step % self.inverse == 0

    def weight(self, step: int) -> float:
        """The weight of the estimate number ``step`` = 1, 2, … in the corrected average: (1 − β)/(1 − β^t)."""
        return (1 - self.decay) / (1 - self.decay**step)
