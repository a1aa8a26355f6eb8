"""Potentials: strictly convex functions ψ, whose gradient takes one chart to its dual, and the quadratic ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.linalg import cholesky
from natgrad.mirror.domains import Domain, Space
from natgrad.operators.base import Inverse, Layout, Operator
from natgrad.operators.dense import DenseOperator
from natgrad.operators.diagonal import DiagonalOperator
from natgrad.slots import check_slots
from natgrad.solve import Cholesky, Solver


class Potential(ABC):
    """ψ, a distance generating function (000 F.2, where it is w; 002 (30), where it is ϕ).

    z = ∇ψ(x) is the dual chart, x = ∇ψ*(z) the way back, ψ*(z) = sup_x ⟨x, z⟩ − ψ(x) the conjugate (000 (53), H there).
    ∇²ψ is a Riemannian metric in the chart x, ∇²ψ* in the chart z, and they are each other's inverse. Points have any
    shape; a value is the sum over all entries.
    """

    @property
    @abstractmethod
    def domain(self) -> Domain:
        """Of x."""

    @property
    @abstractmethod
    def dual_domain(self) -> Domain:
        """Of z."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """ψ(x) []."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """z = ∇ψ(x), of the shape of x."""

    @abstractmethod
    def inverse_gradient(self, z: Tensor) -> Tensor:
        """x = ∇ψ*(z) = (∇ψ)⁻¹(z), differentiable in z."""

    @abstractmethod
    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        """V_x(y) = ψ(y) − ψ(x) − ⟨∇ψ(x), y − x⟩ [] (000 (51)); y may lie on the boundary where ψ is finite there."""

    @abstractmethod
    def hessian(self, x: Tensor) -> Operator:
        """∇²ψ(x) over the flattened entries [p]."""

    @abstractmethod
    def conjugate_hessian(self, z: Tensor) -> Operator:
        """∇²ψ*(z) = (∇²ψ(x))⁻¹ [p q]."""

    def conjugate(self, z: Tensor) -> Tensor:
        """ψ*(z) = ⟨x, z⟩ − ψ(x) [] at x = ∇ψ*(z)."""
        x = self.inverse_gradient(z)
        return (x * z).sum() - self.value(x)


@final
@dataclass(frozen=True)
class SquaredNorm(Potential):
    """ψ = ½‖x‖²: both charts are one, and mirror descent is gradient descent (000 F.2).

    >>> SquaredNorm().bregman(torch.tensor([3.0]), torch.tensor([1.0]))
    tensor(2.)
    """

    @property
    def domain(self) -> Domain:
        return Space()

    @property
    def dual_domain(self) -> Domain:
        return Space()

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * x.square().sum()

    def gradient(self, x: Tensor) -> Tensor:
        return x

    def inverse_gradient(self, z: Tensor) -> Tensor:
        return z

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (y - x).square().sum()

    def hessian(self, x: Tensor) -> Operator:
        return diagonal(torch.ones_like(x))

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return diagonal(torch.ones_like(z))


@final
@dataclass(frozen=True)
class Quadratic(Potential):
    """ψ = ½‖x‖²_G = ½ xᵀGx for any operator of the library; V_x(y) = ½‖y − x‖²_G (000 F.2).

    With G = g(x_k) it is the generating function of proposition 17, ½‖y‖²_{g(x_k)} (ERRATA 23: what is printed has x
    in it, which V already brings). In the pairing ⟨x, z⟩ of (53) the dual metric is ∇²ψ* = G⁻¹, not G (ERRATA 23).

    >>> ψ = Quadratic.of(torch.tensor([[2.0, 0.0], [0.0, 8.0]]))
    >>> ψ.value(torch.tensor([1.0, 1.0])), ψ.inverse_gradient(torch.tensor([2.0, 2.0]))
    (tensor(5.), tensor([1.0000, 0.2500]))
    """

    operator: Operator
    solver: Solver = field(default_factory=Cholesky)

    def __post_init__(self) -> None:
        check_slots(operator=(self.operator, Operator), solver=(self.solver, Solver))

    @staticmethod
    def of(matrix: Tensor) -> Quadratic:
        """From a symmetric positive definite matrix [p q]."""
        return Quadratic(dense(checked_square(matrix, "Quadratic.of(matrix)")))

    @property
    def domain(self) -> Domain:
        return Space()

    @property
    def dual_domain(self) -> Domain:
        return Space()

    @cached_property
    def _inverse(self) -> Inverse:
        return self.solver.init(self.operator)

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * (x * self.gradient(x)).sum()

    def gradient(self, x: Tensor) -> Tensor:
        return self.operator.product(x.reshape(-1)).view_as(x)

    def inverse_gradient(self, z: Tensor) -> Tensor:
        return self._inverse.solve(z.reshape(-1)).view_as(z)

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        return self.value(y - x)

    def hessian(self, x: Tensor) -> Operator:
        return self.operator

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return inverted(self.operator)


@final
@dataclass(frozen=True)
class Conjugate(Potential):
    """ψ*, the potential of the other chart: every map goes the other way, and V_z(z′) = V_x′(x).

    The log-partition functions of exponential families are conjugates of entropies: ``Conjugate(BinaryEntropy())`` is
    log(1 + e^η), ``Conjugate(NegativeEntropy())`` is e^η (Poisson), ``Conjugate(SimplexEntropy())`` is log Σ e^η.

    >>> from natgrad.mirror import BinaryEntropy
    >>> Conjugate(BinaryEntropy()).value(torch.tensor([0.0]))  # log 2
    tensor(0.6931)
    """

    base: Potential

    def __post_init__(self) -> None:
        check_slots(base=(self.base, Potential))

    @property
    def domain(self) -> Domain:
        return self.base.dual_domain

    @property
    def dual_domain(self) -> Domain:
        return self.base.domain

    def value(self, x: Tensor) -> Tensor:
        return self.base.conjugate(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.base.inverse_gradient(x)

    def inverse_gradient(self, z: Tensor) -> Tensor:
        return self.base.gradient(z)

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        return self.base.bregman(self.base.inverse_gradient(x), self.base.inverse_gradient(y))

    def hessian(self, x: Tensor) -> Operator:
        return self.base.conjugate_hessian(x)

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return self.base.hessian(z)


def diagonal(values: Tensor) -> DiagonalOperator:
    """A metric over the entries of one tensor that multiplies each by its number."""
    return DiagonalOperator(layout(values), values.detach().reshape(-1))


def dense(matrix: Tensor) -> DenseOperator:
    """A metric [p q] over the entries of one tensor."""
    return DenseOperator(layout(matrix[0]), matrix.detach())


def layout(x: Tensor) -> Layout:
    """The parameters of a metric over one tensor, which has no name of its own."""
    return Layout.of({"x": x.reshape(-1)}, x.dtype)


def inverted(operator: Operator) -> DenseOperator:
    """G⁻¹ as a metric of covectors [p q]; a singular G raises."""
    factor, scale = scaled_cholesky(operator.dense())
    return DenseOperator(operator.layout, torch.cholesky_inverse(factor) * scale.outer(scale))


def scaled_cholesky(G: Tensor, what: str = "the Hessian of the potential") -> tuple[Tensor, Tensor]:
    """L and s with L Lᵀ = diag(s) G diag(s), whose diagonal is 1: coordinates of different units are not singular."""
    if bool((G.diagonal() > 0).all()):
        scale = G.diagonal().rsqrt()
        return cholesky(G * scale.outer(scale), 0.0, what), scale
    return cholesky(G, 0.0, what), torch.ones_like(G[0])  # which raises


def checked_square(matrix: Tensor, what: str) -> Tensor:
    """Refuse what is not a symmetric matrix, with its shape or its largest asymmetry."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{what} must be a square matrix [p q], got shape {tuple(matrix.shape)}")
    asymmetry = (matrix - matrix.T).abs().max()
    if bool(asymmetry > 64 * torch.finfo(matrix.dtype).eps * matrix.abs().max()):
        raise ValueError(
            f"{what} must be symmetric, and differs from its transpose by {float(asymmetry):.3g}: a metric is "
            "symmetric; pass (A + A.T) / 2"
        )
    return matrix
