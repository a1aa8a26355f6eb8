"""Where fits are, and when they stop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.fit.losses import RobustLoss
from natgrad.fit.residual_function import ResidualFunction
from natgrad.fit.result import Status

CLOSE = 0.1  # relative error of ‖Dδ‖ = radius
NOISE = 4  # in units of the machine epsilon: what a cost may be off by
LITTLE = 0.25  # of the predicted decrease: a step that gains less shortens its region

_RESULT = ("x", "f", "J", "cost", "shortened", "status", "nfev", "njev")


@final
@dataclass(frozen=True)
class Rules:
    """When to stop, the box, and the scale of the unknowns."""

    ftol: float
    xtol: float
    gtol: float
    outside: Tensor  # [3 1]: what pivots, the tangent part and the region must exceed, in units of what they go with
    small: Tensor  # [5 1]: in such units, what a step must exceed in decrease and length, so that no rule is near
    lower: Tensor | None = None  # [b n]
    upper: Tensor | None = None
    D: Tensor | None = None  # [b n]; None: the norms of the columns of J, the largest so far

    @staticmethod
    def like(
        x: Tensor,
        *,
        ftol: float,
        xtol: float,
        gtol: float,
        lower: Tensor | None,
        upper: Tensor | None,
        D: Tensor | None,
    ) -> Rules:
        eps = torch.finfo(x.dtype).eps
        factors = [x.shape[-1] * eps, gtol, 1 / (1 + CLOSE), LITTLE, ftol, NOISE * eps, 2 * xtol, 2 * xtol**2]
        outside, small = x.new_tensor(factors).unsqueeze(1).split([3, 5])
        return Rules(ftol, xtol, gtol, outside, small, lower, upper, D)

    def of(self, rows: Tensor) -> Rules:
        tensors = {name: getattr(self, name) for name in ("lower", "upper", "D")}
        return replace(self, **{name: t[rows] for name, t in tensors.items() if t is not None})


@final
@dataclass
class Fits:
    """Fits that have not stopped yet, and where they are."""

    x: Tensor  # [b n]
    f: Tensor  # residuals [b m]
    J: Tensor  # [b m n] where it was last computed
    D: Tensor  # scale of the unknowns [b n]: the trust region is ‖Dδ‖ ≤ radius
    last: Tensor  # the last step, or zeros if it was stretched, bent or refused [b n]
    cost: Tensor  # [b], as all that follows
    radius: Tensor
    λ: Tensor
    # ‖QQᵀf‖/‖f‖ for J = QR: the cosine between the residuals and the tangent space; of a settled fit, the least so far
    offset: Tensor
    settled: Tensor  # the rule FTOL, XTOL or both that a step has met
    stalled: Tensor  # how much patience it has lost since its offset fell
    limited: Tensor  # steps in a row that ended on the sphere
    still: Tensor  # steps in a row that changed the cost by no more than ftol of it
    shortened: Tensor  # how many trial steps had residuals that are not finite
    status: Tensor
    nfev: Tensor  # how often fun was called until the fit has stopped
    njev: Tensor
    any_settled: bool = field(default=False, kw_only=True)
    any_limited: bool = field(default=False, kw_only=True)
    any_stopped: bool = field(default=False, kw_only=True)

    @staticmethod
    def start(residuals: ResidualFunction, x: Tensor, loss: RobustLoss, rules: Rules) -> Fits:
        f = residuals(x)
        names = ("settled", "stalled", "limited", "still", "shortened", "status", "nfev", "njev")
        counts: dict[str, Any] = {name: torch.zeros(len(x), dtype=torch.int64, device=x.device) for name in names}
        counts["status"] += Status.RUNNING
        zeros = x.new_zeros(len(x))
        D = torch.zeros_like(x) if rules.D is None else rules.D
        region = torch.full_like(zeros, torch.inf)
        cost, J = loss.cost(f), f.new_empty(*f.shape, 0)
        return Fits(
            x=x, f=f, J=J, D=D, last=torch.zeros_like(x), cost=cost, radius=region, λ=zeros, offset=region, **counts
        )

    def of(self, rows: Tensor) -> Fits:
        """Some of the fits."""
        tensors: dict[str, Any] = {name: t[rows] for name, t in vars(self).items() if isinstance(t, Tensor)}
        return Fits(**tensors, any_settled=self.any_settled, any_limited=self.any_limited)

    def put(self, where: Tensor, others: Fits, rows: Tensor) -> None:
        """Write where those rows of other fits have ended."""
        for name in _RESULT:
            getattr(self, name)[where] = getattr(others, name)[rows]

    def stop(self, where: Tensor, status: Tensor | int) -> None:
        """Of two rules that stop a fit, the first one counts."""
        self.status = torch.where(where & (self.status == Status.RUNNING), status, self.status)
        self.any_stopped = bool((self.status != Status.RUNNING).any())
