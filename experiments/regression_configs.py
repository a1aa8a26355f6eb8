"""The optimizers of the regression study, and the loop that trains them against the CPU clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import process_time
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import Tensor, nn

import natgrad as ng
from experiments.regression_data import Pair, Split
from natgrad.errors import NonFiniteError, SingularMetricError
from natgrad.functionspace import Median

T = TypeVar("T")
SMOOTHNESS = (0.5, 1.5, 2.5, 4.5)
LENGTHSCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # over the median distance of two training points
LOOKS = 24  # validation errors in a run


class Config(ABC):
    """An optimizer with its settings."""

    title: ClassVar[str]

    @staticmethod
    @abstractmethod
    def drawn(trial: int) -> Config:
        """The settings of a trial."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """The batch size."""

    @abstractmethod
    def optimizer(self, model: nn.Module, x: Tensor) -> torch.optim.Optimizer:
        """The optimizer of a model whose training inputs are x [n d]."""

    @abstractmethod
    def settings(self) -> dict[str, float]:
        """The settings by name."""

    def decay(self, left: float) -> float:
        """The learning rate over its initial value, when a fraction ``left`` of the time is left."""
        return 1.0


@final
@dataclass(frozen=True)
class AdamW(Config):
    """AdamW with a learning rate that falls linearly to zero."""

    title = "AdamW"
    batch: int
    weight_decay: float
    lr: float

    @staticmethod
    def drawn(trial: int) -> AdamW:
        """Batches of 64 or 256, weight decay from 0.001 to 1, lr from 0.001 to 0.03."""
        u = _point(trial)
        return AdamW(_one_of((64, 256), u[0]), _between(1e-3, 1.0, u[1]), _between(1e-3, 3e-2, u[2]))

    @property
    def examples(self) -> int:
        return self.batch

    def optimizer(self, model: nn.Module, x: Tensor) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=True)

    def settings(self) -> dict[str, float]:
        return asdict(self)

    def decay(self, left: float) -> float:
        return left


@final
@dataclass(frozen=True)
class Natural:
    """Settings of both natural gradients: the exact metric of a batch (``Kernel``), self-tuned steps."""

    batch: int
    weight_decay: float
    damping: float  # the first one: it adapts

    @staticmethod
    def drawn(trial: int) -> Natural:
        """Batches of 128 or 256, weight decay from 0.00001 to 0.01, damping from 0.0001 to 0.1."""
        u = _point(trial)
        return Natural(_one_of((128, 256), u[0]), _between(1e-5, 1e-2, u[1]), _between(1e-4, 1e-1, u[2]))

    def optimizer(self, model: nn.Module, metric: ng.OutputMetric) -> torch.optim.Optimizer:
        """``SelfTuned`` scales the step by the curvature of the loss: only its direction depends on the metric."""
        rule, damping, decay = ng.SelfTuned(every=5), self.damping, self.weight_decay
        return ng.NaturalGradient(model, metric, structure=ng.Kernel(), step=rule, damping=damping, weight_decay=decay)


@final
@dataclass(frozen=True)
class GaussNewton(Config):
    """The natural gradient without a kernel: K = 1."""

    title = "Gauss–Newton"
    shared: Natural

    @staticmethod
    def drawn(trial: int) -> GaussNewton:
        return GaussNewton(Natural.drawn(trial))

    @property
    def examples(self) -> int:
        return self.shared.batch

    def optimizer(self, model: nn.Module, x: Tensor) -> torch.optim.Optimizer:
        return self.shared.optimizer(model, ng.Euclidean())

    def settings(self) -> dict[str, float]:
        return asdict(self.shared)


@final
@dataclass(frozen=True)
class Sobolev(Config):
    """The natural gradient of functions in H_s, s = d + 2ν; ℓ is ``scale`` times the median distance."""

    title = "Sobolev"
    shared: Natural
    nu: float
    scale: float

    @staticmethod
    def drawn(trial: int) -> Sobolev:
        """The settings of Gauss–Newton, and ν and ℓ from the grid."""
        u = _point(trial)
        return Sobolev(Natural.drawn(trial), _one_of(SMOOTHNESS, u[3]), _one_of(LENGTHSCALES, u[4]))

    @property
    def examples(self) -> int:
        return self.shared.batch

    def optimizer(self, model: nn.Module, x: Tensor) -> torch.optim.Optimizer:
        # Measured once, on a thousand points, and not on every batch.
        ell = float(Median(divisor=1 / self.scale).of(x[:1000]))
        return self.shared.optimizer(model, ng.Sobolev(nu=self.nu, lengthscale=ell))

    def settings(self) -> dict[str, float]:
        return {**asdict(self.shared), "nu": self.nu, "scale": self.scale}


CONFIGS: tuple[type[Config], ...] = (AdamW, GaussNewton, Sobolev)


@final
@dataclass(frozen=True)
class Look:
    """A measurement: steps and seconds so far, root mean square errors in the units of the targets."""

    step: int
    seconds: float
    validation: float
    test: float


@final
@dataclass(frozen=True)
class Result:
    """The looks of a run, and why it ended early, if it did."""

    looks: tuple[Look, ...]
    failure: str = ""

    def best(self, steps: float = math.inf) -> Look:
        """Early stopping: the look with the smallest validation error among the first ``steps`` steps."""
        return min((look for look in self.looks if look.step <= steps), key=lambda look: look.validation)


def network(inputs: int, width: int, seed: int) -> nn.Module:
    """Two hidden tanh layers in float64: smooth in its inputs and in its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        return nn.Sequential(*layers).double()


