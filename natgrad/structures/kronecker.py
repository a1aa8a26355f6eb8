"""The Kronecker-factored structure (K-FAC): two small matrices a layer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.inverses import (
    BatchedInverse,
    Inversion,
    Newton,
    SymFactor,
    aligned,
    balance,
    batch_by_size,
    diagonal,
    is_dense,
    layers_at_once,
    matrix,
    spectrum,
    stacked,
    two_sided,
    two_sided_columns,
)
from natgrad.accelerate.moments import spaced
from natgrad.accelerate.replay import Scalar
from natgrad.errors import IncompatibleError, NonFiniteError, UncoveredError
from natgrad.geometry import Covector, Vector
from natgrad.linalg import refuse_indefinite, refuse_singular
from natgrad.model import Model
from natgrad.pullback.bare import SpreadRule, as_spread, parted
from natgrad.pullback.features import Expand, Largest, Reduce, Sharing, mean
from natgrad.pullback.layer import Block, trace
from natgrad.pullback.moments import Sink, factors_of, stream
from natgrad.pullback.pullback import Pullback, without_autocast
from natgrad.rules.base import Moment, Rows
from natgrad.slots import check_slots
from natgrad.structures.base import (
    FALLBACK,
    Cost,
    Inverse,
    LayerSpectrum,
    Layout,
    Operator,
    StateError,
    Structure,
    Subset,
    WorkSharing,
    check_shape,
)
from natgrad.structures.diagonal import Diagonal

# Orthonormal bases of the two sides of every layer, in which a metric is (nearly) diagonal.


Rotation: TypeAlias = Tensor | None  # columns [c d d]; None for the axes themselves


@final
@dataclass(frozen=True, eq=False)
class Basis:
    """Q of the outputs and P of the inputs of every layer; layers with one ``Basis`` object have one basis."""

    left: tuple[Rotation, ...]  # Q [c o o]
    right: tuple[Rotation, ...]  # P [c i i]

    @staticmethod
    def of(left: Sequence[SymFactor], right: Sequence[SymFactor]) -> Basis:
        """The eigenvectors of S and of A."""
        return Basis(tuple(spectra(left)[1]), tuple(spectra(right)[1]))

    @property
    def sides(self) -> list[tuple[Rotation, Rotation]]:
        """Q and P of every layer."""
        return list(zip(self.left, self.right, strict=True))

    def carried(self, scales: Sequence[Tensor], old: Basis) -> tuple[Tensor, ...]:
        """D' = (U∘U) D (V∘V)ᵀ, U = Q'ᵀQ, V = P'ᵀP: the diagonal, in this basis, of what is D [c o i] in another."""
        if old is self:
            return tuple(scales)
        pairs = zip(scales, self.sides, old.sides, strict=True)
        return tuple(spread(_overlap(q, q0), d, _overlap(p, p0)) for d, (q, p), (q0, p0) in pairs)


def rotated(q: Rotation, w: Tensor, p: Rotation) -> Tensor:
    """Qᵀ W P: the coordinates of W [*batch c o i] in the basis."""
    w = w if q is None else q.mT @ w
    return w if p is None else w @ p


def rotated_back(q: Rotation, w: Tensor, p: Rotation) -> Tensor:
    """Q W Pᵀ: the inverse of ``rotated``."""
    w = w if q is None else q @ w
    return w if p is None else w @ p.mT


def spread(q: Rotation, d: Tensor, p: Rotation) -> Tensor:
    """(Q∘Q) D (P∘P)ᵀ [c o i]: the diagonal of (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ."""
    return rotated_back(None if q is None else q.square(), d, None if p is None else p.square())


def spectra(side: Sequence[SymFactor]) -> tuple[list[Tensor], list[Rotation]]:
    """Eigenvalues [c d] and eigenvectors [c d d] of the factors of one side; a diagonal one has its own axes."""
    which = [at for at, factor in enumerate(side) if is_dense(factor)]
    values: list[Tensor] = list(side)
    vectors: list[Rotation] = [None] * len(side)

    full_ones = [side[at] for at in which]
    for stack in batch_by_size(full_ones):
        λ, q = spectrum(stacked([full_ones[at] for at in stack]))
        counts = [full_ones[at].shape[0] for at in stack]
        for at, own_λ, own_q in zip(stack, λ.split(counts), q.split(counts), strict=True):
            values[which[at]], vectors[which[at]] = own_λ, own_q
    return values, vectors


def eigenvalues(factor: SymFactor) -> Tensor:
    """[c d], ascending."""
    return torch.linalg.eigvalsh(factor) if is_dense(factor) else factor.sort(-1).values


def _overlap(new: Rotation, old: Rotation) -> Rotation:
    """Q'ᵀQ."""
    if new is None:
        return old
    return new.mT if old is None else new.mT @ old


