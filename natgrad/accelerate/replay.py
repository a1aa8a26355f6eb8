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
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.moments import switches

Weight: TypeAlias = float | Tensor
Compute: TypeAlias = Callable[[Sequence[Tensor], Weight], None]

_log = logging.getLogger("natgrad")
_KEPT = 64  # recordings; a loop has few patterns of addresses, or none
_PRICE = 4  # computations, in whose time one is recorded
_SMALL = 2**22  # bytes that are copied rather than recognised
_SEEN = 64  # patterns, and computations, that are remembered


@final
@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    sources: list[Tensor]  # where it reads, if that is memory of its own


@final
@dataclass
class _Account:
    """Of all recordings of one computation: its number, how many were made, and how often they have been replayed."""

    number: int
    made: int = 0
    replayed: int = 0

    @property
    def paid(self) -> bool:
        """Whether those that were made have saved as much time as they took."""
        return self.replayed >= _PRICE * self.made


@final
class Recordings:
    """Recordings by the addresses, shapes and strides of what they read.

    A pattern of addresses that comes for the second time is recorded, if the recordings before have been worth it:
    where addresses are never the same again, there is no third. If they have not, it is recorded when it has come as
    often as that costs: a loop may settle on other addresses than those it began with.
    """

    def __init__(self) -> None:
        # By the number of what is computed, and where it is read; the one that was not replayed for longest is first.
        self._kept: OrderedDict[tuple[Hashable, ...], _Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # patterns without one, and how often they came
        self._accounts: OrderedDict[Hashable, _Account] = OrderedDict()  # by what is computed
        self._numbers = count()
        self._pool: Any = None  # a handle of torch's
        self._possible = True
        self._weight: Tensor | None = None  # read by all recordings
        self._told: float | None = None  # what is in it

    def run(self, sources: Sequence[Tensor], what: Hashable, compute: Compute, weight: float) -> None:
        """``compute(sources, weight)``, which must read nothing else, and depend on nothing but ``what``.

        Few numbers are first copied to where a recording reads them; many must lie where they lay before.
        """
        if not self._possible or not sources or torch.cuda.is_current_stream_capturing():
            compute(sources, weight)
            return
        small = sum(t.numel() * t.element_size() for t in sources) <= _SMALL
        account = self._account((what, switches()))
        key = (account.number, *[(0 if small else t.data_ptr(), t.shape, t.stride(), t.dtype) for t in sources])
        found = self._kept.get(key)
        if found is None and self._seen.get(key, 0) >= (1 if account.paid else _PRICE):
            found = self._record(key, sources, compute, small)
            account.made += found is not None
        if found is None or self._weight is None:
            compute(sources, weight)
            self._remember(key)
            return
        account.replayed += 1
        self._kept.move_to_end(key)
        if small:
            torch._foreach_copy_(found.sources, list(sources))
        if weight != self._told:  # one launch less
            self._weight.fill_(weight)
            self._told = weight
        found.graph.replay()

    def _account(self, what: Hashable) -> _Account:
        """Batches of ever other sizes are ever other computations: the one that came last longest ago is forgotten."""
        account = self._accounts.get(what)
        if account is None:
            if len(self._accounts) == _SEEN:
                self._close()
            account = self._accounts[what] = _Account(next(self._numbers))
        else:
            self._accounts.move_to_end(what)
        return account

    def _close(self) -> None:
        """An account, of something without recordings if there is one; else they go with it."""
        empty = (what for what, account in self._accounts.items() if not account.made)
        number = self._accounts.pop(next(empty, next(iter(self._accounts)))).number
        for key in [key for key in self._kept if key[0] == number]:
            del self._kept[key]

    def _remember(self, key: Hashable) -> None:
        """What came once may come again."""
        self._seen[key] = self._seen.pop(key, 0) + 1
        _forget(self._seen, _SEEN)

    def _record(
        self, key: tuple[Hashable, ...], sources: Sequence[Tensor], compute: Compute, copied: bool
    ) -> _Recording | None:
        """All recordings share their memory: only one is replayed at a time."""
        sources = [t.clone() for t in sources] if copied else sources
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._weight is None:  # in single precision, as the kernels that read it want it
            self._weight = torch.ones((), device=sources[0].device)
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, sources[0].device, self._pool):
                compute(sources, self._weight)
        except RuntimeError as error:  # something in it waits for the device
            _log.info("moments or inverses cannot be recorded as a CUDA graph (%s): kernel by kernel instead", error)
            self._possible = False
            return None
        # What lies in the user's memory is not held: it is recognised by its address.
        self._kept[key] = _Recording(graph, list(sources) if copied else [])
        _forget(self._kept, _KEPT)
        return self._kept[key]


def _forget(of: OrderedDict[Any, Any], most: int) -> None:
    """The first, where there are more."""
    if len(of) > most:
        of.popitem(last=False)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """The kernels inside, on tensors of the device, are recorded and not run.

    As ``torch.cuda.graph``, and on its stream: every other one would have 32 MB of its own for matrix products. But the
    allocator's free memory is left to it: torch would give it back to the device, and the addresses of the next steps
    would be others. That stream is on the device that was the current one when torch made it: on another one the
    kernels would run, and nothing would be recorded.
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
