"""The identity: what every metric is at the power 0, and the only metric that needs no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.model import Model
from natgrad.structures.base import IdentityInverse, Layout, Operator, Structure


def constant(structure: Structure, model: Model) -> IdentityOperator | None:
    """The operator of a structure that asks for no data, because its power is 0; None for every other.

    >>> import natgrad as ng
    >>> constant(ng.Diagonal(), Model.of(torch.nn.Linear(2, 1))) is None
    True
    """
    return IdentityOperator(Layout.of(model.params)) if structure.power == 0 else None


@final
@dataclass(frozen=True)
class IdentityOperator(Operator):
    """G⁰ = 1, whatever G is: ♭ and ♯ change the type, and no number.

    >>> v = IdentityOperator(Layout.of({"w": torch.ones(2)})).product(torch.tensor([1.0, 2.0]))
    >>> v
    tensor([1., 2.])
    """

    layout: Layout
    power: float = 0.0

    def product(self, v: Tensor) -> Tensor:
        return v

    def diagonal(self) -> Tensor:
        return torch.ones(self.layout.size, dtype=self.layout.dtype)

    def with_power(self, power: float) -> Self:
        return self

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> IdentityInverse:
        return IdentityInverse(self.layout)

    def lerp(self, other: Operator, weight: float) -> Self:
        self.same_kind(other)
        return self
