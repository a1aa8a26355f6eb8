"""Factors that are second moments of the rows of a matrix, and need not be formed to be averaged."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from natgrad.rules.base import Call, Keys, Moment, Rule
from natgrad.rules.launches import affine_product
from natgrad.rules.precision import single
from natgrad.rules.products import absorb_product, affine_moment, symmetric_product


@final
@dataclass(frozen=True)
class Rows:
    """Vectors x [m i], or x̄ = (x, 1) where they are ``homogeneous``; d are their numbers."""

    x: Tensor
    homogeneous: bool = False

    @property
    def size(self) -> int:
        """d."""
        return self.x.shape[1] + self.homogeneous

    def product(self) -> Tensor:
        """Σ x xᵀ [d d], in memory of its own.

        >>> Rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), homogeneous=True).product()
        tensor([[10., 14.,  4.],
                [14., 20.,  6.],
                [ 4.,  6.,  2.]])
        """
        if not self.homogeneous:
            return symmetric_product(self.x)
        if not self.x.shape[1]:
            return single(self.x).new_full((1, 1), self.x.shape[0])
        return affine_product(self.x) if self.x.device.type == "cuda" else affine_moment(self.x)

    @property
    def bounded(self) -> bool:
        """Whether no number of the product can be too large for its precision, or is none; this waits.

        By Cauchy and Schwarz none is above Σ ‖x‖².
        """
        return float(torch.linalg.vector_norm(self.x)) ** 2 < torch.finfo(self.x.dtype).max

    def absorb(self, average: Tensor, keep: float, weight: float) -> None:
        """keep·Ā + weight Σ x xᵀ in place of Ā [d d], on a processor; symmetric up to rounding.

        >>> average = torch.eye(2)
        >>> Rows(torch.tensor([[1.0], [3.0]]), homogeneous=True).absorb(average, 0.5, 0.25)
        >>> average
        tensor([[3., 1.],
                [1., 1.]])
        """
        m, i = self.x.shape
        absorb_product(self.x, average[:i, :i], keep, weight)
        if self.homogeneous:
            border = average[i]
            border[:i].mul_(keep).add_(self.x.sum(0), alpha=weight)
            border[i:].mul_(keep).add_(weight * m)
            average[:i, i] = border[:i]


class RowsRule(Rule):
    """A layer that is one group, with factors of rows."""

    @abstractmethod
    def input_rows(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        """The inputs a of all examples and positions [n·r i]."""

    @abstractmethod
    def output_rows(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        """All cotangents [k·n·r o], from those of the outputs [k *output]."""

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        rows = self.input_rows(module, keys, call)
        return Moment(rows.product().unsqueeze(0), rows.x.shape[0])

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return self.output_rows(module, keys, g).product().unsqueeze(0)
