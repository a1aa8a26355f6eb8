"""Two optimizers seed by seed, and how soon each is where another ends.

A seed has the same first weights and the same batches for all optimizers, so differences are taken within a seed. Both
schedules have them too, and are the same until 40 % of the epochs: what a seed says in one and in the other is not
independent. So where both are taken together, a seed's two differences are averaged and count once.
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

# The first less the second: with one schedule, and the K-FACs with both.
_METRICS = (("sobolev", "amari"), ("independent", "amari"), ("sobolev", "independent"))
_SAME = (
    *_METRICS,
    ("sobolev_exact", "amari_exact"),
    ("amari", "sgd"),
    ("amari", "adamw"),
)
_BOTH = tuple(dict.fromkeys(PAPER.values()))  # schedules
_RIVALS = ("amari", "sgd", "adamw")  # whose ends are to be reached


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
        return float(2 * stats.t.sf(abs(self.t), len(self.differences) - 1))

    @property
    def margin(self) -> float:
        """Mean ± margin has the true difference inside with probability 95 %."""
        return float(stats.t.isf(0.025, len(self.differences) - 1)) * self.error

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
class Side:
    """The runs of an optimizer with one schedule or with both; the number of a seed is the mean over the schedules."""

    groups: tuple[Group, ...]

    @property
    def dataset(self) -> str:
        """Of all groups."""
        return self.groups[0].dataset

    @property
    def arm(self) -> str:
        """Of all groups."""
        return self.groups[0].arm

    @property
    def schedule(self) -> str:
        """As the tables have it."""
        return self.groups[0].schedule if len(self.groups) == 1 else "both"

    @property
    def seeds(self) -> set[int]:
        """That ended with numbers in every group."""
        return set.intersection(*({run.name.seed for run in group.records} for group in self.groups))

    def of(self, quantity: Quantity, seed: int) -> float:
        """The number of a seed."""
        runs = (run for group in self.groups for run in group.records if run.name.seed == seed)
        return statistics.fmean(map(quantity.of, runs))


@final
@dataclass(frozen=True)
class Pair:
    """Two sides with seeds in common."""

    first: Side
    second: Side

    @property
    def seeds(self) -> list[int]:
        """That ended with numbers in both."""
        return sorted(self.first.seeds & self.second.seeds)

    def paired(self, quantity: Quantity) -> Paired:
        """The first less the second."""
        return Paired(tuple(self.first.of(quantity, seed) - self.second.of(quantity, seed) for seed in self.seeds))

    def of_second(self, quantity: Quantity) -> float:
        """The mean of what is taken away, to know whether a difference is large."""
        return float(f"{statistics.fmean(self.second.of(quantity, seed) for seed in self.seeds):.5g}")

    def columns(self) -> dict[str, Any]:
        """For the file."""
        names = {"dataset": self.first.dataset, "first": [self.first.arm, self.first.schedule]}
        found = {q.name: {**self.paired(q).columns(), "of_second": self.of_second(q)} for q in QUANTITIES}
        return {**names, "second": [self.second.arm, self.second.schedule], "seeds": self.seeds, **found}

    def row(self) -> str:
        """Of the table."""
        one, other = self.first, self.second
        names = [one.dataset, _label(one.schedule, other.schedule), TITLES[one.arm], TITLES[other.arm]]
        cells = [str(len(self.seeds)), *(quantity.cell(self.paired(quantity)) for quantity in QUANTITIES)]
        return f"| {' | '.join([*names, *cells])} |"


def _label(one: str, other: str) -> str:
    """Of one schedule or two."""
    return one if one == other else f"{one}, {other}"


def pairs(found: Sequence[Group]) -> list[Pair]:
    """All that have two seeds or more in common: of one schedule, of both, as the paper has them, and the schedules'.

    The last is Amari's K-FAC with the schedule of Sobolev's less itself with its own: the schedule's part of what the
    paper compares.
    """
    known = {(group.dataset, group.schedule, group.arm): group for group in found}
    # Images; schedules and optimizer of the first; those of the second.
    keys: list[tuple[str, tuple[str, ...], str, tuple[str, ...], str]] = []
    for d, s in dict.fromkeys((dataset, schedule) for dataset, schedule, _ in known):
        keys += [(d, (s,), one, (s,), other) for one, other in _SAME]
    base = (PAPER["amari"],)
    for d in dict.fromkeys(group.dataset for group in found):
        keys += [(d, _BOTH, one, _BOTH, other) for one, other in _METRICS]
        keys += [(d, (schedule,), arm, base, "amari") for arm, schedule in PAPER.items() if arm != "amari"]
        keys.append((d, (PAPER["sobolev"],), "amari", base, "amari"))
    both = [
        Pair(Side(tuple(known[d, s, one] for s in ours)), Side(tuple(known[d, s, other] for s in theirs)))
        for d, ours, one, theirs, other in keys
        if all((d, s, one) in known for s in ours) and all((d, s, other) in known for s in theirs)
    ]
    return [pair for pair in both if len(pair.seeds) > 1]


@final
@dataclass(frozen=True)
class Level:
    """What a rival ends with, in the mean over its seeds, and the first epoch in which each optimizer has it.

    ``schedule``: of those that are to reach it; not the rival's own where the paper compares two.
    """

    rival: Group
    schedule: str
    title: str
    curve: Callable[[Group], Sequence[float]]  # the mean of a quantity that is to rise
    shown: Callable[[float], str]

    @property
    def label(self) -> str:
        """Of the schedules."""
        return _label(self.schedule, self.rival.schedule)

    def epoch(self, group: Group) -> int | None:
        """1, 2, …; None: never."""
        end = self.curve(self.rival)[-1]
        return next((e + 1 for e, value in enumerate(self.curve(group)) if value >= end), None)

    def columns(self, found: Sequence[Group]) -> dict[str, Any]:
        """For the file: epochs, and seconds of a run alone where they are known."""
        epochs = {group.arm: self.epoch(group) for group in found}
        clocks = [(group.arm, epochs[group.arm], group.seconds) for group in found]
        seconds = {arm: round(clock[epoch - 1], 1) for arm, epoch, clock in clocks if epoch and clock}
        names = {"dataset": self.rival.dataset, "schedule": self.label, "rival": self.rival.arm}
        return {**names, "quantity": self.title, "epochs": epochs, "seconds": seconds}

    def row(self, found: Sequence[Group], arms: Sequence[str]) -> str:
        """Of the table."""
        columns = self.columns(found)
        epochs, seconds = columns["epochs"], columns["seconds"]
        clock = {arm: f"{seconds[arm]:.0f} s" if arm in seconds else "–" for arm in arms}
        cells = [f"{epochs[arm]}, {clock[arm]}" if epochs.get(arm) else "–" for arm in arms]
        end = f"{TITLES[self.rival.arm]}: {self.title} {self.shown(self.curve(self.rival)[-1])}"
        return f"| {self.rival.dataset} | {self.label} | {end} | {' | '.join(cells)} |"


def levels(found: Sequence[Group]) -> list[Level]:
    """The last test accuracies and training losses of the rivals; in the end Amari's as the paper has it."""
    places = [(group, group.schedule) for group in found if group.arm in _RIVALS and group.records]
    others = {(group.dataset, group.schedule) for group in found if group.records}
    places += [
        (group, PAPER["sobolev"])
        for group, schedule in places
        if (group.arm, schedule) == ("amari", PAPER["amari"]) and (group.dataset, PAPER["sobolev"]) in others
    ]
    return [
        level
        for group, schedule in places
        for level in (
            Level(group, schedule, "test accuracy, %", lambda g: g.accuracy.mean, lambda end: f"{end:.2f}"),
            Level(
                group, schedule, "training loss", lambda g: [-loss for loss in g.loss.mean], lambda end: f"{-end:.4f}"
            ),
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
    """On the same images, with the schedule that is asked for."""
    place = level.rival.dataset, level.schedule
    return [group for group in found if (group.dataset, group.schedule) == place and group.records]


def save(found: Sequence[Group], results: Path) -> None:
    """``pairs.json`` and the two tables, ``pairs.md`` and ``reached.md``."""
    reach = [level.columns(_beside(level, found)) for level in levels(found)]
    write_json(results / "pairs.json", {"pairs": [pair.columns() for pair in pairs(found)], "reached": reach})
    (results / "pairs.md").write_text(table(found) + "\n")
    (results / "reached.md").write_text(reached(found) + "\n")
