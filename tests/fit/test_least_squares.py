"""``ng.least_squares``: certified values of NIST, the problems of MINPACK, SciPy's minima with bounds and losses."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import natgrad as ng
from benchmarks.least_squares import Problem
from natgrad.errors import IncompatibleError, NonFiniteError, SingularMetricError
from natgrad.fit import solve
from natgrad.log import OnceLogger
from tests.fit.minpack import PROBLEMS

NIST = [
    Problem(**{**row, "starts": tuple(row["starts"])})
    for row in json.loads(Path(__file__).with_name("nist.json").read_text())
]
TIMES = torch.linspace(0, 4, 12, dtype=torch.float64)
DATA = 3 * torch.exp(-0.7 * TIMES) + 0.1 * torch.sin(9 * TIMES)


def decay(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return x[0] * torch.exp(-x[1] * t) - y


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("problem", NIST, ids=lambda problem: problem.name)
def test_nist_certifies_the_values_and_their_standard_errors(problem: Problem, start: int) -> None:
    fit = ng.least_squares(problem.residuals(), torch.tensor(problem.starts[start - 1], dtype=torch.float64))
    assert fit.success
    # The gradient of Nelson's problem meets its tolerance before the unknowns have more digits.
    assert problem.digits(fit.x.tolist(), problem.certified) > (7 if problem.name == "Nelson" else 7.5)
    exact = problem.name == "Lanczos1"  # residuals of 1e-13 are rounding, and so is their standard deviation
    assert problem.digits(fit.standard_errors.tolist(), problem.deviations) > (2 if exact else 6)


@pytest.mark.parametrize("problem", [p for p in NIST if p.name in ("Misra1c", "Eckerle4", "MGH09", "Thurber")])
def test_tight_tolerances_reach_what_double_precision_allows(problem: Problem) -> None:
    x0 = torch.tensor(problem.starts[1], dtype=torch.float64)
    fit = ng.least_squares(problem.residuals(), x0, ftol=1e-15, xtol=1e-15, gtol=1e-12)
    assert problem.digits(fit.x.tolist(), problem.certified) > 9.9
    assert problem.digits(fit.standard_errors.tolist(), problem.deviations) > 9


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_problems_of_minpack_end_at_a_known_minimum(name: str) -> None:
    problem = PROBLEMS[name]
    fit = ng.least_squares(problem.fun, problem.x0)
    assert fit.success, fit.message
    assert any(2 * float(fit.cost) == pytest.approx(s, rel=1e-4, abs=1e-16) for s in problem.minima), float(fit.cost)


@pytest.mark.parametrize("name", ["Brown, almost linear", "Rosenbrock", "Wood", "helical valley", "Brown and Dennis"])
def test_a_far_start_does_not_stop_a_fit_early(name: str) -> None:
    """At 100 times the usual start columns of J are 1e16 long at first, and short steps gain little for a while."""
    problem = PROBLEMS[name]
    fit = ng.least_squares(problem.fun, 100 * problem.x0)
    assert any(2 * float(fit.cost) == pytest.approx(s, rel=1e-4, abs=1e-14) for s in problem.minima), float(fit.cost)


@pytest.mark.parametrize("bounds", [None, (-9.0, 9.0)], ids=["free", "in a box"])
def test_large_residuals_for_which_whole_steps_swing_and_grow_are_fitted_to_all_digits(bounds: Any) -> None:
    """The curvature that Gauss–Newton leaves out is up to twice that which it has: x must be within 1e-7 errors."""
    for seed in range(25):
        draw = np.random.default_rng(seed).standard_normal
        A, B, y = draw((12, 4)), draw((12, 4)), draw(12)
        data = tuple(map(torch.tensor, (A, B, y)))
        fit = ng.least_squares(lambda x, A, B, y: A @ x + 0.5 * torch.sin(B @ x) - y, [0.0] * 4, data, bounds=bounds)
        angle = B @ fit.x.numpy()
        f, J = A @ fit.x.numpy() + 0.5 * np.sin(angle) - y, A + 0.5 * np.cos(angle)[:, None] * B
        newton = np.linalg.solve(J.T @ J - 0.5 * (B.T * (f * np.sin(angle))) @ B, J.T @ f)  # with the whole Hessian
        assert float(np.abs(newton / fit.standard_errors.numpy()).max()) < 1e-7, seed


def test_a_saddle_point_to_which_equal_terms_lead_is_named() -> None:
    y = 3 * torch.exp(-0.5 * TIMES) + torch.exp(-3 * TIMES)

    def two(x: Tensor) -> Tensor:
        return x[0] * torch.exp(-x[1] * TIMES) + x[2] * torch.exp(-x[3] * TIMES) - y

    equal, apart = ng.least_squares(two, ones(4)), ng.least_squares(two, [1.0, 1.0, 1.0, 2.0])
    assert equal.x[:2].tolist() == pytest.approx(equal.x[2:].tolist())
    assert "rank 2 of 4" in equal.message
    assert "saddle point, to which equal starts" in equal.message
    assert apart.x.tolist() == pytest.approx([3, 0.5, 1, 3])
    assert "saddle" not in apart.message


def test_residuals_that_depend_on_nothing_have_nothing_to_fit() -> None:
    fit = ng.least_squares(lambda x: 0 * x[0] + DATA, ones(2))
    assert (fit.njev, fit.status, fit.rank) == (1, 1, 0)
    assert "rank 0 of 2" in fit.message
    assert fit.x.tolist() == [1.0, 1.0]


CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing of x": lambda x: DATA,
    "item": lambda x: x[0].item() * TIMES - DATA,
    "float": lambda x: math.exp(x[0]) * TIMES - DATA,
    "detach": lambda x: x.detach()[0] * TIMES - DATA,
    "many residuals": lambda x: x.detach()[0] * torch.arange(600, dtype=torch.float64),
    "a new tensor": lambda x: torch.tensor([x[0] - 1, x[1] - 2], dtype=torch.float64),
    "by way of NumPy": lambda x: torch.from_numpy(np.exp(x.detach().numpy())),
    "no_grad": torch.no_grad()(lambda x: x[0] * TIMES - DATA),
}


@pytest.mark.parametrize("name", list(CONSTANT))
def test_residuals_that_hide_the_unknowns_are_refused(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of conversions
        for _ in range(2):
            with pytest.raises(ValueError, match=r"do not depend on the unknowns: .* by torch operations, without"):
                ng.least_squares(CONSTANT[name], ones(2))
    with torch.no_grad(), pytest.raises(ValueError, match="do not depend on the unknowns"):
        ng.least_squares(lambda x: x.detach(), ones(3, 2), batch=True)


def test_a_stationary_start_is_not_a_function_that_hides_its_unknowns() -> None:
    for fun in (lambda x: x**2 + 1, lambda x: torch.cat([x**2, x.norm(p=4)[None] ** 4]).cumsum(0)):
        with torch.no_grad():
            fit = ng.least_squares(fun, torch.zeros(2, dtype=torch.float64))
        assert fit.x.tolist() == [0.0, 0.0]
        assert fit.rank == 0


def test_unknowns_that_change_nothing_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def fun(p: dict[str, Tensor]) -> Tensor:
        return p["a"][1, 0] * TIMES + p["b"].detach() - DATA

    x0 = {"a": ones(2, 1), "b": torch.tensor(0.5, dtype=torch.float64)}
    with caplog.at_level(logging.WARNING, logger="natgrad"):
        for _ in range(2):
            ng.least_squares(fun, x0)
            ng.least_squares(lambda x: x[0].item() * TIMES + x[1], ones(2))
        for _ in range(2):
            ng.least_squares(decay, ones(2), (TIMES, DATA))
    first, *others = [r.getMessage() for r in caplog.records]
    assert first.startswith(
        "least_squares: a[0, 0], b do not change the residuals: the derivative at x0 is exactly zero"
    )
    assert [text.split(":")[1] for text in others] == [" x[0] does not change the residuals"]


def test_the_result_has_what_scipy_has() -> None:
    fit = ng.least_squares(decay, ones(2), (TIMES, DATA))
    beside = scipy.optimize.least_squares(
        lambda x: x[0] * np.exp(-x[1] * TIMES.numpy()) - DATA.numpy(), np.ones(2), ftol=1e-14, xtol=1e-14, gtol=1e-14
    )
    np.testing.assert_allclose(fit.x, beside.x, rtol=1e-7)
    np.testing.assert_allclose(fit.cost, beside.cost, rtol=1e-12)
    np.testing.assert_allclose(fit.fun, beside.fun, atol=1e-6)
    np.testing.assert_allclose(fit.jac, beside.jac, atol=1e-5)
    assert float(fit.optimality) == float(fit.grad.abs().max()) < 1e-6
    assert (fit.status, fit.success) == (1, True)
    assert fit.message.startswith("gtol: ")
    assert repr(fit).startswith("FitResult(cost 0.0")
    lines = [f"x[{i}] = {float(fit.x[i]):.6g} ± {float(fit.standard_errors[i]):.2g}" for i in range(2)]
    assert str(fit) == "\n".join([*lines, repr(fit)])
    J = fit.jac
    expected = 2 * fit.cost / 10 * torch.linalg.inv(J.T @ J)
    torch.testing.assert_close(fit.covariance, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(fit.standard_errors, expected.diagonal().sqrt(), rtol=1e-9, atol=0)


def test_a_fit_prints_its_unknowns_by_name() -> None:
    x0 = {"a": torch.ones(()).double(), "b": torch.ones(1, 2).double()}
    fit = ng.least_squares(
        lambda x: torch.cat([(x["a"] - 2).reshape(1), (x["b"] - 3).flatten(), x["a"].reshape(1)]), x0
    )
    assert [line.split(" ± ")[0] for line in str(fit).splitlines()[:3]] == ["a = 1", "b[0] = 3", "b[1] = 3"]
    many = ng.least_squares(lambda x: x - 1, ones(30))
    assert str(many) == repr(many)


def test_unknowns_may_be_a_dict_of_tensors_of_any_shape_and_residuals_too() -> None:
    basis = torch.stack([TIMES**k for k in range(4)])
    target = torch.stack([DATA, DATA.square()])

    def fun(p: dict[str, Tensor]) -> Tensor:
        return (p["weights"] @ basis) * torch.exp(-p["rate"] * TIMES) - target

    fit = ng.least_squares(fun, {"weights": ones(2, 4), "rate": torch.tensor(0.5, dtype=torch.float64)})
    assert isinstance(fit.x, dict)
    assert {name: tuple(t.shape) for name, t in fit.x.items()} == {"weights": (2, 4), "rate": ()}
    assert fit.success
    assert fit.fun.shape == (2, 12)
    assert fit.jac.shape == (24, 9)
    torch.testing.assert_close(fit.fun, fun(fit.x))
    flat = ng.least_squares(
        lambda x: fun({"weights": x[:8].view(2, 4), "rate": x[8]}), torch.cat([ones(8), 0.5 * ones(1)])
    )
    torch.testing.assert_close(fit.x["weights"].flatten(), flat.x[:8], rtol=1e-6, atol=1e-8)


SCALAR: dict[str, Callable[[Tensor], Tensor]] = {
    "by copies": lambda x: x[0] * torch.exp(-x[1] * TIMES) - DATA,
    "a mean of the unknowns": lambda x: x.mean() * TIMES + x.square().sum() - DATA,
    "a matrix product": lambda x: torch.stack([TIMES, TIMES**2], 1) @ x**3 - DATA,
    "a switch": lambda x: torch.where(x.norm() > 1.9, x[0] * TIMES**2, x[0] * TIMES) + x[1] - DATA,
    "a Python branch": lambda x: (x[0] if float(x.detach().flatten()[0]) > 0 else x[0] ** 2) * TIMES + x[1] - DATA,
    "as many rows": lambda x: torch.cat([x[0] * TIMES - DATA, x[1] - x]),
}


@pytest.mark.parametrize("name", list(SCALAR))
def test_the_jacobian_is_right_however_it_is_computed(name: str) -> None:
    fun = SCALAR[name]
    for _ in range(2):  # also when the function is known
        fit = ng.least_squares(fun, ones(2))
        torch.testing.assert_close(fit.jac, torch.autograd.functional.jacobian(fun, fit.x), rtol=1e-9, atol=1e-12)
        gradient = torch.func.grad(lambda x: 0.5 * fun(x).square().sum())(fit.x)
        jumps = name == "a switch"  # and the fit ends there
        assert jumps or float(gradient.abs().max()) < 1e-3 * max(1, float(fit.cost))


def small_network(x: Tensor, z: Tensor) -> Tensor:
    """Of two inputs, six hidden units and one output; x [25]."""
    return torch.tanh(z @ x[:12].view(2, 6) + x[12:18]) @ x[18:24] + x[24]


BY_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a row for each residual": lambda x, z, y: small_network(x, z) - y,
    "rows that are mixed": lambda x, z, y: small_network(x, z - z.mean(0)) - y,
    "residuals that are mixed": lambda x, z, y: (small_network(x, z) - y).cumsum(0),
    "rows in another order": lambda x, z, y: (small_network(x, z) - y).flip(0),
}


@pytest.mark.parametrize("name", list(BY_ROWS))
def test_the_jacobian_of_a_network_is_right_whether_its_rows_are_apart_or_not(name: str) -> None:
    fun = BY_ROWS[name]
    generator = torch.Generator().manual_seed(0)
    z, x0 = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((40, 2), (25,)))
    y = z[:, 0] * z[:, 1]
    for _ in range(2):  # also when the function is known
        fit = ng.least_squares(fun, x0, (z, y), max_nfev=6)
        expected = torch.autograd.functional.jacobian(lambda x: fun(x, z, y), fit.x)
        torch.testing.assert_close(fit.jac, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(fit.fun, fun(fit.x, z, y), rtol=1e-12, atol=1e-14)


def test_a_fit_in_a_bent_valley_takes_few_evaluations() -> None:
    """Bennett5 from its first start: 760 of them along straight steps."""
    (problem,) = [p for p in NIST if p.name == "Bennett5"]
    fit = ng.least_squares(problem.residuals(), torch.tensor(problem.starts[0], dtype=torch.float64))
    assert fit.nfev < 250
    assert ng.least_squares(problem.residuals(), problem.starts[0], max_nfev=6).nfev == 6


@pytest.mark.parametrize("amplitude", [2.4, 2.42, 2.48, 2.5, 2.52])
def test_a_settled_fit_does_not_stop_for_trying_the_same_step_again(amplitude: float) -> None:
    """A model that misses the data, whose Gauss–Newton steps overshoot by about twice their length."""
    t = torch.linspace(0, 4, 60, dtype=torch.float64)
    y = 3 * torch.exp(-0.7 * t) + 0.5 + 0.1 * torch.sin(9 * t)

    def fun(x: Tensor) -> Tensor:
        return amplitude * torch.exp(-x[0] * t) + x[1] - y

    def cost(x: Tensor) -> Tensor:
        return 0.5 * fun(x).square().sum()

    fit = ng.least_squares(fun, [0.7, 0.5])
    x = fit.x
    for _ in range(20):
        x = x - torch.linalg.solve(torch.func.hessian(cost)(x), torch.func.grad(cost)(x))
    assert float(((fit.x - x) / fit.standard_errors).abs().max()) < 1e-6


@pytest.mark.parametrize("loss", ["linear", "soft_l1", "huber", "cauchy", "arctan"])
@pytest.mark.parametrize("bounds", [None, ([2.5, 0.8], [4.0, 2.0]), ([-math.inf, 0.75], [2.9, math.inf])])
def test_losses_and_bounds_have_the_minima_of_scipy(loss: str, bounds: Any) -> None:
    data = DATA.clone()
    data[3] += 5  # an outlier
    x0 = torch.tensor([2.7, 0.9], dtype=torch.float64)
    box = None if bounds is None else (torch.tensor(bounds[0]), torch.tensor(bounds[1]))
    fit = ng.least_squares(decay, x0, (TIMES, data), loss=loss, f_scale=0.1, bounds=box)
    tight: Any = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-14}
    beside = scipy.optimize.least_squares(
        lambda x: x[0] * np.exp(-x[1] * TIMES.numpy()) - data.numpy(),
        x0.numpy(),
        loss=loss,
        f_scale=0.1,
        bounds=(-np.inf, np.inf) if bounds is None else bounds,
        **tight,
    )
    np.testing.assert_allclose(fit.cost, beside.cost, rtol=1e-6)
    np.testing.assert_allclose(fit.x, beside.x, rtol=1e-3)
    assert float(fit.optimality) < 1e-5
    np.testing.assert_array_equal(fit.active, beside.active_mask)


@pytest.mark.parametrize("seed", range(6))
def test_linear_problems_in_a_box_end_where_scipy_does(seed: int) -> None:
    generator = np.random.default_rng(seed)
    A, y = generator.standard_normal((12, 6)), generator.standard_normal(12)
    low, high = -generator.random(6) * 0.2, generator.random(6) * 0.2
    beside = scipy.optimize.lsq_linear(A, y, (low, high), method="bvls", tol=1e-14)
    M, t = torch.tensor(A), torch.tensor(y)
    fit = ng.least_squares(
        lambda x: M @ x - t, torch.zeros(6, dtype=torch.float64), bounds=(torch.tensor(low), torch.tensor(high))
    )
    np.testing.assert_allclose(fit.x, beside.x, atol=1e-9)
    assert fit.nfev < 15


def test_a_box_moves_the_minimum_of_rosenbrock_to_its_edge() -> None:
    def fun(x: Tensor) -> Tensor:
        return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    fit = ng.least_squares(fun, torch.tensor([-1.2, 2.0], dtype=torch.float64), bounds=(None, (math.inf, 2.0)))
    torch.testing.assert_close(fit.x, ones(2), rtol=1e-8, atol=0)
    edge = ng.least_squares(fun, 2 * ones(2), bounds=([-math.inf, 1.5], math.inf))
    assert float(edge.x[1]) == 1.5
    assert edge.active.tolist() == [0, -1]
    a = float(edge.x[0])
    assert 200 * a * (a**2 - 1.5) + (a - 1) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"loss": "soft_l1", "f_scale": 0.1}, {"bounds": (0.0, [10.0, 0.75])}])
def test_many_fits_in_one_call_are_the_fits_one_by_one(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    data = DATA * (0.5 + torch.rand(40, 1, dtype=torch.float64, generator=generator))
    data += 0.05 * torch.randn(40, 12, dtype=torch.float64, generator=generator)
    x0 = 0.1 + 0.6 * torch.rand(40, 2, dtype=torch.float64, generator=generator)
    fit = ng.least_squares(lambda x, y: decay(x, TIMES, y), x0, (data,), batch=True, **options)
    assert fit.x.shape == (40, 2)
    assert fit.fun.shape == (40, 12)
    assert fit.covariance.shape == (40, 2, 2)
    assert bool(torch.as_tensor(fit.success).all())
    assert fit.message.startswith("40 fits by gtol")
    for k in range(0, 40, 7):
        alone = ng.least_squares(decay, x0[k], (TIMES, data[k]), **options)
        torch.testing.assert_close(fit.x[k], alone.x, rtol=1e-7, atol=0)
        torch.testing.assert_close(fit.covariance[k], alone.covariance, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(fit.cost[k], alone.cost, rtol=1e-10, atol=0)


def test_a_fit_that_fails_leaves_the_others_of_its_batch_alone() -> None:
    data = torch.stack([DATA, DATA * math.nan, 2 * DATA])
    fit = ng.least_squares(lambda x, y: decay(x, TIMES, y), ones(3, 2), (data,), batch=True)
    assert torch.as_tensor(fit.status).tolist() == [1, -3, 1]
    assert torch.as_tensor(fit.success).tolist() == [True, False, True]
    assert "1 fits by NaN or infinity" in fit.message
    torch.testing.assert_close(fit.x[2], fit.x[0] * torch.tensor([2.0, 1.0], dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"loss": "cauchy", "f_scale": 0.3}, {"bounds": (0.0, [10.0, 0.65])}])
def test_the_solution_is_differentiable_in_the_arguments(options: dict[str, Any]) -> None:
    def solution(t: Tensor, y: Tensor) -> Any:
        return ng.least_squares(decay, ones(2) * 0.5, (t, y), gtol=1e-12, **options).x

    inputs = (TIMES.clone().requires_grad_(), DATA.clone().requires_grad_())
    assert torch.autograd.gradcheck(solution, inputs, atol=1e-6)


def test_the_solutions_of_a_batch_are_differentiable() -> None:
    data = torch.stack([DATA, 2 * DATA.square()]).requires_grad_()

    def solution(y: Tensor) -> Any:
        fun = lambda x, y: decay(x, TIMES, y)  # noqa: E731
        return ng.least_squares(fun, ones(2, 2), (y,), batch=True, gtol=1e-12).x

    assert torch.autograd.gradcheck(solution, (data,), atol=1e-6)


@pytest.mark.parametrize("batch", [False, True])
def test_second_derivatives_of_the_solution_are_refused(batch: bool) -> None:
    y = (torch.stack([DATA, 2 * DATA]) if batch else DATA).clone().requires_grad_()
    fun = lambda x, y: decay(x, TIMES, y)  # noqa: E731
    x = ng.least_squares(fun, ones(2, 2) if batch else ones(2), (y,), batch=batch).x
    (plain,) = torch.autograd.grad(x.sum(), y, retain_graph=True)
    (gradient,) = torch.autograd.grad(x.sum(), y, create_graph=True)
    torch.testing.assert_close(gradient.detach(), plain)
    for loss in (gradient.square().sum(), gradient.sum() + y.square().sum()):
        with pytest.raises(RuntimeError, match="first derivatives with respect to args, and no second ones"):
            torch.autograd.grad(loss, y, retain_graph=True)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, y: torch.func.jvp(f, (y,), (y,)),
        lambda f, y: torch.func.jacfwd(f)(y),
        lambda f, y: torch.func.jacrev(f)(y),
        lambda f, y: torch.func.grad(lambda y: f(y).sum())(y),
    ],
    ids=["jvp", "jacfwd", "jacrev", "grad"],
)
def test_derivatives_of_the_solution_by_transforms_are_refused(transform: Callable[..., Any]) -> None:
    """Forward mode would find zero."""
    with pytest.raises(IncompatibleError, match=r"args\[1\] is differentiated .* use these, or detach it"):
        transform(lambda y: ng.least_squares(decay, ones(2), (TIMES, y)).x, DATA)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(IncompatibleError, match="in forward mode"):
        ng.least_squares(decay, ones(2), (TIMES, torch.autograd.forward_ad.make_dual(DATA, DATA)))


def test_a_fit_inside_vmap_is_refused_with_the_fix() -> None:
    with pytest.raises(IncompatibleError, match="batch=True"):
        torch.vmap(lambda y: ng.least_squares(decay, ones(2), (TIMES, y)).x)(DATA.expand(3, -1))


def test_a_fit_inside_a_transform_of_something_else_is_the_fit() -> None:
    def times(a: Tensor) -> Tensor:
        x: Tensor = ng.least_squares(decay, ones(2), (TIMES, DATA)).x
        return a * x[0]

    found = torch.func.grad(times)(torch.tensor(2.0).double())
    torch.testing.assert_close(found, ng.least_squares(decay, ones(2), (TIMES, DATA)).x[0])


def test_a_minimum_that_is_not_isolated_has_no_derivative() -> None:
    y = DATA.clone().requires_grad_()
    with pytest.raises(SingularMetricError, match="singular or indefinite, so that x has no derivative"):
        ng.least_squares(lambda x, y: (x[0] + x[1]) * TIMES - y, ones(2), (y,))


def test_an_unknown_whose_derivatives_have_no_square_stays_where_it_is() -> None:
    """The column of x[1] has the length 1e-300, and a part of 1e-308 beside that of x[0]."""

    def fun(x: Tensor) -> Tensor:
        small = x[1] * torch.exp(-x[0].square())
        return torch.stack([x[0] - 26.28 + small, 1 + 1e-8 * small])

    fit = ng.least_squares(fun, torch.tensor([26.6, 1.0], dtype=torch.float64), x_scale=1.0)
    assert fit.success
    assert fit.x.tolist() == pytest.approx([26.28, 1.0], rel=1e-12)


def test_a_step_to_where_residuals_are_not_finite_is_shortened() -> None:
    fit = ng.least_squares(lambda x: torch.log(x) + torch.arange(3, dtype=torch.float64), 5 * ones(3))
    torch.testing.assert_close(fit.x, torch.exp(-torch.arange(3, dtype=torch.float64)), rtol=1e-8, atol=0)
    assert fit.shortened > 0
    assert "trial steps led to residuals that are not finite, and were shortened" in fit.message


def test_more_unknowns_than_residuals_have_a_solution_and_no_covariance() -> None:
    fit = ng.least_squares(lambda x: (x * torch.arange(1.0, 6.0, dtype=torch.float64)).sum().view(1) - 3, ones(5))
    assert fit.success
    assert float(fit.cost) < 1e-20
    assert bool((fit.covariance == math.inf).all())
    assert "rank 1 of 5: x is not unique" in fit.message


def test_a_jacobian_without_full_rank_is_said_and_the_minimum_found() -> None:
    fit = ng.least_squares(lambda x: (x[0] + x[1]) * TIMES + 0 * x[2] - DATA, torch.tensor([5.0, -1.0, 2.0]).double())
    best = float(TIMES @ DATA / (TIMES @ TIMES))
    assert float(fit.x[0] + fit.x[1]) == pytest.approx(best, rel=1e-9)
    assert float(fit.x[2]) == 2.0
    assert fit.rank == 1
    assert "the Jacobian has rank 1 of 3" in fit.message
    assert bool((fit.covariance == math.inf).all())


def test_the_number_of_evaluations_is_kept_and_said() -> None:
    calls = []

    def fun(x: Tensor) -> Tensor:
        calls.append(1)
        return decay(x, TIMES, DATA)

    fit = ng.least_squares(fun, ones(2), max_nfev=3)
    assert (fit.nfev, fit.status, fit.success) == (3, 0, False)
    assert fit.message.startswith("max_nfev")


def test_every_rule_can_stop_a_fit_and_names_itself() -> None:
    off: dict[str, Any] = {"ftol": None, "xtol": None, "gtol": None}
    by = {
        name: ng.least_squares(decay, ones(2), (TIMES, DATA), **off | {name: 1e-6}) for name in ("ftol", "xtol", "gtol")
    }
    assert {name: fit.message.split(":")[0] for name, fit in by.items()} == {name: name for name in by}
    assert {name: fit.status for name, fit in by.items()} == {"ftol": 2, "xtol": 3, "gtol": 1}


def test_single_precision_is_said_once_with_what_is_reached(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="natgrad"):
        for _ in range(2):
            fit = ng.least_squares(decay, torch.ones(2), (TIMES.float(), DATA.float()))
    assert fit.success
    exact = ng.least_squares(decay, ones(2), (TIMES, DATA))
    torch.testing.assert_close(fit.x.double(), exact.x, rtol=1e-4, atol=0)
    assert [r.message.split(" here")[0] for r in caplog.records if "float32" in r.message] in (
        [],  # said before, in another test
        ["least_squares in float32 finds x to about 2e-07 of its size"],
    )


def test_residuals_whose_squares_are_zero_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Every x is then a minimum, and x0 is returned."""
    with caplog.at_level(logging.WARNING, logger="natgrad"):
        ng.least_squares(decay, torch.tensor([3.0, 0.7]).double(), (TIMES, 3 * torch.exp(-0.7 * TIMES)))  # exact
        ng.least_squares(lambda x: 1e-200 * (x - 3), 3 * ones(2))
        assert not caplog.records
        fit = ng.least_squares(lambda x: 1e-200 * decay(x, TIMES, DATA), ones(2))
    assert fit.njev == 1
    assert [r.getMessage() for r in caplog.records] == [
        "least_squares: residuals of at most 2e-200 have squares that are zero, or nearly so, in float64, so that a "
        "fit ends at x0 or too early: multiply them by a number that makes them about 1"
    ]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(("unit", "dtype"), [(1e-158, torch.float64), (1e-22, torch.float32)])
