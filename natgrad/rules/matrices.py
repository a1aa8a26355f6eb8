"""Layers made of one weight and one bias under any names, as fused modules have them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from natgrad.rules.base import Call, Keys, Replayable
from natgrad.rules.precision import single


def weight_and_bias(keys: Keys, a: Tensor, valid: Tensor | None = None) -> dict[str, Replayable]:
    """The inputs of a layer W a + b; ``keys`` are the names of W and, where there is one, of b.

    ``a`` [n r c i] is zero where a position is masked, and so are the ones that belong to the bias.
    """
    a = a.detach()
    ones = a.new_ones(()).expand(*a.shape[:-1], 1) if valid is None else valid.unsqueeze(-1)
    return {key: Replayable(x, valid) for key, x in zip(keys, (a, ones), strict=False)}


def own(module: nn.Module, key: str) -> Tensor | None:
    """A parameter by its local name, without its graph and in single precision at least; None where there is none."""
    parent, _, name = key.rpartition(".")
    p = module.get_submodule(parent)._parameters.get(name)
    return None if p is None else single(p.detach())


def argument(call: Call, at: int, name: str, default: Any = None) -> Any:
    """The argument of a call that is at this position, or has this name."""
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)
