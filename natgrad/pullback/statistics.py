"""Batch statistics as constants: batch normalisation in training mode, seen by the metric.

In training mode a batch normalisation ties the outputs of one example to all others, and there is no per-example
Jacobian. The metric treats the mean and the variance of the batch as constants, so that every example passes through
its own affine map; the user's backward pass is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@final
class Statistics:
    """Two ways back from the outputs of every batch normalisation: the true one, and one with constant statistics."""

    def __init__(self) -> None:
        self.frozen = False  # read by the backward pass, which may run in another thread

    @contextmanager
    def constant(self) -> Iterator[None]:
        """The backward passes inside see constants."""
        self.frozen = True
        try:
            yield
        finally:
            self.frozen = False

    @staticmethod
    def covers(module: nn.Module) -> bool:
        """Whether the module normalises with the statistics of its batch."""
        return type(module) in _KINDS and batch_statistics(cast(_BatchNorm, module))

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Hooks on the batch normalisations that use batch statistics now."""
        return [m.register_forward_hook(self._fork, prepend=True) for m in model.modules() if self.covers(m)]

    def _fork(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not output.requires_grad:
            return None
        layer, x = cast(_BatchNorm, module), cast(Tensor, args[0])
        weight = None if layer.weight is None else layer.weight.detach()
        bias = None if layer.bias is None else layer.bias.detach()
        mean, variance = moments(x.detach())
        # Only the way to x: scale and shift have their own rule.
        constant = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, layer.eps)
        return cast(Tensor, Fork.apply(output, constant, self))  # type: ignore[no-untyped-call]


def batch_statistics(layer: _BatchNorm) -> bool:
    """Whether the layer normalises with the statistics of its batch in the mode it is in."""
    return layer.training or layer.running_mean is None


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of every channel of x [n ch *spatial], in single precision at least."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    variance, mean = torch.var_mean(wide, axes, correction=0)
    return mean, variance


@final
class Fork(torch.autograd.Function):
    """The identity of its first argument; cotangents go to the first, or to the second while statistics are frozen."""

    @staticmethod
    def forward(true: Tensor, constant: Tensor, statistics: Statistics) -> Tensor:
        return true.view_as(true)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Statistics], output: Tensor) -> None:
        ctx.statistics = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return (None, grads[0], None) if ctx.statistics.frozen else (grads[0], None, None)
