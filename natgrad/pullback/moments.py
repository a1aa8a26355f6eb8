"""The two factors of every layer: second moments of its inputs a and of its cotangents g, without per-example rows.

    expand:  A = Σ_nr a aᵀ / (N·R),       S = Σ_kn Σ_r g gᵀ / N            (003 (4.5), (5.3); ERRATA 48)
    reduce:  A = Σ_n ā āᵀ / N, ā = mean_r a,   S = Σ_kn ĝ ĝᵀ / N, ĝ = Σ_r g    (Eschenhagen et al. 2023)

Both are exact for one position, R = 1, up to the independence of a and g. Masked positions count neither in the sum
nor in N·R. A coupling C of the examples enters both sums as Σ_nm C_nm; the scale of the product is then matched by
traces, relative to C = 1 (ERRATA 8).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.factors import Factors
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Moment, Replayed, single


@final
@dataclass
class Pair:
    """Sums over chunks: S [c o o] (or [c o]), and A [c i i] (or [c i]) with its number of positions."""

    s: Tensor | None = None
    a: Tensor | None = None
    count: int | Tensor = 0

    def add_inputs(self, moment: Moment) -> None:
        self.a = moment.total if self.a is None else self.a + moment.total
        self.count = self.count + moment.count

    def add_outputs(self, s: Tensor) -> None:
        self.s = s if self.s is None else self.s.add_(s)

    def factors(self) -> tuple[Tensor, Tensor]:
        """S and A."""
        assert self.s is not None
        assert self.a is not None
        count = self.count
        if isinstance(count, Tensor):
            count = count.clamp(min=1).view(-1, *[1] * (self.a.ndim - 1)).to(self.a.dtype)
        return self.s, self.a / count


class Sharing(ABC):
    """What becomes of the positions r of an example that share a weight."""

    @abstractmethod
    def inputs(self, tape: Tape, block: Block) -> Moment:
        """Σ a aᵀ over all uses of a block."""

    @abstractmethod
    def outputs(self, tape: Tape, block: Block, g: _Cotangents) -> Tensor:
        """Σ g gᵀ over all uses of a block."""


@final
@dataclass(frozen=True)
class _Cotangents:
    """Of every use, by its position: of its outputs, and of the layers inside where it was replayed."""

    outer: Mapping[int, tuple[Tensor, ...]]
    inner: Mapping[int, Mapping[str, Tensor]]


@final
class Expand(Sharing):
    """Positions count as if they were independent examples."""

    def inputs(self, tape: Tape, block: Block) -> Moment:
        pair = Pair()
        for use in tape.of(block):
            if isinstance(use.rule, Replayed):
                pair.add_inputs(use.replay.layer(block.keys).moment)
            else:
                pair.add_inputs(use.rule.input_moment(use.module, block.keys, use.call))
        assert pair.a is not None
        return Moment(pair.a, pair.count)

    def outputs(self, tape: Tape, block: Block, g: _Cotangents) -> Tensor:
        pair = Pair()
        for at, use in enumerate(tape.uses):
            if use.module in block.modules:
                if isinstance(use.rule, Replayed):
                    pair.add_outputs(Moment.of(single(g.inner[at][block.keys[0]].flatten(0, 1))).total)
                else:
                    pair.add_outputs(use.rule.output_moment(use.module, block.keys, g.outer[at][0]))
        assert pair.s is not None
        return pair.s


@final
class Reduce(Sharing):
    """The mean of the inputs and the sum of the cotangents over the positions."""

    def inputs(self, tape: Tape, block: Block) -> Moment:
        means = [
            use.replay.layer(block.keys).mean
            if isinstance(use.rule, Replayed)
            else use.rule.input_mean(use.module, block.keys, use.call)
            for use in tape.of(block)
        ]
        mean = means[0] if len(means) == 1 else torch.stack(means).mean(0)
        return Moment.of(mean.unsqueeze(1))

    def outputs(self, tape: Tape, block: Block, g: _Cotangents) -> Tensor:
        parts = [
            tape.canonical(at, block.keys, g.outer, g.inner).sum(2)
            for at, use in enumerate(tape.uses)
            if use.module in block.modules
        ]
        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        return Moment.of(single(total.flatten(0, 1).unsqueeze(1))).total


@final
@dataclass(frozen=True)
class Largest(Sharing):
    """Another sharing; of a factor with more than ``size`` rows only the diagonal is kept, and formed."""

    sharing: Sharing
    size: int

    def inputs(self, tape: Tape, block: Block) -> Moment:
        moment = None if block.shape[2] > self.size and _dense(tape, block) else self.sharing.inputs(tape, block)
        if moment is None:
            a = single(tape.inputs(block))
            return Moment(a.square().sum((0, 1)), a.shape[0] * a.shape[1])
        if block.shape[2] > self.size and moment.total.ndim == 3:
            return Moment(moment.total.diagonal(dim1=-2, dim2=-1).clone(), moment.count)
        return moment

    def outputs(self, tape: Tape, block: Block, g: _Cotangents) -> Tensor:
        if block.shape[1] <= self.size:
            return self.sharing.outputs(tape, block, g)
        parts = [
            single(tape.canonical(at, block.keys, g.outer, g.inner)).square().sum((0, 1, 2))
            for at, use in enumerate(tape.uses)
            if use.module in block.modules
        ]
        return torch.stack(parts).sum(0)


def _dense(tape: Tape, block: Block) -> bool:
    """Whether the moment of the inputs would be a full matrix; an embedding's is not."""
    assert block.rule is not None
    return not block.rule.sparse


