"""Reproducing kernels: the Sobolev spaces H_s(R^d) of paper 000, that is, Matérn kernels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.functionspace.distances import Features, among, check_features, points, squared_distances
from natgrad.functionspace.lengthscale import Alike, Lengthscale, Measured, check_lengthscale, is_number
from natgrad.functionspace.profile import matern

_SMALL = 1e-15  # lengthscale, below which its square and those of distances like it are too small for single precision
_ELEMENTS = 2**18  # of a temporary; Bessel functions have twenty of them, in double precision


class ReproducingKernel(ABC):
    """K with ⟨K(x, ·), f⟩ = f(x) for every f of its Hilbert space of functions (000 section 4.2).

    Functions with several outputs have the kernel K(x, y) δ_ij: every output by itself (ERRATA 12).
    """

    @abstractmethod
    def __call__(self, x: Any, y: Any = None) -> Tensor:
        """K [n m] between inputs x [n *shape] and y [m *shape]; y = None is x itself: the Gram matrix [n n]."""

    def at(self, x: Any) -> ReproducingKernel:
        """The same kernel with everything that is measured on data (a lengthscale) measured on x, once and for all."""
        return self


@final
@dataclass(frozen=True)
class SobolevKernel(ReproducingKernel):
    """The reproducing kernel of the Sobolev space H_s(R^d), s = d + 2ν (000 lemma 8, (34)), of every real ν > 0:

        K(x, y) = k(‖x − y‖/ℓ),   k(r) = 2^{1−ν}/Γ(ν) r^ν K_ν(r),   k(0) = 1

    Half-integers in closed form: e^{−r}, e^{−r}(1 + r), e^{−r}(1 + r + r²/3) for ν = ½, 3/2, 5/2. There is no √(2ν) as
    in other Matérn kernels (ERRATA 7). Paper 000 uses ν = 3/2 (s = d + 3) and ℓ = 20. Its s is not the usual one: the
    space is the standard Sobolev space of order ν + d/2, and any ν > 0 makes it a space of continuous functions, in any
    dimension (ERRATA 5, 6).

    ``normalised=False`` multiplies by the constant of the space, ∫(1 + |ξ|²)^{−s/2}dξ/(2π)^d, for functions of x/ℓ;
    what (36)–(39) print for it is wrong (ERRATA 1, 2). It underflows in high dimension: ``log_constant`` does not.

    ``lengthscale``: a positive number, or a rule such as ``Median()``, which ``at(x)`` measures. ``features`` maps
    inputs that are not points (tokens) to points. Inputs [n *shape] are flattened; n numbers are points on a line.

    Differentiable in the points: m times where 2ν > m, at equal points too. A first derivative at equal points is 0 for
    every ν. Distances below 10⁻¹⁵⁰ count as none (of ν ≥ 1 in single precision below 10⁻²², where it does not show).

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
    features: Features | None = None

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
        # k' is r^{2ν−2} near r = 0: what it is multiplied by, and what it is made of, may be too small for single.
        wide = (a.double(), b.double()) if ν < 1 or self._extreme else (a, b)
        u = squared_distances(*wide) / ℓ / ℓ
        if y is not None or not u.requires_grad:
            return (self._constant(a) * matern(ν, u)).to(torch.promote_types(a.dtype, b.dtype))
        # A point is at distance 0 from itself wherever it moves: the diagonal is constant, whatever ν is.
        diagonal = torch.eye(a.shape[0], dtype=torch.bool, device=a.device)
        k = matern(ν, u.masked_fill(diagonal, 1.0))
        return (self._constant(a) * k.masked_fill(diagonal, 1.0)).to(a.dtype)

    def _values(self, a: Tensor, b: Tensor | None, ℓ: float | Tensor) -> Tensor:
        """K [n m] without derivatives, a few rows at a time; of points among themselves each pair once.

        Beside K itself it holds some temporaries of ``_ELEMENTS`` numbers.
        """
        ν, constant = float(self.nu), self._constant(a)
        n, m = len(a), len(a if b is None else b)
        dtype = a.dtype if b is None else torch.promote_types(a.dtype, b.dtype)
        # r^{2ν} shows where r² is too small for single precision.
        double = ν < 0.5 or self._extreme
        wide = a.double() if double else a
        other = wide if b is None else b.double() if double else b
        if n * m <= _ELEMENTS:
            u = among(wide) if b is None else squared_distances(wide, other)
            return matern(ν, u / ℓ / ℓ).mul_(constant).to(dtype)
        K = torch.empty(n, m, dtype=dtype, device=a.device)
        step = max(1, _ELEMENTS // m)
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
        if not isinstance(self.lengthscale, Lengthscale) or isinstance(self.lengthscale, Measured):
            return self
        found = points(x, self.features)
        ℓ = self.lengthscale.of(found)
        if not bool((found != found[:1]).any()):
            raise ValueError(
                f"lengthscale={self.lengthscale!r} cannot be told from {len(found)} equal point(s), and is for others "
                "too: give a number as the lengthscale, or points that differ (to fit, or to the first partial_fit)"
            )
        return replace(self, lengthscale=Measured(ℓ))

    def log_constant(self, dimension: int) -> float:
        """log K(x, x) without normalisation: log Γ(ν) − (d/2) log 4π − log Γ(ν + d/2), for x in R^d (ERRATA 1, 4).

        >>> round(SobolevKernel(1.5).log_constant(784), 3)
        -2947.908
        """
        if not isinstance(dimension, int) or dimension < 1:
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
        """Whether r² or ℓ² may be out of the range of single precision where r/ℓ is not."""
        if isinstance(self.lengthscale, Lengthscale):
            return True  # it may be anything
        return not isinstance(self.lengthscale, Tensor) and not _SMALL < float(self.lengthscale) < 1 / _SMALL

    def _lengthscale(self, x: Tensor, other: bool) -> float | Tensor:
        if isinstance(self.lengthscale, Tensor):
            return self.lengthscale
        if not isinstance(self.lengthscale, Lengthscale):
            return float(self.lengthscale)
        if other and not isinstance(self.lengthscale, Measured):
            raise ValueError(
                f"lengthscale={self.lengthscale!r} is measured on data, and two sets of points were given: say which "
                "by kernel = kernel.at(x), and use that"
            )
        return self.lengthscale.of(x)


def _differentiated(a: Tensor, b: Tensor, ℓ: float | Tensor) -> bool:
    """Whether derivatives may be asked for, in reverse or in forward mode."""
    if torch._C._are_functorch_transforms_active():
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
