"""Optimizers by name, and their learning rates: what `natgrad compare` adds to the training loop."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.cli.demo import muon
from natgrad.cli.training import Budget, MakeOptimizer, Problem, Runs, Task, UsageError, Watch, compare

LADDER = tuple(round(mantissa * 10.0**power, 6) for power in range(-5, 1) for mantissa in (1, 3))
START = 0.01  # the first learning rate that is tried
TRIAL = 0.25  # of the budget of a run, for every learning rate that is tried
RATES = "learning rates"

AtRate: TypeAlias = Callable[[Problem, float], Optimizer]


def _kfac(problem: Problem) -> Optimizer:
    return ng.KFAC(problem.model, problem.loss, step=ng.SelfTuned())


# By the names of the command line: those in reports, and how they are made at a learning rate.
OPTIMIZERS: dict[str, tuple[str, AtRate]] = {
    "natural": ("ng.Natural", lambda p, lr: ng.Natural(p.model, lr=lr)),
    "adamw": ("AdamW", lambda p, lr: torch.optim.AdamW(p.model.parameters(), lr=lr)),
    "muon": ("Muon", lambda p, lr: muon(p.model, lr)),
    "sgd": ("SGD", lambda p, lr: torch.optim.SGD(p.model.parameters(), lr=lr, momentum=0.9)),
    "soap": ("SOAP", lambda p, lr: ng.SOAP(p.model, lr=lr)),
    "shampoo": ("Shampoo", lambda p, lr: ng.Shampoo(p.model, lr=lr)),
}
WITHOUT_RATE: dict[str, tuple[str, MakeOptimizer]] = {"kfac": ("K-FAC", _kfac)}


def load(spec: str) -> Any:
    """The object that ``MODULE:FUNCTION`` names; modules of the current folder are found, too.

    >>> load("math:gcd")(12, 18)
    6
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UsageError(f"{spec!r} is not MODULE:FUNCTION, such as mymodel:problem for `def problem()` in mymodel.py")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module has been found, and needs another
        files = [path.stem for path in Path.cwd().glob("*.py")]
        raise UsageError(f"there is no module {module!r} in {Path.cwd()}{nearest(module, files)}") from error
    if not callable(getattr(found, name, None)):
        raise UsageError(f"{module} has no function {name!r}{nearest(name, dir(found))}")
    return getattr(found, name)


def nearest(name: str, names: Sequence[str]) -> str:
    """A question for whoever has mistyped a name.

    >>> nearest("adam", ["adamw", "muon"])
    '. Did you mean adamw?'
    """
    close = get_close_matches(name, names, n=1)
    return f". Did you mean {close[0]}?" if close else ""


def problem_of(spec: str, device: str | None = None, *, least: int = 4) -> Callable[[], Problem]:
    """What the function returns, checked, with the model on the device: ``least`` of its values are needed."""
    function = load(spec)

    def problem() -> Problem:
        found = function()
        found = (found, found) if isinstance(found, nn.Module) else found
        if not isinstance(found, tuple) or not least <= len(found) <= 5 or not isinstance(found[0], nn.Module):
            what = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
            raise UsageError(
                f"{spec} returned {what}: return (model, loss, train, test), a module, "
                "a function of output and target, and two lists or DataLoaders of batches (input, target)"
            )
        result = Problem(*found)
        return result if device is None else replace(result, model=result.model.to(device))

    return problem


@final
@dataclass(frozen=True)
class Contestant:
    """An optimizer by its name in reports; ``rate`` is None until one is found, or if it takes none."""

    name: str
    make: Callable[..., Optimizer]
    tunes: bool
    rate: float | None = None

    @staticmethod
    def of(text: str) -> Contestant:
        """From ``adamw``, ``adamw=0.001``, or ``MODULE:FUNCTION`` of a model and a learning rate.

        >>> Contestant.of("adamw=0.001").title
        'AdamW (lr 0.001)'
        """
        key, _, rate = text.strip().partition("=")
        if key in WITHOUT_RATE and not rate:
            return Contestant(*WITHOUT_RATE[key], tunes=False)
        try:
            lr = float(rate) if rate else None
        except ValueError:
            raise UsageError(f"{text!r}: write {key}=0.001 for a learning rate, or {key} alone to search it") from None
        if ":" in key:
            function = load(key)
            return Contestant(key, lambda p, lr: function(p.model, lr), lr is None, lr)
        if key not in OPTIMIZERS:
            names = [*OPTIMIZERS, *WITHOUT_RATE]
            raise UsageError(
                f"there is no optimizer {text!r}: there are {', '.join(names)}, and MODULE:FUNCTION of a model and a "
                f"learning rate{nearest(key, names)}"
            )
        return Contestant(*OPTIMIZERS[key], lr is None, lr)

    @property
    def title(self) -> str:
        """The name with the learning rate."""
        return self.name if self.rate is None else f"{self.name} (lr {self.rate:g})"

    def __call__(self, problem: Problem) -> Optimizer:
        """The optimizer of a problem."""
        return self.make(problem) if self.rate is None else self.make(problem, self.rate)


def best_rate(loss_at: Callable[[float], float]) -> float:
    """The learning rate of the ladder 1e-5, 3e-5, …, 3 that is better than its neighbours, uphill from 0.01.

    >>> best_rate(lambda lr: abs(math.log(lr / 0.1)))
    0.1
    """
    losses: dict[int, float] = {}
    at = LADDER.index(START)
    while True:
        near = [k for k in (at, at + 1, at - 1) if 0 <= k < len(LADDER)]
        for k in near:
            if k not in losses:
                losses[k] = loss_at(LADDER[k])
        best = min(near, key=lambda k: (losses[k], k))  # where all diverge, the next lower one
        if best == at:
            return LADDER[at]
        at = best


def trials(
    problem: Callable[[], Problem],
    contestants: Sequence[Contestant],
    budget: Budget,
    seed: int,
    watch: Watch,
    so_far: Runs,
) -> Iterator[Contestant]:
    """The contestants, each with a learning rate: its own, or the best in a quarter of the budget."""
    steps = None if budget.steps is None else math.ceil(TRIAL * budget.steps)
    brief = Budget(steps, None if budget.seconds is None else TRIAL * budget.seconds)
    for one in contestants:

        def loss_at(rate: float, one: Contestant = one) -> float:
            at = replace(one, rate=rate)
            compare((Task(RATES, problem, {at.title: at}),), brief, (seed,), watch, so_far)
            if so_far.interrupted:
                raise KeyboardInterrupt
            run = next(run for run in so_far.runs if (run.task.name, run.optimizer) == (RATES, at.title))
            return run.best().test_loss if run.status == "finished" else math.inf

        yield replace(one, rate=best_rate(loss_at)) if one.tunes else one
