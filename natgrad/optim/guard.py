"""NaN and infinity in a step: found without waiting for the device, and never applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError


@final
@dataclass(frozen=True)
class _Answer:
    """Whether something was finite, on its way to the host."""

    ok: Tensor  # pinned
    arrived: torch.cuda.Event
    what: str
    step: int


@final
class Guard:
    """On the CPU a bad step raises at once, by name. On a GPU asking would stall the queue: there the old values
    are kept by the device, and the error is raised by the next step, which finds the answer waiting.
    """

    def __init__(self) -> None:
        self._ok: Tensor | None = None
        self._answers: list[_Answer] = []

    def check(self, tensors: Mapping[str, Tensor], what: str, step: int) -> None:
        """Raise (CPU) or remember (GPU) that a tensor is not finite."""
        largest = torch.stack(list(torch._foreach_norm(list(tensors.values()), float("inf"))))
        if largest.device.type != "cuda":
            finite = torch.isfinite(largest)
            if not bool(finite.all()):
                bad = [name for name, good in zip(tensors, finite.tolist(), strict=True) if not good]
                raise NonFiniteError(f"{what} of {', '.join(bad)} holds NaN or infinity. Nothing was changed")
            return
        ok = torch.isfinite(largest).all()
        self._ok = ok if self._ok is None else self._ok & ok
        # A copy to memory that is not pinned would wait for the device.
        host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(ok, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(largest.device))
        self._answers.append(_Answer(host, arrived, what, step))

    def gated(self, new: Tensor, old: Tensor | float) -> Tensor:
        """The new value, or the old one if something was not finite."""
        return new if self._ok is None else torch.where(self._ok, new, old)

    def report(self) -> None:
        """Raise what the last step found. It was not applied. Its answer left before this step's work was queued."""
        answers, self._answers, self._ok = self._answers, [], None
        for answer in answers:
            answer.arrived.synchronize()
            if not bool(answer.ok):
                raise NonFiniteError(
                    f"{answer.what} held NaN or infinity at step {answer.step}: that step changed nothing"
                )
