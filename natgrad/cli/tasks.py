"""The demo's two tasks on 8 × 8 digits, and the four optimizers that compete on each of them.

Every optimizer has one or two numbers (lr, damping). They were chosen the same way for all four: the smallest training
loss at the end of the demo's default budget, over a grid; `natgrad tune` prints the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.cli.experiment import Contender, Score, Task
from natgrad.data import load_digits
from natgrad.structures import Structure


class Rates(NamedTuple):
    """Learning rates, with the damping where there is one."""

    sgd: float
    adamw: float
    exact: tuple[float, float]
    cg: tuple[float, float]


def perceptron(*sizes: int) -> Callable[[], nn.Module]:
    """A fully connected tanh network, linear at its end.

    >>> perceptron(64, 20, 10)()
    Sequential(
      (0): Linear(in_features=64, out_features=20, bias=True)
      (1): Tanh()
      (2): Linear(in_features=20, out_features=10, bias=True)
    )
    """

    def network() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    return network


def half_squared_error(y: Tensor, t: Tensor) -> Tensor:
    """½‖y − t‖², summed over outputs, mean over examples: minus log-likelihood of a unit Gaussian, up to a constant."""
    return (y - t).square().sum(dim=-1).mean() / 2


def accuracy(y: Tensor, t: Tensor) -> Tensor:
    return (y.argmax(dim=-1) == t).double().mean()


def rms_error(y: Tensor, t: Tensor) -> Tensor:
    """Root mean squared error of a pixel, whose values lie in [0, 1]."""
    return (y - t).square().mean().sqrt()


def contenders(metric: ng.OutputMetric, exact: Structure, rates: Rates) -> tuple[Contender, ...]:
    """The same four optimizers for each task; only their numbers differ."""

    def sgd(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=rates.sgd, momentum=0.9)

    def adamw(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=rates.adamw)

    def natural(model: nn.Module) -> Optimizer:
        lr, damping = rates.exact
        return ng.NaturalGradient(model, metric, structure=exact, solver=ng.Cholesky(), lr=lr, damping=damping)

    def natural_cg(model: nn.Module) -> Optimizer:
        lr, damping = rates.cg
        solver = ng.CG(tol=1e-2, max_steps=20)
        return ng.NaturalGradient(model, metric, structure=ng.Implicit(), solver=solver, lr=lr, damping=damping)

    return (
        Contender("SGD", sgd),
        Contender("AdamW", adamw),
        Contender("natural gradient", natural),
        Contender("natural gradient (CG)", natural_cg),
    )


def classifier() -> Task:
    """Ten classes, cross-entropy; 1,510 parameters."""
    data = load_digits()
    return Task(
        name="classifier",
        network=perceptron(64, 20, 10),
        train=data.train,
        test=data.test,
        loss=F.cross_entropy,
        score=Score("test accuracy", accuracy),
        batch_size=256,
        contenders=contenders(
            ng.Fisher(ng.Categorical()), ng.Dense(), Rates(sgd=1.0, adamw=0.03, exact=(1.0, 0.01), cg=(1.0, 0.01))
        ),
    )


def autoencoder() -> Task:
    """64 pixels through a bottleneck of 6 numbers, ½‖y − t‖²; 4,614 parameters."""
    data = load_digits()
    train, test = data.train.images, data.test.images
    return Task(
        name="auto-encoder",
        network=perceptron(64, 32, 6, 32, 64),
        train=(train, train),
        test=(test, test),
        loss=half_squared_error,
        score=Score("test RMSE", rms_error),
        batch_size=256,
        contenders=contenders(
            ng.Fisher(ng.Gaussian()), ng.Dense(), Rates(sgd=0.03, adamw=0.01, exact=(1.0, 0.1), cg=(1.0, 0.1))
        ),
    )
