"""Layers out of operations: the packing of a parameter that operations use, and a rule for each of its uses.

A parameter all of whose uses are products with views of it (whole, transposed, a slice, one of a stack of experts) is
packed as W [c o i], one way for all of them, and has K-FAC's two factors; so is the bias of such products, in the same
layer. Any other parameter has its rows R_kn = (∂u/∂θ)ᵀ Σ_r g aᵀ, pulled through whatever function u of it the
operations used, and every entry is a group of its own. Dense, diagonal and kernel metrics are exact either way.

So a weight that is a function of parameters (weight_norm, spectral_norm, a merged LoRA) has no Kronecker factors:
Kronecker has the diagonal of G there, and logs it once. ``strict=True`` accepts it, because the diagonal comes from the
same pass and no parameter is left without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.autograd import pulled, without_hooks
from natgrad.accelerate.devices import to_device_async
from natgrad.accelerate.moments import single
from natgrad.model import Model
from natgrad.pullbacks.batch_axis import size_pattern
from natgrad.pullbacks.layer import Block, Facet, ParameterSlice
from natgrad.pullbacks.operations import Operand, Operation, missed
from natgrad.pullbacks.row_examples import Probe, RowExamples
from natgrad.pullbacks.tape import Tape, Use
from natgrad.rules.base import Call, Keys, Rule
from natgrad.rules.features import DenseFeatures, Entries, Features, Moment, OneHot, Patches, Rows

# How a parameter is packed.

_TRANSPOSED = str.maketrans("oi", "io")


@final
@dataclass(frozen=True)
class Packing:
    """A parameter as W [c o i]: its axes, split where needed, and the role of each."""

    splits: tuple[tuple[int, ...], ...]  # the sizes that every axis is split into
    roles: str  # of all of them, one letter each

    @property
    def fine(self) -> tuple[int, ...]:
        return tuple(size for sizes in self.splits for size in sizes)

    @property
    def shape(self) -> tuple[int, int, int]:
        c, o, i = (prod(size for size, entry in zip(self.fine, self.roles, strict=True) if entry == r) for r in "coi")
        return c, o, i

    @property
    def _order(self) -> list[int]:
        return [at for r in "coi" for at, entry in enumerate(self.roles) if entry == r]

    def swapped(self) -> Packing:
        """The transpose, W [c i o]."""
        return replace(self, roles=self.roles.translate(_TRANSPOSED))

    def pack(self, t: Tensor) -> Tensor:
        """[c o i] of a tensor like the parameter."""
        return t.reshape(self.fine).permute(self._order).reshape(self.shape)

    def unpack(self, w: Tensor) -> Tensor:
        """The inverse; axes before [c o i] are kept."""
        lead, order = w.shape[:-3], self._order
        back = [order.index(at) for at in range(len(order))]
        t = w.reshape((*lead, *(self.fine[at] for at in order)))
        t = t.permute(*range(len(lead)), *(len(lead) + at for at in back))
        return t.reshape((*lead, *(prod(sizes) for sizes in self.splits)))

    def digits(self, at: Tensor) -> list[Tensor]:
        """Where along each of the split axes the numbers at these indices [m ndim] of the parameter are."""
        out: list[Tensor] = []
        for axis, sizes in enumerate(self.splits):
            rest, digits = at[:, axis], list[Tensor]()
            for size in reversed(sizes):
                digits.append(rest % size)
                rest = rest // size
            out += reversed(digits)
        return out

    def index(self, role: str, at: Tensor) -> Tensor:
        """The place along c, o or i of the numbers at these indices [m ndim] of the parameter."""
        out = at.new_zeros(len(at))
        for size, entry, digit in zip(self.fine, self.roles, self.digits(at), strict=True):
            if entry == role:
                out = out * size + digit
        return out


Indices: TypeAlias = dict[str, Tensor]  # by role, the indices [size ndim] in the parameter of what is along it


def indices_of(operand: Operand, roles: Sequence[str], groups: int, p: Tensor) -> Indices | None:
    """Where c, o and i of an operation lie in a parameter; None if the operand is no view of it, or repeats numbers."""
    by_name = operand.locate(p)
    if by_name is None or len(roles) != len(by_name[1]):
        return None
    first, axes = by_name
    result: Indices = dict.fromkeys("coi", first[None])

    def along(role: str, axis: Tensor) -> None:
        result[role] = (result[role][:, None] + (axis - first)[None]).flatten(0, 1)

    for role, axis in zip(roles, axes, strict=True):
        if len(role) == 2:
            step = len(axis) // groups
            along(role[0], axis[::step])
            along(role[1], axis[:step])
        elif role:
            along(role, axis)
        elif len(axis) > 1:
            return None
    if any(len(torch.unique(entry, dim=0)) < len(entry) for entry in result.values() if entry.shape[1]):
        return None
    return result


def packing_of(shape: torch.Size, uses: Sequence[Indices]) -> tuple[Packing, list[bool]] | None:
    """The one packing that all uses fit, and which of them are transposed; None if there is none."""
    splits = [_split(axis, size, uses) for axis, size in enumerate(shape)]
    if any(split is None for split in splits):
        return None
    packing = Packing(tuple(split for split in splits if split is not None), "")
    roles, turned = [""] * len(packing.fine), list[bool]()
    for use in uses:
        varying = _roles(packing, use)
        for flip in (False, True):
            new = [role.translate(_TRANSPOSED) if flip else role for role in varying or ()]
            if varying is not None and all(not r or old in ("", r) for r, old in zip(new, roles, strict=True)):
                roles = [r or old for r, old in zip(new, roles, strict=True)]
                turned.append(flip)
                break
        else:
            return None
    return replace(packing, roles="".join(r or "c" for r in roles)), turned


def _roles(packing: Packing, use: Indices) -> list[str] | None:
    """The role along which each of the split axes varies in a use, or ""; None if one varies along two."""
    out = [""] * len(packing.fine)
    for role, at in use.items():
        for axis, digit in enumerate(packing.digits(at)):
            if bool((digit != digit[0]).any()):
                if out[axis]:
                    return None
                out[axis] = role
    return out


def _split(axis: int, size: int, uses: Sequence[Indices]) -> tuple[int, ...] | None:
    """The sizes that an axis is split into, so that each has one role: (h, k) where one role counts in steps of k."""
    result: set[tuple[int, ...]] = set()
    for use in uses:
        steps = {r: at[:, axis] - at[0, axis] for r, at in use.items() if bool((at[:, axis] != at[0, axis]).any())}
        if len(steps) < 2:
            continue
        small, large = sorted(steps.values(), key=lambda s: int(s.max()))[:2]
        k = int(small.max()) + 1
        if len(steps) > 2 or size % k or bool((large % k).any()):
            return None
        result.add((size // k, k))
    return (result.pop() if result else (size,)) if len(result) < 2 else None


# The rules.


@final
class ParameterGroup(nn.Module):
    """Parameters that are a layer because of the operations that use them: by name, and never called."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = dict(shapes)


