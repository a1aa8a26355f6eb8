"""Parameters that belong to no layer and are spread over the examples: positions, LayerScale, a class token, a gain.

Such a parameter θ enters the graph through tensors u(θ) without examples, and u is added to, or multiplied with, a
tensor that has them: z = x + αu, z = x ⊙ u, or z = u for every example (``expand``). The row of example n is then

    R_kn = (∂u/∂θ)ᵀ Σ_r g_knr ⊙ x_nr          (x = α where u is added)

with g the cotangents of z and r the places that u was spread over inside the example. They come from the backward pass
of the other layers; without this, the model would be run again for every example.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from natgrad.errors import BatchStatisticsError
from natgrad.model import Model
from natgrad.pullback.blocks import Block
from natgrad.pullback.cut import LEAF, SAME, Cut
from natgrad.pullback.graph import nodes
from natgrad.pullback.order import FORK, ordered
from natgrad.pullback.tape import Tape
from natgrad.pullback.uses import Ruled, Use
from natgrad.rules.base import Call, Keys, Moment, Rule
from natgrad.rules.precision import single

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

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        one = torch.ones((), dtype=call.x.dtype, device=call.x.device)
        return one.expand(call.args[1], 1, self.shape(module, keys)[0], 1)

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        n: int = call.args[1]
        return Moment(call.x.new_full((self.shape(module, keys)[0], 1, 1), n), n)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        assert self.cut is not None, "asked of a block, not of a use"
        rows = self.cut.pulled(g, [self.parameters(module)[key] for key in keys])
        return rows[:, :, None, :, None]

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return single(self.cotangents(module, keys, g)).square().sum((0, 1, 2)).unsqueeze(-1)

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

    A block is there again after a checkpoint by the names of its first parameters: see ``Layered.restored``.
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
