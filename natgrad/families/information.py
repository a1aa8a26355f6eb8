"""The Fisher information of an exponential family at a point: a linear map between its two charts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import in_transform
from natgrad.show import brief

Linear: TypeAlias = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True, eq=False)
class Information:
    """The Fisher information of an exponential family at a point, as an operator.

    Families make it (``family.fisher(eta)``); vectors have the shape of a point, with any batch axes in front.

    Args:
        point: Where the information is taken, in the shape of a point of its chart.
        axes: The trailing axes of a point: 1, or 0 for a family with one parameter.
        flat: The map v ↦ F v.
        sharp: The map w ↦ F⁻¹ w, or the pseudo-inverse where F is singular.
        divides: Whether ``sharp`` divides by numbers that may round to 0. It does not where it is made of products with
            the point itself.

    Method:
        F [*batch], symmetric and positive on the tangent space of a chart (Amari 1998).

        In the natural chart F_η = ∇²log Z = ∂ξ/∂η: ``flat`` maps a change of η to the change of ξ, and ``sharp`` maps a
        change of ξ back. In the mean chart F_ξ = F_η⁻¹, and the two maps trade places (``inverse``).

    Example:
        >>> from natgrad.families import Poisson
        >>> F = Poisson().fisher(torch.tensor([1.0, 2.0]).log())  # the variance is the rate
        >>> F.flat(torch.ones(2)), F.sharp(torch.ones(2))
        (tensor([1., 2.]), tensor([1.0000, 0.5000]))
    """

    point: Tensor
    axes: int
    flat: Linear
    sharp: Linear
    divides: bool = True

    __repr__ = brief

    @staticmethod
    def by_autodiff(point: Tensor, axes: int, across: Linear, back: Linear) -> Information:
        """F v = D across(x) v and F⁻¹ w = D back(across(x)) w, for the maps between the charts."""
        image = across(point)
        return Information(point, axes, lambda v: _derivative(across, point, v), lambda w: _derivative(back, image, w))

    @staticmethod
    def diagonal(a: Tensor, axes: int) -> Information:
        """diag(a): of independent numbers with variances a, of the shape of a point."""
        return Information(a, axes, lambda v: a * v, lambda w: w / a)

    def dense(self) -> Tensor:
        """F as matrices [*batch p q], column by column; [*batch 1 1] for a one-parameter family."""
        if self.axes == 0:
            return self.flat(torch.ones_like(self.point))[..., None, None]
        p = self.point.shape[-1]
        eye = torch.eye(p, dtype=self.point.dtype, device=self.point.device)
        basis = eye.view(p, *[1] * (self.point.ndim - 1), p).expand(p, *self.point.shape)
        return self.flat(basis).movedim(0, -1)

    def inverse(self) -> Information:
        """F⁻¹, the information in the other chart."""
        return replace(self, flat=self.sharp, sharp=self.flat)


def _derivative(f: Linear, x: Tensor, v: Tensor) -> Tensor:
    """Df(x) v. The derivative is symmetric, so that reverse mode gives it, which is ten times cheaper to set up."""
    x, v = torch.broadcast_tensors(x, v)
    if in_transform():
        pulled: tuple[Tensor] = torch.func.vjp(f, x)[1](v)
        return pulled[0]
    graph = torch.is_grad_enabled() and (x.requires_grad or v.requires_grad)
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        (product,) = torch.autograd.grad(f(leaf), leaf, v, create_graph=graph)
    return product
