"""The loss where a step would land."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from natgrad.optim.keeper import Keeper
from natgrad.untouched import put_back, random_stream, untouched


@final
class Trial:
    """The closure's loss where parameters land, or, for None, as it was computed here. Nothing stays changed.

    The closure draws the same random numbers again (dropout has the same masks), from the ``stream`` as it was before
    the first time; buffers, such as running statistics, do not see where the step was only tried.
    """

    def __init__(self, keeper: Keeper, closure: Callable[[], Any], value: Any, stream: Tensor) -> None:
        self._keeper, self._closure, self._value, self._stream = keeper, closure, value, stream

    def __call__(self, landing: Mapping[str, Tensor] | None) -> float:
        if landing is None:
            return self._keeper.agreed(_number(self._value))
        params, device = self._keeper.model.params, self._keeper.model.example.device
        saved = {name: (p.detach().clone(), p.grad) for name, p in params.items()}
        now = random_stream(device)
        try:
            for name, p in params.items():
                p.copy_(landing[name])
                p.grad = None
            put_back(device, self._stream)
            with torch.enable_grad(), self._keeper.suspended(), untouched(self._keeper.module):
                return self._keeper.agreed(_number(self._closure()))
        finally:
            put_back(device, now)
            for name, p in params.items():
                p.copy_(saved[name][0])
                p.grad = saved[name][1]


def _number(loss: Any) -> float:
    if loss is None:
        raise TypeError("the closure must return the loss")
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
