"""Basins with arms that few lines meet: the estimate says so, where its standard error cannot know."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.functionspace import Flatness, flatness

SAMPLES = 512


def estimate(bend: float, p: int) -> Flatness:
    """Of ‖y‖² < ½ with y = A(w + bend·sinh w), a ball in y whatever A is; A is nearly singular."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(p, p, generator=generator, dtype=torch.float64) + torch.eye(p, dtype=torch.float64)

    def model(params: dict[str, Tensor], x: None) -> Tensor:
        return (A @ (params["w"] + bend * torch.sinh(params["w"])))[None]

    return flatness(
        *(model, None, 0.5, ng.Euclidean()),
        loss=lambda y: y.square().sum(),
        samples=SAMPLES,
        params={"w": torch.zeros(p, dtype=torch.float64)},
        generator=generator,
    )


def test_an_ellipsoid_has_no_heavy_line_and_a_true_error(caplog: pytest.LogCaptureFixture) -> None:
    p = 8
    found, ball = estimate(0.0, p), math.pi ** (p / 2) / math.gamma(p / 2 + 1) * 0.5 ** (p / 2)
    assert abs(found.volume.value - ball) < 4 * found.volume.error
    assert found.heaviest < 10 / SAMPLES
    assert not caplog.records


def test_where_most_of_a_basin_is_missed_one_line_is_heavy_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An estimate far below the truth, many standard errors away: it is told by the weight of a line."""
    p = 8
    found, ball = estimate(0.2, p), math.pi ** (p / 2) / math.gamma(p / 2 + 1) * 0.5 ** (p / 2)
    assert found.volume.value < 0.5 * ball
    assert found.heaviest > 20 / SAMPLES
    (told,) = caplog.messages
    assert re.match(
        rf"one line of {SAMPLES} has .* its error bar too small. Raise samples= until neither changes", told
    )
