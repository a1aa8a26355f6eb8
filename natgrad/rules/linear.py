"""The rule of ``nn.Linear`` with any leading dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from natgrad.rules.base import Call, Keys, plain
from natgrad.rules.leading import rows
from natgrad.rules.packing import homogeneous
from natgrad.rules.rows import Rows, RowsRule


@final
class LinearRule(RowsRule):
    """z = W̄ ā with W̄ = [W b] and ā = (a, 1): the gradient of example n is Σ_r g ā ᵀ (004 (26), (28); ERRATA 51).

    Shapes: input [n *r in] gives a [n r 1 i], output cotangents [k n *r out] give g [k n r 1 o]. Sums over all rows do
    not ask for their order.
    """

    @property
    def pure(self) -> bool:
        return True

    @property
    def linear(self) -> bool:
        return True

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.Linear, "weight", "bias")

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - 1

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        x = call.x
        a = x.reshape(x.shape[0], -1, 1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, 1, 1, -1)
        return homogeneous(a, "weight" in keys, "bias" in keys)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return g.reshape(*g.shape[:2], -1, 1, g.shape[-1])

    def gathered(self, calls: Sequence[Call]) -> Call | None:
        return Call((torch.cat([rows(call.x) for call in calls]),), {}, calls[0].training)

    def gathered_cotangents(self, g: Sequence[Tensor]) -> Tensor | None:
        return torch.cat([rows(part) for part in g]).unsqueeze(0)

    def input_rows(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        x = rows(call.x)
        return Rows(x if "weight" in keys else x[:, :0], "bias" in keys)

    def output_rows(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        return Rows(rows(g))