def second_moments(pb: Pullback, layers: Sequence[Block], sharing: Sharing) -> list[tuple[Tensor, Tensor]]:
    """S and A of every layer in ``layers``, which have rules."""
    if pb.coupling is not None:
        return _coupled(pb, layers, pb.coupling)
    pairs = [Pair() for _ in layers]
    for part in pb.ranges():
        tape = pb.tape(part)
        for s in pb.roots.at(part).split(_columns(pb, tape)):
            outer = tape.outer(s / math.sqrt(pb.n))
            inner = {at: tape.inner(at, g) for at, g in outer.items() if isinstance(tape.uses[at].rule, Replayed)}
            g = _Cotangents(outer, inner)
            for pair, block in zip(pairs, layers, strict=True):
                pair.add_outputs(sharing.outputs(tape, block, g).to(pb.y.dtype))
        for pair, block in zip(pairs, layers, strict=True):
            moment = sharing.inputs(tape, block)
            pair.add_inputs(Moment(moment.total.to(pb.y.dtype), moment.count))
    return [pair.factors() for pair in pairs]


def _columns(pb: Pullback, tape: Tape) -> int:
    """How many roots k at a time."""
    cost = sum(shape.numel() for use in tape.uses for shape in use.shapes)
    return max(1, pb.chunk // max(cost, 1))


def _coupled(pb: Pullback, layers: Sequence[Block], coupling: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A = Σ C_nm a_n a_mᵀ/(N R) and S = Σ C_nm g_n g_mᵀ/N, times the trace of G over that of their product.

    The last factor is taken relative to C = 1, where it is that of K-FAC itself (000 (24)–(25), ERRATA 8).
    """
    tape = pb.tape((0, pb.n))
    found = []
    cotangents = tape.cotangents(pb.root / math.sqrt(pb.n), layers)
    one = torch.eye(pb.n, dtype=coupling.dtype, device=coupling.device)
    for block, g in zip(layers, cotangents, strict=True):
        f = Factors(tape.inputs(block).to(pb.y.dtype), g.to(pb.y.dtype))
        (s, a), (s1, a1) = (_mixed(f, C) for C in (coupling, one))
        rows = f.rows().unflatten(-1, block.shape).flatten(3)  # [k n c (o i)]
        gram = torch.einsum("kncp,kmcp->cnm", rows, rows)
        κ = _trace_ratio(gram, coupling, s, a) / _trace_ratio(gram, one, s1, a1)
        found.append((κ.nan_to_num(nan=1.0)[:, None, None] * s, a))
    return found


def _mixed(f: Factors, C: Tensor) -> tuple[Tensor, Tensor]:
    n, r = f.a.shape[:2]
    s = torch.einsum("knrco,nm,kmrcp->cop", f.g, C, f.g)
    return s, torch.einsum("nrci,nm,mrcj->cij", f.a, C, f.a) / (n * r)


def _trace_ratio(gram: Tensor, C: Tensor, s: Tensor, a: Tensor) -> Tensor:
    """tr G / (tr S tr A), of every group [c]."""
    traces = [t.diagonal(dim1=-2, dim2=-1).sum(-1) for t in (s, a)]
    return torch.einsum("cnm,nm->c", gram, C) / (traces[0] * traces[1])
