"""Batch statistics as constants: batch normalisation in training mode, seen by the metric.

In training mode a batch normalisation ties the outputs of one example to all others, and there is no per-example
Jacobian. The metric treats the mean μ and the variance σ² of the batch as constants, so that every example passes
through its own affine map z = γ (x − μ)/√(σ² + ε) + β; the user's backward pass is not changed.

A batch normalisation is recognised by the operation that is called (``NormMode``), in whatever module or function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.autograd import divert
from natgrad.accelerate.moments import mean_and_variance, single
from natgrad.errors import BatchStatisticsError
from natgrad.rules.base import Call
from natgrad.rules.norm import STATISTICS, batch_statistics

_UNKNOWN = (
    "{}: in training mode the outputs of one example depend on the others, and natgrad cannot take these statistics "
    "for constants, because it sees no call of torch.nn.functional.batch_norm. Call that in its forward, use "
    "nn.BatchNorm1d, 2d or 3d, or take the metric in evaluation mode: with natgrad.evaluating(model): opt.refresh(x)"
)
Moments: TypeAlias = tuple[Tensor, Tensor]  # mean and variance [c]
Normalised: TypeAlias = Callable[[nn.Module, Call, Tensor], None]  # told of a module, the call of its rule, and z


@final
class Statistics:
    """A backward pass of every batch normalisation that treats the batch statistics as constants, beside the true one.

    >>> layer, statistics = nn.BatchNorm1d(1), Statistics()
    >>> x = torch.tensor([[-1.0], [1.0]], requires_grad=True)
    >>> with NormMode(statistics, {"norm": layer}, lambda *call: None, None, lambda: True):
    ...     y = layer(x)
    >>> torch.autograd.grad(y[0], x, retain_graph=True)[0].abs().max() < 1e-4  # the batch moves along
    tensor(True)
    >>> with statistics.constant():
    ...     torch.autograd.grad(y[0], x)[0].round(decimals=3)
    tensor([[1.], [0.]])
    """

    def __init__(self) -> None:
        # Read by the backward pass, which may run in another thread.
        self.frozen: bool = False
        self.affine: bool = False
        self.pairs: list[str] = []  # the names of those that normalised two values a channel

    @contextmanager
    def constant(self, affine: bool = False) -> Iterator[None]:
        """Backward passes inside treat the statistics as constants.

        ``affine``: cotangents also come to the operation itself, and to its scale and shift, which the rule of the
        layer does without.
        """
        before = self.frozen, self.affine  # a pass may run inside another
        self.frozen, self.affine = True, affine
        try:
            yield
        finally:
            self.frozen, self.affine = before

    def fork(
        self, label: str, z: Tensor, x: Tensor, weight: Tensor | None, eps: float, moments: Moments | None = None
    ) -> Tensor:
        """z, the batch normalisation of x [n c *spatial], with both backward passes; ``moments``: not those of x."""
        if moments is None and x.numel() == 2 * x.shape[1] and label not in self.pairs:
            self.pairs.append(label)
        _, variance = moments or mean_and_variance(single(x.detach()), [axis for axis in range(x.ndim) if axis != 1])
        scale = (variance + eps).rsqrt()
        if weight is not None:
            scale = scale * weight.detach()
        operation: Any = z.grad_fn
        while operation.name() == "ForkBackward":  # that of another optimizer
            operation = operation.next_functions[0][0]
        operation.register_hook(self._without_x)
        forked = Fork.apply(z, x, scale.view(-1, *[1] * (x.ndim - 2)), self)  # type: ignore[no-untyped-call]
        return cast(Tensor, forked)

    def synchronised(self, x: Tensor, mean: Tensor, invstd: Tensor, node: Any, g: Tensor) -> Any:
        """Of the backward pass of ``nn.SyncBatchNorm`` (x, scale, shift, …): only what is not in ``Fork``."""
        if not self.frozen:
            return None
        scale = shift = None
        if self.affine:
            shape, axes = (-1, *[1] * (x.ndim - 2)), [axis for axis in range(x.ndim) if axis != 1]
            scale = (g * (x - mean.view(shape)) * invstd.view(shape)).sum(axes)
            shift = g.sum(axes)
        wanted = node.needs_input_grad
        return None, scale if wanted[1] else None, shift if wanted[2] else None, *[None] * (len(wanted) - 3)

    def _without_x(self, into: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
        """Of the backward pass of the operation (x, scale, shift): x has its cotangent from ``Fork``."""
        return (None, *into[1:]) if self.frozen else None


def _label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def refuse_unknown(modules: Sequence[str]) -> None:
    """Refuse these modules, if there are any: in training mode no batch normalisation was seen in them."""
    if modules:
        raise BatchStatisticsError(_UNKNOWN.format(", ".join(modules)))


def uses_batch(module: nn.Module) -> bool:
    return batch_statistics(cast(_BatchNorm, module), module.training)


@final
class NormMode(TorchFunctionMode):
    """While it is entered, every batch normalisation of data is forked, in whatever module or function it is.

    ``called`` is told of those with the weight of the module that runs. ``is_data``: whether a tensor depends on the
    inputs: weights are standardised by the same function. None where only those in the modules ``norms``, by name, are
    to be forked. ``listens``: whether what runs now belongs to the pass.
    """

    def __init__(
        self,
        statistics: Statistics,
        norms: Mapping[str, nn.Module],
        called: Normalised,
        is_data: Callable[[Tensor], bool] | None,
        listens: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._statistics, self._called, self._is_data, self._listens = statistics, called, is_data, listens
        self._running: list[list[Any]] = []  # modules that run, their labels, and whether one has normalised
        self._pending: Callable[[], None] | None = None
        self._shown: dict[Any, Callable[..., Tensor]] = {
            nn.functional.batch_norm: NormMode._function,
            torch.batch_norm: NormMode._operation,
            torch.batch_norm_elemt: NormMode._synchronised,
        }
        self.unknown: list[str] = []  # modules in training mode in which no batch normalisation was seen
        self.handles: list[RemovableHandle] = []
        for name, module in norms.items():
            label = _label(name, module)
            if name:
                self.handles.append(module.register_forward_pre_hook(partial(self._begin, label), prepend=True))
            else:  # the model itself, whose own hooks may have begun the pass
                self._running.append([module, label, False])
            self.handles.append(module.register_forward_hook(self._end, prepend=True))

    def enter(self) -> None:
        """As ``with`` does, for those who begin in one hook and end in another."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """As at the end of ``with``."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._settle()
        for handle in self.handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._settle()
        out = func(*args, **(kwargs or {}))
        if func in self._shown and type(out) is Tensor and self._listens():
            return self._shown[func](self, out, *args, **(kwargs or {}))
        return out

    def _begin(self, label: str, module: nn.Module, args: Any) -> None:
        if self._listens():
            self._running.append([module, label, False])

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._listens():
            return
        self._settle()
        _, label, normalised = self._running.pop()
        if not normalised and uses_batch(module) and isinstance(output, Tensor) and output.requires_grad:
            self.unknown.append(label)

    def _function(
        self,
        z: Tensor,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Of ``torch.nn.functional``."""
        return self._operation(z, input, weight, bias, running_mean, running_var, training, momentum, eps, True)

    def _operation(
        self,
        z: Tensor,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        """Of ``torch``."""
        moments = None
        if self._running:
            self._running[-1][2] = True
        if not z.requires_grad:
            return z
        if not training:
            assert running_mean is not None
            assert running_var is not None
            moments = running_mean, running_var
        elif self._running or (self._is_data is not None and len(input) > 1 and self._is_data(input)):
            label = self._running[-1][1] if self._running else "a call of torch.nn.functional.batch_norm"
            z = self._statistics.fork(label, z, input, weight, eps)
        self._tell(z, input, weight, moments, training)
        return z

    def _synchronised(
        self, z: Tensor, input: Tensor, weight: Tensor | None, bias: Any, mean: Tensor, invstd: Tensor, eps: float
    ) -> Tensor:
        """Inside of a function with its own backward pass: z has no graph before that has returned."""
        moments = mean, invstd.square().reciprocal() - eps
        if self._running:
            self._running[-1][2] = True

        def settle() -> None:
            if z.grad_fn is not None:
                # Its backward pass talks to the other processes, which need not be in theirs.
                divert(z.grad_fn, partial(self._statistics.synchronised, input.detach(), mean, invstd))
                forked = self._statistics.fork("", z, input, weight, eps, moments)
                self._tell(forked, input, weight, moments, True)

        self._pending = settle
        return z

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _tell(self, z: Tensor, x: Tensor, weight: Tensor | None, moments: Moments | None, training: bool) -> None:
        module = self._running[-1][0] if self._running else None
        if module is not None and weight is not None and weight is module.weight:
            given = {} if moments is None else {STATISTICS: tuple(t.detach() for t in moments)}
            self._called(module, Call((x.detach(),), given, training), z)


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
