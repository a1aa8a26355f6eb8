"""Riemannian metrics: an inner product at every point, from a matrix, a potential, or the outputs of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import DomainError, NatgradError
from natgrad.families.domains import entry, first
from natgrad.geometry import Vector, unflatten
from natgrad.linalg import eigvalsh, newton
from natgrad.mirror.potentials import Potential, checked_square, dense, flattened, scaled_cholesky
from natgrad.model import Inputs, Model, check_slots
from natgrad.output.metric import OutputMetric
from natgrad.pullbacks.pullback import pullback
from natgrad.show import brief
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.base import Inverse, Operator, Structure
from natgrad.structures.dense import Dense


@final
@dataclass(frozen=True)
class InnerProduct:
    """A metric at one point: lengths, and the maps between steps and gradients.

    Args:
        operator: G, any operator of the library.
        solver: How the metric is inverted: ``Cholesky()``, ``Pinv()`` for singular ones, ``CG()``, or ``Factored()``
            for Kronecker factors.
        damping: λ ≥ 0, added to G.

    Method:
        ⟨u, v⟩_g = uᵀ(G + λ)v at one point, with ♭ and ♯; vectors have the shape of the point, or are flat [p].

        ``sharp`` inverts ``flat`` only if the solver adds λ to G itself (``Factored`` splits it between its factors).
    """

    operator: Operator
    solver: Solver = field(default_factory=Cholesky)
    damping: float = 0.0

    def __post_init__(self) -> None:
        if self.damping != 0 and self.operator.power != 1:
            power = f"InnerProduct(damping={self.damping:g}) at the power {self.operator.power:g}"
            self.operator.refuse(power, "♭ adds λ to G^p, and ♯ to G; use damping=0, or power=1")

    @cached_property
    def _inverse(self) -> Inverse:
        return self.solver.init(self.operator, self.damping)

    def flat(self, v: Tensor) -> Tensor:
        """v♭ = (G + λ)v."""
        return self.operator.product(flattened(v, self.operator)).view_as(v) + self.damping * v

    def sharp(self, ω: Tensor) -> Tensor:
        """ω♯ = (G + λ)⁻¹ω: for a differential ω = df, the gradient ∇^g f."""
        return self._inverse.solve(flattened(ω, self.operator)).view_as(ω)

    def squared(self, v: Tensor) -> Tensor:
        """‖v‖²_g []."""
        return (v * self.flat(v)).sum()

    def dense(self) -> Tensor:
        """G + λ as a matrix [p q]."""
        G = self.operator.dense()
        return G + self.damping * torch.eye(len(G), dtype=G.dtype, device=G.device)


class RiemannianMetric(ABC):
    """g: a positive inner product at every point x of a convex set of Rᵈ."""

    @abstractmethod
    def at(self, x: Tensor) -> InnerProduct:
        """g(x)."""

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Refuse a point where there is no metric."""


@final
@dataclass(frozen=True)
class MatrixMetric(RiemannianMetric):
    """A Riemannian metric from a function that returns its matrix.

    Args:
        matrix: x ↦ g(x) [p q], positive definite (or not, with ``solver=Pinv()``).
        solver: How the metric is inverted: ``Cholesky()``, ``Pinv()`` for singular ones, ``CG()``, or ``Factored()``
            for Kronecker factors.

    Example:
        >>> half_plane = MatrixMetric(lambda x: torch.eye(2) / x[1] ** 2)
        >>> half_plane.at(torch.tensor([0.0, 2.0])).sharp(torch.ones(2))
        tensor([4., 4.])
    """

    matrix: Callable[[Tensor], Tensor]
    solver: Solver = field(default_factory=Cholesky)

    def at(self, x: Tensor) -> InnerProduct:
        G = checked_square(self.matrix(x), "the matrix of the metric")
        if len(G) != x.numel():
            raise ValueError(f"the matrix of the metric has {len(G)} rows, and x has {x.numel()} entries")
        return InnerProduct(dense(G), self.solver)

    def check(self, x: Tensor) -> None:
        """The matrix is checked where it is used."""


@final
@dataclass(frozen=True)
class HessianMetric(RiemannianMetric):
    """The Hessian of a potential as a Riemannian metric.

    Args:
        potential: ψ, whose Hessian is the metric.
        solver: How the metric is inverted: ``Cholesky()``, ``Pinv()`` for singular ones, ``CG()``, or ``Factored()``
            for Kronecker factors.

    Method:
        g = ∇²ψ in the chart x; the metric of the dual chart is ``HessianMetric(Conjugate(ψ))``.

    Example:
        >>> from natgrad.mirror import NegativeEntropy
        >>> HessianMetric(NegativeEntropy()).at(torch.tensor([4.0])).sharp(torch.tensor([1.0]))
        tensor([4.])
    """

    potential: Potential
    solver: Solver = field(default_factory=Cholesky)

    def __post_init__(self) -> None:
        check_slots(potential=(self.potential, Potential), solver=(self.solver, Solver))

    def at(self, x: Tensor) -> InnerProduct:
        return InnerProduct(self.potential.hessian(x), self.solver)

    def check(self, x: Tensor) -> None:
        self.potential.domain.check(x, "x")


