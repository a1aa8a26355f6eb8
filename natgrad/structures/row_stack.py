"""The sum of metrics that were estimated from several functions of the same parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.linalg import Damping
from natgrad.structures.base import Inverse, Layout, Operator, RootedOperator
from natgrad.structures.dense import DenseOperator
from natgrad.structures.kernel import KernelOperator


@final
@dataclass(frozen=True)
class RowStack(RootedOperator):
    """G = RᵀR with the rows R [m p] of several kernels, one below the other, the rows of each times its ``scale``.

    Each kernel is that of one function of the parameters on points of its own (the residuals inside of a domain, and
    those on its boundary): G = Σ_c scale_c² G_c, and R Rᵀ has the blocks scale_c scale_d R_c R_dᵀ.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> kernels = [ng.Kernel().estimate(ng.pullback(model, x, ng.Euclidean())) for x in torch.eye(2).split(1)]
    >>> RowStack(kernels[0].layout, tuple(kernels), (1.0, 2.0)).gram()
    tensor([[1., 0.],
            [0., 4.]])
    """

    layout: Layout
    kernels: tuple[KernelOperator, ...]
    scales: tuple[float, ...]

    @property
    def sizes(self) -> list[int]:
        """How many rows every kernel has, k·n."""
        return [kernel.factors[0].g.shape[:2].numel() for kernel in self.kernels]

    @property
    def root_columns(self) -> int:
        return sum(self.sizes)

    def push_root(self, v: Tensor) -> Tensor:
        """R v [m]."""
        pairs = zip(self.kernels, self.scales, strict=True)
        return torch.cat([scale * kernel.push(v).flatten() for kernel, scale in pairs])

    def pull_root(self, t: Tensor) -> Tensor:
        """Rᵀ t [p]."""
        pairs = zip(self.kernels, self.scales, t.split(self.sizes), strict=True)
        pulled = [kernel.pull(scale * t_c.view(kernel.factors[0].g.shape[:2])) for kernel, scale, t_c in pairs]
        return pulled[0] if len(pulled) == 1 else torch.stack(pulled).sum(0)

    def gram(self) -> Tensor:
        """R Rᵀ [m m]: R is never formed, unless a layer has no factors."""
        sizes = self.sizes
        out = self.kernels[0].factors[0].g.new_empty(sum(sizes), sum(sizes))
        starts = [sum(sizes[:c]) for c in range(len(sizes))]
        spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        for c, (left, scale) in enumerate(zip(self.kernels, self.scales, strict=True)):
            out[spans[c], spans[c]] = left.gram() * scale**2
            for d in range(c):
                block = left.gram_with(self.kernels[d]) * (scale * self.scales[d])
                out[spans[c], spans[d]], out[spans[d], spans[c]] = block, block.T
        return out

    def rows(self) -> Tensor:
        """R [m p], in flattening order."""
        pairs = zip(self.kernels, self.scales, strict=True)
        return torch.cat([scale * kernel.rows() for kernel, scale in pairs])

    def product(self, v: Tensor) -> Tensor:
        return self.pull_root(self.push_root(v))

    def diagonal(self) -> Tensor:
        pairs = zip(self.kernels, self.scales, strict=True)
        return torch.stack([scale**2 * kernel.diagonal() for kernel, scale in pairs]).sum(0)

    def dense(self) -> Tensor:
        rows = self.rows()
        return rows.T @ rows

    def logdet(self, damping: Damping = 0.0) -> Tensor:
        return DenseOperator(self.layout, self.dense()).logdet(damping)

    def lerp(self, other: Operator, weight: float) -> Self:
        self.refuse("a moving average", "stack the rows of both")

    def tensors(self) -> dict[str, Tensor]:
        return {f"{c}/{name}": t for c, kernel in enumerate(self.kernels) for name, t in kernel.tensors().items()}

    def inverse(self, damping: Damping) -> Inverse:
        return DenseOperator(self.layout, self.dense()).inverse(damping)

    def pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        return DenseOperator(self.layout, self.dense()).pseudo_inverse(damping, rtol, weight)
