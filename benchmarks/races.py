"""Races of optimizers on real networks and data: the loss at equal steps, at equal seconds, the time to AdamW's loss.

    python -m benchmarks.races --data FOLDER --screen            # learning rate and weight decay, short schedules
    python -m benchmarks.races --data FOLDER --confirm           # the best three of each, the whole schedule
    python -m benchmarks.races --data FOLDER --final             # the best of each, three seeds, unseen validation data
    python -m benchmarks.races --data FOLDER --equal-seconds     # in AdamW's time, and in half of it (--shares)
    python -m benchmarks.races --report

Protocol (Wen et al. 2025): everybody has the same number of tries, and is judged at the end of a schedule. ``--screen``
and ``--confirm`` never see the data that ``--final`` validates on. A search starts at the contender's own learning rate
and goes up and down by factors of two until the best has worse neighbours, at most ``--tries`` runs; then it tries the
other weight decays.

Every run is a line of JSON in ``DIR/<task>.jsonl``. A run that is there is not repeated, so that any command can be
stopped and started again; files of two machines can be concatenated. Batches are drawn on the device, and the host
waits for it at checkpoints only. On a GPU the forward and backward pass is one CUDA graph, for every optimizer that
needs no hooks in it, so that seconds are those of the GPU and not of Python. Seconds are those of training: compilation
before the first step and validation do not count.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from benchmarks.race_models import REPORT, TUNE, Data, Task, tasks
from benchmarks.rivals import CONTENDERS, RIVALS, Stepper
from experiments.files import markdown_table

CHECKPOINTS = 24  # validations of a run, unless the command says otherwise
WARM_UP, FLOOR = 0.05, 0.1  # of the schedule, of the learning rate
SEEDS = (0, 1, 2)


# Runs and their records.


@final
@dataclass(frozen=True)
class Run:
    """What is run; equal runs have equal records."""

    task: str
    optimizer: str
    lr: float
    weight_decay: float
    seed: int
    steps: int
    split: str

    @property
    def setting(self) -> tuple[float, float]:
        """What is tuned."""
        return self.lr, self.weight_decay


@final
@dataclass(frozen=True)
class Record:
    """A run and its curve at checkpoints: steps, seconds of training, training and validation loss, score.

    ``ms``: milliseconds a step, the median of the intervals between checkpoints without the first. A run that
    diverges ends there, and its ``loss`` is None. ``total``: seconds of training; ``wall``: with validation and all.
    ``peak_mib``: the peak memory of the run, without the data; older records count the workspaces of the runs before
    them, too. ``graphed``: whether the passes were a CUDA graph. The first short runs of the ViT and of ResNet-18 have
    their last checkpoint only, and zeros for what was not kept.
    """

    run: Run
    step: list[int]
    seconds: list[float]
    train: list[float]
    validation: list[float]
    score: list[float]
    loss: float | None
    ms: float
    total: float
    wall: float
    size: int
    parameters: int
    peak_mib: float
    device: str
    torch: str
    precision: str
    graphed: bool = False

    @property
    def final(self) -> float:
        """The last validation loss; ∞ after a divergence."""
        return math.inf if self.loss is None else self.loss

    def at(self, seconds: float) -> float:
        """The validation loss at a time, interpolated between checkpoints; the last one after the end."""
        return _interpolated(self.seconds, self.validation, seconds)

    def reaches(self, level: float, of: list[float] | None = None) -> float:
        """Seconds until the validation loss (or the curve ``of``, which falls) is at a level; ∞ if never."""
        curve, before = self.validation if of is None else of, (0.0, math.inf)
        for seconds, value in zip(self.seconds, curve, strict=True):
            if value <= level:
                if not math.isfinite(before[1]):
                    return seconds
                return before[0] + (before[1] - level) / (before[1] - value) * (seconds - before[0])
            before = seconds, value
        return math.inf


def _interpolated(xs: list[float], ys: list[float], x: float) -> float:
    """Piecewise linear, constant outside."""
    if not xs:
        return math.inf
    if x <= xs[0]:
        return ys[0]
    for i in range(1, len(xs)):
        if x <= xs[i]:
            return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[-1]


@final
@dataclass
class Records:
    """The records in a folder, one file a task, one line a run."""

    folder: Path
    by_run: dict[Run, Record] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path) -> Records:
        """Read all files; of equal runs the last counts."""
        records = Records(folder)
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                content = json.loads(line)
                record = Record(**{**content, "run": Run(**content["run"])})
                records.by_run[record.run] = record
        return records

    def add(self, record: Record) -> None:
        """Append one, at once."""
        self.by_run[record.run] = record
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{record.run.task}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record), allow_nan=False) + "\n")

    def of(self, task: str, split: str, optimizer: str | None = None, steps: int | None = None) -> list[Record]:
        """The records of a task, by optimizer and steps where they are given."""
        return [
            record
            for run, record in self.by_run.items()
            if (run.task, run.split) == (task, split)
            and optimizer in (None, run.optimizer)
            and steps in (None, run.steps)
        ]


@final
class Clock:
    """The time that is left, and whether a run would fit into it."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def fits(self, run: Run, records: Records) -> bool:
        """Whether there is time for a run, by the fastest run of this optimizer on the task, or else of any.

        The fastest, because others may have shared the GPU.
        """
        same = [r for r in records.by_run.values() if r.run.task == run.task and r.device == device_name() and r.step]
        mine = [r for r in same if r.run.optimizer == run.optimizer] or same
        needed = min((r.wall / r.step[-1] for r in mine), default=0.0) * run.steps
        return self.left > 1.2 * needed + 1


