"""First passage times of a Brownian motion with drift: the inverse Gaussian family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.domain import Box, Concave, Domain
from natgrad.families.expected import expected_log
from natgrad.families.exponential import ExponentialFamily, expect
from natgrad.families.information import Information, Matrix


@final
class InverseGaussianDistribution(D.Distribution):
    """√(λ/(2πx³)) exp(−λ(x − μ)²/(2μ²x)) as a ``torch.distributions`` object, which torch has none of.

    >>> InverseGaussianDistribution(torch.tensor(2.0), torch.tensor(3.0)).mean
    tensor(2.)
    """

    arg_constraints: Any = {"loc": C.positive, "concentration": C.positive}  # noqa: RUF012 (torch's own way)
    support = C.positive

    def __init__(self, loc: Tensor, concentration: Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.concentration = torch.broadcast_tensors(loc, concentration)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.loc**3 / self.concentration

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Michael, Schucany and Haas (1976): a root of λ(x − μ)²/(μ²x) = χ²₁, the smaller with odds μ to x."""
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            μ, λ = self.loc.expand(shape), self.concentration.expand(shape)
            z = torch.randn(shape, dtype=μ.dtype, device=μ.device).square()
            half = μ * z / (2 * λ)
            x = μ / (1 + half + (half * (half + 2)).sqrt())  # the smaller root, without cancellation
            u = torch.rand(shape, dtype=μ.dtype, device=μ.device)
            return torch.where(u * (μ + x) <= μ, x, μ.square() / x)

    def log_prob(self, value: Tensor) -> Tensor:
        μ, λ = self.loc, self.concentration
        return 0.5 * (λ / (2 * math.pi * value**3)).log() - λ * (value - μ).square() / (2 * μ.square() * value)


@final
@dataclass(frozen=True)
class InverseGaussian(ExponentialFamily):
    """t = (x, 1/x), η = (−λ/(2μ²), −λ/2), h = x^(−3/2)/√(2π), log Z = −2√(η₁η₂) − ½ log(−2η₂); points [*batch 2].

    >>> InverseGaussian().mean(torch.tensor([-0.5, -0.5]))  # μ = 1, λ = 1: E x = μ, E 1/x = 1/μ + 1/λ
    tensor([1., 2.])
    """

    @property
    def natural_domain(self) -> Domain:
        return Box(upper=(0.0,))

    @property
    def mean_domain(self) -> Domain:
        return Concave(
            _slacks, ("E x above 0", "E 1/x above 0", "E 1/x above 1/E x (Jensen; equal if all data are the same)")
        )

    @property
    def support(self) -> C.Constraint:
        return C.positive

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.reciprocal()], -1)

    def log_base(self, x: Tensor) -> Tensor:
        return -1.5 * x.log() - 0.5 * math.log(2 * math.pi)

    def distribution(self, eta: Tensor) -> D.Distribution:
        μ, λ = _mean_and_shape(self._inside(eta, self.natural_domain, "eta"))
        return InverseGaussianDistribution(μ, λ)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, InverseGaussianDistribution)
        assert isinstance(d, InverseGaussianDistribution)
        return torch.stack([-d.concentration / (2 * d.loc.square()), -0.5 * d.concentration], -1)

    def _width(self, p: int) -> str:
        return "" if p == 2 else "(−λ/(2μ²), −λ/2), 2 entries,"

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -2 * eta.prod(-1).sqrt() - 0.5 * (-2 * eta[..., 1]).log()

    def _mean(self, eta: Tensor) -> Tensor:
        μ, λ = _mean_and_shape(eta)
        return torch.stack([μ, 1 / μ + 1 / λ], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        μ = xi[..., 0]
        λ = 1 / (xi[..., 1] - 1 / μ)
        return -0.5 * torch.stack([λ / μ.square(), λ], -1)

    def _fisher(self, eta: Tensor) -> Information:
        μ, λ = _mean_and_shape(eta)
        cross = -μ / λ
        rows = [
            torch.stack([μ**3 / λ, cross], -1),
            torch.stack([cross, 1 / (μ * λ) + 2 / λ.square()], -1),
        ]
        return Matrix(torch.stack(rows, -2))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        μ, λ = _mean_and_shape(eta)
        φ = (λ / μ).unsqueeze(-1)
        # E e^{−sx} = exp φ(1 − √(1 + 2s/φ)) of x with mean 1 and shape φ, written without cancellation
        log_x = μ.log() + expected_log(lambda s: -2 * s / (1 + (1 + 2 * s / φ).sqrt()), φ)
        return -1.5 * log_x - 0.5 * math.log(2 * math.pi)


def _mean_and_shape(eta: Tensor) -> tuple[Tensor, Tensor]:
    return (eta[..., 1] / eta[..., 0]).sqrt(), -2 * eta[..., 1]


def _slacks(xi: Tensor) -> Tensor:
    return torch.stack([xi[..., 0], xi[..., 1], 1 - xi.prod(-1).reciprocal()], -1)
