"""Inverses that are made again and again in the same memory: on a GPU most of them from a recording."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.operators.factor import Factor, full
from natgrad.operators.inverting import Task, invert
from natgrad.operators.newton import Newton
from natgrad.operators.sent import sent
from natgrad.pullback.recorded import Recordings, Weight

_RECORDED = 2048  # rows; of larger ones the kernels take longer than to start them, and what they need is much memory

Sides: TypeAlias = Sequence[Sequence[Factor]]  # S of every layer, and A
Chosen: TypeAlias = Callable[[Factor], bool]
Make: TypeAlias = Callable[[Sides, Weight, Chosen], list[Task]]


@final
class Remade:
    """The inverses of factors that change, and stay where they are, with a damping that may change too.

    To invert one small matrix is a dozen kernels, and a network has dozens of them: a GPU waits for the processor to
    start them. Where factors and inverses lie where they lay before, all are started at once.
    """

    def __init__(self) -> None:
        self._recordings = Recordings()
        self._flag: Tensor | None = None
        self.failures: list[Tensor] = []  # above 0 if a matrix could not be inverted; on their way to the host

    def first(self, tasks: Sequence[Task]) -> None:
        """Do the tasks, where there are no inverses yet: a GPU is waited for, as without them there is no step."""
        self.failures = []
        invert(tasks, wait=True)

    def mend(self, tasks: Sequence[Task]) -> None:
        """Do the tasks again, after a failure, and with an eye on each."""
        self.failures = []
        invert(tasks, warm=True, wait=True)

    def again(self, make: Make, sides: Sides, damping: float, newton: Newton | None, places: Hashable) -> None:
        """Do the tasks that ``make`` finds, for the factors that it is asked about; the last inverses are there.

        ``places``: where the inverses lie.
        """
        self.failures = []  # also where it raises
        self.failures = [sent(count) for count in self._again(make, sides, damping, newton, places)]

    def _again(self, make: Make, sides: Sides, damping: float, newton: Newton | None, places: Hashable) -> list[Tensor]:
        like = sides[0][0]
        if not recordable(like):
            return invert(make(sides, damping, lambda _: True), True, newton)
        flag = self._flag = like.new_zeros(()) if self._flag is None else self._flag

        def small(factor: Factor) -> bool:
            d = factor.shape[-1]
            return not full(factor) or (d < _RECORDED and (newton is None or not newton.takes(d)))

        def compute(sources: Sequence[Tensor], weight: Weight) -> None:
            here = sources[: len(sides[0])], sources[len(sides[0]) :]
            flag.copy_(sum(invert(make(here, weight, small), True), torch.zeros_like(flag)))

        self._recordings.run([*sides[0], *sides[1]], (places, repr(newton)), compute, damping)
        return [flag, *invert(make(sides, damping, lambda factor: not small(factor)), True, newton)]


def recordable(like: Factor) -> bool:
    """Whether kernels on such factors are recorded: on a GPU, and in single precision, as recordings have the damping.

    >>> recordable(torch.zeros(1, 2, 2))
    False
    """
    return like.device.type == "cuda" and like.dtype != torch.float64