# Training.


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate at a step: linear warm-up over 5 %, cosine to 10 %.

    >>> [round(schedule(step, 100), 2) for step in (0, 4, 5, 52, 99)]
    [0.2, 1.0, 1.0, 0.56, 0.1]
    """
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    share = (step - warm) / max(1, steps - 1 - warm)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share))


def device_name() -> str:
    """The GPU, or the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@final
class Trainer:
    """A network, its optimizer and batches: one training step, and the validation."""

    def __init__(self, run: Run, task: Task, data: Data, device: torch.device) -> None:
        torch.manual_seed(run.seed)
        self.task, self.data, self.device = task, data, device
        self.autocast = task.autocast and device.type == "cuda"
        self.model = task.network().to(device)
        self.generator = torch.Generator(device).manual_seed(run.seed)
        self.graph: torch.cuda.CUDAGraph | None = None

    def contender(self, model: nn.Module, run: Run) -> Stepper:
        """The optimizer of this run for a model."""
        return CONTENDERS[run.optimizer].make(model, run.lr, run.weight_decay, self.task)

    def passes(self, model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        """Forward and backward; the loss stays on the device."""
        # A cache of casts would outlive the graph that made them.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            loss = self.task.loss(model(x), t)
        loss.backward()
        return loss.detach()

    def capture(self) -> None:
        """Make one graph of the passes: gradients, batch and loss keep their places. The state stays as it was."""
        state, draws = copy.deepcopy(self.model.state_dict()), self.generator.get_state()
        self.batch = self.data.draw(self.generator)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.model.zero_grad()
                self.passes(self.model, *self.batch)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.model.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.passes(self.model, *self.batch)
        self.model.load_state_dict(state)
        self.generator.set_state(draws)

    def step(self, model: nn.Module, optimizer: Stepper) -> Tensor:
        """Forward, backward, step; the loss stays on the device."""
        batch = self.data.draw(self.generator)
        if self.graph is None:
            loss = self.passes(model, *batch)
            optimizer.step()
            optimizer.zero_grad()
            return loss
        for place, new in zip(self.batch, batch, strict=True):
            place.copy_(new)
        self.graph.replay()
        optimizer.step()
        return self.loss

    def warm_up(self, run: Run, steps: int = 3) -> None:
        """A few steps of a copy: what is compiled, tuned and loaded at the first call is not timed."""
        model, state = copy.deepcopy(self.model), self.generator.get_state()
        torch.manual_seed(run.seed)
        optimizer = self.contender(model, run)
        for _ in range(steps):
            self.step(model, optimizer)
        self.generator.set_state(state)
        wait(self.device)

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """The mean loss over all validation examples, and the mean score (0 where there is none)."""
        self.model.eval()
        totals = torch.zeros(2, device=self.device, dtype=torch.float64)
        count = 0
        for x, t in self.data.validation:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                y = self.model(x).float()
            totals[0] += len(x) * self.task.loss(y, t)
            if self.task.score is not None:
                totals[1] += len(x) * self.task.score(y, t)
            count += len(x)
        self.model.train()
        loss, score = (totals / count).tolist()
        return loss, score


def train(
    run: Run, task: Task, data: Data, device: torch.device, clock: Clock, checkpoints: int = CHECKPOINTS
) -> Record | None:
    """The record of a run, validated at so many steps; None if time is up before its end."""
    if device.type == "cuda":
        gc.collect()  # the graphs of the last run
    began = time.perf_counter()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0  # data; what earlier runs have left
    trainer = Trainer(run, task, data, device)
    trainer.warm_up(run)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(run.seed)
    optimizer = trainer.contender(trainer.model, run)
    if device.type == "cuda" and not CONTENDERS[run.optimizer].hooks:
        trainer.capture()
    groups = [(group, group["lr"]) for group in optimizer.param_groups]
    marks = {round(run.steps * k / checkpoints) for k in range(1, checkpoints + 1)} - {0}
    curve: dict[str, list[Any]] = {key: [] for key in ("step", "seconds", "train", "validation", "score")}
    spent, recent, good = 0.0, torch.zeros((), device=device), True
    since, start = 0, time.perf_counter()
    for step in range(1, run.steps + 1):
        for group, lr in groups:
            group["lr"] = lr * schedule(step - 1, run.steps)
        recent += trainer.step(trainer.model, optimizer)
        since += 1
        if step not in marks:
            continue
        wait(device)
        spent += time.perf_counter() - start
        validation, score = trainer.validate()
        good = math.isfinite(validation) and math.isfinite(float(recent))
        if not good:
            break
        row = (step, round(spent, 4), float(f"{float(recent) / since:.6g}"), float(f"{validation:.6g}"), score)
        for key, value in zip(curve, row, strict=True):
            curve[key].append(value)
        if clock.left < 0 and step < run.steps:
            return None
        recent.zero_()
        since = 0
        wait(device)
        start = time.perf_counter()
    return Record(
        run,
        **curve,
        loss=curve["validation"][-1] if good else None,
        ms=_milliseconds(curve["step"], curve["seconds"]),
        total=round(spent, 4),
        wall=round(time.perf_counter() - began, 4),
        size=data.size,
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        peak_mib=(torch.cuda.max_memory_allocated(device) - before) / 2**20 if device.type == "cuda" else 0.0,
        device=device_name(),
        torch=torch.__version__,
        precision=torch.get_float32_matmul_precision(),
        graphed=trainer.graph is not None,
    )


def _milliseconds(steps: list[int], seconds: list[float]) -> float:
    """The median over the intervals, without the first where there are others."""
    ends = list(zip([0, *steps], [0.0, *seconds], strict=True))
    ms = [1e3 * (t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairwise(ends)]
    return round(statistics.median(ms[1:] or ms or [0.0]), 4)


# The phases. A phase asks for runs one by one, as the next may depend on the results of the last.


@final
class Race:
    """Runs what is asked for and not yet recorded, until time is up."""

    def __init__(
        self, records: Records, folder: Path, device: torch.device, clock: Clock, checkpoints: int = CHECKPOINTS
    ) -> None:
        self.records, self.folder, self.device, self.clock = records, folder, device, clock
        self.checkpoints = checkpoints
        self._data: tuple[tuple[str, str], Data] | None = None

    def result(self, run: Run, task: Task) -> Record:
        """The record of a run, from the folder or by running it. ``TimeUpError`` if there is no time."""
        if run in self.records.by_run:
            return self.records.by_run[run]
        if not self.clock.fits(run, self.records):
            raise TimeUpError
        key = task.name, run.split
        if self._data is None or self._data[0] != key:
            self._data = key, task.data(self.folder, run.split, self.device)
        record = train(run, task, self._data[1], self.device, self.clock, self.checkpoints)
        if record is None:
            raise TimeUpError
        self.records.add(record)
        print(describe(record), flush=True)
        return record


class TimeUpError(Exception):
    """No time for another run. All that is recorded stays; the same command goes on from there."""


def describe(record: Record) -> str:
    """One line."""
    run = record.run
    score = f" score {record.score[-1]:.4f}" if record.score and record.score[-1] else ""
    return (
        f"{run.task:14} {run.optimizer:14} lr {run.lr:<9.4g} wd {run.weight_decay:<6g} seed {run.seed} "
        f"{run.steps:5} steps {run.split:6} loss {record.final:.4f}{score} {record.ms:.2f} ms {record.total:.1f} s"
    )


def screen(race: Race, task: Task, optimizer: str, tries: int) -> None:
    """Learning rates on a ladder of factors of two, then the other weight decays at the best of them."""
    contender = CONTENDERS[optimizer]
    decays = contender.weight_decays

    def loss(rung: int, weight_decay: float) -> float:
        lr = float(f"{contender.lr * 2.0**rung:.6g}")
        run = Run(task.name, optimizer, lr, weight_decay, 0, task.screen, TUNE)
        return race.result(run, task).final

    losses: dict[int, float] = {}
    rungs = [0, 1, -1]
    while rungs and len(losses) < tries - len(decays) + 1:
        rung = rungs.pop(0)
        losses[rung] = loss(rung, decays[0])
        if not rungs:
            best = min(losses, key=lambda r: losses[r])
            rungs = [r for r in (best - 1, best + 1) if r not in losses]
    best = min(losses, key=lambda r: losses[r])
    for weight_decay in decays[1:]:
        loss(best, weight_decay)


def settings(records: Records, task: Task, optimizer: str, steps: int) -> list[tuple[float, float]]:
    """The settings that were tuned with so many steps, best first."""
    runs = records.of(task.name, TUNE, optimizer, steps)
    return [record.run.setting for record in sorted(runs, key=lambda r: r.final) if record.loss is not None]


def confirm(race: Race, task: Task, optimizer: str, given: Iterable[tuple[float, float]] = (), best: int = 3) -> None:
    """The best settings of the screening, or those that are ``given``, with the whole schedule."""
    for lr, weight_decay in given or settings(race.records, task, optimizer, task.screen)[:best]:
        race.result(Run(task.name, optimizer, lr, weight_decay, 0, task.steps, TUNE), task)


def chosen(records: Records, task: Task, optimizer: str) -> tuple[float, float] | None:
    """The best setting with the whole schedule, or else of the screening; None before that."""
    for steps in (task.steps, task.screen):
        tuned = settings(records, task, optimizer, steps)
        if tuned:
            return tuned[0]
    return None


def final_runs(race: Race, task: Task, optimizer: str, setting: tuple[float, float] | None = None) -> None:
    """Three seeds of the best setting on the data that nothing was tuned on."""
    setting = setting or chosen(race.records, task, optimizer)
    if setting is None:
        print(f"{task.name}: nothing is tuned for {optimizer}: --screen first, or give --lr", flush=True)
        return
    for seed in SEEDS:
        race.result(Run(task.name, optimizer, *setting, seed, task.steps, REPORT), task)


def equal_seconds(race: Race, task: Task, optimizer: str, share: float = 1.0) -> None:
    """The final runs with as many steps as fit into a share of AdamW's time, each with the whole schedule."""
    if optimizer == "adamw":
        return
    theirs = _best_adamw(race.records, task)
    tuned = chosen(race.records, task, optimizer)
    groups = _groups(race.records, task, optimizer)
    for setting, ours in groups.items():
        if tuned in groups and setting != tuned:
            continue
        ratio = _mean(r.total for r in theirs) / _mean(r.total for r in ours if r.loss is not None)
        if math.isfinite(ratio) and ratio > 0:
            for record in ours:
                steps = max(1, round(share * ratio * task.steps))
                race.result(Run(task.name, optimizer, *setting, record.run.seed, steps, REPORT), task)


def _groups(records: Records, task: Task, optimizer: str) -> dict[tuple[float, float], list[Record]]:
    """The final runs of an optimizer, by setting."""
    groups: dict[tuple[float, float], list[Record]] = {}
    for record in records.of(task.name, REPORT, optimizer, task.steps):
        groups.setdefault(record.run.setting, []).append(record)
    return groups


def _best_adamw(records: Records, task: Task) -> list[Record]:
    """The final runs of AdamW with the setting of the lowest loss: what the others are compared with."""
    groups = _groups(records, task, "adamw").values()
    return min(groups, key=lambda group: _mean(r.final for r in group), default=[])


# The report.


def rows(records: Records, task: Task) -> Iterator[list[str]]:
    """One row for every optimizer and setting that has final runs, best first."""
    groups: dict[tuple[str, float, float], list[Record]] = {}
    for record in records.of(task.name, REPORT, steps=task.steps):
        groups.setdefault((record.run.optimizer, *record.run.setting), []).append(record)
    reference = _best_adamw(records, task)
    seconds, level = _mean(r.total for r in reference), _mean(r.final for r in reference)
    levels = {r.run.seed: r.final for r in reference}
    for (name, lr, decay), group in sorted(groups.items(), key=lambda item: _mean(r.final for r in item[1])):
        others = [r for r in records.of(task.name, REPORT, name) if r.run.setting == (lr, decay)]
        timed = [r for r in others if r.run.steps != task.steps and reference]
        # By the steps that were planned, not by their own seconds: the host is faster at times.
        a_step = _mean(r.total for r in group) / task.steps
        half = [r for r in timed if r.run.steps * a_step < 0.75 * seconds]
        whole = group if name == "adamw" and group == reference else [r for r in timed if r not in half]
        reached = _mean(r.reaches(levels.get(r.run.seed, level)) for r in group) / seconds if reference else math.nan
        yield [
            name,
            f"{lr:g}, {decay:g}",
            str(len(group)),
            _spread(r.final for r in group),
            _spread((r.at(seconds) for r in group) if reference else ()),
            _spread(r.final for r in whole),
            _spread(r.final for r in half),
            f"{reached:.2f}" if math.isfinite(reached) else "never" if reference else "–",
            _spread(r.score[-1] for r in group if r.score) if task.score_name else "–",
            _reach(task, groups, group),
            f"{_mean(r.ms for r in group):.2f}",
            f"{_mean(r.total for r in group):.1f}",
            f"{_mean(r.peak_mib for r in group):.0f}",
            _spread(r.score[-1] for r in half if r.score) if task.score_name else "–",
        ]


def _reach(task: Task, groups: dict[tuple[str, float, float], list[Record]], group: list[Record]) -> str:
    """Time to the best final accuracy of SGD and AdamW, over that one's time."""
    rivals = [g for (name, *_), g in groups.items() if name in ("sgd", "adamw") and all(r.score for r in g)]
    if task.score_name != "accuracy" or not rivals:
        return "–"
    best = max(rivals, key=lambda g: _mean(r.score[-1] for r in g))
    level = -_mean(r.score[-1] for r in best)
    ratio = _mean(r.reaches(level, [-s for s in r.score]) for r in group) / _mean(r.total for r in best)
    return f"{ratio:.2f}" if math.isfinite(ratio) else "never"


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.mean(listed) if listed and all(map(math.isfinite, listed)) else math.inf


def _spread(values: Iterable[float]) -> str:
    """Mean ± standard deviation."""
    listed = list(values)
    if not listed:
        return "–"
    if not all(map(math.isfinite, listed)):
        return "diverges"
    return f"{statistics.mean(listed):.4f}" + (f" ± {statistics.stdev(listed):.4f}" if len(listed) > 1 else "")


HEAD = (
    *("optimizer", "lr, wd", "seeds", "loss, equal steps", "loss at AdamW's seconds", "own schedule, AdamW's seconds"),
    *("own schedule, half of AdamW's seconds", "time to AdamW's loss"),
    *("score", "time to best SGD/AdamW score", "ms a step", "seconds", "MiB"),
    "score, half of AdamW's seconds",
)


def report(records: Records, chosen_tasks: Iterable[Task]) -> str:
    """One Markdown table a task, and the tuning behind it."""
    lines: list[str] = []
    for task in chosen_tasks:
        table = list(rows(records, task))
        if table:
            lines += [f"## {task.name}, {task.steps} steps", ""]
            lines += [markdown_table(HEAD, table), ""]
        for steps in sorted({task.screen, task.steps}):
            tuned = sorted(records.of(task.name, TUNE, steps=steps), key=lambda r: r.final)
            best: dict[str, list[Record]] = {}
            for record in tuned:
                best.setdefault(record.run.optimizer, []).append(record)
            if best:
                lines += [f"{task.name}, tuning with {steps} steps (loss at lr, wd):", ""]
            for name, runs in best.items():
                cells = ", ".join(f"{r.final:.4f} at {r.run.lr:g}, {r.run.weight_decay:g}" for r in runs)
                lines.append(f"- {name}, {len(runs)} tries, {_mean(r.ms for r in runs):.2f} ms: {cells}")
            lines += [""] if best else []
    return "\n".join(lines)


# The command.


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of texts, images and tables")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "races")
    for phase in ("screen", "confirm", "final", "equal-seconds", "report"):
        parser.add_argument(f"--{phase}", action="store_true")
    parser.add_argument("--tasks", nargs="+", choices=list(tasks()), default=list(tasks()), metavar="TASK")
    parser.add_argument("--optimizers", nargs="+", choices=list(CONTENDERS), metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--tries", type=int, default=7, help="runs of a search, for everybody (default 7)")
    parser.add_argument("--lr", type=float, nargs="+", help="--confirm and --final with these, not with the tuned ones")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="with --lr")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5], help="of AdamW's time: --equal-seconds")
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS, help=f"validations a run ({CHECKPOINTS})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before, between two runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="high", choices=["highest", "high"], help="of products of float32")
    parser.add_argument("--tiny", action="store_true", help="small networks, a few steps: to test on a CPU")
    return parser


