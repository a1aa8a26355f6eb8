"""Roots and factors of small matrices, and the errors that say what to do when there are none."""

import pytest
import torch
from torch import Tensor

from natgrad.errors import NonFiniteError, SingularMetricError
from natgrad.linalg import (
    check_damping,
    check_finite,
    cholesky,
    symmetric_root,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("rank", [0, 1, 3, 4])
def test_the_symmetric_root_squares_to_the_matrix_at_every_rank(rank: int) -> None:
    R = normal(2, 4, rank)
    h = R @ R.transpose(1, 2)
    s = symmetric_root(h, "h")
    close(s @ s, h)
    close(s, s.transpose(1, 2))


def test_the_symmetric_root_refuses_negative_eigenvalues_naming_the_example() -> None:
    h = torch.diag_embed(torch.tensor([[1.0, 2.0], [3.0, -0.25], [1.0, -1.0]], dtype=torch.float64))
    with pytest.raises(SingularMetricError, match=r"phi is bent at example 1: its Hessian has the eigenvalue -0\.25"):
        symmetric_root(h, "phi is bent")


def test_the_symmetric_root_takes_rounding_for_zero() -> None:
    h = torch.diag_embed(torch.tensor([[1.0, -1e-16]], dtype=torch.float64))
    close(symmetric_root(h, "h"), torch.diag_embed(torch.tensor([[1.0, 0.0]], dtype=torch.float64)))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_the_cholesky_factor_is_that_of_the_damped_matrix(shape: tuple[int, ...], damping: float) -> None:
    A = normal(*shape, 4, 4)
    G = A @ A.transpose(-1, -2)
    kept = G.clone()
    L = cholesky(G, damping, "G")
    close(L @ L.transpose(-1, -2), G + damping * torch.eye(4, dtype=torch.float64))
    close(L, L.tril(), 0.0)
    close(G, kept, 0.0)


def test_damping_makes_a_singular_matrix_regular() -> None:
    r = normal(4)
    L = cholesky(torch.outer(r, r), 1e-3, "G")
    close(L @ L.T, torch.outer(r, r) + 1e-3 * torch.eye(4, dtype=torch.float64))


R = normal(4, 2)
REFUSED = {
    "singular": (R @ R.T, 0.0, r"G is singular at damping 0: rank 2 of 4, .* Add damping .* or .* Pinv\(\)"),
    "singular in a batch": (torch.stack([torch.eye(4).double(), R @ R.T]), 0.0, "G is singular .* rank 2 of 4"),
    "damping below rounding": (R @ R.T, 1e-18, "G is singular at damping 1e-18: rank 2 of 4"),
    "indefinite": (
        torch.diag(torch.tensor([2.0, 1.0, -0.5])),
        0.0,
        "indefinite .* smallest eigenvalue -0.5, largest 2",
    ),
    "too little damping": (
        torch.diag(torch.tensor([2.0, -0.5])),
        0.25,
        r"damping 0.25: .* eigenvalue -0.25, largest 2.25",
    ),
    "zero": (torch.zeros(2, 2), 0.0, "G is singular at damping 0: rank 0 of 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_matrix_without_an_inverse_is_refused_with_rank_and_spectrum(name: str) -> None:
    matrix, damping, match = REFUSED[name]
    with pytest.raises(SingularMetricError, match=match):
        cholesky(matrix.double(), damping, "G")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_entries_are_refused(bad: float) -> None:
    matrix = torch.eye(2)
    matrix[0, 1] = bad
    with pytest.raises(NonFiniteError, match=r"G holds NaN or infinity\. Nothing was changed"):
        cholesky(matrix, 1.0, "G")
    with pytest.raises(NonFiniteError, match="the step holds NaN"):
        check_finite(matrix, "the step")


@pytest.mark.parametrize("damping", [-1e-9, float("nan"), float("inf")])
def test_damping_is_a_finite_number_that_is_not_negative(damping: float) -> None:
    with pytest.raises(ValueError, match="damping must be a finite number ≥ 0, got"):
        check_damping(damping)
    check_damping(0.0)
