"""Booleans on the device that the host reads later: NaN and infinity are noticed without stalling the queue."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import is_asynchronous
from natgrad.accelerate.fused import largest, nonfinite, total_norm
from natgrad.errors import NonFiniteError

Note = TypeVar("Note")

_AHEAD = 8  # steps that the host may run ahead of what it has read
_PAUSE = 2e-5  # seconds between two looks


def to_host_async(number: Tensor) -> Tensor:
    """A number [] on its way to the host: NaN until it arrives, and infinity where it is NaN itself.

    >>> float(to_host_async(torch.tensor(2.0))), float(to_host_async(torch.tensor(math.nan)))
    (2.0, inf)
    """
    return _host_memory((), pinned=number.is_cuda).copy_(number.nan_to_num(nan=math.inf), non_blocking=True)


def _host_memory(shape: Sequence[int], *, pinned: bool) -> Tensor:
    """NaN, whatever the user's default device and precision are; pinned, as a copy to other memory would wait."""
    return torch.full(tuple(shape), math.nan, dtype=torch.float32, device="cpu", pin_memory=pinned)


@final
class Readback(Generic[Note]):
    """Numbers on their way to the host, each with a note; they arrive in the order in which they were sent.

    On a CPU they are there at once; for a GPU the host may wait, or come again. What has not arrived is NaN, so that
    NaN cannot be sent. An event would tell the same, and takes the host longer to record than a number to look at.

    >>> readback = Readback[str]()
    >>> readback.send(torch.tensor([1.0, 2.0]), "a note")
    >>> readback.take(), readback.take_arrived(), len(readback)
    (([1.0, 2.0], 'a note'), None, 0)
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[Tensor, torch.device, Note]] = deque()
        self._spare: list[Tensor] = []  # in pinned memory

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, numbers: Tensor, note: Note) -> None:
        """Send a tensor [b] or [], which may change afterwards; all have the same shape."""
        spare = self._spare.pop() if numbers.is_cuda and self._spare else None
        host = _host_memory(numbers.shape or (1,), pinned=numbers.is_cuda) if spare is None else spare.fill_(math.nan)
        host.copy_(numbers, non_blocking=True)
        self._sent.append((host, numbers.device, note))

    def take(self) -> tuple[list[float], Note]:
        """The first one, with its note; the device is waited for until it has sent it."""
        host, device, _ = self._sent[0]
        return self._taken(_awaited(host, device))

    def take_arrived(self) -> tuple[list[float], Note] | None:
        """The first one, with its note, if it is there."""
        if not self._sent:
            return None
        numbers = self._sent[0][0].tolist()
        return self._taken(numbers) if _are_there(numbers) else None

    def _taken(self, numbers: list[float]) -> tuple[list[float], Note]:
        host, device, note = self._sent.popleft()
        if device.type == "cuda":
            self._spare.append(host)
        return numbers, note

    def clear(self) -> None:
        """Forget what has been sent."""
        self._sent.clear()


def _are_there(numbers: list[float]) -> bool:
    return not any(map(math.isnan, numbers))


def _awaited(host: Tensor, device: torch.device) -> list[float]:
    while not _are_there(numbers := host.tolist()):
        torch.cuda.current_stream(device).query()  # raises where the device has failed
        time.sleep(_PAUSE)
    return numbers


@final
class Flag:
    """Whether something in a step was not finite.

    On a CPU ``check`` raises at once, by name. On a GPU asking would stall the queue: there ``value`` becomes a tensor
    [] on the device, 1.0 if something was not finite, which gates the updates of ``natgrad.accelerate.fused``. The
    error is raised by a later step, in ``raise_pending``.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._readings: Readback[tuple[str, int]] = Readback()  # what was not finite, and in which step

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
            half = any(tensors[name].dtype is torch.float16 for name in bad)
            ends = ": float16 ends at 65504, use bfloat16 or float32 parameters (autocast)" if half else ""
            raise NonFiniteError(f"{what} of {', '.join(bad)} holds NaN or infinity. Nothing was changed{ends}")

    def look(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the flag on the device. What was found before in this step stays."""
        value = nonfinite(list(tensors.values()))
        self.value = value if self.value is None else torch.maximum(self.value, value)

    def send(self, what: str, step: int) -> None:
        """Send the flag to the host, for ``raise_pending``; on a CPU there is none, as ``check`` has raised."""
        if self.value is not None:
            self._readings.send(self.value, (what, step))

    def raise_pending(self) -> None:
        """Raise the error of an earlier step, which was not applied, and begin a new one.

        Readings that have not arrived are left for later, up to eight of them.
        """
        self.value, readings = None, self._readings
        if not readings:
            return
        while reading := readings.take() if len(readings) > _AHEAD else readings.take_arrived():
            (flag,), (what, step) = reading
            if flag > 0:
                self._readings.clear()
                raise NonFiniteError(f"{what} held NaN or infinity at step {step}: that step changed nothing")
