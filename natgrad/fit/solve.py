"""Nonlinear least squares: SciPy's call for functions of tensors."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from natgrad.accelerate.devices import in_transform
from natgrad.errors import IncompatibleError, NonFiniteError
from natgrad.fit.fits import Fits, Rules
from natgrad.fit.losses import RobustLoss
from natgrad.fit.residual_function import Calls, FlatUnknowns, ResidualFunction, Unknowns
from natgrad.fit.result import FitResult, Iterate, Status
from natgrad.fit.sensitivity import differentiable
from natgrad.fit.trust_region import minimise
from natgrad.linalg import is_number
from natgrad.log import OnceLogger

_logger = OnceLogger()
_NOISE = 8  # in units of the machine epsilon: what a sum of squares may be off by
_FEW = 16  # times the smallest normal number: a cost below has few digits


def least_squares(
    fun: Callable[..., Tensor],
    x0: Unknowns | Sequence[float],
    args: tuple[Any, ...] = (),
    *,
    bounds: tuple[Any, Any] | None = None,
    loss: str | Callable[[Tensor], Any] = "linear",
    f_scale: float = 1.0,
    x_scale: Any = "jac",
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    max_nfev: int | None = None,
    fixed: Any = None,
    callback: Callable[..., Any] | None = None,
    batch: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> FitResult:
    """Minimise a sum of squares, robustly and within bounds: SciPy's call, for tensors.

    Args:
        fun: ``fun(x, *args)`` returns the residuals f, a tensor of any shape, made of differentiable torch operations.
        x0: The start, a tensor or a dict of tensors; ``fun`` gets the unknowns in that form.
        args: Further arguments of ``fun``. Arrays of floats become tensors.
        bounds: (lower, upper), each a number or as ``x0``; in a dict unknowns may be left out.
        loss: ρ: "linear", "soft_l1", "huber", "cauchy" or "arctan", or a function z ↦ (ρ, ρ′, ρ″) of z = (f/f_scale)².
        f_scale: Residuals beyond it count as outliers.
        x_scale: "jac", or the size of a change of the unknowns that matters, a number or as ``x0``.
        ftol: Stop if a step changes the cost by at most this times the cost, and the offset falls no more. None turns a
            rule off.
        xtol: The same for a change of the unknowns, relative to their size, in units of ``x_scale``.
        gtol: Stop if the offset is at most this: the cosine between the residuals and the tangent space of the model
            (Bates and Watts 1981).
        max_nfev: The most calls of ``fun``, by default 1500 + 10n.
        fixed: Unknowns that stay at ``x0``, by their names or as booleans in its form.
        callback: Called after every step, with x, or, if that is the name of its argument, with ``intermediate_result``
            (x, cost, fun, nit, nfev); stops the fit by raising StopIteration.
        batch: Solve b independent fits in one call. ``x0`` and the tensors in ``args`` have the fits on their first
            axis; ``fun`` is written for one fit, and mapped over them by ``torch.vmap``.
        kwargs: Arguments of ``fun`` by name, as they are.

    Returns:
        A ``FitResult``.

    Method:
        ½ Σ ρ(f²) is minimised by steps of Levenberg and Marquardt in a trust region (Moré 1978), by QR of the exact
        Jacobian. An offset of √n·1e-8 leaves x within about 1e-8 standard errors.

        If a tensor in ``args`` requires a gradient, ``result.x`` is a differentiable function of it (the implicit
        function theorem, with the exact Hessian), with first derivatives only, by ``backward()`` and
        ``torch.autograd.grad``.

    Example:
        >>> t = torch.linspace(0, 4, 9, dtype=torch.float64)
        >>> y = 3 * torch.exp(-0.7 * t)
        >>> start = torch.ones(2, dtype=torch.float64)
        >>> fit = least_squares(lambda x, t, y: x[0] * torch.exp(-x[1] * t) - y, start, (t, y))
        >>> fit.x
        tensor([3.0000, 0.7000], dtype=torch.float64)
    """
    if not callable(fun):
        raise TypeError(f"fun must be a function of the unknowns, got {type(fun).__name__}")
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of further arguments of fun, got {type(args).__name__}: write (data,)")
    if kwargs is not None:
        fun = partial(fun, **kwargs)
    unknowns = _checked(x0, batch)
    args = as_tensors(args, next(iter(unknowns.values())) if isinstance(unknowns, Mapping) else unknowns)
    _refuse_transforms(args)
    held = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    flat = FlatUnknowns(unknowns, batch, _fixed(fixed, unknowns, batch))
    x = flat.select(flat.start).clone()  # a fit that ends at x0 does not return x0 itself
    most = 1500 + 10 * x.shape[1] if max_nfev is None else _count(max_nfev)
    residuals = ResidualFunction(fun, flat, held, Calls(most))
    if batch:
        _check_args(args, len(x))
    eps = torch.finfo(x.dtype).eps
    tolerances = [_tolerance(each, name, eps) for each, name in ((ftol, "ftol"), (xtol, "xtol"), (gtol, "gtol"))]
    numbers = x.new_tensor([*tolerances, _NOISE * eps]).unbind()
    box, scale = _box(bounds, flat, x), _scale(x_scale, flat)
    rules = Rules(RobustLoss.named(loss, f_scale), numbers[0], numbers[1], numbers[2], numbers[3], *box, scale)
    if ftol is None and xtol is None and gtol is None:
        raise ValueError("one of ftol, xtol and gtol must be a number: nothing else says when the fit has converged")
    watch = _watch(callback, residuals)
    try:
        fits = minimise(residuals, x, rules, watch)
        calls = residuals.calls.count
        if residuals.confirm(fits.x, fits.f, fits.J):
            fits.nfev = fits.nfev + (residuals.calls.count - calls)
        else:  # fun is not what its first values have shown
            fits = minimise(residuals, fits.x, rules, watch)
    except RuntimeError as error:
        if not in_transform() or not str(error).startswith("vmap:"):
            raise
        raise IncompatibleError(
            "least_squares reads the values of its tensors, which torch.vmap does not allow: give all fits in one "
            "call, with batch=True"
        ) from error
    _say_underflow(fits, eps)
    result = _result(residuals, fits, rules, args)
    if x.dtype != torch.float64:
        _say_accuracy(result, eps)
    return result


def _result(residuals: ResidualFunction, fits: Fits, rules: Rules, args: tuple[Any, ...]) -> FitResult:
    f, J = rules.loss.weighted(fits.f, fits.J)
    unknowns, one, shape = residuals.unknowns, not residuals.batch, residuals.shape
    assert shape is not None
    if one and int(fits.status) == Status.NOT_FINITE:
        _refuse(fits, J)
    active = torch.zeros_like(fits.x, dtype=torch.int64)
    if rules.lower is not None and rules.upper is not None:
        active = (fits.x >= rules.upper).long() - (fits.x <= rules.lower).long()
    x = unknowns.whole(fits.x)
    result = FitResult(
        x=unknowns.unflatten(x),
        cost=0.5 * (fits.squares[0] if one else fits.squares),
        fun=fits.f.view(shape if one else (len(x), *shape)),
        jac=J[0] if one else J,
        nfev=int(fits.nfev) if one else fits.nfev,
        njev=int(fits.njev) if one else fits.njev,
        status=int(fits.status) if one else fits.status,
        unknowns=unknowns,
        pulled=f[0] if one else f,
        shortened=int(fits.shortened.sum()),
        active=active[0] if one else active,
    )
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        free = unknowns.embed(result.free.unsqueeze(0) if one else result.free)
        return replace(result, x=unknowns.unflatten(differentiable(residuals, x, args, rules.loss, free)))
    return result


def _watch(callback: Callable[..., Any] | None, residuals: ResidualFunction) -> Callable[[Fits, int], bool] | None:
    """What calls ``callback`` after a step, as SciPy calls it, and tells whether it has raised StopIteration."""
    if callback is None:
        return None
    if not callable(callback):
        raise TypeError(f"callback must be a function of x or of intermediate_result, got {type(callback).__name__}")
    if residuals.batch:
        raise ValueError("callback sees the steps of one fit: leave out callback, or batch=True")
    takes_all = set(inspect.signature(callback).parameters) == {"intermediate_result"}

    def watch(fits: Fits, nit: int) -> bool:
        assert residuals.shape is not None
        x = residuals.unknowns.unflatten(residuals.unknowns.whole(fits.x))
        try:
            if takes_all:
                cost, fun = 0.5 * fits.squares[0], fits.f.view(residuals.shape)
                callback(intermediate_result=Iterate(x, cost, fun, nit, residuals.calls.count))
            else:
                callback(x)
        except StopIteration:
            return True
        return False

    return watch


def _fixed(fixed: Any, unknowns: Unknowns, batch: bool) -> Tensor | None:
    """Which of the flattened unknowns of one fit are fixed [n], from names, or from booleans in the form of x0."""
    if fixed is None:
        return None
    one = {"x0": unknowns} if isinstance(unknowns, Tensor) else dict(unknowns)
    marks = {"x0": fixed} if isinstance(unknowns, Tensor) else fixed
    if isinstance(marks, str):
        marks = (marks,)
    words = [fixed] if isinstance(fixed, str) else fixed if isinstance(fixed, (list, tuple, set)) else []
    if isinstance(unknowns, Tensor) and any(isinstance(each, str) for each in words):
        raise TypeError("fixed names unknowns, and x0 has no names: give booleans in its form, or x0 as a dict")
    if not isinstance(marks, Mapping):
        if not isinstance(marks, Collection) or not all(isinstance(name, str) for name in marks):
            raise TypeError("fixed is a collection of names in x0, or booleans in the form of x0 (True: fixed)")
        marks = dict.fromkeys(marks, True)
    if missing := sorted(marks.keys() - one.keys()):
        raise ValueError(f"fixed names {', '.join(missing)}, which are not in x0")
    flat = []
    for name, p in one.items():
        mark, shape = torch.as_tensor(marks.get(name, False)), p.shape[1:] if batch else p.shape
        if mark.dtype != torch.bool:
            raise TypeError(f"fixed of {name} must be booleans in the form of x0 (True: fixed), got {mark.dtype}")
        try:
            flat.append(mark.to(p.device).expand(shape).reshape(-1))
        except RuntimeError:
            raise ValueError(f"fixed of {name} is {list(mark.shape)}, and the unknown {list(shape)}") from None
    every = torch.cat(flat)
    if bool(every.all()):
        raise ValueError("all unknowns are fixed: there is nothing to fit")
    return every if bool(every.any()) else None


def _refuse(fits: Fits, J: Tensor) -> None:
    if not bool(fits.f.isfinite().all()):
        bad = int((~fits.f.isfinite()).sum())
        raise NonFiniteError(
            f"{bad} of {fits.f.numel()} residuals at x0 are NaN or infinite: start where fun is finite, "
            "and leave out data that are not"
        )
    columns = (~J[0].isfinite()).any(0).nonzero().squeeze(-1).tolist()
    if not columns:  # what is not finite was computed from them
        raise NonFiniteError(
            f"the cost, or its model, overflows at x = {fits.x[0].tolist()}: there are residuals up to "
            f"{float(fits.f.abs().max()):.1e} and derivatives up to {float(J.abs().max()):.1e}, and the sum of their "
            f"squares is not finite in {str(J.dtype).removeprefix('torch.')}; divide the residuals by their size, or "
            "start where they are smaller"
        )
    raise NonFiniteError(
        f"the Jacobian of the residuals is NaN or infinite at x = {fits.x[0].tolist()}, in the unknowns {columns}: fun "
        "is not differentiable there (√ or |·| at 0, or overflow)"
    )


def _checked(x0: Any, batch: bool) -> Unknowns:
    """Detached unknowns of one precision and one device."""
    if isinstance(x0, Mapping):
        if not x0:
            raise ValueError("x0 holds no unknowns")
        given = dict(x0)
    else:
        given = {"x0": x0}
    tensors = {name: p if isinstance(p, Tensor) else _numbers(p, name, torch.float64) for name, p in given.items()}
    for name, p in tensors.items():
        if p.is_complex():
            raise TypeError(f"{name} is complex: fit its real and imaginary part (torch.view_as_real)")
        if p.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is {p.dtype}: least squares needs float64, or float32 where 3 digits are enough")
        if batch and p.ndim == 0:
            raise ValueError(f"{name} is one number, and with batch=True needs the fits on its first axis")
        if p.numel() == 0:
            raise ValueError(f"{name} is empty: there is nothing to fit")
    whole = {name: p.detach() if p.is_floating_point() else p.to(torch.float64) for name, p in tensors.items()}
    if len({(p.dtype, p.device) for p in whole.values()}) > 1:
        kinds = ", ".join(f"{name} {p.dtype} on {p.device}" for name, p in whole.items())
        raise TypeError(f"the unknowns must have one precision and one device, and are {kinds}")
    if batch and len({len(p) for p in whole.values()}) > 1:
        sizes = ", ".join(f"{name} {len(p)}" for name, p in whole.items())
        raise ValueError(f"with batch=True all unknowns have the fits on their first axis, and here are {sizes}")
    for name, p in whole.items():
        if not bool(p.isfinite().all()):
            raise NonFiniteError(f"{name} holds NaN or infinity: there is nothing to start from")
    return whole if isinstance(x0, Mapping) else whole["x0"]


def _numbers(value: Any, what: str, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Real numbers, a list of them or an array, as a tensor."""
    if _kind(value) == "c" or (isinstance(value, Tensor) and value.is_complex()):  # torch would drop imaginary parts
        raise TypeError(f"{what} is complex: fit its real and imaginary part, with real bounds and scales")
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} must be a number, or numbers in a tensor or a list, got {value!r:.60}") from error


