"""Where a convex function is defined: open convex sets that name the entry and the bound of what lies outside."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError

_ROUNDING = 1024  # units in the last place that the sum of a simplex may be off


class Domain(ABC):
    """An open convex set of points of any shape. ``check`` is for its inside, ``check_closure`` allows the boundary."""

    @abstractmethod
    def check(self, x: Tensor, what: str) -> None:
        """Refuse a point that is not inside, by entry and bound."""

    @abstractmethod
    def check_closure(self, x: Tensor, what: str) -> None:
        """Refuse a point that is neither inside nor on the boundary."""

    @abstractmethod
    def centre(self, like: Tensor) -> Tensor:
        """A point well inside, of the shape of another."""


@final
@dataclass(frozen=True)
class Space(Domain):
    """All finite points."""

    def check(self, x: Tensor, what: str) -> None:
        _refuse(x, x.isfinite(), what, "must be finite")

    def check_closure(self, x: Tensor, what: str) -> None:
        self.check(x, what)

    def centre(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)


@final
@dataclass(frozen=True)
class OpenBox(Domain):
    """lower < x_p < upper for every entry.

    >>> OpenBox(0.0).check(torch.tensor([1.0, -2.0]), "x")
    Traceback (most recent call last):
    ...
    natgrad.errors.DomainError: x[1] = -2 must be above 0: start inside, or take shorter steps (a larger alpha)
    """

    lower: float = -math.inf
    upper: float = math.inf

    def __post_init__(self) -> None:
        if not self.lower < self.upper:
            raise ValueError(f"OpenBox(lower={self.lower}, upper={self.upper}) is empty: lower must be below upper")

    def check(self, x: Tensor, what: str) -> None:
        _refuse(x, x.isfinite(), what, "must be finite")
        _refuse(x, x > self.lower, what, f"must be above {self.lower:g}")
        _refuse(x, x < self.upper, what, f"must be below {self.upper:g}")

    def check_closure(self, x: Tensor, what: str) -> None:
        _refuse(x, x.isfinite(), what, "must be finite")
        _refuse(x, x >= self.lower, what, f"must be at least {self.lower:g}")
        _refuse(x, x <= self.upper, what, f"must be at most {self.upper:g}")

    def centre(self, like: Tensor) -> Tensor:
        lower, upper = math.isfinite(self.lower), math.isfinite(self.upper)
        if lower and upper:
            return torch.full_like(like, 0.5 * (self.lower + self.upper))
        return torch.full_like(like, self.lower + 1 if lower else self.upper - 1 if upper else 0.0)


@final
@dataclass(frozen=True)
class Simplex(Domain):
    """x_p > 0 with Σ_p x_p = 1 over the last axis; several simplices on the axes before it."""

    def check(self, x: Tensor, what: str) -> None:
        self._check_sum(x, what)
        _refuse(x, x > 0, what, "must be above 0")

    def check_closure(self, x: Tensor, what: str) -> None:
        self._check_sum(x, what)
        _refuse(x, x >= 0, what, "must be at least 0")

    def centre(self, like: Tensor) -> Tensor:
        return torch.full_like(like, 1 / like.shape[-1])

    def _check_sum(self, x: Tensor, what: str) -> None:
        if x.ndim == 0:
            raise DomainError(f"{what} is one number: a point of a simplex has its entries on the last axis")
        off = x.detach().sum(-1) - 1
        wrong = ~(off.abs() <= _ROUNDING * torch.finfo(x.dtype).eps)
        if bool(wrong.any()):
            at = tuple(int(i) for i in wrong.nonzero()[0])
            raise DomainError(
                f"{what}{_entry(at)} sums to 1 + {float(off[at]):.6g} over its last axis, and a point of a simplex to "
                "1: divide it by its sum"
            )


def _refuse(x: Tensor, inside: Tensor, what: str, bound: str) -> None:
    if bool(inside.all()):
        return
    at = tuple(int(i) for i in (~inside).nonzero()[0])
    raise DomainError(
        f"{what}{_entry(at)} = {float(x[at]):.6g} {bound}: start inside, or take shorter steps (a larger alpha)"
    )


def _entry(at: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, at))}]" if at else ""
