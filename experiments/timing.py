"""Milliseconds of a step of every optimizer, alone on the device; they take turns in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness import Spread, race
from experiments.arms import TENTHS, Arm
from experiments.images import Images
from experiments.training import Job, Setup, Training

_EXAMPLES = 100  # batches of an epoch here: one period of inverses, ten of factors


def measured(arms: Sequence[Arm], setup: Setup, images: Images, rounds: int = 3) -> dict[str, Any]:
    """Medians and quartiles of rounds of a hundred steps, in time and as ratios to the first arm in the same round."""
    setup.prepare()
    part = images.first(_EXAMPLES * setup.batch)
    trainings = {arm.name: Training(Job(images.name, TENTHS, arm, 0), setup, part) for arm in arms}
    steps = {name: training.feed.steps for name, training in trainings.items()}
    calls = {name: training.steps for name, training in trainings.items()}
    found = race(calls, arms[0].name, rounds, torch.device(setup.device), warmup=2).each(steps)
    epoch = len(images.train.y) // setup.batch
    return {
        "machine": setup.describe(),
        "setup": {"batch": setup.batch, "width": setup.width, "layout": str(setup.layout), "rounds": rounds},
        "ms_a_step": {name: _scaled(found.time(name), 1e3) for name in calls},
        f"over_{arms[0].name}": {name: _scaled(found.ratio(name, arms[0].name), 1.0) for name in calls},
        "seconds_an_epoch": {name: float(f"{found.time(name).median * epoch:.4g}") for name in calls},
    }


def _scaled(spread: Spread, unit: float) -> dict[str, float]:
    return {name: float(f"{value * unit:.4g}") for name, value in asdict(spread).items()}


def lines(found: dict[str, Any]) -> str:
    """To be read."""
    (ratio,) = (name for name in found if name.startswith("over_"))
    return "\n".join(
        f"{name:14}{time['median']:9.2f} ms a step{found[ratio][name]['median']:8.3f} × {ratio.removeprefix('over_')}"
        for name, time in found["ms_a_step"].items()
    )
