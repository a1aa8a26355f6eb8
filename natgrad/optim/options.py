"""The options of an optimizer that most uses leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from natgrad.rules.base import Rule


class Options(TypedDict, total=False):
    """What most uses leave alone.

    ``momentum`` and ``weight_decay`` (decoupled) are group options, as ``lr`` is; ``groups`` are parameter groups as in
    torch.optim, the parameters that no group names form the first; ``output`` takes what the model returns to its
    output tensor; ``generator`` is for sampled metrics (by default one of our own, so the user's stream stays);
    ``memory`` is the bound, in bytes, on what the structure may occupy; ``rules`` are for layers of one's own.
    """

    momentum: float
    weight_decay: float
    groups: Iterable[dict[str, Any]]
    output: Callable[[Any], Tensor]
    generator: torch.Generator
    memory: int
    rules: Sequence[Rule]


def check_arguments(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse what is not a model, and options that there are not."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"NaturalGradient takes the model, an nn.Module, not {type(model).__name__}")
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"NaturalGradient has no option {', '.join(unknown)}: it has {known}")
