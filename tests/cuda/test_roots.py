"""On a GPU: products of halves, and roots made of them, are as exact as they say, whatever the user allows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.accelerate.roots import NOISE, Precision, inverse_powers, products_in
from tests.accelerate.test_roots import exact, spiked, spread, symmetric
from tests.cuda.waiting import no_waiting

pytestmark = pytest.mark.gpu("the rounding of tensor cores")


@pytest.fixture(params=["highest", "medium"], autouse=True)
def allowed(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


def matrices(n: int, condition: float) -> Tensor:
    return torch.stack([symmetric(spectrum(n, condition)) for spectrum in (spread, spiked)]).float().cuda()


@pytest.mark.parametrize("n", [8, 100, 1000])
def test_a_split_product_is_nearly_that_of_single_precision(n: int) -> None:
    """Halves leave 2⁻²¹. A tensor core sums 16 products at a time and cuts off, at 2⁻²³ of the sum at most."""
    bound = 2**-20 + n / 16 * 2**-23
    A, B = (2.0**12 * matrices(n, 1e4) for _ in range(2))
    expected = A.double() @ B.double()
    with products_in("split", A.device) as product:
        found = product(A, B)
        added = product.add_(B.clone(), product.operand(A), product.operand(B), beta=2.0, alpha=0.5)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < bound
    assert float((added - (2 * B + 0.5 * expected)).norm() / expected.norm()) < bound


@pytest.mark.parametrize("precision", ["single", "split"])
@pytest.mark.parametrize("n", [40, 1000])
@pytest.mark.parametrize("power", [0.5, 0.7, 0.75, 1.0])
def test_roots_and_their_residuals(power: float, n: int, precision: Precision) -> None:
    """Rounding of a matrix of condition number κ leaves κε of a root, and the sums of tensor cores ten times that."""
    condition = 2e4
    A = matrices(n, condition)
    shift = torch.full((2,), 1.0 / condition, device="cuda")

    def powers() -> tuple[list[Tensor], Tensor]:
        return inverse_powers(
            A, [power, 0.5], shift=shift, condition=condition, error=NOISE, precision=precision, method="products"
        )

    powers()  # the libraries wait when they are used for the first time
    with no_waiting():
        (X, Z), residual = powers()
    damped = A.double().cpu() + torch.eye(n, dtype=torch.float64) / condition
    right = exact(damped, power)
    tolerance = 3 * NOISE + 10 * condition * torch.finfo(torch.float32).eps
    assert float(((X.cpu() - right).norm(dim=(1, 2)) / right.norm(dim=(1, 2))).max()) < tolerance
    Z = Z.double().cpu()
    true = torch.linalg.matrix_norm(Z @ damped @ Z - torch.eye(n, dtype=torch.float64)) / math.sqrt(n)
    # Symmetrising changes the root by what rounding has left.
    assert ((residual.cpu() - true).abs() <= 0.5 * true + tolerance).all()


@pytest.mark.parametrize("damping", [1e-3, ng.Relative(1e-2)])
@pytest.mark.parametrize("power", [0.75, 0.5, 0.3])
def test_powers_of_a_dense_metric_are_those_of_the_cpu(
    power: float, damping: ng.Relative | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, ω = matrices(600, 1e5)[0], torch.randn(600)
    layout = ng.operators.Layout.of({"w": A[0]})
    G = ng.operators.DenseOperator(layout, A, power=power)
    λ = damping.epsilon * float(A.diagonal().mean()) if isinstance(damping, ng.Relative) else damping
    expected = exact(A.double().cpu() + λ * torch.eye(600, dtype=torch.float64), power) @ ω.double()
    monkeypatch.setattr(torch.linalg, "eigh", None)
    found = G.inverse(damping).solve(ω.cuda())
    assert float((found.cpu() - expected).norm() / expected.norm()) < 1e-3
