"""Coins and counts, in their natural parameters: Bernoulli and Poisson."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C
from torch.nn import functional as F

from natgrad.families.base import diagonal_root, drawn_once, over_terms
from natgrad.families.domain import Domain, Interval
from natgrad.families.expected import expected_log_factorial
from natgrad.families.exponential import ExponentialFamily, expect
from natgrad.families.information import Information, Scalar

_LARGE = math.log(1e4)


@final
@dataclass(frozen=True)
class Bernoulli(ExponentialFamily):
    """Log-odds y [n *terms]: F = p(1 − p), p = σ(y) (002 section 4).

    As a distribution: x in {0, 1}, t(x) = x, log Z = log(1 + e^η), ξ = p (ERRATA 37).

    >>> Bernoulli().flat(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[0.2500]])
    """

    # As an output family

    def check(self, y: Tensor) -> None:
        """Every shape [n *terms] fits."""

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._variance(y) * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, self._variance(y))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = y.sigmoid()
        return torch.bernoulli(p.expand(samples, *p.shape), generator=generator) - p

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return drawn_once(y, samples, generator) * self._variance(y).sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        self._alike(y, y2, "y2")
        # log(1 + e^y) is log Z; KL(p_y ‖ p_y2) is its Bregman divergence at (y2, y) (ERRATA 35).
        return over_terms(self._bregman(y2, y))

    # As a distribution

    @property
    def axes(self) -> int:
        return 0

    @property
    def natural_domain(self) -> Domain:
        return Interval()

    @property
    def mean_domain(self) -> Domain:
        return Interval(0.0, 1.0)

    @property
    def support(self) -> C.Constraint:
        return C.boolean

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def distribution(self, eta: Tensor) -> D.Distribution:
        return D.Bernoulli(logits=self._inside(eta, self.natural_domain, "eta"))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Bernoulli)
        assert isinstance(d, D.Bernoulli)
        return d.logits

    def _log_partition(self, eta: Tensor) -> Tensor:
        return F.softplus(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return eta.sigmoid()

    def _natural(self, xi: Tensor) -> Tensor:
        return xi.logit()

    def _variance(self, eta: Tensor) -> Tensor:
        return eta.sigmoid() * (-eta).sigmoid()

    def _fisher(self, eta: Tensor) -> Information:
        return Scalar(self._variance(eta))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)


@final
@dataclass(frozen=True)
class Poisson(ExponentialFamily):
    """Log-rates y [n *terms]: F = e^y (002 section 4).

    As a distribution: t(x) = x, h(x) = 1/x!, log Z = e^η, ξ = e^η.

    >>> Poisson().kl(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([0.])
    """

    # As an output family

    def check(self, y: Tensor) -> None:
        """Every shape [n *terms] fits."""

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return y.exp() * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, y.exp())

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        rate = y.exp()
        return torch.poisson(rate.expand(samples, *rate.shape), generator=generator) - rate

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return drawn_once(y, samples, generator) * y.exp().sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        self._alike(y, y2, "y2")
        return over_terms(self._bregman(y2, y))

    # As a distribution

    @property
    def axes(self) -> int:
        return 0

    @property
    def natural_domain(self) -> Domain:
        return Interval()

    @property
    def mean_domain(self) -> Domain:
        return Interval(0.0)

    @property
    def support(self) -> C.Constraint:
        return C.nonnegative_integer

    def log_base(self, x: Tensor) -> Tensor:
        return -torch.lgamma(x + 1)

    def distribution(self, eta: Tensor) -> D.Distribution:
        return D.Poisson(self._inside(eta, self.natural_domain, "eta").exp())

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Poisson)
        assert isinstance(d, D.Poisson)
        return d.rate.log()

    def _log_partition(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def _mean(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def _natural(self, xi: Tensor) -> Tensor:
        return xi.log()

    def _variance(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def _fisher(self, eta: Tensor) -> Information:
        return Scalar(self._variance(eta))

    def entropy(self, eta: Tensor) -> Tensor:
        """As of every family; from a rate of 10⁴ on by its series, exact to rounding, where large numbers cancel."""
        eta = self._inside(eta, self.natural_domain, "eta")
        small = super().entropy(eta.clamp(max=_LARGE))
        λ = eta.clamp(min=_LARGE).exp()
        rest = (1 / 12 + (1 / 24 + 19 / (360 * λ)) / λ) / λ
        return torch.where(eta < _LARGE, small, 0.5 * (1 + math.log(2 * math.pi) + eta) - rest)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        rate = eta.exp()
        return -expected_log_factorial(lambda w: -rate.unsqueeze(-1) * w, rate)
