"""The solver: from a metric and a covector to the vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from natgrad.geometry import Covector, Vector
from natgrad.operators.base import Inverse, Operator


class Solver(ABC):
    """v = (G + λ)⁻¹ω or G⁺ω. ``init`` does the expensive part once; ``sharp`` applies it to any covector."""

    @property
    def doubtful(self) -> bool:
        """Whether the last inverse turned out to be no good, so that it must be made again before it is due."""
        return False

    @abstractmethod
    def init(self, G: Operator, damping: float = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        """Factor, or refuse by name a structure that cannot be solved this way.

        ``warm``: the ``tensors()`` of an earlier inverse, to start from.
        """

    def again(self, last: Inverse, G: Operator, damping: float = 0.0) -> Inverse:
        """As ``init``, from the last inverse, which may be used up: the new one may be made in its memory.

        Where that raises, some layers of the last inverse may be new, and the others as they were.
        """
        return self.init(G, damping, last.tensors())

    @property
    def by_layer(self) -> bool:
        """Whether the inverse of a layer depends on that layer alone, where the metric is kept by layers."""
        return False

    def renewed(self, G: Operator) -> Operator:
        """The same metric, with what is amortised over many estimates computed anew, before ``init``."""
        return G.renewed()

    def sharp(self, state: Inverse, ω: Covector) -> Vector:
        """ω♯ from what ``init`` returned."""
        return state.sharp(ω)
