"""A member of an exponential family as a module: what is trained are its coordinates in a chart."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.distributions import Distribution

from natgrad.families.exponential import ExponentialFamily
from natgrad.mirror.charts import Chart, NaturalChart
from natgrad.slots import check_slots

_NATURAL = NaturalChart()


@final
class Member(nn.Module):
    """p_η with its coordinates x [*batch *point] as the parameter ``point``; a batch is a batch of members.

    The gradient of a loss is with respect to the coordinates of ``chart``; ``natural()`` and ``mean()`` are
    differentiable whichever it is. Train it with ``MirrorDescent``, which keeps it in its domain.

    >>> import torch
    >>> from natgrad.families import Poisson
    >>> rate = Member(Poisson(), torch.tensor([0.0, 1.0]))
    >>> rate.mean()
    tensor([1.0000, 2.7183], grad_fn=<ExpBackward0>)
    """

    def __init__(self, family: ExponentialFamily, point: Tensor, chart: Chart = _NATURAL) -> None:
        super().__init__()
        check_slots(family=(family, ExponentialFamily), chart=(chart, Chart))
        self.family, self.chart = family, chart
        chart.domain(family).check(point.detach(), f"{chart.symbol} of {type(family).__name__}, at ")
        chart.across(family, point.detach())  # which refuses a wrong shape
        self.point = nn.Parameter(point.detach().clone())

    def natural(self) -> Tensor:
        """η."""
        return self.chart.natural(self.family, self.point)

    def mean(self) -> Tensor:
        """ξ."""
        return self.chart.mean(self.family, self.point)

    def forward(self) -> Distribution:
        """The distribution, as torch.distributions has it."""
        return self.family.distribution(self.natural())

    def extra_repr(self) -> str:
        return f"{self.family!r}, {self.chart.symbol} {tuple(self.point.shape)}"
