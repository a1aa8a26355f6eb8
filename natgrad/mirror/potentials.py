"""Potentials: strictly convex functions ψ, whose gradient maps one chart to its dual."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from natgrad.errors import NatgradError, SingularMetricError
from natgrad.families.domains import Domain, OpenBox, Simplex, Space
from natgrad.linalg import cholesky, newton
from natgrad.model import check_slots
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.base import Inverse, Layout, Operator
from natgrad.structures.dense import DenseOperator
from natgrad.structures.diagonal import DiagonalOperator

_ROUNDING = 256  # units in the last place
_FAR = 2.0**20  # a ratio whose logarithm loses no digits as a difference of two


class Potential(ABC):
    """The base class of potentials, which give mirror descent its distances.

    See Raskutti and Mukherjee (2015) and Grosse (2021).

    Method:
        z = ∇ψ(x) is the dual chart, x = ∇ψ*(z) its inverse, and ψ*(z) = sup_x ⟨x, z⟩ − ψ(x) the conjugate. ∇²ψ is a
        Riemannian metric in the chart x, ∇²ψ* one in the chart z, and each is the inverse of the other. Points have any
        shape; a value is a sum over all entries.
    """

    @property
    @abstractmethod
    def domain(self) -> Domain:
        """Where x may lie."""

    @property
    @abstractmethod
    def dual_domain(self) -> Domain:
        """Where z may lie."""

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
        """V_x(y) = ψ(y) − ψ(x) − ⟨∇ψ(x), y − x⟩ []; y may lie on the boundary where ψ is finite there."""

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
    """Half the squared Euclidean length, with which mirror descent is gradient descent.

    Method:
        ψ = ½‖x‖²: both charts coincide, and mirror descent is gradient descent.

    Example:
        >>> SquaredNorm().bregman(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor(2.)
    """

    domain: ClassVar[Domain] = Space()
    dual_domain: ClassVar[Domain] = Space()

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
    """Half the squared length in any fixed metric, as a potential.

    Args:
        operator: G, any operator of the library; ``Quadratic.of(matrix)`` takes a matrix.
        solver: How the metric is inverted: ``Cholesky()``, ``Pinv()`` for singular ones, ``CG()``, or ``Factored()``
            for Kronecker factors.

    Method:
        ψ = ½‖x‖²_G = ½ xᵀGx for any operator of the library; V_x(y) = ½‖y − x‖²_G, and ∇²ψ* = G⁻¹.

        With G = g(x_k), made anew at every step, mirror descent is Riemannian gradient descent in the metric g (Bai,
        Rosenberg and Xu 2022).

    Example:
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

    domain: ClassVar[Domain] = Space()
    dual_domain: ClassVar[Domain] = Space()

    @cached_property
    def _inverse(self) -> Inverse:
        return self.solver.init(self.operator)

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * (x * self.gradient(x)).sum()

    def gradient(self, x: Tensor) -> Tensor:
        return self.operator.product(flattened(x, self.operator)).view_as(x)

    def inverse_gradient(self, z: Tensor) -> Tensor:
        return self._inverse.solve(flattened(z, self.operator)).view_as(z)

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        return self.value(y - x)

    def hessian(self, x: Tensor) -> Operator:
        return self.operator

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return inverted(self.operator)


@final
@dataclass(frozen=True)
class Conjugate(Potential):
    """The convex conjugate of a potential, which describes the dual chart.

    Args:
        base: The potential ψ to conjugate.

    Method:
        ψ*, the potential of the dual chart: every map is reversed, and V_z(z′) = V_x′(x).

        The log-partition functions of exponential families are conjugates of entropies: ``Conjugate(BinaryEntropy())``
        is log(1 + e^η), ``Conjugate(NegativeEntropy())`` is e^η (Poisson), ``Conjugate(SimplexEntropy())`` is log Σ
        e^η.

    Example:
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
        here, there = self.base.inverse_gradient(x), self.base.inverse_gradient(y)
        if bool(self.base.domain.contains(there).all()):
            return self.base.bregman(here, there)
        # y is inside its chart, and so far out that its dual point rounds onto the boundary; nothing cancels there.
        return self.value(y) - self.value(x) - (here * (y - x)).sum()

    def hessian(self, x: Tensor) -> Operator:
        return self.base.conjugate_hessian(x)

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return self.base.hessian(z)


def diagonal(values: Tensor) -> DiagonalOperator:
    """The metric diag(values) over the entries of one tensor."""
    return DiagonalOperator(layout(values), values.detach().reshape(-1))


def dense(matrix: Tensor) -> DenseOperator:
    """A metric [p q] over the entries of one tensor."""
    return DenseOperator(layout(matrix[0]), matrix.detach())


def layout(x: Tensor) -> Layout:
    """The layout of a metric over one unnamed tensor."""
    return Layout.of({"x": x.reshape(-1)}, x.dtype)


def flattened(x: Tensor, operator: Operator) -> Tensor:
    """x [p], if it has as many entries as the operator has rows."""
    size = operator.layout.size
    if x.numel() != size:
        raise ValueError(
            f"x of shape {tuple(x.shape)} has {x.numel()} entries, and the metric is over {size}: give a point of it"
        )
    return x.reshape(-1)


def inverted(operator: Operator) -> DenseOperator:
    """G⁻¹ as a metric of covectors [p q]; a singular G raises."""
    factor, scale = scaled_cholesky(operator.dense())
    return DenseOperator(operator.layout, torch.cholesky_inverse(factor) * scale.outer(scale))


def scaled_cholesky(G: Tensor, what: str = "the Hessian of the potential") -> tuple[Tensor, Tensor]:
    """L and s with L Lᵀ = diag(s) G diag(s) of unit diagonal, so that coordinates may have different units."""
    if bool((G.diagonal() > 0).all()):
        scale = G.diagonal().rsqrt()
        return cholesky(G * scale.outer(scale), 0.0, what), scale
    return cholesky(G, 0.0, what), torch.ones_like(G[0])  # raises


def checked_square(matrix: Tensor, what: str) -> Tensor:
    """Refuse a matrix that is not square and symmetric, naming its shape or largest asymmetry."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{what} must be a square matrix [p q], got shape {tuple(matrix.shape)}")
    asymmetry = (matrix - matrix.T).abs().max()
    if bool(asymmetry > 64 * torch.finfo(matrix.dtype).eps * matrix.abs().max()):
        raise ValueError(
            f"{what} must be symmetric, and differs from its transpose by {float(asymmetry):.3g}: a metric is "
            "symmetric; pass (A + A.T) / 2"
        )
    return matrix


