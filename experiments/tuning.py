"""The choice of settings by short runs on images that are held out: all candidates, then the best ones for longer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from experiments.arms import Arm, Schedule
from experiments.cifar import Benchmark
from experiments.files import write_json
from experiments.jobs import Place, Task, perform_all
from experiments.record import Record
from experiments.training import Budget, Job, Setup

TUNING_SEED = 1000  # which no run that is reported has


@final
@dataclass(frozen=True)
class Round:
    """So many candidates, the best of the round before it, and how long they run. None: all there are."""

    epochs: int
    candidates: int | None = None


@final
@dataclass(frozen=True)
class Tuning:
    """The rounds, on the images and with the schedule that they have; what is found is written to ``path`` at once."""

    rounds: Sequence[Round]
    schedule: Schedule
    setup: Setup
    place: Place
    path: Path

    def tune(self, grids: Mapping[str, Sequence[Arm]], benchmarks: Sequence[Benchmark], budget: Budget) -> None:
        """Every kind of arm on every benchmark, all of a round at once; rounds that are done stay as they are."""
        for what in benchmarks:
            self.place.images(what)  # decoded once, before several processes want them
        for number in range(len(self.rounds)):
            self._round(number, grids, benchmarks, budget)

    def _round(
        self, number: int, grids: Mapping[str, Sequence[Arm]], benchmarks: Sequence[Benchmark], budget: Budget
    ) -> None:
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        wanted = {
            (what, name): self._candidates(number, arms, found.get(what.name, {}).get(name, {}))
            for what in benchmarks
            for name, arms in grids.items()
            if len(found.get(what.name, {}).get(name, {}).get("rounds", ())) == number
        }
        records = perform_all(
            [task for (what, _), arms in wanted.items() for task in self._tasks(number, what, arms)],
            self.setup.workers,
            budget,
        )
        for (what, name), arms in wanted.items():
            mine = [r for r in records if (r.name.dataset, r.name.arm) == (what.name, name) and r.finished]
            if len(mine) < len(arms):
                print(f"{name} on {what.name}: {len(mine)} of {len(arms)} trials are done, run --tune again")
                continue
            entry = found.setdefault(what.name, {}).setdefault(name, {"schedule": self.schedule.name, "rounds": []})
            entry["rounds"].append(
                {"epochs": self.rounds[number].epochs, "tried": [_result(record) for record in mine]}
            )
            entry["chosen"] = {key: _ranked(entry["rounds"][-1])[0][key] for key in arms[0].numbers()}
            write_json(self.path, found)
            print(f"{name} on {what.name}: {entry['chosen']} after {self.rounds[number].epochs} epochs")

    def _candidates(self, number: int, arms: Sequence[Arm], entry: Mapping[str, Any]) -> Sequence[Arm]:
        if number == 0:
            return arms
        best = _ranked(entry["rounds"][-1])[: self.rounds[number].candidates]
        return [arm for arm in arms if any(all(one[k] == v for k, v in arm.numbers().items()) for one in best)]

    def _tasks(self, number: int, what: Benchmark, arms: Sequence[Arm]) -> list[Task]:
        """Each in a folder of its own."""
        setup, out = replace(self.setup, epochs=self.rounds[number].epochs), self.place.out / f"round{number}"
        names = ["-".join(f"{value:g}" for value in arm.numbers().values()) for arm in arms]
        return [
            Task(Job(what.name, self.schedule, arm, TUNING_SEED), setup, what, replace(self.place, out=out / name))
            for arm, name in zip(arms, names, strict=True)
        ]


def _result(record: Record) -> dict[str, Any]:
    """Its settings, and how many of the images that were held out it recognises; none if it diverged."""
    last = record.history[-1]
    accuracy, loss = (None, None) if record.diverged else (last.test_accuracy, last.train_loss)
    return {**record.settings["arm"], "accuracy": accuracy, "train_loss": loss}


def _ranked(done: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of a round, the best first."""
    return sorted(done["tried"], key=lambda one: -1.0 if one["accuracy"] is None else one["accuracy"], reverse=True)
