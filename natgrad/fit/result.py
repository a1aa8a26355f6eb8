"""What a least-squares fit returns: of small problems, one or many, and of networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.fit.jacobian import ColumnSpectrum, ResidualJacobian
from natgrad.fit.residual_function import FlatUnknowns
from natgrad.show import as_html

_FEW = 20  # unknowns that are printed one by one
_UNDETERMINED = 1e-6  # the share of a change of an unknown that others may make up for, if it has a variance


class Status(IntEnum):
    """The rule that has stopped a fit, as SciPy counts: positive where it has converged."""

    GTOL = 1
    FTOL = 2
    XTOL = 3
    FTOL_XTOL = 4
    COST = 5
    SPENT = 0
    RUNNING = -1
    STOPPED = -2
    NOT_FINITE = -3
    STALLED = -4
    DAMPED = -5


_WHY = {
    Status.GTOL: "gtol: the residuals are orthogonal to the tangent space of the model",
    Status.FTOL: "ftol: a step changed the cost by no more than ftol times the cost, or rounding",
    Status.XTOL: "xtol: a step changed the unknowns by no more than xtol times their size",
    Status.FTOL_XTOL: "ftol and xtol: a step changed neither the cost nor the unknowns by more than their share",
    Status.COST: "cost: it is at most the one that was asked for",
    Status.SPENT: "max_nfev, max_steps or seconds: the evaluations, steps or time are spent; the fit has not converged",
    Status.STOPPED: "callback: it has asked to stop",
    Status.NOT_FINITE: "NaN or infinity: the residuals at x0, or the Jacobian at x, are not finite",
    Status.STALLED: "stalled: no step lowers the cost",
    Status.DAMPED: "damped: damped steps hardly move, where an undamped one promises a lower cost: scale the unknowns "
    "to similar sizes, start elsewhere, or fit them by ng.least_squares",
}


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
@dataclass(frozen=True)
class Record:
    """One step of a network: ½‖r‖² where it started, its length ‖δ‖, the λ from then on, and what the rule said.

    ``offset`` is √(rᵀJ(JᵀJ + λ)⁻¹Jᵀr)/‖r‖: the cosine between the residuals and the tangent space, for λ = 0.
    """

    step: int
    seconds: float
    cost: float
    offset: float
    length: float
    damping: float
    accepted: bool
    reason: str
    classes: Mapping[str, float]  # the share of every class in ``cost``


@final
@dataclass(frozen=True, repr=False)
class FitResult:
    """The minimum that a fit has found, with its errors and why it stopped.

    With ``batch=True`` everything has the b fits on the first axis. ``grad`` and ``standard_errors`` are as ``x0`` was
    given, with zeros for unknowns that are fixed; ``covariance`` [n n] goes by the unknowns that are not, flattened in
    the order of ``x0``.

    Attributes:
        x: The unknowns, as ``x0`` was given: a tensor, or a dict of tensors. Of a network: its parameters.
        cost: ½ Σ ρ(f²).
        fun: The residuals f, as they were returned; of a network those of every class, unscaled.
        jac: The Jacobian [m n], of the unknowns that are not fixed. With a robust loss J̃ with the curvature J̃ᵀJ̃ of
            the cost, as in SciPy. Of a network: J in its structure.
        nfev: How often the residuals were computed until the fit stopped: an int, or [b].
        njev: How often the Jacobian was computed.
        status: As SciPy's: 1 gtol, 2 ftol, 3 xtol, 4 both of these, 5 a cost that was asked for; 0 what was allowed is
            spent, −2 stopped by the callback, −3 not finite (in a batch). Of networks −4 no step lowers the cost, −5
            the steps are short because the damping is large.
        unknowns: The order of the unknowns.
        pulled: f̃ with the gradient Jᵀf̃ [m]; without a robust loss it is f.
        active: Unknowns at a bound: −1 lower, 1 upper [n], of those that are not fixed.
        shortened: How many trial steps were shortened because residuals there were not finite.
        variance: The variance of the residuals, if it is given and not estimated.
        history: Of a network: a record of every step.
    """

    x: Any  # as x0: a tensor, or a dict of tensors
    cost: Tensor  # ½ Σ ρ(f²)
    fun: Any  # the residuals f, as they were returned
    jac: Any  # with a robust loss J̃ with the curvature J̃ᵀJ̃ of the cost, as in SciPy
    nfev: Any  # how often the residuals were computed until the fit has stopped: an int, or [b]
    njev: Any  # how often J was computed
    status: Any
    unknowns: FlatUnknowns = field(repr=False)  # their order
    pulled: Tensor = field(repr=False)  # f̃ with the gradient Jᵀf̃ [m]; without a robust loss it is f
    active: Tensor  # unknowns at a bound: −1 lower, 1 upper [n], of those that are not fixed
    shortened: int = 0  # how many trial steps were shortened because residuals there were not finite
    variance: float | None = None  # of the residuals, if it is given and not estimated
    history: Sequence[Record] = field(default=(), repr=False)

    _repr_html_ = as_html

    @property
    def success(self) -> Any:
        """Whether a rule of convergence has stopped the fit."""
        return self.status > 0

    @property
    def shape(self) -> tuple[int, int]:
        """m residuals and n unknowns of one fit."""
        return self.pulled.shape[-1], self.unknowns.free_size

    @cached_property
    def _flat_grad(self) -> Tensor:
        if isinstance(self.jac, ResidualJacobian):
            return self.jac.pull(self.pulled)
        return (self.pulled.unsqueeze(-2) @ self.jac).squeeze(-2)

    @property
    def grad(self) -> Any:
        """The gradient of the cost, as x0."""
        return self._as_x0(self._flat_grad)

    def _as_x0(self, t: Tensor) -> Any:
        return self.unknowns.unflatten(self.unknowns.embed(t if self.unknowns.batch else t.unsqueeze(0)))

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
    def spectrum(self) -> ColumnSpectrum:
        """The singular values of J, its columns scaled to one length."""
        if isinstance(self.jac, Tensor):
            return ColumnSpectrum.of_rows(self.jac)
        spectrum = self.jac.spectrum()
        if spectrum is None:
            raise IncompatibleError(
                "the Jacobian is known by products only, so that it has no rank or covariance here: solve with "
                "structure=Kernel() or Dense(), or raise memory="
            )
        return spectrum

    @cached_property
    def rank(self) -> Any:
        """Of J, its columns scaled to one length: how many combinations of the unknowns count."""
        rank = None if isinstance(self.jac, Tensor) else self.jac.rank()
        rank = self.spectrum.rank if rank is None else rank
        return rank if self.unknowns.batch else int(rank)

    @cached_property
    def covariance(self) -> Tensor:
        """s²(JᵀJ)⁻¹ [n n], s² = 2·cost/(m − rank), of the unknowns if the noise is white and the model nearly linear.

        Of the pseudo-inverse, so that unknowns that the residuals determine have a covariance where others have none:
        rows and columns of unknowns whose changes others can make up for are infinite, and all are, if m is at most the
        rank and no variance of the residuals is given. Bounds are not taken account of.
        """
        return self._covariance(slice(None), self.variance)

    def covariance_of(self, name: str, *, variance: float | None = None) -> Tensor:
        """The block [q q] of one unknown in the covariance, also where all unknowns would be too many.

        ``variance``: of the residuals, where it is known.
        """
        sizes = self.unknowns.sizes
        if name not in sizes:
            raise ValueError(f"there is no parameter {name!r}: there are {', '.join(sizes)}")
        start = sum(list(sizes.values())[: list(sizes).index(name)])
        return self._covariance(slice(start, start + sizes[name]), self.variance if variance is None else variance)

    def _covariance(self, span: slice, variance: float | None) -> Tensor:
        spectrum = self.spectrum
        root = spectrum.inverse_root()[..., span, :]
        lost = spectrum.undetermined()[..., span] > _UNDETERMINED
        freedom = self.shape[0] - torch.as_tensor(spectrum.rank, device=root.device)
        s2 = 2 * self.cost / freedom.clamp(min=1) if variance is None else torch.full_like(self.cost, variance)
        lost = lost.unsqueeze(-1) | lost.unsqueeze(-2)
        if variance is None:
            lost = lost | (freedom <= 0)[..., None, None]
        return torch.where(lost, torch.inf, s2[..., None, None] * (root @ root.mT)).to(self.cost.dtype)

    @property
    def standard_errors(self) -> Any:
        """√ of the diagonal of ``covariance``."""
        return self._as_x0(self.covariance.diagonal(dim1=-2, dim2=-1).sqrt())

    @cached_property
    def message(self) -> str:
        """Which rule has stopped the fit, and what one should know about it."""
        m, n = self.shape
        if isinstance(self.status, Tensor):
            kinds = self.status.unique().tolist()
            notes = [f"{int((self.status == kind).sum())} fits by {_WHY[Status(kind)]}" for kind in kinds]
            weak = int((torch.as_tensor(self.rank) < n).sum())
            notes += [f"{weak} fits have a Jacobian of rank below {n}: their covariance is infinite"] if weak else []
        else:
            notes = [_WHY[Status(self.status)]]
            if self.history:
                notes.append(f"after {len(self.history)} steps, at the cost {self.cost:.4g}")
            elif self.rank != n:
                notes.append(
                    f"the Jacobian has rank {self.rank} of {n}: x is not unique, and the covariance of what others can "
                    "make up for infinite, or x is a saddle point, to which equal starts of unknowns that may be "
                    "exchanged lead"
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
        if self.unknowns.batch or self.shape[1] > _FEW or not isinstance(self.jac, Tensor):
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
