"""The leading eigenpairs of the metric, with a diagonal floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.model import Model
from natgrad.operators import Layout, LowRankOperator
from natgrad.operators.lowrank import floored, leading
from natgrad.pullback import Block, Pullback
from natgrad.pullback.precision import without_autocast
from natgrad.structures.exact import Dense, Kernel, Structure


@final
@dataclass(frozen=True)
class LowRank(Structure):
    """The ``rank`` largest eigenpairs of G, and the diagonal of what is left as a floor.

    Averaging cuts back to the rank every time: an average over micro-batches, or over time, has the diagonal of the
    joint batch exactly, and its leading eigenpairs only as far as each part had kept them.

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> LowRank(1).estimate(pb).values.round()
    tensor([6.])
    """

    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"LowRank(rank) needs a positive rank, got {self.rank!r}")

    @property
    def bounded(self) -> bool:
        return True

    def elements(self, pullback: Pullback) -> int:
        small = min(pullback.columns * pullback.n, pullback.model.size)
        return (min(self.rank, small) + 2) * pullback.model.size + small**2

    @without_autocast
    def estimate(self, pullback: Pullback) -> LowRankOperator:
        self.admit(pullback)
        layout = Layout(pullback.model.like, pullback.y.dtype)
        if pullback.model.size <= pullback.columns * pullback.n:
            matrix = Dense().estimate(pullback).matrix
            values, u = leading(matrix, self.rank)
            return floored(layout, u, values, matrix.diagonal(), self.rank)
        # Eigenvectors of G = RᵀR are Rᵀw/√s for the eigenvectors w of the smaller R Rᵀ; R itself is never formed.
        kernel = Kernel().estimate(pullback)
        values, w = leading(kernel.gram(), self.rank)
        u = values.new_empty(layout.size, values.numel())
        for j, value in enumerate(values):
            u[:, j] = kernel.pull(w[:, j].view(kernel.factors[0].g.shape[:2])) / value.sqrt()
        return floored(layout, u, values, kernel.diagonal(), self.rank)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> LowRankOperator:
        kept = (tensors["vectors"], tensors["values"], tensors["floor"])
        return LowRankOperator(Layout.of(model.params, tensors["values"].dtype), *kept, self.rank)
