"""The two factors of every layer: second moments of its inputs a and of its cotangents g, without per-example rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.coupled import Coupled
from natgrad.pullback.pullback import Pullback
from natgrad.pullback.relation import Relation
from natgrad.pullback.sharing import Cotangents, Pair, Sharing, averaged, mean
from natgrad.pullback.tape import Tape
from natgrad.pullback.tied import joined
from natgrad.pullback.weighed import Weighed
from natgrad.rules.base import Moment, Replayed
from natgrad.rules.shapes import check_length, check_moment


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


def check_rows(kind: Block, what: str, size: int, d: int) -> None:
    """Raise if the rule of a layer returned rows of another length than it promised."""
    assert kind.rule is not None
    check_length(kind.rule, what, kind.names, kind.shape[0], d, size)


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
    """All examples at once, as the coupling mixes them."""
    tape = pb.tape((0, pb.n))
    coupled = coupled_by(pb, tape)
    assert coupled is not None
    g = cotangents(tape, pb.root / math.sqrt(pb.n))
    found = (coupled.factors(tape, block, sharing, g) for block in layers)
    return [(s, mean(moment)) for s, moment in found]


def coupled_by(pb: Pullback, tape: Tape) -> Relation | None:
    """What couples the examples of a pass, if something does."""
    if pb.coupled is None:
        return None
    if pb.coupled.weights is not None:
        return Weighed.of(pb.coupled.weights, pb.y.dtype, tape.memo)
    return Coupled.of(pb.coupled.C, pb.mixing(), pb.y.dtype, tape.memo)
