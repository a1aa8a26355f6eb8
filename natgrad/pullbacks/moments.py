"""The two Kronecker factors of every layer of a batch: S = Σ g gᵀ/N and A = Σ a aᵀ/(N·R).

``stream`` computes them layer by layer in one backward pass. Where the root has too many columns for one,
``second_moments`` adds up the factors of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from natgrad.accelerate.moments import nonzero_rows
from natgrad.errors import IncompatibleError
from natgrad.pullbacks.backward import stream_cotangents
from natgrad.pullbacks.captured_factors import kernels_of
from natgrad.pullbacks.coupling import Mixing, Weights, at_fixed_address
from natgrad.pullbacks.layer import Block, joined
from natgrad.pullbacks.layer_factors import (
    FactorList,
    FactorSink,
    LayerFactors,
    ReachedPositions,
    any_of,
    several_positions,
)
from natgrad.pullbacks.pullback import Pullback
from natgrad.pullbacks.sharing import Sharing
from natgrad.pullbacks.tape import Cotangents, Tape
from natgrad.pullbacks.visible_positions import VisiblePositions
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
        several_positions(tape, blocks),
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
