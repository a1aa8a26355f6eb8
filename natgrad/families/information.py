"""The Fisher information of a family at a point, as a map: ♭ takes a vector of its chart to a covector, ♯ back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.families.domains import check_finite, refuse_indefinite


class Information(ABC):
    """F [*batch], symmetric and positive on the tangent space of a chart (002 (16)–(19)).

    In the natural chart F_η = ∇²log Z = ∂ξ/∂η: ♭ takes a change of η to the change of ξ, ♯ takes a change of ξ back. In
    the mean chart F_ξ = F_η⁻¹, and the two trade places (``inverse``). Vectors have the shape of a point.
    """

    @abstractmethod
    def flat(self, v: Tensor) -> Tensor:
        """v♭ = F v."""

    @abstractmethod
    def sharp(self, w: Tensor) -> Tensor:
        """w♯ = F⁻¹ w; where F is singular the tangent vector, by the pseudo-inverse (ERRATA 34)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """F as matrices [*batch p q]; of a one-parameter family [*batch 1 1]."""

    @property
    def divides(self) -> bool:
        """Whether ♯ divides by what may be rounded to 0: no, where it is products with what the chart holds."""
        return True

    def inverse(self) -> Information:
        """F⁻¹, the information in the other chart."""
        return Inverted(self)


@final
@dataclass(frozen=True)
class Inverted(Information):
    """F⁻¹ of another: ♯ and ♭ trade places."""

    other: Information

    def flat(self, v: Tensor) -> Tensor:
        return self.other.sharp(v)

    def sharp(self, w: Tensor) -> Tensor:
        return self.other.flat(w)

    def dense(self) -> Tensor:
        return torch.linalg.pinv(self.other.dense(), hermitian=True)

    def inverse(self) -> Information:
        return self.other


@final
@dataclass(frozen=True)
class Scalar(Information):
    """A variance for every number [*batch].

    >>> Scalar(torch.tensor([2.0, 4.0])).sharp(torch.ones(2))
    tensor([0.5000, 0.2500])
    """

    variance: Tensor

    def flat(self, v: Tensor) -> Tensor:
        return self.variance * v

    def sharp(self, w: Tensor) -> Tensor:
        return w / self.variance

    def dense(self) -> Tensor:
        return self.variance[..., None, None]


@final
@dataclass(frozen=True)
class Diagonal(Information):
    """diag(a), a [*batch p]."""

    a: Tensor

    def flat(self, v: Tensor) -> Tensor:
        return self.a * v

    def sharp(self, w: Tensor) -> Tensor:
        return w / self.a

    def dense(self) -> Tensor:
        return torch.diag_embed(self.a)


@final
@dataclass(frozen=True)
class Matrix(Information):
    """A small matrix [*batch p q], as it is."""

    matrix: Tensor

    def flat(self, v: Tensor) -> Tensor:
        return (self.matrix @ v.unsqueeze(-1)).squeeze(-1)

    def sharp(self, w: Tensor) -> Tensor:
        # Entries of t may differ by orders of magnitude: scale the diagonal to 1 before solving.
        s = self.matrix.diagonal(dim1=-2, dim2=-1).rsqrt()
        scaled = s.unsqueeze(-1) * self.matrix * s.unsqueeze(-2)
        right = (s * w).unsqueeze(-1)
        found, _ = torch.linalg.solve_ex(scaled, right)  # which does not wait for a GPU
        return s * found.squeeze(-1)

    def dense(self) -> Tensor:
        return self.matrix


@final
@dataclass(frozen=True)
class Downdated(Information):
    """diag(a) − c u uᵀ, with a, u [*batch p], c [*batch] and gap [*batch] = 1 − c Σ u²/a > 0 (Sherman and Morrison)."""

    a: Tensor
    u: Tensor
    c: Tensor
    gap: Tensor

    def flat(self, v: Tensor) -> Tensor:
        return self.a * v - (self.c * (self.u * v).sum(-1)).unsqueeze(-1) * self.u

    def sharp(self, w: Tensor) -> Tensor:
        alone, shape = w / self.a, self.u / self.a
        return alone + (self.c * (self.u * alone).sum(-1) / self.gap).unsqueeze(-1) * shape

    def dense(self) -> Tensor:
        return torch.diag_embed(self.a) - self.c[..., None, None] * self.u.unsqueeze(-1) * self.u.unsqueeze(-2)


