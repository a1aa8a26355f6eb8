"""The autograd graph below the outputs: its nodes, and the parameters that enter it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "ToCopyBackward0"})
_LEAF = "torch::autograd::AccumulateGrad"
_ENDS = _VIEWS | {_LEAF}


def nodes(roots: Iterable[Any], stop: Collection[Any] = ()) -> Iterator[Any]:
    """All nodes below the roots, the roots included, down to those in ``stop``, which are left out."""
    seen: set[Any] = set(stop)
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)


def survey(root: Any) -> tuple[tuple[str, ...], Counter[int]]:
    """The names of all nodes below the root, in the order of one walk, and ``leaf_uses`` of it."""
    names: list[str] = []
    counts: Counter[int] = Counter()
    seen: set[Any] = {root}
    stack = [root] if root is not None else []
    while stack:
        node = stack.pop()
        name = node.name()
        names.append(name)
        above = name in _VIEWS and leaf_below(node) is not None
        for child, _ in node.next_functions:
            if child is None:
                continue
            if not above and child.name() in _ENDS:
                leaf = leaf_below(child)
                if leaf is not None:
                    counts[id(leaf)] += 1
            if child not in seen:
                seen.add(child)
                stack.append(child)
    return tuple(names), counts


def unreached(y: Tensor, leaves: Mapping[str, Tensor], counts: Counter[int]) -> frozenset[str]:
    """The names of the leaves that do not enter the graph of y at all; none where there is no graph to tell."""
    if y.grad_fn is None:
        return frozenset()
    top = leaf_below(y.grad_fn)  # a view of a leaf: nothing above it counts its entry
    return frozenset(name for name, leaf in leaves.items() if not counts[id(leaf)] and leaf is not top)


def leaf_uses(roots: Iterable[Any], stop: Collection[Any] = ()) -> Counter[int]:
    """How often each leaf, by id, enters the graph below the roots.

    Transposes and casts of a leaf are looked through: autocast caches its copy of a weight, so that several uses
    share one cast, and it is the entries of the copy that count.
    """
    counts: Counter[int] = Counter()
    for node in nodes(roots, stop):
        if not _above_leaf(node):
            leaves = (leaf_below(child) for child, _ in node.next_functions)
            counts.update(id(leaf) for leaf in leaves if leaf is not None)
    return counts


def _above_leaf(node: Any) -> bool:
    name = node.name()
    return name == _LEAF or (name in _VIEWS and leaf_below(node) is not None)


def leaf_below(node: Any) -> Any:
    """The leaf that a chain of transposes and casts starts from, or None."""
    while node is not None:
        name = node.name()
        if name == _LEAF:
            return node.variable
        if name not in _VIEWS:
            return None
        node = node.next_functions[0][0]
    return None
