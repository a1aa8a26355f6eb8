"""Reproducing kernels of Sobolev spaces (Matérn kernels), and rules for their lengthscale."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import can_read, in_transform
from natgrad.accelerate.temporaries import BESSEL_VALUES, KERNEL_VALUES, at_once
from natgrad.errors import MemoryBoundError
from natgrad.kernels.distances import FeatureMap, check_features, pairwise, points, squared_distances
from natgrad.kernels.matern import matern
from natgrad.linalg import check_number_fields, check_positive, is_number

_GRID, _ROUNDS = 16, 6  # lengthscales tried at once, and how often the interval is refined
_MEMORY = 2**32  # bytes of distances and temporaries


class Lengthscale(ABC):
    """A rule that computes ℓ from points."""

    @abstractmethod
    def of(self, points: Tensor) -> Tensor:
        """ℓ > 0, one number, from points [n d]. Reads nothing back from the device."""


@final
@dataclass(frozen=True)
class Median(Lengthscale):
    """A lengthscale from the median distance between the inputs.

    Args:
        divisor: What the median distance is divided by.

    Method:
        Pairs of equal points are left out. If all points are equal, the kernel is 1 for every ℓ, and ℓ = 1. For an even
        number of distances, the lower median is used. Bai, Rosenberg and Xu (2022) divide CIFAR images by 20, about a
        quarter of their median distance: ``Median(divisor=4)``.

    Example:
        >>> Median().of(torch.tensor([[0.0], [1.0], [3.0]]))
        tensor(2.)
    """

    divisor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.divisor, "Median(divisor=…)", ": the median distance is divided by a positive number")

    def of(self, points: Tensor) -> Tensor:
        u = _pairs(self, points)
        # Every pair occurs twice, which does not change the median.
        median = u.masked_fill_(u == 0, torch.nan).nanmedian().sqrt()
        return torch.where(median.isnan(), 1.0, median / float(self.divisor)).to(points.dtype)


@final
@dataclass(frozen=True)
class Alike(Lengthscale):
    """A lengthscale that keeps the mean similarity of the inputs, however these are scaled.

    Args:
        value: The mean of k over all pairs of distinct points.
        nu: The smoothness ν of the kernel k.

    Method:
        ℓ is such that the mean of k(‖x_n − x_m‖/ℓ) is ``value``. λ_max(K) is then at least 1 + (N − 1)·value, and about
        that if the points are spread evenly. CIFAR images with ℓ = 20 and ν = 3/2 have a mean of about 0.1.

        Pairs of equal points are left out; if all points are equal, ℓ = 1.

        The mean reaches ``value`` between ℓ = min d/r and max d/r, where k(r) = value. Nested grids find it there to a
        relative accuracy of 1e-6, without reading anything back from the device.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [3.0]])
        >>> ℓ = Alike(0.3, nu=0.5).of(x)
        >>> torch.exp(-torch.tensor([1.0, 2.0, 3.0]) / ℓ).mean()
        tensor(0.3000)
    """

    value: float = 0.1
    nu: float = 1.5

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not 0 < self.value < 1:
            raise ValueError(f"Alike(value={self.value}): the mean of a kernel between 0 and 1 lies between 0 and 1")
        check_positive(self.nu, "Alike(nu=…)", ": the smoothness of the kernel is a positive number")

    def of(self, points: Tensor) -> Tensor:
        u = _pairs(self, points)
        apart = u > 0
        r = self._radius
        low = (u.where(apart, torch.inf).amin().sqrt() / r).log()
        high = (u.amax().sqrt() / r).log()
        steps, wanted = torch.linspace(0, 1, _GRID, dtype=u.dtype, device=u.device), float(self.value) * apart.sum()
        for _ in range(_ROUNDS):
            tried = low + (high - low) * steps  # [g], increasing means
            sums = [self._sums(u, apart, ℓ) for ℓ in tried.exp().split(at_once(u.numel(), KERNEL_VALUES))]
            below = (torch.cat(sums) < wanted).sum().clamp(1, _GRID - 1)
            low, high = tried.gather(0, torch.stack([below - 1, below])).unbind()
        return torch.where(apart.any(), ((low + high) / 2).exp(), 1.0).to(points.dtype)

    def _sums(self, u: Tensor, apart: Tensor, lengthscales: Tensor) -> Tensor:
        """Σ k over pairs of distinct points [g], for lengthscales [g]."""
        step, total, square = at_once(len(u), KERNEL_VALUES), torch.zeros_like(lengthscales), lengthscales.square()
        for rows, pairs in zip(u.split(step), apart.split(step), strict=True):
            total = total + matern(float(self.nu), rows / square.view(-1, 1, 1)).where(pairs, 0).sum((1, 2))
        return total

    @cached_property
    def _radius(self) -> float:
        """r with k(r) = value, by bisection."""
        low, high, value = 0.0, 1.0, float(self.value)
        while self._profile(high) > value:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._profile(middle) > value else (low, middle)
        return high

    def _profile(self, r: float) -> float:
        return float(matern(float(self.nu), torch.tensor([r * r], dtype=torch.float64)))


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


def _pairs(rule: Lengthscale, points: Tensor) -> Tensor:
    """The squared distances [n n] within a set of points, in double precision, within a memory bound.

    Squares overflow single precision long before distances do. Overflow of double precision raises an error. On a GPU,
    where the check would make the host wait, the result is NaN, which steps report.
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
    if can_read(u) and bool(u.isinf().any()) and bool(x.isfinite().all()):
        raise ValueError(
            f"{rule!r} cannot measure points that are {float(x.amax() - x.amin()):.3g} apart in a coordinate: the "
            "squares of their distances are infinite. Scale the inputs, or give features= that does"
        )
    return u


