"""K-FAC beside forward+backward, AdamW and other libraries: ratios, all measured in one run.

    make bench
    python benchmarks/kfac.py                           # on the CPU, one thread
    python benchmarks/kfac.py --device cuda             # matrix products "medium": tf32, factors in bfloat16
    python benchmarks/kfac.py --section factors         # one section; the rest of the result file stays as it is
    python benchmarks/kfac.py --contestant Natural      # only contestants with this in their names, and AdamW
    python benchmarks/kfac.py --device cuda --together  # all contestants alternate, so no CUDA graph is ever replayed
    python benchmarks/kfac.py --markdown                # print the tables of the result file

factors   Kronecker factors of a batch, one sampled target per example, over forward+backward. "natgrad" is what the
          optimizer's forward hook does; "natgrad, from nothing" is pullback and estimate
changing  the same where every batch has another size, so that a GPU never sees the same addresses twice
steps     training steps over fused AdamW's, averaged over a whole refresh cycle; "10 & 100" means factors every ten
          steps, inverses every hundred
presets   the optimizers of docs/optimizers.md: training steps over fused AdamW's, averaged over a cycle of ten; then
          the optimizers' steps alone, the same gradient every time; then the host's time in a step, and the peak
          memory of a training step
sobolev   Sobolev K-FAC steps over K-FAC steps
memory    peak memory of a training step that refreshes everything, less the factors and inverses, over SGD's
resnet18  ResNet-18 at full width: the first K-FAC step, a step with new factors and a plain step, over AdamW's
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks import kfac_peers as peers
from benchmarks import networks
from benchmarks.harness import Race, SubprocessRunner, duels, machine, now, peak_memory, settle, together
from benchmarks.networks import Problem, gradient
from benchmarks.report import Report, Row, Target, markdown, save, table
from benchmarks.rivals import SOAP, KLShampoo, Together

OURS, OURS_TF32, FROM_NOTHING = "natgrad", "natgrad, all in tf32", "natgrad, from nothing"
UNIT, ADAMW, SGD = "forward+backward", "AdamW, fused", "SGD with momentum, fused"
KFAC, SOBOLEV = "natgrad K-FAC, 10 & 100", "natgrad Sobolev K-FAC, 10 & 100"
TURNS = 10  # turns of a contestant and the unit in one round on a GPU: the host's launch speed drifts over seconds
Contestant: TypeAlias = Callable[[], Any]
Optimizer: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]
Make: TypeAlias = Callable[[torch.device], Problem]


@final
@dataclass(frozen=True)
class Case:
    """A network and the bounds it has to meet; None where there is no bound.

    ``factors``: time over forward+backward. ``margin``: the fastest peer's time over ours. ``steps``: time over
    AdamW's, by (metric_every, inverse_every). ``natural``: training steps of ``ng.Natural`` over AdamW's, and
    ``natural_memory`` their peak memory. ``sobolev``: Sobolev K-FAC steps over K-FAC steps.
    """

    make: Make
    factors: float | None = None
    margin: float = 1.0
    steps: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    natural: float | None = None
    natural_memory: float | None = None
    sobolev: float | None = None


def cases(device: torch.device) -> list[Case]:
    """The networks of a device."""
    if device.type == "cuda":
        return [
            Case(partial(networks.autoencoder, 1000), 1.2, steps={(10, 100): 1.25, (1, 10): 3.0}, natural=1.25),
            Case(partial(networks.vgg, 128), 1.3, steps={(10, 100): 1.25, (1, 10): 4.0}, natural=1.3, sobolev=1.1),
            Case(partial(networks.vgg, 128, norm=nn.BatchNorm2d), steps={(10, 100): None}, sobolev=1.1),
            Case(
                partial(networks.gpt, 32, 256),
                1.1,
                steps={(10, 100): 1.15, (1, 10): 2.5},
                natural=1.2,
                natural_memory=1.5,
            ),
        ]
    free: dict[tuple[int, int], float | None] = {(10, 100): None, (1, 10): None}
    return [
        Case(partial(networks.mlp, (784, 1000, 1000, 10), 512), 1.5, steps=free),
        Case(partial(networks.lenet, 256), 1.3),
        Case(partial(networks.resnet, 16, 128), 1.9, margin=2.0, steps=free),
        Case(partial(networks.resnet, 16, 128, blocks=3), 1.9, margin=2.0),
        Case(partial(networks.transformer, 16, 64), 1.5, steps=free),
        Case(partial(networks.rnn, 128, 20)),
    ]


def tiny() -> list[Case]:
    """The same kinds of networks at sizes that run in a moment."""
    every: dict[tuple[int, int], float | None] = {(1, 2): 100.0}
    return [
        Case(partial(networks.autoencoder, 8, widths=(6, 5, 3)), 100.0, steps=every),
        Case(partial(networks.lenet, 4, pixels=16), 100.0),
        Case(partial(networks.vgg, 4, plan=(3, 0, 4, 0), pixels=8), 100.0),
        Case(partial(networks.gpt, 2, 5, layers=1, width=12, vocabulary=7), 100.0, steps=every),
        Case(partial(networks.rnn, 4, 3, i=3, width=4), 100.0),
    ]


def metric(problem: Problem) -> ng.Fisher:
    """The Fisher metric of the problem's family, one sampled target per example."""
    return ng.Fisher(problem.family, samples=1)


