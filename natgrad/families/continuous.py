"""Gaussian output families, with a fixed and with a learned scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.families.base import Family, diagonal_root, drawn_once, over_terms


@final
@dataclass(frozen=True)
class Gaussian(Family):
    """N(μ, σ²) a term. With ``scale`` given, the outputs are means and F = 1/σ²: the loss is ½‖y − t‖²/σ².

    With ``scale=None`` the scale is learned: the last axis of the outputs holds (μ₁ … μ_d, log σ₁ … log σ_d), and
    F = diag(1/σ², 2) in that chart.

    >>> Gaussian(scale=2.0).flat(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[0.2500]])
    >>> Gaussian(scale=None).flat(torch.zeros(1, 2), torch.ones(1, 2))
    tensor([[1., 2.]])
    """

    scale: float | None = 1.0

    def __post_init__(self) -> None:
        if self.scale is not None and not self.scale > 0:
            raise ValueError(f"Gaussian(scale=…) must be positive, or None to learn it, got {self.scale}")

    def check(self, y: Tensor) -> None:
        if self.scale is None and (y.ndim < 2 or y.shape[-1] % 2):
            raise ValueError(
                "Gaussian(scale=None) needs as many log-scales as means on the last axis, outputs [n … 2d], "
                f"got outputs of shape {tuple(y.shape)}"
            )

    def terms(self, y: Tensor) -> int:
        return y.shape[1:].numel() // (2 if self.scale is None else 1)

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._information(y) * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, self._information(y))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        if self.scale is not None:
            z = torch.randn(samples, *y.shape, generator=generator, dtype=y.dtype, device=y.device)  # (t − μ)/σ
            return z if self.scale == 1 else z.div_(self.scale)
        μ, log_σ = self._split(y)
        z = torch.randn(samples, *μ.shape, generator=generator, dtype=y.dtype, device=y.device)
        return torch.cat([z * (-log_σ).exp(), z.square() - 1], dim=-1)

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return drawn_once(y, samples, generator) * self._information(y).sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        (μ, log_σ), (μ2, log_σ2) = self._split(y), self._split(y2)
        gap = log_σ - log_σ2
        moved = (μ - μ2) * (-log_σ2).exp()
        return over_terms(0.5 * ((2 * gap).exp() - 1 + moved.square()) - gap)

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.scale is not None:
            return y, torch.full_like(y, self.scale).log()
        μ, log_σ = y.chunk(2, dim=-1)
        return μ, log_σ

    def _information(self, y: Tensor) -> Tensor:
        _, log_σ = self._split(y)
        precision = (-2 * log_σ).exp()
        return precision if self.scale is not None else torch.cat([precision, torch.full_like(precision, 2.0)], dim=-1)
