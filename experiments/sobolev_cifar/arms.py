"""The optimizers that are compared: the table ``ARMS``, their settings, and the learning-rate schedules."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.model import Inputs
from natgrad.output.metric import Coupling
from natgrad.solve import Solver

_SAMPLED = ng.Fisher(ng.Categorical(), samples=1)
_BETAS, _EPS = (0.9, 0.999), 1e-8  # of AdamW
LENGTHSCALE = 20.0  # of the kernel, on normalised pixels
_APART = 3.889720  # in units of it: (1 + r)e⁻ʳ = 0.1, the mean of K over two images (--kernel)


class Schedule(ABC):
    """The fraction of the learning rate in every epoch."""

    name: str

    @abstractmethod
    def left(self, epoch: int, epochs: int) -> float:
        """The fraction in epoch 0, 1, … of so many."""


@final
@dataclass(frozen=True)
class Steps(Schedule):
    """Multiplied by ``factor`` after each of these fractions of all epochs.

    >>> [Steps("tenths", (0.4, 0.8), 0.1).left(epoch, 50) for epoch in (19, 20, 40)]
    [1.0, 0.1, 0.010000000000000002]
    """

    name: str
    parts: tuple[float, ...]
    factor: float

    def left(self, epoch: int, epochs: int) -> float:
        return self.factor ** sum(epoch >= round(part * epochs) for part in self.parts)


@final
@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a period of a cosine, down to zero.

    >>> Cosine().left(25, 50)
    0.5
    """

    name: str = "cosine"

    def left(self, epoch: int, epochs: int) -> float:
        return round(0.5 * (1 + math.cos(math.pi * epoch / epochs)), 12)


# Schedules of Bai, Rosenberg and Xu (2022), appendix D.
# Amari's: "1/10 after every 40 % of the total training epochs", epochs 20 and 40 of 50.
TENTHS = Steps("tenths", (0.4, 0.8), 0.1)
# Sobolev: "1/5 after the first 40 %, and again to 1/5 after another 20 %", epochs 20 and 30 of 50.
FIFTHS = Steps("fifths", (0.4, 0.6), 0.2)


@final
@dataclass(frozen=True)
class Independent(ng.OutputMetric):
    """A Sobolev metric whose examples draw independent labels, which erases all of K⁻¹ but its diagonal on average.

    The factors are mixed by K⁻¹ all the same; but E[s_n s_mᵀ] = 0 for n ≠ m, so that of S only the diagonal of K⁻¹ is
    left, and noise. The difference from ``sobolev`` itself is the sampling alone. Without ``matched`` the factors are
    those that the paper prints, A = āᵀK⁻¹ā/N and S = sᵀK⁻¹s/N, whose product has not the trace of the metric.

    >>> Independent(ng.Sobolev(_SAMPLED)).root(torch.zeros(4, 3)).shape
    torch.Size([1, 4, 3])
    """

    sobolev: ng.Sobolev
    matched: bool = True

    @property
    def exact(self) -> bool:
        return self.sobolev.exact

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return self.sobolev.flat(y, u, target)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.sobolev.base.root(y, target, generator)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return self.sobolev.divergence(y, y0, target)

    def coupling(self, x: Inputs, n: int) -> Tensor:
        return self.sobolev.coupling(x, n)

    def coupled(self, x: Inputs, n: int, dtype: torch.dtype = torch.float64) -> Coupling:
        return replace(self.sobolev.coupled(x, n, dtype), matched=self.matched)


def permuted(x: Tensor) -> Tensor:
    """The inputs of other examples: K of these has the same spectrum, and its coupling nothing to do with the images.

    Batches are shuffled, so that the next example is as good as a random one.

    >>> permuted(torch.tensor([[1.0], [2.0], [3.0]])).T
    tensor([[3., 1., 2.]])
    """
    return x.roll(1, 0)


