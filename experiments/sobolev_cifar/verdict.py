"""The verdict of ``protocol.md`` from the record: its endpoints with intervals, and questions beside them, in tables.

Nothing here is chosen after the runs: endpoints, seeds, coverage and the words of the table are those of the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import final

from scipy import stats

from experiments.files import markdown_table, write_json
from experiments.sobolev_cifar.paired_stats import (
    ACCURACY,
    LOSS,
    QUANTITIES,
    Level,
    Paired,
    Quantity,
    Side,
    bracketed,
    epochs_saved,
    levels,
    signed,
)
from experiments.sobolev_cifar.plan import BETTER, BOTH, Planned, plan
from experiments.sobolev_cifar.record import Name, Point
from experiments.sobolev_cifar.report import NAMES, TITLES, Group
from experiments.sobolev_cifar.tuning import Choices

DECIDE = {"cifar10": range(3, 8), "cifar100": range(4)}  # seeds
EVERY = range(1000)  # seeds
CONTROL = {"cifar10": range(3, 7), "cifar100": range(4)}
FAMILY = 0.975  # coverage: two data sets, 5 % together
CLEAR = 0.05  # of K-FAC's loss
SIMILAR = 0.5  # points of test accuracy
PRIMARY, AT_40, _, SECONDARY = QUANTITIES
_NOT_RUN = "not run"


@final
@dataclass(frozen=True)
class Difference:
    """One optimizer minus another over some seeds, with an interval of a coverage."""

    quantity: Quantity
    seeds: tuple[int, ...]
    paired: Paired
    of_second: float  # the mean of the second
    coverage: float
    one_commit: bool  # whether both sides of every pair name the same code

    @property
    def interval(self) -> tuple[float, float]:
        """Of the mean difference."""
        _, low, high = self.paired.interval(self.coverage)
        return low, high

    @property
    def relative(self) -> tuple[float, float, float]:
        """Mean and interval over the mean of the second: δ of the protocol."""
        mean, low, high = (value / self.of_second for value in self.paired.interval(self.coverage))
        return mean, low, high

    @property
    def detected(self) -> float:
        """The mean difference that as many seeds find with a power of 80 %, if differences deviate as they do here."""
        return detectable(len(self.seeds), self.coverage) * self.paired.deviation

    def shown(self) -> str:
        """Mean and interval."""
        return bracketed(self.paired.interval(self.coverage), self.quantity.digits) + self._mark

    def per_cent_of_mean(self) -> str:
        """The mean relative to the second."""
        return f"{signed(100 * self.paired.mean / self.of_second, 1)} %"

    def per_cent(self) -> str:
        """The same with its interval."""
        return bracketed((100 * value for value in self.relative), 1, " %") + self._mark

    def short(self) -> str:
        """In per cent or in points, as the quantity has it."""
        return self.per_cent() if self.quantity.relative else self.shown()

    @property
    def _mark(self) -> str:
        return "" if self.one_commit else " †"


def detectable(seeds: int, coverage: float, power: float = 0.8) -> float:
    """The mean over the standard deviation of differences that a two-sided t-test finds with this power.

    >>> [round(detectable(n, 0.95), 2) for n in (3, 4, 5, 8)], round(detectable(4, 0.975), 2)
    ([3.26, 2.13, 1.68, 1.16], 2.72)
    """
    edge = float(stats.t.isf((1 - coverage) / 2, seeds - 1))
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        # T > edge where T is Student's t of a mean that is off zero; SciPy has no number for very large ones.
        found = float(stats.nct.sf(edge, seeds - 1, middle * math.sqrt(seeds)))
        low, high = (low, middle) if math.isnan(found) or found >= power else (middle, high)
    return high


@final
@dataclass(frozen=True)
class Runs:
    """All finished runs, by images, schedule and optimizer."""

    groups: Sequence[Group]

    def side(self, dataset: str, arm: str, schedules: Collection[str]) -> Side | None:
        """An optimizer with some schedules; None where one of them has no run."""
        found = [
            g for g in self.groups if (g.dataset, g.arm) == (dataset, arm) and g.schedule in schedules and g.records
        ]
        return Side(tuple(found)) if len(found) == len(schedules) else None

    def any(self, dataset: str, arm: str) -> bool:
        """Whether an optimizer has a run."""
        return any((g.dataset, g.arm) == (dataset, arm) and g.records for g in self.groups)

    def difference(
        self,
        dataset: str,
        ours: tuple[str, Collection[str]],
        theirs: tuple[str, Collection[str]],
        quantity: Quantity,
        seeds: Collection[int],
        coverage: float = 0.95,
        at_least: int = 2,
    ) -> Difference | None:
        """Optimizer and schedules of both sides; None with fewer common seeds. One seed has no interval."""
        one, other = self.side(dataset, *ours), self.side(dataset, *theirs)
        if one is None or other is None:
            return None
        common = tuple(sorted(one.seeds & other.seeds & set(seeds)))
        if len(common) < at_least:
            return None
        values = [(one.of(quantity, seed), other.of(quantity, seed)) for seed in common]
        mean = sum(second for _, second in values) / len(values)
        same = all(one.commits(seed) and one.commits(seed) == other.commits(seed) for seed in common)
        return Difference(quantity, common, Paired(tuple(a - b for a, b in values)), mean, coverage, same)

    def claim(
        self, dataset: str, quantity: Quantity, seeds: Collection[int], coverage: float = FAMILY
    ) -> Difference | None:
        """Sobolev minus K-FAC with the same schedules, a seed counts once."""
        return self.difference(dataset, ("sobolev", BOTH), ("amari", BOTH), quantity, seeds, coverage)

    def explored(self, dataset: str, quantity: Quantity, schedules: Collection[str] = BOTH) -> Difference | None:
        """The same over the seeds that decide, for what the protocol does not name: intervals of 95 %."""
        return self.difference(dataset, ("sobolev", schedules), ("amari", schedules), quantity, DECIDE[dataset])

    def only_seed(self, dataset: str, quantity: Quantity, seeds: Collection[int]) -> Difference | None:
        """The same where one seed has been run; None where none or several have."""
        both = ("sobolev", BOTH), ("amari", BOTH)
        found = self.difference(dataset, *both, quantity, seeds, FAMILY, at_least=1)
        return found if found is not None and len(found.seeds) == 1 else None


def verdict_on(found: Difference) -> str:
    """The row of the protocol's table that an interval of δ is in."""
    _, low, high = found.relative
    if low > 0:
        return "against the claim: slower"
    if high < -CLEAR:
        return "for the claim: a clear advantage"
    if high < 0:
        small = "an advantage, but a small one: against a clear advantage"
        return small if low >= -CLEAR else "for an advantage; whether it is clear is not decided"
    return "against the claim: no advantage found, and a clear one is excluded" if low >= -CLEAR else "undecided"


