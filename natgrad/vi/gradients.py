"""Gradients of an expectation E_q ℓ(z) with respect to the mean parameters of q, from samples.

The gradient in ξ is the natural gradient in η: ∇_ξ E ℓ = F⁻¹∇_η E ℓ (002 (22), (23)), and ∇_η E ℓ = Cov(t, ℓ).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.families.exponential import ExponentialFamily

LogDensity: TypeAlias = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class Expectation:
    """E_q ℓ [*batch] and its gradient in ξ, of the shape of a point."""

    value: Tensor
    gradient: Tensor


class Estimator(ABC):
    """How ∇_ξ E_q ℓ is found. ℓ takes z [s *batch *event], drawn from q, and returns [s *batch].

    ``control``: c such that ℓ is about ⟨c, t⟩ + constant. Its part of the gradient is c, exactly, and only the rest
    ℓ − ⟨c, t⟩ is estimated: where the family contains the posterior, no noise is left there at the end.
    """

    @abstractmethod
    def __call__(
        self,
        family: ExponentialFamily,
        eta: Tensor,
        log_density: LogDensity,
        control: Tensor,
        generator: torch.Generator | None = None,
    ) -> Expectation:
        """E ℓ and ∇_ξ E ℓ at η."""


@dataclass(frozen=True)
class Sampled(Estimator):
    """From values of ℓ alone, which need not be differentiable."""

    samples: int = 64

    def __post_init__(self) -> None:
        _check_samples(self, self.samples, 2)

    @abstractmethod
    def coefficients(self, family: ExponentialFamily, eta: Tensor, t: Tensor, rest: Tensor) -> Tensor:
        """∇_ξ E of the rest, of whose values [s *batch] the mean is 0, at the statistics t of the samples."""

    def __call__(
        self,
        family: ExponentialFamily,
        eta: Tensor,
        log_density: LogDensity,
        control: Tensor,
        generator: torch.Generator | None = None,
    ) -> Expectation:
        with torch.no_grad():
            t, rest = _rest(log_density, family.sample(eta, (self.samples,), generator), family, eta, control)
            slope = self.coefficients(family, eta, t, rest - rest.mean(0))
            return Expectation(rest.mean(0) + family.pair(control, family.mean(eta)), control + slope)


@final
@dataclass(frozen=True)
class Score(Sampled):
    """F⁻¹ Cov(t, ℓ) with the exact F and the covariance of the samples: the score-function gradient, unbiased.

    >>> from natgrad.families import Poisson
    >>> at, zero = torch.tensor(0.0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    >>> found = Score(100000)(Poisson(), at, lambda z: 3.0 * z, zero, torch.Generator().manual_seed(0))
    >>> bool((found.gradient - 3.0).abs() < 0.1)
    True
    """

    def coefficients(self, family: ExponentialFamily, eta: Tensor, t: Tensor, rest: Tensor) -> Tensor:
        weight = rest.unsqueeze(-1) if family.axes else rest
        return family.fisher(eta).sharp((t * weight).sum(0) / (self.samples - 1))


@final
@dataclass(frozen=True)
class Regression(Sampled):
    """The coefficients of the least-squares fit of ℓ by t: F and Cov(t, ℓ) from the same samples (Salimans 2013).

    Exact where ℓ is linear in t (a conjugate model), with as few samples as t has independent entries and one more.
    Else its bias is of order 1/samples, and its noise far below that of ``Score``. In directions of t in which all
    samples agree (a class that was never drawn) nothing is learned, and the gradient is that of the control.

    >>> from natgrad.families import Poisson
    >>> at, zero = torch.tensor(0.0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    >>> Regression(20)(Poisson(), at, lambda z: 3.0 * z, zero).gradient.round(decimals=9)
    tensor(3., dtype=torch.float64)
    """

    def coefficients(self, family: ExponentialFamily, eta: Tensor, t: Tensor, rest: Tensor) -> Tensor:
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
        found = (_least_squares(centred / scale, rest.movedim(0, -1).unsqueeze(-1)) / scale.mT).squeeze(-1)
        return found if family.axes else found.squeeze(-1)


@final
@dataclass(frozen=True)
class Reparametrised(Estimator):
    """F⁻¹ E[(∂z/∂η)ᵀ∇ℓ(z)]: the gradient runs through the samples; ℓ must be differentiable, and z continuous.

    >>> from natgrad.families import DiagonalGaussian
    >>> at = torch.tensor([0.0, 1.0], dtype=torch.float64)  # N(0, 1)
    >>> found = Reparametrised(1000)(DiagonalGaussian(), at, lambda z: 2.0 * z.squeeze(-1), torch.zeros_like(at))
    >>> bool((found.gradient - torch.tensor([2.0, 0.0])).abs().max() < 0.5)
    True
    """

    samples: int = 16

    def __post_init__(self) -> None:
        _check_samples(self, self.samples, 1)

    def __call__(
        self,
        family: ExponentialFamily,
        eta: Tensor,
        log_density: LogDensity,
        control: Tensor,
        generator: torch.Generator | None = None,
    ) -> Expectation:
        with torch.enable_grad():
            leaf = eta.detach().requires_grad_()
            _, rest = _rest(log_density, family.rsample(leaf, (self.samples,), generator), family, eta, control)
            (slope,) = torch.autograd.grad(rest.mean(0).sum(), leaf)
        eta, value = eta.detach(), rest.detach().mean(0)
        return Expectation(value + family.pair(control, family.mean(eta)), control + family.fisher(eta).sharp(slope))


def expected(
    family: ExponentialFamily,
    eta: Tensor,
    log_density: LogDensity,
    control: Tensor,
    samples: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """E ℓ [*batch] alone; the part ⟨c, t⟩ of ℓ has no noise."""
    with torch.no_grad():
        _, rest = _rest(log_density, family.sample(eta, (samples,), generator), family, eta, control)
        return rest.mean(0) + family.pair(control, family.mean(eta))


def _least_squares(t: Tensor, right: Tensor) -> Tensor:
    """The solution of least norm [*batch p 1] of t b = right: entries of t that are equal share their coefficient."""
    U, σ, Vh = torch.linalg.svd(t, full_matrices=False)
    large = σ > σ[..., :1] * max(t.shape[-2:]) * torch.finfo(t.dtype).eps
    inverse = torch.where(large, σ, 1.0).reciprocal() * large
    return Vh.mT @ (inverse.unsqueeze(-1) * (U.mT @ right))


def _rest(
    log_density: LogDensity, z: Tensor, family: ExponentialFamily, eta: Tensor, control: Tensor
) -> tuple[Tensor, Tensor]:
    """t(z), and ℓ(z) − ⟨c, t(z)⟩ [s *batch]."""
    t = family.statistics(z)
    return t, _values(log_density, z, family, eta) - family.pair(control, t)


def _values(log_density: LogDensity, z: Tensor, family: ExponentialFamily, eta: Tensor) -> Tensor:
    """ℓ(z) [s *batch], checked."""
    values = log_density(z)
    check_shape(values, (z.shape[0], *eta.shape[: eta.ndim - family.axes]), z)
    if values.device.type != "cuda" and not bool(values.isfinite().all()):
        s = int((~values.isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.isfinite()).nonzero()[0, 0])
        raise NonFiniteError(
            f"the log-density is not finite at sample {s} of q ({type(family).__name__}): it must be defined on all of "
            "its support. Nothing was changed"
        )
    return values


def check_shape(values: Tensor, shape: tuple[int, ...], z: Tensor) -> None:
    """Refuse values of a log-density that are not one number for every sample and every member of the batch."""
    if values.shape != shape:
        raise ValueError(
            f"the log-density must return one number for every sample, {tuple(shape)}, for z {tuple(z.shape)}; "
            f"it returned {tuple(values.shape)}: sum over the data, and over nothing else"
        )


def _check_samples(estimator: Estimator, samples: int, least: int) -> None:
    if samples < least:
        raise ValueError(f"{type(estimator).__name__}(samples={samples}) needs {least} or more")
