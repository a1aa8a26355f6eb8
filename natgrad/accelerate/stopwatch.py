"""How long work takes on a device, read later and without waiting for it."""

from __future__ import annotations

import time
from typing import TypeAlias, final

import torch

from natgrad.accelerate.devices import is_asynchronous

Mark: TypeAlias = float | torch.cuda.Event  # a point in the time of the host, or in the work of a device


@final
class Stopwatch:
    """Sets marks in the work of a device; on a CPU it is the clock of the host.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> seconds = watch.seconds(watch.mark(), watch.mark())
    >>> seconds is not None and seconds >= 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Here, behind all the work so far."""
        if not is_asynchronous(self._device):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Mark, end: Mark) -> float | None:
        """Between two marks; None where the device has not come to the end."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return start.elapsed_time(end) / 1000 if end.query() else None
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
