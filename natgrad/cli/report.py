"""The report of `natgrad demo` and `natgrad compare`: tables, and one HTML file with curves that needs no network.

Needs rich and matplotlib.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any, TypeAlias

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from natgrad.cli.colours import COLOURS, GREY
from natgrad.cli.compare import RATES
from natgrad.cli.training import Point, Problem, Runs, Task, TrainingRun, UsageError

PANELS: dict[str, tuple[Callable[[Point], float], Callable[[Point], float]]] = {
    "test loss against seconds": (lambda point: point.seconds, lambda point: point.test_loss),
    "test loss against steps": (lambda point: point.step, lambda point: point.test_loss),
    "training loss against seconds": (lambda point: point.seconds, lambda point: point.train_loss),
}
COLUMNS = ("optimizer", "lowest test loss", "after", "as low as AdamW's", "last test loss", "last training loss")
TEMPLATE = Template(files("natgrad.cli").joinpath("report.html").read_text(encoding="utf-8"))

Methods: TypeAlias = dict[str, list[TrainingRun]]  # the runs of every optimizer, seed by seed


def by_task(runs: Sequence[TrainingRun]) -> list[tuple[Task, Methods]]:
    """Runs with at least one measurement, task by task in the order of their training, the best optimizer first."""
    groups: dict[str, tuple[Task, Methods]] = {}
    for run in runs:
        if run.history:
            groups.setdefault(run.task.name, (run.task, {}))[1].setdefault(run.optimizer, []).append(run)
    return [(task, dict(sorted(of.items(), key=lambda item: lowest(item[1])))) for task, of in groups.values()]


def lowest(runs: Sequence[TrainingRun]) -> float:
    """The lowest test loss of a run, mean over the seeds."""
    return fmean(run.best().test_loss for run in runs)


def method(optimizer: str) -> str:
    """The name of an optimizer without its learning rate."""
    return optimizer.partition(" (")[0]


def colours(names: Sequence[str]) -> dict[str, str]:
    """Everyone's own colour; those who have none get what the others leave."""
    spare = [colour for name, colour in COLOURS.items() if name not in {method(name) for name in names}]
    chosen: dict[str, str] = {}
    for name in names:
        own = COLOURS.get(method(name))
        taken = own in chosen.values()
        chosen[name] = own if own is not None and not taken else spare.pop() if spare else GREY
    return chosen


def reaches_adamw(methods: Methods) -> dict[str, float]:
    """Mean seconds to within 2 % of AdamW's lowest test loss of the same seed, for those that always get there."""
    goals = {
        run.seed: 1.02 * run.best().test_loss for name, of in methods.items() if method(name) == "AdamW" for run in of
    }
    firsts = {name: [run.reaches(goals[run.seed]) for run in of if run.seed in goals] for name, of in methods.items()}
    return {name: fmean(p.seconds for p in found if p) for name, found in firsts.items() if found and all(found)}


def verdict(methods: Methods) -> str:
    """Who has the lowest test loss, by how much, and who was first at AdamW's; computed, whoever it is."""
    (best, runs), *others = methods.items()
    after = fmean(run.best().seconds for run in runs)
    text = f"Lowest test loss: {best}, {lowest(runs):.3g} after {after:.2g} s."
    if others and lowest(runs) > 0:
        name, second = others[0]
        ratio = lowest(second) / lowest(runs)
        share = f"{ratio:.3g} times as much" if ratio >= 2 else f"{100 * (ratio - 1):.1f} % more"
        text += f" Next: {name}, {lowest(second):.3g}, {share}."
        won, seeds = wins(methods)
        text += f" Means of {seeds} seeds; {best} is the lowest in {won} of them." if seeds > 1 else ""
    if level := reaches_adamw(methods):
        first = min(level, key=lambda name: level[name])
        text += f" First within 2 % of AdamW's lowest: {first}, after {level[first]:.2g} s."
    return text


def wins(methods: Methods) -> tuple[int, int]:
    """In how many of the seeds that both have the best optimizer is below all others."""
    first, *others = ({run.seed: run.best().test_loss for run in runs} for runs in methods.values())
    seeds = [seed for seed in first if all(seed in other for other in others)]
    return sum(all(first[seed] <= other[seed] for other in others) for seed in seeds), len(seeds)