def similar(found: Difference) -> bool:
    """Whether the protocol calls test accuracies similar."""
    low, high = found.interval
    return low <= 0 <= high or (low >= -SIMILAR and high <= SIMILAR)


def margin_grows(ten: Difference, hundred: Difference) -> tuple[float, float, float]:
    """δ(CIFAR-100) − δ(CIFAR-10) with Welch's 95 % interval."""
    sides = [[d / side.of_second for d in side.paired.differences] for side in (hundred, ten)]
    return _welch(*sides)


def _welch(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """The difference of two means of independent values, with Welch's 95 % interval."""
    mean, sides = fmean(one) - fmean(other), (one, other)
    parts = [Paired(tuple(side)).error ** 2 for side in sides]
    if not any(parts):
        return mean, mean, mean
    degrees = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True))
    half = float(stats.t.isf(0.025, degrees)) * math.sqrt(sum(parts))
    return mean, mean - half, mean + half


def _partly(found: Difference, planned: Collection[int]) -> str:
    return "" if len(found.seeds) == len(planned) else f" (preliminary: {len(found.seeds)} of {len(planned)} seeds)"


def _control(runs: Runs, dataset: str) -> Difference | None:
    """Sobolev K-FAC less the control."""
    ours, control = ("sobolev", ("fifths",)), ("permuted", ("fifths",))
    return runs.difference(dataset, ours, control, PRIMARY, CONTROL[dataset])


