"""The two factors of every layer: second moments of its inputs a and of its cotangents g, without per-example rows.

A coupling C of the examples enters both sums as Σ_nm C_nm; the scale of the product is then matched by traces, relative
to C = 1 (ERRATA 8).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.factors import Factors
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.sharing import Cotangents, Pair, Sharing, averaged
from natgrad.pullback.tape import Tape
from natgrad.pullback.tied import joined, trace
from natgrad.rules.base import Moment, Replayed
from natgrad.rules.shapes import check_moment


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
    if not layers:
        return []
    kinds = [kind for block in layers for kind in block.kinds]
    of_kinds = _of_kinds(pb, kinds, sharing, watcher)
    for kind, (s, a) in zip(kinds, of_kinds, strict=True):
        check_outputs(kind, s)
        check_inputs(kind, a)
    found = iter(of_kinds)
    return [joined(block, [next(found) for _ in block.kinds]) for block in layers]


def check_outputs(kind: Block, s: Tensor) -> None:
    """Raise if the rule of a layer returned S in another shape than it promised."""
    assert kind.rule is not None
    check_moment(kind.rule, "output_moment", kind.names, (kind.shape[0], kind.shape[1]), s)


def check_inputs(kind: Block, a: Tensor) -> None:
    """Raise if the rule of a layer returned A in another shape than it promised."""
    assert kind.rule is not None
    check_moment(kind.rule, "input_moment", kind.names, (kind.shape[0], kind.shape[2]), a)


def _of_kinds(
    pb: Pullback, layers: Sequence[Block], sharing: Sharing, watcher: Watcher | None
) -> list[tuple[Tensor, Tensor]]:
    """S and A of layers that are each of one kind."""
    if pb.coupling is not None:
        return _coupled(pb, layers, sharing)
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
    return averaged(pairs)


def whole(pb: Pullback) -> bool:
    """Whether all examples and roots are seen at once."""
    one = len(pb.ranges()) == 1
    return one and (pb.columns == 1 or pb.columns <= _columns(pb, pb.tape(pb.parts[0])))


def _columns(pb: Pullback, tape: Tape) -> int:
    """How many roots k at a time."""
    cost = sum(shape.numel() for use in tape.uses for shape in use.shapes)
    return max(1, pb.chunk // max(cost, 1))


def _coupled(pb: Pullback, layers: Sequence[Block], sharing: Sharing) -> list[tuple[Tensor, Tensor]]:
    """A = Σ C_nm a_n a_mᵀ/(N R) and S = Σ C_nm g_n g_mᵀ/N, times the trace of G over that of their product.

    The last factor is taken relative to C = 1, where it is that of K-FAC itself (000 (24)–(25), ERRATA 8).
    """
    tape = pb.tape((0, pb.n))
    mix = pb.mixing()
    found = []
    g = cotangents(tape, pb.root / math.sqrt(pb.n))
    for block in layers:
        whole_g = g.whole(tape, block).to(pb.y.dtype)
        traces = _traces(tape.inputs(block).to(pb.y.dtype), whole_g, block, mix)
        f = sharing.explicit(tape, block, g)
        f = Factors(f.a.to(pb.y.dtype), f.g.to(pb.y.dtype))
        plain = Pair()  # what it is at C = 1
        plain.add_outputs(sharing.outputs(tape, block, g).to(pb.y.dtype))
        moment = sharing.inputs(tape, block)
        plain.add_inputs(Moment(moment.total.to(pb.y.dtype), moment.count))
        found.append(_scaled(_mixed(f, mix, plain).factors(), plain.factors(), traces, pb.n))
    return found


def _traces(a: Tensor, g: Tensor, block: Block, mix: Tensor) -> tuple[Tensor, Tensor]:
    """The traces [c] of G at C = 1 and at C = L Lᵀ, from the rows of one root after the other."""
    plain, coupled = a.new_zeros(block.shape[0]), a.new_zeros(block.shape[0])
    for column in g.split(1):
        rows = Factors(a, column).rows().unflatten(-1, block.shape).flatten(3)  # [1 n c (o i)]
        plain += rows.square().sum((0, 1, 3))
        coupled += torch.einsum("nm,kncp->kmcp", mix, rows).square().sum((0, 1, 3))
    return plain, coupled


def _mixed(f: Factors, mix: Tensor, plain: Pair) -> Pair:
    """Σ C_nm g_n g_mᵀ and Σ C_nm a_n a_mᵀ, of the form that the sums at C = 1 have, over as many positions."""
    assert plain.s is not None
    assert plain.a is not None
    s = _products(torch.einsum("nm,knrco->kmrco", mix, f.g).flatten(0, 2), plain.s.ndim == 3)
    a = _products(torch.einsum("nm,nrci->mrci", mix, f.a).flatten(0, 1), plain.a.ndim == 3)
    return Pair(s, a, plain.count)


def _products(x: Tensor, full: bool) -> Tensor:
    """Σ_m x xᵀ [c d e] of x [m c d], or its diagonal [c d]."""
    return torch.einsum("mcd,mce->cde", x, x) if full else x.square().sum(0)


def _scaled(
    coupled: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor], totals: tuple[Tensor, Tensor], n: int
) -> tuple[Tensor, Tensor]:
    """The coupled factors, with the trace of G_C as far as the plain ones have that of G; ``totals`` are those of both.

    A factor that the coupling makes zero (the inputs of a bias, centred) says nothing: the plain one is taken.
    """
    rounding = 8 * n * torch.finfo(plain[0].dtype).eps
    traces = [trace(t) for t in plain]
    sides = []
    for mixed, own, before in zip(coupled, plain, traces, strict=True):
        lost = trace(mixed) <= rounding * before
        sides.append(torch.where(lost.view(-1, *[1] * (own.ndim - 1)), own, mixed))
    s, a = sides
    traces_now = trace(s) * trace(a) * totals[0]
    κ = totals[1] * traces[0] * traces[1] / traces_now
    # Without any gradient there is nothing to scale.
    return torch.where(traces_now > 0, κ, 1.0).view(-1, *[1] * (s.ndim - 1)) * s, a