def headline(groups: Sequence[tuple[Task, Methods]]) -> str:
    """The winner of every task, and whether it wins with every seed."""
    parts = []
    for task, methods in groups:
        won, seeds = wins(methods)
        often = f" on average, and in {won} of {seeds} seeds" if won < seeds else ""
        parts.append(f"{task.name}: {next(iter(methods))} has the lowest test loss{often}")
    return "; ".join(parts)


def heads(task: Task) -> tuple[str, ...]:
    """Of the columns of the table."""
    return (*COLUMNS, *([task.score_name] if task.score_name else []), "steps")


def rows(task: Task, methods: Methods) -> list[tuple[str, ...]]:
    """One row per optimizer, in the order of their lowest test losses, means over the seeds ± standard errors."""
    level = reaches_adamw(methods)
    result: list[tuple[str, ...]] = []
    for name, runs in methods.items():
        ends = [run.history[-1] for run in runs]
        losses, scores = [run.best().test_loss for run in runs], [end.test_score or 0.0 for end in ends]
        unfinished = [run.status for run in runs if run.status != "finished"]
        counts = f"{len(unfinished)} of {len(runs)} " if len(runs) > 1 else ""
        shown = f"{name} ({counts}{unfinished[0]})" if unfinished else name
        error = f" ± {stdev(losses) / len(losses) ** 0.5:.1g}" if len(losses) > 1 else ""
        cells = f"{fmean(losses):.3g}{error}", f"{fmean(run.best().seconds for run in runs):.2g} s"
        reached = f"{level[name]:.2g} s" if name in level else "not reached"
        last = f"{fmean(end.test_loss for end in ends):.3g}", f"{fmean(end.train_loss for end in ends):.2g}"
        score = [f"{fmean(scores):.3g}"] if task.score_name else []
        result.append((shown, *cells, reached, *last, *score, f"{fmean(end.step for end in ends):.0f}"))
    return result


def rates(runs: Sequence[TrainingRun]) -> list[str]:
    """What the search of learning rates has seen, a sentence for every optimizer."""
    tried: dict[str, dict[float, TrainingRun]] = {}
    for run in runs:
        if run.task.name == RATES and run.history:
            name, _, rate = run.optimizer.removesuffix(")").partition(" (lr ")
            tried.setdefault(name, {})[float(rate)] = run
    seen = {
        name: ", ".join(
            f"{found[rate].best().test_loss:.3g} at {rate:g}"
            if found[rate].status == "finished"
            else f"none at {rate:g}"
            for rate in sorted(found)
        )
        for name, found in tried.items()
    }
    return [
        f"{name}, lowest test loss by learning rate in a quarter of the time: {text}." for name, text in seen.items()
    ]


