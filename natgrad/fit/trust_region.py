"""Levenberg–Marquardt steps in a trust region, for many small least-squares problems beside each other.

One fit is a batch of one. Numbers of the fits are tensors [b], and their vectors [b n].
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from natgrad.fit.fits import Fits, Rules
from natgrad.fit.linearised import Linearised
from natgrad.fit.losses import RobustLoss
from natgrad.fit.residual_function import ResidualFunction
from natgrad.fit.result import Status
from natgrad.fit.triangle import TriangularLeastSquares

_SURE = 0.1  # of the size of x: a longer first step is taken only if its model is right; it could mix up two peaks
_RIGHT = 0.1  # how far the ratio of actual to predicted decrease may be from 1 where the model is right
_LEAST_RADIUS = 1e-8  # of the first trust region, where the size of x, 1, is not known from x itself
_LEAST_RATIO = 1e-4  # least ratio of actual to predicted decrease of a step that is taken
_POOR, _GOOD = 0.25, 0.75  # ratios below which a region shrinks, and above which it grows
_FALLS = 0.9  # of the least offset: a settled fit goes on while its offset falls so
_PATIENCE = 10
_WHOLE = 5  # of _PATIENCE: what a settled fit loses with a step without damping after which the offset did not fall
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
    fits.stop(~(fits.cost < torch.inf), Status.NOT_FINITE)
    rows = torch.arange(len(x), device=x.device)
    trial, taken, jacobians = x, rows >= 0, 0
    for step in count():
        if bool(taken.any()):
            J = residuals.jacobian(trial)
            fits.J = _chosen(taken.view(-1, 1, 1), J, fits.J)
            jacobians += 1
            model = Linearised.at(*loss.weighted(fits.f, fits.J), fits, rules)
            fits.D = model.D
            if step and watch is not None and watch(fits, jacobians - 1):
                fits.stop(rows >= 0, Status.STOPPED)
        _judge(fits, model, rules)
        if residuals.left <= 0:
            fits.stop(rows >= 0, Status.SPENT)
        running = fits.status == Status.RUNNING
        if not bool(running.all()):
            fits.nfev = torch.full_like(fits.nfev, residuals.calls.count)
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
        trial, taken = _step(residuals, fits, model, loss, rules, step)
    raise AssertionError  # count() has no end


def _chosen(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return new if bool(rows.all()) else torch.where(rows, new, old)


def _judge(fits: Fits, model: Linearised, rules: Rules) -> None:
    """Stop the fits that a rule stops where they are."""
    offset, settled = model.offset, fits.settled > 0
    above = offset > rules.gtol
    if not bool(above.all()):
        fits.stop(~above, torch.where(offset.isnan(), Status.NOT_FINITE, Status.GTOL))
    if bool(settled.any()):
        waits = settled & ~(offset <= _FALLS * fits.offset)
        # A step that the region has limited says little about the end of a valley
        lost = torch.where(fits.λ > 0, 1, torch.where(model.promise <= model.rounding, _PATIENCE, _WHOLE))
        fits.stalled = torch.where(waits, fits.stalled + lost, 0)
        offset = torch.where(waits, fits.offset, offset)
        fits.stop(fits.stalled >= _PATIENCE, fits.settled)
    fits.offset = offset


def _step(
    residuals: ResidualFunction, fits: Fits, model: Linearised, loss: RobustLoss, rules: Rules, step: int
) -> tuple[Tensor, Tensor]:
    """Try one step of every fit: where it leads, and which fits take it."""
    p, fits.λ = model.within(fits.radius, fits.λ)
    norm, predicted, limited = model.norm, model.promise, fits.λ > 0
    crawls = bool(limited.any())
    if rules.lower is None:
        trial = fits.x + p / model.D
    else:
        p, trial = model.in_box(p, fits.λ, fits.x, rules)
    if crawls or rules.lower is not None:
        norm, predicted = torch.linalg.vector_norm(p, dim=-1), model.QR.decrease(p)
    f = residuals(trial)
    actual = _decrease(loss, fits.f, f)
    fits.limited = (fits.limited + 1) * limited
    if crawls and rules.lower is None and loss.rho is None and residuals.left > 0:
        f, trial, actual = _bent(residuals, fits, loss, p, f, trial, actual)

    eps, tiny = torch.finfo(f.dtype).eps, torch.finfo(f.dtype).tiny
    ratio = actual / predicted.clamp(min=tiny)
    taken, poor, good = ratio > _LEAST_RATIO, ratio <= _POOR, (ratio >= _GOOD) | ~limited
    small = (rules.ftol * fits.cost).maximum(model.rounding)
    # Without ftol, steps that the region makes short may gain little
    by_f = (predicted if rules.ftol > 0 else model.promise).maximum(actual.abs()) <= small
    by_x = norm <= rules.xtol * (model.size + rules.xtol * model.unit)
    met = by_f | by_x
    fits.settled = torch.zeros_like(fits.settled)
    if bool(met.any()):
        both = Status.FTOL_XTOL if rules.ftol > 0 else Status.XTOL  # without ftol, by_f is rounding
        fits.settled = torch.where(by_f, torch.where(by_x, both, Status.FTOL), Status.XTOL * by_x)
        taken = taken | (met & (actual >= -model.rounding))
        poor = poor & ~(taken & (predicted <= model.rounding))  # rounding is no reason for a smaller region
    radius = torch.where(good, 2 * norm, fits.radius)
    if bool(poor.any()):
        # Without xtol steps that no longer move x may follow each other, and λ ~ 1/radius would overflow
        least = eps**2 * (model.size + eps * model.unit)
        less = torch.where(actual < 0, 0.25, 0.5) * fits.radius.minimum(norm)
        radius = torch.where(poor, less.maximum(least), radius)
    if step == 0:
        unsure = (norm > 1.1 * _SURE * fits.radius) & ((ratio - 1).abs() > _RIGHT)
        taken, radius = taken & ~unsure, torch.where(unsure, _SURE * fits.radius, radius)
    fits.radius = radius
    if bool(taken.all()):
        fits.x, fits.f = trial, f
    else:
        rows, fits.shortened = taken.unsqueeze(-1), fits.shortened + (actual == -torch.inf)
        fits.x, fits.f = torch.where(rows, trial, fits.x), torch.where(rows, f, fits.f)
    fits.cost = loss.cost(fits.f)
    return trial, taken


def _decrease(loss: RobustLoss, here: Tensor, there: Tensor) -> Tensor:
    """What the cost falls by: −∞ where it is not finite."""
    return loss.decrease(here, there).nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def _bent(
    residuals: ResidualFunction, fits: Fits, loss: RobustLoss, p: Tensor, f: Tensor, trial: Tensor, actual: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals, trial and decrease of steps that follow a bent valley, of fits that crawl, where that is lower.

    Half of the acceleration a of the curve that a step starts along, (JᵀJ + λD²)a = −Jᵀr″, is added to it, with the
    second derivative r″ of the residuals along the step (Transtrum and Sethna 2012).
    """
    crawls = (fits.limited >= _CRAWLS) & (actual > -torch.inf)
    if not bool(crawls.any()):
        return f, trial, actual
    half = f - fits.f - (fits.J @ (p / fits.D).unsqueeze(-1)).squeeze(-1)  # of r″
    triangle = TriangularLeastSquares.of(fits.J / fits.D.unsqueeze(-2), half)
    bend = triangle.damped(fits.λ.sqrt().unsqueeze(-1).expand_as(p))
    short = torch.linalg.vector_norm(bend, dim=-1) <= _BENT * torch.linalg.vector_norm(p, dim=-1)
    around = trial + torch.where((crawls & short).unsqueeze(-1), bend, 0.0) / fits.D
    beside = residuals(around)
    gain = _decrease(loss, fits.f, beside)
    bent = crawls & (gain > actual)
    fits.limited = torch.where(crawls & ~bent, 0, fits.limited)  # it is not for a bend that the fit crawls
    rows = bent.unsqueeze(-1)
    return _chosen(rows, beside, f), _chosen(rows, around, trial), torch.where(bent, gain, actual)
