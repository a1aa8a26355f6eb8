"""The study of the points of a kernel: more points see more of the norm, and the tables are those of the record."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from experiments import sobolev_points
from experiments.sobolev_points import METRICS

RECORD = Path(__file__).parents[2] / "experiments" / "results" / "sobolev_points" / "record.json"


def test_every_point_adds_to_the_norm_that_is_seen() -> None:
    """The norm of a projection on more kernel functions is not smaller, and never above that of the function."""
    for of_seeds in zip(*sobolev_points.shares(seeds=2).values(), strict=True):
        assert list(of_seeds) == sorted(of_seeds)
        assert 0 < of_seeds[0] < of_seeds[-1] < 1


def test_every_metric_trains_and_the_errors_of_a_short_study_are_numbers() -> None:
    for name in METRICS:
        net = sobolev_points.train(name, 0.0, 1, 0.03, 0.1, steps=10)
        assert net is not None
        x = sobolev_points.inputs(500, torch.Generator().manual_seed(0))
        assert sobolev_points.error(net, x) < sobolev_points.error(sobolev_points.network(1), x)


def test_the_record_has_every_metric_with_a_choice_inside_the_grid() -> None:
    for of_noise in json.loads(RECORD.read_text())["errors"].values():
        assert list(of_noise) == list(METRICS)
        for found in of_noise.values():
            assert len(found["errors"]) == sobolev_points.SEEDS
            assert all(math.isfinite(e) for e in found["errors"])
