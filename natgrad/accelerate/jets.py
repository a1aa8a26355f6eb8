"""An activation and the linear layer after it, of all channels of a jet at once: few passes over memory, few tensors.

Channels z [c *shape] are the value z₀ (and a shift b), m first derivatives J and, where it is not zero, L. An
activation f and a weight W make

    h = (f(v), f′(v) J, f′(v) L + f″(v) Σ_ij D_ij J_i J_j)  with v = z₀ + b,        out = h Wᵀ.

Autograd would keep z, h and what lies between for the backward pass. Here z is kept, and h is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from natgrad.accelerate.autograd import operations_are_seen
from natgrad.accelerate.devices import in_nested_forward_mode

Slopes: TypeAlias = Callable[[Tensor], Iterator[Any]]  # f, f′, f″, None where that is zero, and f‴
Shift: TypeAlias = Tensor | float | None


def weighted(J: Tensor, D: Tensor | None) -> Tensor:
    """Σ_j D_ij J_j of J [m *shape], for D [m], [m m], or None for the identity."""
    if D is None:
        return J
    D = D.to(J.dtype)
    return D.view(-1, *[1] * (J.ndim - 1)) * J if D.ndim == 1 else torch.tensordot(D, J, 1)


def contracted(J: Tensor, K: Tensor, D: Tensor | None) -> Tensor:
    """Σ_ij D_ij J_i K_j [*shape]."""
    if D is not None and D.ndim == 1:
        return torch.tensordot(D.to(J.dtype), J * K, 1)
    J = weighted(J, D)
    if _at_once(J):
        return (J * K).sum(0)
    out = J[0] * K[0]
    for j, k in zip(J[1:], K[1:], strict=True):
        out += j * k  # addcmul_ has no batching rule
    return out


def _at_once(J: Tensor) -> bool:
    """Whether all m channels are multiplied at once; one by one, a processor keeps the products in its cache."""
    return J.is_cuda or torch.is_grad_enabled()


def composed(z: Tensor, shift: Shift, D: Tensor | None, slopes: Slopes, m: int, second: bool) -> Tensor:
    """h [c *shape], for autograd: parts of a ``split`` have one gradient, and slices one each."""
    value, J, *rest = z.split([1, m, *[1] * (len(z) - 1 - m)])
    f, slope, *curvature = islice(slopes(value.squeeze(0) if shift is None else value.squeeze(0) + shift), 2 + second)
    L = slope * rest[0] if rest else None
    if second and curvature[0] is not None:
        bent = (curvature[0] * contracted(J, J, D)).unsqueeze(0)
        L = bent if L is None else L + bent
    return torch.cat([f.unsqueeze(0), slope * J, *([] if L is None else [L])])


def activated(z: Tensor, shift: Shift, D: Tensor | None, slopes: Slopes, m: int, second: bool) -> Tensor:
    """The same without autograd, which would keep what is overwritten here."""
    value = z[0] if shift is None else z[0] + shift
    f, slope, *curvature = islice(slopes(value), 2 + second)
    out = z * slope
    out[0] = f
    if not second:
        return out
    J = z[1 : 1 + m]
    bent = curvature[0] * contracted(J, J, D)
    if len(z) == 1 + m:
        return torch.cat([out, bent.unsqueeze(0)])
    out[-1] += bent
    return out


def is_fused(z: Tensor) -> bool:
    """Whether to compute h Wᵀ in one function.

    Not where its operations are looked at or cast to another precision, nor where it could not be differentiated.
    """
    if operations_are_seen() or torch.is_autocast_enabled(z.device.type):
        return False
    return not in_nested_forward_mode()


def activated_layer(
    z: Tensor, shift: Tensor | None, D: Tensor | None, W: Tensor, slopes: Slopes, m: int, second: bool
) -> Tensor:
    """h Wᵀ [c *rows o]."""
    return ActivatedLayer.apply(z, shift, D, W, slopes, m, second)  # type: ignore[no-untyped-call]


@final
class ActivatedLayer(Function):
    """h Wᵀ with its derivatives: in reverse mode to any order, in forward mode once, and under vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor, shift: Tensor | None, D: Tensor | None, W: Tensor, slopes: Slopes, m: int, second: bool
    ) -> Tensor:
        return functional.linear(activated(z, shift, D, slopes, m, second), W)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.slopes, ctx.m, ctx.second = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        z, shift, D, W = ctx.saved_tensors
        m, second, (of_z, of_shift, of_D, of_W, *_) = ctx.m, ctx.second, ctx.needs_input_grad
        (G,) = cotangents
        dW = dz = dshift = dD = None
        if of_W:
            again = composed if torch.is_grad_enabled() else activated
            h = again(z, shift, D, ctx.slopes, m, second)
            dW = G.reshape(-1, G.shape[-1]).mT @ h.reshape(-1, h.shape[-1])
            del h
        if of_z or of_shift or of_D:
            dh = G @ W
            value = z[0] if shift is None else z[0] + shift
            _, slope, *higher = islice(ctx.slopes(value), 3 + second)
            J = z[1 : 1 + m]
            dv, of_bent = higher[0] * contracted(dh[1 : 1 + m], J, None), None
            if second:
                of_bent = dh[-1] * higher[0]
                dv = dv + dh[-1] * higher[1] * contracted(J, J, D)
                if len(z) > 1 + m:
                    dv = dv + of_bent * z[-1]
                if of_D:
                    flat = J.reshape(m, -1)
                    scaled = of_bent.reshape(-1) * flat
                    dD = (scaled * flat).sum(1) if D.ndim == 1 else scaled @ flat.mT
            dh = dh if len(z) == len(dh) else dh[:-1]
            dz = dh * slope if torch.is_grad_enabled() else dh.mul_(slope)
            dz[0] += dv
            if of_bent is not None:
                K, twice = weighted(J, D), 2 * of_bent
                for at in (slice(0, m),) if _at_once(J) else range(m):
                    dz[1 : 1 + m][at] += twice * K[at]
            dshift = dz[0].sum_to_size(shift.shape) if of_shift else None
        return dz, dshift, dD, dW, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        z, shift, D, W = ctx.saved_tensors
        dz, dshift, dD, dW, *_ = tangents
        m, second, J = ctx.m, ctx.second, z[1 : 1 + ctx.m]
        dz = torch.zeros_like(z) if dz is None else dz
        value, dv = (z[0], dz[0]) if shift is None else (z[0] + shift, dz[0])
        dv = dv if dshift is None else dv + dshift
        _, slope, *higher = islice(ctx.slopes(value), 3 + second)
        first = slope * dz[1 : 1 + m] + higher[0] * dv * J
        rows = [(slope * dv).unsqueeze(0), first]
        if second:
            bent = higher[1] * dv * contracted(J, J, D) + 2 * higher[0] * contracted(J, dz[1 : 1 + m], D)
            if dD is not None:
                bent = bent + higher[0] * contracted(J, J, dD)
            if len(z) > 1 + m:
                bent = bent + slope * dz[-1] + higher[0] * dv * z[-1]
            rows.append(bent.unsqueeze(0))
        out = functional.linear(torch.cat(rows), W)
        if dW is None:
            return out
        return out + functional.linear(composed(z, shift, D, ctx.slopes, m, second), dW)
