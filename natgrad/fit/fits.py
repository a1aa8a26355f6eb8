"""Where fits are, and when they stop."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from natgrad.fit.losses import RobustLoss
from natgrad.fit.residual_function import ResidualFunction
from natgrad.fit.result import Status

Whole = TypeVar("Whole", bound=Any)

_RESULT = ("x", "f", "J", "squares", "shortened", "status", "nfev", "njev")


def some(whole: Whole, rows: Tensor) -> Whole:
    """Of a dataclass of tensors [b *] what belongs to some of the fits; what all share is []."""
    parts: dict[str, Any] = {each.name: getattr(whole, each.name) for each in fields(whole)}
    has_rows = (name for name, t in parts.items() if hasattr(t, "__getitem__") and getattr(t, "ndim", True))
    return replace(whole, **{name: parts[name][rows] for name in has_rows})


@final
@dataclass(frozen=True)
class Rules:
    """What is minimised, when to stop, the box, and the scale of the unknowns."""

    loss: RobustLoss
    ftol: Tensor  # [], as xtol and gtol
    xtol: Tensor
    gtol: Tensor
    noise: Tensor  # what a sum of squares of terms may be off by
    lower: Tensor | None  # [b n]
    upper: Tensor | None
    D: Tensor | None  # [b n]; None: the norms of the columns of J, the largest so far


@final
@dataclass
class Fits:
    """Fits that have not stopped yet, and where they are."""

    x: Tensor  # [b n]
    f: Tensor  # residuals [b m]
    J: Tensor  # [b m n] where it was last computed
    D: Tensor  # scale of the unknowns [b n]: the trust region is ‖Dδ‖ ≤ radius
    squares: Tensor  # twice the cost [b], as all that follows
    radius: Tensor
    λ: Tensor  # of the last step
    offset: Tensor  # the cosine between the residuals and the tangent space; of a settled fit, the least so far
    stalled: Tensor  # how much patience it has lost since its offset fell
    limited: Tensor  # steps in a row that ended on the sphere
    shortened: Tensor  # how many trial steps had residuals that are not finite
    status: Tensor
    nfev: Tensor  # how often fun was called until the fit has stopped
    njev: Tensor
    settled: Tensor | None = None  # the rule FTOL, XTOL or both that the last step has met, if one has

    @staticmethod
    def start(residuals: ResidualFunction, x: Tensor, rules: Rules) -> Fits:
        f, far = residuals(x), torch.full_like(x[:, 0], torch.inf)
        names = ("stalled", "shortened", "status", "nfev", "njev")
        counts: dict[str, Any] = {name: torch.zeros_like(far, dtype=torch.int64) for name in names}
        counts["status"] += Status.RUNNING
        D, J, λ = torch.zeros_like(x) if rules.D is None else rules.D, f.new_empty(*f.shape, 0), torch.zeros_like(far)
        return Fits(x=x, f=f, J=J, D=D, squares=rules.loss.squares(f), radius=far, λ=λ, limited=λ, offset=far, **counts)

    def put(self, where: Tensor, others: Fits, rows: Tensor) -> None:
        """Write where those rows of other fits have ended."""
        for name in _RESULT:
            getattr(self, name)[where] = getattr(others, name)[rows]

    def stop(self, where: Tensor | bool, status: Tensor | int) -> None:
        """Of two rules that stop a fit, the first one counts."""
        self.status = torch.where(where & (self.status == Status.RUNNING), status, self.status)
