"""The rule of ``nn.Linear`` with any leading dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from natgrad.rules.base import Rule, trainable


@final
class LinearRule(Rule):
    """z = W̄ ā with W̄ = [W b] and ā = (a, 1): the gradient of example n is Σ_r g ā ᵀ (004 (26), (28); ERRATA 51).

    Shapes: input [n *r in] gives a [n r 1 i], output cotangents [k n *r out] give g [k n r 1 o].
    """

    def covers(self, module: nn.Module) -> bool:
        # Pruning, spectral norm and the like leave the type, and put other parameters or another forward in.
        own = {name for name, _ in module.named_parameters(recurse=False)}
        return type(module) is nn.Linear and own <= {"weight", "bias"} and "forward" not in vars(module)

    def shape(self, module: nn.Module) -> tuple[int, int, int]:
        layer, names = cast(nn.Linear, module), trainable(module)
        return 1, layer.out_features, layer.in_features * ("weight" in names) + ("bias" in names)

    def inputs(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        x = cast(Tensor, args[0])
        a = x.reshape(x.shape[0], -1, 1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, 1, 1, -1)
        names = trainable(module)
        if "weight" not in names:
            return a.new_ones(*a.shape[:3], 1)
        return torch.cat([a, a.new_ones(*a.shape[:3], 1)], dim=-1) if "bias" in names else a

    def cotangents(self, module: nn.Module, g: Tensor) -> Tensor:
        return g.reshape(*g.shape[:2], -1, 1, g.shape[-1])

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        parts = [block["weight"]] if "weight" in block else []
        if "bias" in block:
            parts.append(block["bias"].unsqueeze(-1))
        return torch.cat(parts, dim=-1).unsqueeze(-3)

    def unpack(self, module: nn.Module, packed: Tensor) -> dict[str, Tensor]:
        w = packed.squeeze(-3)
        names = trainable(module)
        out = {"weight": w[..., : cast(nn.Linear, module).in_features]} if "weight" in names else {}
        if "bias" in names:
            out["bias"] = w[..., -1]
        return out
