"""What this machine can run: a test asks torch first, and judges natgrad only where torch itself has the operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def needs_autocast(forward: Callable[[], Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
    """Skip the test unless torch runs ``forward`` and its backward pass under autocast on this processor.

    oneDNN has no bfloat16 kernels for recurrent layers on processors without AVX-512: torch then raises
    "could not create a primitive descriptor".
    """
    try:
        with torch.enable_grad(), torch.autocast("cpu", dtype):
            forward().sum().backward()
    except RuntimeError as error:
        pytest.skip(f"torch cannot run this network in {dtype} on this processor: {error}")
