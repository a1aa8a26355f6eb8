"""Parameters that belong to no layer and are spread over the examples: positions, LayerScale, a class token, a gain.

Such a parameter θ enters the graph through tensors u(θ) without examples, and u is added to, or multiplied with, a
tensor that has them: z = x + αu, z = x ⊙ u, or z = u for every example (``expand``). The row of example n is then

    R_kn = (∂u/∂θ)ᵀ Σ_r g_knr ⊙ x_nr          (x = α where u is added)

with g the cotangents of z and r the places that u was spread over inside the example. They come from the backward pass
of the other layers; without this, the model would be run again for every example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from natgrad.errors import BatchStatisticsError
from natgrad.model import Model
from natgrad.pullback.blocks import Block
from natgrad.pullback.graph import nodes
from natgrad.pullback.order import ordered
from natgrad.pullback.tape import Tape, Use
from natgrad.rules.base import Call, Keys, Moment, Rule, single

_LEAF = "torch::autograd::AccumulateGrad"
_FORK = "ForkBackward"
# Of a tensor without examples these keep the order of the elements, and all of them.
SAME = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Alias")
) | {"SqueezeBackward1"}
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


@final
@dataclass(frozen=True)
class Cut:
    """Where a tensor u without examples is spread over them: argument ``at`` of a node with n examples in order."""

    node: Any
    at: int
    n: int

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
        name, u, z = self.node.name(), self.u, self.z
        if len(u) > len(z) or (len(u) == len(z) and u[0] != 1) or z[0] % self.n:
            return False
        if name == "RepeatBackward0":
            return all(times == 1 for times in self.node._saved_repeats[1:])
        return name in ("AddBackward0", "SubBackward0", "MulBackward0", "ExpandBackward0")

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
        u = (1,) * (len(self.z) - len(self.u)) + tuple(self.u)
        g = self.weighted(g).unflatten(1, (self.n, -1))  # [k n m *rest]
        spread = [2, *(3 + axis for axis, size in enumerate(u[1:]) if size == 1)]
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
    """Blocks without a rule whose parameters are all spread over the examples get one, and the tape their uses."""
    if not tape.y.requires_grad or all(block.rule for block in blocks):
        return list(blocks), tape
    cuts, refused = _cuts(tape.y)
    out, uses = [], list(tape.uses)
    for block in blocks:
        leaves = {name: model.params[name] for name in block.names}
        found = [] if block.rule else _of(leaves, cuts, refused)
        out.append(as_spread(model, block) if found else block)
        uses += [_use(out[-1].modules[0], cut, tape.y) for cut in found]
    return out, replace(tape, uses=tuple(uses))


def spread_again(blocks: Sequence[Block], tape: Tape) -> Tape:
    """The tape of another part of the batch, with the uses of the same blocks."""
    if not blocks:
        return tape
    cuts, refused = _cuts(tape.y)
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
    return Use(module, SpreadRule(cut), call, (GradientEdge(cut.node, 0),), (cut.z,), {})


def _cuts(y: Tensor) -> tuple[list[tuple[Cut, set[Any]]], set[Any]]:
    """Every place where something is spread over the examples in order, with the nodes that it comes from.

    And the nodes below any other way out of the tensors that have the examples in order.
    """
    proven, _ = ordered(y)
    if y.shape[0] == 1:  # then an axis of one may be that of the examples, or that of a parameter
        proven -= {node for node in proven if _free(node)}
    cuts, others = [], []
    for node in proven:
        for at, (child, _) in enumerate(node.next_functions):
            if child is None or child in proven or (node.name() == _FORK and at == 0):
                continue
            cut = Cut(node, at, y.shape[0])
            if cut.known:
                cuts.append((cut, set(nodes([child]))))
            else:
                others.append(child)
    return cuts, set(nodes(others))


def _of(leaves: Mapping[str, Tensor], cuts: Sequence[tuple[Cut, set[Any]]], refused: set[Any]) -> list[Cut]:
    """The cuts that lead to the leaves; none if one of them has another way into the graph, or no way at all."""
    wanted = {id(leaf) for leaf in leaves.values()}
    if wanted & _leaves(refused):
        return []
    found = [(cut, wanted & _leaves(below)) for cut, below in cuts]
    reached = set().union(*(own for _, own in found))
    return [cut for cut, own in found if own] if reached == wanted else []


def _leaves(found: set[Any]) -> set[int]:
    return {id(node.variable) for node in found if node.name() == _LEAF}


def _free(node: Any) -> bool:
    """Whether a node is certainly a function of parameters alone."""
    while node is not None and (node.name() in SAME or node.name() in _UNARY):
        node = node.next_functions[0][0]
    return node is not None and bool(node.name() == _LEAF)


def reshaped(node: Any) -> Any:
    """The node of the tensor that this one is a reshape, or a cast, of."""
    while node is not None and node.name() in SAME:
        node = node.next_functions[0][0]
    return node


def _only_leaf(node: Any) -> Tensor | None:
    """The leaf that a tensor is a reshape of, or None."""
    below = reshaped(node)
    return below.variable if below is not None and below.name() == _LEAF else None


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
