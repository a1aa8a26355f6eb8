"""A structure of your own: one number for every parameter tensor, the mean of the diagonal of the metric there.

A structure is two classes: what is kept of the metric, an ``Operator``, and how it is estimated, a ``Structure``. The
optimizer inverts, averages and saves it, plans its memory, and Laplace's method draws samples, with no further code.

    python examples/extend/structure.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import Layout, Operator
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import without_autocast
from natgrad.structures import Structure


@final
@dataclass(frozen=True)
class ScalesOperator(Operator):
    """diag(d) with one number d for all entries of a parameter tensor."""

    layout: Layout
    scales: Tensor  # d [t]

    def product(self, v: Tensor) -> Tensor:
        return self.diagonal() * v

    def map(self, f: Callable[[Tensor], Tensor]) -> ScalesOperator:
        return ScalesOperator(self.layout, f(self.scales))

    def eigenvalues(self) -> Tensor:
        return self.diagonal().double()

    def diagonal(self) -> Tensor:
        return torch.cat([d.expand(t.numel()) for d, t in zip(self.scales, self.layout.like.values(), strict=True)])


@final
@dataclass(frozen=True)
class Scales(Structure):
    """G ≈ diag(d), d the mean of the diagonal of G over a parameter tensor: the blocks of Zhang et al. (2024)."""

    operator: ClassVar[type[Operator]] = ScalesOperator

    def shapes(self, blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
        return {"scales": (sum(len(block.names) for block in blocks),)}

    @without_autocast
    def estimate(self, pullback: ng.Pullback, like: Operator | None = None) -> ScalesOperator:
        self.admit(pullback)
        layout = Layout(pullback.model.like, pullback.y.dtype)
        pieces = pullback.square().split([t.numel() for t in layout.like.values()])
        return ScalesOperator(layout, torch.stack([piece.mean() for piece in pieces]))


def train(steps: int = 200) -> list[float]:
    """The losses of a classifier of three classes on a circle."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(256, 2)
    target = (torch.atan2(x[:, 1], x[:, 0]) / torch.pi * 1.5 + 1.5).long().clamp(max=2)
    loss = nn.CrossEntropyLoss()
    structure = ng.Refresh(Scales(), every=5, decay=0.9, inverse=5)
    opt, losses = ng.NaturalGradient(model, loss, structure=structure, lr=0.05, damping=1e-2, momentum=0.9), []
    for _ in range(steps):
        opt.zero_grad()
        value = loss(model(x), target)
        value.backward()
        opt.step()
        losses.append(value.item())
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.2g}")
