"""Cotangents through a graph in half precision: scaled into its range before the pass, and back after it.

float16 has no number below 6·10⁻⁸, and few digits below 6·10⁻⁵. The cotangents s/√N of a large batch, times the small
Jacobians of a deep network, are there. A power of two changes no digit, so the metric does not depend on it, nor on the
scale of a ``GradScaler``, which the loss has and the metric never sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from natgrad.rules.precision import single
from natgrad.vjp import vjp

_LARGEST = 6  # the largest number of a root is brought to 2⁵ … 2⁶: Jacobians up to 10³ do not overflow


def pulled(y: Tensor, edges: Sequence[GradientEdge | None], s: Tensor, half: bool) -> tuple[Tensor | None, ...]:
    """Cotangents [k *shape] at the edges of the graph of y, for s [k n *out]: ``vjp``, without underflow.

    ``half``: whether some of them come in float16.

    >>> x = torch.full((1,), 2.0**-20, dtype=torch.float16, requires_grad=True)
    >>> y = x * 2.0**-10
    >>> edge = torch.autograd.graph.get_gradient_edge(x)
    >>> pulled(y, [edge], torch.full((1, 1), 2.0**-20), half=True)[0] == 2.0**-30
    tensor([[True]])
    """
    if not half:
        return vjp((y,), edges, (s.to(y.dtype),))
    exponent = torch.frexp(s.abs().amax()).exponent
    scale = torch.ldexp(s.new_ones(()), _LARGEST - exponent)
    grads = vjp((y,), edges, ((s * scale).to(y.dtype),))
    return tuple(None if g is None else single(g) / scale for g in grads)
