"""Tuning by short runs on held-out images: first all candidates, then the best ones for longer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from experiments.cifar import Benchmark
from experiments.files import markdown_table, write_json
from experiments.sobolev_cifar.arms import Config, Schedule
from experiments.sobolev_cifar.record import Record, load_all, longest
from experiments.sobolev_cifar.scheduler import Place, Task, perform_all
from experiments.sobolev_cifar.training import Budget, Job, Setup

TUNING_SEED = 1000  # no reported run has it
_MATTERS = ("batch", "width", "limit")  # settings that a tuned rate depends on


@final
@dataclass(frozen=True)
class TuningKey:
    """What settings were tuned for: images, optimizer and schedule.

    >>> print(TuningKey("cifar10", "sgd", "fifths"))
    sgd on cifar10 with fifths
    """

    dataset: str
    arm: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.arm} on {self.dataset} with {self.schedule}"

    @staticmethod
    def of(record: Record) -> TuningKey:
        """The key of a run."""
        return TuningKey(record.name.dataset, record.name.arm, record.name.schedule)


@final
@dataclass(frozen=True)
class Choice:
    """The rounds of a search and its result, None until the last round. ``before``: searches with other options."""

    rounds: tuple[Mapping[str, Any], ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, float] | None = None
    before: tuple[Choice, ...] = ()

    @staticmethod
    def of(entry: Mapping[str, Any]) -> Choice:
        """From JSON."""
        before = tuple(Choice.of(one) for one in entry.get("before", ()))
        return Choice(tuple(entry["rounds"]), entry.get("conditions", {}), entry.get("chosen"), before)

    def entry(self) -> dict[str, Any]:
        """For JSON, without empty fields."""
        fields = {"conditions": self.conditions, "rounds": list(self.rounds), "chosen": self.chosen}
        entry: dict[str, Any] = {key: value for key, value in fields.items() if key == "rounds" or value}
        return {**entry, "before": [one.entry() for one in self.before]} if self.before else entry

    def archived(self) -> Choice:
        """An empty choice that remembers this one."""
        return Choice(before=(*self.before, replace(self, before=())))


@final
@dataclass(frozen=True)
class Choices:
    """All choices of a file."""

    entries: Mapping[TuningKey, Choice]

    @staticmethod
    def load(path: Path) -> Choices:
        """The choices of a file; empty if it does not exist."""
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        entries = {}
        for dataset, arms in content.items():
            for arm, schedules in arms.items():
                for schedule, entry in schedules.items():
                    if not isinstance(entry, Mapping) or "rounds" not in entry:
                        raise SystemExit(
                            f"{path} has settings of {arm} on {dataset} that were not found in rounds: move it away, "
                            "and run --tune again"
                        )
                    entries[TuningKey(dataset, arm, schedule)] = Choice.of(entry)
        return Choices(entries)

    def save(self, path: Path) -> None:
        """Write all choices."""
        content: dict[str, Any] = {}
        for key, choice in self.entries.items():
            content.setdefault(key.dataset, {}).setdefault(key.arm, {})[key.schedule] = choice.entry()
        write_json(path, content)

    def of(self, key: TuningKey) -> Choice:
        """The choice for a key, or an empty one."""
        return self.entries.get(key, Choice())

    def with_choice(self, key: TuningKey, choice: Choice) -> Choices:
        """A copy with this choice."""
        return Choices({**self.entries, key: choice})

    def chosen(self, key: TuningKey, setup: Setup) -> Mapping[str, float]:
        """The tuned settings; refused if there are none, or if they were tuned under other conditions."""
        choice, anew = self.of(key), f"--datasets {key.dataset} --schedules {key.schedule}"
        if choice.chosen is None:
            raise SystemExit(
                f"{key.arm} has not been tuned on {key.dataset} with the schedule {key.schedule}: run --tune "
                f"{anew} first, or leave it out of --arms"
            )
        was, now = choice.conditions, setup.conditions("")
        other = ", ".join(f"{key} {was[key]} and not {now[key]}" for key in _MATTERS if was[key] != now[key])
        if other:
            raise SystemExit(
                f"{key} was tuned with {other}: run --tune --anew {anew} with these options, or leave {key.arm} "
                "out of --arms"
            )
        return choice.chosen

    def better(self, dataset: str, arm: str, schedules: Sequence[str]) -> str | None:
        """The schedule with the higher accuracy on held-out images; None until all have been tuned."""
        found = {schedule: self.of(TuningKey(dataset, arm, schedule)) for schedule in schedules}
        if any(choice.chosen is None for choice in found.values()):
            return None
        return max(schedules, key=lambda schedule: float(_ranked(found[schedule].rounds[-1])[0]["accuracy"]))

    def current(self, records: Sequence[Record]) -> list[Record]:
        """One run per name. Runs with outdated settings count only until a run with the new choice is finished.

        Means must not mix settings: the first finished run with a new choice replaces all runs with the old one.
        """
        new = {TuningKey.of(record) for record in records if record.finished and self._made_with(record)}
        return longest(record for record in records if TuningKey.of(record) not in new or self._made_with(record))

    def table(self, titles: Mapping[str, str]) -> str:
        """A Markdown table: the numbers that were tuned, the best and the second best, with titles of optimizers."""
        head = ["images", "optimizer", "schedule", "chosen", "held-out accuracy, %", "second best"]
        rows = []
        for key, choice in self.entries.items():
            if choice.chosen is not None:
                tried = choice.rounds[0]["tried"]
                tuned = [name for name in choice.chosen if len({one[name] for one in tried}) > 1]
                cells = [key.dataset, titles[key.arm], key.schedule]
                for one in _ranked(choice.rounds[-1])[:2]:
                    numbers = ", ".join(f"{name.replace('_', ' ')} {one[name]:g}" for name in tuned)
                    cells += [numbers, "–" if one["accuracy"] is None else f"{100 * one['accuracy']:.1f}"]
                rows.append(cells + (7 - len(cells)) * ["–"])  # a search with one finalist
        return markdown_table([*head, "held-out accuracy, %"], rows)

    def _made_with(self, record: Record) -> bool:
        """Whether the run has the chosen settings."""
        return self.of(TuningKey.of(record)).chosen == record.settings["arm"]


@final
@dataclass(frozen=True)
class Round:
    """How many of the best candidates of the previous round run for how many epochs; None: all candidates."""

    epochs: int
    candidates: int | None = None


@final
@dataclass(frozen=True)
class Search:
    """A search for the best settings of an optimizer, on images with this digest and with this schedule."""

    what: Benchmark
    images: str
    schedule: Schedule
    name: str
    grid: Sequence[Config]

    @property
    def key(self) -> TuningKey:
        """The key of its result."""
        return TuningKey(self.what.name, self.name, self.schedule.name)

    def edges(self, best: Mapping[str, float]) -> str:
        """Names the numbers that are at the edge of the grid; empty if none is."""
        edges = []
        for key, value in best.items():
            tried = {arm.numbers()[key] for arm in self.grid}
            ends = {max(tried): "largest", min(tried): "smallest"}
            if len(tried) > 1 and value in ends:
                edges.append(f"{key} {value:g} is the {ends[value]}")
        return " and ".join(edges)


@final
@dataclass(frozen=True)
class Tuning:
    """The rounds, schedules and setup of a search; results are written to ``path`` after every round."""

    rounds: Sequence[Round]
    schedules: Sequence[Schedule]
    setup: Setup
    place: Place
    path: Path

    def tune(self, grids: Mapping[str, Sequence[Config]], benchmarks: Sequence[Benchmark], budget: Budget) -> None:
        """Tune every kind of optimizer on every benchmark with every schedule; a round runs all trials at once.

        Finished rounds are not repeated. Results that were found under other conditions are refused before the start.
        A trial that fails ends its search, and no other one.
        """
        searches, choices = self._searches(grids, benchmarks), Choices.load(self.path)
        for search in searches:
            other = self._other(search, choices.of(search.key))
            if other:
                raise SystemExit(
                    f"{self.path} has settings of {search.key} that were found with {other}: run --tune --anew, "
                    "which keeps them in the file, or move it away, or tune as before"
                )
        failed = [text for number in range(len(self.rounds)) for text in self._round(number, searches, budget)]
        if failed:
            raise SystemExit("\n".join(failed))

    def set_aside(self, grids: Mapping[str, Sequence[Config]], benchmarks: Sequence[Benchmark]) -> None:
        """Archive results that were found under other conditions, so that they can be tuned again."""
        choices = Choices.load(self.path)
        for search in self._searches(grids, benchmarks):
            choice = choices.of(search.key)
            other = self._other(search, choice)
            if other:
                print(f"{search.key} is tuned anew: {choice.chosen} was found with {other}")
                choices = choices.with_choice(search.key, choice.archived())
                choices.save(self.path)

    def _searches(self, grids: Mapping[str, Sequence[Config]], benchmarks: Sequence[Benchmark]) -> list[Search]:
        # Decode once, before several processes need the images.
        images = {what: self.place.images(what, self.setup).digest for what in benchmarks}
        return [
            Search(what, digest, schedule, name, arms)
            for what, digest in images.items()
            for schedule in self.schedules
            for name, arms in grids.items()
        ]

    def _round(self, number: int, searches: Sequence[Search], budget: Budget) -> list[str]:
        """Run a round and write what is complete; the failures are returned."""
        choices, tasks = Choices.load(self.path), {}
        for search in searches:
            choice = choices.of(search.key)
            if len(choice.rounds) == number:
                tasks[search.key] = self._tasks(number, search, choice)
        images = {search.what: search.images for search in searches}
        left = [task for trials in tasks.values() for task in trials if _done(task, images[task.what]) is None]
        failed = []
        try:
            perform_all(left, self.setup.pace.workers, budget)
        except SystemExit as failure:
            failed.append(f"{failure}")
        for search in (one for one in searches if one.key in tasks):
            trials = tasks[search.key]
            records = [record for task in trials if (record := _done(task, search.images)) is not None]
            if len(records) < len(trials):
                print(f"{search.key}: {len(records)} of {len(trials)} trials are done, run --tune again")
                continue
            self._write(number, search, [_result(record) for record in records])
        return failed

    def _write(self, number: int, search: Search, tried: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished round and, after the last one, the choice."""
        choices, epochs, last = Choices.load(self.path), self.rounds[number].epochs, number == len(self.rounds) - 1
        choice, done = choices.of(search.key), {"epochs": epochs, "tried": list(tried)}
        best = {key: _ranked(done)[0][key] for key in search.grid[0].numbers()}
        new = replace(
            choice,
            rounds=(*choice.rounds, done),
            conditions=self.setup.conditions(search.images),
            chosen=best if last else None,
        )
        choices.with_choice(search.key, new).save(self.path)
        print(f"{search.key}: {best} after {epochs} epochs")
        edges = search.edges(best)
        if last and edges:
            print(f"{search.key}: {edges} that was tried, the best may lie beyond")

    def _other(self, search: Search, choice: Choice) -> str:
        """The conditions (images, networks, candidates, rounds) that have changed since; empty if none has."""
        if not choice.rounds:
            return ""
        was, now = dict(choice.conditions), self.setup.conditions(search.images)
        names = list(search.grid[0].numbers())
        was["candidates"] = sorted(tuple(one[name] for name in names) for one in choice.rounds[0]["tried"])
        now["candidates"] = sorted(tuple(arm.numbers().values()) for arm in search.grid)
        done = [(one["epochs"], len(one["tried"])) for one in choice.rounds]
        # The first round has all candidates; later ones the best, at most as many as before.
        before = [n for _, n in (done[:1] + done)[: len(done)]]
        most = [None, *(one.candidates for one in self.rounds[1:])][: len(done)]
        was["rounds (epochs, trials)"] = done
        now["rounds (epochs, trials)"] = [
            (one.epochs, n if best is None else min(best, n))
            for one, n, best in zip(self.rounds, before, most, strict=False)
        ]
        return ", ".join(f"{key} {was[key]} and not {now[key]}" for key in now if was[key] != now[key])

    def _tasks(self, number: int, search: Search, choice: Choice) -> list[Task]:
        """The trials of a round; every candidate has its own folder."""
        setup, out = replace(self.setup, epochs=self.rounds[number].epochs), self.place.out / f"round{number}"
        arms = search.grid
        if number > 0:
            best = _ranked(choice.rounds[-1])[: self.rounds[number].candidates]
            arms = [arm for arm in arms if any(all(one[k] == v for k, v in arm.numbers().items()) for one in best)]
        names = ["-".join(f"{value:g}" for value in arm.numbers().values()) for arm in arms]
        return [
            Task(
                Job(search.what.name, search.schedule, arm, TUNING_SEED),
                setup,
                search.what,
                replace(self.place, out=out / name),
            )
            for arm, name in zip(arms, names, strict=True)
        ]


def _done(task: Task, images: str) -> Record | None:
    """The record of a finished trial with the same settings on the same images."""
    finished = {record.name.key: record for record in load_all([task.place.out]) if record.finished}
    record = finished.get(task.job.key)
    return record if record is not None and record.made_with(task.setup.settings(task.job, images)) else None


def _result(record: Record) -> dict[str, Any]:
    """The settings of a trial and its accuracy on the held-out images; None if it diverged."""
    last = record.history[-1]
    accuracy, loss = (None, None) if record.diverged else (last.test_accuracy, last.train_loss)
    return {**record.settings["arm"], "accuracy": accuracy, "train_loss": loss}


def _ranked(done: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of a round, the best first."""
    return sorted(done["tried"], key=lambda one: -1.0 if one["accuracy"] is None else one["accuracy"], reverse=True)
