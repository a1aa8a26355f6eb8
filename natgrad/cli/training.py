"""The training loop of `natgrad demo` and `natgrad compare`, and its record.

The runs of a task share data, initial weights and mini-batches; they differ in the optimizer alone. The clock counts
optimization steps only, and stands still while losses are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from time import perf_counter
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.errors import NonFiniteError
from natgrad.model import arguments, evaluating, map_tensors

E24 = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)
_GRACE = 1.0  # seconds by which measuring may be ahead of training

Status: TypeAlias = Literal["running", "finished", "diverged", "interrupted"]
Loss: TypeAlias = Callable[[Any, Any], Tensor]


class UsageError(ValueError):
    """What was written on the command line, or in the function it names, is wrong; the message says what to write."""


@final
@dataclass(frozen=True)
class Problem:
    """A model with its loss and data: what a function given to `natgrad compare` returns, as a tuple.

    Attributes:
        model: The network, with its initial weights.
        loss: ``loss(output, target)``, a mean over the examples of a batch; the model itself if it computes its loss,
            as those of transformers do.
        train: Mini-batches ``(input, target)`` in a ``DataLoader`` or a list; an input may be a tuple or a dict of
            arguments. With a model that computes its loss a batch is a dict.
        test: Mini-batches that are held out.
        score: ``score(output, target)``, which is reported, too, by its name, such as ``accuracy``.
    """

    model: nn.Module
    loss: Loss | nn.Module
    train: Iterable[Any] = ()
    test: Iterable[Any] = ()
    score: Loss | None = None

    def of_batch(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Loss and score; the batch is moved to the device of the model."""
        device = next(self.model.parameters()).device
        batch = map_tensors(batch, lambda t: t.to(device))
        if self.loss is self.model:
            return self.model(**batch).loss, None
        x, target = batch
        args, kwargs = arguments(x)
        output = self.model(*args, **kwargs)
        return self.loss(output, target), None if self.score is None else self.score(output, target)

    def means(self, batches: Iterable[Any]) -> tuple[float, float | None]:
        """Loss and score over the examples of all batches, in evaluation mode; no random number is drawn."""
        sums, examples = [0.0, 0.0], 0
        with torch.no_grad(), evaluating(self.model), torch.random.fork_rng(devices=[]):
            for batch in batches:
                n, found = length(batch), self.of_batch(batch)
                sums = [
                    total + n * (0.0 if value is None else value.item())
                    for total, value in zip(sums, found, strict=True)
                ]
                examples += n
        if not examples:
            raise UsageError("the test batches are empty, or end and cannot be begun again: return a list of them")
        return sums[0] / examples, None if self.score is None else sums[1] / examples


def length(batch: Any) -> int:
    """How many examples a batch has: the first axis of its first tensor.

    >>> length(({"ids": torch.zeros(3, 2)}, torch.zeros(3)))
    3
    """
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


@final
@dataclass(frozen=True)
class Batches:
    """Mini-batches of two tensors: a new permutation in every epoch, all of the same size.

    >>> data = Batches(torch.arange(5), torch.arange(5), size=2)
    >>> [len(x) for x, t in data]
    [2, 2]
    """

    inputs: Tensor
    targets: Tensor
    size: int

    def __post_init__(self) -> None:
        if not 0 < self.size <= len(self.inputs):
            raise ValueError(
                f"Batches: size is {self.size}, but must lie between 1 and the number of examples, {len(self.inputs)}"
            )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self.inputs)
        for part in torch.randperm(n)[: n - n % self.size].to(self.inputs.device).split(self.size):
            yield self.inputs[part], self.targets[part]


