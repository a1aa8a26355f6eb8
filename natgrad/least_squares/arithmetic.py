"""Arithmetic with one number, or one vector of n, for each fit.

One fit by itself takes a few steps of a few microseconds: its numbers are Python's, as tensors would cost more than its
matrices, and so are its vectors, if they are short. The numbers of b fits beside each other are tensors [b], and their
vectors [b n].
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add, mul, truediv
from typing import Any, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = Any  # a tensor [b], or a float
Truth: TypeAlias = Any  # a tensor [b] of booleans, or a bool
Vector: TypeAlias = Any  # a tensor [b n], or a list of n floats


def select(condition: Truth, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds; rows of tensors [b *], if those are what there is to select."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    rows = max(t.ndim for t in (condition, yes, no) if isinstance(t, Tensor))
    return torch.where(condition.view(-1, *(1,) * (rows - 1)), yes, no)


def least(a: Number, b: Number) -> Number:
    return _both(torch.minimum, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else min(a, b)


def greatest(a: Number, b: Number) -> Number:
    return _both(torch.maximum, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else max(a, b)


def _both(function: Callable[[Tensor, Tensor], Tensor], a: Number, b: Number) -> Tensor:
    like = a if isinstance(a, Tensor) else b
    return function(*(torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in (a, b)))


def negated(condition: Truth) -> Truth:
    return ~condition if isinstance(condition, Tensor) else not condition


def anywhere(condition: Truth) -> bool:
    return bool(condition.any()) if isinstance(condition, Tensor) else condition


def column(a: Number) -> Any:
    """[b 1], to multiply rows with."""
    return a.unsqueeze(-1) if isinstance(a, Tensor) else a


def times(a: Vector, b: Vector) -> Vector:
    return list(map(mul, a, b)) if isinstance(a, list) else a * b


def over(a: Vector, b: Vector) -> Vector:
    return list(map(truediv, a, b)) if isinstance(a, list) else a / b


def scaled(s: Number, a: Vector) -> Vector:
    return [s * v for v in a] if isinstance(a, list) else column(s) * a


def zeros(like: Vector) -> Vector:
    return [0.0] * len(like) if isinstance(like, list) else torch.zeros_like(like)


def displaced(x: Tensor, δ: Vector) -> Tensor:
    """x + δ [b n]."""
    return x.new_tensor([list(map(add, x.tolist()[0], δ))]) if isinstance(δ, list) else x + δ
