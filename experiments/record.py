"""What a run has shown so far, in a file that is written after every epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from experiments.files import write_json


@final
@dataclass(frozen=True)
class Point:
    """After an epoch: the mean training loss during it, what the test images say, and seconds of training until here.

    ``seconds`` do not count evaluation and files. They are those of a GPU that ``workers`` runs shared.
    """

    epoch: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    seconds: float
    workers: int

    @property
    def finite(self) -> bool:
        """Whether the losses are numbers."""
        return math.isfinite(self.train_loss) and math.isfinite(self.test_loss)


@final
@dataclass(frozen=True)
class Name:
    """Which run.

    >>> Name("cifar10", "tenths", "sobolev", 0).key
    'cifar10-tenths-sobolev-0'
    """

    dataset: str
    schedule: str
    arm: str
    seed: int

    @property
    def key(self) -> str:
        """That of its files."""
        return f"{self.dataset}-{self.schedule}-{self.arm}-{self.seed}"


@final
@dataclass(frozen=True)
class Record:
    """One run: which it is, with which settings, on what machine, its curve, and whether it is over."""

    name: Name
    settings: dict[str, Any]
    machine: dict[str, Any]
    history: list[Point]
    finished: bool
    diverged: bool

    def made_with(self, settings: Mapping[str, Any]) -> bool:
        """Whether these are its settings.

        Runs from before limits were written down are of all images, in the precision of their machine; which images
        they are of is not known.
        """
        known = {"limit": None, "held_out": 0, "precision": self.machine.get("matmul")}
        return {**known, "images": settings.get("images"), **self.settings} == settings

    def save(self, path: Path) -> None:
        """As JSON, a line a column of the curve; what is not a number is null."""
        write_json(path, self.columns())

    def columns(self) -> dict[str, Any]:
        """The curve by quantity, with six digits."""
        points = [asdict(point) for point in self.history]
        history = {field.name: [_rounded(point[field.name]) for point in points] for field in fields(Point)}
        rest = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}
        return {**asdict(self.name), **rest, "history": history}

    @staticmethod
    def of(columns: dict[str, Any]) -> Record:
        """From the columns."""
        names = [field.name for field in fields(Point)]
        rows = zip(*(columns["history"][name] for name in names), strict=True)
        values: list[list[Any]] = [[math.nan if value is None else value for value in row] for row in rows]
        rest = {**columns, "history": [Point(*row) for row in values]}
        name = Name(**{field.name: rest.pop(field.name) for field in fields(Name)})
        return Record(name, **rest)

    @staticmethod
    def load(path: Path) -> Record:
        """What was saved."""
        return Record.of(json.loads(path.read_text()))


def _rounded(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def load_each(folders: Iterable[Path]) -> list[Record]:
    """All runs of ``runs.json`` and of ``runs/*.json`` in some folders, folder by folder."""
    found: list[Record] = []
    for folder in folders:
        path = folder / "runs.json"
        found += [Record.of(columns) for columns in json.loads(path.read_text())] if path.exists() else []
        found += [Record.load(path) for path in sorted((folder / "runs").glob("*.json"))]
    return found


def longest(records: Iterable[Record]) -> list[Record]:
    """Of two of one name the longer, and of those the later; by name."""
    found: dict[str, Record] = {}
    for record in records:
        other = found.get(record.name.key)
        if other is None or (record.finished, len(record.history)) >= (other.finished, len(other.history)):
            found[record.name.key] = record
    return [found[key] for key in sorted(found)]


def load_all(folders: Iterable[Path]) -> list[Record]:
    """A run of each name in some folders."""
    return longest(load_each(folders))
