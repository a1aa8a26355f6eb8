"""The metric as a product only: v ↦ Jᵀ(C ⊗ h)Jv, nothing stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor

from natgrad.geometry import unflatten
from natgrad.linearise import Linearisation
from natgrad.operators.base import Inverse, Layout, Operator
from natgrad.pullback.pullback import Pullback


@final
@dataclass(frozen=True)
class ImplicitOperator(Operator):
    """G v = Jᵀ h J v (002 section 5.2, 004 (43)): the model is linearised once, at a snapshot of the parameters.

    A moving average is a weighted sum of such terms.
    """

    layout: Layout
    terms: tuple[tuple[float, Pullback, Linearisation], ...]

    def __post_init__(self) -> None:
        for _, pullback, _ in self.terms:
            pullback.check_metric()

    def product(self, v: Tensor) -> Tensor:
        named = unflatten(v, self.layout.like)
        parts = []
        for weight, pullback, linear in self.terms:
            pushed = linear.push(named).to(pullback.y.dtype)
            # The weight goes where there are few numbers: onto the outputs.
            pulled = linear.pull((pullback.output_flat(pushed) * weight).to(linear.y.dtype))
            parts.append(torch.cat([t.reshape(-1) for t in pulled.values()]).to(v.dtype))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    @property
    def columns(self) -> int:
        """K·N: the columns of the root Rᵀ of G = RᵀR."""
        return sum(pullback.columns * pullback.n for _, pullback, _ in self.terms)

    def push_root(self, v: Tensor) -> Tensor:
        """R v [(k n)], where a row of R is J_nᵀs_kn √(w/N)."""
        named, parts = unflatten(v, self.layout.like), []
        for weight, pullback, linear in self.terms:
            pushed = linear.push(named).to(pullback.y.dtype)
            s = pullback.root
            t = torch.einsum("knd,nd->kn", s.reshape(*s.shape[:2], -1), pushed.reshape(pullback.n, -1))
            parts.append(t.flatten() * math.sqrt(weight / pullback.n))
        return torch.cat(parts)

    def pull_root(self, t: Tensor) -> Tensor:
        """Rᵀ t [p] for t [(k n)]."""
        total = t.new_zeros(self.layout.size)
        sizes = [pullback.columns * pullback.n for _, pullback, _ in self.terms]
        for (weight, pullback, linear), own in zip(self.terms, t.split(sizes), strict=True):
            u = torch.einsum("kn...,kn->n...", pullback.root, own.view(-1, pullback.n)) * math.sqrt(weight / pullback.n)
            pulled = linear.pull(u.to(linear.y.dtype))
            total += torch.cat([g.reshape(-1) for g in pulled.values()]).to(t.dtype)
        return total

    def diagonal(self) -> Tensor:
        return torch.stack([weight * pullback.square() for weight, pullback, _ in self.terms]).sum(0)

    def dense(self) -> Tensor:
        eye = torch.eye(self.layout.size, dtype=self.layout.dtype, device=self.terms[0][1].y.device)
        return torch.stack([self.product(column) for column in eye], dim=1)

    def logdet(self, damping: float = 0.0) -> Tensor:
        self.refuse("logdet", "it has products only; estimate Dense or Kernel from the same pullback")

    def lerp(self, other: Operator, weight: float) -> ImplicitOperator:
        self.same_kind(other)
        old = tuple(((1 - weight) * w, pullback, linear) for w, pullback, linear in self.terms)
        new = tuple((weight * w, pullback, linear) for w, pullback, linear in cast(ImplicitOperator, other).terms)
        return ImplicitOperator(self.layout, old + new)

    def tensors(self) -> dict[str, Tensor]:
        """Nothing is kept: a resumed run linearises again at its next forward pass."""
        return {}

    def inverse(self, damping: float) -> Inverse:
        self.refuse("Cholesky", "it has products only; solve with CG(), or use Dense or Kernel")

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        self.refuse("Pinv", "it has products only; solve with CG(), or use Dense or Kernel")
