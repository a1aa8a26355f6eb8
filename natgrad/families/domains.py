"""Open convex sets of parameters: which points are inside, how far the boundary is, and what to say of a point outside.

Exponential families (both charts) and the potentials of mirror descent share these classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.errors import DomainError
from natgrad.linalg import least_eigenvalue

Bound: TypeAlias = float | tuple[float, ...]
_BISECTIONS = 64
_ROUNDING = 64  # units in the last place that separate the inside from the boundary
_SUM = 1024  # units in the last place by which the sum of probabilities may differ from 1
_ADVICE = "start inside, or take shorter steps (a smaller lr or rate, or a larger smoothness; see reach)"


class Domain(ABC):
    """{x : g_s(x) > 0 for all s} with concave g: an open convex set. Points are [*batch p].

    ``contains``, ``margin`` and ``reach`` return tensors [*batch] and never wait for a GPU; the checks do.
    """

    @abstractmethod
    def slacks(self, x: Tensor) -> Tensor:
        """g(x) [*batch s]: all positive inside, and one of them 0 on the boundary."""

    @abstractmethod
    def check(self, x: Tensor, what: str) -> None:
        """Raise a DomainError that names the entry and the bound, unless x lies inside."""

    def check_closure(self, x: Tensor, what: str) -> None:
        """As ``check``, but points on the boundary pass."""
        refuse_non_finite(x, what)
        negative = self.slacks(x.detach()) < 0
        if bool(negative.any()):
            raise DomainError(f"{what}{entry(first(negative)[:-1])} lies outside {self!r}: {_ADVICE}")

    def centre(self, like: Tensor) -> Tensor:
        """A point well inside, with the shape of ``like``."""
        raise TypeError(f"{self!r} has no centre to start from: use Space, OpenBox or Simplex")

    def contains(self, x: Tensor) -> Tensor:
        """Whether each point lies inside [*batch], booleans."""
        return (self.slacks(x) > 0).all(-1) & x.isfinite().all(-1)

    def margin(self, x: Tensor) -> Tensor:
        """The radius [*batch] of a ball around x that lies inside, 1/√Σ_p r_p⁻²; negative outside.

        r_p is the distance to the boundary along ± axis p. The convex hull of those points lies inside, and the ball
        inside the hull: a lower bound on the distance to the boundary. Subclasses return the distance where it is easy.
        """
        p = x.shape[-1]
        axes = torch.eye(p, dtype=x.dtype, device=x.device).view(p, *[1] * (x.ndim - 1), p).expand(p, *x.shape)
        r = torch.minimum(self.reach(x, axes), self.reach(x, -axes))
        radius = r.square().reciprocal().sum(0).rsqrt()
        return torch.where(self.contains(x), radius, self.slacks(x).amin(-1).clamp(max=0.0))

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        """The longest t [*batch] such that x + s v lies inside for 0 ≤ s < t; infinite if v never leaves.

        By bisection on t/(1 + t), for domains that have no closed form.
        """
        low = torch.zeros(torch.broadcast_shapes(x.shape, v.shape)[:-1], dtype=x.dtype, device=x.device)
        high = torch.ones_like(low)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            inside = self.contains(x + (middle / (1 - middle)).unsqueeze(-1) * v)
            low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
        t = low / (1 - low)
        return torch.where(t < 1 / torch.finfo(x.dtype).eps, t, math.inf)

    def on_boundary(self, x: Tensor) -> Tensor:
        """Whether a point of the closure lies on a curved boundary, up to rounding [*batch]."""
        return torch.zeros_like(self.contains(x))

    def clear_of_boundary(self, x: Tensor, units: int) -> Tensor:
        """Whether x lies inside, and still does after moving by that many units in the last place [*batch]."""
        return self.contains(x) & self.contains(x * (1 + units * torch.finfo(x.dtype).eps))


@final
@dataclass(frozen=True)
class Space(Domain):
    """The domain of all finite points.

    Args:
        axes: The trailing axes of a point: 1, or 0 if every number is a point by itself [*batch].

    Example:
        >>> Space().reach(torch.zeros(2), torch.ones(2))
        tensor(inf)
    """

    axes: int = 1

    def slacks(self, x: Tensor) -> Tensor:
        return torch.full_like(x if self.axes else x.unsqueeze(-1), math.inf)

    def contains(self, x: Tensor) -> Tensor:
        return x.isfinite().all(-1) if self.axes else x.isfinite()

    def margin(self, x: Tensor) -> Tensor:
        return x.new_full(x.shape[:-1] if self.axes else x.shape, math.inf)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        return self.margin(x + v)

    def check(self, x: Tensor, what: str) -> None:
        refuse_non_finite(x, what)

    def centre(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)


@final
@dataclass(frozen=True)
class OpenBox(Domain):
    """The open box: every entry lies strictly between its bounds.

    Args:
        lower: The lower bound: one number for all entries, or a tuple with one for each of equally long pieces of the
            last axis. ``lower=(-inf, 0.0)`` bounds the second half.
        upper: The upper bound, in the same form.
        axes: The trailing axes of a point: 1, or 0 if every number is a point by itself [*batch].

    Example:
        >>> OpenBox((-1.0, -math.inf), (math.inf, 0.0)).check(torch.tensor([1.0, 2.0]), "eta")
        Traceback (most recent call last):
        ...
        natgrad.errors.DomainError: eta[1] = 2 must be below 0: start inside, or take shorter steps (a smaller lr or ...
        >>> OpenBox(0.0).reach(torch.tensor([1.0, 3.0]), torch.tensor([-2.0, 1.0]))
        tensor(0.5000)
        >>> OpenBox(0.0, 1.0, axes=0).margin(torch.tensor([0.25, 0.9, 2.0]))
        tensor([ 0.2500,  0.1000, -1.0000])
    """

    lower: Bound = -math.inf
    upper: Bound = math.inf
    axes: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.lower, tuple) and not isinstance(self.upper, tuple) and not self.lower < self.upper:
            raise ValueError(f"OpenBox(lower={self.lower}, upper={self.upper}) is empty: lower must be below upper")

    def slacks(self, x: Tensor) -> Tensor:
        lower, upper = self._bounds(x)
        return torch.cat([x - lower, upper - x], -1) if self.axes else torch.stack([x - lower, upper - x], -1)

    def contains(self, x: Tensor) -> Tensor:
        lower, upper = self._bounds(x)
        inside = (x > lower) & (x < upper) & x.isfinite()
        return inside.all(-1) if self.axes else inside

    def margin(self, x: Tensor) -> Tensor:
        lower, upper = self._bounds(x)
        distance = torch.minimum(x - lower, upper - x)
        return distance.amin(-1) if self.axes else distance

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        t = _time_to_bound(x, v, *self._bounds(x))
        return t.amin(-1) if self.axes else t

    def check(self, x: Tensor, what: str) -> None:
        lower, upper = self._bounds(x)
        refuse_non_finite(x, what)
        _refuse_entry(x, x <= lower, what, "above", lower)
        _refuse_entry(x, x >= upper, what, "below", upper)

    def check_closure(self, x: Tensor, what: str) -> None:
        lower, upper = self._bounds(x)
        refuse_non_finite(x, what)
        _refuse_entry(x, x < lower, what, "at least", lower)
        _refuse_entry(x, x > upper, what, "at most", upper)

    def centre(self, like: Tensor) -> Tensor:
        lower, upper = (bound.expand_as(like) for bound in self._bounds(like))
        nearest = torch.where(lower.isfinite(), lower + 1, torch.where(upper.isfinite(), upper - 1, 0.0))
        return torch.where(lower.isfinite() & upper.isfinite(), 0.5 * (lower + upper), nearest)

    def _bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both bounds as tensors [] or [p], filled on the device of x: nothing is copied to a GPU."""
        return self._filled(x, self.lower), self._filled(x, self.upper)

    @staticmethod
    def _filled(x: Tensor, bound: Bound) -> Tensor:
        if not isinstance(bound, tuple):
            return torch.full((), bound, dtype=x.dtype, device=x.device)
        size = x.shape[-1] // len(bound)
        return torch.cat([torch.full((size,), b, dtype=x.dtype, device=x.device) for b in bound])


@final
@dataclass(frozen=True)
class Simplex(Domain):
    """The open simplex: positive numbers on the last axis that sum to 1.

    Method:
        x_p > 0 with Σ_p x_p = 1 over the last axis: a flat set, whose tangent vectors sum to 0.
    """

    def slacks(self, x: Tensor) -> Tensor:
        return x

    def contains(self, x: Tensor) -> Tensor:
        return (x > 0).all(-1) & self._sums(x)

    def margin(self, x: Tensor) -> Tensor:
        c = x.shape[-1]
        return x.amin(-1) * (c / max(c - 1, 1)) ** 0.5  # within the plane of the simplex

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        return _time_to_zero(x, v).amin(-1)

    def check(self, x: Tensor, what: str) -> None:
        self._check_sum(x, what)
        _refuse_entry(x, x <= 0, what, "above", torch.zeros_like(x))

    def check_closure(self, x: Tensor, what: str) -> None:
        self._check_sum(x, what)
        _refuse_entry(x, x < 0, what, "at least", torch.zeros_like(x))

    def centre(self, like: Tensor) -> Tensor:
        return torch.full_like(like, 1 / like.shape[-1])

    def _check_sum(self, x: Tensor, what: str) -> None:
        if x.ndim == 0:
            raise DomainError(f"{what} is one number: a point of a simplex has its entries on the last axis")
        refuse_non_finite(x, what)
        if not bool(self._sums(x).all()):
            at = first(~self._sums(x))
            raise DomainError(
                f"{what}{entry(at)} sums to 1 + {float(x[at].detach().sum() - 1):.6g} over its last axis, and "
                "probabilities sum to 1: divide it by its sum"
            )

    @staticmethod
    def _sums(x: Tensor) -> Tensor:
        return (x.sum(-1) - 1).abs() <= _SUM * torch.finfo(x.dtype).eps


@final
@dataclass(frozen=True)
class Corner(Domain):
    """x_p > 0 with Σ_p x_p < 1 over the last axis: the probabilities of all classes but one.

    >>> Corner().margin(torch.tensor([0.25, 0.5]))  # to the plane Σ x = 1: 0.25/√2
    tensor(0.1768)
    """

    def slacks(self, x: Tensor) -> Tensor:
        return torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1)

    def margin(self, x: Tensor) -> Tensor:
        return torch.minimum(x.amin(-1), (1 - x.sum(-1)) / x.shape[-1] ** 0.5)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        return _time_to_zero(self.slacks(x), torch.cat([v, -v.sum(-1, keepdim=True)], -1)).amin(-1)

    def check(self, x: Tensor, what: str) -> None:
        refuse_non_finite(x, what)
        _refuse_entry(x, x <= 0, what, "above", torch.zeros_like(x))
        over = ~(x.detach().sum(-1) < 1)
        if bool(over.any()):
            at = first(over)
            raise DomainError(
                f"{what}{entry(at)} sums to {float(x[at].detach().sum()):.6g} over its last axis, and must leave "
                "something below 1 for the last class"
            )


