"""The Kronecker product S ⊗ A that is nearest in KL divergence to the second moment of gradients, one step of its fixed
point (Lin et al. 2025).

KL(N(0, G) ‖ N(0, S ⊗ A)), with G = E[vec(∇) vec(∇)ᵀ] of matrices ∇ [o i], is least where

    S = E[∇ A⁻¹ ∇ᵀ]/i,   A = E[∇ᵀ S⁻¹ ∇]/o.

A step takes the inverses of the last refresh, as roots: ∇A⁻¹∇ᵀ is the square of ∇A^-½ (``natgrad.pullbacks.gradient``).
The roots are damped, and scaled so that tr(A A⁻¹) is i. Then the scale of S ⊗ A does not move from one factor into the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.flags import to_host_async
from natgrad.accelerate.inverses import SymFactor, diagonal, stacked
from natgrad.pullbacks.layer import Block


@final
class RootCheck:
    """Whether all roots were positive at the last refresh, as far as the host has read: none is that of a zero factor.

    >>> check = RootCheck()
    >>> before = bool(check)
    >>> check.look([torch.eye(2)[None], torch.ones(1, 3)])
    >>> before, bool(check)
    (False, True)
    """

    def __init__(self) -> None:
        self._positive = False
        self._smallest: Tensor | None = None  # on its way to the host

    def look(self, roots: Sequence[SymFactor]) -> None:
        """At the roots of a refresh: a positive matrix has a positive diagonal."""
        self._positive = bool(self)
        if roots:
            self._smallest = to_host_async(torch.cat([diagonal(root)[:, 0] for root in roots]).amin())

    def __bool__(self) -> bool:
        if self._smallest is not None and not math.isnan(smallest := float(self._smallest)):
            self._positive, self._smallest = 0 < smallest < math.inf, None
        return self._positive


@final
@dataclass(frozen=True)
class NearestProduct:
    """The roots for layers that have an inverse; the others have the means of both sides.

    A factor whose inverse is zero (of gradients that were always zero) does not weigh: the other one is a mean. So it
    keeps its scale, where the fixed point would lose it. ``positive``: it is known that there is none, and nothing is
    asked.
    """

    halves: Mapping[tuple[str, ...], tuple[SymFactor, SymFactor]]  # S^-½ and A^-½ by the parameters of a layer
    positive: bool = False

    @cached_property
    def address_key(self) -> Hashable:
        """Where captured kernels read, and what they ask."""
        return self.positive, tuple((names, *(t.data_ptr() for t in pair)) for names, pair in self.halves.items())

    def fits(self, block: Block) -> bool:
        """Whether there is an inverse of this layer."""
        return block.names in self.halves

    def roots(self, blocks: Sequence[Block], otherwise: Callable[[], Tensor]) -> tuple[SymFactor, SymFactor]:
        """S^-½ and A^-½ [b d d] of layers of one shape; a multiple [b] of the identity where a root is zero."""
        left, right = map(stacked, zip(*(self.halves[block.names] for block in blocks), strict=True))
        if self.positive:
            return left, right
        number = otherwise()
        return _alive(left, number), _alive(right, number)


def _alive(root: SymFactor, otherwise: Tensor) -> SymFactor:
    on_diagonal = diagonal(root)
    more = torch.where(on_diagonal.sum(1) > 0, 0.0, otherwise.to(root.dtype)).unsqueeze(1).expand_as(on_diagonal)
    return root + (torch.diag_embed(more) if root.ndim == 3 else more)
