"""The sum of metrics on one set of parameters, each in a structure of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.linalg import check_positive
from natgrad.structures.base import Layout, Operator
from natgrad.structures.dense import FormedOperator


@final
@dataclass(frozen=True, repr=False)
class SumOperator(FormedOperator):
    """The sum of metrics on the same parameters, such as those of a new task and an old one.

    Args:
        parts: The operators G_i, in any structures. ``DiagonalOperator(G.layout, values)`` makes one of numbers.
        weights: A number c_i > 0 for each; 1 by default.

    Method:
        Σ_i c_i G_i. Products are those of the parts, for ``CG()``; direct inverses form the matrix [p p]. With the
        diagonal of an old Fisher metric it is the metric of elastic weight consolidation (Kirkpatrick et al. 2017).
        Metrics on the *outputs* are added before the pullback, ``2 * a + b``, and keep every structure.

    Example:
        >>> from natgrad.operators import DiagonalOperator, Layout
        >>> layout = Layout.of({"w": torch.ones(2)})
        >>> one, other = (DiagonalOperator(layout, torch.tensor(t)) for t in ([1.0, 2.0], [0.5, 0.5]))
        >>> SumOperator((one, other), (1.0, 4.0)).diagonal()
        tensor([3., 4.])
    """

    parts: tuple[Operator, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts or len(self.weights) not in (0, len(self.parts)):
            raise ValueError(
                f"SumOperator has {len(self.parts)} parts and {len(self.weights)} weights: give one for each"
            )
        for c in self.weights:
            check_positive(c, "a weight of SumOperator", ": the sum must be a metric")
        for other in self.parts[1:]:
            if {n: t.shape for n, t in other.layout.like.items()} != {n: t.shape for n, t in self.layout.like.items()}:
                raise ValueError("SumOperator adds metrics on the same parameters, of the same names and shapes")

    @property
    def layout(self) -> Layout:  # type: ignore[override]  # of the parts
        """The names and shapes of the parameters, as in all parts."""
        return self.parts[0].layout

    def _sum(self, of: Callable[[Operator], Tensor]) -> Tensor:
        weights = self.weights or (1.0,) * len(self.parts)
        return torch.stack([c * of(part) for c, part in zip(weights, self.parts, strict=True)]).sum(0)

    def product(self, v: Tensor) -> Tensor:
        return self._sum(lambda part: part.product(v))

    def diagonal(self) -> Tensor:
        return self._sum(lambda part: part.diagonal())

    def dense(self) -> Tensor:
        return self._sum(lambda part: part.dense())

    def eigenvalues(self) -> Tensor:
        return self.to_dense().eigenvalues()

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}/{name}": t for i, part in enumerate(self.parts) for name, t in part.tensors().items()}
