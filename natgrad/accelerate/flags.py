"""Booleans on the device that the host reads later: NaN and infinity are noticed without stalling the queue."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.devices import is_asynchronous
from natgrad.accelerate.fused import largest, nonfinite, total_norm
from natgrad.errors import NonFiniteError

_AHEAD = 8  # steps that the host may run ahead of what it has read


def to_host_async(number: Tensor) -> Tensor:
    """A number [] on its way to the host: NaN until it arrives, and infinity where it is NaN itself.

    >>> float(to_host_async(torch.tensor(2.0))), float(to_host_async(torch.tensor(math.nan)))
    (2.0, inf)
    """
    host = torch.full((), math.nan, pin_memory=number.is_cuda)  # a copy to pageable memory would wait
    return host.copy_(number.nan_to_num(nan=math.inf), non_blocking=True)


@final
@dataclass(frozen=True)
class _Reading:
    """The value of a flag on its way to the host."""

    value: Tensor  # pinned
    arrived: torch.cuda.Event
    what: str
    step: int


@final
class Flag:
    """Whether something in a step was not finite.

    On a CPU ``check`` raises at once, by name. On a GPU asking would stall the queue: there ``value`` becomes a tensor
    [] on the device, 1.0 if something was not finite, which gates the updates of ``natgrad.accelerate.fused``. The
    error is raised by a later step, in ``raise_pending``.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._readings: deque[_Reading] = deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []  # creating them takes longer than using them

    def check(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Raise (CPU), or set the flag (GPU), if a tensor is not finite."""
        values = list(tensors.values())
        if is_asynchronous(values[0].device):
            self.look(tensors)
            return
        # A norm is quick, and finite only if every number is; one that overflows is looked at again.
        if math.isfinite(float(total_norm(values))):
            return
        finite = torch.isfinite(largest(values)).tolist()
        bad = [name for name, good in zip(tensors, finite, strict=True) if not good]
        if bad:
            raise NonFiniteError(f"{what} of {', '.join(bad)} holds NaN or infinity. Nothing was changed")

    def look(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the flag on the device. What was found before in this step stays."""
        value = nonfinite(list(tensors.values()))
        self.value = value if self.value is None else torch.maximum(self.value, value)

    def send(self, what: str, step: int) -> None:
        """Send the flag to the host, for ``raise_pending``; on a CPU there is none, as ``check`` has raised."""
        if self.value is None:
            return
        host, arrived = self._spare.pop() if self._spare else (torch.empty((), pin_memory=True), torch.cuda.Event())
        host.copy_(self.value, non_blocking=True)
        arrived.record()
        self._readings.append(_Reading(host, arrived, what, step))

    def raise_pending(self) -> None:
        """Raise the error of an earlier step, which was not applied, and begin a new one.

        Readings that have not arrived are left for later, up to eight of them.
        """
        self.value = None
        while self._readings and (len(self._readings) > _AHEAD or self._readings[0].arrived.query()):
            reading = self._readings.popleft()
            reading.arrived.synchronize()
            self._spare.append((reading.value, reading.arrived))
            if float(reading.value) > 0:
                self._readings.clear()
                raise NonFiniteError(
                    f"{reading.what} held NaN or infinity at step {reading.step}: that step changed nothing"
                )
