"""The direct solver: right where there is an inverse, and an explanation where there is none."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import NonFiniteError, SingularMetricError
from natgrad.operators import BlockDenseOperator, DiagonalOperator
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.pulled import close, covector, normal, pull, random_roots
from tests.solve import matrices
from tests.solve.matrices import dense, gram, spectral

STRUCTURES = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(3), ng.Kernel(), ng.Implicit()]
CASES = ["linear_bias", "mlp_tanh", "sequence", "layer_norm", "conv", "attention", "tied_weights"]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_sharp_inverts_flat(structure: Structure, name: str) -> None:
    """ω♯♭ = ω in the damped metric, and v♭♯ = v."""
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem))
    G, w, damping = structure.estimate(pb), covector(pb), 0.3
    solver = ng.CG(tol=1e-13, max_steps=1000) if isinstance(structure, ng.Implicit) else ng.Cholesky()
    v = ng.sharp(G, w, solver, damping)
    assert isinstance(v, ng.Vector)
    close(G.flat(v).flatten() + damping * v.flatten(), w.flatten())
    again = ng.sharp(G, ng.Covector(G.flat(v)) + ng.Covector(damping * v), solver, damping)
    close(again.flatten(), v.flatten())


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(9)], ids=repr)
def test_regular_metrics_need_no_damping(structure: Structure) -> None:
    problem = zoo.case("linear_bias").make()
    pb = pull(problem, random_roots(problem, 9))
    G, w = structure.estimate(pb), covector(pb)
    close(ng.sharp(G, w).flatten(), torch.linalg.solve(G.dense(), w.flatten()))


@pytest.mark.parametrize(("damping", "tolerance"), [(1e-8, 1e-12), (1e-10, 1e-8), (1e-12, 1e-4)])
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel(), ng.LowRank(4), ng.LowRank(40)], ids=repr)
def test_a_small_damping_solves_a_covector_in_the_range(structure: Structure, damping: float, tolerance: float) -> None:
    """(G + λ)v = ω for ω = Gu, of which nearly all cancels in the (ω − …)/λ of Woodbury's identity."""
    model, x = torch.nn.Linear(30, 1, bias=False).double(), normal(4, 30)
    matrix = x.T @ x / 4
    G, w = structure.estimate(ng.pullback(model, x, ng.Euclidean())), matrix @ normal(30)
    v = ng.sharp(G, ng.Covector({"weight": w[None]}), damping=damping).flatten()
    close(matrix @ v + damping * v, w, tolerance)


def test_blocks_of_one_size_are_solved_each_by_itself() -> None:
    """Two blocks of three and one of two, at interleaved positions."""
    index = [torch.tensor([0, 5, 2]), torch.tensor([1, 7]), torch.tensor([6, 3, 4])]
    blocks = [gram(4, 3, seed=1), gram(4, 2, seed=2), gram(4, 3, seed=3)]
    G = BlockDenseOperator(matrices.layout(8), ("a", "b", "c"), tuple(index), tuple(blocks))
    w = normal(8)
    close(G.inverse(0.1).solve(w), oracle.damped(G.dense(), w, 0.1))
    close(G.pseudo_inverse(0.1, None, None).solve(w), oracle.damped(G.dense(), w, 0.1))
    close(G.product(w), G.dense() @ w)


# Singular metrics


@pytest.mark.parametrize("damping", [0.0, 1e-18])
@pytest.mark.parametrize("structure", [ng.LowRank(4), ng.LowRank(4, power=0.5)], ids=repr)
def test_the_advice_for_a_singular_low_rank_metric_can_be_followed(structure: Structure, damping: float) -> None:
    """It has no pseudo-inverse: the error must not send the user to one."""
    pb = ng.pullback(torch.nn.Linear(6, 1, bias=False).double(), normal(2, 6), ng.Euclidean())
    advice = rf"Add damping \(damping > {damping:g}\), or .*Pinv\(\) \(in any structure but LowRank"
    with pytest.raises(SingularMetricError, match=advice):
        ng.sharp(structure.estimate(pb), covector(pb), damping=damping)


