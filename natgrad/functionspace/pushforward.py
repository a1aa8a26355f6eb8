"""The pushforward of a metric from the parameters to the functions, as the dual of a kernel of the tangent space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.linalg import check_finite


@final
@dataclass(frozen=True)
class PushforwardMetric:
    """(φ_*g)(X, Y) = g(dφ⁻¹X, dφ⁻¹Y) of tangent functions X, Y known at the points (000 section 5.1): XᵀΘ⁺Y.

    Θ = J g⁻¹Jᵀ is the kernel of the tangent space in which the metric g on the parameters is kept: ``ntk`` for the
    Euclidean one, where ∂φ/∂θ^p are orthonormal (000 (16), lemma 6). The two are dual, and 000 section 5.2 calls the
    kernel the metric (ERRATA 18): under θ' = 2θ the kernel is 1/4 of what it was, and the metric 4 times. Where φ is
    not an immersion, dφ⁻¹X is the least of the vectors that move the outputs by X. For the kernel of a pulled-back
    metric (``TangentKernel``) it is the metric on functions itself, and no parametrisation shows.

    Functions that are not tangent have no length, and are refused. ``PushforwardMetric.of`` makes one.
    """

    values: Tensor  # eigenvalues of Θ that are not zero, [t]
    vectors: Tensor  # [(n k) t]
    precision: float  # of Θ

    @staticmethod
    def of(kernel: Tensor) -> PushforwardMetric:
        """The metric that is dual to the kernel [n n k k] between the points.

        >>> from natgrad.functionspace import ntk
        >>> model, x = torch.nn.Linear(1, 1), torch.tensor([[0.0], [1.0]])
        >>> φ_1 = torch.tensor([[0.0], [1.0]])  # ∂φ/∂weight at the points; that of the bias is 1
        >>> metric = PushforwardMetric.of(ntk(model, x))
        >>> [round(float(metric.inner(φ_1, X)), 5) + 0.0 for X in (φ_1, torch.ones(2, 1))]
        [1.0, 0.0]
        """
        if kernel.ndim != 4 or kernel.shape[0] != kernel.shape[1] or kernel.shape[2] != kernel.shape[3]:
            raise ValueError(
                f"the kernel has the shape {tuple(kernel.shape)}: give that of points with themselves, [n n k k], as "
                "ntk(model, x)"
            )
        check_finite(kernel, "the kernel")
        n, _, k, _ = kernel.shape
        values, vectors = torch.linalg.eigh(kernel.transpose(1, 2).reshape(n * k, n * k).double())
        precision = 8 * n * k * torch.finfo(kernel.dtype).eps
        seen = values > precision * values[-1]
        return PushforwardMetric(values[seen], vectors[:, seen], precision)

    @property
    def rank(self) -> int:
        """The dimension of the tangent space, as far as the points see it."""
        return self.values.numel()

    def flat(self, v: Tensor) -> Tensor:
        """Θ⁺v [n *out], for a tangent function with the values v at the points."""
        inside = self._coordinates(v)
        return (self.vectors @ (inside / self.values)).view(v.shape).to(v.dtype)

    def inner(self, v: Tensor, w: Tensor) -> Tensor:
        """vᵀΘ⁺w of two tangent functions."""
        return (self._coordinates(v) / self.values @ self._coordinates(w)).to(v.dtype)

    def _coordinates(self, v: Tensor) -> Tensor:
        if v.numel() != self.vectors.shape[0]:
            raise ValueError(f"v has the shape {tuple(v.shape)}: it needs {self.vectors.shape[0]} values at the points")
        check_finite(v, "the function")
        flat = v.detach().reshape(-1).double()
        inside = self.vectors.T @ flat
        outside = float((flat - self.vectors @ inside).norm() / flat.norm().clamp(min=torch.finfo(v.dtype).tiny))
        # What is cut off of Θ is of this size in J.
        if outside > 4 * math.sqrt(self.precision):
            raise ValueError(
                f"v is not tangent to the model: {100 * outside:.2g} % of it lie outside the span of ∂φ/∂θ, where the "
                "pushforward metric is not defined. Project it first, with TangentSpace.project or "
                "TangentKernel.project"
            )
        return inside
