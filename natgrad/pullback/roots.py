"""The root of the output metric at the outputs, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.model import tensors_of
from natgrad.output.metric import OutputMetric
from natgrad.pullback.parts import Part, examples


def draw(
    metric: OutputMetric, y: Tensor, target: Any, generator: torch.Generator | None, parts: list[Part]
) -> tuple[Tensor | None, int]:
    """The root and its number of columns. One that is exact and comes in parts is checked, and not kept."""
    n = y.shape[0]
    if len(parts) > 1 and metric.exact and all(t.ndim and t.shape[0] == n for t in tensors_of(target)):
        sizes = {_columns(metric, y[a:b], examples(target, (a, b), n)) for a, b in parts}
        if len(sizes) == 1 and (columns := sizes.pop()) is not None:
            return None, columns
    root = root_at(metric, y, target, generator)
    return root, root.shape[0]


def _columns(metric: OutputMetric, y: Tensor, target: Any) -> int | None:
    """K at a part of the examples; None for a metric that was made for one batch and knows only all of it."""
    with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
        root = metric.root(y, target)
    if root.shape[1:] != y.shape:
        return None
    _check_finite(metric, root)
    return root.shape[0]


def root_at(metric: OutputMetric, y: Tensor, target: Any, generator: torch.Generator | None) -> Tensor:
    """s [k n *out] at y [n *out], of the right shape and finite."""
    with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
        root = metric.root(y, target, generator).detach()
    if root.shape[1:] != y.shape:
        raise ValueError(
            f"{metric!r}.root must be [k n *out] with [n *out] = {tuple(y.shape)}, got {tuple(root.shape)}"
        )
    _check_finite(metric, root)
    return root


def _check_finite(metric: OutputMetric, root: Tensor) -> None:
    if not bool(root.isfinite().all()):
        raise NonFiniteError(f"{metric!r} is not finite at the outputs: they are too large, or outside its domain")
