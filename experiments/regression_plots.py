"""The figures of the regression study, from its record."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.regression_arms import ARMS, LOOKS, SMOOTHNESS, Arm
from experiments.regression_record import CONTEST, Record

COLOURS = ("tab:gray", "tab:blue", "tab:red")


def draw(record: Record, found: dict[str, Any], folder: Path) -> list[Path]:
    """Error against seconds, and error against ν and ℓ."""
    with matplotlib.rc_context({"font.size": 8}):
        figures = {"contest": _contest(record), "sweep": _sweep(found["sweep"])}
        paths = []
        for name, figure in figures.items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=88)
    return paths


def _contest(record: Record) -> Figure:
    """The test error where validation has been best so far, a panel a problem; the median and range of the splits."""
    problems = record.problems(CONTEST)
    columns = min(4, len(problems))
    rows = -(-len(problems) // columns)
    figure = Figure(figsize=(2.6 * columns, 2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, problem in zip(axes, problems, strict=False):
        for arm, colour in zip(ARMS, COLOURS, strict=True):
            seconds, curves = _curves(record, problem, arm)
            at = list(zip(*curves, strict=True))
            ax.plot(seconds, [statistics.median(errors) for errors in at], color=colour, label=arm.title)
            ax.fill_between(seconds, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.15)
        ax.set_title(problem, fontsize=8)
        ax.set_yscale("log")
    for ax in axes[len(problems) :]:
        ax.set_axis_off()
    axes[0].legend(fontsize=7)
    figure.supxlabel("processor seconds")
    figure.supylabel("test error (RMSE), stopped by validation")
    return figure


def _curves(record: Record, problem: str, arm: type[Arm]) -> tuple[list[float], list[list[float]]]:
    """At even times, the test error of the look that is best so far, a list a split."""
    times = [record.seconds * (i + 1) / LOOKS for i in range(LOOKS)]
    curves = []
    for result in record.contest(problem, arm).values():
        seen = [[look for look in result.looks if look.seconds <= t * 1.001] for t in times]
        curves.append([min(looks, key=lambda look: look.validation).test for looks in seen])
    return times, curves


def _sweep(sweep: dict[str, Any]) -> Figure:
    """Test error against the lengthscale, a line a smoothness; Gauss–Newton, the limit ℓ → 0, is dashed."""
    figure = Figure(figsize=(3 * max(1, len(sweep)), 2.6), layout="constrained")
    axes = figure.subplots(1, max(1, len(sweep)), squeeze=False)[0]
    for ax, (problem, cell) in zip(axes, sweep.items(), strict=False):
        for i, (nu, errors) in enumerate(zip(cell["nu"], cell["test"], strict=True)):
            shade = matplotlib.colormaps["viridis"](i / len(SMOOTHNESS))
            ax.plot(cell["scale"], errors, "o-", color=shade, markersize=3, label=f"ν = {nu:g}")
        ax.axhline(cell["Gauss–Newton"], color="tab:blue", linestyle="--", label="Gauss–Newton")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(problem, fontsize=8)
        ax.set_xlabel("ℓ over the median distance")
    axes[0].set_ylabel("test error (RMSE)")
    axes[0].legend(fontsize=7)
    return figure
