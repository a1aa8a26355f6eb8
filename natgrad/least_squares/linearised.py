"""The linear model of the residuals at x, and its steps in a trust region and in a box."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.least_squares.arithmetic import Number, Truth, Vector, anywhere, column, greatest, least, negated, select
from natgrad.least_squares.fits import Fits, Rules
from natgrad.linalg import TriangularLeastSquares, svd

_CLOSE = 0.1  # relative error of ‖Dδ‖ = radius
_NEWTON = 10  # steps for λ

Limited: TypeAlias = tuple[Vector, Number, Number, Number, Number]  # p, ‖p‖, λ, −⟨z, Rp⟩ and ‖Rp‖²


@dataclass(frozen=True)
class Linearised(ABC):
    """min ‖J D⁻¹p + f‖ at x, as ‖Rp + z‖."""

    D: Vector
    gauss_newton: Vector  # its shortest minimum
    tangent: Number  # ‖QQᵀf‖; NaN where J is not finite
    size: Number  # ‖Dx‖
    unit: Number  # ‖D‖
    terms: Number  # the size of the terms of which residuals are differences: that of all Jᵢxᵢ

    @staticmethod
    def of(f: Tensor, J: Tensor, fits: Fits, rules: Rules) -> Linearised:
        """The model of residuals f [b m] with the Jacobian J [b m n]."""
        return (Triangle if isinstance(fits.D, list) else Triangles).of(f, J, fits, rules)

    def within(self, fits: Fits) -> Limited:
        """p = −(RᵀR + λ)⁻¹Rᵀz with ‖p‖ ≤ radius."""
        p = self.gauss_newton
        norm = fits.norm(p)
        outside = negated(norm <= (1 + _CLOSE) * fits.radius)
        if anywhere(outside):
            return self._on_sphere(norm, outside, fits)
        return p, norm, 0.0 * norm, self.tangent**2, self.tangent**2

    @abstractmethod
    def _on_sphere(self, norm: Number, outside: Truth, fits: Fits) -> Limited:
        """As ``within``, for minima of this norm, some of which are outside."""

    @abstractmethod
    def bend(self, second: Tensor, fits: Fits) -> Vector:
        """Half of the acceleration D a of the curve that a step starts along, in a valley that bends.

        (JᵀJ + λD²)a = −Jᵀr″ (Transtrum and Sethna 2012). ``second`` [b m] is half of r″, the second derivative of the
        residuals along the step.
        """


@final
@dataclass(frozen=True)
class Triangle(Linearised):
    """That of one fit with few unknowns, in Python's numbers."""

    rows: Sequence[Sequence[float]]  # of [RD z]
    like: Tensor

    @staticmethod
    def of(f: Tensor, J: Tensor, fits: Fits, rules: Rules) -> Triangle:
        k, n = min(J.shape[-2:]), J.shape[-1]
        rows = torch.linalg.qr(torch.cat([J, f.unsqueeze(-1)], -1), mode="r").R.tolist()[0][:k]
        *columns, z = zip(*rows, strict=True)
        norms, x = [math.hypot(*each) for each in columns], fits.x.tolist()[0]
        D = [max(d, v) or 1.0 for d, v in zip(fits.D, norms, strict=True)] if rules.D is None else fits.D
        scales = math.hypot(*map(mul, D, x)), math.hypot(*D), math.hypot(*map(mul, norms, x))
        if not math.isfinite(sum(norms) + sum(z)):
            return Triangle(D, [0.0] * n, math.nan, *scales, rows, J)
        pivots = [abs(row[i]) / D[i] for i, row in enumerate(rows)]
        if k == n and min(pivots) > n * torch.finfo(J.dtype).eps * max(pivots):
            return Triangle(D, list(map(mul, D, _back_substituted(rows))), math.hypot(*z), *scales, rows, J)
        values = SingularValues.of(rows, D, J)
        return Triangle(D, values.shortest, values.tangent, *scales, rows, J)

    @cached_property
    def _values(self) -> SingularValues:
        return SingularValues.of(self.rows, self.D, self.like)

    def _on_sphere(self, norm: Number, outside: Truth, fits: Fits) -> Limited:
        t, *rest = _secular(self._values.squares, self._values.loads, fits.radius, fits.λ)
        return self._values.combined(t), *rest

    def bend(self, second: Tensor, fits: Fits) -> Vector:
        pulled = [g / d for g, d in zip((second.unsqueeze(-2) @ fits.J).tolist()[0][0], self.D, strict=True)]
        values = self._values
        t = [sum(map(mul, v, pulled)) / (a + fits.λ) for a, v in zip(values.squares, values.Vt, strict=True)]
        return values.combined(t)


