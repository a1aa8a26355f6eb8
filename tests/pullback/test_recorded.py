"""Recordings, with a device that only pretends: what they read, on which stream, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from natgrad.pullback.recorded import Recordings, _Recording, recording


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


def test_the_more_patterns_are_recorded_the_later_another_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where addresses are never the same again, recordings would cost more than they save."""
    done: list[str] = []

    @dataclass
    class Replayed:
        def replay(self) -> None:
            done.append("replay")

    def record(self: Recordings, key: Any, *_: Any) -> _Recording:
        done.append("record")
        self._weight = torch.ones(())
        self._kept[key] = _Recording(Replayed(), [])  # type: ignore[arg-type]
        return self._kept[key]

    monkeypatch.setattr(Recordings, "_record", record)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    recordings, patterns = Recordings(), [torch.zeros(2**21) for _ in range(3)]
    for pattern in patterns:
        for _ in range(5):
            recordings.run([pattern], "S", lambda *_: done.append("compute"), 0.5)
    expected = [["compute"] * (1 + at) + ["record"] + ["replay"] * (4 - at) for at in range(3)]
    assert done == [what for one in expected for what in one]