@final
@dataclass(frozen=True)
class Concave(Domain):
    """{x : g(x) > 0} for a given concave g(x) → [*batch s], with a description of each condition.

    The s conditions are split evenly among ``words``: one condition a description, or one for each of several entries.
    The conditions of the last description must be free of units, since ``on_boundary`` compares them with rounding.
    """

    function: Callable[[Tensor], Tensor]
    words: tuple[str, ...]

    def slacks(self, x: Tensor) -> Tensor:
        return self.function(x)

    def on_boundary(self, x: Tensor) -> Tensor:
        return self._least(x) <= _ROUNDING * torch.finfo(x.dtype).eps

    def clear_of_boundary(self, x: Tensor, units: int) -> Tensor:
        return self.contains(x) & (self._least(x) > units * torch.finfo(x.dtype).eps)

    def check(self, x: Tensor, what: str) -> None:
        refuse_non_finite(x, what)
        g = self.slacks(x.detach())
        wrong = ~(g > 0)
        if bool(wrong.any()):
            *at, s = first(wrong)
            size = g.shape[-1] // len(self.words)
            where = entry((*at, s % size) if size > 1 else tuple(at))
            raise DomainError(
                f"{what}{where} must satisfy {self.words[s // size]}, and breaks it by {0 - float(g[(*at, s)]):.6g}: "
                f"{_ADVICE}"
            )

    def _least(self, x: Tensor) -> Tensor:
        """The smallest slack of the last description [*batch]."""
        g = self.slacks(x)
        return g[..., -(g.shape[-1] // len(self.words)) :].amin(-1)


@final
@dataclass(frozen=True)
class Cone(Domain):
    """{x : A(x) is positive definite} for an affine map x ↦ A(x) [*batch d d] to symmetric matrices.

    ``stretch`` bounds ‖A(x) − A(y)‖/‖x − y‖, so that λ_min(A)/stretch is a safe distance (and the exact distance to the
    boundary where A is the symmetric part of entries of x).
    """

    matrix: Callable[[Tensor], Tensor]
    word: str
    stretch: float = 1.0

    def slacks(self, x: Tensor) -> Tensor:
        return least_eigenvalue(self.matrix(x)).unsqueeze(-1)

    def contains(self, x: Tensor) -> Tensor:
        _, info = torch.linalg.cholesky_ex(self.matrix(x))
        return (info == 0) & all_finite(x)

    def margin(self, x: Tensor) -> Tensor:
        return self.slacks(x)[..., 0] / self.stretch

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        A = self.matrix(x)
        return time_to_singular(torch.linalg.cholesky_ex(A)[0], self.matrix(x + v) - A)

    def check(self, x: Tensor, what: str) -> None:
        refuse_non_finite(x, what)
        A = self.matrix(x.detach())
        _, info = torch.linalg.cholesky_ex(A)
        refuse_indefinite(A, info, what, self.word)

    def on_boundary(self, x: Tensor) -> Tensor:
        A = self.matrix(x)
        s = A.diagonal(dim1=-2, dim2=-1).rsqrt()  # scale to a unit diagonal: entries may have any units
        least = least_eigenvalue(s.unsqueeze(-1) * A * s.unsqueeze(-2))
        return ~(least > _ROUNDING * A.shape[-1] * torch.finfo(x.dtype).eps)

    def clear_of_boundary(self, x: Tensor, units: int) -> Tensor:
        """From one factorisation: each pivot over its diagonal entry is 1 − R² of a variable given those before it."""
        A = self.matrix(x)
        L, info = torch.linalg.cholesky_ex(A)
        pivots = L.diagonal(dim1=-2, dim2=-1).square()
        distinct = pivots > units * torch.finfo(x.dtype).eps * A.diagonal(dim1=-2, dim2=-1)
        return (info == 0) & distinct.all(-1) & all_finite(x)


@final
@dataclass(frozen=True)
class DomainProduct(Domain):
    """Blocks of the last axis, each in a domain of its own; one of the sizes may be −1, for the remaining entries.

    A block of numbers that are points by themselves (``axes=0``) counts as one.
    """

    domains: tuple[Domain, ...]
    sizes: tuple[int, ...]

    def slacks(self, x: Tensor) -> Tensor:
        return torch.cat([domain.slacks(block).flatten(x.ndim - 1) for domain, block in self._blocks(x)], -1)

    def contains(self, x: Tensor) -> Tensor:
        return self._all([domain.contains(block) for domain, block in self._blocks(x)], x)

    def margin(self, x: Tensor) -> Tensor:
        return self._least([domain.margin(block) for domain, block in self._blocks(x)], x)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        pairs = zip(self._blocks(x), self._blocks(v), strict=True)
        return self._least([domain.reach(block, along) for (domain, block), (_, along) in pairs], x)

    def check(self, x: Tensor, what: str) -> None:
        for k, (domain, block) in enumerate(self._blocks(x)):
            domain.check(block, f"{what} (block {k})")

    def on_boundary(self, x: Tensor) -> Tensor:
        return ~self._all([~domain.on_boundary(block) for domain, block in self._blocks(x)], x)

    def clear_of_boundary(self, x: Tensor, units: int) -> Tensor:
        return self._all([domain.clear_of_boundary(block, units) for domain, block in self._blocks(x)], x)

    def _blocks(self, x: Tensor) -> list[tuple[Domain, Tensor]]:
        rest = x.shape[-1] - sum(size for size in self.sizes if size > 0)
        blocks = x.split([rest if size < 0 else size for size in self.sizes], -1)
        return list(zip(self.domains, blocks, strict=True))

    @staticmethod
    def _all(each: list[Tensor], x: Tensor) -> Tensor:
        return torch.stack([c if c.ndim < x.ndim else c.all(-1) for c in each]).all(0)

    @staticmethod
    def _least(each: list[Tensor], x: Tensor) -> Tensor:
        return torch.stack([t if t.ndim < x.ndim else t.amin(-1) for t in each]).amin(0)


def all_finite(x: Tensor) -> Tensor:
    """Whether all entries of the last axis are finite [*batch]: as ``isfinite``, with fewer passes over large points.

    >>> all_finite(torch.tensor([[1.0, 3e38, 3e38], [0.0, math.inf, 1.0], [math.nan, 0.0, 1.0]]))
    tensor([ True, False, False])
    """
    return (0 * x).sum(-1) == 0


def refuse_non_finite(x: Tensor, what: str) -> None:
    """Raise a DomainError that names the first entry that is NaN or infinite."""
    if not bool(all_finite(x.detach().reshape(-1))):
        at = first(~x.isfinite())
        raise DomainError(f"{what}{entry(at)} = {float(x[at].detach()):.6g} must be finite")


def refuse_indefinite(A: Tensor, info: Tensor, what: str, word: str) -> None:
    """Raise if the Cholesky factorisation of A [*batch d d] stopped, according to the ``info`` of ``cholesky_ex``."""
    if bool((info != 0).any()):
        at = first(info != 0)
        least = float(least_eigenvalue(A.detach()[at]))
        place = f"{what}{entry(at)}".removesuffix(", at ")  # one point has no index
        raise DomainError(f"{place}: {word} must be positive definite, and has the eigenvalue {least:.6g}: {_ADVICE}")


def entry(at: tuple[int, ...]) -> str:
    """An index as "[i, j]"; nothing for an empty one."""
    return f"[{', '.join(map(str, at))}]" if at else ""


def first(wrong: Tensor) -> tuple[int, ...]:
    """The index of the first True."""
    return tuple(int(i) for i in wrong.nonzero()[0])


def _refuse_entry(x: Tensor, wrong: Tensor, what: str, side: str, bounds: Tensor) -> None:
    if bool(wrong.any()):
        at = first(wrong)
        raise DomainError(
            f"{what}{entry(at)} = {float(x[at].detach()):.6g} must be {side} {float(bounds.expand_as(x)[at]):g}: "
            f"{_ADVICE}"
        )


def time_to_singular(L: Tensor, V: Tensor) -> Tensor:
    """The first t > 0 [*batch] at which LLᵀ + tV is singular, −1/λ_min(L⁻¹VL⁻ᵀ); infinite if there is none."""
    half = torch.linalg.solve_triangular(L, V, upper=False)
    whitened = torch.linalg.solve_triangular(L, half.mT, upper=False)
    least = least_eigenvalue(0.5 * (whitened + whitened.mT))
    return torch.where(least < 0, -1 / least, math.inf)


def _time_to_bound(x: Tensor, v: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """t at which x + t v meets a bound, entry by entry."""
    return torch.where(v == 0, math.inf, torch.where(v < 0, lower - x, upper - x) / v)


def _time_to_zero(x: Tensor, v: Tensor) -> Tensor:
    """t at which x + t v meets 0 from above, entry by entry."""
    return torch.where(v < 0, -x / v, math.inf)
