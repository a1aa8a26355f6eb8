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
from collections.abc import Iterator, Mapping, Sequence
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
    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        """Σ g gᵀ over all uses of a block."""

    @abstractmethod
    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        """The a [n r c i] and g [k n r c o] whose second moments these are."""


@final
@dataclass(frozen=True)
class Cotangents:
    """Of every use, by its position: of its outputs, and of the layers inside where it was replayed."""

    outer: Mapping[int, tuple[Tensor, ...]]
    inner: Mapping[int, Mapping[str, Tensor]]

    def of(self, tape: Tape, block: Block) -> list[Tensor]:
        """g [k n r c o] of every use of a block."""
        return [
            tape.canonical(at, block.keys, self.outer, self.inner)
            for at, use in enumerate(tape.uses)
            if use.module in block.modules
        ]

    def whole(self, tape: Tape, block: Block) -> Tensor:
        """The uses one after the other along r."""
        parts = self.of(tape, block)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


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

    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        pair = Pair()
        for at, use in enumerate(tape.uses):
            if use.module in block.modules:
                if isinstance(use.rule, Replayed):
                    pair.add_outputs(Moment.of(single(g.inner[at][block.keys[0]].flatten(0, 1))).total)
                else:
                    pair.add_outputs(use.rule.output_moment(use.module, block.keys, g.outer[at][0]))
        assert pair.s is not None
        return pair.s

    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        return Factors(tape.inputs(block), g.whole(tape, block))


