"""Linearise a model once, at a snapshot of the parameters; then apply J and Jᵀ many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from natgrad.accelerate.devices import autocasts, in_transform, refuse_inference_mode
from natgrad.errors import IncompatibleError
from natgrad.model import Inputs, Model

# J v is the derivative of u ↦ Jᵀu. Torch's double backward pass of a convolution always computes the derivatives in the
# inputs and weights as well, which doubles the work. Below, the backward pass is a linear function of u alone.


_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


@contextmanager
def linear_convolutions() -> Iterator[None]:
    """Inside the block, record convolutions so that u ↦ Jᵀu is cheap to differentiate in u (and only in u).

    A model that differentiates inside its own forward pass needs the other derivatives too. So backward passes that run
    inside the block keep them.

    >>> x, w = torch.randn(2, 1, 5), torch.randn(3, 1, 2, requires_grad=True)
    >>> with linear_convolutions():
    ...     y = torch.conv1d(x, w)
    >>> torch.equal(y, torch.conv1d(x, w))
    True
    """
    mode = _Mode()
    try:
        with mode:
            yield
    finally:
        mode.open = False


@final
class _Mode(TorchFunctionMode):
    open = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _CONVOLUTIONS and (call := _call(*args, **(kwargs or {}))) is not None:
            return _Convolution.apply(*call, self)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Geometry(NamedTuple):
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _CONVOLUTIONS[x.ndim - 3](x, weight, bias, *self)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Cotangents of x, weight and bias; None where they are not needed."""
        d = x.ndim - 2
        stride, padding, dilation = ([v] * d if isinstance(v, int) else list(v) for v in self[:3])
        return torch.ops.aten.convolution_backward(
            g, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * d, self.groups, list(needs)
        )


def _call(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor | None, _Geometry] | None:
    """The arguments of a convolution, or None if torch's own version must be used."""
    geometry = _Geometry(*args, **kwargs)
    unsupported = (
        input.ndim != weight.ndim  # an example without a batch axis
        or isinstance(geometry.padding, str)
        or autocasts(input.device)  # the casts belong to the graph
        or in_transform()
    )
    return None if unsupported else (input, weight, bias, geometry)


@final
class _Convolution(Function):
    """z = x ∗ W + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry, mode: _Mode) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.mode = geometry, mode
        return geometry.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.mode.open:  # the model itself differentiates, so all derivatives must stay in the graph
            return *ctx.geometry.backward(g, x, weight, ctx.needs_input_grad[:3]), None, None
        pulled = _Pull.apply(g, x.detach(), weight.detach(), ctx.needs_input_grad[:3], ctx.geometry)  # type: ignore[no-untyped-call]
        return *pulled, None, None


@final
class _Pull(Function):
    """g ↦ the cotangents of x, W and b. It is linear in g; its transpose is v ↦ v_x ∗ W + x ∗ v_W + v_b."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], geometry: _Geometry
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.like = geometry, g.shape
        ctx.set_materialize_grads(False)
        return geometry.backward(g, x, weight, needs)

    @staticmethod
    def backward(ctx: Any, vx: Tensor | None, vw: Tensor | None, vb: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        out = None if vx is None else ctx.geometry.forward(vx, weight)
        if vw is not None:
            moved = ctx.geometry.forward(x, vw, vb)
            out = moved if out is None else out.add_(moved)
        elif vb is not None:
            moved = vb.view(-1, *[1] * (x.ndim - 2)).expand(ctx.like)
            out = moved if out is None else out + moved
        return out, None, None, None, None


@final
@dataclass(frozen=True)
class Linearisation:
    """y = f(θ₀, x) with J and Jᵀ.

    The graph is built once. ``pull`` is a backward pass, and ``push`` a backward pass through that one: u ↦ Jᵀu is
    linear, and ⟨Jᵀu, v⟩ = ⟨u, Jv⟩. Forward mode would recompute y in every product.
    """

    y: Tensor  # [n *out], detached
    params: dict[str, Tensor]
    _y: Tensor
    _u: Tensor
    _pulled: tuple[Tensor | None, ...]

    def push(self, v: Mapping[str, Tensor]) -> Tensor:
        """J v [n *out]."""
        pairs = [(g, v[name]) for name, g in zip(self.params, self._pulled, strict=True) if g is not None]
        outputs, tangents = [g for g, _ in pairs], [t.to(g.dtype) for g, t in pairs]
        try:
            (jv,) = torch.autograd.grad(outputs, self._u, tangents, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "is not implemented" not in str(error):  # torch has two kinds of errors for it
                raise
            raise IncompatibleError(
                f"J v is the derivative of a backward pass, and an operation of the model has no second one ({error}): "
                "use a structure that needs none, such as Dense, Kernel or Kronecker, or write the operation otherwise"
            ) from error
        return torch.zeros_like(self.y) if jv is None else jv

    def pull(self, u: Tensor) -> dict[str, Tensor]:
        """Jᵀu, one tensor for each parameter."""
        leaves = list(self.params.values())
        grads = torch.autograd.grad(self._y, leaves, u, retain_graph=True, allow_unused=True)
        return {name: _or_zero(g, p) for (name, p), g in zip(self.params.items(), grads, strict=True)}


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def linearise(model: Model, x: Inputs) -> Linearisation:
    """Linearise the model at a snapshot of its parameters: later in-place updates do not change it."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.params.items()}
    with torch.enable_grad():
        with linear_convolutions():
            y = model(leaves, x)
        if not y.requires_grad:
            refuse_inference_mode("the Jacobian of the model")
            raise ValueError("the outputs do not depend on any trainable parameter")
        u = torch.zeros_like(y, requires_grad=True)
        pulled = torch.autograd.grad(y, list(leaves.values()), u, create_graph=True, allow_unused=True)
    # A gradient that is not a function of u (a parameter that the outputs ignore) is zero.
    linear = tuple(g if g is not None and g.requires_grad else None for g in pulled)
    return Linearisation(y.detach(), leaves, y, u, linear)
