"""The autograd graph: its nodes, its leaves, and what two graphs of one form have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, final

from torch import Tensor

from natgrad.accelerate.autograd import (
    LEAF,
    TRANSPOSES_AND_CASTS,
    UNTYPED,
    axis_arguments,
    output_shapes,
    place_arguments,
)

Shape: TypeAlias = tuple[int, ...]


def nodes(roots: Iterable[Any], stop: Collection[Any] = ()) -> Iterator[Any]:
    """All nodes below the roots, the roots included, down to those in ``stop``, which are left out."""
    visited: set[Any] = set(stop)
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)


@final
@dataclass(frozen=True, eq=False)
class Survey:
    """One walk over the graph below y: its nodes, how they are joined, and the leaves that enter it, by their ids.

    A leaf under a chain of transposes and casts is where the chain enters (``leaf_uses``); the chain is not looked at.
    ``joins``: for every node the places of its arguments among the nodes, with their output numbers. ``top``: the id of
    the leaf that y itself is such a chain of, which enters nothing.
    """

    nodes: Sequence[Any]
    joins: tuple[object, ...]
    entries: tuple[int, ...]
    top: int | None = None

    @property
    def kinds(self) -> tuple[object, ...]:
        """The types of the nodes, or their names where a type does not tell."""
        kinds = tuple(map(type, self.nodes))
        if any(kind.__name__ == UNTYPED for kind in set(kinds)):
            return tuple(node.name() for node in self.nodes)
        return kinds

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the nodes."""
        return frozenset(kind.__name__ if isinstance(kind, type) else str(kind) for kind in set(self.kinds))

    @cached_property
    def counts(self) -> Counter[int]:
        """How often each leaf enters."""
        return Counter(self.entries)

    @property
    def form(self) -> tuple[object, ...]:
        """Kinds, joins and the axes that operations work along: ``x.softmax(0)`` and ``x.softmax(1)`` are of one kind.

        All but sizes: it is the same for batches of any length.
        """
        return self.kinds, self.joins, tuple(axis_arguments(self.nodes)), self.entries, self.top

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all outputs of nodes that y depends on."""
        return output_shapes(self.nodes, {pair: None for pair in self.joins if type(pair) is tuple})

    @property
    def places(self) -> list[Shape]:
        """Which entries the nodes that cut something out have cut out."""
        return place_arguments(self.nodes)

    def unreached(self, leaves: Mapping[str, Tensor]) -> frozenset[str]:
        """The names of the leaves that do not enter the graph at all; none where there is no graph to tell."""
        if not self.nodes:
            return frozenset()
        return frozenset(name for name, p in leaves.items() if not self.counts[id(p)] and id(p) != self.top)


def survey(y: Tensor) -> Survey:
    """Walk over the graph below y. A tight loop, because it runs in every estimate."""
    root = y.grad_fn
    if root is None:
        return Survey((), (), ())
    top = leaf_below(root)
    if top is not None:
        return Survey((root,), (), (), id(top))
    order: list[Any] = [root]
    index: dict[Any, int] = {root: 0}
    entries: list[int] = []
    joins: list[object] = []
    for node in order:  # which grows
        for child, number in node.next_functions:
            kind = type(child)
            leaf = child.variable if kind is LEAF else leaf_below(child) if kind in TRANSPOSES_AND_CASTS else None
            if leaf is not None:
                entries.append(id(leaf))
                joins.append("leaf")
            elif child is None:
                joins.append(None)
            else:
                at = index.get(child)
                if at is None:
                    at = index[child] = len(order)
                    order.append(child)
                joins.append((at, number))
        joins.append("end")
    return Survey(order, tuple(joins), tuple(entries))


def size_pattern(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """The shapes with every size replaced by its number in the order of appearance: which sizes agree, and no size.

    0 and 1 keep their meaning.

    >>> size_pattern([(5, 7), (7, 1)]) == size_pattern([(6, 9), (9, 1)]) != size_pattern([(6, 6), (6, 1)])
    True
    """
    numbers: dict[int, int] = {0: 0, 1: 1}
    patterns: dict[Shape, Shape] = {}
    out = []
    for shape in shapes:
        pattern = patterns.get(shape)
        if pattern is None:
            pattern = patterns[shape] = tuple([numbers.setdefault(size, len(numbers)) for size in shape])
        out.append(pattern)
    return tuple(out)


def leaf_uses(roots: Iterable[Any], stop: Collection[Any]) -> Counter[int]:
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
    return type(node) is LEAF or (type(node) in TRANSPOSES_AND_CASTS and leaf_below(node) is not None)


def leaf_below(node: Any) -> Any:
    """The leaf that a chain of transposes and casts starts from, or None."""
    kind = type(node)
    while kind in TRANSPOSES_AND_CASTS:
        node = node.next_functions[0][0]
        kind = type(node)
    return node.variable if kind is LEAF else None
