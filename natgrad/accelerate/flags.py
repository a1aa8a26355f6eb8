"""NaN and infinity in a step: found without waiting for the device, and never applied."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.linalg import gated_add, gated_descent, gated_momentum

_PENDING = 8  # steps that the host may be ahead of what it knows


@final
@dataclass(frozen=True)
class _Answer:
    """Whether something was finite, on its way to the host."""

    found: Tensor  # pinned
    arrived: torch.cuda.Event
    what: str
    step: int


@final
class Guard:
    """On the CPU a bad step raises at once, by name. On a GPU asking would stall the queue: there the old values
    are kept by the device, and the error is raised by a later step, which finds the answer waiting.
    """

    def __init__(self) -> None:
        self.found: Tensor | None = None  # 1.0 if something was not finite, on the device
        self._answers: deque[_Answer] = deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []  # making them takes longer than using them

    def check(self, tensors: Mapping[str, Tensor], what: str, step: int) -> None:
        """Raise (CPU) or remember (GPU) that a tensor is not finite."""
        if next(iter(tensors.values())).device.type == "cuda":
            self.look(tensors)
            self.send(what, step)
            return
        values = list(tensors.values())
        # A sum is quick and finite only if every number is; one that overflows is looked at again.
        if bool(torch.isfinite(torch.stack([t.sum() for t in values])).all()):
            return
        finite = torch.isfinite(torch.stack(torch._foreach_norm(values, float("inf"))))
        if not bool(finite.all()):
            bad = [name for name, good in zip(tensors, finite.tolist(), strict=True) if not good]
            raise NonFiniteError(f"{what} of {', '.join(bad)} holds NaN or infinity. Nothing was changed")

    def look(self, tensors: Mapping[str, Tensor]) -> None:
        """Find, on the GPU, whether a tensor is not finite."""
        values = list(tensors.values())
        self.found = torch.zeros((), device=values[0].device)
        # What GradScaler does to look at all gradients in one launch.
        torch._amp_foreach_non_finite_check_and_unscale_(values, self.found, torch.ones_like(self.found))

    def send(self, what: str, step: int) -> None:
        """Send what was found to the host."""
        assert self.found is not None
        # A copy to memory that is not pinned would wait for the device.
        host, arrived = self._spare.pop() if self._spare else (torch.empty((), pin_memory=True), torch.cuda.Event())
        host.copy_(self.found, non_blocking=True)
        arrived.record()
        self._answers.append(_Answer(host, arrived, what, step))

    def adopt(self, found: Tensor | None) -> None:
        """What a recorded step has found."""
        self.found = found

    def forget(self) -> None:
        """Nothing has been looked at."""
        self.found = None

    def add(self, tensors: Sequence[Tensor], changes: Sequence[Tensor]) -> None:
        """Add the changes, unless something was not finite."""
        if self.found is None:
            torch._foreach_add_(list(tensors), list(changes))
        else:  # one launch for all tensors, which looks at the flag on the device
            gated_add(tensors, changes, 1.0, self.found)

    def descend(self, tensors: Sequence[Tensor], velocity: Sequence[Tensor], rate: float | Tensor) -> None:
        """Subtract the rate times the velocity, unless something was not finite."""
        if self.found is None:
            torch._foreach_add_(list(tensors), list(velocity), alpha=-float(rate))
        else:
            gated_descent(tensors, velocity, rate, self.found)

    def roll(
        self,
        tensors: Sequence[Tensor],
        directions: Sequence[Tensor],
        momenta: Sequence[Tensor],
        rate: float | Tensor,
        persistence: float,
        shrink: Tensor,
    ) -> None:
        """m ← μm + shrink·v, x ← x − rate·m on a GPU, unless something was not finite. The directions are used up."""
        assert self.found is not None
        gated_momentum(tensors, directions, momenta, rate, persistence, shrink.reciprocal(), self.found)

    def move(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Set the values, up to rounding, unless something was not finite: few launches for many tensors."""
        if self.found is None:
            torch._foreach_copy_(list(tensors), list(values))
        else:  # the values are used up
            torch._foreach_sub_(list(values), list(tensors))
            self.add(tensors, values)

    def put(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Set the values, unless something was not finite."""
        if self.found is None:
            torch._foreach_copy_(list(tensors), list(values))
        else:
            bad, old = self.found > 0, list(tensors)
            torch._foreach_copy_(old, [torch.where(bad, t, new) for t, new in zip(old, values, strict=True)])

    def scale(self, tensors: Sequence[Tensor], factor: float | Tensor) -> None:
        """Multiply by the factor, unless something was not finite."""
        if self.found is None:
            torch._foreach_mul_(list(tensors), factor)
        else:
            torch._foreach_mul_(list(tensors), torch.where(self.found > 0, 1.0, factor))

    def report(self) -> None:
        """Raise what an earlier step has found. It was not applied. Answers that are still on their way are left."""
        self.found = None
        while self._answers and (len(self._answers) > _PENDING or self._answers[0].arrived.query()):
            answer = self._answers.popleft()
            answer.arrived.synchronize()
            self._spare.append((answer.found, answer.arrived))
            if float(answer.found) > 0:
                self._answers.clear()
                raise NonFiniteError(
                    f"{answer.what} held NaN or infinity at step {answer.step}: that step changed nothing"
                )