# Inverses that work layer by layer.


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
        return {} if self.rest is None else {FALLBACK + key: t for key, t in self.rest.tensors().items()}

    def overwritten(self, new: Inverse) -> Inverse:
        if new is self or type(new) is not type(self):
            return new
        mine, its = self.tensors(), new.tensors()
        if {key: t.shape for key, t in mine.items()} != {key: t.shape for key, t in its.items()}:
            return new
        changed = [key for key, t in mine.items() if t.data_ptr() != its[key].data_ptr()]
        if changed:
            fused.copy_([mine[key] for key in changed], [its[key] for key in changed])
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
        return self._sharp(ω, None)

    def sharp_with_pairing(self, ω: Covector) -> tuple[Vector, Tensor]:
        pairings: list[Tensor] = []
        v = self._sharp(ω, pairings)
        return v, torch.stack(pairings).sum()

    def _sharp(self, ω: Covector, pairings: list[Tensor] | None) -> Vector:
        """As ``solve``, without flattening: layers of one shape are stacked, and solved in two products.

        ``pairings`` receives numbers whose sum is ⟨ω, ω♯⟩.
        """
        v: dict[str, Tensor] = {}
        for at, (group, first, last) in enumerate(self._runs):
            columns = self._columns[at]
            if columns is None:
                packed = stacked([self.blocks[b].packed(ω).to(self.layout.dtype) for b in group[first:last]])
                solved = self.apply(group, first, packed, False)
                for b, w in zip(group[first:last], solved.split(self.blocks[group[0]].shape[0]), strict=True):
                    v.update(self.blocks[b].unpacked(w))
                pairs = [(packed, solved)]
            else:
                pairs = self._solve_columns(group, first, columns, ω, v)
            if pairings is not None:
                pairings += [torch.dot(w.flatten(), u.flatten()) for w, u in pairs]
        if self.rest is not None and self.others is not None:
            others, pairing = self.rest.sharp_with_pairing(Covector(self.others.named(ω)))
            v.update(others)
            if pairings is not None:
                pairings.append(pairing.to(self.layout.dtype))
        # In the precision of every parameter.
        return Vector({name: v[name].to(t.dtype) for name, t in self.layout.like.items()})

    def _solve_columns(
        self,
        group: tuple[int, ...],
        first: int,
        columns: list[tuple[str, ...]],
        ω: Covector,
        v: dict[str, Tensor],
    ) -> list[tuple[Tensor, Tensor]]:
        """Solve the layers of a run, put their solutions into v, and give what was solved with its solutions."""
        (c, o, _), count = self.blocks[group[0]].shape, len(columns[0])
        parts = [
            (ω[names[0]] if count == 1 else torch.stack([ω[name] for name in names])).reshape(count * c, o, -1)
            for names in columns
        ]
        parts = [part.to(self.layout.dtype) for part in parts]
        if self.by_columns(group) and not (torch.is_grad_enabled() and any(part.requires_grad for part in parts)):
            solved = self.apply_columns(group, first, parts)
        elif len(parts) == 1:
            solved = [self.apply(group, first, parts[0], False)]
        else:
            packed = torch.cat(parts, dim=-1)
            packed = self.apply(group, first, packed, not packed.requires_grad)
            solved = list(packed.split([part.shape[-1] for part in parts], dim=-1))
        for names, part in zip(columns, solved, strict=True):
            shape = self.layout.like[names[0]].shape
            v.update(zip(names, [part.view(shape)] if count == 1 else part.view(count, *shape).unbind(), strict=True))
        if count == 1:
            return [(ω[names[0]].to(self.layout.dtype), v[names[0]]) for names in columns]
        return list(zip(parts, solved, strict=True))

    @cached_property
    def _columns(self) -> list[list[tuple[str, ...]] | None]:
        """Of every run, the names of the parameters that lie side by side in W; None where a rule packs otherwise."""
        out: list[list[tuple[str, ...]] | None] = []
        for group, first, last in self._runs:
            columns = [self.blocks[b].columns(self.layout.like) for b in group[first:last]]
            usual = [own for own in columns if own is not None]
            shapes = {tuple(self.layout.like[name].shape for name in own) for own in usual}
            out.append(list(zip(*usual, strict=True)) if len(usual) == len(columns) and len(shapes) == 1 else None)
        return out

    @cached_property
    def _runs(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """Groups, and from which to which of their layers there is room for at once."""
        out: list[tuple[tuple[int, ...], int, int]] = []
        for group in self.groups:
            block = self.blocks[group[0]]
            several = layers_at_once(block.device, block.size * self.layout.dtype.itemsize)
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


# Inverses of Kronecker-factored metrics: a product of inverses, or a scaling in the basis of the eigenvectors.


@final
@dataclass(frozen=True)
class ProductInverse(LayerInverse):
    """v = S⁻¹ W A⁻¹ (003 (2.10), 004 (38))."""

    layout: Layout
    blocks: tuple[Block, ...]
    rest: Inverse | None
    others: Subset | None
    stacks: tuple[tuple[SymFactor, SymFactor], ...]  # of every group of layers, S⁻¹ [b·c o o] and A⁻¹ [b·c i i]
    kinds: tuple[tuple[bool, bool], ...]  # of every layer, whether its factors are full
    batch: BatchedInverse = field(default_factory=BatchedInverse)

    @staticmethod
    def of(
        G: KroneckerOperator, rest: Inverse | None, left: Sequence[SymFactor], right: Sequence[SymFactor]
    ) -> ProductInverse:
        """From S⁻¹ and A⁻¹ of every layer."""
        empty = ProductInverse._shaped(G, rest, left, right)
        stacks = tuple(
            (aligned(stacked([left[b] for b in group])), aligned(stacked([right[b] for b in group])))
            for group in empty.groups
        )
        return replace(empty, stacks=stacks)

    @staticmethod
    def empty(G: KroneckerOperator, rest: Inverse | None) -> ProductInverse:
        """Memory for S⁻¹ and A⁻¹ of every layer, in which nothing has been written yet."""
        shaped = ProductInverse._shaped(G, rest, G.left, G.right)
        stacks = tuple((_memory(G.left[group[0]], group), _memory(G.right[group[0]], group)) for group in shaped.groups)
        return replace(shaped, stacks=stacks)

    @staticmethod
    def _shaped(
        G: KroneckerOperator, rest: Inverse | None, left: Sequence[SymFactor], right: Sequence[SymFactor]
    ) -> ProductInverse:
        kinds = tuple((is_dense(s), is_dense(a)) for s, a in zip(left, right, strict=True))
        return ProductInverse(G.layout, G.blocks, rest, G.others, (), kinds)

    def begin(self, left: Sequence[SymFactor], right: Sequence[SymFactor]) -> None:
        """Copy S⁻¹ and A⁻¹ of every layer."""
        mine = self.tensors()
        for block, s, a in zip(self.blocks, left, right, strict=True):
            mine[f"{block.names[0]}/S"].copy_(s)
            mine[f"{block.names[0]}/A"].copy_(a)

    def fits(self, G: KroneckerOperator) -> bool:
        """Whether the inverse of G can be made in this memory."""
        mine, its = ([(b.names, b.shape) for b in blocks] for blocks in (self.blocks, G.blocks))
        if mine != its or self.kinds != ProductInverse._shaped(G, None, G.left, G.right).kinds:
            return False
        like = G.left[0]
        return all(t.dtype == like.dtype and t.device == like.device for stack in self.stacks for t in stack)

    def jobs(self, factors: Sequence[SymFactor], damping: Scalar) -> list[Inversion]:
        """What is to be inverted, with factored damping, and where it goes; ``factors``: all S, then all A."""
        left, right = factors[: len(self.blocks)], factors[len(self.blocks) :]
        jobs: list[Inversion] = []
        for group, stacks in zip(self.groups, self.stacks, strict=True):
            s, a = [left[b] for b in group], [right[b] for b in group]
            c, π = s[0].shape[0], balance(a, s)
            for letter, side, stack, shifts in (
                ("S", s, stacks[0], damping**0.5 / π),
                ("A", a, stacks[1], damping**0.5 * π),
            ):
                outs = _unaligned(stack, side[0].shape[-1]).split(c)
                for b, factor, shift, out in zip(group, side, shifts.split(c), outs, strict=True):
                    jobs.append(Inversion(factor, shift, out, f"the factor {letter} of {self.blocks[b].title}"))
        return jobs

    def compute_(self, G: KroneckerOperator, damping: float, *, warm: bool = False) -> None:
        """From G, waiting for the device; a matrix that cannot be inverted raises, after a retry in double precision.

        ``warm``: there is an inverse, which stays where it raises.
        """
        self.batch.compute_(self.jobs((*G.left, *G.right), damping), warm=warm)

    def refresh_(self, G: KroneckerOperator, damping: float, newton: Newton | None) -> None:
        """From G, in place of the inverse that is there. A GPU is not waited for: ``failed`` tells later."""
        addresses = tuple(t.data_ptr() for stack in self.stacks for t in stack)
        self.batch.refresh_(self.jobs, (*G.left, *G.right), damping, newton, addresses)

    def failed(self) -> bool:
        return self.batch.failed()

    def inherit(self, other: Inverse) -> None:
        if isinstance(other, ProductInverse):
            self.batch.inherit(other.batch)
        else:
            self.batch.clear()

    def forgive(self) -> None:
        self.batch.clear()

    def overwritten(self, new: Inverse) -> Inverse:
        kept = super().overwritten(new)
        if kept is self is not new:
            self.inherit(new)
        return kept

    def alike(self, b: int) -> object:
        return self.kinds[b]

    def apply(self, group: tuple[int, ...], first: int, w: Tensor, spent: bool) -> Tensor:
        left, right = self._sides(group, first, len(w))
        return two_sided(left, w, right, w if spent else None)

    def by_columns(self, group: tuple[int, ...]) -> bool:
        return self.kinds[group[0]] == (True, True)

    def apply_columns(self, group: tuple[int, ...], first: int, parts: list[Tensor]) -> list[Tensor]:
        left, right = self._sides(group, first, len(parts[0]))
        return two_sided_columns(left, parts, right)

    def _sides(self, group: tuple[int, ...], first: int, count: int) -> tuple[SymFactor, SymFactor]:
        """S⁻¹ and A⁻¹ of ``count`` matrices of a group, from its first layer on."""
        left, right = self.stacks[self.groups.index(group)]
        if count == len(left):
            return left, right
        at = first * self.blocks[group[0]].shape[0]
        return left[at : at + count], right[at : at + count]

    def tensors(self) -> dict[str, Tensor]:
        out = self.below()
        for group, (left, right) in zip(self.groups, self.stacks, strict=True):
            c, o, i = self.blocks[group[0]].shape
            left, right = _unaligned(left, o), _unaligned(right, i)
            for b, s, a in zip(group, left.split(c), right.split(c), strict=True):
                out[f"{self.blocks[b].names[0]}/S"], out[f"{self.blocks[b].names[0]}/A"] = s, a
        return out


@final
@dataclass(frozen=True)
class SpectralInverse(LayerInverse):
    """v = Q (d ⊙ Qᵀ W P) Pᵀ with the eigenvectors Q of S and P of A, and d the inverse of each damped eigenvalue."""

    layout: Layout
    blocks: tuple[Block, ...]
    rest: Inverse | None
    others: Subset | None
    left: tuple[Rotation, ...]  # Q [c o o]; None for the axes themselves
    right: tuple[Rotation, ...]
    scales: tuple[Tensor, ...]  # d [c o i]

    def alike(self, b: int) -> object:
        return b  # rotations are many numbers: no copies of them

    def apply(self, group: tuple[int, ...], first: int, w: Tensor, spent: bool) -> Tensor:
        (b,) = group
        q, p = self.left[b], self.right[b]
        turned = rotated(q, w, p)
        turned = turned.mul_(self.scales[b]) if spent or turned is not w else turned * self.scales[b]
        return rotated_back(q, turned, p)

    @property
    def noise(self) -> int:
        return sum(self._sizes)

    def coloured(self, ξ: Tensor) -> Tensor:
        """Q (√d ⊙ Z) Pᵀ of every layer."""
        *parts, below = ξ.split(self._sizes, dim=1)
        out = ξ.new_empty(len(ξ), self.layout.size)
        for block, q, p, d, z in zip(self.blocks, self.left, self.right, self.scales, parts, strict=True):
            block.unpack(rotated_back(q, z.view(-1, *block.shape) * d.sqrt(), p), out)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.coloured(below), out)
        return out

    def whitened(self, ω: Tensor) -> Tensor:
        """√d ⊙ QᵀWP of every layer."""
        sides = zip(self.blocks, self.left, self.right, self.scales, strict=True)
        parts = [(rotated(q, block.pack(ω), p) * d.sqrt()).flatten(1) for block, q, p, d in sides]
        if self.rest is not None and self.others is not None:
            parts.append(self.rest.whitened(self.others.take(ω)))
        return torch.cat(parts, dim=1)

    @property
    def _sizes(self) -> list[int]:
        """Numbers of white noise for every layer, and for the other parameters."""
        return [block.size for block in self.blocks] + [0 if self.rest is None else self.rest.noise]

    def tensors(self) -> dict[str, Tensor]:
        out = self.below()
        for block, q, p, d in zip(self.blocks, self.left, self.right, self.scales, strict=True):
            parts = {"Q": q, "P": p, "d": d}
            out |= {f"{block.names[0]}/{key}": t for key, t in parts.items() if t is not None}
        return out


