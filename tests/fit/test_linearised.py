"""The linear model of residuals: damped least-squares steps from a triangle, of one problem and of thousands."""

import pytest
import torch
from torch import Tensor

from natgrad.fit.triangle import TriangularLeastSquares
from tests.pulled import normal


def close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("shape", [(7, 3), (3, 3), (2, 5), (4, 7, 3), (2, 3, 2, 5)])
@pytest.mark.parametrize("damping", [1e-4, 1.0, 1e4])
def test_a_damped_least_squares_step_solves_the_stacked_system(shape: tuple[int, ...], damping: float) -> None:
    J, r = normal(*shape), normal(*shape[:-1])
    d = damping * normal(*shape[:-2], shape[-1]).abs() + damping
    found = TriangularLeastSquares.of(J, r).damped(d)
    below = torch.cat([J, torch.diag_embed(d)], -2), torch.cat([r, torch.zeros_like(d)], -1).unsqueeze(-1)
    close(found.unsqueeze(-1), -torch.linalg.lstsq(*below, driver="gelsd").solution, 1e-9)


def test_a_least_squares_step_loses_the_condition_number_once_and_not_twice() -> None:
    """Läuchli's matrix: at ε = 1e-9 JᵀJ is singular in double precision, J is not."""
    ε = 1e-9
    J = torch.cat([torch.ones(1, 3, dtype=torch.float64), ε * torch.eye(3, dtype=torch.float64)])
    p = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    found = TriangularLeastSquares.of(J, -(J @ p)).damped(torch.full((3,), 1e-15, dtype=torch.float64))
    close(found, p, 1e-6)
    assert int(torch.linalg.matrix_rank(J.T @ J)) == 1


def test_the_triangles_of_thousands_of_problems_are_those_of_one_by_one() -> None:
    J, r = normal(1200, 7, 3), normal(1200, 7)
    J[5, :, 1] = 0.0
    J[6, :, 2] = J[6, :, 0] + 1e-9 * J[6, :, 2]
    J[7] *= 1e100
    whole = torch.cat([J, r.unsqueeze(-1)], -1)
    found = TriangularLeastSquares.of(J, r)
    close(found.R.triu(), found.R)
    R, z = torch.linalg.qr(whole, mode="r").R[:, :3].split([3, 1], -1)
    sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-1)
    regular = torch.tensor([k for k in range(1200) if k not in (5, 6)])
    close(
        (found.R / (sign * R).abs().amax((-1, -2), keepdim=True))[regular],
        (sign * R / R.abs().amax((-1, -2), keepdim=True))[regular],
    )
    close(found.z[regular], (sign * z).squeeze(-1)[regular])
    for k in (5, 6):
        close(found.R[k].mT @ found.R[k], J[k].mT @ J[k])
