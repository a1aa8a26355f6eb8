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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from natgrad.accelerate.moments import single
from natgrad.accelerate.vjp import pulled
from natgrad.errors import BatchStatisticsError
from natgrad.model import Model
from natgrad.pullback.layer import Block, Facet, ParameterSlice
from natgrad.pullback.operations import Operand, Operation, missed
from natgrad.pullback.tape import Ruled, Tape, Use
from natgrad.rules.base import Call, Keys, Rule
from natgrad.rules.features import DenseFeatures, Entries, Features, Moment, OneHot, Rows

# The example of every row.


@final
@dataclass(frozen=True)
class Owners:
    """Which of n examples the rows of an operation belong to: row-major [before n after], or any ``index`` [rows].

    ``pairs``: the groups c of a row belong to different examples (experts with a capacity); these are the owners of
    rows and groups (r c) among all pairs (n c).
    """

    n: int
    before: int = 1
    index: Tensor | None = None
    pairs: Owners | None = None

    def by_group(self, rows: int, c: int, device: torch.device) -> Owners:
        """These owners are those of rows and groups (r c)."""
        index = self.index
        if index is None:
            index = torch.arange(rows * c, device=device) // (rows * c // self.n // self.before) % self.n
        pairs = Owners(self.n * c, index=index * c + torch.arange(c, device=device).repeat(rows))
        return replace(self, pairs=pairs)

    def rows(self, t: Tensor, axis: int = 0) -> Tensor:
        """The rows of every example on axes [n r] of their own, zeros where an example has fewer than another."""
        if self.pairs is not None:
            by_pair = self.pairs.rows(t.flatten(axis, axis + 1), axis)
            return by_pair.unflatten(axis, (self.n, -1)).transpose(axis + 1, axis + 2)
        if self.index is None:
            return t.unflatten(axis, (self.before, self.n, -1)).movedim(axis + 1, axis).flatten(axis + 1, axis + 2)
        slots = self._slots.to(t.device)
        t = torch.cat([t, t.new_zeros(()).expand(*t.shape[:axis], 1, *t.shape[axis + 1 :])], dim=axis)
        return t.index_select(axis, slots.flatten()).unflatten(axis, tuple(slots.shape))

    def total(self, t: Tensor, axis: int = 0) -> Tensor:
        """The sum over the rows of every example."""
        if self.index is None or self.pairs is not None:
            return self.rows(t, axis).sum(axis + 1)
        return t.new_zeros(*t.shape[:axis], self.n, *t.shape[axis + 1 :]).index_add(axis, self.index, t)

    @property
    def ragged(self) -> bool:
        """Whether examples may have different numbers of rows."""
        return self.index is not None or self.pairs is not None

    @cached_property
    def _slots(self) -> Tensor:
        """[n r], the rows of every example; one past the last where there is none."""
        assert self.index is not None
        counts = torch.bincount(self.index, minlength=self.n)
        order = torch.argsort(self.index, stable=True)
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.index[order]]
        slots = order.new_full((self.n, max(1, int(counts.max()))), len(order))
        slots[self.index[order], place] = order
        return slots


_BASE = 16  # of the digits that number the examples, as exponents of two: exact in every precision


def probes(y: Tensor) -> Tensor:
    """Cotangents [d n *out] of the outputs: random ones, and the same scaled by a power of two that tells examples."""
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(y.shape, generator=generator, dtype=torch.float64).add(0.5).to(y)
    number, n, columns = torch.arange(len(y)), len(y), [s]
    while True:
        columns.append(s * (2.0 ** (number % _BASE)).to(y).view(-1, *[1] * (y.ndim - 1)))
        number, n = number // _BASE, -(-n // _BASE)
        if n <= 1:
            return torch.stack(columns)