def answers(runs: Runs) -> str:
    """The table of what decides: the protocol's endpoints and their words, and beside them what is exploratory."""
    loss = [runs.claim(dataset, PRIMARY, seeds) for dataset, seeds in DECIDE.items()]
    accuracy = [runs.claim(dataset, SECONDARY, seeds) for dataset, seeds in DECIDE.items()]
    control = [_control(runs, dataset) for dataset in NAMES]
    seeds, ten = [*DECIDE.values()], CONTROL["cifar10"]
    letter = runs.difference("cifar10", ("literal", ("fifths",)), ("amari_scaled", ("fifths",)), PRIMARY, ten)
    rows = [
        [
            f"training loss, mean of epochs to 40 %; {signed(-100 * CLEAR, 0)} % would be clear",
            *map(_answer, loss, seeds),
        ],
        ["… in the words of the protocol", *(_NOT_RUN if one is None else verdict_on(one) for one in loss)],
        ["… CIFAR-100 less CIFAR-10 (Welch)", "", _margin(*loss)],
        ["final test accuracy, points", *map(_answer, accuracy, seeds)],
        [
            "… in the words of the protocol",
            *(_NOT_RUN if one is None else _in_words(similar(one)) for one in accuracy),
        ],
        ["exploratory: the lead in training loss, in epochs", *_on_all_images(runs, _lead_in_epochs)],
        ["exploratory: this loss, Sobolev K-FAC less the control", *map(_answer, control, CONTROL.values())],
        ["exploratory: this loss, to the letter, less K-FAC with the same inputs", _answer(letter, ten), "not planned"],
    ]
    return markdown_table(["Sobolev K-FAC less K-FAC", *NAMES.values()], rows)


def _answer(found: Difference | None, planned: Collection[int]) -> str:
    return _NOT_RUN if found is None else found.short() + _partly(found, planned)


def _in_words(alike: bool) -> str:
    return "similar" if alike else "not similar"


def _margin(ten: Difference | None, hundred: Difference | None) -> str:
    """By how much δ is larger on CIFAR-100."""
    if ten is None or hundred is None:
        return _NOT_RUN
    return bracketed((100 * number for number in margin_grows(ten, hundred)), 1, " %")


def endpoints(runs: Runs) -> str:
    """The table of the protocol's endpoints, and beside each of them what all seeds say."""
    head = ["images", "endpoint", "seeds", "Sobolev − K-FAC", "of K-FAC's", "seed by seed", "sign-flip p"]
    head += ["found with power 80 %", "verdict"]
    rows = []
    for dataset, seeds in DECIDE.items():
        for kind, quantity in (("primary", PRIMARY), ("secondary", SECONDARY)):
            found, every = runs.claim(dataset, quantity, seeds), runs.claim(dataset, quantity, EVERY, 0.95)
            names = [NAMES[dataset], f"{kind}: {quantity.title}"]
            only = runs.only_seed(dataset, quantity, seeds)
            if only is not None:
                cells = [f"{only.seeds[0]}", signed(only.paired.mean, quantity.digits)]
                cells.append(only.per_cent_of_mean() if quantity.relative else "–")
                rows.append([*names, *cells, *3 * ["–"], f"preliminary: 1 of {len(seeds)} seeds"])
            elif found is None:
                rows.append([*names, f"{min(seeds)} to {max(seeds)}", _NOT_RUN, *5 * ["–"]])
            else:
                words = verdict_on(found) if quantity is PRIMARY else _in_words(similar(found))
                rows.append([*names, *_numbers(found), words + _partly(found, seeds)])
            if every is not None and not set(every.seeds) <= set(seeds):
                rows.append([NAMES[dataset], f"exploratory: {quantity.title}", *_numbers(every), "–"])
    return markdown_table(head, rows)


def _numbers(found: Difference) -> list[str]:
    """Cells of a row: seeds, difference, relative difference, seed by seed, p, and what is found with power."""
    digits = found.quantity.digits
    return [
        ", ".join(map(str, found.seeds)),
        found.shown(),
        found.per_cent() if found.quantity.relative else "–",
        ", ".join(signed(d, digits) for d in found.paired.differences),
        f"{found.paired.sign_flip:.3g}",
        f"{found.detected:.{digits}f}",
    ]


# Other ways to look at the endpoints: exploratory, 95 % intervals.


def _accuracy(points: Sequence[Point]) -> float:
    return 100 * fmean(point.test_accuracy for point in points)


_TEST_LOSS = Quantity("test_loss_until_40", "", lambda run: fmean(p.test_loss for p in run.early), 4)
_TEST_EARLY = Quantity("accuracy_until_40", "", lambda run: _accuracy(run.early), 2, relative=False)
_TEST_LATE = Quantity("accuracy_after_40", "", lambda run: _accuracy(run.late), 2, relative=False)
# The area under the training loss without the last epoch, and how far it falls: _lead_in_epochs.
_AREA = Quantity("area", "", lambda run: sum(p.train_loss for p in run.early[:-1]), 4)
_FALL = Quantity("fall", "", lambda run: run.early[0].train_loss - run.early[-1].train_loss, 4)


