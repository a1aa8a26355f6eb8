"""Cotangents through a graph, several at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.accelerate.moments import single

_log = logging.getLogger("natgrad")


def vjp(ys: tuple[Tensor, ...], at: Sequence[Any], cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Jᵀ of cotangents [k *shape of y], [k *shape] at tensors or edges of the graph of ys; None where nothing arrives.

    >>> x = torch.ones(2, requires_grad=True)
    >>> vjp((3 * x,), [x], (torch.tensor([[1.0, 0.0], [0.0, 2.0]]),))
    (tensor([[3., 0.],
            [0., 6.]]),)
    """
    if cotangents[0].shape[0] > 1:
        try:
            return _grad(ys, at, cotangents, batched=True)
        except RuntimeError as error:  # a genuine mistake is raised again below
            _log.info("a kernel takes one cotangent at a time (%s): one backward pass each", error)
    # One column needs no vmap, whose overhead would show beside a single backward pass.
    columns = [_grad(ys, at, tuple(g[k] for g in cotangents)) for k in range(cotangents[0].shape[0])]
    if len(columns) == 1:
        return tuple([None if g is None else g.unsqueeze(0) for g in columns[0]])
    return tuple(None if gs[0] is None else torch.stack(list(gs)) for gs in zip(*columns, strict=True))


def _grad(
    ys: tuple[Tensor, ...], at: Sequence[Any], cotangents: tuple[Tensor, ...], batched: bool = False
) -> tuple[Tensor | None, ...]:
    # For a GPU torch runs the backward pass in another thread. Switching to it, and back for every hook, takes longer
    # than launching many kernels.
    with torch.autograd.set_multithreading_enabled(False):
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            ys, at, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
    return grads


_ROOM = 2**26  # bytes


def waiting_bytes(device: torch.device, total: int) -> int:
    """How many bytes of cotangents, of a ``total``, may wait for others, so that their kernels are launched together.

    >>> waiting_bytes(torch.device("cpu"), 2**30)
    0
    """
    return max(_ROOM, total // 3) if device.type == "cuda" else 0


# Cotangents through a graph in half precision: scaled into its range before the pass, and back after it.
#
# float16 has no number below 6·10⁻⁸, and few digits below 6·10⁻⁵. The cotangents s/√N of a large batch, times the small
# Jacobians of a deep network, are there. A power of two changes no digit, so the metric does not depend on it, nor on
# the scale of a ``GradScaler``, which the loss has and the metric never sees.


_LARGEST = 6  # the largest number of a root is brought to 2⁵ … 2⁶: Jacobians up to 10³ do not overflow


def pulled(y: Tensor, at: Sequence[Any], s: Tensor, half: bool) -> tuple[Tensor | None, ...]:
    """Cotangents [k *shape] at edges or leaves of the graph of y, for s [k n *out]: ``vjp``, without underflow.

    ``half``: whether some of them come in float16.

    >>> x = torch.full((1,), 2.0**-20, dtype=torch.float16, requires_grad=True)
    >>> y = x * 2.0**-10
    >>> edge = torch.autograd.graph.get_gradient_edge(x)
    >>> pulled(y, [edge], torch.full((1, 1), 2.0**-20), half=True)[0] == 2.0**-30
    tensor([[True]])
    """
    if not half:
        return vjp((y,), at, (s.to(y.dtype),))
    exponent = torch.frexp(s.abs().amax()).exponent
    scale = torch.ldexp(s.new_ones(()), _LARGEST - exponent)
    grads = vjp((y,), at, ((s * scale).to(y.dtype),))
    return tuple(None if g is None else single(g) / scale for g in grads)
