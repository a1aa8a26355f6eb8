"""A model linearised once: J and Jᵀ at a snapshot of the parameters, ready to be applied many times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.convolution import linear_convolutions
from natgrad.model import Inputs, Model


@final
@dataclass(frozen=True)
class Linearisation:
    """y = f(θ₀, x) with J and Jᵀ, both ready to be applied many times.

    The graph is built once: ``pull`` is a backward pass, and ``push`` is a backward pass through the backward pass,
    since u ↦ Jᵀu is linear and ⟨Jᵀu, v⟩ = ⟨u, Jv⟩. Forward mode would compute the primal again in every product.
    """

    y: Tensor  # [n *out], detached
    params: dict[str, Tensor]
    _y: Tensor
    _u: Tensor
    _pulled: tuple[Tensor | None, ...]

    def push(self, v: Mapping[str, Tensor]) -> Tensor:
        """J v [n *out]."""
        pairs = [(g, v[name]) for name, g in zip(self.params, self._pulled, strict=True) if g is not None]
        outputs, tangents = [g for g, _ in pairs], [t.to(g.dtype) for g, t in pairs]
        (jv,) = torch.autograd.grad(outputs, self._u, tangents, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.y) if jv is None else jv

    def pull(self, u: Tensor) -> dict[str, Tensor]:
        """Jᵀu, a tensor for every parameter."""
        leaves = list(self.params.values())
        grads = torch.autograd.grad(self._y, leaves, u, retain_graph=True, allow_unused=True)
        return {name: _or_zero(g, p) for (name, p), g in zip(self.params.items(), grads, strict=True)}


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def linearise(model: Model, x: Inputs, params: Mapping[str, Tensor] | None = None) -> Linearisation:
    """Linearise the model at its parameters (a snapshot: later in-place updates do not reach it)."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in (params or model.params).items()}
    with torch.enable_grad():
        with linear_convolutions():
            y = model(leaves, x)
        if not y.requires_grad:
            raise ValueError("the outputs do not depend on any trainable parameter")
        u = torch.zeros_like(y, requires_grad=True)
        pulled = torch.autograd.grad(y, list(leaves.values()), u, create_graph=True, allow_unused=True)
    # A gradient that does not depend on u (a parameter that only adds) is constant zero in u.
    linear = tuple(g if g is not None and g.requires_grad else None for g in pulled)
    return Linearisation(y.detach(), leaves, y, u, linear)
