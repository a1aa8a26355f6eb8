"""Levenberg–Marquardt steps in a trust region, for many small least-squares problems beside each other.

One fit is a batch of one. Numbers of the fits are tensors [b], and their vectors [b n].
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from natgrad.fit.fits import LITTLE, Fits, Rules
from natgrad.fit.linearised import Linearised
from natgrad.fit.losses import RobustLoss
from natgrad.fit.residual_function import ResidualFunction
from natgrad.fit.result import Status

_SURE = 0.1  # of the size of x: a longer first step is taken only if its model is right; it could mix up two peaks
_RIGHT = 0.1  # how far the ratio of actual to predicted decrease may be from 1 where the model is right
_LEAST_RADIUS = 1e-8  # of the first trust region, where the size of x, 1, is not known from x itself
_LEAST_RATIO = 1e-4  # least ratio of actual to predicted decrease of a step that is taken
_FALLS = 0.9  # of the least offset: a settled fit goes on while its offset falls so
_PATIENCE = 10
_WHOLE = 5  # of _PATIENCE: what a settled fit loses with a step without damping after which the offset did not fall
_STEADY = 0.2  # the least |q| of steps that fall by one factor q
_FACTORS = -4.0, 0.95  # between which q is used; below −1 whole steps swing to and fro, and grow
_REFUSED = 3  # of _PATIENCE: what a settled fit loses with a step that raises the cost
_STILL = 10  # steps in a row that gain little: then so do all that follow, in a valley that leads to infinity
_CRAWLS = 10  # steps in a row that the region limits: after these a fit bends its steps
_BENT = 0.2  # of a step: the longest bend that a second derivative is good for


def minimise(
    residuals: ResidualFunction,
    x: Tensor,
    loss: RobustLoss,
    rules: Rules,
    watch: Callable[[Fits, int], bool] | None = None,
) -> Fits:
    """Minimise the cost of every fit from x [b n] (Moré 1978): δ minimises ‖Jδ + f‖ where ‖Dδ‖ ≤ radius.

    With bounds δ stays in the box: unknowns at a bound that the gradient pushes against are held, those that a step
    would take beyond a bound are put on it, and the others solved for again (Bertsekas 1982).

    A step that meets ftol or xtol settles a fit. As long as its offset falls, a settled fit goes on, to gtol: near a
    minimum the cost is flat to half of the digits, and the offset is not. ``watch`` sees one fit after every step that
    was taken, and stops it by returning True.
    """
    fits = whole = Fits.start(residuals, x, loss, rules)
    rows = torch.arange(len(x), device=x.device)
    if not bool((fits.cost < torch.inf).all()):
        fits.stop(~(fits.cost < torch.inf), Status.NOT_FINITE)
    trial, taken, jacobians = fits.x, None, 0
    for step in count():
        if taken is None or bool(taken.any()):
            J = residuals.jacobian(trial)
            fits.J = J if taken is None else torch.where(taken.view(-1, 1, 1), J, fits.J)
            jacobians += 1
            model = Linearised.at(*loss.weighted(fits.f, fits.J), fits, rules)
            fits.D = model.D
            if step and watch is not None and watch(fits, jacobians - 1):
                fits.stop(fits.status == Status.RUNNING, Status.STOPPED)
            _judge(fits, model, rules)
        else:
            model.inside = False  # of the regions as they were
        if residuals.left <= 0:
            fits.stop(fits.status == Status.RUNNING, Status.SPENT)
        if fits.any_stopped:
            running = fits.status == Status.RUNNING
            fits.nfev = torch.full_like(fits.nfev, residuals.calls)
            fits.njev = torch.full_like(fits.njev, jacobians)
            if fits is not whole:
                ended = (~running).nonzero().squeeze(-1)
                whole.put(rows[ended], fits, ended)
            going = running.nonzero().squeeze(-1)
            if not len(going):
                return whole
            rows, model, fits = rows[going], model.of(going), fits.of(going)
            residuals, rules = residuals.of(going), rules.of(going)
        if step == 0:
            # Where unknowns that matter are zero, x says nothing about its size
            fits.radius = torch.where(model.size > 0, model.size.maximum(_LEAST_RADIUS * model.unit), model.unit)
            model.inside = False
        trial, taken = _step(residuals, fits, model, loss, rules, step)
    raise AssertionError  # count() has no end


def _judge(fits: Fits, model: Linearised, rules: Rules) -> None:
    """Stop the fits that a rule stops where they are."""
    if not model.inside:
        above = model.tangent > rules.gtol * model.length
        if not bool(above.all()):
            fits.stop(~above, torch.where(model.tangent.isnan(), Status.NOT_FINITE, Status.GTOL))
    if fits.any_settled:
        offset = model.offset
        falls, settled = offset <= _FALLS * fits.offset, fits.settled > 0
        if bool(falls.all()):
            fits.offset, fits.stalled = offset, torch.zeros_like(fits.stalled)
            return
        # A step that the region has limited says little about the end of a valley
        lost = torch.where(fits.λ > 0, 1, torch.where(model.promise <= model.rounding, _PATIENCE, _WHOLE))
        fits.stalled = torch.where(falls, 0, fits.stalled + settled * lost)
        fits.stop(fits.stalled >= _PATIENCE, fits.settled)
        fits.offset = torch.where(falls | ~settled, offset, fits.offset)


def _step(
    residuals: ResidualFunction, fits: Fits, model: Linearised, loss: RobustLoss, rules: Rules, step: int
) -> tuple[Tensor, Tensor | None]:
    """Try one step of every fit: where it leads, and which fits take it; None: all do."""
    δ, norm, λ, predicted = model.within(fits.radius)
    fits.λ = torch.zeros_like(norm) if λ is None else λ
    stretch = _stretch(δ, fits) if fits.any_settled else None
    if stretch is not None:
        δ, norm, predicted = stretch.unsqueeze(-1) * δ, stretch * norm, stretch * (2 - stretch) * predicted
    if rules.lower is None:
        trial = fits.x + δ
    else:
        p, trial = model.in_box(δ, fits.x, fits.λ, rules)
        norm, predicted = model.measured(p)
        δ = p / fits.D
    f = residuals(trial)
    actual = loss.decrease(fits.f, f)
    if model.inside and not fits.any_settled and model.gains(actual, fits.cost, rules):  # as most steps are
        if fits.any_limited:
            fits.any_limited, fits.limited, fits.still = False, fits.settled, fits.settled  # zeros
        fits.x, fits.f, fits.cost, fits.radius = trial, f, loss.cost(f), 2 * norm
        return trial, None
    eps, tiny = torch.finfo(f.dtype).eps, torch.finfo(f.dtype).tiny
    actual = actual.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    small = (rules.ftol * fits.cost).maximum(model.rounding)
    limited = fits.λ > 0
    if λ is not None or fits.any_limited:
        fits.any_limited = λ is not None
        fits.limited = (fits.limited + 1) * limited
        if step + 1 >= _CRAWLS and rules.lower is None and loss.rho is None and residuals.left > 0:
            crawls = (fits.limited >= _CRAWLS) & (actual > -torch.inf)
            if bool(crawls.any()):
                f, trial, actual = _bend(residuals, fits, model, loss, trial, f, actual, _BENT * norm, crawls)
        fits.still = (fits.still + 1) * ((predicted.maximum(actual.abs()) <= small) & limited)
        if rules.ftol > 0 and step >= _STILL:
            fits.stop(fits.still >= _STILL, Status.FTOL)

    ratio = actual / predicted.clamp(min=tiny)
    # What the cost falls by without damping: with enough of it any step gains little
    by_f = model.promise.maximum(actual.abs()) <= small
    by_x = norm <= rules.xtol * model.size.add(model.unit, alpha=rules.xtol)
    met = by_f | by_x
    radius = torch.where((ratio >= 0.75) | ~limited, _grown(norm, actual, predicted), fits.radius)
    taken, poor = ratio > _LEAST_RATIO, ratio <= LITTLE
    if fits.any_settled or bool(met.any()):
        if not fits.any_settled:
            fits.any_settled, fits.offset = True, model.offset
        both = Status.FTOL_XTOL if rules.ftol > 0 else Status.XTOL  # without ftol, by_f is rounding
        settled, rule = fits.settled > 0, torch.where(by_f, torch.where(by_x, both, Status.FTOL), Status.XTOL * by_x)
        fits.settled = torch.where(settled, fits.settled, rule)
        settled = fits.settled > 0
        taken = taken | (settled & (actual >= -model.rounding))
        poor = poor & ~(taken & (predicted <= model.rounding))  # rounding errors are no reason for a smaller region
        plain = taken & ~limited if stretch is None else taken & ~limited & (stretch == 1)
        fits.last = torch.where(plain.unsqueeze(-1), δ, 0.0)
    if bool(poor.any()):
        # Without xtol steps that no longer move x may follow each other, and λ ~ 1/radius would overflow
        least = eps**2 * (model.size + eps * model.unit)
        # A settled fit has no patience for the same step again, which a region that still holds it would lead to
        reach = fits.radius.minimum(torch.where(fits.settled > 0, norm, 10 * norm))
        radius = torch.where(poor, (torch.where(actual < 0, 0.25, 0.5) * reach).maximum(least), radius)
    if step == 0:
        unsure = (norm > 1.1 * _SURE * fits.radius) & ((ratio - 1).abs() > _RIGHT)
        taken, radius = taken & ~unsure, torch.where(unsure, _SURE * fits.radius, radius)
    fits.radius = radius
    if bool(taken.all()):
        fits.x, fits.f, fits.cost = trial, f, loss.cost(f)
        return trial, None
    fits.shortened = fits.shortened + (actual == -torch.inf)
    if fits.any_settled:
        fits.stalled = fits.stalled + _REFUSED * ((fits.settled > 0) & ~taken)
        fits.stop(fits.stalled >= _PATIENCE, fits.settled)
    rows = taken.unsqueeze(-1)
    fits.x, fits.f = torch.where(rows, trial, fits.x), torch.where(rows, f, fits.f)
    fits.cost = loss.cost(fits.f)
    return trial, taken


def _grown(norm: Tensor, actual: Tensor, predicted: Tensor) -> Tensor:
    """The region after a good step: twice as long as that, or ten times, if the model is right."""
    right = (actual - predicted).abs_() <= _RIGHT * predicted
    return (norm * right).mul_(8).add_(norm, alpha=2)


def _bend(
    residuals: ResidualFunction,
    fits: Fits,
    model: Linearised,
    loss: RobustLoss,
    trial: Tensor,
    f: Tensor,
    actual: Tensor,
    longest: Tensor,
    crawls: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where steps lead, bent if that is lower: f, the trial point and the decrease."""
    second = f - fits.f - (fits.J @ (trial - fits.x).unsqueeze(-1)).squeeze(-1)
    bend = model.bend(second, fits)
    crawls = crawls & (torch.linalg.vector_norm(bend, dim=-1) <= longest)
    if not bool(crawls.any()):
        return f, trial, actual
    around = trial + bend / fits.D
    beside = residuals(around)
    gain = loss.decrease(fits.f, beside)
    bent = crawls & (gain > actual)
    fits.limited = torch.where(crawls & ~bent, 0, fits.limited)  # it is not for a bend that the fit crawls
    if bool(bent.all()):
        return beside, around, gain
    rows = bent.unsqueeze(-1)
    return torch.where(rows, beside, f), torch.where(rows, around, trial), torch.where(bent, gain, actual)


def _stretch(δ: Tensor, fits: Fits) -> Tensor | None:
    """1/(1 − q) for a settled fit: in the end steps fall by one factor q, and δ/(1 − q) is the sum of all to come.

    q is the part of Dδ along the last step, if that was not stretched itself (Aitken 1926). Where large residuals bend
    away from the model, steps swing, with q < 0, and grow if q < −1: then this is what makes them fall.
    None: for no fit.
    """
    last = fits.D * fits.last
    q = (fits.D * δ * last).sum(-1) / last.square().sum(-1)  # NaN, which no comparison holds for, without a last step
    low, high = _FACTORS
    steady = (q > low) & (q < high) & (q.abs() > _STEADY)
    if not bool(steady.any()):
        return None
    return 1 / (1 - torch.where(steady & (fits.settled > 0) & (fits.λ == 0), q, 0.0))
