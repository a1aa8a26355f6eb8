"""The rule of ``nn.Linear`` with any leading dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.moments import homogeneous, rows, single
from natgrad.rules.base import Call, Keys, Moment, Rows, RowsRule, Rule, plain


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


# The rule of PReLU: its slopes w are a layer, z = max(x, 0) + w·min(x, 0), entry by entry.


@final
class PReLURule(Rule):
    """a = min(x, 0): a slope a channel, or one for all (He et al. 2015, (1) and (8)).

    Every channel is a group c of its own with one input and one output; the positions r are those that share its
    slope: the axes after the channels, or all entries of an example where there is one slope.

    Shapes: input [n c *spatial] gives a [n r c 1], output cotangents [k n c *spatial] give g [k n r c 1].

    >>> import torch
    >>> x = torch.tensor([[-2.0, 3.0]])
    >>> PReLURule().inputs(nn.PReLU(), ("weight",), Call((x,), {})).flatten()
    tensor([-2., 0.])
    """

    @property
    def pure(self) -> bool:
        return True

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.PReLU, "weight")

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return _channels(module), 1, 1

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        return _by_channel(module, single(call.x).clamp(max=0), 1).mT.unsqueeze(-1)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return _by_channel(module, g, 2).mT.unsqueeze(-1)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return block["weight"].view(-1, 1, 1)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        return {"weight": packed[..., 0, 0]}

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        a = _by_channel(module, single(call.x).clamp(max=0), 1)
        return Moment(a.square().sum((0, 2)).view(-1, 1, 1), a.shape[0] * a.shape[2])

    def input_mean(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        return _by_channel(module, single(call.x).clamp(max=0), 1).mean(2).unsqueeze(-1)

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return _by_channel(module, single(g), 2).square().sum((0, 1, 3)).view(-1, 1, 1)


def _channels(module: nn.Module) -> int:
    return cast(nn.PReLU, module).num_parameters


def _by_channel(module: nn.Module, x: Tensor, lead: int) -> Tensor:
    """[*lead c r] of a tensor [*lead c *spatial], ``lead`` axes before those of an example."""
    return x.reshape(*x.shape[:lead], _channels(module), -1)