def test_residuals_whose_squares_lose_their_digits_are_named(
    unit: float, dtype: torch.dtype, batch: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve, "_logger", OnceLogger())
    t, data, x0 = TIMES.to(dtype), DATA.to(dtype), torch.ones(2, dtype=dtype)
    with caplog.at_level(logging.WARNING, logger="natgrad"):
        if batch:
            ng.least_squares(lambda x, y: unit * decay(x, t, y), x0.expand(3, 2), (data.expand(3, -1),), batch=True)
        else:
            ng.least_squares(lambda x: unit * decay(x, t, data), x0)
    assert "have squares that are zero, or nearly so" in caplog.records[0].getMessage()


@pytest.mark.parametrize("options", [{}, {"bounds": (-5, 5)}], ids=["free", "box"])
def test_without_xtol_a_kink_ends_a_fit_by_its_number_of_evaluations(options: dict[str, Any]) -> None:
    fit = ng.least_squares(lambda x: x.abs() + 1, torch.tensor([0.3, -0.7]).double(), xtol=None, ftol=None, **options)
    assert (fit.status, fit.success, fit.nfev) == (0, False, 1520)
    assert fit.x.abs().max() < 1e-12


def test_numbers_are_unknowns_in_double_precision() -> None:
    fit = ng.least_squares(decay, [1, 1], (TIMES, DATA))
    assert fit.x.dtype == torch.float64
    named = ng.least_squares(lambda p: decay([p["a"], p["b"][0]], TIMES, DATA), {"a": 1.0, "b": [1.0]})  # type: ignore[arg-type,dict-item]
    assert {p.dtype for p in named.x.values()} == {torch.float64}
    torch.testing.assert_close(torch.stack([named.x["a"], named.x["b"][0]]), fit.x)


