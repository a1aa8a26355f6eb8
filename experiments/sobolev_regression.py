"""Does the Sobolev metric win where it is meaningful? Smooth networks on real regression sets and on known functions.

    python -m experiments.sobolev_regression --data uci_regression.npz.xz

AdamW, Gauss–Newton and the Sobolev natural gradient get the same processor time, the same number of
trials to choose their settings on a validation set, the same weights and the same splits. Then ν and ℓ are swept. Runs
that are in the record are not repeated; ``--data`` may be left out, and the real sets then are.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import matplotlib
import torch
from matplotlib.figure import Figure

from benchmarks.harness import machine
from examples.gallery import style
from experiments.files import commit
from experiments.regression_configs import (
    CONFIGS,
    LENGTHSCALES,
    LOOKS,
    SMOOTHNESS,
    Config,
    GaussNewton,
    Result,
    Sobolev,
    train,
)
from experiments.regression_data import Checks, Problem, Sampled, Sines, real
from experiments.regression_record import CONFIRM, CONTEST, MATCHED, SWEEP, TUNE, Key, Record, summary, tables

REAL = ("concrete", "energy", "yacht", "kin8nm")
NOISY = ("concrete", "energy")
SWEPT = ("energy", "energy, noise 1", "sines, noise 1")


@final
@dataclass(frozen=True)
class Study:
    """The size of the study: seconds of a run, trials per optimizer, splits of the contest and of a sweep point."""

    problems: tuple[Problem, ...]
    swept: tuple[str, ...]
    seconds: float
    trials: int
    splits: int
    points: int
    width: int = 50

    def tuning(self) -> Iterator[tuple[Problem, Key, Config]]:
        """Optimizers take turns, so that a slow phase of the machine affects all of them."""
        for problem in self.problems:
            for trial in range(self.trials):
                for arm in CONFIGS:
                    yield problem, Key(TUNE, problem.name, arm.title, trial, 0), arm.drawn(trial)

    def contest(self, record: Record) -> Iterator[tuple[Problem, Key, Config]]:
        """Every optimizer with its best settings."""
        for split in range(self.splits):
            for problem in self.problems:
                for arm in CONFIGS:
                    trial = record.chosen(problem.name, arm)
                    yield problem, Key(CONTEST, problem.name, arm.title, trial, split), arm.drawn(trial)

    def matched(self, record: Record) -> Iterator[tuple[Problem, Key, Config]]:
        """Gauss–Newton with the best settings of Sobolev: only the metric differs."""
        for split in range(self.splits):
            for problem in self.problems:
                trial = record.chosen(problem.name, Sobolev)
                key = Key(MATCHED, problem.name, GaussNewton.title, trial, split)
                yield problem, key, GaussNewton(Sobolev.drawn(trial).shared)

    def sweep(self, record: Record) -> Iterator[tuple[Problem, Key, Config]]:
        """Sobolev with every ν and ℓ, and Gauss–Newton, with the other best settings of Sobolev."""
        for problem in (p for p in self.problems if p.name in self.swept):
            trial = record.chosen(problem.name, Sobolev)
            best = Sobolev.drawn(trial)
            for split in range(self.points):
                key = Key(SWEEP, problem.name, GaussNewton.title, trial, split)
                yield problem, key, GaussNewton(best.shared)
                for nu in SMOOTHNESS:
                    for scale in LENGTHSCALES:
                        at = replace(key, arm=Sobolev.title, nu=nu, scale=scale)
                        yield problem, at, replace(best, nu=nu, scale=scale)

    def confirm(self, record: Record) -> Iterator[tuple[Problem, Key, Config]]:
        """The best ν and ℓ of the sweep, and Gauss–Newton, on fresh splits."""
        for split in range(self.points, self.points + self.splits):
            for problem in (p for p in self.problems if p.name in self.swept):
                trial = record.chosen(problem.name, Sobolev)
                nu, scale = record.swept(problem.name)
                arm = replace(Sobolev.drawn(trial), nu=nu, scale=scale)
                key = Key(CONFIRM, problem.name, GaussNewton.title, trial, split)
                yield problem, key, GaussNewton(arm.shared)
                yield problem, replace(key, arm=Sobolev.title, nu=nu, scale=scale), arm

    def run(self, folder: Path, *, made_with: str = "") -> Record:
        """Perform all runs that are not yet in the record, with the code of a commit: by default what git tells."""
        path = folder / "record.json"
        record = Record.load(path) if path.exists() else Record(self.seconds, _machine())
        if record.seconds != self.seconds:
            raise ValueError(
                f"{path.name} holds runs of {record.seconds:g} s, and {self.seconds:g} s were asked for: only runs of "
                f"one length compare. Give --seconds {record.seconds:g}, or another folder with --out"
            )
        commits = [*record.machine.get("commits", []), made_with or commit()]
        record.machine["commits"] = list(dict.fromkeys(commits))
        self._warm()
        self._fill(record, self.tuning(), path)
        self._fill(record, self.contest(record), path)
        self._fill(record, self.matched(record), path)
        self._fill(record, self.sweep(record), path)
        self._fill(record, self.confirm(record), path)
        return record

    def _fill(self, record: Record, cells: Iterator[tuple[Problem, Key, Config]], path: Path) -> None:
        for problem, key, arm in cells:
            if key in record.cells:
                continue
            result = train(arm, problem.split(key.split), key.split, self.seconds, self.width)
            record.cells[key] = result
            record.save(path)
            print(_line(key, arm, result), flush=True)

    def _warm(self) -> None:
        """Warm up, so that one-time costs of the process are not measured."""
        for arm in CONFIGS:
            train(arm.drawn(0), self.problems[0].split(0), 0, min(0.2, self.seconds), self.width)


def _line(key: Key, arm: Config, result: Result) -> str:
    best, last = result.best(), result.looks[-1]
    errors = f"validation {best.validation:.4g} test {best.test:.4g} at step {best.step} of {last.step}"
    return f"{key.stage:8}{key.problem:18} split {key.split} {errors} {arm} {result.failure}"


def _machine() -> dict[str, Any]:
    return machine(torch.device("cpu")) | {"dtype": "float64"}


def draw(record: Record, found: dict[str, Any], folder: Path) -> list[Path]:
    """Error against seconds, and error against ν and ℓ."""
    with matplotlib.rc_context(style.LOOK):
        figures = {"contest": _draw_contest(record), "sweep": _draw_sweep(found["sweep"])}
        titles, paths = {"contest": "Test error against seconds", "sweep": "Test error against ν and ℓ"}, []
        for name, figure in figures.items():
            paths.append(folder / f"{name}.svg")
            style.save(figure, paths[-1], titles[name])
    return paths


def _draw_contest(record: Record) -> Figure:
    """The test error at the best validation so far, one panel per problem: median and range over the splits."""
    problems = record.problems(CONTEST)
    columns = min(3, len(problems))
    rows = -(-len(problems) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, problem in zip(axes, problems, strict=False):
        for arm in CONFIGS:
            seconds, curves = _curves(record, problem, arm)
            at, colour = list(zip(*curves, strict=True)), style.COLOURS[arm.title]
            ax.plot(seconds, [statistics.median(errors) for errors in at], color=colour, label=arm.title)
            ax.fill_between(seconds, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.15)
        ax.set_title(problem)
        ax.set_yscale("log")
        style.name_lines(ax)
    for ax in axes[len(problems) :]:
        ax.set_axis_off()
    figure.supxlabel("processor seconds")
    figure.supylabel("test error (RMSE), stopped by validation")
    return figure


def _curves(record: Record, problem: str, arm: type[Config]) -> tuple[list[float], list[list[float]]]:
    """The test error at the best validation so far, at equidistant times, per split."""
    times = [record.seconds * (i + 1) / LOOKS for i in range(LOOKS)]
    curves = []
    for result in record.contest(problem, arm).values():
        seen = [[look for look in result.looks if look.seconds <= t * 1.001] for t in times]
        curves.append([min(looks, key=lambda look: look.validation).test for looks in seen])
    return times, curves


def _draw_sweep(sweep: dict[str, Any]) -> Figure:
    """Test error against the lengthscale, one line per smoothness; Gauss–Newton, the limit ℓ → 0, is dashed."""
    figure = Figure(figsize=(4.2 * max(1, len(sweep)), 3.2), layout="constrained")
    axes = figure.subplots(1, max(1, len(sweep)), squeeze=False)[0]
    for ax, (problem, cell) in zip(axes, sweep.items(), strict=False):
        for i, (nu, errors) in enumerate(zip(cell["nu"], cell["test"], strict=True)):
            shade = matplotlib.colormaps["viridis"](0.25 + 0.6 * i / len(SMOOTHNESS))
            ax.plot(cell["scale"], errors, "o-", color=shade, markersize=3, label=f"ν = {nu:g}")
        limit = [cell["Gauss–Newton"]] * len(cell["scale"])
        ax.plot(cell["scale"], limit, color=style.COLOURS["Gauss–Newton"], linestyle="--", label="Gauss–Newton")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(problem)
        ax.set_xlabel("ℓ over the median distance")
        style.name_lines(ax)
    axes[0].set_ylabel("test error (RMSE)")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="the .npz or .npz.xz with the real sets")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sobolev_regression")
    parser.add_argument("--seconds", type=float, default=1.5, help="processor time of a run")
    parser.add_argument("--trials", type=int, default=10, help="settings that every arm may try on every problem")
    parser.add_argument("--splits", type=int, default=5, help="splits, and seeds, of the contest")
    parser.add_argument("--points", type=int, default=2, help="splits of every point of the sweep")
    parser.add_argument("--commit", default="", help="of the code, where git does not tell it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = (*(Sampled(Sines(), noise) for noise in (0.0, 0.3, 1.0)), Sampled(Checks(), 0.1))
    sets = real(given.data, REAL) if given.data else ()
    noisy = (replace(table, noise=1.0) for table in sets if table.title in NOISY)
    problems = (*sets, *noisy, *known)
    study = Study(problems, SWEPT, given.seconds, given.trials, given.splits, given.points)
    record = study.run(given.out, made_with=given.commit)
    found = summary(record)
    (given.out / "summary.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    draw(record, found, given.out)
    print("\n\n".join(tables(found)))


if __name__ == "__main__":
    main()
