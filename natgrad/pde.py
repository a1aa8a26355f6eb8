"""Differential operators of networks: value, gradient and Laplacian at many points, in one forward pass.

``derivatives(model, x)`` runs the model once, on ``natgrad.jet.Jet``s, which carry the value, the d first derivatives
and the Laplacian through every operation (forward Laplacian; Li et al. 2023). A Laplacian costs about as much as a
Jacobian, instead of d backward passes through a backward pass. What comes out is an ordinary function of the
parameters: differentiate it with autograd or ``torch.func``, return it from the ``forward`` of a module, pull metrics
back through it. Linear layers see value, gradient and Laplacian as positions that share the weight, so that K-FAC is
that of Dangel et al. (2024).

    u = ng.pde.derivatives(net, x)          # x [n d], net: [n d] → [n o]
    u.value, u.gradient, u.laplacian        # [n o], [n o d], [n o]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from natgrad.accelerate.devices import can_read
from natgrad.errors import BatchStatisticsError, NoDerivativeError
from natgrad.isolation import unfused, untouched
from natgrad.jet import Directions, Jet
from natgrad.linalg import is_number
from natgrad.model import eager, library_pass, mixing
from natgrad.show import brief


@final
@dataclass(frozen=True)
class Derivatives:
    """A function and its derivatives at some points, for every output by itself.

    Attributes:
        value: u [*n *out] at points x [*n d].
        gradient: ∇u [*n *out d].
        second: The second derivatives summed for the Laplacian [*n *out]; None with order 1. Read ``laplacian``.
    """

    value: Tensor
    gradient: Tensor
    second: Tensor | None

    __repr__ = brief

    @property
    def laplacian(self) -> Tensor:
        """Δu, or Σ_ij D_ij ∂_ij u, [*n *out]."""
        if self.second is None:
            raise ValueError("derivatives(…, order=1) has no Laplacian: leave out order=1")
        return self.second

    def d(self, i: int) -> Tensor:
        """∂u/∂x_i [*n *out]."""
        return self.gradient[..., i]

    @property
    def divergence(self) -> Tensor:
        """Σ_i ∂u_i/∂x_i [*n] of a vector field with d outputs on the last axis."""
        d, outputs = self.gradient.shape[-1], self.value.shape[-1] if self.value.ndim else 0
        if outputs != d or self.value.ndim < 1:
            raise ValueError(
                f"a divergence needs as many outputs as coordinates: the model returns {outputs} for points of {d} "
                "coordinates. Take the outputs and coordinates that belong together: u.gradient[..., i, j] is ∂u_i/∂x_j"
            )
        return self.gradient.diagonal(dim1=-2, dim2=-1).sum(-1)


def derivatives(
    model: nn.Module | Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    order: int = 2,
    space: slice | Sequence[int] | None = None,
    diffusion: Tensor | None = None,
) -> Derivatives:
    """Value, gradient and Laplacian of a model at some points, in one pass.

    Args:
        model: A module or a function x ↦ u(x) of smooth operations, which treats every point by itself.
        x: The points [*n d].
        order: 2, or 1 for no Laplacian.
        space: The coordinates that the Laplacian runs over, such as ``slice(1, None)`` where the first is time; the
            gradient has all.
        diffusion: D, so that the Laplacian is Σ_ij D_ij ∂_ij u over these coordinates: its diagonal [s], which may have
            negative entries, or a symmetric matrix [s s].

    Returns:
        The ``Derivatives``.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> u = derivatives(lambda x: x[:, 0] * x[:, 1].square(), x)
        >>> u.value, u.laplacian
        (tensor([ 4., 48.]), tensor([2., 6.]))
        >>> u.gradient
        tensor([[ 4.,  4.],
                [16., 24.]])

        The heat equation u_t = κ Δu of one output, with time as the first coordinate:

        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> u = derivatives(net, torch.rand(5, 3), space=slice(1, None))
        >>> (u.d(0) - 0.25 * u.laplacian).shape
        torch.Size([5, 1])
    """
    if order not in (1, 2):
        raise ValueError(f"order= is 1 (gradient) or 2 (gradient and Laplacian), not {order!r}")
    _check_points(x)
    d = x.shape[-1]
    weights = None if order == 1 else _weights(d, space, diffusion, x)
    jet = _propagated(model, x, torch.eye(d, dtype=x.dtype, device=x.device), weights, second=order == 2)
    value, first, _ = jet.components()
    return Derivatives(value, first.movedim(0, -1), jet.laplacian if order == 2 else None)


def gradient(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a model with respect to its inputs, at some points.

    Args:
        model: A module or function of the points.
        x: The points [*n d].

    Returns:
        ∇u [*n *out d].

    Example:
        >>> gradient(lambda x: x.square().sum(-1), torch.tensor([[1.0, 2.0]]))
        tensor([[2., 4.]])
    """
    return derivatives(model, x, order=1).gradient


