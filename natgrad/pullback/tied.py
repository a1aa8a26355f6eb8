"""A weight that two kinds of modules have: the embedding of a language model, and its head.

The head is z = W a with W [V d]; the embedding is z = Wᵀ e with e one-hot. The row of example n is the sum of both,

    R_kn = Σ_r g_knr a_nrᵀ + Σ_r e_nr h_knrᵀ          (g, h the cotangents of head and embedding)

and rows are exact. In a Kronecker product each kind u has its own factors S_u on the side of V and A_u on that of d
(for the embedding these are the counts of the words, a diagonal, and the second moment of h). Between kinds a and g
count as independent and centred, as they do between the layers, and the sum of the products is replaced by one,

    Σ_u S_u ⊗ A_u ≈ S ⊗ A,   S = Σ_u tr(A_u) S_u,   A = Σ_u tr(S_u) A_u / Σ_u tr(S_u) tr(A_u),

which has the same trace and the same two partial traces. It is the sum itself where only one kind has a gradient, or
where all S_u, or all A_u, are multiples of one another; else it is an approximation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.factors import Factors


def joined(block: Block, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """S and A of a block from those of its kinds, in their own packing: the ones above, or the only pair.

    >>> import natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    >>> model[1].weight = model[0].weight
    >>> pb = ng.pullback(model, torch.tensor([[0, 1], [2, 4]]), ng.Euclidean())
    >>> {name: tuple(factor.shape) for name, factor in ng.Kronecker().estimate(pb).tensors().items()}
    {'0.weight/S': (1, 5, 5), '0.weight/A': (1, 3, 3)}
    """
    if not block.facets:
        return pairs[0]
    sides = [facet.oriented(*pair) for facet, pair in zip(block.facets, pairs, strict=True)]
    weights = [(trace(a), trace(s)) for s, a in sides]
    total = sum((x * y for x, y in weights[1:]), start=weights[0][0] * weights[0][1])
    S = _sum([_times(s, of_a) for (s, _), (of_a, _) in zip(sides, weights, strict=True)])
    A = _sum([_times(a, of_s) for (_, a), (_, of_s) in zip(sides, weights, strict=True)])
    # Without any gradient S or A is zero, and the other may be anything.
    return S, _times(A, torch.where(total > 0, total, 1.0).reciprocal())


def trace(factor: Tensor) -> Tensor:
    """[c] of [c d d], or of a diagonal [c d]."""
    return factor.sum(-1) if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1).sum(-1)


def _times(factor: Tensor, weight: Tensor) -> Tensor:
    """A factor times a number a group, [c]."""
    return factor * weight.view(-1, *[1] * (factor.ndim - 1))


def _sum(factors: Sequence[Tensor]) -> Tensor:
    """Of matrices [c d d] and diagonals [c d], in place: a diagonal only where all are."""
    first, *others = sorted(factors, key=lambda factor: factor.ndim, reverse=True)
    for other in others:
        (first if first.ndim == other.ndim else first.diagonal(dim1=-2, dim2=-1)).add_(other)
    return first


@final
@dataclass(frozen=True)
class Tied:
    """The gradients of the examples with respect to a tied weight, from the a [n r c i] and g [k n r c o] of its kinds.

    They are no factors of one kind: on the side of o, the roots k are in g for the one and not in e for the other.
    """

    block: Block
    a: Sequence[Tensor]
    g: Sequence[Tensor]

    @staticmethod
    def of(block: Block, pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tied:
        """From (a, g) of every kind, in this precision."""
        return Tied(block, [a.to(dtype) for a, _ in pairs], [g.to(dtype) for _, g in pairs])

    def at(self, part: slice) -> Factors:
        """Explicit rows of some of the examples, in flattening order."""
        block = self.block
        assert block.rule is not None
        local = block.rule.unpack(block.modules[0], block.keys, self._rows(part))
        return Factors.of_rows(local[block.keys[0]].flatten(2))

    def rows(self, limit: int) -> Iterator[Tensor]:
        """R [k n c o i], packed as the block is, some examples at a time: up to ``limit`` numbers, or one example."""
        return map(self._rows, _slices(self.a[0].shape[0], limit // self.numbers))

    @property
    def numbers(self) -> int:
        """How many the rows of one example are."""
        return self.g[0].shape[0] * self.block.size

    def _rows(self, part: slice) -> Tensor:
        out: Tensor | None = None
        for facet, a, g in zip(self.block.facets, self.a, self.g, strict=True):
            rows = Factors(a[part], g[:, part]).rows().unflatten(-1, facet.block.shape)
            rows = rows.mT if facet.transposed else rows
            out = rows if out is None else out.add_(rows)
        assert out is not None
        return out


def formed(found: Sequence[Factors | Tied], limit: int) -> Iterator[list[Factors]]:
    """Factors of all blocks; with a tied weight some examples at a time, so that its rows are up to ``limit`` numbers.

    The forward pass is not run again for that.
    """
    tied = [f for f in found if isinstance(f, Tied)]
    if not tied:
        yield [f for f in found if isinstance(f, Factors)]
        return
    n = tied[0].a[0].shape[0]
    for part in _slices(n, limit // sum(f.numbers for f in tied)):
        yield [f.at(part) for f in found]


def _slices(n: int, step: int) -> list[slice]:
    """Of n examples, ``step`` of them, or one, at a time."""
    size = max(1, step)
    return [slice(None)] if size >= n else [slice(start, start + size) for start in range(0, n, size)]
