"""Bad input to kernels, metrics, tangent spaces and descent in spaces of functions: an error, or the exact answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.functionspace import FunctionalGradientDescent, Median, SobolevKernel, TangentSpace
from tests.pulled import close, normal

KERNEL = SobolevKernel(1.5)
TOKENS = torch.tensor([[1, 2], [0, 3]])
Make = Callable[[], Any]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1).double()


def squares(y: Tensor, t: Tensor) -> Tensor:
    """½‖y − t‖²."""
    return (y - t).square().sum() / 2


def total(y: Tensor) -> Tensor:
    """½‖y‖²."""
    return y.square().sum() / 2


def descent(kernel: Any = KERNEL, **options: Any) -> FunctionalGradientDescent:
    return FunctionalGradientDescent(kernel, squares, **{"step": 0.1, "passes": 3, **options})


def users(kernel: Any, x: Any) -> dict[str, Make]:
    """All that a kernel of inputs is used for, two targets given."""
    t = torch.zeros(2, 1, dtype=torch.float64)
    return {
        "kernel": lambda: kernel(x),
        "tangent space": lambda: TangentSpace.of(lambda p, x: p["w"] * torch.ones(len(x), 1), x, kernel, {"w": t[0]}),
        "fit": lambda: descent(kernel).fit(x, t),
        "fit by batches": lambda: descent(kernel, batch=1).fit(x, t),
        "partial_fit": lambda: descent(kernel).partial_fit(x, t),
    }


# Smoothness, lengthscale, features


@pytest.mark.parametrize("make", [SobolevKernel, lambda nu: ng.Sobolev(nu=nu)], ids=["kernel", "metric"])
@pytest.mark.parametrize("nu", [0.0, -1.5, float("nan"), float("inf")])
def test_a_smoothness_that_is_not_positive_is_refused(make: Callable[[float], Any], nu: float) -> None:
    with pytest.raises(ValueError, match=r"nu=.* must be positive and finite: .* only for ν > 0"):
        make(nu)


def scales(value: Any) -> dict[str, Make]:
    return {
        "kernel": lambda: SobolevKernel(1.5, value),
        "metric": lambda: ng.Sobolev(lengthscale=value),
        "optimizer": lambda: ng.SobolevKFAC(linear(), ng.Euclidean(), lengthscale=value),
    }


@pytest.mark.parametrize("make", ["kernel", "metric", "optimizer"])
@pytest.mark.parametrize("value", [0.0, -20.0, float("nan"), torch.tensor(-1.0)], ids=repr)
def test_a_lengthscale_that_is_not_positive_is_refused(make: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"lengthscale=.* must be positive and finite: distances are divided by it"):
        scales(value)[make]()
    with pytest.raises(TypeError, match=r"lengthscale='20': give a positive number, or a rule such as Median\(\)"):
        scales("20")[make]()


@pytest.mark.parametrize("make", [lambda f: SobolevKernel(1.5, features=f), lambda f: ng.Sobolev(features=f)])
def test_features_that_are_no_function_are_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"features=3: give a function that maps the inputs to points"):
        make(3)


@pytest.mark.parametrize("make", [descent, lambda k: TangentSpace.of(linear(), normal(2, 2), k)])
def test_what_is_no_kernel_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"kernel must be a natgrad ReproducingKernel, got 1.5"):
        make(1.5)


# Inputs that are not points


@pytest.mark.parametrize("name", users(KERNEL, TOKENS))
def test_tokens_are_no_points_and_features_are_asked_for(name: str) -> None:
    with pytest.raises(TypeError, match=r"the inputs are torch.int64, which are no points in R\^d.*Pass features="):
        users(KERNEL, TOKENS)[name]()
    words = SobolevKernel(1.5, features=lambda token: torch.eye(4, dtype=torch.float64)[token])
    users(words, TOKENS)[name]()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["tangent space", "fit", "fit by batches", "partial_fit"])
def test_points_that_are_not_finite_are_refused(name: str, value: float) -> None:
    x = torch.tensor([[0.0, 1.0], [value, 0.0]], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match=r"(the tensor of inputs|Gram matrix of the kernel) holds NaN"):
        users(KERNEL, x)[name]()


@pytest.mark.parametrize("name", ["fit", "fit by batches", "partial_fit"])
def test_targets_that_are_not_finite_are_refused(name: str) -> None:
    x, t = normal(2, 2), torch.tensor([0.0, torch.nan], dtype=torch.float64)
    step = descent(batch=1 if "batches" in name else None)
    with pytest.raises(NonFiniteError, match="the tensor of targets holds NaN"):
        (step.partial_fit if name == "partial_fit" else step.fit)(x, t)


def test_a_kernel_is_nan_at_a_point_that_is() -> None:
    """It is a function of numbers: what uses it looks at them."""
    K = KERNEL(torch.tensor([[0.0], [torch.nan]]))
    assert K.isnan().tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("metric", [ng.Sobolev(), ng.Sobolev(jitter=0.0), ng.Sobolev(lengthscale=Median())], ids=repr)
def test_a_batch_that_is_not_finite_has_no_metric(metric: ng.Sobolev) -> None:
    x = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="the tensor of points of the Sobolev metric holds NaN"):
        metric.coupling(x, 2)


# Numbers of examples


def test_numbers_of_examples_that_do_not_match_are_refused() -> None:
    x, t = normal(3, 2), normal(2)
    for fit in (descent().fit, descent().partial_fit):
        with pytest.raises(ValueError, match=r"inputs \(3, 2\) and targets \(2,\): they need the same number"):
            fit(x, t)
        with pytest.raises(ValueError, match=r"inputs \(0, 2\) and targets \(0,\): .* at least one"):
            fit(x[:0], t[:0])
    twice = lambda x: torch.cat([x, x])  # noqa: E731
    with pytest.raises(ValueError, match=r"the kernel sees 6 inputs and the model has 3 outputs"):
        TangentSpace.of(linear(), x, SobolevKernel(1.5, features=twice))
    with pytest.raises(ValueError, match=r"found 6 points in the inputs of 3 examples.*Pass features="):
        ng.pullback(linear(), x, ng.Sobolev(features=twice))
    with pytest.raises(ValueError, match=r"points in R\^2 and in R\^3"):
        KERNEL(normal(3, 2), normal(3, 3))


# One input, equal inputs, inputs that K cannot tell apart: the exact answer


@pytest.mark.parametrize("jitter", [0.0, 1e-6])
def test_one_example_has_kernel_one_and_the_step_of_gauss_and_newton(jitter: float) -> None:
    model, x = linear(), normal(1, 2)
    metric = ng.Sobolev(jitter=jitter, lengthscale=Median())
    close(metric.coupling(x, 1), torch.ones(1, 1, dtype=torch.float64))
    for structure in (ng.Dense(), ng.Kernel()):
        v = ng.natural_gradient(model, x, total, metric, structure=structure, damping=0.1)
        gauss_newton = ng.natural_gradient(model, x, total, ng.Euclidean(), structure=structure, damping=0.1)
        close(v.flatten(), gauss_newton.flatten(), 1e-12)
    close(TangentSpace.of(model, x, KERNEL).natural_gradient(total, 0.1).flatten(), gauss_newton.flatten(), 1e-12)
    once = descent(step=0.25, passes=1).fit(x, torch.ones(1, dtype=torch.float64))
    close(once.predict(x), torch.tensor([0.25], dtype=torch.float64))


def test_a_batch_of_copies_is_one_example() -> None:
    model, x = linear(), normal(1, 2)
    copies = x.expand(6, 2).contiguous()
    alone = ng.natural_gradient(model, x, total, ng.Euclidean(), structure=ng.Dense(), damping=0.6).flatten()
    metric = ng.Sobolev(jitter=0.0, lengthscale=Median())
    close(6 * ng.Dense().estimate(ng.pullback(model, copies, metric)).dense(), outer(model, x))
    for structure in (ng.Dense(), ng.Kernel()):  # a mean metric and a mean loss: 1/6 of both, and of the damping
        v = ng.natural_gradient(model, copies, lambda y: total(y) / 36, metric, structure=structure, damping=0.1)
        close(v.flatten(), alone, 1e-10)
    w = TangentSpace.of(model, copies, KERNEL).natural_gradient(lambda y: total(y) / 6, 0.6)
    close(w.flatten(), alone, 1e-10)
    fitted = descent(passes=400).fit(copies, torch.arange(6.0, dtype=torch.float64))
    close(fitted.predict(x), torch.tensor([2.5], dtype=torch.float64))  # the mean is all that one point can have


def outer(model: nn.Linear, x: Tensor) -> Tensor:
    """J Jᵀ of a linear model with one output at one point."""
    row = torch.cat([x[0], torch.ones(1, dtype=x.dtype)])
    return torch.outer(row, row)


@pytest.mark.parametrize(("nu", "lengthscale"), [(1.5, 1e5), (4.5, 1e3), (40.0, 30.0)])
def test_what_is_too_rough_for_a_singular_k_hardly_moves(nu: float, lengthscale: float) -> None:
    """Inputs so close beside ℓ that K is singular in float64, though no two are equal: the limit of small jitters.

    A smaller jitter is nearer to it, until it is below the rounding of K, and none.
    """
    torch.manual_seed(0)
    x, model = normal(12, 1), nn.Sequential(nn.Linear(1, 60), nn.Tanh(), nn.Linear(60, 1)).double()
    metrics = [ng.Sobolev(nu=nu, lengthscale=lengthscale, jitter=jitter) for jitter in (1e-9, 1e-10, 1e-14, 0.0)]
    values = torch.linalg.eigvalsh(metrics[-1].gram(x, 12))
    assert 1 < int((values > 4096 * torch.finfo(torch.float64).eps * values[-1]).sum()) < 12
    for structure in (ng.Kernel(), ng.Dense()):
        small, smaller, less, none = (
            ng.natural_gradient(model, x, lambda y: total(y) / 12, metric, structure=structure, damping=1e-3).flatten()
            for metric in metrics
        )
        assert torch.equal(less, none)
        far, near = (float((v - none).norm() / none.norm()) for v in (small, smaller))
        assert near < far < 0.1


def test_the_coupling_of_a_singular_k_is_its_inverse_up_to_rounding_and_no_less_beyond() -> None:
    x, metric = normal(8, 1), ng.Sobolev(nu=4.5, lengthscale=1e3, jitter=0.0)
    values, vectors = torch.linalg.eigh(metric.gram(x, 8))
    rounding = 4096 * torch.finfo(torch.float64).eps * values[-1]
    C = vectors.T @ metric.coupling(x, 8) @ vectors
    seen = values > 10 * rounding
    close(
        C[seen][:, seen] * values[seen].sqrt() * values[seen].sqrt()[:, None],
        torch.eye(int(seen.sum()), dtype=torch.float64),
        1e-2,
    )
    assert float(torch.linalg.eigvalsh(C[~seen][:, ~seen])[0]) > 0.05 / float(rounding)


def test_the_jitter_makes_any_k_regular() -> None:
    x = torch.ones(5, 2, dtype=torch.float64)
    K = ng.Sobolev(jitter=1e-6).gram(x, 5)
    close(ng.Sobolev(jitter=1e-6).coupling(x, 5) @ K, torch.eye(5, dtype=torch.float64), 1e-8)
