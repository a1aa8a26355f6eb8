"""Where the tensors of a graph hold their examples, proven from the operations alone.

Outputs y [n *out] have their examples on the first axis. Going down from y, every operation tells on which axis of
its arguments they lie (``natgrad.pullback.axes``): an entry of example n there changes nothing but the output of
example n. A node is proven if all ways from y to it agree. A module that hides its layers (a fused recurrence,
attention) is passed over, from its output to its input: its rule says that it keeps the examples apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from natgrad.pullback.axes import Axis, Step, below
from natgrad.pullback.graph import leaf_below, nodes
from natgrad.pullback.uses import Use

FORK = "ForkBackward"

# Where a row goes depends on numbers that the graph does not name.
DATA_DEPENDENT = frozenset(
    f"{name}Backward{version}"
    for version in range(4)
    for name in (
        *("Index", "IndexSelect", "Gather", "Take", "Scatter", "ScatterAdd", "IndexPut", "IndexAdd", "IndexCopy"),
        *("MaskedSelect", "MaskedScatter", "Sort", "Topk", "Permutation", "PackPaddedSequence", "IndexFill", "Unique"),
    )
)


@final
@dataclass(frozen=True)
class Order:
    """What is known about the nodes below y.

    ``axes``: of the proven ones, where their outputs have the examples. ``reached``: all nodes. ``passed``: proven
    outputs of modules that were passed over. ``inside``: the nodes of those modules.
    """

    axes: Mapping[Any, Axis]
    reached: frozenset[Any]
    passed: frozenset[Any]
    inside: frozenset[Any]

    def reaches(self, use: Use) -> bool:
        """Whether a way leads from y to an output of a use."""
        return any(edge is not None and edge.node in self.reached for edge in use.edges)

    def axis(self, use: Use) -> Axis | None:
        """Where the output of a use is proven to have its examples.

        Nothing is said of modules with several outputs in use: a recurrence has its last state another way round.
        """
        found = [edge is not None and edge.node in self.reached for edge in use.edges]
        first = use.edges[0]
        return None if first is None or any(found[1:]) else self.axes.get(first.node)


def ordered(y: Tensor, uses: Sequence[Use] = ()) -> Order:
    """Where the nodes below y have their examples."""
    n = y.shape[0]
    hiding = {(use.edges[0].node, use.edges[0].output_nr): use for use in uses if use.edges[0] and use.source}
    axes: dict[Any, Axis] = {}
    passed: dict[Any, Any] = {}
    doubtful: list[Any] = []
    seen: set[tuple[Any, int]] = set()
    stack: list[tuple[Any, int, Axis]] = [(y.grad_fn, y.output_nr, Axis(0))]
    while stack:
        node, output, axis = stack.pop()
        if node is None or leaf_below(node) is not None:
            continue
        if axes.setdefault(node, axis) != axis:
            doubtful.append(node)
        if (node, output) in seen:
            continue
        seen.add((node, output))
        use = hiding.get((node, output))
        if use is not None and use.source is not None and _kept(use, axis, n):
            passed[node] = use.source.node
            stack.append((use.source.node, use.source.output_nr, axis))
            continue
        for at, (child, number) in enumerate(node.next_functions):
            if child is None or (node.name() == FORK and at == 0):  # the user's gradient, a way the metric never goes
                continue
            found = below(Step(node, at, axis, n, _shape(node, output), _shape(child, number)))
            if found is None:
                doubtful.append(child)
            else:
                stack.append((child, number, found))
    inside = _inside(passed)
    wrong = set(nodes([*doubtful, *(node for node in inside if node in axes)]))
    proven = {node: axis for node, axis in axes.items() if node not in wrong}
    kept = frozenset(node for node in passed if node in proven)
    return Order(proven, frozenset(nodes([y.grad_fn])), kept, inside)


def _kept(use: Use, axis: Axis, n: int) -> bool:
    """Whether a module that hides its layers has n examples there in its output, and so in its input."""
    given = use.call.x.shape
    return (
        axis == Axis(axis.index)
        and use.rule.axis(use.module, use.call) == axis.index < min(len(use.shape), len(given))
        and use.shape[axis.index] == given[axis.index] == n
    )


def _inside(passed: Mapping[Any, Any]) -> frozenset[Any]:
    """The nodes between the outputs of modules and their inputs."""
    return frozenset(
        node
        for top, source in passed.items()
        for node in nodes([child for child, _ in top.next_functions], stop={source})
    )


def _shape(node: Any, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)