def equidistant(x: Tensor) -> Tensor:
    """Points that are all as far from each other as two images are on average: K = 0.9 I + 0.1 · 11ᵀ of any images.

    >>> ng.Sobolev(_SAMPLED, nu=1.5, lengthscale=LENGTHSCALE, features=equidistant).gram(torch.zeros(2, 3), 2)
    tensor([[1.0000, 0.1000],
            [0.1000, 1.0000]], dtype=torch.float64)
    """
    return torch.eye(len(x), dtype=x.dtype, device=x.device) * (_APART * LENGTHSCALE / math.sqrt(2))


class Config(ABC):
    """An optimizer with its settings. The inputs of the network are divided by ``divisor``."""

    name: str
    divisor: float = 1.0

    @abstractmethod
    def looks(self, step: int) -> bool:
        """Whether the optimizer looks at the forward pass of step 0, 1, …"""

    @abstractmethod
    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        """The optimizer of a model; ``seed`` is for its own random numbers."""

    @abstractmethod
    def numbers(self) -> dict[str, float]:
        """All settings that decide a run, for the records: a run counts as done only where they are the same."""

    @abstractmethod
    def at(self, numbers: Mapping[str, float]) -> Config:
        """The same with the tuned ones of these numbers."""


@final
@dataclass(frozen=True)
class Constants:
    """The numbers of Bai, Rosenberg and Xu (2022), appendix D, and of the code that it runs (Wang (2019)).

    That code adds wd·θ to the natural gradient, after it was preconditioned and clipped and before it enters the
    momentum: θ shrinks by lr·wd/(1 − μ) per step. Ours is decoupled and outside of the momentum, θ ← (1 − lr·wd)θ, so
    it is given wd/(1 − μ) = 0.03. (That code also waits for 200 steps, half an epoch, before it decays; we do not.)
    It clips at 0.01: the script passes that to the class, whose own default is 0.001.
    Its damping is exact, (S ⊗ A + λ)⁻¹ by eigenvectors; that of ``ng.KFAC`` is factored, which is faster and gives
    shorter steps. Both are here: ``amari`` and ``sobolev`` are factored, ``exactly_damped`` makes them exact.
    """

    lr: float = 0.01
    weight_decay: float = 0.003
    damping: float = 0.03
    momentum: float = 0.9
    metric_every: int = 10
    inverse_every: int = 100
    clip: float = 0.01
    decay: float = 0.95  # of the moving average of the factors

    @property
    def decoupled(self) -> float:
        """The decoupled weight decay that shrinks θ as fast."""
        return self.weight_decay / (1 - self.momentum)


@final
@dataclass(frozen=True)
class KFAC(Config):
    """K-FAC of a metric with the constants of the paper; Amari's natural gradient has the Fisher metric."""

    name: str
    metric: ng.OutputMetric
    constants: Constants = field(default_factory=Constants)
    solver: Solver | None = None  # None: that of ``ng.KFAC``, factored damping
    divisor: float = 1.0

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        c, device = self.constants, next(model.parameters()).device
        return ng.KFAC(
            model,
            self.metric,
            lr=c.lr,
            damping=c.damping,
            momentum=c.momentum,
            weight_decay=c.decoupled,
            metric_every=c.metric_every,
            inverse_every=c.inverse_every,
            early=False,
            decay=c.decay,
            step=ng.KLClip(c.clip),
            solver=self.solver,
            generator=torch.Generator(device=device).manual_seed(seed),
        )

    def looks(self, step: int) -> bool:
        return step % self.constants.metric_every == 0

    def exactly_damped(self) -> KFAC:
        """(S ⊗ A + λ)⁻¹ by eigenvectors, as in the code of the paper."""
        return replace(self, name=f"{self.name}_exact", solver=ng.Cholesky())

    def numbers(self) -> dict[str, float]:
        numbers = vars(self.constants) | {"decoupled": self.constants.decoupled, "exact": self.solver is not None}
        scaled = {} if self.divisor == 1.0 else {"divisor": self.divisor}
        return numbers | scaled | _numbers_of(self.metric)

    def at(self, numbers: Mapping[str, float]) -> KFAC:
        return replace(self, constants=replace(self.constants, lr=numbers["lr"], damping=numbers["damping"]))


