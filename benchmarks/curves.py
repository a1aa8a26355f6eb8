"""Loss against seconds: curves, targets, a table, and a JSON file from which a run can be resumed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.report import Target, verdicts
from experiments.files import markdown_table
from natgrad.cli.training import Point

KFAC, SGD, ADAMW, SOAP = "K-FAC, self-tuned", "SGD with momentum", "AdamW", "SOAP"


@final
@dataclass(frozen=True)
class Setting:
    """A learning rate, the fraction of it that is left at the end of the budget, and the batch size."""

    lr: float
    left: float
    batch: int


Chosen = dict[str, dict[str, Setting]]  # by task and contender


@final
@dataclass(frozen=True)
class Run:
    """One optimizer on one task. ``train_score``: at the end, on the training set."""

    task: str
    contender: str
    seed: int
    history: list[Point]
    train_score: float = math.nan

    @property
    def final(self) -> float:
        """The final training loss, at least 10⁻⁶; ∞ if it is not finite."""
        loss = self.history[-1].train_loss
        return max(loss, 1e-6) if math.isfinite(loss) else math.inf

    def reaches(self, level: float) -> float:
        """Seconds until the training loss reaches this level, by log-linear interpolation; ∞ if never."""
        before = self.history[0]
        for point in self.history:
            if point.train_loss <= level:
                drop = math.log(before.train_loss / point.train_loss) if point.train_loss > 0 else 0.0
                share = math.log(before.train_loss / level) / drop if drop > 0 else 1.0
                return before.seconds + min(share, 1.0) * (point.seconds - before.seconds)
            before = point
        return math.inf


@final
@dataclass
class Record:
    """The budget of a run in seconds, the chosen settings, and the curves so far."""

    machine: dict[str, Any]
    seconds: float
    chosen: Chosen = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def has(self, task: str, contender: str, seed: int) -> bool:
        """Whether this run is done."""
        return any((run.task, run.contender, run.seed) == (task, contender, seed) for run in self.runs)

    def save(self, path: Path) -> None:
        """As JSON, one line per curve; a level that was never reached is null."""
        targets: list[dict[str, Any]] = [{**asdict(t), "met": t.met} for t in claims(self.runs)]
        for t in targets:
            t["measured"] = t["measured"] if math.isfinite(t["measured"]) else None
        chosen = {task: {name: asdict(s) for name, s in by_name.items()} for task, by_name in self.chosen.items()}
        content = {"machine": self.machine, "seconds": self.seconds, "chosen": chosen, "targets": targets}
        text = json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}")
        curves = ",\n    ".join(json.dumps(_columns(run), ensure_ascii=False) for run in self.runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + ',\n  "runs": [\n    ' + curves + "\n  ]\n}\n")

    @staticmethod
    def load(path: Path) -> Record:
        """Read a saved record."""
        saved = json.loads(path.read_text())
        chosen = {
            task: {name: Setting(**numbers) for name, numbers in by_name.items()}
            for task, by_name in saved["chosen"].items()
        }
        return Record(saved["machine"], saved["seconds"], chosen, [_run(columns) for columns in saved["runs"]])


def _columns(run: Run) -> dict[str, Any]:
    """The history by quantity, with four digits."""
    points = [asdict(point) for point in run.history]
    columns = {key: [float(f"{point[key]:.4g}") for point in points] for key in points[0]}
    score = float(f"{run.train_score:.4g}") if math.isfinite(run.train_score) else None
    return {"task": run.task, "contender": run.contender, "seed": run.seed, "train_score": score, **columns}


def _run(columns: dict[str, Any]) -> Run:
    keys = ("step", "seconds", "train_loss", "test_loss", "test_score")
    history = [Point(int(step), *rest) for step, *rest in zip(*(columns[key] for key in keys), strict=True)]
    score = columns.get("train_score")
    return Run(columns["task"], columns["contender"], columns["seed"], history, math.nan if score is None else score)


def claims(runs: Iterable[Run]) -> list[Target]:
    """K-FAC's time to the final loss of another, over the other's own time; the median over common seeds."""
    by_key = {(run.task, run.contender, run.seed): run for run in runs}
    out = []
    for task in dict.fromkeys(task for task, _, _ in by_key):
        for other, bound in ((ADAMW, 0.5), (SOAP, 1.0)):
            pairs = [
                (run, by_key[task, other, seed])
                for (of, name, seed), run in by_key.items()
                if (of, name) == (task, KFAC) and (task, other, seed) in by_key
            ]
            if not pairs:
                continue
            ratios = [ours.reaches(theirs.final) / _time(theirs) for ours, theirs in pairs]
            note = "of the seeds: " + ", ".join(f"{ratio:.2f}" for ratio in ratios)
            claim = f"K-FAC's time to {other}'s final loss over {other}'s own, {task}"
            out.append(Target(claim, statistics.median(ratios), bound, True, note))
    return out


def _time(run: Run) -> float:
    """The time until a run reached its final loss; all of its time if it diverged."""
    return run.reaches(run.final) or run.history[-1].seconds


def table(record: Record) -> str:
    """Medians over seeds: steps, losses and scores at the end, and the seconds to AdamW's final loss."""
    lines = []
    for task in dict.fromkeys(run.task for run in record.runs):
        lines += ["", task, "  " + "".join(f"{title:>{width}}" for title, width in zip(_HEAD, _WIDTHS, strict=True))]
        for cells in _cells(record, task):
            lines.append(f"  {cells[0]:20}" + "".join(f"{c:>{w}}" for c, w in zip(cells[1:], _WIDTHS[1:], strict=True)))
    return "\n".join([*lines, "", *verdicts(claims(record.runs))])


def markdown(record: Record) -> str:
    """The same as Markdown, one table per task."""
    tasks = dict.fromkeys(run.task for run in record.runs)
    return "\n".join(markdown_table([task, *_HEAD[1:]], _cells(record, task)) for task in tasks)


_HEAD = ("", "steps", "training loss", "score", "test loss", "test score", "to AdamW, s")
_WIDTHS = (20, 8, 15, 10, 12, 12, 14)
_FORMS = (".0f", ".4g", ".4g", ".4g", ".4g", ".1f")


def _cells(record: Record, task: str) -> list[list[str]]:
    """One row per optimizer."""
    runs = [run for run in record.runs if run.task == task]
    level = {run.seed: run.final for run in runs if run.contender == ADAMW}
    out = []
    for name in dict.fromkeys(run.contender for run in runs):
        rows = [_row(run, level.get(run.seed, math.nan)) for run in runs if run.contender == name]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        numbers = (f"{median:{form}}" for median, form in zip(medians, _FORMS, strict=True))
        out.append([name, *("never" if number == "inf" else number for number in numbers)])
    return out


def _row(run: Run, level: float) -> tuple[float, ...]:
    end = run.history[-1]
    score = math.nan if end.test_score is None else end.test_score
    return float(end.step), end.train_loss, run.train_score, end.test_loss, score, run.reaches(level)
