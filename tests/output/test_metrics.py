"""Every output metric is its textbook matrix: as a root, as ♭, and as the Hessian of its divergence."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.output.table import CLASSES, METRICS, Case, close, normal, outer

_hessian: Callable[..., Tensor] = torch.autograd.functional.hessian
_block_diag: Callable[..., Tensor] = torch.block_diag

every_metric = pytest.mark.parametrize("case", METRICS, ids=lambda case: case.name)


@every_metric
def test_the_outer_products_of_the_root_sum_to_the_textbook_matrix(case: Case) -> None:
    s = case.metric.root(case.y, case.target)
    assert case.metric.exact
    assert s.shape[1:] == case.y.shape
    close(outer(s), case.h(case.y), case.tol)


@every_metric
def test_flat_multiplies_by_the_textbook_matrix(case: Case) -> None:
    u = normal(*case.y.shape, seed=1)
    hu = case.metric.flat(case.y, u, case.target)
    assert hu.shape == case.y.shape
    close(hu.reshape(len(u), -1), torch.einsum("nde,ne->nd", case.h(case.y), u.reshape(len(u), -1)), case.tol)


@every_metric
def test_the_metric_is_the_hessian_of_its_divergence(case: Case) -> None:
    """All examples at once: the blocks between different examples vanish."""
    D = case.y.numel()
    H = _hessian(lambda y: case.metric.divergence(y, case.y, case.target).sum(), case.y)
    close(H.reshape(D, D), _block_diag(*case.h(case.y)), case.tol)


@every_metric
def test_the_divergence_is_zero_with_zero_gradient_and_positive_nearby(case: Case) -> None:
    leaf = case.y.clone().requires_grad_()
    ρ = case.metric.divergence(leaf, case.y, case.target)
    (slope,) = torch.autograd.grad(ρ.sum(), leaf)
    close(ρ.detach(), torch.zeros(len(leaf), dtype=torch.float64), 1e-12)
    close(slope, torch.zeros_like(slope), 1e-12)
    for seed in range(5):
        for size in (0.3, 0.03):
            away = case.metric.divergence(case.y + size * normal(*case.y.shape, seed=seed), case.y, case.target)
            assert away.shape == (len(case.y),)
            assert bool((away > -1e-14).all())
            assert float(away.sum()) > 0


@every_metric
def test_the_metric_keeps_the_dtype_and_leaves_no_graph(case: Case) -> None:
    y = case.y.float()
    floating = isinstance(case.target, Tensor) and case.target.is_floating_point()
    target = case.target.float() if floating else case.target
    s = case.metric.root(y, target)
    assert s.dtype == torch.float32
    assert not s.requires_grad
    assert case.metric.flat(y, torch.ones_like(y), target).dtype == torch.float32
    assert case.metric.divergence(y, y, target).dtype == torch.float32
    close(outer(s).double(), case.h(case.y), 1e-4)


@every_metric
def test_flat_is_differentiable_in_the_point(case: Case) -> None:
    """Geodesics differentiate h(y): central differences along w, with their error of order ε²."""
    u, w, ε = normal(*case.y.shape, seed=1), 0.3 * normal(*case.y.shape, seed=2), 1e-4

    def along(y: Tensor) -> Tensor:
        return torch.einsum("nd,nde,ne->", u.reshape(len(u), -1), case.h(y), u.reshape(len(u), -1))

    leaf = case.y.clone().requires_grad_()
    energy = (case.metric.flat(leaf, u, case.target) * u).sum()
    slope = torch.autograd.grad(energy, leaf, materialize_grads=True)[0] if energy.requires_grad else 0 * leaf
    close((slope * w).sum().detach(), (along(case.y + ε * w) - along(case.y - ε * w)) / (2 * ε), 1e-5)


def test_the_categorical_metric_is_singular_along_the_constant_vector() -> None:
    y = normal(3, 4)
    close(ng.Fisher(ng.Categorical()).flat(y, torch.ones_like(y)), torch.zeros_like(y), 1e-15)
    s = ng.Fisher(ng.Categorical()).root(y)
    close(s.sum(-1), torch.zeros(4, 3, dtype=torch.float64), 1e-15)
    assert torch.linalg.matrix_rank(outer(s), rtol=1e-12).tolist() == [3, 3, 3]


def test_the_columns_of_the_categorical_root_are_the_hellinger_embedding() -> None:
    y = normal(3, 4)
    close(ng.Fisher(ng.Categorical()).root(y), oracle.hellinger_roots(y), 1e-12)
    close(ng.Euclidean().root(y), oracle.euclidean_roots(y), 0.0)


def test_roots_of_extreme_outputs_are_finite() -> None:
    y = torch.tensor([[800.0, -800.0], [0.0, 800.0]], dtype=torch.float64)
    for family in (ng.Categorical(), ng.Bernoulli()):
        metric = ng.Fisher(family)
        assert bool(metric.root(y).isfinite().all())
        assert bool(metric.flat(y, torch.ones_like(y)).isfinite().all())
        assert bool(metric.divergence(y + 1, y).isfinite().all())


# The covariance of the training gradients couples the examples

covariance = ng.GradientCovariance(F.cross_entropy)
Y, U = normal(4, 3), normal(4, 3, seed=1)


def gradients() -> Tensor:
    """∇ℓ_n [n D] = softmax(y_n) − e_t."""
    return torch.softmax(Y, 1) - torch.eye(3, dtype=torch.float64)[CLASSES]


def coupled() -> Tensor:
    """h [n D m E] = g_n (1 − 11ᵀ/N)_nm g_mᵀ."""
    C = torch.eye(4, dtype=torch.float64) - 0.25
    return torch.einsum("nd,nm,me->ndme", gradients(), C, gradients())


def test_the_gradient_covariance_is_the_empirical_metric_with_the_centring_matrix() -> None:
    C = covariance.coupling(None, 4)
    assert C is not None
    close(C, torch.eye(4, dtype=torch.float64) - 0.25, 1e-15)
    close(torch.einsum("knd,nm,kme->ndme", covariance.root(Y, CLASSES), C, covariance.root(Y, CLASSES)), coupled())
    close(covariance.flat(Y, U, CLASSES), torch.einsum("ndme,me->nd", coupled(), U))


def test_the_gradient_covariance_is_the_hessian_of_its_divergence_summed_over_the_batch() -> None:
    H = _hessian(lambda y: covariance.divergence(y, Y, CLASSES).sum(), Y)
    close(H.reshape(4, 3, 4, 3), coupled())
    close(covariance.divergence(Y, Y, CLASSES), torch.zeros(4, dtype=torch.float64), 0.0)
    for seed in range(20):
        assert float(covariance.divergence(Y + normal(4, 3, seed=seed), Y, CLASSES).sum()) >= 0


def test_the_empirical_metric_is_the_gradient_covariance_plus_the_outer_product_of_the_mean() -> None:
    """Paper 002 (35), with the covariance that divides by N: F_emp = C + ∇J ∇Jᵀ at J = 1."""
    C = covariance.coupling(None, 4)
    assert C is not None
    s = covariance.root(Y, CLASSES)[0]
    close(torch.einsum("nd,nm,me->de", s, C, s) / 4, torch.cov(gradients().T, correction=0))
    mean = gradients().mean(0)
    second = outer(ng.Empirical(F.cross_entropy).root(Y, CLASSES)).mean(0)
    close(second, torch.cov(gradients().T, correction=0) + torch.outer(mean, mean))


@pytest.mark.parametrize("n", [1, 3, 7])
def test_the_centring_matrix_is_a_projection_in_double_precision(n: int) -> None:
    C = covariance.coupling(None, n)
    assert C is not None
    close(C @ C, C, 1e-15)
    close(C.sum(0), torch.zeros(n, dtype=torch.float64), 1e-15)
