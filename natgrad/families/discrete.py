"""Coins and counts: Bernoulli, binomial, Poisson, geometric and negative binomial. One natural parameter each."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C
from torch.nn import functional as F

from natgrad.families.base import (
    ExponentialFamily,
    diagonal_root,
    expect,
    expect_constant,
    over_terms,
    shared_normals,
)
from natgrad.families.domains import Domain, OpenBox, Space
from natgrad.families.information import Information
from natgrad.families.special import expected_log, expected_log_factorial, log1mexp
from natgrad.linalg import check_positive, is_number

_LARGE = math.log(1e4)


class ScalarOutput(ExponentialFamily):
    """One natural parameter a term, any real number: F is diagonal over the outputs y [n *terms], and every shape fits.

    A model is trained through these methods, so that they do without domain checks and without a dense F.
    """

    axes = 0
    natural_domain: ClassVar[Domain] = Space(axes=0)

    @abstractmethod
    def _variance(self, eta: Tensor) -> Tensor:
        """Var t(x), of the shape of η."""

    def check(self, y: Tensor) -> None:
        """Every shape [n *terms] fits."""

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._variance(y) * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, self._variance(y))

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return shared_normals(y, samples, generator) * self._variance(y).sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        self._check_pair(y, y2, "y2")
        return over_terms(self._bregman(y2, y))  # KL(p_y ‖ p_y2) is the divergence of log Z at (y2, y)

    def _fisher(self, eta: Tensor) -> Information:
        return Information.diagonal(self._variance(eta), 0)


def _softplus(eta: Tensor) -> Tensor:
    """log(1 + e^η) with all digits, and those of its derivatives.

    ``F.softplus(η)`` is η itself above 20, and the second derivative of ``F.logsigmoid(−η)`` is 0 far below 0.
    """
    return torch.where(eta > 0, -F.logsigmoid(-eta), F.softplus(eta))


class Coins(ExponentialFamily):
    """m coins of log-odds η: log Z = m log(1 + e^η), ξ = mp.

    The other side of a coin has the log-odds −η. Where η is large, p rounds to 1, but 1 − p = σ(−η) keeps its digits.
    So divergence and entropy are computed for the less likely side, and the density from both sides.
    """

    axes = 0
    natural_domain: ClassVar[Domain] = Space(axes=0)

    @property
    @abstractmethod
    def coins(self) -> int:
        """m."""

    def entropy(self, eta: Tensor) -> Tensor:
        eta = self._inside(eta, self.natural_domain, "eta")
        return super().entropy(torch.where(eta > 0, -eta, eta))

    def _bregman(self, eta: Tensor, eta2: Tensor) -> Tensor:
        turned = eta2 > 0
        return super()._bregman(torch.where(turned, -eta, eta), torch.where(turned, -eta2, eta2))

    def _log_density(self, eta: Tensor, t: Tensor) -> Tensor:
        return -t * _softplus(-eta) - (self.coins - t) * _softplus(eta)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self.coins * _softplus(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.coins * eta.sigmoid()


@final
@dataclass(frozen=True)
class Bernoulli(Coins, ScalarOutput):
    """The family of coin tosses, with log-odds as outputs.

    Use it in a Fisher metric for logistic regression, or as a distribution with log-odds as natural parameters.

    Method:
        Log-odds y [n *terms]: F = p(1 − p), p = σ(y).

        As a distribution: x in {0, 1}, t(x) = x, log Z = log(1 + e^η), ξ = p.

    Example:
        >>> Bernoulli().flat(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[0.2500]])
    """

    coins = 1
    mean_domain: ClassVar[Domain] = OpenBox(0.0, 1.0, axes=0)
    support: ClassVar[C.Constraint] = C.boolean

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = y.sigmoid()
        return torch.bernoulli(p.expand(samples, *p.shape), generator=generator) - p

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Bernoulli(logits=eta)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        return expect(self, d, D.Bernoulli).logits

    def _natural(self, xi: Tensor) -> Tensor:
        return xi.logit()

    def _variance(self, eta: Tensor) -> Tensor:
        return eta.sigmoid() * (-eta).sigmoid()  # 1 − p would cancel


@final
@dataclass(frozen=True)
class Poisson(ScalarOutput):
    """The family of counts, with log-rates as outputs.

    Method:
        Log-rates y [n *terms]: F = e^y.

        As a distribution: t(x) = x, h(x) = 1/x!, log Z = e^η, ξ = e^η.

    Example:
        >>> Poisson().kl(torch.zeros(1, 1), torch.zeros(1, 1))
        tensor([0.])
    """

    mean_domain: ClassVar[Domain] = OpenBox(0.0, axes=0)
    support: ClassVar[C.Constraint] = C.nonnegative_integer

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        rate = y.exp()
        return torch.poisson(rate.expand(samples, *rate.shape), generator=generator) - rate

    def log_base(self, x: Tensor) -> Tensor:
        return -torch.lgamma(x + 1)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Poisson(eta.exp())

    def from_distribution(self, d: D.Distribution) -> Tensor:
        return expect(self, d, D.Poisson).rate.log()

    def _log_partition(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def _mean(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def _natural(self, xi: Tensor) -> Tensor:
        return xi.log()

    def _variance(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def entropy(self, eta: Tensor) -> Tensor:
        """As for every family; from a rate of 10⁴ on by its asymptotic series, where the exact terms cancel."""
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
class Binomial(Coins):
    """The number of heads among a known number of coins, with log-odds as natural parameter.

    Args:
        total_count: The number m of coins, at least 1.

    Method:
        Successes x of m coins: t = x, h = m!/(x! (m − x)!), η the log-odds, log Z = m log(1 + e^η).

    Example:
        >>> Binomial(4).mean(torch.tensor(0.0))
        tensor(2.)
    """

    total_count: int

    def __post_init__(self) -> None:
        if not is_number(self.total_count, whole=True) or self.total_count < 1:
            raise ValueError(f"Binomial(total_count=…) must be an integer, 1 or more, got {self.total_count}")

    @property
    def coins(self) -> int:
        return self.total_count

    @property
    def mean_domain(self) -> OpenBox:
        return OpenBox(0.0, float(self.total_count), axes=0)

    @property
    def support(self) -> C.Constraint:
        return C.integer_interval(0, self.total_count)

    def log_base(self, x: Tensor) -> Tensor:
        return math.lgamma(self.total_count + 1) - torch.lgamma(x + 1) - torch.lgamma(self.total_count - x + 1)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Binomial(self.total_count, logits=eta)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.Binomial)
        expect_constant(self, "total_count", self.total_count, d.total_count)
        return d.logits

    def _natural(self, xi: Tensor) -> Tensor:
        return xi.log() - (self.total_count - xi).log()

    def _fisher(self, eta: Tensor) -> Information:
        return Information.diagonal(self.total_count * eta.sigmoid() * (-eta).sigmoid(), 0)  # 1 − p would cancel

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        m = self.total_count
        p, q = eta.sigmoid().unsqueeze(-1), (-eta).sigmoid().unsqueeze(-1)
        won = expected_log_factorial(lambda w: m * torch.log1p(-p * w), m * eta.sigmoid())
        lost = expected_log_factorial(lambda w: m * torch.log1p(-q * w), m * (-eta).sigmoid())
        return math.lgamma(m + 1) - won - lost


@final
@dataclass(frozen=True)
class NegativeBinomial(ExponentialFamily):
    """The number of successes before a known number of failures: counts of large spread.

    Args:
        total_count: The number r > 0 of failures, any positive number.

    Method:
        Γ(x + r)/(x! Γ(r)) e^{ηx} (1 − e^η)^r: successes, of probability e^η, before ``total_count`` = r > 0 failures.

        t = x, log Z = −r log(1 − e^η), η < 0.

    Example:
        >>> NegativeBinomial(3.0).mean(torch.tensor(0.5).log())
        tensor(3.)
    """

    total_count: float

    axes = 0
    natural_domain: ClassVar[Domain] = OpenBox(upper=0.0, axes=0)
    mean_domain: ClassVar[Domain] = OpenBox(0.0, axes=0)
    support: ClassVar[C.Constraint] = C.nonnegative_integer

    def __post_init__(self) -> None:
        check_positive(self.total_count, "NegativeBinomial(total_count=…)")

    def log_base(self, x: Tensor) -> Tensor:
        return torch.lgamma(x + self.total_count) - torch.lgamma(x + 1) - math.lgamma(self.total_count)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.NegativeBinomial(eta.new_tensor(self.total_count), logits=eta - log1mexp(eta))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.NegativeBinomial)
        expect_constant(self, "total_count", self.total_count, d.total_count)
        return F.logsigmoid(d.logits)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -self.total_count * log1mexp(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.total_count * _odds(eta)

    def _natural(self, xi: Tensor) -> Tensor:
        return -torch.log1p(self.total_count / xi)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        odds, r = _odds(eta), self.total_count

        def log_generating(w: Tensor) -> Tensor:
            return -r * torch.log1p(odds.unsqueeze(-1) * w)

        # log Γ(x + r) = log Γ(x + r + 1) − log(x + r): for small r the integral of the left side converges slowly.
        above = expected_log_factorial(log_generating, r * odds, r)
        above = above - expected_log(lambda s: log_generating(-torch.expm1(-s)) - r * s, odds)
        return above - expected_log_factorial(log_generating, r * odds) - math.lgamma(r)


@final
@dataclass(frozen=True)
class Geometric(ExponentialFamily):
    """The number of failures before the first success.

    Method:
        e^{ηx} (1 − e^η): failures x, of probability e^η, before the first success. t = x, log Z = −log(1 − e^η), η < 0.

    Example:
        >>> Geometric().natural(torch.tensor(1.0))
        tensor(-0.6931)
    """

    axes = 0
    natural_domain: ClassVar[Domain] = OpenBox(upper=0.0, axes=0)
    mean_domain: ClassVar[Domain] = OpenBox(0.0, axes=0)
    support: ClassVar[C.Constraint] = C.nonnegative_integer

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Geometric(probs=-torch.expm1(eta))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        return torch.log1p(-expect(self, d, D.Geometric).probs)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -log1mexp(eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return _odds(eta)

    def _natural(self, xi: Tensor) -> Tensor:
        return -torch.log1p(1 / xi)


def _odds(eta: Tensor) -> Tensor:
    """e^η/(1 − e^η) for η < 0; the form 1/(e^−η − 1) would overflow, and its derivative be NaN."""
    return -eta.exp() / torch.expm1(eta)
