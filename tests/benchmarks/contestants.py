"""What other processes of the tests run: they import this file, and so nothing but torch."""

from collections.abc import Callable

import torch
from torch import Tensor


def refusing() -> Callable[[], None]:
    """Cannot be prepared."""
    raise SystemExit(3)


def allocate(megabytes: int) -> Callable[[], Tensor]:
    """Touch that much memory."""
    return lambda: torch.ones(megabytes * 2**20 // 4)
