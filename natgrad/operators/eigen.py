"""The eigenvalue-corrected Kronecker metric: diagonal in the eigenvectors of the two factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast, final

import torch
from torch import Tensor

from natgrad.operators.base import Inverse, Layout, Operator
from natgrad.operators.basis import Basis, rotated, rotated_back, spread
from natgrad.operators.factor import Factor
from natgrad.operators.kronecker_inverse import Damped
from natgrad.operators.layers import LayerOperator
from natgrad.operators.newton import Newton
from natgrad.pullback.blocks import Block


@final
@dataclass(frozen=True)
class Moments:
    """S and A of every block, of which the next basis is made."""

    left: tuple[Factor, ...]  # S [c o o], or its diagonal [c o]
    right: tuple[Factor, ...]  # A [c i i], or its diagonal [c i]


@final
@dataclass(frozen=True)
class EigenKroneckerOperator(LayerOperator):
    """G = (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ on every layer: v = W [c o i] goes to Q (D ⊙ QᵀWP) Pᵀ (George et al. 2018, (9)).

    Q and P are eigenvectors of S and A, or of what S and A were when the basis was last ``renewed``; D are the second
    moments of the gradients in that basis. S and A are kept for the next basis. ``rest`` is the metric on the
    parameters that no layer rule covers.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    moments: Moments
    basis: Basis
    scales: tuple[Tensor, ...]  # D [c o i]
    rest: Operator | None = None
    unseen: frozenset[str] = frozenset()

    @property
    def left(self) -> tuple[Factor, ...]:
        """S of every block."""
        return self.moments.left

    @property
    def right(self) -> tuple[Factor, ...]:
        """A of every block."""
        return self.moments.right

    def applied(self, b: int, w: Tensor) -> Tensor:
        q, p = self.basis.left[b], self.basis.right[b]
        return rotated_back(q, self.scales[b] * rotated(q, w, p), p)

    def layer_diagonal(self, b: int) -> Tensor:
        return spread(self.basis.left[b], self.scales[b], self.basis.right[b])

    def layer_dense(self, b: int) -> Iterable[Tensor]:
        c, o, i = self.blocks[b].shape
        unit = torch.eye(o * i, dtype=self.layout.dtype, device=self.blocks[b].device).view(-1, 1, o, i)
        return self.applied(b, unit.expand(-1, c, o, i)).movedim(1, 0).flatten(2)

    def spectrum(self) -> tuple[list[Tensor], Basis]:
        return list(self.scales), self.basis

    def lerp(self, other: Operator, weight: float) -> EigenKroneckerOperator:
        """A, S and D are averaged, D in the basis of ``other``, the newer one.

        Where this one has another basis, its diagonal in the newer one is taken: no more than that can be kept.
        """
        self.same_kind(other)
        there = cast(EigenKroneckerOperator, other)
        rest = self.rest_lerp(there, weight)

        def mean(old: Iterable[Tensor], new: Iterable[Tensor]) -> tuple[Tensor, ...]:
            old, new = list(old), list(new)
            return self.joined(there, old, new, torch._foreach_lerp(old, new, weight)) if self.blocks else ()

        scales = mean(there.basis.carried(self.scales, self.basis), there.scales)
        moments = Moments(mean(self.left, there.left), mean(self.right, there.right))
        return replace(there, moments=moments, scales=scales, rest=rest, unseen=self.unseen & there.unseen)

    def renewed(self) -> EigenKroneckerOperator:
        """In the eigenvectors of S and A as they are now. D becomes the diagonal of the metric there."""
        basis = Basis.of(self.left, self.right)
        rest = None if self.rest is None else self.rest.renewed()
        return replace(self, basis=basis, scales=basis.carried(self.scales, self.basis), rest=rest)

    def tensors(self) -> dict[str, Tensor]:
        sides = {"S": self.left, "A": self.right, "Q": self.basis.left, "P": self.basis.right}
        return self.named({**sides, "D": self.scales})

    def averaged(self) -> dict[str, Tensor] | None:
        """All but the basis, in which both are."""
        if self.rest is not None and self.rest.averaged() is None:
            return None
        return self.every({"S": self.left, "A": self.right, "D": self.scales})

    def inverse(self, damping: float) -> Inverse:
        """(G + λ)⁻¹ = Q (QᵀWP / (D + λ)) Pᵀ, exactly, and with nothing to be factored."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        if damping == 0:
            for block, values in zip(self.blocks, self.scales, strict=True):
                self.refuse_singular(block, values, 0.0)
        return self.spectral(rest, Damped(damping, None))

    def factored_inverse(
        self,
        damping: float,
        warm: Mapping[str, Tensor],
        newton: Newton | None = None,
        into: Inverse | None = None,
    ) -> Inverse:
        self.refuse("Factored", "its eigenvalues are no products of two; Cholesky() damps them exactly, at no cost")
