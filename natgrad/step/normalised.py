"""Steps of a given size: a learning rate then means the same in every layer, whatever the scale of the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.geometry import Vector
from natgrad.linalg import is_number
from natgrad.step.base import PlainRule


@final
@dataclass(frozen=True)
class Normalised(PlainRule):
    """v ← rms·v/√mean(v²), for each parameter tensor: the root mean square of its step is lr·rms.

    The weight and the bias of a layer are two tensors, each with its own scale. The step does not depend on the scale
    of the loss, of the metric or of the damping, and a learning rate is like that of Adam, whose steps have about this
    size for ``rms=0.2`` (Liu et al. 2025). A step that is zero stays zero.

    >>> Normalised().scale(Vector({"w": torch.tensor([3.0, -3.0])}), torch.ones(()))
    {'w': tensor(0.0667)}
    """

    bounded: ClassVar[bool] = True
    measured: ClassVar[bool] = False
    rms: float = 0.2

    def __post_init__(self) -> None:
        check_rms("Normalised", self.rms)

    def scale(self, v: Vector, square: Tensor) -> dict[str, Tensor]:
        return ratios({name: self.rms * math.sqrt(t.numel()) for name, t in v.items()}, v)


def check_rms(rule: str, rms: float) -> None:
    """A size is a positive number."""
    if not is_number(rms) or not 0 < rms < math.inf:
        raise ValueError(f"{rule}(rms=…) must be positive and finite, got {rms}")


def ratios(lengths: Mapping[str, float], v: Vector, unit: Tensor | None = None) -> dict[str, Tensor]:
    """The numbers [] that give every tensor of v its length (times its entry in ``unit`` [b]), and zero to zero.

    NaN where v is not finite, which must not look like a step of zero.
    """
    stretch = torch.stack(fused.divided(fused.norms(list(v.values())), list(lengths.values())))
    finite = stretch - stretch  # 0, and NaN of infinity
    scale = (stretch.reciprocal() + finite).masked_fill_(stretch == 0, 0.0)
    scale = scale if unit is None else scale * unit
    scale = scale.to(torch.promote_types(next(iter(v.values())).dtype, torch.float32))
    return dict(zip(v, scale.unbind(), strict=True))
