"""Equal inputs under the Sobolev metric: however many copies of a point there are, they count as one (ERRATA 13)."""

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.structures import Structure
from tests.output.test_sobolev import STRUCTURES
from tests.pulled import normal

EXACT = ("Dense", "BlockDense", "Diagonal", "Kernel", "Implicit")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
types = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def estimated(name: str, x: Tensor, metric: ng.OutputMetric) -> Tensor:
    """The matrix of an estimate of the network, times the number of examples."""
    return len(x) * STRUCTURES[name].estimate(ng.pullback(network(x.dtype), x, metric)).dense().double()


def alike(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((got - expected).norm()) < tolerance * float(expected.norm())


def check_copies(name: str, n: int, jitter: float, dtype: torch.dtype) -> None:
    """n copies of a point have the metric of the point, and of two clusters that of two points; up to the jitter."""
    x = normal(2, 5).to(dtype)
    metric, exact = ng.Sobolev(jitter=jitter), ng.Sobolev(jitter=0.0)
    # A trace of pairs has nearly λ_max/λ of rounding, and that of n copies is n/jitter, where that is not cut.
    lost = 16 * n / jitter * torch.finfo(torch.float64).eps if jitter > n * 1e-12 and "Kronecker" in name else 0.0
    tolerance = TOLERANCE[dtype] + 2 * jitter + lost
    alike(estimated(name, x[:1].repeat(n, 1), metric), estimated(name, x[:1], ng.Euclidean()), tolerance)
    if name in EXACT:
        alike(estimated(name, x[torch.arange(n) % 2], metric), estimated(name, x, exact), tolerance)


# The coupling itself


@pytest.mark.parametrize("n", [2, 256, 513, 768, 1024, 2048])
def test_the_inverse_of_the_matrix_of_equal_points_is_one_over_n_squared(n: int) -> None:
    C = ng.Sobolev(jitter=0.0).coupling(normal(1, 5).repeat(n, 1), n)
    assert float((C * n**2 - 1).abs().max()) < 1e-10


@pytest.mark.parametrize("n", [513, 1024])
def test_the_inverse_of_the_matrix_of_clusters_spreads_that_of_their_points(n: int) -> None:
    """K = E K' Eᵀ for E [n c] of copies has K⁺ = E D⁻¹ K'⁻¹ D⁻¹ Eᵀ, with their numbers in D."""
    x, cluster = normal(3, 3), torch.arange(n).square() % 7 % 4  # 0, 1 and 2, of different sizes
    inverse = torch.linalg.inv(ng.Sobolev(jitter=0.0).gram(x, 3))
    counts = torch.bincount(cluster).double()
    expected = (inverse / counts / counts[:, None])[cluster][:, cluster]
    alike(ng.Sobolev(jitter=0.0).coupling(x[cluster], n), expected, 1e-11)


@pytest.mark.parametrize("jitter", [1e-10, 1e-8, 1e-6])
@pytest.mark.parametrize("n", [2, 256, 1024])
def test_constants_have_the_norm_of_one_point_at_every_jitter(n: int, jitter: float) -> None:
    coupled = ng.Sobolev(jitter=jitter).coupled(normal(1, 5).repeat(n, 1), n)
    assert coupled.L is not None
    assert abs(float(coupled.L.sum(0).square().sum()) - 1) < 1e-10 + 2 * jitter


# The metric of a network


@types
@pytest.mark.parametrize("jitter", [0.0, 1e-12, 1e-10, 1e-8, 1e-6])
@pytest.mark.parametrize("n", [2, 256])
@pytest.mark.parametrize("name", STRUCTURES)
def test_copies_count_once(name: str, n: int, jitter: float, dtype: torch.dtype) -> None:
    check_copies(name, n, jitter, dtype)


@pytest.mark.parametrize(
    ("name", "n", "jitter", "dtype"),
    [
        ("Dense", 1024, 0.0, torch.float32),
        ("Dense", 1024, 1e-8, torch.float32),
        ("Diagonal", 768, 1e-6, torch.float32),
        ("Kernel", 513, 0.0, torch.float32),
        ("Kernel", 768, 1e-8, torch.float64),
        ("Implicit", 1024, 1e-10, torch.float64),
        ("Implicit", 768, 1e-8, torch.float32),
        ("Kronecker", 1024, 0.0, torch.float32),
        ("Kronecker", 1024, 1e-10, torch.float64),
        ("Kronecker reduce", 2048, 1e-6, torch.float32),
        ("EigenKronecker", 768, 1e-10, torch.float32),
        ("EigenKronecker", 1024, 0.0, torch.float64),
    ],
)
def test_many_copies_count_once(name: str, n: int, jitter: float, dtype: torch.dtype) -> None:
    check_copies(name, n, jitter, dtype)


@types
def test_a_step_on_copies_is_that_on_one_point(dtype: torch.dtype) -> None:
    """Of a mean loss, and a metric that is 1/n of that of the point; so is the damping."""
    x, model = normal(1, 5).to(dtype), network(dtype)

    def step(x: Tensor, metric: ng.OutputMetric, structure: Structure) -> Tensor:
        def loss(y: Tensor) -> Tensor:
            return y.square().sum() / len(x) ** 2

        v = ng.natural_gradient(model, x, loss, metric, structure=structure, damping=0.1 / len(x))
        return v.flatten().double()

    for structure in (ng.Dense(), ng.Kernel(), ng.Kronecker()):
        copies = step(x.repeat(600, 1), ng.Sobolev(jitter=0.0), structure)
        alike(copies, step(x, ng.Euclidean(), structure), TOLERANCE[dtype])
