"""The two factors of every layer, one after the other: each goes into a sink, and is forgotten before the next is made.

What is averaged over time need not be whole at any moment. The factors of a large network are larger than its
parameters, and an estimate that is held beside its average would be as large again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.replay import GraphCache, Scalar
from natgrad.errors import NatgradError
from natgrad.model import tensors_of
from natgrad.pullback.coupling import Coupled, Relation, Weighed
from natgrad.pullback.features import Cotangents, Pair, Sharing, averaged, mean
from natgrad.pullback.layer import Block, joined
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Moment, Replayed, Rows, check_length, check_moment

# The two factors of every layer: second moments of its inputs a and of its cotangents g, without per-example rows.


class Watcher(ABC):
    """Something else that is made of the same cotangents, in the same backward passes."""

    @abstractmethod
    def add(self, tape: Tape, g: Cotangents) -> None:
        """Another chunk of examples and roots."""


def passes(pb: Pullback) -> Iterator[tuple[Tape, Iterator[Cotangents]]]:
    """For every part of the batch its tape, and the cotangents s J/√N chunk by chunk over the roots."""
    for part in pb.ranges():
        tape = pb.tape(part)
        yield tape, (cotangents(tape, s / math.sqrt(pb.n)) for s in pb.roots.at(part).split(_columns(pb, tape)))


def cotangents(tape: Tape, s: Tensor) -> Cotangents:
    """Those of all uses, from s [k n *out]."""
    outer = tape.outer(s)
    inner = {at: tape.inner(at, g) for at, g in outer.items() if isinstance(tape.uses[at].rule, Replayed)}
    return Cotangents(outer, inner)


def second_moments(
    pb: Pullback, layers: Sequence[Block], sharing: Sharing, watcher: Watcher | None = None
) -> list[tuple[Tensor, Tensor]]:
    """S and A of every layer in ``layers``, which have rules. A ``watcher`` sees the cotangents too."""
    if not layers:
        return []
    kinds = [kind for block in layers for kind in block.kinds]
    of_kinds = _of_kinds(pb, kinds, sharing, watcher)
    for kind, (s, a) in zip(kinds, of_kinds, strict=True):
        check_outputs(kind, s)
        check_inputs(kind, a)
    found = iter(of_kinds)
    return [joined(block, [next(found) for _ in block.kinds]) for block in layers]


def check_outputs(kind: Block, s: Tensor) -> None:
    """Raise if the rule of a layer returned S in another shape than it promised."""
    assert kind.rule is not None
    check_moment(kind.rule, "output_moment", kind.names, (kind.shape[0], kind.shape[1]), s)


def check_inputs(kind: Block, a: Tensor) -> None:
    """Raise if the rule of a layer returned A in another shape than it promised."""
    assert kind.rule is not None
    check_moment(kind.rule, "input_moment", kind.names, (kind.shape[0], kind.shape[2]), a)


def check_rows(kind: Block, what: str, size: int, d: int) -> None:
    """Raise if the rule of a layer returned rows of another length than it promised."""
    assert kind.rule is not None
    check_length(kind.rule, what, kind.names, kind.shape[0], d, size)


def _of_kinds(
    pb: Pullback, layers: Sequence[Block], sharing: Sharing, watcher: Watcher | None
) -> list[tuple[Tensor, Tensor]]:
    """S and A of layers that are each of one kind."""
    if pb.coupling is not None:
        return _coupled(pb, layers, sharing)
    pairs = [Pair() for _ in layers]
    for tape, chunks in passes(pb):
        for g in chunks:
            for pair, block in zip(pairs, layers, strict=True):
                pair.add_outputs(sharing.outputs(tape, block, g).to(pb.y.dtype))
            if watcher is not None:
                watcher.add(tape, g)
        for pair, block in zip(pairs, layers, strict=True):
            moment = sharing.inputs(tape, block)
            pair.add_inputs(Moment(moment.total.to(pb.y.dtype), moment.count))
    return averaged(pairs)


def whole(pb: Pullback) -> bool:
    """Whether all examples and roots are seen at once."""
    one = len(pb.ranges()) == 1
    return one and (pb.columns == 1 or pb.columns <= _columns(pb, pb.tape(pb.parts[0])))


def _columns(pb: Pullback, tape: Tape) -> int:
    """How many roots k at a time."""
    cost = sum(shape.numel() for use in tape.uses for shape in use.shapes)
    return max(1, pb.chunk // max(cost, 1))


def _coupled(pb: Pullback, layers: Sequence[Block], sharing: Sharing) -> list[tuple[Tensor, Tensor]]:
    """All examples at once, as the coupling mixes them."""
    tape = pb.tape((0, pb.n))
    coupled = coupled_by(pb, tape)
    assert coupled is not None
    g = cotangents(tape, pb.root / math.sqrt(pb.n))
    found = (coupled.factors(tape, block, sharing, g) for block in layers)
    return [(s, mean(moment)) for s, moment in found]


def coupled_by(pb: Pullback, tape: Tape) -> Relation | None:
    """What couples the examples of a pass, if something does."""
    if pb.coupled is None:
        return None
    if pb.coupled.weights is not None:
        return Weighed.of(pb.coupled.weights, pb.y.dtype, tape.memo)
    return Coupled.of(pb.coupled.C, pb.mixing(), pb.y.dtype, tape.memo)


# Where the two factors of every layer go, one after the other, and how they are made of a pass.


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

    def weighted(self, weight: Scalar) -> Sink:
        """The same sink with another weight, which may be a number on the device."""
        return self

    @abstractmethod
    def inputs(self, b: int, moment: Moment) -> None:
        """A = total/count of the layer number b; the total may be overwritten."""

    @abstractmethod
    def outputs(self, b: int, total: Tensor, count: int) -> None:
        """S = total/count of the layer number b; the total may be overwritten."""

    def input_rows(self, b: int, rows: Rows, count: int) -> bool:
        """Take A = Σ a aᵀ/count of the rows a without forming it, where that is possible; whether it was."""
        return False

    def output_rows(self, b: int, rows: Rows, count: int) -> bool:
        """Take S = Σ g gᵀ/count of the rows g, likewise."""
        return False

    def flush(self) -> None:  # noqa: B027 - a sink that holds nothing back has nothing to do
        """Nothing is held back any longer."""


@final
class Collected(Sink):
    """All factors, S and A of every layer."""

    def __init__(self, count: int) -> None:
        self.left: list[Tensor | None] = [None] * count
        self.right: list[Tensor | None] = [None] * count

    def inputs(self, b: int, moment: Moment) -> None:
        self.right[b] = mean(moment) if isinstance(moment.count, Tensor) else moment.total.div_(moment.count)

    def outputs(self, b: int, total: Tensor, count: int) -> None:
        self.left[b] = total.div_(count)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """After the stream."""
        return [(s, a) for s, a in zip(self.left, self.right, strict=True) if s is not None and a is not None]


@final
@dataclass(frozen=True)
class Layers:
    """The layers, what becomes of their positions, and what couples the n examples.

    Cotangents are those of the root itself: products of them are divided by n where they are used.
    """

    blocks: tuple[Block, ...]
    sharing: Sharing
    dtype: torch.dtype
    n: int
    coupled: Relation | None = None

    def late(self, b: int) -> bool:
        """Whether A depends on cotangents: that of a tied weight does, and with a coupling both have one scale."""
        return self.coupled is not None or bool(self.blocks[b].facets)

    @property
    def places(self) -> Hashable:
        """Where recorded kernels read what is not of the pass."""
        return None if self.coupled is None else self.coupled.places

    def put_inputs(self, b: int, tape: Tape, sink: Sink) -> None:
        """A, unless it is late."""
        if self.late(b):
            return
        block = self.blocks[b]
        rows = self.sharing.input_rows(tape, block)
        if rows is not None:
            check_rows(block, "input_rows", rows.size, block.shape[2])
        if rows is None or not sink.input_rows(b, rows, rows.x.shape[0]):
            sink.inputs(b, self._moment(block, tape))

    def put_outputs(self, b: int, tape: Tape, g: Cotangents, sink: Sink) -> None:
        """S and, where it is late, A."""
        block = self.blocks[b]
        if not self.late(b):
            rows = self.sharing.output_rows(tape, block, g)
            if rows is not None:
                check_rows(block, "output_rows", rows.size, block.shape[1])
            if rows is None or not sink.output_rows(b, rows, self.n):
                sink.outputs(b, self._product(block, tape, g), self.n)
            return
        pairs = [self._pair(kind, tape, g) for kind in block.kinds]
        if not block.facets:  # with their counts, by which the sink divides where it averages
            ((s, moment),) = pairs
            sink.outputs(b, s, self.n)
            sink.inputs(b, moment)
            return
        s, a = joined(block, [(s.div_(self.n), mean(moment)) for s, moment in pairs])
        sink.outputs(b, s, 1)
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

    def _pair(self, kind: Block, tape: Tape, g: Cotangents) -> tuple[Tensor, Moment]:
        """n S and A."""
        if self.coupled is None:
            return self._product(kind, tape, g), self._moment(kind, tape)
        s, moment = self.coupled.factors(tape, kind, self.sharing, g)
        check_outputs(kind, s)
        check_inputs(kind, moment.total)
        return s.to(self.dtype), Moment(moment.total.to(self.dtype), moment.count)

    def _moment(self, kind: Block, tape: Tape) -> Moment:
        moment = self.sharing.inputs(tape, kind)
        check_inputs(kind, moment.total)
        return Moment(moment.total.to(self.dtype), moment.count)

    def _product(self, kind: Block, tape: Tape, g: Cotangents) -> Tensor:
        s = self.sharing.outputs(tape, kind, g)
        check_outputs(kind, s)
        return s.to(self.dtype)


# Cotangents that are used when they arrive, in the backward pass itself.


_ROOM = 2**26  # bytes

Serve: TypeAlias = Callable[[Sequence[int], Cotangents], None]
Arrived: TypeAlias = tuple[Tensor | None, ...]  # what a node is given, of every output of it


@final
class Flow:
    """A backward pass in which the cotangents of a layer are used when they arrive, where that is possible.

    A layer that is called once and has others below it sees its cotangents in a hook on its node. They wait there until
    those of more than ``room`` bytes should have come; then ``serve`` is called with the numbers of their layers, and
    they are forgotten before those of the layers below are made. The others are asked for, and served at the end. On a
    CPU none wait; on a GPU a third of them, whose kernels are then started together.
    """

    def __init__(self, tape: Tape, layers: Layers, serve: Serve, room: int | None = None) -> None:
        self.tape, self.layers, self.serve = tape, layers, serve
        self._all = sum([shape.numel() for use in tape.uses for shape in use.shapes]) * tape.y.element_size()
        self.room = room if room is not None else max(_ROOM, self._all // 3) if tape.y.device.type == "cuda" else 0
        self._left = dict.fromkeys(range(len(layers.blocks)))  # the numbers of the layers that were not served
        self._layers_of: dict[int, list[int]] = {}  # by the positions of their uses
        for b, block in enumerate(layers.blocks):
            for at in tape.places(block):
                self._layers_of.setdefault(at, []).append(b)
        self._served: set[int] = set()  # positions of uses
        self._boxes: dict[int, list[Arrived]] = {}  # what came to the nodes of uses, by their positions

    def run(self, s: Tensor) -> None:
        """Serve all layers, for s [k n *out]."""
        tape = self.tape
        # One in half precision is scaled as a whole.
        alone = s.shape[0] == 1 and not tape.half and self._all > self.room
        early, last = self._early() if alone else ((), frozenset[int]())
        handles = [self._hooked(at, at in last) for at in early]
        wanted = self._layers_of.keys() - set(early)
        try:
            outer = tape.outer(s, sorted(wanted))
        finally:
            for handle in handles:
                handle.remove()
        outer.update(self._waiting())
        for at in self._served.symmetric_difference(early).difference(outer):  # no way leads there
            outer[at] = (s.new_zeros(1, *tape.uses[at].shape),)
        inner = {at: tape.inner(at, g) for at, g in outer.items() if isinstance(tape.uses[at].rule, Replayed)}
        self.serve(list(self._left), Cotangents(outer, inner))

    def _hooked(self, at: int, last: bool) -> RemovableHandle:
        """``last``: when its cotangents come, those that wait are served. The others need no line of Python."""
        (edge,) = self.tape.uses[at].edges
        assert edge is not None
        box = self._boxes[at] = []

        def hook(arrived: Arrived) -> None:
            box.append(arrived)
            self._serve_waiting()

        return edge.node.register_prehook(hook if last else box.append)

    def _waiting(self) -> dict[int, tuple[Tensor, ...]]:
        """What has come and was not served, taken out of the boxes."""
        found: dict[int, tuple[Tensor, ...]] = {}
        for at, box in self._boxes.items():
            if not box:
                continue
            use = self.tape.uses[at]
            if len(box) > 1 or at in self._served:
                raise NatgradError(
                    f"a backward pass through the model came twice to the outputs of {use.module}: a hook on a tensor "
                    "runs a pass of its own through the layers. Do so in the backward of a torch.autograd.Function"
                )
            (edge,) = use.edges
            assert edge is not None
            g = box.pop()[edge.output_nr]
            if g is not None:
                found[at] = (use.first(g.unsqueeze(0)),)
        return found

    def _serve_waiting(self) -> None:
        waiting = self._waiting()
        if not waiting:
            return
        numbers = sorted({b for at in waiting for b in self._layers_of[at]})
        self._served.update(waiting)
        for b in numbers:
            del self._left[b]
        self.serve(numbers, Cotangents(waiting, {}))

    def _early(self) -> tuple[Sequence[int], frozenset[int]]:
        """The uses that can be served in a hook, and those of them with which there is no more room.

        They are found once for every kind of graph: it is a long walk. A pass comes to the layers from the last one on.
        """
        key = ("early", self.room, tuple(block.names for block in self.layers.blocks))
        if key not in self.tape.memo:
            early, held, last = self._found(), 0, set()
            for at in reversed(early):
                held += self.tape.uses[at].shape.numel() * self.tape.y.element_size()
                if held > self.room:
                    last.add(at)
                    held = 0
            self.tape.memo[key] = early, frozenset(last)
        return self.tape.memo[key]

    def _found(self) -> Sequence[int]:
        own: set[int] = set()
        shared: set[int] = set()
        for block in self.layers.blocks:
            places = self.tape.places(block)
            own.update(places)
            if len(places) != 1 or block.facets:
                shared.update(places)
        edges = [edge for use in self.tape.uses for edge in use.edges if edge is not None]
        outputs = Counter(edge.node for edge in edges)
        upper = above({edge.node for at in own for edge in self.tape.uses[at].edges if edge is not None})
        found = []
        for at in sorted(own):
            use = self.tape.uses[at]
            edge = use.edges[0] if len(use.edges) == 1 else None
            if edge is None or at in shared or isinstance(use.rule, Replayed):
                continue
            if edge.node in upper and outputs[edge.node] == 1:
                found.append(at)
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


def _recorded(pb: Pullback, recordings: GraphCache[None], layers: Layers, sink: Sink) -> None:
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

    recordings: GraphCache[None]
    layers: Layers
    tape: Tape
    sink: Sink

    def inputs(self, numbers: Sequence[int]) -> None:
        """A of these layers."""
        places = self._places(numbers)

        def compute(sources: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            here, into = self._reading(places, iter(sources)), self.sink.weighted(scalars[0])
            for b in numbers:
                self.layers.put_inputs(b, here, into)
            into.flush()

        key = self._what("A", numbers, places)
        self.recordings.run(compute, self._called(places), [self.sink.weight], key)

    def outputs(self, numbers: Sequence[int], g: Cotangents) -> None:
        """S of these layers and, where it is late, A."""
        places = self._places(numbers)
        late = self._places([b for b in numbers if self.layers.late(b)])

        def compute(sources: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            supply = iter(sources)
            here, into = self._reading(late, supply), self.sink.weighted(scalars[0])
            own = Cotangents({at: tuple(next(supply) for _ in g.outer[at]) for at in places}, {})
            for b in numbers:
                self.layers.put_outputs(b, here, own, into)
            into.flush()

        sources = [*self._called(late), *(t for at in places for t in g.outer[at])]
        self.recordings.run(compute, sources, [self.sink.weight], self._what("S", numbers, places))

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
