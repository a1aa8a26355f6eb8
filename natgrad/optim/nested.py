"""Models that call themselves."""

from __future__ import annotations

import sys

from torch import nn


def nested(module: nn.Module) -> bool:
    """Whether the call of a module, in whose hook this is asked, is inside another call of the same module.

    Nothing else tells that from a call after one that was interrupted: of a KeyboardInterrupt no hook hears.
    """
    calls, frame = 0, sys._getframe()
    while frame.f_back is not None and calls < 2:
        frame = frame.f_back
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module
    return calls == 2