@final
@dataclass(frozen=True)
class Damped:
    """1/(λ + damping) of eigenvalues; below ``rtol`` of the largest they count as zero, and so do their inverses."""

    damping: float
    rtol: float | None

    def of(self, values: Tensor) -> Tensor:
        """[c o i], each layer by itself; all of its groups have one largest eigenvalue."""
        if self.rtol is None:
            # Rounding below zero is zero: λ is what is left.
            return (values.clamp(min=0) + self.damping).reciprocal()
        damped = values + self.damping
        refuse_indefinite(damped.flatten(), self.rtol, self.damping, "the metric")
        # A group that should be zero (keys of attention have no bias) is noise beside the others.
        return torch.where(damped > self.rtol * damped.amax(), damped, torch.inf).reciprocal()


def undamped(G: KroneckerOperator, rest: Inverse | None) -> ProductInverse:
    """S⁻¹ ⊗ A⁻¹; a singular factor raises, by the name of its layer."""

    for side, factors in (("S", G.left), ("A", G.right)):
        for block, factor in zip(G.blocks, factors, strict=True):
            values_of_groups = eigenvalues(factor.double())
            if factor.shape[-1] == 1:
                values_of_groups = values_of_groups.amin(0, keepdim=True)  # one number for every channel
            for values in values_of_groups:
                rounding = factor.shape[-1] * torch.finfo(factor.dtype).eps
                refuse_singular(values, rounding, False, 0.0, f"the factor {side} of {block.title}")
    out = ProductInverse.empty(G, rest)
    out.compute_(G, 0.0)
    return out


def factored(
    G: KroneckerOperator,
    rest: Inverse | None,
    damping: float,
    last: tuple[list[Tensor], list[Tensor]] | None,
    newton: Newton | None = None,
    into: Inverse | None = None,
) -> ProductInverse:
    """(S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹ with π² = (tr A/dim A)/(tr S/dim S) (Martens and Grosse 2015, section 6.3).

    Where a factor is zero (a layer with no gradient) π is 1. A factor that Cholesky cannot invert keeps the ``last``
    inverse, and when the others are made it raises; on a GPU it has ``failed``, a step or two later. Without a last one
    it raises at once. With ``newton`` the last inverse is refreshed where that is near enough. ``into``: an inverse in
    whose memory this one is made, where it fits; it is then the last one, and is used up.
    """
    if damping == 0 or not G.blocks:
        return undamped(G, rest)
    if isinstance(into, ProductInverse) and into.fits(G):
        out = into if rest is None and into.rest is None else replace(into, rest=rest)
    else:
        out = ProductInverse.empty(G, rest)
        if last is None:
            out.compute_(G, damping)
            return out
        out.begin(*last)
    out.refresh_(G, damping, newton if newton is not None and newton.trusted() else None)
    return out


def _memory(factor: SymFactor, group: Sequence[int]) -> SymFactor:
    """For the inverses of factors like this one, of every layer of a group, ``aligned`` with zeros."""
    shape = (len(group) * factor.shape[0], *factor.shape[1:])
    like = aligned(factor[:1])
    if like.shape[-1] == factor.shape[-1]:
        return torch.empty(shape, dtype=factor.dtype, device=factor.device)
    return like.new_zeros(shape[0], *like.shape[1:])


def _unaligned(factor: SymFactor, size: int) -> SymFactor:
    """A view without the zeros of an ``aligned`` factor."""
    return factor[..., :size, :size] if is_dense(factor) else factor


# What metrics that are kept layer by layer have in common.


UNSEEN = "unseen"  # in place of the letters of a layer's tensors


