"""A kernel matrix that may be singular, and the push-through form that never inverts it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from natgrad.errors import NonFiniteError, SingularMetricError
from natgrad.kernels.gram import KernelMatrix
from natgrad.operators import KernelOperator, Layout
from natgrad.pullbacks.example_grads import ExampleGrads
from natgrad.pullbacks.layer import Block, ParameterSlice
from natgrad.structures.kernel import PushThrough
from tests.pulled import close, normal

COPIES = [0, 1, 2, 3, 1, 0, 1]


def gram(x: Tensor) -> Tensor:
    """(1 + r)e^{−r} of all pairs."""
    r = (x[:, None] - x[None]).norm(dim=2)
    return (1 + r) * (-r).exp()


CASES = {
    "regular": gram(normal(5, 2)),
    "with copies": gram(normal(4, 2)[COPIES]),
    "all copies": torch.ones(4, 4, dtype=torch.float64),
    "one": torch.ones(1, 1, dtype=torch.float64),
}
every_case = pytest.mark.parametrize("K", CASES.values(), ids=CASES)


def operator(rows: Tensor, K: Tensor | None = None) -> KernelOperator:
    """Rows [k n p] of one block without a rule."""
    p = rows.shape[2]
    block = Block(("w",), (ParameterSlice("w", 0, torch.Size([p])),), (1, p, 1), torch.device("cpu"))
    layout = Layout.of({"w": rows[0, 0]}, rows.dtype)
    return KernelOperator(layout, (block,), (ExampleGrads.of_rows(rows),), None if K is None else KernelMatrix.of(K))


def identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def pinv(K: Tensor) -> Tensor:
    return torch.linalg.pinv(K, rtol=1e-12, hermitian=True)


# K


@every_case
def test_the_inverse_of_a_kernel_matrix_is_its_pseudo_inverse(K: Tensor) -> None:
    root = KernelMatrix.of(K).inverse_root()
    close(root @ root.T, pinv(K), 1e-12)


@every_case
def test_what_is_whitened_has_the_squares_of_the_pseudo_inverse_and_unwhitening_is_the_transpose(K: Tensor) -> None:
    matrix, n = KernelMatrix.of(K), len(K)
    W = matrix.whiten(torch.eye(n, dtype=K.dtype)[None])[0]
    close(W.T @ W, pinv(K), 1e-12)
    t = normal(3, n)
    close(matrix.unwhiten(t), t @ W)
    close(matrix.whiten(t), t @ W.T)


@every_case
def test_a_regular_matrix_keeps_its_coordinates_and_a_singular_one_those_that_it_sees(K: Tensor) -> None:
    matrix, n = KernelMatrix.of(K), len(K)
    assert (matrix.basis is None) == (int(torch.linalg.matrix_rank(K)) == n)
    P = matrix.extend(matrix.restrict(torch.eye(n, dtype=K.dtype)))
    close(P, K @ pinv(K))
    close(matrix.extend(matrix.extend(matrix.inner).T), K if matrix.basis is None else P @ K @ P)
    two = normal(2 * n, 2 * n)
    Q = torch.eye(n, dtype=K.dtype) if matrix.basis is None else matrix.basis
    both = torch.block_diag(Q, Q)
    close(matrix.restrict_gram(two), both.T @ two @ both)


def test_a_matrix_of_less_precision_has_less_rank() -> None:
    K = gram(torch.tensor([[0.0], [1.0], [1.0 + 1e-4]], dtype=torch.float64))
    assert KernelMatrix.of(K).basis is None
    for known in (KernelMatrix.of(K, torch.finfo(torch.float32).eps), KernelMatrix.of(K.float())):
        assert known.basis is not None
        assert int(torch.linalg.matrix_rank(known.basis)) == 2


def test_a_matrix_with_an_eigenvalue_below_zero_is_no_kernel_and_is_refused() -> None:
    K = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"has the eigenvalue -1: .* Give k\(x, y\) that is symmetric and positive"):
        KernelMatrix.of(K)
    KernelMatrix.of(gram(normal(40, 2) / 1e4))  # rounding below zero is zero


def test_what_has_no_factor_is_nan_and_not_a_wrong_number() -> None:
    """On a GPU nothing is read back: NaN is what steps are checked for."""
    K = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    assert bool(KernelMatrix.regular(K).inverse_root().isnan().any())
    dual = PushThrough.of(operator(torch.zeros(1, 2, 3, dtype=torch.float64)), KernelMatrix.regular(K), 0.1)
    assert bool(dual.solve(normal(1, 2)).isnan().any())


# (λK + BBᵀ)⁻¹


@pytest.mark.parametrize("p", [3, 40])  # fewer parameters than rows, and more
@pytest.mark.parametrize("damping", [1e-3, 1.0])
@every_case
def test_push_through_is_the_inverse_of_the_metric_with_the_pseudo_inverse_of_k(
    K: Tensor, damping: float, p: int
) -> None:
    """For any rows: copies of an example need not even have equal ones."""
    n = len(K)
    rows, ω = normal(2, n, p), normal(p, seed=1)
    R = rows.flatten(0, 1)
    G = R.T @ torch.block_diag(pinv(K), pinv(K)) @ R
    coupled = operator(rows, K)
    close(coupled.dense(), G)
    close(coupled.inverse(damping).solve(ω), torch.linalg.solve(G + damping * identity(p), ω), 1e-9)


@every_case
def test_a_covector_in_the_range_takes_the_step_that_has_no_inverse_of_k(K: Tensor) -> None:
    """Bᵀ(λK + BBᵀ)⁻¹K e, for rows that are as equal as the points are."""
    n, p, λ = len(K), 40, 0.1
    rows, e = torch.einsum("nm,kmp->knp", K, normal(2, n, p)), normal(2, n, seed=1)
    R, both = rows.flatten(0, 1), torch.block_diag(K, K)
    expected = R.T @ (pinv(λ * both + R @ R.T) @ (both @ e.flatten()))
    close(operator(rows, K).inverse(λ).solve(R.T @ e.flatten()), expected, 1e-9)


def test_damping_below_the_rounding_of_the_rows_is_no_failure() -> None:
    K = CASES["with copies"] + 1e-6 * torch.eye(7, dtype=torch.float64)
    rows = 1e4 * torch.einsum("nm,kmp->knp", K, normal(2, 7, 40))
    dual = PushThrough.of(operator(rows), KernelMatrix.of(K), 1e-9)
    z = dual.solve(torch.einsum("knp,p->kn", rows, normal(40, seed=1)))
    assert bool(z.isfinite().all())


def test_rows_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="the kernel holds NaN"):
        operator(torch.full((1, 4, 3), torch.nan, dtype=torch.float64), CASES["all copies"]).inverse(0.1)


# The operator


@every_case
def test_every_view_of_a_coupled_kernel_is_of_one_metric(K: Tensor) -> None:
    G = operator(normal(2, len(K), 6), K)
    close(G.product(normal(6, seed=1)), G.dense() @ normal(6, seed=1))
    close(G.diagonal(), G.dense().diagonal())
    close(G.rows() @ G.rows().T, G.gram())
    close(G.logdet(0.3), torch.logdet(G.dense() + 0.3 * identity(6)))
    v = G.pseudo_inverse(0.0, 1e-10, None).solve(G.product(normal(6, seed=1)))
    close(v, torch.linalg.pinv(G.dense(), rtol=1e-10, hermitian=True) @ G.dense() @ normal(6, seed=1), 1e-8)


def test_an_average_couples_the_examples_of_each_batch_and_not_those_of_two() -> None:
    first, second = operator(normal(2, 5, 6), CASES["regular"]), operator(normal(2, 7, 6, seed=1), CASES["with copies"])
    plain = operator(normal(2, 3, 6, seed=2))
    both = first.lerp(second, 0.3)
    close(both.dense(), 0.7 * first.dense() + 0.3 * second.dense())
    close(both.lerp(plain, 0.5).dense(), 0.5 * both.dense() + 0.5 * plain.dense())
    close(plain.lerp(first, 0.5).dense(), 0.5 * plain.dense() + 0.5 * first.dense())
    ω = normal(6, seed=3)
    close(both.inverse(0.1).solve(ω), torch.linalg.solve(both.dense() + 0.1 * identity(6), ω), 1e-9)


@pytest.mark.parametrize("K", [None, CASES["regular"]], ids=["alone", "coupled"])
def test_damping_that_is_lost_beside_the_metric_is_refused_where_it_is_divided_by(K: Tensor | None) -> None:
    rows, ω = normal(2, 5, 40), normal(40, seed=1)
    coupled = operator(rows, K)
    with pytest.raises(SingularMetricError, match=r"divides by the damping: at damping 1e-16 .*Add damping \(more"):
        coupled.inverse(1e-16)
    λ = 1e-8
    close(coupled.inverse(λ).solve(ω), torch.linalg.solve(coupled.dense() + λ * identity(40), ω), 1e-5)
