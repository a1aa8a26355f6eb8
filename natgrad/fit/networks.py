"""Nonlinear least squares for residual functions of a model: ½‖r(θ)‖² by Gauss–Newton steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from natgrad.errors import IncompatibleError
from natgrad.fit.jacobian import ResidualJacobian, jacobian_of, refuse_solver
from natgrad.fit.residual_function import FlatUnknowns
from natgrad.fit.residuals import Points, Residuals, classes_of
from natgrad.fit.result import FitResult, Record, Status
from natgrad.geometry import Covector, Vector, check_kind
from natgrad.linalg import check_damping, check_finite, is_number
from natgrad.log import OnceLogger
from natgrad.model import check_slots, check_types
from natgrad.pullbacks.pullback import Pullback
from natgrad.solve.solvers import Solver
from natgrad.step.base import ResidualSpace, Step, StepContext, StepRule
from natgrad.step.line_search import GeodesicSearch
from natgrad.structures.base import Structure, check_shape

_DAMPING = 1e-3  # of the first step, relative to the mean eigenvalue of G that is not zero by counting rows
_REFUSED = 3  # steps in a row
_PROMISED = 1e3  # times ftol or xtol: the share of the cost that an undamped step may promise at a solution


def _asks_to_stop(callback: Callable[[Record], bool | None], record: Record) -> bool:
    try:
        return callback(record) is True
    except StopIteration:
        return True


@final
class LeastSquares:
    """Fit the parameters of a model to residuals by Gauss–Newton: curves, equations, networks.

    Parameters are changed in place. The attributes ``lr`` and ``rule`` may be set between two steps.

    Args:
        residuals: ``Residuals(function, points)``, a dict of these by name, or a function of the parameters alone.
        params: The model, an ``nn.Module``, or a dict of tensors; the functions get it as their first argument.
        structure: How J is kept. By default ``Kernel`` for fewer residuals than parameters, ``Dense`` otherwise (a QR
            of J), and ``Implicit`` with conjugate gradients where neither fits into ``memory``. ``Kronecker``
            preconditions by K-FAC (Dangel et al. 2024).
        solver: How the metric is inverted, for all structures but ``Kernel`` and ``Dense``.
        step: Any step rule; by default ``GeodesicSearch``, whose steps always lower the loss and whose λ rises where
            only short steps do.
        damping: λ at the start; by default a thousandth of tr G/min(m, p), the mean of the eigenvalues of G that m
            residuals and p parameters allow.
        lr: What the step is multiplied by.
        memory: Bytes that J or its kernel may take.

    Method:
        min ½ Σ_c w_c (1/N_c) Σ_n ‖r_c(x_n)‖² over the classes c of residuals. ``Kernel`` takes the step v = Jᵀ(JJᵀ +
        λ)⁻¹r, with JJᵀ from the inputs and cotangents of the layers.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> x = torch.linspace(0, 1, 50).double()[:, None]
        >>> fit = ng.LeastSquares(ng.Residuals(lambda net, x: net(x) - (6 * x).sin(), x), net)
        >>> bool(fit.solve(max_steps=100).cost < 1e-4)
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
        self.rule: StepRule | GeodesicSearch = step or GeodesicSearch()
        self.structure: Structure | None = structure
        self.solver: Solver | None = solver
        self.lr: float = lr
        self.damping = damping
        self.steps = 0
        self.last: Step | None = None
        self._model = self.classes[0].model
        self.velocity: Vector | None = None
        self._evaluations = 0  # of the residuals
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

    def __repr__(self) -> str:
        return f"LeastSquares({', '.join(each.name for each in self.classes)}; {self._model.size} parameters)"

    def cost(self, points: Sequence[Points] | None = None) -> float:
        """½‖r‖² at the parameters, at new points unless they are given."""
        at = self.draw() if points is None else points
        return 0.5 * float(self._rows(self._point(), at).square().sum())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the parameters: the damping, the momentum and the number of steps."""
        velocity = None if self.velocity is None else {name: t.clone() for name, t in self.velocity.items()}
        return {"damping": self.damping, "steps": self.steps, "velocity": velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; the parameters are loaded by the model.

        A state that is damaged, or of another problem, is refused, and nothing is changed.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"the state has no {', '.join(sorted(missing))}: it is incomplete. Nothing was loaded")
        damping, steps, velocity = state["damping"], state["steps"], state["velocity"]
        if damping is not None:
            check_damping(damping, relative=False)
        if not is_number(steps, whole=True) or steps < 0:
            raise ValueError(f'"steps" of the state is {steps!r}: it is damaged. Nothing was loaded')
        if velocity is not None and velocity.keys() != self.params.keys():
            raise ValueError(
                f"the momentum in the state is of the parameters {', '.join(velocity)}, and here they are "
                f"{', '.join(self.params)}: load the state of a problem with the same parameters, or rename those in "
                "state['velocity']"
            )
        for name, t in (velocity or {}).items():
            check_shape(f"the momentum of {name}", t, self.params[name].shape)
            check_finite(t, f"the momentum of {name} in the state")
        self.damping, self.steps = damping, steps
        device = self._model.example.device
        self.velocity = None if velocity is None else Vector({name: t.to(device) for name, t in velocity.items()})

    def step(self) -> Record:
        """One step from here; parameters that no step improves stay."""
        return self._step(self.draw())

    def solve(
        self,
        *,
        max_steps: int = 1000,
        seconds: float | None = None,
        cost: float = 0.0,
        ftol: float = 1e-12,
        xtol: float = 1e-12,
        gtol: float = 1e-8,
        callback: Callable[[Record], bool | None] | None = None,
    ) -> FitResult:
        """Step until a rule says to stop, and return where that was.

        ``ftol``: the cost falls by less than this share of itself; ``xtol``: ‖δ‖ is less than this share of ‖θ‖;
        ``gtol``: the cosine between the residuals and the tangent space is at most this, as the steps tell it (their
        ``offset``, which damping makes smaller). These three are for points that stay: with points that are drawn for
        every step, two costs are not compared. ``cost``: enough. ``seconds``: of wall-clock time. ``callback`` sees
        every step, and stops by returning True or raising StopIteration.
        """
        check_types(max_steps=(max_steps, Integral, "an integer"))
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        limits: dict[str, Any] = {"cost": cost, "ftol": ftol, "xtol": xtol, "gtol": gtol}
        if seconds is not None:
            limits["seconds"] = seconds
        for name, limit in limits.items():
            if not isinstance(limit, (int, float)) or not limit >= 0:
                raise ValueError(f"solve({name}=…) must be a number ≥ 0, got {limit!r}")
        history: list[Record] = []
        start, self._evaluations = time.perf_counter(), 0
        status: Status | None = None
        while status is None:
            record = self._step(self.draw(), start)
            status = self._stopped(record, history, cost, ftol, xtol, gtol)
            history.append(record)
            if callback is not None and _asks_to_stop(callback, record):
                status = Status.STOPPED if status is None else status
            spent = len(history) == max_steps or (seconds is not None and time.perf_counter() - start >= seconds)
            status = Status.SPENT if status is None and spent else status
        return self._result(status, history, max(ftol, xtol, gtol**2))

    def _stopped(
        self, new: Record, history: Sequence[Record], cost: float, ftol: float, xtol: float, gtol: float
    ) -> Status | None:
        if new.cost <= cost:
            return Status.COST
        if self.resampled:
            return None
        if new.offset <= gtol:
            return Status.GTOL
        if not new.accepted:
            if new.reason == "stationary":
                return Status.FTOL
            recent = [each.accepted for each in [*history, new][-_REFUSED:]]
            return Status.STALLED if len(recent) == _REFUSED and not any(recent) else None
        if new.length <= xtol * (xtol + self._size()):
            return Status.XTOL
        if history and history[-1].accepted and abs(history[-1].cost - new.cost) <= ftol * history[-1].cost:
            return Status.FTOL
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

    def _result(self, status: Status, history: list[Record], tolerance: float) -> FitResult:
        points = self.draw()
        pullbacks = self._pulled(points)
        J = self._jacobian(pullbacks)
        r, params = self._stacked([pb.y for pb in pullbacks]), self._point()
        cost = 0.5 * r.square().sum()
        if status in (Status.GTOL, Status.FTOL, Status.XTOL) and self._promises_more(J, r, history[0].cost, tolerance):
            status = Status.DAMPED
        if r.dtype != torch.float64 and status in (Status.FTOL, Status.XTOL, Status.STALLED, Status.DAMPED):
            self._logger.log_once(
                logging.WARNING,
                "least squares in %s stopped at the cost %.2g, where rounding hides any progress: use double precision "
                "(model.double()) to go below",
                str(r.dtype).removeprefix("torch."),
                float(cost),
            )
        return FitResult(
            x={name: t.clone() for name, t in params.items()},
            cost=cost,
            fun={each.name: pb.y for each, pb in zip(self.classes, pullbacks, strict=True)},
            jac=J,
            nfev=self._evaluations,
            njev=len(history) + 1,
            status=int(status),
            unknowns=FlatUnknowns(params, False, None),
            pulled=r,
            active=torch.zeros(self._model.size, dtype=torch.int64, device=r.device),
            history=history,
        )

    def _pulled(self, points: Sequence[Points]) -> list[Pullback]:
        self._evaluations += 1
        return [each.pullback(x) for each, x in zip(self.classes, points, strict=True)]

    def _step(self, points: Sequence[Points], start: float | None = None) -> Record:
        start = time.perf_counter() if start is None else start
        pullbacks = self._pulled(points)
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

        removed: list[float] = []  # what damped steps remove of ‖r‖², in the linear model

        def solve(t: Tensor, λ: float) -> Vector:
            v = J.solve(t, λ)
            if t is r:
                removed.append(float(gradient @ v))
            return layout.vector(v)

        def sharp(ω: Covector, λ: float) -> Vector:
            check_kind(ω, Covector, "context.sharp(ω, λ)")
            if ω is differential:  # Jᵀr: from r the step has more digits
                return solve(r, λ)
            return layout.vector(J.sharp(layout.flatten(ω), λ))

        space = ResidualSpace(
            value=r,
            solve=solve,
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
        if not removed:  # the rule has asked for no such step
            removed.append(math.inf if bool(gradient.any()) else 0.0)
        said = [step.reason] if step.reason else []
        if unfinished:
            said.append(f"shortened: not finite in {', '.join(sorted(unfinished))}")
        losses = r.square().split([pb.y.numel() for pb in pullbacks])
        return Record(
            step=self.steps,
            seconds=time.perf_counter() - start,
            cost=here,
            offset=math.sqrt(max(0.0, *removed) / (2 * here or 1.0)),
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
        self._evaluations += 1
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
