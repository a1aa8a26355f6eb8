"""The linear model of the residuals at x, and its steps in a trust region and in a box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.fit.fits import Fits, Rules, some
from natgrad.fit.triangle import TriangularLeastSquares

_CLOSE = 0.1  # relative error of ‖Dδ‖ = radius
_FIRST = 1e-4  # of ‖z‖/radius, which λ hardly exceeds: the first guess
_FALLS = 1e-2  # the least factor by which λ falls at once
_NEWTON = 20  # steps for λ at most


@final
@dataclass
class Linearised:
    """The linear model of the residuals at x, min ‖Rδ + z‖ with J = QR and z = Qᵀf; steps are as long as Dδ is."""

    D: Tensor  # [b n]
    QR: TriangularLeastSquares  # in which unknowns that are not free stay zero
    δ: Tensor  # its minimum; of many, nearly the one with the shortest Dδ [b n]
    norm: Tensor  # ‖Dδ‖ of that [b], as all that follows
    promise: Tensor  # what the sum of squares falls by there
    offset: Tensor  # ‖QQᵀf‖/‖f‖, the cosine between the residuals and the tangent space; NaN where J is not finite
    above: Tensor  # whether that is above gtol
    size: Tensor  # ‖Dx‖
    unit: Tensor  # ‖D‖
    least: Tensor  # the length of a step that meets xtol
    rounding: Tensor  # what the sum of squares may change by rounding
    diagonal: TriangularLeastSquares | None  # the same as problems of one unknown, if R is singular in all fits, with V
    V: Tensor | None
    free: Tensor | None  # the unknowns that are not at a bound that the gradient pushes against [b n]

    @staticmethod
    def at(f: Tensor, J: Tensor, fits: Fits, rules: Rules) -> Linearised:
        """The model of residuals f [b m] with the Jacobian J [b m n]."""
        QR = TriangularLeastSquares.of(J, f)
        x, free, diagonal, V, norms = fits.x, None, None, None, QR.lengths  # of the columns of J
        D = fits.D.maximum(norms) if rules.D is None else rules.D
        if rules.lower is None and bool(QR.regular().all()):
            δ, fall = QR.undamped(), QR.z
        else:
            D = D + (D == 0)
            if rules.lower is not None and rules.upper is not None:
                g = (QR.R.mT @ QR.z.unsqueeze(-1)).squeeze(-1)
                free = ~(((x <= rules.lower) & (g > 0)) | ((x >= rules.upper) & (g < 0)))
                QR = TriangularLeastSquares(QR.R * free.unsqueeze(-2), QR.z).below((~free).to(x.dtype))
            singular = ~QR.regular()
            if bool(singular.all()):
                diagonal, V = QR.diagonal(D)
                δ = (V @ diagonal.undamped()).squeeze(-1) / D
            else:
                δ = QR.undamped()
                δ[singular] = QR[singular].shortest(D[singular])
            fall = QR.push(δ)
        norm, size, unit, terms = torch.linalg.vector_norm(torch.stack([D * δ, D * x, D, norms * x]), dim=-1).unbind(0)
        tangent, length = torch.linalg.vector_norm(fall, dim=-1), fits.squares.sqrt()
        offset = tangent / length.clamp(min=torch.finfo(f.dtype).tiny)
        least = rules.xtol * torch.addcmul(size, rules.xtol, unit)
        rounding = rules.noise * torch.addcmul(fits.squares, length, terms)  # of sums of terms, which residuals are
        promise, above = tangent.square(), offset > rules.gtol
        return Linearised(D, QR, δ, norm, promise, offset, above, size, unit, least, rounding, diagonal, V, free)

    def inside(self, radius: Tensor) -> Tensor:
        """Whether the minimum is in the trust region [b]."""
        return self.norm <= torch.add(radius, radius, alpha=_CLOSE)

    def within(self, radius: Tensor, λ: Tensor, inside: Tensor) -> tuple[Tensor, ...]:
        """δ with ‖Dδ‖ ≤ radius, up to a tenth, its λ [b], 0 for a minimum that is ``inside``, ‖Dδ‖ and the promise.

        ``λ``: a guess.
        """
        rows = (~inside).nonzero().squeeze(-1)
        if len(rows) < len(λ):
            limited = some(self, rows).within(radius[rows], λ[rows], inside[rows])
            whole = self.δ, torch.zeros_like(λ), self.norm, self.promise
            return tuple(t.index_copy(0, rows, part) for t, part in zip(whole, limited, strict=True))
        problem = self.diagonal or TriangularLeastSquares(self.QR.R / self.D.unsqueeze(-2), self.QR.z)
        p, λ, norm, promise = _on_sphere(problem, radius, λ)
        return (p if self.V is None else (self.V @ p).squeeze(-1)) / self.D, λ, norm, promise

    def in_box(self, δ: Tensor, λ: Tensor, x: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
        """δ in the box, and where it leads: what leaves the box is put on its bounds, and the rest solved for again."""
        assert rules.lower is not None
        assert rules.upper is not None
        assert self.free is not None
        low, high, free, QR = rules.lower - x, rules.upper - x, self.free, self.QR
        root = λ.sqrt().clamp(min=δ.shape[-1] * torch.finfo(δ.dtype).eps).unsqueeze(-1) * self.D
        for _ in range(δ.shape[-1]):
            put = δ.clamp(low, high)
            inside = put == δ
            if bool(inside.all()):
                break
            free = free & inside
            held = torch.where(free, 0.0, put)
            rest = TriangularLeastSquares(QR.R * free.unsqueeze(-2), QR.z + QR.push(held))
            δ = torch.where(free, rest.damped(torch.where(free, root, 1.0)), held)
        δ = δ.clamp(low, high)
        trial = torch.where(δ <= low, rules.lower, torch.where(δ >= high, rules.upper, x + δ))
        return δ, trial.clamp(rules.lower, rules.upper)


def _on_sphere(problem: TriangularLeastSquares, radius: Tensor, λ: Tensor) -> tuple[Tensor, ...]:
    """p(λ) = −(RᵀR + λ)⁻¹Rᵀz with ‖p‖ = radius up to a tenth, λ, from a guess or 0, ‖p‖ and what it promises.

    1/‖p‖ is a concave function of λ: Newton steps for 1/‖p‖ = 1/radius rise to the solution from below (Moré 1978).
    """
    z = problem.z
    λ = torch.where(λ > 0, λ, _FIRST * torch.linalg.vector_norm(z.flatten(1), dim=-1) / radius)
    for _ in range(_NEWTON):
        damped = problem.below(λ.sqrt().view(-1, *(1,) * (z.ndim - 1)).expand_as(z))
        p = damped.undamped()
        norm = torch.linalg.vector_norm(p.flatten(1), dim=-1)
        off = (norm - radius) / radius
        if bool((off.abs() <= _CLOSE).all()):
            break
        slope = torch.linalg.vector_norm(damped.back(p).flatten(1), dim=-1)
        λ = torch.addcmul(λ, off, (norm / slope).square()).maximum(_FALLS * λ)
    # ‖z‖² falls by this to ‖Rp + z‖² + λ‖p‖²
    return p, λ, norm, damped.z.square().flatten(1).sum(-1) + λ * norm.square()
