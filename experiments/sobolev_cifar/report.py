"""Means and standard deviations of the runs over seeds, as JSON, tables and figures."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from experiments.files import write_json
from experiments.sobolev_cifar.arms import ARMS
from experiments.sobolev_cifar.record import Point, Record
from experiments.sobolev_cifar.timing import Timing

TITLES = {name: arm.title for name, arm in ARMS.items()}
ORDER = tuple(TITLES)
# The schedule of each in figures 1 and 2 of Bai, Rosenberg and Xu (2022).
PAPER = {"amari": "tenths", "sobolev": "fifths", "independent": "fifths", "literal": "fifths"}


def before_decay(epochs: int) -> int:
    """The last epoch, counted from 0, before the paper's schedules first decay, at 40 % of the epochs.

    >>> before_decay(50)
    19
    """
    return max(0, round(0.4 * epochs) - 1)


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

    def row(self) -> str:
        """A row of the table."""
        name = f"| {self.dataset} | {self.schedule} | {TITLES[self.arm]} | {len(self.records)}"
        if not self.records:
            return f"{name} (all {self.diverged} diverged) | – | – | – | – | – |"
        name += f" ({self.diverged} diverged)" if self.diverged else ""
        loss, accuracy = self.loss, self.accuracy
        early = before_decay(len(loss.mean))
        best = [100 * max(point.test_accuracy for point in record.history) for record in self.records]
        cells = [
            loss.after(early, 3),
            loss.after(-1, 4),
            accuracy.after(-1, 2),
            f"{statistics.fmean(best):.2f}",
            "–" if self.alone is None else f"{self.alone:.2f}",
        ]
        return f"{name} | " + " | ".join(cells) + " |"


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
    head = (
        "| images | schedule | optimizer | seeds | training loss at 40 % | at the end | test accuracy, % | best, % | "
        "s an epoch (alone) |"
    )
    return "\n".join([head, "|" + " --- |" * 9, *(group.row() for group in found)])


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


# Training loss and test accuracy against epochs and seconds, as figures.


# The arms of the figures of one schedule, and curves of the paper's figures: 1 and 2, 3 and 4.
_SHOWN = ("amari", "sobolev", "independent", "permuted", "sgd", "adamw", "natural")
_PAPER_FIGURES = {
    "paper": (("amari", "tenths"), ("sobolev", "fifths"), ("literal", "fifths")),
    "baselines": (("amari", "tenths"), ("amari", "fifths"), ("amari_scaled", "tenths"), ("amari_scaled", "fifths")),
}


def draw(found: Sequence[Group], results: Path) -> list[Path]:
    """Means with one standard deviation, and every seed: a figure per schedule, and those of the paper."""
    paths = []
    for dataset in dict.fromkeys(group.dataset for group in found):
        mine = [group for group in found if group.dataset == dataset and group.records]
        pictures = {
            schedule: [group for group in mine if group.schedule == schedule and group.arm in _SHOWN]
            for schedule in dict.fromkeys(group.schedule for group in mine)
        }
        for name, curves in _PAPER_FIGURES.items():
            shown = [group for group in mine if (group.arm, group.schedule) in curves]
            if len({group.schedule for group in shown}) == 2:
                pictures[name] = shown
        for name, shown in pictures.items():
            if shown:
                paths.append(results / f"{dataset}-{name}.svg")
                _picture(shown, f"VGG16 on {dataset}: {name}", paths[-1], seconds=name not in _PAPER_FIGURES)
    return paths


def _colour(arm: str) -> str:
    """Of an optimizer, the same in all figures."""
    extra = ("black", "grey", "gold", "navy", "teal")  # matplotlib has ten of its own
    at = ORDER.index(arm)
    return f"C{at}" if at < 10 else extra[at - 10]


def _picture(found: Sequence[Group], title: str, path: Path, *, seconds: bool) -> None:
    """Loss and accuracy against epochs and, with ``seconds``, against time; the seeds are thin.

    Time is that of a run alone, and optimizers without a measurement of it are left out there; time on a shared device
    only if none has one.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 if seconds else 6, 7), layout="constrained")
    axes = figure.subplots(2, 2 if seconds else 1, sharex="col", sharey="row", squeeze=False)
    clocks = [group.seconds for group in found]
    mixed = len({group.schedule for group in found}) > 1
    alone = any(clock is not None for clock in clocks)  # a figure has one kind of seconds
    quantities: list[Callable[[Point], float]] = [lambda p: p.train_loss, lambda p: 100 * p.test_accuracy]
    for group, clock in zip(found, clocks, strict=True):
        epochs = [float(epoch + 1) for epoch in range(len(group.loss.mean))]
        look: dict[str, Any] = {
            "color": _colour(group.arm),
            "linestyle": "--" if mixed and group.schedule == "tenths" else "-",
        }
        label = f"{TITLES[group.arm]}, {group.schedule} ({len(group.records)})"
        for row, (curve, of) in enumerate(zip((group.loss, group.accuracy), quantities, strict=True)):
            for run in group.records:
                axes[row][0].plot(epochs, [of(p) for p in run.history[: len(epochs)]], linewidth=0.4, alpha=0.6, **look)
            xs = (epochs, clock if alone else group.shared.mean) if seconds else (epochs,)
            for axis, x in [(axis, x) for axis, x in zip(axes[row], xs, strict=True) if x is not None]:
                low = [m - d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                high = [m + d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                axis.plot(x, curve.mean, label=label, **look)
                axis.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
    axes[1][0].set_xlabel("epochs")
    if seconds:
        axes[1][1].set_xlabel("seconds, one run on the device" if alone else "seconds, several runs on the device")
    axes[0][0].set_yscale("log")
    axes[0][0].set_ylabel("training loss")
    axes[1][0].set_ylabel("test accuracy, %")
    end = max(group.accuracy.mean[-1] for group in found)
    axes[1][0].set_ylim(max(0.0, end - 30), min(100.0, end + 2))
    axes[0][0].legend(fontsize="small", title="mean ± deviation (seeds)")
    figure.suptitle(title)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "natgrad"}):  # equal figures are equal files
        figure.savefig(text, format="svg", metadata={"Date": None})
    path.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", text.getvalue()))  # hundredths of a point are seen by nobody
