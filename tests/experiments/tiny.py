"""Runs of a moment: their settings, and time for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from experiments.training import Budget, Setup

SETUP = Setup(epochs=2, batch=32, width=2)
TINY = ["--width", "2", "--batch", "32", "--epochs", "2", "--device", "cpu", "--schedules", "tenths"]


@final
@dataclass(frozen=True)
class Ample(Budget):
    """Time for everything."""

    def allows(self, seconds: float) -> bool:
        return True
