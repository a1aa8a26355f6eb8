"""Metrics that are Hessians (of a convex function, a divergence, the training loss), and moments of loss gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import outside_inference_mode
from natgrad.errors import IncompatibleError
from natgrad.families.base import over_terms
from natgrad.linalg import symmetric_root
from natgrad.log import OnceLogger
from natgrad.model import Inputs, map_tensors
from natgrad.output.metric import OutputMetric, Reduction, Source, one_hot_columns, weight

_FLAT = (
    "the Hessian at the outputs is exactly zero in all examples of a batch, so the damping alone decides the step. "
    "A kink, as that of |y − y0|, has no curvature, nor has (y − y0)⁴ at y0: use (y − y0)² or √(1 + (y − y0)²), "
    "Euclidean() or a Fisher metric"
)
_once = OnceLogger()

Scalar = Callable[..., Tensor]
Field = Callable[[Tensor], Tensor]  # y [n *out] ↦ one number for each example [n]


def per_example(function: Scalar, argument: Any = None) -> Field:
    """y [n *out] ↦ f(y_n, t_n) [n], by ``vmap`` over batches of one, whatever reduction the function has."""

    def of_one(a: Tensor, t: Any = None) -> Tensor:
        return (function(a[None]) if t is None else function(a[None], map_tensors(t, lambda s: s[None]))).sum()

    return torch.func.vmap(of_one) if argument is None else lambda y: torch.func.vmap(of_one)(y, argument)


@outside_inference_mode()
def gradient(f: Field, y: Tensor) -> Tensor:
    """∇f(y_n) [n *out]."""
    grad: Tensor = torch.func.grad(lambda a: f(a).sum())(y)
    return grad


@outside_inference_mode()
def hessian_product(f: Field, y: Tensor, u: Tensor) -> Tensor:
    """∇²f(y_n) u_n = ∇⟨∇f(y_n), u_n⟩ [n *out], differentiable in y."""
    product: Tensor = torch.func.grad(lambda a: (gradient(f, a) * u).sum())(y)
    return product


def hessian_root(f: Field, y: Tensor, failure: str) -> Tensor:
    """The symmetric root (∇²f)^½ as columns s [d n *out]; column d belongs to output d in every example."""
    d = y[0].numel()
    columns: Tensor = torch.func.vmap(lambda e: hessian_product(f, y, e))(one_hot_columns(y))
    hessian = columns.reshape(d, y.shape[0], d).transpose(0, 1)  # [n d e]
    root = symmetric_root(hessian, failure)
    if not bool(hessian.any()):  # the root has waited for the device
        _once.log_once(logging.WARNING, f"{failure.partition(':')[0]}: {_FLAT}")
    return root.transpose(0, 1).reshape(-1, *y.shape)


def bregman_divergence(f: Field, y: Tensor, y0: Tensor) -> Tensor:
    """f(y) − f(y0) − ⟨∇f(y0), y − y0⟩ [n], with the gradient at the second argument."""
    return f(y) - f(y0) - over_terms(gradient(f, y0) * (y - y0))


@final
@dataclass(frozen=True)
class Bregman(OutputMetric):
    """The metric of a convex function of the outputs.

    Args:
        phi: φ, a convex function of outputs [n *out] with n = 1. It is called under ``vmap``, one example at a time, so
            any reduction gives the same metric. If φ is not convex, the metric is not positive and has no root.

    Method:
        h = ∇²φ(y), the Hessian at y = y0 of D_φ(y, y0) = φ(y) − φ(y0) − ⟨∇φ(y0), y − y0⟩.

    Example:
        >>> metric = Bregman(lambda y: torch.logsumexp(y, -1))
        >>> metric.flat(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])
    """

    phi: Scalar

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return hessian_product(per_example(self.phi), y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return hessian_root(per_example(self.phi), y, "Bregman(phi): phi is not convex")

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return bregman_divergence(per_example(self.phi), y, y0)


@final
@dataclass(frozen=True)
class Divergence(OutputMetric):
    """The metric of any smooth measure of how different two outputs are.

    Args:
        rho: ρ(y, y0), which takes two batches [n *out] with n = 1, under ``vmap``. It must have its minimum at y = y0.
            If it is flatter than quadratic there, such as (y − y0)⁴, or has a kink, such as |y − y0|, the metric is 0
            and only the damping is left; this is logged once.

    Method:
        h = ∂²ρ(y, y0)/∂y² at y = y0 (Grosse 2021).

    Example:
        >>> metric = Divergence(lambda y, y0: ((y - y0) ** 2).sum())
        >>> metric.flat(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor([[2., 0.]])
    """

    rho: Scalar

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        # y0 = y is not detached, because geodesics differentiate h(y).
        return hessian_product(per_example(self.rho, y), y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return hessian_root(per_example(self.rho, y.detach()), y, "Divergence(rho): rho has no minimum at y = y0")

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return per_example(self.rho, y0)(y)


class LossMetric(OutputMetric):
    """A metric made from the training loss ``loss(y, t)`` at the training targets."""

    loss: Scalar | None

    @property
    def needs_target(self) -> bool:
        return True

    def of_outputs(self, target: Any) -> Field:
        """y ↦ ℓ(y_n, t_n) [n]."""
        self.check_target(target)
        assert self.loss is not None
        return per_example(self.loss, target)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        """∇ℓ, one column."""
        return gradient(self.of_outputs(target), y).unsqueeze(0)


@final
@dataclass(frozen=True)
class LossHessian(LossMetric):
    """The Hessian of a convex training loss at the outputs, for generalised Gauss–Newton steps.

    Args:
        loss: ``loss(y, t)``, any torch loss. It is called on one example at a time, so its reduction over the batch
            does not matter. But a weighted mean over one example loses its weight: class weights need
            ``reduction="sum"``.

    Method:
        h = ∂²ℓ(y, t)/∂y² (Martens 2020). ρ is the Bregman divergence of ℓ(·, t).

    Example:
        >>> metric = LossHessian(torch.nn.functional.mse_loss)
        >>> metric.flat(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.ones(1, 2))
        tensor([[1., 0.]])
    """

    loss: Scalar

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return hessian_product(self.of_outputs(target), y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return hessian_root(self.of_outputs(target), y, "LossHessian(loss): the loss is not convex")

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return bregman_divergence(self.of_outputs(target), y, y0)


# Second moments of the training gradients. They are not the Fisher metric, and their names do not say Fisher.


@final
@dataclass(frozen=True)
class Empirical(LossMetric):
    """The second moment of the training gradients, often called empirical Fisher.

    It is not the Fisher metric and does not approximate a Hessian (Kunstner, Balles and Hennig 2019).

    Args:
        loss: ``loss(y, t)``, called on one example at a time, so its reduction over the batch does not matter. Class
            weights need ``reduction="sum"``, because a weighted mean over one example loses its weight. By default, the
            cotangents of the loss that the training loop calls backward on.
        reduction: Without a loss: what the training loss is over the batch. Cotangents of a "mean" are multiplied by
            the number N of examples, those of a "sum" are taken as they are, so that G is the same for both.

    Method:
        h = ∇ℓ ∇ℓᵀ at the training targets: F_emp = (1/N) Σ_n ∇J_n ∇J_nᵀ (often called empirical Fisher).

        The divergence is ρ = ½⟨∇ℓ(y0), y − y0⟩².

        In gradient accumulation every backward pass is taken for the mean over its own examples: a loss that is divided
        by k makes G k² times smaller, as any factor c of the loss makes it c² times as large. Terms of an example
        (tokens) are what the loss makes of them.

        Without a loss, an optimizer with ``Kronecker`` needs no targets and no backward pass of its own. The cotangents
        come through the batch statistics of a normalisation, and with a ``GradScaler`` they have its scale. Parameters
        that no layer rule covers have the second moment of their gradient, as with ``BatchGradient``.

    Example:
        >>> metric = Empirical(torch.nn.functional.cross_entropy)
        >>> metric.root(torch.zeros(1, 2), torch.tensor([0]))
        tensor([[[-0.5000,  0.5000]]])
    """

    loss: Scalar | None = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        weight(self.reduction, 1)
        if self.loss is not None and self.reduction != "mean":
            raise ValueError("Empirical(loss) calls the loss on single examples, without a reduction: leave it out")

    @property
    def source(self) -> Source:
        return "backward" if self.loss is None else "outputs"

    @property
    def needs_target(self) -> bool:
        return self.loss is not None

    def of_outputs(self, target: Any) -> Field:
        if self.loss is None:
            raise IncompatibleError(
                "Empirical() is made of the cotangents of a training loop: it works in optimizers, with Kronecker and "
                "rules that need no divergence (Fixed, KLClip). Give it the loss, Empirical(loss), to have it anywhere"
            )
        return super().of_outputs(target)

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        g = gradient(self.of_outputs(target), y)
        return g * over_terms(g * u).view(-1, *[1] * (y.ndim - 1))

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return 0.5 * over_terms(gradient(self.of_outputs(target), y0) * (y - y0)).square()


@final
@dataclass(frozen=True)
class GradientCovariance(LossMetric):
    """The covariance of the training gradients: their second moment without the mean.

    Args:
        loss: ``loss(y, t)``, called on one example at a time; class weights need ``reduction="sum"``.

    Method:
        C = (1/N) Σ_n (∇J_n − ∇J)(∇J_n − ∇J)ᵀ, normalised by 1/N. F_emp = C + ∇J ∇Jᵀ.

        Subtracting the mean couples the examples: the roots are those of ``Empirical``, and the coupling is the
        centring matrix 1 − 11ᵀ/N. ``flat`` and ``divergence`` use the whole batch. The divergence of example n is its
        share ½ u_n Σ_m C_nm u_m, u = ⟨∇ℓ, y − y0⟩. A share may be negative; the sum is not.

    Example:
        >>> metric = GradientCovariance(torch.nn.functional.cross_entropy)
        >>> metric.coupling(None, 2)
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]], dtype=torch.float64)
    """

    loss: Scalar

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        g = gradient(self.of_outputs(target), y)
        t = over_terms(g * u)
        return g * (t - t.mean()).view(-1, *[1] * (y.ndim - 1))

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        t = over_terms(gradient(self.of_outputs(target), y0) * (y - y0))
        return 0.5 * t * (t - t.mean())

    def coupling(self, x: Inputs, n: int) -> Tensor | None:
        return torch.eye(n, dtype=torch.float64) - 1.0 / n  # the pullback casts it to the dtype of the outputs
