"""Which example every row of a cotangent belongs to: found by a probe, for modules and operations alike.

A shape does not show it: a model may swap its axes (t positions, and t happens to be n), sort its examples and put them
back, or apply a layer to a table with n rows. Cotangents do. Scaling example n of the outputs by c_n must scale the
rows of example n by c_n, and nothing else. With powers of two, which no precision rounds, a few backward passes number
all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision
from natgrad.accelerate.moments import single

Shape: TypeAlias = tuple[int, ...]


@final
@dataclass(frozen=True)
class BatchAxis:
    """Where a tensor has its n examples: on one axis, whose entries are numbered [before n after], row-major.

    >>> BatchAxis(0, before=2).examples(6, 3)
    tensor([0, 1, 2, 0, 1, 2])
    """

    index: int
    before: int = 1

    def fits(self, shape: Shape, n: int) -> bool:
        """Whether a tensor of this shape can have n examples there."""
        size = shape[self.index] if 0 <= self.index < len(shape) else 0
        return size > 0 and size % (self.before * n) == 0

    def examples(self, size: int, n: int, device: torch.device | None = None) -> Tensor:
        """The example of every entry of the axis."""
        return torch.arange(size, device=device) // (size // (self.before * n)) % n

    def move_to_front(self, t: Tensor, n: int, lead: int = 0) -> Tensor:
        """A view with the n examples on an axis of their own, in front; ``lead`` axes before them stay.

        >>> import torch
        >>> BatchAxis(0, before=2).move_to_front(torch.arange(6), 3).flatten(1)
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
        """
        axis = lead + self.index
        return t.unflatten(axis, (self.before, n, -1)).movedim(axis + 1, lead)

    def split(self, shape: Shape, n: int) -> Shape:
        """The shape of that view."""
        index = self.index
        return (n, *shape[:index], self.before, shape[index] // (self.before * n), *shape[index + 1 :])


@final
@dataclass(frozen=True)
class RowExamples:
    """Which of n examples the rows of an operation belong to: row-major [before n after], or any ``index`` [rows].

    ``of_groups``: the groups c of a row belong to different examples (experts with a capacity); these are the examples
    of rows and groups (r c) among all pairs (n c).
    """

    n: int
    before: int = 1
    index: Tensor | None = None
    of_groups: RowExamples | None = None

    def by_group(self, rows: int, c: int, device: torch.device) -> RowExamples:
        """These are the examples of rows and groups (r c)."""
        index = self.index
        if index is None:
            index = BatchAxis(0, self.before).examples(rows * c, self.n, device)
        pairs = RowExamples(self.n * c, index=index * c + torch.arange(c, device=device).repeat(rows))
        return replace(self, of_groups=pairs)

    def gather(self, t: Tensor, axis: int = 0) -> Tensor:
        """The rows of every example on axes [n r] of their own, zeros where an example has fewer than another."""
        if self.of_groups is not None:
            by_pair = self.of_groups.gather(t.flatten(axis, axis + 1), axis)
            return by_pair.unflatten(axis, (self.n, -1)).transpose(axis + 1, axis + 2)
        if self.index is None:
            return t.unflatten(axis, (self.before, self.n, -1)).movedim(axis + 1, axis).flatten(axis + 1, axis + 2)
        slots = self._slots.to(t.device)
        t = torch.cat([t, t.new_zeros(()).expand(*t.shape[:axis], 1, *t.shape[axis + 1 :])], dim=axis)
        return t.index_select(axis, slots.flatten()).unflatten(axis, tuple(slots.shape))

    def total(self, t: Tensor, axis: int = 0) -> Tensor:
        """The sum over the rows of every example."""
        if self.index is None or self.of_groups is not None:
            return self.gather(t, axis).sum(axis + 1)
        return t.new_zeros(*t.shape[:axis], self.n, *t.shape[axis + 1 :]).index_add(axis, self.index, t)

    @property
    def ragged(self) -> bool:
        """Whether examples may have different numbers of rows."""
        return self.index is not None or self.of_groups is not None

    @cached_property
    def _slots(self) -> Tensor:
        """[n r], the rows of every example; one past the last where there is none."""
        assert self.index is not None
        counts = torch.bincount(self.index, minlength=self.n)
        order = torch.argsort(self.index, stable=True)
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.index[order]]
        slots = order.new_full((self.n, max(1, int(counts.max()))), len(order))
        slots[self.index[order], place] = order
        return slots


# The probe.


_BASES = {True: 4, False: 16}  # of the digits that number the examples, as exponents of two; float16 has few exponents
_NUMBERS = 4  # that a row of cotangents is projected to: those of all layers would not fit into memory twice


@final
@dataclass(frozen=True)
class Probe:
    """Cotangents of the outputs: random ones s [n *out], and the same scaled by powers of two that number the examples.

    >>> probe = Probe.of(torch.ones(3, 2))
    >>> s = torch.stack(list(probe.columns()))
    >>> probe.labels(s[:, [2, 0, 0]])
    tensor([2, 0, 0])
    >>> probe.labels(s + s.flip(1)) is None  # rows that mix examples
    True
    """

    s: Tensor
    base: int

    @staticmethod
    def of(y: Tensor, half: bool = False) -> Probe:
        """For outputs y [n *out]; ``half``: some cotangents come in float16."""
        generator = torch.Generator().manual_seed(0)
        s = torch.rand(y.shape, generator=generator, dtype=torch.float64, device=generator.device).add(0.5).to(y)
        return Probe(s, _BASES[half])

    @property
    def n(self) -> int:
        return self.s.shape[0]

    def columns(self) -> Iterator[Tensor]:
        """s, and s scaled by 2^k for each of the digits k of the examples' numbers."""
        yield self.s
        number, n = torch.arange(self.n, device=self.s.device), self.n
        while True:
            yield self.s * (2.0 ** (number % self.base)).to(self.s).view(-1, *[1] * (self.s.ndim - 1))
            number, n = number // self.base, -(-n // self.base)
            if n <= 1:
                return

    def show(self, rows: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
        """What ``rows`` [r c o], which it returns for cotangents [1 n *out], are for all d of these: [d r c q]."""
        with torch.no_grad(), full_precision(self.s.device):
            each = [[_projected(t) for t in rows(s[None])] for s in self.columns()]
        return [torch.stack(of_columns) for of_columns in zip(*each, strict=True)]

    def labels(self, g: Tensor) -> Tensor | None:
        """The example of every row of g [d rows ·], −1 where the row is zero; None where rows mix examples.

        So may be a row whose cotangents are nothing but the rounding of sums that cancel, such as the query of a first
        token behind a causal mask: −1, too.
        """
        once, eps, power = g[0], torch.finfo(g.dtype).eps, 1
        square = once.square().sum(1)
        alive = (square > 0) & square.isfinite()
        rounding = square <= eps**1.5 * torch.where(alive, square, 0).max() if len(square) else alive
        label = torch.zeros(len(square), dtype=torch.long, device=g.device)
        for scaled in g[1:]:
            ratio = (once * scaled).sum(1) / square
            digit = ratio.clamp(min=0.5).log2().round().nan_to_num(0)
            gap = (scaled - 2.0 ** digit[:, None] * once).norm(dim=1)
            mixed = alive & ~(gap <= eps**0.5 * scaled.norm(dim=1))
            if bool((mixed & ~rounding).any()):
                return None
            alive = alive & ~mixed
            label += power * digit.long()
            power *= self.base
        wrong = alive & ((label >= self.n) | (label < 0))
        if bool((wrong & ~rounding).any()):
            return None
        return torch.where(alive & ~wrong, label, -1)

    def examples_of(self, g: Tensor) -> RowExamples | None:
        """The examples of rows, from their cotangents [d r c q]; where groups have different ones, of rows and groups.

        None where rows mix examples.
        """
        label = self.labels(g.flatten(2))
        if label is not None:
            return self._of_labels(label)
        label = self.labels(g.flatten(1, 2)) if g.shape[2] > 1 else None
        return None if label is None else self._of_labels(label).by_group(g.shape[1], g.shape[2], g.device)

    def _of_labels(self, label: Tensor) -> RowExamples:
        rows, n = len(label), self.n
        if rows % n == 0:
            for before in (b for b in range(1, rows // n + 1) if rows // n % b == 0):
                regular = BatchAxis(0, before).examples(rows, n, label.device)
                if bool(((regular == label) | (label < 0)).all()):
                    return RowExamples(n, before)
        # Rows that nothing depends on go with the last before them that something does: the padding of a sequence.
        # Rows without one, such as a value that was computed on the way to its derivative, are spread over the
        # examples.
        every = torch.arange(rows, device=label.device)
        last = torch.where(label >= 0, every, -1).cummax(0).values if rows else every
        return RowExamples(n, index=torch.where(last < 0, every % n, label[last.clamp(min=0)]))


def _projected(t: Tensor) -> Tensor:
    """Rows [r c o] in single precision at least; of wide ones some random sums. A copy: the cotangents may be freed."""
    o = t.shape[-1]
    if o <= _NUMBERS:
        return single(t).clone()
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(o, _NUMBERS, generator=generator, dtype=torch.float64, device=generator.device)
    return single(t) @ directions.to(single(t))
