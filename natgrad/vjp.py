"""Cotangents through a graph, several at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
        return tuple(None if g is None else g.unsqueeze(0) for g in columns[0])
    return tuple(None if gs[0] is None else torch.stack(list(gs)) for gs in zip(*columns, strict=True))


def _grad(
    ys: tuple[Tensor, ...], at: Sequence[Any], cotangents: tuple[Tensor, ...], batched: bool = False
) -> tuple[Tensor | None, ...]:
    # For a GPU torch has a thread of its own, which starts the kernels while this one waits: to go there and back, and
    # to any hook on the way, takes longer than to start many of them.
    with torch.autograd.set_multithreading_enabled(False):
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            ys, at, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
    return found
