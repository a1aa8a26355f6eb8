"""Second moments of the training gradients. They are not the Fisher metric, and are named so that nobody thinks so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from natgrad.families.base import over_terms
from natgrad.model import Inputs
from natgrad.output.hessian import PerExample
from natgrad.output.metric import OutputMetric


@final
@dataclass(frozen=True)
class Empirical(OutputMetric):
    """h = ∇ℓ ∇ℓᵀ at the training targets: F_emp = (1/N) Σ_n ∇J_n ∇J_nᵀ (002 (33)).

    It is the second moment of the training gradients, not the Fisher metric, and no approximation of a Hessian
    (Kunstner, Balles, Hennig 2019). ``loss(y, t)`` is called on one example at a time: its reduction over the batch
    does not matter; class weights need ``reduction="sum"``, as a weighted mean over one example loses its weight.
    ρ = ½⟨∇ℓ(y0), y − y0⟩².

    >>> metric = Empirical(torch.nn.functional.cross_entropy)
    >>> metric.root(torch.zeros(1, 2), torch.tensor([0]))
    tensor([[[-0.5000,  0.5000]]])
    """

    loss: Callable[..., Tensor]

    @property
    def needs_target(self) -> bool:
        return True

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        g = loss_gradient(self, self.loss, y, target)
        return g * per_example(g, u).view(-1, *[1] * (y.ndim - 1))

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return loss_gradient(self, self.loss, y, target).unsqueeze(0)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return 0.5 * per_example(loss_gradient(self, self.loss, y0, target), y - y0).square()


@final
@dataclass(frozen=True)
class GradientCovariance(OutputMetric):
    """C = (1/N) Σ_n (∇J_n − ∇J)(∇J_n − ∇J)ᵀ, the covariance of the training gradients (002 (34)).

    F_emp = C + ∇J ∇Jᵀ (002 (35)). Taking the mean off couples the examples: the roots are those of ``Empirical`` and
    the coupling is the centring matrix 1 − 11ᵀ/N. ``flat`` and ``divergence`` are of the whole batch: the divergence
    of example n is its share ½ u_n Σ_m C_nm u_m, u = ⟨∇ℓ, y − y0⟩, which can be negative; the sum is not.

    >>> metric = GradientCovariance(torch.nn.functional.cross_entropy)
    >>> metric.coupling(None, 2)
    tensor([[ 0.5000, -0.5000],
            [-0.5000,  0.5000]], dtype=torch.float64)
    """

    loss: Callable[..., Tensor]

    @property
    def needs_target(self) -> bool:
        return True

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        g = loss_gradient(self, self.loss, y, target)
        t = per_example(g, u)
        return g * (t - t.mean()).view(-1, *[1] * (y.ndim - 1))

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return loss_gradient(self, self.loss, y, target).unsqueeze(0)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        t = per_example(loss_gradient(self, self.loss, y0, target), y - y0)
        return 0.5 * t * (t - t.mean())

    def coupling(self, x: Inputs, n: int) -> Tensor | None:
        return torch.eye(n, dtype=torch.float64) - 1.0 / n  # the pullback casts to the dtype of the outputs


def loss_gradient(metric: OutputMetric, loss: Callable[..., Tensor], y: Tensor, target: Any) -> Tensor:
    """∇_y ℓ(y_n, t_n) [n *out] of every example."""
    metric.check_target(target)
    return PerExample(loss, target).gradient(y)


def per_example(g: Tensor, u: Tensor) -> Tensor:
    """⟨g_n, u_n⟩ [n]."""
    return over_terms(g * u)
