"""The record of the regression study: a file to resume from, its summary and tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from experiments.files import markdown_table
from experiments.regression_configs import (
    CONFIGS,
    LENGTHSCALES,
    SMOOTHNESS,
    AdamW,
    Config,
    GaussNewton,
    Look,
    Result,
    Sobolev,
)

TUNE, CONTEST, MATCHED, SWEEP, CONFIRM = "tune", "contest", "matched", "sweep", "confirm"


@final
@dataclass(frozen=True)
class Key:
    """A run: stage of the study, problem, optimizer and settings (a trial; in a sweep also ν and ℓ), split."""

    stage: str
    problem: str
    arm: str
    trial: int
    split: int
    nu: float = 0.0
    scale: float = 0.0


@final
@dataclass(frozen=True)
class Record:
    """All results so far, and the seconds of a run."""

    seconds: float
    machine: dict[str, Any]
    cells: dict[Key, Result] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """As JSON, one line per run: contests with their curves, the others with their best and last measurement."""
        lines = []
        for key, result in self.cells.items():
            looks = result.looks if key.stage == CONTEST else (result.best(), result.looks[-1])
            columns = {name: [_finite(getattr(look, name)) for look in looks] for name in Look.__dataclass_fields__}
            lines.append(json.dumps({**asdict(key), **columns, "failure": result.failure}, ensure_ascii=False))
        head = f'{{"seconds": {json.dumps(self.seconds)}, "machine": {json.dumps(self.machine)}, "cells": [\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + ",\n".join(lines) + "\n]}\n")

    @staticmethod
    def load(path: Path) -> Record:
        """Read a saved record."""
        saved = json.loads(path.read_text())
        cells = {}
        for line in saved["cells"]:
            columns = zip(*(line[name] for name in Look.__dataclass_fields__), strict=True)
            looks = tuple(Look(int(step), *(math.inf if v is None else v for v in rest)) for step, *rest in columns)
            key = Key(**{name: line[name] for name in Key.__dataclass_fields__})
            cells[key] = Result(looks, line["failure"])
        return Record(saved["seconds"], saved["machine"], cells)

    def chosen(self, problem: str, arm: type[Config]) -> int:
        """The trial with the smallest validation error."""
        trials = {key: r for key, r in self.cells.items() if _is(key, TUNE, problem, arm)}
        return min(trials, key=lambda key: trials[key].best().validation).trial

    def swept(self, problem: str) -> tuple[float, float]:
        """ν and ℓ of the sweep with the smallest mean of validation errors."""
        errors: dict[tuple[float, float], list[float]] = {}
        for key, result in self.cells.items():
            if _is(key, SWEEP, problem, Sobolev):
                errors.setdefault((key.nu, key.scale), []).append(result.best().validation)
        return min(errors, key=lambda at: statistics.mean(errors[at]))

    def contest(self, problem: str, arm: type[Config], stage: str = CONTEST) -> dict[int, Result]:
        """The runs that count, by split."""
        return {key.split: r for key, r in self.cells.items() if _is(key, stage, problem, arm)}

    def problems(self, stage: str) -> list[str]:
        """The problems that have runs of this stage."""
        return list(dict.fromkeys(key.problem for key in self.cells if key.stage == stage))


def _is(key: Key, stage: str, problem: str, arm: type[Config]) -> bool:
    return (key.stage, key.problem, key.arm) == (stage, problem, arm.title)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def summary(record: Record) -> dict[str, Any]:
    """The numbers of the page: test errors at the best validation, mean and standard deviation over the splits."""
    contest = {problem: _contest(record, problem) for problem in record.problems(CONTEST)}
    sweep = {problem: _sweep(record, problem) for problem in record.problems(SWEEP)}
    confirm = {problem: _confirm(record, problem) for problem in record.problems(CONFIRM)}
    failures = [{**asdict(key), "failure": r.failure} for key, r in record.cells.items() if r.failure]
    spent = sum(result.looks[-1].seconds for result in record.cells.values())
    head = {"seconds": record.seconds, "runs": len(record.cells), "minutes": round(spent / 60, 1)}
    found = {"contest": contest, "sweep": sweep, "confirm": confirm, "failures": failures}
    return {**head, "machine": record.machine, **found}


def _contest(record: Record, problem: str) -> dict[str, Any]:
    runs = {arm: record.contest(problem, arm) for arm in CONFIGS}
    splits = sorted(set.intersection(*(set(found) for found in runs.values())))
    out: dict[str, Any] = {"splits": len(splits), "arms": {}}
    for arm, found in runs.items():
        errors = [found[s].best().test for s in splits]
        out["arms"][arm.title] = {
            "mean": statistics.mean(errors),
            "deviation": statistics.stdev(errors) if len(errors) > 1 else 0.0,
            "steps": statistics.median(found[s].looks[-1].step for s in splits),
            "settings": arm.drawn(record.chosen(problem, arm)).settings(),
        }
    # Sobolev over another, split by split: the geometric mean of the ratios, and how many are below one.
    for other in (AdamW, GaussNewton):
        pairs = [(runs[Sobolev][s].best().test, runs[other][s].best().test) for s in splits]
        out[f"over {other.title}"] = _paired(pairs)
    steps = {s: min(runs[arm][s].looks[-1].step for arm in (Sobolev, GaussNewton)) for s in splits}
    pairs = [(runs[Sobolev][s].best(steps[s]).test, runs[GaussNewton][s].best(steps[s]).test) for s in splits]
    out["over Gauss–Newton, as many steps"] = _paired(pairs)
    matched = record.contest(problem, GaussNewton, MATCHED)
    pairs = [(runs[Sobolev][s].best().test, matched[s].best().test) for s in splits]
    out["over Gauss–Newton, same settings"] = _paired(pairs)
    pairs = [(runs[Sobolev][s].looks[-1].test, matched[s].looks[-1].test) for s in splits]
    out["over Gauss–Newton, same settings, at the end"] = _paired(pairs)
    return out


def _paired(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    logs = [math.log(ours / theirs) for ours, theirs in pairs]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return {"ratio": math.exp(statistics.mean(logs)), "error": error, "won": sum(log < 0 for log in logs)}


def _sweep(record: Record, problem: str) -> dict[str, Any]:
    def mean(nu: float, scale: float, arm: type[Config]) -> float:
        cells = (r for key, r in record.cells.items() if _is(key, SWEEP, problem, arm) and _at(key, nu, scale))
        return statistics.mean(r.best().test for r in cells)

    grid = [[mean(nu, scale, Sobolev) for scale in LENGTHSCALES] for nu in SMOOTHNESS]
    return {"nu": SMOOTHNESS, "scale": LENGTHSCALES, "test": grid, "Gauss–Newton": mean(0.0, 0.0, GaussNewton)}


def _confirm(record: Record, problem: str) -> dict[str, Any]:
    runs = {arm: record.contest(problem, arm, CONFIRM) for arm in (GaussNewton, Sobolev)}
    pairs = [(result.best().test, runs[GaussNewton][s].best().test) for s, result in runs[Sobolev].items()]
    ends = [(result.looks[-1].test, runs[GaussNewton][s].looks[-1].test) for s, result in runs[Sobolev].items()]
    nu, scale = record.swept(problem)
    means = {arm.title: statistics.mean(result.best().test for result in found.values()) for arm, found in runs.items()}
    return {
        "nu": nu,
        "scale": scale,
        **means,
        "over": _paired(pairs),
        "at the end": _paired(ends),
        "splits": len(pairs),
    }


def _at(key: Key, nu: float, scale: float) -> bool:
    return (key.nu, key.scale) == (nu, scale)


def tables(found: dict[str, Any]) -> list[str]:
    """The tables of the page as Markdown: the contest, its steps, one sweep per problem, its choice."""
    return [_errors(found["contest"]), _steps(found["contest"]), *_sweeps(found["sweep"]), _confirmed(found["confirm"])]


def _errors(contest: dict[str, Any]) -> str:
    head = ["problem", *(arm.title for arm in CONFIGS), "over AdamW", "over Gauss–Newton", "splits won"]
    rows = []
    for problem, cell in contest.items():
        arms = [f"{a['mean']:.3g} ± {a['deviation']:.2g}" for a in cell["arms"].values()]
        over = [cell[f"over {other.title}"] for other in (AdamW, GaussNewton)]
        ratios = [f"{o['ratio']:.2f} ± {o['ratio'] * o['error']:.2f}" for o in over]
        won = ", ".join(str(o["won"]) for o in over)
        rows.append([problem, *arms, *ratios, f"{won} of {cell['splits']}"])
    return markdown_table(head, rows)


def _steps(contest: dict[str, Any]) -> str:
    beside = ("as many steps", "same settings", "same settings, at the end")
    head = ["problem", *(f"steps, {arm.title}" for arm in CONFIGS), *beside, "ν", "ℓ / median"]
    rows = []
    for problem, cell in contest.items():
        steps = [f"{a['steps']:.0f}" for a in cell["arms"].values()]
        over = [cell[f"over Gauss–Newton, {how}"] for how in beside]
        ratios = [f"{o['ratio']:.2f} ± {o['ratio'] * o['error']:.2f}" for o in over]
        settings = cell["arms"][Sobolev.title]["settings"]
        rows.append([problem, *steps, *ratios, f"{settings['nu']:g}", f"{settings['scale']:g}"])
    return markdown_table(head, rows)


def _sweeps(sweep: dict[str, Any]) -> list[str]:
    out = []
    for problem, cell in sweep.items():
        head = [f"{problem}: ν", *(f"ℓ = {scale:g}" for scale in cell["scale"])]
        rows = [[f"{nu:g}", *(f"{e:.3g}" for e in errors)] for nu, errors in zip(cell["nu"], cell["test"], strict=True)]
        out.append(markdown_table(head, rows))
    return out


def _confirmed(confirm: dict[str, Any]) -> str:
    head = ["problem", "ν", "ℓ / median", GaussNewton.title, Sobolev.title, "over", "won", "over, at the end", "won"]
    rows = []
    for problem, cell in confirm.items():
        row = [
            problem,
            f"{cell['nu']:g}",
            f"{cell['scale']:g}",
            f"{cell['Gauss–Newton']:.3g}",
            f"{cell['Sobolev']:.3g}",
        ]
        for over in (cell["over"], cell["at the end"]):
            row += [f"{over['ratio']:.2f} ± {over['ratio'] * over['error']:.2f}", f"{over['won']} of {cell['splits']}"]
        rows.append(row)
    return markdown_table(head, rows)
