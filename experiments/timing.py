"""Milliseconds of a step of every optimizer, alone on the device; they take turns in one process.

``timing.json`` is a list: a measurement for every set of images, size of batches and network, layout, number of images
and machine that there was one for. A new one takes the place of its own kind. The first file of this experiment has one
measurement and no list; it is of CIFAR-10.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from benchmarks.harness import Spread, together
from experiments.configs import TENTHS, Arm
from experiments.files import write_json
from experiments.images import Images
from experiments.record import Record
from experiments.training import Job, Setup, Training

_EXAMPLES = 100  # batches of an epoch here: one period of inverses, ten of factors


def measured(arms: Sequence[Arm], setup: Setup, images: Images, rounds: int = 3) -> dict[str, Any]:
    """Medians and quartiles of rounds of a hundred steps, in time and as ratios to the first arm in the same round."""
    setup.prepare()
    part = images.first(_EXAMPLES * setup.batch)
    trainings = {arm.name: Training(Job(images.name, TENTHS, arm, 0), setup, part) for arm in arms}
    steps = {name: training.feed.steps for name, training in trainings.items()}
    calls = {name: training.steps for name, training in trainings.items()}
    found = together(calls, arms[0].name, rounds, torch.device(setup.device), warmup=2).each(steps)
    epoch = len(images.train.y) // setup.batch
    shape = {"batch": setup.batch, "width": setup.width, "layout": str(setup.layout), "limit": setup.part.limit}
    return {
        "dataset": images.name,
        "machine": setup.describe(),
        "setup": {**shape, "rounds": rounds},
        "ms_a_step": {name: _scaled(found.time(name), 1e3) for name in calls},
        f"over_{arms[0].name}": {name: _scaled(found.ratio(name, arms[0].name), 1.0) for name in calls},
        "seconds_an_epoch": {name: float(f"{found.time(name).median * epoch:.4g}") for name in calls},
    }


@final
@dataclass(frozen=True)
class Conditions:
    """What the seconds of an epoch depend on, besides the optimizer."""

    dataset: str
    batch: int | None
    width: int | None
    layout: str | None
    limit: int | None
    device: str | None

    @staticmethod
    def of(dataset: str, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> Conditions:
        """Of a run or a measurement, as they were written down."""
        batch, width, layout, limit = (settings.get(key) for key in ("batch", "width", "layout", "limit"))
        return Conditions(dataset, batch, width, layout, limit, machine.get("device"))


@final
@dataclass(frozen=True)
class Timing:
    """All measurements of a file."""

    found: Mapping[Conditions, Mapping[str, Any]]

    @staticmethod
    def load(path: Path) -> Timing:
        """None where there is no file."""
        content = json.loads(path.read_text()) if path.exists() else []
        every = [{"dataset": "cifar10", **content}] if isinstance(content, dict) else content
        return Timing({Conditions.of(one["dataset"], one["setup"], one["machine"]): one for one in every})

    def of(self, dataset: str) -> Mapping[str, Any]:
        """The first measurement with these images."""
        return next(one for conditions, one in self.found.items() if conditions.dataset == dataset)

    def beside(self, new: Mapping[str, Any]) -> Timing:
        """With one more, in the place of what was measured under the same conditions."""
        return Timing({**self.found, Conditions.of(new["dataset"], new["setup"], new["machine"]): new})

    def save(self, path: Path) -> None:
        """As a list."""
        write_json(path, list(self.found.values()))

    def seconds(self, runs: Sequence[Record]) -> float | None:
        """Of an epoch of these runs of one optimizer, alone; None where it was not measured under their conditions."""
        places = {Conditions.of(run.name.dataset, run.settings, run.machine) for run in runs}
        arms = {run.name.arm for run in runs}
        if len(places) != 1 or len(arms) != 1:
            return None
        found: float | None = self.found.get(places.pop(), {}).get("seconds_an_epoch", {}).get(arms.pop())
        return found


def _scaled(spread: Spread, unit: float) -> dict[str, float]:
    return {name: float(f"{value * unit:.4g}") for name, value in asdict(spread).items()}


def lines(found: Mapping[str, Any]) -> str:
    """To be read."""
    (ratio,) = (name for name in found if name.startswith("over_"))
    unit = ratio.removeprefix("over_")
    return "\n".join(
        f"{found['dataset']:10}{name:14}{time['median']:9.2f} ms a step{found[ratio][name]['median']:8.3f} × {unit}"
        for name, time in found["ms_a_step"].items()
    )
