"""The map S of the neural tangent kernel, and how far it is from the projection on the tangent space."""

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.functionspace import (
    NTKMap,
    NTKOperator,
    PushforwardMetric,
    TangentFrame,
    TangentKernel,
    functional_gradient,
    ntk,
)
from tests import oracle
from tests.functionspace.tangents import EVERY, KERNEL, dense, framed, network
from tests.pulled import close, normal


def _norm(S: Tensor) -> Tensor:
    """Of an operator: the largest singular value."""
    return torch.linalg.svdvals(S)[0]


@EVERY
def test_s7_the_map_s_is_the_sum_of_inner_products_and_zero_where_the_projection_is(metric: ng.OutputMetric) -> None:
    model, x, v = network(), normal(8, 2), normal(8, 3, seed=1)
    J, H, g, inverse = dense(model, x, metric)
    S = NTKMap(framed(model, x, metric))
    close(S(v).flatten(), J.T @ H @ v.reshape(-1), 1e-9)
    across = v.reshape(-1) - J @ inverse @ J.T @ H @ v.reshape(-1)
    assert across.norm() > 0.1
    close(S(across.view(8, 3)).flatten(), torch.zeros(len(g), dtype=g.dtype), 1e-8)


@EVERY
@pytest.mark.parametrize("hidden", [1, 12])
def test_s7_how_far_s_is_from_a_projection_is_seen_in_the_eigenvalues_of_the_pulled_back_metric(
    metric: ng.OutputMetric, hidden: int
) -> None:
    """In coordinates in which the metric is the plain one, S and P are symmetric matrices: take their norms."""
    model, x = network(hidden), normal(7, 2)
    J, H, g, inverse = dense(model, x, metric)
    values, vectors = torch.linalg.eigh(H)
    R = (vectors * values.clamp(min=0).sqrt()).T @ J  # ξ(J w) = R w
    S, P = R @ R.T, R @ inverse @ R.T
    found = NTKMap(framed(model, x, metric))
    close(found.projection_defect(), _norm(S @ S - S) / _norm(S), 1e-8)
    close(found.distance(), _norm(S - P), 1e-8)
    λ = found.eigenvalues()
    η = 2 / (λ[0] + λ[-1])
    close(found.scaled_distance(), _norm(S * η - P), 1e-6)
    close(λ, torch.linalg.eigvalsh(g)[-len(λ) :], 1e-9)
    assert found.projection_defect() > 0.01


def test_s_of_a_gradient_is_what_plain_gradient_descent_moves_the_function_by() -> None:
    """S∇ℓ = Θe, (15), beside P∇ℓ, which needs the metric."""
    model, x, t = network(), normal(8, 2), normal(8, 3, seed=1)
    loss = lambda y: (y - t).square().sum() / 2  # noqa: E731
    gradient = functional_gradient(KERNEL, model, x, loss)(x)
    S = NTKMap(TangentFrame.within(model, x, KERNEL))
    close(S(gradient).flatten(), ng.differential(model, (model(x) - t).square().sum() / 2).flatten(), 1e-9)
    e = (model(x) - t).detach()
    close(ng.pushforward(model, x, S(gradient)), torch.einsum("nmkl,ml->nk", ntk(model, x), e), 1e-9)


def test_s_is_a_projection_if_and_only_if_the_parameters_are_orthonormal_coordinates() -> None:
    """(16): θ = g^{−1/2}θ' makes them so, and S is P; twice that, and it is not, though a learning rate mends it."""
    x, A = normal(8, 2), normal(8, 5, seed=4)

    def frame(change: Tensor) -> TangentFrame:
        f = lambda p, x: A[: len(x)] @ (change @ p["w"]) + 0 * x.sum(1)  # noqa: E731
        pb = ng.pullback(f, x, ng.Euclidean(), params={"w": normal(5)}, memory=2**34)
        return TangentFrame.of(pb)

    values, vectors = torch.linalg.eigh(A.T @ A / 8)
    root = (vectors / values.sqrt()) @ vectors.T
    assert NTKMap(frame(root)).projection_defect() < 1e-12
    assert NTKMap(frame(2 * root)).projection_defect() > 2.9  # λ = 4: (16 − 4)/4
    assert NTKMap(frame(2 * root)).scaled_distance() < 1e-12
    assert NTKMap(frame(torch.eye(5, dtype=x.dtype))).scaled_distance() > 0.1


def test_lemma_6_in_the_mixed_metric_s_is_the_orthogonal_projection() -> None:
    """Σ_p ⟨v, ∂φ/∂θ^p⟩ ∂φ/∂θ^p = P v, where ⟨v, X⟩ is (φ_*g)(P v, X) for tangent X, and normals are those of H_s."""
    x, v = normal(8, 2), normal(8, 1, seed=1)
    model = nn.Sequential(nn.Linear(2, 1), nn.Tanh()).double()
    J = oracle.module_jacobian(model, x)  # an immersion: 3 parameters
    P = TangentKernel(TangentFrame.within(model, x, KERNEL))
    along = ng.pushforward(model, x, P.project(v))
    pushed = PushforwardMetric.of(ntk(model, x))
    S = sum(pushed.inner(along, J[..., p]) * J[..., p] for p in range(J.shape[2]))
    assert isinstance(S, Tensor)
    close(S, along, 1e-9)
    assert (v - along).norm() > 0.1
    basis = torch.stack([torch.stack([pushed.inner(J[..., p], J[..., q]) for p in range(3)]) for q in range(3)])
    close(basis, torch.eye(3, dtype=x.dtype), 1e-9)


def test_under_the_pulled_back_metric_on_the_parameters_s_is_the_projection() -> None:
    """J g⁻¹ Jᵀ in place of the NTK: Σ g^{pq} ⟨v, ∂_p⟩ ∂_q = P v, lemma 3."""
    model, x, v = nn.Linear(2, 3).double(), normal(8, 2), normal(8, 3, seed=1)
    G = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean()))
    S = NTKOperator.of(model, x, inverse=ng.Cholesky().init(G))
    once = S.product(v / 8)  # ⟨·, ·⟩ is a mean
    close(S.product(once / 8), once, 1e-9)
    close(once, ng.pushforward(model, x, TangentKernel(framed(model, x, ng.Euclidean())).project(v)), 1e-9)
