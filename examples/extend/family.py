"""An output family of your own: logistic noise, whose tails are heavier than those of a Gaussian.

A family says what the Fisher metric, its samples and its divergence are; every structure, solver and step rule then
works with it.

    python examples/extend/family.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

import natgrad as ng
from natgrad.families import Family


@final
@dataclass(frozen=True)
class LogisticNoise(Family):
    """t = y + s·ε with density e^{-ε}/(1 + e^{-ε})², a term for each output; F = 1/(3s²).

    KL(y ‖ y') = d coth(d/2) − 2 with d = (y − y')/s.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"LogisticNoise(scale=…) must be positive, got {self.scale}")

    def check(self, y: Tensor) -> None:
        """Outputs of any shape [n *out] fit."""

    def terms(self, y: Tensor) -> int:
        return y.shape[1:].numel()

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return u / (3 * self.scale**2)

    def root(self, y: Tensor) -> Tensor:
        n, terms = len(y), self.terms(y)
        one = torch.eye(terms, dtype=y.dtype, device=y.device).view(terms, 1, *y.shape[1:])
        return one.expand(terms, n, *y.shape[1:]) / (3**0.5 * self.scale)

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        u = torch.rand(samples, *y.shape, generator=generator, dtype=y.dtype, device=y.device)
        return (2 * u - 1) / self.scale  # ∂_y log p = tanh(ε/2)/s at ε = logit u

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        d = ((y - y2) / self.scale).flatten(1)
        near = d.abs() < 0.1  # there the difference would be lost in rounding
        series = d.square() / 6 * (1 - d.square() / 60 * (1 - d.square() / 42))
        far = torch.where(near, 1.0, d)
        return torch.where(near, series, far / torch.tanh(far / 2) - 2).sum(1)

    def loss(self, y: Tensor, t: Tensor) -> Tensor:
        """−log p(t | y), a mean over examples, without its constant: what is to be trained."""
        ε = (t - y) / self.scale
        return (ε + 2 * F.softplus(-ε)).flatten(1).sum(1).mean()


def slope(family: Family, loss: Callable[[Tensor, Tensor], Tensor], steps: int = 20) -> float:
    """Fit a line through points, of which some are far off, and return its slope; that of the others is 2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 1, generator=generator, dtype=torch.float64)
    t = 2 * x + 0.1 * torch.randn(200, 1, generator=generator, dtype=torch.float64)
    t[x > 0.9] -= 5
    model = torch.nn.Linear(1, 1).double()
    opt = ng.NaturalGradient(model, ng.Fisher(family), damping=1e-9)
    for _ in range(steps):
        opt.zero_grad()
        loss(model(x), t).backward()
        opt.step()
    return model.weight.item()


if __name__ == "__main__":
    noise = LogisticNoise(0.1)
    print(f"slope with logistic noise: {slope(noise, noise.loss):.2f}")
    print(f"slope with Gaussian noise: {slope(ng.Gaussian(), F.mse_loss):.2f}")