def _kind(value: Any) -> str | None:
    """NumPy's letter for the kind of numbers in an array."""
    return getattr(getattr(value, "dtype", None), "kind", None)


def as_tensors(args: tuple[Any, ...], like: Tensor) -> tuple[Any, ...]:
    """Arrays of floats as tensors; what else there is, fun may need as it is."""

    def tensor(a: Any) -> Any:
        if isinstance(a, (Tensor, float)) or _kind(a) != "f":
            return a
        # A copy, in the order of bytes of this machine: torch does not read every array
        return torch.as_tensor(a.__array__().astype("float64"), dtype=like.dtype, device=like.device)

    return tuple(tensor(a) if hasattr(a, "__array__") else a for a in args)


def _refuse_transforms(args: tuple[Any, ...]) -> None:
    """Forward mode would find derivatives that are zero, and a transform of torch.func has no backward pass."""
    for k, a in enumerate(args):
        if not isinstance(a, Tensor):
            continue
        is_dual = torch.autograd.forward_ad.unpack_dual(a).tangent is not None
        if is_dual or (a.requires_grad and torch.is_grad_enabled() and in_transform()):
            raise IncompatibleError(
                f"args[{k}] is differentiated in forward mode or by a transform of torch.func, and result.x of "
                "least_squares has derivatives by backward() and torch.autograd.grad alone: use these, or detach it"
            )


