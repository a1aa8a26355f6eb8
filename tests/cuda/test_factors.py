"""On a GPU: the two factors of every layer are those of the CPU, without waiting."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate import replay
from natgrad.accelerate.autograd import vjp
from natgrad.accelerate.moments import column_moments, counted_moment, symmetric_product
from natgrad.accelerate.replay import GraphCache
from natgrad.rules import RULES, Call, Rule
from natgrad.rules.base import cotangent_features, input_features
from tests.cuda.emulator import EMULATED
from tests.cuda.waiting import no_waiting
from tests.optim.states import whole
from tests.optim.tasks import seeded
from tests.pulled import Rooted, close, normal
from tests.structures.test_changing_sizes import CASES, made, varied

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(4), (6, 4)),
    "rms": (lambda: nn.RMSNorm(4), (6, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 5, 3)),
    "batch": (lambda: nn.BatchNorm2d(4), (4, 5, 3)),
    "batch flat": (lambda: nn.BatchNorm1d(4), (4,)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 5, 3)),
}


def second_moment_of(rule: Rule, layer: nn.Module, keys: tuple[str, ...], what: Call | Tensor) -> Tensor:
    """Σ a aᵀ of a call, or Σ g gᵀ of cotangents of the output."""
    if isinstance(what, Tensor):
        return cotangent_features(rule, layer, keys, what).moment().total
    return input_features(rule, layer, keys, what).moment().total


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_have_the_factors_of_the_cpu_without_waiting(kind: str, training: bool) -> None:
    build, shape = NORMS[kind]
    layer, x, g = build().double(), normal(5, *shape), normal(2, 5, *shape, seed=1)
    rule, keys = next(rule for rule in RULES if rule.covers(layer)), tuple(dict(layer.named_parameters()))
    A, S = (
        second_moment_of(rule, layer, keys, Call((x,), {}, training)),
        second_moment_of(rule, layer, keys, g),
    )
    there, x, g = copy.deepcopy(layer).cuda(), x.cuda(), g.cuda()
    with no_waiting():
        mine = (
            second_moment_of(rule, there, keys, Call((x,), {}, training)),
            second_moment_of(rule, there, keys, g),
        )
    for t, expected in zip(mine, (A, S), strict=True):
        close(t.cpu(), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (0, 3), (4, 0), (5, 3), (1000, 384), (70000, 65)])
def test_sums_over_columns_are_those_of_the_cpu(shape: tuple[int, int], dtype: torch.dtype, transposed: bool) -> None:
    x = normal(*shape)
    there = x.to("cuda", dtype)
    with no_waiting():
        squares, sums = column_moments(there.mT.contiguous().mT if transposed else there)
    tol = 1e-12 if dtype == torch.float64 else 1e-5
    close(squares.cpu().double(), x.square().sum(0), tol)
    close(sums.cpu().double(), x.sum(0), tol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("i", [3, 384, pytest.param(2100, marks=pytest.mark.gpu("slow"))])
def test_rows_that_do_not_count_are_in_no_moment(i: int, ones: bool, dtype: torch.dtype) -> None:
    """Whatever they hold; with 2100 columns they are too many for a copy beside a column of ones."""
    x, counted = normal(8, 1000, i).to(dtype), normal(8, 1000) > 0
    alone = x[counted].double()
    alone = torch.cat([alone, alone.new_ones(len(alone), 1)], 1) if ones else alone
    there = x.masked_fill(~counted.unsqueeze(-1), torch.nan).cuda()
    mask = counted.cuda()
    with no_waiting():
        found, count = counted_moment(there, ones, mask)
    close(found.cpu().double() / len(alone), alone.T @ alone / len(alone), 1e-12 if dtype == torch.float64 else 1e-4)
    assert float(count) == len(alone)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of Triton, if it is there; without a GPU its interpreter runs them."""
    spec = find_spec("natgrad.accelerate.matrix_kernels")
    assert spec is not None
    assert spec.loader is not None
    if EMULATED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "d"), [(1, 1), (5, 3), (1000, 384), (333, 1537), (70, 4100)])
