"""Angles: the von Mises family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.base import ExponentialFamily, expect, natural_by_newton
from natgrad.families.domains import Concave, Domain, Space
from natgrad.families.information import Information

_SMALL = 1e-3  # κ² below which four terms of a series are exact in float64
_LARGE = 100.0  # κ above which 1 − A² − A/κ loses more to cancellation than a series leaves out


@final
@dataclass(frozen=True)
class VonMises(ExponentialFamily):
    """The von Mises distributions of an angle.

    Method:
        exp(κ cos(x − μ))/(2π I₀(κ)): t = (cos x, sin x), η = κ (cos μ, sin μ), any point [*batch 2] of the plane.

        log Z = log 2π + log I₀(‖η‖), ξ = A(κ) η/κ with A = I₁/I₀, F = A/κ (1 − uuᵀ) + A' uuᵀ with u = η/κ.

    Example:
        >>> VonMises().mean(torch.zeros(2))
        tensor([0., 0.])
    """

    natural_domain: ClassVar[Domain] = Space()
    mean_domain: ClassVar[Domain] = Concave(
        lambda xi: 1 - xi.norm(dim=-1, keepdim=True), ("a mean resultant length below 1",)
    )
    support: ClassVar[C.Constraint] = C.real

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack([x.cos(), x.sin()], -1)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        # torch requires κ > 0; the smallest positive number is as uniform as 0.
        κ = eta.norm(dim=-1).clamp(min=torch.finfo(eta.dtype).tiny)
        return D.VonMises(torch.atan2(eta[..., 1], eta[..., 0]), κ)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.VonMises)
        return torch.stack([d.concentration * d.loc.cos(), d.concentration * d.loc.sin()], -1)

    def _wrong_size(self, p: int) -> str:
        return "" if p == 2 else "κ (cos μ, sin μ), 2 entries,"

    def _log_partition(self, eta: Tensor) -> Tensor:
        q, κ = _squared(eta)
        large = torch.special.i0e(κ).log() + κ
        s = q.clamp(max=_SMALL)
        small = s / 4 - s.square() / 64 + s**3 / 576 - 11 * s**4 / 49152
        return math.log(2 * math.pi) + torch.where(q < _SMALL, small, large)

    def _mean(self, eta: Tensor) -> Tensor:
        return _ratio(eta).unsqueeze(-1) * eta

    def _natural(self, xi: Tensor) -> Tensor:
        R2 = xi.square().sum(-1, keepdim=True)
        return natural_by_newton(self, xi, xi * (2 - R2) / (1 - R2))

    def _fisher(self, eta: Tensor) -> Information:
        # In closed form: A/κ across u and A' along u differ by orders of magnitude, and A' cancels at large κ.
        η = eta.double()
        length = torch.where((η == 0).all(-1), 1.0, η.square().sum(-1)).sqrt().unsqueeze(-1)  # at 0 any u will do
        u, across, along = (t.to(eta) for t in (η / length, _ratio(η).unsqueeze(-1), _slope(η).unsqueeze(-1)))

        def split(v: Tensor) -> tuple[Tensor, Tensor]:
            component = (u * v).sum(-1, keepdim=True) * u
            return v - component, component

        def flat(v: Tensor) -> Tensor:
            perpendicular, parallel = split(v)
            return across * perpendicular + along * parallel

        def sharp(w: Tensor) -> Tensor:
            perpendicular, parallel = split(w)
            return perpendicular / across + parallel / along

        return Information(eta, 1, flat, sharp)


def _squared(eta: Tensor) -> tuple[Tensor, Tensor]:
    """κ², and κ where it is not small; 1 elsewhere, so that nothing is divided by 0."""
    q = eta.square().sum(-1)
    return q, torch.where(q < _SMALL, torch.ones_like(q), q).sqrt()


def _ratio(eta: Tensor) -> Tensor:
    """A(κ)/κ."""
    q, κ = _squared(eta)
    large = torch.special.i1e(κ) / (torch.special.i0e(κ) * κ)
    s = q.clamp(max=_SMALL)
    small = 1 / 2 - s / 16 + s.square() / 96 - 11 * s**3 / 6144
    return torch.where(q < _SMALL, small, large)


def _slope(eta: Tensor) -> Tensor:
    """A'(κ) = 1 − A² − A/κ, by series at both ends."""
    q, κ = _squared(eta)
    s, u = q.clamp(max=_SMALL), 1 / κ.clamp(min=_LARGE)
    small = 1 / 2 - 3 * s / 16 + 5 * s.square() / 96 - 77 * s**3 / 6144
    a = _ratio(eta)
    middle = 1 - a.square() * κ.square() - a
    series = 1 / 2 + u * (1 / 4 + u * (3 / 8 + u * (25 / 32 + u * (65 / 32 + u * 3219 / 512))))
    return torch.where(q < _SMALL, small, torch.where(κ < _LARGE, middle, u.square() * series))
