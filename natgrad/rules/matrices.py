"""Layers made of one weight and one bias under any names, as fused modules have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.rules.base import Call, Keys, Replayable, single


def matrices_shape(module: nn.Module, keys: Keys, c: int = 1) -> tuple[int, int, int]:
    """(c, o, i) of weights [c·o fan] and biases [c·o], side by side along i."""
    shapes = [module.get_parameter(key).shape for key in keys]
    return c, shapes[0][0] // c, sum(math.prod(shape[1:]) for shape in shapes)


def pack_matrices(block: Mapping[str, Tensor], c: int = 1) -> Tensor:
    """W [c o i] from weights [c·o fan] and biases [c·o], in the order given."""
    parts = [t.reshape(c, t.shape[0] // c, -1) for t in block.values()]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack_matrices(module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
    """The inverse of ``pack_matrices``; leading axes before [c o i] are kept."""
    shapes = [module.get_parameter(key).shape for key in keys]
    parts = packed.split([math.prod(shape[1:]) for shape in shapes], dim=-1)
    lead = packed.shape[:-3]
    return {key: part.reshape(*lead, *shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


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
