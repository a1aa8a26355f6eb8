"""Loss against seconds: K-FAC that tunes itself beside SGD with momentum, AdamW and SOAP that were tuned.

    python benchmarks/training.py --tune 5                   # choose the learning rates, five seconds a trial, and run
    python benchmarks/training.py                            # run with the numbers that were chosen
    python benchmarks/training.py --mnist mnist/             # idx files, gzipped or not, or an .npz or .npz.xz file
    python benchmarks/training.py --device cuda --mnist mnist.npz.xz --seconds 30

Everyone gets the same seconds, the same initial weights and the same mini-batches. The rivals may choose from a grid of
learning rates, kept or decaying linearly to zero at the end of the budget: what gives the smallest training loss is
theirs. K-FAC has its default arguments. The clock counts one thread's own time, or that of the GPU's queue, and
stands still while losses are measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.optim import Optimizer

import natgrad as ng
from benchmarks.contests import Contest, digits, mnist
from benchmarks.harness import machine, now, settle
from benchmarks.report import Target, verdicts
from benchmarks.soap import SOAP
from natgrad.cli.experiment import Point, batches, measure

KFAC, ADAMW, SOAP_ = "K-FAC, self-tuned", "AdamW", "SOAP"
Make = Callable[[nn.Module], Optimizer]
Chosen = dict[str, dict[str, "Setting"]]


@dataclass(frozen=True)
class Setting:
    """A learning rate, and the part of it that is left at the end of the budget."""

    lr: float
    left: float


@dataclass(frozen=True)
class Contender:
    """An optimizer that is ready to run, and the part of its learning rate that is left at the end."""

    name: str
    make: Make
    left: float = 1.0


@dataclass(frozen=True)
class Rival:
    """An optimizer that has to be tuned, and the grid it may choose from."""

    name: str
    make: Callable[[nn.Module, float], Optimizer]
    lrs: tuple[float, ...]

    def grid(self) -> list[Setting]:
        """Every learning rate, kept and decaying."""
        return [Setting(lr, left) for lr in self.lrs for left in (1.0, 0.0)]

    def at(self, setting: Setting) -> Contender:
        """The rival with a choice made."""
        return Contender(self.name, lambda model: self.make(model, setting.lr), setting.left)


@dataclass(frozen=True)
class Run:
    """One optimizer on one task."""

    task: str
    contender: str
    seed: int
    history: list[Point]

    @property
    def final(self) -> float:
        """The last training loss, ∞ where it is not a number. Below a millionth there is nothing left to learn."""
        loss = self.history[-1].train_loss
        return max(loss, 1e-6) if math.isfinite(loss) else math.inf

    def reaches(self, level: float) -> float:
        """Seconds until the training loss is at this level, on a straight line between logarithms; ∞ if never."""
        before = self.history[0]
        for point in self.history:
            if point.train_loss <= level:
                drop = math.log(before.train_loss / point.train_loss) if point.train_loss > 0 else 0.0
                part = math.log(before.train_loss / level) / drop if drop > 0 else 1.0
                return before.seconds + min(part, 1.0) * (point.seconds - before.seconds)
            before = point
        return math.inf


def rivals(contest: Contest) -> list[Rival]:
    """Who is tuned. Adam's steps do not depend on the scale of the loss, those of SGD do."""
    return [
        Rival(
            "SGD with momentum",
            lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True),
            contest.sgd,
        ),
        Rival(
            ADAMW,
            lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, fused=True),
            (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
        ),
        Rival(SOAP_, lambda model, lr: SOAP(model.parameters(), lr=lr), (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
    ]


def self_tuned(metric: ng.OutputMetric) -> Contender:
    """K-FAC with default arguments."""
    return Contender(KFAC, lambda model: ng.KFAC(model, metric, step=ng.SelfTuned()))


def train(contest: Contest, contender: Contender, seed: int, seconds: float, points: int = 50) -> Run:
    """One run, measured at so many times; it ends early where the loss is no number."""
    task = contest.task
    torch.manual_seed(seed)
    model, (inputs, targets) = task.network(), task.train
    optimizer, stream = contender.make(model), batches(len(inputs), task.batch_size, seed)
    start_lr = [group["lr"] for group in optimizer.param_groups if contender.left < 1]
    stride = 10 if inputs.is_cuda else 1  # a clock that waits for the queue of a GPU is read now and then
    spent, step, history = 0.0, 0, [measure(task, model, 0, 0.0)]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = task.loss(model(x), t)
        loss.backward()
        return loss

    while spent < seconds:
        for group, lr in zip(optimizer.param_groups, start_lr, strict=False):
            group["lr"] = lr * (1 - (1 - contender.left) * spent / seconds)
        start = now(inputs.device)
        for _ in range(stride):
            batch = next(stream).to(inputs.device)
            x, t = inputs[batch], targets[batch]
            optimizer.step(closure)
        spent, step = spent + now(inputs.device) - start, step + stride
        if spent >= min(1.0, len(history) / points) * seconds:
            history.append(measure(task, model, step, spent))
            if not math.isfinite(history[-1].train_loss):
                break
    return Run(task.name, contender.name, seed, history)


def tune(contest: Contest, seconds: float) -> dict[str, Setting]:
    """The best of every rival's grid with the first seed: the smallest final training loss, then the soonest."""
    chosen: dict[str, Setting] = {}
    for rival in rivals(contest):
        results: dict[Setting, tuple[float, float]] = {}
        for s in rival.grid():
            run = train(contest, rival.at(s), contest.seeds[0], seconds, points=20)
            results[s] = (run.final, run.reaches(run.final))
        chosen[rival.name] = min(results, key=lambda s: results[s])
        print(f"  {contest.task.name}: {rival.name}: {chosen[rival.name]}", flush=True)
    return chosen


def compete(contest: Contest, chosen: dict[str, Setting], seconds: float) -> list[Run]:
    """Everybody with every seed."""
    contenders = [*(rival.at(chosen[rival.name]) for rival in rivals(contest)), self_tuned(contest.metric)]
    return [train(contest, contender, seed, seconds) for seed in contest.seeds for contender in contenders]


def claims(runs: list[Run]) -> list[Target]:
    """K-FAC's time to where another ends, over the other's own; the median over seeds."""
    out = []
    for task in dict.fromkeys(run.task for run in runs):
        for other, bound in ((ADAMW, 0.5), (SOAP_, 1.0)):
            pairs = _pairs([run for run in runs if run.task == task], other)
            parts = [ours.reaches(theirs.final) / theirs.reaches(theirs.final) for ours, theirs in pairs]
            note = "of the seeds: " + ", ".join(f"{part:.2f}" for part in parts)
            claim = f"K-FAC's time to {other}'s final loss over {other}'s own, {task}"
            out.append(Target(claim, statistics.median(parts), bound, True, note))
    return out


def _pairs(runs: list[Run], other: str) -> list[tuple[Run, Run]]:
    """K-FAC and another with the same seed."""
    found = {(run.contender, run.seed): run for run in runs}
    return [(run, found[other, run.seed]) for run in runs if run.contender == KFAC]


def table(runs: list[Run], targets: list[Target]) -> str:
    """Medians over seeds: steps, losses, and the seconds to AdamW's final loss."""
    lines = []
    for task in dict.fromkeys(run.task for run in runs):
        mine = [run for run in runs if run.task == task]
        level = {run.seed: run.final for run in mine if run.contender == ADAMW}
        lines += ["", task, f"  {'':20}{'steps':>8}{'training loss':>15}{'test loss':>11}{'test score':>12}{'s':>8}"]
        for name in dict.fromkeys(run.contender for run in mine):
            group = [run for run in mine if run.contender == name]
            ends = [run.history[-1] for run in group]
            rows = [(float(p.step), p.train_loss, p.test_loss, p.test_score) for p in ends]
            steps, loss, test, score = (statistics.median(column) for column in zip(*rows, strict=True))
            reached = statistics.median(run.reaches(level[run.seed]) for run in group)
            lines.append(f"  {name:20}{steps:8.0f}{loss:15.3e}{test:11.3e}{score:12.4f}{reached:8.1f}")
    return "\n".join([*lines, "", *verdicts(targets)])


def save(path: Path, device: torch.device, chosen: Chosen, runs: list[Run], seconds: float) -> None:
    """Everything as JSON; what was never reached is null."""
    targets: list[dict[str, Any]] = [{**asdict(t), "met": t.met} for t in claims(runs)]
    for t in targets:
        t["measured"] = t["measured"] if math.isfinite(t["measured"]) else None
    content = {
        "machine": machine(device),
        "seconds": seconds,
        "chosen": {task: {name: asdict(s) for name, s in settings.items()} for task, settings in chosen.items()},
        "targets": targets,
    }
    curves = [json.dumps(_columns(run), ensure_ascii=False) for run in runs]  # a line a run
    text = json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + ',\n  "runs": [\n    ' + ",\n    ".join(curves) + "\n  ]\n}\n")


