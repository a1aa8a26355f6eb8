"""The two Kronecker factors of every layer of a batch: S = Σ g gᵀ/N and A = Σ a aᵀ/(N·R).

``stream`` computes them layer by layer in one backward pass, on a GPU in CUDA graphs (``CapturedKernels``). Where the
root has too many columns for one pass, ``second_moments`` adds up the factors of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, cast, final

import torch
from torch import Tensor

from natgrad.accelerate.modules import buffers_of
from natgrad.accelerate.moments import nonzero_rows, rows, rows_and_mask
from natgrad.accelerate.replay import GraphCache, Scalar
from natgrad.errors import IncompatibleError
from natgrad.model import tensors_of
from natgrad.pullbacks.coupling import Mixing, Weights, at_fixed_address
from natgrad.pullbacks.layer import Block, Sharing, joined
from natgrad.pullbacks.layer_factors import (
    EagerKernels,
    FactorList,
    FactorSink,
    LayerFactors,
    ReachedPositions,
    Side,
    VisiblePositions,
    any_of,
    forgetting,
    layers_with_positions,
)
from natgrad.pullbacks.pullback import Pullback
from natgrad.pullbacks.tape import Cotangents, Tape, Use, stream_cotangents
from natgrad.rules.features import Moment

# All layers at once, chunk by chunk over the roots.


Pairs: TypeAlias = list[tuple[Tensor, Tensor]]  # S and A
Positions: TypeAlias = list[int | Tensor]  # the numbers of positions that A is the mean of
Watch: TypeAlias = Callable[[Tape, Cotangents], None]  # sees the cotangents of every chunk of roots


def by_roots(pb: Pullback) -> Iterator[Cotangents]:
    """The cotangents s J/√N, chunk by chunk over the roots."""
    return (pb.tape.cotangents(s / math.sqrt(pb.n)) for s in pb.root.split(_columns(pb)))


def second_moments(
    pb: Pullback,
    layers: Sequence[Block],
    sharing: Sharing,
    watch: Watch | None = None,
) -> tuple[Pairs, Positions]:
    """S and A of every layer in ``layers``, which have rules, summed over chunks of roots.

    ``watch`` is called with the cotangents too.
    """
    kinds = [kind for block in layers for kind in block.kinds]
    left: dict[int, Moment] = {}
    tape, leaves_out = pb.tape, pb.batch.target is not None and pb.metric.leaves_out
    weights = counted_examples(pb, pb.root) if kinds and leaves_out else None
    visible = VisiblePositions(tape, kinds, lambda: pb.root)
    there: dict[int, Tensor | None] = {}  # of each layer, the positions that count
    for g in by_roots(pb) if kinds else ():
        for b, kind in enumerate(kinds):
            h = g.of(tape, kind)
            mask = visible.of(kind, h)
            if b not in there or there[b] is not None:
                there[b] = _either(mask, there.get(b))
            moment = sharing.output_moment(sharing.outputs(h), kind)
            left[b] = left[b] + moment if b in left else moment
        if watch is not None:
            watch(tape, g)
    positions = ReachedPositions(tape, {b: kinds[b] for b in there})
    positions.update(there)
    shared = positions.take(whole=False)
    right = [
        sharing.counted_moment(tape.inputs(kind), kind, any_of(shared[b]), weights) for b, kind in enumerate(kinds)
    ]
    dtype = pb.y.dtype
    each = iter([((left[b].total.to(dtype), right[b].mean().to(dtype)), right[b].count) for b in range(len(kinds))])
    rows = [[next(each) for _ in block.kinds] for block in layers]
    pairs = [joined(block, [pair for pair, _ in row]) for block, row in zip(layers, rows, strict=True)]
    return pairs, [row[0][1] for row in rows]


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
    """Whether all roots are seen at once."""
    return pb.columns == 1 or pb.columns <= _columns(pb)


def _columns(pb: Pullback) -> int:
    """How many roots k at a time."""
    cost = sum(shape.numel() for use in pb.tape.uses for shape in use.shapes)
    return max(1, pb.chunk // max(cost, 1))


# Layer by layer: every factor goes into a sink as soon as it is there.


def factors_of(
    pb: Pullback,
    blocks: Sequence[Block],
    sharing: Sharing,
    *,
    inputs_only: bool = False,
) -> tuple[Pairs, Positions]:
    """S and A of every layer in ``blocks``, which have rules, and the numbers of positions that A is the mean of."""
    sink = FactorList()
    stream(pb, blocks, sharing, sink, inputs_only=inputs_only)
    return sink.pairs(), [sink.positions[b] for b in range(len(blocks))]


def stream(
    pb: Pullback,
    blocks: Sequence[Block],
    sharing: Sharing,
    sink: FactorSink,
    *,
    inputs_only: bool = False,
) -> None:
    """S and A of every layer in ``blocks``, which have rules, into the sink.

    Inputs come first, while there are no cotangents. Cotangents are used inside the backward pass, where they arrive.
    ``inputs_only``: S is the identity.
    """
    if inputs_only:
        stream_inputs(pb, blocks, sharing, sink)
    if not blocks or inputs_only:
        return
    if pb.coupling is None and not whole(pb):
        for b, ((s, a), count) in enumerate(zip(*second_moments(pb, blocks, sharing), strict=True)):
            by_group = count.view(-1, *[1] * (a.ndim - 1)) if isinstance(count, Tensor) else count
            sink.put(b, "A", Moment(a * by_group, count))
            sink.put(b, "S", Moment(s, 1))
        sink.flush()
        return
    tape, s, weights = pb.tape, pb.root, None
    if pb.coupling is None and (weights := counted_examples(pb, s)) is not None:
        weights = at_fixed_address(tape.memo, "examples that count", weights)
    layers = LayerFactors(
        tuple(blocks),
        sharing,
        pb.y.dtype,
        pb.n,
        layers_with_positions(tape, blocks),
        weights,
        coupled_by(pb, tape),
        visible=VisiblePositions(tape, blocks, lambda: s),
    )
    graphs = None if sink.address_key is None else pb.graph_cache
    kernels = kernels_of(graphs, layers, tape, sink, layers.reached_positions(tape))
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
    graphs = None if sink.address_key is None else pb.graph_cache
    kernels_of(graphs, layers, pb.tape, sink, layers.reached_positions(pb.tape)).inputs(range(len(blocks)))
    sink.flush()


# From CUDA graphs: layers of a network have hundreds of small kernels, and a GPU waits for the host to launch them.
# ``EagerKernels`` in ``layer_factors.py`` is the same without graphs.


def kernels_of(
    graphs: GraphCache[None] | None, layers: LayerFactors, tape: Tape, sink: FactorSink, positions: ReachedPositions
) -> EagerKernels | CapturedKernels:
    """How the factors of the layers are computed: from graphs, where there is a cache of them."""
    if graphs is None:
        return EagerKernels(layers, tape, sink, positions)
    return CapturedKernels(graphs, layers, tape, sink, positions)


@final
@dataclass(frozen=True)
class CapturedKernels:
    """Computes the factors of all layers: in CUDA graphs if their rules are ``capturable``, else one after the other.

    There is one graph for the inputs, whose memory is free again before there are cotangents. The cotangents have one
    graph or, if they are large, several: those that have been used are freed.

    Where every batch has another size, no address comes again. Then the rows of all examples are padded with zeros to
    one of few sizes: zero rows add nothing to Σ a aᵀ and Σ g gᵀ, and the true counts are scalars of the graph. Indices
    of embeddings, and inputs of normalisations with statistics of a batch, have no zero and are not padded, nor are
    positions that are reduced or layers whose A is late.
    """

    graphs: GraphCache[None]
    layers: LayerFactors
    tape: Tape
    sink: FactorSink
    reached_positions: ReachedPositions

    def inputs(self, numbers: Sequence[int]) -> None:
        """A of these layers, unless it is late."""
        self._put_inputs({b: () for b in numbers if b not in self.layers.needs_cotangents}, late=False)

    def outputs(self, numbers: Sequence[int], g: Cotangents) -> None:
        """S of these layers, and A of the layers in ``needs_mask`` whose masks are now complete."""
        captured = [b for b in numbers if b in self._capturable]
        at_uses, key = self._uses_and_key("S", captured)
        if self._changes_address(key, [g.outer[at][0] for at in (*at_uses[:1], *at_uses[-1:])]):
            rest = self._put_padded_outputs(captured, g, key)
            if rest != captured:
                captured, (at_uses, key) = rest, self._uses_and_key("S", rest)
        late = self._uses_of([b for b in captured if b in self.layers.coupled_sides])
        after = [b for b in numbers if b in self.layers.needs_mask]
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

        if captured:
            tensors = [*self._called(late), *(t for at in at_uses for t in g.outer[at])]
            visible = self.layers.visible.addresses if late and self.layers.visible is not None else ()
            addresses = (*visible, *[mask.data_ptr() for mask in masks.values()])
            self.graphs.run(compute, tensors, [self.sink.weight], key, size=(self.layers.n, addresses))
        others = [b for b in numbers if b not in self._capturable]
        for b in forgetting(self.tape, self.layers.blocks, g, others):
            self.layers.put_outputs(b, self.tape, g, self.sink)
        if after:
            self._put_inputs(self.reached_positions.take(whole=True), late=True)

    def _masks(self, numbers: Sequence[int], g: Cotangents) -> dict[int, Tensor]:
        """Buffers [n r] for the position masks of these layers; none where all positions count.

        Cached for the sizes of the last pass. The first pass of a size fills them here. Where cotangents do not tell,
        there is none.
        """
        if self.layers.gated:
            return {}

        def fill() -> dict[int, Tensor]:
            masks = ((at, self._reached(b, g)) for at, b in enumerate(numbers))
            return {at: mask for at, mask in masks if mask is not None}

        key = "masks", tuple([self.layers.blocks[b].names for b in numbers])
        return {numbers[at]: mask for at, mask in self.tape.cached(key, fill).items()}

    def _reached(self, b: int, g: Cotangents) -> Tensor | None:
        """Which positions of a layer count, [n r], on a GPU where graphs find it; None for all."""
        block = self.layers.blocks[b]
        mask = self.layers.there(block, g.of(self.tape, block))
        if mask is None or self.layers.gated:
            return mask
        return at_fixed_address(self.tape.memo, ("reached", block.names), mask)

    def inputs_after(self) -> None:
        """A of the layers in ``needs_mask`` that are left when the backward pass has ended."""
        self._put_inputs(self.reached_positions.take(whole=False), late=True)

    def _put_inputs(self, there: Mapping[int, tuple[Tensor, ...]], *, late: bool) -> None:
        """A of layers with masks: a position counts if one of them is true. Without a mask all count.

        ``late``: the layers are those in ``needs_mask``.
        """
        if not there:
            return
        captured = [b for b in there if b in self._capturable]
        at_uses, key = self._uses_and_key("A", captured)
        if self._changes_address(key, [self.tape.uses[at].call.x for at in (*at_uses[:1], *at_uses[-1:])]):
            rest = self._put_padded_inputs(captured, key, {b: any_of(there[b]) for b in captured} if late else None)
            if rest != captured:
                captured, (at_uses, key) = rest, self._uses_and_key("A", rest)
        called, numbers_of = self._called(at_uses), dict[tuple[int, ...], list[int]]()
        for b in captured:
            numbers_of.setdefault(tuple([mask.data_ptr() for mask in there[b]]), []).append(b)

        def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            tape = self.tape if tensors is called else self._tape_reading(at_uses, iter(tensors))
            sink = self.sink.with_weight(scalars[0])
            for numbers in numbers_of.values():
                mask = any_of(there[numbers[0]])
                for b in numbers:
                    self.layers.put_inputs(b, tape, sink, mask)
            sink.flush()

        if captured:  # masks are where they always are
            addresses = tuple([(masks, tuple(numbers)) for masks, numbers in numbers_of.items()]) if late else ()
            self.graphs.run(compute, called, [self.sink.weight], key, size=(self.layers.n, addresses))
        for b, masks in there.items():
            if b not in self._capturable:
                self.layers.put_inputs(b, self.tape, self.sink, any_of(masks))

    def _changes_address(self, key: Hashable, tensors: Sequence[Tensor]) -> bool:
        """Whether the inputs of these layers keep changing address; the first and the last tensor tell."""
        return self.graphs.changes_address(tensors, key)

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
            x_rows, mask = rows_and_mask(x, self._mask_of(at, padded.numbers, there), trailing)
            called.append(x_rows)
            masks.append(mask.unsqueeze(1))

        def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
            supply = iter(tensors)
            tape = self._tape_reading([at for at, _ in padded.uses], supply)
            sink, given = (
                self.sink.with_weight(scalars[0]),
                dict(zip((at for at, _ in padded.uses), supply, strict=False)),
            )
            for b, at in zip(padded.numbers, scalar_of, strict=True):
                if there is None:
                    self.layers.put_inputs(b, tape, sink, count=scalars[at])
                else:
                    of_uses = [given[use] for use in self.tape.use_ids(self.layers.blocks[b])]
                    self.layers.put_inputs(b, tape, sink, torch.cat(of_uses, 1))
            sink.flush()

        if called:
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

        if tensors:
            scalars = [self.sink.weight, float(max(1, self.layers.n))]
            self.graphs.run_padded(compute, tensors, scalars, (key, padded.numbers))
        return padded.others

    def _padded_rows(self, side: Side, numbers: Sequence[int]) -> PaddedRows:
        """Cached by the kind of graph."""
        layers = self.layers
        names = tuple(
            (b, layers.blocks[b].names, b in layers.needs_cotangents, b in layers.needs_mask) for b in numbers
        )
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
        if b in self.layers.coupled_sides or self.layers.blocks[b].facets:
            return False
        uses = self.tape.of(self.layers.blocks[b])
        rowwise = all(len(use.edges) == 1 and self._row_axes(use) > 0 for use in uses)
        return rowwise and self.layers.sharing.how == "expand"

    def _pads_inputs(self, b: int) -> bool:
        """Whether zero rows may be appended to its inputs."""
        block = self.layers.blocks[b]
        weighted = self.layers.weights is not None and b not in self.layers.needs_mask
        if not self._pads(b) or weighted or self.layers.sharing.only_diagonal(block)[0]:
            return False
        uses = self.tape.of(block)
        alone = all(len(use.call.args) == 1 and not use.call.kwargs and use.call.x.ndim > 1 for use in uses)
        if b in self.layers.needs_mask and not all(use.rule.leading(use.module, use.shape) for use in uses):
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
        buffers, names = buffers_of([use.module for use in uses]), self.layers.names
        key = (
            side,
            self.layers.sharing,
            self.layers.of_mean,
            self.layers.inputs_only,
            None if self.layers.weights is None else self.layers.weights.data_ptr(),
            None if self.layers.relation is None else self.layers.relation.address_key,
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
