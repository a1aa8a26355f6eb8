"""Discrete output families, in their natural parameters: categorical, Bernoulli, Poisson."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from natgrad.families.base import Family, by_terms, check_terms, diagonal_root, drawn_once, over_terms


@final
@dataclass(frozen=True)
class Categorical(Family):
    """Softmax of logits y [n *terms c]: F = diag p − p pᵀ a term, singular along the constant vector (ERRATA 34).

    Root: √p_k (e_k − p), one column a class, the rows of the Hellinger embedding 2√p (ERRATA 12).

    >>> Categorical().flat(torch.zeros(1, 2), torch.tensor([[1.0, 1.0]]))
    tensor([[0., 0.]])
    """

    def check(self, y: Tensor) -> None:
        check_terms(self, y, 2, "the logits of the classes")

    def terms(self, y: Tensor) -> int:
        return y.shape[1:-1].numel()

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        p = y.softmax(-1)
        return p * (u - (p * u).sum(-1, keepdim=True))

    def root(self, y: Tensor) -> Tensor:
        p = y.softmax(-1)
        centred = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device) - p.unsqueeze(-2)  # [n *terms k c]
        columns = p.sqrt().unsqueeze(-1) * centred
        return by_terms(columns.movedim(-2, 0))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = y.softmax(-1)
        t = _drawn(p, samples, generator)
        return torch.zeros(samples, *y.shape, dtype=y.dtype, device=y.device).scatter_(-1, t, 1.0).sub_(p)

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = y.softmax(-1)
        combined = drawn_once(y, samples, generator) * p.sqrt()
        return combined - p * combined.sum(-1, keepdim=True)

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        log_p, log_q = y.log_softmax(-1), y2.log_softmax(-1)
        return over_terms((log_p.exp() * (log_p - log_q)).sum(-1))


def _drawn(p: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """t [k n *terms 1] with probabilities p [n *terms c].

    As ``torch.multinomial``, which looks at its argument first, so that a GPU waits. What is not finite is not refused
    here: it stays so in the scores.
    """
    if p.device.type == "cpu":  # numbers are dear: one a term, and the class where the sum of p exceeds it
        u = torch.rand(samples, *p.shape[:-1], 1, dtype=torch.float64, generator=generator)
        below = p.cumsum(-1, dtype=torch.float64)
        # Rounded probabilities do not sum to 1: what is missing would be drawn as the last class, though it had p = 0.
        return (below[..., :-1] <= u * below[..., -1:]).sum(-1, keepdim=True)
    # Of independent events with rates p the first is t with probability p_t. It needs no sum, which depends on its
    # order, and fewer launches.
    waiting = torch.empty(samples, *p.shape, dtype=p.dtype, device=p.device).exponential_(generator=generator)
    return (p / waiting).argmax(-1, keepdim=True)


@final
@dataclass(frozen=True)
class Bernoulli(Family):
    """Log-odds y [n *terms]: F = p(1 − p), p = σ(y) (002 section 4).

    >>> Bernoulli().flat(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[0.2500]])
    """

    def check(self, y: Tensor) -> None:
        """Every shape [n *terms] fits."""

    def terms(self, y: Tensor) -> int:
        return y.shape[1:].numel()

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._information(y) * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, self._information(y))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = y.sigmoid()
        return torch.bernoulli(p.expand(samples, *p.shape), generator=generator) - p

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return drawn_once(y, samples, generator) * self._information(y).sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        # log(1 + e^y) is log Z; KL(p_y ‖ p_y2) is its Bregman divergence at (y2, y) (ERRATA 35).
        return over_terms(F.softplus(y2) - F.softplus(y) - y.sigmoid() * (y2 - y))

    @staticmethod
    def _information(y: Tensor) -> Tensor:
        return y.sigmoid() * (-y).sigmoid()


@final
@dataclass(frozen=True)
class Poisson(Family):
    """Log-rates y [n *terms]: F = e^y (002 section 4).

    >>> Poisson().kl(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([0.])
    """

    def check(self, y: Tensor) -> None:
        """Every shape [n *terms] fits."""

    def terms(self, y: Tensor) -> int:
        return y.shape[1:].numel()

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return y.exp() * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, y.exp())

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        rate = y.exp()
        return torch.poisson(rate.expand(samples, *rate.shape), generator=generator) - rate

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return drawn_once(y, samples, generator) * y.exp().sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        return over_terms(y2.exp() - y.exp() - y.exp() * (y2 - y))
