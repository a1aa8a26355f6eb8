"""Inverses of metrics with few rows: Woodbury's identity, and functions of the eigenvalues in the range of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from torch import Tensor

from natgrad.structures.base import Inverse, Layout, Operator


class RowProducts(Protocol):
    """R [m p], known by its products."""

    def push_root(self, v: Tensor) -> Tensor:
        """R v [m]."""

    def pull_root(self, t: Tensor) -> Tensor:
        """Rᵀ t [p]."""


@final
@dataclass(frozen=True)
class Columns:
    """RowProducts that are kept as the columns of a matrix, R = Bᵀ."""

    matrix: Tensor  # B [p m]

    def push_root(self, v: Tensor) -> Tensor:
        return self.matrix.T @ v

    def pull_root(self, t: Tensor) -> Tensor:
        return self.matrix @ t


@final
@dataclass(frozen=True, repr=False)
class WoodburyInverse(Inverse):
    """(E + RᵀR)⁻¹ω = E⁻¹(ω − Rᵀ(1 + RE⁻¹Rᵀ)⁻¹RE⁻¹ω) for a diagonal E, Woodbury's identity."""

    layout: Layout
    rows: RowProducts
    scale: Tensor  # E⁻¹ [p] or []
    factor: Tensor  # the Cholesky factor of 1 + RE⁻¹Rᵀ [m m]

    def solve(self, ω: Tensor) -> Tensor:
        # For ω in the range of Rᵀ, the usual case, nearly all of it cancels in the difference above.
        def product(v: Tensor) -> Tensor:
            return v / self.scale + self.rows.pull_root(self.rows.push_root(v))

        return refine(self._apply, product, ω)

    def _apply(self, ω: Tensor) -> Tensor:
        scaled = self.scale * ω
        inner = torch.cholesky_solve(self.rows.push_root(scaled).unsqueeze(-1), self.factor).squeeze(-1)
        return scaled - self.scale * self.rows.pull_root(inner)

    @property
    def root_size(self) -> int:
        return self.layout.size + self.factor.shape[0]

    def root_times(self, ξ: Tensor) -> Tensor:
        """(E + RᵀR)⁻¹(√E ξ₁ + Rᵀ ξ₂)."""

        def one(noise: Tensor) -> Tensor:
            white, low = noise.split([self.layout.size, self.factor.shape[0]])
            return self.solve(white * self.scale.rsqrt() + self.rows.pull_root(low))

        return torch.func.vmap(one)(ξ)

    def root_transpose_times(self, ω: Tensor) -> Tensor:
        def one(covector: Tensor) -> Tensor:
            v = self.solve(covector)
            return torch.cat([v * self.scale.rsqrt(), self.rows.push_root(v)])

        return torch.func.vmap(one)(ω)

    def tensors(self) -> dict[str, Tensor]:
        if not isinstance(self.rows, Columns):
            return {}
        return {"scale": self.scale, "root": self.rows.matrix, "factor": self.factor}

    def nonnegative(self) -> dict[str, Tensor]:
        return {key: t for key, t in self.tensors().items() if key == "scale"}


@final
@dataclass(frozen=True, repr=False)
class RangeOperator(Operator):
    """One number outside the range of the orthonormal rows R, one for every row inside: d (1 − RᵀR) + Rᵀdiag(s) R.

    These are the functions of a metric that is known by its range.
    """

    layout: Layout
    rows: RowProducts
    inside: Tensor  # s [m]
    outside: Tensor  # d []

    def product(self, v: Tensor) -> Tensor:
        # The first projection leaves rounding of what is inside, which d multiplies: project again.
        R = self.rows
        inner = R.push_root(v)
        rest = v - R.pull_root(inner)
        again = R.push_root(rest)
        return R.pull_root(self.inside * (inner + again)) + self.outside * (rest - R.pull_root(again))

    def map(self, f: Callable[[Tensor], Tensor]) -> RangeOperator:
        return replace(self, inside=f(self.inside), outside=f(self.outside))

    @property
    def device(self) -> torch.device:
        return self.inside.device

    def tensors(self) -> dict[str, Tensor]:
        if not isinstance(self.rows, Columns):
            return {}
        return {"vectors": self.rows.matrix, "inside": self.inside, "outside": self.outside}


def refine(apply: Callable[[Tensor], Tensor], product: Callable[[Tensor], Tensor], ω: Tensor) -> Tensor:
    """v = Aω and then A of what is left, v + A(ω − Gv): one step of iterative refinement."""
    v = apply(ω)
    return v + apply(ω - product(v))