def curve(task: Task, methods: Methods, title: str) -> str:
    """A panel of a task as SVG; every line has its optimizer in its id, and its name at its end."""
    x, y = PANELS[title]
    parts = "text.color axes.edgecolor axes.labelcolor xtick.color ytick.color"
    grey: dict[Any, Any] = dict.fromkeys(parts.split(), GREY)
    with mpl.rc_context({"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False, **grey}):
        figure = Figure(figsize=(5, 4), layout="constrained")
        panel = figure.subplots()
        panel.set(title=f"{title} (lower is better)", xlabel=title.split()[-1], xscale="log", yscale="log")
        panel.title.set_fontsize(10)
        panel.set_facecolor("none")
        ends: list[tuple[tuple[float, float], dict[str, Any]]] = []
        for name, colour in colours(list(methods)).items():
            look: dict[str, Any] = {"color": colour, "gid": f"{task.name}/{name}:{title}"}
            end = None
            for run in methods[name]:
                points = [point for point in run.history if point.step]  # a logarithmic axis has no 0
                if points:
                    end = x(points[-1]), y(points[-1])
                    of_seed = look | {"gid": f"{look['gid']} {run.seed}"}
                    panel.plot([x(point) for point in points], [y(point) for point in points], linewidth=1.2, **of_seed)
            ends += [] if end is None else [(end, look | {"text": f" {method(name)}"})]
        figure.draw_without_rendering()  # now the axes have their places
        heights = [(float(panel.transData.transform(end)[1]), end, look) for end, look in ends]
        above = -1e9
        for height, end, look in sorted(heights, key=lambda row: row[0]):
            above = max(height, above + 15)  # names do not cover each other
            at: dict[str, Any] = {"xytext": (0, 0.72 * (above - height)), "textcoords": "offset points", "va": "center"}
            panel.annotate(xy=end, annotation_clip=False, **look, **at)
        picture = StringIO()
        figure.savefig(
            picture, format="svg", transparent=True, metadata={"Date": None, "Title": f"{task.name}: {title}"}
        )
    return picture.getvalue()[picture.getvalue().index("<svg") :]


def section(task: Task, methods: Methods) -> str:
    """A task in the report: the verdict, a box for every optimizer that hides its curves, the curves, and the table."""
    cells = [heads(task), *rows(task, methods)]
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    box = '<label style="color:{}"><input type="checkbox" checked id="{}"> {}</label>'
    boxes = "".join(
        box.format(colour, escape(f"{task.name}/{name}"), escape(name))
        for name, colour in colours(list(methods)).items()
    )
    figures = "".join(f"<figure>{curve(task, methods, title)}</figure>" for title in PANELS)
    return (
        f'<h2>{escape(task.name)}</h2><p class="verdict">{escape(verdict(methods))}</p><p>{boxes}</p>'
        f'<div class="curves">{figures}</div><div class="table"><table>{table}</table></div>'
    )


# The record, from which a comparison goes on, and the report.


def summary(comparison: Runs, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""
    tasks: dict[str, dict[str, Any]] = {}
    for run in comparison.runs:
        of = tasks.setdefault(run.task.name, {"name": run.task.name, "score": run.task.score_name, "runs": []})
        record = {"optimizer": run.optimizer, "seed": run.seed, "status": run.status}
        of["runs"] += [record | {"history": [asdict(point) for point in run.history]}] if run.history else []
    about = {"settings": settings, "interrupted": comparison.interrupted, "torch": torch.__version__}
    return {**about, "tasks": list(tasks.values())}


def save(comparison: Runs, settings: dict[str, Any], path: Path) -> None:
    """Write the record; whoever is killed here leaves the one before."""
    text = json.dumps(summary(comparison, settings), indent=1, allow_nan=False) + "\n"
    beside = path.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def resumed(path: Path, settings: dict[str, Any], problem: Callable[[], Problem]) -> Runs:
    """The runs of a record that have ended; none, if there is no record."""
    if not path.exists():
        return Runs()
    record = json.loads(path.read_text(encoding="utf-8"))
    other = {
        key: value for key, value in record.get("settings", {"command": None}).items() if settings.get(key) != value
    }
    if other:
        here = {key: settings.get(key) for key in other}
        raise UsageError(f"{path} is a comparison with {other}, not {here}: give another folder with --out")
    runs = [
        TrainingRun(
            Task(task["name"], problem, score_name=task["score"]),
            run["optimizer"],
            [Point(**point) for point in run["history"]],
            run["status"],
            run["seed"],
        )
        for task in record["tasks"]
        for run in task["runs"]
    ]
    return Runs([run for run in runs if run.status in ("finished", "diverged")])


def report(comparison: Runs, settings: dict[str, Any], title: str, out: Path, console: Console) -> None:
    """Print a table and a verdict per task, and write summary.json and report.html into `out`."""
    groups = by_task([run for run in comparison.runs if run.task.name != RATES])
    if not groups:
        console.print("Nothing was trained, so nothing is written.")
        return
    for task, methods in groups:
        table = Table(title=f"{task.name}: {verdict(methods)}", title_justify="left")
        for name in heads(task):
            table.add_column(name, justify="left" if name == "optimizer" else "right", no_wrap=name == "optimizer")
        for row in rows(task, methods):
            table.add_row(*row)
        console.print(table)
    numbers, page = out / "summary.json", (out / "report.html").resolve()
    save(comparison, settings, numbers)
    seeds = {run.seed for _, methods in groups for runs in methods.values() for run in runs}
    noise = " One seed: differences of a few per cent change with it." if len(seeds) == 1 else ""
    about = [f"torch {torch.__version__}, threads: {torch.get_num_threads()}.{noise}", *rates(comparison.runs)]
    sections = "".join(section(task, methods) for task, methods in groups)
    notes = "".join(f"<p>{escape(line)}</p>" for line in about)
    text = TEMPLATE.substitute(title=escape(title), headline=escape(headline(groups)), about=notes, tasks=sections)
    page.write_text(text, encoding="utf-8")
    console.print(f"Written: {numbers}\nReport: {page}", soft_wrap=True, highlight=False)
