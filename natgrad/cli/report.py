"""The report of `natgrad demo`: tables, and one HTML file with curves, readable without a network.

Needs rich and matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from natgrad.cli.colours import COLOURS, GREY
from natgrad.cli.demo import Point, Runs, Task, TrainingRun

PANELS: dict[str, tuple[Callable[[Point], float], Callable[[Point], float]]] = {
    "test loss against seconds": (lambda point: point.seconds, lambda point: point.test_loss),
    "test loss against steps": (lambda point: point.step, lambda point: point.test_loss),
    "training loss against seconds": (lambda point: point.seconds, lambda point: point.train_loss),
}
COLUMNS = ("optimizer", "lowest test loss", "after", "as low as AdamW's", "last test loss", "last training loss")
TEMPLATE = Template(files("natgrad.cli").joinpath("report.html").read_text(encoding="utf-8"))


def by_task(runs: Sequence[TrainingRun]) -> list[tuple[Task, list[TrainingRun]]]:
    """Runs with at least one measurement, task by task in the order of their training."""
    groups: dict[str, tuple[Task, list[TrainingRun]]] = {}
    for run in runs:
        if run.history:
            groups.setdefault(run.task.name, (run.task, []))[1].append(run)
    return list(groups.values())


def reaches_adamw(runs: Sequence[TrainingRun]) -> dict[str, Point]:
    """For every optimizer that gets there, its first measurement within 2 % of AdamW's lowest test loss."""
    goals = [1.02 * run.best().test_loss for run in runs if run.optimizer == "AdamW"]
    firsts = {run.optimizer: run.reaches(goal) for goal in goals for run in runs}
    return {name: point for name, point in firsts.items() if point is not None}


def verdict(runs: Sequence[TrainingRun]) -> str:
    """Who has the lowest test loss, by how much, and who was first at AdamW's; computed, whoever it is."""
    ranked = sorted(runs, key=lambda run: run.best().test_loss)
    losses = [run.best().test_loss for run in ranked]
    text = f"Lowest test loss: {ranked[0].optimizer}, {losses[0]:.3g} after {ranked[0].best().seconds:.2g} s."
    if len(ranked) > 1 and losses[0] > 0:
        ratio = losses[1] / losses[0]
        share = f"{ratio:.3g} times as much" if ratio >= 2 else f"{100 * (ratio - 1):.1f} % more"
        text += f" Next: {ranked[1].optimizer}, {losses[1]:.3g}, {share}."
    if level := reaches_adamw(runs):
        first = min(level, key=lambda name: level[name].seconds)
        text += f" First within 2 % of AdamW's lowest: {first}, after {level[first].seconds:.2g} s."
    return text


def rows(task: Task, runs: Sequence[TrainingRun]) -> list[tuple[str, ...]]:
    """One row per optimizer, in the order of their lowest test losses. "As low as": within 2 % of AdamW's lowest."""
    level = reaches_adamw(runs)
    result: list[tuple[str, ...]] = []
    for run in sorted(runs, key=lambda run: run.best().test_loss):
        best, last = run.best(), run.history[-1]
        name = run.optimizer if run.status == "finished" else f"{run.optimizer} ({run.status})"
        reached = f"{level[run.optimizer].seconds:.2g} s" if run.optimizer in level else "not reached"
        ends = f"{last.test_loss:.3g}", f"{last.train_loss:.2g}", f"{last.test_score:.3g}", str(last.step)
        result.append((name, f"{best.test_loss:.3g}", f"{best.seconds:.2g} s", reached, *ends))
    return result


