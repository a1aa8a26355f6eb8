"""Levenberg–Marquardt steps in a trust region, for many small least-squares problems beside each other.

One fit is a batch of one. Numbers of the fits are tensors [b], and their vectors [b n].
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor, as_tensor

from natgrad.fit.fits import Fits, Rules, some
from natgrad.fit.linearised import Linearised
from natgrad.fit.residual_function import ResidualFunction
from natgrad.fit.result import Status
from natgrad.fit.triangle import TriangularLeastSquares

_SURE = 0.1  # of the size of x: a longer first step is taken only if its model is right; it could mix up two peaks
_RIGHT = 0.1  # how far the ratio of actual to predicted decrease may be from 1 where the model is right
_LEAST_RADIUS = 1e-8  # of the first trust region, where the size of x, 1, is not known from x itself
_LEAST_RATIO = as_tensor(1e-4)  # least ratio of actual to predicted decrease of a step that is taken
_POOR, _GOOD = as_tensor(0.25), as_tensor(0.75)  # ratios below which a region shrinks, and above which it grows
_FALLS = 0.9  # of the least offset: a settled fit goes on while its offset falls so
_PATIENCE = 10
_WHOLE = 5  # of _PATIENCE: what a settled fit loses with a step without damping after which the offset did not fall
_CRAWLS = as_tensor(10)  # steps in a row that the region limits: after these a fit bends its steps
_BENT = 0.2  # of a step: the longest bend that a second derivative is good for


def minimise(residuals: ResidualFunction, x: Tensor, rules: Rules, watch: Callable[[Fits, int], bool] | None) -> Fits:
    """Minimise the cost of every fit from x [b n] (Moré 1978): δ minimises ‖Jδ + f‖ where ‖Dδ‖ ≤ radius.

    With bounds δ stays in the box: unknowns at a bound that the gradient pushes against are held, those that a step
    would take beyond a bound are put on it, and the others solved for again (Bertsekas 1982).

    A step that meets ftol or xtol settles a fit. As long as its offset falls, a settled fit goes on, to gtol: near a
    minimum the cost is flat to half of the digits, and the offset is not. ``watch`` sees one fit after every step that
    was taken, and stops it by returning True.
    """
    fits = whole = Fits.start(residuals, x, rules)
    fits.stop(~(fits.squares < torch.inf), Status.NOT_FINITE)
    rows, trial, taken, jacobians, asked = torch.arange(len(x), device=x.device), x, None, 0, False
    for step in count():
        if taken is None or bool(taken.any()):
            J = residuals.jacobian(trial)
            fits.J = J if taken is None else torch.where(taken.view(-1, 1, 1), J, fits.J)
            jacobians += 1
            model = Linearised.at(*rules.loss.weighted(fits.f, fits.J), fits, rules)
            fits.D = model.D
            if step > 0 and watch is not None and watch(fits, jacobians - 1):
                asked = True
                fits.stop(asked, Status.STOPPED)
        if step == 0:
            # Where unknowns that matter are zero, x says nothing about its size
            fits.radius = torch.where(model.size > 0, model.size.maximum(_LEAST_RADIUS * model.unit), model.unit)
        spent, inside = residuals.left <= 0, model.inside(fits.radius)
        limits = not bool((model.above & inside).all())
        if asked or spent or fits.settled is not None or (limits and not bool(model.above.all())):
            _judge(fits, model)
            if spent:
                fits.stop(spent, Status.SPENT)
            running = fits.status == Status.RUNNING
            if not bool(running.all()):
                fits.nfev, fits.njev = (torch.full_like(rows, n) for n in (residuals.calls.count, jacobians))
                if fits is not whole:
                    ended = (~running).nonzero().squeeze(-1)
                    whole.put(rows[ended], fits, ended)
                going = running.nonzero().squeeze(-1)
                if not len(going):
                    return whole
                rows, model, fits, rules = rows[going], some(model, going), some(fits, going), some(rules, going)
                residuals, inside = residuals.of(going), inside[going]
            limits = not bool(inside.all())
        else:
            fits.offset = model.offset
        trial, taken = _step(residuals, fits, model, rules, inside if limits else None, step > 0)
    raise AssertionError  # count() has no end


def _judge(fits: Fits, model: Linearised) -> None:
    """Stop the fits that a rule stops where they are."""
    offset = model.offset
    fits.stop(~model.above, torch.where(offset.isnan(), Status.NOT_FINITE, Status.GTOL))
    if fits.settled is not None:
        waits = (fits.settled > 0) & ~(offset <= _FALLS * fits.offset)
        # A step that the region has limited says little about the end of a valley
        lost = torch.where(fits.λ > 0, 1, torch.where(model.promise <= model.rounding, _PATIENCE, _WHOLE))
        fits.stalled = torch.where(waits, fits.stalled + lost, 0)
        offset = torch.where(waits, fits.offset, offset)
        fits.stop(fits.stalled >= _PATIENCE, fits.settled)
    fits.offset = offset


def _step(
    residuals: ResidualFunction, fits: Fits, model: Linearised, rules: Rules, inside: Tensor | None, sure: bool
) -> tuple[Tensor, Tensor | None]:
    """Try one step of every fit: where it leads, and which fits take it; None: all do.

    ``inside``: which fits have the minimum of their model in their trust region; None: all. ``sure``: long steps are
    taken, too, if their model is not right.
    """
    δ, norm, predicted = model.δ, model.norm, model.promise
    if inside is None:
        fits.λ = torch.zeros_like(norm)
    else:
        δ, fits.λ, norm, predicted = model.within(fits.radius, fits.λ, inside)
    if rules.lower is None:
        trial = fits.x + δ
    else:
        δ, trial = model.in_box(δ, fits.λ, fits.x, rules)
        norm, predicted = torch.linalg.vector_norm(model.D * δ, dim=-1), model.QR.decrease(δ)
    f = residuals(trial)
    actual = rules.loss.decrease(fits.f, f)  # NaN, for which no comparison holds, where residuals are not finite
    radius = norm + norm
    if inside is None:
        fits.limited = fits.λ  # 0
    else:
        fits.limited = (fits.limited + 1) * ~inside
        crawls = fits.limited >= _CRAWLS
        if rules.lower is None and rules.loss.rho is None and residuals.left > 0 and bool(crawls.any()):
            around = trial + _bend(fits, model.D, δ, f)
            beside = residuals(around)
            gain = rules.loss.decrease(fits.f, beside)
            bent = crawls & (gain > actual)
            fits.limited = torch.where(crawls & ~bent, 0, fits.limited)  # it is not for a bend that the fit crawls
            if bool(bent.all()):
                trial, f, actual = around, beside, gain
            else:
                rows = bent.unsqueeze(-1)
                trial, f = torch.where(rows, around, trial), torch.where(rows, beside, f)
                actual = torch.where(bent, gain, actual)
        radius = torch.where((actual >= _GOOD * predicted) | inside, radius, fits.radius)

    small, fair = (rules.ftol * fits.squares).maximum(model.rounding), _POOR * predicted
    usual, taken, fits.settled = (actual > fair.maximum(small)) & (norm > model.least), None, None
    if not sure:
        unsure = (norm > 1.1 * _SURE * fits.radius) & ~((actual - predicted).abs() <= _RIGHT * predicted)
        usual = usual & ~unsure
    if not bool(usual.all()):
        taken, poor = actual > _LEAST_RATIO * predicted, ~(actual > fair)
        # Without ftol, by_f is rounding, and steps that the region makes short may gain little
        reach, both = (predicted, Status.FTOL_XTOL) if rules.ftol > 0 else (model.promise, Status.XTOL)
        by_f, by_x = reach.maximum(actual.abs()) <= small, norm <= model.least
        met = by_f | by_x
        if bool(met.any()):
            fits.settled = torch.where(by_f, torch.where(by_x, both, Status.FTOL), Status.XTOL * by_x)
            taken = taken | (met & (actual >= -model.rounding))
            poor = poor & ~(taken & (predicted <= model.rounding))  # rounding is no reason for a smaller region
        if bool(poor.any()):
            # Without xtol steps that no longer move x may follow each other, and λ ~ 1/radius would overflow
            eps, less = torch.finfo(f.dtype).eps, torch.where(actual >= 0, 0.5, 0.25) * fits.radius.minimum(norm)
            radius = torch.where(poor, less.maximum(eps**2 * (model.size + eps * model.unit)), radius)
        if not sure:
            taken, radius = taken & ~unsure, torch.where(unsure, _SURE * fits.radius, radius)
    if inside is not None:
        fits.λ = fits.λ * (norm / radius)  # a guess for the next step: with a large λ, ‖Dδ‖ ~ 1/λ
    fits.radius = radius
    if taken is None or bool(taken.all()):
        fits.x, fits.f, taken = trial, f, None
    else:
        rows, fits.shortened = taken.unsqueeze(-1), fits.shortened + ~actual.isfinite()
        fits.x, fits.f = torch.where(rows, trial, fits.x), torch.where(rows, f, fits.f)
    fits.squares = rules.loss.squares(fits.f)
    return trial, taken


def _bend(fits: Fits, D: Tensor, δ: Tensor, f: Tensor) -> Tensor:
    """Half of the acceleration of the curve that steps δ start along; 0 where that is long, or residuals f not finite.

    (JᵀJ + λD²)a = −Jᵀr″ has the second derivative r″ of the residuals along the step (Transtrum and Sethna 2012).
    """
    half = f - fits.f - (fits.J @ δ.unsqueeze(-1)).squeeze(-1)  # of r″
    bend = TriangularLeastSquares.of(fits.J, half).damped(fits.λ.sqrt().unsqueeze(-1) * D)
    lengths = torch.linalg.vector_norm(torch.stack([D * bend, D * δ]), dim=-1)
    return torch.where((lengths[0] <= _BENT * lengths[1]).unsqueeze(-1), bend, 0.0)