def owners_of(g: Tensor, n: int) -> Owners | None:
    """The examples of rows, from their cotangents [d rows ·] of the ``probes``; None where rows mix examples.

    A row without cotangents may be of any example.
    """
    rows = g.shape[1]
    once, label, power = g[0], torch.zeros(rows, dtype=torch.long, device=g.device), 1
    square = once.square().sum(1)
    alive = square > 0
    for scaled in g[1:]:
        ratio = (once * scaled).sum(1) / square
        digit = ratio.clamp(min=0.5).log2().round().nan_to_num(0)
        gap = (scaled - 2.0 ** digit[:, None] * once).norm(dim=1)
        if bool((alive & ~(gap <= torch.finfo(g.dtype).eps ** 0.5 * scaled.norm(dim=1))).any()):
            return None
        label += power * digit.long()
        power *= _BASE
    if bool((label[alive] >= n).any() | (label[alive] < 0).any()):
        return None
    if rows % n == 0:
        for before in (b for b in range(1, rows // n + 1) if rows // n % b == 0):
            regular = torch.arange(rows, device=g.device) // (rows // n // before) % n
            if bool((regular == label)[alive].all()):
                return Owners(n, before)
    # Rows that nothing depends on go with the last before them that something does.
    last = torch.where(alive, torch.arange(rows, device=g.device), 0).cummax(0).values
    return Owners(n, index=label[last] if rows else label)


# How a parameter is packed.


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
        return replace(self, roles=self.roles.translate(str.maketrans("oi", "io")))

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

    def index(self, role: str, at: Tensor) -> Tensor:
        """The place along c, o or i of the numbers at these indices [m ndim] of the parameter."""
        out, where = at.new_zeros(len(at)), 0
        for axis, sizes in enumerate(self.splits):
            rest = at[:, axis]
            digits = []
            for size in reversed(sizes):
                digits.append(rest % size)
                rest = rest // size
            for size, digit in zip(sizes, reversed(digits), strict=True):
                if self.roles[where] == role:
                    out = out * size + digit
                where += 1
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


def swapped(indices: Indices) -> Indices:
    return {"c": indices["c"], "o": indices["i"], "i": indices["o"]}


def packing_of(shape: torch.Size, uses: Sequence[Indices]) -> tuple[Packing, list[bool]] | None:
    """The one packing that all uses fit, and which of them are transposed; None if there is none."""
    splits = [_split(axis, size, uses) for axis, size in enumerate(shape)]
    if any(split is None for split in splits):
        return None
    packing = Packing(tuple(split for split in splits if split is not None), "")
    fine = packing.fine
    roles: list[str | None] = [None] * len(fine)
    turned = []
    for use in uses:
        varying = (
            [{r for r in "coi" if bool(v[r][at])} for at in range(len(fine))] if (v := _varying(packing, use)) else []
        )
        for flip in (False, True):
            entry = [{"o": "i", "i": "o"}.get(r, r) if flip else r for r in (next(iter(v), "") for v in varying)]
            if all(len(v) < 2 for v in varying) and all(
                not r or role_so_far in (None, r) for r, role_so_far in zip(entry, roles, strict=True)
            ):
                roles = [r or role_so_far for r, role_so_far in zip(entry, roles, strict=True)]
                turned.append(flip)
                break
        else:
            return None
    return replace(packing, roles="".join(r or "c" for r in roles)), turned


def _varying(packing: Packing, use: Indices) -> dict[str, list[bool]]:
    """By role, whether every one of the axes that a parameter was split into varies along it."""
    out: dict[str, list[bool]] = {}
    for role, at in use.items():
        result = []
        for axis, sizes in enumerate(packing.splits):
            rest = at[:, axis]
            digits = []
            for size in reversed(sizes):
                digits.append(rest % size)
                rest = rest // size
            result += [bool((digit != digit[0]).any()) for digit in reversed(digits)]
        out[role] = result
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
        self.shapes = dict(shapes)


@final
@dataclass(frozen=True)
class Slice(Features):
    """x [*k n r c d] of some of the groups C and coordinates D of a layer: a slice of a weight, one expert of a stack.

    ``groups`` [c] and ``coordinates`` [d] are their places, None for all; ``valid`` [n r c] is one where a row belongs
    to a group, zero where it is masked or there is none.

    >>> one = Slice(torch.ones(1, 2, 1, 1), (3, 1), groups=torch.tensor([1]))
    >>> one.moment()
    Moment(total=tensor([[[0.]],
    <BLANKLINE>
            [[2.]],
    <BLANKLINE>
            [[0.]]]), count=tensor([0., 2., 0.]))
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

    def squares(self) -> Moment:
        total = _into(DenseFeatures(self.x).squares().total, self.coordinates, self.size[1], -1)
        return Moment(_into(total, self.groups, self.size[0], 0), self.count())

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        return DenseFeatures(replace(self, x=DenseFeatures(self.x, self.valid).reduced(how).dense()).dense())

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        return replace(self, x=combine(self.x, -4))


def _into(t: Tensor, at: Tensor | None, size: int, axis: int) -> Tensor:
    """t at these places of an axis of ``size``, zero elsewhere."""
    if at is None:
        return t
    shape = list(t.shape)
    shape[axis] = size
    return t.new_zeros(shape).index_copy(axis, at.to(t.device), t)


@final
@dataclass(frozen=True)
class Placed:
    """One use of a layer W [c o i] in a pass: an operation, the examples of its rows, and its part of W."""

    operation: Operation
    owners: Owners
    c: Tensor | None = None  # places of its groups, outputs and inputs in W; None where they are all, in order
    o: Tensor | None = None
    i: Tensor | None = None

    def inputs(self, size: tuple[int, int], *, weight: bool, ones: bool) -> Features:
        """a, with the 1 of a bias, or 0 where the operation adds none; ``size`` are C and I of the layer."""
        if not weight:
            return replace(self, i=torch.arange(0)).inputs(size, weight=True, ones=True)
        operation, owners = self.operation, self.owners
        if operation.index is not None and operation.valid is not None and self.c is None and self.i is None:
            values = owners.rows(operation.valid.to(torch.promote_types(_dtype(operation), torch.float32)))
            return OneHot(owners.rows(operation.index), size[1], values, masked=True)
        a = single(operation.inputs())
        a = a if self.i is None else a[..., : len(self.i)]  # none, for a bias alone
        x, biased = owners.rows(a), ones and operation.bias is not None
        if self.c is None and self.i is None and a.shape[1] == 1 and not owners.ragged and biased == ones:
            return Rows(x.squeeze(2), ones)
        valid = None
        if operation.members is not None or operation.valid is not None or owners.ragged:
            valid = owners.rows(self._members(a))
        if not ones:
            return Slice(x, size, self.c, self.i, valid)
        one = x.new_full((*x.shape[:3], 1), float(biased)) if valid is None else valid.unsqueeze(3) * float(biased)
        at = None if self.i is None else torch.cat([self.i, self.i.new_tensor([size[1] - 1])])
        return Slice(torch.cat([x, one], dim=3), size, self.c, at, valid)

    def cotangents(self, size: tuple[int, int], g: Tensor) -> Features:
        """g from cotangents [k *output]; ``size`` are C and O of the layer."""
        x = self.owners.rows(self.operation.cotangents(g), 1)
        return Rows(x.squeeze(3)) if self.c is None and self.o is None and x.shape[3] == 1 else self._cut(x, size)

    def _cut(self, x: Tensor, size: tuple[int, int]) -> Features:
        return Slice(x, size, self.c, self.o)

    def _members(self, a: Tensor) -> Tensor:
        """[r c], one where a row belongs to a group."""
        operation = self.operation
        if operation.members is not None:
            return operation.members().to(a.dtype)
        if operation.valid is not None:
            return operation.valid.to(a.dtype)[:, None]
        return a.new_ones(a.shape[:2])


@final
@dataclass(frozen=True)
class ProductRule(Rule):
    """z = W a + b of operations: the rows r are those of the operation, c its groups (grouped convolution, experts).

    The rule of a block knows how its parameters are packed; that of a use also where it is (``placed``).
    """

    packing: Packing
    bias: bool = False
    lookup: bool = False  # whether all inputs are one-hot
    placed: Placed | None = field(default=None, compare=False)

    def covers(self, module: nn.Module) -> bool:
        return isinstance(module, ParameterGroup)

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        return {}

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        assert isinstance(module, ParameterGroup)
        return (tuple(module.shapes),)

    @property
    def one_hot(self) -> bool:  # type: ignore[override]
        return self.lookup

    @property
    def stacked(self) -> bool:  # type: ignore[override]
        return self.packing.shape[0] > 1

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        c, o, i = self.packing.shape
        weight = _weight(module) in keys
        return c, o, weight * i + (len(keys) > weight)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        c, o, _ = self.packing.shape
        weight = _weight(module)
        pieces = [self.packing.pack(t) if key == weight else t.reshape(c, o, 1) for key, t in block.items()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        assert isinstance(module, ParameterGroup)
        out, start = {}, 0
        for key in keys:
            size = self.packing.shape[2] if key == _weight(module) else 1
            piece = packed[..., start : start + size]
            like = (*packed.shape[:-3], *module.shapes[key])
            out[key] = self.packing.unpack(piece) if key == _weight(module) else piece.reshape(like)
            start += size
        return out

    @property
    def _use(self) -> Placed:
        assert self.placed is not None, "asked of a block, not of a use"
        return self.placed

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        c, _, i = self.shape(module, keys)
        return self._use.inputs(
            (c, i), weight=_weight(module) in keys, ones=any(key != _weight(module) for key in keys)
        )

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Features:
        c, o, _ = self.shape(module, keys)
        return self._use.cotangents((c, o), g)


def _weight(module: nn.Module) -> str:
    """The name of the weight; a bias comes after it."""
    assert isinstance(module, ParameterGroup)
    return next(iter(module.shapes))


def _dtype(operation: Operation) -> torch.dtype:
    assert operation.weight is not None
    return operation.weight.dtype


@final
@dataclass(frozen=True)
class Pulled:
    """One use of a parameter in a pass, as an operand u that is any function of it."""

    operation: Operation
    owners: Owners
    operand: Operand
    leaf: Tensor  # the parameter

    def rows(self, g: Tensor) -> Tensor:
        """R [k n p] from cotangents [k *output]."""
        t = self._of_operand(single(self.operation.cotangents(g)))
        shape = self.operand.unexpanded
        t = t.reshape((*t.shape[:2], *shape))
        by_name = self.operand.locate(self.leaf)
        if by_name is None:
            return self._through(t)
        first, axes = by_name
        at = first
        for axis in axes:
            at = (at[..., None, :] + axis - first) if at.ndim > 1 else (at[None, :] + axis - first)
        sizes = torch.tensor([prod(self.leaf.shape[d + 1 :]) for d in range(self.leaf.ndim)], dtype=torch.long)
        flat = (at * sizes).sum(-1).reshape(-1).to(t.device)
        out = t.new_zeros(*t.shape[:2], self.leaf.numel())
        return out.index_add_(2, flat, t.reshape(*t.shape[:2], -1))

    def _of_operand(self, g: Tensor) -> Tensor:
        """Σ_r g a of every example, for g [k r c o], as the operand has it."""
        operation, owners = self.operation, self.owners
        if operation.entrywise:
            if operation.read is None:
                return owners.total(g, 1) * operation.scale
            return owners.total(g * single(operation.inputs()), 1)
        if self.operand is operation.bias:
            return owners.total(g, 1) * operation.scale
        a, g = owners.rows(single(operation.inputs())), owners.rows(g, 1)
        letters = dict.fromkeys("".join(operation.roles))
        order = [*(letter for letter in "cio" if letter not in letters), *letters]
        result: Tensor = torch.einsum(f"knrco,nrci->kn{''.join(order)}", g, a)
        return result

    def _through(self, t: Tensor) -> Tensor:
        """(∂u/∂θ)ᵀ t [k n p] for t [k n *u]; what was expanded is summed on its way."""
        u, (k, n) = self.operand, t.shape[:2]
        share = prod(u.unexpanded) / max(prod(u.shape), 1)
        t = (t * share).expand(k, n, *u.shape).flatten(0, 1)
        edge = u.edge
        (result,) = _grads(edge, self.leaf, t.to(u.dtype))
        if result is None:
            return t.new_zeros(k, n, self.leaf.numel())
        return result.reshape(k, n, -1).to(t.dtype)


def _grads(edge: GradientEdge, leaf: Tensor, t: Tensor) -> tuple[Tensor | None]:
    def grad(t: Tensor, batched: bool) -> Any:
        return torch.autograd.grad(edge, [leaf], t, retain_graph=True, allow_unused=True, is_grads_batched=batched)

    try:
        result: tuple[Tensor | None] = grad(t, True)
        return result
    except RuntimeError:  # an operation without a batching rule
        each = [grad(one, False)[0] for one in t]
        return (None,) if each[0] is None else (torch.stack(each),)


@final
@dataclass(frozen=True)
class EntriesRule(Rule):
    """Every entry of a parameter is a group of its own with the input 1, and g its rows: a [n 1 p 1], g [k n 1 p 1].

    So Kronecker has S = Σ_kn R² and A = 1: the diagonal of G, exact for a parameter that is used once.
    """

    pulled: Pulled | None = field(default=None, compare=False)

    def covers(self, module: nn.Module) -> bool:
        return isinstance(module, ParameterGroup)

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        return {}

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        assert isinstance(module, ParameterGroup)
        return (tuple(module.shapes),)

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        assert isinstance(module, ParameterGroup)
        return sum(module.shapes[key].numel() for key in keys), 1, 1

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in block.values()]).view(-1, 1, 1)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        assert isinstance(module, ParameterGroup)
        (key,) = keys
        return {key: packed.reshape((*packed.shape[:-3], *module.shapes[key]))}

    @property
    def _use(self) -> Pulled:
        assert self.pulled is not None, "asked of a block, not of a use"
        return self.pulled

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        leaf = self._use.leaf
        one = torch.ones((), dtype=torch.promote_types(leaf.dtype, torch.float32), device=leaf.device)
        return Entries(one.expand(self._use.owners.n, 1, leaf.numel()))

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Features:
        return Entries(self._use.rows(g).unsqueeze(2))


# From the operations of a pass to layers and their uses.


def is_operation(block: Block) -> bool:
    """Whether a layer was shown by operations."""
    return isinstance(block.rule, (ProductRule, EntriesRule))


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
    "are behind a function (weight_norm, spectral_norm, a merged LoRA): they have the diagonal of the metric, not "
    "Kronecker factors. Multiply by the parameters themselves to have them."
)
_LAYOUTS = (
    "are used by products and entry by entry, or by products in different layouts: they have the diagonal of the "
    "metric, not Kronecker factors. Use a parameter of its own for each to have them."
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
        wanted = {name for block in bare for name in block.names}
        by_name = {name: place for block in blocks for name, place in block.named_slices.items()}
        layers, uses, reasons = self.of(model, by_name, tape, wanted)
        return with_layers(blocks, layers), replace(tape, uses=(*tape.uses, *uses)), reasons

    def again(self, model: Model, layers: Sequence[Block], tape: Tape, piece: tuple[int, int]) -> Tape:
        """The tape of another part of the batch, with the uses of the same layers."""
        wanted = {name for block in layers for name in block.names}
        by_name = {name: place for block in layers for name, place in block.named_slices.items()}
        blocks, uses, _ = self.of(model, by_name, tape, wanted)
        if len(blocks) < len(layers):
            names = ", ".join(block.title for block in layers if block not in blocks)
            raise BatchStatisticsError(
                f"{names} is used in another way by the examples {piece[0]} to {piece[1]} than by others: the batch "
                "cannot be processed in parts. Raise memory= so that it fits whole"
            )
        return replace(tape, uses=(*tape.uses, *uses))

    def of(
        self, model: Model, by_name: Mapping[str, ParameterSlice], tape: Tape, wanted: Collection[str]
    ) -> tuple[list[Block], list[Use], dict[str, str]]:
        """Layers of the ``wanted`` parameters, the uses of them in this pass, and why others have none."""
        operations, leaves = list(tape.operations or ()), tape.leaves
        reasons = {
            name: f"they are read by {node}, of which natgrad knows nothing"
            for name, node in missed(tape.y, operations, leaves).items()
            if name in wanted
        }
        ids = {id(leaves[name]) for name in wanted}
        operations = [op for op in operations if any(ids & operand.leaves() for operand in op.operands)]
        probed = _probed(tape, operations)
        owners: Owned = dict(zip(operations, probed.owners, strict=True))
        operations = _merged(operations, probed.biases)
        uses = _by_parameter(operations, {name: leaves[name] for name in wanted})
        for name, entry in uses.items():
            if any(owners[use.operation] is None for use in entry):
                reasons.setdefault(name, _MIXED)
        rest = [name for name in model.params if name in wanted and name in uses and name not in reasons]
        self._decide(model, by_name, rest, uses, leaves)
        for name in rest:
            if isinstance(self._blocks[name].rule, EntriesRule) and any(use.in_product for use in uses[name]):
                self.diagonals[name] = _FUNCTION if any(use.through_function for use in uses[name]) else _LAYOUTS
        blocks = list(dict.fromkeys(self._blocks[name] for name in rest))
        result: list[Use] = []
        for block in blocks:
            placed = _uses(block, uses, owners, leaves, tape.y.shape[0])
            if placed is None or any(name not in rest for name in block.names):
                reasons |= dict.fromkeys(block.names, _OTHERWISE)
            else:
                result += placed
        return [block for block in blocks if not any(name in reasons for name in block.names)], result, reasons

    def _decide(
        self,
        model: Model,
        by_name: Mapping[str, ParameterSlice],
        names: Sequence[str],
        uses: Mapping[str, Sequence[_Used]],
        leaves: Mapping[str, Tensor],
    ) -> None:
        new = [name for name in names if name not in self._blocks]
        packings: dict[str, tuple[Packing, list[bool]]] = {}
        for name in new:
            entry = [use.indices for use in uses[name] if use.indices is not None]
            if len(entry) == len(uses[name]):
                result = packing_of(leaves[name].shape, entry)
                if result is not None:
                    packings[name] = result
        biases = _biases(new, packings, uses, leaves)
        device = model.example.device
        for name in new:
            if name in biases.values() or name in self._blocks:
                continue
            members = [name, biases[name]] if name in biases else [name]
            packing, turned = packings.get(name, (None, []))
            lookups = [use.operation.index is not None for use in uses[name]]
            kinds = dict.fromkeys(zip(turned, lookups, strict=True)) if packing is not None else ()
            block = _block(members, packing, kinds, by_name, device)
            self._blocks |= dict.fromkeys(members, block)


@final
@dataclass(frozen=True)
class _Used:
    """A parameter in an operation: as the operand, or as what the operand is made from."""

    operation: Operation
    operand: Operand
    indices: Indices | None  # of a product with a view of it

    @property
    def in_product(self) -> bool:
        """Whether a product has the parameter, or a function of it, as its weight."""
        return self.operand is self.operation.weight and not self.operation.entrywise

    @property
    def through_function(self) -> bool:
        """Whether a product has a function of the parameter as its weight, and no view."""
        return self.in_product and self.indices is None


def _by_parameter(operations: Sequence[Operation], leaves: Mapping[str, Tensor]) -> dict[str, list[_Used]]:
    names = {id(p): name for name, p in leaves.items()}
    result: dict[str, list[_Used]] = {}
    for operation in operations:
        for operand in operation.operands:
            for at in operand.leaves():
                name = names.get(at)
                if name is None:
                    continue
                indices = None
                if operand is operation.weight and not operation.entrywise:
                    indices = indices_of(operand, operation.roles, operation.groups, leaves[name])
                result.setdefault(name, []).append(_Used(operation, operand, indices))
    return result


Owned: TypeAlias = "dict[Operation, Owners | None]"


@final
@dataclass(frozen=True)
class Probed:
    """What two backward passes have shown of operations, in their order.

    ``owners``: the examples of their rows. ``biases``: numbers of a product and of the operation that adds its bias,
    whose cotangents agree. ``certain``: every operation had cotangents, and no order of rows depends on the data.
    """

    owners: tuple[Owners | None, ...]
    biases: tuple[tuple[int, int], ...]
    certain: bool


def _probed(tape: Tape, operations: Sequence[Operation]) -> Probed:
    """Probe the graph of a pass; what is certain is remembered for passes with the same graph."""
    key = ("operations", tuple((operation.name, tuple(operation.shape)) for operation in operations))
    result: Probed | None = tape.memo.get(key)
    if result is not None or not operations:
        return result or Probed((), (), True)
    s, n = probes(tape.y.detach()), tape.y.shape[0]
    with tape.statistics.constant():
        grads = pulled(tape.y, [operation.edge for operation in operations], s, tape.half)
    pairs = zip(operations, grads, strict=True)
    outer = [s.new_zeros(len(s), *operation.shape) if g is None else g for operation, g in pairs]
    owners = [_owners(operation.cotangents(g), n) for operation, g in zip(operations, outer, strict=True)]
    numbers = {operation: at for at, operation in enumerate(operations)}
    biases = []
    for at, operation in enumerate(operations):
        product = numbers.get(operation.extends) if operation.extends is not None else None
        if product is not None and operation.weight is not None and operations[product].bias is None:
            g, h = outer[product], outer[at]
            if g.shape[-1] == max(operation.weight.unexpanded, default=0) and torch.equal(g.flatten(), h.flatten()):
                biases.append((product, at))
    certain = all(bool(g[0].any()) for g in outer) and all(o is not None and o.index is None for o in owners)
    result = Probed(tuple(owners), tuple(biases), certain)
    if certain:
        tape.memo[key] = result
    return result


def _owners(rows: Tensor, n: int) -> Owners | None:
    """The examples of rows from their cotangents [d r c o]; where groups have different ones, of rows and groups."""
    result = owners_of(rows.flatten(2), n)
    if result is None and rows.shape[2] > 1:
        result = owners_of(rows.flatten(1, 2), n)
        return None if result is None else result.by_group(rows.shape[1], rows.shape[2], rows.device)
    return result


def _merged(operations: Sequence[Operation], biases: Sequence[tuple[int, int]]) -> list[Operation]:
    """Products whose bias is added by an operation of its own (mm, view, add) become one use."""
    for product, at in biases:
        bias = operations[at].weight
        assert bias is not None
        operations[product].bias = bias
        operations[product].bias_roles = (*[""] * (len(bias.shape) - 1), "o")
    return [operation for at, operation in enumerate(operations) if at not in {added for _, added in biases}]


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


def _accompanies(biases: Sequence[_Used], weights: Sequence[_Used], block: Block, leaf: Tensor) -> bool:
    """Whether the bias of a layer is used with its weight only."""
    assert isinstance(block.rule, ProductRule)
    return _aligned_all(block.rule.packing, biases, weights, leaf)


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
    kinds: Iterable[tuple[bool, bool]],
    by_name: Mapping[str, ParameterSlice],
    device: torch.device,
) -> Block:
    """A layer of these parameters: a weight, its bias; with facets where the weight is used in several ways.

    ``kinds``: whether it is transposed, and whether its inputs are one-hot.
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
    blocks = [block(ProductRule(packing.swapped() if flip else packing, len(names) > 1, one)) for flip, one in ways]
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
    kinds = [[rule.packing != first, rule.lookup] for rule in rules]
    return {"names": names, "splits": [list(sizes) for sizes in first.splits], "roles": first.roles, "kinds": kinds}


def loaded(model: Model, blocks: Iterable[Block], state: Iterable[Mapping[str, Any]]) -> list[Block]:
    """The layers of a checkpoint, for a model with these blocks."""
    by_name = {name: place for block in blocks for name, place in block.named_slices.items()}
    out = []
    for saved in state:
        packing, kinds = None, []
        if "roles" in saved:
            packing = Packing(tuple(tuple(sizes) for sizes in saved["splits"]), saved["roles"])
            kinds = [(bool(flip), bool(one)) for flip, one in saved["kinds"]]
        out.append(_block(saved["names"], packing, kinds, by_name, model.example.device))
    return out


def _uses(
    block: Block, uses: Mapping[str, Sequence[_Used]], owners: Owned, leaves: Mapping[str, Tensor], n: int
) -> list[Use] | None:
    """The uses of a layer in a pass; None if one does not fit its packing."""
    out: list[Use] = []
    name, *bias = block.keys
    if bias and not _accompanies(uses.get(bias[0], ()), uses[name], block, leaves[bias[0]]):
        return None
    for use in uses[name]:
        entry = owners[use.operation]
        assert entry is not None
        if isinstance(block.rule, EntriesRule):
            rule: Rule = EntriesRule(Pulled(use.operation, entry, use.operand, leaves[name]))
            out.append(_recorded(block.modules[0], rule, use.operation))
            continue
        fitting = [(kind, placed) for kind in block.kinds if (placed := _placed(kind, use, entry)) is not None]
        if not fitting:
            return None
        kind, placed = fitting[0]
        assert isinstance(kind.rule, ProductRule)
        out.append(_recorded(kind.modules[0], replace(kind.rule, placed=placed), use.operation))
    return out


def _recorded(module: nn.Module, rule: Rule, operation: Operation) -> Use:
    shapes = (torch.Size(operation.shape),)
    return Use(Ruled(module, rule, {}), Call((), {}), (operation.edge,), shapes, operation.half)


def _placed(kind: Block, use: _Used, owners: Owners) -> Placed | None:
    """A use as a part of the packing of a kind of block, if it is one."""
    rule = kind.rule
    assert isinstance(rule, ProductRule)
    if use.indices is None or rule.lookup != (use.operation.index is not None):
        return None
    packing = rule.packing
    at = {role: packing.index(role, entry) for role, entry in use.indices.items()}
    for role, entry in use.indices.items():  # along a role nothing else may vary
        for other in "coi".replace(role, ""):
            where = packing.index(other, entry)
            if bool((where != where[0]).any()):
                return None
    sizes = dict(zip("coi", packing.shape, strict=True))
    c, o, i = (None if torch.equal(at[r], torch.arange(sizes[r])) else at[r] for r in "coi")
    return Placed(use.operation, owners, c, o, i)
