"""Distributions of probabilities: beta and Dirichlet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.base import ExponentialFamily, expect, natural_by_newton
from natgrad.families.domains import Concave, Domain, OpenBox
from natgrad.families.information import Information
from natgrad.families.special import trigamma, trigamma_excess


@dataclass(frozen=True)
class Dirichlet(ExponentialFamily):
    """The Dirichlet distributions of probabilities of c classes.

    Method:
        x on the simplex [*batch c]: t = log x, η = α − 1, log Z = Σ log Γ(α_c) − log Γ(Σ α_c).

    Example:
        >>> Dirichlet().mean(torch.zeros(2))
        tensor([-1.0000, -1.0000])
    """

    natural_domain: ClassVar[Domain] = OpenBox(-1.0)
    mean_domain: ClassVar[Domain] = Concave(
        lambda xi: -xi.logsumexp(-1, keepdim=True),
        ("Σ exp E log x below 1 (Jensen; equal if all data are the same)",),
    )
    support: ClassVar[C.Constraint] = C.simplex

    def statistics(self, x: Tensor) -> Tensor:
        return x.log()

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p,)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Dirichlet(eta + 1)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        return expect(self, d, D.Dirichlet).concentration - 1

    def _wrong_size(self, p: int) -> str:
        return "" if p >= 2 else "α − 1 of the classes, 2 entries or more,"

    def _log_partition(self, eta: Tensor) -> Tensor:
        α = eta + 1
        return torch.lgamma(α).sum(-1) - torch.lgamma(α.sum(-1))

    def _mean(self, eta: Tensor) -> Tensor:
        α = eta + 1
        return torch.digamma(α) - torch.digamma(α.sum(-1, keepdim=True))

    def _natural(self, xi: Tensor) -> Tensor:
        # Large α have Σ exp ξ ≈ 1 − (c − 1)/(2 Σα), small ones ξ ≈ −1/α.
        missing = -torch.expm1(xi.logsumexp(-1, keepdim=True))
        total = (xi.shape[-1] - 1) / (2 * missing)
        return natural_by_newton(self, xi, torch.maximum(total * xi.softmax(-1), -0.5 / xi) - 1)

    def _fisher(self, eta: Tensor) -> Information:
        """diag(a) − c 11ᵀ with a = ψ'(α), c = ψ'(Σα), inverted by the formula of Sherman and Morrison.

        With αψ'(α) = 1 + e(α), 1 − c Σ 1/a is a sum of positive terms; the difference would cancel at large α.
        """
        α = eta + 1
        a, c = trigamma(α), trigamma(α.sum(-1, keepdim=True))
        total = α.double().sum(-1, keepdim=True)
        e = trigamma_excess(α)
        gap = (α / total * (e - trigamma_excess(total)) / (1 + e)).sum(-1, keepdim=True).to(α)

        def sharp(w: Tensor) -> Tensor:
            return (w + c * (w / a).sum(-1, keepdim=True) / gap) / a

        return Information(eta, 1, lambda v: a * v - c * v.sum(-1, keepdim=True), sharp)


@final
@dataclass(frozen=True)
class Beta(Dirichlet):
    """The Beta distributions of a number between 0 and 1.

    Method:
        x in (0, 1): t = (log x, log(1 − x)), η = (a − 1, b − 1); the Dirichlet family of (x, 1 − x), points [*batch 2].

    Example:
        >>> Beta().mean(torch.zeros(2))
        tensor([-1.0000, -1.0000])
    """

    support: ClassVar[C.Constraint] = C.unit_interval

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack([x.log(), torch.log1p(-x)], -1)

    def event_shape(self, p: int) -> tuple[int, ...]:
        return ()

    def _distribution(self, eta: Tensor) -> D.Distribution:
        α = eta + 1
        return D.Beta(α[..., 0], α[..., 1])

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.Beta)
        return torch.stack([d.concentration1, d.concentration0], -1) - 1

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """From draws of both x and 1 − x: where x rounds to 1, the difference 1 − x has no logarithm."""
        return Dirichlet().scores(y, samples, generator)

    def _wrong_size(self, p: int) -> str:
        return "" if p == 2 else "(a − 1, b − 1), 2 entries,"
