"""The tasks, the optimizers and the training loop of `natgrad demo`.

The runs of a task share data, initial weights and mini-batches; they differ in the optimizer alone. The clock counts
optimization steps only, and stands still while losses are measured.

AdamW, Muon and ``ng.Natural`` have the best learning rate of 0.005, 0.01, 0.02, 0.05 and 0.1: that with the lowest test
loss in 400 steps (800 on the differential equation), mean of two seeds. K-FAC and Gauss–Newton choose their steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.data import load_digits

E24 = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)

Status: TypeAlias = Literal["running", "finished", "diverged", "interrupted"]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]


@final
@dataclass(frozen=True)
class Task:
    """A network with training and test data (inputs [n …], targets [n …]), a loss, a score and its optimizers.

    A run of the task gets ``weight`` times the seconds of the budget.
    """

    name: str
    network: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch_size: int
    loss: Loss
    score_name: str
    score: Loss
    weight: float = 1.0
    optimizers: Mapping[str, MakeOptimizer] = field(default_factory=dict)


# The two tasks.


def half_squared_error(y: Tensor, t: Tensor) -> Tensor:
    """½‖y − t‖², summed over outputs, mean over examples: minus the log-likelihood of a unit Gaussian."""
    return (y - t).square().sum(dim=-1).mean() / 2


def accuracy(y: Tensor, t: Tensor) -> Tensor:
    """The fraction of examples whose largest logit is that of their class."""
    return (y.argmax(dim=-1) == t).double().mean()


def relative_error(y: Tensor, t: Tensor) -> Tensor:
    """‖y − t‖ / ‖t‖."""
    return (y - t).norm() / t.norm()


def muon(model: nn.Module, lr: float) -> Optimizer:
    """torch's Muon for matrices; AdamW steps the rest, which Muon does not take, after it."""
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=lr)

    def after(*_: object) -> None:
        rest.step()
        rest.zero_grad()

    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
    optimizer.register_step_post_hook(after)
    return optimizer


def digits() -> Task:
    """64 pixels, 32 hidden units, 10 classes, cross-entropy, mini-batches of 256."""
    data, fisher = load_digits(), ng.Fisher(ng.Categorical(), samples=1)
    return Task(
        name="digits",
        network=lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
        train=data.train,
        test=data.test,
        batch_size=256,
        loss=F.cross_entropy,
        score_name="test accuracy",
        score=accuracy,
        optimizers={
            "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05),
            "Muon": lambda m: muon(m, lr=0.02),
            "ng.Natural": lambda m: ng.Natural(m, lr=0.01),
            "K-FAC": lambda m: ng.KFAC(m, fisher, step=ng.SelfTuned()),
        },
    )


@final
class Laplacian(nn.Module):
    """x ↦ Δu(x) for u = x(1 − x) y(1 − y) times a network, which is zero on the boundary of the unit square."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return ng.pde.laplacian(self.solution, x)

    def solution(self, x: Tensor) -> Tensor:
        a, b = x[:, :1], x[:, 1:]
        return a * (1 - a) * b * (1 - b) * self.network(x)


def poisson() -> Task:
    """Poisson's equation Δu = −2π² sin πx sin πy on the unit square, by least squares at 400 points."""

    def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x, -2 * math.pi**2 * (math.pi * x).sin().prod(1, keepdim=True)

    return Task(
        name="differential equation",
        network=Laplacian,
        train=points(400, 0),
        test=points(400, 1),
        batch_size=400,
        loss=half_squared_error,
        score_name="relative error",
        score=relative_error,
        weight=2.0,
        optimizers={
            "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.0),
            "L-BFGS": lambda m: torch.optim.LBFGS(m.parameters(), line_search_fn="strong_wolfe"),
            "Gauss–Newton": lambda m: ng.NaturalGradient(
                m, ng.Euclidean(), structure=ng.Dense(), step=ng.LevenbergMarquardt(), damping=1e-2
            ),
        },
    )


# The training loop that all optimizers share, and its record.


