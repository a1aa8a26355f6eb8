"""Inverses that are made again: in parts, from a recording or not, and with what failed told."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.accelerate import inverses as inverting
from natgrad.accelerate import inverses as remade
from natgrad.accelerate.inverses import Task, inverse
from natgrad.accelerate.replay import Recordings, _Recording
from natgrad.structures.kronecker import ProductInverse
from tests.operators.test_inverting import operator_of, scaled
from tests.pulled import close


@pytest.fixture
def _pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is taken for a GPU on which nothing can be recorded; only matrices below 4 rows would be."""
    monkeypatch.setattr(remade, "recordable", lambda like: True)
    monkeypatch.setattr(remade, "_RECORDED", 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Recordings, "_record", lambda *args: None)


NEWTONS = {"Cholesky": None, "Newton": ng.Newton(smallest=1, steps=9), "some by Newton": ng.Newton(2, 0.05, 4, 5)}


@pytest.mark.usefixtures("_pretending")
@pytest.mark.parametrize("newton", NEWTONS.values(), ids=NEWTONS)
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "attention", "layer_norm", "tied_weights"])
def test_an_inverse_that_is_made_in_parts_is_the_inverse(name: str, newton: ng.Newton | None) -> None:
    _, G = operator_of(name)
    last = ng.Factored().init(G, 0.1)
    moved, solver = scaled(G, 1.01), ng.Factored(newton)
    expected = ng.Factored().init(moved, 0.11).tensors()
    sizes = {f.shape[-1] for f in (*G.left, *G.right)}
    assert min(sizes) < 4 <= max(sizes)
    for key, found in solver.again(last, moved, 0.11).tensors().items():
        close(found, expected[key], 1e-4 if newton is not None else 1e-12)


@pytest.mark.usefixtures("_pretending")
@pytest.mark.parametrize("layer", [0, 1])
def test_what_fails_in_either_part_is_told_and_keeps_its_inverse(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, G = operator_of("mlp_tanh")
    assert [f.shape[-1] < 4 for f in G.left] == [False, True]
    last = ng.Factored().init(G, 0.1)
    assert isinstance(last, ProductInverse)
    before = {key: t.clone() for key, t in last.tensors().items()}
    spoiled: list[Tensor] = list(scaled(G, 1.7).left)
    spoiled[layer] = -spoiled[layer]
    monkeypatch.setattr(remade, "invert", _flagged)
    again = ng.Factored().again(last, replace(G, left=tuple(spoiled)), 0.1)
    assert again is last
    assert again.failed()
    name = G.blocks[layer].names[0]
    assert torch.equal(again.tensors()[f"{name}/S"], before[f"{name}/S"])
    again.forgive()
    assert not again.failed()


def _flagged(tasks: list[Task], warm: bool, newton: ng.Newton | None = None) -> list[Tensor]:
    """As on a GPU: nobody waits, and what comes back is how many could not be inverted."""
    flags = []
    for task in tasks:
        found, good = inverse(inverting._damped([task]))
        inverting._write([task], found, good, warm)
        flags.append((~good).sum())
    return [torch.stack(flags).sum().float()] if flags else []


@final
@dataclass(frozen=True)
class _Again:
    """A recording that is none: the computation itself."""

    compute: Callable[[], None]

    def replay(self) -> None:
        self.compute()


def _recorded(
    self: Recordings, key: Any, sources: Sequence[Tensor], compute: Callable[..., None], copied: bool
) -> _Recording:
    own = [t.clone() for t in sources] if copied else list(sources)
    weight = self._weight = torch.ones(()) if self._weight is None else self._weight
    graph: Any = _Again(lambda: compute(own, weight))
    self._kept[key] = _Recording(graph, own if copied else [])
    return self._kept[key]


@pytest.mark.usefixtures("_pretending")
@pytest.mark.parametrize("few", [0, 2**22])
def test_what_is_replayed_follows_the_factors_and_the_damping(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the factors are copied to where a recording reads them, or known by their addresses."""
    monkeypatch.setattr(Recordings, "_record", _recorded)
    monkeypatch.setattr(importlib.import_module("natgrad.accelerate.replay"), "_SMALL", few)
    _, G = operator_of("mlp_tanh")
    last = ng.Factored().init(G, 0.1)
    assert isinstance(last, ProductInverse)
    for turn in range(5):
        damping = 0.1 + 0.05 * turn
        torch._foreach_mul_([*G.left, *G.right], 1.3)
        ng.Factored().again(last, G, damping)
        expected = ng.Factored().init(G, damping).tensors()
        for key, found in last.tensors().items():
            close(found, expected[key], 1e-6)  # a recording has the damping in single precision
    (account,) = last.remade._recordings._accounts.values()
    assert (account.made, account.replayed) == (1, 4)


@pytest.mark.usefixtures("_pretending")
def test_an_inverse_that_is_made_anew_every_time_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of several processes, which divide it among them: a recording that is replayed once is a loss."""
    made: list[Any] = []
    monkeypatch.setattr(Recordings, "_record", lambda *args: made.append(args))
    _, G = operator_of("mlp_tanh")
    last = ng.Factored().init(G, 0.1)
    for _ in range(4):
        last = ng.Factored().init(G, 0.1, last.tensors())
    assert made == []
    ng.Factored().again(last, G, 0.1)
    assert len(made) == 1