def _passes_by_rounding() -> Tensor:
    """A singular matrix whose last pivot is not small: its leading part is nearly singular as well."""
    for seed in range(2000):
        matrix = gram(2, 3, seed=seed)
        factor, info = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal().square()
        if int(info) == 0 and float(pivots.min() / pivots.max()) > 1e-12:
            return matrix
    raise AssertionError("no such matrix among the seeds")


SINGULAR: dict[str, tuple[Callable[[], Tensor], int]] = {
    "zero": (lambda: torch.zeros(3, 3, dtype=torch.float64), 0),
    "ones": (lambda: torch.ones(4, 4, dtype=torch.float64), 1),
    "one row": (lambda: gram(1, 5), 1),
    "all rows but one": (lambda: gram(29, 30), 29),
    "graded": (lambda: spectral(torch.tensor([1.0, 1e-3, 1e-6, 0.0], dtype=torch.float64)), 3),
    "tiny": (lambda: 1e-12 * gram(2, 4), 2),
    "huge": (lambda: 1e12 * gram(2, 4), 2),
    "passes Cholesky by rounding": (_passes_by_rounding, 2),
    "dead parameter": (lambda: torch.block_diag(gram(4, 3), torch.zeros(1, 1).double()), 3),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_metric_is_reported_with_rank_and_remedies(name: str) -> None:
    make, rank = SINGULAR[name]
    matrix = make()
    message = rf"singular at damping 0: rank {rank} of {len(matrix)}, smallest eigenvalue .*damping > 0.*Pinv\(\)"
    with pytest.raises(SingularMetricError, match=message):
        ng.sharp(dense(matrix), matrices.covector(normal(len(matrix))))
    v = ng.sharp(dense(matrix), matrices.covector(normal(len(matrix))), damping=1e-2)
    assert bool(v.flatten().isfinite().all())


def test_no_singular_matrix_slips_through() -> None:
    """500 random matrices of every size, rank and grading: none is inverted, and no regular one is refused."""
    for seed in range(500):
        generator = torch.Generator().manual_seed(seed)
        size = int(torch.randint(2, 20, (), generator=generator))
        rank = size - 1 if seed % 2 else int(torch.randint(1, size, (), generator=generator))
        scale = torch.logspace(0, -5, size, dtype=torch.float64) if seed % 3 else torch.ones(size, dtype=torch.float64)
        R = normal(rank, size, seed=seed) * scale[torch.randperm(size, generator=generator)]
        with pytest.raises(SingularMetricError, match="rank"):
            dense(R.T @ R).inverse(0.0)
        dense(spectral(torch.logspace(0, -10, size, dtype=torch.float64), seed)).inverse(0.0)


def test_eigenvalue_in_the_message_is_the_smallest() -> None:
    matrix = torch.diag(torch.tensor([4.0, 2.0, -1.0], dtype=torch.float64))
    with pytest.raises(SingularMetricError, match=r"indefinite.*rank 2 of 3, smallest eigenvalue -1, largest 4"):
        dense(matrix).inverse(0.0)
    with pytest.raises(SingularMetricError, match=r"indefinite at damping 0.5.*smallest eigenvalue -0.5, largest 4.5"):
        dense(matrix).inverse(0.5)
    close(
        dense(matrix).inverse(2.0).solve(torch.ones(3).double()), torch.tensor([1 / 6, 1 / 4, 1.0], dtype=torch.float64)
    )


def test_singular_block_is_found_beside_a_block_that_only_looks_like_one() -> None:
    """Blocks of one size are one batch: the first suspicious block must not speak for the others."""
    ill = torch.diag(torch.logspace(0, -12, 4, dtype=torch.float64))
    index = tuple(torch.arange(8).view(2, 4))
    for blocks in [(ill, gram(2, 4)), (gram(2, 4), ill)]:
        G = BlockDenseOperator(matrices.layout(8), ("a", "b"), index, blocks)
        with pytest.raises(SingularMetricError, match=r"block of the metric \(a, b\) is singular.*rank 2 of 4"):
            G.inverse(0.0)
        with pytest.raises(SingularMetricError, match="rank 2 of 4"):
            G.logdet()
    BlockDenseOperator(matrices.layout(8), ("a", "b"), index, (ill, ill)).inverse(0.0)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.LowRank(50), ng.Kernel()], ids=repr)