@final
@dataclass(frozen=True)
class SingularValues:
    """R = U diag(s) Vᵀ, with zeros for singular values that are rounding: s², sUᵀz and Vᵀ."""

    squares: list[float]
    loads: list[float]
    Vt: list[list[float]]

    @staticmethod
    def of(rows: Sequence[Sequence[float]], D: Sequence[float], like: Tensor) -> SingularValues:
        R = like.new_tensor([[v / d for v, d in zip(row, D, strict=False)] for row in rows])
        U, s, Vt = (t.tolist() for t in svd(R, "the Jacobian"))
        rounding = len(D) * torch.finfo(like.dtype).eps * s[0]
        s = [v if v > rounding else 0.0 for v in s]
        z = [row[-1] for row in rows]
        loads = [v * sum(map(mul, u, z)) for v, u in zip(s, zip(*U, strict=True), strict=True)]
        return SingularValues([v * v for v in s], loads, Vt)

    @property
    def shortest(self) -> list[float]:
        """The shortest p that minimises ‖Rp + z‖."""
        return self.combined([b / a if a else 0.0 for a, b in zip(self.squares, self.loads, strict=True)])

    @property
    def tangent(self) -> float:
        """The norm of the part of z that it reaches."""
        return math.sqrt(sum(b * b / a for a, b in zip(self.squares, self.loads, strict=True) if a))

    def combined(self, t: Sequence[float]) -> list[float]:
        """−Vt."""
        return [-sum(map(mul, t, v)) for v in zip(*self.Vt, strict=True)]


def _back_substituted(rows: Sequence[Sequence[float]]) -> list[float]:
    """−R⁻¹z of the rows of [R z]."""
    out: list[float] = []  # the last first
    for i in reversed(range(len(rows))):
        *right, z = rows[i][i + 1 :]
        out.append(-(z + sum(map(mul, reversed(right), out))) / rows[i][i])
    return out[::-1]


@final
@dataclass(frozen=True)
class Triangles(Linearised):
    """Those of many fits, of one with many unknowns, or with bounds: over the free unknowns."""

    problem: TriangularLeastSquares
    free: Tensor | None  # the unknowns that are not at a bound that the gradient pushes against [b n]

    @staticmethod
    def of(f: Tensor, J: Tensor, fits: Fits, rules: Rules) -> Triangles:
        QR = TriangularLeastSquares.of(J, f)
        norms = torch.linalg.vector_norm(QR.R, dim=-2)  # of the columns of J
        D = fits.D
        if rules.D is None:
            D = torch.maximum(D, norms)
            D = torch.where(D > 0, D, 1.0)
        problem, free = TriangularLeastSquares(QR.R / D.unsqueeze(-2), QR.z), None
        scales = fits.norm(D * fits.x), fits.norm(D), fits.norm(norms * fits.x)
        m, n = J.shape[-2:]
        if rules.lower is None or rules.upper is None:
            if m >= n and _is_regular(problem.R):
                return Triangles(D, problem.undamped(), fits.norm(problem.z), *scales, problem, None)
        else:
            g = (problem.R.mT @ problem.z.unsqueeze(-1)).squeeze(-1)
            free = ~(((fits.x <= rules.lower) & (g > 0)) | ((fits.x >= rules.upper) & (g < 0)))
            problem = TriangularLeastSquares(problem.R * free.unsqueeze(-2), problem.z)
        step, tangent = _pseudo_inverse(problem)
        return Triangles(D, step, fits.norm(tangent), *scales, problem, free)

    def of_rows(self, rows: Tensor) -> Triangles:
        """Those of some of the fits."""
        problem = TriangularLeastSquares(self.problem.R[rows], self.problem.z[rows])
        D, step, tangent = self.D[rows], self.gauss_newton[rows], self.tangent[rows]
        free = None if self.free is None else self.free[rows]
        return Triangles(D, step, tangent, self.size[rows], self.unit[rows], self.terms[rows], problem, free)

    @cached_property
    def _decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """U, s and Vᵀ of R."""
        return _singular(self.problem.R)

    def _on_sphere(self, norm: Number, outside: Truth, fits: Fits) -> Limited:
        z = self.problem.z
        if not isinstance(outside, Tensor):
            U, s, Vt = self._decomposed
            loads = s * (z.unsqueeze(-2) @ U).squeeze(-2)
            t, *rest = _secular(s.square().tolist()[0], loads.tolist()[0], fits.radius, fits.λ)
            return -(z.new_tensor([t]).unsqueeze(-2) @ Vt).squeeze(-2), *rest
        rows = outside.nonzero().squeeze(-1)
        U, s, Vt = _singular(self.problem.R[rows])
        loads = s * (z[rows].unsqueeze(-2) @ U).squeeze(-2)
        t, *rest = _secular(s.square().unbind(-1), loads.unbind(-1), fits.radius[rows], fits.λ[rows])
        limited = -(torch.stack(t, -1).unsqueeze(-2) @ Vt).squeeze(-2), *rest
        inside = self.gauss_newton, norm, torch.zeros_like(norm), self.tangent**2, self.tangent**2
        return tuple(a.index_copy(0, rows, b) for a, b in zip(inside, limited, strict=True))

    def bend(self, second: Tensor, fits: Fits) -> Vector:
        pulled = (second.unsqueeze(-2) @ fits.J).squeeze(-2) / self.D
        T = self.problem.damped(torch.ones_like(pulled) * column(fits.λ**0.5)).triangle
        return -torch.cholesky_solve(pulled.unsqueeze(-1), T, upper=True).squeeze(-1)

    def in_box(self, p: Tensor, fits: Fits, rules: Rules) -> tuple[Tensor, Tensor]:
        """The step in the box, and where it leads."""
        assert rules.lower is not None
        assert rules.upper is not None
        assert self.free is not None
        low, high = (rules.lower - fits.x) * fits.D, (rules.upper - fits.x) * fits.D
        root, free = column(greatest(fits.λ**0.5, p.shape[-1] * torch.finfo(p.dtype).eps)), self.free
        R, z = self.problem.R, self.problem.z
        for _ in range(p.shape[-1]):
            put = torch.minimum(torch.maximum(p, low), high)
            if bool((put == p).all()):
                break
            free = free & (put == p)
            held = torch.where(free, 0.0, put)
            rest = TriangularLeastSquares(R * free.unsqueeze(-2), z + (R @ held.unsqueeze(-1)).squeeze(-1))
            p = torch.where(free, rest.damped(torch.where(free, root, 1.0)).step, held)
        p = torch.minimum(torch.maximum(p, low), high)
        trial = torch.where(p <= low, rules.lower, torch.where(p >= high, rules.upper, fits.x + p / fits.D))
        return p, torch.minimum(torch.maximum(trial, rules.lower), rules.upper)


