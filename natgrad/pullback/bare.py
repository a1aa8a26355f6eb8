"""Parameters that belong to no layer and are spread over the examples: positions, LayerScale, a class token, a gain.

Such a parameter θ enters the graph through tensors u(θ) without examples, and u is added to, or multiplied with, a
tensor that has them: z = x + αu, z = x ⊙ u, or z = u for every example (``expand``). The row of example n is then

    R_kn = (∂u/∂θ)ᵀ Σ_r g_knr ⊙ x_nr          (x = α where u is added)

with g the cotangents of z and r the places that u was spread over inside the example. They come from the backward pass
of the other layers; without this, the model would be run again for every example.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from natgrad.accelerate.moments import single
from natgrad.errors import BatchStatisticsError
from natgrad.model import Model
from natgrad.pullback.batch_axis import FORK, ordered
from natgrad.pullback.graph import Axis, nodes
from natgrad.pullback.layer import Block
from natgrad.pullback.tape import Ruled, Tape, Use
from natgrad.rules.base import Call, Keys, Rule
from natgrad.rules.embedding import EmbeddingRule
from natgrad.rules.features import Entries

# Where a tensor without examples is spread over them, and the rows of the parameters that it comes from.


LEAF = "torch::autograd::AccumulateGrad"
# Of a tensor without examples these keep the order of the elements, and all of them.
SAME = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Alias")
) | {"SqueezeBackward1"}


@final
@dataclass(frozen=True)
class Cut:
    """Where a tensor u without examples is spread over them: argument ``at`` of a node with n of them on an axis."""

    node: Any
    at: int
    n: int
    axis: Axis = field(default_factory=lambda: Axis(0))

    @property
    def below(self) -> Any:
        """The node that u comes from."""
        return self.node.next_functions[self.at][0]

    @property
    def u(self) -> torch.Size:
        """The shape of u."""
        child, output = self.node.next_functions[self.at]
        return _shape(child, output)

    @property
    def z(self) -> torch.Size:
        """The shape of what comes out."""
        return _shape(self.node, 0)

    @property
    def known(self) -> bool:
        """Whether the operation is one of those above, and u has no examples."""
        name, u, z = self.node.name(), self._aligned, self.z
        if len(u) != len(z) or u[self.axis.index] != 1 or not self.axis.fits(tuple(z), self.n):
            return False
        if name == "RepeatBackward0":
            return all(times == 1 for at, times in enumerate(self.node._saved_repeats) if at != self.axis.index)
        return name in ("AddBackward0", "SubBackward0", "MulBackward0", "ExpandBackward0")

    @property
    def _aligned(self) -> tuple[int, ...]:
        """The shape of u with as many axes as z has: broadcasting puts ones in front."""
        return (1,) * (len(self.z) - len(self.u)) + tuple(self.u)

    @property
    def added(self) -> bool:
        """Whether g ⊙ x is g itself."""
        name = self.node.name()
        return name != "MulBackward0" and (self.at == 0 or (name == "AddBackward0" and self.node._saved_alpha == 1))

    def weighted(self, g: Tensor) -> Tensor:
        """g ⊙ x [k *z]: the cotangents of u before they are summed."""
        if self.added:
            return g
        name = self.node.name()
        if name == "MulBackward0":
            other: Tensor = self.node._saved_other if self.at == 0 else self.node._saved_self
            return g * other.detach().to(g.dtype)
        return g * (self.node._saved_alpha if name == "AddBackward0" else -self.node._saved_alpha)

    def summed(self, g: Tensor) -> Tensor:
        """Cotangents [k n *u] of u for every example, from those of z [k *z]."""
        at, u = self.axis.index, self._aligned
        g = self.weighted(g).unflatten(1 + at, (self.axis.before, self.n, -1)).movedim(2 + at, 1)  # [k n *z], z_at = 2
        sizes = (*u[:at], 1, *u[at:])
        spread = [2 + axis for axis, size in enumerate(sizes) if size == 1]
        return g.sum(spread).reshape(g.shape[0], self.n, *self.u)

    def pulled(self, g: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """R [k n p] of the leaves, one after the other, from cotangents [k *z]."""
        g = self.summed(single(g))
        leaf = _only_leaf(self.below)
        if leaf is None:
            return _through(GradientEdge(*self.node.next_functions[self.at]), leaves, g)
        parts = [
            g.reshape(*g.shape[:2], -1) if own is leaf else g.new_zeros(*g.shape[:2], own.numel()) for own in leaves
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def reshaped(node: Any) -> Any:
    """The node of the tensor that this one is a reshape, or a cast, of."""
    while node is not None and node.name() in SAME:
        node = node.next_functions[0][0]
    return node


def _only_leaf(node: Any) -> Tensor | None:
    """The leaf that a tensor is a reshape of, or None."""
    below = reshaped(node)
    return below.variable if below is not None and below.name() == LEAF else None


def _through(u: GradientEdge, leaves: Sequence[Tensor], g: Tensor) -> Tensor:
    """(∂u/∂θ)ᵀ g [k n p] for g [k n *u]."""
    k, n = g.shape[:2]
    dtype = u.node._input_metadata[u.output_nr].dtype
    grads = torch.autograd.grad(
        u, leaves, g.flatten(0, 1).to(dtype), retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    parts = [
        g.new_zeros(k, n, leaf.numel()) if found is None else found.reshape(k, n, -1).to(g.dtype)
        for leaf, found in zip(leaves, grads, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _shape(node: Any, output: int) -> torch.Size:
    return torch.Size(node._input_metadata[output].shape)


# Embeddings without examples: a table of positions is looked up once, and added to all examples.


def over_examples(tape: Tape) -> Tape:
    """The tape with uses of embeddings that have no examples (positions) moved to where they are spread over them.

    ``wte(tokens) + wpe(arange(t))``: as if the table of positions had been asked once an example.
    """
    n = tape.y.shape[0]
    tables = {
        use.edges[0].node: use
        for use in tape.uses
        if type(use.rule) is EmbeddingRule and use.edges[0] and _without(tuple(use.call.x.shape), n)
    }
    if not tables:
        return tape
    places: dict[Any, list[Cut | None]] = {node: [] for node in tables}
    for node in nodes([tape.y.grad_fn]):
        for at, (child, _) in enumerate(node.next_functions):
            below = reshaped(child)
            if below in places and node.name() not in SAME:
                places[below].append(_cut(node, at, n))
    moved = {id(use): _moved(use, places[node]) for node, use in tables.items()}
    return replace(tape, uses=tuple(new for use in tape.uses for new in moved.get(id(use), [use])))


def _without(index: tuple[int, ...], n: int) -> bool:
    """Whether an index of this shape may have no examples, n: it has no axis of theirs, or one of one."""
    return len(index) <= 1 or index[0] != n or 1 in index[1:]


def _cut(node: Any, at: int, n: int) -> Cut | None:
    """Where something may be added to n examples; which axis they are on is found out later, as of any layer's."""
    shape = node._input_metadata[0].shape
    found = (Cut(node, at, n, Axis(axis)) for axis in range(len(shape) - 1) if shape[axis] == n)
    return next((cut for cut in found if cut.known and cut.added), None)