def curves(task: Task, runs: Sequence[TrainingRun]) -> str:
    """The panels of a task as SVG; every line has its optimizer in its id, and its name at its end."""
    parts = "text.color axes.edgecolor axes.labelcolor xtick.color ytick.color"
    grey: dict[Any, Any] = dict.fromkeys(parts.split(), GREY)
    with mpl.rc_context({"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False, **grey}):
        figure = Figure(figsize=(14, 4), layout="constrained")
        for panel, (title, (x, y)) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            panel.set(title=f"{title} (lower is better)", xlabel=title.split()[-1], xscale="log", yscale="log")
            panel.set_facecolor("none")
            ends: list[tuple[float, tuple[float, float], dict[str, str]]] = []
            for run in runs:
                points = [point for point in run.history if point.step] or run.history  # a logarithmic axis has no 0
                look = {"color": COLOURS[run.optimizer], "gid": f"{task.name}/{run.optimizer}:{title}"}
                panel.plot([x(point) for point in points], [y(point) for point in points], **look)
                end = x(points[-1]), y(points[-1])
                look |= {"text": f" {run.optimizer}", "gid": f"{look['gid']} name"}
                ends.append((float(panel.transData.transform(end)[1]), end, look))
            above = -1e9
            for height, end, look in sorted(ends, key=lambda row: row[0]):
                above = max(height, above + 15)  # names do not cover each other
                at = {"xytext": (0, 0.72 * (above - height)), "textcoords": "offset points", "va": "center"}
                panel.annotate(xy=end, annotation_clip=False, **look, **at)
        picture = StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Title": task.name})
    return picture.getvalue()[picture.getvalue().index("<svg") :]


def section(task: Task, runs: Sequence[TrainingRun]) -> str:
    """A task in the report: the verdict, a box for every optimizer that hides its curves, the curves, and the table."""
    cells = [(*COLUMNS, task.score_name, "steps"), *rows(task, runs)]
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    box = '<label style="color:{}"><input type="checkbox" checked id="{}/{}"> {}</label>'
    boxes = "".join(box.format(COLOURS[run.optimizer], task.name, run.optimizer, run.optimizer) for run in runs)
    return (
        f'<h2>{escape(task.name)}</h2><p class="verdict">{escape(verdict(runs))}</p><p>{boxes}</p>'
        f'<figure>{curves(task, runs)}</figure><div class="table"><table>{table}</table></div>'
    )


def summary(comparison: Runs, seed: int) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""

    def record(run: TrainingRun) -> dict[str, Any]:
        return {"optimizer": run.optimizer, "status": run.status, "history": [asdict(point) for point in run.history]}

    def of(task: Task, runs: list[TrainingRun]) -> dict[str, Any]:
        about = {"name": task.name, "score": task.score_name, "batch_size": task.batch_size}
        return {**about, "runs": [record(run) for run in runs]}

    tasks = [of(task, runs) for task, runs in by_task(comparison.runs)]
    about = {"seed": seed, "interrupted": comparison.interrupted, "torch": torch.__version__}
    return {**about, "threads": torch.get_num_threads(), "tasks": tasks}


def report(comparison: Runs, seed: int, out: Path, console: Console) -> None:
    """Print a table and a verdict per task, and write summary.json and report.html into `out`."""
    groups = by_task(comparison.runs)
    if not groups:
        console.print("Nothing was trained, so nothing is written.")
        return
    for task, members in groups:
        table = Table(title=f"{task.name}: {verdict(members)}", title_justify="left")
        for name in (*COLUMNS, task.score_name, "steps"):
            table.add_column(name, justify="left" if name == "optimizer" else "right", no_wrap=name == "optimizer")
        for row in rows(task, members):
            table.add_row(*row)
        console.print(table)
    numbers, report = out / "summary.json", (out / "report.html").resolve()
    numbers.write_text(json.dumps(summary(comparison, seed), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    about = f"Seed {seed}, torch {torch.__version__}, threads: {torch.get_num_threads()}."
    sections = "".join(section(task, members) for task, members in groups)
    report.write_text(TEMPLATE.substitute(about=about, tasks=sections), encoding="utf-8")
    console.print(f"Written: {numbers}\nReport: {report}", soft_wrap=True, highlight=False)