def estimate(problem: Problem) -> Any:
    """The Kronecker factors by pullback and estimate."""
    with ng.evaluating(problem.model):
        return ng.Kronecker().estimate(ng.pullback(problem.model, problem.x, metric(problem)))


def hooked(problem: Problem, batches: Iterator[Tensor] | None = None) -> Contestant:
    """A forward pass of a copy of the network, in which the optimizer's hook computes and averages the factors.

    ``batches``: the inputs of every call; by default those of the problem.
    """
    problem = replace(problem, model=copy.deepcopy(problem.model))
    optimizer = ng.KFAC(problem.model, metric(problem), lr=0.0, metric_every=1)
    problem.loss(problem.model(problem.x), problem.t).backward()
    optimizer.step()  # from now on there is a moving average
    optimizer.zero_grad()

    def contestant() -> None:
        problem.model(problem.x if batches is None else next(batches))
        optimizer.tracker.discard()  # the next pass is due again

    return contestant


def inputs_of(problem: Problem) -> list[Tensor]:
    """A [i i] of every Linear and Conv2d layer by this library."""
    tensors = estimate(problem).tensors()
    layers = [name for name, m in problem.model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return [tensors[f"{name}.weight/A"].squeeze(0) for name in layers]


def kfac(problem: Problem, metric_every: int, inverse_every: int) -> Optimizer:
    """K-FAC with momentum; the learning rate is small, so that the timed network hardly changes."""
    return lambda model: ng.KFAC(
        model,
        metric(problem),
        lr=1e-4,
        momentum=0.9,
        metric_every=metric_every,
        inverse_every=inverse_every,
        early=False,
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The reference for memory."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The reference for time."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def soap(model: nn.Module) -> torch.optim.Optimizer:
    """SOAP with new eigenbases every ten steps."""
    return SOAP(model.parameters(), lr=1e-5, betas=(0.95, 0.95), weight_decay=0.01)


def training(problem: Problem, optimizer: Optimizer, steps: int) -> Contestant:
    """So many training steps of a copy of the network."""
    problem = replace(problem, model=copy.deepcopy(problem.model))
    opt = optimizer(problem.model)

    def contestant() -> None:
        for _ in range(steps):
            opt.zero_grad(set_to_none=True)
            problem.loss(problem.model(problem.x), problem.t).backward()
            opt.step()

    return contestant


def has_batch_norm(problem: Problem) -> bool:
    """Whether the network mixes the examples of a batch in training mode."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in problem.model.modules())


def factors(report: Report, case: Case) -> None:
    """The factors by this library and by its peers."""
    problem = case.make(report.device)
    if has_batch_norm(problem):
        return  # in training mode only an optimizer's hook has factors, and the peers have none to compare with
    section = f"K-FAC factors, one sample: {problem.name}"
    check = peers.same_inputs(problem)
    if wrong := check(inputs_of(problem)):
        raise AssertionError(f"{section}: {wrong}")
    others, report.failures[section] = peers.runnable(peers.factors(), problem, check)
    mine = {OURS: hooked(problem)}
    if report.device.type == "cuda":
        mine[OURS_TF32] = _in_tf32(hooked(problem))
    result = _in_turns(report, section, {UNIT: gradient(problem), **mine, **others}, dict.fromkeys(mine, TURNS))
    # A separate race: it would move the addresses that the other contestants find in a GPU's allocator.
    alone = {UNIT: gradient(problem), FROM_NOTHING: lambda: estimate(problem)}
    _in_turns(report, f"K-FAC factors from nothing: {problem.name}", alone)
    if case.factors is not None and OURS in result.seconds:
        ratio = result.ratio(OURS, UNIT).median
        report.targets.append(Target(f"factors over forward+backward, {problem.name}", ratio, case.factors, True))
    if OURS in result.seconds and (best := report.fastest_peer(result, OURS, others)):
        claim = f"the fastest peer's factors over natgrad's, {problem.name}"
        report.targets.append(Target(claim, best[1], case.margin, False, best[0]))


def _in_tf32(contestant: Contestant) -> Contestant:
    """The same without bfloat16 in matrix products."""

    def run() -> None:
        torch.set_float32_matmul_precision("high")
        contestant()
        torch.set_float32_matmul_precision("medium")

    return run


def _in_turns(
    report: Report, section: str, entries: dict[str, Contestant], turns: dict[str, int] | None = None
) -> Race:
    """A race; on a GPU with ten calls per turn, so that the host runs ahead of the device as it does in training.

    ``turns``: turns of a contestant and the unit in one round on a GPU.
    """
    often, warmup = (10, report.cycles[1]) if report.device.type == "cuda" else (1, 2)
    calls = {name: partial(_repeated, contestant, often) for name, contestant in entries.items()}
    return report.race(section, calls, UNIT, report.rounds, dict.fromkeys(entries, often), warmup, turns)


def _repeated(contestant: Contestant, often: int) -> None:
    for _ in range(often):
        contestant()


def changing(report: Report, case: Case) -> None:
    """The factors where every batch has another size: what is replayed reads padded copies."""
    problem = case.make(report.device)
    if has_batch_norm(problem):
        return
    model, loss, batches = problem.model, problem.loss, batches_of_changing_size(problem)

    def forward_backward() -> None:
        x, t = next(batches)
        model.zero_grad(set_to_none=True)
        loss(model(x), t).backward()

    inputs = (x for x, _ in batches_of_changing_size(problem))
    entries = {UNIT: forward_backward, OURS: hooked(problem, inputs)}
    result = _in_turns(report, f"K-FAC factors, batches of changing size: {problem.name}", entries, {OURS: TURNS})
    if report.device.type == "cuda":  # on the CPU nothing is replayed in any section
        claim = f"factors over forward+backward, batches of changing size, {problem.name}"
        report.targets.append(Target(claim, result.ratio(OURS, UNIT).median, 1.5, True))


def batches_of_changing_size(problem: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches with half to all of the examples; tokens have half to all of their positions instead."""
    axis = 0 if problem.x.is_floating_point() else 1
    size, generator = problem.x.shape[axis], torch.Generator().manual_seed(0)
    while True:
        n = int(torch.randint(max(1, size // 2), size + 1, (), generator=generator))
        yield problem.x.narrow(axis, 0, n).contiguous(), problem.t.narrow(axis, 0, n).contiguous()


def steps(report: Report, case: Case) -> None:
    """Training steps, timed over whole refresh cycles; on a GPU in short turns with AdamW."""
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
        label = f"{every[0]} & {every[1]}"
        if bound is not None and f"{OURS} K-FAC, {label}" in result.seconds:
            ratio = result.ratio(f"{OURS} K-FAC, {label}", ADAMW).median
            claim = f"K-FAC step, {label}, over fused AdamW, {problem.name}"
            report.targets.append(Target(claim, ratio, bound, True))


NATURAL, MUON, TORCH_MUON = "natgrad Natural", "natgrad Muon", "torch's Muon, and AdamW fused"
OUR_SOAP, REFERENCE_SOAP, SHAMPOO = "natgrad SOAP, every 10", "SOAP, every 10", "natgrad Shampoo"
OUR_KL, REFERENCE_KL = "natgrad KL-Shampoo, every 10", "KL-Shampoo, every 10, and AdamW fused"


def torch_muon(model: nn.Module) -> Any:
    """torch's Muon for matrices, and kernels as such; fused AdamW for embeddings, gains and biases."""
    tiny, decay = 1e-5, 0.1
    return Together(
        model,
        lambda hidden: torch.optim.Muon(hidden, lr=tiny, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        lr=tiny,
        weight_decay=decay,
        lend=True,
    )


def kl_shampoo(model: nn.Module) -> Any:
    """KL-Shampoo for matrices and kernels, with new eigenbases every ten steps; fused AdamW for the others."""
    tiny, decay = 1e-5, 0.1
    return Together(
        model, lambda hidden: KLShampoo(hidden, tiny, (0.9, 0.95), decay), lr=tiny, weight_decay=decay, lend=True
    )


PRESETS: dict[str, Callable[[nn.Module], Any]] = {  # learning rates are small: the timed network hardly changes
    ADAMW: adamw,
    NATURAL: lambda model: ng.Natural(model, lr=1e-5),
    SHAMPOO: lambda model: ng.Shampoo(model, lr=1e-5),
    MUON: lambda model: ng.Muon(model, lr=1e-5),
    TORCH_MUON: torch_muon,
    OUR_SOAP: lambda model: ng.SOAP(model, lr=1e-5),
    REFERENCE_SOAP: soap,
    OUR_KL: lambda model: ng.Shampoo(model, lr=1e-5, fit="kl", inverse_every=10),
    REFERENCE_KL: kl_shampoo,
}


def presets(report: Report, case: Case) -> None:
    """Whole training steps of ours, and the steps of all alone, over fifty steps: whole cycles of all of them."""
    problem, (rounds, warmup) = case.make(report.device), report.cycles
    cycle = 50 if report.device.type == "cuda" else 10
    ours = {name: make for name, make in PRESETS.items() if name not in (TORCH_MUON, REFERENCE_SOAP, REFERENCE_KL)}
    whole = {name: training(problem, make, cycle) for name, make in ours.items()}
    count = dict.fromkeys(PRESETS, cycle)
    result = report.race(f"training step of a preset: {problem.name}", whole, ADAMW, rounds, count, warmup)
    alone = {name: stepping(problem, make, cycle) for name, make in PRESETS.items()}
    apart = report.race(f"step of an optimizer alone: {problem.name}", alone, ADAMW, rounds, count, warmup)
    compared = [
        ("step of natgrad's Muon alone over that of torch's", MUON, TORCH_MUON, 0.6),
        ("step of natgrad's SOAP alone over the reference's", OUR_SOAP, REFERENCE_SOAP, 0.5),
        ("step of natgrad's KL-Shampoo alone over the reference's", OUR_KL, REFERENCE_KL, 1.0),
    ]
    for claim, mine, theirs, bound in compared:
        if {mine, theirs} <= apart.seconds.keys():
            # Seconds, not multiples of AdamW's step: that takes 0.1 ms, and varies by half of it.
            ratio = apart.time(mine).median / apart.time(theirs).median
            report.targets.append(Target(f"{claim}, {problem.name}", ratio, bound, True))
    if NATURAL not in result.seconds:
        return
    if case.natural is not None:
        ratio, claim = result.ratio(NATURAL, ADAMW).median, "training step of Natural over fused AdamW"
        report.targets.append(Target(f"{claim}, {problem.name}", ratio, case.natural, True))
    if report.device.type == "cuda":
        own = {name: 1e3 * launching(problem, PRESETS[name], report.device) for name in (ADAMW, NATURAL)}
        note = ", ".join(f"{name}: {ms:.2f} ms" for name, ms in own.items())
        claim = f"milliseconds of the host in a step of Natural, less those in one of AdamW, {problem.name}"
        report.targets.append(Target(claim, own[NATURAL] - own[ADAMW], 0.3, True, note))
    if case.natural_memory is None:
        return
    peak = {
        name: peak_memory(prepare_training, case.make, _OF_PROBLEM[name], report.device, device=report.device)
        for name in _OF_PROBLEM
    }
    note = ", ".join(f"{name}: {size / 2**20:.0f} MB" for name, size in peak.items())
    claim = f"peak memory of a training step of Natural over AdamW's, {problem.name}"
    report.targets.append(Target(claim, peak[NATURAL] / peak[ADAMW], case.natural_memory, True, note))


def _natural(problem: Problem) -> Optimizer:
    return PRESETS[NATURAL]


def _adamw(problem: Problem) -> Optimizer:
    return adamw


_OF_PROBLEM = {ADAMW: _adamw, NATURAL: _natural}


def stepping(problem: Problem, optimizer: Callable[[nn.Module], Any], steps: int) -> Contestant:
    """So many steps of an optimizer with the gradient of the first batch, which stays where it is."""
    problem = replace(problem, model=copy.deepcopy(problem.model))
    opt = optimizer(problem.model)
    problem.loss(problem.model(problem.x), problem.t).backward()

    def contestant() -> None:
        for _ in range(steps):
            opt.step()

    return contestant


def launching(problem: Problem, optimizer: Callable[[nn.Module], Any], device: torch.device) -> float:
    """Seconds until a step of an optimizer returns, while the device has nothing else to do: Python and launches."""
    step, seconds = stepping(problem, optimizer, 1), []
    for _ in range(60):
        start = now(device)
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[20:])  # graphs are captured in the first steps


def sobolev(report: Report, case: Case) -> None:
    """Sobolev K-FAC steps over K-FAC steps. A kernel of tokens does not exist: language models are left out."""
    problem = case.make(report.device)
    if not problem.x.is_floating_point():
        return
    steps, (rounds, warmup) = 100 if report.device.type == "cuda" else 10, report.cycles
    loops = {name: partial(training_loop, case.make, opt, steps) for name, opt in _COUPLINGS.items()}
    with _running(loops, report.device) as entries:
        count = dict.fromkeys(entries, steps)
        result = report.race(f"Sobolev K-FAC: {problem.name}", entries, KFAC, rounds, count, warmup)
    if case.sobolev is not None:
        claim = f"Sobolev K-FAC step, 10 & 100, over K-FAC, {problem.name}"
        report.targets.append(Target(claim, result.ratio(SOBOLEV, KFAC).median, case.sobolev, True))


def plain_kfac(metric: ng.OutputMetric, model: nn.Module) -> torch.optim.Optimizer:
    """The unit of the section."""
    return ng.KFAC(model, metric, lr=1e-4, metric_every=10, inverse_every=100, early=False)


def sobolev_kfac(metric: ng.OutputMetric, model: nn.Module) -> torch.optim.Optimizer:
    """The same schedule with a coupled metric."""
    return ng.SobolevKFAC(model, metric, lr=1e-4, lengthscale=20.0, metric_every=10, inverse_every=100, early=False)


_COUPLINGS = {KFAC: plain_kfac, SOBOLEV: sobolev_kfac}


def training_loop(
    make: Make,
    optimizer: Callable[[ng.OutputMetric, nn.Module], torch.optim.Optimizer],
    steps: int,
    device: torch.device,
) -> Contestant:
    """So many steps of a new network."""
    problem = make(device)
    return training(problem, partial(optimizer, metric(problem)), steps)


@contextmanager
def _running(
    loops: Mapping[str, Callable[[torch.device], Contestant]], device: torch.device
) -> Iterator[dict[str, Contestant]]:
    """The loops, ready to be called. On a GPU each has its own process: a second one would move its addresses."""
    if device.type != "cuda":
        yield {name: loop(device) for name, loop in loops.items()}
        return
    with ExitStack() as stack:
        yield {name: stack.enter_context(SubprocessRunner(loop, device, device=device)) for name, loop in loops.items()}


def prepare_training(make: Make, optimizer: Callable[[Problem], Optimizer], device: torch.device) -> Contestant:
    """A network, its optimizer and six steps, after the same with two examples."""

    def train(problem: Problem) -> None:
        training(problem, optimizer(problem), 6)()

    train(make(device).first(2))
    return lambda: train(make(device))


def memory(report: Report, case: Case) -> None:
    """The peak of a training step: parameters, gradients, activations, factors and their inverses."""
    problem = case.make(report.device)
    contenders = {SGD: _sgd, OURS: partial(kfac, metric_every=1, inverse_every=1)}
    peak = {
        name: peak_memory(prepare_training, case.make, optimizer, report.device, device=report.device)
        for name, optimizer in contenders.items()
    }
    state = 2 * sum(t.numel() * t.element_size() for t in estimate(problem).tensors().values())
    sizes = {**peak, "factors and their inverses": state}
    note = ", ".join(f"{name}: {size / 2**20:.0f} MB" for name, size in sizes.items())
    claim = f"peak memory of a K-FAC step less the factors and their inverses, over SGD's, {problem.name}"
    report.targets.append(Target(claim, (peak[OURS] - state) / peak[SGD], 1.3, True, note))


def _sgd(problem: Problem) -> Optimizer:
    return sgd


FIRST, NEW_FACTORS, PLAIN = "natgrad K-FAC, first step", "natgrad K-FAC, new factors", "natgrad K-FAC, plain step"


def resnet18(report: Report, case: Case) -> None:
    """The kinds of steps of a K-FAC run, each timed beside a step of AdamW; factors are new every ten steps.

    Three optimizers make a first step: the first of them also waits for memory that the process has never used.
    """
    problem = case.make(report.device)
    seconds: dict[str, list[float]] = {name: [] for name in (ADAMW, FIRST, NEW_FACTORS, PLAIN)}
    beside: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(3):
        training(problem, adamw, 2)()  # memory and caches are warm
        ours, theirs = training(problem, kfac(problem, 10, 100), 1), training(problem, adamw, 1)
        for step in range(21 if number < max(1, report.rounds // 3) else 1):
            name = FIRST if step == 0 else NEW_FACTORS if step % 10 == 0 else PLAIN
            unit, time = _seconds(theirs, report.device), _seconds(ours, report.device)
            seconds[name].append(time)
            seconds[ADAMW].append(unit)
            beside[name].append(unit)
    race = Race(ADAMW, seconds, {**beside, ADAMW: seconds[ADAMW]})
    section = f"kinds of steps: {problem.name}"
    for name in seconds:
        report.rows.append(Row(section, name, race.time(name), race.ratio(name, ADAMW), ADAMW))
    plain, renewed = race.ratio(PLAIN, ADAMW).median, race.ratio(NEW_FACTORS, ADAMW).median
    first = race.time(FIRST).median / race.time(PLAIN).median
    report.targets.append(Target(f"first K-FAC step over a plain one, {problem.name}", first, 3.0, True))
    report.targets.append(Target(f"a plain K-FAC step over one of fused AdamW, {problem.name}", plain, 2.0, True))
    claim = f"ten K-FAC steps, one of them with new factors, over ten of fused AdamW, {problem.name}"
    report.targets.append(Target(claim, (9 * plain + renewed) / 10, 2.0, True))


def _seconds(contestant: Contestant, device: torch.device) -> float:
    start = now(device)
    contestant()
    return now(device) - start


def sections() -> dict[str, Callable[[Report, Case], None]]:
    """The sections by name."""
    return {
        "factors": factors,
        "changing": changing,
        "steps": steps,
        "presets": presets,
        "sobolev": sobolev,
        "memory": memory,
        "resnet18": resnet18,
    }


def resnet18_case(quick: bool = False) -> Case:
    """The only network of its section."""
    return Case(partial(networks.resnet18, 2, width=4, pixels=8) if quick else partial(networks.resnet18, 32))


def run(
    report: Report, chosen: list[Case], names: list[str], done: Callable[[], Any] = lambda: None, quick: bool = False
) -> None:
    """Section by section, network by network; ``done`` is called after each, since a run may be cut off."""
    for name in names:
        for case in [resnet18_case(quick)] if name == "resnet18" else chosen:
            if name in ("factors", "changing", "resnet18") or case.steps:
                sections()[name](report, case)
                done()
                if report.device.type == "cuda":
                    torch.cuda.empty_cache()


def only(chosen: list[Case], words: list[str]) -> list[Case]:
    """The networks whose names contain one of the words; all of them, where there are no words."""
    if not words:
        return chosen
    names = [case.make(torch.device("cpu")).name for case in chosen]
    matching = [case for case, name in zip(chosen, names, strict=True) if any(word in name for word in words)]
    if not matching:
        raise ValueError(f"--network {' '.join(words)}: no network is called so. Take a part of {'; '.join(names)}")
    return matching


def main() -> None:
    """Run the sections that were asked for, print the table, save the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the timing; half of them for steps on cpu")
    parser.add_argument("--section", choices=sections(), action="append", help="run this section; may be repeated")
    parser.add_argument("--network", action="append", help="only networks whose names contain this; may be repeated")
    parser.add_argument(
        "--contestant", action="append", help="only this one, or those whose names contain this; may be repeated"
    )
    parser.add_argument("--together", action="store_true", help="all contestants alternate in every round")
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
    report = Report(device, 1 if args.quick else args.rounds, timed, tuple(args.contestant or ()))
    parts = args.section or args.network or args.contestant
    before = json.loads(path.read_text()) if parts and path.exists() else None
    chosen = only(tiny() if args.quick else cases(device), args.network or [])
    run(
        report,
        chosen,
        args.section or list(sections()),
        lambda: save(report, path, time.perf_counter() - start, before),
        quick=args.quick,
    )
    print(table(report))
    print(f"\n{time.perf_counter() - start:.0f} s; torch {torch.__version__}, {machine(device)['device']}")


if __name__ == "__main__":
    main()
