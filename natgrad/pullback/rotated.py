"""Second moments of per-example gradients in a basis of every layer: D = Σ_kn (Qᵀ R_kn P)² (George et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.factors import Factors, Squares
from natgrad.pullback.moments import Watcher, passes
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.sharing import Cotangents
from natgrad.pullback.tape import Tape
from natgrad.pullback.tied import Tied
from natgrad.rules.base import OneHot

Sides: TypeAlias = tuple[Tensor | None, Tensor | None]  # Q [c o o] and P [c i i] of a layer; None for the axes
_ROWS = 2**24  # numbers, of explicit rows at a time


@final
class RotatedSquares(Watcher):
    """D [c o i] of every layer, summed over chunks of examples and roots.

    With one position D is (g Q)²ᵀ(a P)², and no row is formed. With several the rows Σ_r g aᵀ come first, a chunk at a
    time; whether they are rotated, or g and a before, is decided by what is less work. One-hot inputs are not formed.
    The rows of a tied weight are the sum of those of its kinds, and rotated.
    """

    def __init__(self, layers: Sequence[Block], sides: Sequence[Sides], dtype: torch.dtype) -> None:
        self._layers, self._sides, self._dtype = list(layers), list(sides), dtype
        self._sums = [Squares() for _ in layers]
        self._tape: Tape | None = None
        self._inputs: dict[int, Tensor] = {}  # of the tape, rotated: where there is one position they are few numbers

    def add(self, tape: Tape, g: Cotangents) -> None:
        if tape is not self._tape:
            self._tape = tape
            self._inputs.clear()
        for b, block in enumerate(self._layers):
            if block.facets:
                pairs = [(tape.inputs(kind), g.whole(tape, kind)) for kind in block.kinds]
                self._add_tied(b, Tied.of(block, pairs, self._dtype))
                continue
            cotangents = g.whole(tape, block).to(self._dtype)
            if isinstance(block.rule, OneHot):
                self._sums[b].accumulate(_of_places(tape, block, _turned(cotangents, self._sides[b][0])))
                continue
            if b in self._inputs:
                self._add_plain(b, cotangents)
                continue
            f = Factors(tape.inputs(block).to(self._dtype), cotangents)
            if f.a.shape[1] == 1:
                self._inputs[b] = _turned(f.a, self._sides[b][1])
                self._add_plain(b, cotangents)
            else:
                self._add_shared(b, f)

    def totals(self) -> list[Tensor]:
        """D of every layer."""
        return [total.total().contiguous() for total in self._sums]

    def _add_plain(self, b: int, g: Tensor) -> None:
        self._sums[b].add(Factors(self._inputs[b], _turned(g, self._sides[b][0])))

    def _add_shared(self, b: int, f: Factors) -> None:
        q, p = self._sides[b]
        k, _, r, c, o = f.g.shape
        i = f.a.shape[3]
        positions = r * (k * o * o * (q is not None) + i * i * (p is not None))
        rows = k * o * i * (o * (q is not None) + i * (p is not None))
        if positions <= rows:
            self._sums[b].add(Factors(_turned(f.a, p), _turned(f.g, q)))
            return
        step = max(1, _ROWS // (k * c * o * i))
        for a, g in zip(f.a.split(step), f.g.split(step, dim=1), strict=True):
            self._sums[b].accumulate(_squares(Factors(a, g).rows().unflatten(-1, (c, o, i)), q, p))

    def _add_tied(self, b: int, tied: Tied) -> None:
        q, p = self._sides[b]
        for rows in tied.rows(_ROWS):
            self._sums[b].accumulate(_squares(rows, q, p))


def rotated_squares(pb: Pullback, layers: Sequence[Block], sides: Sequence[Sides]) -> list[Tensor]:
    """D [c o i] of every layer in ``layers``, which have rules: the diagonal of G in the basis of its sides."""
    if not layers:
        return []
    if pb.coupling is not None:
        return _coupled(pb, layers, sides)
    squares = RotatedSquares(layers, sides, pb.y.dtype)
    for tape, chunks in passes(pb):
        for g in chunks:
            squares.add(tape, g)
    return squares.totals()


def _coupled(pb: Pullback, layers: Sequence[Block], sides: Sequence[Sides]) -> list[Tensor]:
    """The rows of a coupled metric come mixed, and in flattening order."""
    totals = [Squares() for _ in layers]
    orders = [block.index.argsort().argsort() for block in layers]
    for factors in replace(pb, seen=replace(pb.seen, layers=list(layers))).factors():
        for total, f, block, order, (q, p) in zip(totals, factors, layers, orders, sides, strict=True):
            total.accumulate(_squares(f.rows()[..., order].unflatten(-1, block.shape), q, p))
    return [total.total() for total in totals]


def _of_places(tape: Tape, block: Block, g: Tensor) -> Tensor:
    """Σ_kn (Σ_r g aᵀ)² [1 o i] for one-hot a: at every place r its g times the sum of those at the same word."""
    rule = block.rule
    assert isinstance(rule, OneHot)
    found = [rule.places(use.module, block.keys, use.call) for use in tape.of(block)]
    words, values = (torch.cat(side, dim=1) for side in zip(*found, strict=True))
    g = g.squeeze(3) * values.to(g.dtype).unsqueeze(-1)  # [k n r o]
    total = g.new_zeros(block.shape[2], block.shape[1])
    step = max(1, _ROWS // words.shape[1] ** 2)  # examples, whose pairs of places are formed
    for at, part in zip(words.split(step), g.split(step, dim=1), strict=True):
        same = (at.unsqueeze(-1) == at.unsqueeze(-2)).to(g.dtype)
        total.index_add_(0, at.flatten(), (part * (same @ part)).sum(0).flatten(0, 1))
    return total.T.unsqueeze(0).clamp(min=0)  # a square; below zero it is rounding


def _turned(x: Tensor, basis: Tensor | None) -> Tensor:
    """x [*lead c d] in the coordinates of a basis [c d d]."""
    if basis is None:
        return x
    return x @ basis[0] if basis.shape[0] == 1 else torch.einsum("...cd,cde->...ce", x, basis)


def _squares(rows: Tensor, q: Tensor | None, p: Tensor | None) -> Tensor:
    """Σ_kn (QᵀRP)² [c o i] of rows [k n c o i]."""
    rows = rows if q is None else q.mT @ rows
    return (rows if p is None else rows @ p).square().sum((0, 1))
