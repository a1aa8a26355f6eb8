"""Layers that a forward pass hides from its graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from natgrad.errors import UncoveredError
from natgrad.model import Model

_REENTRANT = "CheckpointFunctionBackward"


def refuse_hidden(model: Model, names: Collection[str], counts: Mapping[int, int]) -> None:
    """Refuse layers inside a reentrant checkpoint, which runs them without a graph.

    ``names`` of the nodes of the graph, and ``counts`` of the entries of each parameter into it, by its id.
    """
    if _REENTRANT not in names:
        return
    hidden = [name for name, p in model.params.items() if not counts.get(id(p))]
    if hidden:
        raise UncoveredError(
            f"torch.utils.checkpoint hides {', '.join(hidden)} from the graph of the forward pass: call it with "
            "use_reentrant=False"
        )
