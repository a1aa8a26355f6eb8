"""The moving average of a metric with layers, in place: every factor is added as soon as it is computed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import final

from torch import Tensor

from natgrad.accelerate.averages import PendingAverages
from natgrad.accelerate.devices import is_asynchronous
from natgrad.accelerate.replay import Scalar
from natgrad.errors import NonFiniteError
from natgrad.pullbacks.layer_factors import FactorSink, Side
from natgrad.rules.features import Moment
from natgrad.structures.layered import LayerOperator, group_weights


@final
class FactorAverage(FactorSink):
    """The sink that adds factors to moving averages, Ā ← (1 − w) Ā + w A, and S̄ and D̄ likewise, one by one.

    ``numbers``: the number in ``average`` of each layer b of ``put``. A layer that is new has weight 1. Every group of
    a stacked layer has its own weight (``group_weights``), computed from A, which arrives before S. ``alone``: no
    forward pass holds activations at the same time. ``lenient``: a factor that is not finite is left out, and
    ``refuse_left_out`` raises; else ``put`` does.
    """

    def __init__(
        self,
        average: LayerOperator,
        numbers: Sequence[int],
        weight: Scalar,
        *,
        alone: bool = False,
        lenient: bool = False,
    ) -> None:
        self.average, self.numbers = average, numbers
        self._weight, self._alone, self._lenient = weight, alone, lenient
        self._left_out: list[str] = []  # titles of layers
        self._group_weights: dict[int, Tensor] = {}

    @cached_property
    def _averages(self) -> PendingAverages:  # not made where captured kernels are replayed
        factors = [t for side in self.average.averaged_letters.values() for t in side]
        return PendingAverages(factors, alone=self._alone)

    @property
    def weight(self) -> Scalar:
        return self._weight

    @property
    def address_key(self) -> Hashable:
        return tuple(self.numbers), self.average.unseen, self.average.addresses

    def with_weight(self, weight: Scalar) -> FactorAverage:
        return FactorAverage(self.average, self.numbers, weight, alone=self._alone, lenient=self._lenient)

    def put(self, b: int, side: Side, moment: Moment) -> None:
        number = self.numbers[b]
        factor = self.average.averaged_letters[side][number]
        weight = self._weight if self.average.saw(number) else 1.0
        rule = self.average.blocks[number].rule
        if rule is not None and rule.stacked:
            new = moment.mean()
            if side == "A":
                self._group_weights[b] = group_weights(factor, new, weight, 1) / weight
            share = self._group_weights[b].view(-1, *[1] * (factor.ndim - 1))
            moment = Moment(factor.lerp(new, share.to(factor.dtype)), 1)  # with ``weight`` this is w_c of the new one
        if is_asynchronous(factor.device):  # not checked on the host: a moment that is not finite is not added
            masked = isinstance(moment.count, Tensor) and moment.count.ndim > 0
            moment = Moment(moment.mean(), 1) if masked else moment
            self._averages.add(factor, moment.total, count=moment.count, weight=weight, is_moment=side != "D")
            return
        if moment.is_finite():
            moment.average_into(factor, float(weight))
            return
        self._left_out.append(self.average.blocks[number].title)
        if not self._lenient:
            self.refuse_left_out()

    def refuse_left_out(self) -> None:
        """Raise if a factor was not finite."""
        if self._left_out:
            raise NonFiniteError(
                f"the estimate of the metric of {', '.join(dict.fromkeys(self._left_out))} holds NaN or infinity, and "
                "was not averaged: clean the batch, or lower the learning rate"
            )

    def flush(self) -> None:
        if "_averages" in vars(self):  # else nothing waits
            self._averages.flush()
