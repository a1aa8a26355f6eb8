"""Waiting times and sizes: exponential, Laplace, Weibull, gamma."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.decaying import ExponentialStatistic
from natgrad.families.domain import Box, Concave, Domain
from natgrad.families.exponential import ExponentialFamily, expect
from natgrad.families.information import Information, Matrix
from natgrad.families.inverse import solved
from natgrad.families.special import trigamma

_EULER = 0.5772156649015329


@final
@dataclass(frozen=True)
class Exponential(ExponentialStatistic):
    """−η e^{ηx}, x > 0: t = x, log Z = −log(−η), η = −rate.

    >>> Exponential().mean(torch.tensor(-2.0))
    tensor(0.5000)
    """

    @property
    def support(self) -> C.Constraint:
        return C.nonnegative

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def distribution(self, eta: Tensor) -> D.Distribution:
        return D.Exponential(-self._inside(eta, self.natural_domain, "eta"))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Exponential)
        assert isinstance(d, D.Exponential)
        return -d.rate

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)


@final
@dataclass(frozen=True)
class Laplace(ExponentialStatistic):
    """½(−η) e^{η|x − c|} with known ``centre`` c: t = |x − c|, log Z = log 2 − log(−η), η = −1/scale.

    >>> Laplace(1.0).log_prob(torch.tensor(-2.0), torch.tensor(1.0))
    tensor(0.)
    """

    centre: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.centre):
            raise ValueError(f"Laplace(centre=…) must be finite, got {self.centre}")

    @property
    def support(self) -> C.Constraint:
        return C.real

    def statistics(self, x: Tensor) -> Tensor:
        return (x - self.centre).abs()

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def distribution(self, eta: Tensor) -> D.Distribution:
        eta = self._inside(eta, self.natural_domain, "eta")
        return D.Laplace(torch.full_like(eta, self.centre), -1 / eta)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Laplace)
        assert isinstance(d, D.Laplace)
        _same(self, "centre", self.centre, d.loc)
        return -1 / d.scale

    def _log_partition(self, eta: Tensor) -> Tensor:
        return math.log(2) + super()._log_partition(eta)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)


@final
@dataclass(frozen=True)
class Weibull(ExponentialStatistic):
    """Known ``shape`` k: t = xᵏ is exponential, h = k xᵏ⁻¹, log Z = −log(−η), η = −scale⁻ᵏ.

    >>> Weibull(2.0).mean(torch.tensor(-0.25))
    tensor(4.)
    """

    shape: float

    def __post_init__(self) -> None:
        if not 0 < self.shape < math.inf:
            raise ValueError(f"Weibull(shape=…) must be positive and finite, got {self.shape}")

    @property
    def support(self) -> C.Constraint:
        return C.positive

    def statistics(self, x: Tensor) -> Tensor:
        return x.pow(self.shape)

    def log_base(self, x: Tensor) -> Tensor:
        return math.log(self.shape) + (self.shape - 1) * x.log()

    def distribution(self, eta: Tensor) -> D.Distribution:
        scale = (-self._inside(eta, self.natural_domain, "eta")).pow(-1 / self.shape)
        return D.Weibull(scale, torch.full_like(scale, self.shape))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Weibull)
        assert isinstance(d, D.Weibull)
        _same(self, "shape", self.shape, d.concentration)
        return -d.scale.pow(-self.shape)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        log_x = -((-eta).log() + _EULER) / self.shape
        return math.log(self.shape) + (self.shape - 1) * log_x


@final
@dataclass(frozen=True)
class Gamma(ExponentialFamily):
    """βᵅ/Γ(α) xᵅ⁻¹ e^{−βx}: t = (log x, x), η = (α − 1, −β), log Z = log Γ(α) − α log β; points [*batch 2].

    >>> gamma = Gamma()
    >>> eta = torch.tensor([1.0, -3.0], dtype=torch.float64)
    >>> gamma.natural(gamma.mean(eta))
    tensor([ 1.0000, -3.0000], dtype=torch.float64)
    """

    @property
    def natural_domain(self) -> Domain:
        return Box((-1.0, -math.inf), (math.inf, 0.0))

    @property
    def mean_domain(self) -> Domain:
        return Concave(_gamma_slacks, ("E x above 0", "E log x below log E x (Jensen; equal if all data are the same)"))

    @property
    def support(self) -> C.Constraint:
        return C.positive

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack([x.log(), x], -1)

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def distribution(self, eta: Tensor) -> D.Distribution:
        α, β = _shape_and_rate(self._inside(eta, self.natural_domain, "eta"))
        return D.Gamma(α, β)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Gamma)
        assert isinstance(d, D.Gamma)
        return torch.stack([d.concentration - 1, -d.rate], -1)

    def _width(self, p: int) -> str:
        return "" if p == 2 else "(α − 1, −β), 2 entries,"

    def _log_partition(self, eta: Tensor) -> Tensor:
        α, β = _shape_and_rate(eta)
        return torch.lgamma(α) - α * β.log()

    def _mean(self, eta: Tensor) -> Tensor:
        α, β = _shape_and_rate(eta)
        return torch.stack([torch.digamma(α) - β.log(), α / β], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        s = xi[..., 1].log() - xi[..., 0]  # log α − ψ(α), which 1/(2α) < s < 1/α
        α = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
        return solved(self, xi, torch.stack([α - 1, -α / xi[..., 1]], -1))

    def _fisher(self, eta: Tensor) -> Information:
        α, β = _shape_and_rate(eta)
        scale = 1 / β
        rows = [torch.stack([trigamma(α), scale], -1), torch.stack([scale, α * scale.square()], -1)]
        return Matrix(torch.stack(rows, -2))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])


def _shape_and_rate(eta: Tensor) -> tuple[Tensor, Tensor]:
    return eta[..., 0] + 1, -eta[..., 1]


def _gamma_slacks(xi: Tensor) -> Tensor:
    return torch.stack([xi[..., 1], xi[..., 1].log() - xi[..., 0]], -1)


def _same(family: Laplace | Weibull, name: str, mine: float, theirs: Tensor) -> None:
    if not bool((theirs == mine).all()):
        raise ValueError(
            f"{type(family).__name__}({name}={mine:g}) cannot hold a distribution with {name} "
            f"{theirs.reshape(-1)[0].item():g}: make a family with that {name}"
        )
