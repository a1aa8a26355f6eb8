"""Kernels that are recorded once as a CUDA graph and replayed wherever the same tensors lie in the same memory.

The second moments of many layers are many small kernels, and a GPU waits for the processor to start them. In a training
loop torch's allocator hands out the same addresses again and again: a recording that has read these addresses is then
the whole computation, in one launch. Where the addresses differ, the kernels are started one by one, as always.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

Compute: TypeAlias = Callable[[Sequence[Tensor]], Iterable[Tensor]]

_log = logging.getLogger("natgrad")
_KEPT = 32  # recordings; a loop has few patterns of addresses, or none
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
        self._like: dict[Hashable, list[Tensor]] = {}  # the shapes of the outputs
        self._outputs: dict[Hashable, list[Tensor]] = {}

    def run(self, sources: Sequence[Tensor], what: Hashable, compute: Compute) -> list[Tensor]:
        """``compute(sources)``, which must read nothing else, and depend on nothing but ``what``.

        Few numbers are first copied to where a recording reads them; many must lie where they lay before. What was
        replayed is lent until ``back`` is called: the next replay overwrites it.
        """
        if not self._possible or self._lent or torch.cuda.is_current_stream_capturing():
            return list(compute(sources))
        small = sum(t.numel() * t.element_size() for t in sources) <= _SMALL
        places = tuple((0 if small else t.data_ptr(), t.shape, t.stride(), t.dtype) for t in sources)
        recording = self._kept.get((what, places))
        if recording is None and (what, places) in self._seen and len(self._kept) < _KEPT:
            recording = self._record((what, places), sources, compute, small)
        if recording is None:
            found = list(compute(sources))
            self._remember((what, places), found)
            return found
        if small:
            torch._foreach_copy_(list(recording.sources), list(sources))
        recording.graph.replay()
        self._lent = True
        return recording.outputs

    def _remember(self, key: tuple[Hashable, Hashable], found: Sequence[Tensor]) -> None:
        """What came once may come again, with outputs like these."""
        self._seen[key] = None
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        self._like[key[0]] = [torch.empty_like(t, device="meta") for t in found]

    def _record(
        self, key: tuple[Hashable, Hashable], sources: Sequence[Tensor], compute: Compute, copied: bool
    ) -> _Recording | None:
        """All recordings of one thing write to the same outputs, one by one: few are in memory at the same time."""
        device = sources[0].device
        sources = [t.clone() for t in sources] if copied else sources
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        outputs = self._outputs.get(key[0])
        if outputs is None:
            outputs = self._outputs[key[0]] = [torch.empty_like(t, device=device) for t in self._like[key[0]]]
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self._pool):
                for out, t in zip(outputs, compute(sources), strict=True):
                    out.copy_(t)
        except RuntimeError as error:  # something in it waits for the device
            _log.info("second moments cannot be recorded as a CUDA graph (%s): kernel by kernel instead", error)
            self._possible = False
            return None
        # What lies in the user's memory is not held: it is recognised by its address.
        self._kept[key] = _Recording(graph, outputs, list(sources) if copied else [])
        return self._kept[key]

    def back(self) -> None:
        """What was lent is no longer used."""
        self._lent = False


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
