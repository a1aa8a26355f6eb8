"""Convolutions of every kind: rules give per-example gradients, and moments are those of the patches."""

from itertools import combinations
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import Moment
from natgrad.rules.base import cotangent_features, input_features
from tests import zoo
from tests.pulled import check_rows, close, normal, pull

# torch's own: a padded copy is slower, not wrong
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

CONVS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "1d": (nn.Conv1d, {"kernel_size": 3}, (7,)),
    "1d strided": (nn.Conv1d, {"kernel_size": 3, "stride": 2, "padding": 1}, (7,)),
    "1d same even": (nn.Conv1d, {"kernel_size": 4, "padding": "same"}, (6,)),
    "2d": (nn.Conv2d, {"kernel_size": 3}, (5, 4)),
    "2d pointwise": (nn.Conv2d, {"kernel_size": 1}, (3, 3)),
    "2d pointwise strided": (nn.Conv2d, {"kernel_size": 1, "stride": 2}, (5, 4)),
    "2d padded": (nn.Conv2d, {"kernel_size": 3, "padding": 1}, (4, 5)),
    "2d valid": (nn.Conv2d, {"kernel_size": 2, "padding": "valid"}, (4, 3)),
    "2d same": (nn.Conv2d, {"kernel_size": (3, 2), "padding": "same"}, (4, 5)),
    "2d same dilated": (nn.Conv2d, {"kernel_size": 3, "padding": "same", "dilation": 2}, (5, 5)),
    "2d strided": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "stride": 2}, (6, 5)),
    "2d uneven": (nn.Conv2d, {"kernel_size": (2, 3), "padding": (1, 2), "stride": (1, 2)}, (4, 5)),
    "2d dilated": (nn.Conv2d, {"kernel_size": 3, "dilation": (1, 2)}, (5, 6)),
    "2d circular": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, (4, 4)),
    "2d reflect": (nn.Conv2d, {"kernel_size": 3, "padding": (1, 2), "padding_mode": "reflect"}, (4, 4)),
    "2d replicate": (nn.Conv2d, {"kernel_size": 3, "padding": 2, "padding_mode": "replicate"}, (3, 4)),
    "2d same circular": (nn.Conv2d, {"kernel_size": 2, "padding": "same", "padding_mode": "circular"}, (3, 4)),
    "2d grouped": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": 2}, (4, 4)),
    "2d depthwise": (nn.Conv2d, {"kernel_size": 3, "groups": 4, "stride": 2}, (5, 5)),
    "2d padded from nothing": (nn.Conv2d, {"kernel_size": (1, 3), "padding": 1, "stride": (3, 1)}, (1, 4)),
    "2d large kernel": (nn.Conv2d, {"kernel_size": 5, "padding": 2}, (6, 6)),
    "3d": (nn.Conv3d, {"kernel_size": 2, "padding": 1, "stride": (1, 2, 1)}, (2, 3, 3)),
    "transposed 1d": (nn.ConvTranspose1d, {"kernel_size": 3, "stride": 2}, (4,)),
    "transposed 2d": (nn.ConvTranspose2d, {"kernel_size": 3}, (3, 2)),
    "transposed 2d strided": (
        nn.ConvTranspose2d,
        {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
        (3, 2),
    ),
    "transposed 2d grouped": (nn.ConvTranspose2d, {"kernel_size": 2, "groups": 2, "stride": (2, 1)}, (2, 3)),
    "transposed 2d sparse": (nn.ConvTranspose2d, {"kernel_size": (1, 2), "stride": (2, 3)}, (3, 2)),
    "transposed 2d dilated": (nn.ConvTranspose2d, {"kernel_size": 2, "dilation": 2, "padding": 1}, (3, 3)),
    "transposed 1d dilated padded": (nn.ConvTranspose1d, {"kernel_size": 2, "dilation": 2, "output_padding": 1}, (5,)),
    "transposed 2d dilated padded": (
        nn.ConvTranspose2d,
        {"kernel_size": 2, "stride": (2, 1), "dilation": (4, 3), "padding": (1, 2), "output_padding": (3, 2)},
        (3, 2),
    ),
    "transposed 3d": (nn.ConvTranspose3d, {"kernel_size": 2, "stride": 2}, (2, 1, 2)),
}
FROZEN = [frozen for size in range(2) for frozen in combinations(("0.weight", "0.bias"), size)]


def problem(kind: str, frozen: tuple[str, ...] = (), bias: bool = True) -> zoo.Problem:
    """The convolution, tanh, and another one after it; four channels in, four out, three examples."""
    layer, options, sizes = CONVS[kind]

    def build() -> zoo.Problem:
        model = nn.Sequential(layer(4, 4, bias=bias, **options), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
        x = torch.randn(3, 4, *sizes, dtype=torch.float64)
        model.double()(x)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        return zoo.Problem(model, x)

    return zoo.Case(kind, build).make()


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: " ".join(frozen) or "all")
@pytest.mark.parametrize("kind", CONVS)
def test_the_gradient_of_an_example_is_the_sum_over_positions(kind: str, frozen: tuple[str, ...]) -> None:
    of = problem(kind, frozen)
    check_rows(of)


@pytest.mark.parametrize("kind", CONVS)
def test_without_bias_there_is_no_homogeneous_coordinate(kind: str) -> None:
    of = problem(kind, bias=False)
    check_rows(of)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CONVS)
