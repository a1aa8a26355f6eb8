"""Output families: what a model's outputs say about the distribution of the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Family(ABC):
    """p(t | y) for outputs y [n *out]; several independent terms an example (pixels, tokens) multiply.

    The Fisher metric in the chart y is F = E[∇log p ∇log pᵀ], targets drawn from the model (002 (8), 004 (19)).
    """

    @property
    def needs_target(self) -> bool:
        """Whether the target of a batch says something about its outputs that they do not say, as a mask does."""
        return False

    def given(self, target: Any) -> Family:
        """The family of the outputs of a batch with this target."""
        return self

    @abstractmethod
    def check(self, y: Tensor) -> None:
        """Raise if the shape of the outputs does not fit the family."""

    @abstractmethod
    def terms(self, y: Tensor) -> int:
        """The number of independent distributions an example has."""

    @abstractmethod
    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        """F_y u [n *out]."""

    @abstractmethod
    def root(self, y: Tensor) -> Tensor:
        """s [k n *out] with Σ_k s sᵀ = F, exactly."""

    @abstractmethod
    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """∇_y log p(t | y) [k n *out] at targets t drawn from the model itself; their mean is 0, their covariance F."""

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor | None:
        """Σ_d ε_kd s_d [k n *out] over the columns of the root, ε ~ N(0, 1) the same for all n, if it needs no root."""
        return None

    @abstractmethod
    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        """KL(p_y ‖ p_y2) [n], in nats, summed over the terms."""


def check_terms(family: Family, y: Tensor, smallest: int, meaning: str) -> None:
    """Refuse outputs whose last axis cannot hold the parameters of one term."""
    if y.ndim < 2 or y.shape[-1] < smallest:
        raise ValueError(
            f"{type(family).__name__} needs {meaning} on the last axis, outputs [n … {smallest} or more], "
            f"got outputs of shape {tuple(y.shape)}"
        )


def drawn_once(y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """ε [k 1 *out], standard normal: a number for every column of a root with as many columns as outputs."""
    return torch.randn(samples, 1, *y.shape[1:], generator=generator, dtype=y.dtype, device=y.device)


def diagonal_root(y: Tensor, information: Tensor) -> Tensor:
    """Columns of √F for a diagonal F [n *out]: column d is output d of every example."""
    d = y[0].numel()
    columns = torch.zeros(d, y.shape[0], d, dtype=y.dtype, device=y.device)
    each = torch.arange(d, device=y.device)
    columns[each, :, each] = information.sqrt().reshape(-1, d).T
    return columns.view(d, *y.shape)


def by_terms(columns: Tensor) -> Tensor:
    """Columns [k n *terms c] that act on all terms at once → [(terms k) n *terms c], one term a column.

    Terms are independent, so h has no entries between them: a column may touch one term only.
    """
    k, n, *terms, c = columns.shape
    flat = columns.reshape(k, n, -1, c)
    t = flat.shape[2]
    if t == 1:
        return columns
    alone = torch.diag_embed(flat.permute(0, 1, 3, 2))  # [k n c t t']
    return alone.permute(3, 0, 1, 4, 2).reshape(t * k, n, *terms, c)


def over_terms(values: Tensor) -> Tensor:
    """Sum [n *terms] over the terms of each example."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values
