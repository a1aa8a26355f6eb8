"""Two optimizers seed by seed, and how soon each is where another ends.

A seed has the same first weights and the same batches for all optimizers, so differences are taken within a seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from scipy import stats

from experiments.files import write_json
from experiments.record import Record
from experiments.report import ORDER, PAPER, TITLES, Group, before_decay

# The first less the second, with one schedule.
_SAME = (
    ("sobolev", "amari"),
    ("independent", "amari"),
    ("sobolev", "independent"),
    ("sobolev_exact", "amari_exact"),
    ("amari", "sgd"),
    ("amari", "adamw"),
)
_RIVALS = ("amari", "sgd", "adamw")  # whose ends are to be reached


def two_sided(t: float, degrees: int) -> float:
    """P(|T| ≥ |t|) of Student's distribution.

    >>> round(two_sided(4.303, 2), 4), round(two_sided(12.706, 1), 4)
    (0.05, 0.05)
    """
    return float(2 * stats.t.sf(abs(t), degrees))


def critical(level: float, degrees: int) -> float:
    """The t that |T| exceeds with this probability.

    >>> round(critical(0.05, 2), 3)
    4.303
    """
    return float(stats.t.isf(level / 2, degrees))


@final
@dataclass(frozen=True)
class Paired:
    """Differences of two optimizers, one a seed.

    >>> found = Paired((1.0, 2.0, 3.0))
    >>> found.mean, found.deviation, round(found.t, 3), round(found.p, 4), round(found.margin, 3)
    (2.0, 1.0, 3.464, 0.0742, 2.484)
    """

    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.differences)

    @property
    def deviation(self) -> float:
        """With n − 1."""
        return statistics.stdev(self.differences)

    @property
    def error(self) -> float:
        """Of the mean: the deviation over √n."""
        return self.deviation / math.sqrt(len(self.differences))

    @property
    def t(self) -> float:
        """The mean over its error; infinite where all differences are one number that is not zero."""
        if self.error == 0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.error

    @property
    def p(self) -> float:
        """How often |t| would be as large if there were no difference; n − 1 degrees of freedom."""
        return two_sided(self.t, len(self.differences) - 1)

    @property
    def margin(self) -> float:
        """Mean ± margin has the true difference inside with probability 95 %."""
        return critical(0.05, len(self.differences) - 1) * self.error

    def columns(self) -> dict[str, Any]:
        """For the file; an infinite t is null."""
        numbers = {name: getattr(self, name) for name in ("mean", "deviation", "t", "p", "margin")}
        rounded = {name: float(f"{v:.5g}") if math.isfinite(v) else None for name, v in numbers.items()}
        return {"differences": [float(f"{d:.5g}") for d in self.differences], **rounded}


@final
@dataclass(frozen=True)
class Quantity:
    """A number of a run."""

    name: str
    title: str
    of: Callable[[Record], float]
    digits: int

    def cell(self, found: Paired) -> str:
        """Mean ± deviation, t and p."""
        mean = f"{found.mean:+.{self.digits}f}".replace("-", "−")
        t = f"{found.t:.1f}".replace("-", "−")
        return f"{mean} ± {found.deviation:.{self.digits}f} (t {t}, p {found.p:.2g})"


QUANTITIES = (
    Quantity(
        "loss_until_40",
        "training loss, mean of epochs to 40 %",
        lambda run: statistics.fmean(point.train_loss for point in run.history[: before_decay(len(run.history)) + 1]),
        4,
    ),
    Quantity("loss_at_40", "at 40 %", lambda run: run.history[before_decay(len(run.history))].train_loss, 4),
    Quantity("loss_at_end", "at the end", lambda run: run.history[-1].train_loss, 4),
    Quantity("test_accuracy", "test accuracy, %", lambda run: 100 * run.history[-1].test_accuracy, 2),
)


@final
@dataclass(frozen=True)
class Pair:
    """Two groups of runs with seeds in common."""

    first: Group
    second: Group

    @property
    def seeds(self) -> list[int]:
        """That ended with numbers in both."""
        ours = {run.name.seed for run in self.first.records}
        return sorted(ours & {run.name.seed for run in self.second.records})

    def paired(self, quantity: Quantity) -> Paired:
        """The first less the second."""
        one, other = ({run.name.seed: quantity.of(run) for run in group.records} for group in (self.first, self.second))
        return Paired(tuple(one[seed] - other[seed] for seed in self.seeds))

    def of_second(self, quantity: Quantity) -> float:
        """The mean of what is taken away, to know whether a difference is large."""
        runs = (run for run in self.second.records if run.name.seed in self.seeds)
        return float(f"{statistics.fmean(map(quantity.of, runs)):.5g}")

    def columns(self) -> dict[str, Any]:
        """For the file."""
        names = {"dataset": self.first.dataset, "first": [self.first.arm, self.first.schedule]}
        found = {q.name: {**self.paired(q).columns(), "of_second": self.of_second(q)} for q in QUANTITIES}
        return {**names, "second": [self.second.arm, self.second.schedule], "seeds": self.seeds, **found}

    def row(self) -> str:
        """Of the table."""
        one, other = self.first, self.second
        schedule = one.schedule if one.schedule == other.schedule else f"{one.schedule}, {other.schedule}"
        names = [one.dataset, schedule, TITLES[one.arm], TITLES[other.arm], str(len(self.seeds))]
        return f"| {' | '.join([*names, *(quantity.cell(self.paired(quantity)) for quantity in QUANTITIES)])} |"


def pairs(found: Sequence[Group]) -> list[Pair]:
    """All that have two seeds or more in common: those of one schedule, then as the paper has them."""
    known = {(group.dataset, group.schedule, group.arm): group for group in found}
    schedules = dict.fromkeys((dataset, schedule) for dataset, schedule, _ in known)
    keys = [((d, s, one), (d, s, other)) for d, s in schedules for one, other in _SAME]
    for d in dict.fromkeys(group.dataset for group in found):
        base = (d, PAPER["amari"], "amari")
        keys += [((d, schedule, arm), base) for arm, schedule in PAPER.items() if arm != "amari"]
    both = (Pair(known[one], known[other]) for one, other in keys if one in known and other in known)
    return [pair for pair in both if len(pair.seeds) > 1]


@final
@dataclass(frozen=True)
class Level:
    """What a rival ends with, in the mean over its seeds, and the first epoch in which each optimizer has it."""

    rival: Group
    title: str
    curve: Callable[[Group], Sequence[float]]  # the mean of a quantity that is to rise
    shown: Callable[[float], str]

    def epoch(self, group: Group) -> int | None:
        """1, 2, …; None: never."""
        end = self.curve(self.rival)[-1]
        return next((e + 1 for e, value in enumerate(self.curve(group)) if value >= end), None)

    def columns(self, found: Sequence[Group]) -> dict[str, Any]:
        """For the file: epochs, and seconds of a run."""
        epochs = {group.arm: self.epoch(group) for group in found}
        seconds = {group.arm: round(group.seconds[e - 1], 1) for group in found if (e := epochs[group.arm])}
        names = {"dataset": self.rival.dataset, "schedule": self.rival.schedule, "rival": self.rival.arm}
        return {**names, "quantity": self.title, "epochs": epochs, "seconds": seconds}

    def row(self, found: Sequence[Group], arms: Sequence[str]) -> str:
        """Of the table."""
        columns = self.columns(found)
        epochs, seconds = columns["epochs"], columns["seconds"]
        cells = [f"{epochs[arm]}, {seconds[arm]:.0f} s" if arm in seconds else "–" for arm in arms]
        end = f"{TITLES[self.rival.arm]}: {self.title} {self.shown(self.curve(self.rival)[-1])}"
        return f"| {self.rival.dataset} | {self.rival.schedule} | {end} | {' | '.join(cells)} |"


def levels(found: Sequence[Group]) -> list[Level]:
    """The last test accuracies and training losses of the rivals."""
    return [
        level
        for group in found
        if group.arm in _RIVALS and group.records
        for level in (
            Level(group, "test accuracy, %", lambda g: g.accuracy.mean, lambda end: f"{end:.2f}"),
            Level(group, "training loss", lambda g: [-loss for loss in g.loss.mean], lambda end: f"{-end:.4f}"),
        )
    ]


def table(found: Sequence[Group]) -> str:
    """Of the pairs, in Markdown."""
    head = ["images", "schedule", "optimizer", "less", "seeds", *(quantity.title for quantity in QUANTITIES)]
    return "\n".join([f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(pair.row() for pair in pairs(found))])


def reached(found: Sequence[Group]) -> str:
    """Of the levels, in Markdown: epochs and seconds."""
    arms = [arm for arm in ORDER if any(group.arm == arm for group in found)]
    head = ["images", "schedule", "the end of", *(TITLES[arm] for arm in arms)]
    rows = [level.row(_beside(level, found), arms) for level in levels(found)]
    return "\n".join([f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *rows])


def _beside(level: Level, found: Sequence[Group]) -> list[Group]:
    """On the same images with the same schedule."""
    place = level.rival.dataset, level.rival.schedule
    return [group for group in found if (group.dataset, group.schedule) == place and group.records]


def save(found: Sequence[Group], results: Path) -> None:
    """``pairs.json`` and the two tables, ``pairs.md`` and ``reached.md``."""
    reach = [level.columns(_beside(level, found)) for level in levels(found)]
    write_json(results / "pairs.json", {"pairs": [pair.columns() for pair in pairs(found)], "reached": reach})
    (results / "pairs.md").write_text(table(found) + "\n")
    (results / "reached.md").write_text(reached(found) + "\n")
