"""The results of `natgrad demo`: tables, two plots and a JSON summary. Needs rich and matplotlib."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from natgrad.cli.demo import Point, Runs, Task, TrainingRun

COLOURS = ("#8c8c8c", "#e08214", "#2166ac", "#1b9e77", "#762a83", "#b2182b")
AXES: dict[str, Callable[[Point], float]] = {"steps": lambda point: point.step, "seconds": lambda point: point.seconds}


def by_task(runs: Sequence[TrainingRun]) -> list[tuple[Task, list[TrainingRun]]]:
    """Runs with at least one measurement, task by task in the order of their training."""
    groups: dict[str, tuple[Task, list[TrainingRun]]] = {}
    for run in runs:
        if run.history:
            groups.setdefault(run.task.name, (run.task, []))[1].append(run)
    return list(groups.values())


def ladder(top: float, rungs: int) -> list[float]:
    """The last numbers 1, 3, 10, 30 … (or … 0.3, 0.1) up to `top`, in increasing order.

    >>> ladder(150, rungs=3), ladder(1.5, rungs=3)
    ([10.0, 30.0, 100.0], [0.1, 0.3, 1.0])
    """
    numbers = [float(f"{mantissa}e{exponent}") for exponent in range(-3, 9) for mantissa in (1, 3)]
    return [number for number in numbers if number <= top][-rungs:]


def reached(runs: Sequence[TrainingRun], axis: Callable[[Point], float]) -> float:
    """The lower median of where finished runs ended on this axis: most losses can be compared up to there."""
    finished = [run for run in runs if run.status == "finished"] or runs
    return median_low(axis(run.history[-1]) for run in finished)


def table(task: Task, runs: Sequence[TrainingRun], rungs: int) -> Table:
    """One row per optimizer: training loss after `rungs` numbers of steps and of seconds, then the end of the run."""
    steps = [int(step) for step in ladder(reached(runs, AXES["steps"]), rungs) if step >= 1]
    seconds = ladder(reached(runs, AXES["seconds"]), rungs)
    result = Table(title=f"{task.name}: training loss after …", title_justify="left")
    result.add_column("optimizer")
    names = [f"{step}\nstep{'s' if step > 1 else ''}" for step in steps] + [f"{second:g}\ns" for second in seconds]
    for name in [*names, "steps\nin all", "train\nloss", task.score_name.replace(" ", "\n")]:
        result.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        points = [run.at_step(step) for step in steps] + [run.at_seconds(second) for second in seconds]
        last = run.history[-1]
        result.add_row(
            run.optimizer + ("" if run.status == "finished" else f" ({run.status})"),
            *(f"{point.train_loss:.2g}" if point else "–" for point in points),
            str(last.step),
            f"{last.train_loss:.2g}",
            f"{last.test_score:.3f}",
        )
    return result


def plot(runs: Sequence[TrainingRun], axis: str) -> Figure:
    """Training loss against `axis` (a key of AXES), one panel per task."""
    groups = by_task(runs)
    figure = Figure(figsize=(6.4 * max(1, len(groups)), 4.8), layout="constrained")
    for panel, (task, members) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        for run, colour in zip(members, cycle(COLOURS), strict=False):
            points = [point for point in run.history if point.step]  # a logarithmic axis has no 0
            x, y = [AXES[axis](point) for point in points], [point.train_loss for point in points]
            panel.plot(x, y, color=colour, label=run.optimizer, linewidth=2)
        panel.set(title=task.name, xlabel=axis, ylabel="training loss", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
        panel.legend()
    return figure


def summary(comparison: Runs, seed: int) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""
    return {
        "seed": seed,
        "interrupted": comparison.interrupted,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tasks": [
            {
                "name": task.name,
                "score": task.score_name,
                "batch_size": task.batch_size,
                "runs": [
                    {
                        "optimizer": run.optimizer,
                        "status": run.status,
                        "history": [asdict(point) for point in run.history],
                    }
                    for run in members
                ],
            }
            for task, members in by_task(comparison.runs)
        ],
    }


def report(comparison: Runs, seed: int, out: Path, console: Console) -> None:
    """Print the tables, then write summary.json, loss-steps.png and loss-seconds.png into `out`."""
    groups = by_task(comparison.runs)
    if not groups:
        console.print("Nothing was trained, so nothing is written.")
        return
    rungs = 3 if console.width >= 110 else 2
    for task, members in groups:
        console.print(table(task, members, rungs))
    written = [out / "summary.json"]
    written[0].write_text(json.dumps(summary(comparison, seed), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for axis in AXES:
        written.append(out / f"loss-{axis}.png")
        plot(comparison.runs, axis).savefig(written[-1], dpi=120)
    console.print("Written: " + ", ".join(str(path) for path in written), soft_wrap=True, highlight=False)
