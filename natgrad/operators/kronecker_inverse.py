"""Inverses of Kronecker-factored metrics: a product of inverses, or a scaling in the basis of the eigenvectors."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from natgrad.errors import SingularMetricError
from natgrad.geometry import Covector, Vector
from natgrad.linalg import refuse_indefinite
from natgrad.operators.base import Inverse, Layout
from natgrad.operators.basis import Rotation, rotated, rotated_back
from natgrad.operators.factor import (
    Factor,
    aligned,
    by_size,
    full,
    inverse,
    mean_diagonal,
    refuse_singular_factor,
    two_sided,
)
from natgrad.operators.newton import Newton
from natgrad.operators.subset import REST, Subset
from natgrad.pullback.blocks import Block

if TYPE_CHECKING:
    from natgrad.operators.kronecker import KroneckerOperator


class LayerInverse(Inverse):
    """An inverse that works layer by layer, on W [c o i]; the parameters in no layer have one of their own."""

    layout: Layout
    blocks: tuple[Block, ...]
    rest: Inverse | None
    others: Subset | None

    @abstractmethod
    def apply(self, group: tuple[int, ...], w: Tensor) -> Tensor:
        """The solution for layers of the same shape, stacked as w [b·c o i]."""

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
        torch._foreach_copy_(list(mine.values()), [its[key] for key in mine])
        return self

    def __copy__(self) -> LayerInverse:
        return self  # it remembers nothing

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that are solved at once."""
        found: dict[object, list[int]] = defaultdict(list)
        for b, block in enumerate(self.blocks):
            found[block.shape, self.alike(b)].append(b)
        return tuple(tuple(group) for group in found.values())

    def solve(self, ω: Tensor) -> Tensor:
        v = torch.empty_like(ω)
        for block, w in zip(self.blocks, self._solved([block.pack(ω) for block in self.blocks]), strict=True):
            block.unpack(w, v)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.solve(self.others.take(ω)), v)
        return v

    def sharp(self, ω: Covector) -> Vector:
        """As ``solve``, without flattening: a step has this many launches, and no more."""
        packed = [block.packed(ω).to(self.layout.dtype) for block in self.blocks]
        found: dict[str, Tensor] = {}
        for block, w in zip(self.blocks, self._solved(packed), strict=True):
            found.update(block.unpacked(w))
        if self.rest is not None and self.others is not None:
            found.update(self.rest.sharp(Covector(self.others.named(ω))).items())
        return Vector({name: _as(found[name], like) for name, like in self.layout.like.items()})

    def _solved(self, packed: Sequence[Tensor]) -> list[Tensor]:
        out: list[Tensor] = list(packed)
        for group in self.groups:
            w = packed[group[0]] if len(group) == 1 else torch.cat([packed[b] for b in group])
            parts = self.apply(group, w).split(self.blocks[group[0]].shape[0])
            for b, part in zip(group, parts, strict=True):
                out[b] = part
        return out


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

    @staticmethod
    def of(
        G: KroneckerOperator, rest: Inverse | None, left: Sequence[Factor], right: Sequence[Factor]
    ) -> ProductInverse:
        """From S⁻¹ and A⁻¹ of every layer."""
        kinds = tuple((full(s), full(a)) for s, a in zip(left, right, strict=True))
        empty = ProductInverse(G.layout, G.blocks, rest, G.others, (), kinds)
        stacks = tuple(
            (aligned(_cat([left[b] for b in group])), aligned(_cat([right[b] for b in group])))
            for group in empty.groups
        )
        return replace(empty, stacks=stacks)

    def alike(self, b: int) -> object:
        return self.kinds[b]

    def apply(self, group: tuple[int, ...], w: Tensor) -> Tensor:
        left, right = self.stacks[self.groups.index(group)]
        return two_sided(left, w, right)

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

    def apply(self, group: tuple[int, ...], w: Tensor) -> Tensor:
        (b,) = group
        q, p = self.left[b], self.right[b]
        return rotated_back(q, self.scales[b] * rotated(q, w, p), p)

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

    def one(factors: Sequence[Factor], side: str) -> list[Factor]:
        for block, factor in zip(G.blocks, factors, strict=True):
            whole = factor if full(factor) else torch.diag_embed(factor)
            refuse_singular_factor(whole, f"the factor {side} of {block.title}")
        return _inverted(factors, [0.0] * len(factors))

    left, right = one(G.left, "S"), one(G.right, "A")
    return ProductInverse.of(G, rest, left, right)


