"""Fused recurrent modules as linear layers that are called once a time step, so that their bases can be changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.invariance.affine import Bases, Transformed

State: TypeAlias = tuple[Tensor, ...]  # (h,) or (h, c), each [n h]


class Cell(ABC):
    """What a recurrent network does with its pre-activations; no parameters."""

    @abstractmethod
    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        """The next state from z = Vx_t + b, u = Wa_{t−1} + b′ [n (gates h)] and the state before."""


@final
@dataclass(frozen=True)
class Elman(Cell):
    """a_t = φ(z + u) (003 section 5.1.1)."""

    φ: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        return (self.φ(z + u),)


@final
@dataclass(frozen=True)
class LongShortTerm(Cell):
    """c_t = f∘c_{t−1} + i∘g and a_t = o∘tanh(c_t), with the gates i, f, g, o."""

    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        i, f, g, o = (z + u).chunk(4, dim=-1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@final
@dataclass(frozen=True)
class Gated(Cell):
    """a_t = (1 − s)∘tanh(z_n + r∘u_n) + s∘a_{t−1}, with the gates r, s, n."""

    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        (z_r, z_s, z_n), (u_r, u_s, u_n) = z.chunk(3, dim=-1), u.chunk(3, dim=-1)
        s = (z_s + u_s).sigmoid()
        return ((1 - s) * (z_n + (z_r + u_r).sigmoid() * u_n).tanh() + s * state[0],)


@final
class Direction(nn.Module):
    """One layer of a recurrent network in one direction of time."""

    def __init__(self, cell: Cell, inputs: Transformed, recurrent: Transformed) -> None:
        super().__init__()
        self.cell, self.inputs, self.recurrent = cell, inputs, recurrent

    def forward(self, x: list[Tensor], state: State) -> tuple[list[Tensor], State]:
        """From x_1 … x_T [n i] and the first state to a_1 … a_T [n h] and the last state."""
        outputs = []
        for x_t in x:
            state = self.cell(self.inputs(x_t), self.recurrent(state[0]), state)
            outputs.append(state[0])
        return outputs, state


@final
class Unrolled(nn.Module):
    """An ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU`` with the same arguments and outputs, in other bases.

    The recurrent layer reads Ωa_{t−1} + γ at every step, at the first one too: a_0 is transformed with the rest (003
    section 5.1.1; ERRATA 44). The layers that add up to one pre-activation have bases of their own; the network of the
    paper, V† = Φ⁻¹V beside W† = Φ⁻¹WΩ⁻¹, is the case where they share Φ. Layer l of the module called ``rnn`` has the
    names ``rnn.inputs_l`` and ``rnn.recurrent_l`` for its bases, with ``_reverse`` in the other direction.

    >>> from natgrad.invariance.affine import Random
    >>> rnn, x = nn.RNN(3, 4, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    >>> torch.allclose(Unrolled("rnn", rnn, Random(seed=1))(x)[0], rnn(x)[0])
    True
    """

    def __init__(self, name: str, rnn: nn.RNNBase, bases: Bases) -> None:
        super().__init__()
        self.batch_first, self.hidden, self.states = rnn.batch_first, rnn.hidden_size, 1 + isinstance(rnn, nn.LSTM)
        self.ways = 2 if rnn.bidirectional else 1
        suffixes = [f"{layer}{way}" for layer in range(rnn.num_layers) for way in ("", "_reverse")[: self.ways]]
        prefix = f"{name}." if name else ""
        cell = _cell(rnn)
        self.directions = nn.ModuleList(
            Direction(
                cell,
                Transformed(f"{prefix}inputs_{s}", _linear(rnn, f"ih_l{s}"), bases),
                Transformed(f"{prefix}recurrent_{s}", _linear(rnn, f"hh_l{s}"), bases),
            )
            for s in suffixes
        )

    def forward(self, x: Tensor, hx: Tensor | State | None = None) -> tuple[Tensor, Tensor | State]:
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise TypeError("a recurrent network in other bases takes sequences of one length as a tensor, 3 axes")
        time = 1 if self.batch_first else 0
        sequence, last = list(x.unbind(time)), []
        for layer in range(0, len(self.directions), self.ways):
            ways = []
            for way in range(self.ways):
                start = self._start(layer + way, sequence[0], hx)
                outputs, state = self.directions[layer + way](sequence[::-1] if way else sequence, start)
                ways.append(outputs[::-1] if way else outputs)
                last.append(state)
            sequence = [torch.cat(at_t, dim=-1) for at_t in zip(*ways, strict=True)]
        final_states = tuple(torch.stack(states) for states in zip(*last, strict=True))
        return torch.stack(sequence, dim=time), final_states if self.states == 2 else final_states[0]

    def _start(self, direction: int, x: Tensor, hx: Tensor | State | None) -> State:
        if hx is None:
            return (x.new_zeros(x.shape[0], self.hidden),) * self.states
        return tuple(h[direction] for h in (hx if isinstance(hx, tuple) else (hx,)))


def _cell(rnn: nn.RNNBase) -> Cell:
    if isinstance(rnn, nn.LSTM):
        return LongShortTerm()
    if isinstance(rnn, nn.GRU):
        return Gated()
    return Elman(torch.tanh if rnn.nonlinearity == "tanh" else torch.relu)


def _linear(rnn: nn.RNNBase, suffix: str) -> nn.Linear:
    """The parameters of one matrix of the module as a linear layer."""
    weight = rnn.get_parameter(f"weight_{suffix}")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=rnn.bias, device="meta")
    layer.weight = weight
    if rnn.bias:
        layer.bias = rnn.get_parameter(f"bias_{suffix}")
    return layer
