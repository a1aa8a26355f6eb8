"""Woodbury's identity, and the pairs of structure and solver that cannot work: refused by name, before any work."""

import pytest
import torch

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.operators import Operator
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.pulled import close, covector, pull, random_roots


def estimate(structure: Structure, name: str = "mlp_tanh", k: int = 2) -> Operator:
    problem = zoo.case(name).make()
    return structure.estimate(pull(problem, random_roots(problem, k)))


@pytest.mark.parametrize("damping", [1e-4, 1e-2, 1.0, 1e3])
@pytest.mark.parametrize("k", [1, 9])
@pytest.mark.parametrize("name", ["mlp_tanh", "sequence", "layer_norm", "called_twice", "attention"])
def test_kernel_is_inverted_through_its_gram_matrix(name: str, k: int, damping: float) -> None:
    """(RᵀR + λ)⁻¹ω = (ω − Rᵀ(RRᵀ + λ)⁻¹Rω)/λ, with more rows than parameters and with fewer."""
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem, k))
    w = covector(pb)
    v = ng.sharp(ng.Kernel().estimate(pb), w, damping=damping).flatten()
    G = ng.Dense().estimate(pb).dense()
    expected = oracle.damped(G, w.flatten(), damping)
    close(v / expected.abs().max(), expected / expected.abs().max())


@pytest.mark.parametrize("k", [1, 9])
@pytest.mark.parametrize("name", ["mlp_tanh", "sequence", "layer_norm"])
def test_small_damping_does_not_spoil_a_covector_in_the_range(name: str, k: int) -> None:
    """Differentials lie in the range of the metric, where λv is the small difference of large numbers."""
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem, k))
    G = ng.Kernel().estimate(pb)
    w = G.flat(ng.Vector(covector(pb)))
    close(ng.sharp(G, w, damping=1e-8).flatten(), oracle.damped(G.dense(), w.flatten(), 1e-8), 1e-6)
    assert float((G.flat(ng.sharp(G, w, damping=1e-8)) - w).flatten().norm()) < 1e-7


@pytest.mark.parametrize("damping", [1e-4, 1e-1, 10.0])
@pytest.mark.parametrize("rank", [1, 4, 50])
@pytest.mark.parametrize("k", [1, 9])
def test_low_rank_is_inverted_through_its_capacity(k: int, rank: int, damping: float) -> None:
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, random_roots(problem, k))
    G, w = ng.LowRank(rank).estimate(pb), covector(pb)
    close(ng.sharp(G, w, damping=damping).flatten(), oracle.damped(G.dense(), w.flatten(), damping))


MATRIX = torch.eye(31, dtype=torch.float64)
NUMBERS = {
    "0.weight": torch.ones(4, 3).double(),
    "0.bias": torch.ones(4).double(),
    "2.weight": torch.ones(3, 4).double(),
    "2.bias": torch.ones(3).double(),
}
REFUSED: list[tuple[Structure, ng.solve.Solver, float, str]] = [
    (ng.Implicit(), ng.Cholesky(), 0.1, r"Cholesky does not work with ImplicitOperator.*CG\(\)"),
    (ng.Implicit(), ng.Pinv(), 0.0, r"Pinv does not work with ImplicitOperator.*CG\(\)"),
    (ng.LowRank(2), ng.Pinv(), 0.0, r"Pinv does not work with LowRankOperator.*Cholesky\(\)"),
    (ng.LowRank(2), ng.Pinv(), 0.1, r"Pinv does not work with LowRankOperator.*Cholesky\(\)"),
    (ng.BlockDense(), ng.Pinv(weight=MATRIX), 0.0, r"Pinv\(weight=matrix\) does not work with BlockDenseOperator"),
    (ng.Diagonal(), ng.Pinv(weight=MATRIX), 0.0, r"Pinv\(weight=matrix\) does not work with DiagonalOperator"),
    (ng.Kernel(), ng.Pinv(weight=MATRIX), 0.0, r"Pinv\(weight=….*\) does not work with KernelOperator.*Dense"),
    (ng.Kernel(), ng.Pinv(weight=NUMBERS), 0.0, r"Pinv\(weight=….*\) does not work with KernelOperator.*Dense"),
    (ng.Dense(), ng.CG(preconditioner=ng.Kernel()), 0.1, r"preconditioner=Kernel\(\)\) does not work with DenseOp"),
]


@pytest.mark.parametrize(("structure", "solver", "damping", "message"), REFUSED)
def test_pairs_that_cannot_work_are_refused_by_name(
    structure: Structure, solver: ng.solve.Solver, damping: float, message: str
) -> None:
    G = estimate(structure)
    with pytest.raises(IncompatibleError, match=message):
        solver.init(G, damping)
    assert issubclass(IncompatibleError, TypeError)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal()], ids=repr)
def test_numbers_a_parameter_are_a_weight_for_the_structures_that_have_one(structure: Structure) -> None:
    G = estimate(structure)
    w = G.layout.covector(G.product(torch.linspace(-1, 1, 31, dtype=torch.float64)))
    weight = {name: 1 + torch.arange(t.numel()).double().view(t.shape) for name, t in NUMBERS.items()}
    W = torch.diag(torch.cat([t.flatten() for t in weight.values()]))
    v = ng.sharp(G, w, ng.Pinv(rtol=1e-12, weight=weight)).flatten()
    close(v, oracle.weighted_pinv(G.dense(), w.flatten(), W, rtol=1e-12), 1e-8)
