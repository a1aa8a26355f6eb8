"""Sparse Gaussian processes: natural-gradient steps beside Adam and beside GPyTorch's, in one run on one machine.

Every contestant maximises the same bound, and has its best step size of a few. Time is what it takes to come within 0.1
nat of the bound where Adam ends; Adam's own time is the whole of its run and, beside it, until it was within 0.1 nat of
its end for good. Run with ``python benchmarks/vi.py``; GPyTorch takes part if it is installed, and the table says so if
it is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gp_cases import Adam, Case, Contestant, Natural, Peer, Steps, cases
from benchmarks.harness import Race, machine, race, settle
from benchmarks.report import Target, verdicts

NEAR = 0.1  # nats


@dataclass(frozen=True)
class Run:
    """The bound after every step of one contestant at its best step size."""

    contestant: Contestant
    elbo: tuple[float, ...]

    def steps_to(self, bound: float) -> int | None:
        """The steps after which the bound is reached, and stays."""
        below = [k for k, value in enumerate(self.elbo) if not value >= bound]
        last = below[-1] + 2 if below else 1
        return last if last <= len(self.elbo) else None


def best(candidates: Sequence[Contestant], case: Case, target: float | None) -> Run:
    """The candidate with the highest bound at the end or, with a target, the one that is there in the fewest steps."""
    runs = [Run(c, tuple(c.start(case).run(c.limit))) for c in candidates]
    if target is None:
        return max(runs, key=lambda run: run.elbo[-1])
    return min(runs, key=lambda run: (run.steps_to(target) or 10**9, -run.elbo[-1]))


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """All contestants on one case: their bounds, their steps to the target, and their times."""
    adam = best(Adam.candidates(), case, None)
    target = adam.elbo[-1] - NEAR
    runs: dict[str, Run] = {"natgrad": best(Natural.candidates(case), case, target)}
    if Peer.installed():
        runs["GPyTorch"] = best(Peer.candidates(case), case, target)
    counts: dict[str, int] = {"Adam": adam.contestant.limit, "Adam, to its end within 0.1": adam.steps_to(target) or 0}
    for name, run in runs.items():
        found = run.steps_to(target)
        if found is None and name == "natgrad":
            raise AssertionError(f"{case.name}: natgrad ends at {run.elbo[-1]:.3f}, below {target:.3f}")
        counts[name] = found or run.contestant.limit  # a peer that does not get there has the time that it had
    entries = {name: _timed({**runs, "Adam": adam}.get(name, adam).contestant, case, k) for name, k in counts.items()}
    result = race(entries, rounds, torch.device("cpu"), warmup=1)
    return {
        "case": case.name,
        "adam_elbo": adam.elbo[-1],
        "settings": {name: run.contestant.label for name, run in {**runs, "Adam": adam}.items()},
        "elbo": {name: run.elbo[counts[name] - 1] for name, run in runs.items()},
        "reached": {name: run.steps_to(target) is not None for name, run in runs.items()},
        "steps": counts,
        "seconds": {name: result.time(name).median for name in counts},
        "ratios": _ratios(result, counts),
    }


def _timed(contestant: Contestant, case: Case, count: int) -> Callable[[], Any]:
    def once() -> Steps:
        steps = contestant.start(case)  # set-up is part of the time: a user waits for it, too
        steps.run(count)
        return steps

    return once


def _ratios(result: Race, counts: Mapping[str, int]) -> dict[str, float]:
    return {name: result.ratio("natgrad", name).median for name in counts if name != "natgrad"}


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    """The ratios that were promised."""
    targets = []
    for row in rows:
        ratios = row["ratios"]
        targets.append(Target(f"{row['case']}: time over Adam's", ratios["Adam"], 0.1, True))
        if "GPyTorch" in ratios:
            targets.append(Target(f"{row['case']}: time over GPyTorch's", ratios["GPyTorch"], 0.5, True))
    return targets


def printed(row: Mapping[str, Any]) -> str:
    """A case as lines of text."""
    lines = [f"{row['case']}: Adam ends at {row['adam_elbo']:.2f} nats"]
    for name, seconds in row["seconds"].items():
        setting = row["settings"].get(name, "")
        setting += "" if row["reached"].get(name, True) else f", not there: {row['elbo'][name]:.2f}"
        lines.append(f"  {name:30}{row['steps'][name]:6} steps{1e3 * seconds:10.1f} ms  {setting}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--inducing", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "vi.json")
    arguments = parser.parse_args()
    settle()
    torch.set_default_dtype(torch.float64)
    start, rows = time.perf_counter(), []
    for case in cases(arguments.examples, arguments.inducing):
        rows.append(compare(case, arguments.rounds))
        print(printed(rows[-1]), flush=True)
    if not Peer.installed():
        print("GPyTorch is not installed, and did not take part")
    targets = claims(rows)
    print("\n".join(verdicts(targets)))
    content = {
        "machine": machine(torch.device("cpu")),
        "peers": {"gpytorch": _version("gpytorch")},
        "seconds": round(time.perf_counter() - start),
        "rows": rows,
        "targets": [{"claim": t.claim, "measured": t.measured, "bound": t.bound, "met": t.met} for t in targets],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
