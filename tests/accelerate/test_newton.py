"""Inverses refreshed by Newton's iteration, and the guard that sends them back to Cholesky."""

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.operators import KroneckerOperator
from tests import zoo
from tests.pulled import close, covector, normal, pull


def _positive(d: int, seed: int = 0) -> Tensor:
    a = normal(2, d, 3 * d, seed=seed)
    return a @ a.mT / d + torch.eye(d, dtype=torch.float64)


def test_every_step_squares_the_error() -> None:
    M = _positive(5)
    X = torch.linalg.inv(M) + 0.001 * _positive(5, seed=1)  # symmetric, as all inverses of metrics are
    one, _ = ng.Newton(steps=1, tolerance=0.9).refreshed(M, X)
    E = torch.eye(5, dtype=torch.float64) - M @ X
    left = torch.eye(5, dtype=torch.float64) - M @ (X + X @ E)
    close(left, E @ E)
    close(one, 0.5 * ((X + X @ E) + (X + X @ E).mT))


def test_the_error_it_reports_is_that_before_the_last_step() -> None:
    M, eye = _positive(4), torch.eye(4, dtype=torch.float64)
    X = 0.9 * torch.linalg.inv(M)
    _, error = ng.Newton(steps=2).refreshed(M, X)
    close(error, torch.full((2,), 0.01 * 4**0.5, dtype=torch.float64))
    close(eye - M @ X, (0.1 * eye).expand(2, 4, 4))


def _operator(seed: int = 0) -> KroneckerOperator:
    G = ng.Kronecker().estimate(pull(zoo.case("mlp_tanh").make(), ng.Euclidean()))
    assert isinstance(G, KroneckerOperator)
    return G


def test_a_metric_that_changed_little_is_refreshed_without_cholesky(monkeypatch: pytest.MonkeyPatch) -> None:
    G = _operator()
    newton, direct = ng.Factored(ng.Newton(steps=4, smallest=1)), ng.Factored()
    warm = direct.init(G, 0.5).tensors()
    moved = G.lerp(_scaled(G, 1.05), 1.0)
    expected = direct.init(moved, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "cholesky_ex", None)
        inverse = newton.init(moved, 0.5, warm)
    w = covector(pull(zoo.case("mlp_tanh").make(), ng.Euclidean()))
    close(inverse.sharp(w).flatten(), expected.sharp(w).flatten(), 1e-8)


def test_a_metric_that_changed_much_goes_back_to_cholesky() -> None:
    G = _operator()
    warm = ng.Factored().init(G, 0.01).tensors()
    moved = _scaled(G, 50.0)
    w = covector(pull(zoo.case("mlp_tanh").make(), ng.Euclidean()))
    found = ng.Factored(ng.Newton(smallest=1)).init(moved, 0.01, warm).sharp(w).flatten()
    close(found, ng.Factored().init(moved, 0.01).sharp(w).flatten())


@pytest.mark.parametrize("times", [0.98, 1.02, 5.0, 9.8])
def test_the_guard_is_at_the_tolerance_for_every_matrix_by_itself(times: float) -> None:
    """X = (1 − e)M⁻¹ has E = e·1 of norm e√d; one step leaves e², and where the norm is too large Cholesky nothing."""
    d, tolerance = 4, 0.05
    M, none = _positive(d), torch.zeros(2, dtype=torch.float64)
    exact = torch.linalg.inv(M)
    e = torch.tensor([times * tolerance / d**0.5, 0.01], dtype=torch.float64)[:, None, None]
    X, good = ng.Newton(steps=1, tolerance=tolerance).inverse(M, (1 - e) * exact, none)
    assert good.all()
    close(X[0], (1 - float(e[0]) ** 2 if times < 1 else 1.0) * exact[0])
    close(X[1], (1 - 1e-4) * exact[1])  # near enough, whatever the other one is


def _scaled(G: KroneckerOperator, factor: float) -> KroneckerOperator:
    operator = ng.Kronecker().restore(
        pull(zoo.case("mlp_tanh").make(), ng.Euclidean()).model,
        G.blocks,
        {key: factor * t for key, t in G.tensors().items()},
    )
    assert isinstance(operator, KroneckerOperator)
    return operator


@pytest.mark.parametrize("numbers", [(0, 0.1), (2, 0.0), (2, 1.0), (2, 0.1, 0), (2, 0.1, 5, 4)])
def test_numbers_that_cannot_converge_are_refused(numbers: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="Newton needs steps ≥ 1, 0 < tolerance < 1 and 1 ≤ smallest ≤ largest, got N"):
        ng.Newton(*numbers)


def test_nothing_to_start_from_is_cholesky() -> None:
    G = _operator()
    w = covector(pull(zoo.case("mlp_tanh").make(), ng.Euclidean()))
    first = ng.Factored(ng.Newton()).init(G, 0.1).sharp(w).flatten()
    close(first, ng.Factored().init(G, 0.1).sharp(w).flatten(), 1e-14)


def test_what_it_is_can_be_read() -> None:
    newton = "Newton(steps=2, tolerance=0.05, smallest=2048, largest=4096)"
    assert repr(ng.Factored(ng.Newton())) == f"Factored(newton={newton})"


@pytest.mark.parametrize("sizes", [{"smallest": 9}, {"smallest": 1, "largest": 1}])
def test_small_and_large_matrices_are_left_to_cholesky(sizes: dict[str, int]) -> None:
    G = _operator()
    assert {f.shape[-1] for f in (*G.left, *G.right)} <= set(range(2, 9))
    warm = {key: torch.zeros_like(t) for key, t in ng.Factored().init(G, 0.5).tensors().items()}
    w = covector(pull(zoo.case("mlp_tanh").make(), ng.Euclidean()))
    found = ng.Factored(ng.Newton(**sizes)).init(G, 0.5, warm).sharp(w).flatten()
    close(found, ng.Factored().init(G, 0.5).sharp(w).flatten(), 1e-14)


def test_after_failures_cholesky_has_the_next_refreshes_and_ever_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natgrad.accelerate.inverses.is_asynchronous", lambda device: True)
    newton = ng.Newton(smallest=1)
    M, far = torch.eye(3, dtype=torch.float64).unsqueeze(0), 0.1 * torch.eye(3, dtype=torch.float64).unsqueeze(0)
    shift = torch.zeros(1, dtype=torch.float64)

    def until_trusted() -> int:
        """Refreshes without Newton, from a failure on, the one that makes up for it not counted."""
        newton.inverse(M, far, shift)
        assert newton.failed()
        assert not newton.trusted()
        return next(count for count in range(100) if newton.trusted())

    assert [until_trusted() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 64, 64]
    newton.inverse(M, M, shift)
    assert newton.trusted()
    assert until_trusted() == 1


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("more", [0, 2])
def test_a_shift_is_added_to_the_matrix_also_where_it_is_aligned(
    steps: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    M, shift = _positive(7), torch.tensor([0.5, 2.0], dtype=torch.float64)
    damped = M + shift[:, None, None] * torch.eye(7, dtype=torch.float64)
    X = torch.linalg.inv(damped) + 1e-3 * _positive(7, seed=2)
    before = M.clone(), X.clone()
    whole = ng.Newton(steps).refreshed(damped, X)
    if more:  # as on a GPU
        monkeypatch.setattr(
            "natgrad.accelerate.inverses.aligned", lambda M: torch.nn.functional.pad(M, (0, more, 0, more))
        )
    found = ng.Newton(steps).refreshed(M, X, shift)
    for got, expected in zip(found, whole, strict=True):
        close(got, expected)
    assert all(torch.equal(now, then) for now, then in zip((M, X), before, strict=True))
