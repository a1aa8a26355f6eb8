"""What the control keeps: the part of K⁻¹ that is the same whichever image has which row.

A permutation of the images leaves every matrix aI + b11ᵀ as it is. So the control takes away only what K⁻¹ has beside
the nearest such matrix. Where b < 0, the part that stays weighs the mean of a batch less than deviations from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from experiments.images import Feed, Images, Scale
from experiments.sobolev_cifar.arms import sobolev
from experiments.sobolev_cifar.verdict import NAMES
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
    rows = [_numbers(metric.gram(x, batch)) for (x, _), _ in zip(feed.epoch(), range(batches), strict=False)]
    means = {name: float(f"{fmean(row[name] for row in rows):.4g}") for name in rows[0]}
    return {"dataset": images.name, "batch": batch, "batches": len(rows), **means}


def _numbers(K: Tensor) -> dict[str, float]:
    C, one = torch.linalg.inv(K), K.new_ones(len(K))
    top = torch.linalg.eigh(K).eigenvectors[:, -1]
    kept = exchangeable(C)
    return {
        "similarity": float((K.sum() - K.trace()) / (len(K) * (len(K) - 1))),
        "diagonal": float(C.diagonal().mean()),
        "along_the_mean": float(one @ C @ one / len(K)),
        "kept": float(kept.square().sum() / C.square().sum()),
        "mean_in_top": float((one @ top).square() / len(K)),
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    head = [
        "images",
        "mean of K, two images",
        "mean diagonal of K⁻¹",
        "1ᵀK⁻¹1/n",
        "share of the nearest aI + b11ᵀ in ‖K⁻¹‖²",
        "share of 1 in the first eigenvector of K",
    ]
    rows = [
        [
            NAMES[one["dataset"]],
            f"{one['similarity']:.2f}",
            f"{one['diagonal']:.2f}",
            f"{one['along_the_mean']:.2f}",
            f"{one['kept']:.0%}".replace("%", " %"),
            f"{one['mean_in_top']:.0%}".replace("%", " %"),
        ]
        for one in found
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
