"""Roots and factors of small matrices, and the errors that say what to do when there are none."""

import pytest
import torch
from torch import Tensor

from natgrad.errors import NonFiniteError, SingularMetricError
from natgrad.linalg import (
    _few,
    _joined,
    check_damping,
    check_finite,
    cholesky,
    consecutive,
    gated_add,
    gated_lerp,
    gated_momentum,
    pairing,
    side_by_side,
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


def test_a_pairing_does_not_depend_on_where_the_tensors_lie() -> None:
    x, y = torch.randn(2, 5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (x * y).sum()
    apart = [(a.clone(), b.clone()) for a, b in zip(x, y, strict=True)]
    turned = [(a.T, b.T) for a, b in zip(x, y, strict=True)]
    both = list(zip(x, y, strict=True))
    copied = [(a.clone(), b) for a, b in both]
    mixed = [(x[0], y[0]), (x[1], apart[1][1]), (x[2], y[2]), (x[3], y[3]), (x[4], y[4])]
    for pairs in (both, both[::-1], apart, turned, copied, mixed):
        torch.testing.assert_close(pairing(pairs), expected)
        runs = side_by_side(pairs)
        assert sum(map(len, runs)) == 5
        close(sum(((a * b).sum() for run in runs for a, b in run), torch.zeros(()).double()), expected)
    assert [len(side_by_side(pairs)) for pairs in (both, both[::-1], apart, copied, mixed)] == [1, 1, 5, 1, 3]


def test_small_vectors_are_paired_end_to_end_and_large_ones_by_themselves() -> None:
    shapes = ((3,), (100, 200), (1, 1), (2, 3))
    pairs = [(normal(*shape, seed=at), normal(*shape, seed=at + 9)) for at, shape in enumerate(shapes)]
    runs = _few([[pair] for pair in pairs])
    assert [len(run) for run in runs] == [1, 3]
    dots = (_joined([x for x, _ in run]) @ _joined([y for _, y in run]) for run in runs)
    close(sum(dots, torch.zeros(()).double()), pairing(pairs), 1e-12)
    assert _few([[pairs[1]]]) == [[pairs[1]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_pairing_of_half_precision_is_a_sum_in_single(dtype: torch.dtype) -> None:
    x, y = torch.full((1000,), 1e3, dtype=dtype), torch.full((1000,), 1e3, dtype=dtype)
    found = pairing([(x, y), (x.float(), y)])
    assert found.dtype is torch.float32
    close(found, 2 * (x.float() @ y.float()))  # float16 ends at 65504


def test_gated_sums_do_not_depend_on_memory_formats() -> None:
    """As torch's fused kernels would, which read memory as it lies."""
    xs, ys, ms = (list(torch.randn(3, 2, 3, 2, 2, generator=torch.Generator().manual_seed(at))) for at in range(3))
    xs[0], ms[0], ys[1] = (t.contiguous(memory_format=torch.channels_last) for t in (xs[0], ms[0], ys[1]))
    added, lerped, rolled, momenta = ([t.clone() for t in of] for of in (xs, xs, xs, ms))
    good, two = torch.zeros(()), torch.full((), 2.0)
    gated_add(added, ys, 0.5, good)
    gated_lerp(lerped, ys, 0.25, 4, good)
    gated_momentum(rolled, [y.clone() for y in ys], momenta, 0.1, 0.5, two, good)
    for at, (x, y, m) in enumerate(zip(xs, ys, ms, strict=True)):
        torch.testing.assert_close(added[at], x + 0.5 * y)
        torch.testing.assert_close(lerped[at], 0.75 * x + 0.25 * y / 4)
        torch.testing.assert_close(momenta[at], 0.5 * m + y / 2)
        torch.testing.assert_close(rolled[at], x - 0.1 * (0.5 * m + y / 2))
    gated_add(added, [torch.full_like(y, torch.nan) for y in ys], 1.0, torch.ones(()))
    assert all(t.isfinite().all() for t in added)


def test_tensors_are_consecutive_only_where_nothing_is_between_them() -> None:
    x = torch.arange(12.0).view(4, 3)
    found = consecutive([x[1], x[2], x[3]])
    assert found is not None
    assert torch.equal(found, x[1:])
    assert consecutive([x[0], x[2]]) is None
    assert consecutive([x[0], x[0].clone()]) is None
    assert consecutive([x[:, 0], x[:, 1]]) is None
    assert consecutive([x[0], x[1, :2]]) is None
    assert consecutive([x[0], x[1].double()]) is None
