"""The projection on the tangent space of a model, and what a Sobolev step does to the function."""

from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.functionspace import SobolevKernel, TangentSpace, functional_gradient
from tests import oracle
from tests.golden import agrees, golden, golden_mlp
from tests.pulled import close, normal

KERNEL = SobolevKernel(1.5)


@final
@dataclass(frozen=True)
class Coupled(ng.OutputMetric):
    """The Euclidean metric with the coupling K⁻¹ of the examples: (22), from its definition."""

    kernel: SobolevKernel

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return u

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return ng.Euclidean().root(y)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return ng.Euclidean().divergence(y, y0)

    def coupling(self, x: Any, n: int) -> Tensor:
        return torch.linalg.inv(self.kernel(x))


def _wide(n: int = 5) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network with more parameters than outputs at n points: it can move all of them as it likes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    return model, normal(n, 2), normal(n, 2, seed=1)


def _squares(t: Tensor) -> Any:
    return lambda y: (y - t).square().sum() / 2


def _flat(v: ng.Vector) -> Tensor:
    return torch.cat([t.reshape(-1) for t in v.values()])


def _oracle(J: Tensor, K: Tensor, v: Tensor, damping: float) -> Tensor:
    """(JᵀK⁻¹J + λ)⁺JᵀK⁻¹v with K ⊗ 1 over the outputs."""
    n, d, _ = J.shape
    inverse = torch.kron(torch.linalg.inv(K).contiguous(), torch.eye(d, dtype=K.dtype))
    rows = J.reshape(n * d, -1)
    g = rows.T @ inverse @ rows + damping * torch.eye(rows.shape[1], dtype=K.dtype)
    return torch.linalg.pinv(g, rtol=1e-11, hermitian=True) @ (rows.T @ (inverse @ v.reshape(-1)))


# The function-space theorem


@pytest.mark.parametrize("nu", [0.5, 1.3, 1.5])
def test_one_undamped_sobolev_step_moves_the_training_outputs_by_minus_k_e(nu: float) -> None:
    model, x, t = _wide()
    kernel = SobolevKernel(nu)
    w = TangentSpace.of(model, x, kernel).natural_gradient(_squares(t))
    e = (model(x) - t).detach()
    close(ng.pushforward(model, x, -w), -kernel(x) @ e, 1e-9)
    close(-functional_gradient(kernel, model, x, _squares(t))(x), -kernel(x) @ e, 1e-12)  # descent in the space


def test_one_undamped_gauss_newton_step_moves_the_training_outputs_by_minus_e() -> None:
    model, x, t = _wide()
    mean = lambda y: (y - t).square().sum() / (2 * len(x))  # noqa: E731
    w = ng.natural_gradient(model, x, mean, ng.Euclidean(), structure=ng.Kernel(), solver=ng.Pinv())
    close(ng.pushforward(model, x, -w), (t - model(x)).detach(), 1e-9)
    apart = SobolevKernel(1.5, lengthscale=1e-3)  # K = 1: the Sobolev step is that of Gauss and Newton
    close(_flat(TangentSpace.of(model, x, apart).natural_gradient(_squares(t))), _flat(w), 1e-9)


def test_a_metric_coupled_by_the_inverse_kernel_takes_the_same_step() -> None:
    model, x, t = _wide()
    mean = lambda y: (y - t).square().sum() / (2 * len(x))  # noqa: E731
    for structure in (ng.Dense(), ng.Kernel()):
        w = ng.natural_gradient(model, x, mean, Coupled(KERNEL), structure=structure, solver=ng.Pinv(rtol=1e-10))
        close(ng.pushforward(model, x, w), KERNEL(x) @ (model(x) - t).detach(), 1e-8)
    damped = ng.natural_gradient(model, x, mean, Coupled(KERNEL), damping=0.3)
    close(_flat(damped), _flat(TangentSpace.of(model, x, KERNEL).natural_gradient(_squares(t), 0.3 * len(x))), 1e-9)