@final
class Reduce(Sharing):
    """The mean of the inputs and the sum of the cotangents over the positions."""

    def inputs(self, tape: Tape, block: Block) -> Moment:
        return Moment.of(self._mean(tape, block))

    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        return Moment.of(single(self._total(tape, block, g).flatten(0, 1))).total

    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        return Factors(self._mean(tape, block), self._total(tape, block, g))

    def _mean(self, tape: Tape, block: Block) -> Tensor:
        """[n 1 c i]."""
        means = [
            use.replay.layer(block.keys).mean
            if isinstance(use.rule, Replayed)
            else use.rule.input_mean(use.module, block.keys, use.call)
            for use in tape.of(block)
        ]
        return (means[0] if len(means) == 1 else torch.stack(means).mean(0)).unsqueeze(1)

    def _total(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        """[k n 1 c o]."""
        parts = [part.sum(2, keepdim=True) for part in g.of(tape, block)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


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

    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        if block.shape[1] <= self.size:
            return self.sharing.outputs(tape, block, g)
        return torch.stack([single(part).square().sum((0, 1, 2)) for part in g.of(tape, block)]).sum(0)

    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        return self.sharing.explicit(tape, block, g)


def _dense(tape: Tape, block: Block) -> bool:
    """Whether the moment of the inputs would be a full matrix; an embedding's is not."""
    assert block.rule is not None
    return not block.rule.sparse


class Watcher(ABC):
    """Something else that is made of the same cotangents, in the same backward passes."""

    @abstractmethod
    def add(self, tape: Tape, g: Cotangents) -> None:
        """Another chunk of examples and roots."""


def passes(pb: Pullback) -> Iterator[tuple[Tape, Iterator[Cotangents]]]:
    """For every part of the batch its tape, and the cotangents s J/√N chunk by chunk over the roots."""
    for part in pb.ranges():
        tape = pb.tape(part)
        yield tape, (cotangents(tape, s / math.sqrt(pb.n)) for s in pb.roots.at(part).split(_columns(pb, tape)))


def cotangents(tape: Tape, s: Tensor) -> Cotangents:
    """Those of all uses, from s [k n *out]."""
    outer = tape.outer(s)
    inner = {at: tape.inner(at, g) for at, g in outer.items() if isinstance(tape.uses[at].rule, Replayed)}
    return Cotangents(outer, inner)


def second_moments(
    pb: Pullback, layers: Sequence[Block], sharing: Sharing, watcher: Watcher | None = None
) -> list[tuple[Tensor, Tensor]]:
    """S and A of every layer in ``layers``, which have rules. A ``watcher`` sees the cotangents too."""
    if pb.coupling is not None:
        return _coupled(pb, layers, sharing, pb.coupling)
    pairs = [Pair() for _ in layers]
    for tape, chunks in passes(pb):
        for g in chunks:
            for pair, block in zip(pairs, layers, strict=True):
                pair.add_outputs(sharing.outputs(tape, block, g).to(pb.y.dtype))
            if watcher is not None:
                watcher.add(tape, g)
        for pair, block in zip(pairs, layers, strict=True):
            moment = sharing.inputs(tape, block)
            pair.add_inputs(Moment(moment.total.to(pb.y.dtype), moment.count))
    return [pair.factors() for pair in pairs]


def _columns(pb: Pullback, tape: Tape) -> int:
    """How many roots k at a time."""
    cost = sum(shape.numel() for use in tape.uses for shape in use.shapes)
    return max(1, pb.chunk // max(cost, 1))


def _coupled(pb: Pullback, layers: Sequence[Block], sharing: Sharing, coupling: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A = Σ C_nm a_n a_mᵀ/(N R) and S = Σ C_nm g_n g_mᵀ/N, times the trace of G over that of their product.

    The last factor is taken relative to C = 1, where it is that of K-FAC itself (000 (24)–(25), ERRATA 8).
    """
    tape = pb.tape((0, pb.n))
    found = []
    g = cotangents(tape, pb.root / math.sqrt(pb.n))
    one = torch.eye(pb.n, dtype=coupling.dtype, device=coupling.device)
    for block in layers:
        rows = Factors(tape.inputs(block).to(pb.y.dtype), g.whole(tape, block).to(pb.y.dtype)).rows()
        rows = rows.unflatten(-1, block.shape).flatten(3)  # [k n c (o i)]
        gram = torch.einsum("kncp,kmcp->cnm", rows, rows)
        f = sharing.explicit(tape, block, g)
        f = Factors(f.a.to(pb.y.dtype), f.g.to(pb.y.dtype))
        plain = Pair()  # what it is at C = 1
        plain.add_outputs(sharing.outputs(tape, block, g).to(pb.y.dtype))
        moment = sharing.inputs(tape, block)
        plain.add_inputs(Moment(moment.total.to(pb.y.dtype), moment.count))
        (s, a), (s1, a1) = _mixed(f, coupling, plain).factors(), plain.factors()
        κ = _trace_ratio(gram, coupling, s, a) / _trace_ratio(gram, one, s1, a1)
        found.append((κ.nan_to_num(nan=1.0).view(-1, *[1] * (s.ndim - 1)) * s, a))
    return found


def _mixed(f: Factors, C: Tensor, plain: Pair) -> Pair:
    """Σ C_nm g_n g_mᵀ and Σ C_nm a_n a_mᵀ, of the form that the sums at C = 1 have, over as many positions."""
    assert plain.s is not None
    assert plain.a is not None
    s = _products(f.g.flatten(0, 2), torch.einsum("nm,kmrco->knrco", C, f.g).flatten(0, 2), plain.s.ndim == 3)
    a = _products(f.a.flatten(0, 1), torch.einsum("nm,mrci->nrci", C, f.a).flatten(0, 1), plain.a.ndim == 3)
    return Pair(s, a, plain.count)


def _products(x: Tensor, y: Tensor, full: bool) -> Tensor:
    """Σ_m x yᵀ [c d e] of x, y [m c d], or its diagonal [c d]."""
    return torch.einsum("mcd,mce->cde", x, y) if full else (x * y).sum(0)


def _trace_ratio(gram: Tensor, C: Tensor, s: Tensor, a: Tensor) -> Tensor:
    """tr G / (tr S tr A), of every group [c]."""
    traces = [t.sum(-1) if t.ndim == 2 else t.diagonal(dim1=-2, dim2=-1).sum(-1) for t in (s, a)]
    return torch.einsum("cnm,nm->c", gram, C) / (traces[0] * traces[1])
