"""Linear layers that are called several times, with any leading dimensions."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.rules import Call, DenseFeatures, Joined, LinearRule
from tests import zoo
from tests.pulled import check_rows, close, normal, pull

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


# PReLU: the gradient of an example with respect to a slope is Σ_r g min(x, 0).


PRELUS: dict[str, tuple[Callable[[], nn.PReLU], tuple[int, ...]]] = {
    "one slope": (lambda: nn.PReLU(), (4,)),
    "one slope for images": (lambda: nn.PReLU(), (2, 3, 2)),
    "one slope a feature": (lambda: nn.PReLU(4), (4,)),
    "one slope a channel": (lambda: nn.PReLU(2), (2, 5)),
    "one slope a channel of images": (lambda: nn.PReLU(2, init=-0.5), (2, 3, 2)),
    "no positions": (lambda: nn.PReLU(), (1,)),
}
every_kind = pytest.mark.parametrize("kind", PRELUS)


def problem(kind: str, frozen: tuple[str, ...] = ()) -> zoo.Problem:
    """PReLU between two layers; examples are as many as channels, so that the axes cannot be told by their lengths."""
    build, shape = PRELUS[kind]
    return zoo.between(kind, build, shape, shape[0] + 1, frozen)


@pytest.mark.parametrize("frozen", [(), ("2.weight",), ("0.weight", "0.bias")], ids=lambda names: " ".join(names))
@every_kind
def test_the_gradient_of_an_example_is_the_sum_over_positions(kind: str, frozen: tuple[str, ...]) -> None:
    of = problem(kind, frozen)
    check_rows(of)


@every_kind
def test_the_metric_of_a_slope_is_exact(kind: str) -> None:
    """Every slope is an entry by itself: Kronecker has the diagonal of G there."""
    pb = pull(problem(kind, ("0.weight", "0.bias", "2.weight")), ng.Euclidean())
    close(ng.Kronecker().estimate(pb).dense().diagonal(), ng.Dense().estimate(pb).dense().diagonal())


@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC])
def test_a_network_of_prelus_is_covered_and_trains(
    preset: Callable[..., ng.NaturalGradient], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.PReLU(3), nn.Flatten(), nn.Linear(12, 8), nn.PReLU(), nn.Linear(8, 2))
    x, t = torch.randn(32, 1, 4, 4), torch.arange(32) % 2
    opt = preset(model, ng.Fisher(ng.Categorical(axis=-1)), strict=True, metric_every=1, inverse_every=1)
    first = loss = F.cross_entropy(model(x), t)
    with caplog.at_level(logging.INFO, "natgrad"):
        for _ in range(10):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), t)
            loss.backward()
            opt.step()
    assert float(loss.detach()) < 0.7 * float(first.detach())
    assert not caplog.records
