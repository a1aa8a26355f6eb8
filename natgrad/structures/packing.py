"""Where the blocks of a pullback lie in a matrix, and which of them are one layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from natgrad.pullback import Block, Factors, Pullback
from natgrad.pullback.factors import cross


def spans_of(pullback: Pullback) -> list[slice]:
    """Of every block, its rows in a packed matrix."""
    ends = accumulate((block.size for block in pullback.blocks), initial=0)
    return [slice(start, end) for start, end in pairwise(ends)]


def layers_in(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """Blocks whose parameters' names agree up to the last dot: what a user calls a layer."""
    grouped: dict[str, list[Block]] = {}
    for block in blocks:
        grouped.setdefault(block.names[0].rpartition(".")[0], []).append(block)
    return grouped


def index_of(group: Sequence[Block]) -> Tensor:
    """The places [p] of the blocks' parameters in flattening order."""
    return torch.cat([block.index for block in group])


def name_of(group: Sequence[Block]) -> str:
    """In flattening order, whatever the blocks."""
    starts: dict[str, int] = {}
    for block in group:
        starts.update(zip(block.names, sorted(place.start for place in block.places), strict=True))
    return " + ".join(sorted(starts, key=lambda name: starts[name]))


def add_pairs(total: Tensor, factors: Sequence[Factors], limit: int) -> None:
    """Add Σ_kn R Rᵀ of several blocks that are kept as one."""
    ends = list(accumulate((f.g.shape[3] * f.g.shape[4] * f.a.shape[3] for f in factors), initial=0))
    spans = [slice(start, end) for start, end in pairwise(ends)]
    for b, left in enumerate(factors):
        for d in range(b + 1):
            product = cross(left, factors[d], limit)
            total[spans[b], spans[d]] += product
            if d < b:
                total[spans[d], spans[b]] += product.T