@final
@dataclass(frozen=True, repr=False)
class Slice(Features):
    """x [*k n r c d] of some of the groups C and coordinates D of a layer: a slice of a weight, one expert of a stack.

    ``groups`` [c] and ``coordinates`` [d] are their places, None for all; ``valid`` [n r c] is one where a row belongs
    to a group, zero where it is masked or there is none.

    >>> one = Slice(torch.ones(1, 2, 1, 1), (3, 1), groups=torch.tensor([1]))
    >>> one.moment().total.flatten(), one.moment().count
    (tensor([0., 2., 0.]), tensor([0., 2., 0.]))
    """

    x: Tensor
    size: tuple[int, int]  # C and D
    groups: Tensor | None = None
    coordinates: Tensor | None = None
    valid: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-2], *self.size)

    def dense(self) -> Tensor:
        return _into(_into(self.x, self.groups, self.size[0], -2), self.coordinates, self.size[1], -1)

    def count(self, weights: Tensor | None = None) -> int | Tensor:
        n, r, c = self.x.shape[-4:-1]
        if self.valid is None and self.groups is None:
            return super().count(weights)
        valid = self.x.new_ones(n, r, c) if self.valid is None else self.valid
        entry = valid.sum((0, 1)) if weights is None else torch.einsum("n,nrc->c", weights, valid.to(weights))
        return _into(entry, self.groups, self.size[0], 0)

    def groups_used(self) -> int | Tensor:
        return 1 if self.groups is None else _into(self.x.new_ones(len(self.groups)), self.groups, self.size[0], 0)

    def moment(self) -> Moment:
        c, d = self.size
        total = DenseFeatures(self.x).moment().total
        total = _into(_into(total, self.coordinates, d, -1), self.coordinates, d, -2)
        return Moment(_into(total, self.groups, c, 0), self.count())

    def mask(self, counted: Tensor) -> Features:
        masked = cast(DenseFeatures, DenseFeatures(self.x, self.valid).mask(counted))
        return replace(self, x=masked.x, valid=masked.valid)

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        one = cast(DenseFeatures, DenseFeatures(self.x, self.valid).reduced(how))
        return replace(self, x=one.x, valid=one.valid)

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        return replace(self, x=combine(self.x, -4))


def _into(t: Tensor, at: Tensor | None, size: int, axis: int) -> Tensor:
    """t at these places of an axis of ``size``, zero elsewhere."""
    if at is None:
        return t
    shape = list(t.shape)
    shape[axis] = size
    return t.new_zeros(shape).index_copy(axis, to_device_async(at, t.device), t)


