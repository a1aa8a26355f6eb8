"""The tasks of `natgrad demo`.

AdamW, Muon and ``ng.Natural`` have the best learning rate of 0.005, 0.01, 0.02, 0.05 and 0.1: that with the lowest test
loss in 400 steps (800 on the differential equation), mean of two seeds. K-FAC and Gauss–Newton choose their steps.
"""

from __future__ import annotations

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.cli.training import Batches, Problem, Task
from natgrad.data import load_digits


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
    """torch's Muon for matrices; AdamW steps the rest, embeddings and heads among it, after it."""
    matrices = {a.name for a in ng.Natural(model).plan().assignments if a.is_matrix and len(a.shape) == 2}
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rest = torch.optim.AdamW([p for name, p in params.items() if name not in matrices], lr=lr)

    def after(*_: object) -> None:
        rest.step()
        rest.zero_grad()

    optimizer = torch.optim.Muon([params[name] for name in matrices], lr=lr, adjust_lr_fn="match_rms_adamw")
    optimizer.register_step_post_hook(after)
    return optimizer


def digits() -> Task:
    """64 pixels, 32 hidden units, 10 classes, cross-entropy, mini-batches of 256."""
    data, fisher = load_digits(), ng.Fisher(ng.Categorical(), samples=1)

    def problem() -> Problem:
        network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        return Problem(network, F.cross_entropy, Batches(*data.train, 256), [data.test], accuracy)

    return Task(
        name="digits",
        problem=problem,
        optimizers={
            "AdamW": lambda p: torch.optim.AdamW(p.model.parameters(), lr=0.05),
            "Muon": lambda p: muon(p.model, lr=0.02),
            "ng.Natural": lambda p: ng.Natural(p.model, lr=0.01),
            "K-FAC": lambda p: ng.KFAC(p.model, fisher, step=ng.SelfTuned()),
        },
        score_name="test accuracy",
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
        problem=lambda: Problem(Laplacian(), half_squared_error, [points(400, 0)], [points(400, 1)], relative_error),
        optimizers={
            "AdamW": lambda p: torch.optim.AdamW(p.model.parameters(), lr=0.05, weight_decay=0.0),
            "L-BFGS": lambda p: torch.optim.LBFGS(p.model.parameters(), line_search_fn="strong_wolfe"),
            "Gauss–Newton": lambda p: ng.NaturalGradient(
                p.model, ng.Euclidean(), structure=ng.Dense(), step=ng.LevenbergMarquardt(), damping=1e-2
            ),
        },
        weight=2.0,
        score_name="relative error",
    )
