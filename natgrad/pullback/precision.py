"""Metrics are computed in the precision that their numbers have, also inside a forward pass under autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch

from natgrad.pullback.pullback import Pullback

Self = TypeVar("Self")
Result = TypeVar("Result")


def without_autocast(estimate: Callable[[Self, Pullback], Result]) -> Callable[[Self, Pullback], Result]:
    """An estimate with autocast off: it would round every product of factors to half precision."""

    @wraps(estimate)
    def wrapped(self: Self, pullback: Pullback) -> Result:
        with torch.autocast(pullback.y.device.type, enabled=False):
            return estimate(self, pullback)

    return wrapped
