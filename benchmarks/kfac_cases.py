"""The networks that K-FAC is timed on, and what is asked of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, final

import torch
from torch import nn

from benchmarks import contestants as c
from benchmarks import networks as n

Make: TypeAlias = Callable[[torch.device], c.Problem]


@final
@dataclass(frozen=True)
class Case:
    """A network and what is asked of it; None and nothing where no bound was set.

    ``factors``: their time over forward+backward. ``margin``: the fastest peer's over ours. ``steps``: time over AdamW,
    by how often the factors and their inverses are refreshed. ``sobolev``: steps of Sobolev K-FAC over those of K-FAC.
    """

    make: Make
    factors: float | None = None
    margin: float = 1.0
    steps: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    sobolev: float | None = None


def cases(device: torch.device) -> list[Case]:
    """The networks of a device, as large as it likes them."""
    if device.type == "cuda":
        return [
            Case(partial(n.autoencoder, 1000), 1.2, steps={(10, 100): 1.25, (1, 10): 3.0}),
            Case(partial(n.vgg, 128), 1.3, steps={(10, 100): 1.25, (1, 10): 4.0}, sobolev=1.1),
            Case(partial(n.vgg, 128, norm=nn.BatchNorm2d), steps={(10, 100): None}, sobolev=1.1),
            Case(partial(n.gpt, 32, 256), 1.1, steps={(10, 100): 1.15, (1, 10): 2.5}),
        ]
    free: dict[tuple[int, int], float | None] = {(10, 100): None, (1, 10): None}
    return [
        Case(partial(c.mlp, (784, 1000, 1000, 10), 512), 1.5, steps=free),
        Case(partial(n.lenet, 256), 1.3),
        Case(partial(c.resnet, 16, 128), 1.9, margin=2.0, steps=free),
        Case(partial(c.resnet, 16, 128, blocks=3), 1.9, margin=2.0),
        Case(partial(n.transformer, 16, 64), 1.5, steps=free),
        Case(partial(n.rnn, 128, 20)),
    ]


def tiny() -> list[Case]:
    """The same kinds of networks at sizes that run in a moment."""
    every: dict[tuple[int, int], float | None] = {(1, 2): 100.0}
    return [
        Case(partial(n.autoencoder, 8, widths=(6, 5, 3)), 100.0, steps=every),
        Case(partial(n.lenet, 4, pixels=16), 100.0),
        Case(partial(n.vgg, 4, plan=(3, 0, 4, 0), pixels=8), 100.0),
        Case(partial(n.gpt, 2, 5, layers=1, width=12, vocabulary=7), 100.0, steps=every),
        Case(partial(n.rnn, 4, 3, i=3, width=4), 100.0),
    ]
