"""Embeddings without examples: a table of positions is looked up once, and added to all examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.autograd.graph import GradientEdge

from natgrad.pullback.cut import SAME, Cut, reshaped
from natgrad.pullback.graph import nodes
from natgrad.pullback.tape import Tape, Use
from natgrad.rules.embedding import EmbeddingRule


def over_examples(tape: Tape) -> Tape:
    """The tape with uses of embeddings that have no examples (positions) moved to where they are spread over them.

    ``wte(tokens) + wpe(arange(t))``: as if the table of positions had been asked once an example.
    """
    n = tape.y.shape[0]
    tables = {
        use.edges[0].node: use
        for use in tape.uses
        if type(use.rule) is EmbeddingRule and use.edges[0] and (use.call.x.ndim == 1 or use.call.x.shape[0] != n)
    }
    if not tables:
        return tape
    places: dict[Any, list[Cut]] = {node: [] for node in tables}
    for node in nodes([tape.y.grad_fn]):
        for at, (child, _) in enumerate(node.next_functions):
            below = reshaped(child)
            if below in places and node.name() not in SAME:
                places[below].append(Cut(node, at, n))
    moved = {id(use): _moved(use, places[node]) for node, use in tables.items()}
    return replace(tape, uses=tuple(new for use in tape.uses for new in moved.get(id(use), [use])))


def _moved(use: Use, cuts: Sequence[Cut]) -> list[Use]:
    """The use, once for every place where its output is added to examples; as it was, if it is used otherwise."""
    d = use.shape[-1]
    if not all(cut.known and cut.added and cut.z[0] == cut.n and cut.z[-1] == cut.u[-1] == d for cut in cuts):
        return [use]
    out: list[Use] = []
    for cut in cuts:
        index = use.call.x.reshape(cut.u[:-1]).expand(cut.z[:-1])
        call, edge = replace(use.call, args=(index,), kwargs={}), GradientEdge(cut.node, 0)
        entries = {} if out else use.entries  # the table entered the graph once
        out.append(replace(use, call=call, edges=(edge,), shapes=(cut.z,), entries=entries))
    return out or [use]
