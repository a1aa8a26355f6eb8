"""Forward passes of the library's own leave the model and the random stream as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from natgrad.errors import BatchStatisticsError

# Forward passes of the library's own run in plain operations, which can be differentiated in every way.


@contextmanager
def unfused(model: Any, device: torch.device) -> Iterator[None]:
    """Inside the block attention is not fused, and neither are recurrences on a GPU.

    Fused attention has neither a batching rule nor a second derivative. The fused transformer of inference, which is
    taken without gradients, gives other outputs at padded positions. The recurrences of cuDNN go back one cotangent at
    a time, in training mode only; where a model has one, cuDNN is off.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        modules = model.modules() if device.type == "cuda" and isinstance(model, nn.Module) else ()
        if any(isinstance(m, nn.RNNBase) for m in modules):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Inside the block the module's buffers are copies; after it, buffers and attributes are what they were.

    A forward pass may count its calls, update a running mean, or keep an auxiliary loss on the module
    (``self.aux = …``). The user's passes do so once each; ours must not show. Buffers are exchanged and not written
    back, since the graph of the pass may hold them.

    >>> layer = nn.BatchNorm1d(2)
    >>> with untouched(layer):
    ...     _ = layer(torch.randn(4, 2))
    >>> int(layer.num_batches_tracked)
    0
    """
    saved = []
    for m in module.modules():
        buffers = dict(m._buffers)
        saved.append((m, buffers, {key: value for key, value in vars(m).items() if key not in _TORCH}))
        m._buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for m, buffers, attributes in saved:
            m._buffers.clear()
            m._buffers.update(buffers)
            for key in [key for key in vars(m) if key not in _TORCH and key not in attributes]:
                del vars(m)[key]
            vars(m).update(attributes)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Refuse a forward pass that draws random numbers, and put the random stream back.

    ``F.dropout(x, training=True)`` has no module that could be asked.
    """
    before = random_stream(device)
    yield
    if not torch.equal(before, random_stream(device)):
        put_back(device, before)
        refuse_chance()


def refuse_chance() -> NoReturn:
    """The error of a forward pass that drew random numbers."""
    raise BatchStatisticsError(
        "the forward pass draws random numbers: two passes give two functions, and there is no Jacobian. Take the "
        "metric in evaluation mode: model.eval(), or with natgrad.evaluating(model): ... around it"
    )


def random_stream(device: torch.device) -> torch.Tensor:
    """The state of the random stream that a model on this device draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def put_back(device: torch.device, state: torch.Tensor) -> None:
    """Set the random stream that a model on this device draws from."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


# What torch keeps in a module: its containers hold what the user put there, and are not attributes of a pass.
_TORCH: frozenset[str] = frozenset(vars(nn.Module())) - {"training"}
