"""The Jacobian J of all residuals in a structure, and damped least-squares solutions with it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError, MemoryBoundError, SingularMetricError
from natgrad.fit.triangle import TriangularLeastSquares
from natgrad.linalg import check_finite, check_positive, eigh, eigvalsh, svd
from natgrad.pullbacks.pullback import Pullback
from natgrad.solve.cg import CG
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.base import Layout, RootedOperator, Structure, mean_of
from natgrad.structures.dense import Dense
from natgrad.structures.implicit import Implicit, ImplicitOperator
from natgrad.structures.kernel import Kernel, RowStack

Solve: TypeAlias = Callable[[Tensor], Tensor]  # ω [p] ↦ (G + λ)⁻¹ω

_REFINED = 2  # steps of iterative refinement
_DEFAULT_CG = CG(tol=1e-10, max_steps=1000)  # one for all steps: it says once that it was cut short
_TRIANGULAR = 512  # parameters, up to which a QR is affordable in every step


@final
@dataclass(frozen=True)
class ColumnSpectrum:
    """J = U diag(s) Vᵀ D, where D makes the columns of J D⁻¹ unit vectors: the rank does not depend on their units.

    Singular values that are rounding are zeros. Columns that are not finite count as zeros.
    """

    lengths: Tensor  # D [* n]; 1 for columns of zeros
    values: Tensor  # s [* k]
    vectors: Tensor  # V [* n k]

    @staticmethod
    def of_rows(J: Tensor) -> ColumnSpectrum:
        """From J [* m n], by QR: JᵀJ would hide singular values below the root of the machine epsilon."""
        m, n = J.shape[-2:]
        lengths = torch.linalg.vector_norm(J.double(), dim=-2)
        regular = lengths.isfinite()
        lengths = torch.where(regular & (lengths > 0), lengths, 1.0)
        scaled = torch.where(regular.unsqueeze(-2), J, 0.0) / lengths.unsqueeze(-2)
        _, s, Vt = svd(torch.linalg.qr(scaled, mode="r").R if m > n else scaled, "the Jacobian")
        rounding = max(m, n) * torch.finfo(J.dtype).eps
        return ColumnSpectrum(lengths, torch.where(s > rounding * s[..., :1], s, 0.0), Vt.mT)

    @staticmethod
    def of_square(G: Tensor, m: int) -> ColumnSpectrum:
        """From G = JᵀJ [p p], summed over m rows: what is below the root of the rounding of G counts as zero."""
        rounding = max(m, len(G)) * torch.finfo(G.dtype).eps
        lengths = G.double().diagonal().clamp(min=0).sqrt()
        lengths = torch.where(lengths > 0, lengths, 1.0)
        squares, V = eigh(G.double() / lengths / lengths.unsqueeze(1), "JᵀJ")
        return ColumnSpectrum(lengths, torch.where(squares > rounding * squares[-1:], squares, 0.0).sqrt(), V)

    @property
    def rank(self) -> Tensor:
        """[*]."""
        return (self.values > 0).sum(-1)

    def undetermined(self) -> Tensor:
        """Of every unknown [* n], the share of a change that the residuals do not see."""
        return 1 - (self.vectors * (self.values > 0).unsqueeze(-2)).square().sum(-1)

    def inverse_root(self) -> Tensor:
        """B [* n k] with the pseudo-inverse B Bᵀ of JᵀJ, on unknowns that the residuals determine."""
        inverse = torch.where(self.values > 0, 1 / self.values, 0.0)
        return self.vectors * inverse.unsqueeze(-2) / self.lengths.unsqueeze(-1)


class ResidualJacobian(ABC):
    """J [m p] of the residuals r [m], each class times the root of its weight over N; G = JᵀJ is the ``operator``."""

    @property
    @abstractmethod
    def operator(self) -> RootedOperator:
        """G = JᵀJ, exact."""

    def solve(self, t: Tensor, damping: float) -> Tensor:
        """(JᵀJ + λ)⁻¹Jᵀt [p]; for λ = 0 the solution of least norm."""
        return self.sharp(self.pull(t), damping)

    @abstractmethod
    def sharp(self, ω: Tensor, damping: float) -> Tensor:
        """(JᵀJ + λ)⁻¹ω [p] of any covector; for ω = Jᵀt ``solve`` has more digits."""

    def formed(self) -> Tensor | None:
        """J [m p], where it may be formed."""
        return None

    def spectrum(self) -> ColumnSpectrum | None:
        """The singular values of J; None where J is known by products only."""
        J = self.formed()
        return None if J is None else ColumnSpectrum.of_rows(J)

    def rank(self) -> int | None:
        """Of J, as ``spectrum`` has it."""
        spectrum = self.spectrum()
        return None if spectrum is None else int(spectrum.rank)

    def removable(self, t: Tensor) -> float | None:
        """‖P t‖², P the projection on the range of J: what of ‖t‖² an undamped step removes, by the linear model.

        None where J is not formed, or has so few rows that its range may be everything.
        """
        J = self.formed() if self.operator.layout.size <= min(_TRIANGULAR, len(t) - 1) else None
        if J is None:
            return None
        problem = TriangularLeastSquares.of(J.unsqueeze(0), t.unsqueeze(0))
        D = problem.lengths + (problem.lengths == 0)  # the rank does not depend on the units of parameters
        return float(problem.decrease(problem.shortest(D)))

    def push(self, v: Tensor) -> Tensor:
        """J v [m]."""
        return self.operator.push_root(v)

    def pull(self, t: Tensor) -> Tensor:
        """Jᵀ t [p]."""
        return self.operator.pull_root(t)


@final
@dataclass(frozen=True)
class KernelJacobian(ResidualJacobian):
    """For fewer rows than parameters: v = Jᵀ(JJᵀ + λ)⁻¹t, with JJᵀ [m m] from factors; J is never formed.

    Where λ is below the rounding of JJᵀ, that rounding is added in its place, and iterative refinement with products
    of J takes it away again as far as it can be told from zero.
    """

    rows: RowStack
    rows_fit: bool  # into memory, so that the rank may come from J itself

    @property
    def operator(self) -> RowStack:
        return self.rows

    @cached_property
    def gram(self) -> Tensor:
        gram = self.rows.gram()
        check_finite(gram, "the Gram matrix of the residuals")
        return gram

    @cached_property
    def _damped(self) -> DampedFactor:
        return DampedFactor(self.gram)

    def solve(self, t: Tensor, damping: float) -> Tensor:
        z = self._damped.solve(t, damping)
        for _ in range(_REFINED if damping < self._damped.rounding else 0):
            z = z + self._damped.solve(t - self.push(self.pull(z)) - damping * z, damping)
        return self.pull(z)

    def sharp(self, ω: Tensor, damping: float) -> Tensor:
        """Woodbury's identity, (ω − v)/λ with the solution v of J v = Jω."""
        check_positive(damping, "the damping")
        return (ω - self.solve(self.push(ω), damping)) / damping

    def formed(self) -> Tensor | None:
        return self.rows.rows() if self.rows_fit else None

    def rank(self) -> int:
        """Where J does not fit into memory, from JJᵀ: singular values below the root of its rounding count as zero."""
        if (spectrum := self.spectrum()) is not None:
            return int(spectrum.rank)
        squares = eigvalsh(self.gram, "JJᵀ")
        rounding = max(self.gram.shape[0], self.rows.layout.size) * torch.finfo(squares.dtype).eps
        return int((squares > rounding * squares[-1:]).sum())


