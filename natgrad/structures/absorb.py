"""The moving average of Kronecker factors, in place: every factor is absorbed as it arrives."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.linalg import gated_lerp
from natgrad.operators import KroneckerOperator
from natgrad.pullback.recorded import Weight
from natgrad.pullback.sharing import mean
from natgrad.pullback.streamed import Sink
from natgrad.pullback.tied import trace
from natgrad.rules.base import Moment

_HELD = 2**26  # bytes that wait to be absorbed together on a GPU: small kernels wait for the processor


@final
class Absorb(Sink):
    """Ā ← (1 − w) Ā + w A of factors that arrive one by one, and S̄ likewise (Martens and Grosse 2015, section 5).

    ``numbers``: of each layer that arrives, its number in the average. One that the average has not seen counts whole.
    A factor that is not finite is not absorbed: it raises or, on a GPU, where nobody looks, leaves the average alone.
    """

    def __init__(self, average: KroneckerOperator, numbers: Sequence[int], weight: Weight) -> None:
        self.average, self.numbers = average, numbers
        self._weight = weight
        self._held: list[tuple[Tensor, Tensor, Weight, int]] = []  # what is, what arrived, its weight and its count
        self._bytes = 0

    @property
    def weight(self) -> float:
        return float(self._weight)

    @property
    def places(self) -> Hashable:
        average = self.average
        known = tuple(average.saw(number) for number in self.numbers)
        sides = (average.left, average.right)
        return known, tuple(side[number].data_ptr() for number in self.numbers for side in sides)

    def weighted(self, weight: Weight) -> Absorb:
        return Absorb(self.average, self.numbers, weight)

    def inputs(self, b: int, moment: Moment) -> None:
        if isinstance(moment.count, Tensor):
            moment = Moment(mean(moment), 1)
        assert not isinstance(moment.count, Tensor)
        self._put(b, self.average.right[self.numbers[b]], moment.total, moment.count)

    def outputs(self, b: int, s: Tensor) -> None:
        self._put(b, self.average.left[self.numbers[b]], s, 1)

    def _put(self, b: int, factor: Tensor, total: Tensor, count: int) -> None:
        number = self.numbers[b]
        assert factor.shape == total.shape
        weight = self._weight if self.average.saw(number) else 1.0
        if factor.device.type == "cuda":
            self._held.append((factor, total, weight, count))
            self._bytes += total.numel() * total.element_size()
            if self._bytes > _HELD:
                self.flush()
            return
        # Second moments are finite where their diagonals are.
        if not math.isfinite(float(trace(total).sum())):
            title = self.average.blocks[number].title
            raise NonFiniteError(f"the estimate of the metric of {title} holds NaN or infinity. It was not averaged")
        factor.mul_(1 - float(weight)).add_(total, alpha=float(weight) / max(count, 1))

    def flush(self) -> None:
        held, self._held, self._bytes = self._held, [], 0
        if not held:
            return
        found = torch.zeros((), device=held[0][0].device)
        means = [total.contiguous() for _, total, _, _ in held]
        double = means[0].dtype == torch.float64  # torch's kernel divides by a number in single precision
        counts = [max(count, 1) for *_, count in held]
        if double:
            torch._foreach_div_(means, counts)
        for count in sorted({1} if double else set(counts)):
            scale = torch.full_like(found, 1.0 / count)
            alike = [t for t, its in zip(means, counts, strict=True) if double or its == count]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found, scale)
        news = [at for at, (_, _, weight, _) in enumerate(held) if isinstance(weight, float) and weight == 1.0]
        for group, weight in ((news, 1.0), ([at for at in range(len(held)) if at not in news], self._weight)):
            if group:
                gated_lerp([held[at][0] for at in group], [means[at] for at in group], weight, found)
