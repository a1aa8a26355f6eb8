"""Points in R^d and their squared distances, computed from differences and not as ‖x‖² + ‖y‖² − 2⟨x, y⟩."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.accelerate.devices import in_nested_forward_mode, in_transform
from natgrad.accelerate.temporaries import TEMPORARY, at_once

FeatureMap: TypeAlias = Callable[[Any], Tensor]


def points(x: Any, features: FeatureMap | None = None) -> Tensor:
    """The inputs [n *shape] as points [n d] in R^d, in float32 or float64; n numbers are n points on a line.

    ``features`` maps inputs that are not points (tokens, tuples, graphs) to such a tensor.

    >>> points(torch.zeros(5, 3, 8, 8)).shape
    torch.Size([5, 192])
    >>> points(torch.tensor([3, 1]), features=lambda token: torch.eye(4)[token]).shape
    torch.Size([2, 4])
    """
    given = x if features is None else features(x)
    if not isinstance(given, Tensor) or not given.is_floating_point():
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        where = "the inputs are" if features is None else "features= returned"
        raise TypeError(
            f"{where} {kind}, which are no points in R^d: a Sobolev kernel needs a floating-point tensor [n *shape]. "
            "Pass features=, a function that maps the inputs to one (an embedding of tokens, say)"
        )
    if given.ndim == 0:
        raise ValueError("a Sobolev kernel needs points [n *shape] with the examples on the first axis, got one number")
    flat = given.flatten(1) if given.ndim > 1 else given.unsqueeze(1)
    if flat.shape[1] == 0:
        raise ValueError(f"points of shape {tuple(given.shape)} have no coordinate: a kernel needs dimension d ≥ 1")
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def check_features(features: object) -> None:
    """Refuse features that are not a function."""
    if features is not None and not callable(features):
        raise TypeError(f"features={features!r}: give a function that maps the inputs to points [n *shape], or None")


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """u [n m] = Σ_i (x_ni − y_mi)² of points [n d] and [m d]; exactly 0 for equal points, differentiable twice.

    The default mode of ``torch.cdist`` multiplies matrices: in float32 it returns distances of 1e-3 between equal
    points. Its gradient cannot be differentiated.

    >>> squared_distances(torch.tensor([[1e4, 0.0]]), torch.tensor([[1e4, 0.0], [1e4, 2.0]]))
    tensor([[0., 4.]])
    """
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"points in R^{x.shape[1]} and in R^{y.shape[1]}: a kernel compares points of one dimension")
    if x is y and not torch.is_grad_enabled() and not in_transform():
        return pairwise(x)
    if in_nested_forward_mode():
        return (x[:, None] - y).square().sum(-1)
    dtype = torch.promote_types(x.dtype, y.dtype)
    u: Tensor = _SquaredDistances.apply(x.to(dtype), y.to(dtype))  # type: ignore[no-untyped-call]
    return u


def pairwise(x: Tensor) -> Tensor:
    """Squared distances [n n] within one set of points, each pair once. Much faster on a CPU; no derivatives."""
    n = x.shape[0]
    u = torch.diag_embed((x - x).sum(1))  # zero, except for points that are not finite
    row, column = torch.triu_indices(n, n, 1, device=x.device)
    u[row, column] = u[column, row] = functional.pdist(x).square()
    return u


@final
class _SquaredDistances(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        (g,) = grads
        needs_x, needs_y = ctx.needs_input_grad
        return _pulled(g, x, y) if needs_x else None, _pulled(g.T, y, x) if needs_y else None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        x, y = ctx.saved_tensors
        dx, dy = (torch.zeros_like(p) if t is None else t for p, t in zip((x, y), tangents, strict=True))
        chunks = zip(_rows(x, y), _rows(dx, y), strict=True)
        return torch.cat([2 * ((a[:, None] - y) * (da[:, None] - dy)).sum(2) for a, da in chunks])


def _pulled(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """2 Σ_m g_nm (x_n − y_m) [n d], a few rows at a time, in operations that can be differentiated again."""
    chunks = zip(_rows(g, y), _rows(x, y), strict=True)
    return torch.cat([2 * torch.einsum("nm,nmd->nd", h, a[:, None] - y) for h, a in chunks])


def _rows(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Chunks of the rows of x, such that a temporary [n *y.shape] has bounded size."""
    return x.split(at_once(y.numel(), TEMPORARY))