def test_arrays_in_args_are_tensors_in_fun() -> None:
    t, y = TIMES.numpy(), DATA.numpy()
    expected = ng.least_squares(decay, ones(2), (TIMES, DATA)).x
    reversed_twice = np.ascontiguousarray(y[::-1])[::-1]  # torch does not read negative strides
    for arrays in ((t, y), (t.astype(">f8"), reversed_twice)):
        assert torch.equal(ng.least_squares(decay, ones(2), arrays).x, expected)
    seen: list[Any] = []

    def fun(x: Tensor, t: Tensor, order: Any, count: Any) -> Tensor:
        seen[:] = [t, order, count]
        return x[0] * t - 1

    order = np.arange(3)
    ng.least_squares(fun, torch.ones(1), (t, order, 2.0))
    assert seen[0].dtype == torch.float32
    assert seen[1] is order
    assert seen[2] == 2.0
    many = ng.least_squares(lambda x, y: decay(x, TIMES, y), ones(2, 2), (np.stack([y, y]),), batch=True)
    torch.testing.assert_close(many.x[1], expected)


@pytest.mark.parametrize("batch", [False, True])
def test_the_solution_does_not_share_memory_with_the_start(batch: bool) -> None:
    for x0 in (ones(3, 2), ones(3, 2).numpy(), {"a": ones(3, 2)}):
        fit = ng.least_squares(lambda p: (p["a"] if isinstance(p, dict) else p) - 1, x0, batch=batch)  # type: ignore[arg-type]
        found, start = (fit.x["a"], x0["a"]) if isinstance(x0, dict) else (fit.x, torch.as_tensor(x0))
        found.add_(1)
        assert torch.equal(start, ones(3, 2))


