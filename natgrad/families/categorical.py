"""The categorical family, over one-hot data, in its redundant and in its minimal chart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, OneHotCategorical
from torch.distributions import constraints as C
from torch.nn import functional as F

from natgrad.families.base import by_terms, check_terms, drawn_once, over_terms
from natgrad.families.domain import Box, Domain, Simplex, entry, first
from natgrad.families.exponential import ExponentialFamily, expect
from natgrad.families.information import Centred, Downdated, Information
from natgrad.families.regions import Corner


@final
@dataclass(frozen=True)
class Categorical(ExponentialFamily):
    """Softmax of logits y [n *terms c]: F = diag p − p pᵀ a term, singular along the constant vector (ERRATA 34).

    Root: √p_k (e_k − p), one column a class, the rows of the Hellinger embedding 2√p (ERRATA 12).

    As a distribution: x one-hot [*batch c], t(x) = x, log Z = log Σ exp η, ξ = p. The natural parameters are
    log-probabilities up to a constant, not log-odds, and ``natural`` returns those of zero mean. ``minimal=True``:
    log-odds against the last class [*batch c−1], in which F is regular.

    >>> Categorical().flat(torch.zeros(1, 2), torch.tensor([[1.0, 1.0]]))
    tensor([[0., 0.]])
    >>> Categorical(minimal=True).natural(torch.tensor([0.25, 0.5]))
    tensor([0.0000, 0.6931])
    """

    minimal: bool = False

    def __repr__(self) -> str:
        return "Categorical(minimal=True)" if self.minimal else "Categorical()"

    # As an output family

    def check(self, y: Tensor) -> None:
        if self.minimal:
            check_terms(self, y, 1, "the log-odds of the classes against the last")
        else:
            check_terms(self, y, 2, "the logits of the classes")

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        p = self._mean(y)
        return p * (u - (p * u).sum(-1, keepdim=True))

    def root(self, y: Tensor) -> Tensor:
        p = self._full(y).softmax(-1)
        centred = torch.eye(p.shape[-1], dtype=y.dtype, device=y.device) - p.unsqueeze(-2)  # [n *terms k c]
        columns = p.sqrt().unsqueeze(-1) * centred
        return by_terms(self._kept(columns).movedim(-2, 0))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = self._full(y).softmax(-1)
        t = _drawn(p, samples, generator)
        return self._kept(torch.zeros(samples, *p.shape, dtype=y.dtype, device=y.device).scatter_(-1, t, 1.0).sub_(p))

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = self._full(y).softmax(-1)
        combined = drawn_once(p, samples, generator) * p.sqrt()
        return self._kept(combined - p * combined.sum(-1, keepdim=True))

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        self._alike(y, y2, "y2")
        log_p, log_q = self._full(y).log_softmax(-1), self._full(y2).log_softmax(-1)
        return over_terms((log_p.exp() * (log_p - log_q)).sum(-1))

    # As a distribution

    @property
    def natural_domain(self) -> Domain:
        return Box()

    @property
    def mean_domain(self) -> Domain:
        return Corner() if self.minimal else Simplex()

    @property
    def support(self) -> C.Constraint:
        return C.one_hot

    def statistics(self, x: Tensor) -> Tensor:
        return self._kept(x)

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., 0])

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p + self.minimal,)

    def log_prob(self, eta: Tensor, x: Tensor) -> Tensor:
        """As of every family; classes may be given by their numbers, integers [*batch], too."""
        if x.is_floating_point() or x.dtype is torch.bool:
            return super().log_prob(eta, x)
        return super().log_prob(eta, _one_hot(x, eta.shape[-1] + self.minimal).to(eta.dtype))

    def distribution(self, eta: Tensor) -> Distribution:
        return OneHotCategorical(logits=self._full(self._inside(eta, self.natural_domain, "eta")))

    def from_distribution(self, d: Distribution) -> Tensor:
        expect(self, d, OneHotCategorical, TorchCategorical)
        assert isinstance(d, (OneHotCategorical, TorchCategorical))
        return d.logits[..., :-1] - d.logits[..., -1:] if self.minimal else d.logits

    def _width(self, p: int) -> str:
        return "" if p else "the logits of the classes"

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self._full(eta).logsumexp(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._kept(self._full(eta).softmax(-1))

    def _natural(self, xi: Tensor) -> Tensor:
        if self.minimal:
            return xi.log() - torch.log1p(-xi.sum(-1, keepdim=True))
        log_p = xi.log()
        return log_p - log_p.mean(-1, keepdim=True)

    def _fisher(self, eta: Tensor) -> Information:
        p = self._full(eta).softmax(-1)
        return (
            Downdated(p[..., :-1], p[..., :-1], torch.ones_like(p[..., 0]), p[..., -1]) if self.minimal else Centred(p)
        )

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])

    def _full(self, eta: Tensor) -> Tensor:
        """The logits of all classes."""
        return F.pad(eta, (0, 1)) if self.minimal else eta

    def _kept(self, x: Tensor) -> Tensor:
        """The entries that the chart has."""
        return x[..., :-1] if self.minimal else x


def _one_hot(x: Tensor, classes: int) -> Tensor:
    """[*batch c] of numbers; a GPU is not waited for, and a number that is no class has no 1."""
    if x.device.type != "cuda" and not torch._C._are_functorch_transforms_active():
        wrong = (x < 0) | (x >= classes)
        if bool(wrong.any()):
            at = first(wrong)
            raise ValueError(
                f"x{entry(at)} = {int(x[at])} is not one of the {classes} classes of Categorical: count them from 0"
            )
    return x.unsqueeze(-1) == torch.arange(classes, device=x.device)


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
