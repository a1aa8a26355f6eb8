"""Gram matrices of the rows of two sets of examples, from the factors of their layers: J is not formed."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from typing import final

import torch
from torch import Tensor

from natgrad.operators.kernel import KernelOperator
from natgrad.pullback.blocks import Block
from natgrad.pullback.factors import Factors
from natgrad.structures.packing import index_of, name_of

_LIMIT = 2**22  # elements of a temporary


@final
@dataclass(frozen=True)
class Layer:
    """The rows of one layer, R [(k n) p], in factors: those of all blocks whose names agree up to the last dot.

    Which blocks a layer has may depend on the batch (a bias of one example looks like any other axis of one); the layer
    does not.
    """

    blocks: tuple[Block, ...]
    factors: tuple[Factors, ...]

    @property
    def title(self) -> str:
        """The names of its parameters, in flattening order."""
        return name_of(self.blocks)

    def gram(self, other: Layer | None = None) -> Tensor:
        """R R'ᵀ [(k n) (l m)] with the rows of the same layer at other examples; None: at the same ones."""
        if other is None:
            return reduce(torch.add, (f.gram() for f in self.factors))
        if not self._packed_as(other):
            return self._rows() @ other._rows().T
        return reduce(torch.add, map(cross_gram, self.factors, other.factors))

    def _packed_as(self, other: Layer) -> bool:
        mine, its = ([(b.names, b.shape, b.keys, type(b.rule)) for b in layer.blocks] for layer in (self, other))
        return mine == its

    def _rows(self) -> Tensor:
        """R [(k n) p] in flattening order."""
        packed = torch.cat([f.rows().flatten(0, 1) for f in self.factors], dim=1)
        return packed[:, index_of(self.blocks).argsort()]


def layers(rows: KernelOperator) -> dict[str, Layer]:
    """The layers of J/√N by the part of their names before the last dot."""
    grouped: dict[str, list[tuple[Block, Factors]]] = defaultdict(list)
    for block, factors in zip(rows.blocks, rows.factors, strict=True):
        grouped[block.names[0].rpartition(".")[0]].append((block, factors))
    return {
        name: Layer(tuple(block for block, _ in found), tuple(f for _, f in found)) for name, found in grouped.items()
    }


def gram(left: KernelOperator, right: KernelOperator) -> Tensor:
    """R R'ᵀ [(k n) (l m)] of two sets of examples, summed over the layers."""
    others = layers(right)
    return reduce(torch.add, (layer.gram(others[name]) for name, layer in layers(left).items()))


def cross_gram(left: Factors, right: Factors, limit: int = _LIMIT) -> Tensor:
    """R R'ᵀ [(k n) (l m)], R = Σ_r g aᵀ and R' = Σ_s h bᵀ: for one position ⟨g_kn, h_lm⟩⟨a_n, b_m⟩, entry by entry.

    With several positions it is that product summed over their pairs, or the product of the rows, whichever is less
    work; see ``Factors.gram``, which is this for equal factors. Temporaries stay within ``limit`` elements, where one
    pair of examples allows.

    >>> from natgrad.pullback import Factors
    >>> f = Factors(torch.randn(3, 1, 1, 4), torch.randn(2, 3, 1, 1, 5))
    >>> torch.allclose(cross_gram(f, f), f.gram())
    True
    """
    (k, n, r, c, o), (l, m, s) = left.g.shape, right.g.shape[:3]
    i = left.a.shape[3]
    if left.plain and right.plain:
        inner = left.g[:, :, 0, 0].flatten(0, 1) @ right.g[:, :, 0, 0].flatten(0, 1).T
        return (inner.view(k, n, l, m) * (left.a[:, 0, 0] @ right.a[:, 0, 0].T)[None, :, None, :]).view(k * n, l * m)
    # A multiplication entry by entry, with its sum, takes as long as a hundred inside a matrix product.
    if c == 1 and r * s * (o + i / (k * l) + 100) < o * i:
        return _by_positions(left, right, limit)
    return _by_rows(left, right, limit)


def _by_rows(left: Factors, right: Factors, limit: int) -> Tensor:
    """R R'ᵀ summed over slices of the parameters: outputs o, and all of c and i."""
    (k, n, _, c, _), (l, m) = left.g.shape, right.g.shape[:2]
    total = left.g.new_zeros(k * n, l * m)
    step = max(1, limit // (max(k * n, l * m) * c * left.a.shape[3]))
    for g, h in zip(left.g.split(step, dim=4), right.g.split(step, dim=4), strict=True):
        total.addmm_(Factors(left.a, g).rows().flatten(0, 1), Factors(right.a, h).rows().flatten(0, 1).T)
    return total


def _by_positions(left: Factors, right: Factors, limit: int) -> Tensor:
    """Σ_rs ⟨g_knr, h_lms⟩⟨a_nr, b_ms⟩, for blocks of pairs of examples (n, m)."""
    (k, n, r, _, o), (l, m, s) = left.g.shape, right.g.shape[:3]
    total = left.g.new_empty(k, n, l, m)
    step = max(1, math.isqrt(limit // (k * r * l * s)))
    for top in range(0, n, step):
        g, a = left.g[:, top : top + step, :, 0].reshape(-1, o), left.a[top : top + step, :, 0].flatten(0, 1)
        for start in range(0, m, step):
            h, b = right.g[:, start : start + step, :, 0].reshape(-1, o), right.a[start : start + step, :, 0]
            inner = (g @ h.T).view(k, -1, r, l, b.shape[0], s)
            inner *= (a @ b.flatten(0, 1).T).view(-1, r, 1, b.shape[0], s)
            total[:, top : top + step, :, start : start + step] = inner.sum((2, 5))
    return total.view(k * n, l * m)