@final
@dataclass(frozen=True)
class Polar(Information):
    """a (1 − uuᵀ) + b uuᵀ with unit vectors u [*batch p]: a across, b along, which may be of very different sizes.

    >>> Polar(torch.tensor([1.0, 0.0]), torch.tensor(2.0), torch.tensor(4.0)).sharp(torch.ones(2))
    tensor([0.2500, 0.5000])
    """

    u: Tensor
    a: Tensor
    b: Tensor

    def flat(self, v: Tensor) -> Tensor:
        along = (self.u * v).sum(-1, keepdim=True) * self.u
        return self.a.unsqueeze(-1) * (v - along) + self.b.unsqueeze(-1) * along

    def sharp(self, w: Tensor) -> Tensor:
        along = (self.u * w).sum(-1, keepdim=True) * self.u
        return (w - along) / self.a.unsqueeze(-1) + along / self.b.unsqueeze(-1)

    def dense(self) -> Tensor:
        eye = torch.eye(self.u.shape[-1], dtype=self.u.dtype, device=self.u.device)
        along = self.u.unsqueeze(-1) * self.u.unsqueeze(-2)
        return self.a[..., None, None] * (eye - along) + self.b[..., None, None] * along


@final
@dataclass(frozen=True)
class Centred(Information):
    """diag p − p pᵀ of probabilities [*batch c], singular along the constant vector; ♯ is P diag(1/p) P, P = 1 − 11ᵀ/c.

    >>> Centred(torch.tensor([0.5, 0.5])).sharp(torch.tensor([1.0, -1.0]))
    tensor([ 2., -2.])
    """

    p: Tensor

    def flat(self, v: Tensor) -> Tensor:
        return self.p * (v - (self.p * v).sum(-1, keepdim=True))

    def sharp(self, w: Tensor) -> Tensor:
        v = (w - w.mean(-1, keepdim=True)) / self.p
        return v - v.mean(-1, keepdim=True)

    def dense(self) -> Tensor:
        return torch.diag_embed(self.p) - self.p.unsqueeze(-1) * self.p.unsqueeze(-2)


@final
@dataclass(frozen=True)
class Blocks(Information):
    """Independent blocks along the last axis, with as many entries each as ``sizes`` says."""

    blocks: tuple[Information, ...]
    sizes: tuple[int, ...]

    def flat(self, v: Tensor) -> Tensor:
        parts = v.split(self.sizes, -1)
        return torch.cat([F.flat(part) for F, part in zip(self.blocks, parts, strict=True)], -1)

    def sharp(self, w: Tensor) -> Tensor:
        parts = w.split(self.sizes, -1)
        return torch.cat([F.sharp(part) for F, part in zip(self.blocks, parts, strict=True)], -1)

    def dense(self) -> Tensor:
        return block_diagonal(*(F.dense() for F in self.blocks))


def block_diagonal(*blocks: Tensor) -> Tensor:
    """Square matrices [*batch d d] of several sizes on the diagonal of one."""
    sizes = [block.shape[-1] for block in blocks]
    batch = torch.broadcast_shapes(*(block.shape[:-2] for block in blocks))
    whole = blocks[0].new_zeros(*batch, sum(sizes), sum(sizes))
    at = 0
    for block, size in zip(blocks, sizes, strict=True):
        whole[..., at : at + size, at : at + size] = block
        at += size
    return whole


def by_basis(information: Information, size: int, like: Tensor) -> Tensor:
    """F [*batch p q] column by column, for an information that has no better way."""
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    columns = information.flat(eye.view(size, *[1] * (like.ndim - 1), size).expand(size, *like.shape[:-1], size))
    return columns.movedim(0, -1)


# Symmetric matrices inside a point: packed as vec, row by row, and read symmetrised, in one place (ERRATA 32).


def side(p: int, vectors: int) -> int:
    """d of p = d·vectors + d² entries, or 0 if there is none.

    >>> side(6, 1), side(9, 0), side(7, 1)
    (2, 3, 0)
    """
    d = (math.isqrt(vectors * vectors + 4 * p) - vectors) // 2
    return d if d * (d + vectors) == p else 0


def symmetric(A: Tensor) -> Tensor:
    """½(A + Aᵀ)."""
    return 0.5 * (A + A.mT)


def square(vec: Tensor) -> Tensor:
    """vec [*batch d²] → its symmetric part [*batch d d]."""
    d = math.isqrt(vec.shape[-1])
    return symmetric(vec.unflatten(-1, (d, d)))


def joined(vector: Tensor, matrix: Tensor) -> Tensor:
    """(v, vec A) [*batch d + d²]."""
    return torch.cat([vector, matrix.flatten(-2)], -1)


def moment_matrix(μ: Tensor, m: Tensor) -> Tensor:
    """E (1, x)(1, x)ᵀ [*batch 1+d 1+d] of E x and −½ E xxᵀ: positive definite where the covariance is."""
    one = torch.ones_like(μ[..., :1])
    top = torch.cat([one, μ], -1).unsqueeze(-2)
    return torch.cat([top, torch.cat([μ.unsqueeze(-1), -2 * m], -1)], -2)


def looked_at(x: Tensor) -> bool:
    """Whether values may be read: a GPU is not waited for, and a transform of functions has none."""
    return x.device.type != "cuda" and not torch._C._are_functorch_transforms_active()