def _numbers_of(metric: ng.OutputMetric) -> dict[str, float]:
    """What decides a metric.

    >>> _numbers_of(ng.Sobolev(_SAMPLED, lengthscale=20.0))
    {'nu': 1.5, 'lengthscale': 20.0, 'jitter': 1e-06, 'independent': False, 'samples': 1}
    """
    if isinstance(metric, Independent):
        unmatched = {} if metric.matched else {"matched": False}
        return _numbers_of(metric.sobolev) | {"independent": True} | unmatched
    if isinstance(metric, ng.Sobolev):
        numbers = {name: getattr(metric, name) for name in ("nu", "lengthscale", "jitter")}
        names = {permuted: "permuted", equidistant: "equidistant"}
        other = {names[metric.features]: True} if metric.features in names else {}
        if (metric.features is None or other) and all(isinstance(number, float) for number in numbers.values()):
            return numbers | {"independent": False} | other | _numbers_of(metric.base)
    if isinstance(metric, ng.Fisher) and isinstance(metric.family, ng.Categorical) and metric.samples is not None:
        return {"samples": metric.samples}
    raise TypeError(f"{metric!r} is not described by numbers: say in _numbers_of which decide it")


@final
@dataclass(frozen=True)
class Momentum(Config):
    """SGD with momentum; the weight decay is added to the gradient."""

    lr: float
    weight_decay: float
    momentum: float = 0.9
    name: str = "sgd"

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        params, μ = model.parameters(), self.momentum
        return torch.optim.SGD(params, lr=self.lr, momentum=μ, weight_decay=self.weight_decay, fused=True)

    def numbers(self) -> dict[str, float]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum}

    def looks(self, step: int) -> bool:
        return False

    def at(self, numbers: Mapping[str, float]) -> Momentum:
        return replace(self, lr=numbers["lr"], weight_decay=numbers["weight_decay"])


@final
@dataclass(frozen=True)
class AdamW(Config):
    """AdamW; the weight decay is decoupled."""

    lr: float
    weight_decay: float
    name: str = "adamw"

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        params, wd = model.parameters(), self.weight_decay
        return torch.optim.AdamW(params, lr=self.lr, betas=_BETAS, eps=_EPS, weight_decay=wd, fused=True)

    def numbers(self) -> dict[str, float]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, "beta1": _BETAS[0], "beta2": _BETAS[1], "eps": _EPS}

    def looks(self, step: int) -> bool:
        return False

    def at(self, numbers: Mapping[str, float]) -> AdamW:
        return replace(self, lr=numbers["lr"], weight_decay=numbers["weight_decay"])


@final
@dataclass(frozen=True)
class Natural(Config):
    """``ng.Natural`` as the library has it: no loss is needed. Gains and biases are stepped by AdamW."""

    lr: float
    weight_decay: float
    name: str = "natural"

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        return ng.Natural(model, lr=self.lr, weight_decay=self.weight_decay)

    def numbers(self) -> dict[str, float]:
        """With the library's defaults of this commit."""
        defaults = {name: one.default for name, one in inspect.signature(ng.Natural).parameters.items()}
        numbers = {name: defaults[name] for name in ("momentum", "power", "rms", "polar", "decay")}
        numbers |= {"damping": defaults["damping"].epsilon, "metric_every": 1, "early": True, "inverse_every": 1}
        numbers |= {"diagonal": True, "kl": False}
        return {"lr": self.lr, "weight_decay": self.weight_decay} | numbers

    def looks(self, step: int) -> bool:
        return False  # at gradients only

    def at(self, numbers: Mapping[str, float]) -> Natural:
        return replace(self, lr=numbers["lr"], weight_decay=numbers["weight_decay"])


def amari() -> KFAC:
    """The baseline of the paper."""
    return KFAC("amari", _SAMPLED)


def sobolev() -> KFAC:
    """Sobolev K-FAC with one probe for the whole batch."""
    return KFAC("sobolev", ng.Sobolev(_SAMPLED, nu=1.5, lengthscale=LENGTHSCALE))


