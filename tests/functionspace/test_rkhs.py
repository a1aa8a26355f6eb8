"""Functions of a reproducing kernel Hilbert space, and the gradient of a loss there: the Riesz representation."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from natgrad.functionspace import KernelSum, Median, SobolevKernel, functional_gradient
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
def test_s2_the_gradient_represents_the_differential_of_the_loss(reduction: str) -> None:
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