def test_rows_are_rounded_marked_and_kept_as_torch_would(m: int, d: int, dtype: torch.dtype, kernels: Any) -> None:
    x, kept = normal(m, d).float().cuda(), (normal(m) > 0).cuda()
    x[normal(m).cuda() > 0.5] = 0
    nonzero = torch.empty(m, dtype=torch.bool, device="cuda")
    # The interpreter cuts bfloat16 off.
    off = 2**-7 if EMULATED and dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(kernels.round_rows(x, dtype, nonzero), x.to(dtype), rtol=off, atol=0)
    assert torch.equal(nonzero, x.any(1))
    expected = torch.cat([x, torch.ones(m, 3, device="cuda")], 1).to(dtype) * kept.unsqueeze(1)
    found = kernels.keep_rows(x.masked_fill(~kept.unsqueeze(1), torch.nan), kept, dtype, d + 3)
    torch.testing.assert_close(found, expected, rtol=off, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_positions_that_no_cotangent_reaches_do_not_count(tied: bool) -> None:
    """Layers that read one tensor wait for each other; A of the others is made while the pass goes on."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.q, self.k = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.last = self.first if tied else nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            x = self.q(x).tanh() * self.k(x[:, :4].mean(1, keepdim=True)).tanh() + self.k(x)
            y = x[..., :5] if tied else x
            return self.last(y)[:, :4].flatten(1)  # the last two of six positions are padding

    torch.manual_seed(0)
    here, x = Tokens().double(), normal(7, 6, 5)
    there = copy.deepcopy(here).cuda()
    expected = ng.Kronecker().estimate(ng.pullback(here, x, ng.Euclidean()))
    found = ng.Kronecker().estimate(ng.pullback(there, x.cuda(), ng.Euclidean()))
    for one, other in zip((*found.left, *found.right), (*expected.left, *expected.right), strict=True):
        close(one.cpu(), other)


@pytest.mark.gpu("torch's thread for backward passes")
def test_cotangents_are_pulled_back_in_the_thread_that_asks_for_them() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    y, threads = 2 * x, list[int]()
    y.register_hook(lambda g: threads.append(threading.get_ident()))
    (g,) = vjp((3 * y,), [x], (torch.ones(1, 3, device="cuda"),))
    assert g is not None
    close(g.cpu(), torch.full((1, 3), 6.0))
    assert threads == [threading.get_ident()]
    torch.autograd.grad(y.sum(), x)  # a pass of the user's is made as ever
    assert len(threads) == 2
    assert threads[1] != threading.get_ident()


WIDE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(30, 7), (30,)),
    "linear of many positions": (lambda: nn.Linear(130, 9), (500, 130)),
    "linear without bias": (lambda: nn.Linear(1025, 3, bias=False), (300, 1025)),
    "patches": (lambda: nn.Conv2d(3, 5, 3, padding=1), (3, 6, 6)),
    "patches with a stride": (lambda: nn.Conv2d(8, 5, 3, stride=2, padding=1), (8, 40, 41)),
    "strips": (lambda: nn.Conv2d(32, 5, 3, padding=1), (32, 40, 36)),
    "strips of one dimension": (lambda: nn.Conv1d(128, 5, 5, padding=1, dilation=2), (128, 1001)),
    "strips without bias": (lambda: nn.Conv2d(32, 5, (3, 2), bias=False), (32, 40, 36)),
    "groups": (lambda: nn.Conv2d(8, 4, 3, padding=1, groups=2), (8, 17, 16)),
}


@pytest.mark.parametrize("kind", WIDE)
def test_linear_layers_and_convolutions_have_the_factors_of_the_cpu_without_waiting(kind: str) -> None:
    build, shape = WIDE[kind]
    layer, x = build().double(), normal(5, *shape)
    g = normal(2, *layer(x).shape, seed=1)
    rule = next(rule for rule in RULES if rule.covers(layer))
    there, on = copy.deepcopy(layer).cuda(), (x.cuda(), g.cuda())
    for keys in rule.layers(layer):
        expected = (
            second_moment_of(rule, layer, keys, Call((x,), {})),
            second_moment_of(rule, layer, keys, g),
        )
        with no_waiting():
            mine = (
                second_moment_of(rule, there, keys, Call((on[0],), {})),
                second_moment_of(rule, there, keys, on[1]),
            )
        for t, on_cpu in zip(mine, expected, strict=True):
            close(t.cpu(), on_cpu)
            close(t.mT, t)


@pytest.mark.parametrize("kind", WIDE)
def test_moments_can_be_recorded_and_replayed(kind: str) -> None:
    build, shape = WIDE[kind]
    layer, x = build().double().cuda(), normal(5, *shape).cuda()
    rule = next(rule for rule in RULES if rule.covers(layer))
    keys = rule.layers(layer)[0]
    expected = second_moment_of(rule, layer, keys, Call((2 * x,), {}))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine = second_moment_of(rule, layer, keys, Call((x,), {}))
    x.mul_(2)
    graph.replay()
    close(mine, expected)


def test_counts_of_an_embedding_are_those_of_the_cpu_without_waiting() -> None:
    layer = nn.Embedding(7, 3, padding_idx=2)
    tokens = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
    rule = next(rule for rule in RULES if rule.covers(layer))
    expected = second_moment_of(rule, layer, ("weight",), Call((tokens,), {}))
    there, tokens = copy.deepcopy(layer).cuda(), tokens.cuda()
    with no_waiting():
        mine = second_moment_of(rule, there, ("weight",), Call((tokens,), {}))
    assert torch.equal(mine.cpu(), expected)


class Everything(nn.Module):
    """Tokens, positions as an embedding and as a parameter, LayerScale, batch and layer normalisation, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.positions, self.gamma = nn.Parameter(torch.randn(1, 6, 4)), nn.Parameter(torch.randn(4))
        self.layer, self.batch, self.relu = nn.LayerNorm(4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n t] to [n t 3]."""
        t = tokens.shape[1]
        h = self.wte(tokens) + self.wpe(torch.arange(t, device=tokens.device)) + self.positions[:, :t]
        h = h + self.gamma * torch.tanh(self.layer(h))
        return self.head(self.relu(self.batch(h.transpose(1, 2))).transpose(1, 2))


@pytest.mark.parametrize("training", [False, True])
def test_an_estimate_on_a_gpu_is_that_of_the_cpu(training: bool) -> None:
    model = seeded(lambda: Everything().double().train(training))
    tokens = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        there = copy.deepcopy(model).to(device)
        opt = ng.NaturalGradient(there, ng.Euclidean(), structure=ng.Kronecker(strict=True), damping=0.1, lr=0.1)
        there(tokens.to(device)).square().sum().backward()
        assert opt.tracker.fresh is not None
        factors = {key: t.cpu() for key, t in opt.tracker.fresh.tensors().items()}
        opt.step()
        found.append(factors | {name: p.detach().cpu() for name, p in there.named_parameters()})
    for key, t in found[0].items():
        close(found[1][key], t, 1e-9)


@pytest.fixture
def bfloat16() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def _moments(layer: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Every A and S of a layer."""
    rule, found = next(rule for rule in RULES if rule.covers(layer)), []
    for keys in rule.layers(layer):
        found += [
            second_moment_of(rule, layer, keys, Call((x,), {})),
            second_moment_of(rule, layer, keys, g),
        ]
    return found


def _inputs(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer of ``WIDE``, its inputs and two cotangents, in double precision on the CPU."""
    build, shape = WIDE[kind]
    layer, x = build().double(), normal(5, *shape)
    return layer, x, normal(2, *layer(x).shape, seed=1)


@pytest.mark.gpu("rounding")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", WIDE)
def test_half_precision_is_multiplied_as_it_is_and_summed_in_single(kind: str, dtype: torch.dtype) -> None:
    layer, x, g = _inputs(kind)
    x, g = x.to(dtype), g.to(dtype)
    expected = _moments(layer, x.double(), g.double())
    mine = _moments(copy.deepcopy(layer).to("cuda", dtype), x.cuda(), g.cuda())
    for t, right in zip(mine, expected, strict=True):
        assert t.dtype == torch.float32
        # nothing is rounded before the sum, in which tensor cores truncate; rounded terms would be off by 2⁻⁹
        assert (t.cpu() - right).abs().max() < 1e-4 * right.abs().max()


# So large that it pays to round.
LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(1024, 3), (8192, 1024)),
    "linear of few examples": (lambda: nn.Linear(4096, 3), (512, 4096)),
    "linear without bias": (lambda: nn.Linear(1024, 3, bias=False), (8192, 1024)),
    "patches": (lambda: nn.Conv2d(512, 3, 3, padding=1), (407, 512, 1, 1)),
    "strips": (lambda: nn.Conv2d(64, 3, 3, padding=1), (26, 64, 36, 37)),
}


@pytest.mark.gpu("rounding")
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.usefixtures("bfloat16")
def test_single_precision_is_rounded_to_bfloat16_where_torch_was_told_that_it_may_be(kind: str) -> None:
    build, shape = LARGE[kind]
    layer, x = build().cuda(), normal(*shape).float().cuda()
    g = normal(1, *layer(x).shape, seed=1).float().cuda()
    for t, right in zip(_moments(layer, x, g), _moments(layer.double(), x.double(), g.double()), strict=True):
        assert t.dtype == torch.float32
        # 2⁻⁹ of every term at most, and of both of its factors
        assert (t - right).abs().max() < 2**-8 * right.abs().max()


@pytest.mark.gpu("rounding")
@pytest.mark.usefixtures("bfloat16")
def test_few_numbers_are_not_rounded_to_bfloat16() -> None:
    x = torch.full((1000, 700), 1.0 + 2**-9, device="cuda")  # which bfloat16 has not, but tf32
    for much, found in ((x, 1.0 + 2**-9), (torch.cat([x] * 20), 1.0)):
        assert float(symmetric_product(much)[0, 0] / much.shape[0]) == pytest.approx(found**2, rel=1e-3)


@pytest.mark.gpu("rounding")
@pytest.mark.usefixtures("bfloat16")
def test_a_recording_is_of_one_precision() -> None:
    layer, n = nn.Linear(1024, 8).cuda(), 8192
    opt = ng.KFAC(layer, ng.Fisher(ng.Categorical(axis=-1)), lr=0.0, metric_every=1, decay=0.0)
    x = torch.full((n, 1024), 1.0 + 2**-9, device="cuda")

    def moment() -> float:
        for _ in range(4):
            opt.zero_grad()
            nn.functional.cross_entropy(layer(x), torch.zeros(n, dtype=torch.long, device="cuda")).backward()
            opt.step()
        return next(
            float(A.flatten()[0]) for name, A in whole(opt)["natgrad"]["operator"].items() if name.endswith("/A")
        )

    assert moment() == pytest.approx(1.0, rel=1e-3)
    torch.set_float32_matmul_precision("highest")
    assert moment() == pytest.approx((1.0 + 2**-9) ** 2, rel=1e-3)


def _sizes(count: int) -> list[int]:
    """Between 16 and 31."""
    return torch.randint(16, 32, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def _padded_replays(cache: GraphCache[None]) -> int:
    """From graphs of padded rows."""
    return sum(stats.replays for key, stats in cache.stats.items() if "'padded'" in repr(key))


def _slow(names: Iterable[str], *quick: str) -> list[Any]:
    """The names as parameters; where a GPU is emulated only the ``quick`` ones are run."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.gpu("slow")) for name in names]


@pytest.mark.parametrize("name", _slow(CASES, "mlp", "time first", "tied"))
def test_factors_of_changing_sizes_are_those_of_each_batch_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_PATIENCE", 1)
    monkeypatch.setattr(replay, "_COPY_BYTES", 0)  # else small tensors are copied as they are
    build, batch = CASES[name]
    here, structure, cache = seeded(lambda: made(build, batch(20))), ng.Kronecker(), GraphCache[None]()
    there = copy.deepcopy(here).to("cuda", torch.float32)

    def pull(n: int, device: str, dtype: torch.dtype) -> ng.Pullback:
        model, x = (here, batch(n)) if device == "cpu" else (there, batch(n).cuda())
        s = normal(1, *here(batch(n)).shape, seed=n).to(device, dtype)
        return ng.pullback(model, x.to(dtype) if x.is_floating_point() else x, Rooted(s))

    expected = structure.estimate(pull(20, "cpu", torch.float64))
    first = structure.estimate(pull(20, "cuda", torch.float32))
    found = first.lerp(first, 0.5)
    for n in _sizes(60):
        expected = expected.lerp(structure.estimate(pull(n, "cpu", torch.float64)), 0.25)
        found = structure.absorb(replace(pull(n, "cuda", torch.float32), graph_cache=cache), found, 0.25)
    for key, t in expected.tensors().items():
        close(found.tensors()[key].cpu().double(), t, 1e-4)
    assert cache.possible([torch.ones(1, device="cuda")])  # no capture has failed
    assert name == "tied" or _padded_replays(cache) > 20


@pytest.mark.parametrize(
    "name", _slow(["mlp", "sequences", "convolutions", "channels last", "attention"], "mlp", "convolutions")
)
def test_factors_of_tensors_that_wander_are_those_of_each_batch_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes stay, and every batch lies elsewhere: a few graphs read copies."""
    monkeypatch.setattr(replay, "_COPY_BYTES", 0)  # else small tensors are copied at once
    build, batch = CASES[name]
    model, found = seeded(lambda: made(build, batch(20))), []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        there, alive = copy.deepcopy(model).to(device, dtype), list[Tensor]()
        opt = ng.KFAC(there, ng.Euclidean(), lr=0.0, metric_every=1, inverse_every=100)
        x = batch(20).to(device) if batch(20).dtype == torch.long else batch(20).to(device, dtype)
        for step in range(60):
            alive += [torch.empty(512 * (1 + step % 7), device=device)]  # moves what is allocated next
            opt.zero_grad()
            there(varied(x, step)).square().sum().backward()
            opt.step()
        found.append({key: t.cpu().double() for key, t in whole(opt)["natgrad"]["operator"].items()})
        stats = opt.tracker.observer.cache.graphs.stats.values()
        assert device == "cpu" or all(each.captures <= 4 for each in stats)
        assert device == "cpu" or sum(each.replays for each in stats) > 60
    for key, t in found[0].items():
        close(found[1][key], t, 1e-3)


@pytest.mark.parametrize("name", _slow(["mlp", "convolutions"], "mlp"))
def test_an_optimizer_with_batches_of_changing_size_has_the_factors_of_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_PATIENCE", 1)
    monkeypatch.setattr(replay, "_COPY_BYTES", 0)  # else small tensors are copied as they are
    build, batch = CASES[name]
    model, found = seeded(lambda: made(build, batch(20))), []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        there = copy.deepcopy(model).to(device, dtype)
        opt = ng.KFAC(there, ng.Euclidean(), lr=0.0, metric_every=1, inverse_every=100)
        for n in _sizes(60):
            opt.zero_grad()
            there(batch(n).to(device, dtype)).square().sum().backward()
            opt.step()
        found.append({key: t.cpu().double() for key, t in whole(opt)["natgrad"]["operator"].items()})
        assert device == "cpu" or _padded_replays(opt.tracker.observer.cache.graphs) > 20
    for key, t in found[0].items():
        close(found[1][key], t, 1e-4)