def _lead_in_epochs(ours: Side, theirs: Side, seeds: Sequence[int]) -> str:
    """How many epochs earlier K-FAC's curve would have to start for the area below it to equal Sobolev K-FAC's.

    A shift of L by h epochs, interpolated linearly, changes Σ_{e<E} L(e) by h (L(E) − L(1)).
    """
    if any(theirs.of(_FALL, seed) == 0 for seed in seeds):
        return "–"
    leads = [(theirs.of(_AREA, seed) - ours.of(_AREA, seed)) / theirs.of(_FALL, seed) for seed in seeds]
    return bracketed(Paired(tuple(leads)).interval(), 2)


def _unpaired(ours: Side, theirs: Side, seeds: Sequence[int]) -> str:
    """The primary endpoint, as if seeds of the two optimizers had nothing in common (Welch)."""
    one, other = ([side.of(PRIMARY, seed) for seed in seeds] for side in (ours, theirs))
    return bracketed((100 * value / fmean(other) for value in _welch(one, other)), 1, " %")


def _on_all_images(runs: Runs, number: Callable[[Side, Side, Sequence[int]], str]) -> list[str]:
    """A number of Sobolev K-FAC, K-FAC and the seeds that decide, for all images."""
    cells = []
    for dataset, planned in DECIDE.items():
        ours, theirs = (runs.side(dataset, arm, BOTH) for arm in ("sobolev", "amari"))
        seeds = sorted(ours.seeds & theirs.seeds & set(planned)) if ours and theirs else []
        cells.append(number(ours, theirs, seeds) if ours and theirs and len(seeds) > 1 else _NOT_RUN)
    return cells


def robustness(runs: Runs) -> str:
    """The table of other ways to compare Sobolev K-FAC and K-FAC; the protocol does not name them."""

    def cells(quantity: Quantity, schedules: Collection[str] = BOTH) -> list[str]:
        found = [runs.explored(dataset, quantity, schedules) for dataset in NAMES]
        return [_NOT_RUN if one is None else one.short() for one in found]

    rows = [
        ["training loss, mean of epochs to 40 %: the primary endpoint", *cells(PRIMARY)],
        *([f"… with {schedule} only", *cells(PRIMARY, (schedule,))] for schedule in BOTH),
        ["… not paired within seeds", *_on_all_images(runs, _unpaired)],
        ["… as a lead in epochs", *_on_all_images(runs, _lead_in_epochs)],
        ["training loss in the last of these epochs", *cells(AT_40)],
        ["test loss, mean of epochs to 40 %", *cells(_TEST_LOSS)],
        ["test accuracy, mean of epochs to 40 %, points", *cells(_TEST_EARLY)],
        ["test accuracy, mean of the epochs after 40 %, points", *cells(_TEST_LATE)],
    ]
    return markdown_table(["Sobolev K-FAC less K-FAC", *NAMES.values()], rows)


# The questions beside the endpoints: exploratory, 95 % intervals.

_BETTER = ("sgd", "adamw", "natural")  # run with one schedule, the better one


def _questions() -> Iterator[tuple[str, str, tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]]:
    """Question, images, and optimizer with schedules of both sides."""
    tenths, fifths = ("tenths",), ("fifths",)
    for dataset in NAMES:
        yield "Does the geometry matter? Sobolev less control", dataset, ("sobolev", fifths), ("permuted", fifths)
        yield "What comes without geometry? Control less K-FAC", dataset, ("permuted", fifths), ("amari", fifths)
        yield "Does the other schedule help K-FAC?", dataset, ("amari", fifths), ("amari", tenths)
        yield "The comparison of the paper, our Sobolev", dataset, ("sobolev", fifths), ("amari", tenths)
        for rival in _BETTER:
            for schedule in BOTH:
                yield f"K-FAC less {TITLES[rival]}", dataset, ("amari", (schedule,)), (rival, (schedule,))
    ten = "cifar10"
    without = ("equidistant", fifths)
    yield "Is it more than the mean of a batch? Sobolev less equidistant points", ten, ("sobolev", fifths), without
    yield "What comes without any image? Equidistant points less K-FAC", ten, without, ("amari", fifths)
    yield "The comparison of the paper, to its letter", ten, ("literal", fifths), ("amari", tenths)
    yield "The letter, with the schedule and inputs of both", ten, ("literal", fifths), ("amari_scaled", fifths)
    yield "The letter less our Sobolev", ten, ("literal", fifths), ("sobolev", fifths)
    yield "Do scaled inputs help K-FAC?", ten, ("amari_scaled", tenths), ("amari", tenths)
    yield "… with the other schedule", ten, ("amari_scaled", fifths), ("amari", tenths)
    yield "Independent labels less one shared probe", ten, ("independent", BOTH), ("sobolev", BOTH)
    yield "Exact damping, Sobolev less K-FAC", ten, ("sobolev_exact", fifths), ("amari_exact", fifths)
    yield "Both tuned, Sobolev less K-FAC", ten, ("sobolev_tuned", fifths), ("amari_tuned", fifths)


