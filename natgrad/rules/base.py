"""A layer rule: how one layer type writes its per-example gradients as Σ_r g aᵀ. It knows no structure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Rule(ABC):
    """One layer type, seen as W [c o i] acting on a [n r c i]: the gradient of example n is Σ_r g[n r c o] a[n r c i].

    Only the layer's trainable parameters take part: a frozen weight or bias has no coordinate in i.
    """

    @abstractmethod
    def covers(self, module: nn.Module) -> bool:
        """Whether this rule speaks for the module, exactly (a subclass may have another forward)."""

    @abstractmethod
    def shape(self, module: nn.Module) -> tuple[int, int, int]:
        """(c, o, i) of the packed parameters."""

    @abstractmethod
    def inputs(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        """a [n r c i] from the arguments of the module's forward."""

    @abstractmethod
    def cotangents(self, module: nn.Module, g: Tensor) -> Tensor:
        """g [k n r c o] from cotangents [k *output] of the module's output."""

    @abstractmethod
    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        """W [c o i] from the module's own trainable tensors, by their local names."""

    @abstractmethod
    def unpack(self, module: nn.Module, packed: Tensor) -> dict[str, Tensor]:
        """The inverse of ``pack``; leading axes before [c o i] are kept."""


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters that the module itself owns, by local name."""
    # named_parameters(recurse=False) is slow, and this is asked for every layer of every estimate.
    return {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
