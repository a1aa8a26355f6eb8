"""Reproducing kernels of Sobolev spaces on closed manifolds: circles, tori and spheres, by their spectra."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from natgrad.kernels.distances import FeatureMap, check_features, points
from natgrad.kernels.matern import matern
from natgrad.kernels.sobolev import ReproducingKernel, check_smoothness
from natgrad.linalg import check_positive, is_number

_SHELLS = 1000  # of omitted terms that an error is summed over; the rest is below rounding


@final
@dataclass(frozen=True)
class TorusKernel(ReproducingKernel):
    """The Sobolev kernel of functions that are periodic in every input, such as angles.

    Args:
        nu: The smoothness ν > 0, any real number.
        lengthscale: ℓ, in the units of the inputs.
        period: The length of every circle, in the same units.
        images: How many periods the sum goes to either side.
        features: Maps inputs that are not coordinates on the torus, or not these alone, to them.

    Method:
        The kernel of the norm Σ_k (1 + ℓ²|k|²)^{ν + d/2} |f_k|² of the Fourier coefficients f_k at the frequencies k of
        the torus, scaled to K(x, x) = 1. By Poisson's formula it is the kernel of R^d, summed over all periods:

            K(x, y) ∝ Σ_m k(‖x − y + m·period‖/ℓ),   m ∈ Z^d

        The sum is cut off at |m| ≤ ``images`` in every coordinate; ``error`` bounds what is left out. It has
        (2·images + 1)^d terms.

    Example:
        >>> circle = TorusKernel(0.5, lengthscale=2.0, images=20)  # cosh((π − θ)/ℓ)/cosh(π/ℓ)
        >>> circle(torch.tensor([0.0]), torch.tensor([0.0, math.pi, 2 * math.pi]))
        tensor([[1.0000, 0.3985, 1.0000]])
        >>> circle.error(dimension=1) < 1e-20
        True
    """

    nu: float
    lengthscale: float = 1.0
    period: float = 2 * math.pi
    images: int = 6
    features: FeatureMap | None = None

    def __post_init__(self) -> None:
        _check(self, self.images, "images")
        check_positive(self.period, "TorusKernel(period=…)", ": the length of a circle")

    def __call__(self, x: Any, y: Any = None) -> Tensor:
        a = points(x, self.features)
        b = a if y is None else points(y, self.features)
        apart = a[:, None] - b
        apart = apart - self.period * (apart / self.period).round().detach()
        return self._summed(apart) / self._summed(torch.zeros_like(apart[:1, :1]))

    def error(self, dimension: int) -> float:
        """A bound on what the omitted terms would add to K, whose diagonal is 1."""
        shells = torch.arange(self.images + 1, self.images + _SHELLS, dtype=torch.float64)
        count = (2 * shells + 1) ** dimension - (2 * shells - 1) ** dimension
        nearest = self.period * (shells - 0.5) / self.lengthscale
        return 2 * float((count * matern(float(self.nu), nearest.square())).sum())

    def _summed(self, apart: Tensor) -> Tensor:
        total = torch.zeros_like(apart[..., 0])
        for m in itertools.product(range(-self.images, self.images + 1), repeat=apart.shape[-1]):
            shifted = (apart + self.period * apart.new_tensor(m)) / self.lengthscale
            total = total + matern(float(self.nu), shifted.square().sum(-1))
        return total


@final
@dataclass(frozen=True)
class SphereKernel(ReproducingKernel):
    """The Sobolev kernel of functions on a sphere, such as directions or places on the earth.

    Args:
        nu: The smoothness ν > 0, any real number.
        lengthscale: ℓ, on a sphere of radius 1.
        degree: The largest degree of the polynomials in the series.
        features: Maps inputs that are not directions to them.

    Method:
        For points of R^{d+1}, of which the direction counts, at an angle θ. It is the kernel of the norm
        Σ_l (1 + ℓ²λ_l)^{ν + d/2} ‖f_l‖² on the sphere S^d, where f_l is the part of f in the eigenspace of the
        Laplacian with eigenvalue λ_l = l(l + d − 1), which has M_l dimensions:

            K ∝ Σ_l M_l (1 + ℓ²λ_l)^{−ν − d/2} p_l(cos θ),   p_l(1) = 1

        p_l are Legendre polynomials on S², cosines on a circle, and ultraspherical ones in general (Borovitskiy et al.
        2020). The series is cut off at ``degree``; ``error`` bounds what is left out, about degree^{−2ν}.

    Example:
        >>> kernel = SphereKernel(2.5)
        >>> kernel(torch.eye(3))
        tensor([[1.0000, 0.9313, 0.9313],
                [0.9313, 1.0000, 0.9313],
                [0.9313, 0.9313, 1.0000]])
        >>> kernel.error(dimension=2) < 1e-9
        True
    """

    nu: float
    lengthscale: float = 1.0
    degree: int = 60
    features: FeatureMap | None = None

    def __post_init__(self) -> None:
        _check(self, self.degree, "degree")

    def __call__(self, x: Any, y: Any = None) -> Tensor:
        a = torch.nn.functional.normalize(points(x, self.features), dim=1)
        b = a if y is None else torch.nn.functional.normalize(points(y, self.features), dim=1)
        d = a.shape[1] - 1
        if d < 1:
            raise ValueError(f"SphereKernel needs points of R² or more, [n 2], got {tuple(a.shape)}")
        w = [self._weight(l, d) for l in range(self.degree + 1)]
        t = a @ b.T
        before, now = torch.ones_like(t), t
        total = w[0] * before
        for l in range(1, self.degree + 1):
            total = total + w[l] * now
            before, now = now, ((2 * l + d - 1) * t * now - l * before) / (l + d - 1)
        return total / sum(w)

    def error(self, dimension: int) -> float:
        """A bound on what the omitted terms would add to K, whose diagonal is 1: for S^d with d = ``dimension``."""
        d, first = dimension, self.degree + 1
        kept = sum(self._weight(l, d) for l in range(first))
        summed = sum(self._weight(l, d) for l in range(first, first + _SHELLS))
        # M_l ≤ 2(l + d)^{d−1}/(d − 1)!: the rest is below the integral of l^{−1−2ν}, with a factor that tends to 1
        last = first + _SHELLS - 1
        factor = 2 / math.factorial(d - 1) * (1 + (d + 1) / last) ** (d - 1)
        return (
            2
            * (summed + factor * self.lengthscale ** (-2 * self.nu - d) * last ** (-2 * self.nu) / (2 * self.nu))
            / kept
        )

    def _weight(self, l: int, d: int) -> float:
        many = 1 if l == 0 else (2 * l + d - 1) * math.comb(l + d - 2, l - 1) // l
        return float(many * (1 + self.lengthscale**2 * l * (l + d - 1)) ** (-self.nu - d / 2))


def _check(kernel: TorusKernel | SphereKernel, terms: int, what: str) -> None:
    check_smoothness(kernel.nu)
    check_positive(kernel.lengthscale, f"{type(kernel).__name__}(lengthscale=…)", ": distances are divided by it")
    if not is_number(terms, whole=True) or terms < 1:
        raise ValueError(
            f"{type(kernel).__name__}({what}={terms!r}): give a positive integer, the length of the series"
        )
    check_features(kernel.features)