def _columns(run: Run) -> dict[str, Any]:
    """The history by quantity, four digits each."""
    points = [asdict(point) for point in run.history]
    columns = {key: [float(f"{point[key]:.4g}") for point in points] for key in points[0]}
    return {"task": run.task, "contender": run.contender, "seed": run.seed, **columns}


def load_chosen(path: Path, task: str) -> dict[str, Setting]:
    """The settings that were chosen for a task."""
    saved: dict[str, Any] = json.loads(path.read_text())["chosen"] if path.exists() else {}
    if task not in saved:
        raise SystemExit(f"{path.name} has no learning rates for the {task}: give --tune SECONDS once")
    return {name: Setting(**numbers) for name, numbers in saved[task].items()}


def main() -> None:
    """Tune if asked to, run everybody, print the table, save the curves."""
    parser = argparse.ArgumentParser(description="Loss against seconds.")
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda (tf32)")
    parser.add_argument("--seconds", type=float, default=10.0, help="the budget of a run")
    parser.add_argument("--tune", type=float, default=None, help="choose the learning rates, so many seconds a trial")
    parser.add_argument("--mnist", type=Path, default=None, help="a folder of idx files, an .npz or an .npz.xz file")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args()
    settle()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    name = "training.json" if device.type == "cpu" else f"training-{device.type}.json"
    path = args.output or Path(__file__).parent / "results" / name
    contests = [digits(device)]
    if args.mnist:
        contests.append(mnist(args.mnist, device))
    else:
        print("The MNIST auto-encoder is left out: give --mnist PATH to run it.")
    chosen: Chosen = {}
    runs: list[Run] = []
    for contest in contests:
        task = contest.task.name
        chosen[task] = tune(contest, args.tune) if args.tune else load_chosen(path, task)
        runs += compete(contest, chosen[task], args.seconds)
    save(path, device, chosen, runs, args.seconds)
    print(table(runs, claims(runs)))


if __name__ == "__main__":
    main()
