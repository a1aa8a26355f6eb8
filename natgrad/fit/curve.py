"""Fit a curve y = f(x, p₁, p₂, …) to data: SciPy's ``curve_fit`` for functions of tensors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.fit.residual_function import Unknowns
from natgrad.fit.result import FitResult
from natgrad.fit.solve import as_tensors, bounds_of, least_squares
from natgrad.linalg import is_number

_MANY = 1000  # degrees of freedom, from which on Student's distribution is expanded around the normal one


@final
@dataclass(frozen=True)
class CurveFit:
    """The curve that ``curve_fit`` has found; it can be called, and has error bars.

    ``x, covariance = curve_fit(…)`` unpacks it, as SciPy's.

    Attributes:
        fit: The result of ``least_squares``: the residuals (f − y)/σ, the rule that has stopped the fit, and so on.
        function: The curve that was fitted, with ``curve(xdata)`` at the parameters that were found.
    """

    fit: FitResult
    function: Callable[..., Tensor]

    @property
    def x(self) -> Any:
        """The parameters, as ``p0``."""
        return self.fit.x

    @property
    def covariance(self) -> Tensor:
        """Of the parameters that are not fixed, flattened in their order [n n]: ``FitResult.covariance``."""
        return self.fit.covariance

    @property
    def standard_errors(self) -> Any:
        """√ of the diagonal of the covariance, as ``p0``."""
        return self.fit.standard_errors

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.covariance))

    def __call__(self, xdata: Any) -> Tensor:
        """The curve at other points."""
        return self._at(self.fit.unknowns.flatten(self.x), xdata)

    def band(self, xdata: Any, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Between which two curves the true one is, at each point by itself with the probability ``level``.

        f ± q √(g C gᵀ), with the derivatives g of f at the point with respect to the parameters, their covariance C,
        and Student's quantile q (the normal one, if σ is absolute). Right where f is nearly linear in the parameters
        within their errors.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be a probability between 0 and 1, got {level}")
        unknowns, x = self.fit.unknowns, self.fit.unknowns.flatten(self.x).detach()
        xdata = _points(xdata, x)

        def one(x: Tensor) -> Tensor:
            return self.function(xdata, unknowns.named(x))

        y = torch.vmap(one)(x)
        J = torch.vmap(torch.func.jacfwd(one))(x)
        g = unknowns.select(J.reshape(len(x), y[0].numel(), -1))  # [b points n]
        C = self.covariance if unknowns.batch else self.covariance.unsqueeze(0)
        root = ((g @ C) * g).sum(-1).clamp(min=0).sqrt().view_as(y)
        m, n = self.fit.shape
        q = student_quantile(level, m - n) if self.fit.variance is None else _normal_quantile(level)
        low, high = y - q * root, y + q * root
        return (low, high) if unknowns.batch else (low[0], high[0])

    def _at(self, x: Tensor, xdata: Any) -> Tensor:
        unknowns = self.fit.unknowns
        xdata = _points(xdata, x)
        y = torch.stack([self.function(xdata, unknowns.named(each)) for each in x.unbind(0)])
        return y if unknowns.batch else y[0]

    def __repr__(self) -> str:
        return f"CurveFit({self.fit!r})"

    def __str__(self) -> str:
        return str(self.fit)


def curve_fit(
    f: Callable[..., Tensor],
    xdata: Any,
    ydata: Any,
    p0: Unknowns | Sequence[float] | None = None,
    sigma: Any = None,
    absolute_sigma: bool = False,
    *,
    bounds: Any = None,
    fixed: Any = None,
    batch: bool = False,
    loss: str | Callable[[Tensor], Any] = "linear",
    f_scale: float = 1.0,
    x_scale: Any = "jac",
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    max_nfev: int | None = None,
    callback: Callable[..., Any] | None = None,
) -> CurveFit:
    """Fit a curve to data, with error bars: the call of SciPy's ``curve_fit``, for tensors.

    Args:
        f: y = ``f(xdata, *p)``, made of differentiable torch operations, a tensor of the shape of ``ydata``.
        xdata: Where the data are; anything that ``f`` takes.
        ydata: The data.
        p0: The start: a sequence of numbers, or a dict of tensors, with which ``f`` is called as ``f(xdata, **p)``; by
            default ones, or, within bounds, numbers between them.
        sigma: The standard deviations of ``ydata``, a number or as ``ydata``, or their covariance matrix [m m].
        absolute_sigma: Whether they are what they say, or known up to a common factor, which the residuals tell.
        bounds: (lower, upper), each a number or as ``p0``.
        fixed: Parameters that stay at ``p0``, by their names or as booleans in its form.
        batch: The first axis of ``ydata`` and ``p0`` is that of many fits, which share ``xdata``.
        loss: "linear", or a robust loss for outliers: "soft_l1", "huber", "cauchy", "arctan", or a function.
        f_scale: Residuals beyond it count as outliers.
        x_scale: "jac", or the size of a change of the parameters that matters.
        ftol: Stop if a step changes the cost by at most this times the cost.
        xtol: Stop if a step changes the parameters by at most this times their size.
        gtol: Stop if the residuals are orthogonal to the tangent space of the curve to this cosine.
        max_nfev: The most calls of ``f``, by default 1500 + 10 for every parameter.
        callback: Called after every step; it stops the fit by raising StopIteration.

    Returns:
        A ``CurveFit``.

    Example:
        >>> t = torch.linspace(0, 4, 30, dtype=torch.float64)
        >>> y = 3 * torch.exp(-0.7 * t) + 0.02 * torch.sin(40 * t)
        >>> curve = curve_fit(lambda t, a, b: a * torch.exp(-b * t), t, y)
        >>> x, covariance = curve
        >>> x
        tensor([2.9931, 0.6987], dtype=torch.float64)
        >>> low, high = curve.band(torch.tensor([0.0, 8.0], dtype=torch.float64), level=0.9)
        >>> high - low
        tensor([0.0277, 0.0008], dtype=torch.float64)
    """
    if not callable(f):
        raise TypeError(f"f must be a function of xdata and the parameters, got {type(f).__name__}")
    y = as_tensors((ydata,), torch.zeros((), dtype=torch.float64))[0]
    is_kept = isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())
    y = y if is_kept else torch.as_tensor(y, dtype=torch.float64)  # counts, or a list
    if y.ndim <= int(batch) or not y.is_floating_point():
        raise ValueError(
            f"ydata must be a tensor of floating-point numbers{', with an axis of fits before those of data' * batch}, "
            f"got {list(y.shape)}, {y.dtype}"
        )
    start = _start(f, bounds, y, batch) if p0 is None else p0
    by_name = isinstance(start, Mapping)
    shape = y.shape[1:] if batch else y.shape
    points = _points(xdata, y)
    whiten, deviations = _whitening(sigma, shape, y)

    def function(xdata: Any, p: Any) -> Tensor:
        return f(xdata, **p) if by_name else f(xdata, *p.unbind(0))

    def residuals(p: Any, points: Any, y: Tensor, *σ: Tensor) -> Tensor:
        model = function(points, p)
        if not isinstance(model, Tensor):
            raise TypeError(f"f must return a tensor, as ydata, got {type(model).__name__}")
        if model.shape != shape and torch.broadcast_shapes(model.shape, shape) != shape:
            raise ValueError(
                f"f returns {list(model.shape)} for ydata {list(shape)}, and their difference would have the shape "
                f"{list(torch.broadcast_shapes(model.shape, shape))}: let f return the shape of ydata"
            )
        return whiten(model - y, *σ)

    fit = least_squares(
        (lambda p, *data: residuals(p, points, *data)) if batch else residuals,
        start,
        (y, *deviations) if batch else (points, y, *deviations),
        bounds=bounds,
        loss=loss,
        f_scale=f_scale,
        x_scale=x_scale,
        ftol=ftol,
        xtol=xtol,
        gtol=gtol,
        max_nfev=max_nfev,
        fixed=fixed,
        callback=callback,
        batch=batch,
    )
    return CurveFit(replace(fit, variance=1.0) if absolute_sigma else fit, function)


def _points(xdata: Any, like: Tensor) -> Any:
    """Numbers, or an array of floats, as a tensor; what else f takes, as it is."""
    if is_number(xdata) or (isinstance(xdata, (list, tuple)) and all(is_number(each) for each in xdata)):
        return torch.as_tensor(xdata, dtype=like.dtype, device=like.device)
    return as_tensors((xdata,), like)[0]


def _start(f: Callable[..., Any], bounds: Any, y: Tensor, batch: bool) -> Tensor:
    """One for every parameter of f, or a number between its bounds."""
    try:
        parameters = list(inspect.signature(f).parameters.values())[1:]
    except ValueError:  # of a builtin function
        parameters = []
    if not parameters or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise ValueError("the signature of f does not show how many parameters it has: give p0")
    lower, upper = (None, None) if bounds is None else bounds_of(bounds)
    if isinstance(lower, Mapping) or isinstance(upper, Mapping):
        raise ValueError("bounds by name need p0, a dict with these names")
    low, high = (
        torch.as_tensor(default if given is None else given, dtype=y.dtype, device=y.device).expand(len(parameters))
        for given, default in ((lower, -math.inf), (upper, math.inf))
    )
    start = torch.where(high.isinf(), torch.where(low.isinf(), 1.0, low + 1), high - 1)
    start = torch.where(low.isinf() | high.isinf(), start, 0.5 * (low + high))
    inside = (low <= 1) & (high >= 1) & (low.isinf() | high.isinf())
    start = torch.where(inside, 1.0, start)
    return start.expand(len(y), -1) if batch else start


def _whitening(sigma: Any, shape: torch.Size, y: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """What divides residuals by their standard deviations, and what it needs of every fit."""
    if sigma is None:
        return lambda r: r, ()
    σ = torch.as_tensor(sigma, dtype=y.dtype, device=y.device)
    m = shape.numel()
    if σ.shape == (m, m) and len(shape) == 1 and σ.shape != y.shape:
        L, failed = torch.linalg.cholesky_ex(σ)
        if bool(failed) or not torch.allclose(σ, σ.mT):
            raise ValueError("sigma [m m] is the covariance of ydata, and must be symmetric and positive definite")
        return lambda r: torch.linalg.solve_triangular(L, r.unsqueeze(-1), upper=False).squeeze(-1), ()
    if not bool((σ > 0).all()):
        raise ValueError("sigma must be positive: it is the standard deviation of each number of ydata")
    if σ.shape == y.shape:
        return torch.div, (σ,)
    if σ.shape not in ((), shape):
        raise ValueError(f"sigma is {list(σ.shape)}, and must be a number, {list(y.shape)} as ydata, or [{m}, {m}]")
    return lambda r: r / σ, ()


def _normal_quantile(level: float) -> float:
    return float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * level, dtype=torch.float64)))


def student_quantile(level: float, freedom: int) -> float:
    """q with P(|t| < q) = level for Student's t with so many degrees of freedom; infinite for none.

    P is a finite series in cos θ, tan θ = q/√ν (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).

    >>> [round(student_quantile(0.95, freedom), 4) for freedom in (1, 10, 9999)]
    [12.7062, 2.2281, 1.9602]
    """
    if freedom < 1:
        return math.inf
    z = _normal_quantile(level)
    if freedom > _MANY:
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    if freedom == 1:
        return math.tan(0.5 * math.pi * level)
    odd = freedom % 2
    k = torch.arange(1, (freedom - 2 - odd) // 2 + 1, dtype=torch.float64)
    factors = torch.cat([torch.ones(1).double(), ((2 * k / (2 * k + 1)) if odd else (2 * k - 1) / (2 * k)).cumprod(0)])
    powers = 2 * torch.arange(len(factors), dtype=torch.float64)

    def probability(θ: float) -> float:
        series = float((factors * math.cos(θ) ** powers).sum())
        return 2 / math.pi * (θ + math.sin(θ) * math.cos(θ) * series) if odd else math.sin(θ) * series

    low, high = 0.0, 0.5 * math.pi
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(0.5 * (low + high))
