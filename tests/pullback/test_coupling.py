"""Factors of coupled examples: mixing inputs before taking moments equals mixing their patches."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.output.metric import Coupling
from natgrad.pullbacks.coupling import Mixing, root_of, traces
from natgrad.pullbacks.example_grads import ExampleGrads
from natgrad.pullbacks.layer import Sharing
from natgrad.rules.features import DenseFeatures, mix_examples
from tests.optim.tasks import seeded
from tests.pulled import Rooted, close, normal

N = 6
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "tokens": (lambda: nn.Linear(3, 2), (5, 3)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 5)),
    "conv, one axis": (lambda: nn.Conv1d(2, 3, 2), (2, 5)),
    "conv, three axes": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "conv, stride and dilation": (lambda: nn.Conv2d(2, 3, (3, 2), (2, 3), (1, 0), (1, 2)), (2, 7, 8)),
    "conv, same": (lambda: nn.Conv2d(2, 3, (1, 5), padding="same"), (2, 6, 5)),
    "conv, circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 6, 5)),
    "conv, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "conv, one pixel": (lambda: nn.Conv2d(8, 9, 1), (8, 1, 1)),
    "many channels": (lambda: nn.Conv2d(24, 40, 3, padding=1), (24, 2, 2)),
}
ENTRIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(3).eval(), (3, 4, 5)),
    "batch norm, one position": (lambda: nn.BatchNorm1d(3).eval(), (3,)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "RMS norm": (lambda: nn.RMSNorm((2, 3)), (5, 2, 3)),
}
SUBSETS: dict[str, tuple[str, ...]] = {"both": (), "weight": ("bias",), "bias": ("weight",)}


def coupled_pullback(name: str, frozen: tuple[str, ...], dtype: torch.dtype) -> tuple[ng.Pullback, Mixing]:
    """A layer at N examples that are coupled by a random C."""
    make, shape = (LAYERS | ENTRIES)[name]
    layer = seeded(make).to(dtype)
    for key in frozen:
        layer.get_parameter(key).requires_grad_(False)
    mix = torch.eye(N, dtype=torch.float64) + 0.3 * normal(N, N, seed=5)
    pb = ng.pullback(layer, normal(N, *shape).to(dtype), ng.Sampled(ng.Euclidean(), 2), generator=torch.Generator())
    pb = replace(pb, coupled=Coupling(mix @ mix.T))
    return pb, Mixing.of(mix @ mix.T, root_of(mix @ mix.T).to(dtype), dtype, pb.tape.memo)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("name", LAYERS | ENTRIES)
def test_factors_are_sums_over_pairs_of_examples_with_the_trace_of_the_rows(
    name: str, subset: str, dtype: torch.dtype
) -> None:
    """A = Σ C a aᵀ/(N R) and S = κ Σ C g gᵀ, from the patches and the rows themselves."""
    if name == "RMS norm" and subset != "both":
        pytest.skip("it has no bias to freeze, and none to be alone")
    pb, coupled = coupled_pullback(name, SUBSETS[subset], dtype)
    (block,), tape = pb.layers, pb.tape
    g = tape.cotangents(pb.root / math.sqrt(N))
    S, moment = coupled.factors(tape.inputs(block), g.of(tape, block), block, Sharing())
    A = moment.mean()
    a, h, C = tape.inputs(block).dense().double(), g.of(tape, block).dense().double(), coupled.C
    mean = torch.einsum("nm,nrci,mrcj->cij", C, a, a) / (N * a.shape[1])
    total = torch.einsum("nm,knrco,kmrcp->cop", C, h, h)
    R = torch.einsum("knrco,nrci->kncoi", h, a)
    of = torch.einsum("nm,kncoi,kmcoi->c", C, R, R) / R.square().sum((0, 1, 3, 4))
    plain = h.square().sum((0, 1, 2, 4)) * a.square().sum((0, 1, 3)) / (N * a.shape[1])
    now = total.diagonal(dim1=1, dim2=2).sum(1) * mean.diagonal(dim1=1, dim2=2).sum(1)
    tol = 1e-10 if dtype == torch.float64 else 2e-5
    close(A.double(), mean, tol)
    close(S.double(), (of * plain / now).view(-1, 1, 1) * total, tol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_examples_that_nothing_couples_have_the_factors_of_no_coupling_under_autocast(dtype: torch.dtype) -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)]
    model, x, s = seeded(lambda: nn.Sequential(*layers)), normal(N, 3, 6, 6).float(), normal(1, N, 4, seed=1).float()
    with torch.autocast("cpu", dtype=dtype):
        pb = ng.pullback(model, x, Rooted(s))
        plain, coupled = (
            ng.Kronecker().estimate(p) for p in (pb, replace(pb, coupled=Coupling(torch.eye(N).double())))
        )
    for name, factor in plain.tensors().items():
        torch.testing.assert_close(coupled.tensors()[name], factor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("r", [1, 3, 40])
def test_traces_are_those_of_the_rows(r: int) -> None:
    a, g = normal(N, r, 1, 30), normal(2, N, r, 1, 25, seed=1)
    mix = normal(N, N, seed=2)
    R = ExampleGrads(a, g).rows()
    plain, coupled = traces(DenseFeatures(a), g, mix @ mix.T, mix)
    close(plain, R.square().sum().view(1))
    close(coupled, torch.einsum("nm,knp->kmp", mix, R).square().sum().view(1))


@pytest.mark.parametrize("C", [torch.eye(4).double() - 0.25, torch.zeros(3, 3).double(), torch.eye(2).double()])
def test_a_coupling_has_a_root_whether_it_is_regular_or_not(C: Tensor) -> None:
    L = root_of(C)
    close(L @ L.T, C, 1e-14)


def test_mixed_inputs_keep_the_memory_format() -> None:
    x, mix = normal(1, N, 3, 4, 5), normal(N, N, seed=1)
    lasting = x[0].contiguous(memory_format=torch.channels_last)[None]
    got = mix_examples(lasting, mix, 1)
    close(got, mix_examples(x, mix, 1), 1e-14)
    assert got[0].is_contiguous(memory_format=torch.channels_last)


def test_a_constant_factor_that_a_centring_takes_away_keeps_its_trace() -> None:
    """Equal inputs, centred, are zero: A is a multiple of 1 then, and S ⊗ A has the trace of the centred rows."""
    layer = seeded(lambda: nn.Linear(3, 2).double())
    C = torch.eye(N, dtype=torch.float64) - 1 / N
    metric: Any = ng.Sampled(ng.Euclidean(), 1)
    pb = replace(ng.pullback(layer, torch.ones(N, 3).double(), metric), coupled=Coupling(C))
    G = ng.Kronecker().estimate(pb)
    close(G.trace(), ng.Dense().estimate(pb).trace(), 1e-10)


@pytest.mark.parametrize("subset", ["both", "weight", "bias"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("linear", "conv, groups", "conv, one pixel")])
def test_projections_of_inputs_need_no_patches(name: str, subset: str) -> None:
    pb, _ = coupled_pullback(name, SUBSETS[subset], torch.float64)
    (block,), tape = pb.layers, pb.tape
    w = normal(block.shape[2], 4, seed=3)
    close(tape.inputs(block).project(w), tape.inputs(block).dense()[:, :, 0] @ w)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of layers of any size are estimated from random signs."""
    module = importlib.import_module("natgrad.pullbacks.coupling")
    monkeypatch.setattr(module, "PROBED", 0)
    monkeypatch.setattr(module, "pairs_pay", lambda *sizes: False)


