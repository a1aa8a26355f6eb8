"""The solvers: least squares of natgrad in several forms, and first-order and quasi-Newton baselines.

A solver makes one step at a time, and can be saved and loaded. All minimise the same loss from the same weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

import natgrad as ng

Classes = Mapping[str, ng.Residuals]


class Stepper(ABC):
    """One step at a time, and the loss ½ Σ (1/N) Σ r² where it started."""

    @abstractmethod
    def step(self, fraction: float) -> float:
        """``fraction``: of the time that is used up, for schedules."""

    @abstractmethod
    def state(self) -> dict[str, Any]: ...

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None: ...


@final
class OfLeastSquares(Stepper):
    """``ng.LeastSquares`` with any of its choices.

    ``longest``: the longest step of ``ng.Spring``, which then falls to zero with the learning rate, along a cosine over
    the time of the run. That is for far fewer points in a step than the solution has unknowns: a step that meets the
    residuals of its own points exactly undoes what earlier ones have learned.
    """

    def __init__(self, problem: ng.LeastSquares, longest: float | None = None) -> None:
        self.problem, self.longest, self.rate = problem, longest, problem.lr

    def step(self, fraction: float) -> float:
        if self.longest is not None and isinstance(self.problem.rule, ng.Spring):
            share = max(_cosine(fraction), 1e-6)
            self.problem.lr = self.rate * share
            self.problem.rule = replace(self.problem.rule, norm=self.longest * share)
        return self.problem.step().cost

    def state(self) -> dict[str, Any]:
        return self.problem.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.problem.load_state_dict(state)


def _cosine(fraction: float) -> float:
    """From one to zero."""
    return 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0)))


@final
class OfTorch(Stepper):
    """An optimizer of torch's interface; the learning rate falls to zero along a cosine over the time of the run."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, net: nn.Module, classes: Classes, fixed_rate: bool = False
    ) -> None:
        self.optimizer, self.net, self.classes = optimizer, net, classes
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.fixed_rate = fixed_rate

    def loss(self, points: Mapping[str, Tensor]) -> Tensor:
        terms = [
            0.5 * each.weight * each.function(self.net, points[name]).square().flatten(1).sum(1).mean()
            for name, each in self.classes.items()
        ]
        return torch.stack(terms).sum()

    def step(self, fraction: float) -> float:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate if self.fixed_rate else rate * _cosine(fraction)
        points: dict[str, Any] = {name: each.draw() for name, each in self.classes.items()}

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(points)
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return float(self.optimizer.step(closure).detach())
        loss = closure()
        self.optimizer.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def least_squares(**choices: Any) -> Callable[[nn.Module, Classes, float | None, int], Stepper]:
    """``ng.LeastSquares`` with these choices; the rate is the damping where one is given."""

    def made(net: nn.Module, classes: Classes, rate: float | None, memory: int) -> Stepper:
        given = {**choices, **({} if rate is None else {"damping": rate})}
        return OfLeastSquares(ng.LeastSquares(classes, net, memory=memory, **given))

    return made


def falling_spring(decay: float) -> Callable[[nn.Module, Classes, float | None, int], Stepper]:
    """The rate is the longest step; the damping is the library's, a share of the first metric."""

    def made(net: nn.Module, classes: Classes, rate: float | None, memory: int) -> Stepper:
        problem = ng.LeastSquares(classes, net, step=ng.Spring(decay=decay), memory=memory)
        return OfLeastSquares(problem, longest=rate or 0.05)

    return made


def adam(net: nn.Module, classes: Classes, rate: float | None, memory: int) -> Stepper:
    return OfTorch(torch.optim.Adam(net.parameters(), lr=rate or 1e-3), net, classes)


def lbfgs(net: nn.Module, classes: Classes, rate: float | None, memory: int) -> Stepper:
    chosen = torch.optim.LBFGS(
        net.parameters(), lr=rate or 1.0, max_iter=20, history_size=100, line_search_fn="strong_wolfe",
        tolerance_grad=0.0, tolerance_change=0.0,
    )  # fmt: skip
    return OfTorch(chosen, net, classes, fixed_rate=True)


def soap(net: nn.Module, classes: Classes, rate: float | None, memory: int) -> Stepper:
    return OfTorch(ng.SOAP(net, lr=rate or 3e-3, weight_decay=0.0), net, classes)


def muon(net: nn.Module, classes: Classes, rate: float | None, memory: int) -> Stepper:
    return OfTorch(ng.Muon(net, lr=rate or 3e-3, weight_decay=0.0), net, classes)


SOLVERS: dict[str, Callable[[nn.Module, Classes, float | None, int], Stepper]] = {
    "natgrad": least_squares(),
    "spring": least_squares(step=ng.Spring(decay=0.9, search=ng.GridSearch()), damping=1e-8),
    "falling_spring": falling_spring(0.97),
    "lm": least_squares(step=ng.LevenbergMarquardt()),
    "engd": least_squares(structure=ng.Dense(), step=ng.GridSearch(), damping=1e-10),
    "engd_kernel": least_squares(structure=ng.Kernel(), step=ng.GridSearch(), damping=1e-10),
    "kfac": least_squares(structure=ng.Kronecker(), step=ng.GridSearch(), damping=1e-8),
    "adam": adam,
    "lbfgs": lbfgs,
    "soap": soap,
    "muon": muon,
}
BASELINES = ("adam", "lbfgs", "soap", "muon", "engd")
RATES: dict[str, tuple[float, ...]] = {  # that a baseline is tuned over
    "adam": (3e-2, 1e-2, 3e-3, 1e-3),
    "soap": (1e-2, 3e-3, 1e-3),
    "muon": (1e-2, 3e-3, 1e-3),
}
