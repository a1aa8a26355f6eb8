"""Batch statistics as constants: batch normalisation in training mode, seen by the metric.

In training mode a batch normalisation ties the outputs of one example to all others, and there is no per-example
Jacobian. The metric treats the mean μ and the variance σ² of the batch as constants, so that every example passes
through its own affine map z = γ (x − μ)/√(σ² + ε) + β; the user's backward pass is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.moments import mean_and_variance, single
from natgrad.errors import BatchStatisticsError
from natgrad.rules.base import Call, plain
from natgrad.rules.norm import batch_statistics

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@final
class Statistics:
    """A backward pass of every batch normalisation that treats the batch statistics as constants, beside the true one.

    >>> layer, statistics = nn.BatchNorm1d(1), Statistics()
    >>> handles = statistics.watch({"norm": layer})
    >>> x = torch.tensor([[-1.0], [1.0]], requires_grad=True)
    >>> y = layer(x)
    >>> torch.autograd.grad(y[0], x, retain_graph=True)[0].abs().max() < 1e-4  # the batch moves along
    tensor(True)
    >>> with statistics.constant():
    ...     torch.autograd.grad(y[0], x)[0].round(decimals=3)
    tensor([[1.], [0.]])
    """

    def __init__(self) -> None:
        # Read by the backward pass, which may run in another thread.
        self.frozen = self.affine = False

    @contextmanager
    def constant(self, affine: bool = False) -> Iterator[None]:
        """Backward passes inside treat the statistics as constants.

        ``affine``: cotangents also come to the operation itself, and to its scale and shift, which the rule of the
        layer does without.
        """
        self.frozen, self.affine = True, affine
        try:
            yield
        finally:
            self.frozen = self.affine = False

    @staticmethod
    def covers(module: nn.Module) -> bool:
        """Whether the module normalises with the statistics of its batch, and is a type that we can take over."""
        kind = type(module)
        return kind in _KINDS and plain(module, kind, "weight", "bias") and _uses_batch(module) and not _syncs(module)

    def watch(self, norms: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Hooks on those batch normalisations, by name, that use batch statistics now; unknown kinds are refused."""
        norms_in_use = [(name, m) for name, m in norms.items() if isinstance(m, _BatchNorm) and _uses_batch(m)]
        unknown = [f"{name or 'the model'} ({type(m).__name__})" for name, m in norms_in_use if not self.covers(m)]
        if unknown:
            raise BatchStatisticsError(
                f"{', '.join(unknown)}: in training mode the outputs of one example depend on the others, over several "
                "processes or in a forward of its own, and natgrad cannot take these statistics for constants. Use "
                "nn.BatchNorm1d, 2d or 3d, or take the metric in evaluation mode: with natgrad.evaluating(model): "
                "opt.refresh(x)"
            )
        return [m.register_forward_hook(self._fork, prepend=True, with_kwargs=True) for _, m in norms_in_use]

    def _fork(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        x = Call(args, kwargs).x
        if not output.requires_grad:
            return None
        layer, wide = cast(_BatchNorm, module), single(x.detach())
        _, variance = mean_and_variance(wide, [axis for axis in range(x.ndim) if axis != 1])
        scale = (variance + layer.eps).rsqrt()
        if layer.weight is not None:
            scale = scale * layer.weight.detach()
        assert output.grad_fn is not None
        output.grad_fn.register_hook(self._without_x)
        forked = Fork.apply(output, x, scale.view(-1, *[1] * (x.ndim - 2)), self)  # type: ignore[no-untyped-call]
        return cast(Tensor, forked)

    def _without_x(self, into: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
        """Of the backward pass of the operation (x, scale, shift): x has its cotangent from ``Fork``."""
        return (None, *into[1:]) if self.frozen else None


def _uses_batch(module: nn.Module) -> bool:
    return batch_statistics(cast(_BatchNorm, module), module.training)


def _syncs(module: nn.Module) -> bool:
    """Whether the statistics are those of the batches of several processes."""
    distributed = torch.distributed
    if not isinstance(module, nn.SyncBatchNorm) or not distributed.is_available() or not distributed.is_initialized():
        return False
    return module.training and distributed.get_world_size(module.process_group) > 1


@final
class Fork(torch.autograd.Function):
    """The identity of its first argument z; cotangents g go on to it.

    With frozen statistics g·scale goes to x, and g to z for scale and shift only, where they are asked for.
    """

    @staticmethod
    def forward(z: Tensor, x: Tensor, scale: Tensor, statistics: Statistics) -> Tensor:
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Statistics], output: Tensor) -> None:
        # Not a view: in-place activations follow most normalisations and may not modify a view of a Function.
        ctx.mark_dirty(inputs[0])
        ctx.dtype, ctx.scale, ctx.statistics = inputs[1].dtype, inputs[2], inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if not ctx.statistics.frozen:
            return grads[0], None, None, None
        through = grads[0] if ctx.statistics.affine else None
        return through, (grads[0] * ctx.scale).to(ctx.dtype) if ctx.needs_input_grad[1] else None, None, None
