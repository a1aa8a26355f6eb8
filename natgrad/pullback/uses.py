"""One call of a layer in a forward pass, and how it looks with its examples on the first axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from natgrad.pullback.axes import Axis
from natgrad.rules.base import Call, Replay, Replayed, Rule


@final
@dataclass(frozen=True)
class Ruled:
    """A module and its rule; ``entries``: by the id of a parameter, how often a call puts it into the graph."""

    module: nn.Module
    rule: Rule
    entries: Mapping[int, int]


@final
@dataclass(frozen=True)
class Use:
    """One call of a module with a rule: its arguments, and for every output its shape and its edge in the graph."""

    of: Ruled
    call: Call
    edges: tuple[GradientEdge | None, ...]  # None for an output that has no gradient
    shapes: tuple[torch.Size, ...]
    half: bool  # whether an output is in float16
    source: GradientEdge | None = None  # of a replayed module whose first argument is all that it has of the graph
    axis: Axis | None = None  # of the examples in the graph, where call and shapes are those of a view: see ``turned``

    @property
    def module(self) -> nn.Module:
        """The one that was called."""
        return self.of.module

    @property
    def rule(self) -> Rule:
        """Its rule."""
        return self.of.rule

    @property
    def entries(self) -> Mapping[int, int]:
        """What this call has put into the graph."""
        return self.of.entries

    @property
    def shape(self) -> torch.Size:
        """Of the first output, for most layers the only one."""
        return self.shapes[0]

    @cached_property
    def replay(self) -> Replay:
        """The call again, in terms of its layers."""
        assert isinstance(self.rule, Replayed)
        with torch.enable_grad():
            return self.rule.replay(self.module, self.call)

    def turns(self, axis: Axis, n: int) -> bool:
        """Whether the rule can have n examples on this axis of the output: it must be like the first."""
        return axis.index < self.rule.leading(self.module, self.shape) and axis.fits(tuple(self.shape), n)

    def turned(self, axis: Axis, n: int) -> Use:
        """The same call of a layer that treats leading axes alike, with its examples, which are there, on the first.

        Inputs and outputs are views. Row n of an output is made of row n of the input, wherever the rows are.
        """
        call = self.call.map(lambda t: axis.first(t, n))
        return replace(self, call=call, shapes=tuple(torch.Size(axis.split(s, n)) for s in self.shapes), axis=axis)

    def first(self, g: Tensor) -> Tensor:
        """Cotangents [k *output] as the graph has them, with the examples where the rule has them."""
        return g if self.axis is None else self.axis.first(g, self.shape[0], 1)
