"""Moving averages and restored operators."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.operators import LowRankOperator, Operator
from natgrad.structures import Structure
from tests import zoo
from tests.pulled import close, normal, pull, random_roots, without_rules

EXACT = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel(), ng.Implicit(), ng.LowRank(31)]
every_case = pytest.mark.parametrize("name", ["mlp_tanh", "layer_norm", "conv", "sequence"])
weights = pytest.mark.parametrize("weight", [0.0, 0.05, 0.5, 1.0])


def two(structure: Structure, name: str) -> tuple[Operator, Operator]:
    """Estimates of one model at two batches."""
    problem = zoo.case(name).make()
    assert isinstance(problem.x, torch.Tensor)
    other = zoo.Problem(problem.model, normal(*problem.x.shape, seed=5))
    s = random_roots(problem, 2)
    return structure.estimate(pull(problem, s)), structure.estimate(pull(other, s))


@weights
@every_case
@pytest.mark.parametrize("structure", EXACT, ids=repr)
def test_average_is_the_average_of_the_matrices(structure: Structure, name: str, weight: float) -> None:
    """LowRank too, here where its rank holds both estimates."""
    old, new = two(structure, name)
    expected = (1 - weight) * old.dense() + weight * new.dense()
    average = old.lerp(new, weight)
    assert type(average) is type(old)
    close(average.dense(), expected)
    v = normal(len(expected))
    close(average.product(v), expected @ v)
    close(average.diagonal(), expected.diagonal())


@weights
@pytest.mark.parametrize("rank", [1, 3, 12])
def test_average_of_low_ranks_keeps_diagonal_and_rank(rank: int, weight: float) -> None:
    old, new = two(ng.LowRank(rank), "mlp_tanh")
    average = old.lerp(new, weight)
    assert isinstance(average, LowRankOperator)
    assert average.values.numel() <= rank
    close(average.diagonal(), (1 - weight) * old.diagonal() + weight * new.diagonal())
    # It is the best approximation of the two ranges together: their leading eigenpairs.
    ranges = [(1 - weight) * _range(old), weight * _range(new)]
    values = torch.linalg.eigvalsh(ranges[0] + ranges[1]).flip(0)[: average.values.numel()]
    close(average.values, values)


def test_average_of_low_ranks_grows_to_the_rank_that_was_asked_for() -> None:
    """Batches of rank 6 each, an average of rank 20: 18 after three batches, and 20 after four."""
    problem = zoo.case("mlp_tanh").make()
    batches = [zoo.Problem(problem.model, normal(6, 3, seed=seed)) for seed in range(4)]
    estimates = [ng.LowRank(20).estimate(pull(batch, random_roots(batch, 1))) for batch in batches]
    average: Operator = estimates[0]
    ranks = [6]
    for step, G in enumerate(estimates[1:], start=2):
        average = average.lerp(G, 1 / step)
        ranks.append(average.tensors()["values"].numel())
    assert ranks == [6, 12, 18, 20]
    mean = torch.stack([G.dense() for G in estimates]).mean(0)
    close(average.diagonal(), mean.diagonal())


def _range(G: Operator) -> torch.Tensor:
    assert isinstance(G, LowRankOperator)
    return (G.vectors * G.values) @ G.vectors.T


def test_average_over_time_is_the_weighted_mean_of_the_estimates() -> None:
    """Grosse (2021), (32) with the correction of its start: weights β^{t−s}, normalised."""
    problem = zoo.case("mlp_tanh").make()
    schedule = ng.Refresh(ng.Dense(), decay=0.7)
    estimates = [schedule.structure.estimate(pull(problem, random_roots(problem, k))) for k in (1, 2, 3, 4)]
    average = estimates[0]
    for step, G in enumerate(estimates[1:], start=2):
        average = average.lerp(G, schedule.weight(step))
    powers = torch.tensor([0.7**3, 0.7**2, 0.7, 1.0], dtype=torch.float64)
    expected = torch.stack([G.dense() for G in estimates])
    close(average.dense(), torch.einsum("t,tpq->pq", powers / powers.sum(), expected))


def test_average_of_different_kinds_is_refused() -> None:
    pb = pull(zoo.case("mlp_tanh").make(), ng.Euclidean())
    estimates = [s.estimate(pb) for s in (*EXACT[:5], ng.LowRank(2))]
    for left, right in combinations(estimates, 2):
        with pytest.raises(IncompatibleError, match=f"{type(left).__name__} and {type(right).__name__}"):
            left.lerp(right, 0.5)


def test_average_over_different_parameters_is_refused() -> None:
    left = ng.Diagonal().estimate(pull(zoo.case("mlp_tanh").make(), ng.Euclidean()))
    right = ng.Diagonal().estimate(pull(zoo.case("called_twice").make(), ng.Euclidean()))
    with pytest.raises(ValueError, match="over the same parameters"):
        left.lerp(right, 0.5)


def test_kernels_with_different_numbers_of_roots_are_not_joined() -> None:
    problem = zoo.case("mlp_tanh").make()
    one, two = (ng.Kernel().estimate(pull(problem, random_roots(problem, k))) for k in (1, 2))
    with pytest.raises(ValueError, match="different numbers of roots"):
        one.lerp(two, 0.5)


@pytest.mark.parametrize("structure", EXACT[:5], ids=repr)
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (1, 4)])
def test_average_over_sequences_of_different_lengths_is_that_of_the_matrices(
    structure: Structure, lengths: tuple[int, int]
) -> None:
    """A kernel pads the positions that share a weight with zeros, which is exact."""
    problem = zoo.case("sequence").make()
    batches = [zoo.Problem(problem.model, normal(4, r, 3, seed=r), lambda y: y.mean(1)) for r in lengths]
    s = random_roots(batches[0], 2)
    old, new = (structure.estimate(pull(batch, s)) for batch in batches)
    close(old.lerp(new, 0.3).dense(), 0.7 * old.dense() + 0.3 * new.dense())


# Restoring

METRICS: dict[str, Callable[[zoo.Problem], ng.Pullback]] = {
    "plain": lambda problem: pull(problem, random_roots(problem, 2)),
    "coupled": lambda problem: pull(
        problem, ng.GradientCovariance(torch.nn.functional.mse_loss), torch.zeros_like(problem.outputs())
    ),
}


@pytest.mark.parametrize("metric", METRICS)
@every_case
@pytest.mark.parametrize("structure", [*EXACT[:4], ng.LowRank(2)], ids=repr)
def test_operator_is_restored_bit_by_bit(structure: Structure, name: str, metric: str) -> None:
    problem = zoo.case(name).make()
    pb = METRICS[metric](problem)
    G = structure.estimate(pb)
    saved = {key: t.clone() for key, t in G.tensors().items()}
    restored = structure.restore(pb.model, pb.layers, saved)
    assert restored is not None
    assert type(restored) is type(G)
    assert restored.tensors().keys() == saved.keys()
    assert all(torch.equal(t, saved[key]) for key, t in restored.tensors().items())
    v = normal(G.layout.size)
    assert torch.equal(restored.product(v), G.product(v))
    assert torch.equal(restored.diagonal(), G.diagonal())
    close(restored.lerp(G, 0.5).dense(), G.dense())


def test_restored_blocks_do_not_depend_on_the_path_of_the_first_batch() -> None:
    """A block that a batch had to do without its rule has the same matrix, in the same order."""
    problem = zoo.case("sequence").make()
    pb = pull(problem, ng.Euclidean())
    for structure in (ng.BlockDense(), ng.Dense(), ng.Diagonal()):
        with_rule, without = structure.estimate(pb), structure.estimate(without_rules(pb))
        assert with_rule.tensors().keys() == without.tensors().keys()
        for key, t in with_rule.tensors().items():
            close(t, without.tensors()[key])


def test_implicit_metric_keeps_nothing() -> None:
    pb = pull(zoo.case("mlp_tanh").make(), ng.Euclidean())
    assert ng.Implicit().estimate(pb).tensors() == {}
    structure: Structure = ng.Implicit()
    assert structure.restore(pb.model, pb.layers, {}) is None


def test_implicit_metric_is_a_snapshot() -> None:
    """Later steps of the parameters do not reach it."""
    problem = zoo.case("mlp_tanh").make()
    G = ng.Implicit().estimate(pull(problem, ng.Euclidean()))
    before = G.dense()
    with torch.no_grad():
        for p in problem.module.parameters():
            p.add_(1.0)
    close(G.dense(), before, 0.0)
