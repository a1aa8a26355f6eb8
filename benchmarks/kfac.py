"""K-FAC beside forward+backward, AdamW and other libraries: ratios, all taken in one run.

    make bench
    python benchmarks/kfac.py                           # on the processor, one thread
    python benchmarks/kfac.py --device cuda             # matrix products "medium": tf32, factors in bfloat16
    python benchmarks/kfac.py --section factors         # one part: the other parts of the file stay as they are
    python benchmarks/kfac.py --device cuda --together  # where no loop settles, and nothing recorded is replayed
    python benchmarks/kfac.py --markdown                # print the tables of the file

factors  from the model and the batch to the Kronecker factors, one sampled target an example, over forward+backward:
         ours as an optimizer makes them, in the hook on a forward pass; "from nothing" is pullback and estimate
steps    training steps over those of fused AdamW, a whole cycle of the refreshes in every round; "10 & 100": the
         factors every ten steps, their inverses every hundred; sobolev: those of Sobolev K-FAC over those of K-FAC
memory   peak of a training step that refreshes everything, less the averaged factors and inverses it keeps, over SGD's
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks import contestants as c
from benchmarks import kfac_peers as peers
from benchmarks.coupling import compare
from benchmarks.harness import Race, duels, machine, peak_memory, settle, together
from benchmarks.kfac_cases import Case, Make, cases, tiny
from benchmarks.report import Report, Target, markdown, save, table
from benchmarks.soap import SOAP

OURS, OURS_TF32, FROM_NOTHING = "natgrad", "natgrad, all in tf32", "natgrad, from nothing"
UNIT, ADAMW, SGD = "forward+backward", "AdamW, fused", "SGD with momentum, fused"
TURNS = 10  # of a contestant and the unit in one round on a GPU: what starts the kernels is fast and slow for seconds
Contestant = Callable[[], Any]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def metric(problem: c.Problem) -> ng.Fisher:
    """The Fisher metric of the problem's family, one target an example."""
    return ng.Fisher(problem.family, samples=1)


def estimate(problem: c.Problem) -> Any:
    """The Kronecker factors, from nothing."""
    with ng.evaluating(problem.model):
        return ng.Kronecker().estimate(ng.pullback(problem.model, problem.x, metric(problem)))


def hooked(problem: c.Problem) -> Contestant:
    """A forward pass of a network of its own, in which an optimizer's hook makes the factors and averages them."""
    own = replace(problem, model=copy.deepcopy(problem.model))
    made = ng.KFAC(own.model, metric(own), lr=0.0, metric_every=1)
    own.loss(own.model(own.x), own.t).backward()
    made.step()  # there is an average from now on
    made.zero_grad()

    def contestant() -> None:
        own.model(own.x)
        made.tracker.discard()  # the next pass is due again

    return contestant


