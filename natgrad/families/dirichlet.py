"""Probabilities of probabilities: beta and Dirichlet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.domains import Box, Concave, Domain
from natgrad.families.exponential import ExponentialFamily, expect, solved
from natgrad.families.information import Downdated, Information
from natgrad.families.special import trigamma


class LogProportions(ExponentialFamily):
    """t are the logarithms of proportions, η = α − 1, log Z = Σ log Γ(α_c) − log Γ(Σ α_c), h = 1.

    F = diag ψ'(α) − ψ'(Σα) 11ᵀ.
    """

    @property
    def natural_domain(self) -> Domain:
        return Box((-1.0,))

    @property
    def mean_domain(self) -> Domain:
        words = "Σ exp E log x below 1 (Jensen; equal if all data are the same)"
        return Concave(lambda xi: -xi.logsumexp(-1, keepdim=True), (words,))

    def _log_partition(self, eta: Tensor) -> Tensor:
        α = eta + 1
        return torch.lgamma(α).sum(-1) - torch.lgamma(α.sum(-1))

    def _mean(self, eta: Tensor) -> Tensor:
        α = eta + 1
        return torch.digamma(α) - torch.digamma(α.sum(-1, keepdim=True))

    def _natural(self, xi: Tensor) -> Tensor:
        return solved(self, xi, _start(xi))

    def _fisher(self, eta: Tensor) -> Information:
        α = eta + 1
        a, c = trigamma(α), trigamma(α.sum(-1))
        return Downdated(a, torch.ones_like(a), c, 1 - c * a.reciprocal().sum(-1))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])


@final
@dataclass(frozen=True)
class Dirichlet(LogProportions):
    """x on the simplex [*batch c]: t = log x, η = α − 1.

    >>> Dirichlet().mean(torch.zeros(2))
    tensor([-1.0000, -1.0000])
    """

    @property
    def support(self) -> C.Constraint:
        return C.simplex

    def statistics(self, x: Tensor) -> Tensor:
        return x.log()

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., 0])

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p,)

    def distribution(self, eta: Tensor) -> D.Distribution:
        return D.Dirichlet(self._inside(eta, self.natural_domain, "eta") + 1)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Dirichlet)
        assert isinstance(d, D.Dirichlet)
        return d.concentration - 1

    def _width(self, p: int) -> str:
        return "" if p >= 2 else "α − 1 of the classes, 2 entries or more,"


@final
@dataclass(frozen=True)
class Beta(LogProportions):
    """x in (0, 1): t = (log x, log(1 − x)), η = (a − 1, b − 1); the Dirichlet family of (x, 1 − x), points [*batch 2].

    >>> Beta().mean(torch.zeros(2))
    tensor([-1.0000, -1.0000])
    """

    @property
    def support(self) -> C.Constraint:
        return C.unit_interval

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack([x.log(), torch.log1p(-x)], -1)

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def distribution(self, eta: Tensor) -> D.Distribution:
        α = self._inside(eta, self.natural_domain, "eta") + 1
        return D.Beta(α[..., 0], α[..., 1])

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Beta)
        assert isinstance(d, D.Beta)
        return torch.stack([d.concentration1, d.concentration0], -1) - 1

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Of x and of 1 − x as they were drawn: the difference of a draw that rounds to 1 has no logarithm."""
        return Dirichlet().scores(y, samples, generator)

    def _width(self, p: int) -> str:
        return "" if p == 2 else "(a − 1, b − 1), 2 entries,"


def _start(xi: Tensor) -> Tensor:
    """Large α have Σ exp ξ ≈ 1 − (c − 1)/(2 Σα), small ones ξ ≈ −1/α."""
    missing = -torch.expm1(xi.logsumexp(-1, keepdim=True))
    total = (xi.shape[-1] - 1) / (2 * missing)
    return torch.maximum(total * xi.softmax(-1), -0.5 / xi) - 1
