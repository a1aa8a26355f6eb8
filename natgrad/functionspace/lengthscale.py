"""How far apart two points must be to be unlike: the lengthscale ℓ of a kernel, given or measured on the data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.functionspace.distances import squared_distances


class Lengthscale(ABC):
    """A rule that finds ℓ from points."""

    @abstractmethod
    def of(self, points: Tensor) -> Tensor:
        """ℓ > 0, one number, from points [n d]; no value is read back from the device."""


@final
@dataclass(frozen=True)
class Median(Lengthscale):
    """ℓ = the median distance between distinct points, over ``divisor``: the median rule.

    Equal points say nothing about scale and are left out. Where all points are equal (or there is one), the kernel
    is 1 whatever ℓ is, and ℓ = 1. Of an even number of distances the lower of the middle two is taken. Paper 000
    divides CIFAR images by 20, about a quarter of their median distance: ``Median(divisor=4)`` (ERRATA 14 and D).

    >>> Median().of(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor(2.)
    """

    divisor: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.divisor) and self.divisor > 0):
            raise ValueError(f"Median(divisor={self.divisor}): the median distance is divided by a positive number")

    def of(self, points: Tensor) -> Tensor:
        x = points.detach()
        u = squared_distances(x, x)
        median = u.where(u > 0, torch.nan).nanmedian().sqrt()  # every pair is there twice, which moves no median
        return torch.where(median.isnan(), 1.0, median / self.divisor)


@final
@dataclass(frozen=True)
class Measured(Lengthscale):
    """ℓ that a rule has found on some points, kept for others."""

    value: Tensor

    def of(self, points: Tensor) -> Tensor:
        return self.value


def check_lengthscale(lengthscale: float | Tensor | Lengthscale) -> None:
    """Refuse what is neither a positive number nor a rule."""
    if isinstance(lengthscale, Lengthscale):
        return
    if isinstance(lengthscale, bool) or not isinstance(lengthscale, (int, float, Tensor)):
        raise TypeError(f"lengthscale={lengthscale!r}: give a positive number, or a rule such as Median()")
    if isinstance(lengthscale, Tensor) and (lengthscale.ndim > 0 or not lengthscale.is_floating_point()):
        raise TypeError(
            f"lengthscale is a tensor {lengthscale.dtype} of shape {tuple(lengthscale.shape)}: it must be one real "
            "number. Scale the inputs by features= for a lengthscale a coordinate"
        )
    value = float(lengthscale.detach() if isinstance(lengthscale, Tensor) else lengthscale)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"lengthscale={value:g} must be positive and finite: distances are divided by it")
