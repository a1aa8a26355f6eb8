"""NaN and infinity in a step: found without waiting for the device, and never applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError


@final
class Guard:
    """On the CPU a bad step raises at once, by name. On a GPU asking would stall the queue: there the old values
    are kept by the device, and the error is raised by the next step, which finds the answer waiting.
    """

    def __init__(self) -> None:
        self._ok: Tensor | None = None
        self._pending: list[tuple[Tensor, str, int]] = []

    def check(self, tensors: Mapping[str, Tensor], what: str, step: int) -> None:
        """Raise (CPU) or remember (GPU) that a tensor is not finite."""
        largest = torch.stack(list(torch._foreach_norm(list(tensors.values()), float("inf"))))
        if largest.device.type == "cpu":
            finite = torch.isfinite(largest)
            if not bool(finite.all()):
                bad = [name for name, good in zip(tensors, finite.tolist(), strict=True) if not good]
                raise NonFiniteError(f"{what} of {', '.join(bad)} holds NaN or infinity. Nothing was changed")
            return
        ok = torch.isfinite(largest).all()
        self._ok = ok if self._ok is None else self._ok & ok
        self._pending.append((ok.to("cpu", non_blocking=True), what, step))

    def gated(self, new: Tensor, old: Tensor | float) -> Tensor:
        """The new value, or the old one if something was not finite."""
        return new if self._ok is None else torch.where(self._ok, new, old)

    def report(self) -> None:
        """Raise what an earlier step found. It was not applied."""
        pending, self._pending, self._ok = self._pending, [], None
        if pending and pending[0][0].device.type == "cpu" and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize() if not torch.cuda.current_stream().query() else None
        for ok, what, step in pending:
            if not bool(ok):
                raise NonFiniteError(f"{what} held NaN or infinity at step {step}: that step changed nothing")
