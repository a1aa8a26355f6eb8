"""Natural gradient as a filter: a Gaussian belief about a state, which moves and is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.families.gaussian import FullGaussian, symmetric
from natgrad.geometry import value_and_differential
from natgrad.linalg import cholesky
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.show import brief

_GAUSSIAN = FullGaussian()


@final
@dataclass(frozen=True)
class Filter:
    """Estimate a state that moves from measurements that come one by one, by natural gradient.

    Args:
        mean: The estimate μ of the state [d].
        covariance: Its covariance Σ [d d]; directions that are known exactly may have none.

    Method:
        The belief N(μ, Σ) has the metric Σ⁻¹: the prior's, plus the metrics of all measurements so far (a mean of k of
        them with the step size 1/k is the same step: ``Refresh(decay=1)``). A measurement adds its metric G, pulled
        back through h, and moves μ by a natural-gradient step of size 1 on the loss:

            Σ⁻¹ ← Σ⁻¹ + G,   μ ← μ − Σ ∇_μ loss(h(μ))

        It is computed in the covariance form, Σ ← Σ − ΣRᵀ(1 + RΣRᵀ)⁻¹RΣ with G = RᵀR. For linear h and Gaussian noise
        this is the Kalman filter, for others the extended one (Ollivier 2018). In between the state may move.

    Example:
        >>> belief = Filter(torch.zeros(2), torch.eye(2))
        >>> belief = belief.predict(lambda s: s + torch.stack([s[1], 0 * s[1]]), 0.1 * torch.eye(2))
        >>> from natgrad.output import Euclidean
        >>> belief = belief.update(lambda s: s[:1], lambda y: 0.5 * (y - 3.0).square().sum(), Euclidean())
        >>> belief.mean, belief.covariance
        (tensor([2.0323, 0.9677]), tensor([[0.6774, 0.3226],
                [0.3226, 0.7774]]))
    """

    mean: Tensor
    covariance: Tensor

    __repr__ = brief

    def __post_init__(self) -> None:
        d = self.mean.shape[-1:]
        if self.mean.ndim != 1 or self.covariance.shape != (*d, *d):
            raise ValueError(
                f"a Filter has a mean [d] and a covariance [d d], got shapes {tuple(self.mean.shape)} and "
                f"{tuple(self.covariance.shape)}"
            )

    @property
    def eta(self) -> Tensor:
        """The same belief in natural parameters (h, vec Λ) of ``families.FullGaussian``: those of a product add up."""
        return _GAUSSIAN.from_covariance(self.mean, self.covariance)

    @staticmethod
    def of(eta: Tensor) -> Filter:
        """The belief with natural parameters of ``families.FullGaussian``."""
        return Filter(*_GAUSSIAN.covariance_form(eta))

    def predict(self, f: Callable[[Tensor], Tensor], noise: Tensor) -> Filter:
        """The belief after the state has moved by f, with Gaussian noise of covariance ``noise`` [d d] added.

        Σ ← FΣFᵀ + noise with F = ∂f/∂s at the mean: exact for affine f.
        """
        F = torch.func.jacrev(f)(self.mean)
        return Filter(f(self.mean).detach(), symmetric(F @ self.covariance @ F.mT + noise))

    def update(
        self, h: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor], metric: OutputMetric | Criterion
    ) -> Filter:
        """The belief after a measurement, by one natural-gradient step.

        ``h`` maps the state to the outputs [*out] that are measured, ``loss`` these to −log p of the datum, and
        ``metric`` is that of −log p, such as ``Fisher(family)`` or ``Bregman(φ)``.
        """
        y, pull = torch.func.vjp(h, self.mean)[:2]
        root = metric_of(metric).root(y.detach()[None])[:, 0]  # [k *out]
        return self._measured(torch.func.vmap(pull)(root)[0], pull(value_and_differential(loss, y)[1])[0])

    def product(self, other: Filter) -> Filter:
        """The normalised product of two densities, N(μ, Σ)·N(μ′, Σ′): two independent beliefs about one state."""
        L = cholesky(other.covariance, 0.0, "the covariance of the second belief")
        rows = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
        return self._measured(rows, rows.mT @ (rows @ (self.mean - other.mean)))

    def _measured(self, R: Tensor, ω: Tensor) -> Filter:
        """With the metric RᵀR added for R [k d], and a step along ω [d]."""
        RΣ = R @ self.covariance
        L = cholesky(symmetric(RΣ @ R.mT), 1.0, "the covariance of the measurement")
        half = torch.linalg.solve_triangular(L, RΣ, upper=False)
        Σ = symmetric(self.covariance - half.mT @ half)
        return Filter((self.mean - Σ @ ω).detach(), Σ.detach())
