"""Robust losses of residuals: the cost ½ Σ ρ(f²), and the residuals and Jacobian of its Gauss–Newton model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.linalg import is_number

# z ↦ ρ(z), ρ′(z), ρ″(z); ρ(z) ≈ z near zero
Rho: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

_LEAST = 1e-2  # curvature of an outlier, in units of its weight: what is below zero has no Gauss–Newton model


def _soft_l1(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    root = (1 + z).sqrt()
    return 2 * z / (1 + root), 1 / root, -0.5 / root**3  # 2(√(1 + z) − 1), without the difference


def _huber(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    root = z.clamp(min=1).sqrt()
    inside = z <= 1
    return torch.where(inside, z, 2 * root - 1), 1 / root, torch.where(inside, 0.0, -0.5 / root**3)


def _cauchy(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.log1p(), 1 / (1 + z), -1 / (1 + z).square()


def _arctan(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = 1 + z.square()
    return z.arctan(), 1 / square, -2 * z / square.square()


RHO: Mapping[str, Rho | None] = {
    "linear": None,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}


@final
@dataclass(frozen=True)
class RobustLoss:
    """½ Σ C² ρ(f²/C²) with C = ``scale``; without ρ it is ½ Σ f²."""

    rho: Rho | None
    scale: float

    @staticmethod
    def named(name: Any, scale: Any) -> RobustLoss:
        if not callable(name) and (not isinstance(name, str) or name not in RHO):
            raise ValueError(
                f"loss is one of {', '.join(map(repr, RHO))}, or a function z ↦ ρ(z), ρ′(z), ρ″(z), got {name!r}"
            )
        if not is_number(scale) and not (isinstance(scale, Tensor) and scale.numel() == 1):
            raise TypeError(
                f"f_scale must be one number, got {scale!r:.60}: divide the residuals by scales of their own"
            )
        if not 0 < float(scale) < torch.inf:
            raise ValueError(f"f_scale must be positive and finite, got {scale}: residuals beyond it are outliers")
        return RobustLoss((lambda z: tuple(name(z))) if callable(name) else RHO[name], float(scale))

    def squares(self, f: Tensor) -> Tensor:
        """Twice the cost [*] of residuals f [* m]."""
        if self.rho is None:
            return torch.linalg.vecdot(f, f)
        return self.scale**2 * self.rho((f / self.scale).square())[0].sum(-1)

    def decrease(self, here: Tensor, there: Tensor) -> Tensor:
        """Twice the cost here less that there [*], term by term: the difference of two sums would be rounding."""
        if self.rho is None:
            return torch.linalg.vecdot(here - there, here + there)
        a, b = (self.rho((f / self.scale).square())[0] for f in (here, there))
        return self.scale**2 * (a - b).sum(-1)

    def weighted(self, f: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """f̃ [* m] and J̃ [* m n] with the gradient J̃ᵀf̃ and the curvature J̃ᵀJ̃ of the cost (Triggs et al. 2000).

        J̃ = √(ρ′ + 2ρ″z) J and f̃ = ρ′/√(ρ′ + 2ρ″z) f, z = f²/C². The curvature of outliers is negative, and counted
        as a hundredth of ρ′.
        """
        if self.rho is None:
            return f, J
        z = (f / self.scale).square()
        _, first, second = self.rho(z)
        root = torch.maximum(first + 2 * second * z, _LEAST * first).sqrt()
        return f * (first / root), J * root.unsqueeze(-1)
