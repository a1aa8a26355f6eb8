"""What the control keeps: the part of K⁻¹ that is the same whichever image has which row.

A permutation of the images leaves every matrix aI + b11ᵀ as it is. So the control takes away only what K⁻¹ has beside
the nearest such matrix. Where b < 0, the part that stays weighs the mean of a batch less than deviations from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from experiments.files import markdown_table, write_json
from experiments.images import Feed, Images, Scale
from experiments.sobolev_cifar.arms import sobolev
from experiments.sobolev_cifar.report import NAMES
from natgrad import Sobolev


def exchangeable(C: Tensor) -> Tensor:
    """The matrix aI + b11ᵀ nearest to C [n n]: the mean of the diagonal, and the mean of the rest.

    >>> exchangeable(torch.tensor([[2.0, 1.0], [3.0, 4.0]]))
    tensor([[3., 2.],
            [2., 3.]])
    """
    n = len(C)
    diagonal = C.diagonal().mean()
    rest = (C.sum() - C.diagonal().sum()) / (n * (n - 1))
    return torch.full_like(C, float(rest)).fill_diagonal_(float(diagonal))


def described(images: Images, batch: int, batches: int = 50) -> dict[str, Any]:
    """Means over batches of the training, in float64."""
    metric = sobolev().metric
    assert isinstance(metric, Sobolev)
    feed = Feed.of(images.train, Scale.of(images.train), batch, torch.Generator().manual_seed(0))
    rows = [coupling(metric.gram(x, batch)) for x, _ in islice(feed.epoch(), batches)]
    means = {name: float(f"{fmean(row[name] for row in rows):.4g}") for name in rows[0]}
    return {"dataset": images.name, "batch": batch, "batches": len(rows), **means}


def coupling(K: Tensor) -> dict[str, float]:
    """What K [n n] does to a batch: the numbers of a row of the table."""
    C, one = torch.linalg.inv(K), K.new_ones(len(K))
    kept = exchangeable(C)
    return {
        "similarity": float((K.sum() - K.trace()) / (len(K) * (len(K) - 1))),
        "diagonal": float(C.diagonal().mean()),
        "along_the_mean": float(one @ C @ one / len(K)),
        "kept": float(kept.square().sum() / C.square().sum()),
    }


def save(new: Sequence[dict[str, Any]], results: Path) -> str:
    """``kernel.json`` and ``kernel.md``; data sets that are not measured again stay. The table is returned."""
    path = results / "kernel.json"
    before = json.loads(path.read_text()) if path.exists() else []
    every = {one["dataset"]: one for one in [*before, *new]}
    write_json(path, list(every.values()))
    text = table(list(every.values()))
    (results / "kernel.md").write_text(text + "\n")
    return text


def table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    head = ["images", "mean of K, two images", "mean diagonal of K⁻¹", "1ᵀK⁻¹1/n"]
    names = "similarity", "diagonal", "along_the_mean"
    return markdown_table(
        [*head, "share of the nearest aI + b11ᵀ in ‖K⁻¹‖²"],
        (
            [NAMES[one["dataset"]], *(f"{one[name]:.2f}" for name in names), f"{100 * one['kept']:.0f} %"]
            for one in found
        ),
    )