def _moved(use: Use, cuts: Sequence[Cut | None]) -> list[Use]:
    """The use, once for every place where its output is added to examples; as it was, if it is used otherwise."""
    d = use.shape[-1]
    known = [cut for cut in cuts if cut is not None and cut.z[-1] == cut.u[-1] == d]
    if len(known) < len(cuts):
        return [use]
    out: list[Use] = []
    for cut in known:
        index = use.call.x.reshape(cut.u[:-1]).expand(cut.z[:-1])
        call, edge = replace(use.call, args=(index,), kwargs={}), GradientEdge(cut.node, 0)
        of = replace(use.of, entries={}) if out else use.of  # the table entered the graph once
        out.append(replace(use, of=of, call=call, edges=(edge,), shapes=(cut.z,)))
    return out or [use]


_UNARY = frozenset(
    f"{name}Backward0"
    for name in ("Slice", "Select", "Permute", "T", "Transpose", "Clone", "Softplus", "Sigmoid", "Exp", "Tanh", "Relu")
)


@final
class Bare(nn.Module):
    """Parameters that are a layer only because no layer has them: by name, and never called."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.leaves = dict(leaves)  # in a dictionary, which torch does not look into


Cuts: TypeAlias = Sequence[tuple[Cut, set[Any]]]  # with the nodes below


@final
@dataclass(frozen=True)
class SpreadRule(Rule):
    """Every entry of the parameters is a group of its own with the input 1, and g its rows: a [n 1 p 1], g [k n 1 p 1].

    So Kronecker has S = Σ_kn R² and A = 1, the diagonal of G, which is exact for a parameter that is spread once. The
    rule of a use knows its ``cut``; that of a block, which outlives the graph, does not.
    """

    cut: Cut | None = None

    def covers(self, module: nn.Module) -> bool:
        return isinstance(module, Bare)

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        assert isinstance(module, Bare)
        return module.leaves

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return sum(self.parameters(module)[key].numel() for key in keys), 1, 1

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Entries:
        one = torch.ones((), dtype=call.x.dtype, device=call.x.device)
        return Entries(one.expand(call.args[1], 1, self.shape(module, keys)[0]))

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Entries:
        assert self.cut is not None, "asked of a block, not of a use"
        rows = self.cut.pulled(g, [self.parameters(module)[key] for key in keys])
        return Entries(rows.unsqueeze(2))

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in block.values()]).view(-1, 1, 1)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        shapes = {key: self.parameters(module)[key].shape for key in keys}
        parts = packed.flatten(-3).split([shape.numel() for shape in shapes.values()], dim=-1)
        lead = packed.shape[:-3]
        return {key: part.reshape(lead + shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


def spread(model: Model, blocks: Sequence[Block], tape: Tape) -> tuple[list[Block], Tape]:
    """Blocks without a rule whose parameters are spread over the examples get one, and the tape their uses."""
    if not tape.y.requires_grad or all(block.rule for block in blocks):
        return list(blocks), tape
    cuts, refused = _cuts(tape)
    out, uses = [], list(tape.uses)
    layered = {id(p) for use in uses for p in use.rule.parameters(use.module).values()}
    for block in blocks:
        pieces = [block] if block.rule else _pieces(model, block, cuts, refused, layered)
        out += pieces
        bare = (piece.modules[0] for piece in pieces if isinstance(piece.rule, SpreadRule))
        uses += [_use(m, cut, tape.y) for m in bare if isinstance(m, Bare) for cut in _of(m.leaves, cuts, refused)]
    return out, replace(tape, uses=tuple(uses))


def _pieces(model: Model, block: Block, cuts: Cuts, refused: set[Any], layered: set[int]) -> list[Block]:
    """The block with the rule of what is spread; where that is not so of all its parameters, those by themselves.

    A layer that its rule cannot speak for stays whole: its bias is no parameter of its own.
    """
    leaves = {name: model.params[name] for name in block.names}
    if _of(leaves, cuts, refused):
        return [as_spread(model, block)]
    if any(id(leaf) in layered for leaf in leaves.values()):
        return [block]
    return parted(model, block, {name for name, leaf in leaves.items() if _of({name: leaf}, cuts, refused)})


def parted(model: Model, block: Block, names: Collection[str]) -> list[Block]:
    """Every one of these parameters by itself, with the rule of what is spread, and the others of the block together.

    A block is there again after a checkpoint by the names of its first parameters: see ``Layered.restored_split``.
    """
    if not names:
        return [block]
    bare = block.without_rule()
    own = dict(zip(bare.names, bare.places, strict=True))

    def part(of: Sequence[str]) -> Block:
        places = tuple(own[name] for name in of)
        size = sum(place.shape.numel() for place in places)
        return replace(bare, names=tuple(of), places=places, shape=(1, size, 1))

    others = [name for name in own if name not in names]
    return [*(as_spread(model, part([name])) for name in own if name in names), *([part(others)] if others else [])]


def spread_again(blocks: Sequence[Block], tape: Tape) -> Tape:
    """The tape of another part of the batch, with the uses of the same blocks."""
    if not blocks:
        return tape
    cuts, refused = _cuts(tape)
    uses = list(tape.uses)
    for block in blocks:
        module = block.modules[0]
        assert isinstance(module, Bare)
        found = _of(module.leaves, cuts, refused)
        if not found:
            raise BatchStatisticsError(
                f"{block.title} is used in another way by some examples than by others: the batch cannot be processed "
                "in parts. Raise memory= so that it fits whole"
            )
        uses += [_use(module, cut, tape.y) for cut in found]
    return replace(tape, uses=tuple(uses))


def as_spread(model: Model, block: Block) -> Block:
    """The same parameters, with the rule of those that are spread."""
    bare = block.without_rule()
    token = Bare({name: model.params[name] for name in bare.names})
    places = tuple(replace(place, key=name) for name, place in zip(bare.names, bare.places, strict=True))
    return replace(bare, places=places, shape=(bare.size, 1, 1), rule=SpreadRule(), modules=(token,))


def _use(module: nn.Module, cut: Cut, y: Tensor) -> Use:
    call = Call((y.detach(), cut.n), {})  # y for its type and device
    half = cut.node._input_metadata[0].dtype is torch.float16
    return Use(Ruled(module, SpreadRule(cut), {}), call, (GradientEdge(cut.node, 0),), (cut.z,), half)


def _cuts(tape: Tape) -> tuple[Cuts, set[Any]]:
    """Every place where something is spread over the examples, with the nodes that it comes from.

    And the nodes below any other way out of the tensors whose examples are known.
    """
    order, n = ordered(tape.y, tape.uses), tape.y.shape[0]
    axes = dict(order.axes)
    if n == 1:  # then an axis of one may be that of the examples, or that of a parameter
        axes = {node: axis for node, axis in axes.items() if not _free(node)}
    cuts, others = [], []
    for node, axis in axes.items():
        if node in order.passed:
            continue
        for at, (child, _) in enumerate(node.next_functions):
            if child is None or child in axes or (node.name() == FORK and at == 0):
                continue
            cut = Cut(node, at, n, axis)
            if cut.known:
                cuts.append((cut, set(nodes([child]))))
            else:
                others.append(child)
    return cuts, set(nodes(others)) | order.inside


def _of(leaves: Mapping[str, Tensor], cuts: Cuts, refused: set[Any]) -> list[Cut]:
    """The cuts that lead to the leaves; none if one of them has another way into the graph, or no way at all."""
    wanted = {id(leaf) for leaf in leaves.values()}
    if wanted & _leaves(refused):
        return []
    found = [(cut, wanted & _leaves(below)) for cut, below in cuts]
    reached = set().union(*(own for _, own in found))
    return [cut for cut, own in found if own] if reached == wanted else []


def _leaves(found: set[Any]) -> set[int]:
    return {id(node.variable) for node in found if node.name() == LEAF}


def _free(node: Any) -> bool:
    """Whether a node is certainly a function of parameters alone."""
    while node is not None and (node.name() in SAME or node.name() in _UNARY):
        node = node.next_functions[0][0]
    return node is not None and bool(node.name() == LEAF)
