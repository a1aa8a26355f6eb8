"""Metrics are computed in the precision that their numbers have, also inside a forward pass under autocast.

And without a graph: a rule may read a parameter, and a factor that remembers it would hold every pass since the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from natgrad.pullback.pullback import Pullback
from natgrad.pullback.roots import unrounded

Self = TypeVar("Self")
Result = TypeVar("Result")
Others = ParamSpec("Others")


def without_autocast(
    estimate: Callable[Concatenate[Self, Pullback, Others], Result],
) -> Callable[Concatenate[Self, Pullback, Others], Result]:
    """An estimate with autocast off, which would round every product of factors to half precision, and no gradients."""

    @wraps(estimate)
    def wrapped(self: Self, pullback: Pullback, /, *args: Others.args, **kwargs: Others.kwargs) -> Result:
        with torch.no_grad(), unrounded(pullback.y.device):
            return estimate(self, pullback, *args, **kwargs)

    return wrapped
