"""A replay whose cotangents are taken by autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.rules.base import Replay
from natgrad.vjp import vjp


@final
@dataclass(frozen=True)
class GraphReplay(Replay):
    """The outputs have a graph, in which ``z`` [n r c o] is what the layer of a parameter computed.

    The parameters of one layer have the same tensor. What only has to be seen in the graph may be a leaf.
    """

    z: Mapping[str, Tensor]

    def pull(self, g: tuple[Tensor, ...]) -> dict[str, Tensor]:
        own = {id(z): z for z in self.z.values()}
        pairs = [(y, s.to(y.dtype)) for y, s in zip(self.outputs, g, strict=True) if y.requires_grad]
        found = vjp(tuple(y for y, _ in pairs), list(own.values()), tuple(s for _, s in pairs))
        k = g[0].shape[0]
        by_id = {
            key: z.new_zeros(k, *z.shape) if got is None else got
            for (key, z), got in zip(own.items(), found, strict=True)
        }
        return {name: by_id[id(z)] for name, z in self.z.items()}
