"""Linear layers that are called several times, with any leading dimensions."""

import itertools

import pytest
import torch
from torch import nn

from natgrad.rules.base import Call, Moment
from natgrad.rules.linear import LinearRule
from tests.pulled import close, normal

KEYS = [("weight", "bias"), ("weight",), ("bias",)]


@pytest.mark.parametrize("keys", KEYS, ids=" and ".join)
def test_the_moment_of_several_calls_is_the_sum_of_theirs(keys: tuple[str, ...]) -> None:
    layer, rule = nn.Linear(3, 2).double(), LinearRule()
    calls = [Call((normal(*shape, seed=seed),), {}) for seed, shape in enumerate([(4, 3), (4, 5, 3), (4, 1, 2, 3)])]
    one = rule.gathered(calls)
    assert one is not None
    found, each = (rule.input_moment(layer, keys, one), [rule.input_moment(layer, keys, call) for call in calls])
    close(found.total, torch.stack([moment.total for moment in each]).sum(0), 1e-14)
    assert found.count == sum(int(moment.count) for moment in each) == 4 + 20 + 8


@pytest.mark.parametrize("k", [1, 2])
def test_the_moment_of_the_cotangents_of_several_calls_is_the_sum_of_theirs(k: int) -> None:
    layer, rule = nn.Linear(3, 2).double(), LinearRule()
    g = [normal(k, *shape, seed=seed) for seed, shape in enumerate([(4, 2), (4, 5, 2), (4, 1, 2, 2)])]
    one = rule.gathered_cotangents(g)
    assert one is not None
    each = [rule.output_moment(layer, ("weight", "bias"), part) for part in g]
    close(rule.output_moment(layer, ("weight", "bias"), one), torch.stack(each).sum(0), 1e-14)


@pytest.mark.parametrize(("lead", "keys"), list(itertools.product([(5,), (5, 2), (5, 2, 3)], KEYS)), ids=str)
def test_the_moment_is_that_of_the_explicit_inputs(lead: tuple[int, ...], keys: tuple[str, ...]) -> None:
    layer, rule, call = nn.Linear(3, 2).double(), LinearRule(), Call((normal(*lead, 3),), {})
    found, explicit = rule.input_moment(layer, keys, call), Moment.of(rule.inputs(layer, keys, call))
    close(found.total, explicit.total, 1e-13)
    assert found.count == explicit.count
