"""The two Kronecker factors of every layer of a batch: S = Σ g gᵀ/N and A = Σ a aᵀ/(N·R).

Read it in this order: which positions of a layer count (``VisiblePositions``), where factors go (``FactorSink``), the
factors of one layer (``LayerFactors``), those of all layers in one backward pass (``stream``), and the same in CUDA
graphs (``CapturedKernels``). Where the root has too many columns for one pass, ``second_moments`` adds up the factors
of several.

A moving average takes every factor as it arrives (``FactorSink``). The factors of a large network are larger than its
parameters, and an estimate that is held beside its average would be as large again.

Positions that the loss does not see do not count (``VisiblePositions``). A padded token, an ignored label and a token
that no head reads have a cotangent that is exactly zero: nothing that the loss sees is computed from them. But so has a
token whose units are all behind a ReLU that is off. It is seen, as an example with such units is. Where functions that
may be flat (``_GATES``) lie in the graph, the positions are those to which a second pass comes, in which such functions
let a part of the cotangents through where they are flat. So does a product with one of them, relu(a) * g, to g where a
is off. Masks are no functions of the numbers that they are put on: they let nothing through in either pass.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast, final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.accelerate.autograd import nodes
from natgrad.accelerate.devices import can_read
from natgrad.accelerate.modules import buffers_of
from natgrad.accelerate.moments import nonzero_rows, rows, rows_and_mask
from natgrad.accelerate.replay import GraphCache, Scalar
from natgrad.errors import IncompatibleError
from natgrad.model import tensors_of
from natgrad.pullbacks.coupling import Mixing, Weights, at_fixed_address
from natgrad.pullbacks.layer import Block, Sharing, joined
from natgrad.pullbacks.operation_layers import is_operation
from natgrad.pullbacks.pullback import Pullback
from natgrad.pullbacks.tape import Cotangents, Tape, Use, stream_cotangents
from natgrad.rules.features import Features, Moment
from natgrad.rules.replayed import Replayed

# Which positions the loss sees.


Grads: TypeAlias = tuple[Tensor | None, ...]


def _named(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{version}" for name in names for version in range(4))


# Functions of every number by itself that are flat on one side, and those that are flat at 0, where these end.
_GATES = _named(
    *("Relu", "Threshold", "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink"),
    *("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum"),
)
_FLAT_AT_ZERO = _named("Pow")


def reached(g: Features, block: Block) -> Tensor | None:
    """The mask [n r] of the positions of a layer with a cotangent that is not zero. None if all have, or all count.

    Pixels all count, and so does the only position of an example.
    """
    assert block.rule is not None
    return None if g.shape[-3] == 1 or block.rule.pixels else g.reached()


def has_several(tape: Tape, block: Block) -> bool:
    """Whether a layer has several positions, of which those count that the loss sees."""
    if block.rule is None or block.rule.pixels:
        return False
    return is_operation(block) or tape.positions(block) > block.shape[0]


def may_hide(tape: Tape, layers: Sequence[Block]) -> bool:
    """Whether units that are off may hide positions of a layer that the loss sees."""
    return any(has_several(tape, kind) for layer in layers for kind in layer.kinds) and bool(_gates(tape))


@final
class VisiblePositions:
    """The positions of layers that count in a pass: those that the loss sees.

    Others add nothing to G = Σ (Σ_r g aᵀ)(Σ_r g aᵀ)ᵀ, and so must add nothing to A: otherwise A would depend on the
    length that a batch is padded to. ``root``: s [k n *out] of the examples of the pass, where outputs that are ignored
    are zero.

    >>> import natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    >>> model[0].weight.data, model[0].bias.data = torch.ones(1, 1), torch.zeros(1)
    >>> pb = ng.pullback(model, torch.tensor([[[1.0], [-2.0]]]), ng.Euclidean())  # the second of two positions is off
    >>> tape = pb.tape
    >>> g, visible = tape.cotangents(pb.root), VisiblePositions(tape, pb.layers, lambda: pb.root)
    >>> reached(g.of(tape, pb.layers[0]), pb.layers[0]), visible.of(pb.layers[0], g.of(tape, pb.layers[0]))
    (tensor([[ True, False]]), None)
    """

    def __init__(self, tape: Tape, layers: Sequence[Block], root: Callable[[], Tensor]) -> None:
        self._tape, self._root = tape, root
        self._kinds = [kind for layer in layers for kind in layer.kinds if has_several(tape, kind)]
        self._gates = _gates(tape) if self._kinds else []
        self.gated: bool = bool(self._gates)  # whether cotangents that are zero do not tell what the loss sees
        self._unread = self.gated and not can_read(tape.y)
        if self._unread:  # all positions may be reached, but to look would be to wait
            _ = self._masks

    def without_graph(self) -> Self:
        """Its masks alone. The graph of the user's backward pass holds those who ask for them."""
        _ = self._masks
        del self._tape, self._root, self._kinds, self._gates
        return self

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where captured kernels read masks."""
        return tuple([mask.data_ptr() for mask in self._masks.values() if mask is not None]) if self.gated else ()

    def of(self, kind: Block, g: Features) -> Tensor | None:
        """The mask [n r] of a layer of one kind with cotangents g; None if all positions count."""
        if self._unread:
            return self._masks.get(_key(kind))
        there = reached(g, kind)
        return there if there is None or not self.gated else self._masks[_key(kind)]

    @cached_property
    def _masks(self) -> dict[object, Tensor | None]:
        """From the second pass. Its cotangents at the outputs are any numbers, where the root is not zero."""
        tape, s = self._tape, self._root()
        any_numbers = torch.arange(s[0].numel(), dtype=s.dtype, device=s.device).cos().view_as(s[0])
        masks: dict[object, Tensor | None] = {}

        def consume(numbers: Sequence[int], g: Cotangents) -> None:
            for b in numbers:
                kind = self._kinds[b]
                mask, key = reached(g.of(tape, kind), kind), _key(kind)
                masks[key] = None if mask is None else at_fixed_address(tape.memo, ("visible", key), mask)

        with _leaking(self._gates):
            stream_cotangents(tape, self._kinds, any_numbers.where((s != 0).any(0), 0).unsqueeze(0), consume)
        return masks


def _key(kind: Block) -> object:
    return kind.names, type(kind.rule), kind.keys


Gate: TypeAlias = tuple[Any, frozenset[int]]  # a node, and into which of its inputs cotangents leak


def _gates(tape: Tape) -> list[Gate]:
    """The nodes of functions that may be flat, if a pass has some in its graphs. All such graphs have equal nodes."""
    if not tape.y.requires_grad or not tape.memo.setdefault("gated", True):
        return []
    gates = [(node, sides) for node in nodes(tape.last_nodes) if (sides := _leaks(node))]
    tape.memo["gated"] = any(node.name() in _GATES for node, _ in gates)
    return gates if tape.memo["gated"] else []


def _leaks(node: Any) -> frozenset[int]:
    """The inputs of a node whose cotangents may vanish where a function is flat: in a product, beside one that is."""
    flat, before = _GATES | _FLAT_AT_ZERO, [each for each, _ in node.next_functions]
    if node.name() in flat:
        return frozenset(range(len(before)))
    if node.name() != "MulBackward0" or None in before:  # a mask has no node
        return frozenset()
    return frozenset(1 - at for at, each in enumerate(before) if each.name() in flat)


@contextmanager
def _leaking(gates: Sequence[Gate]) -> Iterator[None]:
    """Backward passes inside go through these nodes where they are flat. By a half: |x| = ReLU(x) + ReLU(−x) leaks."""

    def leak(sides: frozenset[int], into: Grads, out: Grads) -> Grads:
        (g,) = out
        if g is None:
            return into
        each = enumerate(into)
        return tuple(
            [t if t is None or i not in sides else t.where(t != 0, 0.5 * g.sum_to_size(t.shape)) for i, t in each]
        )

    handles = [node.register_hook(functools.partial(leak, sides)) for node, sides in gates]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Where factors go.


Side: TypeAlias = Literal["S", "A"]


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


def layers_with_positions(tape: Tape, blocks: Sequence[Block]) -> frozenset[int]:
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

    Cotangents are those of the root s, and S is divided by n here. ``has_positions``: the numbers of the layers in
    which some positions may not count (``layers_with_positions``). ``weights`` [n]: 1 for examples that count, else 0;
    None if all count. ``relation``: what couples the n examples. ``of_mean``: the cotangents are those of a loss that
    is a mean over the examples, 1/n of those of a root. ``inputs_only``: S is the identity. ``visible``: the positions
    that count; None where the cotangents alone tell.
    """

    blocks: tuple[Block, ...]
    sharing: Sharing
    dtype: torch.dtype
    n: int
    has_positions: frozenset[int]
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
    def coupled_sides(self) -> frozenset[int]:
        """The layers whose A and S are computed together, because one factor scales the other.

        These are tied weights, stacks of experts and, with a coupling, all.
        """
        if self.inputs_only:
            return frozenset()
        if self.relation is not None:
            return frozenset(range(len(self.blocks)))
        stacked = [b for b in self.has_positions if (rule := self.blocks[b].rule) is not None and rule.stacked]
        tied = [b for b, block in enumerate(self.blocks) if block.facets]
        return frozenset([*stacked, *tied])

    @cached_property
    def needs_mask(self) -> frozenset[int]:
        """The layers whose A is computed after S: the cotangents tell which positions count."""
        return frozenset() if self.inputs_only else self.has_positions - self.coupled_sides

    @cached_property
    def needs_cotangents(self) -> frozenset[int]:
        """All layers whose A depends on cotangents."""
        return self.needs_mask | self.coupled_sides

    @property
    def gated(self) -> bool:
        """Whether cotangents that are zero do not tell which positions count."""
        return self.visible is not None and self.visible.gated

    def there(self, kind: Block, g: Features) -> Tensor | None:
        """Which positions of a layer of one kind count, [n r]; None for all."""
        return reached(g, kind) if self.visible is None else self.visible.of(kind, g)

    def reached_positions(self, tape: Tape) -> ReachedPositions:
        """The masks of the layers in ``needs_mask``; empty until cotangents arrive."""
        return ReachedPositions(tape, {b: self.blocks[b] for b in sorted(self.needs_mask)})

    def put_inputs(
        self, b: int, tape: Tape, sink: FactorSink, there: Tensor | None = None, count: Scalar | None = None
    ) -> None:
        """A of the positions that count.

        ``there`` [n r]: a mask of them, None for all. ``count``: if it is a tensor, the number of positions that are
        not padding.
        """
        kind = self.blocks[b].kinds[0]  # of a tied weight the one that it is packed as
        a = tape.inputs(kind)
        real = a.padded_moment(count).to(self.dtype) if isinstance(count, Tensor) else None
        sink.put(b, "A", self._input_moment(a, kind, there) if real is None else real)
        if self.inputs_only:
            sink.put(b, "S", Moment(torch.ones(kind.shape[:2], dtype=self.dtype, device=kind.device), 1))

    def put_outputs(self, b: int, tape: Tape, g: Cotangents, sink: FactorSink, there: Tensor | None = None) -> None:
        """S, and A of layers in ``coupled_sides``; the mask of positions that count goes to ``there`` [n r]."""
        block = self.blocks[b]
        if b not in self.coupled_sides:
            sink.put(b, "S", self._over_examples(self._outputs(block, g.of(tape, block), there), self.n))
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

    def _over_examples(self, moment: Moment, n: Scalar) -> Moment:
        """Of products of cotangents, those of n examples."""
        return Moment(moment.total * n, 1) if self.of_mean else moment.over(n if isinstance(n, Tensor) else int(n))

    def padded_outputs(self, b: int, tape: Tape, g: Cotangents, n: Scalar) -> Moment:
        """S where only n examples are real."""
        return self._over_examples(self._outputs(self.blocks[b], g.of(tape, self.blocks[b])), n)

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
            if b not in self.layers.needs_cotangents:
                self.layers.put_inputs(b, self.tape, self.sink)

    def outputs(self, numbers: Sequence[int], g: Cotangents) -> None:
        """S of these layers, and A of the layers in ``needs_mask`` whose masks are now complete."""
        blocks = self.layers.blocks
        after = [b for b in numbers if b in self.layers.needs_mask]
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
            self.layers.put_inputs(b, self.tape, self.sink, any_of(masks))


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
# ``EagerKernels`` is the same without graphs.


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