def train(arm: Config, split: Split, seed: int, seconds: float, width: int = 50) -> Result:
    """Train on ½‖y − t‖² for so many CPU seconds, not counting measurements.

    Weights and batches depend on the seed alone. An error of the optimizer ends the run, and is part of the result.
    """
    x, _ = split.train
    model = network(x.shape[1], width, seed)
    optimizer = arm.optimizer(model, x)
    first = [group["lr"] for group in optimizer.param_groups]
    batches = Batches(split.train, min(arm.examples, len(x)), torch.Generator().manual_seed(seed))
    looks, used, step, failure = [_look(model, split, 0, 0.0)], 0.0, 0, ""
    while used < seconds and not failure:
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * arm.decay(1 - used / seconds)
        start = process_time()
        try:
            _step(model, optimizer, batches.next())
        except (NonFiniteError, SingularMetricError) as error:
            failure = str(error)
        used, step = used + process_time() - start, step + 1
        if used >= len(looks) * seconds / LOOKS:
            looks.append(_look(model, split, step, used))
    return Result(tuple(looks), failure)


@final
class Batches:
    """Batches of one size, shuffled in every pass; an incomplete last batch is dropped."""

    def __init__(self, pair: Pair, size: int, generator: torch.Generator) -> None:
        self.pair, self.size, self.generator = pair, size, generator
        self._left: list[Tensor] = []

    def next(self) -> Pair:
        """The next batch."""
        if not self._left:
            n = len(self.pair[0])
            order = torch.randperm(n, generator=self.generator)
            self._left = list(order[: n - n % self.size].split(self.size))
        rows = self._left.pop()
        return self.pair[0][rows], self.pair[1][rows]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Pair) -> None:
    x, y = batch

    def closure() -> Any:
        optimizer.zero_grad()
        loss = 0.5 * (model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)


def _look(model: nn.Module, split: Split, step: int, seconds: float) -> Look:
    with torch.no_grad():
        errors = [float((model(x) - y).square().mean().sqrt()) for x, y in (split.validation, split.test)]
    # Rounded as in the record, so that a resumed study chooses the same settings.
    validation, test = (float(f"{split.unit * e:.5g}") if math.isfinite(e) else math.inf for e in errors)
    return Look(step, float(f"{seconds:.5g}"), validation, test)


def _point(trial: int) -> list[float]:
    """Point ``trial`` of a Sobol sequence in [0, 1]^5, the same for every optimizer."""
    return torch.quasirandom.SobolEngine(5, scramble=True, seed=0).draw(trial + 1)[trial].tolist()


def _one_of(choices: Sequence[T], u: float) -> T:
    return choices[min(int(len(choices) * u), len(choices) - 1)]


def _between(low: float, high: float, u: float) -> float:
    """Log-uniform between low and high, three digits."""
    return float(f"{low * (high / low) ** u:.3g}")
