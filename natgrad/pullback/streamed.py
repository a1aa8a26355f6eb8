"""The two factors of every layer, one after the other: each goes into a sink, and is forgotten before the next is made.

What is averaged over time need not be whole at any moment. The factors of a large network are larger than its
parameters, and an estimate that is held beside its average would be as large again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

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
from natgrad.rules.base import Moment, Replayed


class Sink(ABC):
    """Takes the factors of layers one by one, with a weight."""

    @property
    def weight(self) -> float:
        """Of all that arrives."""
        return 1.0

    @property
    def places(self) -> Hashable:
        """Where it writes: kernels that were recorded write there again. None where nothing is recorded."""
        return None

    def weighted(self, weight: Weight) -> Sink:
        """The same sink with another weight, which may be a number on the device."""
        return self

    @abstractmethod
    def inputs(self, b: int, moment: Moment) -> None:
        """A = total/count of the layer number b; the total may be overwritten."""

    @abstractmethod
    def outputs(self, b: int, s: Tensor) -> None:
        """S of the layer number b; it may be overwritten."""

    def flush(self) -> None:  # noqa: B027 - a sink that holds nothing back has nothing to do
        """Nothing is held back any longer."""


@final
class Collected(Sink):
    """All factors, S and A of every layer."""

    def __init__(self, count: int) -> None:
        self.left: list[Tensor | None] = [None] * count
        self.right: list[Tensor | None] = [None] * count

    def inputs(self, b: int, moment: Moment) -> None:
        self.right[b] = mean(moment)

    def outputs(self, b: int, s: Tensor) -> None:
        self.left[b] = s

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """After the stream."""
        return [(s, a) for s, a in zip(self.left, self.right, strict=True) if s is not None and a is not None]


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
    if pb.coupling is not None or not whole(pb):
        for b, (s, a) in enumerate(second_moments(pb, blocks, sharing)):
            sink.outputs(b, s)
            sink.inputs(b, Moment(a, 1))
    elif pb.recordings is not None and sink.places is not None:
        _recorded(pb, pb.recordings, _Layers(tuple(blocks), sharing, pb.y.dtype), sink)
    else:
        tape, layers = pb.tape(pb.parts[0]), _Layers(tuple(blocks), sharing, pb.y.dtype)
        for b in range(len(blocks)):
            layers.put_inputs(b, tape, sink)
        flow = Flow(tape, layers, sink)
        g = flow.cotangents(pb.root / math.sqrt(pb.n))
        for b in layers.in_order(tape, g, flow.left):
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

    def in_order(self, tape: Tape, g: Cotangents, numbers: Iterable[int]) -> Iterable[int]:
        """The numbers of these layers; cotangents that no later layer asks for are forgotten on the way."""
        left = Counter(at for b in numbers for at in tape.places(self.blocks[b]))
        for b in numbers:
            yield b
            for at in tape.places(self.blocks[b]):
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


@final
class Flow:
    """A backward pass in which the cotangents of a layer are used when they arrive, where that is possible.

    A layer that is called once and has others below it sees its cotangents in a hook on its node, and they are
    forgotten before those of the layers below are made. The others are asked for, and are ``left`` for afterwards.
    """

    def __init__(self, tape: Tape, layers: _Layers, sink: Sink) -> None:
        self.tape, self.layers, self.sink = tape, layers, sink
        self.left: list[int] = list(range(len(layers.blocks)))  # the numbers of the layers whose S is not made yet

    def cotangents(self, s: Tensor) -> Cotangents:
        """Those of the layers that are left, for s [k n *out]."""
        tape = self.tape
        # The backward pass of a GPU runs in a thread of its own, and its kernels are many: all at once is better there.
        # One in half precision is scaled as a whole.
        alone = s.shape[0] == 1 and s.device.type == "cpu" and not tape.half
        early = self._early() if alone else {}
        handles = [node.register_prehook(self._hook(*at)) for node, at in early.items()]
        wanted = sorted(
            {at for b in self.left for at in tape.places(self.layers.blocks[b])} - {at for at, _ in early.values()}
        )
        try:
            outer = tape.outer(s, wanted)
        finally:
            for handle in handles:
                handle.remove()
        missed = [
            at for at, numbers in early.values() if numbers[0] in self.left
        ]  # no way leads there from the outputs
        for at in missed:
            outer[at] = (s.new_zeros(1, *tape.uses[at].shape),)
        inner = {at: tape.inner(at, g) for at, g in outer.items() if isinstance(tape.uses[at].rule, Replayed)}
        return Cotangents(outer, inner)

    def _hook(self, at: int, numbers: Sequence[int]) -> Callable[[tuple[Tensor | None, ...]], None]:
        (edge,) = self.tape.uses[at].edges
        assert edge is not None

        def hook(arrived: tuple[Tensor | None, ...]) -> None:
            g = arrived[edge.output_nr]
            if g is not None:
                own = Cotangents({at: (g.unsqueeze(0),)}, {})
                for b in numbers:
                    self.layers.put_outputs(b, self.tape, own, self.sink)
                    self.left.remove(b)

        return hook

    def _early(self) -> dict[Any, tuple[int, list[int]]]:
        """By its node, every use that can be served in a hook, and the numbers of its layers."""
        of_use: dict[int, list[int]] = {}
        shared: set[int] = set()
        for b, block in enumerate(self.layers.blocks):
            places = self.tape.places(block)
            for at in places:
                of_use.setdefault(at, []).append(b)
            if len(places) != 1 or block.facets:
                shared.update(places)
        edges = [edge for use in self.tape.uses for edge in use.edges if edge is not None]
        outputs = Counter(edge.node for edge in edges)
        upper = above({edge.node for at in of_use for edge in self.tape.uses[at].edges if edge is not None})
        found = {}
        for at, numbers in of_use.items():
            use = self.tape.uses[at]
            edge = use.edges[0] if len(use.edges) == 1 else None
            if edge is None or at in shared or isinstance(use.rule, Replayed):
                continue
            if edge.node in upper and outputs[edge.node] == 1:
                found[edge.node] = (at, numbers)
        return found


def above(ends: Collection[Any]) -> set[Any]:
    """Those of the nodes ``ends`` of a graph below which there are others of them."""
    leads = dict.fromkeys(ends, True)  # whether a node is one of them, or above one
    found = set()
    for end in ends:
        stack = [child for child, _ in end.next_functions if child is not None]
        while stack:
            node = stack[-1]
            children = [] if node in leads else [child for child, _ in node.next_functions if child is not None]
            unknown = [child for child in children if child not in leads]
            stack += unknown
            if not unknown:
                leads.setdefault(node, any(leads[child] for child in children))
                stack.pop()
        if any(leads[child] for child, _ in end.next_functions if child is not None):
            found.add(end)
    return found


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

    sources: list[Tensor] = []
    for use in uses:
        (x, *more), named = use.call.args or (None,), use.call.kwargs
        sources += [x] if isinstance(x, Tensor) and not more and not named else tensors_of((use.call.args, named))
    sources += [t for at in places for t in g.outer[at]]
    recordings.run(sources, what, compute, sink.weight)
    for b in sorted({*range(len(layers.blocks))} - {*pure}):
        layers.put_inputs(b, tape, sink)
        layers.put_outputs(b, tape, g, sink)
