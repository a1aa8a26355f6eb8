"""How a minimum moves with the data: the implicit function theorem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.errors import SingularMetricError
from natgrad.fit.losses import RobustLoss
from natgrad.fit.residual_function import ResidualFunction
from natgrad.linalg import eigvalsh


class _FirstOrder(torch.autograd.Function):
    """The identity, with a gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a.view_as(a)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # a goes in, too: the gradient may have no graph of its own, and would count as a constant
        return _Refused.apply(gradient, *ctx.saved_tensors) if torch.is_grad_enabled() else gradient  # type: ignore[no-untyped-call]


class _Refused(torch.autograd.Function):
    """The identity of a gradient, which raises where it is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, a: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise RuntimeError(
            "result.x of least_squares has first derivatives with respect to args, and no second ones: its gradient "
            "holds the Hessian at the solution fixed; detach the gradient, or take differences of it"
        )


def differentiable(
    residuals: ResidualFunction, x: Tensor, args: tuple[Any, ...], loss: RobustLoss, free: Tensor
) -> Tensor:
    """x [b n], as a function of the tensors in ``args``: from ∇L(x, a) = 0 follows dx/da = −H⁻¹ ∂∇L/∂a.

    H is the Hessian of the cost, not its Gauss–Newton part. Unknowns that are not ``free`` [b n] stay at their bound.
    H and x are constants here, so that second derivatives would be wrong, and are refused.
    """

    def cost(x: Tensor, *args: Any) -> Tensor:  # twice that: H and ∇L are, too
        return loss.squares(residuals.one(x, *args))

    if residuals.batch:
        H = torch.vmap(torch.func.hessian(cost))(x, *residuals.args)
    else:
        H = torch.func.hessian(cost)(x.squeeze(0), *residuals.args).unsqueeze(0)
    both = free.unsqueeze(-1) & free.unsqueeze(-2)
    H = torch.where(both, H.detach(), torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
    scale = H.diagonal(dim1=-2, dim2=-1).abs().clamp(min=torch.finfo(x.dtype).tiny).rsqrt()
    H = scale.unsqueeze(-1) * H * scale.unsqueeze(-2)
    values = eigvalsh(H, "the Hessian at the minimum")
    weak = values[:, 0] <= x.shape[-1] * torch.finfo(x.dtype).eps * values[:, -1]
    if bool(weak.any()):
        which = f" of fit {int(weak.nonzero()[0])}" if residuals.batch else ""
        raise SingularMetricError(
            f"the Hessian{which} at the minimum is singular or indefinite, so that x has no derivative with respect "
            "to args: detach them, or fix the unknowns that the residuals do not determine"
        )
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        args = tuple(_once(a) for a in args)
        L = torch.vmap(cost)(leaf, *args).sum() if residuals.batch else cost(leaf.squeeze(0), *args)
        (g,) = torch.autograd.grad(L, leaf, create_graph=True)
    g = torch.where(free, g, 0.0)
    moved = scale * torch.linalg.solve(H, (scale * (g - g.detach())).unsqueeze(-1)).squeeze(-1)
    return x.detach() - moved


def _once(a: Any) -> Any:
    return _FirstOrder.apply(a) if isinstance(a, Tensor) and a.requires_grad else a  # type: ignore[no-untyped-call]
