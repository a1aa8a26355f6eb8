"""The record of a run, in a file that is written after every epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, final

from experiments.files import write_json


@final
@dataclass(frozen=True)
class Point:
    """An epoch: the mean training loss during it, test loss and accuracy after it, and seconds of training so far.

    ``seconds`` exclude evaluation and files; ``workers`` runs shared the GPU.
    """

    epoch: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    seconds: float
    workers: int

    @property
    def finite(self) -> bool:
        """Whether the losses are finite."""
        return math.isfinite(self.train_loss) and math.isfinite(self.test_loss)


@final
@dataclass(frozen=True)
class Name:
    """The name of a run.

    >>> Name("cifar10", "tenths", "sobolev", 0).key
    'cifar10-tenths-sobolev-0'
    """

    dataset: str
    schedule: str
    arm: str
    seed: int

    @property
    def key(self) -> str:
        """The name of its files."""
        return f"{self.dataset}-{self.schedule}-{self.arm}-{self.seed}"


@final
@dataclass(frozen=True)
class Record:
    """One run: its name, settings, machine and curve, whether it is finished, and the commits that it was made with.

    The first runs do not name their commits. What their optimizers were is in their settings all the same.
    """

    name: Name
    settings: dict[str, Any]
    machine: dict[str, Any]
    history: list[Point]
    finished: bool
    diverged: bool
    commits: list[str] = field(default_factory=list)

    @property
    def early(self) -> list[Point]:
        """The epochs before the paper's schedules first decay, at 40 %; the first epoch is always one of them."""
        return self.history[: max(1, round(0.4 * len(self.history)))]

    @property
    def late(self) -> list[Point]:
        """The epochs after these; the last epoch is always one of them."""
        return self.history[len(self.early) :] or self.history[-1:]

    def made_with(self, settings: Mapping[str, Any]) -> bool:
        """Whether these are its settings.

        Old records have no limit, precision or digest of images: they are of all images, in the precision of their
        machine, and the digest is not compared.
        """
        defaults = {"limit": None, "held_out": 0, "precision": self.machine.get("matmul")}
        return {**defaults, "images": settings.get("images"), **self.settings} == settings

    def save(self, path: Path) -> None:
        """As JSON, one line per column of the curve; NaN is null."""
        write_json(path, self.columns())

    def columns(self) -> dict[str, Any]:
        """The curve by quantity, with six digits."""
        points = [asdict(point) for point in self.history]
        history = {one.name: [_rounded(point[one.name]) for point in points] for one in fields(Point)}
        rest = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}
        return {**asdict(self.name), **rest, "history": history}

    @staticmethod
    def of(columns: dict[str, Any]) -> Record:
        """The inverse of ``columns``."""
        names = [one.name for one in fields(Point)]
        rows = zip(*(columns["history"][name] for name in names), strict=True)
        values: list[list[Any]] = [[math.nan if value is None else value for value in row] for row in rows]
        rest = {**columns, "history": [Point(*row) for row in values]}
        name = Name(**{one.name: rest.pop(one.name) for one in fields(Name)})
        return Record(name, **rest)

    @staticmethod
    def load(path: Path) -> Record:
        """Read a saved record."""
        return Record.of(json.loads(path.read_text()))


def _rounded(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def load_each(folders: Iterable[Path]) -> list[Record]:
    """All runs of ``runs.json`` and of ``runs/*.json`` in some folders, folder by folder."""
    records: list[Record] = []
    for folder in folders:
        path = folder / "runs.json"
        records += [Record.of(columns) for columns in json.loads(path.read_text())] if path.exists() else []
        records += [Record.load(path) for path in sorted((folder / "runs").glob("*.json"))]
    return records


def longest(records: Iterable[Record]) -> list[Record]:
    """One record per name, sorted: the longest, and of equally long ones the last."""
    best: dict[str, Record] = {}
    for record in records:
        other = best.get(record.name.key)
        if other is None or (record.finished, len(record.history)) >= (other.finished, len(other.history)):
            best[record.name.key] = record
    return [best[key] for key in sorted(best)]


def load_all(folders: Iterable[Path]) -> list[Record]:
    """One run per name in some folders."""
    return longest(load_each(folders))
