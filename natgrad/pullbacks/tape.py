"""The tape: a forward pass that records the inputs and the gradient edge of every layer with a rule.

The cotangents of all layers are one ``torch.autograd.grad(y, edges, s)``. This forms no weight gradients and does not
touch ``.grad``. In-place activations after a layer are harmless, because the edge is taken inside the forward hook.
Cotangents can be used where they arrive, in a pass from a root (``stream_cotangents``) or in the user's own
(``BackwardHooks``).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.autograd import (
    edge_of,
    leaf_uses,
    nodes,
    not_viewed,
    output_shape,
    pulled,
    put_forward_hook,
    remove_forward_hook,
    waiting_bytes,
    without_hooks,
)
from natgrad.accelerate.devices import refuse_compiled_backward
from natgrad.accelerate.modules import uncompiled
from natgrad.errors import NatgradError
from natgrad.jet import Jet, homogeneous
from natgrad.model import Inputs, Model, Shapes, in_library_pass, map_tensors, refuse_nested, tensors_of
from natgrad.pullbacks.batch_norm import NormMode, Statistics, refuse_unknown
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.operations import Operation, OperationRecorder
from natgrad.pullbacks.row_examples import BatchAxis
from natgrad.rules.base import Call, Rule, cotangent_features, input_features
from natgrad.rules.features import DenseFeatures, Features, Joined
from natgrad.rules.replayed import Replay, Replayed, replaying

T = TypeVar("T")

# Edges of the autograd graph, at which cotangents are read.


def apart(output: Any, given: Collection[Any]) -> Any:
    """The outputs of a module, cloned if another output was computed from them, so that each has its own node.

    An LSTM cell returns c and h = o tanh c. The cotangent of c would contain that of h, which the replay adds again.
    """
    tops = [t.grad_fn for t in tensors_of(output) if t.grad_fn is not None]
    if len(tops) < 2:
        return output
    below = set(nodes([child for top in tops for child, _ in top.next_functions], stop=given))
    if below.isdisjoint(tops):
        return output
    return map_tensors(output, lambda t: t.clone() if t.grad_fn in below else t)


def _constant(t: Tensor) -> Tensor:
    """An argument of a layer as its rule gets it: sparse inputs have dense second moments."""
    t = t.detach()
    if t.layout is torch.strided and not t.is_nested:
        return t
    refuse_nested(t, "the inputs of a layer")
    return t.to_dense()


# One call of a layer in a forward pass.


@final
@dataclass(frozen=True)
class Use:
    """One call of a module with a rule: its arguments, and the shape and gradient edge of each output.

    ``entries``: how often the call puts each parameter, by its id, into the graph.
    """

    module: nn.Module
    rule: Rule
    entries: Mapping[int, int]
    call: Call
    edges: tuple[GradientEdge | None, ...]  # None for an output without a gradient
    shapes: tuple[torch.Size, ...]
    half: bool  # whether an output is in float16
    axis: BatchAxis | None = None  # in the graph, if call and shapes are of a view (see ``with_batch_first``)

    @property
    def shape(self) -> torch.Size:
        """The shape of the first output; most layers have only one."""
        return self.shapes[0]

    @cached_property
    def replay(self) -> Replay:
        """The call, run again layer by layer."""
        assert isinstance(self.rule, Replayed)
        with torch.enable_grad():
            return self.rule.replay(self.module, self.call)

    def supports_axis(self, axis: BatchAxis, n: int) -> bool:
        """Whether the rule allows n examples on this axis of the output: it must treat it like the first axis."""
        return axis.index < self.rule.leading(self.module, self.shape) and axis.fits(tuple(self.shape), n)

    def with_batch_first(self, axis: BatchAxis, n: int) -> Use:
        """The same call with the batch axis moved to the front, for a layer that treats leading axes alike.

        Inputs and outputs are views. Row n of an output depends on row n of the input only, on whatever axis.
        """
        call = self.call.map(lambda t: axis.move_to_front(t, n))
        return replace(self, call=call, shapes=tuple(torch.Size(axis.split(s, n)) for s in self.shapes), axis=axis)

    def batch_first(self, g: Tensor) -> Tensor:
        """Cotangents [k *output] from the graph, with the batch axis moved to the front."""
        return g if self.axis is None else self.axis.move_to_front(g, self.shape[0], 1)


@final
class Recorder:
    """Collects the uses of all layers with a rule between ``start`` and ``stop``, by forward hooks."""

    def __init__(self, model: Model, blocks: Sequence[Block], of_user: bool = False) -> None:
        self.uses: list[Use] = []
        self._of_user = of_user  # a pass of the user, inside which the library may run its own passes
        self.blocks: list[Block] = list(blocks)
        self.statistics: Statistics = Statistics()
        self._model = model
        kinds = [kind for block in blocks for kind in block.kinds]
        self._rules = {layer: kind.rule for kind in kinds for layer in kind.modules if kind.rule}
        hiding = replaying(map(type, self._rules.values()))
        self._replayed = {layer for layer, rule in self._rules.items() if type(rule) in hiding}
        # Like ``register_forward_hook(hook, with_kwargs=True)``, which makes a handle with three weak references for
        # each module. Here all share the id of one handle, which torch gives to no other hook.
        self._number = RemovableHandle(OrderedDict()).id
        self._once: dict[nn.Module, Mapping[int, int]] = {}  # ``entries`` of layers whose parameters enter it once
        self._operations: OperationRecorder | None = None
        self._norms: NormMode | None = None
        self._unknown: list[str] = []  # normalisations that were not understood
        self._thread = 0  # that the pass runs in; others may evaluate the model meanwhile
        self._stopped = True

    def start(self, x: Inputs = None, *, operations: bool = False) -> None:
        """Start recording a pass on inputs x; ``operations``: also record its operations."""
        self._thread = threading.get_ident()
        self.uses, self.statistics, self._stopped = [], Statistics(), False
        named, watch = self._model.batch_norms, self._watch
        norms = set(named.values())
        for layer in self._rules:
            if layer not in norms:
                put_forward_hook(layer, self._number, watch)
        self._operations = None
        if operations:
            self._operations = OperationRecorder(tensors_of(x))
            self._operations.enter()
        self._unknown = []
        if norms or operations:
            recorded = self._operations if self._model.constant_statistics else None
            is_data = None if recorded is None else recorded.is_data
            self._norms = NormMode(self.statistics, named, self._normalised, is_data, self._listens)
            self._norms.enter()

    def stop(self) -> None:
        if self._norms is not None:
            self._norms.leave()
            self._unknown, self._norms = self._norms.unknown, None  # which holds this recorder
        if self._operations is not None and not self._stopped:
            self._operations.leave()
        self._stopped = True
        for layer in self._rules:
            remove_forward_hook(layer, self._number)

    def forget(self) -> None:
        """Drop what was recorded, which keeps the graph alive."""
        self.uses, self._operations = [], None

    def tape(self, y: Tensor, shapes: Shapes = ()) -> Tape:
        """The tape of the pass with outputs y, heads of these ``shapes``. The recorder drops its references."""
        refuse_unknown(self._unknown)
        uses, self.uses = self.uses, []
        operations, self._operations = self._operations, None
        recorded = None if operations is None else tuple(operations.uses())
        leaves = self._model.leaves
        tape = Tape(y, tuple(uses), self.statistics, operations=recorded, leaves=leaves, shapes=shapes)
        if leaves is self._model.params:
            return tape
        stands = {id(p): id(leaves[name]) for name, p in self._model.params.items()}
        entries = [{stands.get(p, p): count for p, count in use.entries.items()} for use in uses]
        uses = [replace(use, entries=each) for use, each in zip(uses, entries, strict=True)]
        return replace(tape, uses=tuple(uses), stands=stands)

    def _watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook of a layer: append a ``Use``. The output is replaced if it was cloned (``apart``) or a view.

        Nobody else has what a linear layer returns a view of.
        """
        if self._of_user and in_library_pass():
            return None
        if len(args) == 1 and not kwargs and isinstance(output, Tensor) and module not in self._replayed:
            if output.requires_grad:  # the fast path of most layers
                output = not_viewed(output) if type(module).forward is nn.Linear.forward else output
                x = _constant(args[0]) if isinstance(args[0], Tensor) else map_tensors(args[0], _constant)
                self._add(module, Call((x,), {}, module.training), output)
            return output
        if isinstance(output, Jet):
            return self._watch_jet(module, args, output)
        outputs = tensors_of(output)
        if not any(t.requires_grad for t in outputs):
            return None
        call = Call(map_tensors(args, _constant), map_tensors(kwargs, _constant), module.training)
        if module not in self._replayed:
            return self._add(module, call, *outputs)
        given = {t.grad_fn for t in tensors_of((args, kwargs)) if t.grad_fn is not None}
        output = apart(output, given)
        outputs = tensors_of(output)
        self._add(module, call, *outputs, entries=leaf_uses([t.grad_fn for t in outputs], stop=given))
        return output

    def _add(self, module: nn.Module, call: Call, *outputs: Tensor, entries: Mapping[int, int] | None = None) -> None:
        """A use with these outputs. Without ``entries``, every parameter of the layer enters the graph once."""
        rule = self._rules[module]
        if entries is None:
            entries = self._once.get(module)
            if entries is None:
                entries = self._once[module] = dict.fromkeys(map(id, rule.parameters(module).values()), 1)
        edges = tuple([edge_of(t) if t.requires_grad else None for t in outputs])
        half = any(t.dtype is torch.float16 for t in outputs)
        self.uses.append(Use(module, rule, entries, call, edges, tuple([t.shape for t in outputs]), half))

    def _listens(self) -> bool:
        """Whether what runs now belongs to the pass that is recorded."""
        other = self._stopped or threading.get_ident() != self._thread
        return not other and not (self._of_user and in_library_pass())

    def _normalised(self, module: nn.Module, call: Call, z: Tensor) -> None:
        """A module has called the operation of its rule, and goes on with what that returned."""
        if module in self._rules:
            self._add(module, call, z)

    def _watch_jet(self, module: nn.Module, args: tuple[Any, ...], output: Jet) -> None:
        """A call with derivatives by the inputs (``natgrad.pde``): all channels are positions."""
        z = output.channels
        if self._rules[module].takes_jets and len(args) == 1 and isinstance(args[0], Jet) and z.requires_grad:
            x = args[0].detached()
            self._add(module, Call((x, homogeneous(x)), {}, module.training), z)


