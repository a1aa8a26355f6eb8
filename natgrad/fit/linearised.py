"""The linear model of the residuals at x, and its steps in a trust region and in a box."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.temporaries import by_columns
from natgrad.fit.fits import CLOSE, NOISE, Fits, Rules
from natgrad.linalg import svd

_GRID = 24  # numbers between the bounds of λ
_LEAST = 1e-14  # of the upper bound of λ: the lower bound
_NEWTON = 1  # steps for λ

Limited: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # p, ‖p‖, λ, and what the cost falls by in the model
Spectrum: TypeAlias = tuple[Tensor, Tensor, Tensor]  # s², s∘Uᵀz and Vᵀ of R = U diag(s) Vᵀ
Step: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor]  # the same; without λ where all are 0


@final
@dataclass
class TriangularLeastSquares:
    """min ‖Jp + r‖² for J [* m n] and r [* m], as ‖Rp + z‖² plus a constant, with the QR factors of J = QR and z = Qᵀr.

    JᵀJ, whose condition number is that of J squared, is formed nowhere (Björck 1996). R [* k n] and z [* k] have
    k = min(m, n) rows, so that any number of damped steps costs n³ each, whatever m is. More unknowns than residuals
    and columns of zeros need damping, and nothing else.

    >>> J, r = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), torch.tensor([-2.0, -4.0, 5.0])
    >>> TriangularLeastSquares.of(J, r).damped(torch.full((2,), 1e-3))  # of all minima, nearly the shortest
    tensor([1.5000, 1.5000])
    """

    R: Tensor
    z: Tensor

    @staticmethod
    def of(J: Tensor, r: Tensor) -> TriangularLeastSquares:
        """One QR of [J r]: its last column is z, so that Q is not formed either."""
        m, n = J.shape[-2:]
        if J.ndim == 3 and m >= n and by_columns(len(J), n):
            triangle = _gram_schmidt(torch.cat([J.movedim(-1, 0), r.unsqueeze(0)]))
        else:
            triangle = torch.linalg.qr(torch.cat([J.mT, r.unsqueeze(-2)], -2).mT, mode="r").R  # LAPACK goes by columns
        rows = triangle.narrow(-2, 0, min(m, n))
        return TriangularLeastSquares(rows.narrow(-1, 0, n), rows.select(-1, n))

    def damped(self, d: Tensor) -> Tensor:
        """p = argmin ‖Jp + r‖² + ‖d ∘ p‖² for d [* n]: Levenberg–Marquardt with λ where d = √λ·D (Moré 1978)."""
        k, n = self.R.shape[-2:]
        both = self.R.new_zeros(*self.z.shape[:-1], k + n, n + 1)
        both[..., :k, :n], both[..., :k, n] = self.R, self.z
        both[..., k:, :n].diagonal(dim1=-2, dim2=-1).copy_(d)
        triangle = torch.linalg.qr(both, mode="r").R
        return TriangularLeastSquares(triangle[..., :n, :n], triangle[..., :n, n]).undamped()

    def undamped(self) -> Tensor:
        """p = −R⁻¹z, the Gauss–Newton step: not finite where R is singular, and with m < n there is none."""
        return -torch.linalg.solve_triangular(self.R, self.z.unsqueeze(-1), upper=True).squeeze(-1)


def _gram_schmidt(columns: Tensor) -> Tensor:
    """R [b k k] of the QR of b matrices from their columns [k b m], which are used up, in all of them at once.

    Modified Gram–Schmidt on [J r] finds least-squares solutions as accurately as Householder's QR (Björck 1996).
    """
    k, b, _ = columns.shape
    R = columns.new_zeros(k, k, b)
    for i, column in enumerate(columns.unbind(0)):
        R[i, i] = norm = torch.linalg.vector_norm(column, dim=-1)
        q = column / torch.where(norm > 0, norm, 1.0).unsqueeze(-1)
        R[i, i + 1 :] = along = (columns[i + 1 :] * q).sum(-1)
        columns[i + 1 :] -= along.unsqueeze(-1) * q
    return R.permute(2, 1, 0).contiguous().mT  # by columns, as that of LAPACK


@final
@dataclass
class Linearised:
    """min ‖Jδ + f‖ at x, as ‖Rδ + z‖; p = Dδ over the unknowns that are free."""

    D: Tensor  # [b n]
    shortest: Tensor  # δ, the shortest Dδ of all minima [b n]
    norm: Tensor  # its length ‖Dδ‖ [b]
    tangent: Tensor  # ‖QQᵀf‖ [b]; NaN where J is not finite
    size: Tensor  # ‖Dx‖
    unit: Tensor  # ‖D‖
    length: Tensor  # ‖f‖
    norms: Tensor  # ‖Jᵢ‖ [b n]
    x: Tensor
    QR: TriangularLeastSquares
    free: Tensor | None = None  # the unknowns that are not at a bound that the gradient pushes against [b n]
    decomposed: Spectrum | None = None  # of R D⁻¹, where a pivot is rounding or unknowns are at bounds
    inside: bool = False  # whether all shortest minima are inside of their regions, and none meets gtol

    @staticmethod
    def at(f: Tensor, J: Tensor, fits: Fits, rules: Rules) -> Linearised:
        """The model of residuals f [b m] with the Jacobian J [b m n]."""
        x, D = fits.x, fits.D
        QR = TriangularLeastSquares.of(J, f)
        norms = torch.linalg.vector_norm(QR.R, dim=-2)  # of the columns of J
        if rules.D is None:
            D = D.maximum(norms)
        length, free = (2 * fits.cost).sqrt(), None
        if rules.lower is None and J.shape[-2] >= J.shape[-1]:
            low, high = torch.aminmax((QR.R.diagonal(dim1=-2, dim2=-1) / norms).abs(), dim=-1)
            δ = QR.undamped()
            norm, tangent, size, unit = _norms(D * δ, QR.z, D * x, D)
            inside = _exceed((low, tangent, fits.radius), (high, length, norm), rules.outside)
            if inside or _exceed((low,), (high,), rules.outside[:1]):  # no pivot is rounding
                return Linearised(D, δ, norm, tangent, size, unit, length, norms, x, QR, inside=inside)
        if rules.D is None:
            D = torch.where(D > 0, D, 1.0)
        if rules.lower is not None and rules.upper is not None:
            g = (QR.R.mT @ QR.z.unsqueeze(-1)).squeeze(-1)
            free = ~(((x <= rules.lower) & (g > 0)) | ((x >= rules.upper) & (g < 0)))
        p, reached, spectrum = _pseudo_inverse(_scaled(QR, D, free))
        norm, size, unit = _norms(p, D * x, D)
        tangent = torch.linalg.vector_norm(reached, dim=-1)
        return Linearised(D, p / D, norm, tangent, size, unit, length, norms, x, QR, free, spectrum)

    def gains(self, actual: Tensor, cost: Tensor, rules: Rules) -> bool:
        """Whether every whole step lowers the cost by a quarter of the promise, far from what stops a fit."""
        terms = self.size if rules.D is None else self.terms  # which are smaller
        beside = self.promise, cost, self.length * (self.length + terms), self.size, self.unit
        return _exceed((actual, self.promise, self.promise, self.norm, self.norm), beside, rules.small)

    @cached_property
    def promise(self) -> Tensor:
        """What the cost falls by in the linear model without damping."""
        return 0.5 * self.tangent.square()

    @cached_property
    def terms(self) -> Tensor:
        """√Σ (‖Jᵢ‖xᵢ)², the size of the terms whose sums residuals are."""
        return torch.linalg.vector_norm(self.norms * self.x, dim=-1)

    @cached_property
    def rounding(self) -> Tensor:
        """What the cost may change by rounding."""
        return NOISE * torch.finfo(self.length.dtype).eps * self.length * (self.length + self.terms)

    @cached_property
    def problem(self) -> TriangularLeastSquares:
        """‖R D⁻¹p + z‖ over the unknowns that are free."""
        return _scaled(self.QR, self.D, self.free)

    def of(self, rows: Tensor) -> Linearised:
        """The linear models of some of the fits."""

        def some(value: Any) -> Any:
            if isinstance(value, TriangularLeastSquares):
                return TriangularLeastSquares(value.R[rows], value.z[rows])
            return tuple(t[rows] for t in value) if isinstance(value, tuple) else value[rows]

        given = {e.name: getattr(self, e.name) for e in fields(self)}
        return Linearised(**{name: v if v is None or name == "inside" else some(v) for name, v in given.items()})

    @cached_property
    def offset(self) -> Tensor:
        """‖QQᵀf‖/‖f‖."""
        return self.tangent / self.length.clamp(min=torch.finfo(self.length.dtype).tiny)

    def within(self, radius: Tensor) -> Step:
        """δ = D⁻¹p, p = −(RᵀR + λ)⁻¹Rᵀz of the scaled R, with ‖p‖ ≤ radius."""
        if self.inside:
            return self.shortest, self.norm, None, self.promise
        inside = self.norm <= (1 + CLOSE) * radius
        if bool(inside.all()):
            return self.shortest, self.norm, None, self.promise
        rows = (~inside).nonzero().squeeze(-1)
        if len(rows) == len(radius):
            return self._on_sphere(radius)
        limited = self.of(rows)._on_sphere(radius[rows])
        every = self.shortest, self.norm, torch.zeros_like(radius), self.promise
        return tuple(a.index_copy(0, rows, b) for a, b in zip(every, limited, strict=True))  # type: ignore[return-value]

    @cached_property
    def _spectrum(self) -> Spectrum:
        if self.decomposed is not None:
            return self.decomposed
        U, s, Vt = _singular(self.problem.R)
        return s * s, s * (self.problem.z.unsqueeze(-2) @ U).squeeze(-2), Vt

    def _on_sphere(self, radius: Tensor) -> Limited:
        squares, loads, Vt = self._spectrum
        λ, t, norm = _secular(squares, loads, radius)
        return -(t.unsqueeze(-2) @ Vt).squeeze(-2) / self.D, norm, λ, (t * (loads - 0.5 * squares * t)).sum(-1)

    def measured(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """‖p‖, and what the cost falls by in the model, −⟨Rp, z + ½Rp⟩, of any p."""
        pushed = (self.problem.R @ p.unsqueeze(-1)).squeeze(-1)
        return torch.linalg.vector_norm(p, dim=-1), -(pushed * (self.problem.z + 0.5 * pushed)).sum(-1)

    def bend(self, second: Tensor, fits: Fits) -> Tensor:
        """Half of the acceleration D a of the curve that a step starts along, in a valley that bends.

        (JᵀJ + λD²)a = −Jᵀr″ (Transtrum and Sethna 2012). ``second`` [b m] is half of r″, the second derivative of the
        residuals along the step.
        """
        pulled = (second.unsqueeze(-2) @ fits.J).squeeze(-2) / self.D
        squares, _, Vt = self._spectrum
        damped = (squares + fits.λ.unsqueeze(-1)).clamp(min=torch.finfo(squares.dtype).tiny)
        return -(((pulled.unsqueeze(-2) @ Vt.mT) / damped.unsqueeze(-2)) @ Vt).squeeze(-2)

    def in_box(self, δ: Tensor, x: Tensor, λ: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
        """p = Dδ of the step in the box, and where it leads."""
        assert rules.lower is not None
        assert rules.upper is not None
        assert self.free is not None
        p, low, high = δ * self.D, (rules.lower - x) * self.D, (rules.upper - x) * self.D
        root, free = λ.sqrt().clamp(min=p.shape[-1] * torch.finfo(p.dtype).eps).unsqueeze(-1), self.free
        R, z = self.problem.R, self.problem.z
        for _ in range(p.shape[-1]):
            put = p.clamp(low, high)
            inside = put == p
            if bool(inside.all()):
                break
            free = free & inside
            held = torch.where(free, 0.0, put)
            rest = TriangularLeastSquares(R * free.unsqueeze(-2), z + (R @ held.unsqueeze(-1)).squeeze(-1))
            p = torch.where(free, rest.damped(torch.where(free, root, 1.0)), held)
        p = p.clamp(low, high)
        trial = torch.where(p <= low, rules.lower, torch.where(p >= high, rules.upper, x + p / self.D))
        return p, trial.clamp(rules.lower, rules.upper)


def _norms(*vectors: Tensor) -> tuple[Tensor, ...]:
    return torch.linalg.vector_norm(torch.stack(vectors), dim=-1).unbind(0)


def _exceed(large: tuple[Tensor, ...], small: tuple[Tensor, ...], factors: Tensor) -> bool:
    """Whether every number is larger than its factor times the other, in all fits: one answer of the device."""
    return bool((torch.stack(large) > torch.stack(small) * factors).all())


def _scaled(QR: TriangularLeastSquares, D: Tensor, free: Tensor | None) -> TriangularLeastSquares:
    R = QR.R / D.unsqueeze(-2)
    return TriangularLeastSquares(R if free is None else R * free.unsqueeze(-2), QR.z)


def _singular(R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, s and Vᵀ of R, with zeros for the singular values that are rounding."""
    U, s, Vt = svd(R, "the Jacobian")
    return U, s * (s > R.shape[-1] * torch.finfo(R.dtype).eps * s[..., :1]), Vt


