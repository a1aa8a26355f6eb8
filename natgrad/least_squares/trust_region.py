"""Levenberg–Marquardt steps in a trust region, for one small least-squares problem or many beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import mul
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.least_squares.losses import RobustLoss
from natgrad.least_squares.residuals import ResidualFunction
from natgrad.linalg import TriangularLeastSquares

# One fit by itself takes a few steps of a few microseconds: its numbers are Python's, as tensors would cost more than
# its matrices. Those of b fits beside each other are tensors [b].
Number: TypeAlias = Any  # a tensor [b], or a float
Truth: TypeAlias = Any  # a tensor [b] of booleans, or a bool

RUNNING, NOT_FINITE = -1, -2
EVALUATIONS, GTOL, FTOL, XTOL, FTOL_XTOL = 0, 1, 2, 3, 4  # why a fit has stopped, as SciPy counts

_LEAST_RADIUS = 1e-8  # of the first trust region, where the size of x, 1, is not known from x itself
_CLOSE = 0.1  # relative error of ‖Dδ‖ = radius
_NEWTON = 10  # steps for λ
_LEAST_RATIO = 1e-4  # least ratio of actual to predicted decrease of a step that is taken
_FALLS = 0.9  # of the last offset: a settled fit goes on while its offset falls so
_PATIENCE = 10
_STRETCHED = 0.2, 0.95  # between which the factor of falling steps is used
_NOISE = 4  # in units of the machine epsilon: how much the cost of a settled fit may rise by rounding
_REFUSED = 3  # of _PATIENCE: what a settled fit loses with a step that raises the cost
_CRAWLS = 10  # steps in a row that the region limits: after these a fit bends its steps
_BENT = 0.2  # of a step: the longest bend that a second derivative is good for
_RUNNING_SHARE = 0.75  # of the fits, below which those that have stopped are put aside


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
    D: Tensor  # scale of the unknowns [b n]: the trust region is ‖Dδ‖ ≤ radius
    cost: Number
    last: Tensor  # the last step, if it was taken whole [b n]
    J: Tensor = field(default_factory=lambda: torch.empty(0))  # [b m n] where it was last computed
    radius: Number = 0.0
    λ: Number = 0.0
    offset: Number = torch.inf  # ‖QQᵀf‖/‖f‖ for J = QR: the cosine between the residuals and the tangent space
    settled: Number = 0  # the rule FTOL, XTOL or both that a step has met
    stalled: Number = 0  # steps since then in which the offset did not fall; full ones count _PATIENCE
    limited: Number = 0  # steps in a row that ended on the sphere
    status: Number = RUNNING
    evaluations: Number = 1
    shortened: Number = 0  # how many trial steps had residuals that are not finite

    @staticmethod
    def start(residuals: ResidualFunction, x: Tensor, loss: RobustLoss, rules: Rules) -> Fits:
        f = residuals(x)
        D = torch.zeros_like(x) if rules.D is None else rules.D
        fits = Fits(x=x, f=f, D=D, cost=loss.cost(f), last=torch.zeros_like(x))
        if len(x) == 1:
            fits.cost = float(fits.cost)
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
        self.status = select(where & (self.status == RUNNING), status, self.status)

    def number(self, t: Tensor) -> Number:
        """A tensor [b], or the number in it, if there is one fit."""
        return t if isinstance(self.status, Tensor) else float(t)

    def norm(self, t: Tensor, scale: Tensor | None = None) -> Number:
        """‖t‖ of t [b *], or that of scale ∘ t."""
        if isinstance(self.status, Tensor):
            return torch.linalg.vector_norm(t if scale is None else scale * t, dim=-1)
        (numbers,) = t.tolist()
        return math.hypot(*numbers) if scale is None else math.hypot(*map(mul, scale.tolist()[0], numbers))


def minimise(residuals: ResidualFunction, x: Tensor, loss: RobustLoss, rules: Rules) -> Fits:
    """Minimise the cost of every fit from x [b n] (Moré 1978): δ minimises ‖Jδ + f‖ where ‖Dδ‖ ≤ radius.

    With bounds δ stays in the box: unknowns at a bound that the gradient pushes against are held, those that a step
    would take beyond a bound are put on it, and the others solved for again (Bertsekas 1982).

    A step that meets ftol or xtol settles a fit. As long as its offset falls, a settled fit goes on, to gtol: near a
    minimum the cost is flat to half of the digits, and the offset is not.
    """
    fits = whole = Fits.start(residuals, x, loss, rules)
    rows = torch.arange(len(x), device=x.device)
    every, limits = residuals, rules
    fits.stop(negated(fits.cost < torch.inf), NOT_FINITE)
    first = moved = True
    while True:
        if moved:
            model = Linearised.of(residuals, fits, loss, rules, first)
            offset = model.tangent / select(fits.cost > 0, 2 * fits.cost, 1.0) ** 0.5
            fits.stop(offset <= rules.gtol, GTOL)
            # A step that the region has limited says little about the end of a valley
            stalls = (fits.settled > 0) & negated(offset <= _FALLS * fits.offset)
            fits.stalled = fits.stalled + select(stalls, select(fits.λ > 0, 1, _PATIENCE), 0)
            fits.stop(fits.stalled >= _PATIENCE, fits.settled)
            fits.stop(offset != offset, NOT_FINITE)
            fits.offset = offset
        fits.stop(fits.evaluations >= rules.evaluations, EVALUATIONS)
        if not isinstance(fits.status, Tensor):
            if fits.status != RUNNING:
                return fits
        else:
            running = fits.status == RUNNING
            left = int(running.sum())
            if left < _RUNNING_SHARE * len(rows) or not left:
                if fits is not whole:
                    whole.put(rows, fits)
                if not left:
                    return whole
                rows, model = rows[running], model.of_rows(running)
                fits, residuals, rules = whole.of(rows), every.of(rows), limits.of(rows)
        if first:
            # Where unknowns that matter are zero, x says nothing about its size
            fits.radius = select(model.size > 0, greatest(model.size, _LEAST_RADIUS * model.unit), model.unit)
        moved = _step(residuals, fits, model, loss, rules, first)
        first = False


def _step(
    residuals: ResidualFunction, fits: Fits, model: Linearised, loss: RobustLoss, rules: Rules, first: bool
) -> bool:
    """Try one step of every fit, and return whether one was taken."""
    p, norm, fits.λ, slope, bend = model.within(fits)
    stretch = 1.0
    if rules.lower is None:
        if anywhere(fits.settled > 0):
            stretch = model.stretch(p, fits)
            p, norm, slope, bend = column(stretch) * p, stretch * norm, stretch * slope, stretch**2 * bend
        δ = p / fits.D
        trial = fits.x + δ
    else:
        p, trial = model.in_box(p, fits, rules)
        pushed = (model.problem.R @ p.unsqueeze(-1)).squeeze(-1)
        norm, slope, bend = fits.norm(p), -fits.number((pushed * model.problem.z).sum(-1)), fits.norm(pushed) ** 2
        δ = p / fits.D
    predicted = slope - 0.5 * bend
    f = residuals(trial)
    actual = fits.number(loss.decrease(fits.f, f))
    fits.limited = select(fits.λ > 0, fits.limited + 1, 0)
    running = fits.status == RUNNING
    crawls = (fits.limited >= _CRAWLS) & (abs(actual) < torch.inf) & (fits.evaluations + 1 < rules.evaluations)
    crawls = crawls & running
    bent = False
    if rules.lower is None and loss.rho is None and anywhere(crawls):
        bend_of_step = model.bend(δ, f, fits)
        crawls = crawls & (fits.norm(bend_of_step) <= _BENT * norm)
        if anywhere(crawls):
            around = trial + bend_of_step / fits.D
            beside = residuals(around)
            gain = fits.number(loss.decrease(fits.f, beside))
            fits.evaluations = fits.evaluations + crawls
            bent = crawls & (gain > actual)
            fits.limited = select(crawls & negated(bent), 0, fits.limited)  # it is not for a bend that the fit crawls
            actual, trial, f = select(bent, gain, actual), select(bent, around, trial), select(bent, beside, f)
    finite = abs(actual) < torch.inf
    actual = select(finite, actual, -torch.inf)

    length = (2 * fits.cost) ** 0.5
    rounding = _NOISE * torch.finfo(p.dtype).eps * length * (length + model.terms)
    small = greatest(rules.ftol * fits.cost, rounding)
    # Without damping too: with enough of it any step gains little
    by_f = (0.5 * model.tangent**2 <= small) & (predicted <= small) & (abs(actual) <= small)
    by_x = norm <= rules.xtol * (model.size + rules.xtol * model.unit)
    met = select(by_f & by_x, FTOL_XTOL, select(by_f, FTOL, select(by_x, XTOL, 0)))
    fits.settled = select(fits.settled > 0, fits.settled, met)

    ratio = actual / greatest(predicted, torch.finfo(p.dtype).tiny)
    taken = running & ((ratio > _LEAST_RATIO) | ((fits.settled > 0) & (actual >= -rounding)))
    fits.evaluations = fits.evaluations + running
    fits.shortened = fits.shortened + (running & negated(finite))
    refused = negated(taken) & (fits.settled > 0)
    fits.stalled = fits.stalled + select(refused, _REFUSED, 0)
    fits.stop(fits.stalled >= _PATIENCE, fits.settled)
    fits.last = select(taken & (stretch == 1.0) & negated(bent), δ, torch.zeros_like(δ))

    # The parabola through the slope and the two costs has its minimum at this share of the step
    shrink = select(
        actual < 0, greatest(0.1, least(0.5, 0.5 * slope / greatest(slope - actual, torch.finfo(p.dtype).tiny))), 0.5
    )
    radius = least(fits.radius, norm) if first else fits.radius
    noise = taken & (predicted <= rounding)  # a ratio of rounding errors is no reason for a smaller region
    poor, good = (ratio <= 0.25) & negated(noise), (ratio >= 0.75) | (fits.λ == 0)
    # A settled fit has no patience for the same step again, which a region that still holds it would lead to
    reach = least(radius, select(refused, norm, 10 * norm))
    fits.radius = select(poor, shrink * reach, select(good, 2 * norm, radius))
    fits.λ = select(poor, fits.λ / shrink, select(good, 0.5 * fits.λ, fits.λ))
    if not anywhere(taken):
        return False
    if isinstance(taken, Tensor) and bool(taken.all()):
        taken = True
    fits.x, fits.f = select(taken, trial, fits.x), select(taken, f, fits.f)
    fits.cost = fits.number(loss.cost(fits.f))
    return True


@final
@dataclass(frozen=True)
class Linearised:
    """min ‖J D⁻¹p + f‖ at x, over the free unknowns, as ‖Rp + z‖."""

    problem: TriangularLeastSquares
    free: Tensor | None  # the unknowns that are not at a bound that the gradient pushes against [b n]
    gauss_newton: Tensor  # its minimum [b n]; not finite where R is singular
    tangent: Number  # ‖QQᵀf‖
    size: Number  # ‖Dx‖
    unit: Number  # ‖D‖
    terms: Number  # the size of the terms of which residuals are differences: that of all Jᵢxᵢ

    @cached_property
    def _decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """U, s and Vᵀ of R."""
        return _singular(self.problem.R)

    @staticmethod
    def of(residuals: ResidualFunction, fits: Fits, loss: RobustLoss, rules: Rules, first: bool) -> Linearised:
        fits.J = residuals.jacobian(fits.x, fits.f)
        f, J = loss.weighted(fits.f, fits.J)
        QR = TriangularLeastSquares.of(J, f)
        norms = torch.linalg.vector_norm(QR.R, dim=-2)  # of the columns of J
        if rules.D is None:
            fits.D = torch.maximum(fits.D, norms)
            if first:
                fits.D = torch.where(fits.D > 0, fits.D, 1.0)
        problem = TriangularLeastSquares(QR.R / fits.D.unsqueeze(-2), QR.z)
        size, unit, terms = fits.norm(fits.x, fits.D), fits.norm(fits.D), fits.norm(fits.x, norms)
        m, n = J.shape[-2:]
        if rules.lower is None or rules.upper is None:
            if m >= n and _is_regular(problem.R):
                return Linearised(problem, None, problem.undamped(), fits.norm(problem.z), size, unit, terms)
            step, tangent = _pseudo_inverse(problem)
            return Linearised(problem, None, step, fits.norm(tangent), size, unit, terms)
        g = (problem.R.mT @ problem.z.unsqueeze(-1)).squeeze(-1)
        free = ~(((fits.x <= rules.lower) & (g > 0)) | ((fits.x >= rules.upper) & (g < 0)))
        held = TriangularLeastSquares(problem.R * free.unsqueeze(-2), problem.z)
        step, tangent = _pseudo_inverse(held)
        return Linearised(held, free, step, fits.norm(tangent), size, unit, terms)

    def of_rows(self, rows: Tensor) -> Linearised:
        """Those of some of the fits."""
        return Linearised(
            TriangularLeastSquares(self.problem.R[rows], self.problem.z[rows]),
            None if self.free is None else self.free[rows],
            *(t[rows] for t in (self.gauss_newton, self.tangent, self.size, self.unit, self.terms)),
        )

    def within(self, fits: Fits) -> tuple[Tensor, Number, Number, Number, Number]:
        """p = −(RᵀR + λ)⁻¹Rᵀz with ‖p‖ ≤ radius, its norm, λ, −⟨z, Rp⟩ and ‖Rp‖²."""
        p = self.gauss_newton
        norm = fits.norm(p)
        outside = negated(norm <= (1 + _CLOSE) * fits.radius)
        if not anywhere(outside):
            return p, norm, 0.0 * norm, self.tangent**2, self.tangent**2
        R, z = self.problem.R, self.problem.z
        if not isinstance(outside, Tensor):
            return _on_sphere(self._decomposed, z, fits.radius, fits.λ)
        rows = outside.nonzero().squeeze(-1)
        inside = p, norm, torch.zeros_like(norm), self.tangent**2, self.tangent**2
        limited = _on_sphere(_singular(R[rows]), z[rows], fits.radius[rows], fits.λ[rows])
        return tuple(a.index_copy(0, rows, b) for a, b in zip(inside, limited, strict=True))

    def bend(self, δ: Tensor, f: Tensor, fits: Fits) -> Tensor:
        """Half of the acceleration D a of the curve that a step δ starts along, in a valley that bends [b n].

        (JᵀJ + λD²)a = −Jᵀr″ with the second derivative r″ = 2(f(x + δ) − f(x) − Jδ) of the residuals along the step
        (Transtrum and Sethna 2012).
        """
        second = f - fits.f - (fits.J @ δ.unsqueeze(-1)).squeeze(-1)
        pulled = (second.unsqueeze(-2) @ fits.J).squeeze(-2) / fits.D
        T = self.problem.damped(torch.ones_like(δ) * column(fits.λ**0.5)).triangle
        return -torch.cholesky_solve(pulled.unsqueeze(-1), T, upper=True).squeeze(-1)

    def stretch(self, p: Tensor, fits: Fits) -> Number:
        """1/(1 − q) for a settled fit: in the end steps fall by one factor q, and p/(1 − q) is the sum of all to come.

        q is the part of p along the last step, if that was not stretched itself (Aitken 1926).
        """
        last = fits.D * fits.last
        square = fits.norm(last) ** 2
        q = fits.number((p * last).sum(-1)) / select(square > 0, square, 1.0)
        falls = (fits.settled > 0) & (fits.λ == 0) & (abs(q) > _STRETCHED[0]) & (abs(q) < _STRETCHED[1])
        return select(falls, 1 / (1 - least(q, _STRETCHED[1])), 1.0 + 0.0 * q)

    def in_box(self, p: Tensor, fits: Fits, rules: Rules) -> tuple[Tensor, Tensor]:
        """The step in the box, and where it leads."""
        assert rules.lower is not None
        assert rules.upper is not None
        assert self.free is not None
        low, high = (rules.lower - fits.x) * fits.D, (rules.upper - fits.x) * fits.D
        root, free = column(greatest(fits.λ**0.5, p.shape[-1] * torch.finfo(p.dtype).eps)), self.free
        R, z = self.problem.R, self.problem.z
        for _ in range(p.shape[-1]):
            put = torch.minimum(torch.maximum(p, low), high)
            if bool((put == p).all()):
                break
            free = free & (put == p)
            held = torch.where(free, 0.0, put)
            rest = TriangularLeastSquares(R * free.unsqueeze(-2), z + (R @ held.unsqueeze(-1)).squeeze(-1))
            p = torch.where(free, rest.damped(torch.where(free, root, 1.0)).step, held)
        p = torch.minimum(torch.maximum(p, low), high)
        trial = torch.where(p <= low, rules.lower, torch.where(p >= high, rules.upper, fits.x + p / fits.D))
        return p, torch.minimum(torch.maximum(trial, rules.lower), rules.upper)


def _is_regular(R: Tensor) -> bool:
    """Whether no pivot is rounding, in any of the fits."""
    pivots = R.diagonal(dim1=-2, dim2=-1)
    rounding = R.shape[-1] * torch.finfo(R.dtype).eps
    if len(pivots) == 1:
        sizes = [abs(v) for v in pivots[0].tolist()]
        return min(sizes) > rounding * max(sizes)
    pivots = pivots.abs()
    return bool((pivots.amin(-1) > rounding * pivots.amax(-1)).all())


def _singular(R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, s and Vᵀ of R, with zeros for the singular values that are rounding, and for all if R is not finite."""
    rounding = R.shape[-1] * torch.finfo(R.dtype).eps
    if len(R) == 1 and math.isfinite(float(R.sum())):
        U, s, Vt = torch.linalg.svd(R, full_matrices=False)
        return U, torch.threshold(s, rounding * float(s[0, 0]), 0.0), Vt
    finite = R.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    U, s, Vt = torch.linalg.svd(torch.where(finite, R, 0.0), full_matrices=False)
    return U, torch.where(s > rounding * s[..., :1], s, 0.0), Vt


