"""Woodbury's identity, and the pairs of structure and solver that cannot work: refused by name, before any work."""

from dataclasses import replace

import pytest
import torch

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.operators import Operator
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.pulled import close, covector, pull, random_roots


def estimate(structure: Structure, name: str = "mlp_tanh", k: int = 2, examples: int | None = None) -> Operator:
    problem = zoo.case(name).make()
    assert isinstance(problem.x, torch.Tensor)
    problem = replace(problem, x=problem.x[:examples])
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
    (ng.Implicit(), ng.Factored(), 0.1, r"Factored does not work with ImplicitOperator.*; use CG$"),
    (ng.Implicit(), ng.Pinv(), 0.0, r"Pinv does not work with ImplicitOperator.*CG\(\)"),
    (ng.LowRank(2), ng.Pinv(), 0.0, r"Pinv does not work with LowRankOperator.*damping > 0, or Pinv\(\) with Dense"),
    (ng.LowRank(2), ng.Pinv(), 0.1, r"Pinv does not work with LowRankOperator.*damping > 0, or Pinv\(\) with Dense"),
    (ng.BlockDense(), ng.Pinv(weight=MATRIX), 0.0, r"Pinv\(weight=matrix\) does not work with BlockDenseOperator"),
    (ng.Diagonal(), ng.Pinv(weight=MATRIX), 0.0, r"Pinv\(weight=matrix\) does not work with DiagonalOperator"),
    (ng.Kronecker(), ng.Pinv(weight=MATRIX), 0.0, r"Pinv\(weight=…\) does not work with KroneckerOperator"),
    (ng.Kernel(power=0.5), ng.Pinv(weight=NUMBERS), 0.0, r"Pinv\(weight=…\) at the power 0.5 does not .* KernelOp"),
    (ng.EigenKronecker(), ng.Pinv(weight=NUMBERS), 0.0, r"Pinv\(weight=…\) does not work with EigenKroneckerOp"),
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


WEIGHABLE = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel()]


@pytest.mark.parametrize("structure", WEIGHABLE, ids=repr)
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "bare_parameter", "layer_norm", "tied_embedding"])
def test_numbers_a_parameter_are_a_weight_for_the_structures_that_have_one(structure: Structure, name: str) -> None:
    """Equation 33 of van Oostrum, Müller and Ay (2023), of the matrix that the structure stands for."""
    G = estimate(structure, name, k=1, examples=2)
    w = G.product(torch.linspace(-1, 1, G.layout.size, dtype=torch.float64))
    flat = 1 + torch.arange(G.layout.size, dtype=torch.float64) % 7
    weight = dict(G.layout.vector(flat).items())
    v = ng.sharp(G, G.layout.covector(w), ng.Pinv(rtol=1e-12, weight=weight)).flatten()
    close(v, oracle.weighted_pinv(G.dense(), w, torch.diag(flat), rtol=1e-12), 1e-8)
    close(G.product(v), w, 1e-9)
    plain = ng.sharp(G, G.layout.covector(w), ng.Pinv(rtol=1e-12)).flatten()
    diagonal = isinstance(structure, ng.Diagonal)
    assert float((v * flat) @ v) < float((plain * flat) @ plain) or diagonal or torch.allclose(v, plain)


@pytest.mark.parametrize("structure", WEIGHABLE, ids=repr)
def test_weighted_inverse_is_symmetric_outside_of_the_range_too(structure: Structure) -> None:
    """w (wGw)⁺ w with w = W^-½: a gradient that the structure does not see raises no loss."""
    G = estimate(structure, k=1, examples=2)
    flat = 1 + torch.arange(31, dtype=torch.float64) % 7
    inverse = ng.Pinv(rtol=1e-11, weight=dict(G.layout.vector(flat).items())).init(G)
    solved = torch.stack([inverse.solve(e) for e in torch.eye(31, dtype=torch.float64)])
    root = torch.diag(flat.rsqrt())
    expected = root @ torch.linalg.pinv(root @ G.dense() @ root, rtol=1e-11, hermitian=True) @ root
    close(solved / expected.abs().max(), expected / expected.abs().max(), 1e-7)


@pytest.mark.parametrize("metric", [ng.Euclidean(), ng.Sobolev(lengthscale=2.0)], ids=repr)
def test_matrix_is_a_weight_for_the_kernel(metric: ng.OutputMetric) -> None:
    pb = pull(zoo.case("mlp_tanh").make(), metric)
    G, size = ng.Kernel().estimate(pb), pb.model.size
    A = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    W = A @ A.T / size + torch.eye(size, dtype=torch.float64)
    w = G.product(torch.linspace(-1, 1, size, dtype=torch.float64))
    for weight in (W, torch.diag(W.diagonal())):
        v = ng.sharp(G, G.layout.covector(w), ng.Pinv(rtol=1e-11, weight=weight)).flatten()
        close(v, oracle.weighted_pinv(G.dense(), w, weight, rtol=1e-11), 1e-6)
    numbers = dict(G.layout.vector(W.diagonal()).items())
    close(ng.sharp(G, G.layout.covector(w), ng.Pinv(rtol=1e-11, weight=numbers)).flatten(), v, 1e-6)
