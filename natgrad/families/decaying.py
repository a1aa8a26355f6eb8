"""Families of one number η < 0 whose statistic has a mean in (0, ∞): what they share."""

from __future__ import annotations

from torch import Tensor

from natgrad.families.domain import Domain, Interval
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.information import Information, Scalar


class Decaying(ExponentialFamily):
    """e^{η t(x)} with t ≥ 0 can be normalised for η < 0 only."""

    @property
    def axes(self) -> int:
        return 0

    @property
    def natural_domain(self) -> Domain:
        return Interval(upper=0.0)

    @property
    def mean_domain(self) -> Domain:
        return Interval(0.0)


class ExponentialStatistic(Decaying):
    """t(x) is exponentially distributed: log Z = −log(−η) up to a constant, ξ = −1/η, G = 1/η²."""

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -(-eta).log()

    def _mean(self, eta: Tensor) -> Tensor:
        return -1 / eta

    def _natural(self, xi: Tensor) -> Tensor:
        return -1 / xi

    def _fisher(self, eta: Tensor) -> Information:
        return Scalar(eta.square().reciprocal())
