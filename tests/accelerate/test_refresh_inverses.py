"""Inverses that are made again: in parts, from a recording or not, and with what failed told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate import inverses, replay, roots
from natgrad.structures.kronecker import ProductInverse
from tests.accelerate.eager_graphs import EagerGraphs
from tests.accelerate.test_inverses import operator_of, scaled
from tests.pulled import close


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> EagerGraphs:
    """A processor that is taken for a GPU; only matrices below 4 rows are inverted from a graph."""
    graphs = EagerGraphs()
    monkeypatch.setattr(inverses, "_CAPTURED", 4)
    monkeypatch.setattr(replay, "CudaGraphs", lambda: graphs)
    return graphs


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "attention", "layer_norm", "tied_weights"])
def test_an_inverse_that_is_made_in_parts_is_the_inverse(name: str) -> None:
    _, G = operator_of(name)
    last = ng.Factored().init(G, 0.1)
    moved, solver = scaled(G, 1.01), ng.Factored()
    expected = ng.Factored().init(moved, 0.11).tensors()
    sizes = {f.shape[-1] for f in (*G.left, *G.right)}
    assert min(sizes) < 4 <= max(sizes)
    for key, found in solver.again(last, moved, 0.11).tensors().items():
        close(found, expected[key], 1e-12)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("layer", [0, 1])
def test_what_fails_in_either_part_is_told_and_keeps_its_inverse(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, G = operator_of("mlp_tanh")
    assert [f.shape[-1] < 4 for f in G.left] == [False, True]
    last = ng.Factored().init(G, 0.1)
    assert isinstance(last, ProductInverse)
    before = {key: t.clone() for key, t in last.tensors().items()}
    spoiled: list[Tensor] = list(scaled(G, 1.7).left)
    spoiled[layer] = -spoiled[layer]
    monkeypatch.setattr(inverses, "is_asynchronous", lambda device: True)
    again = ng.Factored().again(last, replace(G, left=tuple(spoiled)), 0.1)
    assert again is last
    assert again.failed()
    name = G.blocks[layer].names[0]
    assert torch.equal(again.tensors()[f"{name}/S"], before[f"{name}/S"])
    again.clear_failures()
    assert not again.failed()


def test_what_is_replayed_follows_the_factors_and_the_damping(graphs: EagerGraphs) -> None:
    _, G = operator_of("mlp_tanh")
    last = ng.Factored().init(G, 0.1)
    for turn in range(5):
        damping = 0.1 + 0.05 * turn
        torch._foreach_mul_([*G.left, *G.right], 1.3)
        ng.Factored().again(last, G, damping)
        expected = ng.Factored().init(G, damping).tensors()
        for key, found in last.tensors().items():
            close(found, expected[key], 1e-6)  # a graph has the damping in single precision
    assert graphs.log == ["capture", *4 * ["replay"]]


@pytest.mark.usefixtures("graphs")
def test_factors_that_lie_elsewhere_are_not_those_of_the_graph() -> None:
    _, G = operator_of("mlp_tanh")
    last = ng.Factored().init(G, 0.1)
    for _ in range(3):
        ng.Factored().again(last, G, 0.1)
    other = replace(G, left=tuple(2 * t for t in G.left), right=tuple(3 * t for t in G.right))
    again = ng.Factored().again(last, other, 0.1).tensors()
    for key, expected in ng.Factored().init(other, 0.1).tensors().items():
        close(again[key], expected, 1e-6)


@pytest.mark.parametrize("damping", [0.1, ng.Relative(0.1)])
@pytest.mark.parametrize("power", [1.0, 0.25])
@pytest.mark.parametrize("steps", [0, 4])
def test_diagonals_of_groups_are_damped_group_by_group(
    steps: int, power: float, damping: float | ng.Relative, graphs: EagerGraphs
) -> None:
    """λ_S = √λ/π and λ_A = π√λ, π² = mean A/mean S of the group; ε·mean S and ε·mean A over all groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(6, 4, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    pb = ng.pullback(model, torch.randn(8, 6, 3).double(), ng.Euclidean())
    G = ng.Kronecker(largest=1, power=power).estimate(pb)
    assert [tuple(t.shape) for t in (*G.left, *G.right)] == [(2, 2), (1, 3), (2, 4), (1, 13)]
    last = ng.Factored().init(G, damping)
    for _ in range(steps):
        torch._foreach_mul_([*G.left, *G.right], 1.3)
        ng.Factored().again(last, G, damping)
    assert graphs.log == (["capture", *3 * ["replay"]] if steps else [])
    found = last.tensors()
    for block, S, A in zip(G.blocks, G.left, G.right, strict=True):
        if isinstance(damping, ng.Relative):
            of_s, of_a = 0.1 * S.mean(), 0.1 * A.mean()
        else:
            π = (A.mean(1, keepdim=True) / S.mean(1, keepdim=True)).sqrt()
            of_s, of_a = damping**0.5 / π, damping**0.5 * π
        tol = 1e-6 if steps else 1e-12  # a graph has the damping in single precision
        close(found[f"{block.names[0]}/S"], (S + of_s) ** -power, tol)
        close(found[f"{block.names[0]}/A"], (A + of_a) ** -power, tol)


def test_an_inverse_that_is_made_anew_every_time_is_never_captured(graphs: EagerGraphs) -> None:
    """As that of several processes, which divide it among them: a capture that is replayed once is a loss."""
    _, G = operator_of("mlp_tanh")
    last = ng.Factored().init(G, 0.1)
    for _ in range(4):
        last = ng.Factored().init(G, 0.1, last.tensors())
    assert graphs.log == []
    for _ in range(2):
        ng.Factored().again(last, G, 0.1)
    assert graphs.log == ["capture", "replay", "replay"]


@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "layer_norm"])
def test_powers_that_a_gpu_makes_by_products_are_those_of_the_eigenvalues(
    name: str, power: float, graphs: EagerGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, as a graph, in padded memory."""
    monkeypatch.setattr(inverses, "_CAPTURED", 2048)
    _, G = operator_of(name)
    G = replace(G, power=power, left=_single(G.left), right=_single(G.right))
    solver, ε = ng.Factored(), ng.Relative(0.1)
    expected = solver.init(G, ε).tensors()
    for module in (inverses, roots):
        monkeypatch.setattr(module, "is_asynchronous", lambda device: True)
    inverse = solver.init(G, ε)
    for _ in range(3):
        assert solver.again(inverse, G, ε) is inverse
    assert graphs.log == ["capture", "replay", "replay"]
    assert isinstance(inverse, ProductInverse)
    assert not inverse.failed()
    found = inverse.tensors()
    assert found.keys() == expected.keys()
    for key, t in found.items():
        close(t, expected[key], 1e-3)


def _single(factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(factor.float() for factor in factors)
