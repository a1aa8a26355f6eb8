"""Loss against seconds: self-tuned K-FAC beside tuned SGD with momentum, AdamW and SOAP.

    python benchmarks/training.py --tune 2                # digits: tune, then run
    python benchmarks/training.py                         # run with the tuned settings
    python benchmarks/training.py --mnist mnist/          # auto-encoder; idx files (.gz), .npz or .npz.xz
    python benchmarks/training.py --device cuda --mnist mnist.npz.xz --tune 2 --seconds 15
    python benchmarks/training.py --resume                # skip the runs of the result file

All optimizers get the same seconds and the same initial weights. SGD, AdamW and SOAP are tuned on a grid of learning
rates, constant or decaying linearly to zero, and of batch sizes, K-FAC's and smaller ones: all settings are tried for
``--tune`` seconds, the best three for the whole budget, and the smallest training loss wins. K-FAC has its default
arguments. The clock counts CPU time of one thread, or the time of the GPU's queue, and stops while losses are measured.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.optim import Optimizer

import natgrad as ng
from benchmarks import rivals as optimizers
from benchmarks.curves import ADAMW, KFAC, SGD, SOAP, Record, Run, Setting, table
from benchmarks.harness import machine, now, settle
from benchmarks.tasks import TrainingTask, digits, mnist
from natgrad.cli.training import Batches, Problem, endless, measure

Make = Callable[[nn.Module], Optimizer]
_FINALISTS = 3  # settings of a grid that are tried for the whole budget
_LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@final
@dataclass(frozen=True)
class Contender:
    """An optimizer with its batch size, and the fraction of its learning rate that is left at the end."""

    name: str
    make: Make
    batch: int
    left: float = 1.0


@final
@dataclass(frozen=True)
class Rival:
    """An optimizer that is tuned, and its grid."""

    name: str
    make: Callable[[nn.Module, float], Optimizer]
    lrs: tuple[float, ...]
    batches: tuple[int, ...]

    def grid(self) -> list[Setting]:
        """Every learning rate, constant and decaying, with every batch size."""
        return [Setting(lr, left, batch) for batch in self.batches for lr in self.lrs for left in (1.0, 0.0)]

    def at(self, setting: Setting) -> Contender:
        """The optimizer with these settings."""
        return Contender(self.name, lambda model: self.make(model, setting.lr), setting.batch, setting.left)


def rivals(training: TrainingTask) -> list[Rival]:
    """The tuned optimizers. The rates of SGD depend on the scale of the loss, those of the others do not."""
    sizes = training.batches
    return [
        Rival(
            SGD,
            lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True),
            training.sgd,
            sizes,
        ),
        Rival(ADAMW, lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, fused=True), _LRS, sizes),
        Rival(SOAP, lambda model, lr: optimizers.SOAP(model.parameters(), lr, (0.95, 0.95), 0.01), _LRS, sizes),
    ]


def self_tuned(training: TrainingTask) -> Contender:
    """K-FAC with default arguments and the largest batch size."""
    batch = training.task.batch_size
    return Contender(KFAC, lambda model: ng.KFAC(model, training.metric, step=ng.SelfTuned()), batch)


def train(training: TrainingTask, contender: Contender, seed: int, seconds: float, points: int = 100) -> Run:
    """One run, measured ``points`` times, more often at first; it ends early if the loss is not finite."""
    task = training.task
    torch.manual_seed(seed)
    data, device = Batches(*task.train, contender.batch), task.train[0].device
    problem = Problem(task.network(), task.loss, data, [task.test], task.score)
    optimizer, stream = contender.make(problem.model), endless(data, seed)
    start_lr = [group["lr"] for group in optimizer.param_groups if contender.left < 1]
    stride = 10 if device.type == "cuda" else 1  # reading the clock of a GPU synchronises
    spent, step, history = 0.0, 0, [measure(problem, [task.train], 0, 0.0)]

    def closure() -> Any:
        optimizer.zero_grad()
        loss, _ = problem.of_batch(batch)
        loss.backward()
        return loss

    while spent < seconds:
        for group, lr in zip(optimizer.param_groups, start_lr, strict=False):
            group["lr"] = lr * (1 - (1 - contender.left) * spent / seconds)
        start = now(device)
        for _ in range(stride):
            batch = next(stream)
            optimizer.step(closure)
        spent, step = spent + now(device) - start, step + stride
        if spent >= min(1.0, len(history) / points) ** 2 * seconds:
            history.append(measure(problem, [task.train], step, spent))
            if not math.isfinite(history[-1].train_loss):
                break
    return Run(task.name, contender.name, seed, history, _train_score(training, problem.model))


def _train_score(training: TrainingTask, model: nn.Module) -> float:
    with torch.no_grad():
        inputs, targets = training.task.train
        return float(training.task.score(model(inputs), targets))


def tune(training: TrainingTask, rival: Rival, brief: float, seconds: float) -> tuple[Setting, Run]:
    """The best settings with the first seed (smallest final training loss, then the fastest), and their run.

    All settings are tried for a ``brief`` time, and the best three for ``seconds``.
    """

    def ranked(settings: Iterable[Setting], budget: float) -> dict[Setting, Run]:
        runs = {s: train(training, rival.at(s), training.seeds[0], budget) for s in settings}
        print(f"  {rival.name}, {budget:g} s:")
        print(*(f"    batch {s.batch}, lr {s.lr:g} to {s.lr * s.left:g}: {runs[s].final:.4g}" for s in runs), sep="\n")
        sys.stdout.flush()
        return {s: runs[s] for s in sorted(runs, key=lambda s: (runs[s].final, runs[s].reaches(runs[s].final)))}

    best = ranked(islice(ranked(rival.grid(), brief), _FINALISTS), seconds)
    return next(iter(best.items()))


def tune_all(training: TrainingTask, record: Record, brief: float, path: Path) -> None:
    """Tune every optimizer without settings; the result is saved after each."""
    chosen = record.chosen.setdefault(training.task.name, {})
    for rival in rivals(training):
        if rival.name not in chosen:
            chosen[rival.name], run = tune(training, rival, brief, record.seconds)
            record.runs.append(run)
            record.save(path)


def compete(training: TrainingTask, record: Record, path: Path) -> None:
    """Run every optimizer with every seed; each run is saved when it is done."""
    chosen = record.chosen[training.task.name]
    contenders = [*(rival.at(chosen[rival.name]) for rival in rivals(training)), self_tuned(training)]
    for seed in training.seeds:
        for contender in contenders:
            if record.has(training.task.name, contender.name, seed):
                continue
            on_gpu = training.task.train[0].is_cuda
            if on_gpu:  # warm up: libraries load and compile before the clock runs
                train(training, contender, seed, 0.5, points=1)
            record.runs.append(train(training, contender, seed, record.seconds))
            record.save(path)


def begin(path: Path, fresh: Record, task: str, tuning: bool, resume: bool) -> Record:
    """The record to start from: the whole file, its tuned settings for the task, or nothing."""
    old = Record.load(path) if path.exists() else fresh
    if resume and (old.machine, old.seconds) != (fresh.machine, fresh.seconds):
        raise SystemExit(f"{path.name} is of another machine, or of another budget: leave out --resume")
    if not tuning and task not in old.chosen:
        raise SystemExit(f"{path.name} has no learning rates for the {task}: give --tune SECONDS once")
    if resume:
        return old
    if not tuning:
        fresh.chosen[task] = old.chosen[task]
    return fresh


def main() -> None:
    """Tune if asked to, run all optimizers, print the table, save the curves."""
    parser = argparse.ArgumentParser(description="Loss against seconds.")
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda (tf32)")
    parser.add_argument("--seconds", type=float, default=10.0, help="the budget of a run")
    parser.add_argument("--tune", type=float, default=None, help="tune with so many seconds per trial")
    parser.add_argument("--mnist", type=Path, default=None, help="a folder of idx files, an .npz or an .npz.xz file")
    parser.add_argument("--resume", action="store_true", help="skip the runs that the result file has")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args()
    settle()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    name = "training.json" if device.type == "cpu" else f"training-{device.type}.json"
    path = args.output or Path(__file__).parent / "results" / name
    training = mnist(args.mnist, device) if args.mnist else digits(device)
    fresh = Record(machine(device), args.seconds)
    record = begin(path, fresh, training.task.name, args.tune is not None, args.resume)
    if args.tune:
        tune_all(training, record, args.tune, path)
    compete(training, record, path)
    print(table(record))


if __name__ == "__main__":
    main()