def _check_args(args: tuple[Any, ...], count: int) -> None:
    for k, a in enumerate(args):
        if not isinstance(a, Tensor) or a.ndim == 0 or len(a) != count:
            what = f"a tensor {list(a.shape)}" if isinstance(a, Tensor) else type(a).__name__
            raise ValueError(
                f"with batch=True args are tensors with the {count} fits on their first axis, and args[{k}] is {what}: "
                "let fun read what all fits share from outside"
            )


def _spread(value: Any, what: str, default: float, unknowns: FlatUnknowns) -> Tensor:
    """A number, or unknowns as x0 (of one fit or of all), as [b n]."""

    def full(v: Any, like: Tensor, name: str) -> Tensor:
        t = _numbers(v, f"{what} of {name}", like.dtype, like.device)
        try:
            return t.expand(like.shape)
        except RuntimeError:
            raise ValueError(f"{what} of {name} is {list(t.shape)}, and the unknown {list(like.shape)}") from None

    like = unknowns.like
    if isinstance(like, Mapping):
        if isinstance(value, Mapping):
            if strange := sorted(value.keys() - like.keys()):
                raise ValueError(f"{what} names {', '.join(strange)}, which are not in x0")
            value = {name: value.get(name, default) for name in like}
        each = value if isinstance(value, Mapping) else dict.fromkeys(like, value)
        return unknowns.select(unknowns.flatten({name: full(each[name], p, name) for name, p in like.items()}))
    return unknowns.select(unknowns.flatten(full(value, like, "x0")))


