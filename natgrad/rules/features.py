"""Features: the inputs of a layer, or the cotangents of its outputs, in the form in which the layer has them.

Every layer is W [c o i] acting on inputs a [n r c i], with cotangents g [k n r c o]: example n has the gradient
Σ_r g aᵀ. Both are x [*k n r c d] here; the axis k of root columns is there for cotangents only. A linear layer has x
as rows, a convolution as patches of an image, an embedding as indices. Each form is a class with the same algebra, so
that structures, couplings and sharing ask for a second moment and never for the kind of the layer.

This module is part of ``rules`` because rules return features, and nothing below a rule needs them.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.moments import (
    accumulate_second_moment,
    counted_moment,
    entry_moments,
    marked_moment,
    nonzero_rows,
    over_count,
    second_moment,
    single,
    symmetric_product,
)
from natgrad.accelerate.patches import (
    Axis,
    convolve,
    few_patches,
    patch_mean,
    patch_moment,
    patch_sum,
    patches,
    positions,
)
from natgrad.accelerate.temporaries import at_once
from natgrad.show import brief

Ones: TypeAlias = bool | Tensor  # the homogeneous coordinate: none, 1 everywhere, or u_n after examples were combined


@final
@dataclass(frozen=True, repr=False)
class Moment:
    """The second moment of features, and the number of positions in it.

    ``average_into`` adds rows to a moving average without forming their sum. Do not write into ``total``: it may be
    shared.

    Args:
        formed: Σ x xᵀ [c d d], or its diagonal [c d]; or None if it is computed from ``rows`` when ``total`` is read.
        count: The number of positions; a tensor [c] if positions are masked; a tensor [], above zero, if it is on the
            device.
        rows: The features whose moment it is.
    """

    formed: Tensor | None
    count: int | Tensor
    rows: Rows | None = None

    __repr__ = brief

    def __add__(self, other: Moment) -> Moment:
        """The sum over the positions of both."""
        return Moment(self.total + other.total, self.count + other.count)

    @cached_property
    def total(self) -> Tensor:
        """Σ x xᵀ."""
        return self.formed if self.formed is not None else self._product_of_rows()

    def _product_of_rows(self) -> Tensor:
        assert self.rows is not None
        return second_moment(self.rows.x, self.rows.ones).unsqueeze(0)

    def mean(self) -> Tensor:
        """total/count; zero for a group without positions."""
        count = self.count
        if self.formed is None and not isinstance(count, Tensor):
            return self._product_of_rows().div_(count)  # nobody shares it, and it may be as large as a whole network
        total = self.total
        if isinstance(count, Tensor):
            count = torch.where(count > 0, count, 1).view(-1, *[1] * (total.ndim - 1)).to(total.dtype)
            return over_count(total, count)
        return total / count

    def over(self, count: int | Tensor) -> Moment:
        """The same sum, to be divided by another count."""
        return replace(self, count=count)

    def diagonal(self) -> Moment:
        """Its diagonal [c d]."""
        return Moment(self.total.diagonal(dim1=-2, dim2=-1), self.count)

    def to(self, dtype: torch.dtype) -> Moment:
        """In this precision."""
        if self.rows is not None and self.rows.x.dtype == dtype:
            return self
        return Moment(self.total.to(dtype), self.count)

    def is_finite(self) -> bool:
        """Whether the sum holds neither NaN nor infinity, from its diagonal. This waits for a GPU."""
        if self.rows is not None:  # no entry of the sum is above Σ ‖x‖², by Cauchy and Schwarz
            return float(torch.linalg.vector_norm(self.rows.x)) ** 2 < torch.finfo(self.rows.x.dtype).max
        diagonal = self.total.diagonal(dim1=-2, dim2=-1) if self.total.ndim == 3 else self.total
        return math.isfinite(float(diagonal.sum()))

    def average_into(self, average: Tensor, weight: float) -> None:
        """Ā ← (1 − w) Ā + w total/count, in place."""
        if isinstance(self.count, Tensor):
            average.lerp_(self.mean(), weight)
            return
        weighted = weight / max(self.count, 1)
        if self.rows is not None and isinstance(self.rows.ones, bool) and average.ndim == 3:
            x, ones = self.rows.x, self.rows.ones
            accumulate_second_moment(average[0], x, ones, keep=1 - weight, weight=weighted)
        else:
            average.mul_(1 - weight).add_(self.total, alpha=weighted)


class Features(ABC):
    """The base class of the inputs and cotangents of a layer, with their algebra.

    Method:
        x [*k n r c d]. Only ``dense`` and ``_map`` are needed; the rest may be done faster.
    """

    __repr__ = brief

    @abstractmethod
    def dense(self) -> Tensor:
        """x [*k n r c d] itself."""

    @abstractmethod
    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        """A linear map over the examples; ``combine(t, axis)`` applies it to a tensor with the examples on an axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(*k, n, r, c, d)."""
        return tuple(self.dense().shape)

    def count(self, weights: Tensor | None = None) -> int | Tensor:
        """The number of positions N·R, or Σ_n w_n R_n; a tensor [c] where masked positions do not count."""
        n, r = self.shape[-4:-2]
        return n * r if weights is None else r * weights.sum().view(1)

    def groups_used(self) -> int | Tensor:
        """One for every group c that has positions here, zero for others [c]; or 1 for all."""
        return 1

    def reached(self) -> Tensor | None:
        """The mask [n r] of positions with cotangents that are not all zero; None if that is so at all positions."""
        return nonzero_rows(self.dense().flatten(-2))

    def mask(self, counted: Tensor) -> Features:
        """The same features, of which only the positions with ``counted`` [n r] count: the others are zero."""
        return DenseFeatures(self.dense()).mask(counted)

    def moment(self) -> Moment:
        """Σ x xᵀ [c d d] over k, n and r, in single precision at least."""
        return Moment(_product(single(self.dense())), self.count())

    def marked_moment(self, there: Tensor) -> Moment:
        """``moment`` of cotangents. Writes the mask of ``reached`` to ``there`` [n r]."""
        reached = self.reached()
        there.fill_(True) if reached is None else there.copy_(reached)
        return self.moment()

    @property
    def homogeneous(self) -> bool:
        """Whether the last coordinate is homogeneous: 1, also where the inputs of the layer are zero."""
        return False

    def padded_moment(self, count: Tensor) -> Moment:
        """Σ x xᵀ where only ``count`` positions are real. The others are padding with zero inputs, and do not count."""
        total = self.moment().total
        if self.homogeneous:
            total[..., -1, -1] = count.to(total.dtype)
        return Moment(total, count)

    def squares(self) -> Moment:
        """The diagonal of ``moment``, [c d]."""
        x = single(self.dense())
        return Moment(x.square().sum(tuple(range(x.ndim - 2))), self.count())

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        """One position for all r: their mean, or their sum (K-FAC-reduce; Eschenhagen et al. 2023)."""
        x = single(self.dense())
        return DenseFeatures(x.mean(-3, keepdim=True) if how == "mean" else x.sum(-3, keepdim=True))

    def mixed(self, L: Tensor) -> Features:
        """x̃_m = Σ_n L_nm x_n for L [n m], computed in the precision of L: Σ x̃ x̃ᵀ is Σ C_nm x_n x_mᵀ with C = L Lᵀ."""
        return self._map(lambda x, axis: mix_examples(x, L, axis))

    def weight_examples(self, weights: Tensor) -> Features:
        """√w_n x_n for w [n]: examples that count w_n times."""
        root = weights.sqrt()
        return self._map(lambda x, axis: _times_examples(single(x), root, axis))

    def project(self, w: Tensor) -> Tensor:
        """x·w [*k n r p] for w [d p], where there is one group."""
        return self.dense().squeeze(-2).to(w.dtype) @ w

    def gradients(self, g: Tensor, limit: int) -> Iterator[Tensor]:
        """Σ_r g xᵀ [n c o i] of inputs x with cotangents g [k n r c o]: of one column, and of some outputs, at a time.

        Every tensor has up to ``limit`` numbers, or those of one output.
        """
        a = self.dense().to(g.dtype)
        n, _, c, i = a.shape
        a = a.permute(0, 2, 1, 3)  # [n c r i]
        for column in g.permute(0, 1, 3, 4, 2):  # [n c o r]
            for piece in column.split(at_once(n * c * i, limit), dim=2):
                yield piece @ a

    def squared_gradients(self, g: Tensor) -> Tensor:
        """Σ_kn (Σ_r g xᵀ)² [c o i], some examples at a time."""
        a, (k, _, _, c, o) = self.dense().to(g.dtype), g.shape
        step = at_once(k * c * o * a.shape[-1])
        pieces = zip(a.split(step), g.split(step, dim=1), strict=True)
        squares = (torch.einsum("knrco,nrci->kncoi", h, x).square().sum((0, 1)) for x, h in pieces)
        return reduce(torch.add, squares)


@final
@dataclass(frozen=True, repr=False)
class DenseFeatures(Features):
    """Features as one tensor.

    Args:
        x: The features [*k n r c d].
        valid: A mask [n r c], zero at masked positions, where x is zero too.

    Example:
        >>> DenseFeatures(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)).moment().total
        tensor([[[5.]]])
    """

    x: Tensor
    valid: Tensor | None = None

    def dense(self) -> Tensor:
        return self.x

    def count(self, weights: Tensor | None = None) -> int | Tensor:
        if self.valid is None:
            return super().count(weights)
        return self.valid.sum((0, 1)) if weights is None else torch.einsum("n,nrc->c", weights, self.valid.to(weights))

    def moment(self) -> Moment:
        return self._moment

    @cached_property
    def _moment(self) -> Moment:
        """Cached: W_ih and W_hh of a recurrent layer have the same cotangents."""
        return super().moment()

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        if self.valid is None or how == "sum":
            return super().reduced(how)
        count = self.valid.sum(1, keepdim=True)  # no position at all: the sum is zero, too
        mean = single(self.x).sum(1, keepdim=True) / count.clamp(min=1).unsqueeze(-1)
        return DenseFeatures(mean, (count > 0).to(mean.dtype))

    def mask(self, counted: Tensor) -> Features:
        valid = single(counted.unsqueeze(-1).to(self.x.dtype))  # half precision cannot count
        there = counted[..., None, None]
        if self.valid is not None:
            return DenseFeatures(self.x.where(there, 0), self.valid * valid)
        one = self.x[..., :1, :] if self.x.stride(-2) == 0 else self.x  # one input for all c
        return DenseFeatures(one.where(there, 0).expand_as(self.x), valid.expand(self.x.shape[-4:-1]))

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        return DenseFeatures(combine(self.x, -4), self.valid)


@dataclass(frozen=True, repr=False)
class _Positions(Features):
    """What rows and entries have in common: x [*k n r d], and perhaps a homogeneous coordinate of each."""

    x: Tensor
    ones: Ones = False

    @property
    def homogeneous(self) -> bool:
        return self.ones is not False

    def reached(self) -> Tensor | None:
        return nonzero_rows(self.x)

    def mask(self, counted: Tensor) -> Features:
        return Counted(self, counted) if isinstance(self.ones, bool) and self.x.ndim == 3 else super().mask(counted)

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        return replace(self, x=combine(self.x, -3), ones=_combined(self.ones, self.x, -3, combine))


@final
@dataclass(frozen=True, repr=False)
class Counted(Features):
    """Rows or entries of which only the positions with ``counted`` [n r] count: padding is in no sum and no mean.

    >>> rows = Rows(torch.tensor([[[1.0], [2.0]]]), ones=True)
    >>> Counted(rows, torch.tensor([[True, False]])).moment().total
    tensor([[[1., 1.],
             [1., 1.]]])
    """

    base: _Positions
    counted: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @cached_property
    def _masked(self) -> Features:
        return DenseFeatures(self.base.dense()).mask(self.counted)

    def dense(self) -> Tensor:
        return self._masked.dense()

    def count(self, weights: Tensor | None = None) -> Tensor:
        return (self.counted.sum() if weights is None else weights @ self.counted.to(weights).sum(1)).view(1)

    def moment(self) -> Moment:
        base = self.base
        if isinstance(base, Rows):
            total, count = counted_moment(base.x, bool(base.ones), self.counted)
            return Moment(total.unsqueeze(0), count)
        return replace(base, x=base.x.where(self.counted.unsqueeze(-1), 0)).padded_moment(self.count())

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        return self._masked.reduced(how)

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        return self._masked._map(combine)


@final
@dataclass(frozen=True, repr=False)
class Rows(_Positions):
    """Features of a linear layer: rows of one group.

    Args:
        x: The features [*k n r d].
        ones: Whether the homogeneous coordinate comes last.

    Example:
        >>> Rows(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), ones=True).moment().total
        tensor([[[10., 14.,  4.],
                 [14., 20.,  6.],
                 [ 4.,  6.,  2.]]])
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], 1, self.x.shape[-1] + (self.ones is not False))

    def dense(self) -> Tensor:
        return _with_ones(self.x.unsqueeze(-2), self.ones)

    def moment(self) -> Moment:
        return Moment(None, self.count(), self)

    def marked_moment(self, there: Tensor) -> Moment:
        if self.ones is not False or self.x.ndim != 4 or len(self.x) != 1:
            return super().marked_moment(there)
        return Moment(marked_moment(self.x, there).unsqueeze(0), self.count())

    def project(self, w: Tensor) -> Tensor:
        d = self.x.shape[-1]
        out = self.x.to(w.dtype) @ w[:d]
        return out if self.ones is False else out + _column(self.ones, out, -3) * w[d]


