"""A backward pass whose cotangents are used where they arrive: ours from a root, or the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.autograd import waiting_bytes
from natgrad.accelerate.devices import refuse_compiled_backward
from natgrad.accelerate.modules import uncompiled
from natgrad.errors import NatgradError
from natgrad.model import in_library_pass
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.tape import Cotangents, Tape
from natgrad.rules.base import Replayed, cotangent_features
from natgrad.rules.features import Features

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


def stream_cotangents(
    tape: Tape, blocks: Sequence[Block], s: Tensor, consume: Consume, room: int | None = None
) -> None:
    """Call ``consume`` with all layers, for s [k n *out], while the backward pass runs.

    A layer that is called once and lies above another layer receives its cotangents in a hook on its autograd node.
    They wait there until more than ``room`` bytes of them have arrived, and are freed before those of the layers below
    are computed: on a processor none wait, on a GPU a third of them, so that their kernels are launched together. The
    other layers are consumed after the pass.
    """
    total = tape.output_bytes
    room = waiting_bytes(tape.y.device, total) if room is None else room

    def by_use() -> dict[int, list[int]]:
        """Numbers of layers, by the position of a use."""
        layers_of: dict[int, list[int]] = {}
        for b, block in enumerate(blocks):
            for at in tape.use_ids(block):
                layers_of.setdefault(at, []).append(b)
        return layers_of

    names = tuple([block.names for block in blocks])
    layers_of = tape.cached(("layers", names), by_use)
    early: Sequence[int] = ()
    last: frozenset[int] = frozenset()
    if s.shape[0] == 1 and not tape.half and total > room:  # a pass in half precision is scaled as a whole
        early, last = tape.cached(("early", names, room), lambda: _early_uses(tape, blocks, names, room))
    boxes: dict[int, list[Arrived]] = {at: [] for at in early}
    consumed: set[int] = set()  # positions of uses
    left = dict.fromkeys(range(len(blocks)))  # numbers of layers

    def arrived() -> dict[int, tuple[Tensor, ...]]:
        """The cotangents that wait, taken out of their boxes."""
        cotangents_of: dict[int, tuple[Tensor, ...]] = {}
        for at, box in boxes.items():
            if not box:
                continue
            use = tape.uses[at]
            if len(box) > 1 or at in consumed:
                raise NatgradError(
                    f"a backward pass through the model came twice to the outputs of {use.module}: a hook on a tensor "
                    "runs a pass of its own through the layers (do so in the backward of a torch.autograd.Function), "
                    "or a second optimizer of natgrad was made for this model (delete one of them)"
                )
            (edge,) = use.edges
            assert edge is not None
            g = box.pop()[edge.output_nr]
            if g is not None:
                cotangents_of[at] = (use.batch_first(g.unsqueeze(0)),)
        return cotangents_of

    @_outermost
    def receive(at: int, grads: Arrived) -> None:
        """With the cotangents of the ``last`` use that there is room for, those that wait are consumed."""
        boxes[at].append(grads)
        waiting = arrived() if at in last else {}
        if waiting:
            numbers = sorted({b for use in waiting for b in layers_of[use]})
            consumed.update(waiting)
            for b in numbers:
                del left[b]
            consume(numbers, Cotangents(waiting, {}))

    def hook(at: int) -> RemovableHandle:
        (edge,) = tape.uses[at].edges
        assert edge is not None
        return edge.node.register_prehook(partial(receive, at))

    handles = [hook(at) for at in early]
    try:
        outer = tape.output_cotangents(s, sorted(layers_of.keys() - set(early)))
    finally:
        for handle in handles:
            handle.remove()
    outer.update(arrived())
    for at in consumed.symmetric_difference(early).difference(outer):  # no path of the graph leads there
        outer[at] = (s.new_zeros(1, *tape.uses[at].shape),)
    consume(list(left), tape.with_inner(outer))


@final
class BackwardHooks:
    """Cotangents of a backward pass that the user runs, consumed where they arrive.

    They wait until more than ``room`` bytes of them have arrived, as in ``stream_cotangents``. Layers that are called
    several times, and those that hide layers, wait for ``finish``, which consumes what is left.
    """

    def __init__(self, tape: Tape, blocks: Sequence[Block], consume: Consume) -> None:
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
        self._room = waiting_bytes(tape.y.device, tape.output_bytes)
        outputs: dict[Any, list[tuple[int, int, int]]] = {}
        for at in sorted({at for of_block in self._uses_of for at in of_block}):
            for j, edge in enumerate(tape.uses[at].edges):
                if edge is not None:
                    outputs.setdefault(edge.node, []).append((at, j, edge.output_nr))
        hook = partial(uncompiled(_receive_from_user), _outermost(self._receive))
        self._handles = [node.register_prehook(partial(hook, of_node)) for node, of_node in outputs.items()]
        # Without the graph, which holds the hooks and with them this object.
        uses = tuple(replace(use, edges=(None,) * len(use.edges)) for use in tape.uses)
        self.tape = replace(tape, y=tape.y.detach(), uses=uses, operations=None)

    @property
    def arrived(self) -> bool:
        """Whether a backward pass has come to one of the layers, or there are none."""
        return bool(self._boxes) or len(self._left) < len(self._blocks) or not self._blocks

    @property
    def absent(self) -> frozenset[int]:
        """The numbers of the layers that no backward pass has come to, after ``finish``."""
        return frozenset(self._left)

    def finish(self) -> None:
        """Consume all that has arrived, and let go of the graph."""
        numbers = [b for b in self._left if any(at in self._boxes for at in self._uses_of[b])]
        if numbers:
            self._give(numbers, inner=True)
        self.remove()

    def remove(self) -> None:
        """No longer wait for cotangents, and hold neither them nor those who wait: that would be a reference cycle."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._boxes.clear()
        self._features.clear()
        self._consume = None

    def _receive(self, outputs: Sequence[tuple[int, int, int]], grads: Arrived) -> None:
        for at, j, output in outputs:
            g, box = grads[output], self._boxes.setdefault(at, {})
            if j in box or at in self._consumed:
                raise NatgradError(
                    f"two backward passes came to the outputs of {self.tape.uses[at].module} in one forward pass: call "
                    "backward once, on the sum of the losses. If the loss has derivatives by the inputs (a gradient "
                    "penalty), use BatchGradient() or a metric on the outputs. A second optimizer of natgrad for this "
                    "model may be the cause, too: delete one of them"
                )
            if g is not None:
                box[j] = g.detach()
                self._waiting += g.nbytes
            if at in self._through_graph:
                use, block = self.tape.uses[at], self._through_graph[at]
                (outer,) = self._outer(at)
                self._features[at] = cotangent_features(use.rule, use.module, block.keys, outer, block.shape)
        if self._waiting > self._room:
            ready = [b for b in self._left if self._is_ready(b)]
            if ready:
                self._give(ready, inner=False)

    def _is_ready(self, b: int) -> bool:
        """Whether a layer needs no other cotangents than those that wait."""
        (at, *more), use = self._uses_of[b], self.tape.uses[self._uses_of[b][0]]
        return not more and at in self._boxes and not self._blocks[b].facets and not isinstance(use.rule, Replayed)

    def _give(self, numbers: Sequence[int], *, inner: bool) -> None:
        outer = {at: self._outer(at) for at in {at for b in numbers for at in self._uses_of[b]}}
        for b in numbers:
            del self._left[b]
        needed = {at for b in self._left for at in self._uses_of[b]}
        self._consumed |= outer.keys() - needed
        for at in outer.keys() - needed:
            self._boxes.pop(at, None)
        self._waiting = sum(g.nbytes for box in self._boxes.values() for g in box.values())
        assert self._consume is not None
        cotangents = self.tape.with_inner(outer) if inner else Cotangents(outer, {})
        self._consume(numbers, replace(cotangents, features=self._features))

    def _outer(self, at: int) -> tuple[Tensor, ...]:
        """The cotangents of all outputs of a use, with the examples first; zero where no path of the graph leads."""
        use, box = self.tape.uses[at], self._boxes.get(at, {})
        like = next(iter(box.values()), self.tape.y)
        return tuple(
            use.batch_first(box[j].unsqueeze(0)) if j in box else like.new_zeros(1, *shape)
            for j, shape in enumerate(use.shapes)
        )


def _early_uses(
    tape: Tape, blocks: Sequence[Block], names: Hashable, room: int
) -> tuple[Sequence[int], frozenset[int]]:
    """The uses that can be consumed in a hook, and those of them at which more than ``room`` bytes are waiting.

    The search is slow: it is cached by the kind of graph, for all sizes. A backward pass starts at the last layer.
    """
    key = ("early", names)
    if key not in tape.memo:
        tape.memo[key] = _uses_above_others(tape, blocks)
    early, held, last = tape.memo[key], 0, set()
    for at in reversed(early):
        held += tape.uses[at].shape.numel() * tape.y.element_size()
        if held > room:
            last.add(at)
            held = 0
    return early, frozenset(last)


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
