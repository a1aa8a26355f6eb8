"""Inverses of Kronecker-factored metrics: a product of inverses, or a scaling in the basis of the eigenvectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from natgrad.linalg import refuse_indefinite
from natgrad.operators.base import Inverse, Layout
from natgrad.operators.basis import Rotation, rotated, rotated_back
from natgrad.operators.factor import (
    Factor,
    aligned,
    full,
    mean_diagonal,
    refuse_singular_factor,
    stacked,
    two_sided,
    two_sided_columns,
)
from natgrad.operators.inverting import Task
from natgrad.operators.layer_inverse import LayerInverse
from natgrad.operators.newton import Newton
from natgrad.operators.remade import Chosen, Remade, Sides
from natgrad.operators.subset import Subset
from natgrad.pullback.blocks import Block
from natgrad.pullback.recorded import Weight

if TYPE_CHECKING:
    from natgrad.operators.kronecker import KroneckerOperator


@final
@dataclass(frozen=True)
class ProductInverse(LayerInverse):
    """v = S⁻¹ W A⁻¹ (003 (2.10), 004 (38))."""

    layout: Layout
    blocks: tuple[Block, ...]
    rest: Inverse | None
    others: Subset | None
    stacks: tuple[tuple[Factor, Factor], ...]  # of every group of layers, S⁻¹ [b·c o o] and A⁻¹ [b·c i i]
    kinds: tuple[tuple[bool, bool], ...]  # of every layer, whether its factors are full
    remade: Remade = field(default_factory=Remade)

    @staticmethod
    def of(
        G: KroneckerOperator, rest: Inverse | None, left: Sequence[Factor], right: Sequence[Factor]
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
        G: KroneckerOperator, rest: Inverse | None, left: Sequence[Factor], right: Sequence[Factor]
    ) -> ProductInverse:
        kinds = tuple((full(s), full(a)) for s, a in zip(left, right, strict=True))
        return ProductInverse(G.layout, G.blocks, rest, G.others, (), kinds)

    def begin(self, left: Sequence[Factor], right: Sequence[Factor]) -> None:
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

    def tasks(self, sides: Sides, damping: Weight, chosen: Chosen = lambda _: True) -> list[Task]:
        """What is to be inverted of the ``chosen`` factors, with factored damping, and where it goes."""
        out: list[Task] = []
        for group, stacks in zip(self.groups, self.stacks, strict=True):
            own = [[side[b] for b in group] for side in sides]
            wanted = [chosen(side[0]) for side in own]
            if not any(wanted):
                continue
            shifts = _shifts(own[0], own[1], damping)
            for at in (at for at in range(2) if wanted[at]):
                titles = [f"the factor {'SA'[at]} of {self.blocks[b].title}" for b in group]
                out.append(Task(own[at], shifts[at], _cut(stacks[at], own[at][0].shape[-1]), titles))
        return out

    def remake(self, G: KroneckerOperator, damping: float, newton: Newton | None) -> None:
        """From G, in the place of the inverse that is there."""
        places = tuple(t.data_ptr() for stack in self.stacks for t in stack)
        self.remade.again(self.tasks, (G.left, G.right), damping, newton, places)

    def mend(self, G: KroneckerOperator, damping: float) -> None:
        """From G once more, after it has ``failed``: in double precision, where single is not enough."""
        self.remade.mend(self.tasks((G.left, G.right), damping))

    def failed(self) -> bool:
        return any(float(failure) > 0 for failure in self.remade.failures)

    def inherit(self, other: Inverse) -> None:
        self.remade.failures = list(other.remade.failures) if isinstance(other, ProductInverse) else []

    def forgive(self) -> None:
        self.remade.failures = []

    def overwritten(self, new: Inverse) -> Inverse:
        kept = super().overwritten(new)
        if kept is self is not new:
            self.inherit(new)
        return kept

    def alike(self, b: int) -> object:
        return self.kinds[b]

    def apply(self, group: tuple[int, ...], first: int, w: Tensor, spent: bool) -> Tensor:
        at = first * self.blocks[group[0]].shape[0]
        left, right = (side[at : at + len(w)] for side in self.stacks[self.groups.index(group)])
        return two_sided(left, w, right, w if spent else None)

    def by_columns(self, group: tuple[int, ...]) -> bool:
        return self.kinds[group[0]] == (True, True) and self.stacks[0][0].device.type == "cuda"

    def apply_columns(self, group: tuple[int, ...], first: int, parts: list[Tensor]) -> list[Tensor]:
        at = first * self.blocks[group[0]].shape[0]
        left, right = (side[at : at + len(parts[0])] for side in self.stacks[self.groups.index(group)])
        return two_sided_columns(left, parts, right)

    def tensors(self) -> dict[str, Tensor]:
        out = self.below()
        for group, (left, right) in zip(self.groups, self.stacks, strict=True):
            c, o, i = self.blocks[group[0]].shape
            left, right = _cut(left, o), _cut(right, i)
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
            whole = factor if full(factor) else torch.diag_embed(factor)
            refuse_singular_factor(whole, f"the factor {side} of {block.title}")
    out = ProductInverse.empty(G, rest)
    out.remade.first(out.tasks((G.left, G.right), 0.0))
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
            out.remade.first(out.tasks((G.left, G.right), damping))
            return out
        out.begin(*last)
    out.remake(G, damping, newton if newton is not None and newton.trusted() else None)
    return out


def _shifts(s: Sequence[Factor], a: Sequence[Factor], damping: Weight) -> tuple[list[Tensor], list[Tensor]]:
    """√λ/π and √λ π [c] of every layer."""
    π, counts = balance(a, s), [factor.shape[0] for factor in s]
    return list((damping**0.5 / π).split(counts)), list((damping**0.5 * π).split(counts))


def balance(a: Sequence[Factor], s: Sequence[Factor]) -> Tensor:
    """π of every group of every layer, one after the other."""
    means = [torch.cat([mean_diagonal(factor) for factor in side]) for side in (a, s)]
    ratio = means[0] / means[1]
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0).sqrt()


def _memory(factor: Factor, group: Sequence[int]) -> Factor:
    """For factors like this one of every layer of a group; what aligns them is zero."""
    shape = (len(group) * factor.shape[0], *factor.shape[1:])
    like = aligned(factor[:1])
    if like.shape[-1] == factor.shape[-1]:
        return torch.empty(shape, dtype=factor.dtype, device=factor.device)
    return like.new_zeros(shape[0], *like.shape[1:])


def _cut(factor: Factor, size: int) -> Factor:
    """Without the zeros of an aligned factor, a view."""
    return factor[..., :size, :size] if full(factor) else factor
