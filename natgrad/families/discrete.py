"""Counts: binomial and negative binomial with a known number of trials, and geometric."""

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
from natgrad.families.domains import Domain, Interval
from natgrad.families.exponential import Decaying, ExponentialFamily, expect
from natgrad.families.information import Information, Scalar
from natgrad.families.special import expected_log, expected_log_factorial, log1mexp

# Coins and counts, in their natural parameters: Bernoulli and Poisson.


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


@final
@dataclass(frozen=True)
class Binomial(ExponentialFamily):
    """Successes x of ``total_count`` = m coins: t = x, h = m!/(x! (m − x)!), η the log-odds, log Z = m log(1 + e^η).

    >>> Binomial(4).mean(torch.tensor(0.0))
    tensor(2.)
    """

    total_count: int

    def __post_init__(self) -> None:
        if not isinstance(self.total_count, int) or self.total_count < 1:
            raise ValueError(f"Binomial(total_count=…) must be an integer, 1 or more, got {self.total_count}")

    @property
    def axes(self) -> int:
        return 0

    @property
    def natural_domain(self) -> Domain:
        return Interval()

    @property
    def mean_domain(self) -> Domain:
        return Interval(0.0, float(self.total_count))

    @property
    def support(self) -> C.Constraint:
        return C.integer_interval(0, self.total_count)

    def log_base(self, x: Tensor) -> Tensor:
        return math.lgamma(self.total_count + 1) - torch.lgamma(x + 1) - torch.lgamma(self.total_count - x + 1)

    def distribution(self, eta: Tensor) -> D.Distribution:
        return D.Binomial(self.total_count, logits=self._inside(eta, self.natural_domain, "eta"))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Binomial)
        assert isinstance(d, D.Binomial)
        _same_count(self, float(self.total_count), d.total_count)
        return d.logits

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self.total_count * F.softplus(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.total_count * eta.sigmoid()

    def _natural(self, xi: Tensor) -> Tensor:
        return xi.log() - (self.total_count - xi).log()

    def _fisher(self, eta: Tensor) -> Information:
        return Scalar(self.total_count * eta.sigmoid() * (-eta).sigmoid())

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        m = self.total_count
        p, q = eta.sigmoid().unsqueeze(-1), (-eta).sigmoid().unsqueeze(-1)
        won = expected_log_factorial(lambda w: m * torch.log1p(-p * w), m * eta.sigmoid())
        lost = expected_log_factorial(lambda w: m * torch.log1p(-q * w), m * (-eta).sigmoid())
        return math.lgamma(m + 1) - won - lost


@final
@dataclass(frozen=True)
class NegativeBinomial(Decaying):
    """Γ(x + r)/(x! Γ(r)) e^{ηx} (1 − e^η)^r: successes, of probability e^η, before ``total_count`` = r > 0 failures.

    t = x, log Z = −r log(1 − e^η), η < 0.

    >>> NegativeBinomial(3.0).mean(torch.tensor(0.5).log())
    tensor(3.)
    """

    total_count: float

    def __post_init__(self) -> None:
        if not 0 < self.total_count < math.inf:
            raise ValueError(f"NegativeBinomial(total_count=…) must be positive and finite, got {self.total_count}")

    @property
    def support(self) -> C.Constraint:
        return C.nonnegative_integer

    def log_base(self, x: Tensor) -> Tensor:
        return torch.lgamma(x + self.total_count) - torch.lgamma(x + 1) - math.lgamma(self.total_count)

    def distribution(self, eta: Tensor) -> D.Distribution:
        eta = self._inside(eta, self.natural_domain, "eta")
        return D.NegativeBinomial(eta.new_tensor(self.total_count), logits=eta - log1mexp(eta))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.NegativeBinomial)
        assert isinstance(d, D.NegativeBinomial)
        _same_count(self, self.total_count, d.total_count)
        return F.logsigmoid(d.logits)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -self.total_count * log1mexp(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.total_count / torch.expm1(-eta)

    def _natural(self, xi: Tensor) -> Tensor:
        return -torch.log1p(self.total_count / xi)

    def _fisher(self, eta: Tensor) -> Information:
        odds = 1 / torch.expm1(-eta)
        return Scalar(self.total_count * odds * (1 + odds))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        odds, r = 1 / torch.expm1(-eta), self.total_count

        def log_generating(w: Tensor) -> Tensor:
            return -r * torch.log1p(odds.unsqueeze(-1) * w)

        # log Γ(x + r) = log Γ(x + r + 1) − log(x + r): the integral of the left side ends late if r is small.
        above = expected_log_factorial(log_generating, r * odds, r)
        above = above - expected_log(lambda s: log_generating(-torch.expm1(-s)) - r * s, odds)
        return above - expected_log_factorial(log_generating, r * odds) - math.lgamma(r)


@final
@dataclass(frozen=True)
class Geometric(Decaying):
    """e^{ηx} (1 − e^η): failures x, of probability e^η, before the first success. t = x, log Z = −log(1 − e^η), η < 0.

    >>> Geometric().natural(torch.tensor(1.0))
    tensor(-0.6931)
    """

    @property
    def support(self) -> C.Constraint:
        return C.nonnegative_integer

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def distribution(self, eta: Tensor) -> D.Distribution:
        return D.Geometric(probs=-torch.expm1(self._inside(eta, self.natural_domain, "eta")))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.Geometric)
        assert isinstance(d, D.Geometric)
        return torch.log1p(-d.probs)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -log1mexp(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return 1 / torch.expm1(-eta)

    def _natural(self, xi: Tensor) -> Tensor:
        return -torch.log1p(1 / xi)

    def _fisher(self, eta: Tensor) -> Information:
        odds = 1 / torch.expm1(-eta)
        return Scalar(odds * (1 + odds))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)


def _same_count(family: Binomial | NegativeBinomial, mine: float, theirs: Tensor) -> None:
    if not bool((theirs == mine).all()):
        raise ValueError(
            f"{type(family).__name__}(total_count={mine:g}) cannot hold a distribution with total_count = "
            f"{theirs.reshape(-1)[0].item():g}: make a family with that count"
        )
