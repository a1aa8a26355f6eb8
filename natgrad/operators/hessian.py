"""The Hessian of a scalar function, and weighted sums of operators: what proximal and Newton steps solve with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.geometry import Covector
from natgrad.operators.base import Inverse, Layout, Operator
from natgrad.operators.dense import DenseOperator


@final
@dataclass(frozen=True)
class HessianOperator(Operator):
    """H = ∇²J at a point, as products; it need not be positive. Built by ``HessianOperator.at``."""

    layout: Layout
    leaves: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]  # with their graph

    @staticmethod
    def at(objective: Callable[[Mapping[str, Tensor]], Tensor], point: Mapping[str, Tensor]) -> HessianOperator:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in point.items()}
        with torch.enable_grad():
            # 0·θ² keeps a graph for parameters in which J is linear or constant: their Hessian is zero, not missing.
            value = objective(leaves) + sum((0 * p.square()).sum() for p in leaves.values())
            gradients = torch.autograd.grad(value, list(leaves.values()), create_graph=True)
        return HessianOperator(Layout.of(point), tuple(leaves.values()), tuple(gradients))

    @property
    def differential(self) -> Covector:
        """dJ at the same point."""
        return Covector({name: g.detach() for name, g in zip(self.layout.like, self.gradients, strict=True)})

    def product(self, v: Tensor) -> Tensor:
        tangents = list(self.layout.vector(v).values())
        parts = torch.autograd.grad(self.gradients, self.leaves, tangents, retain_graph=True)
        return torch.cat([part.reshape(-1) for part in parts]).to(v.dtype)

    def diagonal(self) -> Tensor:
        return self.dense().diagonal()

    def dense(self) -> Tensor:
        eye = torch.eye(self.layout.size, dtype=self.layout.dtype, device=self.leaves[0].device)
        matrix = torch.stack([self.product(column) for column in eye])
        return 0.5 * (matrix + matrix.T)

    def logdet(self, damping: float = 0.0) -> Tensor:
        return self._matrix().logdet(damping)

    def lerp(self, other: Operator, weight: float) -> SumOperator:
        return SumOperator(self.layout, ((1 - weight, self), (weight, other)))

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.dense()}

    def inverse(self, damping: float) -> Inverse:
        return self._matrix().inverse(damping)

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        self.refuse("Pinv", "a Hessian can be indefinite, and then it need not descend; use CG() or Cholesky()")

    def _matrix(self) -> DenseOperator:
        return DenseOperator(self.layout, self.dense())


@final
@dataclass(frozen=True)
class SumOperator(Operator):
    """Σ w G of operators over the same parameters, such as H + λG."""

    layout: Layout
    terms: tuple[tuple[float, Operator], ...]

    def product(self, v: Tensor) -> Tensor:
        return torch.stack([w * G.product(v) for w, G in self.terms]).sum(0)

    def diagonal(self) -> Tensor:
        return torch.stack([w * G.diagonal() for w, G in self.terms]).sum(0)

    def dense(self) -> Tensor:
        return torch.stack([w * G.dense() for w, G in self.terms]).sum(0)

    def logdet(self, damping: float = 0.0) -> Tensor:
        return DenseOperator(self.layout, self.dense()).logdet(damping)

    def lerp(self, other: Operator, weight: float) -> SumOperator:
        return SumOperator(self.layout, ((1 - weight, self), (weight, other)))

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.dense()}

    def inverse(self, damping: float) -> Inverse:
        return DenseOperator(self.layout, self.dense()).inverse(damping)

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        self.refuse("Pinv", "a sum with a Hessian can be indefinite; use CG() or Cholesky()")
