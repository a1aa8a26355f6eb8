"""The rules of ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and of their cells: the recurrence is run again, step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from natgrad.accelerate.moments import single
from natgrad.rules.base import (
    Call,
    Keys,
    Replay,
    Replayed,
    detached_parameter,
    plain,
    trainable,
    weight_and_bias,
)
from natgrad.rules.features import DenseFeatures
from natgrad.rules.units import Adjoint, Gru, LinearMap, State, UnitTrace, unit_of

# Packed sequences, padded.


@final
@dataclass(frozen=True)
class PaddedIndex:
    """The example n and the time t of every row of a packed sequence's data; the examples are in the user's order.

    >>> from torch.nn.utils.rnn import pack_padded_sequence
    >>> packed = pack_padded_sequence(torch.tensor([[[1.0], [0.0]], [[2.0], [3.0]]]), torch.tensor([1, 2]), True, False)
    >>> packed.data.flatten()
    tensor([2., 1., 3.])
    >>> index = PaddedIndex.of(packed)
    >>> index.pad(packed.data).squeeze(-1)
    tensor([[1., 0.],
            [2., 3.]])
    >>> index.mask(packed.data)
    tensor([[1., 0.],
            [1., 1.]])
    """

    example: Tensor  # [row]
    time: Tensor  # [row]
    n: int
    steps: int

    @staticmethod
    def of(packed: PackedSequence) -> PaddedIndex:
        sizes = packed.batch_sizes  # on the CPU, [t]: the examples are sorted by length, and this many have a time t
        starts = sizes.cumsum(0) - sizes
        time = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        example = (torch.arange(len(time)) - starts[time]).to(packed.data.device)
        if packed.sorted_indices is not None:
            example = packed.sorted_indices[example]
        return PaddedIndex(example, time.to(packed.data.device), int(sizes[0]), len(sizes))

    def pad(self, data: Tensor) -> Tensor:
        """[row ·] → [n t ·], zero where an example has ended."""
        return data.new_zeros(self.n, self.steps, data.shape[1]).index_put((self.example, self.time), data)

    def pack(self, padded: Tensor) -> Tensor:
        """The inverse of ``pad``."""
        return padded[self.example, self.time]

    def mask(self, data: Tensor) -> Tensor:
        """[n t], one where an example has not ended."""
        return self.pad(data.new_ones(len(data), 1)).squeeze(-1)


# A recurrence over time, forwards, and backwards with the cotangents of its layers.


@final
@dataclass(frozen=True)
class Direction:
    """One layer of a module in one direction of time; its parameters end with ``suffix``, as ``_l0_reverse``."""

    module: nn.Module
    suffix: str
    backward: bool = False

    @property
    def layers(self) -> tuple[Keys, ...]:
        """(W_ih, b_ih), (W_hh, b_hh) and, for an LSTM with projections, (W_hr,)."""
        names = (("weight_ih", "bias_ih"), ("weight_hh", "bias_hh"), ("weight_hr",))
        return tuple(tuple(f"{name}{self.suffix}" for name in layer) for layer in names)

    @property
    def ih(self) -> LinearMap:
        return LinearMap(self._weight("weight_ih"), self._parameter("bias_ih"))

    @property
    def hh(self) -> LinearMap:
        return LinearMap(self._weight("weight_hh"), self._parameter("bias_hh"))

    @property
    def hr(self) -> Tensor | None:
        """W_hr."""
        return self._parameter("weight_hr")

    def start(self, n: int) -> State:
        """The zero state: h has the width of the input of W_hh, c has one entry per unit."""
        weight = self.hh.weight
        h = weight.new_zeros(n, weight.shape[1])
        if not isinstance(self.module, (nn.LSTM, nn.LSTMCell)):
            return h, None
        return h, weight.new_zeros(n, weight.shape[0] // 4)

    def times(self, steps: int) -> Sequence[int]:
        """In the order of the recurrence."""
        return range(steps)[:: -1 if self.backward else 1]

    def unroll(self, x: Tensor, state: State, mask: Tensor | None) -> Unrolled:
        """Run over x [n t i] from a state. Where ``mask`` [n t] is zero the state stays, and inputs are zero."""
        unit, hh, hr, steps = unit_of(self.module), self.hh, self.hr, x.shape[1]
        ih = self.ih.of(x)
        if hh.bias is not None and not isinstance(unit, Gru):  # the others add both biases
            ih = ih + hh.bias
        saved, inner, before, c_before, after, c_after = ([state[0]] * steps for _ in range(6))
        rows = ih.unbind(1)
        for t in self.times(steps):
            before[t], c = state
            c_before[t] = state[0] if c is None else c
            saved[t], (h, c) = unit.step(rows[t], hh, state)
            inner[t] = h
            c_after[t] = h if c is None else c
            h = h if hr is None else F.linear(h, hr)
            state = (h, c) if mask is None else _where(mask[:, t, None] > 0, (h, c), state)
            after[t] = state[0]
        keep = None if mask is None else mask.unsqueeze(2)
        stacked = [torch.stack(values, dim=1) for values in (after, before, inner)]
        h_after, h_before, m = stacked if keep is None else [values * keep for values in stacked]
        c_old, c_new = (None if state[1] is None else torch.stack(values, dim=1) for values in (c_before, c_after))
        inputs: dict[str, DenseFeatures] = {}
        for keys, a in zip(self.layers, (x, h_before, m), strict=True):
            inputs |= weight_and_bias(keys, a.unsqueeze(2), keep)
        trace = UnitTrace(ih, torch.stack(saved, dim=1), h_before, c_old, c_new, keep)
        return Unrolled(self, h_after, state, inputs, trace)

    def _weight(self, name: str) -> Tensor:
        weight = self._parameter(name)
        assert weight is not None
        return weight

    def _parameter(self, name: str) -> Tensor | None:
        return detached_parameter(self.module, f"{name}{self.suffix}")


@final
@dataclass(frozen=True)
class Unrolled:
    """One layer in one direction: h of all times [n t h], the last state, and the inputs of the parameters by name."""

    direction: Direction
    h: Tensor
    state: State
    layers: dict[str, DenseFeatures]
    trace: UnitTrace

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


def _where(present: Tensor, new: State, old: State) -> State:
    h = torch.where(present, new[0], old[0])
    return (h, None) if new[1] is None or old[1] is None else (h, torch.where(present, new[1], old[1]))


@final
class RecurrentRule(Replayed):
    """Fused recurrences: every layer and direction has the layers W̄_ih on x̄_t, W̄_hh on h̄_{t−1}, and W_hr.

    The factors sum over the times as if they were independent (Martens, Ba and Johnson 2018).

    z_t = W̄_ih x̄_t + W̄_hh h̄_{t−1} is shared over the times t, which are the positions r; the gates of a unit are rows
    of one W̄ [1 o i] (i, f, g, o of an LSTM; r, z, n of a GRU). W_ih and W_hh of an RNN or an LSTM have the same
    cotangents. All layers, both directions, projections, either order of the axes, initial states and packed
    sequences are covered; times after the end of a sequence are masked, and count nowhere. A sequence without a batch
    is one example.

    The dropout mask of a fused call is not known. With dropout between the layers, in training mode, the replay runs
    without it: inputs and cotangents inside the module are those of the mean network. Cotangents that pass through the
    module have seen the mask. In evaluation mode, and with dropout=0, everything is exact.

    >>> import natgrad as ng
    >>> lstm = nn.LSTM(2, 3, batch_first=True)
    >>> pb = ng.pullback(lstm, torch.randn(4, 5, 2), ng.Euclidean(), output=lambda out: out[0])
    >>> [layer.title for layer in pb.layers]
    ['weight_ih_l0 + bias_ih_l0', 'weight_hh_l0 + bias_hh_l0']
    """

    def covers(self, module: nn.Module) -> bool:
        kind = next((kind for kind in (nn.RNN, nn.LSTM, nn.GRU) if isinstance(module, kind)), None)
        if kind is None:
            return False
        names = (name for each in _directions(cast(nn.RNNBase, module)) for layer in each.layers for name in layer)
        return plain(module, kind, *names)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        return _trained(module, _directions(cast(nn.RNNBase, module)))

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        rnn, x = cast(nn.RNNBase, module), call.argument(0, "input")
        if isinstance(x, PackedSequence) or x.ndim == 2:
            return None
        return 0 if rnn.batch_first else 1

    def positions(self, module: nn.Module, keys: Keys, call: Call) -> int:
        rnn, x = cast(nn.RNNBase, module), call.argument(0, "input")
        if isinstance(x, PackedSequence):
            return len(x.batch_sizes)
        return int(x.shape[1 if rnn.batch_first and x.ndim == 3 else 0])

    def replay(self, module: nn.Module, call: Call) -> Replay:
        rnn = cast(nn.RNNBase, module)
        batch = _Sequences.of(rnn, call.argument(0, "input"))
        states = batch.states(call.argument(1, "hx"))
        directions, ways = _directions(rnn), 1 + rnn.bidirectional
        h, runs = batch.x, []
        for at, direction in enumerate(directions):
            state = states[at] if states else direction.start(batch.x.shape[0])
            runs.append(direction.unroll(h, state, batch.mask))
            if (at + 1) % ways == 0:  # the last direction of a layer
                h = torch.cat([run.h for run in runs[-ways:]], dim=-1)
        outputs = (*batch.outputs(h), *batch.last([run.state for run in runs]))
        layers = {name: inputs for run in runs for name, inputs in run.layers.items()}
        return _RecurrentReplay(outputs, layers, batch, tuple(runs))


@final
class CellRule(Replayed):
    """One step of a recurrence: W̄_ih on x̄ and W̄_hh on h̄, as in ``RecurrentRule``. Steps are uses, one after another.

    >>> CellRule().layers(nn.GRUCell(2, 3, bias=False))
    (('weight_ih',), ('weight_hh',))
    """

    def covers(self, module: nn.Module) -> bool:
        kind = next((kind for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell) if isinstance(module, kind)), None)
        names = (name for layer in Direction(module, "").layers for name in layer)
        return kind is not None and plain(module, kind, *names)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        return _trained(module, (Direction(module, ""),))

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        return 0 if call.argument(0, "input").ndim == 2 else None

    def positions(self, module: nn.Module, keys: Keys, call: Call) -> int:
        return 1

    def replay(self, module: nn.Module, call: Call) -> Replay:
        x, given = single(call.argument(0, "input")), call.argument(1, "hx")
        direction, batched = Direction(module, ""), x.ndim == 2
        state = direction.start(x.shape[0] if batched else 1)
        if given is not None:
            h, c = _pair(given)
            state = (h, c) if batched else (h.unsqueeze(0), None if c is None else c.unsqueeze(0))
        run = direction.unroll((x if batched else x.unsqueeze(0)).unsqueeze(1), state, None)
        outputs = tuple(t if batched else t.squeeze(0) for t in run.state if t is not None)
        return _CellReplay(outputs, run.layers, run)


@final
@dataclass(frozen=True)
class _Sequences:
    """The input of a fused recurrence as x [n t i], in the user's order, and the conversion back to its layout."""

    rnn: nn.RNNBase
    given: Any
    x: Tensor
    mask: Tensor | None = None  # [n t]
    padding: PaddedIndex | None = None

    @staticmethod
    def of(rnn: nn.RNNBase, given: Any) -> _Sequences:
        if isinstance(given, PackedSequence):
            padding, data = PaddedIndex.of(given), single(given.data)
            return _Sequences(rnn, given, padding.pad(data), padding.mask(data), padding)
        x = single(given)
        if x.ndim == 2:
            return _Sequences(rnn, given, x.unsqueeze(0))
        return _Sequences(rnn, given, x if rnn.batch_first else x.transpose(0, 1))

    @property
    def batched(self) -> bool:
        return isinstance(self.given, PackedSequence) or self.given.ndim == 3

    def states(self, hx: Any) -> list[State]:
        """The initial states of every layer and direction [n h]; none where they are zero."""
        if hx is None:
            return []
        h, c = (t if t is None or self.batched else t.unsqueeze(1) for t in _pair(hx))
        assert h is not None
        return list(zip(h.unbind(0), [None] * len(h) if c is None else c.unbind(0), strict=True))

    def padded(self, g: Tensor) -> Tensor:
        """Cotangents of the output, as [k n t h]."""
        if self.padding is not None:
            return self.padding.pad(g.movedim(0, 1).flatten(1)).unflatten(2, (g.shape[0], -1)).movedim(2, 0)
        if not self.batched:
            return g.unsqueeze(1)
        return g if self.rnn.batch_first else g.transpose(1, 2)

    def outputs(self, h: Tensor) -> tuple[Tensor, ...]:
        """The output tensors of the module for h [n t h] of its last layer."""
        if self.padding is not None:
            fixed = (self.given.batch_sizes, self.given.sorted_indices, self.given.unsorted_indices)
            return (self.padding.pack(h), *(t for t in fixed if t is not None))
        if not self.batched:
            return (h.squeeze(0),)
        return (h if self.rnn.batch_first else h.transpose(0, 1),)

    def last(self, states: list[State]) -> tuple[Tensor, ...]:
        """The last states, [layer n h] each."""
        stacked = [
            torch.stack([t for t in side if t is not None]) for side in zip(*states, strict=True) if _there(side)
        ]
        return tuple(t if self.batched else t.squeeze(1) for t in stacked)


