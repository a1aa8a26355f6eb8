"""Roots and polar factors by products, against eigenvalues and singular values in double precision."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from natgrad.accelerate import roots
from natgrad.accelerate.roots import inverse_powers, minimax, polar

POWERS = [0.25, 0.5, 0.75, 1.0]
EPS = torch.finfo(torch.float32).eps


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues in a random basis, float64 [n n]."""
    n = len(eigenvalues)
    normal = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    Q = torch.linalg.qr(normal).Q
    M = (Q * eigenvalues) @ Q.T
    return 0.5 * (M + M.T)


def spread(n: int, condition: float) -> Tensor:
    """Eigenvalues at equal ratios."""
    return torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)


def spiked(n: int, condition: float) -> Tensor:
    """Three large ones; all others are the smallest."""
    return torch.cat([torch.ones(3), torch.full((n - 3,), 1 / condition)]).double()


def exact(A: Tensor, power: float, epsilon: float = 0.0) -> Tensor:
    """(A + ε·(tr A/n))⁻ᵖ by eigenvalues in double precision."""
    n, A = A.shape[-1], A.double()
    damping = epsilon * A.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    w, V = torch.linalg.eigh(A + damping * torch.eye(n, dtype=torch.float64))
    return (V * w.pow(-power).unsqueeze(-2)) @ V.mT


def inverse_power(
    A: Tensor, power: float, epsilon: float = 0.0, condition: float = 1e6, **options: Any
) -> tuple[Tensor, Tensor]:
    """One power of A + ε·(tr A/n), whose condition number is n/ε + 1 at most."""
    shift = epsilon * A.diagonal(dim1=-2, dim2=-1).mean(-1) if epsilon else None
    bound = A.shape[-1] / epsilon + 1 if epsilon else condition
    (X,), residual = inverse_powers(A, [power], shift=shift, condition=bound, **options)
    return X, residual


def error(X: Tensor, expected: Tensor) -> float:
    return float(((X - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))).max())


@pytest.mark.parametrize("condition", [1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("spectrum", [spread, spiked])
@pytest.mark.parametrize("power", POWERS)
def test_powers_are_as_exact_as_rounding_of_the_matrix_allows(
    power: float, spectrum: Callable[[int, float], Tensor], condition: float
) -> None:
    """A relative error of the matrix of size ε is one of εκ in the smallest eigenvalue."""
    A = torch.stack([7.0 * symmetric(spectrum(48, condition), seed) for seed in range(2)]).float()
    X, residual = inverse_power(A, power, condition=4 * condition, method="products")
    assert X.dtype == torch.float32
    assert error(X, exact(A, power)) < (5 + condition) * EPS
    assert float(residual.max()) < (20 + 2 * condition) * EPS
    assert torch.equal(X, X.mT)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 256, 512])
