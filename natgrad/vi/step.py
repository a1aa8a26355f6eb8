"""What one natural-gradient step did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

MARGIN = 0.9  # of the way to the boundary that a step may go


@final
@dataclass(frozen=True)
class Step:
    """A step of size ρ that was ``asked`` for, and the one that was ``taken``: shorter where it would leave the domain.

    >>> import torch
    >>> Step(1.0, torch.tensor(0.25), "the precision must be positive definite").reason
    'shortened from 1 to 0.25: the precision must be positive definite'
    """

    asked: float
    taken: Tensor  # [] or [*batch]: on the device, so that nobody has to wait for it
    bound: str  # the bound of the domain that was in the way

    @property
    def shortened(self) -> bool:
        """Whether the step, or one in the batch, is shorter than asked; waits for the device."""
        return bool((self.taken < self.asked).any())

    @property
    def reason(self) -> str | None:
        """Why the step is shorter, or None; waits for the device."""
        if not self.shortened:
            return None
        return f"shortened from {self.asked:g} to {float(self.taken.min()):.3g}: {self.bound}"


def check_rate(rate: float) -> None:
    """A step size ρ lies in (0, 1]: 1 forgets the old natural parameters altogether."""
    if not 0 < rate <= 1:
        raise ValueError(
            f"rate={rate} must lie in (0, 1]: η ← (1 − ρ) η + ρ η̂, and ρ = 1 is exact for conjugate models"
        )
