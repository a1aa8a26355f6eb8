"""Cotangents that are used when they arrive, in the backward pass itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from natgrad.errors import NatgradError
from natgrad.pullback.sharing import Cotangents
from natgrad.pullback.sink import Layers
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Replayed

_ROOM = 2**26  # bytes

Serve: TypeAlias = Callable[[Sequence[int], Cotangents], None]
Arrived: TypeAlias = tuple[Tensor | None, ...]  # what a node is given, of every output of it


@final
class Flow:
    """A backward pass in which the cotangents of a layer are used when they arrive, where that is possible.

    A layer that is called once and has others below it sees its cotangents in a hook on its node. They wait there until
    those of more than ``room`` bytes should have come; then ``serve`` is called with the numbers of their layers, and
    they are forgotten before those of the layers below are made. The others are asked for, and served at the end. On a
    CPU none wait; on a GPU a third of them, whose kernels are then started together.
    """

    def __init__(self, tape: Tape, layers: Layers, serve: Serve, room: int | None = None) -> None:
        self.tape, self.layers, self.serve = tape, layers, serve
        self._all = sum([shape.numel() for use in tape.uses for shape in use.shapes]) * tape.y.element_size()
        self.room = room if room is not None else max(_ROOM, self._all // 3) if tape.y.device.type == "cuda" else 0
        self._left = dict.fromkeys(range(len(layers.blocks)))  # the numbers of the layers that were not served
        self._layers_of: dict[int, list[int]] = {}  # by the positions of their uses
        for b, block in enumerate(layers.blocks):
            for at in tape.places(block):
                self._layers_of.setdefault(at, []).append(b)
        self._served: set[int] = set()  # positions of uses
        self._boxes: dict[int, list[Arrived]] = {}  # what came to the nodes of uses, by their positions

    def run(self, s: Tensor) -> None:
        """Serve all layers, for s [k n *out]."""
        tape = self.tape
        # One in half precision is scaled as a whole.
        alone = s.shape[0] == 1 and not tape.half and self._all > self.room
        early, last = self._early() if alone else ((), frozenset[int]())
        handles = [self._hooked(at, at in last) for at in early]
        wanted = self._layers_of.keys() - set(early)
        try:
            outer = tape.outer(s, sorted(wanted))
        finally:
            for handle in handles:
                handle.remove()
        outer.update(self._waiting())
        for at in self._served.symmetric_difference(early).difference(outer):  # no way leads there
            outer[at] = (s.new_zeros(1, *tape.uses[at].shape),)
        inner = {at: tape.inner(at, g) for at, g in outer.items() if isinstance(tape.uses[at].rule, Replayed)}
        self.serve(list(self._left), Cotangents(outer, inner))

    def _hooked(self, at: int, last: bool) -> RemovableHandle:
        """``last``: when its cotangents come, those that wait are served. The others need no line of Python."""
        (edge,) = self.tape.uses[at].edges
        assert edge is not None
        box = self._boxes[at] = []

        def hook(arrived: Arrived) -> None:
            box.append(arrived)
            self._serve_waiting()

        return edge.node.register_prehook(hook if last else box.append)

    def _waiting(self) -> dict[int, tuple[Tensor, ...]]:
        """What has come and was not served, taken out of the boxes."""
        found: dict[int, tuple[Tensor, ...]] = {}
        for at, box in self._boxes.items():
            if not box:
                continue
            use = self.tape.uses[at]
            if len(box) > 1 or at in self._served:
                raise NatgradError(
                    f"a backward pass through the model came twice to the outputs of {use.module}: a hook on a tensor "
                    "runs a pass of its own through the layers. Do so in the backward of a torch.autograd.Function"
                )
            (edge,) = use.edges
            assert edge is not None
            g = box.pop()[edge.output_nr]
            if g is not None:
                found[at] = (use.first(g.unsqueeze(0)),)
        return found

    def _serve_waiting(self) -> None:
        waiting = self._waiting()
        if not waiting:
            return
        numbers = sorted({b for at in waiting for b in self._layers_of[at]})
        self._served.update(waiting)
        for b in numbers:
            del self._left[b]
        self.serve(numbers, Cotangents(waiting, {}))

    def _early(self) -> tuple[Sequence[int], frozenset[int]]:
        """The uses that can be served in a hook, and those of them with which there is no more room.

        They are found once for every kind of graph: it is a long walk. A pass comes to the layers from the last one on.
        """
        key = ("early", self.room, tuple(block.names for block in self.layers.blocks))
        if key not in self.tape.memo:
            early, held, last = self._found(), 0, set()
            for at in reversed(early):
                held += self.tape.uses[at].shape.numel() * self.tape.y.element_size()
                if held > self.room:
                    last.add(at)
                    held = 0
            self.tape.memo[key] = early, frozenset(last)
        return self.tape.memo[key]

    def _found(self) -> Sequence[int]:
        own: set[int] = set()
        shared: set[int] = set()
        for block in self.layers.blocks:
            places = self.tape.places(block)
            own.update(places)
            if len(places) != 1 or block.facets:
                shared.update(places)
        edges = [edge for use in self.tape.uses for edge in use.edges if edge is not None]
        outputs = Counter(edge.node for edge in edges)
        upper = above({edge.node for at in own for edge in self.tape.uses[at].edges if edge is not None})
        found = []
        for at in sorted(own):
            use = self.tape.uses[at]
            edge = use.edges[0] if len(use.edges) == 1 else None
            if edge is None or at in shared or isinstance(use.rule, Replayed):
                continue
            if edge.node in upper and outputs[edge.node] == 1:
                found.append(at)
        return found


def above(ends: Collection[Any]) -> set[Any]:
    """Those of the nodes ``ends`` of a graph below which there are others of them."""
    leads = dict.fromkeys(ends, True)  # whether a node is one of them, or above one
    found = set()
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
            found.add(end)
    return found
