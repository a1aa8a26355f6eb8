"""Linear layers that are called several times, with any leading dimensions."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.rules import Call, DenseFeatures, Joined, LinearRule, PReLURule
from natgrad.rules.base import cotangent_features, input_features
from tests import zoo
from tests.pulled import check_rows, close, normal

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
RULE, SLOPES = PReLURule(), ("weight",)


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
def test_moments_are_those_of_inputs_and_cotangents(kind: str) -> None:
    build, shape = PRELUS[kind]
    layer, call = build().double(), Call((normal(5, *shape),), {})
    a, g = (
        input_features(RULE, layer, SLOPES, call).dense(),
        cotangent_features(RULE, layer, SLOPES, normal(2, 5, *shape, seed=1)).dense(),
    )
    assert (a.shape[2:], g.shape) == ((layer.num_parameters, 1), (2, *a.shape))
    moment = input_features(RULE, layer, SLOPES, call).moment()
    assert moment.count == a.shape[0] * a.shape[1]
    close(moment.total, torch.einsum("nrci,nrcj->cij", a, a), 1e-12)
    close(input_features(RULE, layer, SLOPES, call).reduced("mean").dense().squeeze(1), a.mean(1), 1e-12)
    S = cotangent_features(RULE, layer, SLOPES, normal(2, 5, *shape, seed=1)).moment().total
    close(S, torch.einsum("knrco,knrcp->cop", g, g), 1e-12)


@every_kind
def test_packing_and_unpacking_are_inverse(kind: str) -> None:
    layer = PRELUS[kind][0]().double()
    w = normal(layer.num_parameters)
    packed = RULE.pack(layer, {"weight": w})
    assert packed.shape == RULE.shape(layer, SLOPES)
    close(RULE.unpack(layer, SLOPES, torch.stack([packed, 2 * packed]))["weight"], torch.stack([w, 2 * w]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    layer, x = nn.PReLU(2), normal(20_000, 2, 3).to(dtype)
    A, S = (
        input_features(RULE, layer, SLOPES, Call((x,), {})).moment().total,
        cotangent_features(RULE, layer, SLOPES, 8 * x.unsqueeze(0)).moment().total,
    )
    assert A.dtype == S.dtype == torch.float32
    wide = x.double()
    torch.testing.assert_close(A.double().flatten(), wide.clamp(max=0).square().sum((0, 2)), rtol=1e-5, atol=0)
    torch.testing.assert_close(S.double().flatten(), 64 * wide.square().sum((0, 2)), rtol=1e-5, atol=0)


class _Named(nn.PReLU):
    """A subclass, which inherits."""


class _Steeper(nn.PReLU):
    """A subclass with another forward."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice as steep."""
        return super().forward(2 * input)


def test_a_subclass_inherits_the_rule_unless_it_has_another_forward() -> None:
    assert RULE.covers(nn.PReLU())
    assert RULE.covers(_Named())
    assert not RULE.covers(_Steeper())


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
