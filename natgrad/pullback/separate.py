"""Whether the examples are where a rule expects them: on the first axis of every layer's output, in their order.

A shape cannot say so. A model may swap its axes (t positions where t happens to be n), sort its examples and put them
back, or apply a layer to a table with n rows. Cotangents can: scaling example n by c_n must scale row n of every
g by c_n, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from natgrad.pullback.tape import Tape, Use

# The answer depends on the model's code and on the shapes: two backward passes find it once, not in every step.
_known: WeakKeyDictionary[nn.Module, dict[Any, frozenset[int]]] = WeakKeyDictionary()
_LIMIT = 256  # shapes remembered of one model


def misplaced(tape: Tape, module: nn.Module | None) -> frozenset[int]:
    """Positions in ``tape.uses`` of the layer calls whose first axis is not that of the examples."""
    if module is None or not tape.uses or not tape.y.requires_grad:
        return frozenset()
    known = _known.setdefault(module, {})
    signature = (tape.y.shape, *((id(use.module), use.shape) for use in tape.uses))
    if signature not in known:
        if len(known) >= _LIMIT:
            known.clear()
        known[signature] = _look(tape)
    return known[signature]


def _look(tape: Tape) -> frozenset[int]:
    n = tape.y.shape[0]
    fitting = [at for at, use in enumerate(tape.uses) if len(use.shape) > 1 and use.shape[0] == n]
    wrong = set(range(len(tape.uses))) - set(fitting)
    if n > 1 and fitting:
        generator = torch.Generator().manual_seed(0)
        s = torch.rand(tape.y.shape, generator=generator, dtype=torch.float64).to(tape.y)
        c = 2.0 ** (torch.arange(n) % 8).to(tape.y)  # powers of two: exact in every precision
        uses = [tape.uses[at] for at in fitting]
        once, scaled = _rows(tape, s, uses), _rows(tape, s * c.view(-1, *[1] * (s.ndim - 1)), uses)
        for at, g, h in zip(fitting, once, scaled, strict=True):
            expected = c[:, None] * g
            if bool(((h - expected).norm(dim=1) > 0.1 * expected.norm(dim=1)).any()):
                wrong.add(at)
    return frozenset(wrong)


def _rows(tape: Tape, s: Tensor, uses: Sequence[Use]) -> list[Tensor]:
    """g [n *output] of every use, a row an example."""
    return [g[0].flatten(1) for g in tape.cotangents(s.unsqueeze(0), uses)]
