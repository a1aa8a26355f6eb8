"""Where the examples are in every layer's output: on one axis, in their order, or the rule cannot speak for it.

A shape cannot say so. A model may swap its axes (t positions where t happens to be n), sort its examples and put them
back, or apply a layer to a table with n rows. For most layers the graph proves it
# (``natgrad.pullback.batch_axis``). For
the others cotangents tell: scaling example n by c_n must scale row n of every g by c_n, and nothing else.

Most rules want them on the first axis. To a rule that treats leading axes alike (``Rule.leading``) a layer is shown
with its examples there, wherever they are (``Use.turned``): torch's transformers and recurrences have them second.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.errors import BatchStatisticsError, NonFiniteError, UncoveredError
from natgrad.model import Inputs, Model, tensors_of
from natgrad.pullback.graph import Axis, Step, Survey, below, leaf_below, nodes, survey
from natgrad.pullback.layer import Block
from natgrad.pullback.tape import Tape, Use
from natgrad.rules.base import Replayed, cotangent_features, replaying

# Where the tensors of a graph hold their examples, proven from the operations alone.
#
# Outputs y [n *out] have their examples on the first axis. Going down from y, every operation tells on which axis of
# its arguments they lie (``natgrad.pullback.graph``): an entry of example n there changes nothing but the output of
# example n. A node is proven if all ways from y to it agree. A module that hides its layers (a fused recurrence,
# attention) is passed over, from its output to its input: its rule says that it keeps the examples apart.


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
        and use.rule.batch_axis(use.module, use.call) == axis.index < min(len(use.shape), len(given))
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


_Signature: TypeAlias = tuple[object, ...]
_KEPT = 256  # graphs; the lengths of sequences make many


@final
@dataclass(frozen=True)
class Seating:
    """Where the uses of a tape have their examples, by their positions in ``Tape.uses``.

    ``elsewhere``: those that a rule cannot speak for. ``idle``: those whose output never reaches y, so neither.
    ``axes``: those that it can, once they are turned. All others are as the rule has them. ``certain``: whether
    another pass with the same graph need not be looked at; without any cotangents there was nothing to see.
    """

    elsewhere: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    axes: Mapping[int, Axis] = field(default_factory=dict)
    certain: bool = True

    @property
    def wrong(self) -> frozenset[int]:
        """All that a rule cannot speak for."""
        return self.elsewhere | self.idle


@final
class Verdicts:
    """What was found about graphs that have been looked at before, for a model that is called again and again.

    A graph is known again by its operations with their axes, and by its layers with their shapes. One that moves
    examples by an index that depends on the data is looked at every time.
    """

    def __init__(self) -> None:
        self._known: dict[_Signature, Seating] = {}
        self._told: set[str] = set()

    def news(self, message: str) -> bool:
        """Whether this has not been said yet."""
        new = message not in self._told
        self._told.add(message)
        return new

    def seated(self, tape: Tape, seen: Survey) -> Seating:
        """As the function of this name, for a graph of these kinds of nodes."""
        if not tape.uses or not tape.y.requires_grad:
            return Seating()
        if not DATA_DEPENDENT.isdisjoint(seen.names):
            return seated(tape)
        uses = tuple((id(use.module), use.shapes) for use in tape.uses)
        signature = (tape.y.shape, uses, seen.kinds, seen.form)
        found = self._known.get(signature)
        if found is None:
            found = seated(tape)
            if found.certain:
                self._known[signature] = found
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return found


def seated(tape: Tape) -> Seating:
    """Where every layer call of a tape has its examples."""
    if not tape.uses or not tape.y.requires_grad:
        return Seating()
    n, order = tape.y.shape[0], ordered(tape.y, tape.uses)
    axes: dict[int, Axis] = {}
    unsure: dict[int, list[Axis | None]] = {}
    elsewhere, idle = set(), set()
    for at, use in enumerate(tape.uses):
        home, proven = use.rule.batch_axis(use.module, use.call), order.axis(use)
        if not order.reaches(use):
            idle.add(at)
        elif _at_home(use, n) and (n == 1 or (proven is not None and proven.index == home)):
            continue
        elif proven is not None and use.turns(proven, n):
            axes[at] = proven
        elif options := _options(use, n):
            unsure[at] = options
        else:
            elsewhere.add(at)
    if not unsure:
        return Seating(frozenset(elsewhere), frozenset(idle), axes)
    found, certain = _looked_for(tape, unsure)
    axes |= {at: axis for at, axis in found.items() if axis is not None}
    return Seating(frozenset(elsewhere | unsure.keys() - found.keys()), frozenset(idle), axes, certain)


def _at_home(use: Use, n: int) -> bool:
    """Whether n examples may be where the rule has them."""
    home = use.rule.batch_axis(use.module, use.call)
    return home is None or (len(use.shape) > max(home, 1) and use.shape[home] == n)


def _options(use: Use, n: int) -> list[Axis | None]:
    """Where n examples may be: None is where the rule has them."""
    home = use.rule.batch_axis(use.module, use.call)
    others = [Axis(at) for at, size in enumerate(use.shape) if size == n and at != home and use.turns(Axis(at), n)]
    return [*([None] if _at_home(use, n) else []), *others]


def check_alike(tape: Tape, layers: Sequence[Block], part: tuple[int, int]) -> Seating:
    """Where the examples are. Raise if a layer that has its rule from another part of the batch cannot have it here.

    A model may sort its examples: the first part was in order, and this one is not.
    """
    counts, found = survey(tape.y).counts, seated(tape)
    names = [layer.names[0] for layer in layers if layer.rule and not tape.complete(layer, counts, found.wrong)]
    if names:
        raise BatchStatisticsError(
            f"the layers of {', '.join(names)} see examples {part[0]} to {part[1]} in another order, or are used in "
            "another way, than those before: the batch cannot be processed in parts. Raise memory= so that it fits "
            "whole"
        )
    return found


def check_unused(tape: Tape, leaves: Mapping[str, Tensor], part: tuple[int, int]) -> None:
    """Raise if a parameter that the whole batch did not use is used by a part of it."""
    if not leaves or tape.y.grad_fn is None:
        return
    names = sorted(set(leaves) - survey(tape.y).unreached(leaves))
    if names:
        raise BatchStatisticsError(
            f"examples {part[0]} to {part[1]} use {', '.join(names)}, and the whole batch did not: what the model uses "
            "is decided anew in every pass, and the batch cannot be processed in parts. Raise memory= so that it fits "
            "whole"
        )


def _looked_for(tape: Tape, unsure: Mapping[int, Sequence[Axis | None]]) -> tuple[dict[int, Axis | None], bool]:
    """The first axis of each use on which cotangents show its examples, if one does, and whether that is certain.

    It is not where cotangents were zero, or so many of them that they show the examples on more than one axis.
    """
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(tape.y.shape, generator=generator, dtype=torch.float64).to(tape.y)
    once, left = tape.outer(s.unsqueeze(0)), {at: list(options) for at, options in unsure.items()}
    for c in _codes(tape.y):
        scaled = tape.outer((s * c.view(-1, *[1] * (s.ndim - 1))).unsqueeze(0))
        for at, options in left.items():
            left[at] = [axis for axis in options if _shown(tape, at, axis, once[at], scaled[at], c)]
    alive = {at: [_alive(tape, at, axis, once[at]) for axis in options] for at, options in left.items()}
    seen = all(any(bool(g.any()) for g in once[at]) for at in unsure)
    certain = seen and all(len(each) < 2 or each[0] for each in alive.values())
    return {at: options[0] for at, options in left.items() if options}, certain


def _codes(y: Tensor) -> Iterator[Tensor]:
    """Scales c [n] that tell all examples of y apart, together: powers of two, which are exact in every precision."""
    number, n = torch.arange(y.shape[0]), y.shape[0]
    while True:
        yield 2.0 ** (number % 8).to(y)
        number, n = number // 8, -(-n // 8)
        if n <= 1:
            return


def _shown(
    tape: Tape, at: int, axis: Axis | None, once: tuple[Tensor, ...], scaled: tuple[Tensor, ...], c: Tensor
) -> bool:
    """Whether the cotangents of a use are scaled by c along an axis, as its examples are."""
    return all(
        _scales(g, h, c) for g, h in zip(_rows(tape, at, axis, once), _rows(tape, at, axis, scaled), strict=True)
    )


def _alive(tape: Tape, at: int, axis: Axis | None, outer: tuple[Tensor, ...]) -> bool:
    """Whether every example has cotangents there."""
    return all(bool(g.any(1).all()) for g in _rows(tape, at, axis, outer))


def _scales(g: Tensor, h: Tensor, c: Tensor) -> bool:
    """Whether h [n ·] is c [n] times g."""
    if g.shape[0] != c.shape[0]:
        return False
    expected = c[:, None] * g
    return not bool(((h - expected).norm(dim=1) > torch.finfo(c.dtype).eps ** 0.5 * expected.norm(dim=1)).any())


def _rows(tape: Tape, at: int, axis: Axis | None, outer: tuple[Tensor, ...]) -> list[Tensor]:
    """g [n ·] of every layer of a use, a row an example, if these are on the axis."""
    use = tape.uses[at]
    if isinstance(use.rule, Replayed):
        return [g.dense()[0].flatten(1) for g in tape.inner(at, outer).values()]
    g = outer[0] if axis is None else axis.first(outer[0], tape.y.shape[0], 1)
    layers = use.rule.layers(use.module)
    return [cotangent_features(use.rule, use.module, keys, g).dense()[0].flatten(1) for keys in layers]


# Layers that a forward pass hides from its graph.


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


# Which layers have their rule in a pass. It is found once for every kind of graph, and remembered.


_KEPT_GRAPHS = 64  # graphs


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
            if len(self._known) > _KEPT_GRAPHS:
                del self._known[next(iter(self._known))]
        return found


def _judged(model: Model, given: list[Block], tape: Tape, seen: Survey, whole: bool, seating: Seating) -> Judged:
    wrong = seating.wrong
    blocks = [b if b.rule is None or tape.complete(b, seen.counts, wrong) else b.without_rule() for b in given]
    out = seen.unreached(tape.leaves or model.params) if whole else frozenset()
    # Nothing that the pass returned depends on them, whether or not the layer was called.
    unused = {b.names[0]: b for b in given if out.issuperset(b.names)}
    blocks = [b.without_rule() if b.names[0] in unused else b for b in blocks]
    told = [b for b in blocks if b.rule is not None and not any(isinstance(kind.rule, Replayed) for kind in b.kinds)]
    positions = {b.names[0]: tape.positions(b) for b in told}
    return Judged(list(given), blocks, unused, positions, seating.axes)


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


# Where a NaN or an infinity comes from. Looking is slow and happens only after one was seen.


def check_outputs(model: Model, x: Inputs, y: Tensor) -> None:
    """Raise if an output is not finite, naming the first module whose output is not."""
    if bool(torch.isfinite(y.detach()).all()):
        return
    raise NonFiniteError(f"the outputs are not finite; {_origin(model, x)}. Nothing was changed")


def _origin(model: Model, x: Inputs) -> str:
    for name, p in model.params.items():
        if not bool(torch.isfinite(p.detach()).all()):
            return f"parameter {name} holds NaN or infinity: reload it from a checkpoint"
    if not all(bool(torch.isfinite(t).all()) for t in tensors_of(x) if t.is_floating_point()):
        return "the inputs hold NaN or infinity: clean the batch"
    first = _first_module(model, x)
    return f"the first layer with NaN or infinity is {first}: lower the learning rate or raise the damping"


def _first_module(model: Model, x: Inputs) -> str:
    if model.module is None:
        return "the function itself"
    found: list[str] = []
    handles = []
    for name, module in model.module.named_modules():

        def look(_m: nn.Module, _x: Any, out: Any, name: str = name, kind: str = type(module).__name__) -> None:
            if not all(bool(torch.isfinite(t).all()) for t in tensors_of(out) if t.is_floating_point()):
                found.append(f"{name or 'the model'} ({kind})")

        handles.append(module.register_forward_hook(look))
    try:
        with torch.no_grad():
            model(None, x)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "outside every module"
