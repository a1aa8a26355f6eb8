"""How far apart two points must be to be unlike: the lengthscale ℓ of a kernel, given or measured on the data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError
from natgrad.functionspace.distances import squared_distances
from natgrad.functionspace.profile import matern

_GRID, _ROUNDS = 16, 6  # lengthscales that are tried at once, and how often the interval between two is taken anew
_AT_ONCE = 2**20  # numbers, of kernels of several lengthscales, or of some rows of one
_MEMORY = 2**32  # bytes of distances, and of what is made of them


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
        _check_number("Median(divisor=…)", self.divisor, "the median distance is divided by it")
        if not (math.isfinite(self.divisor) and self.divisor > 0):
            raise ValueError(f"Median(divisor={self.divisor}): the median distance is divided by a positive number")

    def of(self, points: Tensor) -> Tensor:
        u = _pairs(self, points)
        median = u.masked_fill_(u == 0, torch.nan).nanmedian().sqrt()  # pairs are there twice, which moves no median
        return torch.where(median.isnan(), 1.0, median / float(self.divisor)).to(points.dtype)


@final
@dataclass(frozen=True)
class Alike(Lengthscale):
    """ℓ for which the mean of k(‖x_n − x_m‖/ℓ) over all pairs of distinct points is ``value``, k of smoothness ``nu``.

    Measured on every batch it adapts: however the inputs are scaled, spread, or change while features are learned, the
    kernel matrix stays as far from 1 as it was asked to be. λ_max(K) is at least 1 + (N − 1)·value then, and about that
    where the points are spread evenly. CIFAR images over 20 have a mean of about 0.1 with ν = 3/2 (ERRATA 14).

    Equal points are left out; where all are equal ℓ = 1. Between ℓ = min d/r and max d/r with k(r) = value the mean
    passes the value; it is found there to 1e-6 of ℓ by nested grids, and no value is read back from the device.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]])
    >>> ℓ = Alike(0.3, nu=0.5).of(x)
    >>> torch.exp(-torch.tensor([1.0, 2.0, 3.0]) / ℓ).mean()
    tensor(0.3000)
    """

    value: float = 0.1
    nu: float = 1.5

    def __post_init__(self) -> None:
        _check_number("Alike(value=…)", self.value, "it is the mean of the kernel")
        _check_number("Alike(nu=…)", self.nu, "it is the smoothness of the kernel")
        if not 0 < self.value < 1:
            raise ValueError(f"Alike(value={self.value}): the mean of a kernel between 0 and 1 lies between 0 and 1")
        if not (math.isfinite(self.nu) and self.nu > 0):
            raise ValueError(f"Alike(nu={self.nu}): the smoothness of the kernel is a positive number")

    def of(self, points: Tensor) -> Tensor:
        u = _pairs(self, points)
        apart = u > 0
        r = self._radius
        low = (u.where(apart, torch.inf).amin().sqrt() / r).log()
        high = (u.amax().sqrt() / r).log()
        steps, wanted = torch.linspace(0, 1, _GRID, dtype=u.dtype, device=u.device), float(self.value) * apart.sum()
        for _ in range(_ROUNDS):
            tried = low + (high - low) * steps  # [g], the mean grows along it
            sums = [self._sums(u, apart, ℓ) for ℓ in tried.exp().split(max(1, _AT_ONCE // u.numel()))]
            below = (torch.cat(sums) < wanted).sum().clamp(1, _GRID - 1)
            low, high = tried.gather(0, torch.stack([below - 1, below])).unbind()
        return torch.where(apart.any(), ((low + high) / 2).exp(), 1.0).to(points.dtype)

    def _sums(self, u: Tensor, apart: Tensor, lengthscales: Tensor) -> Tensor:
        """Σ k over the pairs that are apart [g], for lengthscales [g]."""
        step, total, square = max(1, _AT_ONCE // len(u)), torch.zeros_like(lengthscales), lengthscales.square()
        for rows, pairs in zip(u.split(step), apart.split(step), strict=True):
            total = total + matern(float(self.nu), rows / square.view(-1, 1, 1)).where(pairs, 0).sum((1, 2))
        return total

    @cached_property
    def _radius(self) -> float:
        """r with k(r) = value, by bisection; the points do not matter to it."""
        low, high, value = 0.0, 1.0, float(self.value)
        while self._profile(high) > value:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._profile(middle) > value else (low, middle)
        return high

    def _profile(self, r: float) -> float:
        return float(matern(float(self.nu), torch.tensor([r * r], dtype=torch.float64)))


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
    if not (isinstance(lengthscale, Tensor) or is_number(lengthscale)):
        raise TypeError(f"lengthscale={lengthscale!r}: give a positive number, or a rule such as Median()")
    if isinstance(lengthscale, Tensor) and (lengthscale.ndim > 0 or not lengthscale.is_floating_point()):
        raise TypeError(
            f"lengthscale is a tensor {lengthscale.dtype} of shape {tuple(lengthscale.shape)}: it must be one real "
            "number. Scale the inputs by features= for a lengthscale a coordinate"
        )
    value = float(lengthscale.detach() if isinstance(lengthscale, Tensor) else lengthscale)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"lengthscale={value:g} must be positive and finite: distances are divided by it")


def is_number(value: object) -> bool:
    """Whether it is a real number: of Python, of numpy, a fraction; True and False are none.

    >>> from fractions import Fraction
    >>> is_number(2), is_number(Fraction(3, 2)), is_number(True), is_number("2")
    (True, True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_number(where: str, value: object, why: str) -> None:
    if not is_number(value):
        raise TypeError(f"{where} got {value!r}: give a real number, {why}")


def _pairs(rule: Lengthscale, points: Tensor) -> Tensor:
    """The squared distances [n n] of the points among themselves, where they fit, in double precision.

    Squares leave the range of single precision long before distances do. What leaves that of double is refused, but on
    a GPU, which is not waited for: there it is NaN, which is reported where steps are checked.
    """
    x = points.detach().double()
    if x.ndim != 2 or len(x) == 0:
        raise ValueError(
            f"{rule!r} measures a lengthscale on points [n d], at least one, and got {tuple(x.shape)}: give a batch "
            "with examples in it, or a number as the lengthscale"
        )
    needed = 3 * len(x) ** 2 * x.element_size()
    if needed > _MEMORY:
        raise MemoryBoundError(
            f"{rule!r} needs {needed:,} bytes for the distances of {len(x):,} points, over {_MEMORY:,}: measure it on "
            "some of them, kernel = kernel.at(x[:1000]), or give a number as the lengthscale"
        )
    with torch.no_grad():
        u = squared_distances(x, x)
    if u.device.type == "cpu" and bool(u.isinf().any()) and bool(x.isfinite().all()):
        raise ValueError(
            f"{rule!r} cannot measure points that are {float(x.amax() - x.amin()):.3g} apart in a coordinate: the "
            "squares of their distances are infinite. Scale the inputs, or give features= that does"
        )
    return u
