"""Paired statistics of two optimizers over seeds, and how soon each reaches the final level of another.

A seed has the same initial weights and the same batches for all optimizers, so that differences are taken within a
seed. Both schedules share them too, and agree until 40 % of the epochs: the two differences of a seed are not
independent. Where both schedules are combined, they are averaged and count once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, final

from scipy import stats

from experiments.files import markdown_table, write_json
from experiments.sobolev_cifar.plan import BOTH
from experiments.sobolev_cifar.record import Point, Record
from experiments.sobolev_cifar.report import PAPER, TITLES, Group

ACCURACY, LOSS = "test accuracy, %", "training loss"  # the levels that are to be reached
# Pairs (first, second) whose difference is taken.
_METRICS = (("sobolev", "amari"), ("independent", "amari"), ("sobolev", "independent"))
_SAME = (
    *_METRICS,
    ("sobolev", "permuted"),
    ("permuted", "amari"),
    ("sobolev", "equidistant"),
    ("equidistant", "amari"),
    ("literal", "amari_scaled"),
    ("literal", "sobolev"),
    ("amari_scaled", "amari"),
    ("sobolev_exact", "amari_exact"),
    ("sobolev_tuned", "amari_tuned"),
    ("amari", "sgd"),
    ("amari", "adamw"),
    ("amari", "natural"),
)
_VARIANTS = ("sobolev", "independent", "permuted", "equidistant", "literal")
_REACHING = ("amari", "sobolev", "independent", "permuted", "equidistant", "literal", "sgd", "adamw", "natural")
_RIVALS = ("amari", "sgd", "adamw")  # their final levels are to be reached


@final
@dataclass(frozen=True)
class Paired:
    """Differences of two optimizers, one per seed, with Student's t-test.

    >>> d = Paired((1.0, 2.0, 3.0))
    >>> d.mean, d.deviation, round(d.t, 3), round(d.p, 4), round(d.margin, 3)
    (2.0, 1.0, 3.464, 0.0742, 2.484)
    """

    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.differences)

    @property
    def deviation(self) -> float:
        """The standard deviation with n − 1."""
        return statistics.stdev(self.differences)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.deviation / math.sqrt(len(self.differences))

    @property
    def t(self) -> float:
        """The mean over its error; infinite where all differences are equal and not zero."""
        if self.error == 0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.error

    @property
    def p(self) -> float:
        """The two-sided p-value with n − 1 degrees of freedom."""
        return float(2 * stats.t.sf(abs(self.t), len(self.differences) - 1))

    @property
    def margin(self) -> float:
        """Half the width of the 95 % confidence interval."""
        return self._half_width(0.95)

    def interval(self, coverage: float = 0.95) -> tuple[float, float, float]:
        """The mean, and the ends of its confidence interval with this coverage."""
        half = self._half_width(coverage)
        return self.mean, self.mean - half, self.mean + half

    def _half_width(self, coverage: float) -> float:
        return float(stats.t.isf((1 - coverage) / 2, len(self.differences) - 1)) * self.error

    @property
    def sign_flip(self) -> float:
        """The two-sided p-value of the exact sign-flip test: no distribution is assumed.

        >>> Paired((1.0, 2.0, 3.0, 4.0)).sign_flip
        0.125
        """
        flips = list(product((1, -1), repeat=len(self.differences)))
        sums = [abs(sum(s * d for s, d in zip(signs, self.differences, strict=True))) for signs in flips]
        return sum(total >= sums[0] * (1 - 1e-12) for total in sums) / len(sums)

    def columns(self) -> dict[str, Any]:
        """For JSON; an infinite t is null."""
        numbers = {name: getattr(self, name) for name in ("mean", "deviation", "t", "p", "margin")}
        rounded = {name: float(f"{v:.5g}") if math.isfinite(v) else None for name, v in numbers.items()}
        return {"differences": [float(f"{d:.5g}") for d in self.differences], **rounded}


def signed(value: float, digits: int) -> str:
    """With a sign in front.

    >>> signed(-0.5, 1)
    '−0.5'
    """
    return f"{value:+.{digits}f}".replace("-", "−")


def bracketed(ends: Iterable[float], digits: int, unit: str = "") -> str:
    """A mean and its interval.

    >>> bracketed((-1.0, -2.0, 0.0), 1, " %")
    '−1.0 % [−2.0, +0.0]'
    """
    mean, low, high = (signed(value, digits) for value in ends)
    return f"{mean}{unit} [{low}, {high}]"


@final
@dataclass(frozen=True)
class Quantity:
    """A number that describes a run."""

    name: str
    title: str
    of: Callable[[Record], float]
    digits: int
    relative: bool = True  # differences are shown in per cent; False: in the unit of the quantity

    def cell(self, paired: Paired) -> str:
        """Mean, 95 % interval, and p of the t-test."""
        return f"{bracketed(paired.interval(), self.digits)}, p {paired.p:.2g}"


QUANTITIES = (
    Quantity(
        "loss_until_40",
        "training loss, mean of epochs to 40 %",
        lambda run: statistics.fmean(point.train_loss for point in run.early),
        4,
    ),
    Quantity("loss_at_40", "at 40 %", lambda run: run.early[-1].train_loss, 4),
    Quantity("loss_at_end", "at the end", lambda run: run.history[-1].train_loss, 4),
    Quantity("test_accuracy", ACCURACY, lambda run: 100 * run.history[-1].test_accuracy, 2, relative=False),
)


@final
@dataclass(frozen=True)
class Side:
    """The runs of an optimizer with one schedule or both; a seed's number is the mean over the schedules."""

    groups: tuple[Group, ...]

    @property
    def dataset(self) -> str:
        """The images."""
        return self.groups[0].dataset

    @property
    def arm(self) -> str:
        """The optimizer."""
        return self.groups[0].arm

    @property
    def schedule(self) -> str:
        """The name in the tables."""
        return self.groups[0].schedule if len(self.groups) == 1 else "both"

    @property
    def seeds(self) -> set[int]:
        """The seeds that did not diverge in any group."""
        return set.intersection(*({run.name.seed for run in group.records} for group in self.groups))

    def of(self, quantity: Quantity, seed: int) -> float:
        """The quantity of a seed."""
        return statistics.fmean(map(quantity.of, self._runs(seed)))

    def commits(self, seed: int) -> set[str]:
        """Of the code that the runs of a seed were made with."""
        return {commit for run in self._runs(seed) for commit in run.commits}

    def _runs(self, seed: int) -> list[Record]:
        return [run for group in self.groups for run in group.records if run.name.seed == seed]


