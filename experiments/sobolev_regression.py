"""Does the Sobolev metric win where it is meaningful? Smooth networks on real regression sets and on known functions.

    python -m experiments.sobolev_regression --data uci_regression.npz.xz

AdamW, Gauss–Newton and the Sobolev natural gradient (paper 000, (22)) get the same processor time, the same number of
trials to choose their settings on a validation set, the same weights and the same splits. Then ν and ℓ are swept. Runs
that are in the record are not repeated; ``--data`` may be left out, and the real sets then are.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from experiments.regression_arms import ARMS, LENGTHSCALES, SMOOTHNESS, Arm, GaussNewton, Result, Sobolev, train
from experiments.regression_data import Checks, Problem, Sampled, Sines, real
from experiments.regression_plots import draw
from experiments.regression_record import CONFIRM, CONTEST, MATCHED, SWEEP, TUNE, Key, Record, summary, tables

REAL = ("concrete", "energy", "yacht", "kin8nm")
NOISY = ("concrete", "energy")
SWEPT = ("energy", "energy, noise 1", "sines, noise 1")


@final
@dataclass(frozen=True)
class Study:
    """How much is run: seconds of a run, trials of an arm, splits of the contest and of a point of the sweep."""

    problems: tuple[Problem, ...]
    swept: tuple[str, ...]
    seconds: float
    trials: int
    splits: int
    points: int
    width: int = 50

    def tuning(self) -> Iterator[tuple[Problem, Key, Arm]]:
        """Arms take turns, so that a machine that slows down slows them all."""
        for problem in self.problems:
            for trial in range(self.trials):
                for arm in ARMS:
                    yield problem, Key(TUNE, problem.name, arm.title, trial, 0), arm.drawn(trial)

    def contest(self, record: Record) -> Iterator[tuple[Problem, Key, Arm]]:
        """Every arm with the settings that were best in its trials."""
        for split in range(self.splits):
            for problem in self.problems:
                for arm in ARMS:
                    trial = record.chosen(problem.name, arm)
                    yield problem, Key(CONTEST, problem.name, arm.title, trial, split), arm.drawn(trial)

    def matched(self, record: Record) -> Iterator[tuple[Problem, Key, Arm]]:
        """Gauss–Newton with what was best for Sobolev: then only the metric differs, and not the luck of the trials."""
        for split in range(self.splits):
            for problem in self.problems:
                trial = record.chosen(problem.name, Sobolev)
                key = Key(MATCHED, problem.name, GaussNewton.title, trial, split)
                yield problem, key, GaussNewton(Sobolev.drawn(trial).shared)

    def sweep(self, record: Record) -> Iterator[tuple[Problem, Key, Arm]]:
        """Sobolev with every ν and ℓ, and Gauss–Newton, all with the other settings that were best for Sobolev."""
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

    def confirm(self, record: Record) -> Iterator[tuple[Problem, Key, Arm]]:
        """The ν and ℓ that validated best in the sweep, and Gauss–Newton, on splits that nothing was chosen on."""
        for split in range(self.points, self.points + self.splits):
            for problem in (p for p in self.problems if p.name in self.swept):
                trial = record.chosen(problem.name, Sobolev)
                nu, scale = record.swept(problem.name)
                arm = replace(Sobolev.drawn(trial), nu=nu, scale=scale)
                key = Key(CONFIRM, problem.name, GaussNewton.title, trial, split)
                yield problem, key, GaussNewton(arm.shared)
                yield problem, replace(key, arm=Sobolev.title, nu=nu, scale=scale), arm

    def run(self, folder: Path) -> Record:
        """All runs that the record in the folder does not hold yet."""
        path = folder / "record.json"
        record = Record.load(path) if path.exists() else Record(self.seconds, _machine())
        if record.seconds != self.seconds:
            raise ValueError(
                f"{path.name} holds runs of {record.seconds:g} s, and {self.seconds:g} s were asked for: only runs of "
                f"one length compare. Give --seconds {record.seconds:g}, or another folder with --out"
            )
        self._warm()
        self._fill(record, self.tuning(), path)
        self._fill(record, self.contest(record), path)
        self._fill(record, self.matched(record), path)
        self._fill(record, self.sweep(record), path)
        self._fill(record, self.confirm(record), path)
        return record

    def _fill(self, record: Record, cells: Iterator[tuple[Problem, Key, Arm]], path: Path) -> None:
        for problem, key, arm in cells:
            if key in record.cells:
                continue
            result = train(arm, problem.split(key.split), key.split, self.seconds, self.width)
            record.cells[key] = result
            record.save(path)
            print(_line(key, arm, result), flush=True)

    def _warm(self) -> None:
        """What happens once in a process is nobody's time."""
        for arm in ARMS:
            train(arm.drawn(0), self.problems[0].split(0), 0, min(0.2, self.seconds), self.width)


def _line(key: Key, arm: Arm, result: Result) -> str:
    best, last = result.best(), result.looks[-1]
    errors = f"validation {best.validation:.4g} test {best.test:.4g} at step {best.step} of {last.step}"
    return f"{key.stage:8}{key.problem:18} split {key.split} {errors} {arm} {result.failure}"


def _machine() -> dict[str, str]:
    return {"processor": platform.machine(), "torch": torch.__version__, "threads": "1", "dtype": "float64"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="the .npz or .npz.xz with the real sets")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sobolev_regression")
    parser.add_argument("--seconds", type=float, default=1.5, help="processor time of a run")
    parser.add_argument("--trials", type=int, default=10, help="settings that every arm may try on every problem")
    parser.add_argument("--splits", type=int, default=5, help="splits, and seeds, of the contest")
    parser.add_argument("--points", type=int, default=2, help="splits of every point of the sweep")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = (*(Sampled(Sines(), noise) for noise in (0.0, 0.3, 1.0)), Sampled(Checks(), 0.1))
    sets = real(given.data, REAL) if given.data else ()
    noisy = (replace(table, noise=1.0) for table in sets if table.title in NOISY)
    problems = (*sets, *noisy, *known)
    record = Study(problems, SWEPT, given.seconds, given.trials, given.splits, given.points).run(given.out)
    found = summary(record)
    (given.out / "summary.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    draw(record, found, given.out)
    print("\n\n".join(tables(found)))


if __name__ == "__main__":
    main()
