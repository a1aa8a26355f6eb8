"""Solvers: from a metric and a covector to the vector, by a direct method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from natgrad.linalg import Damping, check_damping, check_number_fields
from natgrad.structures.base import IdentityOperator, Inverse, Operator
from natgrad.structures.eigen_kronecker import EigenKroneckerOperator
from natgrad.structures.implicit import ImplicitOperator
from natgrad.structures.kronecker import KroneckerOperator


class Solver(ABC):
    """The base class of solvers, which invert the metric.

    Method:
        v = (G + λ)⁻¹ω or G⁺ω. ``init`` does the expensive part once; its result takes any covector.
    """

    by_layer: ClassVar[bool] = False  # whether the inverse of a layer depends on that layer alone
    damps_factors: ClassVar[bool] = False  # whether the damping is added to the factors of a layer, not to the metric
    iterative: ClassVar[bool] = False  # whether it needs products with the metric only
    works_in_place: ClassVar[bool] = False  # whether ``again`` makes the new inverse in the memory of the last one
    damping_note: ClassVar[str] = "exact, (G + λ·1)⁻¹"  # what becomes of the damping

    @abstractmethod
    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        """Factor, or refuse by name a structure that cannot be solved this way.

        ``warm``: the ``tensors()`` of an earlier inverse, to start from.
        """

    def again(self, last: Inverse, G: Operator, damping: Damping = 0.0) -> Inverse:
        """As ``init``, from the last inverse, which may be overwritten.

        Where that raises, some layers of the last inverse may be new, and the others as they were.
        """
        return self.init(G, damping, last.tensors())


@final
@dataclass(frozen=True)
class Cholesky(Solver):
    """Invert the metric exactly by Cholesky factorisation; refuses a singular one.

    Raises:
        SingularMetricError: if the matrix is singular or indefinite, with its rank and smallest eigenvalue.

    Method:
        (G + λ)⁻¹ by Cholesky: of the matrix, of its blocks, of the kernel (Woodbury) or of the capacity of a low rank.

    Example:
        >>> import torch, natgrad as ng
        >>> G = ng.operators.DiagonalOperator(ng.operators.Layout.of({"w": torch.ones(2)}), torch.tensor([1.0, 4.0]))
        >>> Cholesky().init(G, damping=1.0).sharp(ng.Covector({"w": torch.tensor([2.0, 10.0])}))["w"]
        tensor([1., 2.])
    """

    by_layer: ClassVar[bool] = True

    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        check_damping(damping, G.layout.dtype)
        return G.inverse(damping)


@final
@dataclass(frozen=True)
class Factored(Solver):
    """Invert Kronecker factors one by one, as K-FAC does: the fastest, with approximate damping.

    Method:
        (S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹, π² = (tr A/dim A)/(tr S/dim S) (Martens and Grosse 2015, section 6.3).

        The inverse of G + λM with the reference metric M = 1 ⊗ 1, up to the cross terms √λ(π S ⊗ 1 + 1 ⊗ A/π): the step
        is shorter than that of ``Cholesky``, which damps by exactly λM through the eigenvalues. It needs no
        eigenvalues.

    Example:
        >>> import torch, natgrad as ng
        >>> model = torch.nn.Linear(2, 3)
        >>> pb = ng.pullback(model, torch.randn(8, 2), ng.Euclidean())
        >>> ω = ng.Covector({name: torch.ones_like(p) for name, p in model.named_parameters()})
        >>> ng.sharp(ng.Kronecker().estimate(pb), ω, Factored(), damping=0.1)
        Vector(weight: (3, 2), bias: (3,))
    """

    by_layer: ClassVar[bool] = True
    damps_factors: ClassVar[bool] = True
    works_in_place: ClassVar[bool] = True
    damping_note: ClassVar[str] = "factored, (S + √λ/π) ⊗ (A + π√λ) in place of G + λ·1"

    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        return _factored(G, damping, warm or {})

    def again(self, last: Inverse, G: Operator, damping: Damping = 0.0) -> Inverse:
        return _factored(G, damping, {}, last)


def _factored(G: Operator, damping: Damping, warm: Mapping[str, Tensor], into: Inverse | None = None) -> Inverse:
    check_damping(damping, G.layout.dtype)
    if isinstance(G, KroneckerOperator) and G.power != 0:
        return G.factored_inverse(damping, warm, into)
    if isinstance(G, IdentityOperator | KroneckerOperator):
        return G.inverse(damping)
    if isinstance(G, EigenKroneckerOperator):
        G.refuse("Factored", "its eigenvalues are no products of two; Cholesky() damps them exactly, at no cost")
    reason = "it has no Kronecker factors to be damped one by one; use "
    return G.refuse("Factored", reason + ("CG" if isinstance(G, ImplicitOperator) else "Cholesky or CG"))


@final
@dataclass(frozen=True, eq=False)
class Pinv(Solver):
    """Invert the metric where it can be inverted: the pseudo-inverse, for singular metrics.

    Args:
        rtol: Eigenvalues at most rtol times the largest count as zero (default: size × machine epsilon).
        weight: W: positive numbers for every parameter (a mapping of tensors by name), or for ``Dense`` and ``Kernel``
            a positive definite matrix [p q] in flattening order. With damping G + λ has one inverse, whatever the
            weight.

    Method:
        v = argmin ‖y‖_W subject to G y = ω; without a weight the Moore–Penrose inverse.

        This is (33) of van Oostrum, Müller and Ay (2023). For every W its pushforward is the projection of the gradient
        onto the span of the coordinate vectors (their theorem 1); the vector itself depends on both W and the
        coordinates.

    Example:
        >>> import natgrad as ng
        >>> G = ng.operators.DenseOperator(ng.operators.Layout.of({"w": torch.ones(2)}), torch.ones(2, 2))
        >>> ng.sharp(G, ng.Covector({"w": torch.tensor([6.0, 6.0])}), solver=Pinv())["w"]
        tensor([3.0000, 3.0000])
    """

    damping_note: ClassVar[str] = "exact, (G + λ·1)⁺"

    rtol: float | None = None
    weight: Mapping[str, Tensor] | Tensor | None = None

    def __post_init__(self) -> None:
        check_number_fields(self)
        if self.rtol is not None and not 0 <= self.rtol < 1:
            raise ValueError(f"Pinv(rtol=…) must be in [0, 1), got {self.rtol}")
        if isinstance(self.weight, Mapping) and not all(map(_positive, self.weight.values())):
            raise ValueError("Pinv(weight=…) must be positive and finite for every parameter")
        if isinstance(self.weight, Tensor) and not _positive_definite(self.weight):
            raise ValueError("Pinv(weight=…) must be a symmetric positive definite matrix")

    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        check_damping(damping, G.layout.dtype)
        weight = G.layout.flatten(self.weight) if isinstance(self.weight, Mapping) else self.weight
        if weight is not None and weight.shape[0] != G.layout.size:
            raise ValueError(
                f"Pinv(weight=…) is over {weight.shape[0]} parameters, and the metric over {G.layout.size}"
            )
        return G.pseudo_inverse(damping, self.rtol, None if weight is None else weight.to(G.layout.dtype))


def _positive(weight: Tensor) -> bool:
    return bool(((weight > 0) & weight.isfinite()).all())


def _positive_definite(matrix: Tensor) -> bool:
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    return square and torch.allclose(matrix, matrix.T) and bool(torch.linalg.cholesky_ex(matrix).info == 0)