def divergence(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The divergence of a vector field at some points.

    Args:
        model: A module or function [*n d] → [*n d].
        x: The points [*n d].

    Returns:
        div u = Σ_i ∂u_i/∂x_i [*n].

    Example:
        >>> divergence(lambda x: x.square(), torch.tensor([[1.0, 2.0]]))
        tensor([6.])
    """
    return derivatives(model, x, order=1).divergence


def laplacian(
    model: nn.Module | Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    space: slice | Sequence[int] | None = None,
    diffusion: Tensor | None = None,
) -> Tensor:
    """The Laplacian of a model with respect to its inputs, at some points.

    Args:
        model: A module or function of the points.
        x: The points [*n d].
        space: The coordinates that it runs over; all by default.
        diffusion: D of Σ_ij D_ij ∂_ij u: its diagonal [s] or a symmetric matrix [s s]; the identity by default.

    Returns:
        Δu [*n *out], or Σ_ij D_ij ∂_ij u.

    Example:
        >>> laplacian(lambda x: x.square().sum(-1), torch.ones(2, 10))
        tensor([20., 20.])
    """
    return derivatives(model, x, space=space, diffusion=diffusion).laplacian


def partial(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor, i: int | tuple[int, int]) -> Tensor:
    """One first or second partial derivative of a model, at some points.

    Only these directions are propagated.

    Args:
        model: A module or function of the points.
        x: The points [*n d].
        i: One coordinate for ∂u/∂x_i, or a pair (i, j) for ∂²u/∂x_i∂x_j.

    Returns:
        The derivative [*n *out].

    Example:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> partial(lambda x: x[:, 0] * x[:, 1] ** 3, x, 1), partial(lambda x: x[:, 0] * x[:, 1] ** 3, x, (0, 1))
        (tensor([12.]), tensor([12.]))
    """
    _check_points(x)
    d = x.shape[-1]
    axes = _axes(d, i)
    if is_number(i, whole=True):
        return _propagated(model, x, _unit_vectors(axes, x), None, second=False).gradient[0]
    if len(axes) != 2:
        raise ValueError(f"i= is one coordinate, or a pair of them for a second derivative, not {i!r}")
    if axes[0] == axes[1]:
        return _propagated(model, x, _unit_vectors(axes[:1], x), None, second=True).laplacian
    mixed = torch.eye(2, dtype=x.dtype, device=x.device).flip(0) / 2
    return _propagated(model, x, _unit_vectors(axes, x), mixed, second=True).laplacian


def _propagated(
    model: nn.Module | Callable[[Tensor], Tensor], x: Tensor, directions: Tensor, weights: Tensor | None, second: bool
) -> Jet:
    """The jet of the model at points x [*n d] along directions [m d]."""
    if isinstance(model, nn.Module) and (names := mixing(model)):
        raise BatchStatisticsError(
            f"{', '.join(names)}: in training mode the value at one point depends on the others or on chance, so it "
            "has no derivatives by the point. Call model.eval()"
        )
    of = Directions(len(directions), second, weights, torch.is_grad_enabled())
    out = _passed(model, x, directions, of)
    if not isinstance(out, Jet):
        kind = f"a {type(out).__name__}" if not isinstance(out, Tensor) else "a tensor that does not depend on x"
        raise NoDerivativeError(
            f"the model returned {kind}: it must return one tensor, computed from the points by torch operations. "
            "Wrap it in a function that picks the output"
        )
    out.check_current("returns")
    _check_apart(model, x, out.value)
    whole = out.whole()  # joined, so that the last bias is in the graph of every derivative
    if can_read(whole) and not bool(whole[1:].detach().sum().isfinite()):
        _look_for_singular(model, x, directions, Jet(whole.detach(), of))
    return Jet(whole, of)


def _look_for_singular(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor, directions: Tensor, out: Jet) -> None:
    """Raise by the name of the operation, in a second pass, where the model has a value and no derivatives.

    Numbers that overflow raise nothing: a long trial step may have led there, and its loss, which is NaN, refuses it.
    """
    value, *derivatives = out.channels.isfinite()
    lost = (value & ~torch.stack(derivatives).all(0)).nonzero()
    if not len(lost):
        return
    at = lost[0].tolist()[: x.ndim - 1]
    suspect = f"x{at} = {[float(f'{number:.6g}') for number in x[tuple(at)].tolist()]}"
    isolated = untouched(model) if isinstance(model, nn.Module) else nullcontext()
    with torch.no_grad(), library_pass(), isolated:
        _passed(model, x, directions, replace(out.of, graph=False, suspect=suspect))


def _passed(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor, directions: Tensor, of: Directions) -> Any:
    """What the model returns for a jet of the points."""
    first = directions.view(of.m, *[1] * (x.ndim - 1), x.shape[-1]).expand(of.m, *x.shape)
    argument: Any = Jet(torch.cat([x.unsqueeze(0), first]), of)
    with unfused(model, x.device), eager(model) if isinstance(model, nn.Module) else nullcontext():
        return model(argument)


_checked: WeakSet[Any] = WeakSet()  # modules, and the code of functions


def _check_apart(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor, value: Tensor) -> None:
    """Compare the value at the last point with that beside other points, when a module or a function is met first.

    As many others, halfway to the last one: the model may hold numbers that belong to the points.
    """
    identity = model if isinstance(model, nn.Module) else getattr(model, "__code__", model)
    if identity in _checked or x.ndim < 2 or len(x) < 2:
        return
    others = torch.cat([(x[:-1] + x[-1:]) / 2, x[-1:]]).detach()
    isolated = untouched(model) if isinstance(model, nn.Module) else nullcontext()
    try:
        with torch.no_grad(), library_pass(), isolated, eager(model) if isinstance(model, nn.Module) else nullcontext():
            beside = model(others)
        gap, size = float((beside[-1] - value[-1]).detach().abs().max()), float(value.detach().abs().max())
    except RuntimeError:
        return  # inside a transform of torch.func
    if gap > torch.finfo(x.dtype).eps ** 0.5 * size:
        raise BatchStatisticsError(
            f"{getattr(model, '__name__', type(model).__name__)}: the value at a point changes by {gap:.2g} if the "
            "others move, so it depends on them. Derivatives by the points need a model that treats every point by "
            "itself"
        )
    with suppress(TypeError):  # an object that has no weak references is checked every time
        _checked.add(identity)


def _check_points(x: Any) -> None:
    if isinstance(x, Jet):
        raise NoDerivativeError(
            "a model that takes derivatives itself would need third derivatives, which are not propagated: "
            "differentiate the result of natgrad.pde with torch.func.jvp or torch.autograd.grad instead, or make the "
            "inner derivative an output of the network, and its equation a residual"
        )
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"points x [*n d] must be a real floating-point tensor, not {kind}: write x.double()")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"points x of shape {tuple(x.shape)} have no coordinates: they lie on the last axis, [*n d]")


def _axes(d: int, which: int | slice | Sequence[int]) -> list[int]:
    """The numbers of coordinates, counted from the front."""
    if is_number(which):
        listed: list[Any] = [which]
    else:
        listed = list(range(d))[which] if isinstance(which, slice) else list(which)  # type: ignore[arg-type]
    wrong = [i for i in listed if not is_number(i, whole=True) or not -d <= i < d]
    if wrong or not listed:
        raise ValueError(f"coordinates {which!r} of points that have {d}: give numbers from 0 to {d - 1}, one at least")
    return [int(i) % d for i in listed]


def _weights(d: int, space: slice | Sequence[int] | None, diffusion: Tensor | None, x: Tensor) -> Tensor | None:
    """D, as its diagonal [d] or as a matrix [d d]; None for the identity."""
    if space is None and diffusion is None:
        return None
    axes = list(range(d)) if space is None else _axes(d, space)
    s = len(axes)
    if len(set(axes)) < s:
        raise ValueError(f"space={space!r} names a coordinate twice")
    D = x.new_ones(s) if diffusion is None else torch.as_tensor(diffusion, dtype=x.dtype, device=x.device)
    if D.shape not in ((s,), (s, s)):
        raise ValueError(f"diffusion= has shape {tuple(D.shape)}: it must be [{s}] or [{s}, {s}], for {s} coordinates")
    E = _unit_vectors(axes, x)
    return D @ E if D.ndim == 1 else E.mT @ ((D + D.mT) / 2) @ E


def _unit_vectors(axes: Sequence[int], x: Tensor) -> Tensor:
    """The unit vectors [s d] of some coordinates. No index goes to the device: a CUDA graph may hold this."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.stack([eye[i] for i in axes])
