"""Which positions of a layer the loss sees, also where a unit that is off keeps the cotangents from showing it.

A padded token, an ignored label and a token that no head reads have a cotangent that is exactly zero: nothing that the
loss sees is computed from them. But so has a token whose units are all behind a ReLU that is off. It is seen, as an
example with such units is. Where functions that may be flat (``_GATES``) lie in the graph, the positions are those to
which a second pass comes, in which such functions let a part of the cotangents through where they are flat. Masks are
no functions of the numbers that they are put on: they let nothing through in either pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.accelerate.devices import can_read
from natgrad.pullbacks.backward import stream_cotangents
from natgrad.pullbacks.coupling import at_fixed_address
from natgrad.pullbacks.graph import nodes
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.operation_layers import is_operation
from natgrad.pullbacks.tape import Cotangents, Tape
from natgrad.rules.features import Features

Grads: TypeAlias = tuple[Tensor | None, ...]


def _named(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{version}" for name in names for version in range(4))


# Functions of every number by itself that are flat on one side, and those that are flat at 0, where these end.
_GATES = _named(
    *("Relu", "Threshold", "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink"),
    *("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum"),
)
_FLAT_AT_ZERO = _named("Pow")


def reached(g: Features, block: Block) -> Tensor | None:
    """The mask [n r] of the positions of a layer with a cotangent that is not zero. None if all have, or all count.

    Pixels all count, and so does the only position of an example.
    """
    assert block.rule is not None
    return None if g.shape[-3] == 1 or block.rule.pixels else g.reached()


def has_several(tape: Tape, block: Block) -> bool:
    """Whether a layer has several positions, of which those count that the loss sees."""
    if block.rule is None or block.rule.pixels:
        return False
    return is_operation(block) or tape.positions(block) > block.shape[0]


def may_hide(tape: Tape, layers: Sequence[Block]) -> bool:
    """Whether units that are off may hide positions of a layer that the loss sees."""
    return any(has_several(tape, kind) for layer in layers for kind in layer.kinds) and bool(_gates(tape))


@final
class VisiblePositions:
    """The positions of layers that count in a pass: those that the loss sees.

    Others add nothing to G = Σ (Σ_r g aᵀ)(Σ_r g aᵀ)ᵀ, and so must add nothing to A: otherwise A would depend on the
    length that a batch is padded to. ``root``: s [k n *out] of the examples of the pass, where outputs that are ignored
    are zero.

    >>> import natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    >>> model[0].weight.data, model[0].bias.data = torch.ones(1, 1), torch.zeros(1)
    >>> pb = ng.pullback(model, torch.tensor([[[1.0], [-2.0]]]), ng.Euclidean())  # the second of two positions is off
    >>> tape = pb.tape
    >>> g, visible = tape.cotangents(pb.root), VisiblePositions(tape, pb.layers, lambda: pb.root)
    >>> reached(g.of(tape, pb.layers[0]), pb.layers[0]), visible.of(pb.layers[0], g.of(tape, pb.layers[0]))
    (tensor([[ True, False]]), None)
    """

    def __init__(self, tape: Tape, layers: Sequence[Block], root: Callable[[], Tensor]) -> None:
        self._tape, self._root = tape, root
        self._kinds = [kind for layer in layers for kind in layer.kinds if has_several(tape, kind)]
        self._gates = _gates(tape) if self._kinds else []
        self.gated = bool(self._gates)  # whether cotangents that are zero do not tell what the loss sees
        self._unread = self.gated and not can_read(tape.y)
        if self._unread:  # all positions may be reached, but to look would be to wait
            _ = self._masks

    def without_graph(self) -> Self:
        """Its masks alone. The graph of the user's backward pass holds those who ask for them."""
        _ = self._masks
        del self._tape, self._root, self._kinds, self._gates
        return self

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where captured kernels read masks."""
        return tuple([mask.data_ptr() for mask in self._masks.values() if mask is not None]) if self.gated else ()

    def of(self, kind: Block, g: Features) -> Tensor | None:
        """The mask [n r] of a layer of one kind with cotangents g; None if all positions count."""
        if self._unread:
            return self._masks.get(_key(kind))
        there = reached(g, kind)
        return there if there is None or not self.gated else self._masks[_key(kind)]

    @cached_property
    def _masks(self) -> dict[object, Tensor | None]:
        """From the second pass. Its cotangents at the outputs are any numbers, where the root is not zero."""
        tape, s = self._tape, self._root()
        any_numbers = torch.arange(s[0].numel(), dtype=s.dtype, device=s.device).cos().view_as(s[0])
        masks: dict[object, Tensor | None] = {}

        def consume(numbers: Sequence[int], g: Cotangents) -> None:
            for b in numbers:
                kind = self._kinds[b]
                mask, key = reached(g.of(tape, kind), kind), _key(kind)
                masks[key] = None if mask is None else at_fixed_address(tape.memo, ("visible", key), mask)

        with _leaking(self._gates):
            stream_cotangents(tape, self._kinds, any_numbers.where((s != 0).any(0), 0).unsqueeze(0), consume)
        return masks


def _key(kind: Block) -> object:
    return kind.names, type(kind.rule), kind.keys


def _gates(tape: Tape) -> list[Any]:
    """The nodes of functions that may be flat, if some are in the graph of a pass. All such graphs have equal nodes."""
    if not tape.y.requires_grad or not tape.memo.setdefault("gated", True):
        return []
    gates = [node for node in nodes([tape.y.grad_fn]) if node.name() in _GATES | _FLAT_AT_ZERO]
    tape.memo["gated"] = any(node.name() in _GATES for node in gates)
    return gates if tape.memo["gated"] else []


@contextmanager
def _leaking(gates: Sequence[Any]) -> Iterator[None]:
    """Backward passes inside go through these nodes where they are flat. By a half: |x| = ReLU(x) + ReLU(−x) leaks."""

    def leak(into: Grads, out: Grads) -> Grads:
        (g,) = out
        if g is None:
            return into
        return tuple([None if t is None else t.where(t != 0, 0.5 * g.sum_to_size(t.shape)) for t in into])

    handles = [node.register_hook(leak) for node in gates]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