def test_a_fit_leaves_gradients_and_the_random_stream_alone() -> None:
    weight = ones(1).requires_grad_()
    x0 = ones(2).requires_grad_()
    state = torch.get_rng_state()
    fit = ng.least_squares(lambda x: decay(x, TIMES, DATA) * weight, x0)
    assert weight.grad is None
    assert x0.grad is None
    assert not fit.x.requires_grad
    assert not fit.fun.requires_grad
    assert torch.equal(state, torch.get_rng_state())


BAD: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "not a tensor": (TypeError, "must return a tensor of residuals", lambda: ng.least_squares(len, ones(2))),  # type: ignore[arg-type]
    "no residuals": (ValueError, "no residuals", lambda: ng.least_squares(lambda x: x[:0], ones(2))),
    "two precisions": (
        TypeError,
        "residuals of torch.float64 for unknowns of torch.float32",
        lambda: ng.least_squares(lambda x: x.double(), torch.ones(2)),
    ),
    "NaN at x0": (
        NonFiniteError,
        "2 of 2 residuals at x0 are NaN or infinite: start where fun is finite, and leave out data that are not",
        lambda: ng.least_squares(lambda x: x.log(), -ones(2)),
    ),
    "no derivative": (
        NonFiniteError,
        r"Jacobian of the residuals is NaN or infinite .* in the unknowns \[0\]",
        lambda: ng.least_squares(lambda x: torch.stack([x[0].sqrt(), x[1]]) - 1, torch.tensor([0.0, 1.0]).double()),
    ),
    "overflow of the cost": (
        NonFiniteError,
        r"the cost, or its model, overflows at x = .*100.0.: there are residuals up to 5.2e\+173 .* divide",
        lambda: ng.least_squares(lambda x: torch.exp(x[0] * TIMES), [100.0]),
    ),
    "NumPy": (
        TypeError,
        "must use torch functions",
        lambda: ng.least_squares(lambda x: torch.from_numpy(np.exp(x.numpy())), ones(2)),
    ),
    "NumPy in a batch": (
        TypeError,
        "must use torch functions .* turn arrays into tensors",
        lambda: ng.least_squares(lambda x: x.numpy()[0] * x, ones(3, 2), batch=True),
    ),
    "a branch in a batch": (
        TypeError,
        "mapped over all fits at once, .* write it with torch.where",
        lambda: ng.least_squares(lambda x: x if x[0] > 0 else 2 * x, ones(3, 2), batch=True),
    ),
    "args": (TypeError, r"args must be a tuple .* write \(data,\)", lambda: ng.least_squares(decay, ones(2), TIMES)),  # type: ignore[arg-type]
    "loss": (ValueError, "loss is one of 'linear', 'soft_l1'", lambda: ng.least_squares(decay, ones(2), loss="l1")),
    "f_scale": (ValueError, "f_scale must be positive", lambda: ng.least_squares(decay, ones(2), f_scale=0.0)),
    "x_scale": (ValueError, "x_scale is", lambda: ng.least_squares(decay, ones(2), x_scale="x")),
    "no rules": (
        ValueError,
        "one of ftol, xtol and gtol",
        lambda: ng.least_squares(decay, ones(2), (TIMES, DATA), ftol=None, xtol=None, gtol=None),
    ),
    "negative": (ValueError, r"ftol must be a number in \[0, 1\)", lambda: ng.least_squares(decay, ones(2), ftol=-1.0)),
    "max_nfev": (ValueError, "max_nfev must be at least 1", lambda: ng.least_squares(decay, ones(2), max_nfev=0)),
    "whole max_nfev": (
        TypeError,
        "max_nfev must be an integer, got 2.5",
        lambda: ng.least_squares(decay, ones(2), max_nfev=2.5),  # type: ignore[arg-type]
    ),
    "outside": (
        ValueError,
        r"x0 is outside of the bounds in the unknowns \[1\]",
        lambda: ng.least_squares(decay, ones(2), bounds=(0, [2, 0.5])),
    ),
    "empty box": (ValueError, "below its upper bound", lambda: ng.least_squares(decay, ones(2), bounds=(1, 1))),
    "bounds": (TypeError, r"bounds is a pair \(lower, upper\)", lambda: ng.least_squares(decay, ones(2), bounds=3)),  # type: ignore[arg-type]
    "shape of a bound": (
        ValueError,
        r"the lower bound of x0 is \[3\], and the unknown \[2\]",
        lambda: ng.least_squares(decay, ones(2), bounds=([0, 0, 0], 2)),
    ),
    "name of a bound": (
        ValueError,
        "the lower bound names b, which are not in x0",
        lambda: ng.least_squares(lambda p: p["a"], {"a": ones(2)}, bounds=({"b": 0}, 3)),
    ),
    "complex": (TypeError, "complex: fit its real", lambda: ng.least_squares(decay, torch.ones(2, dtype=torch.cfloat))),
    "complex residuals": (TypeError, "torch.view_as_real", lambda: ng.least_squares(lambda x: 1j * x, ones(2))),
    "complex array": (TypeError, "complex: fit its real", lambda: ng.least_squares(decay, np.array([1j, 2]))),  # type: ignore[arg-type]
    "no unknowns": (TypeError, "x0 must be a number, or numbers", lambda: ng.least_squares(decay, None)),  # type: ignore[arg-type]
    "a bound without a number": (
        TypeError,
        r"the lower bound of x0 must be a number, .* got \[0, None\]",
        lambda: ng.least_squares(decay, ones(2), bounds=([0, None], 2)),
    ),
    "several f_scale": (
        TypeError,
        "f_scale must be one number",
        lambda: ng.least_squares(decay, ones(2), loss="huber", f_scale=ones(2)),  # type: ignore[arg-type]
    ),
    "word as a tolerance": (ValueError, "ftol must be a number", lambda: ng.least_squares(decay, ones(2), ftol="no")),  # type: ignore[arg-type]
    "half": (TypeError, "needs float64", lambda: ng.least_squares(decay, torch.ones(2).half())),
    "empty": (ValueError, "x0 is empty", lambda: ng.least_squares(decay, ones(0))),
    "NaN in x0": (NonFiniteError, "x0 holds NaN", lambda: ng.least_squares(decay, ones(2) * math.nan)),
    "shared args of a batch": (
        ValueError,
        r"args\[0\] is a tensor \[12\]: let fun read what all fits share",
        lambda: ng.least_squares(decay, ones(3, 2), (TIMES, ones(3, 12)), batch=True),
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_refused_with_the_fix(name: str) -> None:
    error, message, call = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_a_function_that_writes_into_a_real_buffer_warns_of_nothing() -> None:
    """Ways of differentiation that it was not written for are tried in silence."""

    def fun(x: Tensor) -> Tensor:
        r = torch.zeros(3, dtype=torch.float64)
        r[0], r[1], r[2] = x[0] ** 2 - 1, x[1] - 2, x[0] * x[1] - 2
        return r

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = ng.least_squares(fun, torch.tensor([2.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(fit.x, torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_fits_without_a_finite_jacobian_can_be_printed() -> None:
    t = torch.linspace(0, 1, 6, dtype=torch.float64)
    x0 = torch.tensor([[0.0, 1.5], [1.0, 1.5]], dtype=torch.float64)
    fits = ng.least_squares(lambda x: torch.sqrt(x[0]) * t + x[1] - 2 * t - 1, x0, batch=True)
    assert "1 fits have a Jacobian of rank below 2" in repr(fits)
    assert fits.rank.tolist() == [1, 2]  # the column that is not finite does not count


@pytest.mark.parametrize("m", [3, 12])
@pytest.mark.parametrize("alone", [True, False])
def test_a_singular_linear_problem_ends_at_its_nearest_minimum(m: int, alone: bool) -> None:
    """In units of the columns of A, far from x0, beside regular problems, with fewer residuals than unknowns."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3, m, 5, dtype=torch.float64, generator=generator)
    A = A * torch.tensor([1, 1e3, 1e-3, 10, 1], dtype=torch.float64)
    A[1, :, 4] = 2 * A[1, :, 0]
    A[2, :, 3] = 0
    y = 30 * torch.randn(3, m, dtype=torch.float64, generator=generator)
    x0 = torch.full((3, 5), 0.1, dtype=torch.float64)
    lengths = A.norm(dim=1)
    D = torch.where(lengths > 0, lengths, 1.0)
    gap = (y - (A @ x0.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)
    nearest = x0 + (torch.linalg.pinv(A / D.unsqueeze(1)) @ gap).squeeze(-1) / D

    def fun(x: Tensor, A: Tensor, y: Tensor) -> Tensor:
        return (A @ x.unsqueeze(-1)).squeeze(-1) - y

    if alone:
        found = torch.stack([ng.least_squares(fun, x0[k], (A[k], y[k])).x for k in range(3)])
    else:
        found = ng.least_squares(fun, x0, (A, y), batch=True).x
    torch.testing.assert_close(D * found, D * nearest, rtol=1e-9, atol=1e-9)
