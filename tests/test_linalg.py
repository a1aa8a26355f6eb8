"""Roots and factors of small matrices, and the errors that say what to do when there are none."""

import itertools

import pytest
import torch
from torch import Tensor

from natgrad.errors import NonFiniteError, SingularMetricError
from natgrad.linalg import (
    check_damping,
    check_finite,
    cholesky,
    newton,
    symmetric_root,
)
from tests.pulled import normal


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


# The Newton loop


def test_newton_solves_a_quadratic_in_one_step_and_leaves_points_of_a_batch_alone() -> None:
    """Each point of a batch ends where it ends by itself."""
    A = normal(4, 3, 3)
    H, b, x = A @ A.mT + torch.eye(3, dtype=torch.float64), normal(4, 3, seed=1), normal(4, 3, seed=2)

    def solve(k: slice) -> tuple[Tensor, Tensor]:
        return newton(
            x[k],
            value=lambda x: 0.5 * torch.einsum("...i,...ij,...j->...", x, H[k], x) - (b[k] * x).sum(-1),
            gradient=lambda x: torch.einsum("...ij,...j->...i", H[k], x) - b[k],
            direction=lambda x, g: -torch.linalg.solve(H[k], g),
        )

    found, decrement = solve(slice(None))
    close(found, torch.linalg.solve(H, b), 1e-12)
    assert float(decrement.abs().max()) < 1e-24
    for n in range(4):
        close(solve(slice(n, n + 1))[0][0], found[n], 1e-14)


def test_newton_never_leaves_the_domain_and_descends_at_every_step() -> None:
    """x − a log x from far above: the full Newton step would lead below 0."""
    a, seen = torch.tensor([1e-3, 5.0], dtype=torch.float64), []

    def value(x: Tensor) -> Tensor:
        assert bool((x > 0).all())
        seen.append((x - a * x.log()).tolist())
        return x - a * x.log()

    x, _ = newton(
        torch.full((2,), 100.0, dtype=torch.float64),
        value=value,
        gradient=lambda x: 1 - a / x,
        direction=lambda x, g: -g * x.square() / a,
        reach=lambda x, δ: torch.where(δ < 0, -x / δ, torch.inf),
        axes=0,
    )
    close(x, a, 1e-12)
    assert all(later[0] <= earlier[0] + 1e-12 for earlier, later in itertools.pairwise(seen))


def test_newton_projected_onto_a_box_ends_at_its_minimum() -> None:
    """Of a separable quadratic, entry by entry, the clamped minimum."""
    h, goal = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64), torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)

    def direction(x: Tensor, g: Tensor) -> Tensor:
        free = ~(((x <= 0) & (g > 0)) | ((x >= 1) & (g < 0)))
        return torch.where(free, -g / h, 0.0)

    x, decrement = newton(
        torch.full((3,), 0.25, dtype=torch.float64),
        value=lambda x: 0.5 * (h * (x - goal).square()).sum(),
        gradient=lambda x: h * (x - goal),
        direction=direction,
        project=lambda x: x.clamp(0, 1),
    )
    assert x.tolist() == [1.0, 0.0, 0.5]
    assert float(decrement) == 0.0


def test_newton_stops_where_there_is_no_direction_and_goes_on_elsewhere() -> None:
    """NaN marks a point that cannot move; an ascent direction is refused by its negative decrement."""
    x, decrement = newton(
        torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64),
        value=lambda x: x.square(),
        gradient=lambda x: 2 * x,
        direction=lambda x, g: torch.stack([-x[0], x[1] * torch.nan, x[2]]),
        axes=0,
    )
    assert x.tolist() == [0.0, 3.0, 3.0]
    assert float(decrement[0]) == 0.0
    assert bool(decrement[1].isnan())
    assert float(decrement[2]) < 0
