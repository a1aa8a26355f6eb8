"""Solve differential equations by least squares and by baselines, and keep the raw logs.

    python -m experiments.pde --problem poisson2d --solver natgrad adam --seeds 5 --minutes 1
    python -m experiments.pde --problem poisson5d --device cuda --minutes 5 --results DIR
    python -m experiments.pde --report --results DIR
    python -m experiments.pde --figure

A run writes ``DIR/<problem>/<solver>-<seed>.jsonl``: a header, then a line for each of some hundred looks at the error.
Time is that of the steps alone. A run that was cut short goes on from its last checkpoint, and one that is complete is
not repeated. Baselines with a learning rate are run at every rate of ``solvers.RATES``, each as long as the others: the
best of them is the tuned baseline.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from benchmarks.harness import machine
from experiments.files import commit, markdown_table, replaced
from experiments.pde.figure import draw
from experiments.pde.problems import PROBLEMS, Problem
from experiments.pde.solvers import BASELINES, RATES, SOLVERS, Stepper

RESULTS = Path(__file__).resolve().parents[1] / "results" / "pde"
_SAVE = 30.0  # seconds of steps between two checkpoints
_TARGETS = (1e-3, 1e-4, 1e-5, 1e-6)
HEAD = ("seeds", "seconds", "steps", "error", *(f"to {target:g}" for target in _TARGETS))


@final
@dataclass(frozen=True)
class Run:
    """One problem by one solver from one seed, for so many seconds of steps."""

    problem: Problem
    solver: str
    rate: float | None
    seed: int
    seconds: float
    device: str
    memory: int
    results: Path
    commit: str
    points: float = 1.0

    @property
    def name(self) -> str:
        rate = "" if self.rate is None else f"_{self.rate:g}"
        points = "" if self.points == 1 else f"_x{self.points:g}"
        return f"{self.solver}{rate}{points}-{self.seed}"

    @property
    def log(self) -> Path:
        return self.results / self.problem.name / f"{self.name}.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.results / "checkpoints" / f"{self.problem.name}-{self.name}.pt"

    def complete(self) -> bool:
        lines = read(self.log) if self.log.exists() else []
        return bool(lines) and lines[-1].get("done", False) and lines[0]["seconds"] >= self.seconds

    def execute(self) -> None:
        """From the last checkpoint, or from the start, to the end."""
        net = self.problem.network(self.seed, self.device)
        classes, generator = self.problem.classes(self.seed, self.device, self.points)
        stepper = SOLVERS[self.solver](net, classes, self.rate, self.memory)
        spent, steps, looks = 0.0, 0, self._looks()
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            net.load_state_dict(state["net"])
            stepper.load(state["stepper"])
            generator.set_state(state["generator"].cpu())
            spent, steps = state["seconds"], state["steps"]
            self._keep_until(spent)
        else:
            self._begin(sum(p.numel() for p in net.parameters()))
        looks = [look for look in looks if look > spent]
        saved, failure = spent, None
        while spent < self.seconds:
            start = time.perf_counter()
            try:
                loss = stepper.step(spent / self.seconds)
            except Exception as raised:  # one run of many must not end the others: it is in the log
                failure = f"{type(raised).__name__}: {raised}"
                break
            self._wait()
            spent += time.perf_counter() - start
            steps += 1
            if spent >= looks[0]:
                looks = [look for look in looks if look > spent] or [self.seconds]
                error = self.problem.error(net, self.device)
                self._write({"step": steps, "seconds": round(spent, 3), "loss": loss, "error": error})
            if spent - saved > _SAVE:
                self._save(net, stepper, generator, spent, steps)
                saved = spent
        error = self.problem.error(net, self.device)
        last: dict[str, Any] = {"step": steps, "seconds": round(spent, 3), "error": error, "done": True}
        if self.device.startswith("cuda"):
            last["memory"] = torch.cuda.max_memory_allocated()
        self._write(last if failure is None else {**last, "failure": failure})
        self.checkpoint.unlink(missing_ok=True)

    def _looks(self) -> list[float]:
        """Times of steps at which the error is looked at: close together at the start."""
        first = min(0.5, self.seconds / 100)
        ratio = (self.seconds / first) ** (1 / 100)
        return [first * ratio**k for k in range(101)]

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def _begin(self, parameters: int) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "problem": self.problem.name,
            "solver": self.solver,
            "rate": self.rate,
            "points": self.points,
            "seed": self.seed,
            "seconds": self.seconds,
            "parameters": parameters,
            "commit": self.commit,
            "machine": machine(torch.device(self.device)),
        }
        self.log.write_text(json.dumps(header, ensure_ascii=False) + "\n", encoding="utf-8")

    def _keep_until(self, spent: float) -> None:
        """Drop lines that were written after the checkpoint."""
        head, *lines = read(self.log)
        lines = [line for line in lines if line["seconds"] <= spent + 1e-3 and not line.get("done")]
        head = {**head, "seconds": self.seconds}
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *lines))
        self.log.write_text(text, encoding="utf-8")

    def _write(self, line: dict[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: v for k, v in line.items() if v == v}) + "\n")

    def _save(self, net: nn.Module, stepper: Stepper, generator: torch.Generator, spent: float, steps: int) -> None:
        with replaced(self.checkpoint) as file:
            state = {"net": net.state_dict(), "stepper": stepper.state(), "generator": generator.get_state()}
            torch.save({**state, "seconds": spent, "steps": steps}, file)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that was cut short is left out."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("}\n")]


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """All that was asked for: seeds outermost, so that a solver is known early on one seed."""
    for seed in options.seed or range(options.seeds):
        for problem in options.problem:
            for solver in options.solver:
                rates = options.rate or RATES.get(solver, (None,))
                for rate in rates:
                    yield Run(
                        PROBLEMS[problem], solver, rate, seed, 60 * options.minutes, options.device,
                        int(options.memory * 2**30), options.results, options.commit, options.points,
                    )  # fmt: skip


def by_solver(folder: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """The logs of a problem, by solver with its rate; a list item is a seed."""
    logs: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl")):
        lines = read(path)
        if len(lines) > 1:
            rate = "" if lines[0]["rate"] is None else f" {lines[0]['rate']:g}"
            points = lines[0].get("points", 1)
            logs[lines[0]["solver"] + rate + (f", {points:g}× points" if points != 1 else "")].append(lines)
    return logs


def report(results: Path) -> str:
    """A table for every problem: the median over seeds of the error at the end, and of the times to reach some."""
    tables = []
    for folder in folders(results):
        logs = by_solver(folder)
        rows = [[solver, *row(logs[solver]).values()] for solver in sorted(logs, key=lambda name: _error(logs[name]))]
        tables.append(markdown_table([folder.name, *HEAD], rows))
    return "\n\n".join(tables)


def folders(results: Path) -> list[Path]:
    """The folders of the problems that have logs."""
    return sorted(path for path in results.iterdir() if path.is_dir() and path.name in PROBLEMS)


def row(logs: Sequence[list[dict[str, Any]]]) -> dict[str, str]:
    """The cells of a solver, by column."""
    times = []
    for target in _TARGETS:
        reached = ((line["seconds"] for line in lines[1:] if line.get("error", 1) <= target) for lines in logs)
        middle = statistics.median(next(seconds, float("inf")) for seconds in reached)
        times.append("" if middle == float("inf") else f"{middle:.3g} s")
    steps = int(statistics.median(lines[-1]["step"] for lines in logs))
    cells = [str(len(logs)), f"{_seconds(logs):.0f}", str(steps), f"{_error(logs):.2e}", *times]
    return dict(zip(HEAD, cells, strict=True))


def _seconds(logs: Sequence[list[dict[str, Any]]]) -> float:
    return statistics.median(lines[-1]["seconds"] for lines in logs)


def _error(logs: Sequence[list[dict[str, Any]]], seconds: float = float("inf")) -> float:
    """The lowest error within so many seconds, the median over seeds."""
    looks = ((line["error"] for line in of[1:] if "error" in line and line["seconds"] <= seconds) for of in logs)
    return statistics.median(min(errors, default=float("inf")) for errors in looks)


@final
@dataclass(frozen=True)
class Gap:
    """The best baseline of a problem after all of its time, and least squares with no more time than that."""

    problem: str
    baseline: str
    seconds: float
    baseline_error: float
    solver: str
    error: float

    @property
    def ratio(self) -> float:
        return self.baseline_error / self.error


def gaps(results: Path) -> list[Gap]:
    """For every problem that has a baseline, the widest gap first; a step that was under way may end 1 % later."""
    found = []
    for folder in folders(results):
        logs = by_solver(folder)
        baselines = [name for name in logs if logs[name][0][0]["solver"] in BASELINES]
        if baselines and len(baselines) < len(logs):
            best = min(baselines, key=lambda name: _error(logs[name]))
            seconds = _seconds(logs[best])
            error, ours = min((_error(logs[name], 1.01 * seconds), name) for name in logs if name not in baselines)
            found.append(Gap(folder.name, best, seconds, _error(logs[best]), ours, error))
    return sorted(found, key=lambda gap: -gap.ratio)


def gap_table(results: Path) -> str:
    """How many times lower the error of least squares is than that of the best baseline."""
    head = ["problem", "best baseline", "seconds", "its error", "least squares", "error by then", "ratio"]
    rows = []
    for gap in gaps(results):
        ratio = f"{gap.ratio:,.3g}" if gap.ratio < 1000 else f"{gap.ratio:,.0f}"
        theirs, ours = f"{gap.baseline_error:.2e}", f"{gap.error:.2e}"
        rows.append([gap.problem, gap.baseline, f"{gap.seconds:.0f}", theirs, gap.solver, ours, ratio])
    return markdown_table(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.pde")
    parser.add_argument("--problem", nargs="+", choices=list(PROBLEMS), default=["poisson2d"])
    parser.add_argument("--solver", nargs="+", choices=list(SOLVERS), default=["natgrad"])
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    parser.add_argument("--seed", type=int, nargs="+", help="these instead, as processes beside each other need")
    parser.add_argument("--rate", type=float, nargs="+", help="learning rates, or the damping of least squares")
    parser.add_argument("--minutes", type=float, default=1.0, help="of steps, for every run")
    parser.add_argument("--points", type=float, default=1.0, help="times as many as the table of the problems has")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the processor")
    parser.add_argument("--memory", type=float, default=64.0, help="GiB that a structure may occupy")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of the code, where git does not tell it")
    parser.add_argument("--figure", action="store_true", help="draw the figure of docs/pde.md from the logs")
    parser.add_argument("--report", action="store_true", help="print the tables of the logs, and run nothing")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.figure:
        draw(options.results)
    elif not options.report:
        options.commit = options.commit or commit()
        for run in runs(options):
            if not run.complete():
                run.execute()
                last = read(run.log)[-1]
                print(f"{run.problem.name} {run.name}: {last}", flush=True)
    print(report(options.results), gap_table(options.results), sep="\n\n")


if __name__ == "__main__":
    main()
