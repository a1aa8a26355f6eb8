"""What the tests of steps and optimizers train: small problems in float64, with their metrics from the oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.zoo import mlp

Built = TypeVar("Built")


def half_square(y: Tensor, t: Tensor) -> Tensor:
    """½‖y − t‖², the mean over the examples: its Gauss–Newton matrix is the Euclidean metric."""
    return 0.5 * (y - t).square().reshape(len(y), -1).sum(1).mean()


def coin_loss(y: Tensor, t: Tensor) -> Tensor:
    """−log p of coins with log-odds y."""
    return (F.softplus(y) - t * y).sum(1).mean()


def count_loss(y: Tensor, t: Tensor) -> Tensor:
    """−log p of Poisson counts with log-rates y."""
    return (y.exp() - t * y).sum(1).mean()


@dataclass(frozen=True)
class Kind:
    """A metric of the library, the same one of the oracle, and the loss that goes with it."""

    metric: ng.OutputMetric
    h: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: bool = False


KINDS = {
    "regression": Kind(ng.Euclidean(), oracle.euclidean, half_square),
    "classes": Kind(ng.Fisher(ng.Categorical()), oracle.categorical, F.cross_entropy, classes=True),
    "coins": Kind(ng.Fisher(ng.Bernoulli()), oracle.bernoulli, coin_loss),
    "counts": Kind(ng.Fisher(ng.Poisson()), oracle.poisson, count_loss),
}


@dataclass(frozen=True)
class Task:
    """A model with a batch; the model is new at every call of ``task``, and always the same."""

    model: nn.Module
    x: Tensor
    t: Tensor
    kind: Kind

    def loss(self) -> Tensor:
        """The loss of the batch."""
        return self.kind.loss(self.model(self.x), self.t)

    def optimizer(self, **options: Any) -> ng.NaturalGradient:
        """The optimizer with the metric of the task."""
        return ng.NaturalGradient(self.model, options.pop("metric", self.kind.metric), **options)

    def closure(self, opt: torch.optim.Optimizer) -> Callable[[], Tensor]:
        """Zero, forward, backward."""

        def evaluate() -> Tensor:
            opt.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return evaluate

    def step(self, opt: torch.optim.Optimizer) -> None:
        """One turn of the user's loop."""
        self.closure(opt)()
        opt.step()

    def theta(self) -> Tensor:
        """θ [P]."""
        return oracle.flatten(self.model.parameters())

    def gradient(self) -> Tensor:
        """ω [P], by the oracle."""
        with torch.enable_grad(), silent(self.model):
            return oracle.differential(self.model, self.loss())

    def metric(self) -> Tensor:
        """G [P P], by the oracle."""
        with silent(self.model):
            J = oracle.module_jacobian(self.model, self.x)
            return oracle.dense(J, self.kind.h(self.model(self.x)))


def seeded(build: Callable[[], Built], seed: int = 0) -> Built:
    """What is built from random numbers, the same at every call; the global stream stays."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


Made = tuple[nn.Module, ng.NaturalGradient]


def resumes(made: Callable[[], Made], step: Callable[[nn.Module, ng.NaturalGradient, int], None]) -> None:
    """A run that was saved after two steps goes on, bit for bit, in another model and optimizer."""
    model, opt = made()
    for seed in range(2):
        step(model, opt, seed)
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    state = opt.state_dict()
    step(model, opt, 3)
    other, again = made()
    other.load_state_dict(weights)
    again.load_state_dict(state)
    step(other, again, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


class silent:  # noqa: N801 - a context manager that reads as a word
    """The oracle's forward passes are none of the optimizer's business: hooks are taken off for a while."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.hooks = dict(self.model._forward_pre_hooks)
        self.model._forward_pre_hooks.clear()

    def __exit__(self, *error: object) -> None:
        self.model._forward_pre_hooks.update(self.hooks)


def task(kind: str = "regression", n: int = 12, seed: int = 0) -> Task:
    """A 2-3-2 network with tanh: 17 parameters and, with 12 examples, a regular metric (but for classes)."""

    def build() -> Task:
        model = mlp(2, 3, 2).double()
        x = torch.randn(n, 2, dtype=torch.float64)
        t = torch.rand(n, 2, dtype=torch.float64)
        labels = torch.randint(2, (n,))
        return Task(model, x, labels if KINDS[kind].classes else t, KINDS[kind])

    return seeded(build, seed)


class Rosenbrock(nn.Module):
    """z(θ) = (a − θ₁, √b (θ₂ − θ₁²)) as one example with two outputs; the loss is z₁² + z₂²."""

    def __init__(self, start: tuple[float, float] = (-1.2, 1.0)) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self) -> Tensor:
        """[1 2]."""
        first, second = self.point
        return torch.stack([1 - first, 10 * (second - first**2)])[None]


class Scalar(nn.Module):
    """y = θ, one example, one parameter: every step can be computed by hand."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=torch.float64))

    def forward(self) -> Tensor:
        """[1 1]."""
        return self.value[None]
