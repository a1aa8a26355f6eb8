"""The full matrix, and the block-diagonal one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor

from natgrad.linalg import check_finite, cholesky, refuse_indefinite
from natgrad.structures.base import Inverse, Layout, Operator

_CHOLESKY, _ROOT = "cholesky/", "root/"  # before the numbers of the tensors of an inverse


@final
@dataclass(frozen=True)
class DenseOperator(Operator):
    """G [p q], every entry."""

    layout: Layout
    matrix: Tensor

    def product(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal().clone()

    def dense(self) -> Tensor:
        return self.matrix

    def logdet(self, damping: float = 0.0) -> Tensor:
        factor = cholesky(self.matrix, damping, "the dense metric")
        return 2 * factor.diagonal().log().sum()

    def lerp(self, other: Operator, weight: float) -> DenseOperator:
        self.same_kind(other)
        return DenseOperator(self.layout, torch.lerp(self.matrix, cast(DenseOperator, other).matrix, weight))

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def averaged(self) -> dict[str, Tensor]:
        return self.tensors()

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        return restored_inverse(self.layout, [torch.arange(self.layout.size, device=self.matrix.device)], tensors)

    def inverse(self, damping: float) -> Inverse:
        whole = torch.arange(self.layout.size, device=self.matrix.device)
        return CholeskyInverse.of(self.layout, [whole], [self.matrix], damping, "the dense metric")

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        whole = torch.arange(self.layout.size, device=self.matrix.device)
        return SpectralInverse.of(self.layout, [whole], [self.matrix], damping, rtol, weight)


@final
@dataclass(frozen=True)
class BlockDenseOperator(Operator):
    """The diagonal blocks of G, one a layer; block b lives on the flattened positions ``indices[b]``."""

    layout: Layout
    names: tuple[str, ...]
    indices: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]

    def product(self, v: Tensor) -> Tensor:
        out = torch.zeros_like(v)
        for index, matrix in zip(self.indices, self.matrices, strict=True):
            out[index] = matrix @ v[index]
        return out

    def diagonal(self) -> Tensor:
        out = self.matrices[0].new_zeros(self.layout.size)
        for index, matrix in zip(self.indices, self.matrices, strict=True):
            out[index] = matrix.diagonal()
        return out

    def dense(self) -> Tensor:
        out = self.matrices[0].new_zeros(self.layout.size, self.layout.size)
        for index, matrix in zip(self.indices, self.matrices, strict=True):
            out[index[:, None], index] = matrix
        return out

    def logdet(self, damping: float = 0.0) -> Tensor:
        factors = [cholesky(m, damping, self._block(b)) for b, m in zip(self.names, self.matrices, strict=True)]
        return torch.stack([2 * factor.diagonal().log().sum() for factor in factors]).sum()

    def lerp(self, other: Operator, weight: float) -> BlockDenseOperator:
        self.same_kind(other)
        pairs = zip(self.matrices, cast(BlockDenseOperator, other).matrices, strict=True)
        matrices = tuple(torch.lerp(a, b, weight) for a, b in pairs)
        return BlockDenseOperator(self.layout, self.names, self.indices, matrices)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.matrices, strict=True))

    def averaged(self) -> dict[str, Tensor]:
        return self.tensors()

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        return restored_inverse(self.layout, self.indices, tensors)

    def inverse(self, damping: float) -> Inverse:
        what = ", ".join(self.names)
        return CholeskyInverse.of(self.layout, self.indices, self.matrices, damping, f"a block of the metric ({what})")

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None and weight.ndim == 2:
            self.refuse("Pinv(weight=matrix)", "a full weight mixes the blocks; give positive numbers a parameter")
        return SpectralInverse.of(self.layout, self.indices, self.matrices, damping, rtol, weight)

    @staticmethod
    def _block(name: str) -> str:
        return f"the block {name} of the metric"


@final
@dataclass(frozen=True)
class CholeskyInverse(Inverse):
    """(G_b + λ)⁻¹ of every block by its Cholesky factor; blocks of one size are factored and solved as one batch."""

    layout: Layout
    indices: tuple[Tensor, ...]  # [b d] flattened positions
    factors: tuple[Tensor, ...]  # [b d d]

    @staticmethod
    def of(
        layout: Layout, indices: Sequence[Tensor], matrices: Sequence[Tensor], damping: float, what: str
    ) -> CholeskyInverse:
        batches = _batched(indices, matrices)
        factors = tuple(cholesky(matrix, damping, what) for _, matrix in batches)
        return CholeskyInverse(layout, tuple(index for index, _ in batches), factors)

    def solve(self, ω: Tensor) -> Tensor:
        v = torch.empty_like(ω)
        for index, factor in zip(self.indices, self.factors, strict=True):
            v[index] = torch.cholesky_solve(ω[index].unsqueeze(-1), factor).squeeze(-1)
        return v

    def coloured(self, ξ: Tensor) -> Tensor:
        return self._through(ξ, upper=True)

    def whitened(self, ω: Tensor) -> Tensor:
        return self._through(ω, upper=False)

    def _through(self, t: Tensor, upper: bool) -> Tensor:
        """L⁻ᵀ t or L⁻¹ t of every block, for t [s p]."""
        out = torch.empty_like(t)
        for index, factor in zip(self.indices, self.factors, strict=True):
            own = t[:, index].permute(1, 2, 0)  # [b d s]
            solved = torch.linalg.solve_triangular(factor.mT if upper else factor, own, upper=upper)
            out[:, index] = solved.permute(2, 0, 1)
        return out

    def tensors(self) -> dict[str, Tensor]:
        return {f"{_CHOLESKY}{at}": factor for at, factor in enumerate(self.factors)}


@final
@dataclass(frozen=True)
class SpectralInverse(Inverse):
    """W^{-½} (W^{-½} G W^{-½})⁺ W^{-½}: the solution of G v = ω of least ‖v‖_W (001 (33)); Moore–Penrose at W = 1.

    Eigenvalues at most ``rtol`` times the largest count as zero.
    """

    layout: Layout
    indices: tuple[Tensor, ...]  # [b d]
    roots: tuple[Tensor, ...]  # [b d r]: the pseudo-inverse is root rootᵀ

    @staticmethod
    def of(
        layout: Layout,
        indices: Sequence[Tensor],
        matrices: Sequence[Tensor],
        damping: float,
        rtol: float | None,
        weight: Tensor | None,
    ) -> SpectralInverse:
        batches = _batched(indices, matrices)
        roots = []
        for index, matrix in batches:
            check_finite(matrix, "the metric")
            damped = matrix + damping * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
            inverse_root = None if weight is None else _inverse_root(weight, index)
            roots.append(_pseudo_root(damped, rtol, inverse_root, damping))
        return SpectralInverse(layout, tuple(index for index, _ in batches), tuple(roots))

    def solve(self, ω: Tensor) -> Tensor:
        v = torch.empty_like(ω)
        for index, root in zip(self.indices, self.roots, strict=True):
            v[index] = (root @ (root.transpose(-1, -2) @ ω[index].unsqueeze(-1))).squeeze(-1)
        return v

    def tensors(self) -> dict[str, Tensor]:
        return {f"{_ROOT}{at}": root for at, root in enumerate(self.roots)}


def restored_inverse(layout: Layout, indices: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> Inverse | None:
    """The inverse with these tensors, of matrices at these places."""
    places = tuple(index for index, _ in _batched(indices, indices))
    for kind, prefix in ((CholeskyInverse, _CHOLESKY), (SpectralInverse, _ROOT)):
        found = tuple(tensors[f"{prefix}{at}"] for at in range(len(places)) if f"{prefix}{at}" in tensors)
        if len(found) == len(places):
            return kind(layout, places, found)
    return None


def _pseudo_root(matrix: Tensor, rtol: float | None, inverse_root: Tensor | None, damping: float) -> Tensor:
    """T with T Tᵀ = w (w G w)⁺ w, w = W^{-½} or 1, of the ``matrix`` G with its damping in it."""
    inner = matrix if inverse_root is None else inverse_root @ matrix @ inverse_root
    values, vectors = torch.linalg.eigh(0.5 * (inner + inner.transpose(-1, -2)))
    rtol = matrix.shape[-1] * torch.finfo(matrix.dtype).eps if rtol is None else rtol
    refuse_indefinite(values, rtol, damping, "the metric")
    cut = rtol * values[..., -1:]
    scale = torch.where(values > cut, values, torch.inf).rsqrt()
    root = vectors * scale.unsqueeze(-2)
    return root if inverse_root is None else inverse_root @ root


def _inverse_root(weight: Tensor, index: Tensor) -> Tensor:
    """W^{-½} [b d d] on the blocks ``index`` [b d], of a weight [p] (diagonal) or [p q]."""
    if weight.ndim == 1:
        return torch.diag_embed(weight[index].rsqrt())
    values, vectors = torch.linalg.eigh(0.5 * (weight + weight.T))
    root = (vectors * values.rsqrt()) @ vectors.T
    return root[index.unsqueeze(-1), index.unsqueeze(-2)]


def _batched(indices: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Stack blocks of the same size."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for b, index in enumerate(indices):
        by_size[index.numel()].append(b)
    return [
        (torch.stack([indices[b] for b in group]), torch.stack([matrices[b] for b in group]))
        for group in by_size.values()
    ]
