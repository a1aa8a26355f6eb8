"""The generalised inverse: natural gradients of singular metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.linalg import check_damping
from natgrad.operators.base import Inverse, Operator
from natgrad.solve.base import Solver


@final
@dataclass(frozen=True, eq=False)
class Pinv(Solver):
    """v = argmin ‖y‖_W subject to G y = ω (001 (33)); Moore–Penrose without a weight (001 definitions 2 and 3).

    Its pushforward is the projection of the gradient onto the span of the coordinate vectors, for every W (theorem 1);
    the vector itself does depend on W and on the parametrisation (section 3.2). ``rtol``: eigenvalues at most rtol
    times the largest count as zero (default: size × machine epsilon). ``weight``: positive numbers for every
    parameter (a mapping of tensors by name), or a positive definite matrix [p q] in flattening order.

    >>> import natgrad as ng
    >>> G = ng.operators.DenseOperator(ng.operators.Layout.of({"w": torch.ones(2)}), torch.ones(2, 2))
    >>> ng.sharp(G, ng.Covector({"w": torch.tensor([6.0, 6.0])}), solver=Pinv())["w"]
    tensor([3.0000, 3.0000])
    """

    rtol: float | None = None
    weight: Mapping[str, Tensor] | Tensor | None = None

    def __post_init__(self) -> None:
        if self.rtol is not None and not 0 <= self.rtol < 1:
            raise ValueError(f"Pinv(rtol=…) must be in [0, 1), got {self.rtol}")
        if isinstance(self.weight, Mapping) and not all(map(_positive, self.weight.values())):
            raise ValueError("Pinv(weight=…) must be positive and finite for every parameter")
        if isinstance(self.weight, Tensor) and not _positive_definite(self.weight):
            raise ValueError("Pinv(weight=…) must be a symmetric positive definite matrix")

    def init(self, G: Operator, damping: float = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
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
