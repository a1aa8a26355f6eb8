"""The loss where a step would land."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from natgrad.optim.keeper import Keeper


@final
class Trial:
    """The closure's loss where parameters land, or, for None, as it was computed here. Nothing stays changed."""

    def __init__(self, keeper: Keeper, closure: Callable[[], Any], value: Any) -> None:
        self._keeper, self._closure, self._value = keeper, closure, value

    def __call__(self, landing: Mapping[str, Tensor] | None) -> float:
        if landing is None:
            return self._keeper.agreed(_number(self._value))
        params = self._keeper.model.params
        saved = {name: (p.detach().clone(), p.grad) for name, p in params.items()}
        try:
            for name, p in params.items():
                p.copy_(landing[name])
                p.grad = None
            with torch.enable_grad(), self._keeper.suspended():
                return self._keeper.agreed(_number(self._closure()))
        finally:
            for name, p in params.items():
                p.copy_(saved[name][0])
                p.grad = saved[name][1]


def _number(loss: Any) -> float:
    if loss is None:
        raise TypeError("the closure must return the loss")
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
