"""Where fits are, and when they stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from operator import mul
from typing import final

import torch
from torch import Tensor

from natgrad.least_squares.arithmetic import Number, Truth, Vector, select
from natgrad.least_squares.losses import RobustLoss
from natgrad.least_squares.residuals import ResidualFunction

RUNNING, NOT_FINITE = -1, -2
EVALUATIONS, GTOL, FTOL, XTOL, FTOL_XTOL = 0, 1, 2, 3, 4  # why a fit has stopped, as SciPy counts

_SHORT = 16  # up to so many unknowns, the vectors of one fit are lists


@final
@dataclass(frozen=True)
class Rules:
    """When to stop, the box, and the scale of the unknowns."""

    ftol: float
    xtol: float
    gtol: float
    evaluations: int
    lower: Tensor | None = None  # [b n]
    upper: Tensor | None = None
    D: Tensor | None = None  # [b n]; None: the norms of the columns of J, the largest so far

    def of(self, rows: Tensor) -> Rules:
        tensors = {name: getattr(self, name) for name in ("lower", "upper", "D")}
        return replace(self, **{name: t[rows] for name, t in tensors.items() if t is not None})


@final
@dataclass
class Fits:
    """Where the fits are: tensors with b fits on the first axis, and for each fit numbers."""

    x: Tensor  # [b n]
    f: Tensor  # residuals [b m]
    D: Vector  # scale of the unknowns [b n]: the trust region is ‖Dδ‖ ≤ radius
    cost: Number
    last: Vector  # the last step, if it was taken whole [b n]
    J: Tensor = field(default_factory=lambda: torch.empty(0))  # [b m n] where it was last computed
    radius: Number = 0.0
    λ: Number = 0.0
    # ‖QQᵀf‖/‖f‖ for J = QR: the cosine between the residuals and the tangent space; of a settled fit, the least so far
    offset: Number = torch.inf
    settled: Number = 0  # the rule FTOL, XTOL or both that a step has met
    stalled: Number = 0  # how much patience it has lost since its offset fell
    limited: Number = 0  # steps in a row that ended on the sphere
    status: Number = RUNNING
    evaluations: Number = 1
    shortened: Number = 0  # how many trial steps had residuals that are not finite

    @staticmethod
    def start(residuals: ResidualFunction, x: Tensor, loss: RobustLoss, rules: Rules) -> Fits:
        f = residuals(x)
        zero = torch.zeros_like(x)
        fits = Fits(x=x, f=f, D=zero if rules.D is None else rules.D, cost=loss.cost(f), last=zero)
        if len(x) == 1:
            fits.cost = float(fits.cost)
            if rules.lower is None and x.shape[-1] <= _SHORT:
                fits.D, fits.last = fits.D.tolist()[0], zero.tolist()[0]
            return fits
        for name in ("radius", "λ", "offset", "settled", "stalled", "limited", "status", "evaluations", "shortened"):
            value = getattr(fits, name)
            dtype = x.dtype if isinstance(value, float) else torch.int64
            setattr(fits, name, torch.full((len(x),), value, dtype=dtype, device=x.device))
        return fits

    def of(self, rows: Tensor) -> Fits:
        """Some of the fits."""
        return Fits(**{entry.name: getattr(self, entry.name)[rows] for entry in fields(self)})

    def put(self, rows: Tensor, others: Fits) -> None:
        """Write these fits into those rows."""
        for entry in fields(self):
            getattr(self, entry.name)[rows] = getattr(others, entry.name)

    def stop(self, where: Truth, status: Number) -> None:
        if where is not False:
            self.status = select(where & (self.status == RUNNING), status, self.status)

    def number(self, t: Tensor) -> Number:
        """A tensor [b], or the number in it, if there is one fit."""
        return t if isinstance(self.status, Tensor) else float(t)

    def norm(self, a: Vector) -> Number:
        """‖a‖, one number for each fit."""
        if isinstance(a, list):
            return math.hypot(*a)
        if isinstance(self.status, Tensor):
            return torch.linalg.vector_norm(a, dim=-1)
        return math.hypot(*a.tolist()[0])

    def inner(self, a: Vector, b: Vector) -> Number:
        """⟨a, b⟩, one number for each fit."""
        return sum(map(mul, a, b)) if isinstance(a, list) else self.number((a * b).sum(-1))
