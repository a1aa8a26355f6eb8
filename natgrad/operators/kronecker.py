"""The Kronecker-factored metric: one product S ⊗ A a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast, final

import torch
from torch import Tensor

from natgrad.operators.base import Inverse, Layout, Operator
from natgrad.operators.basis import Basis, spectra
from natgrad.operators.factor import Factor, diagonal, matrix, two_sided
from natgrad.operators.kronecker_inverse import Damped, ProductInverse, factored, undamped
from natgrad.operators.layers import LayerOperator
from natgrad.operators.newton import Newton
from natgrad.pullback.blocks import Block


@final
@dataclass(frozen=True)
class KroneckerOperator(LayerOperator):
    """G = S ⊗ A on every layer: v = W [c o i] goes to S W A (003 (2.8), (4.5), (5.3); ERRATA 51: row-major, S first).

    ``rest`` is the metric on the parameters that no layer rule covers, in another structure.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    left: tuple[Factor, ...]  # S [c o o] of every block, or its diagonal [c o]
    right: tuple[Factor, ...]  # A [c i i] of every block, or its diagonal [c i]
    rest: Operator | None = None
    unseen: frozenset[str] = frozenset()

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the factors lie, which is where their averages are made."""
        return tuple(t.data_ptr() for t in (*self.left, *self.right))

    def applied(self, b: int, w: Tensor) -> Tensor:
        return two_sided(self.left[b], w, self.right[b])

    def layer_diagonal(self, b: int) -> Tensor:
        return diagonal(self.left[b]).unsqueeze(-1) * diagonal(self.right[b]).unsqueeze(-2)

    def layer_dense(self, b: int) -> Iterable[Tensor]:
        pairs = zip(matrix(self.left[b]), matrix(self.right[b]), strict=True)
        return (torch.kron(s.contiguous(), a.contiguous()) for s, a in pairs)

    def spectrum(self) -> tuple[list[Tensor], Basis]:
        """The products s_o a_i, in the eigenvectors of the factors."""
        (s, q), (a, p) = spectra(self.left), spectra(self.right)
        products = [x.unsqueeze(-1) * y.unsqueeze(-2) for x, y in zip(s, a, strict=True)]
        return products, Basis(tuple(q), tuple(p))

    def lerp(self, other: Operator, weight: float) -> KroneckerOperator:
        """A and S are averaged, each by itself, as in Martens and Grosse (2015, section 5)."""
        self.same_kind(other)
        there = cast(KroneckerOperator, other)
        rest = self.rest_lerp(there, weight)
        if not self.blocks:
            return replace(self, rest=rest)
        both = torch._foreach_lerp([*self.left, *self.right], [*there.left, *there.right], weight)
        left = self.joined(there, self.left, there.left, both[: len(self.left)])
        right = self.joined(there, self.right, there.right, both[len(self.left) :])
        return replace(self, left=left, right=right, rest=rest, unseen=self.unseen & there.unseen)

    def absorbed(self, rest: Operator | None, weight: float, unseen: frozenset[str]) -> KroneckerOperator:
        """The average after factors have been averaged in place, with the estimate over the other parameters."""
        if self.rest is not None and rest is not None:
            rest = self.rest.merged(rest, weight)
        same = rest is self.rest and self.unseen <= unseen
        return self if same else replace(self, rest=rest, unseen=self.unseen & unseen)

    def tensors(self) -> dict[str, Tensor]:
        return self.named({"S": self.left, "A": self.right})

    def averaged(self) -> dict[str, Tensor] | None:
        if self.rest is not None and self.rest.averaged() is None:
            return None
        return self.every({"S": self.left, "A": self.right})

    def inverse(self, damping: float) -> Inverse:
        """(G + λ)⁻¹ exactly: by Cholesky of the factors without damping, through their eigenvalues with it."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        return undamped(self, rest) if damping == 0 else self.spectral(rest, Damped(damping, None))

    def factored_inverse(
        self,
        damping: float,
        warm: Mapping[str, Tensor],
        newton: Newton | None = None,
        into: Inverse | None = None,
    ) -> Inverse:
        """(S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹: an approximation of (G + λ)⁻¹ that needs no eigenvalues (ERRATA D)."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        return factored(self, rest, damping, self._sides(warm), newton, into)

    def mend(self, inverse: Inverse, damping: float) -> None:
        if isinstance(inverse, ProductInverse) and inverse.fits(self):
            inverse.mend(self, damping)
        else:
            super().mend(inverse, damping)

    def layers_from(self, tensors: Mapping[str, Tensor], rest: Inverse | None) -> Inverse | None:
        sides = self._sides(tensors)
        if sides is None:
            return super().layers_from(tensors, rest)
        left, right = (tuple(side) for side in sides)
        return ProductInverse.of(self, rest, left, right)

    def _sides(self, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """S⁻¹ and A⁻¹ of every layer, where they are there."""
        names = [block.names[0] for block in self.blocks]
        if any(f"{name}/S" not in tensors for name in names[:1]):
            return None
        return [tensors[f"{name}/S"] for name in names], [tensors[f"{name}/A"] for name in names]
