"""Draws from ``torch.distributions`` with a generator of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


@contextmanager
def seeded(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Inside, the global streams start where ``generator`` stands, which moves on; afterwards they are as they were.

    torch.distributions draw from the global stream only. Nothing is seeded on other devices, which torch.manual_seed
    would do. Without a generator the global stream itself is used.
    """
    if generator is None:
        yield
        return
    seed = _seed(generator)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _seed(generator: torch.Generator) -> int:
    """A number from where the generator stands, which moves on. None is drawn and read, for which a GPU would wait."""
    stands = bytes(generator.get_state().tolist())
    torch.rand((), generator=generator, device=generator.device)
    return int.from_bytes(blake2b(stands, digest_size=7).digest(), "little")
