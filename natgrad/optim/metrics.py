"""What an optimizer tells while it trains: a flat dict of numbers, for which nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.log import Numbers
from natgrad.optim.estimates import MetricTracker
from natgrad.optim.parameters import ParameterStatus, ParameterTable
from natgrad.optim.preconditioner import Preconditioner
from natgrad.step.base import Rates, squared_length


def of_parameters(table: ParameterTable, params: Mapping[str, Tensor]) -> Numbers:
    """How many numbers the metric moves, how many AdamW steps, and how many rest."""
    metric = {name for name, status in table.status.items() if status is ParameterStatus.METRIC}
    names = {"metric": metric, "adamw": table.adamw}
    counts = {key: sum(params[name].numel() for name in of) for key, of in names.items()}
    rest = sum(p.numel() for p in params.values()) - sum(counts.values())
    return {f"params_{key}": count for key, count in (counts | {"still": rest}).items()}


def ages(tracker: MetricTracker, preconditioner: Preconditioner) -> tuple[int | None, int | None]:
    """Steps since the metric was estimated, and since it was inverted, 0 if the last step did so.

    None in the identity metric, which never is.
    """
    if tracker.constant:
        return None, None
    last = tracker.step - 1
    return last - tracker.estimated, last - preconditioner.inverted


def of_metric(tracker: MetricTracker, preconditioner: Preconditioner) -> Numbers:
    """How old the metric and its inverse are, and how often this process has made them."""
    age, inverse_age = ages(tracker, preconditioner)
    counts = {"metric_updates": tracker.estimates, "inverse_updates": preconditioner.inversions}
    return {"metric_age": age, "inverse_age": inverse_age, **counts, "failed_inversions": preconditioner.failures}


def of_natural_step(terms: Sequence[Tensor], rates: Rates, scale: Tensor | float | None) -> Numbers:
    """Of c·v with v = (G + λ)⁻¹ω and ⟨ω, v⟩ of every group: its length, and what its quadratic model promises."""
    if not terms:
        return {}
    square, c = squared_length(terms, rates), 1.0 if scale is None else scale
    slope = sum(term * lr for term, (_, lr) in zip(terms, rates, strict=True))
    return {"step_length": c * square.clamp(min=0).sqrt(), "predicted_decrease": c * slope - c**2 * square / 2}


def step_rms(lengths: Iterable[tuple[Sequence[Tensor], float | Tensor]], count: int) -> Tensor | None:
    """√mean((lr·v)²) [] from ‖v‖ [] of the tensors of every group, which have ``count`` numbers together."""
    squares = [torch.stack(list(group)).square().sum() * lr**2 for group, lr in lengths if group]
    return (torch.stack(squares).sum() / count).sqrt() if squares else None
