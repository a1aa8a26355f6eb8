"""Moving averages of Kronecker factors on a GPU: in place, and many in few launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.inverses import diagonal
from natgrad.accelerate.moments import aligned_size
from natgrad.accelerate.replay import Scalar

_WAITING = 2**22  # bytes that wait to be averaged together on a GPU, at least: a launch of few takes as long as of many
_WAITING_ALONE = 2**26  # the same, where there is memory
_SHARE = 8  # or this part of all factors
_LAUNCH = 320 * 2**16  # numbers that torch's fused kernels take in one launch
_LINE = 16  # numbers of a cache line
_NARROW = 128  # columns, up to which it does not matter where rows begin
_PAGE = 4096  # bytes
_VECTOR = 4  # numbers that they read at once, where a tensor starts at such a multiple


@final
class PendingAverages:
    """Ā ← (1 − w) Ā + w total/count of factors that arrive one by one (Martens and Grosse 2015, section 5).

    They wait for others, and all leave their averages alone where one is not finite. ``alone``: no pass holds its
    activations meanwhile, so that more may wait.

    >>> average = torch.ones(1, 1, 1)
    >>> averages = PendingAverages([average])
    >>> averages.add(average, torch.full((1, 1, 1), 6.0), count=2, weight=0.5)
    >>> averages.flush()
    >>> average.item()
    2.0
    """

    def __init__(self, factors: Sequence[Tensor], *, alone: bool = False) -> None:
        least = _WAITING_ALONE if alone else _WAITING
        self._most = max(least, sum(factor.nbytes for factor in factors) // _SHARE)
        self._waiting: list[Pending] = []
        self._bytes = 0

    def add(
        self, factor: Tensor, total: Tensor, *, count: int | Tensor, weight: Scalar, is_moment: bool = True
    ) -> None:
        """Average a factor [c d d], or a diagonal [c d], now or at the next ``flush``.

        Where the count is a tensor [], of single precision and above zero, the total is overwritten. ``is_moment``: of
        [c d d] the diagonal tells whether all is finite.
        """
        assert factor.shape == total.shape
        count = count if isinstance(count, Tensor) else max(count, 1)
        self._waiting.append(Pending.of(factor, total, weight, count, is_moment=is_moment))
        self._bytes += total.numel() * total.element_size()
        if self._bytes > self._most:
            self.flush()

    def flush(self) -> None:
        """Average all that waits."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            average_together(waiting)


def lay_out(factor: Tensor) -> Tensor:
    """A factor with rows that start at whole vectors, as moments write them; itself where it is so.

    On a processor rows are also not whole pages apart, where they would share the same few lines of a cache.
    """
    if factor.ndim != 3 or factor.shape[0] != 1:
        return factor.contiguous()
    if factor.device.type == "cuda" and not factor.is_contiguous():
        return factor if _padded(factor) else factor.contiguous()
    d = factor.shape[1]
    width = _row_length(factor, d)
    if factor.stride()[1:] == (width, 1):
        return factor
    return factor.new_zeros(1, d, width)[..., :d].copy_(factor)


def gram(x: Tensor, count: int) -> Tensor:
    """x xᵀ/count [b d d] of matrices [b d n], with the rows that ``lay_out`` gives to factors.

    >>> gram(torch.ones(1, 2, 3), 6)
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]])
    """
    b, d, _ = x.shape
    out = x.new_empty(b, d, _row_length(x, d))[..., :d]
    return out.baddbmm_(x, x.mT, beta=0, alpha=1 / count)


def _row_length(like: Tensor, d: int) -> int:
    return aligned_size(d) if like.device.type == "cuda" else _cache_line_size(d, like.element_size())


def _cache_line_size(d: int, size: int) -> int:
    """The distance of the rows of a matrix with d columns, of numbers of ``size`` bytes, on a processor."""
    width = -(-d // _LINE) * _LINE if d > _NARROW else d
    return width + _LINE * (width * size % _PAGE == 0)


@final
@dataclass(frozen=True)
class Pending:
    """A factor and a total that goes into it, both as numbers in a row, and numbers that show whether it is finite."""

    factor: Tensor
    total: Tensor
    diagonal: Tensor | None  # None where the whole total is looked at
    weight: Scalar
    count: int | Tensor

    @property
    def scale(self) -> tuple[int, int]:
        """Weight and count: averages that have the same ones are computed at once."""
        return id(self.weight), id(self.count) if isinstance(self.count, Tensor) else self.count

    @staticmethod
    def of(factor: Tensor, total: Tensor, weight: Scalar, count: int | Tensor, *, is_moment: bool = True) -> Pending:
        """In the memory of the factor; what lies between the rows of a matrix may be anything."""
        if not _padded(factor):
            on_diagonal = diagonal(total) if is_moment and total.ndim == 3 else None
            return Pending(factor.view(-1), total.contiguous().view(-1), on_diagonal, weight, count)
        if total.stride()[1:] != factor.stride()[1:]:
            like = torch.empty_strided(factor.shape, factor.stride(), dtype=total.dtype, device=total.device)
            total = like.copy_(total)
        length = (factor.shape[1] - 1) * factor.stride(1) + factor.shape[2]
        row = total.as_strided((length,), (1,))
        return Pending(factor.as_strided((length,), (1,)), row, diagonal(total), weight, count)


def average_together(pending: Sequence[Pending]) -> None:
    """(1 − w) x + w y/count of all of them in few launches; nothing, if one of the y is not finite."""
    gate = _not_finite(pending)
    for scale in dict.fromkeys(one.scale for one in pending):
        alike = [one for one in pending if one.scale == scale]
        for launch in _launches(alike):
            factors, totals = zip(*launch, strict=True)
            fused.average_(factors, totals, alike[0].weight, count=alike[0].count, gate=gate)


def _launches(pending: Sequence[Pending], most: int = _LAUNCH) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Factors and totals that are averaged at once: a large one in equal parts, as a small rest would take as long.

    >>> x = torch.zeros(22)
    >>> [[len(part) for part, _ in launch] for launch in _launches([Pending(x, x, None, 1.0, 1)], most=16)]
    [[12], [10]]
    """
    small = [(one.factor, one.total) for one in pending if len(one.factor) <= most]
    if small:
        yield small
    for one in pending:
        if len(one.factor) > most:
            size = _divided(_divided(len(one.factor), _divided(len(one.factor), most)), _VECTOR) * _VECTOR
            yield from ([pair] for pair in zip(one.factor.split(size), one.total.split(size), strict=True))


def _divided(count: int, by: int) -> int:
    """Rounded up."""
    return -(-count // by)


def _padded(factor: Tensor) -> bool:
    """Whether a matrix [1 d d] has rows that are longer in memory."""
    return factor.ndim == 3 and factor.shape[0] == 1 and not factor.is_contiguous() and factor.stride(2) == 1


def _not_finite(pending: Sequence[Pending]) -> Tensor:
    """1 where one of the totals is not finite, on the device: second moments are finite where their diagonals are."""
    whole = [one.total for one in pending if one.diagonal is None]
    diagonals = [one.diagonal.flatten() for one in pending if one.diagonal is not None]
    return fused.nonfinite([*whole, torch.cat(diagonals)] if diagonals else whole)
