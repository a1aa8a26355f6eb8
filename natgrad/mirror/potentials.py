"""Potentials: strictly convex functions ψ, whose gradient takes one chart to its dual, and the quadratic ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError, NatgradError, SingularMetricError
from natgrad.linalg import cholesky
from natgrad.slots import check_slots
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.base import Inverse, Layout, Operator
from natgrad.structures.dense import DenseOperator
from natgrad.structures.diagonal import DiagonalOperator

# Where a convex function is defined: open convex sets that name the entry and the bound of what lies outside.


_ROUNDING = 1024  # units in the last place that the sum of a simplex may be off


class Domain(ABC):
    """An open convex set of points of any shape. ``check`` is for its inside, ``check_closure`` allows the boundary."""

    @abstractmethod
    def check(self, x: Tensor, what: str) -> None:
        """Refuse a point that is not inside, by entry and bound."""

    @abstractmethod
    def check_closure(self, x: Tensor, what: str) -> None:
        """Refuse a point that is neither inside nor on the boundary."""

    @abstractmethod
    def centre(self, like: Tensor) -> Tensor:
        """A point well inside, of the shape of another."""


@final
@dataclass(frozen=True)
class Space(Domain):
    """All finite points."""

    def check(self, x: Tensor, what: str) -> None:
        _refuse(x, x.isfinite(), what, "must be finite")

    def check_closure(self, x: Tensor, what: str) -> None:
        self.check(x, what)

    def centre(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)


@final
@dataclass(frozen=True)
class OpenBox(Domain):
    """lower < x_p < upper for every entry.

    >>> OpenBox(0.0).check(torch.tensor([1.0, -2.0]), "x")
    Traceback (most recent call last):
    ...
    natgrad.errors.DomainError: x[1] = -2 must be above 0: start inside, or take shorter steps (a larger alpha)
    """

    lower: float = -math.inf
    upper: float = math.inf

    def __post_init__(self) -> None:
        if not self.lower < self.upper:
            raise ValueError(f"OpenBox(lower={self.lower}, upper={self.upper}) is empty: lower must be below upper")

    def check(self, x: Tensor, what: str) -> None:
        _refuse(x, x.isfinite(), what, "must be finite")
        _refuse(x, x > self.lower, what, f"must be above {self.lower:g}")
        _refuse(x, x < self.upper, what, f"must be below {self.upper:g}")

    def check_closure(self, x: Tensor, what: str) -> None:
        _refuse(x, x.isfinite(), what, "must be finite")
        _refuse(x, x >= self.lower, what, f"must be at least {self.lower:g}")
        _refuse(x, x <= self.upper, what, f"must be at most {self.upper:g}")

    def centre(self, like: Tensor) -> Tensor:
        lower, upper = math.isfinite(self.lower), math.isfinite(self.upper)
        if lower and upper:
            return torch.full_like(like, 0.5 * (self.lower + self.upper))
        return torch.full_like(like, self.lower + 1 if lower else self.upper - 1 if upper else 0.0)


@final
@dataclass(frozen=True)
class Simplex(Domain):
    """x_p > 0 with Σ_p x_p = 1 over the last axis; several simplices on the axes before it."""

    def check(self, x: Tensor, what: str) -> None:
        self._check_sum(x, what)
        _refuse(x, x > 0, what, "must be above 0")

    def check_closure(self, x: Tensor, what: str) -> None:
        self._check_sum(x, what)
        _refuse(x, x >= 0, what, "must be at least 0")

    def centre(self, like: Tensor) -> Tensor:
        return torch.full_like(like, 1 / like.shape[-1])

    def _check_sum(self, x: Tensor, what: str) -> None:
        if x.ndim == 0:
            raise DomainError(f"{what} is one number: a point of a simplex has its entries on the last axis")
        off = x.detach().sum(-1) - 1
        wrong = ~(off.abs() <= _ROUNDING * torch.finfo(x.dtype).eps)
        if bool(wrong.any()):
            at = tuple(int(i) for i in wrong.nonzero()[0])
            raise DomainError(
                f"{what}{_entry(at)} sums to 1 + {float(off[at]):.6g} over its last axis, and a point of a simplex to "
                "1: divide it by its sum"
            )


def _refuse(x: Tensor, inside: Tensor, what: str, bound: str) -> None:
    if bool(inside.all()):
        return
    at = tuple(int(i) for i in (~inside).nonzero()[0])
    raise DomainError(
        f"{what}{_entry(at)} = {float(x[at]):.6g} {bound}: start inside, or take shorter steps (a larger alpha)"
    )


def _entry(at: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, at))}]" if at else ""


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


# Potentials with a boundary: entropies of the orthant, the box and the simplex, and the logarithmic barrier.


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


# The Legendre transform of any smooth convex function, by Newton's method.


_HALVINGS = 60
_NEWTON_ROUNDING = 256  # units in the last place


@final
@dataclass(frozen=True)
class Convex(Potential):
    """Any smooth strictly convex ψ(x) → [], with its gradient by automatic differentiation.

    ∇ψ*(z) = argmin_x ψ(x) − ⟨z, x⟩ by Newton steps that are halved until they stay in the domain and descend; its
    derivative is (∇²ψ)⁻¹, by the implicit function theorem. The Hessian is dense: for small spaces. ``within``: where ψ
    is defined; ``image``: the domain of z, where it is known (a z outside it has no x, and Newton cannot find one).

    >>> ψ = Convex(lambda x: torch.logaddexp(x, -x).sum())  # z = tanh x
    >>> ψ.inverse_gradient(torch.tensor([0.5], dtype=torch.float64))
    tensor([0.5493], dtype=torch.float64)
    """

    function: Callable[[Tensor], Tensor]
    within: Domain = field(default_factory=Space)
    image: Domain = field(default_factory=Space)
    max_steps: int = 100

    @property
    def domain(self) -> Domain:
        return self.within

    @property
    def dual_domain(self) -> Domain:
        return self.image

    def value(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        return self.function(x).reshape(())

    def gradient(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            (z,) = torch.autograd.grad(self.function(leaf).sum(), leaf, create_graph=x.requires_grad)
        return z

    def inverse_gradient(self, z: Tensor) -> Tensor:
        self.image.check(z, "z")
        x = self._solved(z.detach())
        # One more Newton step, in which z is differentiated and the Hessian is not: the implicit function theorem.
        return x + self._newton(x, z - self.gradient(x))

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        here, there, slope = self.value(x), self.value(y), self.gradient(x)
        plain = there - here - (slope * (y - x)).sum()
        # Where the difference of values is lost in rounding, half of V_x(y) + V_y(x) is not, and does not differ.
        both = ((self.gradient(y) - slope) * (y - x)).sum()
        lost = _NEWTON_ROUNDING * torch.finfo(x.dtype).eps * (here.abs() + there.abs())
        return torch.where((plain - 0.5 * both).abs() <= lost, 0.5 * both, plain)

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        h = torch.autograd.functional.hessian(lambda a: self.function(a).sum(), x.detach())
        matrix = h.reshape(x.numel(), x.numel())
        return dense(0.5 * (matrix + matrix.T))

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return inverted(self.hessian(self.inverse_gradient(z).detach()))

    def _solved(self, z: Tensor) -> Tensor:
        x = self.domain.centre(z)
        residual = self.gradient(x) - z
        rounding = _NEWTON_ROUNDING * torch.finfo(z.dtype).eps
        for _ in range(self.max_steps):
            if bool((residual.abs() <= rounding * z.abs()).all()):
                return x
            try:
                δ = -self._newton(x, residual)
            except SingularMetricError:
                break  # far out, where ψ is flat
            found = self._shortened(x, z, δ, residual)
            if found is None:
                break
            x, residual = found
        off = float(residual.abs().max())
        if off <= _NEWTON_ROUNDING * rounding * (1 + float(z.abs().max())):
            return x  # no step improves it: ∇ψ itself is not known better
        raise NatgradError(
            f"no x with ∇ψ(x) = z was found: after at most {self.max_steps} Newton steps ∇ψ differs from z by "
            f"{off:.3g}. z may lie outside the range of ∇ψ, or ψ is not strictly convex: give the image= of the "
            "potential, or take shorter steps (a larger alpha)"
        )

    def _newton(self, x: Tensor, residual: Tensor) -> Tensor:
        """(∇²ψ(x))⁻¹ applied to a residual of the shape of x."""
        factor, scale = scaled_cholesky(self.hessian(x).dense())
        solved = torch.cholesky_solve((scale * residual.reshape(-1)).unsqueeze(-1), factor).squeeze(-1)
        return (scale * solved).view_as(x)

    def _shortened(self, x: Tensor, z: Tensor, δ: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """Halve the step until ψ − ⟨z, ·⟩ falls inside the domain or, where it is flat to rounding, its slope does."""
        here, slope = float(self.value(x) - (z * x).sum()), float((residual * δ).sum())
        flat = _NEWTON_ROUNDING * torch.finfo(z.dtype).eps * (1 + abs(here))
        for _ in range(_HALVINGS):
            moved = x + δ
            try:
                there = float(self.value(moved) - (z * moved).sum())
            except DomainError:
                δ, slope = 0.5 * δ, 0.5 * slope
                continue
            new = self.gradient(moved) - z
            falls = there <= here + 1e-4 * slope
            if falls or (abs(there - here) <= flat and float(new.norm()) < float(residual.norm())):
                return moved, new
            δ, slope = 0.5 * δ, 0.5 * slope
        return None
