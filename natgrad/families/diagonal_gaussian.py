"""Gaussians of independent numbers: mean and precision, precision alone, log-normal, and outputs of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.base import (
    ExponentialFamily,
    Family,
    broadcast,
    check_event,
    check_vector,
    diagonal_root,
    expect,
    over_terms,
    shared_normals,
)
from natgrad.families.domains import Concave, Domain, OpenBox
from natgrad.families.information import Information
from natgrad.show import brief

Base = TypeVar("Base", bound=D.Distribution)


def _mean_slacks(xi: Tensor) -> Tensor:
    μ, m = xi.chunk(2, -1)
    square = -2 * m
    return torch.cat([square, 1 - μ.square() / square], -1)


@dataclass(frozen=True)
class DiagonalGaussian(ExponentialFamily):
    """Independent normal variables, with means and variances both unknown.

    Method:
        d independent N(μ, σ²): t = (x, −½x²), η = (h, λ) = (μ/σ², 1/σ²), points [*batch 2d], data [*batch d].

        log Z = Σ ½ (log 2π − log λ + h²/λ).

    Example:
        >>> DiagonalGaussian().mean(torch.tensor([1.0, 2.0]))  # μ = ½, σ² = ½
        tensor([ 0.5000, -0.3750])
    """

    natural_domain: ClassVar[Domain] = OpenBox((-math.inf, 0.0))
    mean_domain: ClassVar[Domain] = Concave(
        _mean_slacks, ("E x² = −2ξ₂ above 0", "variances −2ξ₂ − ξ₁² above 0, in units of E x²")
    )
    support: ClassVar[C.Constraint] = C.real_vector

    def statistics(self, x: Tensor) -> Tensor:
        return torch.cat([x, -0.5 * x.square()], -1)

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p // 2,)

    def from_covariance(self, μ: Tensor, variance: Tensor) -> Tensor:
        """η of the covariance form (μ, σ²)."""
        μ, variance = broadcast("DiagonalGaussian", μ, variance, 1)
        return torch.cat([μ / variance, variance.reciprocal()], -1)

    def from_information(self, h: Tensor, λ: Tensor) -> Tensor:
        """η of the information form (h, λ)."""
        return torch.cat(broadcast("DiagonalGaussian", h, λ, 1), -1)

    def covariance_form(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """(μ, σ²)."""
        h, λ = self.information_form(eta)
        return h / λ, λ.reciprocal()

    def information_form(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """(h, λ)."""
        h, λ = self._inside(eta, self.natural_domain, "eta").chunk(2, -1)
        return h, λ

    def _distribution(self, eta: Tensor) -> D.Distribution:
        μ, variance = self.covariance_form(eta)
        return D.Independent(D.Normal(μ, variance.sqrt()), 1)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        base = _independent(self, d, D.Normal)
        return self.from_covariance(base.loc, base.scale.square())

    def _wrong_size(self, p: int) -> str:
        return "" if p and p % 2 == 0 else "(h, λ), 2d entries,"

    def _log_partition(self, eta: Tensor) -> Tensor:
        h, λ = eta.chunk(2, -1)
        return 0.5 * (math.log(2 * math.pi) - λ.log() + h.square() / λ).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        h, λ = eta.chunk(2, -1)
        μ = h / λ
        return torch.cat([μ, -0.5 * (λ.reciprocal() + μ.square())], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        μ, m = xi.chunk(2, -1)
        return self.from_covariance(μ, -2 * m - μ.square())

    def _fisher(self, eta: Tensor) -> Information:
        """δμ = σ²(δh − μ δλ), and ξ = (μ, −½(σ² + μ²)).

        In closed form: the derivative of ``natural`` at ξ would subtract μ² from E x².
        """
        h, λ = eta.chunk(2, -1)
        μ = h / λ

        def flat(v: Tensor) -> Tensor:
            δh, δλ = v.chunk(2, -1)
            δμ = (δh - μ * δλ) / λ
            return torch.cat([δμ, 0.5 * δλ / λ.square() - μ * δμ], -1)

        def sharp(w: Tensor) -> Tensor:
            δμ, m = w.chunk(2, -1)
            δλ = 2 * (m + μ * δμ) * λ.square()
            return torch.cat([δμ * λ + μ * δλ, δλ], -1)

        return Information(eta, 1, flat, sharp)


@final
@dataclass(frozen=True)
class LogNormal(DiagonalGaussian):
    """Independent positive numbers whose logarithms are normal.

    Method:
        x = exp of d independent N(μ, σ²): t = (log x, −½ log²x), h = Π 1/x; otherwise the Gaussian of log x.

    Example:
        >>> LogNormal().mean(torch.tensor([1.0, 2.0]))
        tensor([ 0.5000, -0.3750])
    """

    support: ClassVar[C.Constraint] = C.independent(C.positive, 1)

    def statistics(self, x: Tensor) -> Tensor:
        return super().statistics(x.log())

    def log_base(self, x: Tensor) -> Tensor:
        return -x.log().sum(-1)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        h, λ = eta.chunk(2, -1)
        return D.Independent(D.LogNormal(h / λ, λ.rsqrt()), 1)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        base = _independent(self, d, D.LogNormal)
        return self.from_covariance(base.loc, base.scale.square())

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        h, λ = eta.chunk(2, -1)
        return -(h / λ).sum(-1)


@final
@dataclass(frozen=True, eq=False)
class DiagonalGaussianKnownMean(ExponentialFamily):
    """Independent normal variables whose means are known and whose variances are not.

    Args:
        m: The known means [d].

    Method:
        d independent N(m, σ²) with known m [d]: t = −½(x − m)², η = λ = 1/σ² [*batch d].

    Example:
        >>> DiagonalGaussianKnownMean(torch.zeros(1)).mean(torch.tensor([4.0]))
        tensor([-0.1250])
    """

    m: Tensor

    natural_domain: ClassVar[Domain] = OpenBox(0.0)
    mean_domain: ClassVar[Domain] = OpenBox(upper=0.0)
    support: ClassVar[C.Constraint] = C.real_vector

    __repr__ = brief

    def __post_init__(self) -> None:
        check_vector(self.m, "DiagonalGaussianKnownMean(m)")

    def statistics(self, x: Tensor) -> Tensor:
        check_event("DiagonalGaussianKnownMean", tuple(self.m.shape), x)
        return -0.5 * (x - self.m.to(x)).square()

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p,)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Independent(D.Normal(self.m.to(eta).expand_as(eta), eta.rsqrt()), 1)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        base = _independent(self, d, D.Normal)
        if not bool((base.loc == self.m.to(base.loc)).all()):
            raise ValueError(
                "DiagonalGaussianKnownMean cannot hold a distribution with another mean: make a family with that mean, "
                "or use DiagonalGaussian"
            )
        return base.scale.square().reciprocal()

    def _wrong_size(self, p: int) -> str:
        d = self.m.shape[-1]
        return "" if p == d else f"as many precisions as the mean has entries, {d},"

    def _log_partition(self, eta: Tensor) -> Tensor:
        return 0.5 * (math.log(2 * math.pi) - eta.log()).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return -0.5 / eta

    def _natural(self, xi: Tensor) -> Tensor:
        return -0.5 / xi


def _independent(family: ExponentialFamily, d: D.Distribution, kind: type[Base]) -> Base:
    """The base of Independent(kind, 1)."""
    if isinstance(d, kind):
        raise TypeError(
            f"{type(family).__name__}.from_distribution needs to know which axis holds the numbers of one datum: wrap "
            f"it, Independent({kind.__name__}(…), 1)"
        )
    return expect(family, d.base_dist if isinstance(d, D.Independent) and d.reinterpreted_batch_ndims == 1 else d, kind)


@final
@dataclass(frozen=True)
class Gaussian(Family):
    """Normal noise on real outputs, with a scale that is given or learned.

    Args:
        scale: The standard deviation σ of every output, a positive number. With ``None`` it is learned: the last axis
            of the outputs then holds (μ₁ … μ_d, log σ₁ … log σ_d).

    Method:
        N(μ, σ²) a term. With a ``scale``, the outputs are means, F = 1/σ², and the loss is ½‖y − t‖²/σ². With ``None``,
        F = diag(1/σ², 2) in the chart (μ, log σ).

    Example:
        >>> Gaussian(scale=2.0).flat(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[0.2500]])
        >>> Gaussian(scale=None).flat(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[1., 2.]])
    """

    scale: float | None = 1.0

    def __post_init__(self) -> None:
        given: object = self.scale
        if isinstance(given, Tensor) and (given.requires_grad or given.numel() != 1):
            what = "that requires a gradient" if given.requires_grad else f"of shape {tuple(given.shape)}"
            raise TypeError(
                f"Gaussian(scale=…) is one number, and got a tensor {what}: to learn σ, let the outputs have it "
                "(scale=None), or tune it by the evidence, with vi.Laplace(…).with_noise(σ) or .tuned(residuals)"
            )
        if self.scale is not None and not self.scale > 0:
            raise ValueError(f"Gaussian(scale=…) must be positive, or None to learn it, got {self.scale}")

    def check(self, y: Tensor) -> None:
        if self.scale is None and (y.ndim < 2 or y.shape[-1] % 2):
            raise ValueError(
                "Gaussian(scale=None) needs as many log-scales as means on the last axis, outputs [n … 2d], "
                f"got outputs of shape {tuple(y.shape)}"
            )

    def terms(self, y: Tensor) -> int:
        return y.shape[1:].numel() // (2 if self.scale is None else 1)

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._information(y) * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, self._information(y))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        if self.scale is not None:
            z = torch.randn(samples, *y.shape, generator=generator, dtype=y.dtype, device=y.device)  # (t − μ)/σ
            return z if self.scale == 1 else z.div_(self.scale)
        μ, log_σ = self._split(y)
        z = torch.randn(samples, *μ.shape, generator=generator, dtype=y.dtype, device=y.device)
        return torch.cat([z * (-log_σ).exp(), z.square() - 1], dim=-1)

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return shared_normals(y, samples, generator) * self._information(y).sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        (μ, log_σ), (μ2, log_σ2) = self._split(y), self._split(y2)
        gap = log_σ - log_σ2
        moved = (μ - μ2) * (-log_σ2).exp()
        return over_terms(0.5 * (torch.expm1(2 * gap) + moved.square()) - gap)

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.scale is not None:
            return y, torch.full_like(y, self.scale).log()
        μ, log_σ = y.chunk(2, dim=-1)
        return μ, log_σ

    def _information(self, y: Tensor) -> Tensor:
        _, log_σ = self._split(y)
        precision = (-2 * log_σ).exp()
        return precision if self.scale is not None else torch.cat([precision, torch.full_like(precision, 2.0)], dim=-1)
