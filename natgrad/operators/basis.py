"""Orthonormal bases of the two sides of every layer, in which a metric is (nearly) diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from torch import Tensor

from natgrad.operators.factor import Factor, by_size, full, spectrum, stacked

Rotation: TypeAlias = Tensor | None  # columns [c d d]; None for the axes themselves


@final
@dataclass(frozen=True, eq=False)
class Basis:
    """Q of the outputs and P of the inputs of every layer; layers with one ``Basis`` object have one basis."""

    left: tuple[Rotation, ...]  # Q [c o o]
    right: tuple[Rotation, ...]  # P [c i i]

    @staticmethod
    def of(left: Sequence[Factor], right: Sequence[Factor]) -> Basis:
        """The eigenvectors of S and of A."""
        return Basis(tuple(spectra(left)[1]), tuple(spectra(right)[1]))

    @property
    def sides(self) -> list[tuple[Rotation, Rotation]]:
        """Q and P of every layer."""
        return list(zip(self.left, self.right, strict=True))

    def carried(self, scales: Sequence[Tensor], old: Basis) -> tuple[Tensor, ...]:
        """D' = (U∘U) D (V∘V)ᵀ, U = Q'ᵀQ, V = P'ᵀP: the diagonal, in this basis, of what is D [c o i] in another."""
        if old is self:
            return tuple(scales)
        pairs = zip(scales, self.sides, old.sides, strict=True)
        return tuple(spread(_overlap(q, q0), d, _overlap(p, p0)) for d, (q, p), (q0, p0) in pairs)


def rotated(q: Rotation, w: Tensor, p: Rotation) -> Tensor:
    """Qᵀ W P: the coordinates of W [*batch c o i] in the basis."""
    w = w if q is None else q.mT @ w
    return w if p is None else w @ p


def rotated_back(q: Rotation, w: Tensor, p: Rotation) -> Tensor:
    """Q W Pᵀ: the inverse of ``rotated``."""
    w = w if q is None else q @ w
    return w if p is None else w @ p.mT


def spread(q: Rotation, d: Tensor, p: Rotation) -> Tensor:
    """(Q∘Q) D (P∘P)ᵀ [c o i]: the diagonal of (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ."""
    return rotated_back(None if q is None else q.square(), d, None if p is None else p.square())


def spectra(side: Sequence[Factor]) -> tuple[list[Tensor], list[Rotation]]:
    """Eigenvalues [c d] and eigenvectors [c d d] of the factors of one side; a diagonal one has its own axes."""
    which = [at for at, factor in enumerate(side) if full(factor)]
    values: list[Tensor] = list(side)
    vectors: list[Rotation] = [None] * len(side)

    full_ones = [side[at] for at in which]
    for stack in by_size(full_ones):
        λ, q = spectrum(stacked([full_ones[at] for at in stack]))
        counts = [full_ones[at].shape[0] for at in stack]
        for at, own_λ, own_q in zip(stack, λ.split(counts), q.split(counts), strict=True):
            values[which[at]], vectors[which[at]] = own_λ, own_q
    return values, vectors


def _overlap(new: Rotation, old: Rotation) -> Rotation:
    """Q'ᵀQ."""
    if new is None:
        return old
    return new.mT if old is None else new.mT @ old
