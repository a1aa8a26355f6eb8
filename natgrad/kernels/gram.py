"""The kernel matrix of a batch, regular or singular: its pseudo-inverse and roots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from natgrad.linalg import check_finite, eigh, smallest


@final
@dataclass(frozen=True)
class KernelMatrix:
    """K [n n], positive semi-definite, as Q K' Qᵀ with K' regular, in float64.

    If K is regular, K' = K and Q = 1. If it is singular because points are equal, equal points count once: Q maps to
    the distinct points, and K⁺ = Q K'⁻¹ Qᵀ is the pseudo-inverse. Eigenvalues that are zero to ``rounding`` for
    another reason (points that are close) are raised to ``rounding``: the norm of such rough functions is large, not
    zero. Unused columns of Q are 0, with K' = 1 there, so that all shapes stay the same.

    >>> root = KernelMatrix.of(torch.ones(2, 2, dtype=torch.float64)).inverse_root()
    >>> root @ root.T
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]], dtype=torch.float64)
    """

    whole: Tensor  # K
    inner: Tensor  # K' before the small eigenvalues are raised
    root: Tensor  # L lower triangular, with K' = L Lᵀ
    basis: Tensor | None  # Q; None for 1

    @staticmethod
    def regular(K: Tensor) -> KernelMatrix:
        """For a matrix known to be regular: reads nothing back from the device. If it is not, the root is NaN."""
        K = K.double()
        return KernelMatrix(K, K, root_or_nan(K), None)

    @staticmethod
    def of(K: Tensor, eps: float | None = None) -> KernelMatrix:
        """``eps``: the precision of the entries of K, if it is lower than that of the dtype."""
        check_finite(K, "the kernel matrix of the examples")
        given, K, cut = K.dtype, K.double(), rounding(K, eps)
        factor, info = torch.linalg.cholesky_ex(K)
        if bool((info == 0) & (smallest(factor) > 100 * cut)):
            return KernelMatrix(K, K, factor, None)
        distinct = _distinct(K, torch.finfo(given).eps if eps is None else eps)
        values, vectors = eigh(distinct.T @ K @ distinct, "the kernel matrix of the examples")
        if bool(values[0] < -100 * cut):
            raise ValueError(
                f"the kernel matrix of the examples has the eigenvalue {float(values[0]):.3g}: that of a kernel has "
                "none below zero. Give k(x, y) that is symmetric and positive definite, in the precision of its dtype"
            )
        more = (0, len(K) - len(values))
        inner, floored = (pad(values.clamp(min=low), more, value=1.0) for low in (0.0, float(cut)))
        return KernelMatrix(K, inner.diag(), floored.sqrt().diag(), pad(distinct @ vectors, more))

    def inverse_root(self) -> Tensor:
        """Q L⁻ᵀ [n m], a root of K⁺."""
        return self.unwhiten(torch.eye(len(self.whole), dtype=self.whole.dtype, device=self.whole.device)).T

    def restrict(self, t: Tensor) -> Tensor:
        """Qᵀt, for t [* n]."""
        return t if self.basis is None else t @ self.basis

    def extend(self, z: Tensor) -> Tensor:
        """Q z, for z [* n]."""
        return z if self.basis is None else z @ self.basis.T

    def whiten(self, rows: Tensor) -> Tensor:
        """L⁻¹Qᵀ applied to the examples n of [k n *], so that inner products become those of K⁺."""
        inside = rows.double() if self.basis is None else torch.einsum("nm,kn...->km...", self.basis, rows.double())
        flat = inside.flatten(2) if inside.ndim > 2 else inside.unsqueeze(2)
        return torch.linalg.solve_triangular(self.root, flat, upper=False).view_as(inside).to(rows.dtype)

    def unwhiten(self, t: Tensor) -> Tensor:
        """Q L⁻ᵀ t, for t [k n]: the transpose of ``whiten``."""
        inside = torch.linalg.solve_triangular(self.root.T, t.double().T, upper=True).T
        return self.extend(inside).to(t.dtype)

    def restrict_gram(self, gram: Tensor) -> Tensor:
        """Qᵀ G Q for G [(k n) (l m)]."""
        if self.basis is None:
            return gram
        n = self.basis.shape[0]
        k = gram.shape[0] // n
        left = torch.einsum("nt,knj->ktj", self.basis, gram.view(k, n, k * n)).reshape(k * n, k, n)
        return (left @ self.basis).view_as(gram)


def _distinct(K: Tensor, eps: float) -> Tensor:
    """E [n m] with one orthonormal column for each distinct point: K = E EᵀK E Eᵀ.

    Points are equal if their squared distance in the space of the kernel, K_nn + K_mm − 2K_nm, is zero to rounding.
    """
    diagonal = K.diagonal()
    squares = diagonal.unsqueeze(1) + diagonal - 2 * K
    equal = squares.abs() <= 4 * eps * diagonal.abs().amax()  # far below zero, K is not a kernel matrix
    first = equal.to(torch.uint8).argmax(1)  # the first point that equals it (at the latest itself)
    _, index, count = first.unique(return_inverse=True, return_counts=True)
    return one_hot(index).to(K.dtype) / count.to(K.dtype).sqrt()


def root_or_nan(matrix: Tensor) -> Tensor:
    """The Cholesky factor, or NaN if there is none (steps report NaN). Reads nothing back from the device.

    >>> root_or_nan(torch.tensor([[4.0]])), root_or_nan(torch.tensor([[-4.0]]))
    (tensor([[2.]]), tensor([[nan]]))
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return torch.where(failed == 0, factor, torch.nan)


def rounding(K: Tensor, eps: float | None = None) -> Tensor:
    """The level below which an eigenvalue of K cannot be distinguished from zero.

    The larger of ``relative_rounding``·λ_max, the limit of an inversion, and 8ε·tr K, the accuracy of its entries.

    >>> float(rounding(torch.ones(5000, 5000).double())) / torch.finfo(torch.float64).eps == 5000**2
    True
    """
    accuracy = 8 * (torch.finfo(K.dtype).eps if eps is None else eps) * K.diagonal().double().sum()
    largest = K.abs().sum(1).amax()  # ≥ λ_max, with equality if all points are equal
    return torch.maximum(accuracy, relative_rounding(len(K)) * largest.double())


def relative_rounding(n: int) -> float:
    """The ratio λ/λ_max below which the inverse of a kernel matrix [n n] is noise in double precision.

    The error of ``eigh`` is up to n units in the last place of λ_max. Products with the inverse have the relative error
    ελ_max/λ; rows in single precision that agree up to rounding have ε²λ_max/λ, with the ε of single precision. Below
    4096 units of double precision both exceed a few thousandths.
    """
    return max(n, 4096) * torch.finfo(torch.float64).eps
