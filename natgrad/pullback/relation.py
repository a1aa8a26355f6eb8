"""What the examples of a pass are to each other, for the factors of its layers: coupled, or of different weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.sharing import Cotangents, Sharing
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Moment


class Relation(ABC):
    """A coupling C of the examples, as the factors of a layer see it."""

    @property
    @abstractmethod
    def places(self) -> Hashable:
        """Where recorded kernels read it."""

    @abstractmethod
    def factors(self, tape: Tape, block: Block, sharing: Sharing, g: Cotangents) -> tuple[Tensor, Moment]:
        """S and A of a layer of one kind, from its cotangents s J/√N."""


def products(x: Tensor, full: bool) -> Tensor:
    """Σ_m x xᵀ [c d e] of x [m c d], or its diagonal [c d].

    >>> products(torch.tensor([[[1.0, 2.0]]]), full=False)
    tensor([[1., 4.]])
    """
    return torch.einsum("mcd,mce->cde", x, x) if full else x.square().sum(0)
