"""The two factors of every layer, one after the other: each goes into a sink, and is forgotten before the next is made.

What is averaged over time need not be whole at any moment. The factors of a large network are larger than its
parameters, and an estimate that is held beside its average would be as large again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from natgrad.model import tensors_of
from natgrad.pullback.blocks import Block
from natgrad.pullback.moments import check_inputs, check_outputs, cotangents, second_moments, whole
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.recorded import Recordings, Weight
from natgrad.pullback.sharing import Cotangents, Sharing, mean
from natgrad.pullback.tape import Tape
from natgrad.pullback.tied import joined
from natgrad.rules.base import Moment


class Sink(ABC):
    """Takes the factors of layers one by one, with a weight."""

    @property
    @abstractmethod
    def weight(self) -> float:
        """Of all that arrives."""

    @property
    @abstractmethod
    def places(self) -> Hashable:
        """Where it writes: kernels that were recorded write there again."""

    @abstractmethod
    def weighted(self, weight: Weight) -> Sink:
        """The same sink with another weight, which may be a number on the device."""

    @abstractmethod
    def inputs(self, b: int, moment: Moment) -> None:
        """A = total/count of the layer number b; the total may be overwritten."""

    @abstractmethod
    def outputs(self, b: int, s: Tensor) -> None:
        """S of the layer number b; it may be overwritten."""

    @abstractmethod
    def flush(self) -> None:
        """Nothing is held back any longer."""


def stream(pb: Pullback, blocks: Sequence[Block], sharing: Sharing, sink: Sink) -> None:
    """S and A of every layer in ``blocks``, which have rules, into the sink.

    The inputs come first, while there are no cotangents. On a GPU the kernels of rules that read nothing but a call are
    recorded, with those of the sink, and replayed.
    """
    if pb.coupling is not None or not whole(pb):
        for b, (s, a) in enumerate(second_moments(pb, blocks, sharing)):
            sink.outputs(b, s)
            sink.inputs(b, Moment(a, 1))
    elif pb.recordings is not None:
        _recorded(pb, pb.recordings, _Layers(tuple(blocks), sharing, pb.y.dtype), sink)
    else:
        tape, layers = pb.tape(pb.parts[0]), _Layers(tuple(blocks), sharing, pb.y.dtype)
        for b in range(len(blocks)):
            layers.put_inputs(b, tape, sink)
        g = cotangents(tape, pb.root / math.sqrt(pb.n))
        for b in layers.in_order(tape, g):
            layers.put_outputs(b, tape, g, sink)
    sink.flush()


@final
@dataclass(frozen=True)
class _Layers:
    """The layers, and what becomes of their positions."""

    blocks: tuple[Block, ...]
    sharing: Sharing
    dtype: torch.dtype

    def put_inputs(self, b: int, tape: Tape, sink: Sink) -> None:
        """A, unless it depends on cotangents: that of a tied weight does."""
        block = self.blocks[b]
        if not block.facets:
            sink.inputs(b, self._moment(block, tape))

    def put_outputs(self, b: int, tape: Tape, g: Cotangents, sink: Sink) -> None:
        """S and, of a tied weight, A."""
        block = self.blocks[b]
        if not block.facets:
            sink.outputs(b, self._product(block, tape, g))
            return
        pairs = [(self._product(kind, tape, g), mean(self._moment(kind, tape))) for kind in block.kinds]
        s, a = joined(block, pairs)
        sink.outputs(b, s)
        sink.inputs(b, Moment(a, 1))

    def in_order(self, tape: Tape, g: Cotangents) -> Iterable[int]:
        """The numbers of the layers; cotangents that no later layer asks for are forgotten on the way."""
        left = Counter(at for block in self.blocks for at in tape.places(block))
        for b, block in enumerate(self.blocks):
            yield b
            for at in tape.places(block):
                left[at] -= 1
                if not left[at]:
                    g.forget(at)

    def _moment(self, kind: Block, tape: Tape) -> Moment:
        moment = self.sharing.inputs(tape, kind)
        check_inputs(kind, moment.total)
        return Moment(moment.total.to(self.dtype), moment.count)

    def _product(self, kind: Block, tape: Tape, g: Cotangents) -> Tensor:
        s = self.sharing.outputs(tape, kind, g)
        check_outputs(kind, s)
        return s.to(self.dtype)


def _recorded(pb: Pullback, recordings: Recordings, layers: _Layers, sink: Sink) -> None:
    """The layers whose rules are pure from a recording where there is one, the others kernel by kernel."""
    tape = pb.tape(pb.parts[0])
    g = cotangents(tape, pb.root / math.sqrt(pb.n))
    pure = [b for b, block in enumerate(layers.blocks) if all(k.rule is not None and k.rule.pure for k in block.kinds)]
    places = list(dict.fromkeys(at for b in pure for at in tape.places(layers.blocks[b])))
    uses = [tape.uses[at] for at in places]
    buffers = [t for use in uses for t in use.module._buffers.values() if t is not None]
    what = (
        layers.sharing,
        tuple(layers.blocks[b].names for b in pure),
        tuple(use.call.training for use in uses),
        tuple(t.data_ptr() for t in buffers),
        sink.places,
    )

    def compute(sources: Sequence[Tensor], weight: Weight) -> None:
        supply = iter(sources)
        calls = {at: tape.uses[at].call.map(lambda _: next(supply)) for at in places}
        outer = {at: tuple(next(supply) for _ in g.outer[at]) for at in places}
        changed = (replace(use, call=calls[at]) if at in calls else use for at, use in enumerate(tape.uses))
        here, own, into = replace(tape, uses=tuple(changed)), Cotangents(outer, {}), sink.weighted(weight)
        for b in pure:
            layers.put_inputs(b, here, into)
            layers.put_outputs(b, here, own, into)
        into.flush()

    sources = [t for use in uses for t in tensors_of((use.call.args, use.call.kwargs))]
    sources += [t for at in places for t in g.outer[at]]
    recordings.run(sources, what, compute, sink.weight)
    for b in sorted({*range(len(layers.blocks))} - {*pure}):
        layers.put_inputs(b, tape, sink)
        layers.put_outputs(b, tape, g, sink)
