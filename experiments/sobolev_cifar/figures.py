"""Figures: training loss and test accuracy of every optimizer, and how far Sobolev K-FAC is ahead of K-FAC."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.sobolev_cifar.paired_stats import Pair, Quantity
from experiments.sobolev_cifar.plan import BOTH
from experiments.sobolev_cifar.record import Point, Record
from experiments.sobolev_cifar.report import NAMES, ORDER, TITLES, Group
from experiments.sobolev_cifar.verdict import CLEAR, PAPER_FIGURES, Runs

_SHOWN = ("amari", "sobolev", "independent", "permuted", "equidistant", "sgd", "adamw", "natural")
_CONTROLS = ("permuted", "equidistant")  # run with fifths


def draw(found: Sequence[Group], results: Path) -> list[Path]:
    """A figure for each schedule, those of the paper, and the lead of Sobolev K-FAC."""
    paths = []
    for dataset in dict.fromkeys(group.dataset for group in found):
        mine = [group for group in found if group.dataset == dataset and group.records]
        for schedule in dict.fromkeys(group.schedule for group in mine):
            shown = [group for group in mine if group.schedule == schedule and group.arm in _SHOWN]
            if shown:
                paths.append(results / f"{dataset}-{schedule}.svg")
                _save(_curves(shown, f"VGG16 on {NAMES[dataset]}: {schedule}", seconds=True), paths[-1])
        for name, number, images, curves, _ in PAPER_FIGURES:
            keys = [(arm, schedule) for _, arm, schedule in curves]
            shown = [group for group in mine if images == dataset and (group.arm, group.schedule) in keys]
            if len({group.schedule for group in shown}) == 2:
                paths.append(results / f"{dataset}-{name}.svg")
                title = f"VGG16 on {NAMES[dataset]}: the curves of figure {number} of the paper"
                _save(_curves(shown, title, seconds=False), paths[-1])
    leads = {dataset: pairs for dataset in NAMES if (pairs := _leads(Runs(found), dataset))}
    if leads:
        paths.append(results / "lead.svg")
        _save(_lead(leads), paths[-1])
    return paths


def _save(figure: Figure, path: Path) -> None:
    text = io.StringIO()
    # Equal figures are equal files; hundredths of a point are seen by nobody, but labels keep their digits.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "natgrad"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    path.write_text(re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text.getvalue()))


def _colour(arm: str) -> str:
    """Of an optimizer, the same in all figures."""
    extra = ("black", "grey", "gold", "navy", "teal")  # matplotlib has ten of its own
    at = ORDER.index(arm)
    return f"C{at}" if at < 10 else extra[at - 10]


def _curves(found: Sequence[Group], title: str, *, seconds: bool) -> Figure:
    """Loss and accuracy against epochs and, with ``seconds``, against time: mean, standard deviation, and thin seeds.

    Time is that of a run alone, and optimizers without a measurement of it are left out there; time on a shared device
    only if none has one.
    """
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
    _legend(figure, "mean ± standard deviation (seeds)", columns=2 if seconds else 1)
    figure.suptitle(title)
    return figure


def _legend(figure: Figure, title: str, columns: int) -> None:
    """Of all axes, below them: inside it would hide curves."""
    known: dict[str, Any] = {}
    for axis in figure.axes:
        known |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known, loc="outside lower center", ncols=columns, fontsize="small", title=title)


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
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, len(leads), sharey=True, squeeze=False)[0]
    for axis, (dataset, pairs) in zip(axes, leads.items(), strict=True):
        for pair in pairs:
            _plot_lead(axis, pair)
        axis.axhline(0.0, color="C0", linewidth=1, label=TITLES["amari"])
        axis.axhline(-100 * CLEAR, color="black", linewidth=1, linestyle=":", label="in the mean: a clear lead")
        seeds = " and ".join(f"{len(pair.seeds)}" for pair in pairs)
        axis.set(title=f"{NAMES[dataset]} ({seeds} seeds)", xlabel="epochs")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("training loss less that of K-FAC, %")
    figure.suptitle("How far ahead of K-FAC? Below zero is better")
    _legend(figure, "mean, 95 % interval of every epoch, thin: seeds", columns=4)
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
    epochs, colour = range(1, len(mean) + 1), _colour(pair.first.arm)
    for seed in seeds:
        axis.plot(epochs, seed, color=colour, linewidth=0.4, alpha=0.6)
    axis.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(epochs, mean, color=colour, label=TITLES[pair.first.arm])
