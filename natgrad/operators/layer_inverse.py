"""Inverses that work layer by layer."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from natgrad.geometry import Covector, Vector
from natgrad.linalg import consecutive
from natgrad.operators.base import Inverse, Layout
from natgrad.operators.factor import room_on, stacked
from natgrad.operators.subset import REST, Subset
from natgrad.pullback.blocks import Block

# Bytes of layers that are solved at once: products of one layer leave a GPU half idle.
_ROOM = {"cuda": 2**26, "cpu": 2**22}


class LayerInverse(Inverse):
    """An inverse that works layer by layer, on W [c o i]; the parameters in no layer have one of their own."""

    layout: Layout
    blocks: tuple[Block, ...]
    rest: Inverse | None
    others: Subset | None

    @abstractmethod
    def apply(self, group: tuple[int, ...], first: int, w: Tensor, spent: bool) -> Tensor:
        """The solution for layers of a group from the first on, w [b·c o i], in the memory of w where that is spent."""

    def apply_columns(self, group: tuple[int, ...], first: int, parts: list[Tensor]) -> list[Tensor]:
        """The same for W that have these parts [b·c o j] side by side."""
        raise TypeError(f"{type(self).__name__} has no use for columns")  # where ``by_columns`` says so

    def by_columns(self, group: tuple[int, ...]) -> bool:
        """Whether layers of a group are best solved part by part, without packing them."""
        return False

    @abstractmethod
    def alike(self, b: int) -> object:
        """What must be equal in layers that are stacked, beside their shape."""

    def below(self) -> dict[str, Tensor]:
        """The tensors of the inverse over the other parameters."""
        return {} if self.rest is None else {REST + key: t for key, t in self.rest.tensors().items()}

    def overwritten(self, new: Inverse) -> Inverse:
        if new is self or type(new) is not type(self):
            return new
        mine, its = self.tensors(), new.tensors()
        if {key: t.shape for key, t in mine.items()} != {key: t.shape for key, t in its.items()}:
            return new
        changed = [key for key, t in mine.items() if t.data_ptr() != its[key].data_ptr()]
        if changed:
            torch._foreach_copy_([mine[key] for key in changed], [its[key] for key in changed])
        return self

    def __copy__(self) -> LayerInverse:
        return self  # it remembers nothing

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that are solved at once, the largest first: later there are more results beside them."""
        found: dict[object, list[int]] = defaultdict(list)
        for b, block in enumerate(self.blocks):
            found[block.shape, self.alike(b)].append(b)
        return tuple(sorted(map(tuple, found.values()), key=lambda group: -len(group) * self.blocks[group[0]].size))

    def solve(self, ω: Tensor) -> Tensor:
        v, lent = torch.empty_like(ω), {ω.untyped_storage().data_ptr()}
        for group, first, last in self._runs:
            packed = [self.blocks[b].pack(ω) for b in group[first:last]]
            self._solve(group, first, packed, lent, lambda block, w: block.unpack(w, v))
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.solve(self.others.take(ω)), v)
        return v

    def sharp(self, ω: Covector) -> Vector:
        """As ``solve``, without flattening: a step has this many launches, and no more.

        Beside the result, packed layers of one shape are held, not too many, and their product with one side.
        """
        lent, like = {t.untyped_storage().data_ptr() for t in ω.values()}, self.layout.like
        found: dict[str, Tensor] = {}

        def put(block: Block, w: Tensor) -> None:
            found.update((name, _as(t, like[name])) for name, t in block.unpacked(w).items())

        for group, first, last in self._runs:
            columns = self._columns(group, first, last, ω)
            if columns is not None:
                found.update((name, _as(t.view(like[name].shape), like[name])) for name, t in columns.items())
                continue
            packed = [self.blocks[b].packed(ω).to(self.layout.dtype) for b in group[first:last]]
            self._solve(group, first, packed, lent, put)
        if self.rest is not None and self.others is not None:
            others = self.rest.sharp(Covector(self.others.named(ω)))
            found.update((name, _as(t, like[name])) for name, t in others.items())
        return Vector({name: found[name] for name in like})

    def memory(self, ω: Covector) -> dict[str, Tensor]:
        """For covectors like ω, so that layers which are solved at once lie side by side."""
        found = {name: torch.empty_like(t) for name, t in ω.items()}
        for group, first, last in self._runs:
            if last - first == 1 or not self.by_columns(group):
                continue
            for names in self._names(group[first:last], ω) or ():
                alike = [ω[name] for name in names]
                if all(t.is_contiguous() and t.shape == alike[0].shape for t in alike):
                    whole = alike[0].new_empty(len(alike), *alike[0].shape)
                    found.update(zip(names, whole, strict=True))
        return found

    def _names(self, numbers: Sequence[int], ω: Covector) -> list[tuple[str, ...]] | None:
        """Of every part of these layers, which lie side by side in W, the names of the parameters."""
        columns = [self.blocks[b].columns(ω) for b in numbers]
        if any(own is None or [t.shape for t in own.values()] != _shapes(columns[0]) for own in columns):
            return None
        return list(zip(*(own for own in columns if own is not None), strict=True))

    def _columns(self, group: tuple[int, ...], first: int, last: int, ω: Covector) -> dict[str, Tensor] | None:
        """The solutions by name of layers that are solved part by part; None for layers that are packed."""
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in ω.values())
        names = self._names(group[first:last], ω) if self.by_columns(group) and not graph else None
        if names is None:
            return None
        c, o, _ = self.blocks[group[0]].shape
        parts = [_side_by_side([ω[name].reshape(c, o, -1) for name in own]).to(self.layout.dtype) for own in names]
        solved = self.apply_columns(group, first, parts)
        return {
            name: part
            for own, whole in zip(names, solved, strict=True)
            for name, part in zip(own, whole.split(c), strict=True)
        }

    @cached_property
    def _runs(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """Groups, and from which to which of their layers there is room for at once."""
        out: list[tuple[tuple[int, ...], int, int]] = []
        for group in self.groups:
            block = self.blocks[group[0]]
            several = max(1, room_on(block.device, _ROOM) // (block.size * self.layout.dtype.itemsize))
            out += [(group, at, min(at + several, len(group))) for at in range(0, len(group), several)]
        return tuple(out)

    def _solve(
        self,
        group: tuple[int, ...],
        first: int,
        packed: list[Tensor],
        lent: set[int],
        put: Callable[[Block, Tensor], None],
    ) -> None:
        """Hand out the solutions of layers; ``packed`` is used up where it is not in ``lent`` memory."""
        w = stacked(packed)
        packed.clear()  # copies, where they have been stacked
        graph = torch.is_grad_enabled() and w.requires_grad
        w = self.apply(group, first, w, not graph and w.untyped_storage().data_ptr() not in lent)
        for at, part in enumerate(w.split(self.blocks[group[0]].shape[0]), first):
            put(self.blocks[group[at]], part)


def _shapes(columns: dict[str, Tensor] | None) -> list[torch.Size]:
    return [] if columns is None else [t.shape for t in columns.values()]


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """[b·c o j] of parts [c o j], without a copy where they lie side by side already."""
    whole = consecutive(parts)
    return torch.cat(parts) if whole is None else whole.flatten(0, 1)


def _as(t: Tensor, like: Tensor) -> Tensor:
    """t in the precision and the memory format of a parameter: kernels over many tensors want them alike."""
    if t.dtype == like.dtype and t.stride() == like.stride():
        return t
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=t.device).copy_(t)
