"""Cotangents that are used when they arrive, in the backward pass itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

from torch import Tensor

from natgrad.pullback.sharing import Cotangents
from natgrad.pullback.sink import Layers, Sink
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Replayed


@final
class Flow:
    """A backward pass in which the cotangents of a layer are used when they arrive, where that is possible.

    A layer that is called once and has others below it sees its cotangents in a hook on its node, and they are
    forgotten before those of the layers below are made. The others are asked for, and are ``left`` for afterwards.
    """

    def __init__(self, tape: Tape, layers: Layers, sink: Sink) -> None:
        self.tape, self.layers, self.sink = tape, layers, sink
        self.left: list[int] = list(range(len(layers.blocks)))  # the numbers of the layers whose S is not made yet

    def cotangents(self, s: Tensor) -> Cotangents:
        """Those of the layers that are left, for s [k n *out]."""
        tape = self.tape
        # The backward pass of a GPU runs in a thread of its own, and its kernels are many: all at once is better there.
        # One in half precision is scaled as a whole.
        alone = s.shape[0] == 1 and s.device.type == "cpu" and not tape.half
        early = self._early() if alone else {}
        handles = [node.register_prehook(self._hook(*at)) for node, at in early.items()]
        wanted = sorted(
            {at for b in self.left for at in tape.places(self.layers.blocks[b])} - {at for at, _ in early.values()}
        )
        try:
            outer = tape.outer(s, wanted)
        finally:
            for handle in handles:
                handle.remove()
        missed = [
            at for at, numbers in early.values() if numbers[0] in self.left
        ]  # no way leads there from the outputs
        for at in missed:
            outer[at] = (s.new_zeros(1, *tape.uses[at].shape),)
        inner = {at: tape.inner(at, g) for at, g in outer.items() if isinstance(tape.uses[at].rule, Replayed)}
        return Cotangents(outer, inner)

    def _hook(self, at: int, numbers: Sequence[int]) -> Callable[[tuple[Tensor | None, ...]], None]:
        (edge,) = self.tape.uses[at].edges
        assert edge is not None

        def hook(arrived: tuple[Tensor | None, ...]) -> None:
            g = arrived[edge.output_nr]
            if g is not None:
                own = Cotangents({at: (g.unsqueeze(0),)}, {})
                for b in numbers:
                    self.layers.put_outputs(b, self.tape, own, self.sink)
                    self.left.remove(b)

        return hook

    def _early(self) -> dict[Any, tuple[int, list[int]]]:
        """By its node, every use that can be served in a hook, and the numbers of its layers."""
        of_use: dict[int, list[int]] = {}
        shared: set[int] = set()
        for b, block in enumerate(self.layers.blocks):
            places = self.tape.places(block)
            for at in places:
                of_use.setdefault(at, []).append(b)
            if len(places) != 1 or block.facets:
                shared.update(places)
        edges = [edge for use in self.tape.uses for edge in use.edges if edge is not None]
        outputs = Counter(edge.node for edge in edges)
        upper = above({edge.node for at in of_use for edge in self.tape.uses[at].edges if edge is not None})
        found = {}
        for at, numbers in of_use.items():
            use = self.tape.uses[at]
            edge = use.edges[0] if len(use.edges) == 1 else None
            if edge is None or at in shared or isinstance(use.rule, Replayed):
                continue
            if edge.node in upper and outputs[edge.node] == 1:
                found[edge.node] = (at, numbers)
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