def record(model: Model, blocks: Sequence[Block], x: Inputs, operations: bool = False) -> Tape:
    """Run the model on x and record the pass, and its ``operations`` if parameters are used outside their modules.

    If no block has a rule and no operations are wanted, only the outputs are recorded.
    """
    if not operations and not any(block.rule for block in blocks):
        with torch.no_grad():
            y, shapes = model.evaluated(None, x)
            return Tape(y, (), shapes=shapes)
    recorder = Recorder(model, blocks)
    leaves: dict[str, Tensor] = model.params
    if operations and model.module is None:
        leaves = {name: p.detach().requires_grad_() for name, p in model.params.items()}
    recorder.start(x, operations=operations)
    try:
        with torch.enable_grad():
            y, shapes = model.evaluated(leaves if model.module is None else None, x)
    finally:
        recorder.stop()
    return replace(recorder.tape(y, shapes), leaves=leaves)


@final
@dataclass(frozen=True)
class Tape:
    """The outputs y [n *out] of a forward pass with their graph, and the recorded uses of its layers."""

    y: Tensor
    uses: tuple[Use, ...]
    statistics: Statistics = field(default_factory=Statistics)
    memo: dict[Hashable, Any] = field(default_factory=dict)  # cache shared by passes with the same graph
    shown: dict[Hashable, Any] = field(default_factory=dict)  # by probes of operations, likewise
    operations: tuple[Operation, ...] | None = None  # operations that read parameters, if they were recorded
    leaves: Mapping[str, Tensor] = field(default_factory=dict)  # the parameters of the pass
    shapes: Shapes = ()  # of the heads that y holds side by side
    stands: Mapping[int, int] = field(default_factory=dict)  # by the id of a shard that of the leaf that stands for it

    def with_batch_first(self, axes: Mapping[int, BatchAxis]) -> Tape:
        """The same pass, with the batch axis of the uses at these positions moved to the front."""
        if not axes:
            return self
        n = self.y.shape[0]
        changed = (use.with_batch_first(axes[at], n) if at in axes else use for at, use in enumerate(self.uses))
        return replace(self, uses=tuple(changed))

    def with_tables(self, tables: Mapping[int, Sequence[Place]], nodes: Sequence[Any]) -> Tape:
        """The same pass, with these uses of embeddings as if every example had asked for its row.

        A use, by its position, becomes one for each of the places among the ``nodes`` where its output is broadcast
        over the examples.
        """
        if not tables:
            return self
        pairs = enumerate(self.uses)
        moved = [_at_places(use, tables[at], nodes) if at in tables else [use] for at, use in pairs]
        return replace(self, uses=tuple(use for each in moved for use in each))

    def complete(self, block: Block, counts: Counter[int], misplaced: Collection[int]) -> bool:
        """Whether the recorded uses are all uses of a block, each with a usable batch axis.

        A weight that is used outside its module's forward (``F.linear(x, layer.weight)``) enters the graph more often
        (``leaf_uses``) than the recorded uses explain. ``misplaced``: positions in ``uses`` without a usable batch
        axis.
        """
        uses = self.use_ids(block)
        if not uses or any(at in misplaced for at in uses):
            return False
        expected: Counter[int] = Counter()
        for at in uses:
            expected.update(self.uses[at].entries)
        params = {
            id(kind.rule.parameters(m)[key])
            for kind in block.kinds
            if kind.rule is not None
            for m in kind.modules
            for key in kind.keys
        }
        replayed = any(isinstance(kind.rule, Replayed) for kind in block.kinds)
        params = {self.stands.get(p, p) for p in params}
        # ``functional_call`` may put other parameters into the graph than the module's own.
        return all(counts[p] == expected[p] and (replayed or expected[p]) for p in params)

    def positions(self, block: Block) -> int:
        """The number of positions r·c of an example that share the weight of a block; 1 without a rule."""
        if block.rule is None:
            return 1
        if block.facets:
            return sum(map(self.positions, block.kinds))
        if isinstance(block.rule, Replayed):
            rule = block.rule
            return sum(rule.positions(use.module, block.keys, use.call) for use in self.of(block))
        return max(1, sum(use.shape.numel() for use in self.of(block)) // max(1, self.y.shape[0] * block.shape[1]))

    def of(self, block: Block) -> list[Use]:
        """The uses of a block, in the order of the calls."""
        return [self.uses[at] for at in self.use_ids(block)]

    def use_ids(self, block: Block) -> list[int]:
        """The positions in ``uses`` of the uses of a block."""
        owners = block.owners
        if len(owners) == 1:
            return self._by_module.get(owners[0], [])
        return sorted(at for module in owners for at in self._by_module.get(module, ()))

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        """The shapes of y, of the outputs of all uses, and of the arguments of replayed modules."""
        hidden = [self.uses[at].call for at in self._replayed]
        given = [t.shape for call in hidden for t in tensors_of((call.args, call.kwargs))]
        return (self.y.shape, *[shape for use in self.uses for shape in use.shapes], *given)

    @cached_property
    def _replayed(self) -> tuple[int, ...]:
        """The positions in ``uses`` of the uses of replayed modules."""
        kinds = [type(use.rule) for use in self.uses]
        hiding = replaying(kinds)
        return tuple([at for at, kind in enumerate(kinds) if kind in hiding]) if hiding else ()

    @property
    def last_nodes(self) -> list[Any]:
        """The nodes that end the graph of y and the graphs of all replays."""
        replays = [self.uses[at].replay.outputs for at in self._replayed]
        return [self.y.grad_fn, *(t.grad_fn for outputs in replays for t in outputs)]

    @property
    def output_bytes(self) -> int:
        """The bytes of the outputs of all uses, in the precision of y."""
        numbers = self.cached("outputs", lambda: sum(shape.numel() for use in self.uses for shape in use.shapes))
        return numbers * self.y.element_size()

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, cached in ``memo`` until a pass has other sizes. It must depend on graph and sizes only."""
        if key not in self._of_sizes:
            self._of_sizes[key] = make()
        value: T = self._of_sizes[key]
        return value

    @cached_property
    def _of_sizes(self) -> dict[Hashable, Any]:
        """What ``memo`` has for the sizes of this pass; what it had for others is dropped."""
        sizes = self.sizes
        of_sizes = self.memo.get("sizes")
        if of_sizes is None or of_sizes[0] != sizes:
            of_sizes = self.memo["sizes"] = sizes, {}
        return cast(dict[Hashable, Any], of_sizes[1])

    @cached_property
    def _by_module(self) -> dict[nn.Module, list[int]]:
        by_module: dict[nn.Module, list[int]] = {}
        for at, use in enumerate(self.uses):
            by_module.setdefault(use.module, []).append(at)
        return by_module

    def inputs(self, block: Block) -> Features:
        """a of a block with a rule, its uses concatenated along r (for a tied weight, of one kind)."""
        rule = block.rule
        assert rule is not None
        if isinstance(rule, Replayed):
            return Joined.of([use.replay.layer(block.keys) for use in self.of(block)])
        uses = self.of(block)
        return Joined.of([input_features(u.rule, u.module, block.keys, u.call, block.names, block.shape) for u in uses])

    @cached_property
    def half(self) -> bool:
        """Whether a cotangent is in float16, which needs loss scaling; bfloat16 has the range of single precision."""
        return self.y.dtype is torch.float16 or any(use.half for use in self.uses)

    def output_cotangents(self, s: Tensor, use_ids: Iterable[int] | None = None) -> dict[int, tuple[Tensor, ...]]:
        """Cotangents [k *output] of the outputs of these uses (default: all): one backward pass from s."""
        ids = range(len(self.uses)) if use_ids is None else list(use_ids)
        edges = [edge for at in ids for edge in self.uses[at].edges if edge is not None]
        if not edges:
            return {}
        with self.statistics.constant(affine=self.operations is not None):
            grads = iter(pulled(self.y, edges, s, self.half))
        cotangents: dict[int, tuple[Tensor, ...]] = {}
        for at in ids:
            use = self.uses[at]
            arrived = [None if edge is None else next(grads) for edge in use.edges]
            pairs = zip(arrived, use.shapes, strict=True)
            cotangents[at] = tuple(
                [s.new_zeros(s.shape[0], *shape) if g is None else use.batch_first(g) for g, shape in pairs]
            )
        return cotangents

    def leaf_cotangents(self, leaves: Sequence[Tensor], s: Tensor) -> list[Tensor]:
        """Jᵀs [k *shape] at leaves of the graph, zero where y does not depend on one; s [k n *out]."""
        with self.statistics.constant(affine=True), without_hooks(leaves):
            grads = pulled(self.y, leaves, s, self.half)
        pairs = zip(leaves, grads, strict=True)
        return [s.new_zeros(s.shape[0], *p.shape) if g is None else g for p, g in pairs]

    def inner_cotangents(self, at: int, outer: tuple[Tensor, ...]) -> Mapping[str, Features]:
        """Cotangents [k n r c o] of the layers of a replayed use, by local parameter name."""
        pulled = self.uses[at].replay.pull(outer)
        distinct: dict[int, Features] = {id(g): DenseFeatures(g) for g in pulled.values()}  # layers may share one g
        return {key: distinct[id(g)] for key, g in pulled.items()}

    def cotangents(self, s: Tensor) -> Cotangents:
        """The cotangents of all uses, from s [k n *out]."""
        return self.with_inner(self.output_cotangents(s))

    def with_inner(self, outer: dict[int, tuple[Tensor, ...]]) -> Cotangents:
        """These cotangents of outputs, and those of the layers inside replayed uses, computed from them."""
        replayed = [at for at in outer if at in self._replayed]
        return Cotangents(outer, {at: self.inner_cotangents(at, outer[at]) for at in replayed})


Place: TypeAlias = tuple[int, int]  # a node of the graph, by its number, and an argument of it, by its own


def shapes_at(place: Place, nodes: Sequence[Any]) -> tuple[torch.Size, torch.Size]:
    """The shapes of the argument and of the result there."""
    node = nodes[place[0]]
    child, output = node.next_functions[place[1]]
    return torch.Size(output_shape(child, output)), torch.Size(output_shape(node))


def _at_places(use: Use, places: Sequence[Place], nodes: Sequence[Any]) -> list[Use]:
    """The use of an embedding, once for every place."""
    out: list[Use] = []
    for place in places:
        u, z = shapes_at(place, nodes)
        call = replace(use.call, args=(use.call.x.reshape(u[:-1]).expand(z[:-1]),), kwargs={})
        entries = {} if out else use.entries  # the table entered the graph once
        out.append(replace(use, entries=entries, call=call, edges=(GradientEdge(nodes[place[0]], 0),), shapes=(z,)))
    return out


@final
@dataclass(frozen=True)
class Cotangents:
    """Cotangents of the uses of a tape, by position in ``Tape.uses``.

    ``outer``: of the outputs of a use. ``inner``: of the layers inside a replayed use, by local parameter name.
    ``features``: of a use whose rule needs the graph, computed before the graph was freed.
    """

    outer: dict[int, tuple[Tensor, ...]]
    inner: dict[int, Mapping[str, Features]]
    features: Mapping[int, Features] = field(default_factory=dict)

    def of(self, tape: Tape, block: Block) -> Features:
        """g of a block with a rule, its uses concatenated along r (for a tied weight, of one kind)."""
        return Joined.of([self._of_use(tape.uses[at], at, block) for at in tape.use_ids(block)])

    def _of_use(self, use: Use, at: int, block: Block) -> Features:
        if isinstance(use.rule, Replayed):
            return self.inner[at][block.keys[0]]
        if at in self.features:
            return self.features[at]
        return cotangent_features(use.rule, use.module, block.keys, self.outer[at][0], block.shape)

    def forget(self, at: int) -> None:
        """Free the cotangents of a use that no other layer needs."""
        self.outer.pop(at, None)
        self.inner.pop(at, None)


# Backward passes whose cotangents are used where they arrive.


Consume: TypeAlias = Callable[[Sequence[int], Cotangents], None]  # numbers of layers, and the cotangents of their uses
Arrived: TypeAlias = tuple[Tensor | None, ...]  # what a node is given, of every output of it


def _outermost(receive: Callable[..., None]) -> Callable[..., None]:
    """The hook, deaf while it runs: to compute features it may pull a parameter's rows through the layers below."""
    runs = False

    def hook(*arrived: Any) -> None:
        nonlocal runs
        if runs:
            return
        runs = True
        try:
            receive(*arrived)
        finally:
            runs = False

    return hook


def _receive_from_user(receive: Callable[..., None], *arrived: Any) -> None:
    refuse_compiled_backward()
    if not in_library_pass():
        receive(*arrived)


_TWICE_IN_OURS = (
    "a backward pass through the model came twice to the outputs of {}: a hook on a tensor runs a pass of its own "
    "through the layers (do so in the backward of a torch.autograd.Function), or a second optimizer of natgrad was "
    "made for this model (delete one of them)"
)
_TWICE_IN_THEIRS = (
    "two backward passes came to the outputs of {} in one forward pass: call backward once, on the sum of the losses. "
    "If the loss has derivatives by the inputs (a gradient penalty), use BatchGradient() or a metric on the outputs. A "
    "second optimizer of natgrad for this model may be the cause, too: delete one of them"
)


def stream_cotangents(
    tape: Tape, blocks: Sequence[Block], s: Tensor, consume: Consume, room: int | None = None
) -> None:
    """Call ``consume`` with all layers, for s [k n *out], while the backward pass runs.

    A layer that is called once and lies above another layer receives its cotangents in a hook on its autograd node.
    They wait there until more than ``room`` bytes of them have arrived, and are freed before those of the layers below
    are computed: on a processor none wait, on a GPU a third of them, so that their kernels are launched together. The
    other layers are consumed after the pass.
    """
    early: Sequence[int] = ()
    room = waiting_bytes(tape.y.device, tape.output_bytes) if room is None else room
    if s.shape[0] == 1 and not tape.half and tape.output_bytes > room:  # a half precision pass is scaled as a whole
        key = "early", tuple([block.names for block in blocks])
        if key not in tape.memo:  # the search is slow: it holds for all sizes
            tape.memo[key] = _uses_above_others(tape, blocks)
        early = tape.memo[key]
    hooks = BackwardHooks(tape, blocks, consume, early, room)
    try:
        late = {at for block in blocks for at in tape.use_ids(block)}.difference(early)
        hooks.finish(tape.output_cotangents(s, sorted(late)))
    finally:
        hooks.remove()


@final
class BackwardHooks:
    """Cotangents of a backward pass, consumed where they arrive: of the user's or, for some ``uses``, of the library's.

    They wait until more than ``room`` bytes of them have arrived. Layers that are called several times, and those that
    hide layers, wait for ``finish``, which consumes what is left.
    """

    def __init__(
        self,
        tape: Tape,
        blocks: Sequence[Block],
        consume: Consume,
        uses: Sequence[int] | None = None,
        room: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._consume: Consume | None = consume
        self._uses_of = [tape.use_ids(block) for block in blocks]
        self._left = dict.fromkeys(range(len(blocks)))  # numbers of layers
        self._boxes: dict[int, dict[int, Tensor]] = {}  # by the position of a use, the cotangents of its outputs
        self._consumed: set[int] = set()  # positions of uses
        pairs = [(at, block) for block, ids in zip(blocks, self._uses_of, strict=True) for at in ids]
        self._through_graph = {at: block for at, block in pairs if tape.uses[at].rule.needs_graph}
        self._features: dict[int, Features] = {}  # of those
        self._waiting = 0  # bytes
        self._room = waiting_bytes(tape.y.device, tape.output_bytes) if room is None else room
        self._layers_of: dict[int, list[int]] = {}
        for b, ids in enumerate(self._uses_of):
            for at in ids:
                self._layers_of.setdefault(at, []).append(b)
        outputs: dict[Any, list[tuple[int, int, int]]] = {}
        for at in sorted(self._layers_of) if uses is None else uses:
            for j, edge in enumerate(tape.uses[at].edges):
                if edge is not None:
                    outputs.setdefault(edge.node, []).append((at, j, edge.output_nr))
        hook, self._twice = _outermost(self._receive), _TWICE_IN_OURS
        self.tape = tape
        if uses is None:
            hook, self._twice = partial(uncompiled(_receive_from_user), hook), _TWICE_IN_THEIRS
            # Without the graph, which holds the hooks and with them this object.
            no_edges = tuple(replace(use, edges=(None,) * len(use.edges)) for use in tape.uses)
            self.tape = replace(tape, y=tape.y.detach(), uses=no_edges, operations=None)
        self._handles = [node.register_prehook(partial(hook, of_node)) for node, of_node in outputs.items()]

    @property
    def arrived(self) -> bool:
        """Whether a backward pass has come to one of the layers, or there are none."""
        return bool(self._boxes) or len(self._left) < len(self._blocks) or not self._blocks

    @property
    def absent(self) -> frozenset[int]:
        """The numbers of the layers that no backward pass has come to, after ``finish``."""
        return frozenset(self._left)

    def finish(self, others: Mapping[int, tuple[Tensor, ...]] | None = None) -> None:
        """Consume all that has arrived, and let go of the graph; with the cotangents of all ``others``, every layer."""
        numbers = [b for b in self._left if others is not None or any(at in self._boxes for at in self._uses_of[b])]
        self._unhook()  # those who consume may run a pass of their own
        if numbers:
            self._give(numbers, others or {})
        self.remove()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def remove(self) -> None:
        """No longer wait for cotangents, and hold neither them nor those who wait: that would be a reference cycle."""
        self._unhook()
        self._boxes.clear()
        self._features.clear()
        self._consume = None

    def _receive(self, outputs: Sequence[tuple[int, int, int]], grads: Arrived) -> None:
        for at, j, output in outputs:
            g, box = grads[output], self._boxes.setdefault(at, {})
            if j in box or at in self._consumed:
                raise NatgradError(self._twice.format(self.tape.uses[at].module))
            if g is not None:
                box[j] = g.detach()
                self._waiting += g.nbytes
            if at in self._through_graph:
                use, block = self.tape.uses[at], self._through_graph[at]
                (outer,) = self._outer(at)
                self._features[at] = cotangent_features(use.rule, use.module, block.keys, outer, block.shape)
        if self._waiting > self._room:
            ready = sorted(b for at in self._boxes for b in self._layers_of[at] if self._is_ready(b))
            if ready:
                self._give(ready, {})

    def _is_ready(self, b: int) -> bool:
        """Whether a layer needs no other cotangents than those that wait."""
        (at, *more) = self._uses_of[b]
        return b in self._left and not (more or self._blocks[b].facets or isinstance(self.tape.uses[at].rule, Replayed))

    def _give(self, numbers: Sequence[int], others: Mapping[int, tuple[Tensor, ...]]) -> None:
        ids = {at for b in numbers for at in self._uses_of[b]}
        outer = {at: others[at] if at in others else self._outer(at) for at in ids}
        for b in numbers:
            del self._left[b]
        used = {at for at in ids if self._left.keys().isdisjoint(self._layers_of[at])}
        self._consumed |= used
        for at in used & self._boxes.keys():
            self._waiting -= sum(g.nbytes for g in self._boxes.pop(at).values())
        assert self._consume is not None
        self._consume(numbers, replace(self.tape.with_inner(outer), features=self._features))

    def _outer(self, at: int) -> tuple[Tensor, ...]:
        """The cotangents of all outputs of a use, with the examples first; zero where no path of the graph leads."""
        use, box = self.tape.uses[at], self._boxes.get(at, {})
        like = next(iter(box.values()), self.tape.y)
        return tuple(
            use.batch_first(box[j].unsqueeze(0)) if j in box else like.new_zeros(1, *shape)
            for j, shape in enumerate(use.shapes)
        )


def _uses_above_others(tape: Tape, blocks: Sequence[Block]) -> Sequence[int]:
    """Uses of layers that are called once, whose node is theirs alone and is visited on the way to another layer's."""
    used: set[int] = set()
    several: set[int] = set()
    for block in blocks:
        at_uses = tape.use_ids(block)
        used.update(at_uses)
        if len(at_uses) != 1 or block.facets:
            several.update(at_uses)
    outputs = Counter(edge.node for use in tape.uses for edge in use.edges if edge is not None)
    upper = above({edge.node for at in used for edge in tape.uses[at].edges if edge is not None})
    early = []
    for at in sorted(used - several):
        use = tape.uses[at]
        edge = use.edges[0] if len(use.edges) == 1 else None
        if edge is not None and not isinstance(use.rule, Replayed) and edge.node in upper and outputs[edge.node] == 1:
            early.append(at)
    return early


def above(ends: Collection[Any]) -> set[Any]:
    """The nodes of ``ends`` that are above another one of ``ends``."""
    leads = dict.fromkeys(ends, True)  # whether a node is one of them, or above one
    upper = set()
    for end in ends:
        stack = [child for child, _ in end.next_functions if child is not None]
        while stack:
            node = stack[-1]
            children = [] if node in leads else [child for child, _ in node.next_functions if child is not None]
            unknown = [child for child in children if child not in leads]
            stack += unknown
            if not unknown:
                leads.setdefault(node, any(leads[child] for child in children))
                stack.pop()
        if any(leads[child] for child, _ in end.next_functions if child is not None):
            upper.add(end)
    return upper