# The projection


def test_the_golden_sobolev_natural_gradient() -> None:
    case = golden("sobolev.mlp.natgrad.ell1")
    model, x, target = golden_mlp()
    damping = case["inputs"]["damping"] * len(x)  # a sum metric, not a mean one
    space = TangentSpace.of(model, x, SobolevKernel(1.5, case["inputs"]["ell"]))
    loss = lambda y: F.cross_entropy(y, target, reduction="sum")  # noqa: E731
    agrees(case, _flat(space.natural_gradient(loss, damping)), "natgrad")


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("hidden", [1, 16])  # fewer parameters than outputs, and more
def test_the_projection_is_that_of_lemma_3(hidden: int, damping: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()
    x, v = normal(8, 2), normal(8, 2, seed=1)
    J = oracle.module_jacobian(model, x)
    w = TangentSpace.of(model, x, KERNEL).project(v, damping)
    close(_flat(w), _oracle(J, KERNEL(x), v, damping), 1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("nu", "lengthscale"), [(1.5, 30.0), (4.5, 30.0), (40.0, 10.0)])
def test_a_damped_projection_in_a_space_of_very_smooth_functions_is_the_push_through_form(
    nu: float, lengthscale: float, dtype: torch.dtype, tolerance: float
) -> None:
    """Bᵀ(λK + BBᵀ)⁻¹v needs no inverse of K, which has none in floating point here."""
    torch.manual_seed(0)
    model, n, λ = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype), 20, 1e-3
    x, kernel = normal(n, 2).to(dtype), SobolevKernel(nu, lengthscale)
    K = kernel(x).double()
    v = K @ normal(n, 1, seed=1)
    J = oracle.module_jacobian(model, x).double().reshape(n, -1)
    expected = J @ (J.T @ torch.linalg.solve(λ * K + J @ J.T, v))
    found = J @ _flat(TangentSpace.of(model, x, kernel).project(v.to(dtype), λ)).double()
    assert float((found - expected.squeeze(1)).norm()) < tolerance * float(expected.norm())


def test_the_projection_is_idempotent_and_what_it_leaves_is_orthogonal() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x, v = normal(12, 2), normal(12, 2, seed=1)
    space = TangentSpace.of(model, x, KERNEL)
    once = ng.pushforward(model, x, space.project(v))
    close(ng.pushforward(model, x, space.project(once)), once, 1e-9)
    J = oracle.module_jacobian(model, x)
    left = torch.linalg.solve(KERNEL(x), v - once)
    close(torch.einsum("ndp,nd->p", J, left), torch.zeros(J.shape[2], dtype=J.dtype), 1e-9)
    assert (v - once).norm() > 0.1