@final
@dataclass(frozen=True)
class Pair:
    """Two sides with common seeds."""

    first: Side
    second: Side

    @property
    def seeds(self) -> list[int]:
        """The seeds of both sides."""
        return sorted(self.first.seeds & self.second.seeds)

    def paired(self, quantity: Quantity) -> Paired:
        """The first minus the second."""
        return Paired(tuple(self.first.of(quantity, seed) - self.second.of(quantity, seed) for seed in self.seeds))

    def of_second(self, quantity: Quantity) -> float:
        """The mean of the second side, to judge the size of a difference."""
        return float(f"{statistics.fmean(self.second.of(quantity, seed) for seed in self.seeds):.5g}")

    def columns(self) -> dict[str, Any]:
        """For JSON."""
        names = {"dataset": self.first.dataset, "first": [self.first.arm, self.first.schedule]}
        numbers = {q.name: {**self.paired(q).columns(), "of_second": self.of_second(q)} for q in QUANTITIES}
        return {**names, "second": [self.second.arm, self.second.schedule], "seeds": self.seeds, **numbers}

    def row(self) -> list[str]:
        """A row of the table."""
        one, other = self.first, self.second
        names = [one.dataset, _label(one.schedule, other.schedule), TITLES[one.arm], TITLES[other.arm]]
        return [*names, str(len(self.seeds)), *(quantity.cell(self.paired(quantity)) for quantity in QUANTITIES)]


def _label(one: str, other: str) -> str:
    """One schedule or two."""
    return one if one == other else f"{one}, {other}"