@final
@dataclass(frozen=True)
class Budget:
    """A run ends after this many steps or seconds, whichever comes first.

    >>> Budget(steps=200, seconds=10.0).spent(steps=50, seconds=8.0)
    0.8
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise ValueError("Budget: give steps, seconds or both; a run without a budget never ends")

    def times(self, weight: float) -> Budget:
        """The same steps, ``weight`` times the seconds."""
        return Budget(self.steps, None if self.seconds is None else weight * self.seconds)

    def spent(self, steps: int, seconds: float) -> float:
        """The fraction of the budget that is used up; the run is over at 1."""
        fractions = [steps / self.steps if self.steps else 0.0, seconds / self.seconds if self.seconds else 0.0]
        return min(1.0, max(fractions))


@final
@dataclass(frozen=True)
class Point:
    """Losses on the whole training and test set after ``step`` steps, which took ``seconds`` together."""

    step: int
    seconds: float
    train_loss: float
    test_loss: float
    test_score: float


@final
@dataclass
class TrainingRun:
    """One optimizer on one task; ``history`` grows during training, so that an interrupted run has a record."""

    task: Task
    optimizer: str
    history: list[Point] = field(default_factory=list)
    status: Status = "running"

    def best(self) -> Point:
        """The measurement with the lowest test loss."""
        return min(self.history, key=lambda point: point.test_loss)

    def reaches(self, test_loss: float) -> Point | None:
        """The first measurement with at most this test loss, or None."""
        return next((point for point in self.history if point.test_loss <= test_loss), None)


@final
@dataclass
class Runs:
    """The runs that were started; Ctrl-C cuts the last one short."""

    runs: list[TrainingRun] = field(default_factory=list)
    interrupted: bool = False


Watch: TypeAlias = Callable[[TrainingRun, float], None]


def batches(examples: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of mini-batches, forever: a new permutation per epoch, all batches of the same size.

    >>> [sorted(batch.tolist()) for batch, _ in zip(batches(4, 4, seed=0), range(2))]
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    if not 0 < size <= examples:
        raise ValueError(f"batches: size is {size}, but must lie between 1 and the number of examples, {examples}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(examples, generator=generator)
        yield from order[: examples - examples % size].split(size)


def milestones() -> Iterator[int]:
    """Steps at which losses are measured: 1 … 9, then the E24 numbers, evenly spaced on a logarithmic axis.

    >>> from itertools import islice
    >>> list(islice(milestones(), 24))
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39]
    """
    yield from range(1, 10)
    for decade in count():
        yield from (mantissa * 10**decade for mantissa in E24)


def measure(task: Task, model: nn.Module, step: int, seconds: float) -> Point:
    """Losses on all of the data, in evaluation mode and without gradients."""
    model.eval()
    with torch.no_grad():
        (x, t), (test_x, test_t) = task.train, task.test
        y, test_y = model(x), model(test_x)
        values = (task.loss(y, t), task.loss(test_y, test_t), task.score(test_y, test_t))
    model.train()
    return Point(step, seconds, *(value.item() for value in values))


def train(run: TrainingRun, budget: Budget, seed: int, watch: Watch) -> None:
    """Train until the budget is spent, and record losses in ``run.history`` from step 0 on."""
    task = run.task
    torch.manual_seed(seed)  # the same initial weights for every optimizer
    model = task.network()
    optimizer = task.optimizers[run.optimizer](model)
    inputs, targets = task.train
    due = milestones()
    next_due = next(due)
    seconds = 0.0
    run.history.append(measure(task, model, 0, seconds))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = task.loss(model(x), t)
        loss.backward()
        return loss

    for step, batch in enumerate(batches(len(inputs), task.batch_size, seed), start=1):
        x, t = inputs[batch], targets[batch]
        start = perf_counter()
        loss: Any = optimizer.step(closure)
        seconds += perf_counter() - start
        if not loss.isfinite():
            run.status = "diverged"
            return
        spent = budget.spent(step, seconds)
        if step == next_due or spent >= 1:
            run.history.append(measure(task, model, step, seconds))
            next_due = next(due) if step == next_due else next_due
        watch(run, spent)
        if spent >= 1:
            run.status = "finished"
            return


def compare(tasks: tuple[Task, ...], budget: Budget, seed: int, watch: Watch = lambda run, spent: None) -> Runs:
    """Every optimizer on every task, one after the other. Ctrl-C ends the comparison and keeps what was measured.

    >>> runs = compare((digits(),), Budget(steps=2), seed=0).runs
    >>> [run.optimizer for run in runs]
    ['AdamW', 'Muon', 'ng.Natural', 'K-FAC']
    >>> len({run.history[0].train_loss for run in runs})
    1
    """
    result = Runs()
    try:
        for task in tasks:
            for optimizer in task.optimizers:
                run = TrainingRun(task, optimizer)
                result.runs.append(run)
                train(run, budget.times(task.weight), seed, watch)
    except KeyboardInterrupt:
        result.interrupted = True
        for run in result.runs:
            run.status = "interrupted" if run.status == "running" else run.status
    return result
