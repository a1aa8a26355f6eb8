"""A recurrence over time, with all its layers in sight: forwards, and back with their cotangents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.rules.base import Keys, Replayable
from natgrad.rules.matrices import own, weight_and_bias
from natgrad.rules.units import Adjoint, Affine, Gru, State, Trace, unit_of


@final
@dataclass(frozen=True)
class Direction:
    """One layer of a module in one direction of time; ``suffix`` is how its parameters end: ``_l0_reverse``."""

    module: nn.Module
    suffix: str
    backward: bool = False

    @property
    def layers(self) -> tuple[Keys, ...]:
        """(W_ih, b_ih), (W_hh, b_hh) and, for an LSTM with projections, (W_hr,)."""
        names = (("weight_ih", "bias_ih"), ("weight_hh", "bias_hh"), ("weight_hr",))
        return tuple(tuple(f"{name}{self.suffix}" for name in layer) for layer in names)

    @property
    def ih(self) -> Affine:
        return Affine(self._weight("weight_ih"), self._own("bias_ih"))

    @property
    def hh(self) -> Affine:
        return Affine(self._weight("weight_hh"), self._own("bias_hh"))

    @property
    def hr(self) -> Tensor | None:
        """W_hr."""
        return self._own("weight_hr")

    def start(self, n: int) -> State:
        """Zeros: c is as wide as there are units, and h as W_hh takes it."""
        weight = self.hh.weight
        h = weight.new_zeros(n, weight.shape[1])
        if not isinstance(self.module, (nn.LSTM, nn.LSTMCell)):
            return h, None
        return h, weight.new_zeros(n, weight.shape[0] // 4)

    def times(self, steps: int) -> Sequence[int]:
        """In the order of the recurrence."""
        return range(steps)[:: -1 if self.backward else 1]

    def unroll(self, x: Tensor, state: State, mask: Tensor | None) -> Unrolled:
        """Over x [n t i] from a state. Where ``mask`` [n t] is zero the state stays, and nothing is an input."""
        unit, hh, hr, steps = unit_of(self.module), self.hh, self.hr, x.shape[1]
        ih = self.ih.of(x)
        if hh.bias is not None and not isinstance(unit, Gru):  # the others add both biases
            ih = ih + hh.bias
        kept, inner, before, c_before, after, c_after = ([state[0]] * steps for _ in range(6))
        rows = ih.unbind(1)
        for t in self.times(steps):
            before[t], c = state
            c_before[t] = state[0] if c is None else c
            kept[t], (h, c) = unit.step(rows[t], hh, state)
            inner[t] = h
            c_after[t] = h if c is None else c
            h = h if hr is None else F.linear(h, hr)
            state = (h, c) if mask is None else _where(mask[:, t, None] > 0, (h, c), state)
            after[t] = state[0]
        keep = None if mask is None else mask.unsqueeze(2)
        stacked = [torch.stack(part, dim=1) for part in (after, before, inner)]
        h_after, h_before, m = stacked if keep is None else [part * keep for part in stacked]
        c_old, c_new = (None if state[1] is None else torch.stack(part, dim=1) for part in (c_before, c_after))
        found: dict[str, Replayable] = {}
        for keys, a in zip(self.layers, (x, h_before, m), strict=True):
            found |= weight_and_bias(keys, a.unsqueeze(2), keep)
        trace = Trace(ih, torch.stack(kept, dim=1), h_before, c_old, c_new, keep)
        return Unrolled(self, h_after, state, found, trace)

    def _weight(self, name: str) -> Tensor:
        found = self._own(name)
        assert found is not None
        return found

    def _own(self, name: str) -> Tensor | None:
        return own(self.module, f"{name}{self.suffix}")


@final
@dataclass(frozen=True)
class Unrolled:
    """One layer in one direction: h of all times [n t h], the last state, and the inputs of the parameters by name."""

    direction: Direction
    h: Tensor
    state: State
    layers: dict[str, Replayable]
    trace: Trace

    @cached_property
    def adjoint(self) -> Adjoint:
        """The derivatives of all steps."""
        return unit_of(self.direction.module).adjoint(self.trace)

    def pull(self, g: Tensor, last: State) -> tuple[dict[str, Tensor], Tensor]:
        """Cotangents of the layers by parameter, and dz [k n t o] of W_ih x + b_ih, from those of h and the state.

        g is [k n t h], and the last state's are [k n ·].
        """
        mask, weights = self.trace.mask, (self.direction.hh.weight, self.direction.hr)
        dz, dh = self.adjoint.pull(self.direction.times(g.shape[2]), g if mask is None else g * mask, last, weights)
        dz_ih, dz_hr = self.adjoint.from_inputs(dz, dh), dh if mask is None else dh * mask
        pairs = zip(self.direction.layers, (dz_ih, dz, dz_hr), strict=True)
        views = [(keys, z.unsqueeze(3)) for keys, z in pairs]
        if dz_ih is dz:  # one tensor, so that its second moment is formed once
            views[1] = (views[1][0], views[0][1])
        return {key: z for keys, z in views for key in keys}, dz_ih

    def down(self, dz: Tensor) -> Tensor:
        """Cotangents of x [k n t i] from those of W_ih x + b_ih."""
        return dz @ self.direction.ih.weight


def _where(kept: Tensor, new: State, old: State) -> State:
    h = torch.where(kept, new[0], old[0])
    return (h, None) if new[1] is None or old[1] is None else (h, torch.where(kept, new[1], old[1]))