def _is_regular(R: Tensor) -> bool:
    """Whether no pivot is rounding, in any of the fits."""
    pivots = R.diagonal(dim1=-2, dim2=-1)
    rounding = R.shape[-1] * torch.finfo(R.dtype).eps
    if len(pivots) == 1:
        sizes = [abs(v) for v in pivots[0].tolist()]
        return min(sizes) > rounding * max(sizes)
    pivots = pivots.abs()
    return bool((pivots.amin(-1) > rounding * pivots.amax(-1)).all())


def _singular(R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, s and Vᵀ of R, with zeros for the singular values that are rounding, and for all if R is not finite."""
    rounding = R.shape[-1] * torch.finfo(R.dtype).eps
    if len(R) == 1 and math.isfinite(float(R.sum())):
        U, s, Vt = svd(R, "the Jacobian")
        return U, torch.threshold(s, rounding * float(s[0, 0]), 0.0), Vt
    finite = R.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    U, s, Vt = svd(torch.where(finite, R, 0.0), "the Jacobian")
    return U, torch.where(s > rounding * s[..., :1], s, 0.0), Vt


def _pseudo_inverse(problem: TriangularLeastSquares) -> tuple[Tensor, Tensor]:
    """The shortest p that minimises ‖Rp + z‖ [b n], and the part Uᵀz of z [b k] that it reaches."""
    U, s, Vt = _singular(problem.R)
    inside = torch.where(s > 0, (problem.z.unsqueeze(-2) @ U).squeeze(-2), 0.0)
    inside = inside + 0.0 * problem.R.sum((-1, -2)).unsqueeze(-1)  # NaN, if R is not finite
    return -((inside / torch.where(s > 0, s, 1.0)).unsqueeze(-2) @ Vt).squeeze(-2), inside


def _secular(
    squares: Sequence[Number], loads: Sequence[Number], radius: Number, λ: Number
) -> tuple[list[Number], Number, Number, Number, Number]:
    """t = loads/(squares + λ) with ‖t‖ = radius, or with λ = 0 if that is shorter; ‖t‖, λ, Σ loads·t and Σ squares·t².

    Newton steps for 1/‖t(λ)‖ = 1/radius (Moré 1978).
    """

    def length(λ: Number) -> tuple[Number, Number]:
        """‖t(λ)‖ and its derivative."""
        square, slope = 0.0 * λ, 0.0 * λ
        for a, b in zip(squares, loads, strict=True):
            a = select(a > 0, a + λ, 1.0)  # where a is zero, so is b
            square, slope = square + (b / a) ** 2, slope - b * b / a**3
        norm = square**0.5
        return norm, slope / select(norm > 0, norm, 1.0)

    norm, slope = length(0.0 * radius)
    outside = norm > (1 + _CLOSE) * radius
    low = select(outside, (radius - norm) / select(slope < 0, slope, -1.0), 0.0 * radius)
    high = sum(b * b for b in loads) ** 0.5 / radius
    λ = select((λ > low) & (λ < high), λ, greatest(1e-3 * high, (low * high) ** 0.5))
    λ = select(outside, λ, 0.0 * radius)
    for _ in range(_NEWTON):
        norm, slope = length(λ)
        far = outside & (abs(norm - radius) > _CLOSE * radius)
        if not anywhere(far):
            break
        newton = (norm - radius) / select(slope < 0, slope, -1.0)
        high = select(norm < radius, least(high, λ), high)
        low = greatest(low, λ - newton)
        λ = select(far, least(greatest(λ - norm / radius * newton, low), high), λ)
    t = [b / select(a > 0, a + λ, 1.0) for a, b in zip(squares, loads, strict=True)]
    drop = sum(b * c for b, c in zip(loads, t, strict=True))
    bend = sum(a * c * c for a, c in zip(squares, t, strict=True))
    return t, norm, λ, drop, bend
