"""Batches of ever new sizes: factors from graphs of padded rows are those of every batch by itself."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.accelerate import moments, replay
from natgrad.accelerate.replay import GraphCache
from natgrad.model import Model
from natgrad.pullbacks import coupling
from natgrad.pullbacks.pullback import Observer
from natgrad.rules import RULES
from natgrad.structures import layered
from tests.accelerate.eager_graphs import EagerGraphs
from tests.optim.tasks import seeded
from tests.pulled import Rooted, close, normal

WEIGHT = 0.25  # exact in single precision, as in a graph


class Attention(nn.Module):
    """Tokens and positions to logits [n t 5], by one block of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(40, 4, padding_idx=0)
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4, bias=False)
        self.rms, self.head = nn.RMSNorm(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[n t] to [n t 5]."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(self.rms(h))


class Fused(nn.Module):
    """torch's own attention, which hides its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 4] to [n t 3]."""
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class TimeFirst(nn.Module):
    """Examples on the second axis inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 3] to [n t 2]."""
        return self.second(self.first(x.transpose(0, 1)).tanh()).transpose(0, 1)


class Recurrent(nn.Module):
    """Layers with many uses."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 3] to [n 2]."""
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h = torch.tanh(self.input(step) + self.hidden(h))
        return self.head(h)


class Tied(nn.Module):
    """A table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """[n t] to [n t 7]."""
        return self.head(self.tokens(x).tanh())


def convolutions() -> nn.Module:
    """With strides, dilation, groups, reflection, and without a bias."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2, groups=2)),
        *(nn.PReLU(4), nn.Conv2d(4, 3, 2, dilation=2, bias=False), nn.BatchNorm2d(3)),
        *(nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), nn.InstanceNorm2d(3, affine=True), nn.Flatten()),
        nn.Linear(18, 2),
    )


def images(n: int) -> Tensor:
    """[n 2 11 9]."""
    return normal(n, 2, 11, 9, seed=n)


def sequences(n: int) -> Tensor:
    """[5 t 3]: the number of positions changes."""
    return normal(5, n, 3, seed=n)


def tokens(n: int) -> Tensor:
    """[3 t]."""
    return torch.randint(7, (3, n), generator=torch.Generator().manual_seed(n))


def varied(x: Tensor, step: int) -> Tensor:
    """Other inputs of the same shape, in memory of their own: what reads old ones has other moments."""
    return (1 + 0.2 * (step % 5)) * x if x.is_floating_point() else (x + step) % 7


def made(build: Callable[[], nn.Module], x: Tensor) -> nn.Module:
    """In evaluation mode, and with parameters that hide nothing."""
    model = build().double().eval()
    model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lambda n: normal(n, 3, seed=n)),
    "sequences": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), sequences),
    "convolutions": (convolutions, images),
    "channels last": (convolutions, lambda n: images(n).contiguous(memory_format=torch.channels_last)),
    "attention": (Attention, tokens),
    "fused attention": (Fused, lambda n: normal(n, 3, 4, seed=n)),
    "time first": (TimeFirst, lambda n: normal(n, 3, 3, seed=n)),
    "recurrent": (Recurrent, lambda n: normal(n, 4, 3, seed=n)),
    "tied": (Tied, tokens),
}