@dataclass(frozen=True)
class OperationRule(Rule):
    """A layer of parameters that operations use.

    The rule of a block knows how its parameters are packed. The rule of a use also has the operation, and the examples
    that its rows belong to.
    """

    operation: Operation | None = field(default=None, compare=False, kw_only=True)
    examples: RowExamples | None = field(default=None, compare=False, kw_only=True)

    def covers(self, module: nn.Module) -> bool:
        return isinstance(module, ParameterGroup)

    @property
    def use(self) -> tuple[Operation, RowExamples]:
        """The operation and the examples of its rows."""
        assert self.operation is not None, "asked of a block, not of a use"
        assert self.examples is not None
        return self.operation, self.examples


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Of the parameters by name: a weight, and after it its bias."""
    assert isinstance(module, ParameterGroup)
    return module.shapes


@final
@dataclass(frozen=True)
class ProductRule(OperationRule):
    """z = W a + b of operations: the rows r are those of the operation, c its groups (grouped convolution, experts).

    ``lookup``: all inputs are one-hot. ``pixels``: it is a convolution.

    ``c``, ``o`` and ``i``: where in W the groups, outputs and inputs of a use are; None where they are all, in order.
    """

    packing: Packing
    lookup: bool = False
    pixels: bool = False  # type: ignore[misc]
    c: Tensor | None = field(default=None, compare=False)
    o: Tensor | None = field(default=None, compare=False)
    i: Tensor | None = field(default=None, compare=False)

    @property
    def one_hot(self) -> bool:  # type: ignore[override]
        return self.lookup

    @property
    def stacked(self) -> bool:  # type: ignore[override]
        return self.packing.shape[0] > 1

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        c, o, i = self.packing.shape
        weight = next(iter(_shapes(module))) in keys
        return c, o, weight * i + (len(keys) > weight)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        c, o, _ = self.packing.shape
        weight = next(iter(_shapes(module)))
        pieces = [self.packing.pack(t) if key == weight else t.reshape(c, o, 1) for key, t in block.items()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        shapes = _shapes(module)
        weight = next(iter(shapes))
        pieces = packed.split([self.packing.shape[2] if key == weight else 1 for key in keys], dim=-1)
        return {
            key: self.packing.unpack(piece) if key == weight else piece.reshape(*packed.shape[:-3], *shapes[key])
            for key, piece in zip(keys, pieces, strict=True)
        }

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        """a, with the 1 of a bias, or 0 where the operation adds none."""
        (operation, examples), (c, _, size) = self.use, self.shape(module, keys)
        weight = next(iter(_shapes(module))) in keys
        ones, at = len(keys) > weight, self.i if weight else torch.arange(0)
        if operation.index is not None and operation.members is not None and self.c is None and at is None:
            values = single(operation.members()[:, 0])
            return OneHot(examples.gather(operation.index), size, examples.gather(values), masked=True)
        biased = ones and operation.bias is not None
        if self._reads_images and at is None and biased == ones:
            return Patches(operation.images(), operation.axes, operation.groups, ones)
        a = single(operation.inputs())
        a = a if at is None else a[..., : len(at)]
        x = examples.gather(a)
        if self.c is None and at is None and a.shape[1] == 1 and not examples.ragged and biased == ones:
            return Rows(x.squeeze(2), ones)
        valid = None
        if operation.members is not None or examples.ragged:
            members = a.new_ones(a.shape[:2]) if operation.members is None else operation.members().to(a.dtype)
            valid = examples.gather(members)
        if not ones:
            return Slice(x, (c, size), self.c, at, valid)
        one = x.new_ones(x.shape[:3]) if valid is None else valid
        at = None if at is None else torch.cat([at, at.new_tensor([size - 1])])
        return Slice(torch.cat([x, one.unsqueeze(3) * float(biased)], dim=3), (c, size), self.c, at, valid)

    @property
    def _reads_images(self) -> bool:
        """Whether every image of a convolution, with all its groups, is that of an example."""
        operation, examples = self.use
        images = bool(operation.axes) and operation.shape[0] == examples.n
        return images and self.c is None and examples.before == 1 and not examples.ragged

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Features:
        (operation, examples), (c, o, _) = self.use, self.packing.shape
        if self._reads_images and self.o is None:
            return Patches(operation.crop(g), operation.outer, operation.groups)
        x = examples.gather(operation.cotangents(g), 1)
        if self.c is None and self.o is None and x.shape[3] == 1:
            return Rows(x.squeeze(3))
        return Slice(x, (c, o), self.c, self.o)


@final
@dataclass(frozen=True)
class EntriesRule(OperationRule):
    """Every entry of a parameter is a group of its own with the input 1, and g its rows: a [n 1 p 1], g [k n 1 p 1].

    So Kronecker has S = Σ_kn R² and A = 1: the diagonal of G, exact for a parameter that is used once. In a use the
    operand u of the operation is any function of the parameter, the ``leaf``.
    """

    operand: Operand | None = field(default=None, compare=False)
    leaf: Tensor | None = field(default=None, compare=False)

    @property
    def needs_graph(self) -> bool:  # type: ignore[override]
        u, leaf = self._read
        return u.locate(leaf) is None

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return sum(_shapes(module)[key].numel() for key in keys), 1, 1

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in block.values()]).view(-1, 1, 1)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        (key,) = keys
        return {key: packed.reshape((*packed.shape[:-3], *_shapes(module)[key]))}

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        (_, examples), leaf = self.use, self._read[1]
        one = torch.ones((), dtype=torch.promote_types(leaf.dtype, torch.float32), device=leaf.device)
        return Entries(one.expand(examples.n, 1, leaf.numel()))

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Features:
        """R = (∂u/∂θ)ᵀ Σ_r g a of every example."""
        u, leaf = self._read
        t = self._of_operand(single(self.use[0].cotangents(g)))
        t = t.reshape((*t.shape[:2], *u.unexpanded))
        view = u.locate(leaf)
        if view is None:
            return Entries(_pulled_through(u, leaf, t).unsqueeze(2))
        first, axes = view
        at = first
        for axis in axes:
            at = (at[..., None, :] + axis - first) if at.ndim > 1 else (at[None, :] + axis - first)
        steps = torch.tensor([prod(leaf.shape[d + 1 :]) for d in range(leaf.ndim)], dtype=torch.long)
        flat = to_device_async((at * steps).sum(-1).reshape(-1), t.device)
        out = t.new_zeros(*t.shape[:2], leaf.numel())
        return Entries(out.index_add_(2, flat, t.reshape(*t.shape[:2], -1)).unsqueeze(2))

    @property
    def _read(self) -> tuple[Operand, Tensor]:
        assert self.operand is not None
        assert self.leaf is not None
        return self.operand, self.leaf

    def _of_operand(self, g: Tensor) -> Tensor:
        """Σ_r g a of every example, for g [k r c o], as the operand has it."""
        operation, examples = self.use
        if operation.read is None or self.operand is operation.bias:
            return examples.total(g, 1) * operation.scale
        if operation.entrywise:
            return examples.total(g * single(operation.inputs()), 1)
        a, g = examples.gather(single(operation.inputs())), examples.gather(g, 1)
        letters = dict.fromkeys("".join(operation.roles))
        order = [*(letter for letter in "cio" if letter not in letters), *letters]
        result: Tensor = torch.einsum(f"knrco,nrci->kn{''.join(order)}", g, a)
        return result


def _pulled_through(u: Operand, leaf: Tensor, t: Tensor) -> Tensor:
    """(∂u/∂θ)ᵀ t [k n p] for t [k n *u]; what was expanded is summed on its way."""
    k, n = t.shape[:2]
    share = prod(u.unexpanded) / max(prod(u.shape), 1)
    columns, edge = (t * share).expand(k, n, *u.shape).flatten(0, 1).to(u.dtype), u.edge

    def grad(column: Tensor, batched: bool) -> Tensor:
        (result,) = torch.autograd.grad(
            edge, [leaf], column, retain_graph=True, is_grads_batched=batched, allow_unused=True, materialize_grads=True
        )
        return result

    with without_hooks([leaf]):
        try:
            result = grad(columns, True)
        except RuntimeError:  # an operation without a batching rule
            result = torch.stack([grad(column, False) for column in columns])
    return result.reshape(k, n, -1).to(t.dtype)


# From the operations of a pass to layers and their uses.


def is_operation(block: Block) -> bool:
    """Whether a layer was shown by operations."""
    return isinstance(block.rule, OperationRule)


def with_layers(blocks: Iterable[Block], layers: Iterable[Block]) -> list[Block]:
    """The blocks with these layers in the place of the parameters that they have; what is left has no rule."""
    layers = list(layers)
    taken = {name for layer in layers for name in layer.names}
    out = list(layers)
    for block in blocks:
        left = [name for name in block.names if name not in taken]
        if len(left) == len(block.names):
            out.append(block)
        elif left:
            by_name = block.named_slices
            entry = tuple(by_name[name] for name in left)
            size = sum(place.shape.numel() for place in entry)
            out.append(replace(block.without_rule(), names=tuple(left), slices=entry, shape=(1, size, 1)))
    return sorted(out, key=lambda block: min(place.start for place in block.slices))


_MIXED = (
    "behind them the outputs of one example depend on the others (z @ z.T, statistics of the batch), or their rows "
    "belong to no example"
)
_FUNCTION = (
    "are behind a function (weight_norm, spectral_norm, a merged LoRA, learned queries that layers read, a stack "
    "that @ broadcasts): they have a diagonal in place of Kronecker factors. Multiply by the parameters themselves, "
    "for stacks by einsum, to have them."
)
_LAYOUTS = (
    "are used by products and entry by entry, or by products in different layouts: they have a diagonal in place of "
    "Kronecker factors. Use a parameter of its own for each to have them."
)
_NO_DATA = (
    "are multiplied by constants (positions, a table), not by the data: they have a diagonal in place of Kronecker "
    "factors. Pass the constants as inputs, a row for every example, to have them."
)
_OTHERWISE = "they are used in another way than in the pass that first used them"


@final
class OperationLayers:
    """The layers that operations have shown, by the names of their parameters: the same in every pass.

    The first pass that uses a parameter decides how it is packed, since averages over time are kept in its packing.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}  # by the name of every parameter
        self._needed = False
        self._declared: tuple[Block, ...] = ()
        self.diagonals: dict[str, str] = {}  # parameters of products without Kronecker factors: why, and what to do

    def needed(self, blocks: Sequence[Block]) -> bool:
        """Whether a pass must record its operations: modules do not tell all that is computed with these parameters."""
        return self._needed or any(block.rule is None for block in blocks)

    def expect(self) -> None:
        """A pass has shown a parameter that modules do not tell of: from now on operations are recorded."""
        self._needed = True

    def forget(self) -> None:
        """The last pass was read with other examples than those of its outputs: nothing of it is remembered."""
        if not self._declared:
            self._blocks, self._needed, self.diagonals = {}, False, {}

    def remember(self, blocks: list[Block]) -> None:
        """Put the layers that operations have shown in the place of those parameters."""
        self._needed = True
        self._declared = self._declared or tuple(blocks)
        blocks[:] = with_layers(blocks, dict.fromkeys(self._blocks.values()))

    def declared(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The blocks as they were before that."""
        return self._declared or blocks

    def state(self) -> list[dict[str, Any]]:
        """The packing of every layer, for a checkpoint."""
        return [_saved(block) for block in dict.fromkeys(self._blocks.values())]

    def put(self, layers: Iterable[Block], blocks: list[Block]) -> None:
        """Go on with these ``loaded`` layers, in the place of their parameters among the blocks."""
        self._blocks = {name: layer for layer in layers for name in layer.names}
        if self._blocks:
            self.remember(blocks)

    def resolve(
        self, model: Model, blocks: Sequence[Block], tape: Tape, bare: Sequence[Block]
    ) -> tuple[list[Block], Tape, dict[str, str]]:
        """The blocks and the tape with layers for the ``bare`` blocks, and why some parameters have none."""
        leaves = {name: tape.leaves[name] for block in bare for name in block.names}
        names = {id(p): name for name, p in leaves.items()}
        operations = [
            op for op in tape.operations or () if any(not names.keys().isdisjoint(u.leaves) for u in op.operands)
        ]
        result = _probed(tape, operations)
        examples = _merged(operations, result)
        mixed = tuple(rows is None for rows in result.examples)
        key = "resolution", tuple(op.place(leaves, names) for op in operations), tuple(result.biases.items()), mixed
        known: _Resolution | None = tape.memo.get(key)
        if known is None or not known.layers_of(self._blocks):
            known = tape.memo[key] = self._resolve(model, blocks, tape, leaves, examples)
        merged = list(examples.items())
        uses = [use.at(*merged[use.operation], leaves) for use in known.uses]
        return with_layers(blocks, known.blocks), replace(tape, uses=(*tape.uses, *uses)), dict(known.reasons)

    def _resolve(
        self,
        model: Model,
        blocks: Sequence[Block],
        tape: Tape,
        leaves: Mapping[str, Tensor],
        examples: RowsOf,
    ) -> _Resolution:
        reasons = {
            name: f"they are read by {node}, of which natgrad knows nothing: write it as a matrix product"
            for name, node in missed(tape.y, tape.operations or (), tape.leaves).items()
            if name in leaves
        }
        uses = _by_parameter(examples, leaves)
        for name, entry in uses.items():
            if any(examples[use.operation] is None for use in entry):
                reasons.setdefault(name, _MIXED)
        rest = [name for name in model.params if name in uses and name not in reasons]
        self._decide([name for name in rest if name not in self._blocks], uses, leaves, blocks)
        for name in rest:
            if not isinstance(self._blocks[name].rule, EntriesRule):
                continue
            if any(use.in_product for use in uses[name]):
                self.diagonals[name] = _FUNCTION if any(use.through_function for use in uses[name]) else _LAYOUTS
            elif sum(size > 1 for size in leaves[name].shape) > 1 and any(
                use.operand.locate(leaves[name]) is None for use in uses[name]
            ):
                self.diagonals[name] = _NO_DATA
        layers = list(dict.fromkeys(self._blocks[name] for name in rest))
        numbers = {operation: number for number, operation in enumerate(examples)}
        planned: list[_PlannedUse] = []
        for block in layers:
            of_block = _planned(block, uses, numbers, leaves)
            if of_block is None or any(name not in rest for name in block.names):
                reasons |= dict.fromkeys(block.names, _OTHERWISE)
            else:
                planned += of_block
        layers = [block for block in layers if not any(name in reasons for name in block.names)]
        return _Resolution(layers, planned, reasons)

    def _decide(
        self,
        new: Sequence[str],
        uses: Mapping[str, Sequence[_Used]],
        leaves: Mapping[str, Tensor],
        blocks: Sequence[Block],
    ) -> None:
        """How the parameters that are ``new`` are packed."""
        packings: dict[str, tuple[Packing, list[bool]]] = {}
        for name in new:
            entry = [use.indices for use in uses[name] if use.indices is not None]
            if len(entry) == len(uses[name]):
                result = packing_of(leaves[name].shape, entry)
                if result is not None:
                    packings[name] = result
        biases = _biases(new, packings, uses, leaves)
        by_name = {name: place for block in blocks for name, place in block.named_slices.items()}
        for name in new:
            if name in biases.values():
                continue
            members = [name, biases[name]] if name in biases else [name]
            packing, turned = packings.get(name, (None, []))
            pairs = zip(turned, uses[name], strict=True) if packing is not None else ()
            kinds = dict.fromkeys(
                (flip, use.operation.index is not None, bool(use.operation.axes)) for flip, use in pairs
            )
            block = _block(members, packing, kinds, by_name, blocks[0].device)
            self._blocks |= dict.fromkeys(members, block)


@final
@dataclass(frozen=True)
class _Used:
    """A parameter in an operation: as the operand, or as what the operand is made from."""

    operation: Operation
    operand: Operand
    indices: Indices | None  # of a product with a view of it

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether the inputs are one-hot, and whether it is a convolution."""
        return self.operation.index is not None, bool(self.operation.axes)

    @property
    def in_product(self) -> bool:
        """Whether a product has the parameter, or a function of it, as its weight."""
        return self.operand is self.operation.weight and not self.operation.entrywise

    @property
    def through_function(self) -> bool:
        """Whether a product has a function of the parameter as its weight, and no view."""
        return self.in_product and self.indices is None


def _by_parameter(operations: Iterable[Operation], leaves: Mapping[str, Tensor]) -> dict[str, list[_Used]]:
    names = {id(p): name for name, p in leaves.items()}
    result: dict[str, list[_Used]] = {}
    for operation in operations:
        for operand in operation.operands:
            for name in (names[leaf] for leaf in operand.leaves if leaf in names):
                indices = None
                if operand is operation.weight and not operation.entrywise:
                    indices = indices_of(operand, operation.roles, operation.groups, leaves[name])
                result.setdefault(name, []).append(_Used(operation, operand, indices))
    return result


@final
@dataclass(frozen=True)
class ProbeResult:
    """What a probe has shown of operations, in their order.

    ``examples``: those of their rows. ``biases``: by the number of a product, that of the operation that adds its bias:
    their cotangents agree. ``sizes``: of the outputs of the pass and of the operations.
    """

    examples: tuple[RowExamples | None, ...]
    biases: Mapping[int, int]
    sizes: Sequence[tuple[int, ...]] = ()

    def certain(self, shown: Iterable[Tensor]) -> bool:
        """Whether every operation had cotangents, [d r c q], and no order of rows depends on the data."""
        return all(rows is not None and rows.index is None for rows in self.examples) and all(
            bool(g[0].any()) for g in shown
        )

    def at(self, n: int, operations: Sequence[Operation]) -> ProbeResult | None:
        """The same for operations of other sizes, if it can be: the examples were in front of all other axes."""
        if any(rows is None or rows.before > 1 or rows.index is not None for rows in self.examples):
            return None
        zero = torch.zeros(())
        if any(operation.cotangents(zero.expand(1, *operation.shape)).shape[1] % n for operation in operations):
            return None
        return replace(self, examples=tuple(replace(rows, n=n) for rows in self.examples if rows is not None))


def _probed(tape: Tape, operations: Sequence[Operation]) -> ProbeResult:
    """Probe the graph of a pass; what is certain is remembered for passes with graphs of the same form."""
    if not operations:
        return ProbeResult((), {})
    n, sizes = tape.y.shape[0], [tuple(tape.y.shape), *(tuple(operation.shape) for operation in operations)]
    key = ("operations", tuple(operation.name for operation in operations), size_pattern(sizes))
    known: ProbeResult | None = tape.shown.get(key)
    if known is not None and known.sizes != sizes:
        earlier = known
        known = tape.cached((*key, tuple(sizes)), lambda: earlier.at(n, operations))
    if known is not None:
        return known
    probe = Probe.of(tape.y.detach(), tape.half)
    numbers = {operation: number for number, operation in enumerate(operations)}
    added = [  # numbers of products and of offsets that may be their biases
        (numbers[operation.extends], number)
        for operation, number in numbers.items()
        if operation.extends in numbers and operation.weight is not None
    ]
    outer: dict[int, Tensor] = {}  # of those, for the first column

    def rows(s: Tensor) -> list[Tensor]:
        with tape.statistics.constant(affine=True):
            grads = pulled(tape.y, [operation.edge for operation in operations], s, tape.half)
        pairs = zip(operations, grads, strict=True)
        gs = [s.new_zeros(1, *operation.shape) if g is None else g for operation, g in pairs]
        if not outer:
            outer.update((number, gs[number]) for pair in added for number in pair)
        return [operation.cotangents(g)[0] for operation, g in zip(operations, gs, strict=True)]

    shown = probe.show(rows)
    biases: dict[int, int] = {}
    for product, number in added:
        g, h = outer[product], outer[number]
        free = product not in biases and operations[product].bias is None
        if (
            free
            and _is_bias(operations[number], operations[product], g.device)
            and torch.equal(g.flatten(), h.flatten())
        ):
            biases[product] = number
    result = ProbeResult(tuple(map(probe.examples_of, shown)), biases, sizes)
    if result.certain(shown):
        tape.shown[key] = result
    return result


def _is_bias(offset: Operation, product: Operation, device: torch.device) -> bool:
    """Whether an offset is along the outputs o of a product, its last axis: not along positions, pixels or experts."""
    assert offset.weight is not None
    o = product.shape[-1] if product.shape else 0
    sizes = offset.weight.unexpanded
    if not sizes or sizes[-1] != o or prod(sizes) != o or tuple(offset.shape[-1:]) != (o,):
        return False
    outputs = torch.arange(o, device=device)
    rows = product.write(outputs.expand(product.shape))  # [r c o]
    return rows.shape[1:] == (1, o) and bool((rows == outputs).all())


RowsOf: TypeAlias = dict[Operation, RowExamples | None]


def _merged(operations: Sequence[Operation], result: ProbeResult) -> RowsOf:
    """The examples of all operations; a product whose bias an operation of its own adds becomes one with it."""
    biases, out = result.biases, RowsOf()
    added = set(biases.values())
    for number, (operation, examples) in enumerate(zip(operations, result.examples, strict=True)):
        if number in biases:
            bias = operations[biases[number]].weight
            assert bias is not None
            operation = replace(operation, bias=bias, bias_roles=(*[""] * (len(bias.shape) - 1), "o"))
        if number not in added:
            out[operation] = examples
    return out


def _biases(
    names: Sequence[str],
    packings: Mapping[str, tuple[Packing, list[bool]]],
    uses: Mapping[str, Sequence[_Used]],
    leaves: Mapping[str, Tensor],
) -> dict[str, str]:
    """The bias of every weight that has one bias, which is used nowhere else, in the order of the outputs."""
    by_use = {(use.operation, use.operand): name for name in names for use in uses[name]}
    result: dict[str, str] = {}
    for name, (packing, turned) in packings.items():
        biases = {by_use.get((u.operation, u.operation.bias)) for u in uses[name] if u.operation.bias is not None}
        if len(biases) != 1 or any(turned):
            continue
        (bias,) = biases
        if bias is None or bias == name or bias in result.values():
            continue
        if _aligned_all(packing, uses[bias], uses[name], leaves[bias]):
            result[name] = bias
    return result


def _aligned_all(packing: Packing, biases: Sequence[_Used], weights: Sequence[_Used], leaf: Tensor) -> bool:
    with_bias = [use for use in weights if use.operation.bias is not None]
    products = [use.operation for use in with_bias]
    return all(use.operation in products and use.operand is use.operation.bias for use in biases) and all(
        _aligned(packing, use, biases, leaf) for use in with_bias
    )


def _aligned(packing: Packing, use: _Used, biases: Sequence[_Used], leaf: Tensor) -> bool:
    """Whether the bias of a product is a view of a parameter [c o] at the groups and outputs of the product."""
    operation = use.operation
    entry = next((b for b in biases if b.operation is operation and b.operand is operation.bias), None)
    if entry is None or operation.scale != 1 or use.indices is None:
        return False
    at = indices_of(entry.operand, operation.bias_roles, operation.groups, leaf)
    if at is None:
        return False
    c, o, _ = packing.shape
    shape = leaf.shape
    steps = torch.tensor([prod(shape[d + 1 :]) for d in range(len(shape))], dtype=torch.long)
    first = at["c"][0] if len(at["c"]) else at["o"][0]
    by_name = ((at["c"][:, None] + at["o"][None] - first) * steps).sum(-1)
    expected = packing.index("c", use.indices["c"])[:, None] * o + packing.index("o", use.indices["o"])[None]
    return shape.numel() == c * o and torch.equal(by_name, expected)


def _block(
    names: Sequence[str],
    packing: Packing | None,
    kinds: Iterable[tuple[bool, bool, bool]],
    by_name: Mapping[str, ParameterSlice],
    device: torch.device,
) -> Block:
    """A layer of these parameters: a weight, its bias; with facets where the weight is used in several ways.

    ``kinds``: whether it is transposed, whether its inputs are one-hot, and whether it is that of a convolution.
    """
    entry = tuple(replace(by_name[name], key=name) for name in names)
    ordered = tuple(sorted(names, key=lambda name: by_name[name].start))
    shapes = {name: by_name[name].shape for name in names}

    def block(rule: Rule) -> Block:
        module = ParameterGroup(shapes)
        return Block(ordered, entry, rule.shape(module, tuple(names)), device, rule, (module,))

    if packing is None:
        return block(EntriesRule())
    ways = sorted(kinds, key=lambda kind: kind[1])  # first one whose inputs are not one-hot
    blocks = [block(ProductRule(packing.swapped() if flip else packing, one, cut)) for flip, one, cut in ways]
    if len(blocks) == 1:
        return blocks[0]
    facets = tuple(Facet(kind, kind_of_use[0] != ways[0][0]) for kind, kind_of_use in zip(blocks, ways, strict=True))
    return replace(blocks[0], facets=facets)


def _saved(block: Block) -> dict[str, Any]:
    """What ``_block`` makes this block from, in numbers and words."""
    names = list(block.keys)
    if isinstance(block.rule, EntriesRule):
        return {"names": names}
    rules = [kind.rule for kind in block.kinds if isinstance(kind.rule, ProductRule)]
    first = rules[0].packing
    kinds = [[rule.packing != first, rule.lookup, rule.pixels] for rule in rules]
    return {"names": names, "splits": [list(sizes) for sizes in first.splits], "roles": first.roles, "kinds": kinds}


def loaded(model: Model, blocks: Iterable[Block], state: Iterable[Mapping[str, Any]]) -> list[Block]:
    """The layers of a checkpoint, for a model with these blocks."""
    by_name = {name: place for block in blocks for name, place in block.named_slices.items()}
    out = []
    for saved in state:
        packing, kinds = None, []
        if "roles" in saved:
            packing = Packing(tuple(tuple(sizes) for sizes in saved["splits"]), saved["roles"])
            kinds = [(bool(flip), bool(one), any(pixels)) for flip, one, *pixels in saved["kinds"]]
        out.append(_block(saved["names"], packing, kinds, by_name, model.example.device))
    return out


@final
@dataclass(frozen=True)
class _PlannedUse:
    """A use of a layer: the number of its operation, its rule without that, the parameter, and if it is the bias."""

    kind: Block
    rule: OperationRule
    operation: int
    name: str
    of_bias: bool

    def at(self, operation: Operation, examples: RowExamples | None, leaves: Mapping[str, Tensor]) -> Use:
        """The use in a pass."""
        rule: Rule = replace(self.rule, operation=operation, examples=examples)
        if isinstance(rule, EntriesRule):
            rule = replace(rule, operand=operation.bias if self.of_bias else operation.weight, leaf=leaves[self.name])
        shapes = (torch.Size(operation.shape),)
        return Use(self.kind.modules[0], rule, {}, Call((), {}), (operation.edge,), shapes, operation.half)


@final
@dataclass(frozen=True)
class _Resolution:
    """What is alike in all passes of one form: the layers, their uses, and why parameters have none."""

    blocks: Sequence[Block]
    uses: Sequence[_PlannedUse]
    reasons: Mapping[str, str]

    def layers_of(self, blocks: Mapping[str, Block]) -> bool:
        """Whether these are still the layers of their parameters."""
        return all(blocks.get(name) is block for block in self.blocks for name in block.names)


def _planned(
    block: Block,
    uses: Mapping[str, Sequence[_Used]],
    numbers: Mapping[Operation, int],
    leaves: Mapping[str, Tensor],
) -> list[_PlannedUse] | None:
    """The uses of a layer; None if one does not fit its packing."""
    name, *bias = block.keys
    if bias:  # it must be used with the weight only
        assert isinstance(block.rule, ProductRule)
        if not _aligned_all(block.rule.packing, uses.get(bias[0], ()), uses[name], leaves[bias[0]]):
            return None
    out: list[_PlannedUse] = []
    for use in uses[name]:
        fitting = ((kind, rule) for kind in block.kinds if (rule := _rule_of_use(kind, use)))
        kind, rule = next(fitting, (None, None))
        if kind is None or rule is None:
            return None
        out.append(_PlannedUse(kind, rule, numbers[use.operation], name, use.operand is use.operation.bias))
    return out


def _rule_of_use(kind: Block, use: _Used) -> OperationRule | None:
    """The rule of a use of a kind of block, without its operation; None if it does not fit the packing."""
    rule = kind.rule
    if isinstance(rule, EntriesRule):
        return rule
    assert isinstance(rule, ProductRule)
    if use.indices is None or (rule.lookup, rule.pixels) != use.kind:
        return None
    packing = rule.packing
    index = {role: packing.index(role, entry) for role, entry in use.indices.items()}
    for role, entry in use.indices.items():  # along a role nothing else may vary
        for other in "coi".replace(role, ""):
            where = packing.index(other, entry)
            if bool((where != where[0]).any()):
                return None
    sizes = dict(zip("coi", packing.shape, strict=True))
    c, o, i = (None if torch.equal(index[r], torch.arange(sizes[r])) else index[r] for r in "coi")
    return replace(rule, c=c, o=o, i=i)