def endless(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """The batches, epoch after epoch, with random numbers of their own: no optimizer changes their order.

    >>> data = Batches(torch.arange(4), torch.arange(4), size=4)
    >>> [sorted(x.tolist()) for (x, _), _ in zip(endless(data, seed=0), range(2))]
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    state = torch.Generator().manual_seed(seed).get_state()
    epoch: Iterator[Any] = iter(())
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            batch = next(epoch, None)
            if batch is None:
                epoch = iter(batches)
                batch = next(epoch, None)
            state = torch.get_rng_state()
        if batch is None:
            raise UsageError(
                "the training batches are empty, or end and cannot be begun again: return a DataLoader or a list"
            )
        yield batch


# A task, its budget, and the record of a run.

MakeOptimizer: TypeAlias = Callable[[Problem], Optimizer]


@final
@dataclass(frozen=True)
class Task:
    """A problem, which is made anew for every run after the seed was set, and its optimizers.

    A run of the task gets ``weight`` times the seconds of the budget.
    """

    name: str
    problem: Callable[[], Problem]
    optimizers: Mapping[str, MakeOptimizer] = field(default_factory=dict)
    weight: float = 1.0
    score_name: str | None = None


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
    """Losses after ``step`` steps, which took ``seconds`` together.

    The test loss is over all test batches, the training loss over the first training batches that have as many
    examples.
    """

    step: int
    seconds: float
    train_loss: float
    test_loss: float
    test_score: float | None


@final
@dataclass
class TrainingRun:
    """One optimizer on one task; ``history`` grows during training, so that an interrupted run has a record."""

    task: Task
    optimizer: str
    history: list[Point] = field(default_factory=list)
    status: Status = "running"
    seed: int = 0

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

    def done(self, task: str, optimizer: str, seed: int) -> bool:
        """Whether this run has ended by itself."""
        ended = (run for run in self.runs if run.status in ("finished", "diverged"))
        return any((run.task.name, run.optimizer, run.seed) == (task, optimizer, seed) for run in ended)


Watch: TypeAlias = Callable[[TrainingRun, float], None]


def milestones() -> Iterator[int]:
    """Steps at which losses are measured: 1 … 9, then the E24 numbers, evenly spaced on a logarithmic axis.

    >>> from itertools import islice
    >>> list(islice(milestones(), 24))
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39]
    """
    yield from range(1, 10)
    for decade in count():
        yield from (mantissa * 10**decade for mantissa in E24)


def measure(problem: Problem, sample: Iterable[Any], step: int, seconds: float) -> Point:
    """Losses on a sample of the training batches and on the test batches."""
    return Point(step, seconds, problem.means(sample)[0], *problem.means(problem.test))


def sample_of(problem: Problem, seed: int) -> list[Any]:
    """The first training batches that have as many examples as the test batches."""
    missing, sample = sum(length(batch) for batch in problem.test), []
    for batch in endless(problem.train, seed):
        sample.append(batch)
        missing -= length(batch)
        if missing <= 0:
            break
    return sample


def train(run: TrainingRun, budget: Budget, watch: Watch) -> None:
    """Train until the budget is spent, and record losses in ``run.history`` from step 0 on."""
    torch.manual_seed(run.seed)  # the same initial weights for every optimizer
    problem = run.task.problem()
    optimizer = run.task.optimizers[run.optimizer](problem)
    sample, due = sample_of(problem, run.seed), milestones()
    next_due, seconds, measuring = next(due), 0.0, 0.0
    run.history.append(measure(problem, sample, 0, seconds))

    def closure() -> Any:
        optimizer.zero_grad()
        loss, _ = problem.of_batch(batch)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return loss

    for step, given in enumerate(endless(problem.train, run.seed), start=1):
        batch, start = given, perf_counter()
        try:
            loss: Any = optimizer.step(closure)
            finite = math.isfinite(loss.item())  # which waits for a GPU: the clock counts what was computed
        except NonFiniteError:
            finite = False
        now = perf_counter()
        seconds += now - start
        spent = budget.spent(step, seconds)
        late = budget.seconds is not None and measuring > seconds + _GRACE  # a large test set is measured less often
        if finite and ((step == next_due and not late) or spent >= 1):
            point = measure(problem, sample, step, seconds)
            measuring += perf_counter() - now
            finite = math.isfinite(point.test_loss) and math.isfinite(point.train_loss)
            run.history += [point] if finite else []
        next_due = next(due) if step == next_due else next_due
        if not finite or spent >= 1:
            run.status = "finished" if finite else "diverged"
        watch(run, spent)
        if run.status != "running":
            return


def warm_up(task: Task) -> Problem:
    """One step with every optimizer, and no record: libraries load, and errors are told, before the clock runs.

    Returns the problem.
    """

    def short() -> Problem:
        problem = task.problem()
        return replace(problem, test=[*islice(problem.test, 1)])

    for optimizer in task.optimizers:
        train(TrainingRun(replace(task, problem=short), optimizer), Budget(steps=1), lambda run, spent: None)
    return task.problem()


def compare(
    tasks: tuple[Task, ...],
    budget: Budget,
    seeds: Iterable[int] = (0,),
    watch: Watch = lambda run, spent: None,
    so_far: Runs | None = None,
) -> Runs:
    """Every optimizer on every task, seed by seed. Ctrl-C ends the comparison and keeps what was measured.

    ``so_far``: what an earlier comparison has done, which is not done again.

    >>> from natgrad.cli.demo import digits
    >>> runs = compare((digits(),), Budget(steps=2)).runs
    >>> [run.optimizer for run in runs]
    ['AdamW', 'Muon', 'ng.Natural', 'K-FAC']
    >>> len({run.history[0].train_loss for run in runs})
    1
    """
    result = Runs() if so_far is None else so_far
    try:
        for task in tasks:
            for seed in seeds:
                for optimizer in task.optimizers:
                    if result.done(task.name, optimizer, seed):
                        continue
                    run = TrainingRun(task, optimizer, seed=seed)
                    result.runs.append(run)
                    train(run, budget.times(task.weight), watch)
    except KeyboardInterrupt:
        result.interrupted = True
        for run in result.runs:
            run.status = "interrupted" if run.status == "running" else run.status
    return result
