"""Runs of a moment: their settings, and time for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from experiments.sobolev_cifar.training import Budget, Setup

SETUP = Setup(epochs=2, batch=32, width=2)
TINY = ["--width", "2", "--batch", "32", "--epochs", "2", "--device", "cpu", "--schedules", "tenths", "--commit", "abc"]
# Of runs that are made up.
SIZES: dict[str, Any] = {"batch": 32, "width": 2, "layout": "torch.channels_last", "limit": None}
MACHINE = {"device": "GPU"}


def write_timing(results: Path, seconds: dict[str, float], **other: Any) -> None:
    """As if ``--time`` had measured epochs of such runs on CIFAR-10; ``other``: what was not so."""
    setup = {key: other.get(key, value) for key, value in SIZES.items()}
    machine = {"device": other.get("device", MACHINE["device"])}
    found = {"dataset": other.get("dataset", "cifar10"), "machine": machine, "setup": setup}
    (results / "timing.json").write_text(json.dumps([{**found, "seconds_an_epoch": seconds}]))


@final
@dataclass(frozen=True)
class Ample(Budget):
    """Time for everything."""

    def allows(self, seconds: float) -> bool:
        return True
