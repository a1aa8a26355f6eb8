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
from experiments.images import Part
from experiments.jobs import Place, Task, perform_all
from experiments.record import Record, load_all
from experiments.training import Budget, Job, Setup

TUNING_SEED = 1000  # which no run that is reported has
_MATTERS = ("batch", "width", "limit")  # to a rate that was chosen


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
        # Decoded once, before several processes want them.
        images = {what: self.place.images(what, self.setup).digest for what in benchmarks}
        for number in range(len(self.rounds)):
            self._round(number, grids, images, budget)

    def _round(
        self, number: int, grids: Mapping[str, Sequence[Arm]], images: Mapping[Benchmark, str], budget: Budget
    ) -> None:
        found = self._found(grids, images)
        wanted = {
            (what, name): self._candidates(number, arms, found.get(what.name, {}).get(name, {}))
            for what in images
            for name, arms in grids.items()
            if len(found.get(what.name, {}).get(name, {}).get("rounds", ())) == number
        }
        tasks = {key: self._tasks(number, key[0], arms) for key, arms in wanted.items()}
        left = [t for own in tasks.values() for t in own if _done(t, images[t.what]) is None]
        perform_all(left, self.setup.pace.workers, budget)
        for (what, name), own in tasks.items():
            mine = [record for task in own if (record := _done(task, images[what])) is not None]
            if len(mine) < len(own):
                print(f"{name} on {what.name}: {len(mine)} of {len(own)} trials are done, run --tune again")
                continue
            new = {"schedule": self.schedule.name, "conditions": self.setup.conditions(images[what]), "rounds": []}
            entry = found.setdefault(what.name, {}).setdefault(name, new)
            tried = [_result(record) for record in mine]
            entry["rounds"].append({"epochs": self.rounds[number].epochs, "tried": tried})
            best = {key: _ranked(entry["rounds"][-1])[0][key] for key in mine[0].settings["arm"]}
            if number == len(self.rounds) - 1:
                entry["chosen"] = best
            write_json(self.path, found)
            print(f"{name} on {what.name}: {best} after {self.rounds[number].epochs} epochs")

    def _found(self, grids: Mapping[str, Sequence[Arm]], images: Mapping[Benchmark, str]) -> dict[str, Any]:
        """What is in the file; refused, before anything runs, where it was found in another way."""
        found = _read(self.path)
        for name, entry in (pair for arms in found.values() for pair in arms.items()):
            if entry.get("schedule") != self.schedule.name or "rounds" not in entry:
                raise SystemExit(
                    f"{self.path} has settings of {name} that were found with the schedule {entry.get('schedule')}, or "
                    f"without rounds, and not with {self.schedule.name}: move it away, or give that schedule first"
                )
        for what, digest in images.items():
            for name, entry in found.get(what.name, {}).items():
                if name in grids:
                    self._same(f"{name} on {what.name}", entry, digest)
        return found

    def _same(self, title: str, entry: Mapping[str, Any], images: str) -> None:
        """Refuse what was found on other images, with other networks or in other rounds."""
        was, now = _conditions(entry, images), self.setup.conditions(images)
        done = [(one["epochs"], len(one["tried"])) for one in entry["rounds"]]
        # All candidates in the first round, however many there are; then the best, no more than there were before.
        before = [n for _, n in (done[:1] + done)[: len(done)]]
        most = [None, *(one.candidates for one in self.rounds[1:])][: len(done)]
        now["rounds (epochs, trials)"] = [
            (one.epochs, n if best is None else min(best, n))
            for one, n, best in zip(self.rounds[: len(done)], before, most, strict=True)
        ]
        was["rounds (epochs, trials)"] = done
        if was != now:
            other = ", ".join(f"{key} {was[key]} and not {now[key]}" for key in now if was[key] != now[key])
            raise SystemExit(
                f"{self.path} has settings of {title} that were found with {other}: move it away, or tune as before"
            )

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


def chosen(path: Path, what: Benchmark, name: str, setup: Setup) -> dict[str, float]:
    """The settings that were found for such runs; refused where those were others, or nothing was found."""
    entry = _read(path).get(what.name, {}).get(name, {})
    if "chosen" not in entry:
        raise SystemExit(f"{name} has not been tuned on {what.name}: run --tune first, or leave it out of --arms")
    was, now = _conditions(entry, ""), setup.conditions("")
    other = ", ".join(f"{key} {was[key]} and not {now[key]}" for key in _MATTERS if was[key] != now[key])
    if other:
        raise SystemExit(
            f"{name} was tuned on {what.name} with {other}: move {path} away and --tune again, or leave {name} out of "
            "--arms"
        )
    found: dict[str, float] = entry["chosen"]
    return found


def _read(path: Path) -> dict[str, Any]:
    """By images and optimizer; nothing where there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _conditions(entry: Mapping[str, Any], images: str) -> dict[str, Any]:
    """Of a choice. One from before they were written down is that of the command without options, on a GPU."""
    before = Setup(device="cuda", part=Part(held_out=5000)).conditions(images)
    return {**before, **entry.get("conditions", {})}


def _done(task: Task, images: str) -> Record | None:
    """The record of a trial that was run to its end with the same settings on the same images."""
    known = {record.name.key: record for record in load_all([task.place.out]) if record.finished}
    record = known.get(task.job.key)
    return record if record is not None and record.made_with(task.setup.settings(task.job, images)) else None


def _result(record: Record) -> dict[str, Any]:
    """Its settings, and how many of the images that were held out it recognises; none if it diverged."""
    last = record.history[-1]
    accuracy, loss = (None, None) if record.diverged else (last.test_accuracy, last.train_loss)
    return {**record.settings["arm"], "accuracy": accuracy, "train_loss": loss}


def _ranked(done: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of a round, the best first."""
    return sorted(done["tried"], key=lambda one: -1.0 if one["accuracy"] is None else one["accuracy"], reverse=True)
