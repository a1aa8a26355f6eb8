"""Figures: training loss and test accuracy of every optimizer, and how far Sobolev K-FAC is ahead of K-FAC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.gallery import style
from experiments.sobolev_cifar.paired_stats import Pair, Quantity
from experiments.sobolev_cifar.plan import BOTH
from experiments.sobolev_cifar.record import Point, Record
from experiments.sobolev_cifar.report import NAMES, Group
from experiments.sobolev_cifar.verdict import CLEAR, Runs

_CONTROLS = ("permuted", "equidistant")  # run with fifths


@matplotlib.rc_context(style.LOOK)
def draw(found: Sequence[Group], results: Path) -> list[Path]:
    """A figure for each schedule, and the lead of Sobolev K-FAC; figures 1 to 4 of the paper are in the gallery."""
    paths = []
    for dataset in dict.fromkeys(group.dataset for group in found):
        mine = [group for group in found if group.dataset == dataset and group.records]
        for schedule in dict.fromkeys(group.schedule for group in mine):
            shown = [group for group in mine if group.schedule == schedule and group.arm in _LINES]
            if shown:
                paths.append(results / f"{dataset}-{schedule}.svg")
                title = f"VGG16 on {NAMES[dataset]}: {schedule}"
                style.save(_curves(shown, title), paths[-1], title)
    leads = {dataset: pairs for dataset in NAMES if (pairs := _leads(Runs(found), dataset))}
    if leads:
        paths.append(results / "lead.svg")
        style.save(_lead(leads), paths[-1], "The training loss less that of K-FAC")
    return paths


# The method of the style and the words at the line; the controls are grey.
_LINES = {
    "amari": ("K-FAC", "K-FAC", "-"),
    "sobolev": ("Sobolev", "Sobolev K-FAC", "-"),
    "independent": ("Sobolev", "independent samples", "--"),
    "permuted": ("exact", "permuted (control)", "-"),
    "equidistant": ("exact", "equidistant (control)", "--"),
    "sgd": ("gradient descent", "SGD, tuned", "-"),
    "adamw": ("AdamW", "AdamW, tuned", "-"),
    "natural": ("ng.Natural", "ng.Natural, tuned", "-"),
}


def _curves(found: Sequence[Group], title: str) -> Figure:
    """Loss and accuracy against epochs and against time: mean, standard deviation, and thin seeds.

    Time is that of a run alone, and optimizers without a measurement of it are left out there; time on a shared device
    only if none has one.
    """
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row", squeeze=False)
    clocks = [group.seconds for group in found]
    alone = any(clock is not None for clock in clocks)  # a figure has one kind of seconds
    quantities: list[Callable[[Point], float]] = [lambda p: p.train_loss, lambda p: 100 * p.test_accuracy]
    for group, clock in zip(found, clocks, strict=True):
        epochs = [float(epoch + 1) for epoch in range(len(group.loss.mean))]
        method, label, dashes = _LINES[group.arm]
        look: dict[str, Any] = {"color": style.COLOURS[method], "linestyle": dashes}
        for row, (curve, of) in enumerate(zip((group.loss, group.accuracy), quantities, strict=True)):
            for run in group.records:
                ys = [of(p) for p in run.history[: len(epochs)]]
                axes[row][0].plot(epochs, ys, linewidth=0.4, alpha=0.6, label="_", **look)
            xs = (epochs, clock if alone else group.shared.mean)
            for axis, x in [(axis, x) for axis, x in zip(axes[row], xs, strict=True) if x is not None]:
                low = [m - d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                high = [m + d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                axis.plot(x, curve.mean, label=f"{label} ({len(group.records)})", **look)
                axis.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
    axes[1][0].set_xlabel("epochs")
    axes[1][1].set_xlabel("seconds, one run on the device" if alone else "seconds, several runs on the device")
    axes[0][0].set_yscale("log")
    axes[0][0].set_ylabel("training loss (lower is better)")
    axes[1][0].set_ylabel("test accuracy, % (higher is better)")
    end = max(group.accuracy.mean[-1] for group in found)
    axes[1][0].set_ylim(max(0.0, end - 30), min(100.0, end + 2))
    for axis in axes.flat:
        style.name_lines(axis)
    figure.suptitle(f"{title}; mean ± standard deviation (seeds)")
    return figure


def _leads(runs: Runs, dataset: str) -> list[Pair]:
    """Sobolev K-FAC and the controls, each beside K-FAC with the same schedules."""
    pairs = []
    for arm, schedules in {"sobolev": BOTH, **dict.fromkeys(_CONTROLS, ("fifths",))}.items():
        ours, theirs = (runs.side(dataset, one, schedules) for one in (arm, "amari"))
        if ours is not None and theirs is not None and len(ours.seeds & theirs.seeds) > 1:
            pairs.append(Pair(ours, theirs))
    return pairs


def _lead(leads: dict[str, list[Pair]]) -> Figure:
    """The training loss less that of K-FAC, in per cent of it, until the schedules decay."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.subplots(1, len(leads), sharey=True, squeeze=False)[0]
    for axis, (dataset, pairs) in zip(axes, leads.items(), strict=True):
        for pair in pairs:
            _plot_lead(axis, pair)
        epochs = [1, len(pairs[0].first.groups[0].records[0].early)]
        axis.plot(epochs, [0.0, 0.0], color=style.COLOURS["K-FAC"], linewidth=1, label="K-FAC")
        axis.plot(epochs, 2 * [-100 * CLEAR], color=style.GREY, linewidth=1, linestyle=":", label="a clear lead")
        style.name_lines(axis)
        seeds = " and ".join(f"{len(pair.seeds)}" for pair in pairs)
        axis.set(title=f"{NAMES[dataset]} ({seeds} seeds)", xlabel="epochs")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("training loss less that of K-FAC, %\n(lower is better)")
    figure.suptitle("How far ahead of K-FAC? Mean, 95 % interval of every epoch; thin: seeds")
    return figure


def lead(pair: Pair) -> list[list[float]]:
    """Rows of numbers, one for each epoch until the schedules decay, in per cent of the mean loss of the second.

    A row has the mean difference of the training losses, its 95 % interval, and the difference of every seed.
    """
    rows = []
    for epoch in range(1, len(pair.first.groups[0].records[0].early) + 1):
        loss = Quantity("loss", "training loss", _loss_in(epoch), 4)
        paired, unit = pair.paired(loss), pair.of_second(loss) / 100
        rows.append([number / unit for number in (*paired.interval(), *paired.differences)])
    return rows


def _loss_in(epoch: int) -> Callable[[Record], float]:
    return lambda run: run.history[epoch - 1].train_loss


def _plot_lead(axis: Axes, pair: Pair) -> None:
    mean, low, high, *seeds = zip(*lead(pair), strict=True)
    method, label, dashes = _LINES[pair.first.arm]
    epochs, colour = range(1, len(mean) + 1), style.COLOURS[method]
    for seed in seeds:
        axis.plot(epochs, seed, color=colour, linewidth=0.4, alpha=0.6, label="_")
    axis.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(epochs, mean, color=colour, linestyle=dashes, label=label)
