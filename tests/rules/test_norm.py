"""Normalisations: the gradient of an example with respect to scale and shift is Σ_r g (x̂, 1)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from natgrad.errors import BatchStatisticsError
from natgrad.rules import BatchNormRule, Call, InstanceNormRule, LayerNormRule, RMSNormRule, Rule
from natgrad.rules.base import cotangent_features, input_features
from natgrad.rules.norm import NormRule
from tests import zoo
from tests.pulled import check_rows, close, normal, oracle_rows, pull, random_roots

Build = Callable[[], nn.Module]
NORMS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(4), (4,)),
    "layer sequence": (lambda: nn.LayerNorm(4), (3, 4)),
    "layer two axes": (lambda: nn.LayerNorm((3, 4)), (3, 4)),
    "layer two axes sequence": (lambda: nn.LayerNorm((3, 4)), (2, 2, 3, 4)),
    "layer without shift": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "rms": (lambda: nn.RMSNorm(4), (3, 4)),
    "rms two axes": (lambda: nn.RMSNorm((3, 4), eps=0.1), (2, 3, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "group of all": (lambda: nn.GroupNorm(1, 4), (4, 5)),
    "group of one": (lambda: nn.GroupNorm(4, 4), (4, 2, 2, 2)),
    "group flat": (lambda: nn.GroupNorm(2, 4), (4,)),
    "batch 1d": (lambda: _seen(nn.BatchNorm1d(4)), (4,)),
    "batch 1d sequence": (lambda: _seen(nn.BatchNorm1d(4)), (4, 3)),
    "batch 2d": (lambda: _seen(nn.BatchNorm2d(4, eps=0.1)), (4, 3, 2)),
    "batch 3d": (lambda: _seen(nn.BatchNorm3d(4)), (4, 2, 2, 2)),
    "instance 1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 3)),
    "instance 2d": (lambda: nn.InstanceNorm2d(4, affine=True, eps=0.1), (4, 3, 2)),
    "instance 3d": (lambda: nn.InstanceNorm3d(4, affine=True), (4, 2, 2, 2)),
    "instance tracked": (lambda: _seen(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), (4, 3, 2)),
    "instance tracked training": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (4, 3)),
}
every_norm = pytest.mark.parametrize("kind", NORMS)


KEYS = (("weight", "bias"), ("weight",), ("bias",))
SHIFTLESS = ("layer without shift", "rms", "rms two axes")
PARTS = [(kind, keys) for kind in NORMS for keys in KEYS if not ("bias" in keys and kind in SHIFTLESS)]


def _seen(layer: nn.Module) -> nn.Module:
    """In evaluation mode, with running statistics of its own."""
    for name, buffer in layer.named_buffers():
        if name.startswith("running"):
            buffer.uniform_(0.5, 2.0)
    return layer.eval()


def problem(kind: str, frozen: tuple[str, ...] = ()) -> zoo.Problem:
    """The normalisation between two other layers, so that its inputs and its cotangents are not special."""
    build, shape = NORMS[kind]
    return zoo.between(kind, build, shape, 3, frozen)


@pytest.mark.parametrize("frozen", [(), ("2.weight",), ("2.bias",)], ids=lambda names: " ".join(names) or "all")
@every_norm
def test_the_gradient_of_an_example_is_the_sum_over_positions(kind: str, frozen: tuple[str, ...]) -> None:
    of = problem(kind, frozen)
    check_rows(of)


def _rule(layer: nn.Module) -> Rule:
    return next(rule for rule in ng.rules.RULES if rule.covers(layer))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "keys"), PARTS, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_moments_are_those_of_inputs_and_cotangents(kind: str, keys: tuple[str, ...], training: bool) -> None:
    build, shape = NORMS[kind]
    layer = build().double()
    rule, call = _rule(layer), Call((normal(5, *shape),), {}, training)
    a = input_features(rule, layer, keys, call).dense()
    moment = input_features(rule, layer, keys, call).moment()
    assert moment.count == a.shape[0] * a.shape[1]
    close(moment.total, torch.einsum("nrci,nrcj->cij", a, a), 1e-12)
    close(input_features(rule, layer, keys, call).reduced("mean").dense().squeeze(1), a.mean(1), 1e-12)
    cotangents = normal(2, 5, *shape, seed=1)
    g = cotangent_features(rule, layer, keys, cotangents).dense()
    assert g.shape == (2, 5, *a.shape[1:3], 1)
    close(
        cotangent_features(rule, layer, keys, cotangents).moment().total, torch.einsum("knrco,knrcp->cop", g, g), 1e-12
    )


@every_norm
def test_packing_and_unpacking_are_inverse(kind: str) -> None:
    layer = NORMS[kind][0]().double()
    rule = _rule(layer)
    named = {name: normal(*p.shape, seed=at) for at, (name, p) in enumerate(layer.named_parameters())}
    for keys in [tuple(named), *((name,) for name in named)]:
        block = {key: named[key] for key in keys}
        packed = rule.pack(layer, block)
        assert packed.shape == rule.shape(layer, keys)
        again = rule.unpack(layer, keys, torch.stack([packed, 2 * packed]))
        for key in keys:
            close(again[key], torch.stack([block[key], 2 * block[key]]))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False).eval()])
def test_batch_norm_uses_the_statistics_of_its_batch_where_torch_does(layer: nn.BatchNorm1d) -> None:
    x = 3 + 2 * normal(6, 4, 5)
    layer.double()
    x̂ = layer(x)  # the scale is 1 and the shift 0
    a = input_features(BatchNormRule(), layer, ("weight",), Call((x,), {}, layer.training)).dense()
    close(a.squeeze(-1).mT, x̂.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["layer sequence", "rms", "group", "batch 2d", "instance 2d"])
def test_half_precision_is_summed_in_single(kind: str, dtype: torch.dtype) -> None:
    """Sums of 20 000 squares overflow float16 and stall in bfloat16."""
    build, shape = NORMS[kind]
    layer = build()
    rule, x = _rule(layer), normal(20_000, *shape).to(dtype)
    keys = tuple(dict(layer.named_parameters()))
    moment = input_features(rule, layer, keys, Call((x,), {})).moment()
    expected = input_features(rule, layer.double(), keys, Call((x.double(),), {})).moment()
    assert moment.total.dtype == torch.float32
    torch.testing.assert_close(
        moment.total.double(), expected.total, rtol=1e-5, atol=1e-5 * float(expected.total.max())
    )
    g = 8 * x.unsqueeze(0)
    S = cotangent_features(rule, layer, keys, g).moment().total
    assert S.dtype == torch.float32
    torch.testing.assert_close(
        S.double(), cotangent_features(rule, layer, keys, g.double()).moment().total, rtol=1e-5, atol=0
    )


def test_the_default_epsilon_of_rms_norm_is_that_of_torch() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer = nn.RMSNorm(4, dtype=dtype)
        x = (1e-4 * normal(8, 4)).to(dtype)
        a = input_features(RMSNormRule(), layer, ("weight",), Call((x,), {})).dense()
        torch.testing.assert_close(a.flatten(1).to(dtype), layer(x).detach())


def test_an_instance_norm_without_a_batch_is_one_example() -> None:
    layer, x = nn.InstanceNorm1d(3, affine=True).double(), normal(3, 4)
    call = Call((x,), {})
    assert InstanceNormRule().batch_axis(layer, call) is None
    a = input_features(InstanceNormRule(), layer, ("weight",), call).dense()
    close(a.squeeze(-1).mT[0], layer(x).detach())
    assert cotangent_features(InstanceNormRule(), layer, ("weight",), normal(2, 3, 4)).dense().shape == (2, 1, 4, 3, 1)


def test_a_layer_norm_over_the_examples_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm((4, 3)), nn.Linear(3, 1)).double()
    pb = ng.pullback(model, normal(4, 2), ng.Euclidean())
    with pytest.raises(
        BatchStatisticsError, match=r"LayerNorm\(\(4, 3\).*over the axis of the examples.*trailing axes"
    ):
        ng.Dense().estimate(pb)


class _Named(nn.LayerNorm):
    """A subclass, which may have another forward."""


def test_a_subclass_inherits_the_rule_and_a_module_with_another_forward_does_not() -> None:
    twice: Any = nn.LayerNorm(3)
    twice.forward = lambda x: 2 * x
    assert any(isinstance(rule, NormRule) and rule.covers(_Named(3)) for rule in ng.rules.RULES)
    for layer in (twice, nn.LayerNorm(3, elementwise_affine=False), nn.BatchNorm1d(3, affine=False)):
        assert not any(isinstance(rule, NormRule) and rule.covers(layer) for rule in ng.rules.RULES)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", [kind for kind, (_, shape) in NORMS.items() if shape == (4,)])
def test_kronecker_of_one_datum_with_one_position_is_exact(kind: str, sharing: str) -> None:
    """Luk and Grosse (2018), section 3: for one datum and one root a and g are independent."""
    of = problem(kind)
    of = zoo.Problem(of.model, of.x[:1])
    metric = random_roots(of, 1)
    pb = pull(of, metric)
    G = ng.Kronecker(sharing=sharing).estimate(pb).dense()  # type: ignore[arg-type]
    R = oracle_rows(of, metric.s).flatten(0, 1)
    for layer in pb.layers:
        c, _, i = layer.shape
        if isinstance(layer.rule, NormRule):  # blocks of one entry of scale and shift
            index = layer.index.view(c, i)
            for group in index:
                close(G[group][:, group], R[:, group].T @ R[:, group])


class Launches(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        self.count += not views and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def test_layer_norms_cost_few_launches() -> None:
    """A transformer has many of them: the two factors of one take eight operations."""
    layer, x, keys = nn.LayerNorm(8), torch.randn(4, 3, 8), ("weight", "bias")
    rule = LayerNormRule()
    with Launches() as inputs:
        input_features(rule, layer, keys, Call((x,), {})).moment()
    with Launches() as outputs:
        cotangent_features(rule, layer, keys, x.unsqueeze(0)).moment()
    assert inputs.count == 6
    assert outputs.count == 2
