"""The metric of wave functions: functions that differ by a constant factor are the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from natgrad.families.base import over_terms
from natgrad.model import Inputs
from natgrad.output.metric import OutputMetric, one_hot_columns


@final
@dataclass(frozen=True)
class FubiniStudy(OutputMetric):
    """The metric of wave functions, for stochastic reconfiguration.

    The outputs y [n *out] of the model are log ψ(x): real, or the pair of log |ψ| and the phase, which
    ``output=torch.view_as_real`` makes of a complex log ψ [n]. Its natural gradient of the energy is stochastic
    reconfiguration (Sorella 1998), which ``StochasticReconfiguration`` sets up.

    Method:
        G = Re(E[Ō O] − E[Ō] E[O]), O = ∂ log ψ/∂θ, at inputs x that are drawn from |ψ(x)|² (Provost and Vallee 1980).

        The metric is the covariance of ∂y/∂θ, summed over the outputs, so that a factor in front of ψ, and its phase,
        do not count: the roots are those of ``Euclidean``, and the coupling is the centring matrix 1 − 11ᵀ/N.

        The divergence of example n is its share ½⟨u_n, u_n − E[u]⟩, u = y − y0. A share may be negative; the sum is
        not. Kronecker factors do not approximate it: they are centred separately, and the cotangents of a linear last
        layer are constant, so that S is zero.

    Example:
        >>> FubiniStudy().flat(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
        tensor([[-1.],
                [ 1.]])
    """

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return u - u.mean(0)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return one_hot_columns(y)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        u = y - y0
        return 0.5 * over_terms(u * (u - u.mean(0)))

    def coupling(self, x: Inputs, n: int) -> Tensor | None:
        return torch.eye(n, dtype=torch.float64) - 1.0 / n  # the pullback casts it to the dtype of the outputs