@final
@dataclass(frozen=True)
class PulledBack(RiemannianMetric):
    """The metric of a model's outputs, pulled back to its flattened parameters.

    Takes any output metric × structure × solver of the library; the model itself never changes. ``start`` holds its
    parameters, ``objective(loss)`` is θ ↦ loss(y(θ)), and ``parameters(θ)`` restores the names.

    Args:
        model: An ``nn.Module``, or ``Model.of(f, params)`` for a pure function f(θ, x).
        inputs: The inputs of the model at which the metric is taken.
        metric: The metric on the outputs.
        structure: How the pulled-back metric is held; ``Dense()`` by default.
        solver: How the metric is inverted: ``Cholesky()``, ``Pinv()`` for singular ones, ``CG()``, or ``Factored()``
            for Kronecker factors.
        damping: λ ≥ 0, added to the metric before it is inverted; ``Relative(ε)`` scales it with the metric.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.

    Example:
        >>> import natgrad as ng
        >>> model, x, t = nn.Linear(2, 1).double(), torch.eye(2).double(), torch.tensor([[1.0], [2.0]]).double()
        >>> g = PulledBack(model, x, ng.Euclidean(), damping=1e-3)
        >>> f = g.objective(lambda y: (y - t).square().mean() / 2)
        >>> trace = ng.mirror.PrimalDescent(g, lipschitz=1.0).run(f, g.start, steps=3)
        >>> bool(trace.values[-1] < 1e-6), g.parameters(trace.point)
        (True, Vector(weight: (1, 2), bias: (1,)))
    """

    model: nn.Module | Model
    inputs: Inputs
    metric: OutputMetric
    structure: Structure = field(default_factory=Dense)
    solver: Solver = field(default_factory=Cholesky)
    damping: float = 0.0
    target: Any = None

    __repr__ = brief

    def __post_init__(self) -> None:
        check_slots(metric=(self.metric, OutputMetric), structure=(self.structure, Structure))
        check_slots(solver=(self.solver, Solver))

    @cached_property
    def _model(self) -> Model:
        return Model.of(self.model)

    @property
    def start(self) -> Tensor:
        """The parameters of the model, θ [p]."""
        return torch.cat([p.detach().reshape(-1) for p in self._model.params.values()])

    def parameters(self, θ: Tensor) -> Vector:
        """θ [p] by name."""
        return Vector(unflatten(θ, self._model.params))

    def objective(self, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """θ [p] ↦ loss(y(θ)) [], a function of the outputs y [n *out]."""
        return lambda θ: loss(self._model(unflatten(θ, self._model.params), self.inputs))

    def at(self, x: Tensor) -> InnerProduct:
        there = self._model.copied().at(unflatten(x.detach(), self._model.params))
        G = self.structure.estimate(pullback(there, self.inputs, self.metric, self.target))
        return InnerProduct(G, self.solver, self.damping)

    def check(self, x: Tensor) -> None:
        if x.shape != (self._model.size,):
            raise ValueError(f"a point of this model is θ flattened, [{self._model.size}], got shape {tuple(x.shape)}")


def compatibility(metric: RiemannianMetric, points: Tensor) -> Tensor:
    """The constant that compares a Riemannian metric with the Euclidean one at some points.

    The constant C of ``PrimalDescent`` must hold on the whole set, of which these points are a sample.

    Args:
        metric: The Riemannian metric g.
        points: The points [k *shape] at which it is taken.

    Returns:
        C = max_x 1/λ_min(g(x)) [], so that ‖v‖_E ≤ √C ‖v‖_{g,x} for all v at these points.

    Raises:
        ValueError: if the metric is singular at one of them.

    Example:
        >>> half_plane = MatrixMetric(lambda x: torch.eye(2) / x[1] ** 2)
        >>> compatibility(half_plane, torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
        tensor(9.)
    """
    smallest = torch.stack([eigvalsh(metric.at(x).dense(), "the metric")[0] for x in points])
    if bool((smallest <= 0).any()):
        raise ValueError(
            f"the metric at point {int(smallest.argmin())} has the eigenvalue {float(smallest.min()):.3g}: no constant "
            "C makes it compatible with the Euclidean one. Add damping"
        )
    return smallest.min().reciprocal()


# Constraint sets, over which a step minimises its quadratic model


class Region(ABC):
    """The base class of closed convex sets that steps may not leave.

    A region is not a ``Domain``: it restricts the steps of a metric that is defined beyond it.
    """

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Refuse a point outside, by entry and bound."""

    @abstractmethod
    def step(self, g: InnerProduct, x: Tensor, ω: Tensor, α: float) -> tuple[Tensor, Tensor]:
        """argmin_{y ∈ Q} m(y) and −min m, for m(y) = ⟨ω, y − x⟩ + (α/2)‖y − x‖²_g."""


@final
@dataclass(frozen=True)
class Everywhere(Region):
    """No restriction: the region of all points.

    Method:
        Q = Rᵈ: y = x − ω♯/α, and −min m = ‖ω♯‖²_g/2α.
    """

    def check(self, x: Tensor) -> None:
        """Every point is inside."""

    def step(self, g: InnerProduct, x: Tensor, ω: Tensor, α: float) -> tuple[Tensor, Tensor]:
        gradient = g.sharp(ω)
        return x - gradient / α, 0.5 * (ω * gradient).sum() / α


@final
@dataclass(frozen=True)
class Box(Region):
    """A box of allowed points, bounded entry by entry.

    Args:
        lower: The smallest allowed value of every entry.
        upper: The largest allowed value of every entry.

    Method:
        Q = {lower ≤ x ≤ upper}, entry by entry.

        m is minimised by Newton steps in the free entries, projected onto Q (Bertsekas 1982), with a dense G: for small
        spaces.

    Example:
        >>> from natgrad.mirror import SquaredNorm
        >>> G = InnerProduct(SquaredNorm().hessian(torch.zeros(2)))
        >>> Box(torch.zeros(2), torch.ones(2)).step(G, torch.full((2,), 0.5), torch.tensor([1.0, -0.1]), α=1.0)[0]
        tensor([0.0000, 0.6000])
    """

    lower: Tensor
    upper: Tensor

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.lower.shape != self.upper.shape or not bool((self.lower < self.upper).all()):
            raise ValueError(
                f"Box(lower, upper) of shapes {tuple(self.lower.shape)} and {tuple(self.upper.shape)}: both need the "
                "shape of x, and lower must be below upper in every entry"
            )

    def check(self, x: Tensor) -> None:
        if x.shape != self.lower.shape:
            raise ValueError(f"x has shape {tuple(x.shape)} and the box {tuple(self.lower.shape)}")
        outside = ~((x >= self.lower) & (x <= self.upper))
        if bool(outside.any()):
            at = first(outside)
            raise DomainError(
                f"x{entry(at)} = {float(x[at]):.6g} is outside [{float(self.lower[at]):g}, {float(self.upper[at]):g}]: "
                "start inside the box"
            )

    def step(self, g: InnerProduct, x: Tensor, ω: Tensor, α: float) -> tuple[Tensor, Tensor]:
        M, linear = α * g.dense(), ω.reshape(-1)
        factor, scale = scaled_cholesky(M, "the metric in a box")  # raises where m has no minimum, or more than one
        low, high = (self.lower - x).reshape(-1), (self.upper - x).reshape(-1)
        # Newton's method stops by values of about 1, so m is divided by a bound of its decrease: that of its linear
        # part in the box, or that of m without the box.
        along = torch.where(linear == 0, 0.0, torch.maximum(-linear * low, -linear * high)).sum()
        whole = torch.linalg.solve_triangular(factor, (scale * linear).unsqueeze(-1), upper=False).square().sum() / 2
        unit = torch.minimum(along, whole)
        if bool(unit == 0):
            return x, unit
        M, linear = M / unit, linear / unit

        def model(d: Tensor) -> Tensor:
            return (linear * d).sum() + 0.5 * (d * (M @ d)).sum()

        def direction(d: Tensor, slope: Tensor) -> Tensor:
            free = ~(((d <= low) & (slope > 0)) | ((d >= high) & (slope < 0)))
            δ = torch.zeros_like(d)
            δ[free] = -torch.linalg.solve(M[free][:, free], slope[free])
            return δ

        d, decrement = newton(
            torch.zeros_like(low),
            value=model,
            gradient=lambda d: linear + M @ d,
            direction=direction,
            project=lambda d: d.clamp(low, high),
        )
        least = model(d)
        if not float(decrement) <= torch.finfo(d.dtype).eps ** 0.5 * (1 + float(least.abs())):
            raise NatgradError("the step in the box was not found by Newton's method: is the metric positive?")
        y = torch.where(d <= low, self.lower.reshape(-1), torch.where(d >= high, self.upper.reshape(-1), x.ravel() + d))
        return y.view_as(x), -least * unit