@pytest.mark.parametrize(("structure", "k", "gpu"), [
    (ng.Kronecker(), 1, False),
    (ng.Kronecker(), 2, True),
    (ng.Kronecker("reduce"), 2, False),
    (ng.Kronecker(sides="inputs"), 1, False),
])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_factors_of_changing_sizes_are_those_of_each_batch(
    name: str, structure: ng.Kronecker, k: int, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``gpu``: the averages are taken as there, many in one launch."""
    monkeypatch.setattr(layered, "is_asynchronous", lambda device: gpu)
    monkeypatch.setattr(replay, "_PATIENCE", 1)
    build, batch = CASES[name]
    model, cache = seeded(lambda: made(build, batch(20))), GraphCache[None](capture=EagerGraphs())

    def pull(n: int) -> ng.Pullback:
        x = batch(n)
        return ng.pullback(model, x, Rooted(normal(k, *model(x).shape, seed=n)))

    first = structure.estimate(pull(20))
    expected, found = first, first.lerp(first, 0.5)
    for n in (16, 17, 18, 19, 20, 30, 21, 20, 19, 29, 18, 17, 31, 22, 20, 19, 30, 18, 29):  # 30 makes the buffer grow
        pulled = pull(n)
        expected = expected.lerp(structure.estimate(pulled), WEIGHT)
        found = structure.absorb(replace(pulled, graph_cache=cache), found, WEIGHT)
        for key, t in expected.tensors().items():
            close(found.tensors()[key], t, 1e-7 if gpu else 1e-12)  # there, weight/count is in single precision
    if structure.sharing == "expand" and name != "tied":
        padded = [stats for key, stats in cache.stats.items() if "'padded'" in repr(key)]
        assert all(stats.replays >= 4 for stats in padded)
        assert padded


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.Kronecker("reduce")])
@pytest.mark.parametrize("name", CASES)
def test_factors_of_tensors_that_wander_are_those_of_each_batch(
    name: str, structure: ng.Kronecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two networks take turns: the sizes stay, and every batch lies elsewhere. Graphs read copies."""
    monkeypatch.setattr(replay, "_COPY_BYTES", 0)  # else small tensors are copied at once
    monkeypatch.setattr(replay, "_STRAYS", 2)
    build, batch = CASES[name]
    model, graphs = seeded(lambda: made(build, batch(20))), EagerGraphs()
    cache, alive = GraphCache[None](capture=graphs), list[ng.Pullback]()  # so that no other has its addresses

    def pull(seed: int) -> ng.Pullback:
        x = varied(batch(20), seed)
        alive.append(ng.pullback(model, x, Rooted(normal(1, *model(x).shape, seed=seed))))
        return alive[-1]

    first = structure.estimate(pull(0))
    expected, found = first, first.lerp(first, 0.5)
    for seed in range(1, 13):
        pulled = pull(seed)
        expected = expected.lerp(structure.estimate(pulled), WEIGHT)
        found = structure.absorb(replace(pulled, graph_cache=cache), found, WEIGHT)
        for key, t in expected.tensors().items():
            close(found.tensors()[key], t)
    # Two at addresses that come again by chance, and one of copies.
    assert graphs.log.count("capture") <= 3 * len(cache.stats)
    assert all(stats.replays >= 6 for stats in cache.stats.values())


def test_layers_that_no_zero_rows_can_be_appended_to_say_so() -> None:
    """A normalisation without ε would divide zero by zero; batch statistics and indices have no zero."""

    def paddable(layer: nn.Module, *keys: str) -> bool:
        return next(rule for rule in RULES if rule.covers(layer)).paddable(layer, keys or ("weight", "bias"))

    assert paddable(nn.LayerNorm(3))
    assert not paddable(nn.LayerNorm(3, eps=0.0))
    assert paddable(nn.RMSNorm(3), "weight")
    assert not paddable(nn.BatchNorm2d(3))
    assert not paddable(nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    assert not paddable(nn.Embedding(3, 3), "weight")
    assert not paddable(nn.Conv2d(3, 3, 1), "bias")


@pytest.mark.parametrize("name", ["mlp", "sequences", "convolutions", "attention", "fused attention"])
def test_terms_that_do_not_count_are_where_graphs_find_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose numbers are not looked at: two sizes, and other labels ignored each time."""
    structure, (build, batch) = ng.Kronecker(), CASES[name]
    model, stand_in = seeded(lambda: made(build, batch(20))), EagerGraphs()
    cache, metric = GraphCache[None](capture=stand_in), ng.metric_of(nn.CrossEntropyLoss(), axis=-1)

    def labelled(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x, draw = batch(n), torch.Generator().manual_seed(seed)
        labels = torch.randint(2, model(x).shape[:-1], generator=draw)
        return x, torch.where(torch.rand(labels.shape, generator=draw) < 0.4, -100, labels)

    x, labels = labelled(20, 0)
    observer = Observer(Model.of(model), metric, ng.pullback(model, x, metric, labels).layers, None, 2**30)
    first = structure.estimate(observer.checked(x, labels))
    expected, found = first, first.lerp(first, 0.5)
    for step in range(16):
        given = labelled((20, 20, 20, 12, 20, 12, 12, 12)[step % 8], step)
        expected = expected.lerp(structure.estimate(observer.checked(*given)), WEIGHT)
        with monkeypatch.context() as gpu:
            gpu.setattr(moments, "can_read", lambda t: False)
            for module in (coupling, layered):
                gpu.setattr(module, "is_asynchronous", lambda device: True)
            found = structure.absorb(replace(observer.checked(*given), graph_cache=cache), found, WEIGHT)
        for key, t in expected.tensors().items():
            close(found.tensors()[key], t, 1e-7)
    assert stand_in.log.count("replay") >= 12
