"""The two coordinate systems of an exponential family: natural parameters η, and mean parameters ξ = ∇log Z(η)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.families.domain import Domain
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.information import Information


class Chart(ABC):
    """Coordinates x of the members of an exponential family; a point has the shape that the family gives it."""

    @property
    @abstractmethod
    def symbol(self) -> str:
        """Its letter, for messages."""

    @property
    @abstractmethod
    def other(self) -> Chart:
        """The dual coordinates."""

    @abstractmethod
    def natural(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        """η of the member with the coordinates x."""

    @abstractmethod
    def mean(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        """ξ of the member with the coordinates x."""

    @abstractmethod
    def across(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        """The coordinates of the same member in the other chart, differentiable."""

    @abstractmethod
    def domain(self, family: ExponentialFamily) -> Domain:
        """Where x may lie."""

    @abstractmethod
    def fisher(self, family: ExponentialFamily, x: Tensor) -> Information:
        """The Fisher information in these coordinates; it is the Jacobian of ``across`` (002 (19))."""


@final
@dataclass(frozen=True)
class NaturalChart(Chart):
    """x = η, with ξ = ∇log Z(η) across and F_η = ∇²log Z (002 (13), (17))."""

    @property
    def symbol(self) -> str:
        return "η"

    @property
    def other(self) -> Chart:
        return MeanChart()

    def natural(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return x

    def mean(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return family.mean(x)

    def across(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return family.mean(x)

    def domain(self, family: ExponentialFamily) -> Domain:
        return family.natural_domain

    def fisher(self, family: ExponentialFamily, x: Tensor) -> Information:
        return family.fisher(x)


@final
@dataclass(frozen=True)
class MeanChart(Chart):
    """x = ξ = E t, with η across and F_ξ = F_η⁻¹ (002 (19))."""

    @property
    def symbol(self) -> str:
        return "ξ"

    @property
    def other(self) -> Chart:
        return NaturalChart()

    def natural(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return family.natural(x)

    def mean(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return x

    def across(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return family.natural(x)

    def domain(self, family: ExponentialFamily) -> Domain:
        return family.mean_domain

    def fisher(self, family: ExponentialFamily, x: Tensor) -> Information:
        return family.fisher_mean(x)


def in_other_chart(
    objective: Callable[[Tensor], Tensor], family: ExponentialFamily, chart: Chart
) -> Callable[[Tensor], Tensor]:
    """An objective of points of a chart, as a function of the other: J_ξ(ξ) = J_η(η(ξ)) (002 section 4.1).

    >>> import torch
    >>> from natgrad.families import Poisson
    >>> in_other_chart(lambda xi: xi, Poisson(), MeanChart())(torch.tensor(0.0))  # ξ = e^η
    tensor(1.)
    """
    return lambda z: objective(chart.other.across(family, z))