@final
@dataclass(frozen=True)
class DenseJacobian(ResidualJacobian):
    """J = QR [m p], formed once; v solves [R; √λ] v = [Qᵀt; 0] by another QR, so that the condition is that of J.

    From 512 parameters on a QR takes too long: v comes from JᵀJ + λ, and products with J refine it.
    """

    rows: RowStack

    @property
    def operator(self) -> RowStack:
        return self.rows

    @cached_property
    def matrix(self) -> Tensor:
        """J [m p]."""
        J = self.rows.rows()
        check_finite(J, "the Jacobian of the residuals")
        return J

    @cached_property
    def _qr(self) -> tuple[Tensor, Tensor]:
        Q, R = torch.linalg.qr(self.matrix)
        return Q, R

    def formed(self) -> Tensor:
        return self.matrix

    def push(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def pull(self, t: Tensor) -> Tensor:
        return t @ self.matrix

    @cached_property
    def _normal(self) -> DampedFactor:
        return DampedFactor(self.matrix.T @ self.matrix)

    def solve(self, t: Tensor, damping: float) -> Tensor:
        if self.matrix.shape[1] > _TRIANGULAR and damping > 0:
            v = self._normal.solve(self.pull(t), damping)
            for _ in range(_REFINED):
                v = v + self._normal.solve(self.pull(t - self.push(v)) - damping * v, damping)
            return v
        Q, R = self._qr
        problem = TriangularLeastSquares(R.unsqueeze(0), -(t @ Q).unsqueeze(0))
        root = R.new_full((1, R.shape[1]), math.sqrt(damping))
        return (problem.damped(root) if damping > 0 else problem.shortest(torch.ones_like(root))).squeeze(0)

    def sharp(self, ω: Tensor, damping: float) -> Tensor:
        return self._normal.solve(ω, damping)


@final
@dataclass(frozen=True)
class DampedFactor:
    """(G + λ)⁻¹ of a matrix G [p p] by Cholesky, with a λ that is at least the rounding of G."""

    G: Tensor
    _factors: dict[float, Tensor] = field(default_factory=dict)

    @cached_property
    def rounding(self) -> float:
        """Of the entries of G: the smallest λ. It is positive for G = 0, too, where every step is zero."""
        number = torch.finfo(self.G.dtype)
        return len(self.G) * number.eps * float(self.G.diagonal().amax()) or math.sqrt(number.tiny)

    def solve(self, ω: Tensor, damping: float) -> Tensor:
        λ = max(damping, self.rounding)
        if λ not in self._factors:
            self._factors.clear()
            self._factors[λ] = self._factored(λ)
        factor = self._factors[λ]
        return torch.cholesky_solve(ω.unsqueeze(1), factor).squeeze(1)

    def _factored(self, λ: float) -> Tensor:
        """The Cholesky factor of G + λ; where rounding makes that indefinite, at the next λ·4ᵏ where it is not."""
        while λ < math.inf:
            damped = self.G.clone()
            damped.diagonal().add_(λ)
            factor, info = torch.linalg.cholesky_ex(damped)
            if not bool(info):
                return factor
            λ *= 4
        raise SingularMetricError("the products of the rows of J are not positive at any damping")


@final
@dataclass(frozen=True)
class StructuredJacobian(ResidualJacobian):
    """J by products, and (Ĝ + λ)⁻¹ of another structure Ĝ: ``Implicit`` by ``CG``, Kronecker factors by Cholesky.

    For so many rows that J does not fit, Ĝ is G = JᵀJ [p p], summed over chunks of points. The condition number is that
    of J squared: λ is at least the rounding of G.
    """

    exact: ImplicitOperator
    invert: Callable[[float], Solve]
    G: Tensor | None = None
    _inverses: dict[float, Solve] = field(default_factory=dict)

    @property
    def operator(self) -> ImplicitOperator:
        return self.exact

    def sharp(self, ω: Tensor, damping: float) -> Tensor:
        if damping not in self._inverses:
            self._inverses.clear()
            self._inverses[damping] = self.invert(damping)
        return self._inverses[damping](ω)

    def spectrum(self) -> ColumnSpectrum | None:
        return None if self.G is None else ColumnSpectrum.of_square(self.G, self.exact.root_columns or 0)


def refuse_solver(structure: Structure | None, solver: Solver | None) -> None:
    """Refuse a solver that a structure would not use."""
    if solver is not None and isinstance(structure, (Kernel, Dense)):
        raise IncompatibleError(
            f"LeastSquares(solver=…) does not work with {type(structure).__name__}, which solves by its own "
            "factorisation: give structure=Implicit() for CG, or leave the solver out"
        )


def jacobian_of(
    pullbacks: Sequence[Pullback],
    weights: Sequence[float],
    structure: Structure | None,
    solver: Solver | None,
) -> ResidualJacobian:
    """J of all classes, in the given structure, or in the one that their sizes ask for."""
    layout = Layout(pullbacks[0].model.like, pullbacks[0].y.dtype)
    sizes = Sizes.of(pullbacks)
    structure = structure or sizes.chosen()
    refuse_solver(structure, solver)
    if isinstance(structure, Kernel) or (isinstance(structure, Dense) and sizes.rows_fit):
        if isinstance(structure, Kernel):
            sizes.admit_kernel()
        rows = RowStack(layout, tuple(map(Kernel().without_gram, pullbacks)), tuple(map(math.sqrt, weights)))
        return KernelJacobian(rows, sizes.rows_fit) if isinstance(structure, Kernel) else DenseJacobian(rows)
    pairs = list(zip(pullbacks, weights, strict=True))
    terms = tuple((w * c, at, linear) for pb, w in pairs for c, at, linear in Implicit().estimate(pb).terms)
    exact = ImplicitOperator(layout, terms)
    if isinstance(structure, Dense):
        G = torch.stack([w * structure.estimate(pb).matrix for pb, w in pairs]).sum(0)
        normal = DampedFactor(G)
        return StructuredJacobian(exact, lambda λ: lambda ω: normal.solve(ω, λ), G)
    if isinstance(structure, Implicit):
        products = solver or _DEFAULT_CG
        return StructuredJacobian(exact, lambda λ: products.init(exact, λ).solve)
    total, mean, direct = sum(weights), mean_of([(w, structure.estimate(pb)) for pb, w in pairs]), solver or Cholesky()

    def invert(λ: float) -> Solve:
        inverse = direct.init(mean, λ / total)
        return lambda ω: inverse.solve(ω / total)

    return StructuredJacobian(exact, invert)


@final
@dataclass(frozen=True)
class Sizes:
    """How many numbers the ways to keep J need, for m rows and p parameters, and how many there may be."""

    m: int
    p: int
    factors: int
    most: int

    @staticmethod
    def of(pullbacks: Sequence[Pullback]) -> Sizes:
        rows = [pb.columns * pb.n for pb in pullbacks]
        factors = sum(Kernel().elements(pb) - 2 * count**2 for pb, count in zip(pullbacks, rows, strict=True))
        return Sizes(sum(rows), pullbacks[0].model.size, factors, pullbacks[0].memory // pullbacks[0].y.element_size())

    @property
    def rows_fit(self) -> bool:
        """Whether J, its factor Q, and a few matrices [p p] do."""
        return self.factors + 3 * self.m * self.p + 5 * self.p**2 <= self.most

    @property
    def gram_fits(self) -> bool:
        """Whether JJᵀ, its factor and a temporary do."""
        return self.factors + 3 * self.m**2 <= self.most

    def chosen(self) -> Structure:
        """``Kernel`` for fewer rows than parameters, else ``Dense``; ``Implicit`` where neither fits into memory."""
        square = 4 * self.p**2 <= self.most
        if self.m < self.p:
            return Kernel() if self.gram_fits else Implicit()
        return Dense() if self.rows_fit or square else Implicit()

    def admit_kernel(self) -> None:
        """Refuse a Gram matrix that does not fit, before it is made."""
        if not self.gram_fits:
            needed = self.factors + 3 * self.m**2
            raise MemoryBoundError(
                f"JJᵀ of {self.m:,} residuals and the factors of its rows need {needed:,} numbers, over the bound of "
                f"{self.most:,} (memory=): use structure=Implicit(), or fewer points in a step"
            )
