"""Functions of a reproducing kernel Hilbert space, and the gradient of a loss there: the Riesz representation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.functionspace import (
    Alike,
    FunctionalGradientDescent,
    KernelSum,
    Lengthscale,
    Median,
    SobolevKernel,
    functional_gradient,
)
from tests.golden import agrees, golden, tensor
from tests.pulled import close, normal

KERNEL = SobolevKernel(1.7, 1.5)
X, Z = normal(5, 2), normal(4, 2, seed=1)


def _function(centres: Tensor, *out: int, seed: int = 2) -> KernelSum:
    return KernelSum(KERNEL, centres, normal(len(centres), *out, seed=seed))


@pytest.mark.parametrize("out", [(), (3,), (2, 2)])
def test_the_inner_product_with_the_kernel_at_a_point_is_the_value_there(out: tuple[int, ...]) -> None:
    f = _function(X, *out)
    for z in Z:
        c = normal(1, *out, seed=5)
        close(KernelSum(KERNEL, z[None], c).inner(f), (f(z[None]) * c).sum(), 1e-13)


def test_functions_form_a_vector_space_with_an_inner_product() -> None:
    f, g = _function(X, 2), _function(Z, 2, seed=3)
    close((f - 3 * g)(Z), f(Z) - 3 * g(Z), 1e-13)
    close(f.inner(g), g.inner(f), 1e-13)
    close((f + g).norm() ** 2, f.norm() ** 2 + 2 * f.inner(g) + g.norm() ** 2, 1e-12)
    assert f.inner(g) ** 2 < f.norm() ** 2 * g.norm() ** 2
    assert (f - f).norm() < 1e-7


def test_the_norm_bounds_every_value() -> None:
    f = _function(X)
    assert (f(normal(50, 2, seed=9)).abs() <= f.norm()).all()


def test_the_norm_of_what_is_known_at_more_points_is_never_smaller() -> None:
    """fᵀK⁻¹f on a part of the data is biased low: it is the norm of the smallest function through them."""
    x = normal(9, 2, seed=8)
    y = x.prod(1).sin()
    norms = torch.stack([y[:n] @ torch.linalg.solve(KERNEL(x[:n]), y[:n]) for n in range(1, 10)])
    assert (norms.diff() >= 0).all()
    smallest = KernelSum(KERNEL, x, torch.linalg.solve(KERNEL(x), y))
    close(smallest.norm() ** 2, norms[-1], 1e-10)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_gradient_represents_the_differential_of_the_loss(reduction: str) -> None:
    """⟨∇ℓ, h⟩ = dℓ(h) for every direction h (Bai, Rosenberg and Xu (2022), lemma 4), by finite differences along h."""
    f, t = _function(Z, 3), torch.tensor([0, 2, 1, 1, 0])

    def loss(y: Tensor) -> Tensor:
        return F.cross_entropy(y, t, reduction=reduction)

    gradient = functional_gradient(KERNEL, f, X, loss)
    for seed in range(3):
        h, δ = _function(normal(3, 2, seed=seed), 3, seed=seed + 10), 1e-5
        slope = (loss((f + δ * h)(X)) - loss((f - δ * h)(X))) / (2 * δ)
        close(gradient.inner(h), slope, 1e-9)


def test_the_gradient_of_half_a_sum_of_squares_is_the_kernel_times_the_residual() -> None:
    f, t = _function(Z), normal(5, seed=7)
    gradient = functional_gradient(KERNEL, f, X, lambda y: (y - t).square().sum() / 2)
    close(gradient(X), KERNEL(X) @ (f(X) - t), 1e-13)


def test_the_gradient_is_the_steepest_direction() -> None:
    f, t = _function(Z), normal(5, seed=7)
    loss = lambda y: (y - t).square().sum() / 2  # noqa: E731
    gradient = functional_gradient(KERNEL, f, X, loss)
    steepest = gradient.norm()
    for seed in range(5):
        h = _function(normal(6, 2, seed=seed), seed=seed + 20)
        assert (f(X) - t) @ h(X) / h.norm() < steepest
    close((f(X) - t) @ gradient(X) / gradient.norm(), steepest, 1e-12)


def test_the_gradient_measures_its_lengthscale_on_the_data() -> None:
    gradient = functional_gradient(SobolevKernel(1.5, Median()), lambda x: x[:, 0], X, lambda y: y.sum())
    close(gradient(X), SobolevKernel(1.5, float(torch.pdist(X).median()))(X).sum(1), 1e-13)


def test_functions_of_two_spaces_do_not_add() -> None:
    f = _function(X)
    with pytest.raises(ValueError, match="functions of two spaces"):
        f + KernelSum(SobolevKernel(0.5), X, f.coefficients)
    with pytest.raises(ValueError, match=r"functions with outputs \(\) and \(2,\)"):
        f.inner(_function(X, 2))
    with pytest.raises(ValueError, match="one coefficient"):
        KernelSum(KERNEL, X, torch.zeros(3))
    with pytest.raises(TypeError, match="unsupported operand"):
        f + 1  # type: ignore[operator]


def test_losses_that_have_no_gradient_are_refused() -> None:
    f = _function(Z)
    with pytest.raises(ValueError, match=r"the loss returned shape \(5,\): it must be one number"):
        functional_gradient(KERNEL, f, X, lambda y: y.square())
    with pytest.raises(ValueError, match="does not depend on the outputs"):
        functional_gradient(KERNEL, f, X, lambda y: torch.tensor(1.0))
    with pytest.raises(TypeError, match="a function of a kernel has its centres in one"):
        functional_gradient(SobolevKernel(1.5, features=lambda x: x[0]), lambda x: x[0], (X, X), lambda y: y.sum())


# Functional gradient descent: golden values, its closed form, its limit, and classification.


SMOOTH = SobolevKernel(1.5)
POINTS, T = normal(6, 2), normal(6, 3, seed=1)


def _squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum() / 2


def _descent(**changes: Any) -> FunctionalGradientDescent:
    return FunctionalGradientDescent(**{"kernel": SMOOTH, "loss": _squares, "step": 0.2, **changes})


def _golden() -> tuple[Tensor, Tensor, Tensor, float]:
    inputs = golden("sobolev.kernel_gd")["inputs"]
    return tensor(inputs["X"]), tensor(inputs["y"]), tensor([[inputs["x_test"]]]), inputs["eta"]


def test_stochastic_descent_one_point_at_a_time_is_13() -> None:
    case = golden("sobolev.kernel_gd")
    x, y, x_test, η = _golden()
    fitted = _descent(step=η, passes=1, batch=1).fit(x, y)
    agrees(case, fitted.function.coefficients, "coef")
    agrees(case, fitted.predict(x_test)[0], "f_test")


def test_partial_fit_on_one_point_after_the_other_is_13_too() -> None:
    case = golden("sobolev.kernel_gd")
    x, y, x_test, η = _golden()
    descent = _descent(step=η)
    for n in range(3):
        descent.partial_fit(x[n : n + 1], y[n : n + 1])
    agrees(case, descent.function.coefficients, "coef")
    agrees(case, descent.predict(x_test)[0], "f_test")
    assert descent.loss_curve.shape == (3,)


def test_residuals_of_squares_shrink_by_one_minus_step_times_kernel() -> None:
    fitted = _descent(passes=7).fit(POINTS, T)
    K = SMOOTH(POINTS)
    shrink = torch.matrix_power(torch.eye(6, dtype=K.dtype) - 0.2 * K, 7)
    close(fitted.predict(POINTS) - T, -shrink @ T, 1e-13)
    close(fitted.loss_curve[0], T.square().sum() / 2)
    assert (fitted.loss_curve.diff() < 0).all()


def test_descent_ends_at_the_function_of_least_norm_through_the_data() -> None:
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)
    fitted = _descent(passes=3000, step=0.4).fit(x, x.sin())
    z = normal(9, seed=4)
    close(fitted.predict(z), SMOOTH(z, x) @ torch.linalg.solve(SMOOTH(x), x.sin()), 1e-8)


def test_a_step_beyond_two_over_the_largest_eigenvalue_diverges_and_one_below_does_not() -> None:
    limit = 2 / float(torch.linalg.eigvalsh(SMOOTH(POINTS))[-1])
    assert _descent(step=0.99 * limit, passes=300).fit(POINTS, T).loss_curve[-1] < 0.1 * T.square().sum()
    assert _descent(step=1.01 * limit, passes=300).fit(POINTS, T).loss_curve[-1] > T.square().sum()


def test_a_diverged_fit_is_refused_and_leaves_the_last_function() -> None:
    descent = _descent(passes=3).fit(POINTS, T)
    before = descent.function
    descent.step, descent.passes = 1e6, 100
    with pytest.raises(NonFiniteError, match=r"The step is too long .* Nothing was changed"):
        descent.fit(POINTS, T)
    assert descent.function is before
    assert descent.loss_curve.shape == (3,)


def test_steps_may_depend_on_time_and_batches_on_chance() -> None:
    seen: list[int] = []

    def step(t: int) -> float:
        seen.append(t)
        return 0.1 / t

    def fitted(seed: int) -> FunctionalGradientDescent:
        return _descent(step=step, passes=2, batch=4, generator=torch.Generator().manual_seed(seed)).fit(POINTS, T)

    first = fitted(0)
    assert seen == [1, 2, 3, 4]
    again, other = fitted(0), fitted(1)
    close(first.function.coefficients, again.function.coefficients, 0)
    assert (first.function.coefficients - other.function.coefficients).norm() > 1e-3


def test_classes_are_learned_with_outputs_of_their_own_shape() -> None:
    x = torch.cat([normal(20, 2) + c for c in (torch.tensor([4.0, 0.0]), torch.tensor([-4.0, 0.0]))])
    t = torch.arange(40) // 20
    loss = lambda y, t: F.cross_entropy(y, t, reduction="sum")  # noqa: E731
    kernel = SobolevKernel(1.5, Median(divisor=2))
    descent = FunctionalGradientDescent(kernel, loss, step=0.2, passes=30, outputs=(2,)).fit(x, t)
    assert (descent.predict(x).argmax(1) == t).all()
    with pytest.raises(ValueError, match=r"targets are torch.int64, no function values: pass outputs="):
        FunctionalGradientDescent(kernel, loss, step=0.2).fit(x, t)


def test_single_precision_stays_single() -> None:
    fitted = _descent(passes=5).fit(POINTS.float(), T.float())
    assert fitted.predict(POINTS.float()).dtype == torch.float32
    close(fitted.predict(POINTS.float()).double(), _descent(passes=5).fit(POINTS, T).predict(POINTS), 1e-5)


@pytest.mark.parametrize("rule", [Median(), Alike(0.1)], ids=repr)
def test_a_lengthscale_that_the_first_examples_do_not_tell_is_refused(rule: Lengthscale) -> None:
    x, t = 1000 * normal(50, 3), normal(50)
    first = _descent(kernel=SobolevKernel(1.5, rule))
    for few in (x[:1], x[:1].expand(4, 3)):
        with pytest.raises(ValueError, match=r"cannot be told from \d equal point\(s\).*first partial_fit"):
            first.partial_fit(few, t[: len(few)])
        with pytest.raises(ValueError, match=r"cannot be told from \d equal point\(s\), and is for others too: give a"):
            first.fit(few, t[: len(few)])
    with pytest.raises(RuntimeError, match="there is no function yet"):
        _ = first.function
    first.partial_fit(x, t).partial_fit(x[:1], t[:1])  # later ones have the lengthscale of the first
    kernel = first.function.kernel
    assert isinstance(kernel, SobolevKernel)
    assert kernel.lengthscale == float(rule.of(x))
    _descent(kernel=SobolevKernel(1.5, 7.0)).partial_fit(x[:1], t[:1])


@pytest.mark.parametrize("shape", [(3, 2), (3,), (3, 1, 1)], ids=str)
def test_targets_of_another_shape_than_the_first_are_refused(shape: tuple[int, ...]) -> None:
    """They would be broadcast inside the loss."""
    for descent in (_descent(passes=2).fit(POINTS, T[:, :1]), _descent().partial_fit(POINTS, T[:, :1])):
        before = descent.function
        with pytest.raises(ValueError, match=r"has the shape \(.*\), and those before had \(1,\). Reshape them"):
            descent.partial_fit(POINTS[:3], torch.zeros(shape, dtype=torch.float64))
        assert descent.function is before
        descent.partial_fit(POINTS[:3], T[:3, :1])
        descent.fit(POINTS, T).partial_fit(POINTS, T)  # fit starts anew


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"there is no function yet: call fit"):
        _descent().predict(POINTS)
    for step in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be a positive, finite number, or a function"):
            _descent(step=step)
        with pytest.raises(ValueError, match="must be a positive, finite number, or a function"):
            _descent(step=lambda t, step=step: step).fit(POINTS, T)
    for name in ("passes", "batch"):
        with pytest.raises(ValueError, match=f"{name}=0 must be a positive integer"):
            _descent(**{name: 0})
    with pytest.raises(ValueError, match="they need the same number of examples"):
        _descent().fit(POINTS, T[:4])
    with pytest.raises(ValueError, match="they need the same number of examples"):
        _descent().partial_fit(POINTS[:0], T[:0])
    with pytest.raises(MemoryBoundError, match=r"take a few examples a step with batch="):
        _descent().fit(torch.zeros(30_000, 1, dtype=torch.float64), torch.zeros(30_000))


def test_a_function_does_not_change_with_the_inputs_that_it_was_fitted_to() -> None:
    x, points = normal(6, 2), normal(4, 2, seed=1)
    kernel = SobolevKernel(1.5)
    target = x.sin()
    descent = FunctionalGradientDescent(kernel, lambda y, t: (y - t).square().sum() / 2, step=0.1, passes=3)
    f, gradient = descent.fit(x, target).function, functional_gradient(kernel, torch.sin, x, lambda y: y.sum())
    before = f(points), gradient(points)
    x.add_(1)
    assert torch.equal(f(points), before[0])
    assert torch.equal(gradient(points), before[1])