def factored(
    G: KroneckerOperator,
    rest: Inverse | None,
    damping: float,
    last: tuple[list[Tensor], list[Tensor]] | None,
    newton: Newton | None = None,
) -> ProductInverse:
    """(S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹ with π² = (tr A/dim A)/(tr S/dim S) (Martens and Grosse 2015, section 6.3).

    Where a factor is zero (a layer with no gradient) π is 1. A factor that Cholesky cannot invert keeps the ``last``
    inverse; without one it raises. With ``newton`` the last inverse is refreshed where that is near enough.
    """
    if damping == 0 or not G.blocks:
        return undamped(G, rest)
    π = balance(G.right, G.left)
    counts, root = [factor.shape[0] for factor in G.left], damping**0.5
    shifts = [*(root / π).split(counts), *(root * π).split(counts)]
    before = None if last is None else [*last[0], *last[1]]
    inverses = _inverted([*G.left, *G.right], shifts, before, newton if newton and newton.trusted() else None)
    half = len(G.left)
    return ProductInverse.of(G, rest, inverses[:half], inverses[half:])


def balance(a: Sequence[Factor], s: Sequence[Factor]) -> Tensor:
    """π of every group of every layer, one after the other."""
    means = [torch.cat([mean_diagonal(factor) for factor in side]) for side in (a, s)]
    ratio = means[0] / means[1]
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0).sqrt()


def _inverted(
    factors: Sequence[Factor],
    shifts: Sequence[Tensor | float],
    last: Sequence[Factor] | None = None,
    newton: Newton | None = None,
) -> list[Factor]:
    """(F + shift)⁻¹ of every factor, those of the same size at once."""
    out: list[Factor] = [
        factor if full(factor) else (factor + _column(shift, factor)).reciprocal()
        for factor, shift in zip(factors, shifts, strict=True)
    ]
    which = [at for at, factor in enumerate(factors) if full(factor)]

    def invert(stack: Tensor, group: list[int]) -> list[Tensor]:
        at = [which[g] for g in group]
        damped = stack.clone()
        amounts = [_column(shifts[i], factors[i]).expand(factors[i].shape[0], 1) for i in at]
        damped.diagonal(dim1=-2, dim2=-1).add_(torch.cat(amounts))
        before = None if last is None else torch.cat([last[i] for i in at])
        if newton is not None and before is not None and stack.shape[-1] >= newton.smallest:
            return [newton.inverse(damped, before)]
        inverted, good = inverse(damped)
        if before is not None:
            return [torch.where(good[:, None, None], inverted, before)]
        if stack.device.type == "cpu" and not bool(good.all()):
            raise SingularMetricError(
                f"a factor of size {stack.shape[-1]} of the metric is not positive after damping: raise the damping"
            )
        return [inverted]

    for at, found in zip(which, by_size([factors[at] for at in which], invert), strict=True):
        out[at] = found
    return out


def _column(shift: Tensor | float, factor: Factor) -> Tensor:
    """[c 1]."""
    if isinstance(shift, Tensor):
        return shift.unsqueeze(-1)
    return torch.full((factor.shape[0], 1), shift, dtype=factor.dtype, device=factor.device)


def _cat(factors: Sequence[Factor]) -> Factor:
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))


def _cut(factor: Factor, size: int) -> Factor:
    """Without the zeros of an aligned factor, a view."""
    return factor[..., :size, :size] if full(factor) else factor


def _as(t: Tensor, like: Tensor) -> Tensor:
    """t in the precision and the memory format of a parameter: kernels over many tensors want them alike."""
    if t.dtype == like.dtype and t.stride() == like.stride():
        return t
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=t.device).copy_(t)
