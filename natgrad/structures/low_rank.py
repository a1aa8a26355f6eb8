"""LowRank: the leading eigenpairs of the metric, and the diagonal of what is left as a floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor

from natgrad.linalg import check_finite, cholesky, refuse_singular
from natgrad.model import Model
from natgrad.pullback.layer import Block
from natgrad.pullback.pullback import Pullback, without_autocast
from natgrad.structures.base import Cost, Inverse, Layout, Operator, Structure
from natgrad.structures.dense import CholeskyInverse, Dense, restored_inverse
from natgrad.structures.kernel import Kernel

_WHAT = "the low-rank metric"
_LARGEST = 4096  # parameters, up to which a matrix is affordable


@final
@dataclass(frozen=True)
class LowRank(Structure):
    """The ``rank`` largest eigenpairs of G, and the diagonal of what is left as a floor.

    Averaging cuts back to the rank every time: an average over micro-batches, or over time, has the diagonal of the
    joint batch exactly, and its leading eigenpairs only as far as each part had kept them.

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> LowRank(1).estimate(pb).values.round()
    tensor([6.])
    """

    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"LowRank(rank) needs a positive rank, got {self.rank!r}")

    def elements(self, pullback: Pullback) -> int:
        small = min(pullback.columns * pullback.n, pullback.model.size)
        return (min(self.rank, small) + 2) * pullback.model.size + small**2

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> LowRankOperator:
        self.admit(pullback)
        layout = Layout(pullback.model.like, pullback.y.dtype)
        if pullback.model.size <= pullback.columns * pullback.n:
            matrix = Dense().estimate(pullback).matrix
            values, u = leading(matrix, self.rank)
            return floored(layout, u, values, matrix.diagonal(), self.rank)
        # Eigenvectors of G = RᵀR are Rᵀw/√s for the eigenvectors w of the smaller R Rᵀ; R itself is never formed.
        kernel = Kernel().estimate(pullback)
        values, w = leading(kernel.gram(), self.rank)
        u = values.new_empty(layout.size, values.numel())
        for j, value in enumerate(values):
            u[:, j] = kernel.pull(w[:, j].view(kernel.factors[0].g.shape[:2])) / value.sqrt()
        return floored(layout, u, values, kernel.diagonal(), self.rank)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> LowRankOperator:
        layout = Layout.of(model.params, tensors["values"].dtype)
        return LowRankOperator(layout, tensors["vectors"], tensors["values"], tensors["floor"], self.rank)

    def cost(self, blocks: Sequence[Block], *, exact: bool = False, iterative: bool = False) -> Cost:
        p, r = sum(block.size for block in blocks), self.rank
        return Cost((r + 1) * p, r**2 * p, 4 * r * p, p, {"U": (1, p, r)})


@final
@dataclass(frozen=True)
class LowRankOperator(Operator):
    """G ≈ U diag(s) Uᵀ + diag(d): the leading eigenpairs, and a floor that keeps the diagonal of G exact."""

    layout: Layout
    vectors: Tensor  # U [p r]
    values: Tensor  # s [r]
    floor: Tensor  # d [p]
    rank: int  # eigenpairs that a moving average may keep; one batch can have fewer

    def product(self, v: Tensor) -> Tensor:
        return self.vectors @ (self.values * (self.vectors.T @ v)) + self.floor * v

    def diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values + self.floor

    def dense(self) -> Tensor:
        return (self.vectors * self.values) @ self.vectors.T + self.floor.diag()

    def logdet(self, damping: float = 0.0) -> Tensor:
        """log det(E + BBᵀ) = log det E + log det(1 + BᵀE⁻¹B), E = d + λ."""
        if self._bare(damping):
            return 2 * cholesky(self.dense(), damping, _WHAT).diagonal().log().sum()
        e, _, factor = self._capacity(damping)
        return e.log().sum() + 2 * factor.diagonal().log().sum()

    def lerp(self, other: Operator, weight: float) -> LowRankOperator:
        """The two ranges together, cut back to the rank; what is cut goes into the floor, so the diagonal stays."""
        self.same_kind(other)
        new = cast(LowRankOperator, other)
        root = torch.cat(
            [self.vectors * ((1 - weight) * self.values).sqrt(), new.vectors * (weight * new.values).sqrt()], dim=1
        )
        diagonal = torch.lerp(self.diagonal(), new.diagonal(), weight)
        values, w = leading(root.T @ root, self.rank)
        return floored(self.layout, root @ w / values.sqrt(), values, diagonal, self.rank)

    def tensors(self) -> dict[str, Tensor]:
        return {"vectors": self.vectors, "values": self.values, "floor": self.floor}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        p, r = self.layout.size, self.values.numel()
        return {"vectors": (p, r), "values": (r,), "floor": (p,)}

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        if "factor" in tensors:
            return LowRankInverse(self.layout, tensors["scale"], tensors["root"], tensors["factor"])
        return restored_inverse(self.layout, [torch.arange(self.layout.size, device=self.floor.device)], tensors)

    def inverse(self, damping: float) -> Inverse:
        if self._bare(damping):
            whole = torch.arange(self.floor.numel(), device=self.floor.device)
            return CholeskyInverse.of(self.layout, [whole], [self.dense()], damping, _WHAT)
        e, b, factor = self._capacity(damping)
        return LowRankInverse(self.layout, e.reciprocal(), b, factor)

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        self.refuse("Pinv", "its floor and its range have no common eigenbasis; it has its own inverse, Cholesky()")

    def _bare(self, damping: float) -> bool:
        """Whether E vanishes somewhere, so that Woodbury has no E⁻¹: the matrix itself says whether it is singular."""
        check_finite(self.floor, _WHAT)
        e, eps = self.floor + damping, torch.finfo(self.floor.dtype).eps
        if bool(e.min() > eps * (self.values.sum() + e.amax())):
            return False
        if e.numel() > _LARGEST:
            spectrum = torch.cat([e, self.values]).sort().values[-e.numel() :]
            refuse_singular(spectrum, e.numel() * eps, True, damping, _WHAT)
        return True

    def _capacity(self, damping: float) -> tuple[Tensor, Tensor, Tensor]:
        """E = d + λ [p], B = U√s [p r] and the Cholesky factor of 1 + BᵀE⁻¹B [r r]."""
        e = self.floor + damping
        b = self.vectors * self.values.sqrt()
        return e, b, cholesky(b.T @ (b / e[:, None]), 1.0, "the capacity matrix of the low-rank metric")


@final
@dataclass(frozen=True)
class LowRankInverse(Inverse):
    """(E + BBᵀ)⁻¹ = E⁻¹ − E⁻¹B (1 + BᵀE⁻¹B)⁻¹ BᵀE⁻¹."""

    layout: Layout
    scale: Tensor  # E⁻¹ [p]
    root: Tensor  # B [p r]
    factor: Tensor  # [r r]

    def solve(self, ω: Tensor) -> Tensor:
        scaled = self.scale * ω
        inner = torch.cholesky_solve((self.root.T @ scaled).unsqueeze(-1), self.factor).squeeze(-1)
        return scaled - self.scale * (self.root @ inner)

    @property
    def noise(self) -> int:
        return sum(self.root.shape)

    def coloured(self, ξ: Tensor) -> Tensor:
        """(E + BBᵀ)⁻¹(√E ξ₁ + B ξ₂)."""
        white, low = ξ.split(list(self.root.shape), dim=1)
        return self._solved(white * self.scale.rsqrt() + low @ self.root.T)

    def whitened(self, ω: Tensor) -> Tensor:
        v = self._solved(ω)
        return torch.cat([v * self.scale.rsqrt(), v @ self.root], dim=1)

    def _solved(self, ω: Tensor) -> Tensor:
        """``solve`` of every row of ω [s p]."""
        scaled = self.scale * ω
        inner = torch.cholesky_solve((scaled @ self.root).T, self.factor).T
        return scaled - self.scale * (inner @ self.root.T)

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "root": self.root, "factor": self.factor}


def leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues [r] of a positive semi-definite matrix, descending, at most ``rank``, with vectors [d r].

    Eigenvalues that are zero up to rounding are left out.
    """
    check_finite(matrix, "the metric")
    values, vectors = torch.linalg.eigh(matrix)
    positive = values > values.numel() * torch.finfo(values.dtype).eps * values[-1:]
    keep = positive.nonzero().squeeze(-1).flip(0)[:rank]
    return values[keep], vectors[:, keep]


def floored(layout: Layout, u: Tensor, values: Tensor, diagonal: Tensor, rank: int) -> LowRankOperator:
    """U diag(s) Uᵀ with the floor that restores ``diagonal`` [p]; below zero is rounding, as the rest is PSD."""
    floor = (diagonal - u.square() @ values).clamp(min=0)
    return LowRankOperator(layout, u, values, floor, rank)