def test_the_natural_gradient_moves_the_function_by_the_projection_and_not_by_the_gradient() -> None:
    """dφ(∇F̃) = P(∇F), where lemma 1 (ii) prints ∇F."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x, t = normal(12, 2), normal(12, 2, seed=1)
    space = TangentSpace.of(model, x, KERNEL)
    gradient = functional_gradient(KERNEL, model, x, _squares(t))(x)
    moved = ng.pushforward(model, x, space.natural_gradient(_squares(t)))
    close(moved, ng.pushforward(model, x, space.project(gradient)), 1e-9)
    assert (moved - gradient).norm() > 0.1 * gradient.norm()


def test_a_mean_loss_with_the_printed_sum_metric_takes_a_step_n_times_too_small() -> None:
    model, x, t = _wide()  # the metric is a mean, the loss a sum
    space = TangentSpace.of(model, x, KERNEL)
    mean = space.natural_gradient(lambda y: (y - t).square().sum() / (2 * len(x)))
    close(len(x) * _flat(mean), _flat(space.natural_gradient(_squares(t))), 1e-9)


def test_equal_points_count_once() -> None:
    """A duplicate makes K singular, and the step does not change; Gauss and Newton count it twice."""
    torch.manual_seed(0)
    for hidden in (1, 16):
        model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()
        x, v = normal(6, 2), normal(6, 2, seed=1)
        twice, again = torch.cat([x, x[:2]]), torch.cat([v, v[:2]])
        for damping in (0.0, 0.1):
            alone = TangentSpace.of(model, x, KERNEL).project(v, damping)
            both = TangentSpace.of(model, twice, KERNEL).project(again, damping)
            close(_flat(both), _flat(alone), 1e-7)


def test_outputs_without_a_dimension_and_single_precision_are_projected() -> None:
    model, x = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)), normal(4, 2).float()
    w = TangentSpace.of(model, x, KERNEL).natural_gradient(lambda y: y.sum())
    assert w["0.weight"].dtype == torch.float32
    close(ng.pushforward(model, x, w), KERNEL(x).sum(1), 1e-3)


@pytest.mark.parametrize("hidden", [3, 40])  # fewer parameters than outputs, and more
@pytest.mark.parametrize("damping", [0.0, 1e-2])
def test_the_projection_in_single_precision_is_near_that_in_double(hidden: int, damping: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()
    x, v = normal(20, 2).float().double(), normal(20, 2, seed=1).float().double()
    exact = TangentSpace.of(model, x, SobolevKernel(1.5, 1.3)).project(v, damping)
    single = TangentSpace.of(model.float(), x.float(), SobolevKernel(1.5, 1.3)).project(v.float(), damping)
    J = oracle.module_jacobian(model.double(), x).flatten(0, 1)
    moved, expected = (J @ torch.cat([t.double().reshape(-1) for t in w.values()]) for w in (single, exact))
    assert (moved - expected).norm() < 1e-2 * expected.norm()


def test_pure_functions_have_tangent_spaces() -> None:
    x = normal(3, 2)
    params = {"w": normal(2, seed=3)}
    space = TangentSpace.of(lambda p, x: (x @ p["w"]).sin(), x, KERNEL, params=params)
    w = space.project(normal(3, seed=4), 0.2)
    J = (x @ params["w"]).cos()[:, None, None] * x[:, None]
    close(w["w"], _oracle(J, KERNEL(x), normal(3, seed=4), 0.2), 1e-11)


def test_what_cannot_be_projected_is_refused() -> None:
    model, x, _ = _wide()
    space = TangentSpace.of(model, x, KERNEL)
    with pytest.raises(ValueError, match=r"v has the shape \(5,\), and the outputs at the points \(5, 2\)"):
        space.project(normal(5))
    with pytest.raises(ValueError, match="damping must be a finite number ≥ 0"):
        space.project(normal(5, 2), -1.0)
    with pytest.raises(NonFiniteError, match="the function holds NaN"):
        space.project(torch.full((5, 2), torch.nan, dtype=torch.float64))
    with pytest.raises(ValueError, match="the kernel sees 2 inputs and the model has 5 outputs"):
        TangentSpace.of(model, x, SobolevKernel(1.5, features=lambda x: x[:2]))
    with pytest.raises(TypeError, match="Pass features="):
        TangentSpace.of(nn.Embedding(3, 2), torch.tensor([0, 1]), KERNEL)


def test_a_frame_of_parameters_that_have_changed_is_refused_at_new_points() -> None:
    first = nn.Linear(2, 3).double()
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 1).double())
    x = normal(6, 2)
    frame = ng.functionspace.TangentFrame.of(ng.pullback(model, x, ng.Euclidean()))
    before = ng.functionspace.TangentKernel(frame)(x)
    weight = first.weight.detach().clone()
    with torch.no_grad():
        first.weight.add_(1.0)
    with pytest.raises(ValueError, match=r"0\.weight changed since .* make a new TangentFrame"):
        ng.functionspace.TangentKernel(frame)(x)
    with torch.no_grad():
        first.weight.copy_(weight)
    assert torch.equal(ng.functionspace.TangentKernel(frame)(x), before)
