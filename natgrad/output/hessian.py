"""Metrics that are Hessians (of a convex function, a divergence, the training loss), and moments of loss gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from natgrad.families.base import over_terms
from natgrad.linalg import symmetric_root
from natgrad.model import Inputs, map_tensors
from natgrad.output.metric import OutputMetric

Scalar = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class Bregman(OutputMetric):
    """h = ∇²φ(y), the Hessian at y = y0 of D_φ(y, y0) = φ(y) − φ(y0) − ⟨∇φ(y0), y − y0⟩.

    φ takes outputs [n *out] with n = 1. It is called under ``vmap``, one example at a time, so any reduction gives the
    same metric. φ must be convex; otherwise the metric is not positive and has no root.

    >>> metric = Bregman(lambda y: torch.logsumexp(y, -1))
    >>> metric.flat(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([[ 0.2500, -0.2500]])
    """

    phi: Scalar

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return hessian_product(self._of(), y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return hessian_root(self._of(), y, "Bregman(phi): phi is not convex")

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return bregman_divergence(self._of(), y, y0)

    def _of(self) -> PerExample:
        return PerExample(self.phi)


@final
@dataclass(frozen=True)
class Divergence(OutputMetric):
    """h = ∂²ρ(y, y0)/∂y² at y = y0, for any smooth dissimilarity ρ(y, y0) (Grosse 2021).

    ρ takes two batches [n *out] with n = 1, under ``vmap``. It must have its minimum at y = y0. If it is flatter than
    quadratic there, such as (y − y0)⁴, then h = 0.

    >>> metric = Divergence(lambda y, y0: ((y - y0) ** 2).sum())
    >>> metric.flat(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([[2., 0.]])
    """

    rho: Scalar

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        # y0 = y is not detached, because geodesics differentiate h(y).
        return hessian_product(PerExample(self.rho, y), y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return hessian_root(PerExample(self.rho, y.detach()), y, "Divergence(rho): rho has no minimum at y = y0")

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return PerExample(self.rho, y0)(y)


@final
@dataclass(frozen=True)
class LossHessian(OutputMetric):
    """h = ∂²ℓ(y, t)/∂y²: the generalised Gauss–Newton matrix of a convex training loss (Martens 2020).

    ``loss(y, t)`` is any torch loss. It is called on one example at a time, so its reduction over the batch does not
    matter. But a weighted mean over one example loses its weight: class weights need ``reduction="sum"``. ρ is the
    Bregman divergence of ℓ(·, t).

    >>> metric = LossHessian(torch.nn.functional.mse_loss)
    >>> metric.flat(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.ones(1, 2))
    tensor([[1., 0.]])
    """

    loss: Scalar

    @property
    def needs_target(self) -> bool:
        return True

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        self.check_target(target)
        return hessian_product(PerExample(self.loss, target), y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        self.check_target(target)
        return hessian_root(PerExample(self.loss, target), y, "LossHessian(loss): the loss is not convex")

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        self.check_target(target)
        return bregman_divergence(PerExample(self.loss, target), y, y0)


@final
@dataclass(frozen=True)
class PerExample:
    """y [n *out] ↦ f(y_n, t_n) [n], by ``vmap`` over batches of one, whatever reduction f has."""

    function: Scalar
    argument: Any = None

    def __call__(self, y: Tensor) -> Tensor:
        if self.argument is None:
            values: Tensor = torch.func.vmap(lambda a: self.function(a[None]).sum())(y)
        else:
            values = torch.func.vmap(lambda a, t: self.function(a[None], map_tensors(t, _unsqueeze)).sum())(
                y, self.argument
            )
        return values

    def gradient(self, y: Tensor) -> Tensor:
        """∇f(y_n) [n *out]."""
        grad: Tensor = torch.func.grad(lambda a: self(a).sum())(y)
        return grad


def _unsqueeze(t: Tensor) -> Tensor:
    """A batch of one."""
    return t[None]


def hessian_product(f: PerExample, y: Tensor, u: Tensor) -> Tensor:
    """∇²f(y_n) u_n = ∇⟨∇f(y_n), u_n⟩ [n *out], differentiable in y."""
    product: Tensor = torch.func.grad(lambda a: (f.gradient(a) * u).sum())(y)
    return product


def hessian(f: PerExample, y: Tensor) -> Tensor:
    """∇²f(y_n) [n d e], with the outputs of an example flattened."""
    d = y[0].numel()
    eye = torch.eye(d, dtype=y.dtype, device=y.device).view(d, 1, *y.shape[1:]).expand(d, *y.shape)
    columns: Tensor = torch.func.vmap(lambda e: hessian_product(f, y, e))(eye)
    return columns.reshape(d, y.shape[0], d).transpose(0, 1)


def hessian_root(f: PerExample, y: Tensor, failure: str) -> Tensor:
    """The symmetric root (∇²f)^½ as columns s [d n *out]; column d belongs to output d in every example."""
    return symmetric_root(hessian(f, y), failure).transpose(0, 1).reshape(-1, *y.shape)


def bregman_divergence(f: PerExample, y: Tensor, y0: Tensor) -> Tensor:
    """f(y) − f(y0) − ⟨∇f(y0), y − y0⟩ [n], with the gradient at the second argument."""
    linear = over_terms(f.gradient(y0) * (y - y0))
    return f(y) - f(y0) - linear


# Second moments of the training gradients. They are not the Fisher metric, and their names do not say Fisher.


@final
@dataclass(frozen=True)
class Empirical(OutputMetric):
    """h = ∇ℓ ∇ℓᵀ at the training targets: F_emp = (1/N) Σ_n ∇J_n ∇J_nᵀ (often called empirical Fisher).

    It is the second moment of the training gradients. It is not the Fisher metric and does not approximate a Hessian
    (Kunstner, Balles and Hennig 2019). ``loss(y, t)`` is called on one example at a time, so its reduction over the
    batch does not matter; class weights need ``reduction="sum"``, because a weighted mean over one example loses its
    weight. ρ = ½⟨∇ℓ(y0), y − y0⟩².

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
    """C = (1/N) Σ_n (∇J_n − ∇J)(∇J_n − ∇J)ᵀ, the covariance of the training gradients.

    F_emp = C + ∇J ∇Jᵀ, with the covariance normalised by 1/N. Subtracting the mean couples the examples: the roots are
    those of ``Empirical``, and the coupling is the centring matrix 1 − 11ᵀ/N. ``flat`` and ``divergence`` use the whole
    batch. The divergence of example n is its share ½ u_n Σ_m C_nm u_m, u = ⟨∇ℓ, y − y0⟩. A share may be negative; the
    sum is not.

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
        return torch.eye(n, dtype=torch.float64) - 1.0 / n  # the pullback casts it to the dtype of the outputs


def loss_gradient(metric: OutputMetric, loss: Callable[..., Tensor], y: Tensor, target: Any) -> Tensor:
    """∇_y ℓ(y_n, t_n) [n *out] of every example."""
    metric.check_target(target)
    return PerExample(loss, target).gradient(y)


def per_example(g: Tensor, u: Tensor) -> Tensor:
    """⟨g_n, u_n⟩ [n]."""
    return over_terms(g * u)
