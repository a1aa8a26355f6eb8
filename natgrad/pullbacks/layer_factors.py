"""The two Kronecker factors of one layer, from its inputs and cotangents, and where they go.

A moving average takes every factor as it arrives (``FactorSink``). The factors of a large network are larger than its
parameters, and an estimate that is held beside its average would be as large again.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.replay import Scalar
from natgrad.pullbacks.coupling import Mixing, Weights
from natgrad.pullbacks.layer import Block, joined
from natgrad.pullbacks.operation_layers import is_operation
from natgrad.pullbacks.sharing import Sharing
from natgrad.pullbacks.tape import Cotangents, Tape
from natgrad.pullbacks.visible_positions import VisiblePositions, has_several, reached
from natgrad.rules.base import Replayed
from natgrad.rules.features import Features, Moment

# Where factors go.


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
    """Keeps S and A of every layer, and the numbers of positions that A is the mean of."""

    def __init__(self) -> None:
        self.factors: dict[tuple[int, Side], Tensor] = {}
        self.positions: dict[int, int | Tensor] = {}

    def put(self, b: int, side: Side, moment: Moment) -> None:
        self.factors[b, side] = moment.mean()
        if side == "A":
            self.positions[b] = moment.count

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """S and A of every layer."""
        return [(self.factors[b, "S"], self.factors[b, "A"]) for b in range(len(self.factors) // 2)]


# Which positions count.


def several_positions(tape: Tape, blocks: Sequence[Block]) -> frozenset[int]:
    """The numbers of the layers with several positions, of which those count that the loss sees."""
    key = "several", tuple([block.names for block in blocks])
    return tape.cached(key, lambda: frozenset(b for b, block in enumerate(blocks) if has_several(tape, block)))


@final
class ReachedPositions:
    """Masks of the positions that the loss sees, layer by layer as the backward pass comes to them.

    Layers that read the same tensor (query, key and value) count the same positions: those that the loss sees in at
    least one of these layers. (The query of a token that sees only one key has no cotangent, up to rounding.) So
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


def any_of(masks: Sequence[Tensor]) -> Tensor | None:
    """Where one of these is true; None, which is everywhere, where there is none."""
    return functools.reduce(torch.logical_or, masks) if masks else None


def _only_read(tape: Tape, layer: Block) -> tuple[int, int] | None:
    """The use that a layer reads its input in, and how many positions it has.

    None where it has several uses, or hides what it reads.
    """
    ids = tape.use_ids(layer)
    if len(ids) != 1 or isinstance(layer.rule, Replayed) or is_operation(layer):
        return None
    return ids[0], tape.inputs(layer).shape[-3]


@final
@dataclass(frozen=True)
class LayerFactors:
    """Computes A and S of one layer at a time, and puts them into a sink.

    Cotangents are those of the root s, and S is divided by n here. ``several``: the numbers of the layers in which some
    positions may not count (``several_positions``). ``weights`` [n]: 1 for examples that count, else 0; None if all
    count. ``relation``: what couples the n examples. ``of_mean``: the cotangents are those of a loss that is a mean
    over the examples, 1/n of those of a root. ``inputs_only``: S is the identity. ``visible``: the positions that
    count; None where the cotangents alone tell.
    """

    blocks: tuple[Block, ...]
    sharing: Sharing
    dtype: torch.dtype
    n: int
    several: frozenset[int]
    weights: Tensor | None = None
    relation: Mixing | Weights | None = None
    of_mean: bool = False
    inputs_only: bool = False
    visible: VisiblePositions | None = None

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Of the parameters of every layer."""
        return tuple([block.names for block in self.blocks])

    @cached_property
    def together(self) -> frozenset[int]:
        """The layers whose A and S are computed together, because one factor scales the other.

        These are tied weights, stacks of experts and, with a coupling, all.
        """
        if self.inputs_only:
            return frozenset()
        if self.relation is not None:
            return frozenset(range(len(self.blocks)))
        stacked = [b for b in self.several if (rule := self.blocks[b].rule) is not None and rule.stacked]
        tied = [b for b, block in enumerate(self.blocks) if block.facets]
        return frozenset([*stacked, *tied])

    @cached_property
    def after(self) -> frozenset[int]:
        """The layers whose A is computed after S: the cotangents tell which positions count."""
        return frozenset() if self.inputs_only else self.several - self.together

    @cached_property
    def late(self) -> frozenset[int]:
        """All layers whose A depends on cotangents."""
        return self.after | self.together

    @property
    def gated(self) -> bool:
        """Whether cotangents that are zero do not tell which positions count."""
        return self.visible is not None and self.visible.gated

    def there(self, kind: Block, g: Features) -> Tensor | None:
        """Which positions of a layer of one kind count, [n r]; None for all."""
        return reached(g, kind) if self.visible is None else self.visible.of(kind, g)

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
        there = self.there(kind, h)
        if self.relation is None:
            return self._outputs(kind, h).total, self._input_moment(a, kind, there)
        return self.relation.factors(a, h, kind, self.sharing, there)

    def _input_moment(self, a: Features, kind: Block, there: Tensor | None) -> Moment:
        return self.sharing.counted_moment(a, kind, there, self.weights).to(self.dtype)

    def _outputs(self, kind: Block, g: Features, there: Tensor | None = None) -> Moment:
        if there is not None:
            return self.sharing.marked_output_moment(g, kind, there).to(self.dtype)
        return self.sharing.output_moment(self.sharing.outputs(g), kind).to(self.dtype)


@final
@dataclass(frozen=True)
class EagerKernels:
    """Computes the factors of all layers, one layer after the other; ``CapturedKernels`` does so in CUDA graphs."""

    layers: LayerFactors
    tape: Tape
    sink: FactorSink
    reached_positions: ReachedPositions

    def inputs(self, numbers: Sequence[int]) -> None:
        """A of these layers, unless it is late."""
        for b in numbers:
            self.layers.put_inputs(b, self.tape, self.sink)

    def outputs(self, numbers: Sequence[int], g: Cotangents) -> None:
        """S of these layers, and A of the layers in ``after`` whose masks are now complete."""
        blocks = self.layers.blocks
        after = [b for b in numbers if b in self.layers.after]
        self.reached_positions.update({b: self.layers.there(blocks[b], g.of(self.tape, blocks[b])) for b in after})
        for b in forgetting(self.tape, blocks, g, numbers):
            self.layers.put_outputs(b, self.tape, g, self.sink)
        if after:
            self._put_inputs_after(self.reached_positions.take(whole=True))

    def inputs_after(self) -> None:
        """A of the layers that still wait for others, when no more cotangents will come."""
        self._put_inputs_after(self.reached_positions.take(whole=False))

    def _put_inputs_after(self, there: Mapping[int, tuple[Tensor, ...]]) -> None:
        for b, masks in there.items():
            self.layers.put_inputs_after(b, self.tape, self.sink, any_of(masks))


def forgetting(tape: Tape, blocks: Sequence[Block], g: Cotangents, numbers: Sequence[int]) -> Iterator[int]:
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