class LayerOperator(Operator):
    """A metric with one block a layer, on W [c o i], which is diagonal in a basis Q ⊗ P of the layer.

    A layer that the forward pass did not use (an expert, a block that was dropped) is zero, and its parameters are
    ``unseen``: in an average, which is over the passes that used a layer, it does not count.
    ``rest`` is the metric on the parameters that no layer rule covers, in another structure.
    """

    letters: ClassVar[tuple[str, ...]]  # of the tensors of a layer
    layout: Layout
    blocks: tuple[Block, ...]
    left: tuple[SymFactor, ...]  # S [c o o] of every layer, or its diagonal [c o]
    right: tuple[SymFactor, ...]  # A [c i i], or its diagonal [c i]
    rest: Operator | None
    unseen: frozenset[str]

    @abstractmethod
    def applied(self, b: int, w: Tensor) -> Tensor:
        """G W [c o i] of the layer number b."""

    @abstractmethod
    def layer_diagonal(self, b: int) -> Tensor:
        """The diagonal of the layer's block, packed [c o i]."""

    @abstractmethod
    def layer_dense(self, b: int) -> Iterable[Tensor]:
        """The layer's block of every group, [(o i) (o i)] each."""

    @abstractmethod
    def spectrum(self) -> tuple[list[Tensor], Basis]:
        """The eigenvalues [c o i] of every block, and the basis they belong to."""

    @cached_property
    def others(self) -> Subset | None:
        """The parameters of ``rest`` among all."""
        return None if self.rest is None else Subset.of(self.layout, list(self.rest.layout.like))

    @property
    def layers(self) -> tuple[Block, ...]:
        return self.blocks

    def layer_spectra(self) -> Iterator[LayerSpectrum]:
        for b, block in enumerate(self.blocks):
            s, a = self.left[b].double(), self.right[b].double()
            factors = {"S": eigenvalues(s), "A": eigenvalues(a)}
            yield LayerSpectrum(
                block.names, factors, {"S": diagonal(s), "A": diagonal(a)}, self.layer_values(b, *factors.values())
            )

    @abstractmethod
    def layer_values(self, b: int, s: Tensor, a: Tensor) -> Tensor:
        """The eigenvalues [c o i] of the block, in double precision; those of S and A are s [c o] and a [c i]."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        out = {key: shape for key, shape in self.inverse_shapes().items() if key.rpartition("/")[2] in self.letters}
        out |= {f"{block.names[0]}/{UNSEEN}": (0,) for b, block in enumerate(self.blocks) if not self.saw(b)}
        return out | ({} if self.rest is None else {FALLBACK + key: shape for key, shape in self.rest.shapes().items()})

    def inverse_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that a metric by layers, or an inverse of it, may keep of the layers that were seen."""
        out: dict[str, tuple[int, ...]] = {}
        for b, block in enumerate(self.blocks):
            if not self.saw(b):
                continue
            (c, o, i), s, a = block.shape, self.left[b], self.right[b]
            shapes = {"S": tuple(s.shape), "A": tuple(a.shape), "D": (c, o, i), "d": (c, o, i)}
            shapes |= {"Q": (c, o, o)} if is_dense(s) else {}
            shapes |= {"P": (c, i, i)} if is_dense(a) else {}
            out |= {f"{block.names[0]}/{letter}": shape for letter, shape in shapes.items()}
        return out

    def product(self, v: Tensor) -> Tensor:
        out = torch.empty_like(v)
        for b, block in enumerate(self.blocks):
            block.unpack(self.applied(b, block.pack(v)), out)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.product(self.others.take(v)), out)
        return out

    def diagonal(self) -> Tensor:
        out = self._empty(self.layout.size)
        for b, block in enumerate(self.blocks):
            block.unpack(self.layer_diagonal(b), out)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.diagonal(), out)
        return out

    def dense(self) -> Tensor:
        out = self._empty(self.layout.size, self.layout.size).zero_()
        for b, block in enumerate(self.blocks):
            index = block.index.view(block.shape[0], -1)
            for own, dense in zip(index, self.layer_dense(b), strict=True):
                out[own[:, None], own] = dense
        if self.rest is not None and self.others is not None:
            index = self.others.index(out.device)
            out[index[:, None], index] = self.rest.dense()
        return out

    def logdet(self, damping: float = 0.0) -> Tensor:
        total = self._empty().zero_()
        for block, values in zip(self.blocks, self.spectrum()[0], strict=True):
            self.refuse_singular(block, values, damping)
            total = total + (values + damping).log().sum()
        return total if self.rest is None else total + self.rest.logdet(damping)

    def refuse_singular(self, block: Block, values: Tensor, damping: float) -> None:
        """Raise, by the name of its layer, if one of the eigenvalues [c o i] + λ is zero up to rounding."""
        what = f"the block {block.title} of the metric"
        refuse_singular((values + damping).flatten().sort().values, self._rounding(block), False, damping, what)

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None:
            self.refuse("Pinv(weight=…)", "a weight has no Kronecker factors; use Dense or BlockDense")
        rest = None if self.rest is None else self.rest.pseudo_inverse(damping, rtol, None)
        return self.spectral(
            rest, Damped(damping, rtol if rtol is not None else max(map(self._rounding, self.blocks), default=0.0))
        )

    def spectral(self, rest: Inverse | None, damped: Damped) -> SpectralInverse:
        """The inverse by the eigenvalues."""
        values, basis = self.spectrum()
        scales = tuple(map(damped.of, values))
        return SpectralInverse(self.layout, self.blocks, rest, self.others, basis.left, basis.right, scales)

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        below = {key.removeprefix(FALLBACK): t for key, t in tensors.items() if key.startswith(FALLBACK)}
        rest = None if self.rest is None else self.rest.inverse_from(below)
        return None if self.rest is not None and rest is None else self.layers_from(tensors, rest)

    def layers_from(self, tensors: Mapping[str, Tensor], rest: Inverse | None) -> Inverse | None:
        """The inverse with these tensors and, over the other parameters, the inverse ``rest``."""
        if any(f"{block.names[0]}/d" not in tensors for block in self.blocks[:1]):
            return None
        q, p = (tuple(tensors.get(f"{block.names[0]}/{side}") for block in self.blocks) for side in "QP")
        d = tuple(tensors[f"{block.names[0]}/d"] for block in self.blocks)
        return SpectralInverse(self.layout, self.blocks, rest, self.others, q, p, d)

    def rest_lerp(self, other: LayerOperator, weight: float) -> Operator | None:
        """The average over the other parameters."""
        self.same_layers(other.blocks)
        return None if self.rest is None else self.rest.lerp(cast(Operator, other.rest), weight)

    def same_layers(self, blocks: Iterable[Block]) -> None:
        """An estimate must have the same layers."""
        here, there = {b.names for b in self.blocks}, {b.names for b in blocks}
        if here != there:
            names = ", ".join(sorted({name for block in here ^ there for name in block}))
            raise IncompatibleError(
                f"the layers of {names} were seen by their rule in one batch and not in another: they are called in "
                "different ways. Leave them to the fallback, with a rule that does not cover them, or call them alike"
            )

    def saw(self, b: int) -> bool:
        """Whether the layer number b has been used."""
        return self.blocks[b].names[0] not in self.unseen

    def joined(
        self, other: LayerOperator, old: Iterable[Tensor], new: Iterable[Tensor], mean: Iterable[Tensor]
    ) -> tuple[Tensor, ...]:
        """Of every layer the mean, or what it is in the one operator that has seen it."""
        if not self.unseen and not other.unseen:
            return tuple(mean)
        choices = enumerate(zip(old, new, mean, strict=True))
        return tuple((m if self.saw(b) else y) if other.saw(b) else x for b, (x, y, m) in choices)

    def named(self, parts: Mapping[str, Iterable[Tensor | None]]) -> dict[str, Tensor]:
        """As ``every``; of a layer that is unseen only that."""
        hidden = [block.names[0] for b, block in enumerate(self.blocks) if not self.saw(b)]
        out = {key: t for key, t in self.every(parts).items() if key.rpartition("/")[0] not in hidden}
        return out | {f"{name}/{UNSEEN}": self._empty(0) for name in hidden}

    def every(self, parts: Mapping[str, Iterable[Tensor | None]]) -> dict[str, Tensor]:
        """Tensors of every layer by the layer's first name and their letter, with those of ``rest``."""
        out = {} if self.rest is None else {FALLBACK + key: t for key, t in self.rest.tensors().items()}
        for letter, side in parts.items():
            pairs = zip(self.blocks, side, strict=True)
            out |= {f"{block.names[0]}/{letter}": t for block, t in pairs if t is not None}
        return out

    def _rounding(self, block: Block) -> float:
        """Eigenvalues of this part of the largest are noise. Each side has the noise of its own size."""
        return sum(block.shape[1:]) * torch.finfo(self.layout.dtype).eps

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.layout.dtype, device=self._device)

    @property
    def _device(self) -> torch.device:
        if self.blocks or self.rest is None:
            return self.blocks[0].device
        return next(iter(self.rest.tensors().values())).device  # no layer has a rule