def inputs_of(problem: c.Problem) -> list[Tensor]:
    """A [i i] of every Linear and Conv2d layer by this library."""
    made = estimate(problem).tensors()
    layers = [name for name, m in problem.model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return [made[f"{name}.weight/A"].squeeze(0) for name in layers]


def kfac(problem: c.Problem, metric_every: int, inverse_every: int) -> Optimizer:
    """K-FAC with momentum; the step is short, so that random targets are not learned while the clock runs."""
    return lambda model: ng.KFAC(
        model, metric(problem), lr=1e-4, momentum=0.9, metric_every=metric_every, inverse_every=inverse_every
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The reference of memory."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The reference of time."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def soap(model: nn.Module) -> torch.optim.Optimizer:
    """Bases every ten steps."""
    return SOAP(model.parameters(), lr=1e-5, frequency=10)


def training(problem: c.Problem, optimizer: Optimizer, steps: int) -> Contestant:
    """So many training steps of a network of one's own."""
    own = replace(problem, model=copy.deepcopy(problem.model))
    made = optimizer(own.model)

    def contestant() -> None:
        for _ in range(steps):
            made.zero_grad(set_to_none=True)
            own.loss(own.model(own.x), own.t).backward()
            made.step()

    return contestant


def factors(report: Report, case: Case) -> None:
    """The factors by this library and by others."""
    problem = case.make(report.device)
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in problem.model.modules()):
        return  # in training mode there are factors in an optimizer's hook only, and peers have none to compare
    section = f"K-FAC factors, one sample: {problem.name}"
    check = peers.same_inputs(problem)
    if wrong := check(inputs_of(problem)):
        raise AssertionError(f"{section}: {wrong}")
    others, report.failures[section] = peers.runnable(peers.factors(), problem, check)
    mine = {OURS: hooked(problem)}
    if report.device.type == "cuda":
        mine[OURS_TF32] = _in_tf32(hooked(problem))
    result = _in_turns(report, section, {UNIT: c.gradient(problem), **mine, **others}, dict.fromkeys(mine, TURNS))
    # A race of its own: what it leaves in the allocator of a GPU would move what the others find there.
    alone = {UNIT: c.gradient(problem), FROM_NOTHING: lambda: estimate(problem)}
    _in_turns(report, f"K-FAC factors from nothing: {problem.name}", alone)
    if case.factors is not None:
        ratio = result.ratio(OURS, UNIT).median
        report.targets.append(Target(f"factors over forward+backward, {problem.name}", ratio, case.factors, True))
    if best := report.fastest_peer(result, OURS, others):
        claim = f"the fastest peer's factors over natgrad's, {problem.name}"
        report.targets.append(Target(claim, best[1], case.margin, False, best[0]))


def _in_tf32(contestant: Contestant) -> Contestant:
    """The same where matrix products may not be in bfloat16."""

    def run() -> None:
        torch.set_float32_matmul_precision("high")
        contestant()
        torch.set_float32_matmul_precision("medium")

    return run


def _in_turns(
    report: Report, section: str, entries: dict[str, Contestant], turns: dict[str, int] | None = None
) -> Race:
    """A race; on a GPU ten calls at a turn, so that the processor runs ahead of it as it does in training.

    ``turns``: how many of a contestant and the unit are a round there.
    """
    often, warmup = (10, report.cycles[1]) if report.device.type == "cuda" else (1, 2)
    calls = {name: partial(_repeated, contestant, often) for name, contestant in entries.items()}
    return report.race(section, calls, UNIT, report.rounds, dict.fromkeys(entries, often), warmup, turns)


def _repeated(contestant: Contestant, often: int) -> None:
    for _ in range(often):
        contestant()


def steps(report: Report, case: Case) -> None:
    """Training steps; whoever has a rhythm is timed over all of it, on a GPU in short turns with AdamW."""
    problem = case.make(report.device)
    section = f"training step: {problem.name}"
    plain, on_gpu = (10, True) if report.device.type == "cuda" else (20, False)
    entries: dict[str, Contestant] = {ADAMW: training(problem, adamw, plain), SGD: training(problem, sgd, plain)}
    entries["SOAP, every 10"] = training(problem, soap, 10)
    count, turns = {ADAMW: plain, SGD: plain, "SOAP, every 10": 10}, {SGD: TURNS}
    failures = report.failures.setdefault(section, {})
    for every in case.steps:
        label, ours = f"{every[0]} & {every[1]}", f"{OURS} K-FAC, {every[0]} & {every[1]}"
        length, cycle = (plain, plain) if on_gpu else (max(every[1], plain), every[1])
        entries[ours] = training(problem, kfac(problem, *every), length)
        able, errors = peers.runnable(peers.steps(*every, cycle), problem)
        entries |= {f"{name} K-FAC, {label}": contestant for name, contestant in able.items()}
        count |= {ours: length, **dict.fromkeys((f"{name} K-FAC, {label}" for name in able), cycle)}
        turns |= {ours: TURNS, **dict.fromkeys((f"{name} K-FAC, {label}" for name in able), max(1, every[1] // plain))}
        failures |= {f"{name} K-FAC, {label}": error for name, error in errors.items()}
    rounds, warmup = report.cycles
    result = report.race(section, entries, ADAMW, rounds, count, warmup, turns)
    for every, bound in case.steps.items():
        if bound is not None:
            label = f"{every[0]} & {every[1]}"
            ratio = result.ratio(f"{OURS} K-FAC, {label}", ADAMW).median
            claim = f"K-FAC step, {label}, over fused AdamW, {problem.name}"
            report.targets.append(Target(claim, ratio, bound, True))


def sobolev(report: Report, case: Case) -> None:
    """Steps of Sobolev K-FAC."""
    compare(report, case.make, metric, training, case.sobolev)


def prepare_training(make: Make, optimizer: Callable[[c.Problem], Optimizer], device: torch.device) -> Contestant:
    """A network, its optimizer and six steps, after the same with two examples."""

    def train(problem: c.Problem) -> None:
        training(problem, optimizer(problem), 6)()

    train(make(device).first(2))
    return lambda: train(make(device))


def memory(report: Report, case: Case) -> None:
    """All that a training step holds at its peak: parameters, gradients, activations, factors and their inverses."""
    problem = case.make(report.device)
    contenders = {SGD: _sgd, OURS: partial(kfac, metric_every=1, inverse_every=1)}
    peak = {
        name: peak_memory(prepare_training, case.make, optimizer, report.device, device=report.device)
        for name, optimizer in contenders.items()
    }
    kept = 2 * sum(t.numel() * t.element_size() for t in estimate(problem).tensors().values())
    sizes = {**peak, "factors and their inverses": kept}
    note = ", ".join(f"{name}: {size / 2**20:.0f} MB" for name, size in sizes.items())
    claim = f"peak memory of a K-FAC step less the factors and their inverses, over SGD's, {problem.name}"
    report.targets.append(Target(claim, (peak[OURS] - kept) / peak[SGD], 1.3, True, note))


def _sgd(problem: c.Problem) -> Optimizer:
    return sgd


def parts() -> dict[str, Callable[[Report, Case], None]]:
    """The sections by name."""
    return {"factors": factors, "steps": steps, "sobolev": sobolev, "memory": memory}


def run(report: Report, chosen: list[Case], names: list[str], done: Callable[[], Any] = lambda: None) -> None:
    """Section by section, network by network; ``done`` is called after each: a run may be cut off."""
    for name in names:
        for case in chosen:
            if name == "factors" or case.steps:
                parts()[name](report, case)
                done()
                if report.device.type == "cuda":
                    torch.cuda.empty_cache()


def only(chosen: list[Case], words: list[str]) -> list[Case]:
    """Those networks whose names have one of the words in them; all, where there are no words."""
    if not words:
        return chosen
    names = [case.make(torch.device("cpu")).name for case in chosen]
    found = [case for case, name in zip(chosen, names, strict=True) if any(word in name for word in words)]
    if not found:
        raise ValueError(f"--network {' '.join(words)}: no network is called so. Take a part of {'; '.join(names)}")
    return found


def main() -> None:
    """Run what was asked for, print the table, save the numbers."""
    parser = argparse.ArgumentParser(description="K-FAC in ratios, in one run.")
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda")
    parser.add_argument("--rounds", type=int, default=7, help="of one turn or several; half for steps on cpu")
    parser.add_argument("--section", choices=parts(), action="append", help="a part; may be given more than once")
    parser.add_argument("--network", action="append", help="only those whose names have this in them; may be repeated")
    parser.add_argument("--together", action="store_true", help="all contestants in every round")
    parser.add_argument("--quick", action="store_true", help="tiny networks and one round, to see that it runs")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the saved file and stop")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args()
    device = torch.device(args.device)
    words = ["kfac", *([] if device.type == "cpu" else [device.type]), *(["many"] if args.together else [])]
    name = "-".join(words) + ".json"
    path = args.output or Path(__file__).parent / "results" / (f"quick-{name}" if args.quick else name)
    if args.markdown:
        print(markdown(path))
        return
    settle()
    torch.set_float32_matmul_precision("medium" if device.type == "cuda" else "highest")
    start, timed = time.perf_counter(), together if args.together else duels
    report = Report(device, 1 if args.quick else args.rounds, timed)
    before = json.loads(path.read_text()) if (args.section or args.network) and path.exists() else None
    chosen = only(tiny() if args.quick else cases(device), args.network or [])
    run(report, chosen, args.section or list(parts()), lambda: save(report, path, time.perf_counter() - start, before))
    print(table(report))
    print(f"\n{time.perf_counter() - start:.0f} s; torch {torch.__version__}, {machine(device)['device']}")


if __name__ == "__main__":
    main()
