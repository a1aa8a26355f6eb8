"""Milliseconds per step of every optimizer on an idle device; they take turns in one process.

``timing.json`` is a list with one measurement for each combination of images, batch size, width, layout, number of
images and machine. A new measurement replaces the old one under the same conditions, and has all of its optimizers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from benchmarks.harness import Spread, together
from experiments.files import write_json
from experiments.images import Images
from experiments.sobolev_cifar.arms import TENTHS, Config
from experiments.sobolev_cifar.record import Record
from experiments.sobolev_cifar.training import Job, Setup, Training

_BATCHES = 100  # of an epoch here: one refresh of the inverses, ten of the factors


def measured(arms: Sequence[Config], setup: Setup, images: Images, rounds: int = 3) -> dict[str, Any]:
    """Medians and quartiles over rounds of a hundred steps: times, and ratios to the first optimizer."""
    setup.prepare()
    subset = images.first(_BATCHES * setup.batch)
    trainings = {arm.name: Training(Job(images.name, TENTHS, arm, 0), setup, subset) for arm in arms}
    steps = {name: training.feed.steps for name, training in trainings.items()}
    calls = {name: training.steps for name, training in trainings.items()}
    race = together(calls, arms[0].name, rounds, torch.device(setup.device), warmup=2).each(steps)
    epoch = len(images.train.y) // setup.batch
    shape = {"batch": setup.batch, "width": setup.width, "layout": str(setup.layout), "limit": setup.part.limit}
    return {
        "dataset": images.name,
        "machine": setup.describe(),
        "commit": setup.commit,
        "setup": {**shape, "rounds": rounds},
        "ms_a_step": {name: _scaled(race.time(name), 1e3) for name in calls},
        f"over_{arms[0].name}": {name: _scaled(race.ratio(name, arms[0].name), 1.0) for name in calls},
        "seconds_an_epoch": {name: float(f"{race.time(name).median * epoch:.4g}") for name in calls},
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
        """The conditions of a saved run or measurement."""
        batch, width, layout, limit = (settings.get(key) for key in ("batch", "width", "layout", "limit"))
        return Conditions(dataset, batch, width, layout, limit, machine.get("device"))


@final
@dataclass(frozen=True)
class Timing:
    """All measurements of a file."""

    found: Mapping[Conditions, Mapping[str, Any]]

    @staticmethod
    def load(path: Path) -> Timing:
        """The measurements of a file; none if it does not exist."""
        every = json.loads(path.read_text()) if path.exists() else []
        return Timing({Conditions.of(one["dataset"], one["setup"], one["machine"]): one for one in every})

    def lost(self, dataset: str, setup: Setup, arms: Collection[str]) -> list[str]:
        """The optimizers that a new measurement of these ones would drop: times of two measurements are not mixed."""
        place = Conditions.of(dataset, setup.conditions(""), setup.describe())
        return [arm for arm in self.found.get(place, {}).get("seconds_an_epoch", {}) if arm not in arms]

    def with_measurement(self, new: Mapping[str, Any]) -> Timing:
        """A copy with one more, which replaces a measurement under the same conditions."""
        return Timing({**self.found, Conditions.of(new["dataset"], new["setup"], new["machine"]): new})

    def save(self, path: Path) -> None:
        """Write a list."""
        write_json(path, list(self.found.values()))

    def seconds(self, runs: Sequence[Record]) -> float | None:
        """Seconds per epoch of these runs of one optimizer on an idle device; None if not measured."""
        places = {Conditions.of(run.name.dataset, run.settings, run.machine) for run in runs}
        arms = {run.name.arm for run in runs}
        if len(places) != 1 or len(arms) != 1:
            return None
        found: float | None = self.found.get(places.pop(), {}).get("seconds_an_epoch", {}).get(arms.pop())
        return found


def _scaled(spread: Spread, unit: float) -> dict[str, float]:
    return {name: float(f"{value * unit:.4g}") for name, value in asdict(spread).items()}


def lines(found: Mapping[str, Any]) -> str:
    """Lines of text."""
    (ratio,) = (name for name in found if name.startswith("over_"))
    unit = ratio.removeprefix("over_")
    return "\n".join(
        f"{found['dataset']:10}{name:14}{time['median']:9.2f} ms a step{found[ratio][name]['median']:8.3f} × {unit}"
        for name, time in found["ms_a_step"].items()
    )
