"""Refresh: when a metric is estimated and inverted, and how it is averaged over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.linalg import is_number
from natgrad.model import Model, check_slots, check_types
from natgrad.pullback.gradient import GradientSample
from natgrad.pullback.layer import Block
from natgrad.pullback.pullback import Pullback
from natgrad.structures.base import Operator, Structure

_BEGINNING = 64  # steps in which a metric without a period is inverted whenever the number of steps has doubled
_EVERY_STEP = 16  # steps in which an early schedule estimates the metric every time


@final
@dataclass(frozen=True, repr=False)
class Refresh(Structure):
    """Another structure, estimated every ``every`` steps and averaged over time with ``decay`` (Grosse 2021, (32)).

    The metric is inverted every ``inverse`` steps; in between the last inverse is used, and a change of the damping has
    no effect until the next inversion. With ``inverse=1`` it is inverted whenever the metric or the damping has
    changed. ``early``: in the beginning, when the metric changes fastest, it is also inverted in the steps 1, 2, 4, 8,
    … before the first period is over, and estimated in each of the first 16 of them.

    With ``inverse="fresh"`` there is no period. The metric is inverted in the steps 1, 2, 4, …, 64, and whenever its
    factors F have moved by ``drift`` since the last inverse: √(mean over the factors of ‖F̄ − F‖²/‖F‖²), from products
    with random signs, or the damping has. One factor of a hundred that doubles counts as much as a change of all
    factors by a tenth. This is measured whenever the inverse has grown older by an eighth of its age, and the host
    reads the number four steps later, so that it does not wait for the device.
    ``budget``: inversions take at most this share of the time of the forward and backward passes, which is measured
    from one step to the next; the steps 1, 2, 4, …, 64 are not limited. Measured times differ from run to run: with
    ``budget=None`` they are not used, and a run can be repeated and resumed bit for bit.

    ``basis``: a structure with eigenvectors (``EigenKronecker``) keeps them for this many steps, early ones excepted,
    and is inverted in them, which costs nothing; by default they are computed again whenever it is inverted.

    The average is corrected for its start, Ḡ_t = Σ_s β^{t−s} G_s / Σ_s β^{t−s}, so that the first estimate has the full
    weight. Kronecker factors of one process are also weighted by their numbers of examples. The optimizers use this;
    ``estimate`` is that of the inner structure.

    >>> from natgrad.structures import Dense, Diagonal
    >>> schedule = Refresh(Diagonal(), every=10, decay=0.95, inverse=20)
    >>> [step for step in range(1, 50) if schedule.inverse_due(step - 1)]
    [1, 2, 4, 8, 16, 21, 41]
    >>> Refresh(Dense(), every=10, decay=0.95, inverse="fresh", drift=0.2)
    Refresh(structure=Dense(), every=10, decay=0.95, inverse='fresh', drift=0.2)
    """

    structure: Structure
    every: int = 1
    decay: float = 0.0
    inverse: int | Literal["fresh"] = 1
    early: bool = field(default=True, kw_only=True)
    drift: float = field(default=0.1, kw_only=True)
    budget: float | None = field(default=0.1, kw_only=True)
    basis: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_slots(structure=(self.structure, Structure))
        if isinstance(self.structure, Refresh):
            raise ValueError(f"Refresh({self.structure!r}) has two schedules: give it {self.structure.structure!r}")
        if isinstance(self.inverse, str) and not self.fresh:
            raise ValueError(f'Refresh(inverse=…) is a number of steps or "fresh", not {self.inverse!r}')
        check_types(early=(self.early, bool, "True or False"))
        for which, got in (("every", self.every), ("inverse", self._period), ("basis", self.basis)):
            if (got is not None or which == "every") and not is_number(got, whole=True):
                raise TypeError(f"Refresh({which}=…) must be a whole number of steps, got {got!r}")
            if got is not None and got < 1:
                raise ValueError(f"Refresh({which}=…) must be at least 1, got {got}")
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise ValueError(f"Refresh(decay=…) must be in [0, 1), got {self.decay}")
        self._check_fresh()
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

    def _check_fresh(self) -> None:
        given = [name for name in ("drift", "budget") if getattr(self, name) != getattr(Refresh, name)]
        if given and not self.fresh:
            raise ValueError(
                f"Refresh(inverse={self.inverse}, {given[0]}=…) has a period, and {given[0]} is for metrics that have "
                f'none: leave it out, or give inverse="fresh"'
            )
        for name in ("drift", "budget"):
            value = getattr(self, name)
            if (value is not None or name == "drift") and not (is_number(value) and value > 0):
                raise ValueError(f"Refresh({name}=…) must be a positive number, got {value!r}")
        if self.fresh and not self.structure.stored:
            raise IncompatibleError(
                f'Refresh(inverse="fresh") does not work with {type(self.structure).__name__}: it is never factored, '
                "so no inverse grows old. Use inverse=1"
            )

    @property
    def fresh(self) -> bool:
        """Whether the inverse has no period, and is made again when the metric has moved."""
        return self.inverse == "fresh"

    @property
    def _period(self) -> int | None:
        return None if isinstance(self.inverse, str) else self.inverse

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
        return step % self.every == 0 or (self._beginning(step, self._period) and step < _EVERY_STEP)

    def inverse_due(self, step: int) -> bool:
        """Whether a metric that has changed is inverted for the step number 0, 1, …, however little it has moved."""
        return self._due(step, self._period)

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

    def _due(self, step: int, period: int | None) -> bool:
        return (self._beginning(step, period) and _doubled(step)) or (period is not None and step % period == 0)

    def _beginning(self, step: int, period: int | None) -> bool:
        return self.early and step < (_BEGINNING if period is None else period)

    def weight(self, step: int) -> float:
        """The weight of the estimate number ``step`` = 1, 2, … in the corrected average: (1 − β)/(1 − β^t)."""
        return (1 - self.decay) / (1 - self.decay**step)


def _doubled(step: int) -> bool:
    """Whether the number of steps, ``step`` + 1, is a power of 2."""
    return (step + 1) & step == 0
