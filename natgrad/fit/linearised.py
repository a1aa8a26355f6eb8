"""The linear model of the residuals at x, and its steps in a trust region and in a box."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.fit.fits import Fits, Rules
from natgrad.linalg import TriangularLeastSquares, svd

_CLOSE = 0.1  # relative error of ‖Dδ‖ = radius
_GRID = 24  # numbers between the bounds of λ
_LEAST = 1e-14  # of the upper bound of λ: the lower bound
_NEWTON = 1  # steps for λ
_NOISE = 4  # in units of the machine epsilon: what a cost may be off by

Limited: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # p, ‖p‖, λ, and what the cost falls by in the model
Spectrum: TypeAlias = tuple[Tensor, Tensor, Tensor]  # s², s∘Uᵀz and Vᵀ of R = U diag(s) Vᵀ
Step: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor]  # the same; without λ where all are 0


@final
@dataclass(frozen=True)
class Linearised:
    """min ‖J D⁻¹p + f‖ at x over the free unknowns, as ‖Rp + z‖."""

    D: Tensor  # [b n]
    gauss_newton: Tensor  # its shortest minimum [b n]
    norm: Tensor  # ‖p‖ of that [b]
    tangent: Tensor  # ‖QQᵀf‖ [b]; NaN where J is not finite
    size: Tensor  # ‖Dx‖
    unit: Tensor  # ‖D‖
    length: Tensor  # ‖f‖
    rounding: Tensor  # what the cost may change by rounding
    problem: TriangularLeastSquares
    free: Tensor | None  # the unknowns that are not at a bound that the gradient pushes against [b n]
    decomposed: Spectrum | None  # of R, where a pivot is rounding or unknowns are at bounds

    @staticmethod
    def at(f: Tensor, J: Tensor, fits: Fits, rules: Rules) -> Linearised:
        """The model of residuals f [b m] with the Jacobian J [b m n]."""
        x, D = fits.x, fits.D
        QR = TriangularLeastSquares.of(J, f)
        norms = torch.linalg.vector_norm(QR.R, dim=-2)  # of the columns of J
        if rules.D is None:
            D = D.maximum(norms)
        problem, free = TriangularLeastSquares(QR.R / D.unsqueeze(-2), QR.z), None
        m, n = J.shape[-2:]
        regular = rules.lower is None and m >= n and _is_regular(problem.R)
        if not regular and rules.D is None:
            D = torch.where(D > 0, D, 1.0)
            problem = TriangularLeastSquares(QR.R / D.unsqueeze(-2), QR.z)
        vectors, length = (D * x, D, norms * x), (2 * fits.cost).sqrt()
        if regular:
            step = problem.undamped()
            norm, tangent, *sizes = _norms(step, problem.z, *vectors)
            return Linearised(D, step, norm, tangent, *_sizes(sizes, length), problem, None, None)
        if rules.lower is not None and rules.upper is not None:
            g = (problem.R.mT @ problem.z.unsqueeze(-1)).squeeze(-1)
            free = ~(((x <= rules.lower) & (g > 0)) | ((x >= rules.upper) & (g < 0)))
            problem = TriangularLeastSquares(problem.R * free.unsqueeze(-2), problem.z)
        step, inside, spectrum = _pseudo_inverse(problem)
        norm, *sizes = _norms(step, *vectors)
        tangent = torch.linalg.vector_norm(inside, dim=-1)
        return Linearised(D, step, norm, tangent, *_sizes(sizes, length), problem, free, spectrum)

    @cached_property
    def promise(self) -> Tensor:
        """What the cost falls by in the linear model without damping."""
        return 0.5 * self.tangent.square()

    def of(self, rows: Tensor) -> Linearised:
        """Those of some of the fits."""
        problem = TriangularLeastSquares(self.problem.R[rows], self.problem.z[rows])
        spectrum = None if self.decomposed is None else tuple(t[rows] for t in self.decomposed)
        rest = {e.name: getattr(self, e.name) for e in fields(self) if e.name not in ("problem", "decomposed")}
        tensors: dict[str, Any] = {name: None if t is None else t[rows] for name, t in rest.items()}
        return Linearised(problem=problem, decomposed=spectrum, **tensors)  # type: ignore[arg-type]

    @cached_property
    def offset(self) -> Tensor:
        """‖QQᵀf‖/‖f‖."""
        return self.tangent / self.length.clamp(min=torch.finfo(self.length.dtype).tiny)

    def within(self, radius: Tensor) -> Step:
        """p = −(RᵀR + λ)⁻¹Rᵀz with ‖p‖ ≤ radius."""
        inside = self.norm <= (1 + _CLOSE) * radius
        if bool(inside.all()):
            return self.gauss_newton, self.norm, None, self.promise
        rows = (~inside).nonzero().squeeze(-1)
        if len(rows) == len(radius):
            return self._on_sphere(radius)
        limited = self.of(rows)._on_sphere(radius[rows])
        every = self.gauss_newton, self.norm, torch.zeros_like(radius), self.promise
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
        return -(t.unsqueeze(-2) @ Vt).squeeze(-2), norm, λ, (t * (loads - 0.5 * squares * t)).sum(-1)

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

    def in_box(self, p: Tensor, x: Tensor, λ: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
        """The step in the box, and where it leads."""
        assert rules.lower is not None
        assert rules.upper is not None
        assert self.free is not None
        low, high = (rules.lower - x) * self.D, (rules.upper - x) * self.D
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
            p = torch.where(free, rest.damped(torch.where(free, root, 1.0)).step, held)
        p = p.clamp(low, high)
        trial = torch.where(p <= low, rules.lower, torch.where(p >= high, rules.upper, x + p / self.D))
        return p, trial.clamp(rules.lower, rules.upper)


def _norms(*vectors: Tensor) -> tuple[Tensor, ...]:
    return torch.linalg.vector_norm(torch.stack(vectors), dim=-1).unbind(0)


def _sizes(norms: list[Tensor], length: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """‖Dx‖, ‖D‖, ‖f‖, and what the cost may change by rounding of the terms Jᵢxᵢ, whose sums residuals are."""
    size, unit, terms = norms
    return size, unit, length, _NOISE * torch.finfo(length.dtype).eps * length * (length + terms)


def _is_regular(R: Tensor) -> bool:
    """Whether no pivot is rounding, in any of the fits."""
    low, high = torch.aminmax(R.diagonal(dim1=-2, dim2=-1).abs(), dim=-1)
    return bool((low > R.shape[-1] * torch.finfo(R.dtype).eps * high).all())


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