# Potentials with a boundary: entropies of the orthant, the box and the simplex, and the logarithmic barrier


@final
@dataclass(frozen=True)
class NegativeEntropy(Potential):
    """The potential of mirror descent for positive numbers: steps multiply.

    Method:
        ψ = Σ x log x − x on the positive orthant: z = log x, ψ* = Σ e^z, V_x(y) = Σ y log(y/x) − y + x.

        Mirror descent is the multiplicative update x ← x e^{−∇f/α}.

    Example:
        >>> NegativeEntropy().inverse_gradient(torch.tensor([0.0]))
        tensor([1.])
    """

    domain: ClassVar[Domain] = OpenBox(lower=0.0)
    dual_domain: ClassVar[Domain] = Space()

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
    """The potential of mirror descent for probabilities between 0 and 1, each by itself.

    Method:
        ψ = Σ x log x + (1 − x) log(1 − x) on the box (0, 1): z = log x/(1 − x), ψ* = Σ log(1 + e^z) (Bernoulli).

        V_x(y) = KL(y ‖ x), coin by coin.

    Example:
        >>> BinaryEntropy().inverse_gradient(torch.tensor([0.0]))
        tensor([0.5000])
    """

    domain: ClassVar[Domain] = OpenBox(0.0, 1.0)
    dual_domain: ClassVar[Domain] = Space()

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
    """The potential of mirror descent for probabilities that sum to 1 on the last axis.

    Method:
        ψ = Σ x log x on the simplex (last axis): x = softmax z, ψ* = Σ log Σ e^z (categorical), V_x(y) = KL(y ‖ x).

        z is determined up to a constant a simplex; ``gradient`` returns log x. Mirror descent is exponentiated
        gradient.

        The metric lives on the tangent space Σ v = 0: as matrices ∇²ψ = C diag(1/x) C with the centring C, and ∇²ψ* =
        diag x − x xᵀ, each the pseudo-inverse of the other and singular along the constants, so solve with ``Pinv()``.

    Example:
        >>> SimplexEntropy().inverse_gradient(torch.zeros(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    domain: ClassVar[Domain] = Simplex()
    dual_domain: ClassVar[Domain] = Space()

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
        return _kl(y, x)  # Σ(x − y) = 0

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
    """The potential of mirror descent for positive numbers whose logarithms matter.

    Method:
        ψ = −Σ log x on the positive orthant: z = −1/x < 0, ψ* = −Σ 1 + log(−z), V_x(y) = Σ y/x − log(y/x) − 1.

        A step that leaves the dual domain z < 0 is refused: use a larger α.

    Example:
        >>> LogBarrier().gradient(torch.tensor([2.0]))
        tensor([-0.5000])
    """

    domain: ClassVar[Domain] = OpenBox(lower=0.0)
    dual_domain: ClassVar[Domain] = OpenBox(upper=0.0)

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
        t = (y - x) / x
        near = t.abs() < 0.5  # else log1p would lose y in y − x, and t may overflow
        return (t - torch.where(near, torch.where(near, t, 0.0).log1p(), y.log() - x.log())).sum()

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        return diagonal(x.square().reciprocal())

    def conjugate_hessian(self, z: Tensor) -> Operator:
        self.dual_domain.check(z, "z")
        return diagonal(z.square().reciprocal())


def _kl(y: Tensor, x: Tensor) -> Tensor:
    """Σ y log(y/x) − y + x [] as Σ x((1 + t) log(1 + t) − t), t = (y − x)/x, which keeps its digits near y = x."""
    far = y > _FAR * x  # where t, or its slope, may overflow
    beside, large, small = torch.where(far, y, x), torch.where(far, y, 1.0), torch.where(far, x, 1.0)
    t = (y - beside) / beside
    terms = x * (torch.special.xlog1py(1 + t, t) - t)
    return torch.where(far, large * (large.log() - small.log()) - (large - small), terms).sum()


def _blocks(matrices: Tensor) -> Tensor:
    """Matrices [* d d] as one block-diagonal matrix [p q]."""
    d = matrices.shape[-1]
    whole: Tensor = torch.block_diag(*matrices.reshape(-1, d, d).unbind())
    return whole


# The Legendre transform of any smooth convex function, by Newton's method


@final
@dataclass(frozen=True)
class Convex(Potential):
    """Any smooth, strictly convex function as a potential, with automatic derivatives.

    Args:
        function: ψ, from a point to a number [].
        within: Where ψ is defined; everywhere by default.
        image: Where z = ∇ψ(x) may lie, if known. A z outside has no x, and Newton's method cannot find one.
        max_steps: The most Newton steps that ``inverse_gradient`` may take.

    Method:
        ∇ψ*(z) = argmin_x ψ(x) − ⟨z, x⟩ by damped Newton steps that stay in the domain; its derivative is (∇²ψ)⁻¹, by
        the implicit function theorem. The Hessian is dense: for small spaces.

    Example:
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
        x = self._argmin(z.detach())
        # One more Newton step, differentiable in z but not in the Hessian: the implicit function theorem.
        return x + self._solve(x, z - self.gradient(x))

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        here, there, slope = self.value(x), self.value(y), self.gradient(x)
        plain = there - here - (slope * (y - x)).sum()
        # Where the difference of values is lost in rounding, use ½(V_x(y) + V_y(x)), which agrees there to first order.
        both = ((self.gradient(y) - slope) * (y - x)).sum()
        lost = _ROUNDING * torch.finfo(x.dtype).eps * (here.abs() + there.abs())
        return torch.where((plain - 0.5 * both).abs() <= lost, 0.5 * both, plain)

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        h = torch.autograd.functional.hessian(lambda a: self.function(a).sum(), x.detach())
        matrix = h.reshape(x.numel(), x.numel())
        return dense(0.5 * (matrix + matrix.T))

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return inverted(self.hessian(self.inverse_gradient(z).detach()))

    def _argmin(self, z: Tensor) -> Tensor:
        """x with ∇ψ(x) = z, without a derivative."""

        def direction(x: Tensor, residual: Tensor) -> Tensor:
            try:
                return -self._solve(x, residual)
            except SingularMetricError:  # far out, where ψ is flat: stop
                return torch.full_like(x, torch.nan)

        with torch.no_grad():
            x, _ = newton(
                self.domain.centre(z),
                value=lambda x: self.value(x) - (z * x).sum(),
                gradient=lambda x: self.gradient(x) - z,
                direction=direction,
                reach=lambda x, δ: self.domain.reach(x, δ).amin(),
                axes=z.ndim,
                max_steps=self.max_steps,
            )
        off = float((self.gradient(x) - z).abs().max())
        if not off <= _ROUNDING**2 * torch.finfo(z.dtype).eps * (1 + float(z.abs().max())):
            raise NatgradError(
                f"no x with ∇ψ(x) = z was found: after at most {self.max_steps} Newton steps ∇ψ differs from z by "
                f"{off:.3g}. z may lie outside the range of ∇ψ, or ψ is not strictly convex: give the image= of the "
                "potential, or take shorter steps (a larger smoothness)"
            )
        return x

    def _solve(self, x: Tensor, residual: Tensor) -> Tensor:
        """(∇²ψ(x))⁻¹ applied to a residual of the shape of x."""
        factor, scale = scaled_cholesky(self.hessian(x).dense())
        solution = torch.cholesky_solve((scale * residual.reshape(-1)).unsqueeze(-1), factor).squeeze(-1)
        return (scale * solution).view_as(x)