def pairs(found: Sequence[Group]) -> list[Pair]:
    """All pairs with two or more common seeds: with one schedule, with both, as in the paper, and of the schedules.

    The last is Amari's K-FAC with the schedule of Sobolev K-FAC minus itself with its own schedule: the effect of the
    schedule in the comparison of the paper.
    """
    by_key = {(group.dataset, group.schedule, group.arm): group for group in found}
    # Images; schedules and optimizer of the first; those of the second.
    keys: list[tuple[str, tuple[str, ...], str, tuple[str, ...], str]] = []
    for d, s in dict.fromkeys((dataset, schedule) for dataset, schedule, _ in by_key):
        keys += [(d, (s,), one, (s,), other) for one, other in _SAME]
    base = (PAPER["amari"],)
    for d in dict.fromkeys(group.dataset for group in found):
        keys += [(d, BOTH, one, BOTH, other) for one, other in _METRICS]
        keys += [(d, (schedule,), arm, base, "amari") for arm, schedule in PAPER.items() if arm != "amari"]
        keys.append((d, (PAPER["sobolev"],), "amari", base, "amari"))
    both = [
        Pair(Side(tuple(by_key[d, s, one] for s in ours)), Side(tuple(by_key[d, s, other] for s in theirs)))
        for d, ours, one, theirs, other in keys
        if all((d, s, one) in by_key for s in ours) and all((d, s, other) in by_key for s in theirs)
    ]
    return [pair for pair in both if len(pair.seeds) > 1]


@final
@dataclass(frozen=True)
class Level:
    """The final level of a rival, in the mean over its seeds, and the first epoch in which each optimizer reaches it.

    ``schedule``: of the optimizers that are to reach it, where the paper compares two schedules.
    """

    rival: Group
    schedule: str
    title: str
    curve: Callable[[Group], Sequence[float]]  # the mean of a quantity that is to rise
    shown: Callable[[float], str]
    of: Callable[[Point], float]  # the same of one run

    @property
    def label(self) -> str:
        """The schedules."""
        return _label(self.schedule, self.rival.schedule)

    def epoch(self, group: Group) -> int | None:
        """The first epoch 1, 2, … that reaches the level; None: never."""
        return _first(self.curve(group), self.curve(self.rival)[-1])

    def saved(self, group: Group) -> dict[int, int | None]:
        """By seed: how many epochs earlier a run reaches the end of its rival's run; None: never."""
        theirs = {run.name.seed: [self.of(point) for point in run.history] for run in self.rival.records}
        out: dict[int, int | None] = {}
        for run in group.records:
            if run.name.seed in theirs:
                curve = theirs[run.name.seed]
                rival, ours = _first(curve, curve[-1]), _first([self.of(point) for point in run.history], curve[-1])
                out[run.name.seed] = None if rival is None or ours is None else rival - ours
        return dict(sorted(out.items()))

    def columns(self, found: Sequence[Group]) -> dict[str, Any]:
        """For JSON: epochs, and seconds of a run on an idle device where they were measured."""
        epochs = {group.arm: self.epoch(group) for group in found}
        clocks = [(group.arm, epochs[group.arm], group.seconds) for group in found]
        seconds = {arm: round(clock[epoch - 1], 1) for arm, epoch, clock in clocks if epoch and clock}
        names = {"dataset": self.rival.dataset, "schedule": self.label, "rival": self.rival.arm}
        saved = {group.arm: list(self.saved(group).values()) for group in found}
        return {**names, "quantity": self.title, "epochs": epochs, "seconds": seconds, "saved": saved}

    def row(self, found: Sequence[Group], arms: Sequence[str]) -> list[str]:
        """A row of the table."""
        columns = self.columns(found)
        epochs, seconds = columns["epochs"], columns["seconds"]
        clock = {arm: f"{seconds[arm]:.0f} s" if arm in seconds else "–" for arm in arms}
        cells = [f"{epochs[arm]}, {clock[arm]}" if epochs.get(arm) else "–" for arm in arms]
        end = f"{TITLES[self.rival.arm]}: {self.title} {self.shown(self.curve(self.rival)[-1])}"
        return [self.rival.dataset, self.label, end, *cells]

    def saved_row(self, found: Sequence[Group], arms: Sequence[str]) -> list[str]:
        """Epochs saved, seed by seed."""
        by_arm = self.columns(found)["saved"]
        cells = [", ".join(epochs_saved(saved) for saved in by_arm.get(arm, [])) or "–" for arm in arms]
        end = f"{TITLES[self.rival.arm]}: {self.title}"
        return [self.rival.dataset, self.label, end, *cells]