@final
@dataclass(frozen=True, repr=False)
class Patches(Features):
    """Features of a convolution: what every output position reads.

    Args:
        x: The image [*k n (c ch) *spatial]; i is channel-major.
        axes: Kernel, stride, padding and dilation of every spatial axis.
        groups: The number c of groups of channels.
        ones: Add a coordinate 1, for a bias.

    Method:
        The second moment is a correlation of x with itself and needs no patches (Grosse and Martens 2016).

    Example:
        >>> image = torch.arange(4.0).view(1, 1, 4)
        >>> Patches(image, (Axis(kernel=2),), ones=True).moment().total
        tensor([[[ 5.,  8.,  3.],
                 [ 8., 14.,  6.],
                 [ 3.,  6.,  3.]]])
    """

    x: Tensor
    axes: tuple[Axis, ...]
    groups: int = 1
    ones: Ones = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """(*k, n, r, c, d)."""
        width = self.x.shape[self._examples + 1] // self.groups * math.prod(axis.kernel for axis in self.axes)
        lead = self.x.shape[: self._examples + 1]
        return (*lead, positions(self._images, self.axes), self.groups, width + (self.ones is not False))

    @property
    def _examples(self) -> int:
        """The axis of the examples in x, from the end."""
        return -2 - len(self.axes)

    @property
    def _images(self) -> Tensor:
        """x with k and n in one axis."""
        return self.x if self._examples == -self.x.ndim else self.x.flatten(0, 1)

    def dense(self) -> Tensor:
        a = patches(self._images, self.axes, self.groups)
        return _with_ones(a.unflatten(0, self.x.shape[: self._examples + 1]), self.ones)

    @property
    def homogeneous(self) -> bool:
        return self.ones is not False

    def moment(self) -> Moment:
        x, count = self._images, self.count()
        if isinstance(self.ones, bool) and few_patches(x, self.axes, self.groups):
            return Rows(patches(x, self.axes).squeeze(2), self.ones).moment().over(count)
        return Moment(patch_moment(x, self.axes, self.groups, self.ones), count)

    def squares(self) -> Moment:
        total = patch_sum(single(self._images).square(), self.axes, self.groups)
        if self.ones is not False:
            n, r = self.shape[-4:-2]
            corner = total.new_full((), n * r) if self.ones is True else r * self.ones.square().sum().to(total.dtype)
            total = torch.cat([total, corner.expand(len(total), 1)], dim=1)
        return Moment(total, self.count())

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        mean = patch_mean(self._images, self.axes, self.groups).unflatten(0, self.x.shape[: self._examples + 1])
        mean = _with_ones(mean.unsqueeze(-3), self.ones)
        return DenseFeatures(mean if how == "mean" else mean * self.shape[-3])

    def project(self, w: Tensor) -> Tensor:
        if self.groups > 1:
            return super().project(w)
        size = self.shape[-1] - (self.ones is not False)
        out = convolve(self._images.to(w.dtype), self.axes, w[:size].T)
        out = out.unflatten(0, self.x.shape[: self._examples + 1])
        return out if self.ones is False else out + _column(self.ones, out, -3) * w[size]

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        axis = self._examples
        return replace(self, x=combine(self.x, axis), ones=_combined(self.ones, self.x, axis, combine))


