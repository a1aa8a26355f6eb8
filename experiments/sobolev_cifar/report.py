"""Means and standard deviations of the runs over seeds, as JSON and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from experiments.files import markdown_table, write_json
from experiments.sobolev_cifar.arms import ARMS
from experiments.sobolev_cifar.record import Point, Record
from experiments.sobolev_cifar.timing import Timing

TITLES = {name: arm.title for name, arm in ARMS.items()}
ORDER = tuple(TITLES)
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
# The schedule of each in figures 1 and 2 of Bai, Rosenberg and Xu (2022).
PAPER = {"amari": "tenths", "sobolev": "fifths", "independent": "fifths", "literal": "fifths"}


@final
@dataclass(frozen=True)
class Curve:
    """A quantity after every epoch: mean and standard deviation (n − 1) over the seeds; 0 for a single seed."""

    mean: list[float]
    deviation: list[float]
    seeds: int

    @staticmethod
    def of(records: Sequence[Record], quantity: Callable[[Point], float]) -> Curve:
        """Over the seeds, for the epochs that all runs have."""
        columns = list(zip(*([quantity(point) for point in record.history] for record in records), strict=False))
        mean = [statistics.fmean(column) for column in columns]
        deviation = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
        return Curve(mean, deviation, len(records))

    def after(self, epoch: int, digits: int) -> str:
        """Mean ± deviation after an epoch, which counts from 0; one seed has no deviation.

        >>> Curve([0.25], [0.0], seeds=1).after(-1, 2), Curve([0.25], [0.125], seeds=2).after(-1, 3)
        ('0.25', '0.250 ± 0.125')
        """
        mean = f"{self.mean[epoch]:.{digits}f}"
        return mean if self.seeds < 2 else f"{mean} ± {self.deviation[epoch]:.{digits}f}"

    def columns(self) -> dict[str, list[float]]:
        """For JSON, with five digits."""
        return {name: [float(f"{v:.5g}") for v in getattr(self, name)] for name in ("mean", "deviation")}


@final
@dataclass(frozen=True)
class Group:
    """The finished runs of one optimizer with one schedule on one set of images.

    ``alone``: seconds per epoch on an idle device, from ``--time`` on the same images with the same batches, network
    and machine; None if it was not measured.
    """

    dataset: str
    schedule: str
    arm: str
    records: tuple[Record, ...]  # the runs that did not diverge
    diverged: int
    alone: float | None

    @property
    def loss(self) -> Curve:
        """The training loss."""
        return Curve.of(self.records, lambda point: point.train_loss)

    @property
    def accuracy(self) -> Curve:
        """The test accuracy in per cent."""
        return Curve.of(self.records, lambda point: 100 * point.test_accuracy)

    @property
    def shared(self) -> Curve:
        """Seconds, as measured on a shared device."""
        return Curve.of(self.records, lambda point: point.seconds)

    @property
    def seconds(self) -> list[float] | None:
        """Seconds after every epoch on an idle device, if measured: those of a shared device mean little."""
        if self.alone is None:
            return None
        return [self.alone * (epoch + 1) for epoch in range(len(self.loss.mean))]

    def columns(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seeds": [record.name.seed for record in self.records],
            "diverged": self.diverged,
            "settings": self.records[0].settings if self.records else {},
            "workers": sorted({point.workers for record in self.records for point in record.history}),
            "train_loss": self.loss.columns(),
            "test_accuracy": self.accuracy.columns(),
            "seconds_shared": self.shared.columns(),
            "seconds_an_epoch_alone": self.alone,
        }

    def row(self) -> list[str]:
        """A row of the table."""
        name, seeds = [self.dataset, self.schedule, TITLES[self.arm]], f"{len(self.records)}"
        if not self.records:
            return [*name, f"{seeds} (all {self.diverged} diverged)", *5 * ["–"]]
        seeds += f" ({self.diverged} diverged)" if self.diverged else ""
        loss, accuracy = self.loss, self.accuracy
        early = min(len(record.early) for record in self.records) - 1
        best = [100 * max(point.test_accuracy for point in record.history) for record in self.records]
        cells = [
            loss.after(early, 3),
            loss.after(-1, 4),
            accuracy.after(-1, 2),
            f"{statistics.fmean(best):.2f}",
            "–" if self.alone is None else f"{self.alone:.2f}",
        ]
        return [*name, seeds, *cells]


def groups(records: Sequence[Record], timing: Path) -> list[Group]:
    """All finished runs, by images, schedule and optimizer."""
    alone = Timing.load(timing)
    done = [record for record in records if record.finished]
    keys = {_group(record) for record in done}
    result = []
    for dataset, schedule, arm in sorted(
        keys, key=lambda key: (key[0], key[1] != "tenths", key[1], ORDER.index(key[2]))
    ):
        runs = [record for record in done if _group(record) == (dataset, schedule, arm)]
        finite = tuple(record for record in runs if not record.diverged)
        result.append(Group(dataset, schedule, arm, finite, len(runs) - len(finite), alone.seconds(runs)))
    return result


def _group(record: Record) -> tuple[str, str, str]:
    """The name without the seed."""
    return record.name.dataset, record.name.schedule, record.name.arm


def table(found: Sequence[Group]) -> str:
    """A Markdown table."""
    head = ["images", "schedule", "optimizer", "seeds", "training loss at 40 %", "at the end", "test accuracy, %"]
    return markdown_table([*head, "best, %", "s an epoch (alone)"], (group.row() for group in found))


def save_runs(records: Sequence[Record], results: Path) -> None:
    """``runs.json``: the curves of finished runs."""
    write_json(results / "runs.json", [record.columns() for record in records if record.finished])


def save(records: Sequence[Record], results: Path) -> list[Group]:
    """``runs.json``, ``summary.json`` and ``table.md``."""
    found = groups(records, results / "timing.json")
    save_runs(records, results)
    summary: dict[str, Any] = {"machine": records[0].machine if records else {}}
    summary["commits"] = sorted({commit for record in records for commit in record.commits})
    for group in found:
        summary.setdefault(group.dataset, {}).setdefault(group.schedule, {})[group.arm] = group.columns()
    write_json(results / "summary.json", summary)
    (results / "table.md").write_text(table(found) + "\n")
    return found
