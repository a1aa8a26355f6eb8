"""Nonlinear least squares for residual functions of a model: ½‖r(θ)‖² by Gauss–Newton steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn

from natgrad.errors import IncompatibleError, SingularMetricError
from natgrad.fit.jacobian import ColumnSpectrum, ResidualJacobian, jacobian_of, refuse_solver
from natgrad.fit.residuals import Points, Residuals, classes_of
from natgrad.geometry import Covector, Vector, check_kind
from natgrad.linalg import check_damping, is_number
from natgrad.log import OnceLogger
from natgrad.model import check_slots, check_types
from natgrad.pullbacks.pullback import Pullback
from natgrad.solve.solvers import Solver
from natgrad.step.base import ResidualSpace, Step, StepContext, StepRule
from natgrad.step.line_search import GeodesicSearch
from natgrad.structures.base import Structure

Status: TypeAlias = Literal["ftol", "xtol", "gtol", "loss", "stalled", "damped", "max_steps", "seconds", "stopped"]
_Value = TypeVar("_Value")
_DAMPING = 1e-3  # of the first step, relative to the mean eigenvalue of G that is not zero by counting rows
_REFUSED = 3  # steps in a row
_PROMISED = 1e3  # times ftol or xtol: the share of the loss that an undamped step may promise at a solution
_REASONS: dict[str, str] = {
    "ftol": "the loss changed by less than ftol of itself",
    "xtol": "the step was shorter than xtol of the parameters",
    "gtol": "the gradient is below gtol",
    "loss": "the loss is at most the one that was asked for",
    "stalled": "no step lowers the loss",
    "damped": "damped steps hardly move, where an undamped one promises a lower loss: scale the parameters to similar "
    "sizes, start elsewhere, or fit them by ng.least_squares",
    "max_steps": "the number of steps is used up",
    "seconds": "the time is used up",
    "stopped": "the callback asked to stop",
}


@final
@dataclass(frozen=True)
class Record:
    """One step: ½‖r‖² and ‖Jᵀr‖∞ where it started, its length ‖δ‖, the λ from then on, and what the rule said."""

    step: int
    seconds: float
    loss: float
    gradient: float
    length: float
    damping: float
    accepted: bool
    reason: str
    classes: Mapping[str, float]  # the share of every class in ``loss``


def _formed(value: _Value | None) -> _Value:
    """What was computed from J, if that was formed."""
    if value is None:
        raise IncompatibleError(
            "the Jacobian is known by products only, so that it has no rank or covariance here: solve with "
            "structure=Kernel() or Dense(), or raise memory="
        )
    return value


@final
@dataclass(frozen=True)
class LeastSquaresResult:
    """What ``LeastSquares.solve`` found. ``status`` names the rule that stopped it, ``message`` says it in words.

    ``rank`` and ``covariance`` are computed from the Jacobian at the end, when they are asked for.
    """

    params: dict[str, Tensor] = field(repr=False)
    loss: float
    residuals: dict[str, Tensor] = field(repr=False)  # by class, [n *out], unscaled
    status: Status
    message: str
    success: bool
    steps: int
    seconds: float
    history: list[Record] = field(repr=False)
    jacobian: ResidualJacobian = field(repr=False)

    @cached_property
    def _spectrum(self) -> ColumnSpectrum:
        return _formed(self.jacobian.spectrum())

    @cached_property
    def rank(self) -> int:
        """Of J [m p] at the end, its columns scaled to one length: how many combinations of the parameters count."""
        return _formed(self.jacobian.rank())

    @property
    def shape(self) -> tuple[int, int]:
        """m residuals and p parameters."""
        return sum(r.numel() for r in self.residuals.values()), sum(t.numel() for t in self.params.values())

    @cached_property
    def covariance(self) -> Tensor:
        """σ²(JᵀJ)⁻¹ [p p] of the parameters, in their order, with σ² = ‖r‖²/(m − p).

        It is right where the scaled residuals are independent with one variance, which the weights of the classes must
        bring about. Refused where the residuals do not determine the parameters.
        """
        m, p = self.shape
        if self.rank < p:
            raise SingularMetricError(
                f"the residuals determine {self.rank} of {p} parameters at the solution, so that these have no "
                "covariance: add residuals, or fix parameters"
            )
        if m <= p:
            raise SingularMetricError(
                f"{m} residuals for {p} parameters leave nothing to tell the variance from: add residuals"
            )
        return self._scaled(self._spectrum.inverse_root(), 2 * self.loss / (m - p))

    def covariance_of(self, name: str, *, variance: float | None = None) -> Tensor:
        """The covariance [q q] of one parameter, also where others are not determined: its block of σ²(JᵀJ)⁺.

        ``variance``: σ², of the scaled residuals, where it is known; by default ‖r‖²/(m − rank). Refused where the
        residuals do not determine this parameter: a change of it can be made up for by the others.
        """
        if name not in self.params:
            raise ValueError(f"there is no parameter {name!r}: there are {', '.join(self.params)}")
        m, spectrum = self.shape[0], self._spectrum
        if variance is None and m <= spectrum.rank:
            raise SingularMetricError(
                f"{m} residuals and the rank {spectrum.rank} leave nothing to tell the variance from: give variance="
            )
        sizes = [t.numel() for t in self.params.values()]
        at = list(self.params).index(name)
        span = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
        lost = float(spectrum.undetermined()[span].max())
        if lost > 1e-6:
            raise SingularMetricError(
                f"the residuals do not determine {name}: {lost:.1g} of a change of it can be made up for by other "
                "parameters"
            )
        σ2 = 2 * self.loss / (m - spectrum.rank) if variance is None else variance
        return self._scaled(spectrum.inverse_root()[span], σ2)

    def _scaled(self, root: Tensor, variance: float) -> Tensor:
        """σ²BBᵀ, in the precision of the parameters."""
        return (variance * (root @ root.T)).to(self.jacobian.operator.layout.dtype)

    @property
    def standard_errors(self) -> dict[str, Tensor]:
        """The root of the diagonal of the covariance, parameter by parameter."""
        errors = self.covariance.diagonal().sqrt().split([t.numel() for t in self.params.values()])
        return {name: e.view_as(t) for (name, t), e in zip(self.params.items(), errors, strict=True)}


@final
class LeastSquares:
    """min ½‖r(θ)‖² over the parameters of a model, for residual functions r that can be differentiated.

    ``residuals``: ``Residuals(function, points)``, a dict of these by name, or a function of the parameters alone.
    The loss is ½ Σ_c w_c (1/N_c) Σ_n ‖r_c(x_n)‖². ``params``: the model, an ``nn.Module``, or a dict of tensors; the
    functions get it as their first argument. Parameters are changed in place.

    ``structure``: how J is kept. By default ``Kernel`` for fewer residuals than parameters (v = Jᵀ(JJᵀ + λ)⁻¹r, with
    JJᵀ from the inputs and cotangents of the layers), ``Dense`` otherwise (a QR of J), and ``Implicit`` with conjugate
    gradients where neither fits into ``memory``, bytes. ``Kronecker`` preconditions by K-FAC (Dangel et al. 2024).
    ``step``: any step rule; by default ``GeodesicSearch``, whose steps always lower the loss and whose λ rises where
    only short steps do. It starts at ``damping``, by default a thousandth of tr G/min(m, p), the mean of the
    eigenvalues of G that m residuals and p parameters allow. ``solver``: for all structures but ``Kernel`` and
    ``Dense``. The attributes ``lr`` and ``rule`` may be set between two steps.

    >>> import torch, natgrad as ng
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    >>> x = torch.linspace(0, 1, 50).double()[:, None]
    >>> fit = ng.LeastSquares(ng.Residuals(lambda net, x: net(x) - (6 * x).sin(), x), net)
    >>> fit.solve(max_steps=100).loss < 1e-4
    True
    """

    def __init__(
        self,
        residuals: Residuals | Callable[..., Tensor] | Mapping[str, Residuals] | Sequence[Residuals],
        params: nn.Module | Mapping[str, Tensor],
        *,
        structure: Structure | None = None,
        solver: Solver | None = None,
        step: StepRule | None = None,
        damping: float | None = None,
        lr: float = 1.0,
        memory: int | None = None,
    ) -> None:
        if structure is not None:
            check_slots(structure=(structure, Structure))
            structure.require_whole("LeastSquares")
        if solver is not None:
            check_slots(solver=(solver, Solver))
        refuse_solver(structure, solver)
        if step is not None:
            check_slots(step=(step, StepRule))
        if damping is not None:
            check_damping(damping, relative=False)
        check_types(memory=(memory, (Real, type(None)), "a number of bytes"), lr=(lr, Real, "a number"))
        if not 0 < lr < math.inf:
            raise ValueError(f"LeastSquares(lr=…) must be positive and finite, got {lr}")
        self.classes = classes_of(residuals, params, memory)
        self.rule = step or GeodesicSearch()
        self.structure, self.solver, self.lr = structure, solver, lr
        self.damping = damping
        self.steps = 0
        self.last: Step | None = None
        self._model = self.classes[0].model
        self.velocity: Vector | None = None
        self._logger = OnceLogger()
        self.rule.admit(self._model.params)

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters themselves, by name."""
        return self._model.params

    @property
    def resampled(self) -> bool:
        """Whether a class draws new points for every step."""
        return any(each.residuals.resampled for each in self.classes)

    def draw(self) -> list[Points]:
        """The points of every class for a step."""
        return [each.residuals.draw() for each in self.classes]

    def loss(self, points: Sequence[Points] | None = None) -> float:
        """½‖r‖² at the parameters, at new points unless they are given."""
        at = self.draw() if points is None else points
        return 0.5 * float(self._rows(self._point(), at).square().sum())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the parameters: the damping, the momentum and the number of steps."""
        velocity = None if self.velocity is None else {name: t.clone() for name, t in self.velocity.items()}
        return {"damping": self.damping, "steps": self.steps, "velocity": velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; the parameters are loaded by the model."""
        velocity, device = state["velocity"], self._model.example.device
        if velocity is not None and velocity.keys() != self.params.keys():
            raise ValueError(
                f"the momentum in the state is of the parameters {', '.join(velocity)}, and here they are "
                f"{', '.join(self.params)}: load the state of a problem with the same parameters, or rename those in "
                "state['velocity']"
            )
        self.damping, self.steps = state["damping"], state["steps"]
        self.velocity = None if velocity is None else Vector({name: t.to(device) for name, t in velocity.items()})

    def step(self) -> Record:
        """One step from here; parameters that no step improves stay."""
        return self._step(self.draw())

    def solve(
        self,
        *,
        max_steps: int = 1000,
        seconds: float | None = None,
        loss: float = 0.0,
        ftol: float = 1e-12,
        xtol: float = 1e-12,
        gtol: float = 1e-14,
        callback: Callable[[Record], bool | None] | None = None,
    ) -> LeastSquaresResult:
        """Step until a rule says to stop, and return where that was.

        ``ftol``: the loss falls by less than this share of itself; ``xtol``: ‖δ‖ is less than this share of ‖θ‖;
        ``gtol``: no entry of the gradient is larger. These three are for points that stay: with points that are drawn
        for every step, two losses are not compared. ``loss``: enough. ``seconds``: of wall-clock time. ``callback``
        sees every step, and stops by returning True.
        """
        check_types(max_steps=(max_steps, Integral, "an integer"))
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        limits: dict[str, Any] = {"loss": loss, "ftol": ftol, "xtol": xtol, "gtol": gtol}
        if seconds is not None:
            limits["seconds"] = seconds
        for name, limit in limits.items():
            if not is_number(limit) or not limit >= 0:
                raise ValueError(f"solve({name}=…) must be a number ≥ 0, got {limit!r}")
        history: list[Record] = []
        start = time.perf_counter()
        status: Status | None = None
        while status is None:
            record = self._step(self.draw(), start)
            status = self._stopped(record, history, loss, ftol, xtol, gtol)
            history.append(record)
            if callback is not None and callback(record) is True:
                status = status or "stopped"
            if status is None and seconds is not None and time.perf_counter() - start >= seconds:
                status = "seconds"
            if status is None and len(history) == max_steps:
                status = "max_steps"
        return self._result(status, history, time.perf_counter() - start, max(ftol, xtol))

    def _stopped(
        self, new: Record, history: Sequence[Record], loss: float, ftol: float, xtol: float, gtol: float
    ) -> Status | None:
        if new.loss <= loss:
            return "loss"
        if self.resampled:
            return None
        if new.gradient <= gtol:
            return "gtol"
        if not new.accepted:
            if new.reason == "stationary":
                return "ftol"
            recent = [each.accepted for each in [*history, new][-_REFUSED:]]
            return "stalled" if len(recent) == _REFUSED and not any(recent) else None
        if new.length <= xtol * (xtol + self._size()):
            return "xtol"
        if history and history[-1].accepted and abs(history[-1].loss - new.loss) <= ftol * history[-1].loss:
            return "ftol"
        return None

    @staticmethod
    def _promises_more(J: ResidualJacobian, r: Tensor, first: float, tolerance: float) -> bool:
        """Whether the linear model without damping promises a lower loss, beyond the tolerance and rounding.

        ``first``: the loss at the start, of which rounding is a share.

        Large damping makes short steps, also where the loss could fall: short steps alone are no sign of a minimum.
        """
        promised, eps = J.removable(r), torch.finfo(r.dtype).eps
        if promised is None:
            return False
        enough = max(_PROMISED * tolerance, math.sqrt(eps)) * float(r.square().sum())
        return promised > enough and promised > 2 * eps * first

    def _result(self, status: Status, history: list[Record], seconds: float, tolerance: float) -> LeastSquaresResult:
        points = self.draw()
        pullbacks = [each.pullback(x) for each, x in zip(self.classes, points, strict=True)]
        J = self._jacobian(pullbacks)
        r = self._stacked([pb.y for pb in pullbacks])
        loss, dtype = 0.5 * float(r.square().sum()), r.dtype
        if status in ("ftol", "xtol") and self._promises_more(J, r, history[0].loss, tolerance):
            status = "damped"
        if dtype != torch.float64 and status in ("ftol", "xtol", "stalled", "damped"):
            self._logger.log_once(
                logging.WARNING,
                "least squares in %s stopped at the loss %.2g, where rounding hides any progress: use double precision "
                "(model.double()) to go below",
                str(dtype).removeprefix("torch."),
                loss,
            )
        return LeastSquaresResult(
            params={name: t.clone() for name, t in self._point().items()},
            loss=loss,
            residuals={each.name: pb.y for each, pb in zip(self.classes, pullbacks, strict=True)},
            status=status,
            message=f"{status}: {_REASONS[status]} after {len(history)} steps, at the loss {loss:.4g}",
            success=status in ("ftol", "xtol", "gtol", "loss"),
            steps=len(history),
            seconds=seconds,
            history=history,
            jacobian=J,
        )

    def _step(self, points: Sequence[Points], start: float | None = None) -> Record:
        start = time.perf_counter() if start is None else start
        pullbacks = [each.pullback(x) for each, x in zip(self.classes, points, strict=True)]
        if self.last is None:
            for each, x, pb in zip(self.classes, points, pullbacks, strict=True):
                each.refuse_pairs(x, pb.y.shape)
        J = self._jacobian(pullbacks)
        layout, r = J.operator.layout, self._stacked([pb.y for pb in pullbacks])
        gradient = J.pull(r)
        differential = layout.covector(gradient)
        if not bool(gradient.any()) and float(J.operator.trace()) == 0 and bool(r.any()):
            for each, x in zip(self.classes, points, strict=True):
                each.refuse_flat(x)
        if self.damping is None:
            self.damping = _DAMPING * float(J.operator.trace()) / min(len(r), layout.size)
        params = self._point()
        here, unfinished = 0.5 * float(r.square().sum()), set[str]()

        def loss_at(landing: Mapping[str, Tensor] | None) -> float:
            if landing is None:
                return here
            there = 0.5 * float(self._rows(landing, points, unfinished).square().sum())
            return there if math.isfinite(there) else math.inf

        def sharp(ω: Covector, λ: float) -> Vector:
            check_kind(ω, Covector, "context.sharp(ω, λ)")
            if ω is differential:  # Jᵀr: from r the step has more digits
                return layout.vector(J.solve(r, λ))
            return layout.vector(J.sharp(layout.flatten(ω), λ))

        space = ResidualSpace(
            value=r,
            solve=lambda t, λ: layout.vector(J.solve(t, λ)),
            push=lambda v: J.push(layout.flatten(v)),
            second=lambda v: self._second(params, points, v, r, J),
        )
        names = list(params)
        context = StepContext(
            step=self.steps,
            params=params,
            differential=differential,
            operator=J.operator,
            damping=self.damping,
            rates=[(names, self.lr)],
            decay=lambda: params,
            smooth=lambda ω: ω,
            sharp=sharp,
            move=lambda v: v * -self.lr,
            velocity=lambda: self.velocity,
            acceleration=lambda δ: -space.solve(space.second(δ), self.damping or 0.0),
            queries=self._queries,
            loss_at=loss_at,
            residuals=space,
        )
        step = self.rule.take(context)
        if step.accepted and not bool(step.displacement.flatten().isfinite().all()):
            step = Step(step.displacement * 0.0, step.damping, accepted=False, reason="the step is not finite")
        if step.accepted:
            self._move(step)
        self.velocity = step.velocity if step.accepted else None
        self.damping, self.last, self.steps = step.damping, step, self.steps + 1
        said = [step.reason] if step.reason else []
        if unfinished:
            said.append(f"shortened: not finite in {', '.join(sorted(unfinished))}")
        losses = r.square().split([pb.y.numel() for pb in pullbacks])
        return Record(
            step=self.steps,
            seconds=time.perf_counter() - start,
            loss=here,
            gradient=float(gradient.abs().amax()),
            length=float(step.displacement.flatten().norm()) if step.accepted else 0.0,
            damping=step.damping,
            accepted=step.accepted,
            reason="; ".join(said),
            classes={each.name: 0.5 * float(share.sum()) for each, share in zip(self.classes, losses, strict=True)},
        )

    @torch.no_grad()
    def _move(self, step: Step) -> None:
        for name, p in self._model.params.items():
            p.copy_(step.landing[name]) if name in step.landing else p.add_(step.displacement[name])

    def _second(
        self, params: Mapping[str, Tensor], points: Sequence[Points], v: Vector, r: Tensor, J: ResidualJacobian
    ) -> Tensor:
        """d²/dt² r(θ + tv) ≈ (2/h)((r(θ + hv) − r(θ))/h − Jv) with h = 0.1 (Transtrum and Sethna 2012)."""
        h = 0.1
        there = self._rows(dict(params) + v * h, points)
        return (2 / h) * ((there - r) / h - J.push(J.operator.layout.flatten(v)))

    def _queries(self) -> NoReturn:
        raise IncompatibleError(
            f"{type(self.rule).__name__} asks for the divergence of outputs, and least squares has residuals: use "
            "GeodesicSearch(), LevenbergMarquardt(), GridSearch(), Armijo(), Spring() or Fixed()"
        )

    def _jacobian(self, pullbacks: Sequence[Pullback]) -> ResidualJacobian:
        weights = [each.weight(pb.n) for each, pb in zip(self.classes, pullbacks, strict=True)]
        return jacobian_of(pullbacks, weights, self.structure, self.solver)

    def _stacked(self, ys: Sequence[Tensor]) -> Tensor:
        return torch.cat([each.rows(y) for each, y in zip(self.classes, ys, strict=True)])

    def _rows(
        self, params: Mapping[str, Tensor], points: Sequence[Points], unfinished: set[str] | None = None
    ) -> Tensor:
        """r [m] at other parameters; the names of classes that are not finite there are added to ``unfinished``."""
        by_class = [each.at(params, x) for each, x in zip(self.classes, points, strict=True)]
        if unfinished is not None:
            unfinished |= {
                each.name for each, r in zip(self.classes, by_class, strict=True) if not bool(r.isfinite().all())
            }
        return torch.cat(by_class)

    def _point(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._model.params.items()}

    def _size(self) -> float:
        return float(Vector(self._point()).flatten().norm())
