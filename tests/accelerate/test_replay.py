"""The cache of captured graphs, with a stand-in for a GPU: what is captured, when, and what is evicted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.accelerate import replay
from natgrad.accelerate.replay import CudaGraphs, GraphCache, Scalar, capturing
from tests.accelerate.eager_graphs import EagerGraphs


@dataclass
class _Stream:
    device: torch.device
    waited: list[Any] = field(default_factory=list)

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


@dataclass
class _Graph:
    ended: bool = False

    def capture_begin(self, **_: Any) -> None:
        pass

    def capture_end(self) -> None:
        self.ended = True


@dataclass(frozen=True)
class _Shared:
    """torch.cuda.graph, whose stream was created on the device of the first capture."""

    graph: Any
    capture_stream = _Stream(torch.device("cuda", 0))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams on which kernels are launched."""
    used: list[Any] = []

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph", _Shared)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(torch.device(device)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream(device))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return used


@pytest.mark.parametrize("index", [0, 1])
def test_kernels_are_captured_on_a_stream_of_their_device(index: int, streams: list[Any]) -> None:
    graph, device = _Graph(), torch.device("cuda", index)
    with capturing(graph, device):  # type: ignore[arg-type]
        assert streams
    assert graph.ended
    (stream,) = streams
    assert stream.device == device
    assert (stream is _Shared.capture_stream) == (index == 0)  # one for all, where it can be
    assert all(other.device == device for other in stream.waited)


@pytest.mark.usefixtures("streams")
def test_a_capture_that_raises_is_ended() -> None:
    graph = _Graph()
    with pytest.raises(RuntimeError, match="waits"), capturing(graph, torch.device("cuda", 0)):  # type: ignore[arg-type]
        raise RuntimeError("it waits for the device")
    assert graph.ended


def test_nothing_is_captured_on_a_processor() -> None:
    assert not CudaGraphs().possible([torch.zeros(2)])
    assert not CudaGraphs().possible([])


class _Counted:
    """A cache, and a computation that logs where it runs."""

    def __init__(self, **options: Any) -> None:
        self.graphs = EagerGraphs()
        self.cache = GraphCache[None](capture=self.graphs, **options)
        self.log = self.graphs.log

    def run(self, pattern: Tensor, key: object = "S") -> None:
        self.cache.run(lambda *_: self.log.append("compute"), [pattern], [0.5], key)

    @property
    def short(self) -> list[str]:
        """A replay computes as well."""
        return " ".join(self.log).replace("replay compute", "replay").split()


def _patterns(count: int) -> list[Tensor]:
    """Of addresses; each is too large to be copied."""
    whole = torch.zeros(2**21 + count)
    return [whole[at : at + 2**21] for at in range(count)]


def test_a_pattern_that_is_seen_twice_is_captured_and_replayed() -> None:
    counted = _Counted()
    for pattern in _patterns(3):
        for _ in range(6):
            counted.run(pattern)
    assert counted.short == 3 * ["compute", "capture", *5 * ["replay"]]


