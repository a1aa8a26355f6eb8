"""Diagonal: the diagonal of the metric, which is inverted by division."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import can_read
from natgrad.linalg import (
    Damping,
    Relative,
    check_finite,
    inverse_powered,
    refuse_rounding,
    refuse_singular,
)
from natgrad.pullbacks.gradient import GradientSample
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.structures.base import DualMetric, Inverse, Layout, Operator, Structure, Subset

_WHAT = "the diagonal metric"


@final
@dataclass(frozen=True, repr=False)
class DiagonalOperator(Operator):
    """A metric as its diagonal.

    Args:
        layout: The names and shapes of the parameters, and the precision.
        values: G_pp [p].
        power: p: the operator is G^p of the G that the tensors hold.
    """

    damps_per_block: ClassVar[bool] = True
    layout: Layout
    values: Tensor
    power: float = field(default=1.0, kw_only=True)

    def product(self, v: Tensor) -> Tensor:
        return self.diagonal() * v

    def map(self, f: Callable[[Tensor], Tensor]) -> DiagonalOperator:
        return DiagonalOperator(self.layout, f(self.values))

    def eigenvalues(self) -> Tensor:
        return self.values.double()

    def diagonal(self) -> Tensor:
        return self.values if self.power == 1 else self.values.pow(self.power)

    def dense(self) -> Tensor:
        return self.diagonal().diag()

    @without_autocast
    def output_gram(self, pullback: Pullback) -> Tensor:
        pairs = zip(pullback.blocks, pullback.collect(), strict=True)
        return reduce(torch.add, (f.weighed_gram(block.pack(self.diagonal())) for block, f in pairs))

    def _logdet(self, damping: Damping) -> Tensor:
        damped = self._damped(damping)
        refuse_singular(damped, what=_WHAT, damping=damping)
        return damped.log().sum()

    def nonnegative(self) -> dict[str, Tensor]:
        return self.tensors()

    def _inverse(self, damping: Damping) -> Inverse:
        scale = inverse_powered(self._damped(damping), self.power)
        return DualMetric(self.layout, DiagonalOperator(self.layout, scale))

    def _pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        # The weight chooses among solutions that differ in the null space. For a diagonal G the one of least norm is
        # the same for every diagonal weight: zero where G is zero.
        if weight is not None and weight.ndim == 2:
            self.refuse("Pinv(weight=matrix)", "a full weight mixes the coordinates; give numbers a parameter")
        return super()._pseudo_inverse(damping, rtol, None)

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        return super().inverse_from({"values" if key == "scale" else key: t for key, t in tensors.items()})  # of 0.1.0

    def _damped(self, damping: Damping) -> Tensor:
        """d + λ [p], positive; with relative damping also zero, for parameters where d is zero throughout."""
        λ = self._shift(damping)
        damped = self.values + λ
        if isinstance(λ, Tensor):
            damped = damped.masked_fill(λ == 0, 0.0)
        if damping != 0 and not can_read(damped):  # squares are not negative, and an average of them is finite
            return damped
        check_finite(self.values, "the diagonal of the metric")
        bad = damped < 0 if isinstance(damping, Relative) else damped <= 0
        if bool(bad.any()):
            refuse_singular(damped, what=_WHAT, damping=damping, failed=True)
        if damping == 0:
            refuse_rounding(damped, _WHAT)
        return damped

    def _shift(self, damping: Damping) -> float | Tensor:
        """λ, or λ [p] relative to the mean over each parameter."""
        if not isinstance(damping, Relative):
            return damping
        sizes = [t.numel() for t in self.layout.like.values()]
        shifts = damping.shifts(torch.stack([piece.mean() for piece in self.values.split(sizes)]))
        return torch.cat([λ.expand(size) for λ, size in zip(shifts, sizes, strict=True)])


@final
@dataclass(frozen=True, repr=False)
class Diagonal(Structure):
    """Keep the diagonal of the metric, as Adam does.

    Args:
        power: p: the metric is G^p. 1 is the natural gradient, ½ the metric of Adam and Shampoo, 0 the identity.

    Method:
        Σ_n (Σ_k g²) a², one product for every layer. With a sampled metric this is the pullback sampling trick of
        Grosse (2021, (31)): one backward pass, and no per-example gradient.

    Example:
        >>> import natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
        >>> Diagonal().estimate(pb).values
        tensor([1., 4., 1.])
    """

    operator: ClassVar[type[Operator]] = DiagonalOperator
    suggested: ClassVar[bool] = True
    power: float = field(default=1.0, kw_only=True)

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> DiagonalOperator:
        self.admit(pullback)
        return DiagonalOperator(Layout(pullback.model.like, pullback.y.dtype), pullback.square(), power=self.power)

    def shapes(self, blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
        return {"values": (sum(block.size for block in blocks),)}

    def gradient_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        return list(blocks)

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> DiagonalOperator:
        """g² (Duchi, Hazan and Singer 2011; Kingma and Ba 2015)."""
        layout = Layout.of(sample.ω) if like is None else like.layout
        values = layout.flatten(sample.ω).square_()
        if sample.without and isinstance(like, DiagonalOperator):
            absent = Subset.of(layout, sorted(sample.without))
            absent.put(absent.take(like.values), values)
        return DiagonalOperator(layout, values, power=self.power)

    def extract(self, G: Operator) -> DiagonalOperator:
        return DiagonalOperator(G.layout, G.diagonal(), power=self.power)
