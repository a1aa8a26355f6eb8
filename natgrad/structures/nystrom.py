"""Nystrom: the leading eigenpairs of the metric from products with random vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from natgrad.linalg import check_finite, is_number, svd
from natgrad.model import Model
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.structures.base import Layout, Operator, Structure
from natgrad.structures.implicit import Implicit
from natgrad.structures.low_rank import LowRankOperator


@final
@dataclass(frozen=True, repr=False)
class Nystrom(Structure):
    """G ≈ U diag(s) Uᵀ + d(1 − UUᵀ) from ``rank`` products with G (Frangella, Tropp and Udell 2023, algorithm 2.1).

    With orthonormal random Ω [p r] and Y = GΩ, U diag(s) Uᵀ = Y(ΩᵀY)⁻¹Yᵀ, and d is the least of the s. It needs
    nothing but products, so that it preconditions ``CG`` for an ``Implicit`` metric of any number of terms:
    ``CG(preconditioner=Nystrom(50))``. The iterations then depend on the eigenvalues that are left, λ_r and below.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Nystrom(2).estimate(pb).dense().round()
    tensor([[1., 2., 1.],
            [2., 4., 2.],
            [1., 2., 1.]])
    """

    rank: int
    seed: int = field(default=0, kw_only=True)  # of Ω

    def __post_init__(self) -> None:
        if not is_number(self.rank, whole=True) or self.rank < 1:
            raise ValueError(f"Nystrom(rank) needs a positive rank, got {self.rank!r}")

    def uncovered(self) -> None:
        return None

    def elements(self, pullback: Pullback) -> int:
        return (3 * min(self.rank, pullback.model.size) + 2) * pullback.model.size

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> LowRankOperator:
        self.admit(pullback)
        return self.extracted(Implicit().estimate(pullback))

    def extracted(self, G: Operator) -> LowRankOperator:
        p, dtype = G.layout.size, G.layout.dtype
        rank = min(self.rank, p)
        random = torch.randn(p, rank, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        Ω = torch.linalg.qr(random.to(G.device)).Q.to(dtype)
        Y = torch.stack([G.product(column) for column in Ω.T], dim=1)
        check_finite(Y, "the metric")
        # Shifted by its rounding, which makes ΩᵀY positive, and shifted back at the end.
        ν, info = torch.finfo(dtype).eps * p**0.5 * torch.linalg.matrix_norm(Y), None
        while info is None or bool(info):
            shifted = Y + ν * Ω
            C, info = torch.linalg.cholesky_ex(0.5 * (Ω.T @ shifted + shifted.T @ Ω))
            ν = torch.where(info > 0, 10 * ν + torch.finfo(dtype).tiny, ν)
        U, s, _ = svd(torch.linalg.solve_triangular(C, shifted.T, upper=False).T, "the sketch of the metric")
        values = (s.square() - ν).clamp(min=0)
        floor = values[-1] if rank < p else values.new_zeros(())
        return LowRankOperator(G.layout, U, values - floor, floor.expand(p).clone(), rank)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> LowRankOperator:
        layout = Layout.of(model.params, tensors["values"].dtype)
        u, values, floor = (tensors[key] for key in ("vectors", "values", "floor"))
        return LowRankOperator(layout, u, values, floor, self.rank)