_SMALL = 1e-15  # lengthscales below it have squares that underflow in single precision


class ReproducingKernel(ABC):
    """The base class of reproducing kernels, which define a Hilbert space of functions.

    Sums, products and positive multiples of kernels are kernels: ``2 * a + b``, ``a * b``. The product of a kernel of
    some inputs and one of others (by their ``features``) is that of functions of both.

    Method:
        K with ⟨K(x, ·), f⟩ = f(x) for every f in its Hilbert space of functions.

        Functions with several outputs have the kernel K(x, y) δ_ij: each output separately.

    Example:
        >>> rough, smooth = SobolevKernel(0.5), SobolevKernel(2.5)
        >>> (0.5 * rough + 0.5 * smooth)(torch.tensor([0.0, 1.0]))
        tensor([[1.0000, 0.6131],
                [0.6131, 1.0000]])
    """

    @abstractmethod
    def __call__(self, x: Any, y: Any = None) -> Tensor:
        """K [n m] between inputs x [n *shape] and y [m *shape]; y = None is x itself: the Gram matrix [n n]."""

    def at(self, x: Any) -> ReproducingKernel:
        """The same kernel, with what depends on data (a lengthscale) measured on x and then fixed."""
        return self

    def __add__(self, other: ReproducingKernel) -> ReproducingKernel:
        return _Combined((self, other), torch.add) if isinstance(other, ReproducingKernel) else NotImplemented

    def __mul__(self, other: ReproducingKernel | float) -> ReproducingKernel:
        if isinstance(other, ReproducingKernel):
            return _Combined((self, other), torch.mul)
        check_positive(other, "the factor of a kernel", ": a negative multiple is no kernel")
        return _Combined((self, _Constant(other)), torch.mul)

    __rmul__ = __mul__


@final
@dataclass(frozen=True)
class _Combined(ReproducingKernel):
    parts: tuple[ReproducingKernel, ReproducingKernel]
    by: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Any, y: Any = None) -> Tensor:
        return self.by(self.parts[0](x, y), self.parts[1](x, y))

    def at(self, x: Any) -> ReproducingKernel:
        return replace(self, parts=(self.parts[0].at(x), self.parts[1].at(x)))


@final
@dataclass(frozen=True)
class _Constant(ReproducingKernel):
    """c for all pairs of points, as a tensor that broadcasts."""

    value: float

    def __call__(self, x: Any, y: Any = None) -> Tensor:
        return torch.tensor(float(self.value), dtype=torch.float64)


