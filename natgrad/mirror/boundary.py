"""What becomes of a step that would leave the domain of a family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError
from natgrad.families.domain import Domain

_DOUBLINGS, _BISECTIONS = 11, 10  # of the exponent e of 2⁻ᵉ: down to 2⁻²⁰⁴⁸, and to a factor of 2


@final
@dataclass(frozen=True)
class Taken:
    """What was taken of a step: where it leads, which share of it that is [*batch], and where the whole would lead."""

    point: Tensor
    share: Tensor
    aim: Tensor


class Boundary(ABC):
    """How much of a step v from x is taken, where x + v may lie outside."""

    @abstractmethod
    def take(self, domain: Domain, x: Tensor, v: Tensor, what: str) -> Taken:
        """x + t v, inside, with 0 ≤ t ≤ 1 for every member of the batch."""

    @abstractmethod
    def retreat(self, taken: Taken, x: Tensor, v: Tensor, held: Callable[[Tensor], Tensor], what: str) -> Taken:
        """Less of a step, where the other chart cannot hold what was taken: ``held`` tells of points [*batch]."""

    def share(self, domain: Domain, x: Tensor, v: Tensor, what: str) -> Tensor:
        """t [*batch] alone."""
        return self.take(domain, x, v, what).share


@final
@dataclass(frozen=True)
class Shorten(Boundary):
    """Take a share of the way to the boundary, every member of a batch by itself.

    The boundary is looked for only when a step has left, as the way to it costs more than a look (an eigenvalue problem
    where the look is a Cholesky factorisation); whether one has is one boolean that is read from the device.

    >>> from natgrad.families.domain import Interval
    >>> x, v = torch.tensor([1.0, 1.0]), torch.tensor([-4.0, -0.5])
    >>> Shorten(0.5).take(Interval(0.0), x, v, "x").share  # ½ of ¼, and the whole step
    tensor([0.1250, 1.0000])
    """

    of_the_way: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.of_the_way < 1:
            raise ValueError(
                f"Shorten({self.of_the_way!r}) must be between 0 and 1: the share of the way to the boundary that is "
                "taken, and on the boundary there is no distribution"
            )

    def take(self, domain: Domain, x: Tensor, v: Tensor, what: str) -> Taken:
        aim = x + v
        whole = domain.contains(aim)
        t = torch.ones_like(whole, dtype=x.dtype)
        if bool(whole.all()):
            return Taken(aim, t, aim)
        t = torch.where(whole, t, (self.of_the_way * domain.reach(x, v)).clamp(max=1.0))
        # So close to the boundary that the sum is rounded onto it: stay, which is reported as no step at all.
        t = torch.where(domain.contains(x + spread(t, x) * v), t, 0.0)
        return Taken(x + spread(t, x) * v, t, aim)

    def retreat(self, taken: Taken, x: Tensor, v: Tensor, held: Callable[[Tensor], Tensor], what: str) -> Taken:
        """The share is halved until the point is held, up to a factor of 2; where none is, the member stays."""

        def shared(e: Tensor) -> Tensor:
            return taken.share * torch.exp2(-e)

        def fine(e: Tensor) -> Tensor:
            return held(x + spread(shared(e), x) * v) | (shared(e) == 0)

        kept = held(taken.point)
        low, high = torch.zeros_like(taken.share), torch.ones_like(taken.share)
        for _ in range(_DOUBLINGS):
            good = fine(high) | kept
            low, high = torch.where(good, low, high), torch.where(good, high, 2 * high)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            good = fine(middle)
            low, high = torch.where(good, low, middle), torch.where(good, middle, high)
        t = torch.where(kept, taken.share, shared(high))
        return replace(taken, point=x + spread(t, x) * v, share=t)


@final
@dataclass(frozen=True)
class Forbid(Boundary):
    """Raise a DomainError that names the entry and the bound."""

    def take(self, domain: Domain, x: Tensor, v: Tensor, what: str) -> Taken:
        aim = x + v
        domain.check(aim, what)
        return Taken(aim, torch.ones_like(domain.contains(aim), dtype=x.dtype), aim)

    def retreat(self, taken: Taken, x: Tensor, v: Tensor, held: Callable[[Tensor], Tensor], what: str) -> Taken:
        raise DomainError(f"{what}: take shorter steps (a smaller lr), or let Shorten() do it")


def spread(t: Tensor, x: Tensor) -> Tensor:
    """A number a member, t [*batch], for points x [*batch *point]."""
    return t.reshape(t.shape + (1,) * (x.ndim - t.ndim))
