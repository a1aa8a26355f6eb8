"""Embeddings without examples: a table of positions is looked up once, and added to all examples.

``wte(tokens) + wpe(arange(t))`` is, to the rule of embeddings, as if the table had been asked once an example: the use
moves to where its output is added to, or expanded over, the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from natgrad.accelerate.autograd_nodes import argument, output_shape
from natgrad.pullbacks.graph import nodes
from natgrad.pullbacks.tape import Tape, Use
from natgrad.rules.embedding import EmbeddingRule

# Of a tensor without examples these keep the order of the elements, and all of them.
_SAME = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Alias")
) | {"SqueezeBackward1"}


def over_examples(tape: Tape) -> Tape:
    """The tape with uses of embeddings that have no examples (positions) moved to where they are spread over them."""
    n = tape.y.shape[0]
    tables = {
        use.edges[0].node: use
        for use in tape.uses
        if type(use.rule) is EmbeddingRule and use.edges[0] and _without(tuple(use.call.x.shape), n)
    }
    if not tables:
        return tape
    sums: dict[Any, list[tuple[Any, torch.Size] | None]] = {node: [] for node in tables}
    for node in nodes([tape.y.grad_fn]):
        for at, (child, output) in enumerate(node.next_functions):
            below = _reshaped(child)
            if below in sums and node.name() not in _SAME:
                u = torch.Size(output_shape(child, output))
                sums[below].append((node, u) if _adds(node, at, u, n) else None)
    moved = {id(use): _moved(use, sums[node]) for node, use in tables.items()}
    return replace(tape, uses=tuple(new for use in tape.uses for new in moved.get(id(use), [use])))


def _reshaped(node: Any) -> Any:
    """The node of the tensor that this one is a reshape, or a cast, of."""
    while node is not None and node.name() in _SAME:
        node = node.next_functions[0][0]
    return node


def _without(index: tuple[int, ...], n: int) -> bool:
    """Whether an index of this shape may have no examples, n: it has no axis of theirs, or one of one."""
    return len(index) <= 1 or index[0] != n or 1 in index[1:]


def _adds(node: Any, at: int, u: torch.Size, n: int) -> bool:
    """Whether a node adds its argument u to n examples, or expands it over them, on some axis."""
    z, name = torch.Size(output_shape(node)), node.name()
    axes = [axis for axis in range(len(z) - 1) if z[axis] == n and ((1,) * (len(z) - len(u)) + tuple(u))[axis] == 1]
    if name == "RepeatBackward0":
        axes = [axis for axis in axes if all(k == 1 for at, k in enumerate(argument(node, "repeats")) if at != axis)]
    plain = at == 0 or argument(node, "alpha") == 1 if name == "AddBackward0" else at == 0
    spreads = name in ("AddBackward0", "SubBackward0", "ExpandBackward0", "RepeatBackward0")
    return spreads and plain and len(u) <= len(z) and bool(axes)


def _moved(use: Use, sums: Sequence[tuple[Any, torch.Size] | None]) -> list[Use]:
    """The use, once for every sum that it is a part of; as it was, if it is used otherwise."""
    out: list[Use] = []
    for addition in sums:
        if addition is None:
            return [use]
        node, u = addition
        z = torch.Size(output_shape(node))
        if not z[-1] == u[-1] == use.shape[-1]:
            return [use]
        index = use.call.x.reshape(u[:-1]).expand(z[:-1])
        call, edge = replace(use.call, args=(index,), kwargs={}), GradientEdge(node, 0)
        of = replace(use.of, entries={}) if out else use.of  # the table entered the graph once
        out.append(replace(use, of=of, call=call, edges=(edge,), shapes=(z,)))
    return out or [use]