def test_singular_metric_of_a_model_is_reported_in_every_structure(structure: Structure) -> None:
    problem = zoo.case("linear_bias").make()
    pb = pull(problem, random_roots(problem, 1))
    with pytest.raises(SingularMetricError, match=r"singular at damping 0: rank 5 of 8.*Pinv"):
        ng.sharp(structure.estimate(pb), covector(pb))


def test_singular_diagonal_is_reported() -> None:
    G = DiagonalOperator(matrices.layout(3), torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64))
    with pytest.raises(SingularMetricError, match=r"diagonal metric is singular.*rank 2 of 3, smallest eigenvalue 0"):
        G.inverse(0.0)
    with pytest.raises(SingularMetricError, match="rank 2 of 3"):
        G.logdet()
    close(G.inverse(1.0).solve(torch.ones(3).double()), torch.tensor([1 / 3, 1.0, 1 / 2], dtype=torch.float64))


def test_damping_below_the_rounding_of_the_metric_does_not_hide_that_it_is_singular() -> None:
    with pytest.raises(SingularMetricError, match="singular at damping 1e-18"):
        dense(gram(3, 5)).inverse(1e-18)


# What is not a number


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Pinv(), ng.CG()], ids=lambda s: type(s).__name__)
def test_nothing_that_is_no_number_is_returned(solver: ng.solve.Solver, bad: float) -> None:
    matrix = gram(4, 3)
    w = matrices.covector(normal(3))
    spoilt = matrix.clone()
    spoilt[1, 1] = bad
    for G in (dense(spoilt), DiagonalOperator(matrices.layout(3), spoilt.diagonal())):
        for damping in (0.0, 1.0):
            with pytest.raises(NonFiniteError, match="NaN or infinity"):
                ng.sharp(G, w, solver, damping)
    with pytest.raises(NonFiniteError, match="the differential holds NaN or infinity"):
        ng.sharp(dense(matrix), matrices.covector(torch.tensor([0.0, bad, 0.0]).double()), solver)


@pytest.mark.parametrize("damping", [-1.0, -1e-30, math.inf, math.nan])
@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Pinv(), ng.CG()], ids=lambda s: type(s).__name__)
def test_damping_must_be_a_finite_number_and_not_negative(solver: ng.solve.Solver, damping: float) -> None:
    with pytest.raises(ValueError, match=r"damping must be a finite number ≥ 0, got"):
        ng.sharp(dense(gram(4, 3)), matrices.covector(normal(3)), solver, damping)


def test_factorisation_is_made_once_for_many_covectors() -> None:
    matrix = gram(5, 4)
    inverse = ng.Cholesky().init(dense(matrix), damping=0.1)
    matrix.zero_()
    expected = gram(5, 4) + 0.1 * torch.eye(4).double()
    for seed in range(3):
        w = normal(4, seed=seed)
        close(inverse.solve(w), torch.linalg.solve(expected, w))
    assert list(inverse.tensors()) == ["cholesky/0"]  # from which a checkpoint has it back


@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Pinv(), ng.CG()], ids=repr)
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Diagonal(), ng.Kernel()], ids=repr)
def test_damping_that_overflows_in_the_precision_of_the_metric_is_refused(
    structure: Structure, solver: ng.solve.Solver
) -> None:
    model, x = torch.nn.Linear(2, 1), torch.ones(3, 2)
    for dtype in (torch.float32, torch.bfloat16):
        model, x = model.to(dtype), x.to(dtype)
        G = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
        with pytest.raises(ValueError, match=r"damping=1e\+40 overflows in the float32 of the metric"):
            solver.init(G, damping=1e40)
    G = structure.estimate(ng.pullback(model.double(), x.double(), ng.Euclidean()))
    v = ng.sharp(G, G.layout.covector(torch.ones(3, dtype=torch.float64)), solver, damping=1e40)
    torch.testing.assert_close(v.flatten(), torch.full((3,), 1e-40, dtype=torch.float64), rtol=1e-9, atol=0)
