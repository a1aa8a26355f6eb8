"""The neural tangent kernel against the dense Jacobian, in every form, and how it changes with the parametrisation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import BatchStatisticsError, MemoryBoundError, NonFiniteError
from natgrad.functionspace import NTKOperator, PushforwardMetric, layer_ntks, ntk
from natgrad.functionspace.ntk import LayerRows, cross_gram
from natgrad.pullback import Factors
from tests import memory, oracle, zoo
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
    left = Factors(normal(n, r, c, i), normal(k, n, r, c, o, seed=1))
    right = Factors(normal(m, s, c, i, seed=2), normal(l, m, s, c, o, seed=3))
    close(cross_gram(left, right, limit), left.rows().flatten(0, 1) @ right.rows().flatten(0, 1).T)
    close(cross_gram(left, left, limit), left.gram())


def test_a_layer_that_is_packed_in_another_way_at_other_points_has_the_same_gram() -> None:
    """As a bias of one example may be: then rows are compared in the order of the parameters."""
    rows = ng.Kernel().estimate(ng.pullback(nn.Linear(3, 2).double(), normal(4, 3), ng.Euclidean()))
    R = rows.rows()  # [(k n) p]
    (block,) = rows.blocks
    plain = LayerRows((block.without_rule(),), (Factors.of_rows(R.view(2, 4, -1)),))
    ruled = LayerRows((block,), rows.factors)
    close(ruled.gram(plain), R @ R.T)
    close(plain.gram(ruled), R @ R.T)


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
