"""On a GPU: eigenvectors that follow their factors are those of Householder's method, and wait for nothing."""

from __future__ import annotations

import pytest
import torch

from tests.accelerate.test_bases import EPS, below_diagonal, followed, problem
from tests.cuda.waiting import no_waiting


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(
    ("d", "condition", "rank"),
    [
        *((1, 1.0, 1), (30, 1e3, 30), (250, 1e8, 250)),
        *(pytest.param(*large, marks=pytest.mark.gpu("slow")) for large in ((1000, 1e8, 1000), (784, 1e3, 20))),
    ],
)
def test_columns_are_a_factorisation_up_to_rounding(d: int, condition: float, rank: int, near: bool) -> None:
    F, Q = problem(d, condition, rank, near)
    there = F.float().cuda(), Q.float().cuda()
    followed(*there)  # the libraries wait when they are used for the first time
    with no_waiting():
        X, failed = followed(*there)
    assert failed is not None
    assert not failed
    X = X.double().cpu()
    assert (X.mT @ X - torch.eye(d, dtype=torch.float64)).abs().max() < 16 * EPS
    assert below_diagonal(X, F, Q) < 40 * EPS


def test_products_are_in_single_precision_whatever_the_user_allows() -> None:
    F, Q = (t.float().cuda() for t in problem(250, 1e4, 250, near=True))
    expected, _ = followed(F, Q)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        X, _ = followed(F, Q)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(X, expected)


def test_a_matrix_that_is_not_finite_keeps_its_basis() -> None:
    F, Q = (t.float().cuda() for t in problem(40, 1e2, 40, near=True))
    F[0, 3, 3] = torch.nan
    X, failed = followed(F, Q)
    assert failed == 1
    assert torch.equal(X[0], Q[0])
