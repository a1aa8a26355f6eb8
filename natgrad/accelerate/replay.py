"""One cache of CUDA graphs: a computation whose tensors lie where they lay before is replayed in one launch.

Second moments, inverses and the update of the parameters are hundreds of small kernels, and a GPU waits for the host to
launch them. In a training loop torch's allocator hands out the same addresses again and again. A graph that was
captured on these addresses is then the whole computation. Where the addresses differ, the kernels are launched one by
one, as without a cache. Where they keep differing, because every batch has another size, sums over rows are replayed
on copies with zero rows after the others, so that there are few sizes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from natgrad.accelerate.fused import pad_copy_
from natgrad.accelerate.moments import channels_last, switches

K = TypeVar("K")
V = TypeVar("V")


@final
class LRU(OrderedDict[K, V]):
    """At most ``capacity`` entries; ``get`` and assignment make an entry the most recent one.

    >>> cache = LRU[str, int](capacity=2)
    >>> cache["a"], cache["b"] = 1, 2
    >>> cache.get("a")
    1
    >>> cache["c"] = 3
    >>> list(cache)
    ['a', 'c']
    """

    def __init__(self, *, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        try:
            self.move_to_end(key)
        except KeyError:
            return default
        return self[key]

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.capacity:
            self.popitem(last=False)


T = TypeVar("T")
Scalar: TypeAlias = float | Tensor  # a number, or a tensor [] on the device that holds it in single precision

_log = logging.getLogger("natgrad")
_CAPACITY = 64  # entries of every table; a loop has few address patterns, or never the same one twice
_CAPTURE_COST = 4  # runs that take as long as one capture
_RECENT = 8  # calls that are compared one by one before a table is asked; a pass with large cotangents makes several
_COPY_BYTES = 2**22  # inputs up to this size are copied to a fixed address rather than recognised by their own
_GRADIENT_BYTES = 2**28  # the same, of a computation that reads and writes several times as much
_PATTERNS = 2  # address patterns of a computation that are captured; if it has more, a graph reads copies
_STRAYS = 8  # runs without a graph, after which it does so, too
_PATIENCE = 16  # runs without a graph, after which rows are padded
_SIZES = 8  # that padded tensors have, between two powers of two
_ALIGNMENT = 256  # bytes, as torch's allocator
_BUFFER_BYTES = 2**31  # of padded copies; kernels of larger tensors take longer than to launch them


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
        self._latest: torch.cuda.CUDAGraph | None = None  # torch refuses a pool whose graphs have all been freed

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
        self._latest = graph
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
    last: Hashable = None  # addresses of the last run, once they keep changing
    repeats: int = 0  # runs in a row that had them

    def worthwhile(self, free: int) -> bool:
        """Whether its captures, all but the first ``free``, have saved as much time as they took."""
        return self.replays >= _CAPTURE_COST * (self.captures - free)

    @property
    def needs_copies(self) -> bool:
        """Whether its tensors have been at many addresses: the next capture is one of copies."""
        return self.captures >= _PATTERNS or self.misses >= _STRAYS

    @property
    def changes_address(self) -> bool:
        """Whether its tensors keep coming at new addresses, and copies have not helped: their sizes change."""
        return self.misses > max(_PATIENCE, self.replays)

    def is_stable_at(self, addresses: Hashable) -> bool:
        """Whether tensors that kept changing address, and now have these, have had them time after time."""
        self.repeats = self.repeats + 1 if addresses == self.last else 0
        self.last = addresses
        if self.repeats < _PATIENCE:
            return False
        self.misses = self.repeats = 0
        return True


def padded_size(count: int) -> int:
    """Rounded up to one of eight sizes between two powers of two: at most an eighth more.

    >>> [padded_size(count) for count in (0, 7, 17, 1000, 1025)]
    [0, 7, 18, 1024, 1152]
    """
    step = max(1, 2 ** (count.bit_length() - 1) // _SIZES)
    return -(-count // step) * step


@final
class GraphCache(Generic[T]):
    """Run pure functions of tensors, from a captured graph where the same addresses come again.

    An address pattern is captured when it is seen for the second time, as long as captures pay off (replays ≥ 4 ×
    captures), else when it is seen for the fifth time. At most ``capacity`` graphs are kept (LRU eviction), beside
    those of the last calls. A loop that shares the allocator with another (a second model, validation) may have many
    patterns: after two of them one graph reads copies of the tensors, from wherever they lie, up to 256 MB.

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
        self._on_copies = LRU[Hashable, _Graph[T]](capacity=capacity)
        self._buffer: Tensor | None = None  # bytes that all graphs of copies read, one after the other
        self._sightings = LRU[Hashable, int](capacity=_CAPACITY)  # of address patterns that have no graph
        self.stats: LRU[Hashable, ReplayStats] = LRU[Hashable, ReplayStats](capacity=_CAPACITY)  # by ``key``
        self._enabled = True
        self._last_changes_address = False  # of the last computation that was asked for
        self._some_change_address = False  # of a computation so far
        self._recent = deque[tuple[Any, _Graph[T], ReplayStats]](maxlen=min(_RECENT, capacity))  # the last calls
        self._scalars: list[Tensor] = []  # read by all graphs
        self._values: list[float] = []  # what they hold

    def run(
        self,
        fn: Callable[[Sequence[Tensor], Sequence[Scalar]], T],
        tensors: Sequence[Tensor],
        scalars: Sequence[Scalar],
        key: Hashable,
        *,
        size: Hashable = None,
        may_copy: bool = False,
        shaped: bool = False,
        placed: bool = False,
    ) -> T:
        """``fn(tensors, scalars)``. ``fn`` writes in place and must depend on nothing but its arguments and ``key``.

        ``key`` stands for all else that ``fn`` reads or writes: options, addresses of what it holds. What changes with
        the batch is not in the key but in ``size``, if the shapes of the tensors do not tell. ``shaped``: the key tells
        the shapes and types of the tensors, as those of parameters tell those of gradients, and they are not compared.
        ``placed``: it also holds their addresses, and the graph reads them there; the strides at one address must stay.
        Other tensors are copied to where the graph reads them if they are small, so that they may lie anywhere. With
        ``may_copy`` up to 256 MB are: gradients, which lie elsewhere after every step with new factors. In a graph the
        scalars are tensors [] of single precision, so that they may change between replays. What comes back from a
        replay is the result of the capture, with new numbers in its tensors.
        """
        if not self.possible(tensors):
            return fn(tensors, scalars)
        copy = not placed and sum(map(_bytes, tensors)) <= (_GRADIENT_BYTES if may_copy else _COPY_BYTES)
        # A training loop makes the same call again and again: to compare it takes less time than to hash it.
        shapes = None if shaped or placed else [(t.shape, t.dtype) for t in tensors]
        layouts = None if copy or placed else ([*map(Tensor.data_ptr, tensors)], [*map(Tensor.stride, tensors)])
        call = layouts, shapes, key, switches(), len(scalars), size
        for recent, captured, stats in self._recent:
            if recent == call:
                return self._replayed(captured, tensors, scalars, stats)
        stats, computation = self._stats(key)
        # A copy goes to where it is read, whatever its strides.
        addresses = [(t.shape, t.dtype) if copy else (t.shape, t.dtype, t.data_ptr(), t.stride()) for t in tensors]
        pattern = computation, len(scalars), size, *addresses
        graph = self._graphs.get(pattern)
        if graph is None and not (copy or placed) and stats.needs_copies and self._may_move(tensors):
            return self._run_on_copies(fn, tensors, scalars, [_layout(t) for t in tensors], (computation, size), stats)
        if graph is None:
            if self._due(pattern, stats):
                graph = self._captured(fn, [torch.empty_like(t) for t in tensors] if copy else tensors, len(scalars))
            if graph is None:
                self._miss(stats)
                return fn(tensors, scalars)
            # Tensors of the user are not kept alive: their addresses are compared.
            self._graphs[pattern] = graph = graph if copy else replace(graph, inputs=[])
        self._recent.append((call, graph, stats))
        return self._replayed(graph, tensors, scalars, stats)

    def changes_address(self, tensors: Sequence[Tensor], key: Hashable) -> bool:
        """Whether the tensors of a computation keep coming at new addresses: then ``run_padded`` is faster.

        Two of them are enough: they tell whether the addresses stay the same again. A computation that has never been
        replayed is taken to be like the last of the others that were.
        """
        if not self._some_change_address or not self.possible(tensors):
            return False
        stats, _ = self._stats(key)
        if not stats.changes_address:
            return self._last_changes_address and not stats.replays
        first, last = tensors[0], tensors[-1]
        self._last_changes_address = not stats.is_stable_at(
            (first.data_ptr(), first.shape, last.data_ptr(), last.shape)
        )
        return self._last_changes_address

    def run_padded(
        self,
        fn: Callable[[Sequence[Tensor], Sequence[Scalar]], T],
        rows: Sequence[Tensor],
        scalars: Sequence[Scalar],
        key: Hashable,
    ) -> T:
        """``run`` for tensors [m *rest] that come in ever new sizes m: zero rows are appended, so that there are few.

        ``fn`` must give the same with zero rows after the others: the true numbers of rows, where they matter, are
        among the scalars. The copies lie in one buffer for all graphs, which is as large as those of one run, and of
        2 GiB at most: larger tensors are not copied.

        >>> def add(tensors, scalars):
        ...     return tensors[0].sum(0) / scalars[0]
        >>> GraphCache().run_padded(add, [torch.ones(3, 2)], [3.0], key="mean")
        tensor([1., 1.])
        """
        if not self.possible(rows):
            return fn(rows, scalars)
        stats, computation = self._stats((key, "padded"))
        return self._run_on_copies(fn, rows, scalars, [_padded(t) for t in rows], computation, stats, free=_SIZES)

    def _run_on_copies(
        self,
        fn: Callable[[Sequence[Tensor], Sequence[Scalar]], T],
        tensors: Sequence[Tensor],
        scalars: Sequence[Scalar],
        layouts: Sequence[_Layout],
        computation: Hashable,
        stats: ReplayStats,
        free: int = 0,
    ) -> T:
        """Replay a graph that reads copies of the tensors, with zero rows after them where a layout has more rows."""
        pattern = computation, len(scalars), *layouts
        graph = self._on_copies.get(pattern)
        if graph is None:
            if sum(map(_nbytes, layouts)) <= _BUFFER_BYTES and self._due(pattern, stats, free=free):
                graph = self._captured(fn, self._in_buffer(layouts, tensors[0].device), len(scalars))
            if graph is None:
                self._miss(stats)
                return fn(tensors, scalars)
            self._on_copies[pattern] = graph
        pad_copy_(graph.inputs, tensors)
        return self._replayed(graph, (), scalars, stats)

    @staticmethod
    def _may_move(tensors: Sequence[Tensor]) -> bool:
        """Whether copies of the tensors take less time than what reads them."""
        return all(t.ndim for t in tensors) and sum(map(_bytes, tensors)) <= _GRADIENT_BYTES

    def _stats(self, key: Hashable) -> tuple[ReplayStats, Hashable]:
        """The history of a computation, and what it is: under other switches it is another one."""
        computation = key, switches()
        stats = self.stats.get(computation)
        if stats is None:
            stats = self.stats[computation] = ReplayStats()
        return stats, computation

    def _miss(self, stats: ReplayStats) -> None:
        """A computation runs without a graph."""
        stats.misses += 1
        self._some_change_address = self._some_change_address or stats.changes_address

    def _due(self, pattern: Hashable, stats: ReplayStats, free: int = 0) -> bool:
        """Whether a pattern that has no graph has been seen often enough to be captured."""
        sightings = self._sightings.get(pattern) or 0
        due = sightings >= (1 if stats.worthwhile(free) else _CAPTURE_COST)
        if due:
            del self._sightings[pattern]
            stats.captures += 1
        else:
            self._sightings[pattern] = sightings + 1
        return due

    def _replayed(
        self, graph: _Graph[T], tensors: Sequence[Tensor], scalars: Sequence[Scalar], stats: ReplayStats
    ) -> T:
        """Run the kernels again, on copies of the tensors where the graph has memory for them."""
        stats.replays += 1
        if graph.inputs and tensors:
            torch._foreach_copy_(graph.inputs, list(tensors))
        for at, value in enumerate(map(float, scalars)):
            if value != self._values[at]:  # else a launch is saved
                self._scalars[at].fill_(value)
                self._values[at] = value
        graph.replay()
        return graph.result

    def _in_buffer(self, layouts: Sequence[_Layout], device: torch.device) -> list[Tensor]:
        """Memory for these tensors in the buffer; if it has to grow, graphs that read the old one are captured anew."""
        starts = [0, *accumulate(-(-_nbytes(layout) // _ALIGNMENT) * _ALIGNMENT for layout in layouts)]
        if self._buffer is None or self._buffer.device != device or len(self._buffer) < starts[-1]:
            for pattern in self._on_copies:
                self._sightings[pattern] = _CAPTURE_COST
            self._on_copies.clear()
            self._buffer = None  # before the new one is allocated
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        tensors = []
        for layout, start in zip(layouts, starts, strict=False):
            m, rest, stride, dtype = layout
            flat = self._buffer[start : start + _nbytes(layout)].view(dtype)
            tensors.append(flat.view(m, *rest) if stride is None else flat.as_strided((m, *rest), stride))
        return tensors

    def possible(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a function of these tensors may be captured: on a GPU, unless an earlier capture failed."""
        return self._enabled and self._capture.possible(tensors)

    def clear(self) -> None:
        """Forget all graphs: what they read or write is no longer in use."""
        self._graphs.clear()
        self._on_copies.clear()
        self._sightings.clear()
        self._recent.clear()
        self._buffer = None

    def _captured(
        self, fn: Callable[[Sequence[Tensor], Sequence[Scalar]], T], inputs: Sequence[Tensor], count: int
    ) -> _Graph[T] | None:
        """The graph of ``fn`` on these tensors; None, now and ever after, where it cannot be captured."""
        device = inputs[0].device
        while len(self._scalars) < count:  # in single precision, as the fused kernels that read them require
            self._scalars.append(torch.zeros((), dtype=torch.float32, device=device))
            self._values.append(0.0)
        try:
            result, replay = self._capture.capture(lambda: fn(inputs, self._scalars[:count]), device)
        except RuntimeError as error:  # something in it waits for the device
            _log.info("a computation cannot be captured as a CUDA graph (%s): its kernels are launched singly", error)
            self._enabled = False
            return None
        return _Graph(replay, result, list(inputs))


_bytes: Callable[[Tensor], int] = Tensor.nbytes.__get__  # type: ignore[attr-defined]

_Layout: TypeAlias = tuple[int, torch.Size, tuple[int, ...] | None, torch.dtype]  # m, *rest, strides, type


def _layout(t: Tensor) -> _Layout:
    """What a copy of a tensor [m *rest] is like: contiguous, unless t has other strides that are as dense."""
    dense = not t.is_contiguous() and t.ndim > 2 and channels_last(t)
    return t.shape[0], t.shape[1:], t.stride() if dense else None, t.dtype


def _padded(t: Tensor) -> _Layout:
    """The same with more rows."""
    m, rest, stride, dtype = _layout(t)
    return padded_size(m), rest, stride, dtype


def _nbytes(layout: _Layout) -> int:
    m, rest, _, dtype = layout
    return m * rest.numel() * dtype.itemsize