def test_moments_are_those_of_inputs_and_cotangents(kind: str, dtype: torch.dtype) -> None:
    of = problem(kind)
    assert isinstance(of.x, Tensor)
    pb = ng.pullback(of.module.to(dtype=dtype), of.x.to(dtype), ng.Euclidean())
    tape = pb.tape
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for block in pb.layers:
        (use,) = tape.of(block)
        rule, keys = use.rule, block.keys
        a = input_features(rule, use.module, keys, use.call).dense().double()
        moment = input_features(rule, use.module, keys, use.call).moment()
        _alike(moment, a, tolerance)
        mean = input_features(rule, use.module, keys, use.call).reduced("mean").dense().squeeze(1).double()
        close(mean, a.mean(1), tolerance)
        g = normal(2, *use.shape).to(dtype)
        found = cotangent_features(rule, use.module, keys, g).moment().total
        assert found.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        canonical = cotangent_features(rule, use.module, keys, g).dense().double()
        close(found.double(), torch.einsum("knrco,knrcp->cop", canonical, canonical), tolerance)


def test_a_transposed_convolution_after_another_layer_has_factors_under_autocast() -> None:
    """Its input is in half precision there, its weight and bias are not."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ConvTranspose2d(2, 3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        pb = ng.pullback(model, normal(5, 1, 3, 3).float(), ng.Euclidean())
        factors = ng.Kronecker(strict=True).estimate(pb).tensors()
    assert bool((factors["1.bias/A"] == 1.0).all())
    assert all(t.dtype == torch.float32 and bool(torch.isfinite(t).all()) for t in factors.values())


TOPS: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "pool": nn.MaxPool2d((1, 3)),
    "crop": nn.ZeroPad2d((0, -2, -1, 0)),
}


@pytest.mark.parametrize("structure", [ng.Kronecker(bias="separate"), ng.EigenKronecker(), ng.Kronecker("reduce")])
@pytest.mark.parametrize("top", TOPS)
def test_all_pixels_of_a_transposed_convolution_count(top: str, structure: ng.Kronecker | ng.EigenKronecker) -> None:
    """A = E[a aᵀ] over the pixels of its input, S = E Σ g gᵀ over their patches of the output; their mean and sum."""
    conv = nn.ConvTranspose2d(2, 3, (1, 2), stride=(2, 3)).double()
    model, x = nn.Sequential(conv, TOPS[top], nn.Flatten()), normal(4, 2, 3, 4)
    z = conv(x).detach().requires_grad_()
    y = nn.Sequential(*list(model)[1:])(z)
    s = torch.eye(y.shape[1]).double()
    g = torch.stack([torch.autograd.grad(y, z, row.expand_as(y), retain_graph=True)[0] for row in s])  # [k n o *pixels]
    a, patches = x.flatten(2), nn.functional.unfold(g.flatten(0, 1), (1, 2), stride=(2, 3))  # [n i r], [kn o·kernel r]
    if structure.sharing == "reduce":
        a, patches = a.mean(2, keepdim=True), patches.sum(2, keepdim=True)
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean())).tensors()
    close(G["0.weight/A"][0], torch.einsum("nir,njr->ij", a, a) / (a.shape[0] * a.shape[2]))
    close(G["0.weight/S"][0], torch.einsum("mor,mpr->op", patches, patches) / len(x))
    close(G["0.bias/S"].flatten(), g.flatten(3).sum(3).square().sum((0, 1)) / len(x))  # every entry by itself


@final
class Sized(nn.Module):
    """A transposed convolution that is called with the size of its output, as a keyword or not."""

    def __init__(self, named: bool, **options: Any) -> None:
        super().__init__()
        self.layer, self.named = nn.ConvTranspose1d(2, 3, kernel_size=2, **options), named

    def forward(self, x: Tensor) -> Tensor:
        sizes = [10]
        return (self.layer(x, output_size=sizes) if self.named else self.layer(x, sizes)).tanh().flatten(1)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({"stride": 2}, 5),
        ({"stride": 3, "dilation": 3, "padding": 1, "output_padding": 1}, 3),
        ({"dilation": 2, "output_padding": 1}, 8),  # ten outputs are also those of seven inputs
        ({"dilation": 7, "output_padding": 6}, 3),
    ],
)
def test_a_call_with_the_size_of_the_output_has_its_own_output_padding(
    options: dict[str, int], inputs: int, named: bool
) -> None:
    of = zoo.Case("sized", lambda: zoo.Problem(Sized(named, **options).double(), normal(3, 2, inputs))).make()
    check_rows(of)


def _alike(moment: Moment, a: Tensor, tolerance: float) -> None:
    assert moment.count == a.shape[0] * a.shape[1]
    close(moment.total.double(), torch.einsum("nrci,nrcj->cij", a, a), tolerance)


@pytest.mark.parametrize("kind", ["2d padded", "2d grouped", "2d strided", "transposed 2d strided"])
def test_memory_format_does_not_matter(kind: str) -> None:
    of = problem(kind)
    expected = ng.Kronecker().estimate(pull(of, ng.Euclidean())).dense()
    assert isinstance(of.x, Tensor)
    of.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    last = zoo.Problem(of.model, of.x.to(memory_format=torch.channels_last))
    close(ng.Kronecker().estimate(pull(last, ng.Euclidean())).dense(), expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_convolution_with_one_position_is_a_linear_layer(sharing: Any) -> None:
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(2, 3, 3).double(), nn.Linear(18, 3).double()
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
    x = normal(5, 2, 3, 3)
    structure = ng.Kronecker(sharing=sharing)
    G = structure.estimate(ng.pullback(nn.Sequential(conv, nn.Flatten()), x, ng.Euclidean()))
    H = structure.estimate(ng.pullback(linear, x.flatten(1), ng.Euclidean()))
    close(G.dense(), H.dense())
