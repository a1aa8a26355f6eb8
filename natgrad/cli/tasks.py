"""The demo's two tasks on 8 × 8 digits, and the five optimizers that compete on each of them.

The networks have sigmoid units. As σ(z) = (1 + tanh(z/2))/2, they are tanh networks in other coordinates, and worse
ones: activations are never negative, gradients shrink at least fourfold a layer. First-order methods feel the
coordinates, the natural gradient feels the functions. The units were chosen to show that: with tanh the first-order
methods are quicker.

Both natural gradients solve the same equation with the same numbers, one by Cholesky, one by conjugate gradients, and
shorten steps that leave a ball in the metric. K-FAC keeps two small matrices a layer instead of one for all, and tunes
itself: it has no number here at all. SGD and AdamW have the learning rate of the grid with the smallest
training loss after thousands of steps, over two seeds; the natural gradients have more numbers (lr, damping, radius),
chosen by hand from short runs. `natgrad demo --grid` runs the numbers around all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.cli.experiment import Contender, Data, Score, Task
from natgrad.data import load_digits


def perceptron(*sizes: int) -> Callable[[], nn.Module]:
    """A fully connected sigmoid network, linear at its end.

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
    """½‖y − t‖², summed over outputs, mean over examples: minus log-likelihood of a unit Gaussian, up to a constant."""
    return (y - t).square().sum(dim=-1).mean() / 2


def accuracy(y: Tensor, t: Tensor) -> Tensor:
    """The part of the examples whose largest logit is that of their class."""
    return (y.argmax(dim=-1) == t).double().mean()


def rms_error(y: Tensor, t: Tensor) -> Tensor:
    """Root mean squared error of a pixel, whose values lie in [0, 1]."""
    return (y - t).square().mean().sqrt()


def sgd(name: str, lr: float) -> Contender:
    """Gradient descent with momentum 0.9."""
    return Contender(name, lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def adamw(name: str, lr: float) -> Contender:
    """Adam with decoupled weight decay, all but lr as torch has it."""
    return Contender(name, lambda model: torch.optim.AdamW(model.parameters(), lr=lr))


def natural(name: str, metric: ng.OutputMetric, lr: float, damping: float, radius: float) -> Contender:
    """θ ← θ − lr·(G + λ)⁻¹∇L, exactly, and shortened where ½ δᵀGδ exceeds the radius."""

    def optimizer(model: nn.Module) -> Optimizer:
        rule = ng.TrustRegion(radius, longest=1.0)
        return ng.NaturalGradient(
            model, metric, structure=ng.Dense(), solver=ng.Cholesky(), step=rule, lr=lr, damping=damping
        )

    return Contender(name, optimizer)


def natural_cg(name: str, metric: ng.OutputMetric, lr: float, damping: float, radius: float) -> Contender:
    """The same by conjugate gradients: G is never formed, and the equation is solved approximately."""

    def optimizer(model: nn.Module) -> Optimizer:
        rule, solver = ng.TrustRegion(radius, longest=1.0), ng.CG(tol=1e-2, max_steps=30)
        return ng.NaturalGradient(
            model, metric, structure=ng.Implicit(), solver=solver, step=rule, lr=lr, damping=damping
        )

    return Contender(name, optimizer)


def kfac(name: str, metric: ng.OutputMetric) -> Contender:
    """K-FAC with its default arguments; learning rate, momentum and damping are chosen as it goes."""
    return Contender(name, lambda model: ng.KFAC(model, metric, step=ng.SelfTuned()))


def classifier() -> Task:
    """Ten classes, cross-entropy; 1,510 parameters."""
    data = load_digits()
    metric = ng.Fisher(ng.Categorical())
    return Task(
        name="classifier",
        network=perceptron(64, 20, 10),
        data=Data(data.train, data.test, batch_size=256),
        loss=F.cross_entropy,
        score=Score("test accuracy", accuracy),
        weight=1.0,
        contenders=(
            sgd("SGD", lr=3.0),
            adamw("AdamW", lr=0.03),
            natural("natural gradient", metric, lr=1.0, damping=3e-4, radius=0.01),
            natural_cg("natural gradient (CG)", metric, lr=1.0, damping=3e-4, radius=0.01),
            kfac("K-FAC", ng.Fisher(ng.Categorical(), samples=1)),
        ),
    )


def autoencoder() -> Task:
    """64 pixels through a bottleneck of 6 numbers, ½‖y − t‖²; 2,342 parameters."""
    data = load_digits()
    metric = ng.Fisher(ng.Gaussian())
    train, test = data.train.images, data.test.images
    return Task(
        name="auto-encoder",
        network=perceptron(64, 16, 6, 16, 64),
        data=Data((train, train), (test, test), batch_size=256),
        loss=half_squared_error,
        score=Score("test RMSE", rms_error),
        weight=3.0,
        contenders=(
            sgd("SGD", lr=0.1),
            adamw("AdamW", lr=0.03),
            natural("natural gradient", metric, lr=0.5, damping=3e-4, radius=1.0),
            natural_cg("natural gradient (CG)", metric, lr=0.5, damping=3e-4, radius=1.0),
            kfac("K-FAC", ng.Fisher(ng.Gaussian(), samples=1)),
        ),
    )


def grid(task: Task) -> Task:
    """The task with a grid of learning rates, damping and radii in place of its contenders: how those were chosen."""
    metric = ng.Fisher(ng.Categorical() if task.loss is F.cross_entropy else ng.Gaussian())

    def cells() -> Iterator[Contender]:
        yield from (sgd(f"SGD {lr:g}", lr) for lr in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0))
        yield from (adamw(f"AdamW {lr:g}", lr) for lr in (0.003, 0.01, 0.03, 0.1, 0.3))
        for lr, damping, radius in product((0.5, 1.0), (1e-4, 3e-4, 1e-3), (0.01, 0.1, 1.0)):
            numbers = f"{lr:g} {damping:g} {radius:g}"
            yield natural(f"natural {numbers}", metric, lr, damping, radius)
            yield natural_cg(f"CG {numbers}", metric, lr, damping, radius)

    return replace(task, contenders=tuple(cells()))
