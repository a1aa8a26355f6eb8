"""The Fisher information of a family at a point, as a map: ♭ takes a vector of its chart to a covector, ♯ back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


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