def test_matrices_of_any_size_with_relative_damping(n: int) -> None:
    a = torch.randn(2, n, max(1, n // 2), dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    A = (a @ a.mT * torch.tensor([1e-6, 1e6])[:, None, None]).float()  # half of the rank, and far from unit size
    X, residual = inverse_power(A, 0.5, epsilon=1e-2, method="products")
    assert error(X, exact(A, 0.5, 1e-2)) < 1e-4
    assert float(residual.max()) < 1e-3


@pytest.mark.parametrize("epsilon", [1e-1, 1e-2, 1e-4])
@pytest.mark.parametrize("power", POWERS)
def test_damping_bounds_the_condition_number_whatever_the_rank(power: float, epsilon: float) -> None:
    """Rank one is the worst: its condition number is n/ε, for which the iteration is prepared without looking."""
    n = 40
    A = torch.stack([symmetric(torch.eye(n, dtype=torch.float64)[0], seed) for seed in range(3)]).float()
    X, residual = inverse_power(A, power, epsilon=epsilon, method="products")
    bound = 2 * (n / epsilon) * EPS
    assert error(X, exact(A, power, epsilon)) < bound
    assert float(residual.max()) < 2 * bound


ANY = [0.0, 1e-3, 1 / 8, 0.3, 1 / 3, 0.375, 0.5, 0.6, 0.6875, 0.7, 0.9, 63 / 64, 0.999, 1.0]


@pytest.mark.parametrize("condition", [1e5, 1e6, 2.0**22])
@pytest.mark.parametrize("power", [0.25, 0.5, 0.7, 1.0])
def test_rounding_of_the_bound_is_not_enlarged(power: float, condition: float) -> None:
    """Of data with a mean, the bound is the largest eigenvalue: rounding must not put that above it."""
    generator = torch.Generator().manual_seed(0)
    R = torch.randn(3200, 800, generator=generator) + torch.randn(800, generator=generator)
    A = (R.T @ R / 3200)[None]
    X, residual = inverse_power(A, power, condition=condition, method="products")
    assert float(residual) < 1e-3
    assert error(X, exact(A, power)) < 1e-3


@pytest.mark.parametrize("precision", ["single", "split"])
@pytest.mark.parametrize("power", [1e-4, 0.4999, 0.9999])
def test_powers_beside_a_root_are_in_the_range_of_halves(power: float, precision: roots.Precision) -> None:
    A = symmetric(spread(40, 1e3))[None].float()
    X, residual = inverse_power(A, power, condition=1e6, error=roots.NOISE, precision=precision, method="products")
    assert float(residual) < 1e-2
    assert error(X, exact(A, power)) < 3 * roots.NOISE


@pytest.mark.parametrize("epsilon", [1e-2, 1.0, 30.0, 1e3, 1e20])
@pytest.mark.parametrize("power", ANY)
def test_damping_may_be_far_larger_than_the_matrix(power: float, epsilon: float) -> None:
    """Then all eigenvalues are nearly the same, and the bound of the largest is n^¼ times as large."""
    A = torch.stack([symmetric(spread(40, 1e3)), torch.eye(40, dtype=torch.float64)]).float()
    X, residual = inverse_power(A, power, epsilon=epsilon, method="products")
    assert error(X, exact(A, power, epsilon)) < 1e-4
    assert float(residual.max()) < 1e-3


@pytest.mark.parametrize("method", ["products", "eigenvalues"])
@pytest.mark.parametrize("power", ANY)
def test_any_power_in_double_precision(power: float, method: roots.Method) -> None:
    A = torch.stack([symmetric(spread(9, 1e4), seed) for seed in range(2)])
    X, residual = inverse_power(A, power, epsilon=1e-3, method=method)
    assert error(X, exact(A, power, 1e-3)) < 1e-11
    assert float(residual.max()) < 1e-9


@pytest.mark.parametrize("asked", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("spectrum", [spread, spiked])
@pytest.mark.parametrize("power", ANY)
def test_powers_are_as_exact_as_is_asked_for(
    power: float, spectrum: Callable[[int, float], Tensor], asked: float
) -> None:
    """In double precision, which leaves no other error. Small eigenvalues of M⁻ᵖ are as exact as large ones."""
    A = symmetric(spectrum(30, 1e5))[None]
    X, _ = inverse_power(A, power, condition=4e5, error=asked, method="products")
    relative = exact(A, -0.5 * power) @ X @ exact(A, -0.5 * power)  # M^½ᵖ X M^½ᵖ
    assert float((torch.linalg.eigvalsh(relative) - 1).abs().max()) < 3 * asked


@pytest.mark.parametrize("method", ["products", "eigenvalues"])
@pytest.mark.parametrize("power", [0.0, *POWERS])
def test_a_matrix_of_zeros_has_the_identity_as_its_powers(power: float, method: roots.Method) -> None:
    A = torch.stack([torch.zeros(5, 5), 4 * torch.eye(5)])
    X, residual = inverse_power(A, power, epsilon=0.0, method=method)
    torch.testing.assert_close(X[0], torch.eye(5))
    torch.testing.assert_close(X[1], 4.0**-power * torch.eye(5))
    assert float(residual.max()) < 1e-5


@pytest.mark.parametrize("method", ["products", "eigenvalues"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_where_a_root_fails_its_residual_tells_and_the_others_are_right(bad: float, method: roots.Method) -> None:
    A = torch.stack([4 * torch.eye(3), torch.eye(3)])
    A[1, 0, 2] = bad
    X, residual = inverse_power(A, 0.5, method=method)
    torch.testing.assert_close(X[0], 0.5 * torch.eye(3))
    assert float(residual[0]) < 1e-5
    assert float(residual[1]) == math.inf


@pytest.mark.parametrize("power", POWERS)
def test_a_matrix_worse_than_expected_is_noticed(power: float) -> None:
    A = symmetric(spread(20, 1e5))[None].float()
    _, residual = inverse_power(A, power, condition=100.0, method="products")
    assert float(residual) > 0.1
    X, residual = inverse_power(A, power, condition=1e6, method="products")
    assert float(residual) < 0.1
    assert error(X, exact(A, power)) < 0.02


def test_a_singular_matrix_without_damping_is_noticed() -> None:
    A = symmetric(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64))[None].float()
    assert float(inverse_power(A, 0.5, method="products")[1]) > 0.1


def test_scaling_a_matrix_scales_its_powers_and_nothing_else() -> None:
    A = symmetric(spread(10, 30.0))[None].float()
    for power in POWERS:
        X, residual = inverse_power(A, power, epsilon=0.01, method="products")
        for scale in (2.0**-60, 2.0**60):
            Y, again = inverse_power(scale * A, power, epsilon=0.01, method="products")
            torch.testing.assert_close(Y * scale**power, X)
            torch.testing.assert_close(again, residual)


@pytest.mark.parametrize("method", ["products", "eigenvalues"])
@pytest.mark.parametrize("powers", [(0.5, 1.0), (0.75, 1.0), (0.25, 0.5, 1.0), (0.0, 0.75)])
def test_several_powers_at_once_are_as_one_by_one(powers: tuple[float, ...], method: roots.Method) -> None:
    A = torch.stack([symmetric(spread(12, 40.0), seed) for seed in range(3)]).float()
    together, _ = inverse_powers(A, powers, shift=0.01 * A.diagonal(dim1=1, dim2=2).mean(1), method=method)
    for X, power in zip(together, powers, strict=True):
        assert error(X, exact(A, power, 0.01)) < 1e-4


@pytest.mark.parametrize("method", ["products", "eigenvalues"])
def test_a_shift_is_added_to_every_matrix(method: roots.Method) -> None:
    A, shift = torch.stack([symmetric(spread(6, 1e3)), torch.zeros(6, 6)]).float(), torch.tensor([0.5, 3.0])
    (X, Y), residual = inverse_powers(A, [0.5, 1.0], shift=shift, method=method)
    damped = A.double() + shift[:, None, None] * torch.eye(6, dtype=torch.float64)
    assert error(X, exact(damped, 0.5)) < 1e-5
    assert error(Y, exact(damped, 1.0)) < 1e-5
    assert float(residual.max()) < 1e-5


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_single(half: torch.dtype) -> None:
    X, _ = inverse_power(4 * torch.eye(3, dtype=half)[None], 0.5, method="products")
    torch.testing.assert_close(X, 0.5 * torch.eye(3)[None])


def test_autocast_rounds_nothing() -> None:
    A = symmetric(spread(16, 100.0))[None].float()
    with torch.autocast("cpu", torch.bfloat16):
        X, _ = inverse_power(A, 0.5, method="products")
        Y, _ = inverse_power(A, 0.5, method="eigenvalues")
    assert error(X, exact(A, 0.5)) < 1e-4
    assert error(Y, exact(A, 0.5)) < 1e-4


# Lower precision, as far as it can be told without a GPU.


def test_a_split_product_is_nearly_that_of_single_precision() -> None:
    """Half precision alone would leave 2⁻¹¹."""
    A, B = (roots._UNIT * symmetric(spread(40, 1e6), seed)[None].float() for seed in range(2))
    expected = A.double() @ B.double()
    assert float((roots.Products(split=True)(A, B) - expected).norm() / expected.norm()) < 2**-21


class _TF32(TorchDispatchMode):
    """Products of what tensor cores read of single precision: ten bits of mantissa, and so all of half precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_):
            *out, A, B = args
            args = *out, *((x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32) for x in (A, B))
        return func(*args, **(kwargs or {}))


@contextmanager
def rounded_products(precision: roots.Precision, device: torch.device) -> Iterator[roots.Products]:
    """Products as a GPU rounds them."""
    with _TF32() if precision == "split" else nullcontext():  # type: ignore[no-untyped-call]
        yield roots.Products(precision == "split")


@pytest.mark.parametrize("spectrum", [spread, spiked])
@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5])
def test_roots_by_halves_and_a_last_step_in_tf32(
    condition: float, spectrum: Callable[[int, float], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ten bits of tf32 in every product, the residual would be above 1."""
    monkeypatch.setattr(roots, "products_in", rounded_products)
    A = symmetric(spectrum(80, condition))[None].float()
    for power in (0.5, 0.75):
        X, residual = inverse_power(A, power, condition=4 * condition, method="products", precision="split")
        assert error(X, exact(A, power)) < 2e-3 + 10 * condition * EPS
        assert float(residual) < 1e-2 + 20 * condition * EPS
    monkeypatch.setattr(roots.Products, "operand", lambda self, A: (A,))
    assert condition < 1e5 or float(inverse_power(A, 0.5, method="products", precision="split")[1]) > 1


@pytest.mark.parametrize("condition", [1e2, 1e4, 2.0**19])
def test_halves_can_hold_what_every_step_makes_of_any_eigenvalue(condition: float) -> None:
    """Of a diagonal matrix, whose numbers are its eigenvalues: the first polynomials reach 2, and their T² 16."""
    A = torch.diag(torch.logspace(0, -math.log10(condition), 400))[None]
    worst = 8 * condition  # the bound of the largest eigenvalue is above it
    X, residual = inverse_power(A, 0.5, condition=worst, method="products", precision="split", error=1e-3)
    assert float(residual) < 1e-2
    torch.testing.assert_close(X[0].diagonal(), A[0].diagonal().rsqrt(), rtol=5e-3, atol=0)


@pytest.mark.parametrize("n", [20, 32, 33, 200])
def test_the_residual_is_measured_by_signs(n: int) -> None:
    """Within a few deviations; exactly, if the matrix is no larger than their number."""
    M = torch.stack([symmetric(spread(n, 30.0), seed) for seed in range(4)])
    noise = torch.stack([1e-3 * symmetric(spread(n, 10.0), seed) for seed in range(4, 8)])
    Z = exact(M, 0.5) + noise
    expected = torch.linalg.matrix_norm(Z @ M @ Z - torch.eye(n, dtype=torch.float64)) / math.sqrt(n)
    torch.testing.assert_close(roots.residual_of([Z, M, Z]), expected, rtol=1e-9 if n <= 32 else 0.4, atol=0)


def test_the_users_precision_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    inside, A = set[str](), torch.eye(2)[None]
    operand = roots.Products.operand

    def seen(self: roots.Products, A: Tensor) -> roots.Operand:
        inside.add(settings.fp32_precision)
        return operand(self, A)

    def broken(self: roots.Products, A: Tensor) -> roots.Operand:
        raise ZeroDivisionError

    monkeypatch.setattr(roots, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(roots.Products, "operand", seen)
    inverse_power(A, 0.5, method="products", precision="single")
    assert inside == {"ieee"}
    inverse_power(A, 0.5, method="products", precision="split")
    assert inside == {"ieee", "tf32"}  # the residual is measured in single precision
    assert settings.fp32_precision == before
    monkeypatch.setattr(roots.Products, "operand", broken)
    with pytest.raises(ZeroDivisionError):
        inverse_power(A, 0.5, method="products")
    assert settings.fp32_precision == before


class _NoReading(TorchDispatchMode):
    """Fails where the host would wait for a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["single", "split"])
def test_nothing_waits_for_the_device(precision: roots.Precision) -> None:
    A = symmetric(spread(8, 10.0))[None].float()

    def both() -> None:
        inverse_power(A, 0.75, epsilon=0.1, precision=precision, method="products")
        polar(A)

    both()  # the coefficients are computed once, on the host
    with _NoReading():  # type: ignore[no-untyped-call]
        both()
        with pytest.raises(AssertionError):
            float(A.sum())


# Bad input.


def test_bad_input_is_named() -> None:
    A = torch.eye(2)[None]
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        inverse_power(A, 1.5)
    with pytest.raises(ValueError, match=r"stack of square matrices \[b n n\], got \[2, 2\]"):
        inverse_power(A[0], 0.5)
    with pytest.raises(ValueError, match="only matrices have polar factors"):
        polar(torch.ones(3))
    with pytest.raises(ValueError, match="1 ≤ condition"):
        minimax(0.5)
    with pytest.raises(ValueError, match=r"1e-12 ≤ error < 1, got .*, nan"):
        inverse_power(A, 0.3, error=math.nan, method="products")


# Coefficients and polar factors.


@pytest.mark.parametrize("terms", [3, 5])
@pytest.mark.parametrize("condition", [1.0, 3.0, 1e2, 1e3, 1e5])
def test_the_coefficients_take_the_whole_interval_to_one(condition: float, terms: int) -> None:
    schedule = minimax(condition, 1e-9, terms)
    s = torch.logspace(-math.log10(condition), 0, 2000, dtype=torch.float64)
    for coefficients in schedule:
        s = torch.stack([c * s ** (2 * j + 1) for j, c in enumerate(coefficients)]).sum(0)
    assert float((s - 1).abs().max()) < 2e-9
    assert len(schedule) <= 4 + 0.8 * math.log2(condition) / math.log(2 * terms - 1, 5)


def test_fewer_steps_than_newton_and_schulz() -> None:
    """Whose slope at zero is 15/8."""
    s, steps = 1e-3, 0
    while abs(1 - s) > 1e-6:
        s, steps = (15 * s - 10 * s**3 + 3 * s**5) / 8, steps + 1
    assert (len(minimax(1e3)), steps) == (7, 14)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (2, 5, 3), (2, 3, 4, 4), (1, 1), (1, 5)])
def test_the_converged_polar_factor_is_that_of_the_singular_values(shape: tuple[int, ...]) -> None:
    M = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    U, _, V = torch.linalg.svd(M.double(), full_matrices=False)
    X = polar(M, schedule=minimax(1e3), dtype=torch.float32)
    torch.testing.assert_close(X.double(), U @ V, rtol=0, atol=1e-4)


@pytest.mark.parametrize("others", [0.0, 1e-3])
@pytest.mark.parametrize("shape", [(1, 300), (30, 40), (250, 250), (700, 300)])
def test_the_polar_factor_of_a_matrix_of_nearly_rank_one_converges(shape: tuple[int, int], others: float) -> None:
    """σ = ‖M‖_F is 1 up to rounding, and rounding is above 1 in some: there the polynomials may not be steep."""
    for seed in range(12):
        drawn = torch.Generator().manual_seed(seed)
        u, v = (torch.randn(size, generator=drawn) for size in shape)
        M = torch.outer(u, v) + others * torch.randn(shape, generator=drawn)
        values = torch.linalg.svdvals(polar(M, schedule=minimax(1e4), dtype=torch.float32).double())
        assert float((values[0] - 1).abs()) < 1e-5
        assert float(values.max()) < 1 + 1e-5


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_the_default_is_the_step_of_muon(shape: tuple[int, int]) -> None:
    G = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    expected = []
    for g in G:
        w = torch.nn.Parameter(torch.zeros(shape))
        w.grad = g
        torch.optim.Muon([w], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        expected.append(-w.detach() / math.sqrt(max(1, shape[0] / shape[1])))
    X = polar(G)
    assert X.dtype == torch.bfloat16
    torch.testing.assert_close(X.float(), torch.stack(expected), rtol=0, atol=2e-2)


@pytest.mark.parametrize("shape", [(256, 512), (1100, 270), (300, 300)])
@pytest.mark.parametrize("smallest", [0.1, 1e-2, 1e-4, 1e-8])
def test_the_steps_of_large_matrices_are_as_exact_as_those_of_muon(shape: tuple[int, int], smallest: float) -> None:
    """Of wide ones they are several at once; here each by itself, in double and, as torch has it, in half precision."""
    generator = torch.Generator().manual_seed(0)
    U, _, V = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    M = (U * torch.logspace(0, math.log10(smallest), min(shape), dtype=torch.float64)) @ V

    def stepwise(dtype: torch.dtype) -> Tensor:
        X = (M / M.norm()).to(dtype)
        X = X.T if shape[0] > shape[1] else X
        for _ in range(5):
            G = X @ X.T
            X = torch.addmm(X, torch.addmm(G, G, G, beta=-4.7750, alpha=2.0315), X, beta=3.4445)
        return (X.T if shape[0] > shape[1] else X).double()

    exact = stepwise(torch.float64)
    assert (polar(M).double() - exact).norm() < 2 * (stepwise(torch.bfloat16) - exact).norm()


@pytest.mark.parametrize("rank", [1, 4, 64, 256])
def test_the_steps_of_large_matrices_are_torchs_up_to_enlarged_rounding(rank: int) -> None:
    """By up to 8 % of an orthogonal matrix, and 40 % of a step."""
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.zeros(256, 256))
    w.grad = torch.randn(256, rank, generator=generator) @ torch.randn(rank, 256, generator=generator)
    torch.optim.Muon([w], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    distance = (polar(w.grad).float() + w.detach()).norm()
    assert 0 < distance < 0.08 * 256**0.5
    assert distance < 0.4 * w.detach().norm()


def test_the_polar_factor_of_zero_is_zero_and_singular_values_of_zero_stay() -> None:
    assert not polar(torch.zeros(2, 3, 4)).any()
    M = torch.diag(torch.tensor([2.0, 1.0, 0.0]))
    X = polar(M, schedule=minimax(100.0), dtype=torch.float32)
    torch.testing.assert_close(X, torch.diag(torch.tensor([1.0, 1.0, 0.0])))


def test_eigenvectors_that_are_not_finite_are_computed_again_in_double_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor's routine has returned NaN for a factor of rank 8 and size 288 with entries near 10⁻⁵."""
    eigh = torch.linalg.eigh

    def broken(A: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = eigh(A)
        return (values, vectors) if A.dtype == torch.float64 else (values, vectors * torch.nan)

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    values, vectors = roots.spectrum(torch.diag(torch.tensor([3.0, 1.0]))[None])
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(values, torch.tensor([[1.0, 3.0]]))
    torch.testing.assert_close(vectors[0].abs(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