@final
@dataclass(frozen=True, repr=False)
class Entries(_Positions):
    """Features of gains and offsets: every entry is a group of its own.

    Args:
        x: The features [*k n r c]: every entry is a group with one coordinate.
        ones: Add a coordinate 1 to each (scale and shift of a norm).

    Example:
        >>> Entries(torch.tensor([[[3.0, 4.0]]]), ones=True).moment().total
        tensor([[[ 9.,  3.],
                 [ 3.,  1.]],
        <BLANKLINE>
                [[16.,  4.],
                 [ 4.,  1.]]])
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape, 1 + (self.ones is not False))

    def dense(self) -> Tensor:
        return _with_ones(self.x.unsqueeze(-1), self.ones)

    def moment(self) -> Moment:
        x = single(self.x)
        squares, sums = entry_moments(x, self.ones)
        if sums is None:
            return Moment(squares.view(-1, 1, 1), self.count())
        n, r = x.shape[-3:-1]
        corner = n * r if isinstance(self.ones, bool) else r * self.ones.square().sum()
        return Moment(border_entries(squares, sums, corner), self.count())

    def squares(self) -> Moment:
        return self.moment().diagonal()

    def gradients(self, g: Tensor, limit: int) -> Iterator[Tensor]:
        """Entry by entry."""
        x = self.x.to(g.dtype)
        for column in g.squeeze(4):  # [n r c]
            yield (column * x).sum(1)[:, :, None, None]
            if self.ones is not False:
                sums = column.sum(1)
                yield (sums if self.ones is True else sums * _column(self.ones, sums, -2))[:, :, None, None]


@final
@dataclass(frozen=True, repr=False)
class OneHot(Features):
    """Features of lookups: one coordinate of a position is not zero.

    Args:
        index: The coordinate of every position [n r].
        size: The number of coordinates.
        values: The values there [n r].
        masked: Whether positions with the value zero do not count.

    Method:
        Σ x xᵀ is diagonal, the counts.

    Example:
        >>> OneHot(torch.tensor([[0, 2, 2]]), size=3, values=torch.ones(1, 3)).moment().total
        tensor([[1., 0., 2.]])
    """

    index: Tensor
    size: int
    values: Tensor
    masked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.index.shape, 1, self.size)

    def dense(self) -> Tensor:
        x = self.values.new_zeros(self.shape)
        return x.scatter_(3, self.index[..., None, None], self.values[..., None, None])

    def count(self, weights: Tensor | None = None) -> int | Tensor:
        if not self.masked:
            return super().count(weights)
        valid = (self.values != 0).to(self.values.dtype)
        return valid.sum().view(1) if weights is None else (weights @ valid.to(weights).sum(1)).view(1)

    def moment(self) -> Moment:
        total = self.values.new_zeros(self.size)
        total.index_add_(0, self.index.flatten(), self.values.square().flatten())
        return Moment(total.unsqueeze(0), self.count())

    def squares(self) -> Moment:
        return self.moment()

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        total = self.values.new_zeros(len(self.index), self.size).scatter_add_(1, self.index, self.values)
        if how == "sum" or not self.masked:
            return DenseFeatures((total / self.index.shape[1] if how == "mean" else total)[:, None, None])
        count = (self.values != 0).sum(1).view(-1, 1, 1)  # without any position the sum is zero, too
        return DenseFeatures((total[:, None] / count.clamp(min=1)).unsqueeze(1), (count > 0).to(total.dtype))

    def weight_examples(self, weights: Tensor) -> Features:
        return replace(self, values=_times_examples(self.values, weights.sqrt(), 0))

    def project(self, w: Tensor) -> Tensor:
        return w[self.index] * self.values.to(w.dtype).unsqueeze(-1)

    def mask(self, counted: Tensor) -> Features:
        return replace(self, values=self.values * counted.to(self.values.dtype), masked=True)

    def squared_gradients(self, g: Tensor) -> Tensor:
        """At every position its g times the sum of those at the same coordinate: no one-hot vector is formed."""
        g = g.squeeze(3) * self.values.to(g.dtype).unsqueeze(-1)  # [k n r o]
        total = g.new_zeros(self.size, g.shape[-1])
        step = at_once(self.index.shape[1] ** 2)  # examples, whose pairs of positions are formed
        for at, piece in zip(self.index.split(step), g.split(step, dim=1), strict=True):
            same = (at.unsqueeze(-1) == at.unsqueeze(-2)).to(g.dtype)
            total.index_add_(0, at.flatten(), (piece * (same @ piece)).sum(0).flatten(0, 1))
        return total.T.unsqueeze(0).clamp(min=0)  # a square; below zero it is rounding

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        valid = (self.values != 0).to(self.values.dtype).unsqueeze(-1) if self.masked else None
        return DenseFeatures(self.dense(), valid)._map(combine)


@final
@dataclass(frozen=True, repr=False)
class Joined(Features):
    """The uses of one layer, one after the other along r."""

    uses: tuple[Features, ...]

    @staticmethod
    def of(uses: Sequence[Features]) -> Features:
        """One large product is cheaper than many: rows, and indices, are put together."""
        if len(uses) == 1:
            return uses[0]
        rows = [use for use in uses if isinstance(use, Rows)]
        if len(rows) == len(uses) and all(use.ones is rows[0].ones for use in rows):
            return Rows(torch.cat([use.x for use in rows], dim=-2), rows[0].ones)
        hot = [use for use in uses if isinstance(use, OneHot)]
        if len(hot) == len(uses):
            index, values = (torch.cat(side, dim=1) for side in ([h.index for h in hot], [h.values for h in hot]))
            return OneHot(index, hot[0].size, values, any(h.masked for h in hot))
        return Joined(tuple(uses))

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [use.shape for use in self.uses]
        return (*shapes[0][:-3], sum(shape[-3] for shape in shapes), *shapes[0][-2:])

    def dense(self) -> Tensor:
        return torch.cat([use.dense() for use in self.uses], dim=-3)

    @property
    def homogeneous(self) -> bool:
        return any(use.homogeneous for use in self.uses)

    def count(self, weights: Tensor | None = None) -> int | Tensor:
        return reduce(operator.add, [use.count(weights) for use in self.uses])

    def reached(self) -> Tensor | None:
        uses = [(use.shape[-4:-2], use.reached()) for use in self.uses]
        some = [there for _, there in uses if there is not None]
        if not some:
            return None
        return torch.cat([some[0].new_ones(shape) if there is None else there for shape, there in uses], dim=1)

    def mask(self, counted: Tensor) -> Features:
        each = counted.split([use.shape[-3] for use in self.uses], dim=1)
        return Joined(tuple(use.mask(there) for use, there in zip(self.uses, each, strict=True)))

    def moment(self) -> Moment:
        return reduce(operator.add, [use.moment() for use in self.uses])

    def squares(self) -> Moment:
        return reduce(operator.add, [use.squares() for use in self.uses])

    def reduced(self, how: Literal["mean", "sum"]) -> Features:
        """Every use of a group counts alike in a mean, however many positions it has."""
        total = reduce(torch.add, [use.reduced(how).dense() for use in self.uses])
        if how == "sum":
            return DenseFeatures(total)
        uses = reduce(operator.add, [use.groups_used() for use in self.uses])
        return DenseFeatures(total / (uses if isinstance(uses, int) else uses.clamp(min=1).unsqueeze(-1)))

    def project(self, w: Tensor) -> Tensor:
        return torch.cat([use.project(w) for use in self.uses], dim=-2)

    def _map(self, combine: Callable[[Tensor, int], Tensor]) -> Features:
        return Joined(tuple(use._map(combine) for use in self.uses))

    def weight_examples(self, weights: Tensor) -> Features:
        return Joined(tuple(use.weight_examples(weights) for use in self.uses))


def mix_examples(x: Tensor, L: Tensor, axis: int) -> Tensor:
    """Σ_n L_nm x_n along an axis, in the precision of L, in the order that x has in memory.

    >>> mix_examples(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, 3.0]]), 0)
    tensor([1., 7.])
    """
    x = single(x)
    axis %= x.ndim
    if len(L) == 1:  # channels-last strides of one example may be anything
        return (x * L[0, 0]).to(x.dtype)
    rest = sorted((at for at in range(x.ndim) if at != axis), key=x.stride, reverse=True)
    lead = [at for at in rest if at < axis]  # the root columns stay outside
    order = [*lead, axis, *(at for at in rest if at > axis)]
    flat = x.permute(order)
    out = L.mT @ flat.reshape(*flat.shape[: len(lead) + 1], -1).to(L.dtype)
    out = out.to(x.dtype).view(*flat.shape[: len(lead)], L.shape[1], *flat.shape[len(lead) + 1 :])
    return out.permute([order.index(at) for at in range(x.ndim)])


def border_entries(squares: Tensor, sums: Tensor, corner: int | Tensor) -> Tensor:
    """Σ (x, 1)(x, 1)ᵀ [c 2 2] from Σ x² [c], Σ x [c] and the number of terms."""
    last = torch.full_like(sums, corner) if isinstance(corner, int) else corner.to(sums.dtype).expand_as(sums)
    return torch.stack([squares, sums, sums, last], dim=-1).view(-1, 2, 2)


def _product(x: Tensor) -> Tensor:
    """Σ x xᵀ [c d d] of x [*k n r c d]."""
    c, d = x.shape[-2:]
    if c == 1 or x.stride(-2) == 0:  # one input for all groups
        return symmetric_product(x[..., 0, :].reshape(-1, d)).expand(c, d, d).contiguous()
    flat = x.reshape(-1, c, d)
    return torch.einsum("nci,ncj->cij", flat, flat)


def _with_ones(x: Tensor, ones: Ones) -> Tensor:
    """(x, 1) of x [*k n r c d] along the last axis, or (x, u_n)."""
    if ones is False:
        return x
    column = x.new_ones(()) if ones is True else _column(ones, x, -4).to(x.dtype)
    return torch.cat([x, column.expand(*x.shape[:-1], 1)], dim=-1)


def _column(ones: Ones, like: Tensor, axis: int) -> Tensor:
    """u_n, to be broadcast with a tensor that has the examples on an axis counted from the end."""
    if isinstance(ones, bool):
        return like.new_ones(())
    return ones.to(like.dtype).view(-1, *[1] * (-1 - axis))


def _combined(ones: Ones, x: Tensor, axis: int, combine: Callable[[Tensor, int], Tensor]) -> Ones:
    """The homogeneous coordinate u_n after a linear map over the examples."""
    if ones is False:
        return False
    return combine(single(x).new_ones(x.shape[axis]) if ones is True else ones, 0)


def _times_examples(x: Tensor, weights: Tensor, axis: int) -> Tensor:
    """x_n times w_n, with the examples on an axis."""
    return x * weights.to(x.dtype).view(-1, *[1] * (x.ndim - 1 - axis % x.ndim))
