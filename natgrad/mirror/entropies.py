"""Potentials with a boundary: entropies of the orthant, the box and the simplex, and the logarithmic barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.mirror.domains import Domain, OpenBox, Simplex, Space
from natgrad.mirror.potentials import Potential, dense, diagonal
from natgrad.operators.base import Operator


@final
@dataclass(frozen=True)
class NegativeEntropy(Potential):
    """ψ = Σ x log x − x on the positive orthant: z = log x, ψ* = Σ e^z, V_x(y) = Σ y log(y/x) − y + x.

    Mirror descent is the multiplicative update x ← x e^{−∇f/α}.

    >>> NegativeEntropy().inverse_gradient(torch.tensor([0.0]))
    tensor([1.])
    """

    @property
    def domain(self) -> Domain:
        return OpenBox(lower=0.0)

    @property
    def dual_domain(self) -> Domain:
        return Space()

    def value(self, x: Tensor) -> Tensor:
        self.domain.check_closure(x, "x")
        return (torch.xlogy(x, x) - x).sum()

    def gradient(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        return x.log()

    def inverse_gradient(self, z: Tensor) -> Tensor:
        self.dual_domain.check(z, "z")
        return z.exp()

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        self.domain.check_closure(y, "y")
        return _kl(y, x)

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        return diagonal(x.reciprocal())

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return diagonal(self.inverse_gradient(z))


@final
@dataclass(frozen=True)
class BinaryEntropy(Potential):
    """ψ = Σ x log x + (1 − x) log(1 − x) on the box (0, 1): z = log x/(1 − x), ψ* = Σ log(1 + e^z) (Bernoulli).

    V_x(y) = KL(y ‖ x), coin by coin.

    >>> BinaryEntropy().inverse_gradient(torch.tensor([0.0]))
    tensor([0.5000])
    """

    @property
    def domain(self) -> Domain:
        return OpenBox(0.0, 1.0)

    @property
    def dual_domain(self) -> Domain:
        return Space()

    def value(self, x: Tensor) -> Tensor:
        self.domain.check_closure(x, "x")
        return (torch.xlogy(x, x) + torch.special.xlog1py(1 - x, -x)).sum()

    def gradient(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        return x.log() - (-x).log1p()

    def inverse_gradient(self, z: Tensor) -> Tensor:
        self.dual_domain.check(z, "z")
        return z.sigmoid()

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        self.domain.check_closure(y, "y")
        return _kl(y, x) + _kl(1 - y, 1 - x)

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        return diagonal((x * (1 - x)).reciprocal())

    def conjugate_hessian(self, z: Tensor) -> Operator:
        self.dual_domain.check(z, "z")
        return diagonal(z.sigmoid() * (-z).sigmoid())


@final
@dataclass(frozen=True)
class SimplexEntropy(Potential):
    """ψ = Σ x log x on the simplex (last axis): x = softmax z, ψ* = Σ log Σ e^z (categorical), V_x(y) = KL(y ‖ x).

    z is determined up to a constant a simplex: log x is returned. The metric lives on the tangent space Σ v = 0; as
    matrices ∇²ψ = C diag(1/x) C with the centring C, and ∇²ψ* = diag x − x xᵀ, each the pseudo-inverse of the other
    and singular along the constants (ERRATA 34): solve with ``Pinv()``. Mirror descent is exponentiated gradient.

    >>> SimplexEntropy().inverse_gradient(torch.zeros(4))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    @property
    def domain(self) -> Domain:
        return Simplex()

    @property
    def dual_domain(self) -> Domain:
        return Space()

    def value(self, x: Tensor) -> Tensor:
        self.domain.check_closure(x, "x")
        return torch.xlogy(x, x).sum()

    def gradient(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        return x.log()

    def inverse_gradient(self, z: Tensor) -> Tensor:
        self.dual_domain.check(z, "z")
        return z.softmax(-1)

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        self.domain.check_closure(y, "y")
        return _kl(y, x)  # −y + x sums to nothing

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        d = x.shape[-1]
        centring = torch.eye(d, dtype=x.dtype, device=x.device) - 1 / d
        return dense(_blocks(centring @ torch.diag_embed(x.reciprocal()) @ centring))

    def conjugate_hessian(self, z: Tensor) -> Operator:
        x = self.inverse_gradient(z)
        return dense(_blocks(torch.diag_embed(x) - x.unsqueeze(-1) * x.unsqueeze(-2)))


@final
@dataclass(frozen=True)
class LogBarrier(Potential):
    """ψ = −Σ log x on the positive orthant: z = −1/x < 0, ψ* = −Σ 1 + log(−z), V_x(y) = Σ y/x − log(y/x) − 1.

    A step may leave the dual domain z < 0, which is not the whole space: it is refused, and α must be larger.

    >>> LogBarrier().gradient(torch.tensor([2.0]))
    tensor([-0.5000])
    """

    @property
    def domain(self) -> Domain:
        return OpenBox(lower=0.0)

    @property
    def dual_domain(self) -> Domain:
        return OpenBox(upper=0.0)

    def value(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        return -x.log().sum()

    def gradient(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        return -x.reciprocal()

    def inverse_gradient(self, z: Tensor) -> Tensor:
        self.dual_domain.check(z, "z")
        return -z.reciprocal()

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        self.domain.check(y, "y")
        moved = (y - x) / x
        return (moved - moved.log1p()).sum()

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        return diagonal(x.square().reciprocal())

    def conjugate_hessian(self, z: Tensor) -> Operator:
        self.dual_domain.check(z, "z")
        return diagonal(z.square().reciprocal())


def _kl(y: Tensor, x: Tensor) -> Tensor:
    """Σ y log(y/x) − y + x [], as Σ x((1 + t) log(1 + t) − t) with t = (y − x)/x, which does not cancel near y = x."""
    t = (y - x) / x
    return (x * (torch.special.xlog1py(1 + t, t) - t)).sum()


def _blocks(matrices: Tensor) -> Tensor:
    """Matrices [* d d] side by side on the diagonal of one [p q]."""
    d = matrices.shape[-1]
    whole: Tensor = torch.block_diag(*matrices.reshape(-1, d, d).unbind())
    return whole
