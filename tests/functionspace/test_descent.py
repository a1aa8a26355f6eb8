"""Functional gradient descent: golden values, its closed form, its limit, and classification."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.functionspace import Alike, FunctionalGradientDescent, Lengthscale, Median, SobolevKernel
from tests.golden import agrees, golden, tensor
from tests.pulled import close, normal

KERNEL = SobolevKernel(1.5)
X, T = normal(6, 2), normal(6, 3, seed=1)


def _squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum() / 2


def _descent(**changes: Any) -> FunctionalGradientDescent:
    return FunctionalGradientDescent(**{"kernel": KERNEL, "loss": _squares, "step": 0.2, **changes})


def _golden() -> tuple[Tensor, Tensor, Tensor, float]:
    inputs = golden("sobolev.kernel_gd")["inputs"]
    return tensor(inputs["X"]), tensor(inputs["y"]), tensor([[inputs["x_test"]]]), inputs["eta"]


def test_s2_stochastic_descent_one_point_at_a_time_is_13() -> None:
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
    fitted = _descent(passes=7).fit(X, T)
    K = KERNEL(X)
    shrink = torch.matrix_power(torch.eye(6, dtype=K.dtype) - 0.2 * K, 7)
    close(fitted.predict(X) - T, -shrink @ T, 1e-13)
    close(fitted.loss_curve[0], T.square().sum() / 2)
    assert (fitted.loss_curve.diff() < 0).all()


def test_descent_ends_at_the_function_of_least_norm_through_the_data() -> None:
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)
    fitted = _descent(passes=3000, step=0.4).fit(x, x.sin())
    z = normal(9, seed=4)
    close(fitted.predict(z), KERNEL(z, x) @ torch.linalg.solve(KERNEL(x), x.sin()), 1e-8)


def test_a_step_beyond_two_over_the_largest_eigenvalue_diverges_and_one_below_does_not() -> None:
    limit = 2 / float(torch.linalg.eigvalsh(KERNEL(X))[-1])
    assert _descent(step=0.99 * limit, passes=300).fit(X, T).loss_curve[-1] < 0.1 * T.square().sum()
    assert _descent(step=1.01 * limit, passes=300).fit(X, T).loss_curve[-1] > T.square().sum()


def test_a_diverged_fit_is_refused_and_leaves_the_last_function() -> None:
    descent = _descent(passes=3).fit(X, T)
    before = descent.function
    descent.step, descent.passes = 1e6, 100
    with pytest.raises(NonFiniteError, match=r"The step is too long .* Nothing was changed"):
        descent.fit(X, T)
    assert descent.function is before
    assert descent.loss_curve.shape == (3,)


def test_steps_may_depend_on_time_and_batches_on_chance() -> None:
    seen: list[int] = []

    def step(t: int) -> float:
        seen.append(t)
        return 0.1 / t

    def fitted(seed: int) -> FunctionalGradientDescent:
        return _descent(step=step, passes=2, batch=4, generator=torch.Generator().manual_seed(seed)).fit(X, T)

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
    fitted = _descent(passes=5).fit(X.float(), T.float())
    assert fitted.predict(X.float()).dtype == torch.float32
    close(fitted.predict(X.float()).double(), _descent(passes=5).fit(X, T).predict(X), 1e-5)


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
    assert isinstance(kernel.lengthscale, Lengthscale)
    close(kernel.lengthscale.of(x[:1]), rule.of(x), 0)
    _descent(kernel=SobolevKernel(1.5, 7.0)).partial_fit(x[:1], t[:1])


@pytest.mark.parametrize("shape", [(3, 2), (3,), (3, 1, 1)], ids=str)
def test_targets_of_another_shape_than_the_first_are_refused(shape: tuple[int, ...]) -> None:
    """They would be broadcast inside the loss."""
    for descent in (_descent(passes=2).fit(X, T[:, :1]), _descent().partial_fit(X, T[:, :1])):
        before = descent.function
        with pytest.raises(ValueError, match=r"has the shape \(.*\), and those before had \(1,\). Reshape them"):
            descent.partial_fit(X[:3], torch.zeros(shape, dtype=torch.float64))
        assert descent.function is before
        descent.partial_fit(X[:3], T[:3, :1])
        descent.fit(X, T).partial_fit(X, T)  # fit starts anew


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"there is no function yet: call fit"):
        _descent().predict(X)
    for step in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be a positive, finite number, or a function"):
            _descent(step=step)
        with pytest.raises(ValueError, match="must be a positive, finite number, or a function"):
            _descent(step=lambda t, step=step: step).fit(X, T)
    for name in ("passes", "batch"):
        with pytest.raises(ValueError, match=f"{name}=0 must be a positive integer"):
            _descent(**{name: 0})
    with pytest.raises(ValueError, match="they need the same number of examples"):
        _descent().fit(X, T[:4])
    with pytest.raises(ValueError, match="they need the same number of examples"):
        _descent().partial_fit(X[:0], T[:0])
    with pytest.raises(MemoryBoundError, match=r"take a few examples a step with batch="):
        _descent().fit(torch.zeros(30_000, 1, dtype=torch.float64), torch.zeros(30_000))
