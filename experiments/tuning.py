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
from experiments.record import Record, load_all
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
        for number in range(len(self.rounds)):
            self._round(number, grids, benchmarks, budget)

    def _round(
        self, number: int, grids: Mapping[str, Sequence[Arm]], benchmarks: Sequence[Benchmark], budget: Budget
    ) -> None:
        found = self._found()
        wanted = {
            (what, name): self._candidates(number, arms, found.get(what.name, {}).get(name, {}))
            for what in benchmarks
            for name, arms in grids.items()
            if len(found.get(what.name, {}).get(name, {}).get("rounds", ())) == number
        }
        for what in dict.fromkeys(what for what, _ in wanted):
            self.place.images(what)  # decoded once, before several processes want them
        tasks = {key: self._tasks(number, key[0], arms) for key, arms in wanted.items()}
        perform_all([t for own in tasks.values() for t in own if _done(t) is None], self.setup.workers, budget)
        for (what, name), own in tasks.items():
            mine = [record for record in map(_done, own) if record is not None]
            if len(mine) < len(own):
                print(f"{name} on {what.name}: {len(mine)} of {len(own)} trials are done, run --tune again")
                continue
            entry = found.setdefault(what.name, {}).setdefault(name, {"schedule": self.schedule.name, "rounds": []})
            tried = [_result(record) for record in mine]
            entry["rounds"].append({"epochs": self.rounds[number].epochs, "tried": tried})
            best = {key: _ranked(entry["rounds"][-1])[0][key] for key in mine[0].settings["arm"]}
            if number == len(self.rounds) - 1:
                entry["chosen"] = best
            write_json(self.path, found)
            print(f"{name} on {what.name}: {best} after {self.rounds[number].epochs} epochs")

    def _found(self) -> dict[str, Any]:
        """What is in the file; refused, before anything runs, where it was found in another way."""
        found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        for name, entry in (pair for arms in found.values() for pair in arms.items()):
            if entry.get("schedule") != self.schedule.name or "rounds" not in entry:
                raise SystemExit(
                    f"{self.path} has settings of {name} that were found with the schedule {entry.get('schedule')}, or "
                    f"without rounds, and not with {self.schedule.name}: move it away, or give that schedule first"
                )
        return found

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


def _done(task: Task) -> Record | None:
    """The record of a trial that was run to its end with the same settings."""
    known = {record.name.key: record for record in load_all([task.place.out]) if record.finished}
    record = known.get(task.job.key)
    return record if record is not None and record.settings == task.setup.settings(task.job) else None


def _result(record: Record) -> dict[str, Any]:
    """Its settings, and how many of the images that were held out it recognises; none if it diverged."""
    last = record.history[-1]
    accuracy, loss = (None, None) if record.diverged else (last.test_accuracy, last.train_loss)
    return {**record.settings["arm"], "accuracy": accuracy, "train_loss": loss}


def _ranked(done: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of a round, the best first."""
    return sorted(done["tried"], key=lambda one: -1.0 if one["accuracy"] is None else one["accuracy"], reverse=True)