@final
@dataclass(frozen=True)
class _RecurrentReplay(Replay):
    """All layers and directions in the order of the states."""

    batch: _Sequences
    runs: tuple[Unrolled, ...]

    def pull(self, g: tuple[Tensor, ...]) -> dict[str, Tensor]:
        dtype, cotangents, ways = self.batch.x.dtype, {}, 1 + self.batch.rnn.bidirectional
        count = sum(t is not None for t in self.runs[0].state)
        last = [t.to(dtype) if self.batch.batched else t.to(dtype).unsqueeze(2) for t in g[-count:]]  # [k layer n h]
        above = self.batch.padded(g[0].to(dtype))
        for first in reversed(range(0, len(self.runs), ways)):
            below = []
            for at, g_of in enumerate(above.chunk(ways, dim=-1), start=first):
                state = (last[0][:, at], last[1][:, at] if count == 2 else None)
                layers, dz = self.runs[at].pull(g_of, state)
                cotangents.update(layers)
                if first > 0:
                    below.append(self.runs[at].down(dz))
            above = functools.reduce(torch.add, below) if below else above
        return cotangents


@final
@dataclass(frozen=True)
class _CellReplay(Replay):
    """One step."""

    run: Unrolled

    def pull(self, g: tuple[Tensor, ...]) -> dict[str, Tensor]:
        last = [t.to(self.run.h.dtype).reshape(t.shape[0], *self.run.state[0].shape[:1], -1) for t in g]
        state = (last[0], last[1] if len(last) == 2 else None)
        return self.run.pull(last[0].new_zeros(last[0].unsqueeze(2).shape), state)[0]


def _there(side: tuple[Tensor | None, ...]) -> bool:
    return side[0] is not None


def _pair(hx: Any) -> State:
    """h and, for an LSTM, c."""
    h, c = hx if isinstance(hx, (tuple, list)) else (hx, None)
    return single(h), None if c is None else single(c)


def _directions(rnn: nn.RNNBase) -> tuple[Direction, ...]:
    """Every layer in every direction, in the order of the states."""
    ways = (("", False), ("_reverse", True)) if rnn.bidirectional else (("", False),)
    return tuple(Direction(rnn, f"_l{layer}{end}", back) for layer in range(rnn.num_layers) for end, back in ways)


def _trained(module: nn.Module, directions: tuple[Direction, ...]) -> tuple[Keys, ...]:
    """The layers, without parameters that are frozen."""
    names = trainable(module)
    layers = [tuple(n for n in layer if n in names) for direction in directions for layer in direction.layers]
    return tuple(keys for keys in layers if keys)
