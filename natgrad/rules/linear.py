"""The rule of ``nn.Linear`` with any leading dimensions, and the packing it shares with convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast, final

import torch
from torch import Tensor, nn

from natgrad.rules.base import Call, Keys, Moment, Rule, bordered, homogeneous, plain, single
from natgrad.rules.launches import affine_product
from natgrad.rules.products import symmetric_product


class AffineRule(Rule):
    """z = W̄ ā with W̄ = [W b]: weight [c·o *fan] and bias [c·o], packed as W̄ [c o i] with the bias last."""

    @property
    def pure(self) -> bool:
        return True

    def groups(self, module: nn.Module) -> int:
        """c."""
        return 1

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        weight, c = cast(Tensor, module.weight), self.groups(module)
        return c, weight.shape[0] // c, math.prod(weight.shape[1:]) * ("weight" in keys) + ("bias" in keys)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        c = self.groups(module)
        parts = [block[key].reshape(c, block[key].shape[0] // c, -1) for key in ("weight", "bias") if key in block]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        weight, lead = cast(Tensor, module.weight), packed.shape[:-3]
        fan = math.prod(weight.shape[1:])
        out = {"weight": packed[..., :fan].reshape(*lead, *weight.shape)} if "weight" in keys else {}
        if "bias" in keys:
            out["bias"] = packed[..., -1].reshape(*lead, weight.shape[0])
        return out


@final
class LinearRule(AffineRule):
    """z = W̄ ā with W̄ = [W b] and ā = (a, 1): the gradient of example n is Σ_r g ā ᵀ (004 (26), (28); ERRATA 51).

    Shapes: input [n *r in] gives a [n r 1 i], output cotangents [k n *r out] give g [k n r 1 o].
    """

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.Linear, "weight", "bias")

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        x = call.x
        a = x.reshape(x.shape[0], -1, 1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, 1, 1, -1)
        return homogeneous(a, "weight" in keys, "bias" in keys)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return g.reshape(*g.shape[:2], -1, 1, g.shape[-1])

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        x = single(call.x.reshape(-1, call.x.shape[-1]))
        count = x.shape[0]
        if "weight" not in keys:
            return Moment(x.new_full((1, 1, 1), count), count)
        if "bias" in keys and x.device.type == "cuda":
            return Moment(affine_product(x).unsqueeze(0), count)
        total = symmetric_product(x).unsqueeze(0)
        return Moment(bordered(total, x.sum(0, keepdim=True), count) if "bias" in keys else total, count)

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return symmetric_product(single(g.reshape(-1, g.shape[-1]))).unsqueeze(0)
