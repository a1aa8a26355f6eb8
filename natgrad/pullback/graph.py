"""The autograd graph below the outputs: its nodes, and the parameters that enter it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, final

import torch
from torch import Tensor

_nodes: Any = torch._C._functions  # the types of nodes, which torch's stubs do not list
_LEAF = _nodes.AccumulateGrad
_VIEWS = frozenset({_nodes.TBackward0, _nodes.TransposeBackward0, _nodes.ToCopyBackward0})
_NAMELESS = "CppFunction"  # the type of all nodes that torch has no type of their own for
_RESHAPES = frozenset(
    {_nodes.ViewBackward0, _nodes.UnsafeViewBackward0, _nodes.ReshapeAliasBackward0, _nodes.ExpandBackward0}
)
# What a node says of itself, in numbers: the axes that it works along, and whether statistics are those of the batch.
# No tensors, which are not looked at.
_SAVED = frozenset(
    f"_saved_{name}"
    for name in (
        *("dim", "dims", "dim0", "dim1", "dim2", "dimension", "keepdim", "normalized_shape", "pad", "training"),
        *("start", "end", "step", "shifts", "repeats", "offset", "diagonal", "split_size", "split_sizes"),
        *("size", "stride", "storage_offset", "self_sym_sizes"),
    )
)


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


@final
@dataclass(frozen=True)
class Survey:
    """One walk over the graph below y: the kinds of its nodes, and the leaves that enter it, by their ids, in order.

    A leaf under a chain of transposes and casts is where the chain enters (``leaf_uses``); the chain is not looked at.
    ``top``: the id of the leaf that y itself is such a chain of, which enters nothing. ``form``: how the nodes are
    joined, and along which axes they work, as ``x.softmax(0)`` and ``x.softmax(1)`` are nodes of one kind.
    """

    kinds: tuple[object, ...]
    entries: tuple[int, ...]
    top: int | None = None
    form: tuple[object, ...] = ()

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the nodes."""
        return frozenset(kind.__name__ if isinstance(kind, type) else str(kind) for kind in set(self.kinds))

    @cached_property
    def counts(self) -> Counter[int]:
        """How often each leaf enters."""
        return Counter(self.entries)

    def unreached(self, leaves: Mapping[str, Tensor]) -> frozenset[str]:
        """The names of the leaves that do not enter the graph at all; none where there is no graph to tell."""
        if not self.kinds:
            return frozenset()
        return frozenset(name for name, p in leaves.items() if not self.counts[id(p)] and id(p) != self.top)


def survey(y: Tensor) -> Survey:
    """A tight loop, as it runs in every estimate: nodes are told apart by their types, which are known to Python."""
    root = y.grad_fn
    if root is None:
        return Survey((), ())
    top = leaf_below(root)
    if top is not None:
        return Survey((root.name(),), (), id(top))
    order: list[Any] = [root]
    places: dict[Any, int] = {root: 0, None: -1}
    entries: list[int] = []
    joined: list[object] = []
    for node in order:  # which grows
        for child, number in node.next_functions:
            kind = type(child)
            if kind is _LEAF:
                entries.append(id(child.variable))
                joined.append("leaf")
                continue
            if kind in _VIEWS:
                leaf = leaf_below(child)
                if leaf is not None:
                    entries.append(id(leaf))
                    joined.append("leaf")
                    continue
            place = places.get(child)
            if place is None:
                place = places[child] = len(order)
                order.append(child)
            joined.append((place, number) if number else place)
        joined.append("end")
    return Survey(_kinds(order), tuple(entries), None, (*joined, *_saved(order)))


def _kinds(order: Sequence[Any]) -> tuple[object, ...]:
    """The types of nodes, or their names."""
    kinds = tuple(map(type, order))
    if any(kind.__name__ == _NAMELESS for kind in set(kinds)):
        return tuple(node.name() for node in order)
    return kinds


def _saved(order: Sequence[Any]) -> list[object]:
    """What the nodes say of themselves; of reshapes, which say only what they had, also what they give."""
    keys = {kind: _keys(kind) for kind in set(map(type, order))}
    found: list[object] = [getattr(node, key) for node in order for key in keys[type(node)]]
    return found + [tuple(node._input_metadata[0].shape) for node in order if type(node) in _RESHAPES]


@cache
def _keys(kind: type) -> tuple[str, ...]:
    """What nodes of a type say of themselves; there are few types, and every estimate asks."""
    return tuple(sorted(_SAVED.intersection(vars(kind))))


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
    return type(node) is _LEAF or (type(node) in _VIEWS and leaf_below(node) is not None)


def leaf_below(node: Any) -> Any:
    """The leaf that a chain of transposes and casts starts from, or None."""
    kind = type(node)
    while kind in _VIEWS:
        node = node.next_functions[0][0]
        kind = type(node)
    return node.variable if kind is _LEAF else None
