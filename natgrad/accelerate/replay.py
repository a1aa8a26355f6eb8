"""One cache of CUDA graphs: a computation whose tensors lie where they lay before is replayed in one launch.

Second moments, inverses and the update of the parameters are hundreds of small kernels, and a GPU waits for the host to
launch them. In a training loop torch's allocator hands out the same addresses again and again. A graph that was
captured on these addresses is then the whole computation. Where the addresses differ, the kernels are launched one by
one, as without a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from natgrad.accelerate.moments import switches
from natgrad.lru import LRU

T = TypeVar("T")
Scalar: TypeAlias = float | Tensor  # a number, or a tensor [] on the device that holds it in single precision

_log = logging.getLogger("natgrad")
_CAPACITY = 64  # entries of every table; a loop has few address patterns, or never the same one twice
_CAPTURE_COST = 4  # runs that take as long as one capture
_COPY_BYTES = 2**22  # inputs up to this size are copied to a fixed address rather than recognised by their own
_PATIENCE = 16  # runs without a graph, after which larger inputs are copied too if they may be


class Capture(Protocol):
    """How a computation is captured. ``CudaGraphs`` does it; a test may put something else in its place."""

    def possible(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a computation that reads these tensors can be captured."""

    def capture(self, fn: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        """What ``fn`` returns, and a function that runs its kernels again. ``fn`` is not executed by this call."""


@final
class CudaGraphs:
    """Capture on a CUDA stream. All graphs share one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def possible(self, tensors: Sequence[Tensor]) -> bool:
        """On a GPU, outside of a capture, and not in double precision: a graph reads its scalars in single."""
        if not tensors or not tensors[0].is_cuda or tensors[0].dtype == torch.float64:
            return False
        return not torch.cuda.is_current_stream_capturing()

    def capture(self, fn: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        """Raises RuntimeError where ``fn`` waits for the device."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, device, self._pool):
            result = fn()
        return result, graph.replay


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """The kernels inside, on tensors of the device, are captured and not executed.

    As ``torch.cuda.graph``, and on its stream, since every other stream would have a cuBLAS workspace of 32 MB. Unlike
    it, this does not empty the allocator's cache, after which the next steps would get other addresses. torch creates
    its capture stream on the device that is current at that time: for another device we need a stream of our own.
    """
    shared = torch.cuda.graph(graph).capture_stream
    stream = shared if shared is not None and shared.device == device else torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)


@final
@dataclass(frozen=True)
class _Graph(Generic[T]):
    replay: Callable[[], None]
    result: T
    inputs: list[Tensor]  # static copies that the graph reads; empty where it reads the tensors themselves


@final
@dataclass
class ReplayStats:
    """How often one computation was captured and replayed, over all address patterns."""

    captures: int = 0
    replays: int = 0
    misses: int = 0  # runs for which there was no graph

    @property
    def worthwhile(self) -> bool:
        """Whether its captures have saved as much time as they took."""
        return self.replays >= _CAPTURE_COST * self.captures

    @property
    def unsettled(self) -> bool:
        """Whether its tensors keep coming at new addresses."""
        return self.misses > max(_PATIENCE, self.replays)


@final
class GraphCache(Generic[T]):
    """Run pure functions of tensors, from a captured graph where the same addresses come again.

    An address pattern is captured when it is seen for the second time, as long as captures pay off (replays ≥ 4 ×
    captures), else when it is seen for the fifth time. At most ``capacity`` graphs are kept (LRU eviction).

    >>> total = torch.zeros(2)
    >>> def add(tensors, scalars):
    ...     total.add_(scalars[0] * tensors[0])
    >>> GraphCache().run(add, [torch.ones(2)], [0.5], key="add")
    >>> total
    tensor([0.5000, 0.5000])
    """

    def __init__(self, *, capacity: int = _CAPACITY, capture: Capture | None = None) -> None:
        self._capture: Capture = CudaGraphs() if capture is None else capture
        self._graphs = LRU[Hashable, _Graph[T]](capacity=capacity)
        self._sightings = LRU[Hashable, int](capacity=_CAPACITY)  # of address patterns that have no graph
        self.stats = LRU[Hashable, ReplayStats](capacity=_CAPACITY)  # by ``key``
        self._enabled = True
        self._scalars: list[Tensor] = []  # read by all graphs
        self._values: list[float] = []  # what they hold

    def run(
        self,
        fn: Callable[[Sequence[Tensor], Sequence[Scalar]], T],
        tensors: Sequence[Tensor],
        scalars: Sequence[float],
        key: Hashable,
        *,
        may_copy: bool = False,
    ) -> T:
        """``fn(tensors, scalars)``. ``fn`` writes in place and must depend on nothing but its arguments and ``key``.

        ``key`` stands for all else that ``fn`` reads or writes: shapes, options, addresses of what it holds.
        Small tensors are copied to where the graph reads them, so that they may lie anywhere. With ``may_copy`` large
        ones are too, if they keep coming at new addresses. In a graph the scalars are tensors [] of single precision,
        so that they may change between replays. What comes back from a replay is the result of the capture, with new
        numbers in its tensors.
        """
        if not self.possible(tensors):
            return fn(tensors, scalars)
        computation = (key, len(scalars), switches())
        stats = self.stats.get(computation)
        if stats is None:
            stats = self.stats[computation] = ReplayStats()
        small = sum(t.numel() * t.element_size() for t in tensors) <= _COPY_BYTES
        copy = small or (may_copy and stats.unsettled)
        # A copy goes to where it is read, whatever its strides.
        pattern = computation, *[t.shape if copy else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
        graph = self._graphs.get(pattern)
        if graph is None:
            sightings = self._sightings.get(pattern) or 0
            if sightings >= (1 if stats.worthwhile else _CAPTURE_COST):
                graph = self._captured(fn, tensors, len(scalars), copy)
            if graph is None:
                self._sightings[pattern] = sightings + 1
                stats.misses += 1
                return fn(tensors, scalars)
            del self._sightings[pattern]
            stats.captures += 1
            self._graphs[pattern] = graph
        stats.replays += 1
        if copy:
            torch._foreach_copy_(graph.inputs, list(tensors))
        for at, value in enumerate(scalars):
            if value != self._values[at]:  # else a launch is saved
                self._scalars[at].fill_(value)
                self._values[at] = value
        graph.replay()
        return graph.result

    def possible(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a function of these tensors may be captured: on a GPU, unless an earlier capture failed."""
        return self._enabled and self._capture.possible(tensors)

    def clear(self) -> None:
        """Forget all graphs: what they read or write is no longer in use."""
        self._graphs.clear()
        self._sightings.clear()

    def _captured(
        self, fn: Callable[[Sequence[Tensor], Sequence[Scalar]], T], tensors: Sequence[Tensor], count: int, copy: bool
    ) -> _Graph[T] | None:
        """The graph of ``fn``; None, now and ever after, where it cannot be captured."""
        inputs = [torch.empty_like(t) for t in tensors] if copy else list(tensors)
        device = tensors[0].device
        while len(self._scalars) < count:  # in single precision, as the fused kernels that read them require
            self._scalars.append(torch.zeros((), device=device))
            self._values.append(0.0)
        try:
            result, replay = self._capture.capture(lambda: fn(inputs, self._scalars[:count]), device)
        except RuntimeError as error:  # something in it waits for the device
            _log.info("a computation cannot be captured as a CUDA graph (%s): its kernels are launched singly", error)
            self._enabled = False
            return None
        # Tensors of the user are not kept alive: their addresses are compared.
        return _Graph(replay, result, inputs if copy else [])