def main(words: list[str] | None = None) -> None:
    """Run the phases that are asked for, in order, task by task."""
    args = arguments().parse_args(words)
    torch.set_float32_matmul_precision(args.precision)
    by_name = tasks(tiny=args.tiny)
    selected = [by_name[name] for name in args.tasks]
    records = Records.load(args.results)
    phases: list[Callable[[Race, Task, str], None]] = []
    if args.screen:
        phases.append(lambda race, task, name: screen(race, task, name, args.tries))
    given = [(lr, args.weight_decay) for lr in args.lr or ()]
    if args.confirm:
        phases.append(lambda race, task, name: confirm(race, task, name, given))
    if args.final:
        phases += [partial(final_runs, setting=setting) for setting in given] or [final_runs]
    if args.equal_seconds:
        phases += [partial(equal_seconds, share=share) for share in args.shares]
    if phases and args.data is None:
        raise SystemExit("the races need data: give the folder of the texts, images and tables by --data")
    race = Race(records, args.data, torch.device(args.device), Clock(args.minutes), args.checkpoints)
    try:
        for task in selected:
            for phase in phases:
                for name in args.optimizers or RIVALS:
                    kinds = CONTENDERS[name].kinds
                    if kinds is None or task.kind in kinds:
                        phase(race, task, name)
    except TimeUpError:
        print("time is up: the same command goes on from here", flush=True)
    if args.report or not phases:
        print(report(records, selected))


if __name__ == "__main__":
    main()