# The Kronecker-factored metric: one product S ⊗ A a layer.


@final
@dataclass(frozen=True)
class KroneckerOperator(LayerOperator):
    """G = S ⊗ A on every layer: v = W [c o i] goes to S W A (003 (2.8), (4.5), (5.3); ERRATA 51: row-major, S first).

    ``rest`` is the metric on the parameters that no layer rule covers, in another structure.
    """

    letters: ClassVar[tuple[str, ...]] = ("S", "A")
    layout: Layout
    blocks: tuple[Block, ...]
    left: tuple[SymFactor, ...]  # S [c o o] of every block, or its diagonal [c o]
    right: tuple[SymFactor, ...]  # A [c i i] of every block, or its diagonal [c i]
    rest: Operator | None = None
    unseen: frozenset[str] = frozenset()

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the factors lie, which is where their averages are made."""
        return tuple(t.data_ptr() for t in (*self.left, *self.right))

    def applied(self, b: int, w: Tensor) -> Tensor:
        return two_sided(self.left[b], w, self.right[b])

    def layer_diagonal(self, b: int) -> Tensor:
        return diagonal(self.left[b]).unsqueeze(-1) * diagonal(self.right[b]).unsqueeze(-2)

    def layer_values(self, b: int, s: Tensor, a: Tensor) -> Tensor:
        return s.clamp(min=0).unsqueeze(-1) * a.clamp(min=0).unsqueeze(-2)

    def layer_dense(self, b: int) -> Iterable[Tensor]:
        pairs = zip(matrix(self.left[b]), matrix(self.right[b]), strict=True)
        return (torch.kron(s.contiguous(), a.contiguous()) for s, a in pairs)

    def spectrum(self) -> tuple[list[Tensor], Basis]:
        """The products s_o a_i, in the eigenvectors of the factors."""
        (s, q), (a, p) = spectra(self.left), spectra(self.right)
        products = [x.unsqueeze(-1) * y.unsqueeze(-2) for x, y in zip(s, a, strict=True)]
        return products, Basis(tuple(q), tuple(p))

    def lerp(self, other: Operator, weight: float) -> KroneckerOperator:
        """A and S are averaged, each by itself, as in Martens and Grosse (2015, section 5)."""
        self.same_kind(other)
        there = cast(KroneckerOperator, other)
        rest = self.rest_lerp(there, weight)
        if not self.blocks:
            return replace(self, rest=rest)
        both = fused.lerp([*self.left, *self.right], [*there.left, *there.right], weight)
        left = self.joined(there, self.left, there.left, both[: len(self.left)])
        right = self.joined(there, self.right, there.right, both[len(self.left) :])
        return replace(self, left=left, right=right, rest=rest, unseen=self.unseen & there.unseen)

    def absorbed(self, rest: Operator | None, weight: float, unseen: frozenset[str]) -> KroneckerOperator:
        """The average after factors have been averaged in place, with the estimate over the other parameters."""
        if self.rest is not None and rest is not None:
            rest = self.rest.merged(rest, weight)
        same = rest is self.rest and self.unseen <= unseen
        return self if same else replace(self, rest=rest, unseen=self.unseen & unseen)

    def tensors(self) -> dict[str, Tensor]:
        return self.named({"S": self.left, "A": self.right})

    def averaged(self) -> dict[str, Tensor] | None:
        if self.rest is not None and self.rest.averaged() is None:
            return None
        return self.every({"S": self.left, "A": self.right})

    def inverse(self, damping: float) -> Inverse:
        """(G + λ)⁻¹ exactly: by Cholesky of the factors without damping, through their eigenvalues with it."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        return undamped(self, rest) if damping == 0 else self.spectral(rest, Damped(damping, None))

    def factored_inverse(
        self,
        damping: float,
        warm: Mapping[str, Tensor],
        newton: Newton | None = None,
        into: Inverse | None = None,
    ) -> Inverse:
        """(S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹: an approximation of (G + λ)⁻¹ that needs no eigenvalues (ERRATA D)."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        return factored(self, rest, damping, self._sides(warm), newton, into)

    def shared_inverse(self, invert: Callable[[Operator], Inverse], sharing: WorkSharing, damping: float) -> Inverse:
        """Every process inverts the factors of its layers."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        share, inverses = sharing.share(self.blocks), list[Inverse]()

        def inverted() -> Mapping[str, Tensor]:
            left, right = (tuple(side[b] for b in share) for side in (self.left, self.right))
            blocks = tuple(self.blocks[b] for b in share)
            if share:
                inverses.append(invert(replace(self, blocks=blocks, left=left, right=right, rest=None)))
            return inverses[0].tensors() if inverses else {}

        inverse = self.layers_from(sharing.gathered(inverted), rest)
        assert inverse is not None
        for computed in inverses:  # on a GPU the host reads later that a factor could not be inverted
            inverse.inherit(computed)
        return inverse

    def mend(self, inverse: Inverse, damping: float) -> None:
        if isinstance(inverse, ProductInverse) and inverse.fits(self):
            inverse.compute_(self, damping, warm=True)
        else:
            super().mend(inverse, damping)

    def layers_from(self, tensors: Mapping[str, Tensor], rest: Inverse | None) -> Inverse | None:
        sides = self._sides(tensors)
        if sides is None:
            return super().layers_from(tensors, rest)
        left, right = (tuple(side) for side in sides)
        return ProductInverse.of(self, rest, left, right)

    def _sides(self, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """S⁻¹ and A⁻¹ of every layer, where they are there."""
        names = [block.names[0] for block in self.blocks]
        if any(f"{name}/S" not in tensors for name in names[:1]):
            return None
        return [tensors[f"{name}/S"] for name in names], [tensors[f"{name}/A"] for name in names]


# The moving average of Kronecker factors, in place: every factor is absorbed as it arrives.


_HELD = 2**22  # bytes that wait to be absorbed together on a GPU, at least: a launch of few takes as long as of many
_PART = 8  # or this part of all factors
_LARGE = 2**20  # numbers
_LAUNCH = 320 * 2**16  # numbers that torch's fused kernels take in one launch
_VECTOR = 4  # numbers that they read at once, where a tensor starts at such a multiple


@final
class Absorb(Sink):
    """Ā ← (1 − w) Ā + w A of factors that arrive one by one, and S̄ likewise (Martens and Grosse 2015, section 5).

    ``numbers``: of each layer that arrives, its number in the average. One that the average has not seen counts whole.
    A factor that is not finite is not absorbed: it raises or, on a GPU, where nobody looks, leaves the average alone.
    """

    def __init__(self, average: KroneckerOperator, numbers: Sequence[int], weight: Scalar) -> None:
        self.average, self.numbers = average, numbers
        self._weight = weight
        self._held: list[Held] = []
        self._bytes = 0

    @property
    def weight(self) -> float:
        return float(self._weight)

    @property
    def places(self) -> Hashable:
        return tuple(self.numbers), self.average.unseen, self.average.addresses

    def weighted(self, weight: Scalar) -> Absorb:
        return Absorb(self.average, self.numbers, weight)

    def input_rows(self, b: int, rows: Rows, count: int) -> bool:
        return self._absorbed(b, self.average.right, rows, count)

    def output_rows(self, b: int, rows: Rows, count: int) -> bool:
        return self._absorbed(b, self.average.left, rows, count)

    def _absorbed(self, b: int, factors: Sequence[Tensor], rows: Rows, count: int) -> bool:
        """On a processor, and where nothing can overflow; what was not seen before has nothing to be added to."""
        number = self.numbers[b]
        factor = factors[number]
        alike = factor.ndim == 3 and factor.dtype == rows.x.dtype
        if factor.device.type == "cuda" or not alike or not self.average.saw(number) or not rows.bounded:
            return False
        rows.absorb(factor[0], 1 - self.weight, self.weight / max(count, 1))
        return True

    def inputs(self, b: int, moment: Moment) -> None:
        if isinstance(moment.count, Tensor):
            moment = Moment(mean(moment), 1)
        assert not isinstance(moment.count, Tensor)
        self._put(b, self.average.right[self.numbers[b]], moment.total, moment.count)

    def outputs(self, b: int, total: Tensor, count: int) -> None:
        self._put(b, self.average.left[self.numbers[b]], total, count)

    @cached_property
    def _most(self) -> int:
        """Bytes that may wait."""
        return max(_HELD, sum(factor.nbytes for factor in (*self.average.left, *self.average.right)) // _PART)

    def _put(self, b: int, factor: Tensor, total: Tensor, count: int) -> None:
        number, count = self.numbers[b], max(count, 1)
        assert factor.shape == total.shape
        known = self.average.saw(number)
        if factor.device.type == "cuda":
            self._held.append(Held.of(factor, total, self._weight if known else 1.0, count))
            self._bytes += total.numel() * total.element_size()
            if self._bytes > self._most:
                self.flush()
            return
        # Second moments are finite where their diagonals are.
        if not math.isfinite(float(trace(total).sum())):
            title = self.average.blocks[number].title
            raise NonFiniteError(
                f"the estimate of the metric of {title} holds NaN or infinity, and was not averaged: clean the batch, "
                "or lower the learning rate"
            )
        weight = float(self._weight) if known else 1.0
        factor.mul_(1 - weight).add_(total, alpha=weight / count)

    def flush(self) -> None:
        held, self._held, self._bytes = self._held, [], 0
        if held:
            absorb_together(held)


def laid_out(factor: Tensor) -> Tensor:
    """With rows that begin at whole vectors, as those of estimates: an average meets them without a copy."""
    if factor.ndim != 3 or factor.shape[0] != 1:
        return factor.contiguous()
    if factor.device.type != "cuda":
        return spaced(factor)
    if not factor.is_contiguous():
        return factor if _padded(factor) else factor.contiguous()
    wider = aligned(factor)
    return factor if wider is factor else wider[:, : factor.shape[1], : factor.shape[2]]


@final
@dataclass(frozen=True)
class Held:
    """A factor and what arrived of it, each as numbers in a row, and numbers that show whether that is finite."""

    factor: Tensor
    total: Tensor
    sign: Tensor | None  # the diagonal; None where all are to be looked at
    weight: Scalar
    count: int

    @staticmethod
    def of(factor: Tensor, total: Tensor, weight: Scalar, count: int) -> Held:
        """In the memory of the factor; what lies between the rows of a matrix may be anything."""
        diagonal = total.diagonal(dim1=-2, dim2=-1) if total.ndim == 3 else total
        if not _padded(factor):
            total = total.contiguous().view(-1)
            return Held(factor.view(-1), total, diagonal if len(total) >= _LARGE else None, weight, count)
        if total.stride()[1:] != factor.stride()[1:]:
            like = torch.empty_strided(factor.shape, factor.stride(), dtype=total.dtype, device=total.device)
            total = like.copy_(total)
        length = (factor.shape[1] - 1) * factor.stride(1) + factor.shape[2]
        return Held(factor.as_strided((length,), (1,)), total.as_strided((length,), (1,)), diagonal, weight, count)


def absorb_together(held: Sequence[Held]) -> None:
    """(1 − w) x + w y/count of all of them in few launches; nothing, if one of the y is not finite."""
    found = _not_finite(held)
    for key in dict.fromkeys((id(one.weight), one.count) for one in held):
        alike = [one for one in held if (id(one.weight), one.count) == key]
        for launch in _launches(alike):
            factors, totals = zip(*launch, strict=True)
            fused.average_(factors, totals, alike[0].weight, count=key[1], gate=found)


def _launches(held: Sequence[Held], most: int = _LAUNCH) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Factors and totals that are averaged at once: a large one in equal parts, as a small rest would take as long.

    >>> x = torch.zeros(22)
    >>> [[len(part) for part, _ in launch] for launch in _launches([Held(x, x, None, 1.0, 1)], most=16)]
    [[12], [10]]
    """
    small = [(one.factor, one.total) for one in held if len(one.factor) <= most]
    if small:
        yield small
    for one in held:
        if len(one.factor) > most:
            size = _divided(_divided(len(one.factor), _divided(len(one.factor), most)), _VECTOR) * _VECTOR
            yield from ([pair] for pair in zip(one.factor.split(size), one.total.split(size), strict=True))


def _divided(count: int, by: int) -> int:
    """Rounded up."""
    return -(-count // by)


def _padded(factor: Tensor) -> bool:
    """Whether a matrix [1 d d] has rows that are longer in memory."""
    return factor.ndim == 3 and factor.shape[0] == 1 and not factor.is_contiguous() and factor.stride(2) == 1


def _not_finite(held: Sequence[Held]) -> Tensor:
    """1 where one of the totals is not finite, on the device: second moments are finite where their diagonals are."""
    whole = [one.total for one in held if one.sign is None]
    found = fused.nonfinite(whole) if whole else torch.zeros((), device=held[0].total.device)
    signs = [one.sign.flatten() for one in held if one.sign is not None]
    # NaN and infinity times zero are NaN, and NaN is not zero.
    return torch.cat(signs).mul_(0).sum().add(found).ne(0).to(found.dtype) if signs else found


T = TypeVar("T")
EIGENVECTORS = 9  # times d³ operations, for eigenvalues and eigenvectors (Golub and Van Loan 2013, section 8.3)


@final
@dataclass(frozen=True)
class SidesCost:
    """What the two factors of a layer cost; d³/3 for a Cholesky factor and 2d³/3 for the inverse from it."""

    left: tuple[int, ...]  # the shape of S
    right: tuple[int, ...]  # the shape of A
    numbers: int  # of both: also the operations of a symmetric product, for every row
    rotations: int  # numbers of the eigenvectors
    cubes: int  # Σ d³ of the full factors
    solve: int  # operations of a product with both: a full factor takes 2d for every number of W, a diagonal one 1

    @staticmethod
    def of(block: Block, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> SidesCost:
        full_ones = [shape for shape in shapes if len(shape) == 3]
        return SidesCost(
            *shapes,
            numbers=sum(map(math.prod, shapes)),
            rotations=sum(map(math.prod, full_ones)),
            cubes=sum(c * d**3 for c, d, _ in full_ones),
            solve=sum(block.size * (2 * shape[1] if len(shape) == 3 else 1) for shape in shapes),
        )


@dataclass(frozen=True)
class Layered(Structure):
    """Two factors a layer, and another structure for the parameters that no layer rule covers."""

    sharing: Literal["expand", "reduce"] = "expand"
    fallback: Structure = field(default_factory=Diagonal)
    strict: bool = False
    largest: int = 16384

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.sharing not in ("expand", "reduce"):
            raise ValueError(f'{name}(sharing=…) is "expand" or "reduce", not {self.sharing!r}')
        check_slots(fallback=(self.fallback, Structure))
        if not self.fallback.bounded:
            raise ValueError(
                f"{name}(fallback={self.fallback!r}) cannot be averaged over time: use Diagonal() or BlockDense()"
            )
        if self.largest < 1:
            raise ValueError(f"{name}(largest=…) must be at least 1, got {self.largest}")

    @abstractmethod
    def layer_elements(self, block: Block) -> int:
        """How many numbers are kept of a layer."""

    @abstractmethod
    def product_cost(self, block: Block, *, exact: bool) -> Cost:
        """Of a layer that has a rule."""

    def layer_cost(self, block: Block, *, exact: bool, iterative: bool = False) -> Cost | None:
        if block.rule is None:
            return self.fallback.cost([block], iterative=iterative)
        return self.product_cost(block, exact=exact)

    def title(self, block: Block) -> str:
        if block.rule is not None:
            return type(self).__name__
        return "refused (strict=True)" if self.strict else f"{type(self.fallback).__name__} (fallback)"

    def uncovered(self) -> str | None:
        if self.strict:
            return f"strict=True refuses them in the first pass that uses them (strict=False: {self.fallback!r})"
        return f"{super().uncovered()}, and their metric is {self.fallback!r}"

    @property
    def covers_by_rule(self) -> bool:
        return True

    @property
    def bounded(self) -> bool:
        return True

    @property
    def one_pass(self) -> bool:
        return True

    def elements(self, pullback: Pullback) -> int:
        blocks, others = split(pullback, None)
        total = sum(map(self.layer_elements, blocks))
        return total + (self.fallback.elements(restricted(pullback, others)) if others else 0)

    def shapes(self, block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of S and A of a layer."""
        c, o, i = block.shape
        diagonal = block.sparse or i > self.largest
        return (c, o) if o > self.largest else (c, o, o), (c, i) if diagonal else (c, i, i)

    def parts(self, pullback: Pullback, like: Operator | None = None) -> Parts:
        """The layers that have a rule, and the pullback to the other parameters; refused is what does not fit.

        ``like``: what the estimate will be averaged with.
        """
        if like is None:  # else there is one of this size already
            self.admit(pullback)
        blocks, others = split(pullback, like)
        out = {name for block in pullback.seen.unused.values() for name in block.names}
        self.check([block for block in others if block.names[0] not in out], pullback.seen.displaced)
        unseen = frozenset(name for block in blocks for name in block.names if name in out)
        return Parts(tuple(blocks), unseen, restricted(pullback, others) if others else None)

    def zeros(self, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """S and A of a layer that a pass did not use."""
        s, a = (torch.zeros(shape, dtype=dtype, device=block.device) for shape in self.shapes(block))
        return s, a

    @property
    def rule_of_sharing(self) -> Sharing:
        """What to do with positions, as an object."""
        return Largest(Expand() if self.sharing == "expand" else Reduce(), self.largest)

    def check(self, others: Sequence[Block], displaced: Collection[str] = ()) -> None:
        """With ``strict``, refuse parameters that no rule covers, or cannot, with examples ``displaced``."""
        if self.strict and others:
            names = ", ".join(name for block in others for name in block.names)
            if displaced:
                raise UncoveredError(
                    f"no layer rule can be used for {', '.join(sorted(displaced))}, and strict=True: behind it the "
                    "outputs of one example depend on the others, as in z @ z.T or F.batch_norm(…, training=True), or "
                    "the examples are not on one axis, in order, or its outputs are not used. Keep the examples apart, "
                    f"or let {names} fall back to {self.fallback!r} with strict=False"
                )
            raise UncoveredError(
                f"no layer rule covers {names}, and strict=True. Pass rules=[…] with a rule for their module, use the "
                f"module's own forward, or let them fall back to {self.fallback!r} with strict=False"
            )

    def restored(
        self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]
    ) -> tuple[Parts, Operator | None]:
        """The layers that have a product among these tensors, and the operator over the other parameters."""
        for block in blocks:
            self._check_factors(block, tensors)
        blocks = [piece for block in blocks for piece in _as_before(model, block, tensors)]
        hidden = [block for block in blocks if f"{block.names[0]}/{UNSEEN}" in tensors]
        kept = [block for block in blocks if f"{block.names[0]}/S" in tensors or block in hidden]
        parts = Parts(tuple(kept), frozenset(name for block in hidden for name in block.names))
        rest = {key.removeprefix(FALLBACK): t for key, t in tensors.items() if key.startswith(FALLBACK)}
        names = {name for block in kept for name in block.names}
        if not rest:
            missing = [name for name in model.params if name not in names]
            if missing:
                raise StateError(f"the factors of {', '.join(missing)} are missing in the metric of the state")
            return parts, None
        ruled = [block for block in blocks if block not in kept]
        params = {name: p for name, p in model.params.items() if name not in names}
        smaller = Model(model.function, params, model.output)
        return parts, self.fallback.restore(smaller, _placed(ruled, params), rest)

    def _check_factors(self, block: Block, tensors: Mapping[str, Tensor]) -> None:
        """S and A of a layer: both, and of its size, or of the size of parameters that are a layer by themselves."""
        whole = (block.size, 1, 1)
        for name, place in zip(block.names, block.places, strict=True):
            factors = {side: tensors[f"{name}/{side}"] for side in "SA" if f"{name}/{side}" in tensors}
            if not factors:
                continue
            for side in "SA":
                if side not in factors:
                    raise StateError(f"{name}/{side} of the metric is missing in the state")
            alone = (place.shape.numel(), 1, 1)
            choices: list[tuple[tuple[int, ...], tuple[int, ...]]] = [(alone, alone)]
            if name == block.names[0]:
                choices = [self.shapes(block), (whole, whole), (alone, alone)]
            if tuple(tuple(t.shape) for t in factors.values()) in choices:
                continue
            for (side, t), shape in zip(factors.items(), choices[0], strict=True):
                check_shape(f"{name}/{side} of the metric", t, shape)


@final
@dataclass(frozen=True)
class Kronecker(Layered):
    """G ≈ S ⊗ A on every layer, A = E[a aᵀ], S = E[g gᵀ] (003 (2.8), (4.5), (5.3); 004 (37)).

    ``sharing``: what becomes of positions that share a weight (pixels, tokens, time steps): "expand" takes them for
    independent examples, "reduce" sums over them first. ``fallback`` is the structure of the parameters that no layer
    rule covers; with ``strict`` there must be none. Of a factor with more than ``largest`` rows (a vocabulary) only the
    diagonal is kept. All of this is in ``opt.plan()``.

    Parameters of no layer that are only added to the examples, or multiplied with them (positions, a class token,
    LayerScale), are covered: every entry is a group of its own, so that they have the diagonal of G.

    An embedding that is also the weight of a linear head is one layer, W [V d], with one product for both uses, whose
    trace and partial traces are those of the sum of the two (``natgrad.pullback.layer``).

    In training mode the statistics of a batch normalisation and the masks of dropout are constants of the pass. The
    parameters that fall back need passes of their own: they are seen in evaluation mode then, and the log says so once.

    A layer that a forward pass does not use (an expert, a block that stochastic depth drops) is not in the estimate of
    that pass: the moving average of its factors goes on with the next pass that uses it. The correction of the average
    for its start counts all estimates, so that it is an approximation for such a layer.

    The products S ⊗ A are exact for one datum, for deep linear networks with squared loss, and wherever a and g are
    independent. Any metric on the outputs will do (003, theorem 3.6), also a sampled one.

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Kronecker().estimate(pb).dense()
    tensor([[1., 2., 1.],
            [2., 4., 2.],
            [1., 2., 1.]])
    """

    def layer_elements(self, block: Block) -> int:
        return sum(map(math.prod, self.shapes(block)))

    def product_cost(self, block: Block, *, exact: bool) -> Cost:
        """A product of inverses or, with exact damping, a scaling between two rotations."""
        sides = SidesCost.of(block, self.shapes(block))
        factors = {"S": sides.left, "A": sides.right}
        if not exact:
            return Cost(2 * sides.numbers, sides.cubes, sides.solve, sides.numbers, factors)
        numbers = sides.numbers + sides.rotations + block.size
        return Cost(numbers, EIGENVECTORS * sides.cubes, 2 * sides.solve, sides.numbers, factors)

    def estimate(self, pullback: Pullback) -> KroneckerOperator:
        return self.estimate_like(pullback, None)

    @without_autocast
    def estimate_like(self, pullback: Pullback, like: Operator | None) -> KroneckerOperator:
        """With every parameter in the layers, or in the fallback, as it is in ``like``."""
        parts, dtype = self.parts(pullback, like), pullback.y.dtype
        found = factors_of(pullback, parts.seen, self.rule_of_sharing)
        factors = parts.everywhere(found, lambda block: self.zeros(block, dtype))
        return KroneckerOperator(
            Layout(pullback.model.like, dtype),
            parts.blocks,
            tuple(laid_out(s) for s, _ in factors),
            tuple(laid_out(a) for _, a in factors),
            None if parts.others is None else self.fallback.estimate(parts.others),
            parts.unseen,
        )

    def absorbs(self, average: Operator) -> bool:
        return isinstance(average, KroneckerOperator)

    @without_autocast
    def absorb(self, pullback: Pullback, average: Operator, weight: float) -> KroneckerOperator:
        """SymFactor by factor, and in place; a layer that the pass did not use keeps its average."""
        assert isinstance(average, KroneckerOperator)
        parts = self.parts(pullback, average)
        rest = None if parts.others is None else self.fallback.estimate(parts.others).finite()
        average.same_layers(parts.blocks)
        numbers = {block.names: b for b, block in enumerate(average.blocks)}
        sink = Absorb(average, [numbers[block.names] for block in parts.seen], weight)
        stream(pullback, parts.seen, self.rule_of_sharing, sink)
        return average.absorbed(rest, weight, parts.unseen)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> KroneckerOperator:
        parts, rest = self.restored(model, blocks, tensors)
        dtype = dtype_of(parts, tensors, rest)
        found = [(tensors[f"{block.names[0]}/S"], tensors[f"{block.names[0]}/A"]) for block in parts.seen]
        factors = parts.everywhere(found, lambda block: self.zeros(block, dtype))
        left, right = tuple(laid_out(s) for s, _ in factors), tuple(laid_out(a) for _, a in factors)
        return KroneckerOperator(Layout.of(model.params, dtype), parts.blocks, left, right, rest, parts.unseen)


def dtype_of(parts: Parts, tensors: Mapping[str, Tensor], rest: Operator | None) -> torch.dtype:
    """The precision of a metric: that of its factors or, where no layer has a rule, of what is over the others."""
    if rest is not None and not parts.blocks:
        return rest.layout.dtype
    name = parts.blocks[0].names[0]
    return tensors[f"{name}/{UNSEEN if name in parts.unseen else 'S'}"].dtype


@final
@dataclass(frozen=True)
class Parts:
    """The layers that have a rule, the parameters of those that a pass did not use, and the pullback to the others."""

    blocks: tuple[Block, ...]
    unseen: frozenset[str]
    others: Pullback | None = None

    @property
    def seen(self) -> list[Block]:
        """The layers that the pass used."""
        return [block for block in self.blocks if block.names[0] not in self.unseen]

    def of_seen(self, of_all: Iterable[T]) -> list[T]:
        """What belongs to the layers that are seen, out of what belongs to every layer."""
        return [t for block, t in zip(self.blocks, of_all, strict=True) if block.names[0] not in self.unseen]

    def everywhere(self, found: Iterable[T], nothing: Callable[[Block], T]) -> list[T]:
        """What was found of the layers that are seen, and ``nothing`` for each of the others, in the order of all."""
        supply = iter(found)
        return [nothing(block) if block.names[0] in self.unseen else next(supply) for block in self.blocks]


def split(pullback: Pullback, like: Operator | None) -> tuple[list[Block], list[Block]]:
    """The layers that have a rule, and the others.

    A layer that the pass did not use is what it is in ``like``, or where it is used. Parameters of no layer are then
    among the others, and stay there when they turn out to be spread over the examples: their diagonal is the same.
    """
    known = {block.names: block for block in like.blocks} if isinstance(like, LayerOperator) else {}
    below = like.rest.layout.like if isinstance(like, LayerOperator) and like.rest is not None else {}
    blocks: list[Block] = []
    others: list[Block] = []
    for layer in pullback.layers:
        pieces, fallen = [layer], any(name in below for name in layer.names)
        if layer.names[0] in pullback.seen.unused:
            own = known.get(layer.names, pullback.seen.unused[layer.names[0]])
            alone = {name for name in layer.names if (name,) in known}
            pieces = parted(pullback.model, layer, alone) if fallen or own.rule is None else [own]
        elif fallen and isinstance(layer.rule, SpreadRule):
            pieces = [layer.without_rule()]
        blocks += [piece for piece in pieces if piece.rule is not None]
        others += [piece for piece in pieces if piece.rule is None]
    return blocks, others


def _as_before(model: Model, block: Block, tensors: Mapping[str, Tensor]) -> list[Block]:
    """A block, or the pieces of it, that had these factors."""
    named = {name for name in block.names if f"{name}/S" in tensors}
    if block.names[0] in named:
        s, a = (tensors[f"{block.names[0]}/{side}"] for side in "SA")
        if s.shape[0] * s.shape[1] * a.shape[-1] == block.size:  # of all parameters, with the rule or a number each
            ruled = block.rule is not None and not s.shape[0] == block.size != block.shape[0]
            return [block if ruled else as_spread(model, block)]
    return parted(model, block, named)


def restricted(pullback: Pullback, blocks: Sequence[Block]) -> Pullback:
    """The same pullback, to some of the parameters only, and without rules."""
    names = {name for block in blocks for name in block.names}
    params = {name: p for name, p in pullback.model.params.items() if name in names}
    model = Model(pullback.model.function, params, pullback.model.output)
    seen = replace(pullback.seen, layers=_placed(blocks, params))
    return replace(pullback, batch=replace(pullback.batch, model=model), seen=seen)


def _placed(blocks: Sequence[Block], params: Mapping[str, Tensor]) -> list[Block]:
    """The blocks without their rules, at their places among these parameters."""
    starts, at = {}, 0
    for name, p in params.items():
        starts[name] = at
        at += p.numel()
    out = []
    for block in (block.without_rule() for block in blocks):
        places = (replace(place, start=starts[name]) for name, place in zip(block.names, block.places, strict=True))
        out.append(replace(block, places=tuple(places)))
    return out
