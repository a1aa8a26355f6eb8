"""Forward passes of the library's own run in plain operations, which can be differentiated in every way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


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
