"""Kernels that are recorded once as a CUDA graph and replayed wherever the same tensors lie in the same memory.

The second moments of many layers are many small kernels, and a GPU waits for the processor to start them. In a training
loop torch's allocator hands out the same addresses again and again: a recording that has read these addresses is then
the whole computation, in one launch. Where the addresses differ, the kernels are started one by one, as always.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

_log = logging.getLogger("natgrad")
_KEPT = 8  # recordings; a loop has few patterns of addresses, or none
_SMALL = 2**26  # bytes that are copied rather than recognised
_SEEN = 64  # patterns that are remembered


@final
@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    outputs: list[Tensor]
    sources: list[Tensor]  # where it reads, if that is memory of its own


@final
class Recordings:
    """Recordings by the addresses, shapes and strides of what they read."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Recording] = {}
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._pool: Any = None  # a handle of torch's
        self._possible = True
        self._lent = False

    def run(
        self, sources: Sequence[Tensor], what: Hashable, compute: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """``compute(sources)``, which must read nothing else, and depend on nothing but ``what``.

        Few numbers are first copied to where a recording reads them; many must lie where they lay before. What was
        replayed belongs to the recording, and is lent until ``back`` is called: the next replay overwrites it.
        """
        if not self._possible or self._lent or torch.cuda.is_current_stream_capturing():
            return compute(sources)
        small = sum(t.numel() * t.element_size() for t in sources) <= _SMALL
        key = (what, tuple((0 if small else t.data_ptr(), t.shape, t.stride(), t.dtype) for t in sources))
        recording = self._kept.get(key)
        if recording is None:
            recording = self._new(key, sources, small, compute)
        if recording is None:
            return compute(sources)
        if small:
            torch._foreach_copy_(recording.sources, list(sources))
        recording.graph.replay()
        self._lent = True
        return recording.outputs

    def _new(
        self, key: Hashable, sources: Sequence[Tensor], small: bool, compute: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> _Recording | None:
        """A recording of what is seen for the second time."""
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            return None
        if len(self._kept) >= _KEPT:  # there is no pattern
            return None
        read = [t.clone() for t in sources] if small else list(sources)
        recorded = self._record(compute, read)
        if recorded is not None:
            # What lies in the user's memory is not held: it is recognised by its address.
            self._kept[key] = recorded if small else replace(recorded, sources=[])
            return self._kept[key]
        return None

    def back(self) -> None:
        """What was lent is no longer used."""
        self._lent = False

    def _record(self, compute: Callable[[Sequence[Tensor]], list[Tensor]], sources: list[Tensor]) -> _Recording | None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self._pool):
                outputs = compute(sources)
        except RuntimeError as error:  # something in it waits for the device
            _log.info("second moments cannot be recorded as a CUDA graph (%s): kernel by kernel instead", error)
            self._possible = False
            return None
        return _Recording(graph, outputs, sources)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """The kernels inside are recorded and not run.

    As ``torch.cuda.graph``, but the allocator's free memory is left to it: torch would give it back to the device, and
    the addresses of the next steps would be others.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
