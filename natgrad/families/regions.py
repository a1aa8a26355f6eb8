"""Domains that are made of others, or of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError
from natgrad.families.domain import ROUNDING, Domain, all_finite, check_box, check_finite, entry, first, steps


@final
@dataclass(frozen=True)
class SecondHalf(Domain):
    """x_p > 0 for the second half of the entries of the last axis: precisions behind their means."""

    def slacks(self, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[1]

    def margin(self, x: Tensor) -> Tensor:
        return self.slacks(x).amin(-1)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        lower, upper = self._bounds(x)
        return steps(x, v, lower, upper).amin(-1)

    def check(self, x: Tensor, what: str) -> None:
        check_box(x, *self._bounds(x), what)

    @staticmethod
    def _bounds(x: Tensor) -> tuple[Tensor, Tensor]:
        lower = torch.full_like(x, -math.inf)
        lower.chunk(2, -1)[1].zero_()
        return lower, torch.full_like(x, math.inf)


@final
@dataclass(frozen=True)
class Corner(Domain):
    """x_p > 0 with Σ_p x_p < 1 over the last axis: the probabilities of all classes but one.

    >>> Corner().margin(torch.tensor([0.25, 0.5]))  # to the plane of the sum, 0.25/√2
    tensor(0.1768)
    """

    def slacks(self, x: Tensor) -> Tensor:
        return torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1)

    def margin(self, x: Tensor) -> Tensor:
        return torch.minimum(x.amin(-1), (1 - x.sum(-1)) / x.shape[-1] ** 0.5)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        left, along = self.slacks(x), torch.cat([v, -v.sum(-1, keepdim=True)], -1)
        return steps(left, along, torch.zeros_like(left), torch.full_like(left, math.inf)).amin(-1)

    def check(self, x: Tensor, what: str) -> None:
        check_box(x, torch.zeros_like(x), torch.full_like(x, math.inf), what)
        over = ~(x.detach().sum(-1) < 1)
        if bool(over.any()):
            at = first(over)
            raise DomainError(
                f"{what}{entry(at)} sums to {float(x[at].detach().sum()):.6g} over its last axis, and must leave "
                "something below 1 for the last class"
            )


@final
@dataclass(frozen=True)
class Cone(Domain):
    """{x : A(x) is positive definite} for an affine map x ↦ A(x) [*batch d d] that is symmetric.

    ``stretch``: at most how many times longer A makes a vector, so that λ_min(A)/stretch is a distance that is inside
    (it is the distance to the boundary where A is a symmetrised part of x).
    """

    matrix: Callable[[Tensor], Tensor]
    word: str
    stretch: float = 1.0

    def slacks(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(self.matrix(x))[..., :1]

    def contains(self, x: Tensor) -> Tensor:
        _, info = torch.linalg.cholesky_ex(self.matrix(x))
        return (info == 0) & all_finite(x)

    def margin(self, x: Tensor) -> Tensor:
        return self.slacks(x)[..., 0] / self.stretch

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        """A + tV is singular first where t = −1/λ_min(L⁻¹VL⁻ᵀ), A = LLᵀ."""
        A = self.matrix(x)
        V = self.matrix(x + v) - A
        L, _ = torch.linalg.cholesky_ex(A)
        left = torch.linalg.solve_triangular(L, V, upper=False)
        whitened = torch.linalg.solve_triangular(L, left.mT, upper=False)
        least = torch.linalg.eigvalsh(0.5 * (whitened + whitened.mT))[..., 0]
        return torch.where(least < 0, -1 / least, math.inf)

    def check(self, x: Tensor, what: str) -> None:
        check_finite(x, what)
        A = self.matrix(x.detach())
        _, info = torch.linalg.cholesky_ex(A)
        refuse_indefinite(A, info, what, self.word)

    def edge(self, x: Tensor) -> Tensor:
        A = self.matrix(x)
        s = A.diagonal(dim1=-2, dim2=-1).rsqrt()  # of a unit diagonal: entries may have any scales
        least = torch.linalg.eigvalsh(s.unsqueeze(-1) * A * s.unsqueeze(-2))[..., 0]
        return ~(least > ROUNDING * A.shape[-1] * torch.finfo(x.dtype).eps)

    def clear(self, x: Tensor, units: int) -> Tensor:
        """By the pivots of A over its diagonal, 1 − R² of a variable given those before it: one factorisation."""
        A = self.matrix(x)
        L, info = torch.linalg.cholesky_ex(A)
        pivots = L.diagonal(dim1=-2, dim2=-1).square()
        told = pivots > units * torch.finfo(x.dtype).eps * A.diagonal(dim1=-2, dim2=-1)
        return (info == 0) & told.all(-1) & all_finite(x)


@final
@dataclass(frozen=True)
class Parts(Domain):
    """Every part of the last axis in a domain of its own; one of the sizes may be −1, for what is left.

    A part of numbers that are points by themselves (an ``Interval``) counts as one.
    """

    domains: tuple[Domain, ...]
    sizes: tuple[int, ...]

    def slacks(self, x: Tensor) -> Tensor:
        found = [domain.slacks(part) for domain, part in self._parts(x)]
        return torch.cat([g.flatten(x.ndim - 1) for g in found], -1)

    def contains(self, x: Tensor) -> Tensor:
        found = [domain.contains(part) for domain, part in self._parts(x)]
        return torch.stack([c if c.ndim < x.ndim else c.all(-1) for c in found]).all(0)

    def margin(self, x: Tensor) -> Tensor:
        return self._least([domain.margin(part) for domain, part in self._parts(x)], x)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        both = zip(self._parts(x), self._parts(v), strict=True)
        return self._least([domain.reach(part, along) for (domain, part), (_, along) in both], x)

    def check(self, x: Tensor, what: str) -> None:
        for k, (domain, part) in enumerate(self._parts(x)):
            domain.check(part, f"{what} (part {k})")

    def edge(self, x: Tensor) -> Tensor:
        found = [domain.edge(part) for domain, part in self._parts(x)]
        return torch.stack([c if c.ndim < x.ndim else c.any(-1) for c in found]).any(0)

    def clear(self, x: Tensor, units: int) -> Tensor:
        found = [domain.clear(part, units) for domain, part in self._parts(x)]
        return torch.stack([c if c.ndim < x.ndim else c.all(-1) for c in found]).all(0)

    def _parts(self, x: Tensor) -> list[tuple[Domain, Tensor]]:
        left = x.shape[-1] - sum(size for size in self.sizes if size > 0)
        split = x.split([left if size < 0 else size for size in self.sizes], -1)
        return list(zip(self.domains, split, strict=True))

    @staticmethod
    def _least(found: list[Tensor], x: Tensor) -> Tensor:
        return torch.stack([t if t.ndim < x.ndim else t.amin(-1) for t in found]).amin(0)


def refuse_indefinite(A: Tensor, info: Tensor, what: str, word: str) -> None:
    """Raise if a Cholesky factorisation of A [*batch d d] stopped, by the report of ``cholesky_ex``."""
    if bool((info != 0).any()):
        at = first(info != 0)
        least = float(torch.linalg.eigvalsh(A.detach()[at])[0])
        raise DomainError(
            f"{what}{entry(at)}: {word} must be positive definite, and has the eigenvalue {least:.6g}: start inside, "
            "or take shorter steps (see reach)"
        )