def _first(curve: Sequence[float], end: float) -> int | None:
    """The first epoch 1, 2, … with this value or a larger one; None: never."""
    return next((e + 1 for e, value in enumerate(curve) if value >= end), None)


def epochs_saved(saved: int | None) -> str:
    """In words.

    >>> epochs_saved(-3), epochs_saved(None)
    ('−3', 'never')
    """
    return "never" if saved is None else f"{saved}".replace("-", "−")


def levels(found: Sequence[Group]) -> list[Level]:
    """The final test accuracies and training losses of the rivals, and Amari's with the schedules of the paper."""
    rivals = [(group, group.schedule) for group in found if group.arm in _RIVALS and group.records]
    others = {(group.dataset, group.schedule) for group in found if group.records}
    rivals += [
        (group, PAPER["sobolev"])
        for group, schedule in rivals
        if (group.arm, schedule) == ("amari", PAPER["amari"]) and (group.dataset, PAPER["sobolev"]) in others
    ]
    return [
        level
        for group, schedule in rivals
        for level in (
            Level(
                group,
                schedule,
                ACCURACY,
                lambda g: g.accuracy.mean,
                lambda end: f"{end:.2f}",
                lambda point: point.test_accuracy,
            ),
            Level(
                group,
                schedule,
                LOSS,
                lambda g: [-loss for loss in g.loss.mean],
                lambda end: f"{-end:.4f}",
                lambda point: -point.train_loss,
            ),
        )
    ]


def table(found: Sequence[Group]) -> str:
    """The pairs as a Markdown table."""
    head = ["images", "schedule", "optimizer", "less", "seeds", *(quantity.title for quantity in QUANTITIES)]
    return markdown_table(head, (pair.row() for pair in pairs(found)))


def reached(found: Sequence[Group]) -> str:
    """The levels as a Markdown table: epochs and seconds."""
    arms = [arm for arm in _REACHING if any(group.arm == arm for group in found)]
    head = ["images", "schedule", "the end of", *(TITLES[arm] for arm in arms)]
    rows = [level.row(_beside(level, found), arms) for level in levels(found)]
    return markdown_table(head, rows)


def saved(found: Sequence[Group]) -> str:
    """How many epochs before K-FAC every seed of its variants reaches the end of K-FAC's run of that seed.

    K-FAC itself with the schedule of the row is the first of them: what it saves comes from the schedule.
    """
    variants = [arm for arm in ("amari", *_VARIANTS) if any(group.arm == arm for group in found)]
    head = ["images", "schedule", "the end of", *(TITLES[arm] for arm in variants)]
    of_kfac = [level for level in levels(found) if level.rival.arm == "amari"]
    rows = [level.saved_row(_beside(level, found), variants) for level in of_kfac]
    return markdown_table(head, rows)


def _beside(level: Level, found: Sequence[Group]) -> list[Group]:
    """The groups on the same images with the schedule of the level."""
    place = level.rival.dataset, level.schedule
    return [group for group in found if (group.dataset, group.schedule) == place and group.records]


def save(found: Sequence[Group], results: Path) -> None:
    """``pairs.json`` and the tables ``pairs.md``, ``reached.md`` and ``saved.md``."""
    reach = [level.columns(_beside(level, found)) for level in levels(found)]
    write_json(results / "pairs.json", {"pairs": [pair.columns() for pair in pairs(found)], "reached": reach})
    (results / "pairs.md").write_text(table(found) + "\n")
    (results / "reached.md").write_text(reached(found) + "\n")
    (results / "saved.md").write_text(saved(found) + "\n")