def bounds_of(bounds: Any) -> tuple[Any, Any]:
    """Lower and upper bounds, from a pair, or from an object with lb and ub, as SciPy's."""
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        return bounds.lb, bounds.ub
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        error = ValueError if isinstance(bounds, (tuple, list)) else TypeError
        raise error("bounds is a pair (lower, upper), each a number or as x0; ±inf where there is no bound")
    return bounds[0], bounds[1]


def _box(bounds: Any, unknowns: FlatUnknowns, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if bounds is None:
        return None, None
    low, high = bounds_of(bounds)
    lower = _spread(-math.inf if low is None else low, "the lower bound", -math.inf, unknowns)
    upper = _spread(math.inf if high is None else high, "the upper bound", math.inf, unknowns)
    if bool((lower.isnan() | upper.isnan()).any()):
        raise NonFiniteError("a bound is NaN: use ±inf where there is none")
    if not bool((lower < upper).all()):
        raise ValueError("every lower bound must be below its upper bound: to hold an unknown, use fixed=")
    outside = (x < lower) | (x > upper)
    if bool(outside.any()):
        indices = sorted(set(outside.nonzero()[:, 1].tolist()))
        raise ValueError(f"x0 is outside of the bounds in the unknowns {indices}: start inside")
    if bool((lower == -math.inf).all()) and bool((upper == math.inf).all()):
        return None, None
    return lower, upper


def _scale(x_scale: Any, unknowns: FlatUnknowns) -> Tensor | None:
    if isinstance(x_scale, str):
        if x_scale != "jac":
            raise ValueError(f'x_scale is "jac", or positive numbers as x0, got {x_scale!r}')
        return None
    scale = _spread(x_scale, "x_scale", 1.0, unknowns)
    if not bool(((scale > 0) & (scale < math.inf)).all()):
        raise ValueError("x_scale must be positive and finite")
    return 1 / scale


def _tolerance(value: float | None, name: str, eps: float) -> float:
    """Not below what rounding leaves."""
    if value is None:
        return eps if name == "gtol" else 0.0
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), or None, got {value!r}")
    return max(value, 2 * eps)