def _pseudo_inverse(problem: TriangularLeastSquares) -> tuple[Tensor, Tensor, Spectrum]:
    """The shortest p that minimises ‖Rp + z‖ [b n], the part Uᵀz of z [b k] that it reaches, and their source."""
    finite = problem.R.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    U, s, Vt = _singular(torch.where(finite, problem.R, 0.0))
    inside = torch.where(s > 0, (problem.z.unsqueeze(-2) @ U).squeeze(-2), 0.0)
    inside = torch.where(finite.squeeze(-1), inside, torch.nan)
    step = -((inside / torch.where(s > 0, s, 1.0)).unsqueeze(-2) @ Vt).squeeze(-2)
    return step, inside, (s * s, s * inside, Vt)


def _secular(squares: Tensor, loads: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """λ where ‖t‖ = radius for t = loads/(squares + λ), t and ‖t‖; λ is 0 if that is shorter.

    Of numbers between the bounds of Moré (1978), the largest with ‖t‖ ≥ radius, and Newton steps for 1/‖t‖ = 1/radius
    from there. This function of λ is concave, so that they rise to the solution.
    """
    tiny = torch.finfo(squares.dtype).tiny

    def along(λ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = (squares + λ.unsqueeze(-1)).clamp(min=tiny)  # where s is zero, so is the load
        t = loads / a
        return a, t, torch.linalg.vector_norm(t, dim=-1)

    def newton(λ: Tensor, a: Tensor, t: Tensor, norm: Tensor, over: Tensor) -> Tensor:
        return λ + (norm - radius) * norm * norm / (over * (t * t / a).sum(-1))

    zero = torch.zeros_like(radius)
    a, t, norm = along(zero)
    low, high = newton(zero, a, t, norm, norm), torch.linalg.vector_norm(loads, dim=-1) / radius
    shares = torch.linspace(0, 1, _GRID, dtype=low.dtype, device=low.device)
    low = low.maximum(_LEAST * high)
    grid = low.unsqueeze(-1) * (high / low).unsqueeze(-1) ** shares  # [b grid]
    norms = torch.linalg.vector_norm(loads.unsqueeze(-2) / (squares.unsqueeze(-2) + grid.unsqueeze(-1)), dim=-1)
    last = (norms >= radius.unsqueeze(-1)).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    λ = grid.gather(-1, last).squeeze(-1)
    for _ in range(_NEWTON):
        a, t, norm = along(λ)
        λ = newton(λ, a, t, norm, radius)
    a, t, norm = along(λ)
    return λ, t, norm
