"""Mirror descent and natural gradient of exponential families, in either chart (002 section 4.1).

With λ = 1/lr the proximal steps of the linearised objective are explicit: the gradient is taken in one chart, and the
point moves in the other,

    argmin_u ⟨∇_ηJ, u⟩ + λ KL(p_η ‖ p_u)   is   ξ ← ξ − lr ∇_ηJ   (20),
    argmin_u ⟨∇_ξJ, u⟩ + λ KL(p_u ‖ p_ξ)   is   η ← η − lr ∇_ξJ   (21),

and either is a step of natural gradient in the chart that moves: F_ξ⁻¹∇_ξJ = ∇_ηJ (23), F_η⁻¹∇_ηJ = ∇_ξJ (22).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.errors import DomainError
from natgrad.families.domain import entry
from natgrad.families.exponential import ExponentialFamily
from natgrad.mirror.boundary import Boundary, Shorten
from natgrad.mirror.charts import Chart

_WHOLE = Shorten()


@final
@dataclass(frozen=True)
class Move:
    """A step of members of a family, all of which are in the domain.

    ``point``: where it leads, in the chart of the gradient. ``share`` [*batch]: how much of the step was taken, 1 where
    it is whole. ``reasons`` say why not; they are made when they are asked for, and wait for the device.
    """

    family: ExponentialFamily
    moved: Chart  # the chart in which the step is a straight line
    point: Tensor
    share: Tensor
    aim: Tensor  # where the whole step would have led, in the chart that moved

    @property
    def shortened(self) -> Tensor:
        """Of which members the step was cut [*batch], booleans."""
        return self.share < 1

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for every member whose step was shortened."""
        return tuple(self._reason(tuple(map(int, at))) for at in self.shortened.nonzero().tolist())

    def _reason(self, at: tuple[int, ...]) -> str:
        what = f"{self.moved.symbol} of {type(self.family).__name__}{entry(at)}, at "
        outside = ""
        try:
            self.moved.domain(self.family).check(self.aim[at], what)
        except DomainError as error:
            outside = str(error).split(": start inside")[0]
        return (
            f"{float(self.share[at]):.3g} of the step was taken, as the whole would leave the domain ({outside}): take "
            "shorter steps (a smaller lr)"
        )


def natural_gradient(family: ExponentialFamily, x: Tensor, ω: Tensor, chart: Chart) -> Tensor:
    """F⁻¹ω, of the gradient ω in a chart the natural gradient there: the plain gradient in the other (002 (22)–(23)).

    >>> import torch
    >>> from natgrad.families import Poisson
    >>> from natgrad.mirror import NaturalChart
    >>> eta, J = torch.tensor(0.5), lambda xi: xi**2  # of ξ = e^η: ∇_ηJ = 2ξ², ∇_ξJ = 2ξ
    >>> natural_gradient(Poisson(), eta, 2 * (2 * eta).exp(), NaturalChart()) - 2 * eta.exp()
    tensor(0.)
    """
    _alike(x, ω, chart)
    return chart.fisher(family, x).sharp(ω)


def mirror_step(
    family: ExponentialFamily, x: Tensor, ω: Tensor, lr: float | Tensor, chart: Chart, boundary: Boundary = _WHOLE
) -> Move:
    """From x, with the gradient ω in the same chart, a step in the other: 002 (20) for η, 002 (21) for ξ, lr = 1/λ.

    >>> import torch
    >>> from natgrad.families import Poisson
    >>> from natgrad.mirror import MeanChart
    >>> mirror_step(Poisson(), torch.tensor(1.0), torch.tensor(2.0), 0.5, MeanChart()).point  # η = 0 ← 0 − 1
    tensor(0.3679)
    """
    _alike(x, ω, chart)
    other = chart.other
    what = f"{other.symbol} of {type(family).__name__}, at "
    taken = boundary.take(other.domain(family), chart.across(family, x), -lr * ω, what)
    return Move(family, other, other.across(family, taken.point), taken.share, taken.aim)


def natural_step(
    family: ExponentialFamily, x: Tensor, ω: Tensor, lr: float | Tensor, chart: Chart, boundary: Boundary = _WHOLE
) -> Move:
    """x ← x − lr F⁻¹ω: natural gradient descent in the chart of the gradient itself (002 (10)).

    It is ``mirror_step`` from the other chart, where the gradient F⁻¹ω is plain.
    """
    what = f"{chart.symbol} of {type(family).__name__}, at "
    taken = boundary.take(chart.domain(family), x, -lr * natural_gradient(family, x, ω, chart), what)
    return Move(family, chart, taken.point, taken.share, taken.aim)


class Descent(ABC):
    """Which of the two steps is made from a gradient."""

    @abstractmethod
    def move(
        self, family: ExponentialFamily, x: Tensor, ω: Tensor, lr: float | Tensor, chart: Chart, boundary: Boundary
    ) -> Move:
        """The step from x with the gradient ω, both in one chart."""


@final
@dataclass(frozen=True)
class Mirror(Descent):
    """The other chart moves along the plain gradient of this one: no metric is inverted (``mirror_step``)."""

    def move(
        self, family: ExponentialFamily, x: Tensor, ω: Tensor, lr: float | Tensor, chart: Chart, boundary: Boundary
    ) -> Move:
        return mirror_step(family, x, ω, lr, chart, boundary)


@final
@dataclass(frozen=True)
class Natural(Descent):
    """This chart moves along its natural gradient (``natural_step``)."""

    def move(
        self, family: ExponentialFamily, x: Tensor, ω: Tensor, lr: float | Tensor, chart: Chart, boundary: Boundary
    ) -> Move:
        return natural_step(family, x, ω, lr, chart, boundary)


def _alike(x: Tensor, ω: Tensor, chart: Chart) -> None:
    if x.shape != ω.shape:
        raise ValueError(
            f"the gradient has shape {tuple(ω.shape)} and {chart.symbol} {tuple(x.shape)}: take it of one number, with "
            f"respect to {chart.symbol} itself"
        )