def questions(runs: Runs) -> str:
    """The table of exploratory comparisons; what is planned and not there is said."""
    coming = {(run.name.dataset, run.name.arm) for run in plan()}
    rows = []
    for question, dataset, ours, theirs in _questions():
        found = [runs.difference(dataset, ours, theirs, quantity, EVERY) for quantity in (PRIMARY, SECONDARY)]
        schedules = " and ".join(ours[1]) if ours[1] == theirs[1] else f"{ours[1][0]}, {theirs[1][0]}"
        first, last = found
        if first is not None and last is not None:
            seeds = ", ".join(map(str, first.seeds))
            rows.append([question, NAMES[dataset], schedules, seeds, first.shown(), first.per_cent(), last.shown()])
        elif theirs[0] not in _BETTER:
            rows.append([question, NAMES[dataset], schedules, _NOT_RUN, "–", "–", "–"])
        elif (dataset, theirs[0]) in coming and not runs.any(dataset, theirs[0]) and ours[1] == BOTH[:1]:  # one row
            rows.append([question, NAMES[dataset], f"the {BETTER} one", _NOT_RUN, "–", "–", "–"])
    head = ["question", "images", "schedule", "seeds", PRIMARY.title, "relative", SECONDARY.title]
    return markdown_table(head, rows)


# The figures of the paper.

_BASELINE = ("baseline", "amari", "tenths")
_OURS = (_BASELINE, ("ours, to the letter", "literal", "fifths"), ("ours, as here", "sobolev", "fifths"))
_BASELINES = (
    _BASELINE,
    ("baseline_lr", "amari", "fifths"),
    ("baseline_scale", "amari_scaled", "tenths"),
    ("baseline_lr_scale", "amari_scaled", "fifths"),
)
# The number in the paper, images, curves, and what the paper says.
PAPER_FIGURES = (
    ("1", "cifar10", _OURS, 'final test "similar", "a clear advantage regarding convergence speed"'),
    ("2", "cifar100", _OURS, 'the same, "with the margin increased"'),
    ("3", "cifar10", _BASELINES, 'the other three "cannot bring any benefit to the baseline"'),
    ("4", "cifar100", _BASELINES, "the same"),
)


def paper_figures(runs: Runs) -> str:
    """Figures 1 to 4 of the paper: what it prints beside them, and the same curves here."""
    rows = []
    coming = {(run.name.dataset, run.name.arm, run.name.schedule) for run in plan()}
    for figure, dataset, curves, printed in PAPER_FIGURES:
        for at, (label, arm, schedule) in enumerate(curves):
            names = [figure, NAMES[dataset], "" if at else printed, f"{label}: {TITLES[arm]}, {schedule}"]
            side = runs.side(dataset, arm, (schedule,))
            if side is None:
                why = _NOT_RUN if (dataset, arm, schedule) in coming else "not planned"
                rows.append([*names, why, *3 * ["–"]])
                continue
            (group,) = side.groups
            early = sum(side.of(PRIMARY, seed) for seed in side.seeds) / len(side.seeds)
            end = group.accuracy.after(-1, 2)
            rows.append([*names, f"{len(side.seeds)}", f"{early:.4f}", end, _reached(runs, group)])
    head = ["figure", "images", "the paper prints", "curve", "seeds", PRIMARY.title, SECONDARY.title]
    return markdown_table([*head, "epoch at which the baseline's final test accuracy is reached"], rows)