def _pseudo_inverse(problem: TriangularLeastSquares) -> tuple[Tensor, Tensor]:
    """The shortest p that minimises ‖Rp + z‖ [b n], and the part Uᵀz of z [b k] that it reaches."""
    U, s, Vt = _singular(problem.R)
    inside = torch.where(s > 0, (problem.z.unsqueeze(-2) @ U).squeeze(-2), 0.0)
    inside = inside + 0.0 * problem.R.sum((-1, -2)).unsqueeze(-1)  # NaN, if R is not finite
    return -((inside / torch.where(s > 0, s, 1.0)).unsqueeze(-2) @ Vt).squeeze(-2), inside


def _on_sphere(
    decomposed: tuple[Tensor, Tensor, Tensor], z: Tensor, radius: Number, λ: Number
) -> tuple[Tensor, Number, Number, Number, Number]:
    """As ``within``, with ‖p‖ = radius, or with the shortest minimum if that is shorter, and λ = 0.

    Newton steps for 1/‖p(λ)‖ = 1/radius (Moré 1978). They cost nothing with the singular values s of R.
    """
    U, s, Vt = decomposed
    c = s * (z.unsqueeze(-2) @ U).squeeze(-2)
    single = not isinstance(radius, Tensor)
    squares = [a * a for a in (s[0].tolist() if single else s.unbind(-1))]
    loads = c[0].tolist() if single else c.unbind(-1)

    def length(λ: Number) -> tuple[Number, Number]:
        """‖p(λ)‖ and its derivative."""
        square, slope = 0.0 * λ, 0.0 * λ
        for a, b in zip(squares, loads, strict=True):
            a = select(a > 0, a + λ, 1.0)  # where s is zero, so is c
            square, slope = square + (b / a) ** 2, slope - b * b / a**3
        norm = square**0.5
        return norm, slope / select(norm > 0, norm, 1.0)

    norm, slope = length(0.0 * radius)
    outside = norm > (1 + _CLOSE) * radius
    low = select(outside, (radius - norm) / select(slope < 0, slope, -1.0), 0.0 * radius)
    high = sum(b * b for b in loads) ** 0.5 / radius
    λ = select((λ > low) & (λ < high), λ, greatest(1e-3 * high, (low * high) ** 0.5))
    λ = select(outside, λ, 0.0 * radius)
    for _ in range(_NEWTON):
        norm, slope = length(λ)
        far = outside & (abs(norm - radius) > _CLOSE * radius)
        if not anywhere(far):
            break
        newton = (norm - radius) / select(slope < 0, slope, -1.0)
        high = select(norm < radius, least(high, λ), high)
        low = greatest(low, λ - newton)
        λ = select(far, least(greatest(λ - norm / radius * newton, low), high), λ)
    t = [b / select(a > 0, a + λ, 1.0) for a, b in zip(squares, loads, strict=True)]
    drop = sum(b * c for b, c in zip(loads, t, strict=True))
    bend = sum(a * c * c for a, c in zip(squares, t, strict=True))
    rows = z.new_tensor([t]) if single else torch.stack(t, -1)
    return -(rows.unsqueeze(-2) @ Vt).squeeze(-2), norm, λ, drop, bend


# Arithmetic with one number for each fit.


def select(condition: Truth, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds; rows of tensors [b *], if those are what there is to select."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    rows = max(t.ndim for t in (condition, yes, no) if isinstance(t, Tensor))
    return torch.where(condition.view(-1, *(1,) * (rows - 1)), yes, no)


def least(a: Number, b: Number) -> Number:
    return _both(torch.minimum, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else min(a, b)


def greatest(a: Number, b: Number) -> Number:
    return _both(torch.maximum, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else max(a, b)


def _both(function: Callable[[Tensor, Tensor], Tensor], a: Number, b: Number) -> Tensor:
    like = a if isinstance(a, Tensor) else b
    return function(*(torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in (a, b)))


def negated(condition: Truth) -> Truth:
    return ~condition if isinstance(condition, Tensor) else not condition


def anywhere(condition: Truth) -> bool:
    return bool(condition.any()) if isinstance(condition, Tensor) else condition


def column(a: Number) -> Any:
    """[b 1], to multiply rows with."""
    return a.unsqueeze(-1) if isinstance(a, Tensor) else a
