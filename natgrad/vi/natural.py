"""Natural-gradient variational inference: any log-density, any exponential family, conjugate parts in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.families.exponential import ExponentialFamily
from natgrad.mirror.boundary import Boundary, Shorten, spread
from natgrad.mirror.charts import NaturalChart
from natgrad.mirror.families import Move
from natgrad.vi.gradients import Estimator, LogDensity, Regression, check_shape, expected
from natgrad.vi.step import check_rate

_SHORTEN = Shorten()


@final
@dataclass(frozen=True)
class Posterior:
    """p(z | data) ∝ p(z) exp(⟨λ, t(z)⟩ + ℓ(z)), to be approximated by q in ``family``: log p(data, z) in parts.

    ``log_density``: ℓ, any function of z [s *batch *event] → [s *batch]. ``prior``: the natural parameters of p(z) in
    the family; without one, ℓ is the whole log p(data, z). ``sites``: λ of a conjugate likelihood, from
    ``Conjugate.sites``; it is never sampled.

    With log p(z) = ⟨η₀, t⟩ + log h − log Z(η₀), the natural gradient of the ELBO in η is its gradient in ξ
    (002 (22), (23)), and a step of size ρ is (Khan & Lin 2017)

        η ← (1 − ρ) η + ρ η̂,   η̂ = η₀ + λ + ∇_ξ E_q ℓ.

    Without ℓ, η̂ is the exact posterior, whatever η was.

    >>> import natgrad as ng
    >>> gamma, data = ng.families.Gamma(), torch.tensor([2.0, 0.0, 4.0])
    >>> prior = torch.tensor([0.0, -1.0])  # shape 1, rate 1
    >>> posterior = ng.vi.Posterior(gamma, prior=prior, sites=ng.vi.PoissonRate().sites(data))
    >>> posterior.step(prior).point  # shape 1 + 6, rate 1 + 3
    tensor([ 6., -4.])
    """

    family: ExponentialFamily
    log_density: LogDensity | None = None
    prior: Tensor | None = None
    sites: Tensor | None = None

    def __post_init__(self) -> None:
        if self.log_density is None and self.prior is None:
            raise ValueError("a Posterior needs a log_density (of data and z), or a prior, or both")
        if self.prior is not None:
            self.family.log_partition(self.prior)  # refuses what is outside

    def target(
        self, eta: Tensor, estimator: Estimator | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """η̂, and the ELBO [*batch] at η."""
        known = self._known(eta)
        if self.log_density is None:
            return known.expand_as(eta), self._entropic(eta)
        estimator = estimator or Regression(_enough(eta, self.family))
        found = estimator(self.family, eta, self._rest, eta - known, generator)
        return known + found.gradient, self._entropic(eta) + found.value

    def step(
        self,
        eta: Tensor,
        rate: float = 1.0,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
        boundary: Boundary = _SHORTEN,
    ) -> Move:
        """From η, a step of size ``rate``; shortened where it would leave the domain, with the reason in the move."""
        check_rate(rate)
        aim, _ = self.target(eta, estimator, generator)
        return self.moved(eta, aim, rate, boundary)

    def elbo(self, eta: Tensor, samples: int = 256, generator: torch.Generator | None = None) -> Tensor:
        """E_q log p(data, z) + H(q) [*batch]; exact without ℓ, and up to the constants that ``sites`` leave out."""
        bound = self._entropic(eta)
        if self.log_density is None:
            return bound
        return bound + expected(self.family, eta, self._rest, eta - self._known(eta), samples, generator)

    def _entropic(self, eta: Tensor) -> Tensor:
        """The ELBO without ℓ: log Z(η) − log Z(η₀) − ⟨η − η₀ − λ, ξ⟩."""
        bound = self.family.log_partition(eta) - self.family.pair(eta - self._known(eta), self.family.mean(eta))
        return bound if self.prior is None else bound - self.family.log_partition(self.prior)

    def moved(self, eta: Tensor, aim: Tensor, rate: float, boundary: Boundary) -> Move:
        """(1 − ρ) η + ρ η̂, kept in the domain."""
        v = rate * (aim - eta)
        domain = self.family.natural_domain
        t = boundary.share(domain, eta, v, f"η of {type(self.family).__name__}, at ")
        return Move(self.family, NaturalChart(), eta + spread(t, eta) * v, t, eta + v)

    def _known(self, eta: Tensor) -> Tensor:
        """η₀ + λ."""
        known = torch.zeros_like(eta) if self.prior is None else self.prior
        known = known if self.sites is None else known + self.sites
        if torch.broadcast_shapes(known.shape, eta.shape) != eta.shape:
            raise ValueError(
                f"the prior and the sites have shape {tuple(known.shape)} and eta {tuple(eta.shape)}: eta must have "
                "the batch of both"
            )
        return known

    def _rest(self, z: Tensor) -> Tensor:
        """ℓ, against the base measure: a prior of the family brings its own."""
        assert self.log_density is not None
        values = self.log_density(z)
        if self.prior is not None:
            return values
        base = self.family.log_base(z)
        check_shape(values, base.shape, z)
        return values - base


class Schedule(ABC):
    """Step sizes ρ_k in (0, 1]."""

    @abstractmethod
    def __call__(self, k: int) -> float:
        """ρ_k, for k = 0, 1, …"""


@final
@dataclass(frozen=True)
class Constant(Schedule):
    """The same ρ always: for gradients without noise."""

    rate: float

    def __call__(self, k: int) -> float:
        return self.rate


@final
@dataclass(frozen=True)
class Decaying(Schedule):
    """ρ_k = (1 + k/delay)^−power: noise averages out for ½ < power ≤ 1 (Robbins & Monro 1951).

    >>> Decaying(power=1.0, delay=1.0)(3)
    0.25
    """

    power: float = 0.75
    delay: float = 3.0

    def __post_init__(self) -> None:
        if not 0.5 < self.power <= 1 or not self.delay > 0:
            raise ValueError(f"Decaying needs ½ < power ≤ 1 and delay > 0, got {self.power} and {self.delay}")

    def __call__(self, k: int) -> float:
        return float((1 + k / self.delay) ** -self.power)


@final
@dataclass(frozen=True)
class Fit:
    """Natural parameters of q, the ELBO [k *batch] before every step, and why steps were shortened, by step."""

    eta: Tensor
    elbo: Tensor
    reasons: dict[int, tuple[str, ...]]


def fit(
    posterior: Posterior,
    eta: Tensor,
    steps: int = 100,
    schedule: Schedule | None = None,
    estimator: Estimator | None = None,
    generator: torch.Generator | None = None,
) -> Fit:
    """Natural-gradient variational inference from η on; every iterate is a distribution.

    >>> import natgrad as ng
    >>> y, beta = torch.tensor([1.0, 1.0, 0.0]), ng.families.Beta()
    >>> log_joint = lambda z: (y * z.log()[..., None] + (1 - y) * (1 - z).log()[..., None]).sum(-1)  # a flat prior
    >>> ng.vi.fit(ng.vi.Posterior(beta, log_joint), torch.zeros(2), steps=2).eta.round(decimals=3)
    tensor([2., 1.])
    """
    schedule = schedule or (Constant(1.0) if posterior.log_density is None else Decaying())
    bounds, reasons = [], {}
    for k in range(steps):
        rate = schedule(k)
        check_rate(rate)
        aim, bound = posterior.target(eta, estimator, generator)
        move = posterior.moved(eta, aim, rate, _SHORTEN)
        if eta.device.type == "cpu" and move.reasons:
            reasons[k] = move.reasons
        bounds.append(bound)
        eta = move.point
    return Fit(eta, torch.stack(bounds), reasons)


def _enough(eta: Tensor, family: ExponentialFamily) -> int:
    """Samples for a regression on t with some to spare."""
    return 64 + 4 * (eta.shape[-1] if family.axes else 1)
