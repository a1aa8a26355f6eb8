"""Recordings, with a device that only pretends: what they read, on which stream, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.accelerate.replay import Recordings, recording


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
    """torch.cuda.graph, whose stream was made where the first recording was."""

    graph: Any
    capture_stream = _Stream(torch.device("cuda", 0))


def _pretend(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that kernels are started on."""
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
def test_kernels_are_recorded_on_a_stream_of_their_device(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used, graph, device = _pretend(monkeypatch), _Graph(), torch.device("cuda", index)
    with recording(graph, device):  # type: ignore[arg-type]
        assert used
    assert graph.ended
    (stream,) = used
    assert stream.device == device
    assert (stream is _Shared.capture_stream) == (index == 0)  # one for all, where it can be
    assert all(other.device == device for other in stream.waited)


def test_a_recording_that_raises_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    graph = _Graph()
    with pytest.raises(RuntimeError, match="waits"), recording(graph, torch.device("cuda", 0)):  # type: ignore[arg-type]
        raise RuntimeError("it waits for the device")
    assert graph.ended


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What recordings do, which are pretended."""
    done: list[str] = []

    @dataclass
    class Replayed:
        def capture_begin(self, **_: Any) -> None:
            done.append("record")

        def capture_end(self) -> None:
            assert done.pop() == "compute"  # the kernels, which are recorded and not run

        def replay(self) -> None:
            done.append("replay")

    _pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return done


def _run(recordings: Recordings, pattern: Tensor, done: list[str]) -> None:
    recordings.run([pattern], "S", lambda *_: done.append("compute"), 0.5)


def _patterns(count: int) -> list[Tensor]:
    """Of addresses; each is too large to be copied."""
    whole = torch.zeros(2**21 + count)
    return [whole[at : at + 2**21] for at in range(count)]


def test_a_pattern_that_comes_again_is_recorded_and_replayed(done: list[str]) -> None:
    recordings = Recordings()
    for pattern in _patterns(3):
        for _ in range(6):
            _run(recordings, pattern, done)
    assert done == 3 * ["compute", "record", *5 * ["replay"]]


def test_recordings_that_are_not_replayed_are_not_made_again(done: list[str]) -> None:
    """Where addresses are never the same again, they would cost more than they save."""
    recordings = Recordings()
    for pattern in _patterns(8):
        for _ in range(2):
            _run(recordings, pattern, done)
    assert done == ["compute", "record", "replay", *14 * ["compute"]]


def test_a_loop_that_settles_elsewhere_is_recorded_there_too(done: list[str]) -> None:
    """Though the recording of its beginning was not worth it: after as many computations as another one costs."""
    recordings, (beginning, settled) = Recordings(), _patterns(2)
    for pattern in (beginning, beginning, *6 * [settled]):
        _run(recordings, pattern, done)
    assert done == ["compute", "record", "replay", *4 * ["compute"], "record", *2 * ["replay"]]


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("after", ["highest", "high", "medium"])
def test_what_was_recorded_in_one_precision_is_not_replayed_in_another(
    before: str, after: str, done: list[str]
) -> None:
    precision = torch.get_float32_matmul_precision()
    recordings, (pattern,) = Recordings(), _patterns(1)
    try:
        for setting in (before, before, after):
            torch.set_float32_matmul_precision(setting)
            _run(recordings, pattern, done)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert done == ["compute", "record", "replay", "replay" if after == before else "compute"]


def test_the_recording_that_was_not_replayed_for_longest_makes_room(done: list[str]) -> None:
    recordings, patterns = Recordings(), _patterns(65)
    for pattern in patterns:
        for _ in range(6):
            _run(recordings, pattern, done)
    done.clear()
    _run(recordings, patterns[1], done)
    _run(recordings, patterns[0], done)
    assert done == ["replay", "compute"]


def test_a_recording_outlives_computations_that_come_once(done: list[str]) -> None:
    recordings, (pattern,) = Recordings(), _patterns(1)
    for _ in range(3):
        _run(recordings, pattern, done)
    for n in range(100):
        recordings.run([torch.zeros(3)], n, lambda *_: done.append("compute"), 0.5)
    done.clear()
    _run(recordings, pattern, done)
    assert done == ["replay"]


def test_what_is_forgotten_takes_its_recordings_with_it(done: list[str]) -> None:
    recordings, (pattern,) = Recordings(), _patterns(1)
    for n in range(65):  # each is recorded
        for _ in range(6):
            recordings.run([pattern], n, lambda *_: done.append("compute"), 0.5)
    assert {key[0] for key in recordings._kept} == {account.number for account in recordings._accounts.values()}
    done.clear()
    recordings.run([pattern], 0, lambda *_: done.append("compute"), 0.5)
    assert done == ["compute"]


def test_batches_of_ever_other_sizes_leave_no_more_behind_than_a_few(done: list[str]) -> None:
    recordings, pattern = Recordings(), torch.zeros(3)
    for n in range(200):
        recordings.run([pattern], n, lambda *_: done.append("compute"), 0.5)
    assert all(len(kept) <= 64 for kept in (recordings._kept, recordings._seen, recordings._accounts))
    assert done == 200 * ["compute"]
