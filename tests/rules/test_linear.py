"""Linear layers that are called several times, with any leading dimensions."""

import itertools

import pytest
import torch
from torch import nn

from natgrad.rules import Call, DenseFeatures, Joined, LinearRule
from tests.pulled import close, normal

KEYS = [("weight", "bias"), ("weight",), ("bias",)]


@pytest.mark.parametrize("keys", KEYS, ids=" and ".join)
def test_the_moment_of_several_calls_is_the_sum_of_theirs(keys: tuple[str, ...]) -> None:
    layer, rule = nn.Linear(3, 2).double(), LinearRule()
    calls = [Call((normal(*shape, seed=seed),), {}) for seed, shape in enumerate([(4, 3), (4, 5, 3), (4, 1, 2, 3)])]
    each = [rule.inputs(layer, keys, call) for call in calls]
    joined = Joined.of(each)
    close(joined.moment().total, torch.stack([a.moment().total for a in each]).sum(0), 1e-14)
    close(joined.dense(), torch.cat([a.dense() for a in each], dim=1), 1e-15)
    assert joined.count() == sum(int(a.count()) for a in each) == 4 + 20 + 8


@pytest.mark.parametrize("k", [1, 2])
def test_the_moment_of_the_cotangents_of_several_calls_is_the_sum_of_theirs(k: int) -> None:
    layer, rule = nn.Linear(3, 2).double(), LinearRule()
    shapes = [(4, 2), (4, 5, 2), (4, 1, 2, 2)]
    each = [rule.cotangents(layer, ("weight",), normal(k, *shape, seed=seed)) for seed, shape in enumerate(shapes)]
    close(Joined.of(each).moment().total, torch.stack([g.moment().total for g in each]).sum(0), 1e-14)


@pytest.mark.parametrize(("lead", "keys"), list(itertools.product([(5,), (5, 2), (5, 2, 3)], KEYS)), ids=str)
def test_the_moment_is_that_of_the_explicit_inputs(lead: tuple[int, ...], keys: tuple[str, ...]) -> None:
    layer, rule, call = nn.Linear(3, 2).double(), LinearRule(), Call((normal(*lead, 3),), {})
    rows = rule.inputs(layer, keys, call)
    explicit = DenseFeatures(rows.dense())
    close(rows.moment().total, explicit.moment().total, 1e-13)
    assert rows.moment().count == explicit.moment().count
