"""A stand-in for CUDA graphs: what is captured is not executed then, and every replay executes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class EagerGraphs:
    """Logs "capture" and "replay". ``fails``: as where something waits for the device."""

    log: list[str] = field(default_factory=list)
    fails: bool = False

    def possible(self, tensors: Sequence[Tensor]) -> bool:
        return bool(tensors)

    def capture(self, fn: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        self.log.append("capture")
        if self.fails:
            raise RuntimeError("something waits for the device")
        result: list[T] = []

        def replay() -> None:
            self.log.append("replay")
            result[:] = [fn()]

        return None, replay  # type: ignore[return-value]
