"""The equations of recurrent units, and their recurrence over time with all layers in sight.

Every parameter acts through a sum, z_t = W x_t + b, and its cotangents can be read off any tensor that is added to
that sum. One tensor [n t 1 o] for all times takes part step by step, so that the cotangents of all times are one
tensor, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.rules.base import Keys, Replayable
from natgrad.rules.matrices import own, probe, weight_and_bias

State: TypeAlias = tuple[Tensor, Tensor | None]  # h [n h], and for an LSTM c [n h]


class Unit(ABC):
    """One step of a recurrence, from its pre-activations to the next state."""

    @abstractmethod
    def sums(self, ih: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        """What W_ih x + b_ih [n t 1 o] and W_hh h + b_hh are sums with, before the products with h are there."""

    @abstractmethod
    def step(self, ih: Tensor, hh: Tensor, state: State, weight: Tensor) -> State:
        """The state after a step with the sums [n o] of its time; ``weight`` is W_hhᵀ."""


class _Added(Unit):
    """A unit that knows W_ih x + b_ih and W_hh h + b_hh only by their sum, so that both have the same cotangents."""

    def sums(self, ih: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        z = probe(ih if b is None else ih + b)
        return z, z


@final
@dataclass(frozen=True)
class Elman(_Added):
    """h' = φ(W_ih x + b_ih + W_hh h + b_hh) (003 (5.1))."""

    φ: Callable[[Tensor], Tensor]

    def step(self, ih: Tensor, hh: Tensor, state: State, weight: Tensor) -> State:
        return self.φ(torch.addmm(hh, state[0], weight)), None


@final
class Lstm(_Added):
    """c' = f c + i g and h' = o tanh c' with (i, f, g, o) = (σ, σ, tanh, σ)(W_ih x + b_ih + W_hh h + b_hh)."""

    def step(self, ih: Tensor, hh: Tensor, state: State, weight: Tensor) -> State:
        h, c = state
        assert c is not None
        i, f, g, o = torch.addmm(hh, h, weight).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@final
class Gru(Unit):
    """h' = n + u (h − n), n = tanh(z_in + r z_hn), with r, u = σ(z_i + z_h): the two sums have their own cotangents."""

    def sums(self, ih: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        hh = ih.new_zeros(()) if b is None else b
        return probe(ih), probe(hh.expand(ih.shape))

    def step(self, ih: Tensor, hh: Tensor, state: State, weight: Tensor) -> State:
        h = state[0]
        (r_i, u_i, n_i), (r_h, u_h, n_h) = (z.chunk(3, dim=-1) for z in (ih, torch.addmm(hh, h, weight)))
        n = torch.tanh(n_i + torch.sigmoid(r_i + r_h) * n_h)
        return n + torch.sigmoid(u_i + u_h) * (h - n), None


def unit_of(module: nn.Module) -> Unit:
    """The unit of a recurrent module."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return Lstm()
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return Gru()
    return Elman(torch.relu if module.nonlinearity == "relu" else torch.tanh)


@final
@dataclass(frozen=True)
class Unrolled:
    """One layer in one direction: h of all times [n t h], the last state, and the parameters by name."""

    h: Tensor
    state: State
    layers: dict[str, Replayable]


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

    def start(self, n: int) -> State:
        """Zeros: c is as wide as there are units, and h as W_hh takes it."""
        weight = self._weight("weight_hh")
        h = weight.new_zeros(n, weight.shape[1])
        if not isinstance(self.module, (nn.LSTM, nn.LSTMCell)):
            return h, None
        return h, weight.new_zeros(n, weight.shape[0] // 4)

    def unroll(self, x: Tensor, state: State, mask: Tensor | None) -> Unrolled:
        """Over x [n t i] from a state. Where ``mask`` [n t] is zero the state stays, and nothing is an input."""
        unit, (n, steps, _) = unit_of(self.module), x.shape
        ih, hh = unit.sums(F.linear(x.unsqueeze(2), self._weight("weight_ih"), self._bias("ih")), self._bias("hh"))
        weight, at = self._weight("weight_hh").T, list(zip(_times(ih), _times(hh), strict=True))
        projection = own(self.module, f"weight_hr{self.suffix}")
        hr = None if projection is None else probe(x.new_zeros(()).expand(n, steps, 1, len(projection)))
        shift = () if hr is None else _times(hr)
        before, inner, after = ([state[0]] * steps for _ in range(3))
        for t in reversed(range(steps)) if self.backward else range(steps):
            before[t] = state[0]
            h, c = unit.step(*at[t], state, weight)
            inner[t] = h
            if projection is not None:
                h = torch.addmm(shift[t], h, projection.T)
            state = (h, c) if mask is None else _where(mask[:, t, None] > 0, (h, c), state)
            after[t] = state[0]
        return Unrolled(
            _stack(after, mask), state, self._seen((x, _stack(before, mask), _stack(inner, mask)), (ih, hh, hr), mask)
        )

    def _seen(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], mask: Tensor | None
    ) -> dict[str, Replayable]:
        """The layers with their inputs [n t i] and where their outputs [n t 1 o] are."""
        valid, found = None if mask is None else mask.unsqueeze(2), {}
        for keys, a, z in zip(self.layers, inputs, outputs, strict=True):
            if z is not None:
                found.update(weight_and_bias(keys, a.unsqueeze(2), z, valid))
        return found

    def _weight(self, name: str) -> Tensor:
        found = own(self.module, f"{name}{self.suffix}")
        assert found is not None
        return found

    def _bias(self, name: str) -> Tensor | None:
        return own(self.module, f"bias_{name}{self.suffix}")


def _times(z: Tensor) -> tuple[Tensor, ...]:
    """[n t 1 o] as one [n o] for every time."""
    return z.squeeze(2).unbind(1)


def _stack(steps: list[Tensor], mask: Tensor | None) -> Tensor:
    """[n t ·], zero where a position is masked."""
    stacked = torch.stack(steps, dim=1)
    return stacked if mask is None else stacked * mask.unsqueeze(-1)


def _where(kept: Tensor, new: State, old: State) -> State:
    h = torch.where(kept, new[0], old[0])
    return (h, None) if new[1] is None or old[1] is None else (h, torch.where(kept, new[1], old[1]))
