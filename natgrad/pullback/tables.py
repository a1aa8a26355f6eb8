"""Embeddings without examples: a table of positions is looked up once, and added to all examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.autograd.graph import GradientEdge

from natgrad.pullback.axes import Axis
from natgrad.pullback.cut import SAME, Cut, reshaped
from natgrad.pullback.graph import nodes
from natgrad.pullback.tape import Tape
from natgrad.pullback.uses import Use
from natgrad.rules.embedding import EmbeddingRule


def over_examples(tape: Tape) -> Tape:
    """The tape with uses of embeddings that have no examples (positions) moved to where they are spread over them.

    ``wte(tokens) + wpe(arange(t))``: as if the table of positions had been asked once an example.
    """
    n = tape.y.shape[0]
    tables = {
        use.edges[0].node: use
        for use in tape.uses
        if type(use.rule) is EmbeddingRule and use.edges[0] and _without(tuple(use.call.x.shape), n)
    }
    if not tables:
        return tape
    places: dict[Any, list[Cut | None]] = {node: [] for node in tables}
    for node in nodes([tape.y.grad_fn]):
        for at, (child, _) in enumerate(node.next_functions):
            below = reshaped(child)
            if below in places and node.name() not in SAME:
                places[below].append(_cut(node, at, n))
    moved = {id(use): _moved(use, places[node]) for node, use in tables.items()}
    return replace(tape, uses=tuple(new for use in tape.uses for new in moved.get(id(use), [use])))


def _without(index: tuple[int, ...], n: int) -> bool:
    """Whether an index of this shape may have no examples, n: it has no axis of theirs, or one of one."""
    return len(index) <= 1 or index[0] != n or 1 in index[1:]


def _cut(node: Any, at: int, n: int) -> Cut | None:
    """Where something may be added to n examples; which axis they are on is found out later, as of any layer's."""
    shape = node._input_metadata[0].shape
    found = (Cut(node, at, n, Axis(axis)) for axis in range(len(shape) - 1) if shape[axis] == n)
    return next((cut for cut in found if cut.known and cut.added), None)


def _moved(use: Use, cuts: Sequence[Cut | None]) -> list[Use]:
    """The use, once for every place where its output is added to examples; as it was, if it is used otherwise."""
    d = use.shape[-1]
    known = [cut for cut in cuts if cut is not None and cut.z[-1] == cut.u[-1] == d]
    if len(known) < len(cuts):
        return [use]
    out: list[Use] = []
    for cut in known:
        index = use.call.x.reshape(cut.u[:-1]).expand(cut.z[:-1])
        call, edge = replace(use.call, args=(index,), kwargs={}), GradientEdge(cut.node, 0)
        of = replace(use.of, entries={}) if out else use.of  # the table entered the graph once
        out.append(replace(use, of=of, call=call, edges=(edge,), shapes=(cut.z,)))
    return out or [use]
