"""Steps of a given size: a learning rate then means the same in every layer, whatever the scale of the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.geometry import Covector, Vector
from natgrad.linalg import check_number_fields, is_number, is_rounding
from natgrad.step.base import PlainRule, SharpMap, rescale_


@final
@dataclass(frozen=True)
class Normalised(PlainRule):
    """Give the step of every parameter tensor the same size, as Adam's have.

    A learning rate is then like that of Adam, and the step does not depend on the scale of the loss, the metric or the
    damping.

    Args:
        rms: The root mean square of a step, as a multiple of the learning rate; Adam's steps have about 0.2 (Liu et al.
            2025).

    Method:
        v ← rms·v/√mean(v²), for each parameter tensor. The weight and the bias of a layer are two tensors, each with
        its own scale. A step that is zero stays zero, and so does that of a gradient of which only rounding is left
        beside the largest one (``natgrad.linalg.is_rounding``): it would be a random step of full length.

    Example:
        >>> ω = Covector({"w": torch.tensor([3.0, -3.0]), "rounding": torch.tensor([3e-9])})
        >>> dict(Normalised().direction(ω, SharpMap(lambda ω: Vector(dict(ω)))))
        {'w': tensor([ 0.2000, -0.2000]), 'rounding': tensor([0.])}
    """

    bounded: ClassVar[bool] = True
    measured: ClassVar[bool] = False
    rms: float = 0.2

    def __post_init__(self) -> None:
        check_number_fields(self)
        check_rms("Normalised", self.rms)

    def direction(self, ω: Covector, sharp: SharpMap) -> Vector:
        v = sharp(ω)
        rescale_(v, ratios({name: self.rms * math.sqrt(t.numel()) for name, t in v.items()}, v, ω))
        return v

    def scale(self, v: Vector, square: Tensor) -> None:
        return None


def check_rms(rule: str, rms: float) -> None:
    """A size is a positive number."""
    if not is_number(rms) or not 0 < rms < math.inf:
        raise ValueError(f"{rule}(rms=…) must be positive and finite, got {rms}")


def ratios(lengths: Mapping[str, float], v: Vector, ω: Covector, unit: Tensor | None = None) -> dict[str, Tensor]:
    """The numbers [] that give every tensor of v its length (times its entry in ``unit`` [b]), and zero to zero.

    Zero is what v is, or what the gradient ω is up to rounding. NaN where v is not finite, which must not look like a
    step of zero.
    """
    gradients = [ω[name] for name in v]
    of_both = [*lengths.values(), *(math.sqrt(max(1, t.numel())) for t in gradients)]  # in one launch
    stretch, sizes = torch.stack(fused.divided(fused.norms([*v.values(), *gradients]), of_both)).chunk(2)
    coarsest = max((t.dtype for t in gradients), key=lambda dtype: torch.finfo(dtype).eps)
    zero = is_rounding(sizes, dtype=coarsest).logical_or_(stretch == 0)
    finite = stretch - stretch  # 0, and NaN of infinity
    scale = (stretch.reciprocal() + finite).masked_fill_(zero, 0.0)
    scale = scale if unit is None else scale * unit
    scale = scale.to(reduce(torch.promote_types, (t.dtype for t in v.values()), torch.float32))
    return dict(zip(v, scale.unbind(), strict=True))
