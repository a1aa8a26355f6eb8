"""Ranges of examples whose forward pass fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from natgrad.model import Inputs, Model, map_tensors, tensors_of
from natgrad.pullback.blocks import Block
from natgrad.pullback.tape import Tape, TapeOverflow, activations, record

Part: TypeAlias = tuple[int, int]  # a range of examples
_EXPANSION = 64  # outputs of a layer over inputs of the model, at the most, before memory is looked after


def examples(x: Inputs, part: Part, n: int) -> Inputs:
    """The inputs of a range of examples."""
    if part == (0, n):
        return x
    return map_tensors(x, lambda t: t[part[0] : part[1]])


def forward(model: Model, blocks: Sequence[Block], x: Inputs, bound: int) -> tuple[Tape, list[Part]]:
    """The tape of the batch, or, if that is too large, of its first part, with all the parts.

    A batch can be cut where every input has the same number of examples on its first axis and the outputs follow.
    """
    sizes = {t.shape[0] if t.ndim else 0 for t in tensors_of(x)}
    n = sizes.pop() if len(sizes) == 1 else 0
    row = sum(b.size for b in blocks if b.rule is None) * model.example.element_size()
    step = n if row == 0 else min(n, max(1, bound // row))
    # The pass that is cut short has made one layer's outputs already: do not try it where inputs alone come close.
    if step > 1 and _EXPANSION * sum(t.numel() * t.element_size() for t in tensors_of(x)) > bound:
        step = min(step, max(1, bound // max(1, activations(model, examples(x, (0, 1), n)))))
    while step > 0:
        try:
            tape = record(model, blocks, examples(x, (0, step), n), bound if step > 1 else None)
        except TapeOverflow:
            step //= 2
            continue
        if step == n:
            return tape, [(0, tape.y.shape[0])]  # outputs may have more examples than inputs: tokens, for one
        if tape.y.shape[0] == step:
            return tape, [(a, min(a + step, n)) for a in range(0, n, step)]
        break
    tape = record(model, blocks, x)
    return tape, [(0, tape.y.shape[0])]
