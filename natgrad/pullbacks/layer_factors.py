"""The two Kronecker factors of one layer, from its inputs and cotangents: which positions count, and where factors go.

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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.accelerate.autograd import nodes
from natgrad.accelerate.devices import can_read
from natgrad.accelerate.replay import Scalar
from natgrad.pullbacks.coupling import Mixing, Weights, at_fixed_address
from natgrad.pullbacks.layer import Block, Sharing, joined
from natgrad.pullbacks.operation_layers import is_operation
from natgrad.pullbacks.tape import Cotangents, Tape, stream_cotangents
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
