"""Levenberg–Marquardt steps in a trust region, for one small least-squares problem or many beside each other."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.accelerate.temporaries import RUNNING_SHARE
from natgrad.least_squares.arithmetic import (
    Number,
    Vector,
    anywhere,
    displaced,
    greatest,
    least,
    negated,
    over,
    scaled,
    select,
    times,
    zeros,
)
from natgrad.least_squares.fits import (
    EVALUATIONS,
    FTOL,
    FTOL_XTOL,
    GTOL,
    NOT_FINITE,
    RUNNING,
    XTOL,
    Fits,
    Rules,
)
from natgrad.least_squares.linearised import Linearised, Triangles
from natgrad.least_squares.losses import RobustLoss
from natgrad.least_squares.residuals import ResidualFunction

_LEAST_RADIUS = 1e-8  # of the first trust region, where the size of x, 1, is not known from x itself
_LEAST_RATIO = 1e-4  # least ratio of actual to predicted decrease of a step that is taken
_FALLS = 0.9  # of the least offset: a settled fit goes on while its offset falls so
_PATIENCE = 10
_WHOLE = 5  # of _PATIENCE: what a settled fit loses with a step without damping after which the offset did not fall
_STEADY = 0.2  # the least |q| of steps that fall by one factor q
_FACTORS = -4.0, 0.95  # between which q is used; below −1 whole steps swing to and fro, and grow
_NOISE = 4  # in units of the machine epsilon: how much the cost of a settled fit may rise by rounding
_REFUSED = 3  # of _PATIENCE: what a settled fit loses with a step that raises the cost
_CRAWLS = 10  # steps in a row that the region limits: after these a fit bends its steps
_BENT = 0.2  # of a step: the longest bend that a second derivative is good for


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
            fits.J = residuals.jacobian(fits.x, fits.f)
            model = Linearised.of(*loss.weighted(fits.f, fits.J), fits, rules)
            fits.D = model.D
            offset = model.tangent / select(fits.cost > 0, 2 * fits.cost, 1.0) ** 0.5
            fits.stop(offset <= rules.gtol, GTOL)
            # A step that the region has limited says little about the end of a valley
            falls = offset <= _FALLS * fits.offset
            noise = 0.5 * model.tangent * model.tangent <= _rounding(fits, model)
            lost = select(fits.λ > 0, 1, select(noise, _PATIENCE, _WHOLE))
            fits.stalled = select(falls, 0, fits.stalled + select(fits.settled > 0, lost, 0))
            fits.stop(fits.stalled >= _PATIENCE, fits.settled)
            fits.stop(offset != offset, NOT_FINITE)
            fits.offset = select(falls | (fits.settled == 0), offset, fits.offset)
        fits.stop(fits.evaluations >= rules.evaluations, EVALUATIONS)
        if not isinstance(fits.status, Tensor):
            if fits.status != RUNNING:
                return fits
        else:
            running = fits.status == RUNNING
            left = int(running.sum())
            if left < RUNNING_SHARE * len(rows) or not left:
                if fits is not whole:
                    whole.put(rows, fits)
                if not left:
                    return whole
                assert isinstance(model, Triangles)
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
    if anywhere(fits.settled > 0):
        stretch = _stretch(p, fits)
        p, norm, slope, bend = scaled(stretch, p), stretch * norm, stretch * slope, stretch**2 * bend
    if rules.lower is None:
        δ = over(p, fits.D)
        trial = displaced(fits.x, δ)
    else:
        assert isinstance(model, Triangles)
        p, trial = model.in_box(p, fits, rules)
        pushed = (model.problem.R @ p.unsqueeze(-1)).squeeze(-1)
        norm, slope, bend = fits.norm(p), -fits.inner(pushed, model.problem.z), fits.norm(pushed) ** 2
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
        second = f - fits.f - ((trial - fits.x).unsqueeze(-2) @ fits.J.mT).squeeze(-2)
        bend_of_step = model.bend(second, fits)
        crawls = crawls & (fits.norm(bend_of_step) <= _BENT * norm)
        if anywhere(crawls):
            around = displaced(trial, over(bend_of_step, fits.D))
            beside = residuals(around)
            gain = fits.number(loss.decrease(fits.f, beside))
            fits.evaluations = fits.evaluations + crawls
            bent = crawls & (gain > actual)
            fits.limited = select(crawls & negated(bent), 0, fits.limited)  # it is not for a bend that the fit crawls
            actual, trial, f = select(bent, gain, actual), select(bent, around, trial), select(bent, beside, f)
    finite = abs(actual) < torch.inf
    actual = select(finite, actual, -torch.inf)

    rounding = _rounding(fits, model)
    small = greatest(rules.ftol * fits.cost, rounding)
    # Without damping too: with enough of it any step gains little
    by_f = (0.5 * model.tangent**2 <= small) & (predicted <= small) & (abs(actual) <= small)
    by_x = norm <= rules.xtol * (model.size + rules.xtol * model.unit)
    met = select(by_f & by_x, FTOL_XTOL, select(by_f, FTOL, select(by_x, XTOL, 0)))
    fits.settled = select(fits.settled > 0, fits.settled, met)

    ratio = actual / greatest(predicted, torch.finfo(f.dtype).tiny)
    taken = running & ((ratio > _LEAST_RATIO) | ((fits.settled > 0) & (actual >= -rounding)))
    fits.evaluations = fits.evaluations + running
    fits.shortened = fits.shortened + (running & negated(finite))
    refused = negated(taken) & (fits.settled > 0)
    fits.stalled = fits.stalled + select(refused, _REFUSED, 0)
    fits.stop(fits.stalled >= _PATIENCE, fits.settled)
    fits.last = select(taken & (stretch == 1.0) & negated(bent), δ, zeros(δ))

    # The parabola through the slope and the two costs has its minimum at this share of the step
    shrink = select(
        actual < 0, greatest(0.25, least(0.5, 0.5 * slope / greatest(slope - actual, torch.finfo(f.dtype).tiny))), 0.5
    )
    radius = least(fits.radius, norm) if first else fits.radius
    noise = taken & (predicted <= rounding)  # a ratio of rounding errors is no reason for a smaller region
    poor, good = (ratio <= 0.25) & negated(noise), (ratio >= 0.75) | (fits.λ == 0)
    # A settled fit has no patience for the same step again, which a region that still holds it would lead to
    reach = least(radius, select(refused, norm, 10 * norm))
    radius = select(poor, shrink * reach, select(good, 2 * norm, radius))
    eps = torch.finfo(f.dtype).eps
    # Without xtol steps that no longer move x may follow each other, and λ ~ 1/radius would overflow
    fits.radius = greatest(radius, eps**2 * (model.size + eps * model.unit))
    fits.λ = select(poor, fits.λ / shrink, select(good, 0.5 * fits.λ, fits.λ))
    if not anywhere(taken):
        return False
    if isinstance(taken, Tensor) and bool(taken.all()):
        taken = True
    fits.x, fits.f = select(taken, trial, fits.x), select(taken, f, fits.f)
    fits.cost = fits.number(loss.cost(fits.f))
    return True


def _stretch(p: Vector, fits: Fits) -> Number:
    """1/(1 − q) for a settled fit: in the end steps fall by one factor q, and p/(1 − q) is the sum of all to come.

    q is the part of p along the last step, if that was not stretched itself (Aitken 1926). Where large residuals bend
    away from the model, steps swing, with q < 0, and grow if q < −1: then this is what makes them fall.
    """
    last = times(fits.D, fits.last)
    square = fits.norm(last) ** 2
    q = fits.inner(p, last) / select(square > 0, square, 1.0)
    low, high = _FACTORS
    steady = (fits.settled > 0) & (fits.λ == 0) & (abs(q) > _STEADY) & (q > low) & (q < high)
    return select(steady, 1 / (1 - least(q, high)), 1.0 + 0.0 * q)


def _rounding(fits: Fits, model: Linearised) -> Number:
    """What the cost may change by rounding."""
    length = (2 * fits.cost) ** 0.5
    return _NOISE * torch.finfo(fits.f.dtype).eps * length * (length + model.terms)
