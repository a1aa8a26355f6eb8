"""The two Kronecker factors of every layer, one layer at a time: S = Σ g gᵀ/N and A = Σ a aᵀ/(N·R).

A moving average takes every factor as it arrives (``FactorSink``). The factors of a large network are larger than its
parameters, and an estimate that is held beside its average would be as large again.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, cast, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.modules import buffers_of
from natgrad.accelerate.moments import nonzero_rows, rows
from natgrad.accelerate.replay import GraphCache, Scalar
from natgrad.accelerate.vjp import waiting_bytes
from natgrad.errors import IncompatibleError, NatgradError
from natgrad.model import tensors_of
from natgrad.pullback.coupling import Mixing, Weights, at_fixed_address
from natgrad.pullback.layer import Block, joined
from natgrad.pullback.nearest import NearestProduct
from natgrad.pullback.operation_layers import is_operation
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.sharing import Sharing, reached
from natgrad.pullback.tape import Cotangents, Tape, Use
from natgrad.rules.base import Replayed, cotangent_features
from natgrad.rules.features import Features, Moment

# All layers at once, chunk by chunk over examples and roots.


Watch: TypeAlias = Callable[[Tape, Cotangents], None]  # sees the cotangents of every chunk of examples and roots


def passes(pb: Pullback) -> Iterator[tuple[Tape, Iterator[Cotangents]]]:
    """For every part of the batch its tape, and the cotangents s J/√N chunk by chunk over the roots."""
    for examples in pb.split_ranges():
        tape = pb.tape(examples)
        yield tape, (tape.cotangents(s / math.sqrt(pb.n)) for s in pb.roots.at(examples).split(_columns(pb, tape)))


def second_moments(
    pb: Pullback,
    layers: Sequence[Block],
    sharing: Sharing,
    watch: Watch | None = None,
    nearest: NearestProduct | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """S and A of every layer in ``layers``, which have rules, summed over the parts of the batch that fit into memory.

    ``watch`` is called with the cotangents too.
    """
    kinds = [kind for block in layers for kind in block.kinds]
    fitted = frozenset(b for b, kind in enumerate(kinds) if nearest is not None and nearest.fits(kind))
    left: dict[int, Moment] = {}
    right: dict[int, Moment] = {}

    def add(side: dict[int, Moment], b: int, moment: Moment) -> None:
        side[b] = side[b] + moment if b in side else moment

    pieces = zip(pb.split_ranges(), passes(pb), strict=True) if kinds else ()
    for examples, (tape, chunks) in pieces:
        leaves_out = pb.batch.target is not None and pb.metric.leaves_out
        weights = counted_examples(pb, pb.roots.at(examples)) if leaves_out else None
        there: dict[int, Tensor | None] = {}  # of each layer, the positions to which a cotangent comes
        for g in chunks:
            for b, kind in enumerate(kinds):
                h = g.of(tape, kind)
                if b not in there or there[b] is not None:
                    there[b] = _either(reached(h, kind), there.get(b))
                if nearest is not None and b in fitted:
                    share = h.shape[0] / (pb.columns * pb.n)
                    s, a = nearest.factors(tape.inputs(kind), h, kind, sharing, share=share)
                    add(right, b, a.over(1))
                else:
                    s = sharing.output_moment(sharing.outputs(h), kind)
                add(left, b, s)
            if watch is not None:
                watch(tape, g)
        positions = ReachedPositions(tape, {b: kinds[b] for b in there})
        positions.update(there)
        shared = positions.take(whole=False)
        for b, kind in enumerate(kinds):
            if b not in fitted:
                add(right, b, sharing.counted_moment(tape.inputs(kind), kind, _any_of(shared[b]), weights))
    dtype = pb.y.dtype
    means = [right[b].total if b in fitted else right[b].mean() for b in range(len(kinds))]
    pairs = iter([(left[b].total.to(dtype), a.to(dtype)) for b, a in enumerate(means)])
    return [joined(block, [next(pairs) for _ in block.kinds]) for block in layers]


def counted_examples(pb: Pullback, s: Tensor) -> Tensor | None:
    """1 for every example with a term that counts, else 0 [n], from the root s [k n *out]; None where all have one.

    Only targets can leave out all terms of an example (``OutputMetric.leaves_out``).
    """
    if pb.batch.target is None or not pb.metric.leaves_out:
        return None
    there = nonzero_rows(s.flatten(2).unsqueeze(2) if s.ndim > 2 else s[:, :, None, None])
    return None if there is None else there[:, 0].to(pb.y.dtype)


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Positions that some of the roots reach; None: all positions, or no other roots yet."""
    return one if one is None or other is None else one | other


def coupled_by(pb: Pullback, tape: Tape) -> Mixing | Weights | None:
    """What couples the examples of a pass, if something does."""
    if pb.coupled is None:
        return None
    if pb.coupled.weights is not None:
        return Weights.of(pb.coupled.weights, pb.y.dtype, tape.memo)
    return Mixing.of(pb.coupled.C, pb.mixing(), pb.y.dtype, tape.memo, matched=pb.coupled.matched)


def whole(pb: Pullback) -> bool:
    """Whether all examples and roots are seen at once."""
    one = len(pb.split_ranges()) == 1
    return one and (pb.columns == 1 or pb.columns <= _columns(pb, pb.tape(pb.ranges[0])))


