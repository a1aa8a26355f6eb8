"""The direct solver: Cholesky, in the form each structure has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.linalg import check_damping
from natgrad.operators.base import Inverse, Operator
from natgrad.solve.base import Solver


@final
@dataclass(frozen=True)
class Cholesky(Solver):
    """(G + λ)⁻¹ by Cholesky: of the matrix, of its blocks, of the kernel (Woodbury) or of the capacity of a low rank.

    A singular or indefinite matrix raises, with its rank and smallest eigenvalue.

    >>> import torch, natgrad as ng
    >>> G = ng.operators.DiagonalOperator(ng.operators.Layout.of({"w": torch.ones(2)}), torch.tensor([1.0, 4.0]))
    >>> Cholesky().init(G, damping=1.0).sharp(ng.Covector({"w": torch.tensor([2.0, 10.0])}))["w"]
    tensor([1., 2.])
    """

    @property
    def by_layer(self) -> bool:
        return True

    def init(self, G: Operator, damping: float = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        check_damping(damping, G.layout.dtype)
        return G.inverse(damping)
