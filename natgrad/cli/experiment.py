"""One training loop for every optimizer, and the record it keeps.

Same data, same initial weights, same mini-batches in the same order: what differs between two runs of a task is the
optimizer alone. The clock counts optimization steps only, and stands still while losses are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Status = Literal["running", "finished", "diverged", "interrupted"]
Loss = Callable[[Tensor, Tensor], Tensor]

E24 = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)


@final
@dataclass(frozen=True)
class Contender:
    """A named optimizer, still to be given its network."""

    name: str
    optimizer: Callable[[nn.Module], Optimizer]


@final
@dataclass(frozen=True)
class Score:
    """What is measured on the test set beside the loss."""

    name: str
    measure: Loss


@final
@dataclass(frozen=True)
class Data:
    """Pairs (inputs[n …], targets[n …]) to train and to test with, and how many examples make a batch."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch_size: int


@final
@dataclass(frozen=True)
class Task:
    """A network, its data, its loss, and who competes on it.

    A run of the task gets `weight` times the seconds of the budget.
    """

    name: str
    network: Callable[[], nn.Module]
    data: Data
    loss: Loss
    score: Score
    weight: float
    contenders: tuple[Contender, ...]


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
        """The same steps, `weight` times the seconds."""
        return Budget(self.steps, None if self.seconds is None else weight * self.seconds)

    def spent(self, steps: int, seconds: float) -> float:
        """The part of the budget that is used up; the run is over at 1."""
        parts = [steps / self.steps if self.steps else 0.0, seconds / self.seconds if self.seconds else 0.0]
        return min(1.0, max(parts))


@final
@dataclass(frozen=True)
class Point:
    """Losses on the whole training and test set after `step` steps that took `seconds` together."""

    step: int
    seconds: float
    train_loss: float
    test_loss: float
    test_score: float


@final
@dataclass
class Run:
    """One contender on one task; `history` grows while it trains, so that an interrupted run is worth something."""

    task: Task
    contender: Contender
    history: list[Point] = field(default_factory=list)
    status: Status = "running"

    def at_step(self, step: int) -> Point | None:
        """The last measurement up to this step, or None if the run never got there.

        Steps of the ladder 1, 3, 10, 30 … are always measured, so for those this is exact.
        """
        return self._until(lambda point: point.step, step)

    def at_seconds(self, seconds: float) -> Point | None:
        """The last measurement before this time, or None if the run ended earlier."""
        return self._until(lambda point: point.seconds, seconds)

    def _until(self, key: Callable[[Point], float], bound: float) -> Point | None:
        if not self.history or key(self.history[-1]) < bound:
            return None
        return next((point for point in reversed(self.history) if key(point) <= bound), None)


@final
@dataclass
class Comparison:
    """The runs that were started, the last of them perhaps cut short."""

    runs: list[Run] = field(default_factory=list)
    interrupted: bool = False


Watch = Callable[[Run, float], None]


def batches(examples: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of mini-batches, for ever: a new permutation an epoch, all batches of the same size.

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
        (x, t), (test_x, test_t) = task.data.train, task.data.test
        y, test_y = model(x), model(test_x)
        values = (task.loss(y, t), task.loss(test_y, test_t), task.score.measure(test_y, test_t))
    model.train()
    return Point(step, seconds, *(value.item() for value in values))


def train(run: Run, budget: Budget, seed: int, watch: Watch) -> None:
    """The loop that all optimizers share; it fills `run.history` from step 0 on."""
    task = run.task
    torch.manual_seed(seed)  # the same initial weights for every contender
    model = task.network()
    optimizer = run.contender.optimizer(model)
    inputs, targets = task.data.train
    due = milestones()
    next_due = next(due)
    seconds = 0.0
    run.history.append(measure(task, model, 0, seconds))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = task.loss(model(x), t)
        loss.backward()
        return loss

    for step, batch in enumerate(batches(len(inputs), task.data.batch_size, seed), start=1):
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


def compare(tasks: tuple[Task, ...], budget: Budget, seed: int, watch: Watch = lambda run, spent: None) -> Comparison:
    """Every contender on every task, one after the other. Ctrl-C ends the comparison and keeps what there is.

    >>> from natgrad.cli.tasks import classifier
    >>> runs = compare((classifier(),), Budget(steps=2), seed=0).runs
    >>> [run.contender.name for run in runs]
    ['SGD', 'AdamW', 'natural gradient', 'natural gradient (CG)', 'K-FAC']
    >>> len({run.history[0].train_loss for run in runs})
    1
    """
    result = Comparison()
    try:
        for task in tasks:
            for contender in task.contenders:
                run = Run(task, contender)
                result.runs.append(run)
                train(run, budget.times(task.weight), seed, watch)
    except KeyboardInterrupt:
        result.interrupted = True
        for run in result.runs:
            run.status = "interrupted" if run.status == "running" else run.status
    return result
