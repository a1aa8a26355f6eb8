"""Which layers have their rule in a pass. It is found once for every kind of graph, and remembered."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from natgrad.model import Model, tensors_of
from natgrad.pullback.axes import Axis
from natgrad.pullback.blocks import Block
from natgrad.pullback.graph import Survey, survey
from natgrad.pullback.hidden import refuse_hidden
from natgrad.pullback.order import DATA_DEPENDENT
from natgrad.pullback.separate import Seating, Verdicts
from natgrad.pullback.tape import Tape
from natgrad.pullback.uses import Use
from natgrad.rules.base import Replayed, replaying

_KEPT = 64  # graphs


@final
@dataclass(frozen=True)
class Refused:
    """The names of parameters whose rule does not apply: their layer has examples elsewhere, or outputs in vain."""

    elsewhere: frozenset[str]
    idle: frozenset[str]

    def among(self, blocks: Sequence[Block]) -> Refused:
        """Those of these layers."""
        names = {name for block in blocks for name in block.names}
        return Refused(self.elsewhere & names, self.idle & names)

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.elsewhere | self.idle


@final
@dataclass(frozen=True)
class Judged:
    """What a pass shows of the layers ``given``.

    ``blocks``: the layers, without their rule where it does not apply. ``unused``: the layers that the pass did not
    use, by their first name. ``positions``: how many r·c of one example share the weight, by the first name, of layers
    whose shapes tell. ``axes``: of uses that are to be turned (``Tape.turned``).
    """

    given: list[Block]
    blocks: list[Block]
    refused: Refused
    unused: Mapping[str, Block]
    positions: Mapping[str, int]
    axes: Mapping[int, Axis]
    memo: dict[Hashable, Any] = field(default_factory=dict)  # what others have found about such passes

    def positions_of(self, blocks: Sequence[Block], tape: Tape) -> dict[str, int]:
        """Of all blocks of a pass that looks like this one."""
        known = self.positions
        if len(known) == len(blocks):
            return dict(known)
        return {b.names[0]: known[b.names[0]] if b.names[0] in known else tape.positions(b) for b in blocks}


@final
class Judgements:
    """What was found about passes that have been looked at before, for a model that is called again and again.

    A pass is known again by all that decides: the kinds of the nodes of its graph, how they are joined and along which
    axes they work, the parameters that enter it, in order, and the calls of its layers. One that moves examples by an
    index that depends on the data is judged anew.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Judged] = {}

    def of(self, model: Model, blocks: list[Block], tape: Tape, whole: bool, verdicts: Verdicts) -> Judged:
        """``whole``: all examples are in this pass, so that what it does not use is not used."""
        seen = survey(tape.y)
        key = (seen.kinds, seen.form, seen.entries, seen.top, whole, tape.y.shape, _signature(tape.uses))
        found = self._known.get(key)
        if found is not None and found.given == blocks:
            return found
        refuse_hidden(model, seen.names, seen.counts)
        seating = verdicts.seated(tape, seen)
        found = _judged(model, blocks, tape, seen, whole, seating)
        if seating.certain and DATA_DEPENDENT.isdisjoint(seen.names):
            self._known[key] = found
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return found


def _judged(model: Model, given: list[Block], tape: Tape, seen: Survey, whole: bool, seating: Seating) -> Judged:
    wrong = seating.wrong
    blocks = [b if b.rule is None or tape.complete(b, seen.counts, wrong) else b.without_rule() for b in given]
    refused = Refused(
        *(
            frozenset(name for b in given if not places.isdisjoint(tape.places(b)) for name in b.names)
            for places in (seating.elsewhere, seating.idle)
        )
    )
    out = seen.unreached(model.params) if whole else frozenset()
    # A pass neither called the layer nor used its parameters.
    unused = {b.names[0]: b for b in given if not tape.places(b) and out.issuperset(b.names)}
    told = [b for b in blocks if b.rule is not None and not any(isinstance(kind.rule, Replayed) for kind in b.kinds)]
    positions = {b.names[0]: tape.positions(b) for b in told}
    return Judged(list(given), blocks, refused, unused, positions, seating.axes)


def _signature(uses: Sequence[Use]) -> tuple[Hashable, ...]:
    """All of the calls that a judgement depends on, in one flat tuple, which is soon compared."""
    hiding = replaying([type(use.rule) for use in uses])
    out: list[Hashable] = []
    for use in uses:
        out.append(id(use.module))
        out.append(use.shapes)
        out.extend(use.entries)
        if type(use.rule) in hiding:  # how often its parameters enter, and what it was given
            given = tuple(t.shape for t in tensors_of((use.call.args, use.call.kwargs)))
            edges = tuple(edge is None for edge in use.edges)
            out.append((tuple(use.entries.values()), given, edges, use.source is None, use.call.training))
    return tuple(out)
