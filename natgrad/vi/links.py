"""Probabilities of classes whose log-odds are Gaussian: the mean of a softmax or of a sigmoid."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.linalg import eigh, is_number
from natgrad.output.metric import fresh_generator


class Link(ABC):
    """An approximation of E softmax(y) and E σ(y) for Gaussian y; neither has a closed form."""

    @abstractmethod
    def softmax(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """E softmax(y) [* c] for logits y ~ N(mean [* c], covariance [* c c])."""

    @abstractmethod
    def sigmoid(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E σ(y) for log-odds y ~ N(mean, variance), number by number."""


@final
@dataclass(frozen=True)
class Probit(Link):
    """Class probabilities from Gaussian logits by MacKay's rescaling of the logits.

    Method:
        σ(μ/√(1 + πv/8)): as if σ(y) were the Gaussian distribution function Φ(y√(π/8)), which has the same slope at 0.

        (Spiegelhalter and Lauritzen 1990.) For several classes softmax(μ_k/√(1 + πΣ_kk/8)), without the covariances.

    Example:
        >>> Probit().sigmoid(torch.tensor([2.0]), torch.tensor([8 * 3 / torch.pi]))  # σ(2/√4)
        tensor([0.7311])
    """

    def softmax(self, mean: Tensor, covariance: Tensor) -> Tensor:
        return (mean * _shrinkage(covariance.diagonal(dim1=-2, dim2=-1))).softmax(-1)

    def sigmoid(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean * _shrinkage(variance)).sigmoid()


@final
@dataclass(frozen=True)
class Bridge(Link):
    """Class probabilities from Gaussian logits by Laplace's bridge, without sampling.

    Method:
        The mean of the Dirichlet distribution whose Laplace approximation in the logits is N(μ, Σ), with μ and Σ
        conditioned on logits of sum zero (MacKay 1998; Hobbhahn et al. 2022, (6)),

            p_k ∝ α_k = (1 − 2/c + e^{μ_k} Σ_l e^{−μ_l}/c²)/Σ_kk.

        For two classes this is softmax(μ), whatever Σ is.

    Example:
        >>> sure, vague = 0.1 * torch.eye(3), torch.diag(torch.tensor([10.0, 0.1, 0.1]))
        >>> mean = torch.tensor([1.0, 0.0, 0.0])
        >>> bool(Bridge().softmax(mean, vague)[0] < Bridge().softmax(mean, sure)[0])
        True
    """

    def softmax(self, mean: Tensor, covariance: Tensor) -> Tensor:
        c, rows, diagonal = mean.shape[-1], covariance.sum(-1), covariance.diagonal(dim1=-2, dim2=-1)
        total = rows.sum(-1, keepdim=True)
        rounding = 8 * c * torch.finfo(mean.dtype).eps * diagonal.sum(-1, keepdim=True)
        gain = torch.where(total > rounding, rows / total, 0.0)  # else the sum of the logits is certain
        μ = mean - gain * mean.sum(-1, keepdim=True)
        v = (diagonal - gain * rows).clamp(min=torch.finfo(mean.dtype).tiny)
        # In logarithms: e^μ overflows for sure classes. The logarithm of 1 − 2/c = 0 is −∞, and adds nothing.
        first = torch.full_like(μ, 1 - 2 / c).log()
        second = μ + (-μ).logsumexp(-1, keepdim=True) - 2 * math.log(c)
        return (torch.logaddexp(first, second) - v.log()).softmax(-1)

    def sigmoid(self, mean: Tensor, variance: Tensor) -> Tensor:
        raise IncompatibleError(
            "Bridge() does not work with log-odds of two outcomes: the Beta distribution of Laplace's bridge has the "
            "mean σ(μ), whatever the variance. Use Probit(), or MonteCarlo(samples)"
        )


@final
@dataclass(frozen=True)
class MonteCarlo(Link):
    """Class probabilities from Gaussian logits as a mean over samples.

    Args:
        samples: The number of samples of the logits.
        generator: Where random numbers come from; without one, the global random stream is not touched.

    Example:
        >>> p = MonteCarlo(100).softmax(torch.zeros(5, 3), torch.eye(3).expand(5, 3, 3))
        >>> p.shape, torch.allclose(p.sum(1), torch.ones(5))
        (torch.Size([5, 3]), True)
    """

    samples: int = 1000
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not is_number(self.samples, whole=True) or self.samples < 1:
            raise ValueError(f"MonteCarlo(samples) is a number of samples, 1 or more, got {self.samples!r}")

    def softmax(self, mean: Tensor, covariance: Tensor) -> Tensor:
        values, vectors = eigh(covariance, "the covariance of the outputs")
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # what is below zero is rounding
        drawn = (root @ self._noise(mean).unsqueeze(-1)).squeeze(-1)
        return (mean + drawn).softmax(-1).mean(0)

    def sigmoid(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean + variance.sqrt() * self._noise(mean)).sigmoid().mean(0)

    def _noise(self, like: Tensor) -> Tensor:
        """[s *like]."""
        generator = self.generator or fresh_generator(like.device)
        return torch.randn(self.samples, *like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _shrinkage(variance: Tensor) -> Tensor:
    return (1 + math.pi / 8 * variance).rsqrt()
