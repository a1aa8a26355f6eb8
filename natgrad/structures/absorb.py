"""The moving average of Kronecker factors, in place: every factor is absorbed as it arrives."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.linalg import gated_lerp
from natgrad.operators import KroneckerOperator
from natgrad.operators.factor import aligned
from natgrad.pullback.recorded import Weight
from natgrad.pullback.sharing import mean
from natgrad.pullback.sink import Sink
from natgrad.pullback.tied import trace
from natgrad.rules.base import Moment
from natgrad.rules.products import spaced
from natgrad.rules.rows import Rows

_HELD = 2**22  # bytes that wait to be absorbed together on a GPU, at least: a launch of few takes as long as of many
_PART = 8  # or this part of all factors
_LARGE = 2**20  # numbers
_LAUNCH = 320 * 2**16  # numbers that torch's fused kernels take in one launch
_VECTOR = 4  # numbers that they read at once, where a tensor starts at such a multiple


@final
class Absorb(Sink):
    """Ā ← (1 − w) Ā + w A of factors that arrive one by one, and S̄ likewise (Martens and Grosse 2015, section 5).

    ``numbers``: of each layer that arrives, its number in the average. One that the average has not seen counts whole.
    A factor that is not finite is not absorbed: it raises or, on a GPU, where nobody looks, leaves the average alone.
    """

    def __init__(self, average: KroneckerOperator, numbers: Sequence[int], weight: Weight) -> None:
        self.average, self.numbers = average, numbers
        self._weight = weight
        self._held: list[Held] = []
        self._bytes = 0

    @property
    def weight(self) -> float:
        return float(self._weight)

    @property
    def places(self) -> Hashable:
        return tuple(self.numbers), self.average.unseen, self.average.addresses

    def weighted(self, weight: Weight) -> Absorb:
        return Absorb(self.average, self.numbers, weight)

    def input_rows(self, b: int, rows: Rows, count: int) -> bool:
        return self._absorbed(b, self.average.right, rows, count)

    def output_rows(self, b: int, rows: Rows, count: int) -> bool:
        return self._absorbed(b, self.average.left, rows, count)

    def _absorbed(self, b: int, factors: Sequence[Tensor], rows: Rows, count: int) -> bool:
        """On a processor, and where nothing can overflow; what was not seen before has nothing to be added to."""
        number = self.numbers[b]
        factor = factors[number]
        alike = factor.ndim == 3 and factor.dtype == rows.x.dtype
        if factor.device.type == "cuda" or not alike or not self.average.saw(number) or not rows.bounded:
            return False
        rows.absorb(factor[0], 1 - self.weight, self.weight / max(count, 1))
        return True

    def inputs(self, b: int, moment: Moment) -> None:
        if isinstance(moment.count, Tensor):
            moment = Moment(mean(moment), 1)
        assert not isinstance(moment.count, Tensor)
        self._put(b, self.average.right[self.numbers[b]], moment.total, moment.count)

    def outputs(self, b: int, total: Tensor, count: int) -> None:
        self._put(b, self.average.left[self.numbers[b]], total, count)

    @cached_property
    def _most(self) -> int:
        """Bytes that may wait."""
        return max(_HELD, sum(factor.nbytes for factor in (*self.average.left, *self.average.right)) // _PART)

    def _put(self, b: int, factor: Tensor, total: Tensor, count: int) -> None:
        number, count = self.numbers[b], max(count, 1)
        assert factor.shape == total.shape
        known = self.average.saw(number)
        if factor.device.type == "cuda":
            self._held.append(Held.of(factor, total, self._weight if known else 1.0, count))
            self._bytes += total.numel() * total.element_size()
            if self._bytes > self._most:
                self.flush()
            return
        # Second moments are finite where their diagonals are.
        if not math.isfinite(float(trace(total).sum())):
            title = self.average.blocks[number].title
            raise NonFiniteError(
                f"the estimate of the metric of {title} holds NaN or infinity, and was not averaged: clean the batch, "
                "or lower the learning rate"
            )
        weight = float(self._weight) if known else 1.0
        factor.mul_(1 - weight).add_(total, alpha=weight / count)

    def flush(self) -> None:
        held, self._held, self._bytes = self._held, [], 0
        if held:
            absorb_together(held)


def laid_out(factor: Tensor) -> Tensor:
    """With rows that begin at whole vectors, as those of estimates: an average meets them without a copy."""
    if factor.ndim != 3 or factor.shape[0] != 1:
        return factor.contiguous()
    if factor.device.type != "cuda":
        return spaced(factor)
    if not factor.is_contiguous():
        return factor if _padded(factor) else factor.contiguous()
    wider = aligned(factor)
    return factor if wider is factor else wider[:, : factor.shape[1], : factor.shape[2]]


@final
@dataclass(frozen=True)
class Held:
    """A factor and what arrived of it, each as numbers in a row, and numbers that show whether that is finite."""

    factor: Tensor
    total: Tensor
    sign: Tensor | None  # the diagonal; None where all are to be looked at
    weight: Weight
    count: int

    @staticmethod
    def of(factor: Tensor, total: Tensor, weight: Weight, count: int) -> Held:
        """In the memory of the factor; what lies between the rows of a matrix may be anything."""
        diagonal = total.diagonal(dim1=-2, dim2=-1) if total.ndim == 3 else total
        if not _padded(factor):
            total = total.contiguous().view(-1)
            return Held(factor.view(-1), total, diagonal if len(total) >= _LARGE else None, weight, count)
        if total.stride()[1:] != factor.stride()[1:]:
            like = torch.empty_strided(factor.shape, factor.stride(), dtype=total.dtype, device=total.device)
            total = like.copy_(total)
        length = (factor.shape[1] - 1) * factor.stride(1) + factor.shape[2]
        return Held(factor.as_strided((length,), (1,)), total.as_strided((length,), (1,)), diagonal, weight, count)


def absorb_together(held: Sequence[Held]) -> None:
    """(1 − w) x + w y/count of all of them in few launches; nothing, if one of the y is not finite."""
    found = _not_finite(held)
    for key in dict.fromkeys((id(one.weight), one.count) for one in held):
        alike = [one for one in held if (id(one.weight), one.count) == key]
        for launch in _launches(alike):
            factors, totals = zip(*launch, strict=True)
            gated_lerp(factors, totals, alike[0].weight, key[1], found)


def _launches(held: Sequence[Held], most: int = _LAUNCH) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Factors and totals that are averaged at once: a large one in equal parts, as a small rest would take as long.

    >>> x = torch.zeros(22)
    >>> [[len(part) for part, _ in launch] for launch in _launches([Held(x, x, None, 1.0, 1)], most=16)]
    [[12], [10]]
    """
    small = [(one.factor, one.total) for one in held if len(one.factor) <= most]
    if small:
        yield small
    for one in held:
        if len(one.factor) > most:
            size = _divided(_divided(len(one.factor), _divided(len(one.factor), most)), _VECTOR) * _VECTOR
            yield from ([pair] for pair in zip(one.factor.split(size), one.total.split(size), strict=True))


def _divided(count: int, by: int) -> int:
    """Rounded up."""
    return -(-count // by)


def _padded(factor: Tensor) -> bool:
    """Whether a matrix [1 d d] has rows that are longer in memory."""
    return factor.ndim == 3 and factor.shape[0] == 1 and not factor.is_contiguous() and factor.stride(2) == 1


def _not_finite(held: Sequence[Held]) -> Tensor:
    """1 where one of the totals is not finite, on the device: second moments are finite where their diagonals are."""
    found = torch.zeros((), device=held[0].total.device)
    whole = [one.total for one in held if one.sign is None]
    if whole:
        torch._amp_foreach_non_finite_check_and_unscale_(whole, found, torch.ones_like(found))
    signs = [one.sign.flatten() for one in held if one.sign is not None]
    # NaN and infinity times zero are NaN, and NaN is not zero.
    return torch.cat(signs).mul_(0).sum().add(found).ne(0).to(found.dtype) if signs else found
