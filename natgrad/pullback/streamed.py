"""The two factors of every layer, one after the other: each goes into a sink, and is forgotten before the next is made.

What is averaged over time need not be whole at any moment. The factors of a large network are larger than its
parameters, and an estimate that is held beside its average would be as large again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from torch import Tensor

from natgrad.model import tensors_of
from natgrad.pullback.blocks import Block
from natgrad.pullback.flow import Flow
from natgrad.pullback.moments import coupled_by, second_moments, whole
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.recorded import Recordings, Weight
from natgrad.pullback.sharing import Cotangents, Sharing
from natgrad.pullback.sink import Collected, Layers, Sink
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Moment


def factors_of(pb: Pullback, blocks: Sequence[Block], sharing: Sharing) -> list[tuple[Tensor, Tensor]]:
    """S and A of every layer in ``blocks``, which have rules."""
    collected = Collected(len(blocks))
    stream(pb, blocks, sharing, collected)
    return collected.pairs()


def stream(pb: Pullback, blocks: Sequence[Block], sharing: Sharing, sink: Sink) -> None:
    """S and A of every layer in ``blocks``, which have rules, into the sink.

    The inputs come first, while there are no cotangents. On a GPU the kernels of rules that read nothing but a call are
    recorded, with those of the sink, and replayed.
    """
    if not blocks:
        return
    if pb.coupling is None and not whole(pb):
        for b, (s, a) in enumerate(second_moments(pb, blocks, sharing)):
            sink.outputs(b, s, 1)
            sink.inputs(b, Moment(a, 1))
        sink.flush()
        return
    tape = pb.tape(pb.parts[0])
    layers = Layers(tuple(blocks), sharing, pb.y.dtype, pb.n, coupled_by(pb, tape))
    recordings = pb.passes.recordings
    if recordings is not None and sink.places is not None:
        _recorded(pb, recordings, layers, sink)
    else:
        for b in range(len(blocks)):
            layers.put_inputs(b, tape, sink)

        def serve(numbers: Sequence[int], g: Cotangents) -> None:
            for b in layers.in_order(tape, g, numbers):
                layers.put_outputs(b, tape, g, sink)

        Flow(tape, layers, serve).run(pb.root)
    sink.flush()


def _recorded(pb: Pullback, recordings: Recordings, layers: Layers, sink: Sink) -> None:
    """The layers whose rules are pure from recordings where there are any, the others kernel by kernel.

    There is one for the inputs, which runs while the backward pass is started, and what it needs is free again before
    there are cotangents. These have one or, where they are large, several: what has been used is forgotten.
    """
    tape = pb.tape(pb.parts[0])
    rules = [[kind.rule for kind in block.kinds] for block in layers.blocks]
    pure = {b for b, own in enumerate(rules) if all(rule is not None and rule.pure for rule in own)}
    recorded = _Recorded(recordings, layers, tape, sink)
    recorded.inputs([b for b in sorted(pure) if not layers.late(b)])
    for b in range(len(rules)):
        if b not in pure:
            layers.put_inputs(b, tape, sink)

    def serve(numbers: Sequence[int], g: Cotangents) -> None:
        recorded.outputs([b for b in numbers if b in pure], g)
        for b in numbers:
            if b not in pure:
                layers.put_outputs(b, tape, g, sink)

    Flow(tape, layers, serve).run(pb.root)


@final
@dataclass(frozen=True)
class _Recorded:
    """Kernels that read what the layers of a pass were called with, or its cotangents, and write into a sink."""

    recordings: Recordings
    layers: Layers
    tape: Tape
    sink: Sink

    def inputs(self, numbers: Sequence[int]) -> None:
        """A of these layers."""
        places = self._places(numbers)

        def compute(sources: Sequence[Tensor], weight: Weight) -> None:
            here, into = self._reading(places, iter(sources)), self.sink.weighted(weight)
            for b in numbers:
                self.layers.put_inputs(b, here, into)
            into.flush()

        self.recordings.run(self._called(places), self._what("A", numbers, places), compute, self.sink.weight)

    def outputs(self, numbers: Sequence[int], g: Cotangents) -> None:
        """S of these layers and, where it is late, A."""
        places = self._places(numbers)
        late = self._places([b for b in numbers if self.layers.late(b)])

        def compute(sources: Sequence[Tensor], weight: Weight) -> None:
            supply = iter(sources)
            here, into = self._reading(late, supply), self.sink.weighted(weight)
            own = Cotangents({at: tuple(next(supply) for _ in g.outer[at]) for at in places}, {})
            for b in numbers:
                self.layers.put_outputs(b, here, own, into)
            into.flush()

        sources = [*self._called(late), *(t for at in places for t in g.outer[at])]
        self.recordings.run(sources, self._what("S", numbers, places), compute, self.sink.weight)

    def _places(self, numbers: Sequence[int]) -> list[int]:
        """The uses of these layers."""
        return list(dict.fromkeys([at for b in numbers for at in self._uses[b]]))

    @cached_property
    def _uses(self) -> list[list[int]]:
        """Of every layer."""
        return [self.tape.places(block) for block in self.layers.blocks]

    def _called(self, places: Sequence[int]) -> list[Tensor]:
        """What these uses were called with."""
        found: list[Tensor] = []
        for use in (self.tape.uses[at] for at in places):
            (x, *more), named = use.call.args or (None,), use.call.kwargs
            found += [x] if isinstance(x, Tensor) and not more and not named else tensors_of((use.call.args, named))
        return found

    def _reading(self, places: Sequence[int], supply: Iterator[Tensor]) -> Tape:
        """The tape, with these tensors in the calls of these uses."""
        calls = {at: self.tape.uses[at].call.map(lambda _: next(supply)) for at in places}
        changed = (replace(use, call=calls[at]) if at in calls else use for at, use in enumerate(self.tape.uses))
        return replace(self.tape, uses=tuple(changed))

    def _what(self, side: str, numbers: Sequence[int], places: Sequence[int]) -> Hashable:
        """All that the kernels depend on, beside what they read."""
        uses = [self.tape.uses[at] for at in places]
        buffers = [t for use in uses for t in use.module._buffers.values() if t is not None]
        return (
            side,
            self.layers.sharing,
            self.layers.n,
            self.layers.places,
            tuple(self.layers.blocks[b].names for b in numbers),
            tuple(use.call.training for use in uses),
            tuple(t.data_ptr() for t in buffers),
            self.sink.places,
        )
