"""The neural tangent kernel against the dense Jacobian, in every form, and how it changes with the parametrisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import BatchStatisticsError, MemoryBoundError, NonFiniteError
from natgrad.functionspace import (
    NTKMap,
    NTKOperator,
    PushforwardMetric,
    TangentFrame,
    TangentKernel,
    functional_gradient,
    layer_ntks,
    ntk,
)
from natgrad.pullbacks import ExampleGrads
from tests import memory, oracle, zoo
from tests.functionspace.tangents import EVERY, KERNEL, dense, framed, network
from tests.golden import agrees, golden, tensor
from tests.pulled import close, normal

CASES = pytest.mark.parametrize("case", zoo.ZOO, ids=zoo.IDS)
QUIET = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, on weight_norm


def _theta(J: Tensor, other: Tensor | None = None) -> Tensor:
    """Σ_p ∂φ_k(x_n)/∂θ^p ∂φ_l(y_m)/∂θ^p, from its definition."""
    return torch.einsum("nkp,mlp->nmkl", J, J if other is None else other)


def _part(x: oracle.Inputs, part: slice) -> oracle.Inputs:
    return tuple(t[part] for t in x) if isinstance(x, tuple) else x[part]


def _mlp(hidden: int = 4) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double(), normal(5, 3)


# The kernel


@QUIET
@CASES
def test_the_kernel_is_j_j_transposed_of_points_with_themselves_and_with_others(case: zoo.Case) -> None:
    of = case.make()
    J = of.jacobian()
    close(ntk(of.model, of.x, params=of.params, output=of.output), _theta(J))
    few, last = slice(0, len(J) - 1), slice(len(J) - 1, None)  # one example alone: blocks may be others for it
    left, right = _part(of.x, few), _part(of.x, last)
    close(ntk(of.model, left, right, params=of.params, output=of.output), _theta(J[few], J[last]))


@QUIET
@CASES
def test_the_kernel_in_blocks_of_examples_is_the_same(case: zoo.Case) -> None:
    of = case.make()
    J = of.jacobian()
    close(ntk(of.model, of.x, batch=len(J) - 1, params=of.params, output=of.output), _theta(J))
    close(ntk(of.model, of.x, of.x, batch=2, params=of.params, output=of.output), _theta(J))


@QUIET
@CASES
def test_the_kernel_is_the_sum_of_those_of_the_layers_and_each_is_that_of_its_parameters(case: zoo.Case) -> None:
    of = case.make()
    J, θ = of.jacobian(), of.parameters()
    found = layer_ntks(of.model, of.x, batch=3, params=of.params, output=of.output)
    close(torch.stack([*found.values()]).sum(0), _theta(J))
    spans = dict(zip(θ, torch.arange(J.shape[2]).split([p.numel() for p in θ.values()]), strict=True))
    assert sorted(name for title in found for name in title.split(" + ")) == sorted(θ)
    for title, kernel in found.items():
        close(kernel, _theta(J[:, :, torch.cat([spans[name] for name in title.split(" + ")])]))


@QUIET
@CASES
def test_the_operator_has_the_products_of_the_kernel(case: zoo.Case) -> None:
    of = case.make()
    J, y = of.jacobian(), of.outputs()
    u = normal(*y.shape)
    expected = torch.einsum("nmkl,ml->nk", _theta(J), u.reshape(len(J), -1))
    close(NTKOperator.of(of.model, of.x, params=of.params, output=of.output).product(u), expected.view_as(y))


def test_points_may_have_outputs_of_different_shapes() -> None:
    """Sequences of two lengths."""
    model, x, y = zoo.mlp(3, 4, 2).double(), normal(4, 3, 3), normal(2, 5, 3)
    kernel = ntk(model, x, y)
    assert kernel.shape == (4, 2, 6, 10)
    close(kernel, _theta(oracle.module_jacobian(model, x), oracle.module_jacobian(model, y)))
    close(NTKOperator.of(model, x, y).dense(), kernel)


@pytest.mark.parametrize(
    ("shape", "other"),
    [((2, 3, 1, 1, 5, 4), (3, 4, 1)), ((1, 5, 2, 1, 40, 50), (2, 3, 3)), ((2, 3, 4, 2, 5, 6), (1, 2, 4))],
    ids=["plain", "by positions", "by rows"],
)
@pytest.mark.parametrize("limit", [1, 200, 2**22])
def test_the_cross_gram_of_factors_is_that_of_their_rows(shape: Any, other: Any, limit: int) -> None:
    k, n, r, c, o, i = shape
    l, m, s = other
    left = ExampleGrads(normal(n, r, c, i), normal(k, n, r, c, o, seed=1))
    right = ExampleGrads(normal(m, s, c, i, seed=2), normal(l, m, s, c, o, seed=3))
    close(left.gram(right, limit), left.rows().flatten(0, 1) @ right.rows().flatten(0, 1).T)
    close(left.gram(limit=limit), left.gram(left))


def test_a_layer_that_is_packed_in_another_way_at_other_points_has_the_same_gram() -> None:
    """As a bias of one example may be: then rows are compared in the order of the parameters."""
    rows = ng.Kernel().estimate(ng.pullback(nn.Linear(3, 2).double(), normal(4, 3), ng.Euclidean()))
    R = rows.rows()  # [(k n) p]
    (block,) = rows.blocks
    plain = replace(rows, blocks=(block.without_rule(),), factors=(ExampleGrads.of_rows(R.view(2, 4, -1)),))
    close(rows.gram_with(plain), R @ R.T)
    close(plain.gram_with(rows), R @ R.T)


def test_a_step_of_gradient_descent_moves_the_outputs_by_the_kernel_times_the_error() -> None:
    """Bai, Rosenberg and Xu (2022), (15): J Jᵀe = Θe, to first order."""
    model, x = _mlp()
    e = normal(5, 2, seed=3)
    ω = ng.pullback_covector(model, x, e)
    moved = ng.pushforward(model, x, ng.Vector(dict(ω)))
    close(torch.einsum("nmkl,ml->nk", ntk(model, x), e), moved)


def test_single_and_half_precision_have_kernels() -> None:
    model, x = _mlp()
    expected = ntk(model, x)
    close(ntk(model.float(), x.float()).double(), expected, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        half = ntk(model, x.float(), batch=2)
    assert half.dtype == torch.float32
    close(half.double(), expected, 0.05)


# Memory


def test_the_kernel_of_two_million_parameters_does_not_form_the_jacobian() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 8))
    x, P = torch.randn(16, 1000), sum(p.numel() for p in model.parameters())
    assert P > 2_000_000
    jacobian = 16 * 8 * P * 4  # bytes
    assert memory.peak(lambda: ntk(model, x)) < jacobian / 50
    assert memory.peak(lambda: ntk(model, x, x[:4], batch=4)) < jacobian / 50
    assert memory.peak(lambda: NTKOperator.of(model, x).product(torch.randn(16, 8))) < jacobian / 20


def test_what_does_not_fit_is_refused_before_it_is_made_and_the_form_that_fits_is_named() -> None:
    model, x = _mlp(64)
    with pytest.raises(MemoryBoundError, match=r"the layers of 5 points with 2 outputs.*batch=.*NTKOperator"):
        ntk(model, x, memory=5_000)
    with pytest.raises(MemoryBoundError, match=r"between 400 and 400 points needs 10,240,000 bytes.*NTKOperator"):
        ntk(model, normal(400, 3), batch=2, memory=100_000)
    with pytest.raises(MemoryBoundError, match=r"between 5 and 5 points needs 800 bytes"):
        NTKOperator.of(model, x).dense(memory=100)


# Duality and the parametrisation


def _in(coordinates: Callable[[Tensor], Tensor], θ: Tensor, n: int = 6) -> tuple[Callable[..., Tensor], Any, Tensor]:
    """φ(θ) = tanh(x₁θ₁ + …) + …, in coordinates θ' with θ = coordinates(θ')."""

    def f(params: Any, x: Tensor) -> Tensor:
        w = coordinates(params["w"])
        return torch.stack([(x @ w[:2]).tanh() * w[2], (x @ w[:2]).sin() + w[3]], dim=1)

    return f, {"w": θ}, normal(n, 2)


def test_under_doubled_parameters_the_kernel_is_a_quarter_and_the_pushforward_metric_four_times() -> None:
    """They are dual: the kernel is the inverse of the metric."""
    θ = normal(4, seed=1)
    f, params, x = _in(lambda w: w, θ)
    f2, params2, _ = _in(lambda w: w / 2, 2 * θ)  # θ' = 2θ, the same function
    Θ, Θ2 = ntk(f, x, params=params), ntk(f2, x, params=params2)
    close(Θ2, Θ / 4)
    X = oracle.jacobian(f, params, x, 6) @ normal(4, seed=2)  # a tangent function
    once, twice = PushforwardMetric.of(Θ), PushforwardMetric.of(Θ2)
    close(twice.inner(X, X), 4 * once.inner(X, X))
    close(twice.flat(X), 4 * once.flat(X))


def test_a_change_of_coordinates_changes_the_kernel_as_an_inverse_metric_changes() -> None:
    """Θ' = J A Aᵀ Jᵀ for θ = Aθ': that of the metric (A Aᵀ)⁻¹ on the old parameters, and no other invariance."""
    A, θ = normal(4, 4, seed=5), normal(4, seed=1)
    f, params, x = _in(lambda w: w, θ)
    g, params2, _ = _in(lambda w: A @ w, torch.linalg.solve(A, θ))
    Θ2 = ntk(g, x, params=params2)
    J = oracle.jacobian(f, params, x, 6)
    close(Θ2, _theta(J @ A))
    G = ng.operators.DenseOperator(ng.operators.Layout.of(params), torch.linalg.inv(A @ A.T))
    close(NTKOperator.of(f, x, inverse=ng.Cholesky().init(G), params=params).dense(), Θ2, 1e-9)
    assert (Θ2 - ntk(f, x, params=params)).norm() > 0.1 * Θ2.norm()


def test_the_pushforward_metric_is_that_of_the_vectors_that_are_pushed_forward() -> None:
    """(φ_*g)(J v, J w) = ⟨v, w⟩ for the Euclidean metric, vᵀG w for another; φ is an immersion here."""
    f, params, x = _in(lambda w: w, normal(4, seed=1))
    J, v, w = oracle.jacobian(f, params, x, 6), normal(4, seed=2), normal(4, seed=3)
    close(PushforwardMetric.of(ntk(f, x, params=params)).inner(J @ v, J @ w), v @ w, 1e-9)
    B = normal(4, 4, seed=5)
    G = ng.operators.DenseOperator(ng.operators.Layout.of(params), B @ B.T)
    kernel = NTKOperator.of(f, x, inverse=ng.Cholesky().init(G), params=params).dense()
    close(PushforwardMetric.of(kernel).inner(J @ v, J @ w), v @ B @ B.T @ w, 1e-8)


def test_over_parametrised_the_length_is_that_of_the_least_vector() -> None:
    model, x = _mlp(16)
    J = oracle.module_jacobian(model, x).reshape(10, -1)
    X = J @ normal(J.shape[1])
    least = torch.linalg.pinv(J) @ X
    close(PushforwardMetric.of(ntk(model, x)).inner(X.view(5, 2), X.view(5, 2)), least @ least, 1e-9)


def test_lemma_6_the_golden_basis_is_orthonormal() -> None:
    case = golden("ntk.lemma6")
    B = tensor(case["inputs"]["B"])  # [i x]
    kernel = ntk(lambda p, x: x @ p["w"], B.T.contiguous(), params={"w": normal(2)})
    agrees(case, kernel[:, :, 0, 0], "K")
    metric = PushforwardMetric.of(kernel)
    agrees(case, torch.stack([torch.stack([metric.inner(a, b) for a in B]) for b in B]), "gram")
    assert metric.rank == 2


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Kronecker(), ng.Diagonal(), ng.Kernel()])
def test_any_structure_of_a_metric_on_the_parameters_has_a_kernel(structure: Any) -> None:
    model, x = _mlp()
    G = structure.estimate(ng.pullback(model, normal(40, 3, seed=9), ng.Fisher(ng.Categorical())))
    J = oracle.module_jacobian(model, x)
    inverse = torch.linalg.inv(G.dense() + 0.1 * torch.eye(J.shape[2], dtype=J.dtype))
    operator = NTKOperator.of(model, x, x[:2], inverse=ng.Cholesky().init(G, 0.1))
    close(operator.dense(), _theta(J @ inverse, J[:2]), 1e-8)


# Bad input


def test_what_has_no_kernel_is_refused() -> None:
    model, x = _mlp()
    with pytest.raises(ValueError, match="has no trainable parameters"):
        ntk(nn.Tanh(), x)
    with pytest.raises(ValueError, match="batch=0 must be a positive integer"):
        ntk(model, x, batch=0)
    with pytest.raises(ValueError, match=r"batch=2 takes a range of the examples.*leave batch= out"):
        ntk(lambda p, x: x[0] * x[1] * p["w"], (x, torch.tensor(2.0)), batch=2, params={"w": normal(3)})
    with pytest.raises(NonFiniteError, match="NaN"):
        ntk(model, torch.full((5, 3), torch.nan, dtype=torch.float64))
    with pytest.raises(NonFiniteError, match="the output of the model holds NaN"):
        NTKOperator.of(model, torch.full((5, 3), torch.nan, dtype=torch.float64))
    with pytest.raises(BatchStatisticsError, match="BatchNorm1d"):
        NTKOperator.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double(), x)
    with pytest.raises(ValueError, match=r"u has the shape \(5,\), and the outputs at the points y \(5, 2\)"):
        NTKOperator.of(model, x).product(normal(5))
    G: Any = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean()))
    with pytest.raises(TypeError, match="inverse must be a natgrad Inverse, got DenseOperator"):
        NTKOperator.of(model, x, inverse=G)
    other = ng.operators.DenseOperator(ng.operators.Layout.of({"w": x}), torch.eye(15, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"the metric is over \['w'\], and the model has .*pullback of this model"):
        NTKOperator.of(model, x, inverse=ng.Cholesky().init(other))


def test_what_has_no_length_is_refused() -> None:
    f, params, x = _in(lambda w: w, normal(4, seed=1))
    metric = PushforwardMetric.of(ntk(f, x, params=params))
    with pytest.raises(ValueError, match=r"v is not tangent to the model.*Project it first"):
        metric.inner(normal(6, 2), normal(6, 2))
    with pytest.raises(ValueError, match=r"v has the shape \(3,\): it needs 12 values"):
        metric.flat(normal(3))
    with pytest.raises(NonFiniteError, match="the function holds NaN"):
        metric.flat(torch.full((6, 2), torch.nan, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"the kernel has the shape \(6, 2, 2, 2\).*\[n n k k\]"):
        PushforwardMetric.of(ntk(f, x, x[:2], params=params))


# The map S of the neural tangent kernel, and how far it is from the projection on the tangent space.


def _norm(S: Tensor) -> Tensor:
    """Of an operator: the largest singular value."""
    return torch.linalg.svdvals(S)[0]


@EVERY
def test_the_map_s_is_the_sum_of_inner_products_and_zero_where_the_projection_is(metric: ng.OutputMetric) -> None:
    model, x, v = network(), normal(8, 2), normal(8, 3, seed=1)
    J, H, g, inverse = dense(model, x, metric)
    S = NTKMap(framed(model, x, metric))
    close(S(v).flatten(), J.T @ H @ v.reshape(-1), 1e-9)
    across = v.reshape(-1) - J @ inverse @ J.T @ H @ v.reshape(-1)
    assert across.norm() > 0.1
    close(S(across.view(8, 3)).flatten(), torch.zeros(len(g), dtype=g.dtype), 1e-8)


@EVERY
@pytest.mark.parametrize("hidden", [1, 12])
def test_how_far_s_is_from_a_projection_is_seen_in_the_eigenvalues_of_the_pulled_back_metric(
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
