"""Kernels that are recorded once as a CUDA graph and replayed wherever the same tensors lie in the same memory.

The second moments of many layers are many small kernels, and a GPU waits for the processor to start them. In a training
loop torch's allocator hands out the same addresses again and again: a recording that has read these addresses is then
the whole computation, in one launch. Where the addresses differ, the kernels are started one by one, as always.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

_log = logging.getLogger("natgrad")
_KEPT = 6  # recordings; a loop has few patterns of addresses
_SEEN = 64  # patterns that are remembered


@final
@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    outputs: list[Tensor]


@final
class Recordings:
    """Recordings by the addresses, shapes and strides of what they read."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._pool: Any = None  # a handle of torch's
        self._possible = True

    def run(self, sources: Iterable[Tensor], what: Hashable, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        """What ``compute`` returns, which must read nothing but the ``sources``, and depend on nothing but ``what``.

        The tensors belong to the recording: the next run overwrites them.
        """
        if not self._possible or torch.cuda.is_current_stream_capturing():
            return compute()
        key = (what, tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in sources))
        recording = self._kept.get(key)
        if recording is None:
            if key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > _SEEN:
                    self._seen.popitem(last=False)
                return compute()
            recording = self._record(compute)
            if recording is None:
                return compute()
            self._kept[key] = recording
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        recording.graph.replay()
        return recording.outputs

    def _record(self, compute: Callable[[], list[Tensor]]) -> _Recording | None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = compute()
        except RuntimeError as error:  # something in it waits for the device
            _log.info("second moments cannot be recorded as a CUDA graph (%s): kernel by kernel instead", error)
            self._possible = False
            return None
        return _Recording(graph, outputs)


def owned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, in one launch."""
    return list(torch._foreach_mul(list(tensors), 1.0))