@pytest.mark.parametrize("name", ["tokens", "conv", "many channels"])
def test_estimated_traces_are_right_on_average_and_exact_at_no_coupling(
    name: str, request: pytest.FixtureRequest
) -> None:
    """E (uᵀRw)² = ‖R‖²: over 40 sets of signs the mean is within three of its standard errors; at C = 1 κ is 1."""
    pb, coupled = coupled_pullback(name, (), torch.float64)
    (block,), tape = pb.layers, pb.tape
    g = tape.cotangents(pb.root / math.sqrt(N))
    a, h = tape.inputs(block), g.of(tape, block)
    exact = torch.cat(coupled.traces(a, h))
    request.getfixturevalue("probed")
    found = []
    for seed in range(40):
        signs: dict[Hashable, Tensor] = {
            ("signs", size, at, torch.float64): normal(size, 64, seed=1000 * seed + at).sign()
            for size, at in ((block.shape[1], 1), (block.shape[2], 2))
        }
        found.append(torch.cat(replace(coupled, memo=signs).traces(a, h)))
    drawn = torch.stack(found)
    assert bool(((drawn.mean(0) - exact).abs() <= 3 * drawn.std(0) / 40**0.5).all())
    eye = torch.eye(N, dtype=torch.float64)
    S, A = Mixing.of(eye, eye, eye.dtype, coupled.memo).factors(a, h, block, Sharing())
    close(S, h.moment().total)
    close(A.mean(), a.moment().mean())


def test_captured_kernels_know_where_the_signs_lie_that_they_read(probed: None) -> None:
    pb, coupled = coupled_pullback("tokens", (), torch.float64)
    (block,), tape = pb.layers, pb.tape
    a, h = tape.inputs(block), tape.cotangents(pb.root).of(tape, block)
    here, there = replace(coupled, memo={}), replace(coupled, memo={})
    assert here.address_key == there.address_key
    first = here.traces(a, h)
    assert here.address_key != there.address_key
    assert torch.equal(torch.cat(there.traces(a, h)), torch.cat(first))
    assert here.address_key != there.address_key  # the same numbers, elsewhere
