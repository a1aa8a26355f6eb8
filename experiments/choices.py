"""The settings that were chosen, by images, optimizer and schedule, in a file that keeps what was chosen before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from experiments.files import write_json
from experiments.record import Record, longest
from experiments.training import Setup

_MATTERS = ("batch", "width", "limit")  # to a rate that was chosen


@final
@dataclass(frozen=True)
class Whose:
    """Whose settings.

    >>> print(Whose("cifar10", "sgd", "fifths"))
    sgd on cifar10 with fifths
    """

    dataset: str
    arm: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.arm} on {self.dataset} with {self.schedule}"

    @staticmethod
    def of(record: Record) -> Whose:
        """Those that a run had."""
        return Whose(record.name.dataset, record.name.arm, record.name.schedule)


@final
@dataclass(frozen=True)
class Choice:
    """The rounds of a search and what came out: None before the last. ``before``: what was found in another way."""

    rounds: tuple[Mapping[str, Any], ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, float] | None = None
    before: tuple[Choice, ...] = ()

    @staticmethod
    def of(entry: Mapping[str, Any]) -> Choice:
        """From the file."""
        before = tuple(Choice.of(one) for one in entry.get("before", ()))
        return Choice(tuple(entry["rounds"]), entry.get("conditions", {}), entry.get("chosen"), before)

    def entry(self) -> dict[str, Any]:
        """For the file, without what is not known."""
        found = {"conditions": self.conditions, "rounds": list(self.rounds), "chosen": self.chosen}
        known = {key: value for key, value in found.items() if key == "rounds" or value}
        return {**known, "before": [one.entry() for one in self.before]} if self.before else known

    def aside(self) -> Choice:
        """A new search, which keeps this one."""
        return Choice(before=(*self.before, replace(self, before=())))


@final
@dataclass(frozen=True)
class Choices:
    """All that there are."""

    entries: Mapping[Whose, Choice]

    @staticmethod
    def load(path: Path) -> Choices:
        """What is in the file; nothing where there is none."""
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        entries = {}
        for dataset, arms in found.items():
            for arm, schedules in arms.items():
                for schedule, entry in schedules.items():
                    if not isinstance(entry, Mapping) or "rounds" not in entry:
                        raise SystemExit(
                            f"{path} has settings of {arm} on {dataset} that were not found in rounds: move it away, "
                            "and run --tune again"
                        )
                    entries[Whose(dataset, arm, schedule)] = Choice.of(entry)
        return Choices(entries)

    def save(self, path: Path) -> None:
        """All of them."""
        found: dict[str, Any] = {}
        for whose, choice in self.entries.items():
            found.setdefault(whose.dataset, {}).setdefault(whose.arm, {})[whose.schedule] = choice.entry()
        write_json(path, found)

    def of(self, whose: Whose) -> Choice:
        """That one, or one that has yet to be made."""
        return self.entries.get(whose, Choice())

    def beside(self, whose: Whose, choice: Choice) -> Choices:
        """All others, and this one."""
        return Choices({**self.entries, whose: choice})

    def chosen(self, whose: Whose, setup: Setup) -> Mapping[str, float]:
        """The settings that were found for such runs; refused where those were others, or nothing was found."""
        choice, anew = self.of(whose), f"--datasets {whose.dataset} --schedules {whose.schedule}"
        if choice.chosen is None:
            raise SystemExit(
                f"{whose.arm} has not been tuned on {whose.dataset} with the schedule {whose.schedule}: run --tune "
                f"{anew} first, or leave it out of --arms"
            )
        was, now = choice.conditions, setup.conditions("")
        other = ", ".join(f"{key} {was[key]} and not {now[key]}" for key in _MATTERS if was[key] != now[key])
        if other:
            raise SystemExit(
                f"{whose} was tuned with {other}: run --tune --anew {anew} with these options, or leave {whose.arm} "
                "out of --arms"
            )
        return choice.chosen

    def current(self, records: Sequence[Record]) -> list[Record]:
        """A run of each name, those with settings that are no longer chosen only while there is none of the choice.

        Means are over runs of one kind: the first run with a new choice that is finished replaces all with the old one.
        """
        new = {Whose.of(record) for record in records if record.finished and self._made_with(record)}
        return longest(record for record in records if Whose.of(record) not in new or self._made_with(record))

    def _made_with(self, record: Record) -> bool:
        """Whether it has the settings of the choice for such runs."""
        return self.of(Whose.of(record)).chosen == record.settings["arm"]