def _count(max_nfev: Any) -> int:
    if not hasattr(max_nfev, "__index__"):
        raise TypeError(f"max_nfev must be an integer, got {max_nfev!r}")
    max_nfev = index(max_nfev)
    if max_nfev < 1:
        raise ValueError(f"max_nfev must be at least 1, got {max_nfev}")
    return max_nfev


def _say_underflow(fits: Fits, eps: float) -> None:
    """Where the squares of all residuals are zero, or have lost digits, a fit ends anywhere: name such fits."""
    lost = fits.squares < 2 * _FEW * torch.finfo(fits.f.dtype).tiny
    if not bool(lost.any()):
        return
    sizes = fits.f.abs()
    terms = (fits.J.abs() @ fits.x.abs().unsqueeze(-1)).squeeze(-1)  # whose rounding residuals of an exact x are
    left = sizes[lost & (sizes > eps**0.5 * terms).any(-1)]
    if left.numel():
        _logger.log_once(
            logging.WARNING,
            "least_squares: residuals of at most %.0e have squares that are zero, or nearly so, in %s, so that a fit "
            "ends at x0 or too early: multiply them by a number that makes them about 1",
            float(left.max()),
            str(left.dtype).removeprefix("torch."),
        )


def _say_accuracy(result: FitResult, eps: float) -> None:
    """In float32 the tolerances are not reached: say once what is."""
    s = result.spectrum.values
    digits = float((eps * s[..., 0] / s[..., -1].clamp(min=eps)).median())
    _logger.log_once(
        logging.WARNING,
        "least_squares in float32 finds x to about %.0e of its size here, not to 1e-08: give x0 and data in float64",
        min(digits, 1.0),
    )
