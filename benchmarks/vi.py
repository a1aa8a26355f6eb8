"""Sparse Gaussian processes: natural-gradient steps beside Adam and GPyTorch, in one run on one machine.

Every contestant maximises the same bound, with up to 1500 steps and the best of a few rates. Its time is the time to
come within 0.1 nat of the final bound of the best Adam run, set-up included; the file also has the number of steps
after which a run stays there.

Where hyperparameters are learned, ours are moved by L-BFGS (``learn``) and GPyTorch's by Adam, as in its tutorial. A
third contestant combines our steps with Adam, to separate the two differences. Where they are given, ours and Adam
compute the projection on the inducing points once, and GPyTorch in every step.

Run with ``python benchmarks/vi.py``. GPyTorch takes part if it is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gp_cases import Adam, Case, Contestant, Natural, NaturalAdam, Peer, Steps, cases
from benchmarks.harness import Race, duels, machine, settle
from benchmarks.report import Target, verdicts

NEAR = 0.1  # nats
OURS, MATCHED, PEER = "natgrad", "natgrad, hyperparameters by Adam", "GPyTorch"
ADAM, WHOLE = "Adam", "Adam, all steps"


@final
@dataclass(frozen=True)
class Run:
    """The bound after every step of one contestant at its best step size."""

    contestant: Contestant
    elbo: tuple[float, ...]

    def steps_to(self, bound: float) -> int | None:
        """The number of steps until the bound is first reached."""
        return next((k for k, value in enumerate(self.elbo, 1) if value >= bound), None)

    def steps_for_good(self, bound: float) -> int | None:
        """The number of steps after which the run stays above the bound."""
        below = [k for k, value in enumerate(self.elbo, 1) if not value >= bound]
        last = below[-1] + 1 if below else 1
        return last if last <= len(self.elbo) else None


def tried(candidates: Sequence[Contestant], case: Case) -> list[Run]:
    """Run every candidate on a case, with all of its steps."""
    return [Run(c, tuple(c.start(case).run(c.limit))) for c in candidates]


def soonest(runs: Sequence[Run], target: float) -> Run:
    """The run that reaches the target in the fewest steps or, if none does, the one that ends highest."""
    return min(runs, key=lambda run: (run.steps_to(target) or 10**9, -run.elbo[-1]))


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """All contestants on one case: their bounds, their steps to the target, and their times."""
    of_adam = tried(Adam.candidates(), case)
    adam = max(of_adam, key=lambda run: run.elbo[-1])
    target = adam.elbo[-1] - NEAR
    runs = {ADAM: soonest(of_adam, target), OURS: soonest(tried(Natural.candidates(case), case), target)}
    if case.learned:
        runs[MATCHED] = soonest(tried(NaturalAdam.candidates(case), case), target)
    if Peer.installed():
        runs[PEER] = soonest(tried(Peer.candidates(case), case), target)
    if runs[OURS].steps_to(target) is None:
        raise AssertionError(f"{case.name}: {OURS} ends at {runs[OURS].elbo[-1]:.3f}, below {target:.3f}")
    # A contestant that does not reach the target has the time of all its steps; "reached" says so.
    counts = {name: run.steps_to(target) or run.contestant.limit for name, run in runs.items()}
    entries = {name: _timed(run.contestant, case, counts[name]) for name, run in runs.items()}
    entries[WHOLE] = _timed(adam.contestant, case, adam.contestant.limit)
    result = duels(entries, ADAM, rounds, torch.device("cpu"), warmup=1)
    return {
        "case": case.name,
        "learned": case.learned,
        "adam_elbo": adam.elbo[-1],
        "settings": {name: run.contestant.label for name, run in {**runs, WHOLE: adam}.items()},
        "elbo": {name: run.elbo[min(counts[name], len(run.elbo)) - 1] for name, run in runs.items()},
        "reached": {name: run.steps_to(target) is not None for name, run in runs.items()},
        "steps": {**counts, WHOLE: adam.contestant.limit},
        "steps_for_good": {name: run.steps_for_good(target) for name, run in runs.items()},
        "seconds": {name: result.time(name).median for name in entries},
        "ratios": {ours: _ratios(result, ours) for ours in (OURS, MATCHED) if ours in entries},
    }


def _timed(contestant: Contestant, case: Case, count: int) -> Callable[[], Any]:
    def once() -> Steps:
        steps = contestant.start(case)  # set-up is part of the time
        steps.run(count)
        return steps

    return once


def _ratios(result: Race, ours: str) -> dict[str, float]:
    return {name: result.ratio(ours, name).median for name in result.seconds if name not in (OURS, MATCHED)}


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    """The target ratios. Adam's time is the time until it reaches the target itself, not that of its whole run.

    Where hyperparameters are learned, the peer is compared with our steps and the peer's optimizer for them.
    """
    targets = []
    for row in rows:
        like = row["ratios"][MATCHED if row["learned"] else OURS]
        targets.append(Target(f"{row['case']}: time over Adam's", row["ratios"][OURS][ADAM], 0.1, True))
        if PEER in like:
            note = "" if row["reached"][PEER] else "the peer did not get there: its time is that of all its steps"
            targets.append(Target(f"{row['case']}: time over GPyTorch's", like[PEER], 0.5, True, note))
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
        "targets": [{**asdict(t), "met": t.met} for t in targets],
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
