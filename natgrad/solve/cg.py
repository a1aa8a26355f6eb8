"""Conjugate gradients: only products with the metric, preconditioned and warm-started."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn, final

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError, NonFiniteError, SingularMetricError
from natgrad.geometry import Covector, Vector
from natgrad.linalg import Damping, check_damping, check_number_fields, range_rounding
from natgrad.log import OnceLogger
from natgrad.model import check_slots
from natgrad.solve.solvers import Solver
from natgrad.structures.base import Inverse, Layout, Operator, RootedOperator, Structure, mean_of
from natgrad.structures.implicit import ImplicitOperator


@final
@dataclass(frozen=True)
class CGReport:
    """How a solve ended: ``residual`` is ‖ω − (G + λ)v‖/‖ω‖ after ``steps`` products; ``reason``: why it stopped.

    The residual is the true one, computed at the end; the one that stops the loop follows a recursion and drifts from
    it by rounding, so that ``converged`` allows it ten times the tolerance.
    """

    steps: int
    residual: float
    converged: bool
    reason: str


@final
@dataclass(frozen=True)
class CG(Solver):
    """Solve by conjugate gradients, from products with the metric alone.

    Args:
        tol: Stop at this relative residual.
        max_steps: The most products with the metric. A damped solve that is cut short still descends: the logger
            "natgrad" says so once.
        preconditioner: A structure, inverted with the same damping; it must be regular, so give damping.
            ``Nystrom(rank)`` is made for this.

    Raises:
        SingularMetricError: if ω is not in the range of the metric, or an undamped solve is cut short far from a
            solution.

    Method:
        (G + λ)v = ω by preconditioned conjugate gradients (Grosse 2021, section 5.2). A new solve starts from the last
        solution; ``inverse.report`` says how the last one ended. On a singular but consistent system the solution of
        least norm is reached when started at zero.

    Example:
        >>> import natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> G = ng.Implicit().estimate(ng.pullback(model, torch.randn(8, 2), ng.Euclidean()))
        >>> inverse = CG(tol=1e-6).init(G, damping=0.1)
        >>> v = inverse.sharp(ng.differential(model, model(torch.ones(1, 2)).sum()))
        >>> inverse.report.converged
        True
    """

    iterative: ClassVar[bool] = True
    damping_note: ClassVar[str] = "exact, G + λ·1 solved by conjugate gradients"

    tol: float = 1e-6
    max_steps: int = 250
    preconditioner: Structure | None = None
    logger: OnceLogger = field(default_factory=OnceLogger, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number_fields(self)
        if not self.tol > 0:
            raise ValueError(f"CG(tol=…) must be positive, got {self.tol}")
        if self.max_steps < 1:
            raise ValueError(f"CG(max_steps=…) must be at least 1, got {self.max_steps}")
        if self.preconditioner is not None:
            check_slots(preconditioner=(self.preconditioner, Structure))

    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> CGInverse:
        check_damping(damping, G.layout.dtype)
        if G.power != 1:
            G.refuse(
                f"CG at the power {G.power:g}",
                "products with G^p need the eigenvalues of G, with which Cholesky() inverts it at once",
            )
        λ = G.absolute(damping)
        guess = (warm or {}).get("guess")
        return CGInverse(G.layout, self, G, λ, self._preconditioner(G, λ), guess)

    def _preconditioner(self, G: Operator, damping: Damping) -> Inverse | None:
        if self.preconditioner is None:
            return None
        P, total = self.preconditioner.extract(G), 1.0
        if P is None and isinstance(G, ImplicitOperator):
            total = sum(weight for weight, _, _ in G.terms)
            P = mean_of([(weight, self.preconditioner.estimate(pb)) for weight, pb, _ in G.terms])
        if P is not None:
            return P.inverse(damping / total if isinstance(damping, float) else damping)
        raise IncompatibleError(
            f"CG(preconditioner={self.preconditioner!r}) does not work with {type(G).__name__}: only an Implicit "
            "metric still has its pullback to estimate it from. Use preconditioner=Diagonal()"
        )


@final
@dataclass(repr=False)
class CGInverse(Inverse):
    """The system, ready to be solved for any ω; it remembers how the last solve ended, and starts from its solution."""

    layout: Layout
    solver: CG
    operator: Operator
    damping: float
    preconditioner: Inverse | None
    guess: Tensor | None
    report: CGReport | None = field(default=None)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.guess is None else {"guess": self.guess}

    def sharp(self, ω: Covector) -> Vector:
        v = super().sharp(ω)
        if self._failed():
            self._refuse()
        return v

    def _failed(self) -> bool:
        """Whether the last solve has ended far from a solution, and with no step that descends."""
        assert self.report is not None
        if self.report.converged or (self.damping > 0 and self.report.steps >= self.solver.max_steps):
            return False
        return self.report.residual > range_rounding(self.layout.size, self.layout.dtype)

    def solve(self, ω: Tensor) -> Tensor:
        """As ``sharp``, for numbers: ``report`` tells how it ended, and only negative curvature raises."""
        largest = float(ω.abs().max()) if ω.numel() else 0.0
        if largest == 0.0:
            self.report = CGReport(0, 0.0, True, "ω is zero")
            return torch.zeros_like(ω)
        # The squares of a tiny ω would underflow. A power of two changes no digit.
        unit = math.ldexp(1.0, math.frexp(largest)[1])
        guess = None if self.guess is None else self.guess / unit
        v = unit * self._scaled(ω / unit, guess)
        self.guess = v.detach().clone()  # what is returned may be changed in place
        assert self.report is not None
        if not self.report.converged and self.report.steps >= self.solver.max_steps and not self._failed():
            self.solver.logger.log_once(
                logging.WARNING,
                "conjugate gradients stopped after max_steps=%d with the relative residual %.2g, over tol=%g: the step "
                "descends, but is not (G + λ)⁻¹ω. Raise max_steps, tol or the damping, or give a preconditioner",
                self.solver.max_steps,
                self.report.residual,
                self.solver.tol,
            )
        return v

    @property
    def root_size(self) -> int:
        return self.layout.size + (self._rooted().root_columns or 0)

    def root_times(self, ξ: Tensor) -> Tensor:
        """(RᵀR + λ)⁻¹(√λ ξ₁ + Rᵀ ξ₂), one solve a sample."""
        G = self._rooted()
        white, pulled = ξ.split([self.layout.size, self.root_size - self.layout.size], dim=1)
        pairs = zip(white, pulled, strict=True)
        return torch.stack([self._converged(math.sqrt(self.damping) * a + G.pull_root(b)) for a, b in pairs])

    def root_transpose_times(self, ω: Tensor) -> Tensor:
        G = self._rooted()
        solved = [self._converged(row) for row in ω]
        return torch.stack([torch.cat([math.sqrt(self.damping) * v, G.push_root(v)]) for v in solved])

    def _rooted(self) -> RootedOperator:
        """The metric with its root, without which there are no samples."""
        if not isinstance(self.operator, RootedOperator) or self.operator.root_columns is None:
            self.refuse_root()
        return self.operator

    def _converged(self, ω: Tensor) -> Tensor:
        """The solution; raises where it was not reached, since samples would have another covariance."""
        v = self.solve(ω)
        if self.report is not None and not self.report.converged:
            self._refuse()
        return v

    def _refuse(self) -> NoReturn:
        assert self.report is not None
        raise SingularMetricError(
            f"conjugate gradients did not reach tol={self.solver.tol:g} at damping {self.damping:g} "
            f"({self.report.reason}, residual {self.report.residual:.3g}): raise the damping, or give "
            "CG(tol=…, max_steps=…, preconditioner=…); with Dense or Kernel, Pinv() takes the part of ω in the range"
        )

    def _scaled(self, ω: Tensor, guess: Tensor | None) -> Tensor:
        scale = float(torch.linalg.vector_norm(ω))
        v, r = self._start(ω, guess)
        z = self._precondition(r)
        p, rz = z, torch.dot(r, z)
        steps, residual, size = 0, float(torch.linalg.vector_norm(r)) / scale, 0.0
        best = (residual, v)
        while residual > self.solver.tol and steps < self.solver.max_steps:
            Ap = self._product(p)
            square, curvature = float(torch.dot(p, p)), float(torch.dot(p, Ap))
            size = max(size, float(torch.linalg.vector_norm(Ap)) / square**0.5)  # ‖G + λ‖, from below
            if self._exhausted(curvature, size * square, p):
                v = best[1]
                break
            α = rz / curvature
            v, r = v + α * p, r - α * Ap
            z = self._precondition(r)
            rz, previous = torch.dot(r, z), rz
            p = z + (rz / previous) * p
            steps += 1
            residual = float(torch.linalg.vector_norm(r)) / scale
            best = min(best, (residual, v), key=lambda pair: pair[0])
        return self._finish(v, ω, steps, scale)

    def _start(self, ω: Tensor, guess: Tensor | None) -> tuple[Tensor, Tensor]:
        if guess is None:
            return torch.zeros_like(ω), ω
        r = ω - self._product(guess)
        # A stale guess can be worse than none, and so much larger than ω that it overflows (NaN).
        if not float(torch.linalg.vector_norm(r)) < float(torch.linalg.vector_norm(ω)):
            return torch.zeros_like(ω), ω
        return guess, r

    def _product(self, v: Tensor) -> Tensor:
        return self.operator.product(v) + self.damping * v

    def _precondition(self, r: Tensor) -> Tensor:
        return r if self.preconditioner is None else self.preconditioner.solve(r)

    def _exhausted(self, curvature: float, largest: float, p: Tensor) -> bool:
        """Whether p is (to rounding) a null direction; negative curvature beyond rounding raises.

        ``largest``: the curvature that p would have along the largest eigenvalue. A product rounds relative to that:
        for a null direction p·Gp is noise of either sign, as large as |p| times the noise in Gp.
        """
        if not math.isfinite(curvature):
            raise NonFiniteError("conjugate gradients met NaN or infinity in a product with the metric")
        rounding = 10 * math.sqrt(p.numel()) * torch.finfo(p.dtype).eps * largest
        if curvature < -rounding:
            raise SingularMetricError(
                f"conjugate gradients met negative curvature {curvature:.3g} at damping {self.damping:g}: the metric "
                "is indefinite. Add damping (damping > 0), or use a positive metric (Fisher, or a convex loss)"
            )
        return curvature <= rounding

    def _finish(self, v: Tensor, ω: Tensor, steps: int, scale: float) -> Tensor:
        # The recursive residual drifts: report the true one.
        residual = float(torch.linalg.vector_norm(ω - self._product(v))) / scale
        if residual != residual:
            raise NonFiniteError("conjugate gradients met NaN or infinity in a product with the metric")
        converged = residual <= 10 * self.solver.tol
        if converged:
            reason = "converged"
        elif steps >= self.solver.max_steps:
            reason = f"stopped after max_steps={self.solver.max_steps}"
        else:
            reason = "no further progress: ω is not in the range of the metric, or tol is below rounding"
        self.report = CGReport(steps, residual, converged, reason)
        return v
