"""What a least-squares fit returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from natgrad.fit.fits import EVALUATIONS, FTOL, FTOL_XTOL, GTOL, NOT_FINITE, STOPPED, XTOL
from natgrad.fit.residual_function import ResidualFunction
from natgrad.linalg import svdvals

_WHY = {
    GTOL: "gtol: the residuals are orthogonal to the tangent space of the model",
    FTOL: "ftol: a step changed the cost by no more than ftol times the cost, or rounding",
    XTOL: "xtol: a step changed the unknowns by no more than xtol times their size",
    FTOL_XTOL: "ftol and xtol: a step changed neither the cost nor the unknowns by more than their share",
    EVALUATIONS: "max_nfev: the number of evaluations is spent; the fit has not converged",
    STOPPED: "callback: it has raised StopIteration",
    NOT_FINITE: "NaN or infinity: the residuals at x0, or the Jacobian at x, are not finite",
}

_FEW = 20  # unknowns that are printed one by one


@final
@dataclass(frozen=True)
class Iterate:
    """What a callback gets as ``intermediate_result``: the fit after ``nit`` steps."""

    x: Any  # as x0
    cost: Tensor
    fun: Tensor
    nit: int
    nfev: int


@final
@dataclass(frozen=True, repr=False)
class FitResult:
    """The minimum that ``least_squares`` has found. With ``batch=True`` everything has the b fits on the first axis.

    ``x``, ``grad`` and ``standard_errors`` are as ``x0`` was given, with zeros in the last two for unknowns that are
    fixed; ``jac`` [m n], ``covariance`` [n n] go by the unknowns that are not, flattened in the order of ``x0``. As
    SciPy's result does, ``status`` counts: 1 gtol, 2 ftol, 3 xtol, 4 both of these, 0 no convergence in ``max_nfev``
    calls of ``fun``, −2 stopped by the callback, and (in a batch) −3 not finite.
    """

    x: Any  # as x0: a tensor, or a dict of tensors
    cost: Tensor  # ½ Σ ρ(f²)
    fun: Tensor  # the residuals f, as they were returned
    jac: Tensor  # with a robust loss J̃ with the curvature J̃ᵀJ̃ of the cost, as in SciPy
    nfev: Any  # how often fun was called until the fit has stopped: an int, or [b]
    njev: Any  # how often J was computed
    status: Any
    residuals: ResidualFunction = field(repr=False)  # which knows the order of the unknowns
    shortened: int  # how many trial steps were shortened because residuals there were not finite
    active: Tensor  # unknowns at a bound: −1 lower, 1 upper [n], of those that are not fixed
    pulled: Tensor = field(repr=False)  # f̃ with the gradient Jᵀf̃ [m]; without a robust loss it is f
    variance: float | None = None  # of the residuals, if it is given and not estimated

    @property
    def success(self) -> Any:
        """Whether one of the rules ftol, xtol and gtol has stopped the fit."""
        return self.status > 0

    @cached_property
    def _flat_grad(self) -> Tensor:
        return (self.pulled.unsqueeze(-2) @ self.jac).squeeze(-2)

    @property
    def grad(self) -> Any:
        """The gradient of the cost, as x0."""
        return self._as_x0(self._flat_grad)

    def _as_x0(self, t: Tensor) -> Any:
        return self.residuals.unflatten(self.residuals.embed(t if self.residuals.batch else t.unsqueeze(0)))

    @property
    def free(self) -> Tensor:
        """The unknowns [n] that no bound holds: not at one, or at one that the gradient leads away from."""
        return (self.active == 0) | (self.active * self._flat_grad > 0)

    @property
    def optimality(self) -> Tensor:
        """The largest entry of the gradient, of unknowns that are free."""
        g = self._flat_grad
        return torch.where(self.free, g, 0.0).abs().amax(-1)

    @cached_property
    def rank(self) -> Any:
        """Of J, its columns scaled to one length."""
        norms = torch.linalg.vector_norm(self.jac, dim=-2, keepdim=True)
        J = torch.where(norms.isfinite(), self.jac, 0.0)  # such a column does not count
        s = svdvals(J / torch.where(norms > 0, norms, 1.0).nan_to_num(), "the Jacobian")
        tol = max(self.jac.shape[-2:]) * torch.finfo(s.dtype).eps
        rank = (s > tol * s[..., :1]).sum(-1)
        return rank if self.residuals.batch else int(rank)

    @cached_property
    def covariance(self) -> Tensor:
        """s²(JᵀJ)⁻¹ [n n], s² = 2·cost/(m − n), of the unknowns if the noise is white and the model nearly linear.

        By QR. Bounds are not taken account of. Infinite where the residuals do not determine the unknowns: the rank of
        J is below n, or m ≤ n (m < n, if the variance of the residuals is given).
        """
        m, n = self.jac.shape[-2:]
        if m < n or (m == n and self.variance is None):
            return torch.full_like(self.jac[..., :1, :], torch.inf).expand(*self.jac.shape[:-2], n, n)
        norms = torch.linalg.vector_norm(self.jac, dim=-2, keepdim=True)
        R = torch.linalg.qr(self.jac / torch.where(norms > 0, norms, 1.0), mode="r").R
        full = torch.as_tensor(self.rank, device=R.device) == n
        eye = torch.eye(n, dtype=R.dtype, device=R.device)
        R = torch.where(full[..., None, None], R, eye)
        half = torch.linalg.solve_triangular(R, eye.expand_as(R), upper=True) / norms.mT
        variance = 2 * self.cost / (m - n) if self.variance is None else torch.full_like(self.cost, self.variance)
        return torch.where(full[..., None, None], variance[..., None, None] * (half @ half.mT), torch.inf)

    @property
    def standard_errors(self) -> Any:
        """√ of the diagonal of ``covariance``."""
        return self._as_x0(self.covariance.diagonal(dim1=-2, dim2=-1).sqrt())

    @cached_property
    def message(self) -> str:
        """Which rule has stopped the fit, and what one should know about it."""
        m, n = self.jac.shape[-2:]
        if isinstance(self.status, Tensor):
            kinds = self.status.unique().tolist()
            notes = [f"{int((self.status == kind).sum())} fits by {_WHY[kind]}" for kind in kinds]
            weak = int((torch.as_tensor(self.rank) < n).sum())
            notes += [f"{weak} fits have a Jacobian of rank below {n}: their covariance is infinite"] if weak else []
        else:
            notes = [_WHY[self.status]]
            if self.rank != n:
                notes.append(
                    f"the Jacobian has rank {self.rank} of {n}: x is not unique, and its covariance infinite, or x is "
                    "a saddle point, to which equal starts of unknowns that may be exchanged lead"
                )
            elif m == n and self.variance is None:
                notes.append("as many unknowns as residuals: the covariance is infinite")
        if self.shortened:
            notes.append(f"{self.shortened} trial steps led to residuals that are not finite, and were shortened")
        return "; ".join(notes)

    def __repr__(self) -> str:
        evaluations = "" if isinstance(self.nfev, Tensor) else f", {self.nfev} evaluations"
        cost = f"{self.cost:.6g}" if self.cost.ndim == 0 else f"[{len(self.cost)}]"
        return f"FitResult(cost {cost}{evaluations}; {self.message})"

    def __str__(self) -> str:
        """What ``repr`` says, and every unknown with its standard error if there is one fit with a few of them."""
        if self.residuals.batch or self.jac.shape[-1] > _FEW:
            return repr(self)
        x, errors = ({"x": each} if isinstance(each, Tensor) else each for each in (self.x, self.standard_errors))
        lines = []
        for name, values in x.items():
            labels = [name] if values.ndim == 0 else [f"{name}[{i}]" for i in range(values.numel())]
            pairs = zip(values.flatten().tolist(), errors[name].flatten().tolist(), strict=True)
            lines += [
                f"{label} = {value:.6g} ± {error:.2g}" for label, (value, error) in zip(labels, pairs, strict=True)
            ]
        return "\n".join([*lines, repr(self)])
