"""Natural-gradient variational inference: any log-density, any exponential family, conjugate terms in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import can_read
from natgrad.errors import NonFiniteError
from natgrad.families.base import ExponentialFamily
from natgrad.linalg import svd
from natgrad.mirror.charts import Boundary, Move, NaturalChart, Shorten, along
from natgrad.model import check_slots
from natgrad.show import brief

LogDensity: TypeAlias = Callable[[Tensor], Tensor]
_SHORTEN = Shorten()


def check_rate(rate: float) -> None:
    """A step size ρ lies in (0, 1]: 1 forgets the old natural parameters altogether."""
    if not 0 < rate <= 1:
        raise ValueError(
            f"rate={rate} must lie in (0, 1]: η ← (1 − ρ) η + ρ η̂, and ρ = 1 is exact for conjugate models"
        )


# Gradients of E_q ℓ(z) with respect to the mean parameters of q, from samples. The gradient in ξ is the natural
# gradient in η: ∇_ξ E ℓ = F⁻¹∇_η E ℓ (Grosse 2021), and ∇_η E ℓ = Cov(t, ℓ).


@final
@dataclass(frozen=True)
class Expectation:
    """E_q ℓ [*batch] and its gradient in ξ, of the shape of a point."""

    value: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Estimator(ABC):
    """The base class of estimators of the gradient of an expected log-density.

    Args:
        samples: The number of samples of q that an estimate takes.

    Method:
        It estimates ∇_ξ E_q ℓ, where ℓ maps z [s *batch *event] to [s *batch].

        ``control``: c with ℓ ≈ ⟨c, t⟩ + constant. The gradient of ⟨c, t⟩ is c, exactly, and only the remainder ℓ − ⟨c,
        t⟩ is estimated: where the family contains the posterior, the noise vanishes at the optimum.
    """

    samples: int
    least: ClassVar[int] = 2  # samples
    through: ClassVar[bool] = False  # whether the gradient runs through the samples

    def __post_init__(self) -> None:
        if self.samples < self.least:
            raise ValueError(f"{type(self).__name__}(samples={self.samples}) needs {self.least} or more")

    @abstractmethod
    def slope(self, family: ExponentialFamily, eta: Tensor, t: Tensor, remainder: Tensor) -> Tensor:
        """∇_ξ E of the remainder [s *batch], given the statistics t of the samples."""

    def __call__(
        self,
        family: ExponentialFamily,
        eta: Tensor,
        log_density: LogDensity,
        control: Tensor,
        generator: torch.Generator | None = None,
    ) -> Expectation:
        """E ℓ and ∇_ξ E ℓ at η."""
        with torch.set_grad_enabled(self.through):
            eta = eta.detach().requires_grad_(self.through)
            draw = family.rsample if self.through else family.sample
            z = draw(eta, (self.samples,), generator)
            t, remainder, value = _remainder(log_density, z, family, eta.detach(), control)
            return Expectation(value.detach(), control + self.slope(family, eta, t, remainder).detach())


@final
@dataclass(frozen=True)
class Score(Estimator):
    """Estimate the gradient without bias and without derivatives of the log-density.

    Args:
        samples: The number of samples of q.

    Method:
        F⁻¹ Cov(t, ℓ) with the exact F and the sample covariance: the score-function gradient, unbiased.

    Example:
        >>> from natgrad.families import Poisson
        >>> at, zero = torch.tensor(0.0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        >>> estimate = Score(100000)(Poisson(), at, lambda z: 3.0 * z, zero, torch.Generator().manual_seed(0))
        >>> bool((estimate.gradient - 3.0).abs() < 0.1)
        True
    """

    samples: int = 64

    def slope(self, family: ExponentialFamily, eta: Tensor, t: Tensor, remainder: Tensor) -> Tensor:
        remainder = remainder - remainder.mean(0)
        weight = remainder.unsqueeze(-1) if family.axes else remainder
        return family.fisher(eta).sharp((t * weight).sum(0) / (self.samples - 1))


@final
@dataclass(frozen=True)
class Regression(Estimator):
    """Estimate the gradient by a least-squares fit of the log-density: little noise, small bias.

    Args:
        samples: The number of samples of q.

    Method:
        The fit of ℓ by the statistics t: F and Cov(t, ℓ) from the same samples (Salimans and Knowles 2013).

        Exact where ℓ is linear in t (a conjugate model), with one sample more than t has independent entries. Elsewhere
        its bias is O(1/samples), and its noise far below that of ``Score``. In directions of t in which all samples
        agree (a class that was never drawn) nothing is learned, and the gradient is that of the control.

    Example:
        >>> from natgrad.families import Poisson
        >>> at, zero = torch.tensor(0.0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        >>> Regression(20)(Poisson(), at, lambda z: 3.0 * z, zero).gradient.round(decimals=9)
        tensor(3., dtype=torch.float64)
    """

    samples: int = 64

    def slope(self, family: ExponentialFamily, eta: Tensor, t: Tensor, remainder: Tensor) -> Tensor:
        remainder = remainder - remainder.mean(0)
        t = t if family.axes else t.unsqueeze(-1)
        p = t.shape[-1]
        if self.samples <= p:
            raise ValueError(
                f"Regression(samples={self.samples}) cannot determine the {p} natural parameters of "
                f"{type(family).__name__}: use more than {p} samples, or Score, or Reparametrised"
            )
        centred = (t - t.mean(0)).movedim(0, -2)  # [*batch s p]
        scale = centred.square().mean(-2, keepdim=True).sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        # The solution of least norm: entries of t that are equal share their coefficient.
        U, σ, Vh = svd(centred / scale, "the sufficient statistic of the samples")
        large = σ > σ[..., :1] * max(centred.shape[-2:]) * torch.finfo(t.dtype).eps
        inverse = torch.where(large, σ, 1.0).reciprocal() * large
        solution = Vh.mT @ (inverse.unsqueeze(-1) * (U.mT @ remainder.movedim(0, -1).unsqueeze(-1)))
        slope = (solution / scale.mT).squeeze(-1)
        return slope if family.axes else slope.squeeze(-1)


@final
@dataclass(frozen=True)
class Reparametrised(Estimator):
    """Estimate the gradient through the samples, for continuous z and differentiable densities.

    Args:
        samples: The number of samples of q.

    Method:
        F⁻¹ E[(∂z/∂η)ᵀ∇ℓ(z)].

    Example:
        >>> from natgrad.families import DiagonalGaussian
        >>> at = torch.tensor([0.0, 1.0], dtype=torch.float64)  # N(0, 1)
        >>> estimate = Reparametrised(1000)(DiagonalGaussian(), at, lambda z: 2.0 * z.squeeze(-1), torch.zeros_like(at))
        >>> bool((estimate.gradient - torch.tensor([2.0, 0.0])).abs().max() < 0.5)
        True
    """

    samples: int = 16
    least = 1
    through = True

    def slope(self, family: ExponentialFamily, eta: Tensor, t: Tensor, remainder: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(remainder.mean(0).sum(), eta)
        return family.fisher(eta.detach()).sharp(slope)


def _remainder(
    log_density: LogDensity, z: Tensor, family: ExponentialFamily, eta: Tensor, control: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """t(z), ℓ(z) − ⟨c, t(z)⟩ [s *batch], and E ℓ [*batch], in which ⟨c, t⟩ is exact; ℓ is checked."""
    values = log_density(z)
    _check_shape(values, (z.shape[0], *eta.shape[: eta.ndim - family.axes]), z)
    if can_read(values) and not bool(values.isfinite().all()):
        s = int((~values.isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.isfinite()).nonzero()[0, 0])
        raise NonFiniteError(
            f"the log-density is not finite at sample {s} of q ({type(family).__name__}): it must be defined on all of "
            "its support. Nothing was changed"
        )
    t = family.statistics(z)
    remainder = values - family.pair(control, t)
    return t, remainder, remainder.mean(0) + family.pair(control, family.mean(eta))


def _broadcasts_to(shape: torch.Size, other: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, other) == shape
    except RuntimeError:  # they do not broadcast at all
        return False


def _check_shape(values: Tensor, shape: tuple[int, ...], z: Tensor) -> None:
    """Refuse values of a log-density that are not one number per sample and member of the batch."""
    if values.shape != shape:
        raise ValueError(
            f"the log-density must return one number for every sample, {tuple(shape)}, for z {tuple(z.shape)}; "
            f"it returned {tuple(values.shape)}: sum over the data, and over nothing else"
        )


@final
@dataclass(frozen=True)
class Posterior:
    """A posterior to approximate: a prior, conjugate data, and any other log-density.

    Args:
        family: The exponential family of the approximation q.
        log_density: ℓ, any function from z [s *batch *event] to [s *batch].
        prior: The natural parameters η₀ of p(z) in the family. Without a prior, ℓ is the whole log p(data, z).
        sites: λ of a conjugate likelihood, from ``Conjugate.sites``; it is never sampled.

    Method:
        p(z | data) ∝ p(z) exp(⟨λ, t(z)⟩ + ℓ(z)).

        With log p(z) = ⟨η₀, t⟩ + log h − log Z(η₀), the natural gradient of the ELBO in η is its gradient in ξ (Grosse
        2021), and a step of size ρ is (Khan & Lin 2017)

            η ← (1 − ρ) η + ρ η̂,   η̂ = η₀ + λ + ∇_ξ E_q ℓ.

        Without ℓ, η̂ is the exact posterior, whatever η was.

    Example:
        >>> import torch, natgrad as ng
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

    __repr__ = brief

    def __post_init__(self) -> None:
        check_slots(family=(self.family, ExponentialFamily))
        if self.log_density is None and self.prior is None:
            raise ValueError("a Posterior needs a log_density (of data and z), or a prior, or both")
        if self.prior is not None:
            self.family.log_partition(self.prior)  # refuses a prior outside the domain

    def target(
        self, eta: Tensor, estimator: Estimator | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """η̂, and the ELBO [*batch] at η."""
        conjugate = self._conjugate(eta)
        if self.log_density is None:
            return conjugate.expand_as(eta), self._exact_bound(eta)
        entries = eta.shape[-1] if self.family.axes else 1
        estimator = estimator or Regression(64 + 4 * entries)
        estimate = estimator(self.family, eta, self._log_ratio, eta - conjugate, generator)
        return conjugate + estimate.gradient, self._exact_bound(eta) + estimate.value

    def step(
        self,
        eta: Tensor,
        rate: float = 1.0,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
        boundary: Boundary = _SHORTEN,
    ) -> Move:
        """A step of size ``rate`` from η, shortened where it would leave the domain; the move has the reason."""
        check_rate(rate)
        target, _ = self.target(eta, estimator, generator)
        return self._move(eta, target, rate, boundary, "a smaller rate")

    def elbo(self, eta: Tensor, samples: int = 256, generator: torch.Generator | None = None) -> Tensor:
        """E_q log p(data, z) + H(q) [*batch]; exact without ℓ, and up to the constants that ``sites`` leave out."""
        if samples < 1:
            raise ValueError(f"elbo(samples={samples}) needs one sample or more")
        bound = self._exact_bound(eta)
        if self.log_density is None:
            return bound
        with torch.no_grad():
            z = self.family.sample(eta, (samples,), generator)
            return bound + _remainder(self._log_ratio, z, self.family, eta, eta - self._conjugate(eta))[2]

    def _exact_bound(self, eta: Tensor) -> Tensor:
        """The ELBO without ℓ: log Z(η) − log Z(η₀) − ⟨η − η₀ − λ, ξ⟩."""
        bound = self.family.log_partition(eta) - self.family.pair(eta - self._conjugate(eta), self.family.mean(eta))
        return bound if self.prior is None else bound - self.family.log_partition(self.prior)

    def _move(self, eta: Tensor, target: Tensor, rate: float, boundary: Boundary, shorter: str) -> Move:
        """(1 − ρ) η + ρ η̂, inside the domain."""
        v = rate * (target - eta)
        domain = self.family.natural_domain
        t = boundary.share(domain, eta, v, f"η of {type(self.family).__name__}, at ")
        return Move(self.family, NaturalChart(), along(eta, t, v), t, eta + v, shorter)

    def _conjugate(self, eta: Tensor) -> Tensor:
        """η₀ + λ."""
        total = torch.zeros_like(eta)
        for point, name in ((self.prior, "the prior has"), (self.sites, "the sites have")):
            if point is None:
                continue
            size = self.family.axes and point.shape[-1:] != eta.shape[-1:]
            if size or not _broadcasts_to(eta.shape, point.shape):
                raise ValueError(
                    f"{name} shape {tuple(point.shape)} and eta {tuple(eta.shape)}: eta must have the batch of both, "
                    "and all points one size"
                )
            total = total + point
        return total

    def _log_ratio(self, z: Tensor) -> Tensor:
        """ℓ relative to the base measure h, unless a prior of the family brings h already."""
        assert self.log_density is not None
        values = self.log_density(z)
        if self.prior is not None:
            return values
        base = self.family.log_base(z)
        _check_shape(values, base.shape, z)
        return values - base


@final
@dataclass(frozen=True)
class Decaying:
    """Step sizes that decay slowly enough to converge and fast enough to average out noise.

    Args:
        power: The exponent; noise averages out for ½ < power ≤ 1.
        delay: The number of steps after which the decay sets in.

    Method:
        ρ_k = (1 + k/delay)^−power (Robbins and Monro 1951).

    Example:
        >>> Decaying(power=1.0, delay=1.0)(3)
        0.25
    """

    power: float = 0.75
    delay: float = 3.0

    def __post_init__(self) -> None:
        if not 0.5 < self.power <= 1 or not self.delay > 0:
            raise ValueError(f"Decaying needs ½ < power ≤ 1 and delay > 0, got {self.power} and {self.delay}")

    def __call__(self, k: int) -> float:
        """ρ_k, for k = 0, 1, …"""
        return float((1 + k / self.delay) ** -self.power)


@final
@dataclass(frozen=True)
class Fit:
    """What ``vi.fit`` returns: the approximate posterior and how it was reached.

    Attributes:
        eta: The natural parameters of q.
        elbo: The evidence bound [k *batch] before every step.
        reasons: Why steps were shortened, by the number of the step.
    """

    eta: Tensor
    elbo: Tensor
    reasons: dict[int, tuple[str, ...]]

    __repr__ = brief


def fit(
    posterior: Posterior,
    eta: Tensor,
    *,
    steps: int = 100,
    schedule: float | Callable[[int], float] | None = None,
    estimator: Estimator | None = None,
    generator: torch.Generator | None = None,
) -> Fit:
    """Approximate a posterior by natural-gradient variational inference.

    Every iterate is a distribution of the family.

    Args:
        posterior: What to approximate.
        eta: The natural parameters to start from.
        steps: The number of steps.
        schedule: The step size ρ in (0, 1], one for all steps or a function of their number k = 0, 1, …; by default
            ``Decaying()``, or 1 without a log-density.
        estimator: How the gradient of E ℓ is estimated, ``Regression()`` by default.
        generator: Where random numbers come from; without one, torch's global generator.

    Returns:
        A ``Fit`` with the last ``eta``, the evidence bound before every step as ``elbo``, and ``reasons``, which says
        by number why steps were shortened.

    Example:
        >>> import torch, natgrad as ng
        >>> y, beta = torch.tensor([1.0, 1.0, 0.0]), ng.families.Beta()
        >>> log_joint = lambda z: (y * z.log()[..., None] + (1 - y) * (1 - z).log()[..., None]).sum(-1)  # a flat prior
        >>> ng.vi.fit(ng.vi.Posterior(beta, log_joint), torch.zeros(2), steps=2).eta.round(decimals=3)
        tensor([2., 1.])
    """
    if steps < 1:
        raise ValueError(f"fit(steps={steps}) needs one step or more")
    if schedule is None:
        schedule = 1.0 if posterior.log_density is None else Decaying()
    bounds, reasons = [], {}
    for k in range(steps):
        rate = schedule(k) if callable(schedule) else schedule
        check_rate(rate)
        target, bound = posterior.target(eta, estimator, generator)
        move = posterior._move(eta, target, rate, _SHORTEN, "a schedule= with smaller rates, such as 0.1")
        if can_read(eta) and move.reasons:
            reasons[k] = move.reasons
        bounds.append(bound)
        eta = move.point
    return Fit(eta, torch.stack(bounds), reasons)
