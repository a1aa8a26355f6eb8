"""The rules of ``nn.Linear`` and ``nn.PReLU``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.moments import single
from natgrad.rules.base import Call, Keys, Rule, plain
from natgrad.rules.features import Entries, Rows


@final
class LinearRule(Rule):
    """z = W̄ ā with W̄ = [W b] and ā = (a, 1): the gradient of example n is Σ_r g āᵀ (Martens and Grosse 2015).

    Shapes: input [n *r in] gives a [n r 1 i], output cotangents [k n *r out] give g [k n r 1 o].

    Called with a ``Jet``, the layer sees value, derivatives and Laplacian as positions. The bias is added to the value
    alone: the homogeneous coordinate, 1 there and 0 elsewhere, is the second argument of the call.
    """

    capturable = True
    takes_jets = True

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.Linear, "weight", "bias")

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - 1

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return True

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        x = positions_in_one_axis(call.x if call.x.ndim > 1 else call.x.unsqueeze(0), 0)
        x, homogeneous = x if "weight" in keys else x[..., :0], call.argument(1, "homogeneous")
        if homogeneous is None or "bias" not in keys:
            return Rows(x, "bias" in keys)
        return Rows(torch.cat([x, positions_in_one_axis(homogeneous, 0)], -1))

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        return Rows(positions_in_one_axis(g if g.ndim > 2 else g.unsqueeze(1), 1))


def positions_in_one_axis(x: Tensor, examples: int) -> Tensor:
    """[*k n r d] of x [*k n *r d]; ``examples`` is the index of the axis n. A view if possible."""
    if x.ndim == examples + 3:
        return x
    return x.unsqueeze(examples + 1) if x.ndim == examples + 2 else x.flatten(examples + 1, -2)


@final
class PReLURule(Rule):
    """a = min(x, 0): a slope w a channel, or one for all, z = max(x, 0) + w·min(x, 0) (He et al. 2015).

    Every channel is a group c of its own with one input and one output; the positions r are those that share its
    slope: the axes after the channels, or all entries of an example where there is one slope.

    Shapes: input [n c *spatial] gives a [n r c 1], output cotangents [k n c *spatial] give g [k n r c 1].

    >>> import torch
    >>> x = torch.tensor([[-2.0, 3.0]])
    >>> PReLURule().inputs(nn.PReLU(), ("weight",), Call((x,), {})).dense().flatten()
    tensor([-2., 0.])
    """

    capturable = True
    pixels = True

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.PReLU, "weight")

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return _channels(module), 1, 1

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return True

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Entries:
        return Entries(_by_channel(module, single(call.x).clamp(max=0), 1).mT)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Entries:
        return Entries(_by_channel(module, g, 2).mT)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return block["weight"].view(-1, 1, 1)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        return {"weight": packed[..., 0, 0]}


def _channels(module: nn.Module) -> int:
    return cast(nn.PReLU, module).num_parameters


def _by_channel(module: nn.Module, x: Tensor, lead: int) -> Tensor:
    """[*lead c r] of a tensor [*lead c *spatial], ``lead`` axes before those of an example."""
    return x.reshape(*x.shape[:lead], _channels(module), -1)
