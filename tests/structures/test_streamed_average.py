"""A moving average updated layer by layer equals one updated by a whole estimate."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate.moments import Pending, average_together
from natgrad.accelerate.replay import GraphCache
from natgrad.errors import IncompatibleError, NonFiniteError
from natgrad.operators import KroneckerOperator
from natgrad.optim.estimates import EmaWeight
from natgrad.pullbacks.tape import above
from tests import zoo
from tests.pulled import Rooted, close, normal, pull, random_roots

STRUCTURES = [ng.Kronecker(), ng.Kronecker("reduce"), ng.Kronecker(largest=3), ng.Kronecker(fallback=ng.BlockDense())]
NAMES = zoo.IDS


def _average(structure: ng.Kronecker, pb: ng.Pullback) -> KroneckerOperator:
    """Something to be averaged with, over the same layers, in memory of its own."""
    return structure.estimate(pb).lerp(structure.estimate(pb), 0.5)


def _two(problem: zoo.Problem, k: int) -> tuple[ng.Pullback, ng.Pullback]:
    """Of one model at two batches, with other inputs where they are numbers, and other roots."""
    roots = [Rooted(normal(k, *problem.outputs().shape, seed=seed)) for seed in range(2)]
    other = problem
    if isinstance(problem.x, Tensor) and problem.x.is_floating_point():
        other = replace(problem, x=normal(*problem.x.shape, seed=3))
    return pull(problem, roots[0]), pull(other, roots[1])


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_an_absorbed_estimate_is_a_whole_one(name: str, k: int, structure: ng.Kronecker) -> None:
    before, now = _two(zoo.case(name).make(), k)
    expected = _average(structure, before).lerp(structure.estimate(now), 0.3)
    found = structure.absorb(now, _average(structure, before), 0.3)
    close(found.dense(), expected.dense())


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", zoo.IDS)
def test_inputs_and_cotangents_can_be_absorbed_apart(name: str, k: int) -> None:
    """As the kernels of a GPU are recorded; here none is, and they run one by one."""
    (before, now), structure, recordings = _two(zoo.case(name).make(), k), ng.Kronecker(), GraphCache[None]()
    expected = _average(structure, before).lerp(structure.estimate(now), 0.3)
    recorded = replace(now, graph_cache=recordings)
    found = structure.absorb(recorded, _average(structure, before), 0.3)
    close(found.dense(), expected.dense())


def test_the_average_stays_where_it_is() -> None:
    problem = zoo.case("mlp_tanh").make()
    average = _average(ng.Kronecker(), pull(problem, random_roots(problem)))
    places = {key: t.data_ptr() for key, t in average.tensors().items()}
    after = ng.Kronecker().absorb(pull(problem, random_roots(problem)), average, 0.3)
    assert {key: t.data_ptr() for key, t in after.tensors().items()} == places


def test_an_estimate_that_overflows_is_named_and_not_absorbed() -> None:
    problem = zoo.case("mlp_tanh").make()
    average = _average(ng.Kronecker(), pull(problem, random_roots(problem)))
    large = pull(problem, replace(random_roots(problem, 1), s=1e200 * random_roots(problem, 1).s))
    with pytest.raises(NonFiniteError, match=r"the estimate of the metric of .*weight \+ .*bias holds NaN or infinity"):
        ng.Kronecker().absorb(large, average, 0.5)
    assert all(bool(torch.isfinite(t).all()) for t in average.tensors().values())


def test_layers_of_another_model_are_refused() -> None:
    here, there = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=b)).double() for b in (True, False))
    pulled = [ng.pullback(model, normal(5, 3), ng.Euclidean()) for model in (here, there)]
    with pytest.raises(IncompatibleError, match="were seen by their rule in one batch and not in another"):
        ng.Kronecker().absorb(pulled[1], ng.Kronecker().estimate(pulled[0]), 0.5)


# Many factors in few kernels, as on a GPU


def _padded(rows: int, seed: int) -> Tensor:
    """A symmetric matrix [1 d d] with room between its rows that holds no number."""
    x = normal(rows, rows, seed=seed)
    out = torch.full((1, rows, rows + 3), torch.nan, dtype=torch.float64)[:, :, :rows]
    return out.copy_((x @ x.T).unsqueeze(0))


@pytest.mark.parametrize("weight", [0.3, torch.tensor(0.25)])
def test_factors_are_averaged_together_whatever_lies_between_their_rows(weight: float | Tensor) -> None:
    sides = [
        (_padded(4, 0), _padded(4, 1)),
        (_padded(4, 2), _padded(4, 3).contiguous()),
        (_padded(5, 4).contiguous(), _padded(5, 5)),
        (normal(2, 3).square(), normal(2, 3, seed=1).square()),
        (_padded(1100, 6).contiguous(), _padded(1100, 7)),
    ]
    counts = [1, 2, 8, 2, 1]
    w = float(weight)
    expected = [(1 - w) * x + w * y / n for (x, y), n in zip(sides, counts, strict=True)]
    average_together([Pending.of(x, y, weight, n) for (x, y), n in zip(sides, counts, strict=True)])
    for (found, _), right in zip(sides, expected, strict=True):
        close(found, right, 1e-7)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_total_that_is_not_finite_leaves_all_of_them_alone(bad: int, value: float) -> None:
    factors = [_padded(4, 0), normal(2, 3).square(), _padded(1100, 6).contiguous()]
    totals = [t.clone() for t in factors]
    totals[bad].view(-1)[0] = value
    before = [t.clone() for t in factors]
    average_together([Pending.of(x, y, 0.5, 1) for x, y in zip(factors, totals, strict=True)])
    assert all(torch.equal(x, y) for x, y in zip(factors, before, strict=True))


# Which layers are above others


def test_nodes_with_others_below_them_are_found_on_every_path() -> None:
    x = torch.ones(2, requires_grad=True)
    a = x.exp()
    b, c = a.sin(), a.cos()
    d = b * c
    ends: list[Tensor] = [a, b, d]
    assert above({t.grad_fn for t in ends}) == {b.grad_fn, d.grad_fn}
    assert above({c.grad_fn}) == set()


# The weights of an average over time


def test_whole_steps_have_the_weights_of_the_corrected_average() -> None:
    mass, structure = EmaWeight(0.9), ng.Refresh(ng.Kronecker(), decay=0.9)
    for step in range(1, 6):
        assert mass.next_step(32) == pytest.approx(structure.weight(step), rel=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_parts_of_a_step_weigh_as_the_whole(decay: float) -> None:
    """Two passes of half a batch, one after the other, against one of the whole batch."""
    parts, whole = EmaWeight(decay), EmaWeight(decay)
    values, of_parts, of_whole = normal(6), 0.0, 0.0
    for mass in (parts, whole):
        mass.next_step(32)
    for x, y in zip(values[0::2].tolist(), values[1::2].tolist(), strict=True):
        for value, n in ((x, 8), (y, 24)):
            w = parts.next(n)
            of_parts = (1 - w) * of_parts + w * value
        parts.end_step()
        w = whole.next_step(32)
        of_whole = (1 - w) * of_whole + w * (8 * x + 24 * y) / 32
    assert of_parts == pytest.approx(of_whole, rel=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_the_average_is_over_examples_whatever_the_sizes_of_the_steps(decay: float) -> None:
    """The last batch of an epoch may have few: neither it nor the one after it is anything special."""
    sizes, values, mass, found = (
        [[64], [64], [3], [32, 32], [128], [1], [64]],
        iter(normal(8).tolist()),
        EmaWeight(decay),
        0.0,
    )
    total = weights = 0.0
    for step, parts in enumerate(sizes):
        total, weights = decay * total, decay * weights
        for n in parts:
            value, w = next(values), mass.next(n) if step else mass.next_step(n)
            found = (1 - w) * found + w * value
            total, weights = total + n * value, weights + n
        if step:
            mass.end_step()
        assert found == pytest.approx(total / weights, rel=1e-12)
