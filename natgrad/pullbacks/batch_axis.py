"""Find the batch axis of every layer call; without one the layer's rule does not apply.

A probe shows it (``natgrad.pullbacks.row_examples``), once for every form of graph (``StatusCache``).

Most rules want the batch on the first axis. A rule that treats leading axes alike (``Rule.leading``) gets a view with
the batch axis moved there (``Use.with_batch_first``): torch's transformers and recurrences have it second.

An embedding without examples, ``wte(tokens) + wpe(arange(t))``, is to its rule as if every example had asked the table:
the use moves to where its output is added to the examples (``Tape.with_tables``). There the cotangents of all examples
add up to its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from natgrad.accelerate.autograd import (
    LEAF,
    TRANSPOSES_AND_CASTS,
    UNTYPED,
    VIEWS,
    WRITTEN_VIEW,
    axis_arguments,
    leaf_below,
    output_shapes,
    place_arguments,
)
from natgrad.accelerate.replay import LRU
from natgrad.errors import NonFiniteError, UncoveredError
from natgrad.model import Inputs, Model, plain_name, tensors_of
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.row_examples import BatchAxis, Probe
from natgrad.pullbacks.tape import Place, Tape, Use, shapes_at
from natgrad.rules.base import cotangent_features
from natgrad.rules.linear import EmbeddingRule
from natgrad.rules.replayed import Replayed, replaying


@final
@dataclass(frozen=True)
class BatchAxes:
    """The batch axes of the uses of a tape, by their positions in ``Tape.uses``.

    ``tables``: embeddings without examples, and where these are, by their positions before they are moved there.
    ``missing``: uses without a batch axis. ``idle``: uses on whose output y does not depend. ``axes``: uses whose batch
    axis must be moved to the front. All others have it where their rule expects it. ``certain``: whether the result
    holds for every pass with the same graph; without cotangents it does not. ``operations``: what probes have shown of
    operations in graphs of this form.
    """

    tables: Mapping[int, Sequence[Place]] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    axes: Mapping[int, BatchAxis] = field(default_factory=dict)
    certain: bool = True
    operations: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def without_rule(self) -> frozenset[int]:
        """The uses to which no rule applies."""
        return self.missing | self.idle

    @property
    def any_size(self) -> bool:
        """Whether they hold for every graph of the same form, where sizes agree as they do here, and ``fit`` holds.

        Of an axis (n after) of a reshaped tensor the number of entries before the examples is one whatever n is. Of
        (before n after) it is a size.
        """
        return all(axis.before == 1 for axis in self.axes.values())

    def fit(self, tape: Tape) -> bool:
        """Whether the uses of a tape, whose tables have been moved, can have their examples on these axes."""
        n = tape.y.shape[0]
        return all(tape.uses[number].supports_axis(axis, n) for number, axis in self.axes.items())


def find_batch_axes(tape: Tape, graph: Survey) -> BatchAxes:
    """The batch axis of every layer call of a tape, and where tables without examples are added to them."""
    if not tape.uses or not tape.y.requires_grad:
        return BatchAxes()
    n, probe = tape.y.shape[0], Probe.of(tape.y.detach(), tape.half)
    tables = _tables(tape, graph, probe.s[None])
    tape = tape.with_tables(tables, graph.nodes)
    reached = frozenset(graph.nodes)
    overwritten = frozenset(node.next_functions[0][0] for node in graph.nodes if node.name() == WRITTEN_VIEW)
    unsure: dict[int, list[BatchAxis | None]] = {}
    missing, idle = set(), set()
    axes: dict[int, BatchAxis | None] = {}
    for number, use in enumerate(tape.uses):
        options = _options(use, n)
        if not any(edge is not None and edge.node in reached for edge in use.edges):
            idle.add(number)
        elif not options or any(edge is not None and _is_bypassed(edge.node, overwritten) for edge in use.edges):
            missing.add(number)
        elif n == 1:
            axes[number] = options[0]
        else:
            unsure[number] = options
    certain = True
    if unsure:
        shown = probe.show(lambda s: _rows(tape, s, list(unsure)))
        for (number, options), g in zip(unsure.items(), shown, strict=True):
            label = probe.labels(g.flatten(2))
            fitting = [] if label is None else [axis for axis in options if _agrees(label, axis, tape.uses[number], n)]
            if fitting:
                axes[number] = fitting[0]
            else:
                missing.add(number)
            # Zero cotangents tell nothing, and few may be on two axes.
            certain = certain and (label is None or bool((label >= 0).any())) and len(fitting) < 2
    elsewhere = {number: axis for number, axis in axes.items() if axis is not None}
    return BatchAxes(tables, frozenset(missing), frozenset(idle), elsewhere, certain)


def _options(use: Use, n: int) -> list[BatchAxis | None]:
    """The possible batch axes; None is the one that the rule expects."""
    home, shape = use.rule.batch_axis(use.module, use.call), use.shape
    at_home = home is None or (len(shape) > max(home, 1) and shape[home] == n)
    axes = [
        BatchAxis(index, before)
        for index in range(use.rule.leading(use.module, shape))
        for before in range(1, shape[index] // n + 1)
        if shape[index] % (before * n) == 0 and not (index == home and shape[index] == n and at_home)
    ]
    return [*([None] if at_home else []), *sorted(axes, key=lambda axis: shape[axis.index] != n)]


def _rows(tape: Tape, s: Tensor, numbers: Sequence[int]) -> list[Tensor]:
    """Cotangents [r 1 ·] of uses: a row for every entry of the axes that may be that of the batch."""
    outer = tape.output_cotangents(s, numbers)
    return [_rows_of(tape, number, outer[number]) for number in numbers]


def _rows_of(tape: Tape, number: int, outer: tuple[Tensor, ...]) -> Tensor:
    use = tape.uses[number]
    lead, home = use.rule.leading(use.module, use.shape), use.rule.batch_axis(use.module, use.call)
    if lead:
        return outer[0][0].flatten(0, lead - 1).flatten(1).unsqueeze(1)
    if isinstance(use.rule, Replayed):
        features = list(tape.inner_cotangents(number, outer).values())
    elif home is not None:
        return outer[0][0].movedim(home, 0).flatten(1).unsqueeze(1)
    else:
        layers = use.rule.layers(use.module)
        features = [cotangent_features(use.rule, use.module, keys, outer[0]) for keys in layers]
    return torch.cat([g.dense()[0].flatten(1) for g in features], dim=1).unsqueeze(1)


def _agrees(label: Tensor, axis: BatchAxis | None, use: Use, n: int) -> bool:
    """Whether rows have the examples that the axis says."""
    lead = use.rule.leading(use.module, use.shape)
    if not lead:
        return len(label) == n and bool(((label == torch.arange(n, device=label.device)) | (label < 0)).all())
    axis = axis or BatchAxis(use.rule.batch_axis(use.module, use.call) or 0)
    labels, size = label.view(use.shape[:lead]), use.shape[axis.index]
    examples = axis.examples(size, n, label.device).view(-1, *[1] * (lead - axis.index - 1))
    return bool(((labels == examples) | (labels < 0)).all())


def _is_bypassed(node: Any, overwritten: Collection[Any]) -> bool:
    """Whether y depends on an output around its edge, as ``h *= h.sigmoid()`` with a view h does.

    The edge is that of the view: the output of a linear layer on [n t i] is one of ``addmm``. What is written to the
    view goes to the memory below it, and a part of the cotangent comes from there. ``overwritten``: the nodes whose
    outputs were changed in place through a view of them.
    """
    while overwritten and node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
        if node in overwritten:
            return True
    return False


# Embeddings without examples.


def _tables(tape: Tape, graph: Survey, s: Tensor) -> dict[int, Sequence[Place]]:
    """Where the outputs of embeddings without examples are added to the examples; s [1 n *out]."""
    n = tape.y.shape[0]
    asked = [
        number
        for number, use in enumerate(tape.uses)
        if n > 1 and type(use.rule) is EmbeddingRule and use.edges[0] and _may_lack_examples(use.call.x.shape, n)
    ]
    if not asked:
        return {}
    readers: dict[Any, list[Place]] = {}
    for number, node in enumerate(graph.nodes):
        for argument, (child, _) in enumerate(node.next_functions):
            readers.setdefault(child, []).append((number, argument))
    tables = {number: places for number in asked if (places := _places(tape.uses[number], graph, readers, n))}
    outer = tape.output_cotangents(s, tables)
    return {number: each for number, each in tables.items() if _add_up(tape, number, each, graph, s, outer[number][0])}


def _places(use: Use, graph: Survey, readers: Mapping[Any, Sequence[Place]], n: int) -> Sequence[Place]:
    """The operations that broadcast the output of a use over n examples; none where it is used otherwise, too."""
    assert use.edges[0] is not None
    places: list[Place] = []
    stack, visited = [use.edges[0].node], {use.edges[0].node}
    while stack:
        for place in readers.get(stack.pop(), ()):
            node, (u, z) = graph.nodes[place[0]], shapes_at(place, graph.nodes)
            if u.numel() == z.numel():  # perhaps a reshape
                stack += [node] if node not in visited else []
                visited.add(node)
            elif u[-1:] == z[-1:] == use.shape[-1:] and _is_broadcast(u, z, n):
                places.append(place)
            else:
                return ()
    return places


def _is_broadcast(u: torch.Size, z: torch.Size, n: int) -> bool:
    """Whether a tensor of shape u broadcasts to z, with n examples on an axis where it has none."""
    wide = (1,) * (len(z) - len(u)) + tuple(u)
    pairs = list(zip(wide, z, strict=len(u) <= len(z)))
    return all(one in (1, size) for one, size in pairs) and any(one == 1 and size == n for one, size in pairs[:-1])


def _add_up(tape: Tape, number: int, places: Sequence[Place], graph: Survey, s: Tensor, g: Tensor) -> bool:
    """Whether the cotangent of a use is the sum of those at these places."""
    moved = tape.with_tables({number: places}, graph.nodes)
    there = moved.output_cotangents(s, range(number, number + len(places)))
    sums = (
        there[number + k][0][0].sum_to_size(shapes_at(place, graph.nodes)[0]).flatten()
        for k, place in enumerate(places)
    )
    g = g.flatten()
    return bool((g - sum(sums, torch.zeros_like(g))).norm() <= torch.finfo(g.dtype).eps ** 0.5 * g.norm())


def _may_lack_examples(index: Sequence[int], n: int) -> bool:
    """Whether an index of this shape may have no examples, n: it has no axis of theirs, or one of one."""
    return len(index) <= 1 or index[0] != n or 1 in index[1:]


_REENTRANT = "CheckpointFunctionBackward"


def check_reentrant_checkpoint(model: Model, names: Collection[str], counts: Mapping[int, int]) -> None:
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


# What two graphs of one form have in common.


Shape: TypeAlias = tuple[int, ...]


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


# Which layers can use their rule in a pass, cached by graph signature.


_FORMS = 256  # of graphs that are remembered
# Where a row goes depends on numbers that the graph does not name.
_DATA_DEPENDENT = frozenset(
    f"{name}Backward{version}"
    for version in range(4)
    for name in (
        *("Index", "IndexSelect", "Gather", "Take", "Scatter", "ScatterAdd", "IndexPut", "IndexAdd", "IndexCopy"),
        *("MaskedSelect", "MaskedScatter", "Sort", "Topk", "Permutation", "PackPaddedSequence", "IndexFill", "Unique"),
    )
)


def _orders_by_data(graph: Survey) -> bool:
    """Whether an operation puts rows where the data says, other than those of a parameter."""
    if _DATA_DEPENDENT.isdisjoint(graph.names):
        return False
    ordered = (node for node in graph.nodes if node.name() in _DATA_DEPENDENT)
    return any(child is not None and leaf_below(child) is None for node in ordered for child, _ in node.next_functions)


_SHOWN: WeakKeyDictionary[nn.Module, LRU[Hashable, BatchAxes]] = WeakKeyDictionary()


@final
@dataclass(frozen=True)
class LayerStatus:
    """Which of the layers ``given`` can use their rule in a pass.

    ``blocks``: the layers, without their rule if it does not apply. ``unused``: the layers that the pass did not use,
    by their first name. ``unreached``: all parameters that the outputs do not depend on.
    """

    given: list[Block]
    blocks: list[Block]
    unused: Mapping[str, Block]
    unreached: frozenset[str]
    axes: BatchAxes
    memo: dict[Hashable, Any] = field(default_factory=dict)  # a cache for others, shared by passes with the same graph


@final
class StatusCache:
    """The status of layers, cached by graph signature, for a model that is called repeatedly.

    The signature is all that decides: the form of the graph, with the parameters that enter it in order, the calls of
    the layers, and which sizes agree. The sizes themselves belong to it only where examples are folded behind other
    axes: a loop whose batches change their length is probed once. What a module's probes have shown is remembered for
    as long as it lives. A graph that moves examples by an index that depends on the data is never cached.
    """

    def __init__(self) -> None:
        self._statuses: LRU[Hashable, LayerStatus] = LRU(capacity=_FORMS)
        self._last: tuple[Any, LayerStatus] | None = None  # what the last graph was like, sizes and all, and its status
        self._shown: LRU[Hashable, BatchAxes] = LRU(capacity=_FORMS)  # of a function, which has no module

    def of(self, model: Model, blocks: list[Block], tape: Tape) -> tuple[LayerStatus, Tape]:
        """The status, and the tape with the batch in front."""
        graph = survey(tape.y)
        calls, shapes = _signature(tape.uses)
        shapes = [tuple(tape.y.shape), *shapes, *graph.shapes, *graph.places]
        form = (graph.form, calls, tape.operations is None)
        # A training loop shows the same graph again and again: to compare it takes less time than to hash it.
        if self._last is not None and self._last[0] == (form, shapes) and self._last[1].given == blocks:
            return self._last[1], _placed(tape, self._last[1], graph)
        keys = (form, size_pattern(shapes)), (form, tuple(shapes))
        for key in keys:
            status = self._statuses.get(key)
            if status is not None and status.given == blocks:
                placed = _placed(tape, status, graph)
                if status.axes.fit(placed):
                    self._last = (form, shapes), status
                    return status, placed
        check_reentrant_checkpoint(model, graph.names, graph.counts)
        axes, kept = self._look(model, tape, graph, keys)
        status = _status(model, blocks, tape, graph, axes)
        if kept is not None:
            self._statuses[kept] = status
        return status, _placed(tape, status, graph)

    def _look(
        self, model: Model, tape: Tape, graph: Survey, keys: tuple[Hashable, Hashable]
    ) -> tuple[BatchAxes, Hashable | None]:
        """What probes show, now or earlier, and the key of all graphs for which that holds; None if it holds once."""
        known = self._shown if model.module is None else _SHOWN.setdefault(model.module, LRU(capacity=_FORMS))
        for key in keys:
            axes = known.get(key)
            if axes is not None and axes.fit(tape.with_tables(axes.tables, graph.nodes)):
                return axes, key
        axes = find_batch_axes(tape, graph)
        if not axes.certain or _orders_by_data(graph):
            return axes, None
        key = keys[not axes.any_size or keys[0] in known]
        known[key] = axes
        return axes, key


def _placed(tape: Tape, status: LayerStatus, graph: Survey) -> Tape:
    """The tape with the tables and the batch axes of a status, and what it remembers."""
    axes = status.axes
    tape = tape.with_tables(axes.tables, graph.nodes).with_batch_first(axes.axes)
    return replace(tape, memo=status.memo, shown=axes.operations)


def _status(model: Model, given: list[Block], tape: Tape, graph: Survey, axes: BatchAxes) -> LayerStatus:
    wrong, tape = axes.without_rule, tape.with_tables(axes.tables, graph.nodes)
    blocks = [b if b.rule is None or tape.complete(b, graph.counts, wrong) else b.without_rule() for b in given]
    unreached = graph.unreached(tape.leaves or model.params)
    # Nothing that the pass returned depends on them, whether or not the layer was called.
    unused = {b.names[0]: b for b in given if unreached.issuperset(b.names)}
    blocks = [b.without_rule() if b.names[0] in unused else b for b in blocks]
    return LayerStatus(list(given), blocks, unused, unreached, axes)


def _signature(uses: Sequence[Use]) -> tuple[tuple[Hashable, ...], list[tuple[int, ...]]]:
    """All that the status depends on in the calls: what was called, in one flat tuple, and the shapes."""
    hiding = replaying([type(use.rule) for use in uses])
    calls: list[Hashable] = []
    shapes: list[tuple[int, ...]] = []
    for use in uses:
        calls += id(use.module), type(use.rule)
        calls.extend(use.entries)
        shapes += use.shapes
        if hiding and type(use.rule) in hiding:  # how often its parameters enter, and what it was given
            given = [t.shape for t in tensors_of((use.call.args, use.call.kwargs))]
            edges = tuple(edge is None for edge in use.edges)
            calls.append((tuple(use.entries.values()), len(given), edges, use.call.training))
            shapes += given
    return tuple(calls), shapes


# The origin of a NaN or an infinity. The search is slow and runs only after one has appeared.


def check_outputs(model: Model, x: Inputs, y: Tensor) -> None:
    """Raise if an output is not finite, naming the first module whose output is not."""
    if bool(torch.isfinite(y.detach()).all()):
        return
    raise NonFiniteError(f"the outputs are not finite; {_origin(model, x)}. {_masked(y)}Nothing was changed")


def _masked(y: Tensor) -> str:
    """What to do about logits of −inf, which exclude a class on purpose."""
    if not bool((y.isfinite() | (y == -torch.inf)).all()):
        return ""
    return (
        "If −inf excludes a class, return finite logits, and give Fisher(Masked(Categorical())) with the target "
        "Mask(actions=…), both of ng.families. "
    )


def _origin(model: Model, x: Inputs) -> str:
    for name, p in model.params.items():
        if not bool(torch.isfinite(p.detach()).all()):
            return f"parameter {name} holds NaN or infinity: reload it from a checkpoint"
    if not all(bool(torch.isfinite(t).all()) for t in tensors_of(x) if t.is_floating_point()):
        return "the inputs hold NaN or infinity: clean the batch"
    first = _first_module(model, x)
    return f"the first layer with NaN or infinity is {first}: start elsewhere, lower the learning rate or raise damping"


def _first_module(model: Model, x: Inputs) -> str:
    if model.module is None:
        return "the function itself"
    broken: list[str] = []
    handles = []
    for name, module in model.module.named_modules():

        def look(_m: nn.Module, _x: Any, out: Any, name: str = name, kind: str = type(module).__name__) -> None:
            if not all(bool(torch.isfinite(t).all()) for t in tensors_of(out) if t.is_floating_point()):
                broken.append(f"{plain_name(name) or 'the model'} ({kind})")

        handles.append(module.register_forward_hook(look))
    try:
        with torch.no_grad():
            model(None, x)
    finally:
        for handle in handles:
            handle.remove()
    return broken[0] if broken else "outside every module"
