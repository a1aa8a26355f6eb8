"""The tape: one forward pass that remembers, for every layer with a rule, its inputs and its gradient edge.

Per-layer cotangents then come from ``torch.autograd.grad(y, edges, s)``: no weight gradient is formed, ``.grad`` is
not touched, and in-place activations after a layer do no harm, since the edge is taken inside the hook.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from natgrad.model import Inputs, Model, tensors_of
from natgrad.pullback.blocks import Block
from natgrad.rules.base import trainable


@final
class TapeOverflow(Exception):  # noqa: N818 - control flow, not an error: the caller retries with fewer examples
    """The activations of this many examples exceed the bound."""


@final
@dataclass(frozen=True)
class Use:
    """One call of a layer: its arguments and the edge of its output in the graph."""

    module: nn.Module
    args: tuple[Any, ...]
    edge: GradientEdge
    shape: torch.Size


@final
class Recorder:
    """Hooks on the layers that have a rule, from ``start`` to ``stop``; it collects their uses.

    ``bound`` (bytes) limits the activations: what leaf modules return stays alive for the backward pass, and a
    forward pass that exceeds it is cut short by ``TapeOverflow``.
    """

    def __init__(self, model: Model, blocks: Sequence[Block], bound: int | None = None) -> None:
        self.uses: list[Use] = []
        self.blocks = list(blocks)
        self._model, self._bound = model, bound
        self.bytes = 0  # of the activations so far
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        module = self._model.module
        for block in self.blocks:
            for layer in block.modules:
                # First in line: another forward hook may return something else than what the layer computed.
                self._handles.append(layer.register_forward_hook(self._watch, with_kwargs=True, prepend=True))
        if self._bound is not None and module is not None:
            leaves = (m for m in module.modules() if next(m.children(), None) is None)
            self._handles += [leaf.register_forward_hook(self._meter) for leaf in leaves]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            detached = tuple(t.detach() for t in tensors_of((args, kwargs)))
            self.uses.append(Use(module, detached, get_gradient_edge(output), output.shape))

    def _meter(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.bytes += sum(t.numel() * t.element_size() for t in tensors_of(output))
        if self._bound is not None and self.bytes > self._bound:
            raise TapeOverflow


def record(model: Model, blocks: Sequence[Block], x: Inputs, bound: int | None = None) -> Tape:
    """Run the model on x and record it; where no block has a rule there is nothing to record but the outputs."""
    if not any(block.rule for block in blocks):
        with torch.no_grad():
            return Tape(model(None, x), ())
    recorder = Recorder(model, blocks, bound)
    recorder.start()
    try:
        with torch.enable_grad():
            y = model(None, x)
    finally:
        recorder.stop()
    return Tape(y, tuple(recorder.uses))


def activations(model: Model, x: Inputs) -> int:
    """Bytes of the activations that a pass over x would keep."""
    recorder = Recorder(model, (), sys.maxsize)
    recorder.start()
    try:
        with torch.no_grad():
            model(None, x)
    finally:
        recorder.stop()
    return recorder.bytes


@final
@dataclass(frozen=True)
class Tape:
    """The outputs y [n *out] of one forward pass, with their graph, and the recorded uses of its layers."""

    y: Tensor
    uses: tuple[Use, ...]

    def complete(self, block: Block, counts: Counter[int], misplaced: Collection[int]) -> bool:
        """Whether the recorded uses are all there is of a block, with the examples in their places on the first axis.

        A weight used past its module's forward (``F.linear(x, layer.weight)``, ``MultiheadAttention.out_proj``)
        shows as more entries of its leaf into the graph (``leaf_uses(y)``) than there are recorded uses.
        ``misplaced``: positions in ``uses`` of those a rule cannot speak for.
        """
        uses = [at for at, use in enumerate(self.uses) if use.module in block.modules]
        if not uses or any(at in misplaced for at in uses):
            return False
        params = {id(p) for module in block.modules for p in trainable(module).values()}
        return all(counts[p] == len(uses) for p in params)

    def positions(self, block: Block) -> int:
        """How many r·c of one example share the weight of a block, over all its uses; 1 for explicit rows."""
        return sum(math.prod(use.shape[1:]) for use in self.of(block)) // block.shape[1] if block.rule else 1

    def of(self, block: Block) -> list[Use]:
        """The uses of a block, in the order of the calls."""
        return [use for use in self.uses if use.module in block.modules]

    def cotangents(self, s: Tensor, uses: Sequence[Use]) -> list[Tensor]:
        """g [k *output] of every use for output cotangents s [k n *out]: one (batched) backward pass."""
        if not uses:
            return []
        edges = [use.edge for use in uses]
        batched = s.shape[0] > 1
        # One column needs no vmap, whose overhead would show beside a single backward pass.
        grad_outputs = (s if batched else s[0]).to(self.y.dtype)
        out: tuple[Tensor | None, ...] = torch.autograd.grad(
            self.y, edges, grad_outputs, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
        grads: list[Tensor] = []
        for g, use in zip(out, uses, strict=True):
            if g is None:
                grads.append(s.new_zeros(s.shape[0], *use.shape))
            else:
                grads.append(g if batched else g.unsqueeze(0))
        return grads


_VIEWS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0")


def nodes(y: Tensor) -> set[Any]:
    """All nodes of the graph of y."""
    seen: set[Any] = set()
    stack: list[Any] = [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(child for child, _ in node.next_functions)
    return seen


def leaf_uses(y: Tensor) -> Counter[int]:
    """How often each leaf, by id, enters the graph of y.

    Transposes and casts of a leaf are looked through: autocast caches its copy of a weight, so that several uses
    share one cast, and it is the entries of the copy that count.
    """
    counts: Counter[int] = Counter()
    for node in nodes(y):
        if leaf_below(node) is None:
            leaves = (leaf_below(child) for child, _ in node.next_functions)
            counts.update(id(leaf) for leaf in leaves if leaf is not None)
    return counts


def leaf_below(node: Any) -> Any:
    """The leaf that a chain of transposes and casts starts from, or None."""
    while node is not None:
        if node.name() == "torch::autograd::AccumulateGrad":
            return node.variable
        if node.name() not in _VIEWS:
            return None
        node = node.next_functions[0][0]
    return None
