"""The library's own forward passes leave the model and the random stream unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from natgrad.accelerate.devices import get_rng_state, is_asynchronous, set_rng_state, without_fused_recurrence
from natgrad.accelerate.modules import buffers_in
from natgrad.errors import BatchStatisticsError


@contextmanager
def unfused(model: Any, device: torch.device) -> Iterator[None]:
    """Inside the block, attention and (on a GPU) recurrent layers are not fused.

    Fused attention has neither a batching rule nor a second derivative. The fused transformer of inference mode gives
    different outputs at padded positions. The recurrent layers of cuDNN only support a backward pass in training mode,
    one cotangent at a time; cuDNN is switched off if the model has one.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        modules = model.modules() if is_asynchronous(device) and isinstance(model, nn.Module) else ()
        if any(isinstance(m, nn.RNNBase) for m in modules):
            stack.enter_context(without_fused_recurrence(device))
        yield


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Inside the block the module works on copies of its buffers; afterwards, buffers and attributes are restored.

    A forward pass may count its calls, update a running mean, or store an auxiliary loss on the module (``self.aux =
    …``). The library's passes must not do so. Buffers are swapped instead of overwritten, because the graph of the
    pass may refer to them.

    >>> layer = nn.BatchNorm1d(2)
    >>> with untouched(layer):
    ...     _ = layer(torch.randn(4, 2))
    >>> int(layer.num_batches_tracked)
    0
    """
    saved = []
    for m in module.modules():
        buffers = dict(buffers_in(m))
        saved.append((m, buffers, {key: value for key, value in vars(m).items() if key not in _TORCH}))
        buffers_in(m).update({name: b.clone() for name, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for m, buffers, attributes in saved:
            buffers_in(m).clear()
            buffers_in(m).update(buffers)
            for key in [key for key in vars(m) if key not in _TORCH and key not in attributes]:
                del vars(m)[key]
            vars(m).update(attributes)


Outputs = TypeVar("Outputs", bound=tuple[Any, ...])

_draws: ContextVar[Tensor | None] = ContextVar("natgrad draws the same numbers in every pass", default=None)


@contextmanager
def same_draws(state: Tensor) -> Iterator[None]:
    """All passes of the library inside draw the same random numbers, from this state of the stream on.

    They are passes of one function, with the same masks of dropout, and have Jacobians.
    """
    token = _draws.set(state)
    try:
        yield
    finally:
        _draws.reset(token)


def deterministic(run: Callable[[], Outputs], model: Any, device: torch.device) -> Outputs:
    """What a forward pass ``run`` of a model returns; refuse one that random numbers change, except ``same_draws``.

    This also catches ``F.dropout(x, training=True)``, which has no module. In evaluation mode a model may draw numbers
    that it uses in training only, as models of speech do to skip layers: a second pass tells. The random stream is put
    back.
    """
    before, state = get_rng_state(device), _draws.get()
    if state is not None:
        set_rng_state(device, state)
        try:
            return run()
        finally:
            set_rng_state(device, before)
    out = run()
    if not torch.equal(before, get_rng_state(device)):
        try:
            training = not isinstance(model, nn.Module) or any(m.training for m in model.modules())
            with torch.no_grad():
                if training or not torch.equal(out[0], run()[0]):
                    refuse_randomness()
        finally:
            set_rng_state(device, before)
    return out


def refuse_randomness() -> NoReturn:
    """Raise the error for a forward pass that draws random numbers."""
    raise BatchStatisticsError(
        "the forward pass draws random numbers: two passes give two functions, and there is no Jacobian. Take the "
        "metric in evaluation mode: model.eval(), or with natgrad.evaluating(model): ... around it"
    )


# Attributes that torch itself keeps in a module. They are containers, which a forward pass does not replace.
_TORCH: frozenset[str] = frozenset(vars(nn.Module())) - {"training"}
