"""One training run of VGG16. It can be stopped after any epoch, and resumes exactly."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import machine
from experiments.files import replaced
from experiments.images import Feed, Images, Part, Scale
from experiments.sobolev_cifar.arms import Config, Schedule
from experiments.sobolev_cifar.captured import Capture, CapturedPass, own_stream, twin
from experiments.sobolev_cifar.record import Name, Point, Record
from natgrad.errors import NonFiniteError

_TEST_BATCH = 1000
_PLAN = (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0)  # channels in units of the width; 0: a pooling layer


def vgg16(classes: int, width: int = 64) -> nn.Sequential:
    """Thirteen convolutions 3 × 3 (Conv, BatchNorm, ReLU) and one linear layer 8·width → classes.

    Weights are drawn from N(0, 2/(9·o)) in convolutions with o outputs and from N(0, 10⁻⁴) in the last layer, biases
    are zero, as in the KFAC-Pytorch of Wang (2019).

    >>> sum(p.numel() for p in vgg16(10).parameters())
    14728266
    """
    layers: list[nn.Module] = []
    i = 3
    for o in (width * channels for channels in _PLAN):
        if o == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
        i = o
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(i, classes))
    for module in model:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            spread = math.sqrt(2 / (9 * module.out_channels)) if isinstance(module, nn.Conv2d) else 0.01
            nn.init.normal_(module.weight, 0.0, spread)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return model


@final
@dataclass(frozen=True)
class Job:
    """A run: images, schedule, optimizer and seed."""

    dataset: str
    schedule: Schedule
    arm: Config
    seed: int

    @property
    def name(self) -> Name:
        """The name in the records."""
        return Name(self.dataset, self.schedule.name, self.arm.name, self.seed)

    @property
    def key(self) -> str:
        """The name of its files."""
        return self.name.key


@final
@dataclass(frozen=True)
class Pace:
    """What changes results by rounding at most: runs that share the device, time, checkpoints, kernels."""

    workers: int = 1
    save_every: int = 1  # epochs between checkpoints
    capture: Capture | None = None  # of passes that no optimizer looks at
    fuse: bool = False  # their kernels, by torch.compile
    epoch_seconds: float = 0.0  # that an epoch is expected to take: a run is begun only if there is time for all


@final
@dataclass(frozen=True)
class Setup:
    """The settings that all runs share."""

    epochs: int = 50
    batch: int = 128
    width: int = 64
    device: str = "cpu"
    layout: torch.memory_format = torch.channels_last
    part: Part = field(default_factory=Part)
    pace: Pace = field(default_factory=Pace)
    commit: str = ""  # of the code

    @property
    def duration(self) -> float:
        """The seconds that a run is expected to take; 0 where none are given."""
        return self.epochs * self.pace.epoch_seconds

    @property
    def precision(self) -> str:
        """The precision of matrix products: TF32 on a GPU."""
        return "high" if self.device != "cpu" else "highest"

    def conditions(self, images: str) -> dict[str, Any]:
        """All settings but the epochs and the optimizer; ``images`` is the digest of the training images."""
        shape = {"batch": self.batch, "width": self.width, "layout": str(self.layout), "precision": self.precision}
        return {**shape, "limit": self.part.limit, "held_out": self.part.held_out, "images": images}

    def settings(self, job: Job, images: str) -> dict[str, Any]:
        """What must agree for a run to be resumed, or to count as done."""
        return {"epochs": self.epochs, **self.conditions(images), "arm": dict(job.arm.numbers())}

    def prepare(self) -> None:
        """TF32 and the fastest convolutions on a GPU; one thread per run on a CPU."""
        torch.set_float32_matmul_precision(self.precision)
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.set_num_threads(1)

    def describe(self) -> dict[str, Any]:
        """The machine and its switches."""
        precision = {"matmul": torch.get_float32_matmul_precision(), "cudnn_tf32": torch.backends.cudnn.allow_tf32}
        kernels = {"captured": self.pace.capture is not None, "fused": self.pace.fuse}
        cudnn = {"cudnn_benchmark": torch.backends.cudnn.benchmark}
        return machine(torch.device(self.device)) | precision | cudnn | kernels


@final
class Training:
    """A run in progress. A seed has the same initial weights and the same batches with every optimizer."""

    def __init__(self, job: Job, setup: Setup, images: Images) -> None:
        device = torch.device(setup.device)
        self.job, self.setup, self.settings = job, setup, setup.settings(job, images.digest)
        images = images.to(device)
        torch.manual_seed(job.seed)
        model = vgg16(images.classes, setup.width).to(device)
        # Only the images are channels-last: with contiguous weights no optimizer has to copy gradients.
        self.model = model
        capture, fuse = setup.pace.capture, setup.pace.fuse
        self.captured = CapturedPass(twin(model), capture, fuse=fuse) if capture else None
        self.optimizer = job.arm.optimizer(self.model, job.seed)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        scale = Scale.of(images.train).divided_by(job.arm.divisor)
        generator = torch.Generator(device=device).manual_seed(job.seed)
        self.feed = Feed.of(images.train, scale, setup.batch, generator)
        self.test, self.scale = images.test, scale
        self.stream = own_stream(capture)
        self.history: list[Point] = []
        self.diverged = False
        self.commits: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.diverged or len(self.history) >= self.setup.epochs

    def epoch(self) -> None:
        """Train on every image once, then test."""
        left = self.job.schedule.left(len(self.history), self.setup.epochs)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * left
        before, start = self.history[-1].seconds if self.history else 0.0, self._now()
        try:
            total = self.steps()
        except NonFiniteError:
            total = torch.tensor(math.nan)  # natgrad refuses a step with NaN: the run has diverged
        seconds = before + self._now() - start
        loss, accuracy = self._tested()
        mean = float(total) / self.feed.steps
        point = Point(len(self.history) + 1, mean, loss, accuracy, seconds, self.setup.pace.workers)
        self.history.append(point)
        self.diverged = not point.finite

    def steps(self) -> Tensor:
        """One epoch; the sum of the losses, without waiting for the device."""
        self.model.train()
        with self.stream:
            total = torch.zeros((), dtype=torch.float64, device=self.test.y.device)
            for step, (x, t) in enumerate(self.feed.epoch(), len(self.history) * self.feed.steps):
                total += self._pass(x.contiguous(memory_format=self.setup.layout), t, step)
                self.optimizer.step()
        return total

    def _pass(self, x: Tensor, t: Tensor, step: int) -> Tensor:
        """The loss of a batch; every parameter has its gradient."""
        if self.captured is not None and not self.job.arm.looks(step):
            return self.captured(x, t)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), t)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def _tested(self) -> tuple[float, float]:
        """The mean loss and the accuracy on the test images, in evaluation mode."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.test.y.device)
        for x, t in zip(self.test.x.split(_TEST_BATCH), self.test.y.split(_TEST_BATCH), strict=True):
            y = self.model(self.scale(x).contiguous(memory_format=self.setup.layout))
            hits = (y.argmax(1) == t).sum()
            total += torch.stack([F.cross_entropy(y, t, reduction="sum").double(), hits.double()])
        loss, accuracy = (total / len(self.test.y)).tolist()
        return loss, accuracy

    def _now(self) -> float:
        if self.setup.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def state(self) -> dict[str, Any]:
        """A checkpoint."""
        return {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.feed.generator.get_state(),
            "history": [asdict(point) for point in self.history],
            "diverged": self.diverged,
            "commits": self._commits(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        if state["settings"] != self.settings:
            raise ValueError(
                f"{self.job.key} was begun with {state['settings']}, now it is {self.settings}: choose another --out, "
                "or the same settings and images"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.feed.generator.set_state(state["generator"].cpu())
        self.history = [Point(**point) for point in state["history"]]
        self.diverged, self.commits = state["diverged"], state["commits"]

    def record(self) -> Record:
        """The record so far."""
        job, setup = self.job, self.setup
        return Record(
            job.name,
            settings=self.settings,
            machine=setup.describe(),
            history=list(self.history),
            finished=self.finished,
            diverged=self.diverged,
            commits=self._commits(),
        )

    def _commits(self) -> list[str]:
        """Of the code that the run was begun with, and that it was resumed with."""
        return list(dict.fromkeys([*self.commits, self.setup.commit]))


class Budget(ABC):
    """A limit on the time of all runs."""

    @abstractmethod
    def allows(self, seconds: float) -> bool:
        """Whether there is time for something that takes this long."""


@final
@dataclass(frozen=True)
class Until(Budget):
    """A deadline on the machine's clock, which all processes share.

    >>> Until(time.time() + 60).allows(50.0), Until(time.time() + 60).allows(70.0)
    (True, False)
    """

    deadline: float

    def allows(self, seconds: float) -> bool:
        return time.time() + seconds < self.deadline


def train(job: Job, setup: Setup, images: Images, out: Path, budget: Budget) -> Record:
    """Start or resume a run, until it is done or there is no time for another epoch.

    The curve is written after every epoch, the checkpoint every ``save_every`` epochs and where the run stops; the
    checkpoint is deleted when the run is done.
    """
    checkpoint, path = out / "states" / f"{job.key}.pt", out / "runs" / f"{job.key}.json"
    training = Training(job, setup, images)
    if checkpoint.exists():
        training.load(torch.load(checkpoint, map_location="cpu", weights_only=True))
    goes_on = budget.allows(0.0)
    while goes_on and not training.finished:
        start = time.time()
        training.epoch()
        goes_on = budget.allows(1.2 * (time.time() - start))  # the next one takes as long as this one, about
        due = len(training.history) % setup.pace.save_every == 0 or not goes_on
        if due and not training.finished:
            with replaced(checkpoint) as file:
                torch.save(training.state(), file)
        training.record().save(path)
    if training.finished:
        checkpoint.unlink(missing_ok=True)
    return training.record()
