"""Whether the examples are where a rule expects them: on the first axis of every layer's output, in their order.

A shape cannot say so. A model may swap its axes (t positions where t happens to be n), sort its examples and put them
back, or apply a layer to a table with n rows. Cotangents can: scaling example n by c_n must scale row n of every
g by c_n, and nothing else. A graph of nothing but layers and element-wise functions needs no such test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.errors import BatchStatisticsError
from natgrad.pullback.blocks import Block
from natgrad.pullback.tape import Tape, Use, leaf_below, leaf_uses, nodes

# Functions of every number by itself: they keep every axis where it is.
_ELEMENTWISE = frozenset(
    f"{name}Backward{version}"
    for name in (
        *("Add", "Sub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Sqrt", "Sin", "Cos", "Abs", "Erf", "Clamp"),
        *("Relu", "LeakyRelu", "Threshold", "Elu", "Gelu", "Silu", "Mish", "Tanh", "Sigmoid", "Softplus", "LogSigmoid"),
        *("Hardtanh", "Hardswish", "Hardsigmoid", "ToCopy", "Clone", "Alias"),
    )
    for version in (0, 1)
)
# Products with a weight on the right: rows stay rows. (bias, rows, weight) and (rows, weight).
_PRODUCTS = {"AddmmBackward0": 2, "MmBackward0": 1}


def misplaced(tape: Tape) -> frozenset[int]:
    """Positions in ``tape.uses`` of the layer calls that a rule cannot speak for.

    Those whose first axis is not that of the examples, and those whose output never reaches y.
    """
    if not tape.uses or not tape.y.requires_grad:
        return frozenset()
    graph = nodes(tape.y)
    n = tape.y.shape[0]
    fitting = [
        at for at, use in enumerate(tape.uses) if len(use.shape) > 1 and use.shape[0] == n and use.edge.node in graph
    ]
    wrong = set(range(len(tape.uses))) - set(fitting)
    if n > 1 and fitting and not all(map(_keeps_rows, graph)):
        wrong |= _looked_for(tape, fitting)
    return frozenset(wrong)


def check_alike(tape: Tape, layers: Sequence[Block], part: tuple[int, int]) -> None:
    """Raise if a layer that has its rule from another part of the batch cannot have it in this one.

    A model may sort its examples: the first part was in order, and this one is not.
    """
    counts, moved = leaf_uses(tape.y), misplaced(tape)
    names = [layer.names[0] for layer in layers if layer.rule and not tape.complete(layer, counts, moved)]
    if names:
        raise BatchStatisticsError(
            f"the layers of {', '.join(names)} see examples {part[0]} to {part[1]} in another order, or are used in "
            "another way, than those before: the batch cannot be processed in parts. Raise memory= so that it fits "
            "whole"
        )


def _keeps_rows(node: Any) -> bool:
    """Whether a node of the graph surely leaves every example in its row."""
    name = node.name()
    if name in _PRODUCTS:
        return leaf_below(node.next_functions[_PRODUCTS[name]][0]) is not None
    return name in _ELEMENTWISE or leaf_below(node) is not None


def _looked_for(tape: Tape, fitting: Sequence[int]) -> set[int]:
    n = tape.y.shape[0]
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(tape.y.shape, generator=generator, dtype=torch.float64).to(tape.y)
    c = 2.0 ** (torch.arange(n) % 8).to(tape.y)  # powers of two: exact in every precision
    uses = [tape.uses[at] for at in fitting]
    once, scaled = _rows(tape, s, uses), _rows(tape, s * c.view(-1, *[1] * (s.ndim - 1)), uses)
    wrong, tolerance = set(), torch.finfo(tape.y.dtype).eps ** 0.5
    for at, g, h in zip(fitting, once, scaled, strict=True):
        expected = c[:, None] * g
        if bool(((h - expected).norm(dim=1) > tolerance * expected.norm(dim=1)).any()):
            wrong.add(at)
    return wrong


def _rows(tape: Tape, s: Tensor, uses: Sequence[Use]) -> list[Tensor]:
    """g [n *output] of every use, a row an example."""
    return [g[0].flatten(1) for g in tape.cotangents(s.unsqueeze(0), uses)]
