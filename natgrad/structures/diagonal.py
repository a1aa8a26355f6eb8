"""Diagonal: the diagonal of the metric, which is inverted by division."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast, final

import torch
from torch import Tensor

from natgrad.linalg import check_finite, refuse_indefinite, refuse_singular
from natgrad.model import Model
from natgrad.pullback.gradient import GradientSample
from natgrad.pullback.layer import Block
from natgrad.pullback.pullback import Pullback, without_autocast
from natgrad.structures.base import Cost, Inverse, Layout, Operator, Structure, Subset


@final
@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal of G, without its rows: Σ_n (Σ_k g²) a², one product for every layer.

    With a sampled metric this is the pullback sampling trick of Grosse (2021, (31)): one backward pass, and no
    per-example gradient.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Diagonal().estimate(pb).values
    tensor([1., 4., 1.])
    """

    suggested: ClassVar[bool] = True

    def elements(self, pullback: Pullback) -> int:
        return pullback.model.size

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> DiagonalOperator:
        self.admit(pullback)
        return DiagonalOperator(Layout(pullback.model.like, pullback.y.dtype), pullback.square())

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> DiagonalOperator:
        return DiagonalOperator(Layout.of(model.params, tensors["values"].dtype), tensors["values"])

    def gradient_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        return list(blocks)

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> DiagonalOperator:
        """g² (Duchi, Hazan and Singer 2011; Kingma and Ba 2015)."""
        layout = Layout.of(sample.ω) if like is None else like.layout
        values = layout.flatten(sample.ω).square_()
        if sample.without and isinstance(like, DiagonalOperator):
            absent = Subset.of(layout, sorted(sample.without))
            absent.put(absent.take(like.values), values)
        return DiagonalOperator(layout, values)

    def extracted(self, G: Operator) -> DiagonalOperator:
        return DiagonalOperator(G.layout, G.diagonal())

    def cost(self, blocks: Sequence[Block], *, exact: bool = False, iterative: bool = False) -> Cost:
        p = sum(block.size for block in blocks)
        return Cost(2 * p, p, p, p, {"G": (1, p)})


@final
@dataclass(frozen=True)
class DiagonalOperator(Operator):
    """G_pp, nothing beside it: ``values`` [p]."""

    layout: Layout
    values: Tensor

    def product(self, v: Tensor) -> Tensor:
        return self.values * v

    def diagonal(self) -> Tensor:
        return self.values

    def dense(self) -> Tensor:
        return self.values.diag()

    def logdet(self, damping: float = 0.0) -> Tensor:
        return self._damped(damping).log().sum()

    def lerp(self, other: Operator, weight: float) -> DiagonalOperator:
        self.same_kind(other)
        return DiagonalOperator(self.layout, torch.lerp(self.values, cast(DiagonalOperator, other).values, weight))

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def averaged(self) -> dict[str, Tensor]:
        return self.tensors()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"values": (self.layout.size,)}

    def inverse(self, damping: float) -> Inverse:
        return ScaleInverse(self.layout, self._damped(damping).reciprocal())

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        return ScaleInverse(self.layout, tensors["scale"]) if "scale" in tensors else None

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        # The weight chooses among solutions that differ in the null space. For a diagonal G the one of least norm is
        # the same for every diagonal weight: zero where G is zero.
        if weight is not None and weight.ndim == 2:
            self.refuse("Pinv(weight=matrix)", "a full weight mixes the coordinates; give numbers a parameter")
        check_finite(self.values, "the diagonal of the metric")
        damped = self.values + damping
        rtol = damped.numel() * torch.finfo(damped.dtype).eps if rtol is None else rtol
        refuse_indefinite(damped, rtol, damping, "the diagonal metric")
        cut = rtol * damped.max()
        return ScaleInverse(self.layout, torch.where(damped > cut, damped, torch.inf).reciprocal())

    def _damped(self, damping: float) -> Tensor:
        check_finite(self.values, "the diagonal of the metric")
        damped = self.values + damping
        if bool((damped <= 0).any()):
            refuse_singular(damped.sort().values, 0.0, True, damping, "the diagonal metric")
        return damped


@final
@dataclass(frozen=True)
class ScaleInverse(Inverse):
    """Division by the diagonal."""

    layout: Layout
    scale: Tensor  # [p]

    def solve(self, ω: Tensor) -> Tensor:
        return self.scale * ω

    def coloured(self, ξ: Tensor) -> Tensor:
        return self.scale.sqrt() * ξ

    def whitened(self, ω: Tensor) -> Tensor:
        return self.scale.sqrt() * ω

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale}
