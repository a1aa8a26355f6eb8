"""What an operator answers agrees with the matrix that it stands for."""

import math

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError, NonFiniteError, SingularMetricError
from natgrad.operators import DenseOperator, DiagonalOperator, KernelOperator, Layout, LowRankOperator, Operator
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.pulled import close, covector, normal, pull, random_roots

STRUCTURES = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(3), ng.LowRank(50), ng.Kernel(), ng.Implicit()]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
some_cases = pytest.mark.parametrize("name", ["linear_bias", "mlp_tanh", "sequence", "attention", "pure_function"])
columns = pytest.mark.parametrize("k", [1, 9])


def estimate(structure: Structure, name: str, k: int = 2) -> Operator:
    problem = zoo.case(name).make()
    return structure.estimate(pull(problem, random_roots(problem, k)))


@every_structure
@some_cases
@columns
def test_products_diagonal_and_trace_are_those_of_the_matrix(structure: Structure, name: str, k: int) -> None:
    G = estimate(structure, name, k)
    matrix = G.dense()
    v = normal(len(matrix))
    close(matrix, matrix.T)
    close(G.product(v), matrix @ v)
    close(G.diagonal(), matrix.diagonal())
    close(G.trace(), matrix.trace())
    named = ng.Vector(oracle.unflatten(v, G.layout.like))
    assert isinstance(G.flat(named), ng.Covector)
    close(G.flat(named).flatten(), matrix @ v)
    assert float(torch.linalg.eigvalsh(matrix)[0]) > -1e-12


@pytest.mark.parametrize("structure", STRUCTURES[:-1], ids=repr)
@some_cases
@columns
@pytest.mark.parametrize("damping", [1e-3, 2.0])
def test_logdet_is_that_of_the_damped_matrix(structure: Structure, name: str, k: int, damping: float) -> None:
    G = estimate(structure, name, k)
    damped = G.dense() + damping * torch.eye(G.layout.size, dtype=torch.float64)
    close(G.logdet(damping), torch.linalg.slogdet(damped).logabsdet)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(50)], ids=repr)
def test_logdet_of_a_regular_metric_needs_no_damping(structure: Structure) -> None:
    G = estimate(structure, "linear_bias", k=9)
    close(G.logdet(), torch.linalg.slogdet(G.dense()).logabsdet)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.LowRank(50), ng.Kernel()], ids=repr)
def test_logdet_of_a_singular_metric_raises(structure: Structure) -> None:
    with pytest.raises(SingularMetricError, match="rank 5 of 8"):
        estimate(structure, "linear_bias", k=1).logdet()


def test_logdet_of_an_implicit_metric_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleError, match=r"logdet does not work with ImplicitOperator.*Dense or Kernel"):
        estimate(ng.Implicit(), "linear_bias").logdet()


def test_gram_matrix_has_the_spectrum_of_the_metric() -> None:
    G = estimate(ng.Kernel(), "mlp_tanh", k=2)
    assert isinstance(G, KernelOperator)
    close(torch.linalg.eigvalsh(G.gram())[-12:], torch.linalg.eigvalsh(G.dense())[-12:])


# Names, shapes and types


@every_structure
def test_elements_over_other_parameters_are_refused(structure: Structure) -> None:
    G = estimate(structure, "linear_bias")
    wrong_names = ng.Vector({"w": torch.zeros(2, 3).double(), "bias": torch.zeros(2).double()})
    with pytest.raises(ValueError, match=r"is over \['weight', 'bias'\], and this is over \['w', 'bias'\]"):
        G.flat(wrong_names)
    transposed = ng.Vector({"weight": torch.zeros(3, 2).double(), "bias": torch.zeros(2).double()})
    with pytest.raises(ValueError, match=r"weight of shape \(2, 3\), and this has \(3, 2\)"):
        G.flat(transposed)


# Degenerate metrics


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_zero_metric_with_damping_is_a_multiple_of_the_identity(structure: Structure) -> None:
    problem = zoo.case("mlp_tanh").make()
    metric = random_roots(problem, 1)
    pb = pull(problem, type(metric)(torch.zeros_like(metric.s)))
    G, w = structure.estimate(pb), covector(pb)
    close(G.dense(), torch.zeros(31, 31, dtype=torch.float64), 0.0)
    solver = ng.CG() if isinstance(structure, ng.Implicit) else ng.Cholesky()
    close(ng.sharp(G, w, solver, damping=0.5).flatten(), 2 * w.flatten())
    close(ng.sharp(G.lerp(G, 0.5), w, solver, damping=0.5).flatten(), 2 * w.flatten())


class Infinite(nn.Module):
    """Finite outputs, infinite derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).abs().sqrt()


@every_structure
@pytest.mark.parametrize("damping", [0.0, 1.0])
def test_infinite_metric_raises_and_returns_no_number(structure: Structure, damping: float) -> None:
    pb = ng.pullback(Infinite(), normal(4, 3), ng.Euclidean())
    solvers = [ng.CG()] if isinstance(structure, ng.Implicit) else [ng.Cholesky(), ng.CG()]
    for solver in solvers:
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            ng.sharp(structure.estimate(pb), covector(pb), solver, damping)


def test_low_rank_inverse_where_the_floor_vanishes_in_places() -> None:
    """E = d + λ has zeros, E + BBᵀ has an inverse all the same; where it has none, the rank is right."""
    layout = Layout.of({"w": torch.zeros(4, dtype=torch.float64)})
    U = torch.linalg.qr(normal(4, 2)).Q
    values = torch.tensor([3.0, 1.0], dtype=torch.float64)
    regular = LowRankOperator(layout, U, values, torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=torch.float64), 2)
    w = normal(4, seed=1)
    close(regular.inverse(0.0).solve(w), torch.linalg.solve(regular.dense(), w))
    close(regular.logdet(), torch.linalg.slogdet(regular.dense()).logabsdet)
    singular = LowRankOperator(layout, U, values, torch.tensor([0.0, 0.0, 0.0, 2.0], dtype=torch.float64), 2)
    with pytest.raises(SingularMetricError, match="low-rank metric is singular at damping 0: rank 3 of 4"):
        singular.inverse(0.0)


def test_kernel_of_a_regular_metric_asks_for_damping() -> None:
    G = estimate(ng.Kernel(), "linear_bias", k=9)
    w = normal(G.layout.size)
    with pytest.raises(IncompatibleError, match=r"Cholesky without damping does not work with KernelOperator.*Pinv"):
        G.inverse(0.0)
    close(G.pseudo_inverse(0.0, None, None).solve(w), torch.linalg.solve(G.dense(), w), 1e-8)


# The two operators by hand


def test_operators_by_hand() -> None:
    layout = Layout.of({"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)})
    assert layout.size == 3
    matrix = torch.tensor([[4.0, 2.0, 0.0], [2.0, 3.0, 0.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    G = DenseOperator(layout, matrix)
    v = ng.Vector({"a": torch.tensor([1.0, -1.0]).double(), "b": torch.tensor(2.0).double()})
    assert G.flat(v).flatten().tolist() == [2.0, -1.0, 10.0]
    assert float(G.trace()) == 12.0
    assert math.isclose(float(G.logdet()), math.log(40))
    D = DiagonalOperator(layout, matrix.diagonal())
    assert D.flat(v).flatten().tolist() == [4.0, -3.0, 10.0]
    assert math.isclose(float(D.logdet(1.0)), math.log(5 * 4 * 6))
    assert G.flat(v)["b"].shape == ()
