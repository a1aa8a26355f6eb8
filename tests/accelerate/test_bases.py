"""The orthogonal iteration by products and Cholesky factors, against Householder's method in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.accelerate import bases
from natgrad.accelerate.bases import Factorisation, iterate_bases, lower_inverses
from tests.accelerate.test_roots import spread, symmetric

EPS = torch.finfo(torch.float32).eps


def followed(F: Tensor, Q: Tensor, method: Factorisation = "auto") -> tuple[Tensor, Tensor | None]:
    (X,), failed = iterate_bases([F], [Q], method)
    return X, failed


def rotation(d: int, seed: int, near: Tensor | None = None) -> Tensor:
    noise = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(noise if near is None else near + 0.02 * noise).Q


def problem(d: int, condition: float, rank: int, near: bool) -> tuple[Tensor, Tensor]:
    """Two factors and their bases, in double precision, of numbers that single precision has."""
    values = spread(d, condition)
    values[rank:] = 0
    factors = [symmetric(values, seed) for seed in range(2)]
    starts = [
        rotation(d, 5 + seed, torch.linalg.eigh(F).eigenvectors if near else None) for seed, F in enumerate(factors)
    ]
    return torch.stack(factors).float().double(), torch.stack(starts).float().double()


def by_householder(F: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """FQ with its columns in the order of qᵀFq, and its Q."""
    moved = F @ Q
    order = (Q * moved).sum(1).argsort(dim=1, descending=True)
    moved = torch.stack([m[:, columns] for m, columns in zip(moved, order, strict=True)])
    return moved, torch.linalg.qr(moved).Q


def below_diagonal(X: Tensor, F: Tensor, Q: Tensor) -> Tensor:
    """The largest length of a column of XᵀFQ below the diagonal, over that of the largest column of FQ.

    Columns are in the order of qᵀFq. Single precision cannot tell those from each other that differ by its rounding,
    and the order of a sum decides: of a thousand quotients two are that near. XᵀFQ is triangular up to the blocks of
    such columns, which do not count.
    """
    moved, _ = by_householder(F, Q)
    lengths = torch.linalg.vector_norm(moved, dim=1).amax(1)
    quotients = (Q * (F @ Q)).sum(1).sort(dim=1, descending=True).values
    told = quotients.unsqueeze(1) - quotients.unsqueeze(2) > EPS * lengths[:, None, None]  # those of columns and rows
    return (torch.linalg.vector_norm((X.mT @ moved) * told, dim=1) / lengths.unsqueeze(1)).max()


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(
    ("d", "condition", "rank"), [(1, 1.0, 1), (2, 10.0, 2), (150, 1e8, 150), (300, 1e8, 300), (200, 1e3, 20)]
)
def test_columns_are_a_factorisation_up_to_rounding(d: int, condition: float, rank: int, near: bool) -> None:
    """Orthogonal, and FQ is upper triangular in them: the sizes are below, at and above that of a block."""
    F, Q = problem(d, condition, rank, near)
    X, failed = followed(F.float(), Q.float(), "cholesky")
    assert failed is not None
    assert not failed
    moved, _ = by_householder(F, Q)
    one = torch.eye(d, dtype=torch.float64)
    assert (X.double().mT @ X.double() - one).abs().max() < 16 * EPS
    assert below_diagonal(X.double(), F, Q) < 40 * EPS
    R = X.double().mT @ moved
    assert (R.diagonal(dim1=1, dim2=2)[:, : max(1, rank // 4)] > 0).all()


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e8])
def test_columns_that_single_precision_can_tell_are_those_of_householder(condition: float) -> None:
    """Up to their signs; the error of a column is that of FQ over what is left of it."""
    F, Q = problem(200, condition, 200, near=True)
    X, _ = followed(F.float(), Q.float(), "cholesky")
    moved, H = by_householder(F, Q)
    left = (H.mT @ moved).diagonal(dim1=1, dim2=2).abs() / torch.linalg.vector_norm(moved, dim=1).amax(1, keepdim=True)
    sine = torch.linalg.vector_norm(X.double() - H * (X.double() * H).sum(1, keepdim=True), dim=1)
    clear = left > 1e-3
    assert clear.sum() > 30
    assert (sine * left)[clear].max() < 1e3 * EPS


def test_without_a_scale_the_basis_stays() -> None:
    F, Q = torch.zeros(2, 40, 40), torch.stack([rotation(40, seed) for seed in range(2)]).float()
    X, failed = followed(F, Q, "cholesky")
    assert failed is not None
    assert not failed
    overlap = (X.mT @ Q).abs()  # the order of equal eigenvalues is any
    torch.testing.assert_close(overlap.amax(1), torch.ones(2, 40))


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e30])
def test_scales_of_all_sizes(scale: float) -> None:
    F, Q = problem(50, 1e3, 50, near=True)
    (X, failed), (Y, _) = followed(scale * F.float(), Q.float(), "cholesky"), followed(F.float(), Q.float(), "cholesky")
    assert failed is not None
    assert not failed
    torch.testing.assert_close(X[..., :20], Y[..., :20], rtol=1e-4, atol=1e-4)


def test_a_matrix_that_is_not_finite_keeps_its_basis_and_is_counted() -> None:
    F, Q = problem(20, 1e2, 20, near=True)
    F[0, 3, 3] = torch.nan
    X, failed = followed(F.float(), Q.float(), "cholesky")
    assert failed == 1
    assert torch.equal(X[0], Q[0].float())
    assert not torch.equal(X[1], Q[1].float())


def test_on_a_processor_it_is_householders_method() -> None:
    F, Q = problem(20, 1e2, 20, near=True)
    _, H = by_householder(F, Q)
    X, failed = followed(F, Q)
    assert failed is None
    torch.testing.assert_close(X, H)


@pytest.mark.parametrize("method", ["householder", "cholesky"])
def test_factors_of_many_sizes_are_followed_whatever_their_order(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk and in several, each is what it is by itself."""
    sizes = [150, 6, 130, 150, 300, 1]
    pairs = [tuple(t[:1].float() for t in problem(d, 10.0, d, near=False)) for d in sizes]
    expected = [followed(F, Q, method)[0] for F, Q in pairs]
    for chunk in (2**27, 2**17):
        monkeypatch.setattr(bases, "_CHUNK_BYTES", chunk)
        news, failures = iterate_bases([F for F, _ in pairs], [Q for _, Q in pairs], method)
        assert (failures is None) == (method == "householder")
        assert not failures
        for new, right in zip(news, expected, strict=True):
            torch.testing.assert_close(new, right, rtol=1e-4, atol=1e-5)


def test_without_factors_nothing_is_followed() -> None:
    assert iterate_bases([], []) == ([], None)


@pytest.mark.parametrize("leaf", [1, 7, 16, 100])
def test_inverses_of_cholesky_factors_do_not_depend_on_the_blocks(leaf: int) -> None:
    stacks = [torch.stack([symmetric(spread(d, 1e4), seed) for seed in range(2)]) for d in (37, 5, 16, 20)]
    factors = [torch.linalg.cholesky(G) for G in stacks]
    for L, V in zip(factors, lower_inverses([G.clone() for G in stacks], leaf), strict=True):
        torch.testing.assert_close(V @ L, torch.eye(L.shape[-1], dtype=L.dtype).expand_as(L))


def test_a_matrix_that_is_not_positive_has_no_inverse_factor() -> None:
    (V,) = lower_inverses([torch.stack([torch.eye(5), -torch.eye(5)])], leaf=2)
    assert torch.equal(V[0], torch.eye(5))
    assert not V[1].isfinite().all()
