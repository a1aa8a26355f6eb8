"""Members of exponential families as modules, and maximum likelihood from a stream of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from natgrad.errors import DomainError
from natgrad.families.base import ExponentialFamily
from natgrad.mirror.charts import Chart, NaturalChart
from natgrad.model import check_slots
from natgrad.show import brief

_NATURAL = NaturalChart()


@final
class Member(nn.Module):
    """A distribution of an exponential family as a module, with its coordinates as parameter.

    Gradients are with respect to the coordinates of ``chart``; ``natural()`` and ``mean()`` are differentiable in
    either. Train it with ``ng.MirrorDescent``, which keeps it in its domain.

    Args:
        family: The exponential family.
        point: The first coordinates [*batch *point]; a batch is a batch of members.
        chart: The coordinates of ``point``: ``NaturalChart()``, the default, or ``MeanChart()``.

    Example:
        >>> import torch
        >>> from natgrad.families import Poisson
        >>> rate = Member(Poisson(), torch.tensor([0.0, 1.0]))
        >>> rate.mean()
        tensor([1.0000, 2.7183], grad_fn=<ExpBackward0>)
    """

    def __init__(self, family: ExponentialFamily, point: Tensor, chart: Chart = _NATURAL) -> None:
        super().__init__()
        check_slots(family=(family, ExponentialFamily), chart=(chart, Chart))
        self.family: ExponentialFamily = family
        self.chart: Chart = chart
        chart.domain(family).check(point.detach(), f"{chart.symbol} of {type(family).__name__}, at ")
        chart.across(family, point.detach())  # refuses a wrong shape
        self.point: nn.Parameter = nn.Parameter(point.detach().clone())

    def natural(self) -> Tensor:
        """η."""
        return self.chart.natural(self.family, self.point)

    def mean(self) -> Tensor:
        """ξ."""
        return self.chart.mean(self.family, self.point)

    def forward(self) -> Distribution:
        """The distribution, as a torch.distributions object."""
        return self.family.distribution(self.natural())

    def extra_repr(self) -> str:
        return f"{self.family!r}, {self.chart.symbol} {tuple(self.point.shape)}"


@final
@dataclass(frozen=True)
class Online:
    """Maximum likelihood from a stream of data, one step of natural gradient per datum.

    The moments of the first few data may lie on the boundary of the domain, where there is no η: ``eta`` then raises.
    Without data, ``Online(family, xi, count)`` is a prior worth ``count`` data.

    Args:
        family: The exponential family.
        xi: The present estimate, in mean parameters.
        count: The number of data that it stands for.

    Method:
        ξ ← ξ − α_k(ξ − t(x)): mirror descent on −log p(x), which is natural gradient in ξ (Grosse 2021, section 4.2).

        With α_k = 1/(k + 1) after k data, ξ is the mean of t over all of them, and p_ξ the maximum likelihood estimate,
        whose variance reaches the Cramér–Rao bound F⁻¹/k in the limit.

    Example:
        >>> import torch
        >>> from natgrad.families import Poisson
        >>> estimate = Online.of(Poisson(), torch.tensor([3.0]))
        >>> for x in (1.0, 4.0, 1.0):
        ...     estimate = estimate.update(torch.tensor([x]))
        >>> estimate.xi, estimate.count
        (tensor(2.2500), 4)
    """

    family: ExponentialFamily
    xi: Tensor
    count: float

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.count > 0:
            raise ValueError(
                f"count={self.count!r} must be positive: the number of data that ξ is worth; Online.of starts from data"
            )

    @staticmethod
    def of(family: ExponentialFamily, x: Tensor) -> Online:
        """The estimate from the first data x [n *batch *event]."""
        return Online(family, _mean(family, x, torch.get_default_dtype()), len(x))

    def update(self, x: Tensor) -> Online:
        """The estimate with more data x [n *batch *event]: one step, of size n/(k + n)."""
        t = _mean(self.family, x, self.xi.dtype)
        if t.shape != self.xi.shape:
            raise ValueError(
                f"the statistics of the data have shape {tuple(t.shape)} and ξ has {tuple(self.xi.shape)}: data are "
                "[n *batch *event], with the batch of the estimate"
            )
        n = len(x)
        return Online(self.family, self.xi - n / (self.count + n) * (self.xi - t), self.count + n)

    @property
    def eta(self) -> Tensor:
        """η of the estimate; raises while the data are too few, or too similar, to determine one."""
        try:
            self.family.mean_domain.check(self.xi, "ξ")
        except DomainError as error:
            raise DomainError(
                f"{type(self.family).__name__} has no member with the moments of these {self.count:g} data: the "
                f"likelihood has no maximum inside the family ({error}). Wait for more data, or start from a prior, "
                "Online(family, xi, count)"
            ) from error
        return self.family.natural(self.xi)


def _mean(family: ExponentialFamily, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean of the statistics [*batch *point], of integers in this dtype."""
    if x.ndim == 0 or not len(x):
        raise ValueError(f"data must be [n *batch *event] with n ≥ 1, got shape {tuple(x.shape)}")
    family.check_data(x)
    t = family.statistics(x)
    return t.mean(0) if t.is_floating_point() else t.double().mean(0).to(dtype)