def independent() -> KFAC:
    """Sobolev K-FAC with independent labels, as in the paper."""
    return KFAC("independent", Independent(ng.Sobolev(_SAMPLED, nu=1.5, lengthscale=LENGTHSCALE)))


def control() -> KFAC:
    """Sobolev K-FAC with the kernel matrix of permuted inputs."""
    return KFAC("permuted", ng.Sobolev(_SAMPLED, nu=1.5, lengthscale=LENGTHSCALE, features=permuted))


def without_images() -> KFAC:
    """Sobolev K-FAC with the kernel matrix of equidistant points, which depends on no image."""
    return KFAC("equidistant", ng.Sobolev(_SAMPLED, nu=1.5, lengthscale=LENGTHSCALE, features=equidistant))


def amari_scaled() -> KFAC:
    """The baseline with scaled inputs: "baseline_scale" of the paper with tenths, "baseline_lr_scale" with fifths."""
    return replace(amari(), name="amari_scaled", divisor=LENGTHSCALE)


def literal() -> KFAC:
    """The paper to the letter: scaled inputs, the printed factors without the matched trace, independent labels.

    The kernel sees the scaled inputs, so that its own lengthscale is 1.
    """
    metric = Independent(ng.Sobolev(_SAMPLED, nu=1.5, lengthscale=1.0), matched=False)
    return KFAC("literal", metric, divisor=LENGTHSCALE)


def _damped(arm: KFAC) -> tuple[KFAC, ...]:
    """Learning rates and dampings around the paper's, 0.01 and 0.03."""
    numbers = [{"lr": lr, "damping": λ} for lr in (0.03, 0.01, 0.003) for λ in (0.3, 0.1, 0.03, 0.01)]
    return tuple(replace(arm.at(one), name=f"{arm.name}_tuned") for one in numbers)


@final
@dataclass(frozen=True)
class Arm:
    """A row of the table: its title, and the settings; where there are several, ``--tune`` chooses one of them."""

    title: str
    candidates: tuple[Config, ...]

    @property
    def name(self) -> str:
        """On the command line and in the records."""
        return self.candidates[0].name

    @property
    def tuned(self) -> bool:
        """Whether its settings are chosen by short runs."""
        return len(self.candidates) > 1


_ALL = (
    Arm("K-FAC (Amari)", (amari(),)),
    Arm("Sobolev K-FAC", (sobolev(),)),
    Arm("Sobolev K-FAC, independent samples", (independent(),)),
    Arm("Sobolev K-FAC of permuted inputs (control)", (control(),)),
    Arm("K-FAC (Amari), scaled inputs", (amari_scaled(),)),
    Arm("Sobolev K-FAC, to the letter of the paper", (literal(),)),
    Arm("K-FAC (Amari), exact damping", (amari().exactly_damped(),)),
    Arm("Sobolev K-FAC, exact damping", (sobolev().exactly_damped(),)),
    Arm("K-FAC (Amari), tuned", _damped(amari())),
    Arm("Sobolev K-FAC, tuned", _damped(sobolev())),
    # These grids surround the best settings of Wang's grid for SGD and of the usual one for AdamW, which were at the
    # edge there.
    Arm(
        "SGD with momentum, tuned",
        tuple(Momentum(lr, wd) for lr in (0.06, 0.03, 0.01, 0.003) for wd in (3e-2, 1e-2, 3e-3, 1e-3)),
    ),
    Arm("AdamW, tuned", tuple(AdamW(lr, wd) for lr in (1e-3, 3e-4, 1e-4) for wd in (8.0, 2.0, 0.5, 0.1))),
    Arm("ng.Natural, tuned", tuple(Natural(lr, wd) for lr in (1e-2, 3e-3, 1e-3) for wd in (1.0, 0.3, 0.1, 0.03))),
    Arm("Sobolev K-FAC of equidistant points (control)", (without_images(),)),
)
ARMS: Mapping[str, Arm] = {arm.name: arm for arm in _ALL}