def _end_of_baseline(runs: Runs, dataset: str, title: str = ACCURACY) -> Level | None:
    """The final test accuracy of K-FAC with tenths, or its final training loss."""
    base = runs.side(dataset, "amari", ("tenths",))
    return None if base is None else next(one for one in levels(base.groups) if one.title == title)


def _reached(runs: Runs, group: Group) -> str:
    level = _end_of_baseline(runs, group.dataset)
    epoch = None if level is None else level.epoch(group)
    return "–" if level is None else "never" if epoch is None else f"{epoch}"


def schedule(runs: Runs) -> str:
    """Whether the other schedule brings a benefit to the baseline: how much earlier it gets to the end of tenths."""
    rows = []
    for dataset, name in NAMES.items():
        side = runs.side(dataset, "amari", ("fifths",))
        for title in (LOSS, ACCURACY):
            level = _end_of_baseline(runs, dataset, title)
            saved = [] if level is None or side is None else list(level.saved(side.groups[0]).values())
            earlier = sum(epochs is not None and epochs > 0 for epochs in saved)
            cells = [f"{earlier} of {len(saved)}", ", ".join(map(epochs_saved, saved))] if saved else [_NOT_RUN, "–"]
            rows.append([name, f"final {title.removesuffix(', %')}", *cells])
    head = ["images", "K-FAC with fifths reaches, of K-FAC with tenths, the", "earlier in seeds", "by epochs"]
    return markdown_table(head, rows)


def progress(left: Sequence[Planned], choices: Choices) -> str:
    """How many runs of every part of the protocol the record has, and the searches and runs that it has not."""
    rows, counts = list[list[str]](), list[tuple[int, int, int]]()
    for part in dict.fromkeys(run.part for run in plan()):
        planned = sum(run.part == part for run in plan())
        absent = [run for run in left if run.part == part]
        searches = {key for run in absent for key in run.searches(choices)}
        counts.append((planned, planned - len(absent), len(searches)))
        seeds: dict[str, list[str]] = {}
        for run in absent:
            what = f"{TITLES[run.name.arm]}, {NAMES[run.name.dataset]}, {run.name.schedule}"
            seeds.setdefault(what, []).append(f"{run.name.seed}")
        listed = "; ".join(f"{text}: {', '.join(ones)}" for text, ones in seeds.items())
        rows.append([part, *map(str, counts[-1]), listed or "–"])
    rows.append(["all", *(str(sum(column)) for column in zip(*counts, strict=True)), ""])
    head = ["part of the protocol", "runs planned", "made", "searches not made"]
    return markdown_table([*head, "runs not made: optimizer, images, schedule: seeds"], rows)


def commits(found: Sequence[Group]) -> str:
    """The commits of the code that the runs were made with."""
    of: dict[str, list[Name]] = {}
    for record in (record for group in found for record in group.records):
        of.setdefault(", ".join(commit[:7] for commit in record.commits) or "not named", []).append(record.name)
    rows = []
    for commit, names in of.items():
        arms: dict[str, set[int]] = {}
        for name in names:
            arms.setdefault(f"{TITLES[name.arm]}, {NAMES[name.dataset]}", set()).add(name.seed)
        listed = "; ".join(f"{what}: {', '.join(map(str, sorted(seeds)))}" for what, seeds in arms.items())
        rows.append([commit, f"{len(names)}", listed])
    return markdown_table(["commit", "runs", "optimizer, images: seeds"], rows)


def save(found: Sequence[Group], left: Sequence[Planned], choices: Choices, results: Path) -> str:
    """``answers.md`` and the tables beside it, and ``verdict.json``; the first is returned."""
    runs = Runs(found)
    parts = {"answers": answers(runs), "endpoints": endpoints(runs), "questions": questions(runs)}
    parts |= {"robustness": robustness(runs), "figures": paper_figures(runs), "schedule": schedule(runs)}
    parts |= {"progress": progress(left, choices), "commits": commits(found)}
    for name, content in parts.items():
        (results / f"{name}.md").write_text(content + "\n")
    claims = {
        dataset: {q.name: d.paired.columns() for q in (PRIMARY, SECONDARY) if (d := runs.claim(dataset, q, seeds))}
        for dataset, seeds in DECIDE.items()
    }
    write_json(results / "verdict.json", {"claims": claims, "not_run": [r.name.key for r in left]})
    return parts["answers"]