def test_captures_that_do_not_pay_off_are_not_repeated() -> None:
    """Where addresses never come again, they would cost more than they save: after a while one graph reads copies."""
    counted = _Counted()
    for pattern in _patterns(8):
        for _ in range(2):
            counted.run(pattern)
    assert counted.short == ["compute", "capture", "replay", *11 * ["compute"], "capture", *3 * ["replay"]]


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_loop_of_many_address_patterns_is_replayed_on_copies(channels_last: bool) -> None:
    """Another network that takes turns with it leaves it ever other memory, of the same sizes."""
    graphs, total, expected = EagerGraphs(), torch.zeros(3), torch.zeros(3)
    cache = GraphCache[None](capture=graphs)
    whole = torch.randn(40, 3, 600, 600).contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    weights = torch.rand(30)

    def add(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
        assert tensors[0].is_contiguous(memory_format=torch.channels_last) == channels_last
        total.add_(scalars[0] * tensors[0].mean((0, 2, 3)) + tensors[1].sum())

    for at, weight in enumerate(weights.tolist()):
        x, y = whole[at : at + 2], torch.full((2, at % 2 + 1), float(at))
        expected += weight * x.mean((0, 2, 3)) + y.sum()
        cache.run(add, [x, y], [weight], "mean")
    torch.testing.assert_close(total, expected)
    (stats,) = cache.stats.values()
    assert stats.captures <= 4
    assert stats.replays >= 14
    assert graphs.log[-2:] == ["replay"] * 2


def test_a_loop_that_settles_elsewhere_is_captured_there_too() -> None:
    """Though the first capture did not pay off: after as many runs as another one costs."""
    counted, (beginning, settled) = _Counted(), _patterns(2)
    for pattern in (beginning, beginning, *6 * [settled]):
        counted.run(pattern)
    assert counted.short == ["compute", "capture", "replay", *4 * ["compute"], "capture", *2 * ["replay"]]


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("after", ["highest", "high", "medium"])
def test_what_was_captured_in_one_precision_is_not_replayed_in_another(before: str, after: str) -> None:
    precision = torch.get_float32_matmul_precision()
    counted, (pattern,) = _Counted(), _patterns(1)
    try:
        for setting in (before, before, after):
            torch.set_float32_matmul_precision(setting)
            counted.run(pattern)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert counted.short == ["compute", "capture", "replay", "replay" if after == before else "compute"]


@pytest.mark.parametrize("capacity", [1, 64])
def test_the_least_recently_used_graph_is_evicted(capacity: int) -> None:
    counted, (pattern,) = _Counted(capacity=capacity), _patterns(1)
    for key in range(capacity + 1):
        for _ in range(6):
            counted.run(pattern, key)
    counted.log.clear()
    counted.run(pattern, capacity)
    counted.run(pattern, 0)
    assert counted.short == ["replay", "compute"]


def test_a_graph_outlives_computations_that_come_once() -> None:
    counted, (pattern,) = _Counted(), _patterns(1)
    for _ in range(3):
        counted.run(pattern)
    for n in range(100):
        counted.run(torch.zeros(3), n)
    counted.log.clear()
    counted.run(pattern)
    assert counted.short == ["replay"]


class _Key:
    """Compares by identity, so that every one is new, and can be watched."""


def test_batches_of_ever_new_sizes_leave_a_bounded_memory() -> None:
    counted, pattern, keys = _Counted(), torch.zeros(3), []
    for _ in range(200):
        key = _Key()
        keys.append(weakref.ref(key))
        counted.run(pattern, key)
        del key
    assert sum(key() is not None for key in keys) <= 64
    assert counted.short == 200 * ["compute"]


def test_after_clear_everything_is_captured_anew() -> None:
    counted, (pattern,) = _Counted(), _patterns(1)
    for _ in range(6):
        counted.run(pattern)
    counted.cache.clear()
    counted.log.clear()
    for _ in range(3):
        counted.run(pattern)
    assert counted.short == ["compute", "capture", *2 * ["replay"]]


def test_what_cannot_be_captured_is_computed_and_not_tried_again() -> None:
    counted, (pattern,) = _Counted(), _patterns(1)
    counted.graphs.fails = True
    for _ in range(5):
        counted.run(pattern)
    assert counted.short == ["compute", "capture", *4 * ["compute"]]


@pytest.mark.parametrize(("size", "may_copy", "moving", "replays"), [
    (3, False, True, 29),  # small: copied
    (3, False, False, 29),
    (2**20 + 1, False, False, 29),  # large: recognised by its address
    (2**20 + 1, False, True, 21),  # copied once that is known
    (2**20 + 1, True, False, 29),
    (2**20 + 1, True, True, 29),  # copied
])  # fmt: skip
def test_a_replay_has_the_numbers_of_the_call(size: int, may_copy: bool, moving: bool, replays: int) -> None:
    """Also where the tensors lie elsewhere: then they are copied, or there is no replay."""
    total, graphs = torch.zeros(1), EagerGraphs()
    cache, x, alive = GraphCache[None](capture=graphs), torch.zeros(size), []

    def add(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
        total.add_(tensors[0][-1] * scalars[0] + scalars[1])

    expected = torch.zeros(1)
    for n in range(30):
        if moving:
            x = torch.zeros(size)
            alive.append(x)  # so that no other has its address
        x.fill_(n)
        cache.run(add, [x], [0.5, 2.0 * n], "add", may_copy=may_copy)
        expected += 0.5 * n + 2.0 * n
        assert torch.equal(total, expected)
    assert graphs.log.count("replay") == replays


def test_a_copy_is_not_rounded_to_the_type_of_an_earlier_one() -> None:
    """Passes with and without autocast have tensors of the same shapes."""
    total, cache = torch.zeros(1), GraphCache[None](capture=EagerGraphs())

    def copy(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
        total.copy_(tensors[0])

    for dtype in (*3 * [torch.bfloat16], *3 * [torch.float32]):
        x = torch.full((1,), 1 + 2**-20, dtype=dtype)
        cache.run(copy, [x], [], "copy")
        assert float(total) == float(x)


def test_a_replay_returns_the_result_of_the_capture() -> None:
    class Remembering(EagerGraphs):
        def capture(self, fn: Any, device: torch.device) -> Any:
            result = fn()
            return result, lambda: result.copy_(fn())

    cache = GraphCache[Tensor](capture=Remembering())
    found = [cache.run(lambda tensors, _: 2 * tensors[0], [torch.full((1,), float(n))], [], "twice") for n in range(4)]
    assert found[1] is found[2] is found[3]
    assert float(found[0]) == 0.0
    assert float(found[3]) == 6.0


# Tensors of ever new sizes, padded with zero rows.


def _means(cache: GraphCache[None], *, width: int = 3) -> list[int]:
    """Run a mean over rows in many sizes; the sizes of the buffer after each."""
    mean, sizes = torch.zeros(width, dtype=torch.float64), list[int]()

    def compute(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
        mean.copy_(torch.stack([t.double().sum(0) for t in tensors]).sum(0) / scalars[0])

    for m in (17, 18, 24, 31, 30, 17, 25, 18, 32, 31, 17, 29, 18, 24, 32, 30):
        tensors = [torch.randn(m, width), torch.randn(m, width).half()]
        cache.run_padded(compute, tensors, [2.0 * m], "mean")
        expected = torch.cat([t.double() for t in tensors]).mean(0)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
        sizes.append(0 if cache._buffer is None else cache._buffer.numel())
    return sizes


def test_rows_of_changing_number_are_replayed_in_few_sizes() -> None:
    graphs = EagerGraphs()
    sizes = _means(GraphCache(capture=graphs))
    assert graphs.log.count("replay") == 11  # 18, 24, 32, 30 and 26 rows come for a first time
    assert sizes == sorted(sizes)
    assert sizes[-1] == 512 + 256  # 32 rows of 3 numbers, in multiples of 256 bytes: of one run


def test_rows_that_are_too_many_bytes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_BUFFER_BYTES", 100)
    graphs = EagerGraphs()
    assert not any(_means(GraphCache(capture=graphs)))
    assert not graphs.log


def test_tensors_are_unsettled_until_they_lie_still() -> None:
    cache = GraphCache[None](capture=EagerGraphs())
    patterns = [whole[: 2**20 + at + 1] for at, whole in enumerate(_patterns(40))]  # of ever new sizes
    for at, pattern in enumerate(patterns):
        for key in ("S", "another that is new"):
            assert cache.changes_address([pattern], key) == (at > 16)
        cache.run(lambda *_: None, [pattern], [], "S")
        cache.run(lambda *_: None, [patterns[0]], [], "replayed")
        assert not cache.changes_address([pattern], "replayed")
    found = [cache.changes_address([patterns[0]], "S") for _ in range(20)]
    assert found == [True] * 16 + [False] * 4
    assert not cache.changes_address([patterns[0]], "another that is new")
