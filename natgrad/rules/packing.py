"""Weights and biases side by side, the bias last: W̄ = [W b] (004 (26); ERRATA 51), for every group c by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def matrices_shape(module: nn.Module, keys: Sequence[str], c: int = 1) -> tuple[int, int, int]:
    """(c, o, i) of weights [c·o *fan] and biases [c·o], side by side along i."""
    shapes = [module.get_parameter(key).shape for key in keys]
    return c, shapes[0][0] // c, sum(math.prod(shape[1:]) for shape in shapes)


def matrices(block: Mapping[str, Tensor], c: int = 1) -> dict[str, Tensor]:
    """Every weight [c·o *fan] and bias [c·o] as a matrix [c o fan] of its own."""
    return {key: t.reshape(c, t.shape[0] // c, -1) for key, t in block.items()}


def pack_matrices(block: Mapping[str, Tensor], c: int = 1) -> Tensor:
    """W [c o i] from weights [c·o *fan] and biases [c·o], in the order given."""
    parts = list(matrices(block, c).values())
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack_matrices(module: nn.Module, keys: Sequence[str], packed: Tensor) -> dict[str, Tensor]:
    """The inverse of ``pack_matrices``; leading axes before [c o i] are kept."""
    shapes = [module.get_parameter(key).shape for key in keys]
    parts = packed.split([math.prod(shape[1:]) for shape in shapes], dim=-1)
    lead = packed.shape[:-3]
    return {key: part.reshape(*lead, *shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def homogeneous(x: Tensor, weight: bool, bias: bool) -> Tensor:
    """ā = (x, 1), along the last axis, as far as weight and bias are trained."""
    if not weight:
        return x.new_ones(*x.shape[:-1], 1)
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1) if bias else x


def bordered(total: Tensor, sums: Tensor, count: int | Tensor) -> Tensor:
    """Σ ā āᵀ [c i+1 i+1] from Σ a aᵀ [c i i], Σ a [c i] and the number of terms."""
    c, i, _ = total.shape
    out = total.new_empty(c, i + 1, i + 1)
    out[:, :i, :i] = total
    return put_border(out, sums, count)


def put_border(out: Tensor, sums: Tensor, count: int | Tensor) -> Tensor:
    """The last row and column of Σ ā āᵀ [*c i+1 i+1], the rest of which is there, from Σ a [*c i]; nothing waits.

    >>> put_border(torch.zeros(3, 3), torch.tensor([4.0, 6.0]), 2)
    tensor([[0., 0., 4.],
            [0., 0., 6.],
            [4., 6., 2.]])
    """
    out[..., :-1, -1].copy_(sums)
    out[..., -1, :-1].copy_(sums)
    corner = out[..., -1, -1]
    corner.copy_(count) if isinstance(count, Tensor) else corner.fill_(count)
    return out
