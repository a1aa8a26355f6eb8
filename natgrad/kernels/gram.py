"""The matrix of a kernel at the examples, regular or not: its inverse, its root, and what it does not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from natgrad.linalg import check_finite, smallest


@final
@dataclass(frozen=True)
class KernelMatrix:
    """K [n n], positive semi-definite, as Q K' Qᵀ with K' regular; in float64.

    A regular K is its own K', and Q = 1. Of a singular one, equal points count as one: Q has no part in their
    differences, and K⁺ = Q K'⁻¹ Qᵀ is the pseudo-inverse (ERRATA 13). What else is zero to ``rounding`` are functions
    so rough that their norm is beyond it, which points that are close make: it is 1/``rounding``, as that of the
    roughest that is known, and not none. Of the n columns of Q those that are not needed are 0, and K' is 1 there: all
    shapes stay what they are.

    >>> equal = KernelMatrix.of(torch.ones(2, 2, dtype=torch.float64))
    >>> equal.inverse()
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]], dtype=torch.float64)
    """

    whole: Tensor  # K
    inner: Tensor  # K' without what rounding adds
    root: Tensor  # L lower triangular, with K' = L Lᵀ
    basis: Tensor | None  # Q; None for 1

    @staticmethod
    def regular(K: Tensor) -> KernelMatrix:
        """Of a matrix that is known to be regular: nothing is read back from the device. One that is not has NaN."""
        K = K.double()
        return KernelMatrix(K, K, root_or_nan(K), None)

    @staticmethod
    def of(K: Tensor, eps: float | None = None) -> KernelMatrix:
        """``eps`` is the precision that K is known to, where that is less than its own."""
        check_finite(K, "the kernel matrix of the examples")
        given, K, cut = K.dtype, K.double(), rounding(K, eps)
        factor, info = torch.linalg.cholesky_ex(K)
        if bool((info == 0) & (smallest(factor) > 100 * cut)):
            return KernelMatrix(K, K, factor, None)
        distinct = _distinct(K, torch.finfo(given).eps if eps is None else eps)
        values, vectors = torch.linalg.eigh(distinct.T @ K @ distinct)
        if bool(values[0] < -100 * cut):
            raise ValueError(
                f"the kernel matrix of the examples has the eigenvalue {float(values[0]):.3g}: that of a kernel has "
                "none below zero. Give k(x, y) that is symmetric and positive definite, in the precision of its dtype"
            )
        more = (0, len(K) - len(values))
        inner, floored = (pad(values.clamp(min=low), more, value=1.0) for low in (0.0, float(cut)))
        return KernelMatrix(K, inner.diag(), floored.sqrt().diag(), pad(distinct @ vectors, more))

    def inverse(self) -> Tensor:
        """K⁺."""
        half = self.inverse_root()
        return half @ half.T

    def inverse_root(self) -> Tensor:
        """Q L⁻ᵀ [n m], whose square K⁺ is."""
        return self.unwhiten(torch.eye(len(self.whole), dtype=self.whole.dtype, device=self.whole.device)).T

    def restrict(self, t: Tensor) -> Tensor:
        """Qᵀt, for t [* n]."""
        return t if self.basis is None else t @ self.basis

    def extend(self, z: Tensor) -> Tensor:
        """Q z, for z [* n]."""
        return z if self.basis is None else z @ self.basis.T

    def whiten(self, rows: Tensor) -> Tensor:
        """L⁻¹Qᵀ on the examples n of [k n *]: the squares of what comes out sum to those of K⁺."""
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
    """E [n m] with orthonormal columns, one for every point that is none of those before it: K = E EᵀK E Eᵀ.

    Points are equal where the square of their distance in the space of the kernel, K_nn + K_mm − 2K_nm, is rounding.
    """
    diagonal = K.diagonal()
    squares = diagonal.unsqueeze(1) + diagonal - 2 * K
    equal = squares.abs() <= 4 * eps * diagonal.abs().amax()  # one that is far below zero is of no kernel
    first = equal.to(torch.uint8).argmax(1)  # the first that a point is equal to, at the latest itself
    _, place, count = first.unique(return_inverse=True, return_counts=True)
    return one_hot(place).to(K.dtype) / count.to(K.dtype).sqrt()


def root_or_nan(matrix: Tensor) -> Tensor:
    """Its Cholesky factor, or NaN where there is none, which is reported wherever steps are checked. No value is read.

    >>> root_or_nan(torch.tensor([[4.0]])), root_or_nan(torch.tensor([[-4.0]]))
    (tensor([[2.]]), tensor([[nan]]))
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return torch.where(failed == 0, factor, torch.nan)


def rounding(K: Tensor, eps: float | None = None) -> Tensor:
    """What an eigenvalue of K cannot be told from zero below: ``unseen`` of λ_max, or some units of the trace.

    To the first a kernel matrix can be inverted, and to the second it is known.

    >>> float(rounding(torch.ones(5000, 5000).double())) / torch.finfo(torch.float64).eps == 5000**2
    True
    """
    known = 8 * (torch.finfo(K.dtype).eps if eps is None else eps) * K.diagonal().double().sum()
    largest = K.abs().sum(1).amax()  # at least λ_max, and as large where all points are equal
    return torch.maximum(known, unseen(len(K)) * largest.double())


def unseen(n: int) -> float:
    """λ/λ_max below which the inverse of a kernel matrix [n n] is noise, in double precision.

    ``eigh`` may be wrong by n units in the last place of λ_max. Products with the inverse have the relative error
    ελ_max/λ, and rows in single precision, equal but for their rounding, ε²λ_max/λ with the ε of that: below 4096 units
    of double precision both are more than some thousandths.
    """
    return max(n, 4096) * torch.finfo(torch.float64).eps