def factored(A: Tensor, what: str, word: str) -> Tensor:
    """L with LLᵀ = A [*batch d d]. On a CPU an indefinite or infinite A raises; a GPU is not waited for."""
    watched = looked_at(A)
    if watched:
        check_finite(A.detach(), f"{what}: {word}")
    L, info = torch.linalg.cholesky_ex(A)
    if watched:
        refuse_indefinite(A, info, what, word)
    return L


# The Fisher information of Gaussians and Wishart matrices, by products of d × d matrices.


@final
@dataclass(frozen=True, eq=False)
class GaussianInformation(Information):
    """F of N(μ, Σ) in (h, Λ), L the factor of Λ: δμ = Σ(δh − δΛ μ), δΣ = −Σ δΛ Σ, and ξ = (μ, −½(Σ + μμᵀ)).

    ♯ needs products with Λ alone. In dense form it is ¼(1 + K)(Σ ⊗ Σ) for μ = 0, K the commutation (ERRATA 32).
    """

    h: Tensor
    Λ: Tensor
    L: Tensor

    @cached_property
    def Σ(self) -> Tensor:
        return torch.cholesky_inverse(self.L)

    @cached_property
    def μ(self) -> Tensor:
        return torch.cholesky_solve(self.h.unsqueeze(-1), self.L)

    @property
    def divides(self) -> bool:
        return False

    def flat(self, v: Tensor) -> Tensor:
        d = self.h.shape[-1]
        δΛ = square(v[..., d:])
        δμ = self.Σ @ (v[..., :d].unsqueeze(-1) - δΛ @ self.μ)
        outer = δμ @ self.μ.mT
        return joined(δμ.squeeze(-1), 0.5 * (self.Σ @ δΛ @ self.Σ - outer - outer.mT))

    def sharp(self, w: Tensor) -> Tensor:
        d = self.h.shape[-1]
        W, h = w[..., d:].unflatten(-1, (d, d)), self.h.unsqueeze(-1)
        Λδμ = self.Λ @ w[..., :d].unsqueeze(-1)
        # Λ(W + Wᵀ + δμ μᵀ + μ δμᵀ)Λ, where Λμ = h: what has rank two is added when the large products are done.
        pair = torch.cat([Λδμ, h], -1) @ torch.cat([h, Λδμ], -1).mT
        δΛ = self.Λ @ (W + W.mT) @ self.Λ + pair
        return joined((Λδμ + δΛ @ self.μ).squeeze(-1), δΛ)

    def dense(self) -> Tensor:
        d = self.h.shape[-1]
        return by_basis(self, d + d * d, torch.cat([self.h, self.Λ.flatten(-2)], -1))


@final
@dataclass(frozen=True, eq=False)
class PrecisionInformation(Information):
    """F of N(m, Σ) with known m in vec Λ: δξ = ½ Σ δΛ Σ."""

    Λ: Tensor
    L: Tensor

    @cached_property
    def Σ(self) -> Tensor:
        return torch.cholesky_inverse(self.L)

    @property
    def divides(self) -> bool:
        return False

    def flat(self, v: Tensor) -> Tensor:
        return (0.5 * self.Σ @ square(v) @ self.Σ).flatten(-2)

    def sharp(self, w: Tensor) -> Tensor:
        return (2 * self.Λ @ square(w) @ self.Λ).flatten(-2)

    def dense(self) -> Tensor:
        return by_basis(self, self.Λ.shape[-1] ** 2, self.Λ.flatten(-2))


@final
@dataclass(frozen=True, eq=False)
class WishartInformation(Information):
    """F in (a, Λ): δξ₁ = f δa − tr(V δΛ), δξ₂ = −V δa + ½ν V δΛ V, with V = Λ⁻¹, f = Σ ψ'((ν + 1 − j)/2)."""

    ν: Tensor
    f: Tensor
    Λ: Tensor
    L: Tensor

    @cached_property
    def V(self) -> Tensor:
        return torch.cholesky_inverse(self.L)

    def flat(self, v: Tensor) -> Tensor:
        a, δΛ = v[..., :1], square(v[..., 1:])
        first = self.f * v[..., 0] - (self.V * δΛ).sum((-2, -1))
        second = -self.V * a.unsqueeze(-1) + 0.5 * self.ν[..., None, None] * self.V @ δΛ @ self.V
        return torch.cat([first.unsqueeze(-1), second.flatten(-2)], -1)

    def sharp(self, w: Tensor) -> Tensor:
        W, d = square(w[..., 1:]), self.Λ.shape[-1]
        a = (w[..., 0] + 2 / self.ν * (self.Λ * W).sum((-2, -1))) / (self.f - 2 * d / self.ν)
        δΛ = (2 / self.ν)[..., None, None] * (self.Λ @ W @ self.Λ + a[..., None, None] * self.Λ)
        return torch.cat([a.unsqueeze(-1), δΛ.flatten(-2)], -1)

    def dense(self) -> Tensor:
        return by_basis(self, 1 + self.Λ.shape[-1] ** 2, torch.cat([self.ν.unsqueeze(-1), self.Λ.flatten(-2)], -1))
