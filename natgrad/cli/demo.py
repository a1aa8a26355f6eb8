"""The tasks, the optimizers and the training loop of `natgrad demo`.

The runs of a task share data, initial weights and mini-batches; they differ in the optimizer alone. The clock counts
optimization steps only, and stands still while losses are measured.

The networks have sigmoid units. As σ(z) = (1 + tanh(z/2))/2 they are tanh networks in worse coordinates: activations
are never negative, and gradients shrink at least fourfold per layer. First-order methods depend on the coordinates, the
natural gradient does not. The units were chosen to show that; with tanh the first-order methods are quicker.

The learning rates of SGD and AdamW gave the smallest training loss of a grid after thousands of steps, over two seeds.
The numbers of the natural gradients (lr, damping, radius) were chosen by hand from short runs. K-FAC tunes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise
from time import perf_counter
from typing import Any, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.data import load_digits
from natgrad.solve import Solver
from natgrad.structures import Structure

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


def perceptron(*sizes: int) -> Callable[[], nn.Module]:
    """A fully connected sigmoid network with a linear last layer.

    >>> perceptron(64, 20, 10)()
    Sequential(
      (0): Linear(in_features=64, out_features=20, bias=True)
      (1): Sigmoid()
      (2): Linear(in_features=20, out_features=10, bias=True)
    )
    """

    def network() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
        return nn.Sequential(*layers[:-1])

    return network


def half_squared_error(y: Tensor, t: Tensor) -> Tensor:
    """½‖y − t‖², summed over outputs, mean over examples: minus the log-likelihood of a unit Gaussian."""
    return (y - t).square().sum(dim=-1).mean() / 2


def accuracy(y: Tensor, t: Tensor) -> Tensor:
    """The fraction of examples whose largest logit is that of their class."""
    return (y.argmax(dim=-1) == t).double().mean()


def rms_error(y: Tensor, t: Tensor) -> Tensor:
    """Root mean squared error of the pixels, whose values lie in [0, 1]."""
    return (y - t).square().mean().sqrt()


def optimizers(
    family: ng.families.Family, *, sgd_lr: float, adamw_lr: float, lr: float, damping: float, radius: float
) -> dict[str, MakeOptimizer]:
    """The five optimizers.

    Both natural gradients solve (G + λ)v = ∇L and shorten steps with ½ δᵀGδ above ``radius``: one by Cholesky, one by
    conjugate gradients without forming G. K-FAC has two small matrices per layer and no number to choose.
    """

    def natural(structure: Structure, solver: Solver) -> MakeOptimizer:
        return lambda m: ng.NaturalGradient(
            m,
            ng.Fisher(family),
            structure=structure,
            solver=solver,
            step=ng.TrustRegion(radius, longest=1.0),
            lr=lr,
            damping=damping,
        )

    return {
        "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=sgd_lr, momentum=0.9),
        "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=adamw_lr),
        "natural gradient": natural(ng.Dense(), ng.Cholesky()),
        "natural gradient (CG)": natural(ng.Implicit(), ng.CG(tol=1e-2, max_steps=30)),
        "K-FAC": lambda m: ng.KFAC(m, ng.Fisher(family, samples=1), step=ng.SelfTuned()),
    }


def classifier() -> Task:
    """64 pixels, 20 hidden units, 10 classes, cross-entropy; 1,510 parameters."""
    data = load_digits()
    return Task(
        name="classifier",
        network=perceptron(64, 20, 10),
        train=data.train,
        test=data.test,
        batch_size=256,
        loss=F.cross_entropy,
        score_name="test accuracy",
        score=accuracy,
        optimizers=optimizers(ng.Categorical(), sgd_lr=3.0, adamw_lr=0.03, lr=1.0, damping=3e-4, radius=0.01),
    )


def autoencoder() -> Task:
    """64 pixels through a bottleneck of 6 numbers, ½‖y − t‖²; 2,342 parameters."""
    data = load_digits()
    return Task(
        name="auto-encoder",
        network=perceptron(64, 16, 6, 16, 64),
        train=(data.train.images, data.train.images),
        test=(data.test.images, data.test.images),
        batch_size=256,
        loss=half_squared_error,
        score_name="test RMSE",
        score=rms_error,
        weight=3.0,
        optimizers=optimizers(ng.Gaussian(), sgd_lr=0.1, adamw_lr=0.03, lr=0.5, damping=3e-4, radius=1.0),
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

    def at_step(self, step: int) -> Point | None:
        """The last measurement up to this step, or None if the run ended earlier."""
        return self._until(lambda point: point.step, step)

    def at_seconds(self, seconds: float) -> Point | None:
        """The last measurement up to this time, or None if the run ended earlier."""
        return self._until(lambda point: point.seconds, seconds)

    def _until(self, key: Callable[[Point], float], bound: float) -> Point | None:
        if not self.history or key(self.history[-1]) < bound:
            return None
        return next((point for point in reversed(self.history) if key(point) <= bound), None)


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

    >>> runs = compare((classifier(),), Budget(steps=2), seed=0).runs
    >>> [run.optimizer for run in runs]
    ['SGD', 'AdamW', 'natural gradient', 'natural gradient (CG)', 'K-FAC']
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
