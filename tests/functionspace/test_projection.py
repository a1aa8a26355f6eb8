"""The kernel of a tangent space under any metric on functions, and the projection on it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.functionspace import (
    NTKMap,
    NTKOperator,
    PushforwardMetric,
    SobolevKernel,
    TangentFrame,
    TangentKernel,
    TangentSpace,
    functional_gradient,
    ntk,
)
from natgrad.invariance import reparametrise
from tests import oracle
from tests.functionspace.tangents import EVERY, KERNEL, dense, framed, matrix, network
from tests.pulled import close, normal

# The kernel


@EVERY
@pytest.mark.parametrize("hidden", [1, 12])  # fewer parameters than outputs, and more
def test_the_kernel_of_the_tangent_space_is_19(metric: ng.OutputMetric, hidden: int) -> None:
    model, x, y, z = network(hidden), normal(8, 2), normal(5, 2, seed=1), normal(3, 2, seed=2)
    _, _, g, inverse = dense(model, x, metric)
    K_f = TangentKernel(framed(model, x, metric))
    J, L = (oracle.module_jacobian(model, at).flatten(0, 1) for at in (y, z))
    close(matrix(K_f(y, z)), J @ inverse @ L.T, 1e-6)
    close(matrix(K_f(y)), J @ inverse @ J.T, 1e-6)
    found = K_f.frame.spectrum.values
    close(found, torch.linalg.eigvalsh(g)[-len(found) :], 1e-9)


@EVERY
def test_the_kernel_reproduces_tangent_functions(metric: ng.OutputMetric) -> None:
    """⟨K_f(y, ·)u, v⟩ = u·v(y) for v = J w; with the Fisher metric, in its range: the model sees no constant."""
    model, x, y = network(), normal(20, 2), normal(4, 2, seed=1)
    J, H, g, inverse = dense(model, x, metric)
    w = inverse @ g @ normal(g.shape[0], seed=3)  # what g does not see has no length
    K_f = TangentKernel(framed(model, x, metric))
    at = matrix(K_f(y, x))
    L = oracle.module_jacobian(model, y).flatten(0, 1)
    close(at @ H @ J @ w, L @ inverse @ g @ w, 1e-8)
    if not isinstance(metric, ng.Fisher):
        close(at @ H @ J @ w, L @ w, 1e-8)


def test_at_the_points_it_is_n_times_the_orthogonal_projection_for_the_empirical_l2() -> None:
    model, x = network(), normal(8, 2)
    P = matrix(TangentKernel(framed(model, x, ng.Euclidean()))(x)) / 8
    J = oracle.module_jacobian(model, x).flatten(0, 1)
    close(P, J @ torch.linalg.pinv(J), 1e-9)
    close(P @ P, P, 1e-9)


@pytest.mark.parametrize("hidden", [1, 12])
def test_at_the_points_it_is_the_projection_times_k_in_the_space_of_a_kernel(hidden: int) -> None:
    """P d_x of (18): the columns of P K are the projections of K(x_n, ·)e_k."""
    model, x = network(hidden), normal(8, 2)
    K_f = TangentKernel(TangentFrame.within(model, x, KERNEL))(x)
    space = TangentSpace.of(model, x, KERNEL)
    column = torch.zeros(8, 3, dtype=x.dtype)
    column[:, 1] = KERNEL(x)[:, 2]
    close(K_f[:, 2, :, 1], ng.pushforward(model, x, space.project(column)), 1e-7)
    J, H, _, inverse = dense(model, x, ng.Sobolev(jitter=0.0))
    close(matrix(K_f), J @ inverse @ J.T @ H @ torch.linalg.inv(8 * H), 1e-7)
    # The metric of a pullback is a mean.
    close(TangentKernel(framed(model, x, ng.Sobolev(jitter=0.0)))(x), 8 * K_f, 1e-6)


def test_no_parametrisation_shows_in_it_as_it_does_in_the_ntk() -> None:
    model, x, y = network(), normal(20, 2), normal(4, 2, seed=1)
    other = reparametrise(model, seed=3)
    one, two = (TangentKernel(TangentFrame.within(m, x, KERNEL))(y) for m in (model, other))
    close(two, one, 1e-7)
    assert (ntk(other, y) - ntk(model, y)).norm() > 0.1 * ntk(model, y).norm()
    wide = network(12)  # a singular metric: at the points, all the same
    one, two = (TangentKernel(framed(m, x[:5], ng.Euclidean()))(x[:5]) for m in (wide, reparametrise(wide, seed=3)))
    close(two, one, 1e-7)


def test_the_kernels_of_a_loss_sum_to_what_the_natural_gradient_moves_the_function_by() -> None:
    """Σ_n K_f(·, x_n) e_n = P∇ℓ, (20)."""
    model, x, t = network(), normal(8, 2), normal(8, 3, seed=1)
    loss = lambda y: (y - t).square().sum() / 2  # noqa: E731
    K_f = TangentKernel(TangentFrame.within(model, x, KERNEL))
    moved = ng.pushforward(model, x, TangentSpace.of(model, x, KERNEL).natural_gradient(loss))
    close(torch.einsum("nmkl,ml->nk", K_f(x), (model(x) - t).detach()), moved, 1e-8)
    gradient = functional_gradient(KERNEL, model, x, loss)(x)
    close(ng.pushforward(model, x, K_f.project(gradient)), moved, 1e-8)


@EVERY
@pytest.mark.parametrize("hidden", [1, 12])
def test_the_damped_kernel_is_that_of_the_damped_metric_and_the_ntk_where_damping_is_large(
    metric: ng.OutputMetric, hidden: int
) -> None:
    model, x, y = network(hidden), normal(6, 2), normal(3, 2, seed=1)
    frame = framed(model, x, metric)
    g = dense(model, x, metric)[2]
    J = oracle.module_jacobian(model, y).flatten(0, 1)
    damped = torch.linalg.inv(g + 0.2 * torch.eye(len(g), dtype=g.dtype))
    close(matrix(TangentKernel(frame, 0.2)(y)), J @ damped @ J.T, 1e-8)
    close(1e12 * TangentKernel(frame, 1e12)(y, x), ntk(model, y, x), 1e-8)
    close(matrix(NTKOperator.of(model, y, inverse=_cholesky(model, x, metric)).dense()), J @ damped @ J.T, 1e-8)


def _cholesky(model: nn.Module, x: Tensor, metric: ng.OutputMetric) -> Any:
    return ng.Cholesky().init(ng.Dense().estimate(ng.pullback(model, x, metric)), 0.2)


def test_the_metric_dual_to_the_kernel_is_the_metric_on_functions() -> None:
    model, x = network(), normal(8, 2)
    J, H, _, _ = dense(model, x, ng.Euclidean())
    dual = PushforwardMetric.of(TangentKernel(framed(model, x, ng.Euclidean()))(x))
    v, w = (J @ normal(J.shape[1], seed=s) for s in (1, 2))
    close(dual.inner(v.view(8, 3), w.view(8, 3)), v @ H @ w, 1e-9)


def test_equal_points_count_once_in_the_space_of_a_kernel() -> None:
    model, x, y = network(), normal(8, 2), normal(3, 2, seed=1)
    alone = TangentKernel(TangentFrame.within(model, x, KERNEL))(y)
    close(TangentKernel(TangentFrame.within(model, torch.cat([x, x[:3]]), KERNEL))(y), alone, 1e-7)


def test_single_precision_and_outputs_without_a_dimension_have_a_kernel() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Flatten(0))
    x = normal(6, 2).float()
    for frame in (framed(model, x, ng.Euclidean()), TangentFrame.within(model, x, KERNEL)):
        found = TangentKernel(frame)(x)
        assert found.dtype == torch.float32
        assert found.shape == (6, 6, 1, 1)
        assert TangentKernel(frame).project(torch.ones(6))["0.weight"].dtype == torch.float32


@EVERY
def test_in_single_precision_the_tangent_space_has_all_of_its_dimensions(metric: ng.OutputMetric) -> None:
    """Products of rows are taken in double precision: in single, what is below √eps of the largest would be lost."""
    model, x, y = network(4), normal(8, 2), normal(3, 2, seed=1)
    exact = framed(model, x, metric)
    frame = framed(network(4).float(), x.float(), metric)
    assert frame.spectrum.values.shape == exact.spectrum.values.shape
    for damping in (0.0, 1e-2):
        found, expected = TangentKernel(frame, damping)(x.float()).double(), TangentKernel(exact, damping)(x)
        assert (found - expected).norm() < 1e-3 * expected.norm()
    assert (TangentKernel(frame, 1e-2)(y.float()) - TangentKernel(exact, 1e-2)(y)).norm() < 1e-4


def test_rows_that_do_not_fit_in_double_precision_are_refused() -> None:
    pb = ng.pullback(network().float(), normal(8, 2).float(), ng.Euclidean(), memory=8_000)
    with pytest.raises(MemoryBoundError, match=r"the tangent space of 8 points .* in double precision too, over the"):
        TangentFrame.of(pb)


# The projection


@EVERY
@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("hidden", [1, 12])
def test_the_projection_is_that_of_lemma_3_for_every_metric(
    metric: ng.OutputMetric, damping: float, hidden: int
) -> None:
    model, x, v = network(hidden), normal(7, 2), normal(7, 3, seed=1)
    J, H, g, inverse = dense(model, x, metric)
    if damping:
        inverse = torch.linalg.inv(g + damping * torch.eye(len(g), dtype=g.dtype))
    w = TangentKernel(framed(model, x, metric), damping).project(v)
    close(w.flatten(), inverse @ J.T @ H @ v.reshape(-1), 1e-6)


# Bad input


def test_what_has_no_place_in_the_tangent_space_is_refused() -> None:
    model, x = network(), normal(5, 2)
    S = NTKMap(framed(model, x, ng.Euclidean()))
    with pytest.raises(ValueError, match=r"v has the shape \(5,\), and the outputs at the points \(5, 3\)"):
        S(normal(5))
    with pytest.raises(NonFiniteError, match="the function holds NaN"):
        S(torch.full((5, 3), torch.nan, dtype=torch.float64))
    with pytest.raises(ValueError, match="damping must be a finite number ≥ 0"):
        TangentKernel(S.frame, -1.0)
    with pytest.raises(ValueError, match="the kernel sees 2 inputs and the model has 5 outputs"):
        TangentFrame.within(model, x, SobolevKernel(1.5, features=lambda x: x[:2]))
    with pytest.raises(ValueError, match="has no trainable parameters"):
        TangentFrame.within(nn.Tanh(), x, KERNEL)
    wrong: Any = ng.Sobolev()
    with pytest.raises(TypeError, match="kernel must be a natgrad ReproducingKernel, got Sobolev"):
        TangentFrame.within(model, x, wrong)
    with pytest.raises(TypeError, match="pullback must be a natgrad Pullback, got Sobolev"):
        TangentFrame.of(wrong)
    with pytest.raises(MemoryBoundError, match=r"between 40 and 5 points needs 14,400 bytes"):
        TangentKernel(replace(S.frame, memory=12_000))(normal(40, 2))
    flat = TangentFrame.of(ng.pullback(nn.Linear(2, 1, bias=False).double(), torch.zeros_like(x), ng.Euclidean()))
    with pytest.raises(ValueError, match=r"S is zero\. Take points where the outputs depend on the parameters"):
        NTKMap(flat).projection_defect()
