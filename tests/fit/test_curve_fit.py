"""``ng.curve_fit`` beside SciPy's, and what a fit is watched, held and counted by."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

import natgrad as ng

T = torch.linspace(0.2, 5, 25, dtype=torch.float64)
Y = 2 * torch.exp(-((T - 2) ** 2)) + 0.3 * T + 0.05 * torch.cos(17 * T)
SIGMA = 0.03 + 0.02 * T


def hill(t: Any, a: Any, b: Any, c: Any, of: Any = torch) -> Any:
    return a * of.exp(-((t - b) ** 2)) + c * t


def hill3(t: Any, a: Any, b: Any, c: Any) -> Any:
    return hill(t, a, b, c, np)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("sigma", ["none", "each", "matrix"])
def test_parameters_and_covariance_are_those_of_scipy(sigma: str, absolute: bool) -> None:
    C = torch.diag(SIGMA**2) + 1e-4 * torch.exp(-(T[:, None] - T).abs())
    given = {"none": None, "each": SIGMA, "matrix": C}[sigma]
    options = {"p0": [1.0, 1.5, 1.0], "absolute_sigma": absolute}
    x, covariance = ng.curve_fit(lambda t, a, b, c: hill(t, a, b, c), T, Y, sigma=given, **options)  # type: ignore[arg-type]
    expected = scipy.optimize.curve_fit(
        hill3, T.numpy(), Y.numpy(), sigma=None if given is None else given.numpy(), ftol=1e-14, xtol=1e-14, **options
    )
    np.testing.assert_allclose(x, expected[0], rtol=1e-6)
    np.testing.assert_allclose(covariance, expected[1], rtol=1e-4)


def test_the_band_is_student_times_the_error_that_the_gradient_propagates() -> None:
    curve = ng.curve_fit(lambda t, a, b, c: hill(t, a, b, c), T, Y, [1.0, 1.5, 1.0])
    at = torch.tensor([0.5, 2.5, 6.0], dtype=torch.float64)
    low, high = curve.band(at, level=0.9)
    a, b, c = curve.x
    bell = torch.exp(-((at - b) ** 2))
    g = torch.stack([bell, a * bell * 2 * (at - b), at], 1)
    half = scipy.stats.t.ppf(0.95, 22) * (g @ curve.covariance * g).sum(1).sqrt()
    torch.testing.assert_close(0.5 * (high + low), a * bell + c * at, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(0.5 * (high - low), half, rtol=1e-9, atol=0)
    absolute = ng.curve_fit(lambda t, a: a * t, T, Y, sigma=0.5, absolute_sigma=True)
    low, high = absolute.band(at, level=0.9)
    torch.testing.assert_close(high - low, 2 * scipy.stats.norm.ppf(0.95) * 0.5 * at / T.norm(), rtol=1e-9, atol=0)


def test_points_may_be_a_list_or_one_number_and_data_may_be_counts() -> None:
    def line(t: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return a * torch.sqrt(t) + b

    counts = torch.tensor([3, 5, 4, 7, 8, 8])
    curve = ng.curve_fit(line, list(range(6)), counts)
    expected = ng.curve_fit(line, torch.arange(6.0).double(), counts.double())
    torch.testing.assert_close(curve.x, expected.x, rtol=0, atol=0)
    for many, one in zip(curve.band([2, 7]), curve.band(7.0), strict=True):
        assert one.shape == ()
        torch.testing.assert_close(one, many[1], rtol=1e-12, atol=0)


def test_the_band_covers_the_true_curve_as_often_as_it_says() -> None:
    noise = 0.1 * torch.randn(2000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0, 1, 8, dtype=torch.float64)
    curves = ng.curve_fit(lambda t, a, b: a + b * t, t, 1 + 2 * t + noise, batch=True)
    low, high = curves.band(torch.tensor([0.3], dtype=torch.float64), level=0.8)
    assert float(((low < 1.6) & (high > 1.6)).double().mean()) == pytest.approx(0.8, abs=0.03)


def test_parameters_may_have_names_and_be_fixed() -> None:
    p0 = {"a": 1.0, "b": 2.0, "c": 0.3}
    curve = ng.curve_fit(lambda t, a, b, c: hill(t, a, b, c), T, Y, p0, fixed=("b",))  # type: ignore[arg-type]
    A = torch.stack([torch.exp(-((T - 2) ** 2)), T], 1)
    best = torch.linalg.lstsq(A, Y[:, None]).solution[:, 0]
    torch.testing.assert_close(torch.stack([curve.x["a"], curve.x["c"]]), best, rtol=1e-8, atol=0)
    assert float(curve.x["b"]) == 2.0
    assert float(curve.standard_errors["b"]) == 0.0
    r = Y - A @ best
    expected = r @ r / 23 * torch.linalg.inv(A.T @ A)
    torch.testing.assert_close(curve.covariance, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("batch", [False, True])
def test_a_fixed_unknown_stays_and_the_others_are_fitted_without_it(batch: bool) -> None:
    x0 = torch.tensor([[1.0, 1.7, 1.0], [1.0, 2.1, 1.0]], dtype=torch.float64)
    data = torch.stack([Y, 2 * Y])

    def fun(x: Tensor, y: Tensor) -> Tensor:
        return hill(T, x[0], x[1], x[2]) - y

    held = torch.tensor([False, True, False])
    fit = ng.least_squares(fun, x0 if batch else x0[0], (data if batch else Y,), fixed=held, batch=batch, bounds=(0, 9))
    for k in range(2 if batch else 1):
        x = fit.x[k] if batch else fit.x
        alone = ng.least_squares(lambda z, k=k: hill(T, z[0], x0[k, 1], z[1]) - data[k], [1.0, 1.0])
        torch.testing.assert_close(x[[0, 2]], alone.x, rtol=1e-7, atol=0)
        assert float(x[1]) == float(x0[k, 1])
    assert fit.jac.shape[-1] == 2


def test_the_derivative_of_a_fit_leaves_fixed_unknowns_alone() -> None:
    def solution(y: Tensor) -> Any:
        fun = lambda x, y: hill(T, x[0], x[1], x[2]) - y  # noqa: E731
        return ng.least_squares(fun, [1.0, 1.7, 1.0], (y,), fixed=[False, True, False], gtol=1e-12).x

    assert torch.autograd.gradcheck(solution, (Y.clone().requires_grad_(),), atol=1e-6)


def _network(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """Every residual needs its own row of the data, and its tensors do not broadcast."""
    return (torch.tanh(t @ x[:2].reshape(1, 2)) @ x[1:]) - y


MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: _network(x, T[:, None], Y),
    "apart": lambda x: hill(T, x[0], x[1], x[2]) - Y,
    "together": lambda x: (hill(T, x[0], x[1], x[2]) - Y).cumsum(0),
    "many": lambda x: (hill(torch.linspace(0, 5, 400).double(), x[0], x[1], x[2]) - 1).cumsum(0),
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("limit", [1, 2, 3, 6, None])
def test_nfev_is_how_often_fun_was_called_and_max_nfev_its_limit(name: str, limit: int | None) -> None:
    calls = []

    def fun(x: Tensor, *data: Tensor) -> Tensor:
        calls.append(1)
        return _network(x, *data) if data else MODELS[name](x)

    fit = ng.least_squares(fun, [1.0, 1.5, 1.0], (T[:, None], Y) if name == "rows" else (), max_nfev=limit)
    assert fit.nfev == len(calls)
    assert limit is None or name == "many" or fit.nfev <= limit
    assert fit.success == (limit is None)


def test_a_callback_sees_every_step_and_ends_where_the_fit_does() -> None:
    steps: list[Any] = []

    def watch(intermediate_result: Any) -> None:
        steps.append(intermediate_result)

    fit = ng.least_squares(MODELS["apart"], [1.0, 1.5, 1.0], callback=watch)
    assert [step.nit for step in steps] == list(range(1, len(steps) + 1))
    assert all(a.cost > b.cost or a.cost == pytest.approx(float(b.cost)) for a, b in pairwise(steps))
    assert torch.equal(steps[-1].x, fit.x)
    points: list[Tensor] = []
    ng.least_squares(MODELS["apart"], [1.0, 1.5, 1.0], callback=points.append)
    assert [p.tolist() for p in points] == [step.x.tolist() for step in steps]


def test_a_callback_stops_a_fit_as_in_scipy() -> None:
    def stop(x: Tensor) -> None:
        raise StopIteration

    fit = ng.least_squares(MODELS["apart"], [1.0, 1.5, 1.0], callback=stop)
    assert (fit.status, fit.success, fit.njev) == (-2, False, 2)
    assert fit.message.startswith("callback: ")


def test_a_loss_may_be_a_function_as_in_scipy() -> None:
    def cubic(z: Any, of: Any = torch) -> Any:
        t = 1 + z
        return of.stack([3 * (t ** (1 / 3) - 1), t ** (-2 / 3), -2 / 3 * t ** (-5 / 3)])

    data = Y.clone()
    data[7] += 4
    p0 = np.array([1.0, 1.5, 1.0])
    fit = ng.least_squares(lambda x: hill(T, x[0], x[1], x[2]) - data, p0.tolist(), loss=cubic, f_scale=0.1)
    expected = scipy.optimize.least_squares(
        lambda x: hill3(T.numpy(), *x) - data.numpy(), p0, loss=lambda z: cubic(z, np), f_scale=0.1, xtol=1e-14
    )
    np.testing.assert_allclose(fit.x, expected.x, rtol=1e-5)


def test_start_bounds_and_keywords_are_those_of_scipy() -> None:
    box = scipy.optimize.Bounds([0.0, 1.0, -np.inf], [5.0, 1.8, np.inf])
    curve = ng.curve_fit(lambda t, a, b, c: hill(t, a, b, c), T.numpy(), Y.numpy(), bounds=box)
    expected, _ = scipy.optimize.curve_fit(hill3, T.numpy(), Y.numpy(), bounds=box, xtol=1e-14)
    np.testing.assert_allclose(curve.x, expected, rtol=1e-5)
    torch.testing.assert_close(curve(T), hill(T, *curve.x))
    fit = ng.least_squares(lambda x, y, power: x**power - y, [2.0], (4.0,), kwargs={"power": 2})
    assert fit.x.tolist() == pytest.approx([2.0])


def test_two_close_peaks_are_found_as_often_in_either_scale_of_the_unknowns() -> None:
    """Of 500 fits of six unknowns, with centres that are up to two widths off."""
    draw = torch.Generator().manual_seed(3)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=draw)

    def model(x: Tensor) -> Tensor:
        t = torch.linspace(0, 10, 60, dtype=torch.float64)
        return x[0] * torch.exp(-0.5 * ((t - x[1]) / x[2]) ** 2) + x[3] * torch.exp(-0.5 * ((t - x[4]) / x[5]) ** 2)

    low = torch.tensor([1, 2, 0.4, 1, 6, 0.4], dtype=torch.float64)
    truth = low + torch.tensor([2, 2, 0.6, 2, 2, 0.6], dtype=torch.float64) * uniform(500, 6)
    x0 = truth * (0.7 + 0.6 * uniform(500, 6))
    x0[:, [1, 4]] = truth[:, [1, 4]] + 2.4 * uniform(500, 2) - 1.2
    data = torch.vmap(model)(truth) + 0.05 * torch.randn(500, 60, dtype=torch.float64, generator=draw)
    fun = lambda x, y: model(x) - y  # noqa: E731
    best = ng.least_squares(fun, truth, (data,), batch=True).cost
    for scale in ("jac", 1.0):
        fit = ng.least_squares(fun, x0, (data,), batch=True, x_scale=scale)
        assert int((fit.cost > 1.01 * best).sum()) <= 12
        assert float(fit.nfev.double().mean()) < 30  # those that lead to infinity stop


BAD: dict[str, tuple[type[Exception], str, Any]] = {
    "a column for a row": (
        ValueError,
        r"f returns \[25, 1\] for ydata \[25\], and their difference would have the shape \[25, 25\]",
        lambda: ng.curve_fit(lambda t, a: a * t[:, None], T, Y),
    ),
    "unknown number of parameters": (ValueError, "give p0", lambda: ng.curve_fit(lambda t, *p: p[0] * t, T, Y)),
    "sigma": (ValueError, r"sigma is \[3\]", lambda: ng.curve_fit(lambda t, a: a * t, T, Y, sigma=torch.ones(3))),
    "zero sigma": (ValueError, "sigma must be positive", lambda: ng.curve_fit(lambda t, a: a * t, T, Y, sigma=0.0)),
    "level": (ValueError, "level must be", lambda: ng.curve_fit(lambda t, a: a * t, T, Y).band(T, level=95)),
    "sigma of one side": (
        ValueError,
        r"sigma \[m m\] is the covariance of ydata, and must be symmetric",
        lambda: ng.curve_fit(lambda t, a: a * t, T, Y, sigma=torch.eye(25) + 0.5 * torch.ones(25, 25).triu(1)),
    ),
    "bounds that hold": (
        ValueError,
        "below its upper bound: to hold an unknown, use fixed=",
        lambda: ng.curve_fit(lambda t, a: a * t, T, Y, bounds=([1.0], [1.0])),
    ),
    "names without names": (
        TypeError,
        "x0 has no names: give booleans in its form, or x0 as a dict",
        lambda: ng.curve_fit(lambda t, a, b: a * t + b, T, Y, fixed="b"),
    ),
    "all fixed": (ValueError, "all unknowns are fixed", lambda: ng.least_squares(lambda x: x, [1.0], fixed=[True])),
    "names that are not there": (
        ValueError,
        "fixed names z, which are not in x0",
        lambda: ng.least_squares(lambda p: p["a"], {"a": torch.ones(2)}, fixed="z"),
    ),
    "numbers for booleans": (TypeError, "must be booleans", lambda: ng.least_squares(lambda x: x, [1.0], fixed=[1.0])),
    "callback of many": (
        ValueError,
        "callback sees the steps of one fit",
        lambda: ng.least_squares(lambda x: x, torch.ones(2, 1), callback=print, batch=True),
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_refused_with_the_fix(name: str) -> None:
    error, message, call = BAD[name]
    with pytest.raises(error, match=message):
        call()
