"""The linear model of the residuals at x, and its steps in a trust region and in a box."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, final

import torch
from torch import Tensor

from natgrad.fit.fits import Fits, Rules
from natgrad.fit.triangle import TriangularLeastSquares

_CLOSE = 0.1  # relative error of ‖p‖ = radius
_NOISE = 4  # in units of the machine epsilon: what a cost may be off by
_FIRST = 1e-3  # of the upper bound of λ: the first guess
_FALLS = 1e-2  # the least factor by which λ falls at once
_NEWTON = 20  # steps for λ at most


@final
@dataclass
class Linearised:
    """The linear model of the residuals at x, min ‖Rp + z‖ over p = Dδ, with J D⁻¹ = QR and z = Qᵀf."""

    D: Tensor  # [b n]
    QR: TriangularLeastSquares  # in which unknowns that are not free stay zero
    p: Tensor  # its minimum; of many, nearly the shortest [b n]
    norm: Tensor  # the length of that [b], as all that follows
    promise: Tensor  # what the cost falls by there
    offset: Tensor  # ‖QQᵀf‖/‖f‖, the cosine between the residuals and the tangent space; NaN where J is not finite
    size: Tensor  # ‖Dx‖
    unit: Tensor  # ‖D‖
    rounding: Tensor  # what the cost may change by rounding
    free: Tensor | None = None  # the unknowns that are not at a bound that the gradient pushes against [b n]

    @staticmethod
    def at(f: Tensor, J: Tensor, fits: Fits, rules: Rules) -> Linearised:
        """The model of residuals f [b m] with the Jacobian J [b m n]."""
        x, QR, free, number = fits.x, TriangularLeastSquares.of(J, f), None, torch.finfo(f.dtype)
        norms = torch.linalg.vector_norm(QR.R, dim=-2)  # of the columns of J
        D = fits.D.maximum(norms) if rules.D is None else rules.D
        D = D + (D == 0)
        QR = TriangularLeastSquares(QR.R / D.unsqueeze(-2), QR.z)
        if rules.lower is not None and rules.upper is not None:
            g = (QR.R.mT @ QR.z.unsqueeze(-1)).squeeze(-1)
            free = ~(((x <= rules.lower) & (g > 0)) | ((x >= rules.upper) & (g < 0)))
            QR = TriangularLeastSquares(QR.R * free.unsqueeze(-2), QR.z).below((~free).to(x.dtype))
        p = QR.shortest()
        promise, norm, length = QR.decrease(p), torch.linalg.vector_norm(p, dim=-1), (2 * fits.cost).sqrt()
        offset = (2 * promise.clamp(min=0)).sqrt() / length.clamp(min=number.tiny)
        size, unit, terms = torch.linalg.vector_norm(torch.stack([D * x, D, norms * x]), dim=-1).unbind(0)
        rounding = _NOISE * number.eps * length * (length + terms)  # residuals are sums of terms, and round as these do
        return Linearised(D, QR, p, norm, promise, offset, size, unit, rounding, free)

    def of(self, rows: Tensor) -> Linearised:
        """The models of some of the fits."""
        whole = {each.name: getattr(self, each.name) for each in fields(self)}
        some: dict[str, Any] = {name: None if value is None else value[rows] for name, value in whole.items()}
        return Linearised(**some)

    def within(self, radius: Tensor, λ: Tensor) -> tuple[Tensor, Tensor]:
        """p with ‖p‖ ≤ radius, up to a tenth, and its λ [b]: 0 where the minimum is inside. ``λ``: of the last step."""
        rows, none = (self.norm > (1 + _CLOSE) * radius).nonzero().squeeze(-1), torch.zeros_like(radius)
        if not len(rows):
            return self.p, none
        p, shifts = _on_sphere(self.QR[rows], radius[rows], λ[rows])
        return self.p.index_copy(0, rows, p), none.index_copy(0, rows, shifts)

    def in_box(self, p: Tensor, λ: Tensor, x: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
        """p in the box, and where it leads: what leaves the box is put on its bounds, and the rest solved for again."""
        assert rules.lower is not None
        assert rules.upper is not None
        assert self.free is not None
        low, high, free, QR = (rules.lower - x) * self.D, (rules.upper - x) * self.D, self.free, self.QR
        root = λ.sqrt().clamp(min=p.shape[-1] * torch.finfo(p.dtype).eps).unsqueeze(-1)
        for _ in range(p.shape[-1]):
            put = p.clamp(low, high)
            inside = put == p
            if bool(inside.all()):
                break
            free = free & inside
            held = torch.where(free, 0.0, put)
            rest = TriangularLeastSquares(QR.R * free.unsqueeze(-2), QR.z + (QR.R @ held.unsqueeze(-1)).squeeze(-1))
            p = torch.where(free, rest.damped(torch.where(free, root, 1.0)), held)
        p = p.clamp(low, high)
        trial = torch.where(p <= low, rules.lower, torch.where(p >= high, rules.upper, x + p / self.D))
        return p, trial.clamp(rules.lower, rules.upper)


def _on_sphere(QR: TriangularLeastSquares, radius: Tensor, λ: Tensor) -> tuple[Tensor, Tensor]:
    """p(λ) = −(RᵀR + λ)⁻¹Rᵀz with ‖p‖ = radius up to a tenth, and λ, from a guess or 0 (Moré 1978).

    1/‖p(λ)‖ is a concave function of λ: Newton steps for 1/‖p‖ = 1/radius rise to the solution from below.
    """
    most = torch.linalg.vector_norm((QR.R.mT @ QR.z.unsqueeze(-1)).squeeze(-1), dim=-1) / radius
    λ = torch.where(λ > 0, λ, _FIRST * most).minimum(most)
    for _ in range(_NEWTON):
        damped = QR.below(λ.sqrt().unsqueeze(-1).expand(-1, QR.R.shape[-1]))
        p = damped.undamped()
        norm = torch.linalg.vector_norm(p, dim=-1)
        off = norm / radius - 1
        if bool((off.abs() <= _CLOSE).all()):
            break
        q = torch.linalg.solve_triangular(damped.R.mT, p.unsqueeze(-1), upper=False).squeeze(-1)
        λ = torch.addcmul(λ, off, (norm / torch.linalg.vector_norm(q, dim=-1)).square()).maximum(_FALLS * λ)
    return p, λ
