"""Where the parameters of a family may lie: open convex sets of points, with the way to their boundary."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError

_BISECTIONS = 64
ROUNDING = 64  # units in the last place that tell the inside from the boundary
_SUM = 1024  # units in the last place that the sum of a simplex may be off


class Domain(ABC):
    """{x : g_s(x) > 0 for all s} with concave g: an open convex set, batched.

    ``contains``, ``margin`` and ``reach`` return tensors [*batch] and do not wait for a GPU; ``check`` does.
    """

    @abstractmethod
    def slacks(self, x: Tensor) -> Tensor:
        """g(x) [*batch s], concave: all are positive inside, and one is 0 on the boundary."""

    @abstractmethod
    def check(self, x: Tensor, what: str) -> None:
        """Refuse a point outside by its entry and its bound."""

    def contains(self, x: Tensor) -> Tensor:
        """Whether each point is inside [*batch], of booleans."""
        return (self.slacks(x) > 0).all(-1) & x.isfinite().all(-1)

    def margin(self, x: Tensor) -> Tensor:
        """The radius [*batch] of a ball around x that is inside, 1/√Σ_p r_p⁻²; negative outside.

        r_p is the way to the boundary along ± axis p: the hull of these points is inside, and the ball inside the hull.
        Never more than the distance to the boundary; domains that know that return it.
        """
        p = x.shape[-1]
        axes = torch.eye(p, dtype=x.dtype, device=x.device).view(p, *[1] * (x.ndim - 1), p).expand(p, *x.shape)
        r = torch.minimum(self.reach(x, axes), self.reach(x, -axes))
        radius = r.square().reciprocal().sum(0).rsqrt()
        return torch.where(self.contains(x), radius, self.slacks(x).amin(-1).clamp(max=0.0))

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        """The longest t [*batch] such that x + s v is inside for 0 ≤ s < t: infinite where v never leaves."""
        near = torch.zeros(torch.broadcast_shapes(self._batch(x), self._batch(v)), dtype=x.dtype, device=x.device)
        far = torch.ones_like(near)  # of u = t/(1 + t)
        largest = 1 / torch.finfo(x.dtype).eps
        for _ in range(_BISECTIONS):
            middle = 0.5 * (near + far)
            inside = self.contains(x + self._along(middle / (1 - middle), v))
            near, far = torch.where(inside, middle, near), torch.where(inside, far, middle)
        t = near / (1 - near)
        return torch.where(t < largest, t, math.inf)

    def edge(self, x: Tensor) -> Tensor:
        """Whether a point of the closure is on the boundary to rounding [*batch], where that is curved."""
        return torch.zeros_like(self.contains(x))

    def clear(self, x: Tensor, units: int) -> Tensor:
        """Whether each point is inside and stays there if it moves by so many units in the last place [*batch]."""
        return self.contains(x) & self.contains(x * (1 + units * torch.finfo(x.dtype).eps))

    def _batch(self, x: Tensor) -> torch.Size:
        return x.shape[:-1]

    def _along(self, t: Tensor, v: Tensor) -> Tensor:
        return t.unsqueeze(-1) * v


@final
@dataclass(frozen=True)
class Box(Domain):
    """lower_p < x_p < upper_p: bounds for the entries of the last axis, or one for all of them.

    >>> Box((-1.0, -math.inf), (math.inf, 0.0)).check(torch.tensor([1.0, 2.0]), "eta")
    Traceback (most recent call last):
    ...
    natgrad.errors.DomainError: eta[1] = 2 must be below 0: start inside, or take shorter steps (see reach)
    >>> Box((0.0,)).reach(torch.tensor([1.0, 3.0]), torch.tensor([-2.0, 1.0]))
    tensor(0.5000)
    """

    lower: tuple[float, ...] = (-math.inf,)
    upper: tuple[float, ...] = (math.inf,)

    def slacks(self, x: Tensor) -> Tensor:
        lower, upper = self._bounds(x)
        return torch.cat([x - lower, upper - x], -1)

    def contains(self, x: Tensor) -> Tensor:
        lower, upper = self._bounds(x)
        return ((x > lower) & (x < upper) & x.isfinite()).all(-1)

    def margin(self, x: Tensor) -> Tensor:
        return self.slacks(x).amin(-1)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        lower, upper = self._bounds(x)
        return steps(x, v, lower, upper).amin(-1)

    def check(self, x: Tensor, what: str) -> None:
        lower, upper = self._bounds(x)
        check_box(x, lower.expand(x.shape), upper.expand(x.shape), what)

    def _bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._filled(x, self.lower), self._filled(x, self.upper)

    @staticmethod
    def _filled(x: Tensor, bounds: tuple[float, ...]) -> Tensor:
        """[p] or [1]; filled on the device, so that nothing is copied to a GPU."""
        return torch.stack([torch.full((), bound, dtype=x.dtype, device=x.device) for bound in bounds])


@final
@dataclass(frozen=True)
class Interval(Domain):
    """lower < x < upper for points that are numbers [*batch].

    >>> Interval(0.0, 1.0).margin(torch.tensor([0.25, 0.9, 2.0]))
    tensor([ 0.2500,  0.1000, -1.0000])
    """

    lower: float = -math.inf
    upper: float = math.inf

    def slacks(self, x: Tensor) -> Tensor:
        return torch.stack([x - self.lower, self.upper - x], -1)

    def contains(self, x: Tensor) -> Tensor:
        return (x > self.lower) & (x < self.upper) & x.isfinite()

    def margin(self, x: Tensor) -> Tensor:
        return torch.minimum(x - self.lower, self.upper - x)

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        return steps(x, v, torch.full_like(x, self.lower), torch.full_like(x, self.upper))

    def check(self, x: Tensor, what: str) -> None:
        check_box(x, torch.full_like(x, self.lower), torch.full_like(x, self.upper), what)


@final
@dataclass(frozen=True)
class Simplex(Domain):
    """x_p > 0 with Σ_p x_p = 1 over the last axis: flat, with tangent vectors that sum to 0."""

    def slacks(self, x: Tensor) -> Tensor:
        return x

    def contains(self, x: Tensor) -> Tensor:
        return (x > 0).all(-1) & self._sums(x)

    def margin(self, x: Tensor) -> Tensor:
        c = x.shape[-1]
        return x.amin(-1) * (c / max(c - 1, 1)) ** 0.5  # within the plane of the simplex

    def reach(self, x: Tensor, v: Tensor) -> Tensor:
        return steps(x, v, torch.zeros_like(x), torch.full_like(x, math.inf)).amin(-1)

    def check(self, x: Tensor, what: str) -> None:
        check_box(x, torch.zeros_like(x), torch.full_like(x, math.inf), what)  # rounding may make one of them 1
        if not bool(self._sums(x).all()):
            at = first(~self._sums(x))
            raise DomainError(
                f"{what}{entry(at)} sums to {float(x[at].detach().sum()):.6g} over its last axis, and probabilities "
                "sum to 1: divide it by its sum"
            )

    @staticmethod
    def _sums(x: Tensor) -> Tensor:
        return (x.sum(-1) - 1).abs() <= _SUM * torch.finfo(x.dtype).eps


@final
@dataclass(frozen=True)
class Concave(Domain):
    """{x : g(x) > 0} for given concave g(x) → [*batch s], and what they say in words.

    Every word is for as many of the g, one after the other: one, or one for each of several entries. Those of the last
    word have no scale.
    """

    function: Callable[[Tensor], Tensor]
    words: tuple[str, ...]

    def slacks(self, x: Tensor) -> Tensor:
        return self.function(x)

    def edge(self, x: Tensor) -> Tensor:
        return self._last(self.slacks(x)).amin(-1) <= ROUNDING * torch.finfo(x.dtype).eps

    def clear(self, x: Tensor, units: int) -> Tensor:
        least = self._last(self.slacks(x)).amin(-1)
        return self.contains(x) & (least > units * torch.finfo(x.dtype).eps)

    def check(self, x: Tensor, what: str) -> None:
        check_finite(x, what)
        g = self.slacks(x.detach())
        wrong = ~(g > 0)
        if bool(wrong.any()):
            *at, s = first(wrong)
            each = g.shape[-1] // len(self.words)
            where = entry((*at, s % each) if each > 1 else tuple(at))
            raise DomainError(
                f"{what}{where} must satisfy {self.words[s // each]}, and breaks it by {0 - float(g[(*at, s)]):.6g}: "
                "start inside, or take shorter steps (see reach)"
            )

    def _last(self, g: Tensor) -> Tensor:
        """Those of the last word."""
        return g[..., -(g.shape[-1] // len(self.words)) :]


def all_finite(x: Tensor) -> Tensor:
    """Whether all entries of the last axis are finite [*batch]: as ``isfinite``, in fewer passes over large points.

    >>> all_finite(torch.tensor([[1.0, 3e38, 3e38], [0.0, math.inf, 1.0], [math.nan, 0.0, 1.0]]))
    tensor([ True, False, False])
    """
    return (0 * x).sum(-1) == 0


def check_finite(x: Tensor, what: str) -> None:
    """Refuse NaN and infinity by entry."""
    if not bool(all_finite(x.detach().reshape(-1))):
        at = first(~x.isfinite())
        raise DomainError(f"{what}{entry(at)} = {float(x[at].detach()):.6g} must be finite")


def entry(at: tuple[int, ...]) -> str:
    """[i, j] of an index, nothing of an empty one."""
    return f"[{', '.join(map(str, at))}]" if at else ""


def first(wrong: Tensor) -> tuple[int, ...]:
    """The index of the first that is wrong."""
    return tuple(int(i) for i in wrong.nonzero()[0])


def check_box(x: Tensor, lower: Tensor, upper: Tensor, what: str) -> None:
    """Refuse what is not finite, or not between its bounds, which have the shape of x."""
    check_finite(x, what)
    for wrong, side, bounds in ((x <= lower, "above", lower), (x >= upper, "below", upper)):
        if bool(wrong.any()):
            at = first(wrong)
            raise DomainError(
                f"{what}{entry(at)} = {float(x[at].detach()):.6g} must be {side} {float(bounds[at]):g}: start inside, "
                "or take shorter steps (see reach)"
            )


def steps(x: Tensor, v: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The step at which each entry meets its bound."""
    room = torch.where(v < 0, lower - x, upper - x)
    return torch.where(v == 0, math.inf, room / v)


# Domains that are made of others, or of matrices.


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