@final
@dataclass(frozen=True)
class SobolevKernel(ReproducingKernel):
    """The reproducing kernel of a Sobolev space, for any smoothness: Matérn's kernel.

    Args:
        nu: The smoothness ν > 0, any real number.
        lengthscale: ℓ, a positive number, or a rule such as ``Median()`` that ``at(x)`` measures.
        normalised: Whether k(0) = 1. False multiplies by the constant of the space, which underflows in high dimension;
            ``log_constant`` does not.
        features: Maps inputs that are not points (tokens) to points.

    Method:
            K(x, y) = k(‖x − y‖/ℓ),   k(r) = 2^{1−ν}/Γ(ν) r^ν K_ν(r),   k(0) = 1

        This is the space of order ν + d/2 on R^d. For ν = ½, 3/2, 5/2 k is e^{−r}, e^{−r}(1 + r), e^{−r}(1 + r + r²/3),
        without the factor √(2ν) of many other Matérn kernels.

        Bai, Rosenberg and Xu (2022) use ν = 3/2 and ℓ = 20, and write the space as H_s with s = d + 2ν. For every ν > 0
        it consists of continuous functions, in any dimension. Its constant is ∫(1 + |ξ|²)^{−s/2}dξ/(2π)^d, for
        functions of x/ℓ (the paper prints other values, which are wrong).

        Inputs [n *shape] are flattened; n numbers are points on a line.

        It is differentiable in the points m times if 2ν > m, also at equal points. First derivatives at equal points
        are 0 for every ν. Distances below 10⁻¹⁵⁰ count as 0 (below 10⁻²² for ν ≥ 1 in single precision, which has no
        effect).

    Example:
        >>> kernel = SobolevKernel(1.5)
        >>> kernel(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
        tensor([[1.0000, 0.7358],
                [0.7358, 1.0000]])
        >>> SobolevKernel(2.2)(torch.zeros(4, 3, 32, 32), torch.ones(2, 3, 32, 32)).shape
        torch.Size([4, 2])
    """

    nu: float
    lengthscale: float | Tensor | Lengthscale = 1.0
    normalised: bool = True
    features: FeatureMap | None = None

    def __post_init__(self) -> None:
        check_smoothness(self.nu)
        check_lengthscale(self.lengthscale)
        self._check_alike()
        check_features(self.features)

    def __call__(self, x: Any, y: Any = None) -> Tensor:
        a = points(x, self.features)
        b = a if y is None else points(y, self.features)
        ℓ, ν = self._lengthscale(a, y is not None), float(self.nu)
        if not _differentiated(a, b, ℓ):
            return self._values(a, None if y is None else b, ℓ)
        # k' is about r^{2ν−2} near r = 0: its factors may underflow in single precision.
        wide = (a.double(), b.double()) if ν < 1 or self._extreme else (a, b)
        u = squared_distances(*wide) / ℓ / ℓ
        if y is not None or not u.requires_grad:
            return (self._constant(a) * matern(ν, u)).to(torch.promote_types(a.dtype, b.dtype))
        # A point is always at distance 0 from itself, so the diagonal is constant for every ν.
        diagonal = torch.eye(a.shape[0], dtype=torch.bool, device=a.device)
        k = matern(ν, u.masked_fill(diagonal, 1.0))
        return (self._constant(a) * k.masked_fill(diagonal, 1.0)).to(a.dtype)

    def _values(self, a: Tensor, b: Tensor | None, ℓ: float | Tensor) -> Tensor:
        """K [n m] without derivatives, a few rows at a time; within one set of points each pair once.

        Beside K it needs a few temporaries of ``BESSEL_VALUES`` numbers.
        """
        ν, constant = float(self.nu), self._constant(a)
        n, m = len(a), len(a if b is None else b)
        dtype = a.dtype if b is None else torch.promote_types(a.dtype, b.dtype)
        # r^{2ν} matters where r² underflows in single precision.
        double = ν < 0.5 or self._extreme
        wide = a.double() if double else a
        other = wide if b is None else b.double() if double else b
        if n * m <= BESSEL_VALUES:
            u = pairwise(wide) if b is None else squared_distances(wide, other)
            return matern(ν, u / ℓ / ℓ).mul_(constant).to(dtype)
        K = torch.empty(n, m, dtype=dtype, device=a.device)
        step = at_once(m, BESSEL_VALUES)
        for start in range(0, n, step):
            rows, columns = slice(start, start + step), slice(0 if b is not None else start, None)
            u = squared_distances(wide[rows], other[columns])
            K[rows, columns] = matern(ν, u.div_(ℓ).div_(ℓ)).mul_(constant)
            if b is None:
                K[columns, rows] = K[rows, columns].T
        return K

    def at(self, x: Any) -> SobolevKernel:
        """The kernel with its lengthscale measured on x, for use on other points.

        >>> from natgrad.functionspace import Median
        >>> kernel = SobolevKernel(0.5, lengthscale=Median()).at(torch.tensor([0.0, 1.0, 3.0]))
        >>> kernel(torch.tensor([0.0]), torch.tensor([2.0]))  # exp(−2/2)
        tensor([[0.3679]])
        """
        if not isinstance(self.lengthscale, Lengthscale):
            return self
        z = points(x, self.features)
        if not bool((z != z[:1]).any()):
            raise ValueError(
                f"lengthscale={self.lengthscale!r} cannot be told from {len(z)} equal point(s), and is for others "
                "too: give a number as the lengthscale, or points that differ (to fit, or to the first partial_fit)"
            )
        return replace(self, lengthscale=float(self.lengthscale.of(z)))

    def log_constant(self, dimension: int) -> float:
        """log K(x, x) without normalisation: log Γ(ν) − (d/2) log 4π − log Γ(ν + d/2), for x in R^d.

        >>> round(SobolevKernel(1.5).log_constant(784), 3)
        -2947.908
        """
        if not is_number(dimension, whole=True) or dimension < 1:
            raise ValueError(
                f"dimension={dimension!r} must be a positive integer: the number of coordinates of a point"
            )
        half = dimension / 2
        return math.lgamma(self.nu) - half * math.log(4 * math.pi) - math.lgamma(self.nu + half)

    def _check_alike(self) -> None:
        if isinstance(self.lengthscale, Alike) and self.lengthscale.nu != self.nu:
            raise ValueError(
                f"lengthscale={self.lengthscale!r} keeps the mean of a kernel of another smoothness than ν = "
                f"{self.nu:g}: give Alike({self.lengthscale.value:g}, nu={self.nu:g})"
            )

    def _constant(self, x: Tensor) -> float:
        if self.normalised:
            return 1.0
        log_constant = self.log_constant(x.shape[1])
        if log_constant < math.log(torch.finfo(x.dtype).tiny):
            raise ValueError(
                f"in dimension {x.shape[1]} the constant of the Sobolev space is e^{log_constant:.0f}, which is zero "
                f"in {x.dtype}. Use normalised=True, and log_constant({x.shape[1]}) where the constant matters"
            )
        return math.exp(log_constant)

    @property
    def _extreme(self) -> bool:
        """Whether r² or ℓ² may overflow or underflow in single precision although r/ℓ does not."""
        ℓ = self.lengthscale
        if isinstance(ℓ, Lengthscale):
            return True  # it may be anything
        if isinstance(ℓ, Tensor):  # one that the host cannot read without waiting is taken for an ordinary one
            return can_read(ℓ) and not _SMALL < float(ℓ.detach()) < 1 / _SMALL
        return not _SMALL < float(ℓ) < 1 / _SMALL

    def _lengthscale(self, x: Tensor, other: bool) -> float | Tensor:
        if isinstance(self.lengthscale, Tensor):
            return self.lengthscale
        if not isinstance(self.lengthscale, Lengthscale):
            return float(self.lengthscale)
        if other:
            raise ValueError(
                f"lengthscale={self.lengthscale!r} is measured on data, and two sets of points were given: say which "
                "by kernel = kernel.at(x), and use that"
            )
        return self.lengthscale.of(x)


def _differentiated(a: Tensor, b: Tensor, ℓ: float | Tensor) -> bool:
    """Whether derivatives may be needed, in reverse or forward mode."""
    if in_transform():
        return True
    tensors = (a, b, ℓ) if isinstance(ℓ, Tensor) else (a, b)
    forward = any(torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    return forward or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def check_smoothness(nu: float) -> None:
    """Refuse a smoothness for which H_s is not a space of continuous functions."""
    if not is_number(nu):
        raise TypeError(f"nu={nu!r}: the smoothness is a real number")
    if not (math.isfinite(nu) and nu > 0):
        raise ValueError(
            f"nu={nu!r} must be positive and finite: H_s(R^d) with s = d + 2ν has a reproducing kernel only for ν > 0 "
            "(1.5 is the paper's)"
        )
