"""Some of the parameters of a larger set, by their places in its flattening order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.operators.base import Layout

REST = "rest/"  # before the names of the tensors of what is over the other parameters


@final
@dataclass(frozen=True)
class Subset:
    """Where the parameters ``names`` lie among all, flattened."""

    names: tuple[str, ...]
    spans: tuple[slice, ...]

    @staticmethod
    def of(layout: Layout, names: Sequence[str]) -> Subset:
        spans, start = {}, 0
        for name, t in layout.like.items():
            spans[name] = slice(start, start + t.numel())
            start += t.numel()
        return Subset(tuple(names), tuple(spans[name] for name in names))

    def take(self, flat: Tensor) -> Tensor:
        """The elements of these parameters, from the elements [*batch p] of all."""
        return torch.cat([flat[..., span] for span in self.spans], dim=-1)

    def put(self, part: Tensor, flat: Tensor) -> None:
        """The inverse of ``take``."""
        sizes = [span.stop - span.start for span in self.spans]
        for span, values in zip(self.spans, part.split(sizes, dim=-1), strict=True):
            flat[..., span] = values

    def index(self, device: torch.device) -> Tensor:
        """The positions."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans])

    def named(self, element: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These parameters of a vector or a covector."""
        return {name: element[name] for name in self.names}
