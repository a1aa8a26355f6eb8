"""Whether the processor waits for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever waits for the GPU is an error."""
    try:
        _set("error")
        yield
    finally:
        _set("default")


def _set(mode: str) -> None:
    with warnings.catch_warnings():  # torch's own: the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