def _columns(pb: Pullback, tape: Tape) -> int:
    """How many roots k at a time."""
    cost = sum(shape.numel() for use in tape.uses for shape in use.shapes)
    return max(1, pb.chunk // max(cost, 1))


# Layer by layer: every factor goes into a sink as soon as it is there.


Side: TypeAlias = Literal["S", "A", "D"]  # the factors, and in the basis of EigenKronecker the diagonal


class FactorSink(ABC):
    """Takes the factors of layers one by one."""

    @abstractmethod
    def put(self, b: int, side: Side, moment: Moment) -> None:
        """S or A of layer number b, in any order; of a stacked layer (``Rule.stacked``) A comes first."""

    def flush(self) -> None:  # noqa: B027 - a sink without a buffer has nothing to do
        """Write what is still buffered."""

    @property
    def weight(self) -> Scalar:
        """The weight of the factors in the moving average."""
        return 1.0

    @property
    def address_key(self) -> Hashable:
        """The key of the memory that captured kernels write to; None if nothing may be captured."""
        return None

    def with_weight(self, weight: Scalar) -> FactorSink:
        """The same sink with another weight, which may be a number on the device."""
        return self


@final
class FactorList(FactorSink):
    """Keeps S and A of every layer."""

    def __init__(self) -> None:
        self.factors: dict[tuple[int, Side], Tensor] = {}

    def put(self, b: int, side: Side, moment: Moment) -> None:
        self.factors[b, side] = moment.mean()

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """S and A of every layer."""
        return [(self.factors[b, "S"], self.factors[b, "A"]) for b in range(len(self.factors) // 2)]


def factors_of(
    pb: Pullback,
    blocks: Sequence[Block],
    sharing: Sharing,
    nearest: NearestProduct | None = None,
    *,
    inputs_only: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """S and A of every layer in ``blocks``, which have rules."""
    sink = FactorList()
    stream(pb, blocks, sharing, sink, nearest, inputs_only=inputs_only)
    return sink.pairs()


def stream(
    pb: Pullback,
    blocks: Sequence[Block],
    sharing: Sharing,
    sink: FactorSink,
    nearest: NearestProduct | None = None,
    *,
    inputs_only: bool = False,
) -> None:
    """S and A of every layer in ``blocks``, which have rules, into the sink.

    Inputs come first, while there are no cotangents. Cotangents are used inside the backward pass, where they arrive.
    ``nearest``: the layers that it fits have its factors in place of means. ``inputs_only``: S is the identity.
    """
    if inputs_only:
        stream_inputs(pb, blocks, sharing, sink)
    if not blocks or inputs_only:
        return
    if pb.coupling is None and not whole(pb):
        for b, (s, a) in enumerate(second_moments(pb, blocks, sharing, nearest=nearest)):
            sink.put(b, "A", Moment(a, 1))
            sink.put(b, "S", Moment(s, 1))
        sink.flush()
        return
    tape = pb.tape(pb.ranges[0])
    s, weights = pb.root, None
    if pb.coupling is None and (weights := counted_examples(pb, s)) is not None:
        weights = at_fixed_address(tape.memo, "examples that count", weights)
    layers = LayerFactors(
        tuple(blocks),
        sharing,
        pb.y.dtype,
        pb.n,
        several_positions(tape, blocks),
        weights,
        coupled_by(pb, tape),
        nearest,
    )
    graphs = None if sink.address_key is None else pb.graph_cache
    kernels = CapturedKernels(graphs, layers, tape, sink, layers.reached_positions(tape))
    kernels.inputs(range(len(blocks)))
    stream_cotangents(tape, blocks, s, kernels.outputs)
    kernels.inputs_after()
    sink.flush()


def stream_inputs(pb: Pullback, blocks: Sequence[Block], sharing: Sharing, sink: FactorSink) -> None:
    """A of every layer in ``blocks``, and S = 1, into the sink. There is no root and no backward pass."""
    if pb.coupling is not None:
        raise IncompatibleError(
            f'Kronecker(sides="inputs") does not work with {pb.metric!r}: the coupling of the examples has one scale '
            'for both factors. Use sides="both"'
        )
    if not blocks:
        return
    layers = LayerFactors(tuple(blocks), sharing, pb.y.dtype, pb.n, frozenset(), inputs_only=True)
    first, *others = (pb.tape(examples) for examples in pb.ranges)
    if not others:
        graphs = None if sink.address_key is None else pb.graph_cache
        kernels = CapturedKernels(graphs, layers, first, sink, layers.reached_positions(first))
        kernels.inputs(range(len(blocks)))
    else:
        moments = FactorMoments()
        for tape in (first, *others):
            for b in range(len(blocks)):
                layers.put_inputs(b, tape, moments)
        for (b, side), moment in moments.totals.items():
            sink.put(b, side, moment)
    sink.flush()


@final
class FactorMoments(FactorSink):
    """Adds up S and A of every layer over the parts of a batch."""

    def __init__(self) -> None:
        self.totals: dict[tuple[int, Side], Moment] = {}

    def put(self, b: int, side: Side, moment: Moment) -> None:
        self.totals[b, side] = self.totals[b, side] + moment if (b, side) in self.totals else moment


def several_positions(tape: Tape, blocks: Sequence[Block]) -> frozenset[int]:
    """The numbers of the layers with several positions, of which those count to which a cotangent comes."""

    def has_several(block: Block) -> bool:
        if block.rule is None or block.rule.pixels:
            return False
        return is_operation(block) or tape.positions(block) > block.shape[0]

    key = "several", tuple([block.names for block in blocks])
    return tape.cached(key, lambda: frozenset(b for b, block in enumerate(blocks) if has_several(block)))


@final
class ReachedPositions:
    """Masks of the positions that a cotangent has reached, layer by layer as the backward pass comes to them.

    Layers that read the same tensor (query, key and value) count the same positions: those that a cotangent has reached
    in at least one of these layers. (The query of a token that sees only one key has no cotangent, up to rounding.) So
    A of such layers is computed when all of them have their cotangents.
    """

    def __init__(self, tape: Tape, layers: Mapping[int, Block]) -> None:
        key = "read", tuple([block.names for block in layers.values()])
        reads = tape.cached(key, lambda: [_only_read(tape, block) for block in layers.values()])
        readers: dict[Hashable, list[int]] = {}
        for b, read in zip(layers, reads, strict=True):
            if read is None:
                readers[b] = [b]
            else:
                at, positions = read
                x = tape.uses[at].call.x
                readers.setdefault((x.data_ptr(), x.shape, x.stride(), positions), []).append(b)
        self._readers = {b: numbers for numbers in readers.values() for b in numbers}  # of what a layer reads
        self._there: dict[int, Tensor | None] = {}  # of layers whose A is not made yet
        self._new: list[int] = []  # layers whose cotangents have come since ``take``

    def update(self, there: Mapping[int, Tensor | None]) -> None:
        """Masks [n r] by the numbers of layers, or None where all positions count."""
        self._there.update(there)
        self._new += there

    def take(self, *, whole: bool) -> dict[int, tuple[Tensor, ...]]:
        """The masks [n r] of layers, by number: a position counts if any mask is true. Without a mask all count.

        ``whole``: only of layers whose masks are complete. Otherwise of all layers that have their cotangents.
        """
        taken: dict[int, tuple[Tensor, ...]] = {}
        for b in self._new if whole else self._there:
            numbers = self._readers[b]
            came = [number for number in numbers if number in self._there]
            if b in taken or (whole and len(came) < len(numbers)):
                continue
            masks = tuple([mask for number in came if (mask := self._there[number]) is not None])
            taken.update(dict.fromkeys(came, masks if len(masks) == len(came) else ()))
        self._new = []
        for b in taken:
            del self._there[b]
        return taken


def _any_of(masks: Sequence[Tensor]) -> Tensor | None:
    """Where one of these is true; None, which is everywhere, where there is none."""
    return functools.reduce(torch.logical_or, masks) if masks else None


def _only_read(tape: Tape, layer: Block) -> tuple[int, int] | None:
    """The use that a layer reads its input in, and how many positions it has.

    None where it has several uses, or hides what it reads.
    """
    ids = tape.use_ids(layer)
    if len(ids) != 1 or isinstance(layer.rule, Replayed) or is_operation(layer):
        return None
    return ids[0], tape.uses[ids[0]].shape.numel() // (layer.shape[0] * layer.shape[1])


@final
@dataclass(frozen=True)
class LayerFactors:
    """Computes A and S of one layer at a time, and puts them into a sink.

    Cotangents are those of the root s, and S is divided by n here. ``several``: the numbers of the layers in which some
    positions may not count (``several_positions``). ``weights`` [n]: 1 for examples that count, else 0; None if all
    count. ``relation``: what couples the n examples. ``of_mean``: the cotangents are those of a loss that is a mean
    over the examples, 1/n of those of a root. ``inputs_only``: S is the identity.
    """

    blocks: tuple[Block, ...]
    sharing: Sharing
    dtype: torch.dtype
    n: int
    several: frozenset[int]
    weights: Tensor | None = None
    relation: Mixing | Weights | None = None
    nearest: NearestProduct | None = None
    of_mean: bool = False
    inputs_only: bool = False

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Of the parameters of every layer."""
        return tuple([block.names for block in self.blocks])

    @cached_property
    def together(self) -> frozenset[int]:
        """The layers whose A and S are computed together, because one factor scales or weighs the other.

        These are tied weights, factors that are fitted in KL divergence, stacks of experts and, with a coupling, all.
        """
        if self.inputs_only:
            return frozenset()
        if self.relation is not None:
            return frozenset(range(len(self.blocks)))
        stacked = [b for b in self.several if (rule := self.blocks[b].rule) is not None and rule.stacked]
        tied = [b for b, block in enumerate(self.blocks) if block.facets]
        fitted = [] if self.nearest is None else [b for b, block in enumerate(self.blocks) if self.nearest.fits(block)]
        return frozenset([*stacked, *tied, *fitted])

    @cached_property
    def after(self) -> frozenset[int]:
        """The layers whose A is computed after S: the cotangents tell which positions count."""
        return frozenset() if self.inputs_only else self.several - self.together

    @cached_property
    def late(self) -> frozenset[int]:
        """All layers whose A depends on cotangents."""
        return self.after | self.together

    def reached_positions(self, tape: Tape) -> ReachedPositions:
        """Of the layers ``after``, before any cotangent has come."""
        return ReachedPositions(tape, {b: self.blocks[b] for b in sorted(self.after)})

    def put_inputs(self, b: int, tape: Tape, sink: FactorSink, count: Scalar | None = None) -> None:
        """A, unless it is late. ``count``: if it is a tensor, the number of positions that are not padding."""
        if b in self.late:
            return
        kind = self.blocks[b].kinds[0]  # of a tied weight the one that it is packed as
        real = tape.inputs(kind).padded_moment(count).to(self.dtype) if isinstance(count, Tensor) else None
        sink.put(b, "A", self._input_moment(tape.inputs(kind), kind, None) if real is None else real)
        if self.inputs_only:
            sink.put(b, "S", Moment(torch.ones(kind.shape[:2], dtype=self.dtype, device=kind.device), 1))

    def put_inputs_after(self, b: int, tape: Tape, sink: FactorSink, there: Tensor | None) -> None:
        """A of the positions that count, [n r]; None for all."""
        sink.put(b, "A", self._input_moment(tape.inputs(self.blocks[b]), self.blocks[b], there))

    def put_outputs(self, b: int, tape: Tape, g: Cotangents, sink: FactorSink, there: Tensor | None = None) -> None:
        """S, and A of layers in ``together``. Writes the mask of positions that count to ``there`` [n r], if given."""
        block = self.blocks[b]
        if b not in self.together:
            sink.put(b, "S", self._over_examples(self._outputs(block, g.of(tape, block), there)))
            return
        if self.nearest is not None and self.nearest.fits(block):
            share = self.n**-2.0 if self.of_mean else 1.0
            of_s, of_a = self.nearest.factors(tape.inputs(block), g.of(tape, block), block, self.sharing, share=share)
            sink.put(b, "A", self._over_examples(of_a))
            sink.put(b, "S", self._over_examples(of_s))
            return
        pairs = [self._pair(kind, tape, g) for kind in block.kinds]
        if block.facets:
            scale = self.n if self.of_mean else 1 / self.n
            S, A = joined(block, [(s * scale, moment.mean()) for s, moment in pairs])
            s, moment, n = S, Moment(A, 1), 1
        else:
            ((s, moment),), n = pairs, self.n
        sink.put(b, "A", moment)
        sink.put(b, "S", Moment(s, n))

    def _over_examples(self, moment: Moment) -> Moment:
        """Of products of cotangents."""
        return Moment(moment.total * self.n, 1) if self.of_mean else moment.over(self.n)

    def padded_outputs(self, b: int, tape: Tape, g: Cotangents, n: Scalar) -> Moment:
        """S where only n examples are real."""
        moment = self._outputs(self.blocks[b], g.of(tape, self.blocks[b]))
        return Moment(moment.total * n, 1) if self.of_mean else moment.over(n if isinstance(n, Tensor) else int(n))

    def _pair(self, kind: Block, tape: Tape, g: Cotangents) -> tuple[Tensor, Moment]:
        """n S and A."""
        a, h = tape.inputs(kind), g.of(tape, kind)
        if self.relation is None:
            return self._outputs(kind, h).total, self._input_moment(a, kind, reached(h, kind))
        return self.relation.factors(a, h, kind, self.sharing)

    def _input_moment(self, a: Features, kind: Block, there: Tensor | None) -> Moment:
        return self.sharing.counted_moment(a, kind, there, self.weights).to(self.dtype)

    def _outputs(self, kind: Block, g: Features, there: Tensor | None = None) -> Moment:
        if there is not None:
            return self.sharing.marked_output_moment(g, kind, there).to(self.dtype)
        return self.sharing.output_moment(self.sharing.outputs(g), kind).to(self.dtype)


@final
@dataclass(frozen=True)
class CapturedKernels:
    """Computes the factors of all layers: in CUDA graphs if rules are ``capturable``, otherwise layer by layer.

    On a CPU there are no graphs: ``inputs``, ``outputs`` and ``inputs_after`` call ``LayerFactors`` for every layer.

    There is one graph for the inputs, whose memory is free again before there are cotangents. The cotangents have one
    graph or, if they are large, several: those that have been used are freed.

    Where every batch has another size, no address comes again. Then the rows of all examples are padded with zeros to
    one of few sizes: zero rows add nothing to Σ a aᵀ and Σ g gᵀ, and the true counts are scalars of the graph. Indices
    of embeddings, and inputs of normalisations with statistics of a batch, have no zero and are not padded, nor are
    positions that are reduced or layers whose A is late.
    """

    graphs: GraphCache[None] | None
    layers: LayerFactors
    tape: Tape
    sink: FactorSink
    reached_positions: ReachedPositions

    def inputs(self, numbers: Sequence[int]) -> None:
        """A of these layers, unless it is late."""
        early = [b for b in numbers if b not in self.layers.late]
        captured = [b for b in early if b in self._capturable]
        at_uses, key = self._uses_and_key("A", captured)
        if self._unsettled(key, [self.tape.uses[at].call.x for at in (*at_uses[:1], *at_uses[-1:])]):
            rest = self._put_padded_inputs(captured, key)
            if rest != captured:
                captured, (at_uses, key) = rest, self._uses_and_key("A", rest)
        called = self._called(at_uses)

        def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            tape = self.tape if tensors is called else self._tape_reading(at_uses, iter(tensors))
            sink = self.sink.with_weight(scalars[0])
            for b in captured:
                self.layers.put_inputs(b, tape, sink)
            sink.flush()

        if captured and self.graphs is not None:
            self.graphs.run(compute, called, [self.sink.weight], key, size=self.layers.n)
        for b in early:
            if b not in self._capturable:
                self.layers.put_inputs(b, self.tape, self.sink)

    def outputs(self, numbers: Sequence[int], g: Cotangents) -> None:
        """S of these layers, and A of the layers in ``after`` whose masks are now complete."""
        captured = [b for b in numbers if b in self._capturable]
        at_uses, key = self._uses_and_key("S", captured)
        if self._unsettled(key, [g.outer[at][0] for at in (*at_uses[:1], *at_uses[-1:])]):
            rest = self._put_padded_outputs(captured, g, key)
            if rest != captured:
                captured, (at_uses, key) = rest, self._uses_and_key("S", rest)
        late = self._uses_of([b for b in captured if b in self.layers.together])
        after = [b for b in numbers if b in self.layers.after]
        masks = self._masks([b for b in captured if b in after], g) if after else {}
        self.reached_positions.update(masks)
        self.reached_positions.update({b: self._reached(b, g) for b in after if b not in masks})

        def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            supply = iter(tensors)
            tape = self._tape_reading(late, supply) if late else self.tape
            sink = self.sink.with_weight(scalars[0])
            mine = Cotangents({at: tuple(next(supply) for _ in g.outer[at]) for at in at_uses}, {})
            for b in captured:
                self.layers.put_outputs(b, tape, mine, sink, masks.get(b))
            sink.flush()

        if captured and self.graphs is not None:
            tensors = [*self._called(late), *(t for at in at_uses for t in g.outer[at])]
            addresses = tuple([mask.data_ptr() for mask in masks.values()])
            self.graphs.run(compute, tensors, [self.sink.weight], key, size=(self.layers.n, addresses))
        others = [b for b in numbers if b not in self._capturable]
        for b in _forgetting(self.tape, self.layers.blocks, g, others):
            self.layers.put_outputs(b, self.tape, g, self.sink)
        if after:
            self._inputs_after(self.reached_positions.take(whole=True))

    def _masks(self, numbers: Sequence[int], g: Cotangents) -> dict[int, Tensor]:
        """Where a graph is to put which positions of these layers count, [n r]; not of those of which all do.

        Cached for the sizes of the last pass. The first pass of a size fills them here.
        """

        def fill() -> dict[int, Tensor]:
            masks = ((at, self._reached(b, g)) for at, b in enumerate(numbers))
            return {at: mask for at, mask in masks if mask is not None}

        key = "masks", tuple([self.layers.blocks[b].names for b in numbers])
        return {numbers[at]: mask for at, mask in self.tape.cached(key, fill).items()}

    def _reached(self, b: int, g: Cotangents) -> Tensor | None:
        """Which positions of a layer count, [n r], on a GPU where graphs find it; None for all."""
        block = self.layers.blocks[b]
        mask = reached(g.of(self.tape, block), block)
        return None if mask is None else at_fixed_address(self.tape.memo, ("reached", block.names), mask)

    def inputs_after(self) -> None:
        """A of the layers in ``after`` that are left when the backward pass has ended."""
        self._inputs_after(self.reached_positions.take(whole=False))

    def _inputs_after(self, there: Mapping[int, tuple[Tensor, ...]]) -> None:
        """A of layers of which not all positions need count."""
        if not there:
            return
        captured = [b for b in there if b in self._capturable]
        at_uses, key = self._uses_and_key("A", captured)
        if self._unsettled(key, [self.tape.uses[at].call.x for at in (*at_uses[:1], *at_uses[-1:])]):
            rest = self._put_padded_inputs(captured, key, {b: _any_of(there[b]) for b in captured})
            if rest != captured:
                captured, (at_uses, key) = rest, self._uses_and_key("A", rest)
        called, numbers_of = self._called(at_uses), dict[tuple[int, ...], list[int]]()
        for b in captured:
            numbers_of.setdefault(tuple([mask.data_ptr() for mask in there[b]]), []).append(b)

        def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            tape, sink = self._tape_reading(at_uses, iter(tensors)), self.sink.with_weight(scalars[0])
            for numbers in numbers_of.values():
                mask = _any_of(there[numbers[0]])
                for b in numbers:
                    self.layers.put_inputs_after(b, tape, sink, mask)
            sink.flush()

        if captured and self.graphs is not None:  # masks are where they always are
            addresses = tuple([(masks, tuple(numbers)) for masks, numbers in numbers_of.items()])
            self.graphs.run(compute, called, [self.sink.weight], key, size=(self.layers.n, addresses))
        for b, masks in there.items():
            if b not in self._capturable:
                self.layers.put_inputs_after(b, self.tape, self.sink, _any_of(masks))

    def _unsettled(self, key: Hashable, tensors: Sequence[Tensor]) -> bool:
        """Whether what some layers read, of which these are the first and the last, keeps coming at new addresses."""
        return self.graphs is not None and self.graphs.unsettled(tensors, key)

    def _put_padded_inputs(
        self, numbers: Sequence[int], key: Hashable, there: Mapping[int, Tensor | None] | None = None
    ) -> list[int]:
        """A of layers, from padded rows of all examples; the numbers of those whose inputs cannot be padded.

        ``there``: of layers of which not all positions count, those that do; they are rows, too.
        """
        padded = self._padded_rows("A", numbers)
        counts = [max(1, self._positions(b)) for b in padded.numbers]
        distinct = list(dict.fromkeys(counts))
        scalar_of = tuple(1 + distinct.index(count) for count in counts)
        called, masks = list[Tensor](), list[Tensor]()
        for at, trailing in padded.uses:
            x = self.tape.uses[at].call.x
            if there is None:
                called.append(rows(x, trailing))
                continue
            x_rows, mask = _matching_rows(x, self._mask_of(at, padded.numbers, there), trailing)
            called.append(x_rows)
            masks.append(mask)

        def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            supply = iter(tensors)
            tape = self._tape_reading([at for at, _ in padded.uses], supply)
            sink, given = (
                self.sink.with_weight(scalars[0]),
                dict(zip((at for at, _ in padded.uses), supply, strict=False)),
            )
            for b, at in zip(padded.numbers, scalar_of, strict=True):
                if there is None:
                    self.layers.put_inputs(b, tape, sink, scalars[at])
                else:
                    of_uses = [given[use] for use in self.tape.use_ids(self.layers.blocks[b])]
                    self.layers.put_inputs_after(b, tape, sink, torch.cat(of_uses, 1))
            sink.flush()

        if called and self.graphs is not None:
            scalars = [self.sink.weight, *map(float, distinct)]
            self.graphs.run_padded(compute, [*called, *masks], scalars, (key, padded.numbers, scalar_of))
        return padded.others

    def _mask_of(self, at: int, numbers: Sequence[int], there: Mapping[int, Tensor | None]) -> Tensor:
        """Which positions of a use count, [n r], for the first of its layers."""
        b = next(b for b in numbers if at in self.tape.use_ids(self.layers.blocks[b]))
        block, mask, n = self.layers.blocks[b], there[b], self.layers.n
        sizes = [use.shape.numel() // (n * block.shape[0] * block.shape[1]) for use in self.tape.of(block)]
        number = self.tape.use_ids(block).index(at)
        if mask is None and self.layers.weights is not None:
            return (self.layers.weights != 0).unsqueeze(1).expand(n, sizes[number])
        if mask is None:
            return torch.ones(n, sizes[number], dtype=torch.bool, device=block.device)
        return mask.split(sizes, dim=1)[number]

    def _put_padded_outputs(self, numbers: Sequence[int], g: Cotangents, key: Hashable) -> list[int]:
        """S of layers, likewise; the columns of the root are rows, too."""
        padded = self._padded_rows("S", numbers)
        tensors = [rows(g.outer[at][0], trailing) for at, trailing in padded.uses]

        def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            sink = self.sink.with_weight(scalars[0])
            mine = Cotangents({at: (t.unsqueeze(0),) for (at, _), t in zip(padded.uses, tensors, strict=True)}, {})
            for b in padded.numbers:
                sink.put(b, "S", self.layers.padded_outputs(b, self.tape, mine, scalars[1]))
            sink.flush()

        if tensors and self.graphs is not None:
            scalars = [self.sink.weight, float(max(1, self.layers.n))]
            self.graphs.run_padded(compute, tensors, scalars, (key, padded.numbers))
        return padded.others

    def _padded_rows(self, side: Side, numbers: Sequence[int]) -> PaddedRows:
        """Cached by the kind of graph."""
        layers = self.layers
        names = tuple((b, layers.blocks[b].names, b in layers.late, b in layers.after) for b in numbers)
        key = ("padded", side, layers.n > 1, layers.sharing, layers.weights is None, names)
        if key not in self.tape.memo:
            pads = self._pads_inputs if side == "A" else self._pads
            padded = [b for b in numbers if pads(b)]
            uses = [(at, self.tape.uses[at]) for at in self._uses_of(padded)]
            ranks = [use.call.x.ndim if side == "A" else len(use.shape) for _, use in uses]
            trailing = [rank - self._row_axes(use) for rank, (_, use) in zip(ranks, uses, strict=True)]
            at_uses = tuple(zip((at for at, _ in uses), trailing, strict=True))
            others = [b for b in numbers if b not in padded]
            self.tape.memo[key] = PaddedRows(tuple(padded), at_uses, others)
        return cast(PaddedRows, self.tape.memo[key])

    def _pads(self, b: int) -> bool:
        """Whether zero rows may be appended to the cotangents of a layer."""
        if b in self.layers.together or self.layers.blocks[b].facets:
            return False
        uses = self.tape.of(self.layers.blocks[b])
        rowwise = all(len(use.edges) == 1 and self._row_axes(use) > 0 for use in uses)
        return rowwise and self.layers.sharing.how == "expand"

    def _pads_inputs(self, b: int) -> bool:
        """Whether zero rows may be appended to its inputs."""
        block = self.layers.blocks[b]
        weighted = self.layers.weights is not None and b not in self.layers.after
        if not self._pads(b) or weighted or self.layers.sharing.only_diagonal(block)[0]:
            return False
        uses = self.tape.of(block)
        alone = all(len(use.call.args) == 1 and not use.call.kwargs and use.call.x.ndim > 1 for use in uses)
        if b in self.layers.after and not all(use.rule.leading(use.module, use.shape) for use in uses):
            return False  # a row is an example, with all its positions
        return alone and all(use.rule.paddable(use.module, block.keys) for use in uses)

    def _row_axes(self, use: Use) -> int:
        """How many leading axes of an input or output hold rows that are all treated alike; 0 where that is unknown."""
        n = self.layers.n
        return use.rule.leading(use.module, use.shape) or int(use.shape[0] == n > 1 and len(use.shape) > 1)

    def _positions(self, b: int) -> int:
        """How many there are of a layer, of all examples."""
        block = self.layers.blocks[b]
        return sum(use.shape.numel() for use in self.tape.of(block)) // (block.shape[0] * block.shape[1])

    @cached_property
    def _capturable(self) -> frozenset[int]:
        """Which layers a graph may hold."""
        if self.graphs is None:
            return frozenset()

        def capturable() -> frozenset[int]:
            rules = [[kind.rule for kind in block.kinds] for block in self.layers.blocks]
            return frozenset(
                b for b, of in enumerate(rules) if all(rule is not None and rule.capturable for rule in of)
            )

        return self.tape.cached(("capturable", self.layers.names), capturable)

    @cached_property
    def _uses(self) -> dict[tuple[int, ...], list[int]]:
        """``_uses_of`` what was asked so far, also in other passes of the same graph and sizes."""
        return self.tape.cached(("uses", self.layers.names), dict)

    def _uses_of(self, numbers: Sequence[int]) -> list[int]:
        """The positions of the uses of these layers."""
        key = tuple(numbers)
        if key not in self._uses:
            uses = (at for b in numbers for at in self.tape.use_ids(self.layers.blocks[b]))
            self._uses[key] = list(dict.fromkeys(uses))
        return self._uses[key]

    def _called(self, at_uses: Sequence[int]) -> list[Tensor]:
        """What these uses were called with."""
        tensors: list[Tensor] = []
        for use in (self.tape.uses[at] for at in at_uses):
            (x, *more), named = use.call.args or (None,), use.call.kwargs
            tensors += [x] if isinstance(x, Tensor) and not more and not named else tensors_of((use.call.args, named))
        return tensors

    def _tape_reading(self, at_uses: Sequence[int], supply: Iterator[Tensor]) -> Tape:
        """The tape, with these tensors in the calls of these uses."""
        calls = {at: self.tape.uses[at].call.map(lambda _: next(supply)) for at in at_uses}
        changed = (replace(use, call=calls[at]) if at in calls else use for at, use in enumerate(self.tape.uses))
        return replace(self.tape, uses=tuple(changed))

    def _uses_and_key(self, side: Side, numbers: Sequence[int]) -> tuple[list[int], Hashable]:
        """The positions of the uses of layers, and all that their kernels depend on, beside what they read."""
        if not numbers:
            return [], None
        at_uses = self._uses_of(numbers)
        uses = [self.tape.uses[at] for at in at_uses]
        buffers, names = buffers_of([use.of.module for use in uses]), self.layers.names
        key = (
            side,
            self.layers.sharing,
            self.layers.of_mean,
            self.layers.inputs_only,
            None if self.layers.weights is None else self.layers.weights.data_ptr(),
            None if self.layers.relation is None else self.layers.relation.address_key,
            None if self.layers.nearest is None else self.layers.nearest.address_key,
            names if len(numbers) == len(names) else tuple([names[b] for b in numbers]),
            tuple([use.call.training for use in uses]),
            tuple([t.data_ptr() for t in buffers]),
            self.sink.address_key,
        )
        return at_uses, key


@final
@dataclass(frozen=True)
class PaddedRows:
    """Layers whose rows can be padded with zeros, and the others.

    ``uses``: of the former, with the number of axes of a row.
    """

    numbers: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]
    others: list[int]


def _matching_rows(x: Tensor, mask: Tensor, trailing: int) -> tuple[Tensor, Tensor]:
    """x [* *i] as [m *i] and its mask [n r] as [m 1], both in the order that x has in memory."""
    lead = x.ndim - trailing
    order = sorted(range(lead), key=x.stride, reverse=True)
    mask = mask.reshape(x.shape[:lead]).permute(order).reshape(-1, 1)
    return x.permute(*order, *range(lead, x.ndim)).reshape(-1, *x.shape[lead:]), mask


def _forgetting(tape: Tape, blocks: Sequence[Block], g: Cotangents, numbers: Sequence[int]) -> Iterator[int]:
    """The numbers of these layers; cotangents that no later layer asks for are forgotten on the way."""
    if not numbers:
        return
    left = Counter(at for b in numbers for at in tape.use_ids(blocks[b]))
    for b in numbers:
        yield b
        for at in tape.use_ids(blocks[b]):
            left[at] -= 1
            if not left[at]:
                g.forget(at)


# A backward pass whose cotangents are used where they arrive.


Consume: TypeAlias = Callable[[Sequence[int], Cotangents], None]  # numbers of layers, and the cotangents of their uses
Arrived: TypeAlias = tuple[Tensor | None, ...]  # what a node is given, of every output of it


def stream_cotangents(
    tape: Tape, blocks: Sequence[Block], s: Tensor, consume: Consume, room: int | None = None
) -> None:
    """Call ``consume`` with all layers, for s [k n *out], while the backward pass runs.

    A layer that is called once and lies above another layer receives its cotangents in a hook on its autograd node.
    They wait there until more than ``room`` bytes of them have arrived, and are freed before those of the layers below
    are computed: on a processor none wait, on a GPU a third of them, so that their kernels are launched together. The
    other layers are consumed after the pass.
    """
    total = tape.output_bytes
    room = waiting_bytes(tape.y.device, total) if room is None else room

    def by_use() -> dict[int, list[int]]:
        """Numbers of layers, by the position of a use."""
        layers_of: dict[int, list[int]] = {}
        for b, block in enumerate(blocks):
            for at in tape.use_ids(block):
                layers_of.setdefault(at, []).append(b)
        return layers_of

    names = tuple([block.names for block in blocks])
    layers_of = tape.cached(("layers", names), by_use)
    early: Sequence[int] = ()
    last: frozenset[int] = frozenset()
    if s.shape[0] == 1 and not tape.half and total > room:  # a pass in half precision is scaled as a whole
        early, last = tape.cached(("early", names, room), lambda: _early_uses(tape, blocks, names, room))
    boxes: dict[int, list[Arrived]] = {at: [] for at in early}
    consumed: set[int] = set()  # positions of uses
    left = dict.fromkeys(range(len(blocks)))  # numbers of layers

    def arrived() -> dict[int, tuple[Tensor, ...]]:
        """The cotangents that wait, taken out of their boxes."""
        cotangents_of: dict[int, tuple[Tensor, ...]] = {}
        for at, box in boxes.items():
            if not box:
                continue
            use = tape.uses[at]
            if len(box) > 1 or at in consumed:
                raise NatgradError(
                    f"a backward pass through the model came twice to the outputs of {use.module}: a hook on a tensor "
                    "runs a pass of its own through the layers. Do so in the backward of a torch.autograd.Function"
                )
            (edge,) = use.edges
            assert edge is not None
            g = box.pop()[edge.output_nr]
            if g is not None:
                cotangents_of[at] = (use.batch_first(g.unsqueeze(0)),)
        return cotangents_of

    def hook(at: int) -> RemovableHandle:
        """With the cotangents of the ``last`` use that there is room for, those that wait are consumed."""
        (edge,) = tape.uses[at].edges
        assert edge is not None
        if at not in last:
            return edge.node.register_prehook(boxes[at].append)

        def receive(grads: Arrived) -> None:
            boxes[at].append(grads)
            waiting = arrived()
            if waiting:
                numbers = sorted({b for use in waiting for b in layers_of[use]})
                consumed.update(waiting)
                for b in numbers:
                    del left[b]
                consume(numbers, Cotangents(waiting, {}))

        return edge.node.register_prehook(receive)

    handles = [hook(at) for at in early]
    try:
        outer = tape.output_cotangents(s, sorted(layers_of.keys() - set(early)))
    finally:
        for handle in handles:
            handle.remove()
    outer.update(arrived())
    for at in consumed.symmetric_difference(early).difference(outer):  # no path of the graph leads there
        outer[at] = (s.new_zeros(1, *tape.uses[at].shape),)
    consume(list(left), tape.with_inner(outer))


@final
class BackwardHooks:
    """Cotangents of a backward pass that the user runs, consumed where they arrive.

    They wait until more than ``room`` bytes of them have arrived, as in ``stream_cotangents``. Layers that are called
    several times, and those that hide layers, wait for ``finish``, which consumes what is left.
    """

    def __init__(self, tape: Tape, blocks: Sequence[Block], consume: Consume, room: int | None = None) -> None:
        self._blocks = blocks
        self._consume: Consume | None = consume
        self._uses_of = [tape.use_ids(block) for block in blocks]
        self._left = dict.fromkeys(range(len(blocks)))  # numbers of layers
        self._boxes: dict[int, dict[int, Tensor]] = {}  # by the position of a use, the cotangents of its outputs
        self._consumed: set[int] = set()  # positions of uses
        pairs = [(at, block) for block, ids in zip(blocks, self._uses_of, strict=True) for at in ids]
        self._through_graph = {at: block for at, block in pairs if tape.uses[at].rule.needs_graph}
        self._features: dict[int, Features] = {}  # of those
        self._waiting = 0  # bytes
        total = tape.output_bytes
        self._room = waiting_bytes(tape.y.device, total) if room is None else room
        outputs: dict[Any, list[tuple[int, int, int]]] = {}
        for at in sorted({at for of_block in self._uses_of for at in of_block}):
            for j, edge in enumerate(tape.uses[at].edges):
                if edge is not None:
                    outputs.setdefault(edge.node, []).append((at, j, edge.output_nr))
        self._handles = [node.register_prehook(partial(self._receive, of_node)) for node, of_node in outputs.items()]
        # Without the graph, which holds the hooks and with them this object.
        uses = tuple(replace(use, edges=(None,) * len(use.edges), source=None) for use in tape.uses)
        self.tape = replace(tape, y=tape.y.detach(), uses=uses, operations=None)

    @property
    def arrived(self) -> bool:
        """Whether a backward pass has come to one of the layers, or there are none."""
        return bool(self._boxes) or len(self._left) < len(self._blocks) or not self._blocks

    @property
    def absent(self) -> frozenset[int]:
        """The numbers of the layers that no backward pass has come to, after ``finish``."""
        return frozenset(self._left)

    def finish(self) -> None:
        """Consume all that has arrived, and let go of the graph."""
        numbers = [b for b in self._left if any(at in self._boxes for at in self._uses_of[b])]
        if numbers:
            self._give(numbers, inner=True)
        self.remove()

    def remove(self) -> None:
        """No longer wait for cotangents, and hold neither them nor those who wait: that would be a reference cycle."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._boxes.clear()
        self._features.clear()
        self._consume = None

    def _receive(self, outputs: Sequence[tuple[int, int, int]], grads: Arrived) -> None:
        for at, j, output in outputs:
            g, box = grads[output], self._boxes.setdefault(at, {})
            if j in box or at in self._consumed:
                raise NatgradError(
                    f"two backward passes came to the outputs of {self.tape.uses[at].module} in one forward pass: call "
                    "backward once, on the sum of the losses"
                )
            if g is not None:
                box[j] = g.detach()
                self._waiting += g.nbytes
            if at in self._through_graph:
                use, block = self.tape.uses[at], self._through_graph[at]
                (outer,) = self._outer(at)
                self._features[at] = cotangent_features(use.rule, use.module, block.keys, outer, block.shape)
        if self._waiting > self._room:
            ready = [b for b in self._left if self._is_ready(b)]
            if ready:
                self._give(ready, inner=False)

    def _is_ready(self, b: int) -> bool:
        """Whether a layer needs no other cotangents than those that wait."""
        (at, *more), use = self._uses_of[b], self.tape.uses[self._uses_of[b][0]]
        return not more and at in self._boxes and not self._blocks[b].facets and not isinstance(use.rule, Replayed)

    def _give(self, numbers: Sequence[int], *, inner: bool) -> None:
        outer = {at: self._outer(at) for at in {at for b in numbers for at in self._uses_of[b]}}
        for b in numbers:
            del self._left[b]
        needed = {at for b in self._left for at in self._uses_of[b]}
        self._consumed |= outer.keys() - needed
        for at in outer.keys() - needed:
            self._boxes.pop(at, None)
        self._waiting = sum(g.nbytes for box in self._boxes.values() for g in box.values())
        assert self._consume is not None
        cotangents = self.tape.with_inner(outer) if inner else Cotangents(outer, {})
        self._consume(numbers, replace(cotangents, features=self._features))

    def _outer(self, at: int) -> tuple[Tensor, ...]:
        """The cotangents of all outputs of a use, with the examples first; zero where no path of the graph leads."""
        use, box = self.tape.uses[at], self._boxes.get(at, {})
        like = next(iter(box.values()), self.tape.y)
        return tuple(
            use.batch_first(box[j].unsqueeze(0)) if j in box else like.new_zeros(1, *shape)
            for j, shape in enumerate(use.shapes)
        )


def _early_uses(
    tape: Tape, blocks: Sequence[Block], names: Hashable, room: int
) -> tuple[Sequence[int], frozenset[int]]:
    """The uses that can be consumed in a hook, and those of them at which more than ``room`` bytes are waiting.

    The search is slow: it is cached by the kind of graph, for all sizes. A backward pass starts at the last layer.
    """
    key = ("early", names)
    if key not in tape.memo:
        tape.memo[key] = _uses_above_others(tape, blocks)
    early, held, last = tape.memo[key], 0, set()
    for at in reversed(early):
        held += tape.uses[at].shape.numel() * tape.y.element_size()
        if held > room:
            last.add(at)
            held = 0
    return early, frozenset(last)


def _uses_above_others(tape: Tape, blocks: Sequence[Block]) -> Sequence[int]:
    """Uses of layers that are called once, whose node is theirs alone and is visited on the way to another layer's."""
    used: set[int] = set()
    several: set[int] = set()
    for block in blocks:
        at_uses = tape.use_ids(block)
        used.update(at_uses)
        if len(at_uses) != 1 or block.facets:
            several.update(at_uses)
    outputs = Counter(edge.node for use in tape.uses for edge in use.edges if edge is not None)
    upper = above({edge.node for at in used for edge in tape.uses[at].edges if edge is not None})
    early = []
    for at in sorted(used - several):
        use = tape.uses[at]
        edge = use.edges[0] if len(use.edges) == 1 else None
        if edge is not None and not isinstance(use.rule, Replayed) and edge.node in upper and outputs[edge.node] == 1:
            early.append(at)
    return early


def above(ends: Collection[Any]) -> set[Any]:
    """Those of the nodes ``ends`` of a graph below which there are others of them."""
    leads = dict.fromkeys(ends, True)  # whether a node is one of them, or above one
    upper = set()
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
            upper.add(end)
    return upper
