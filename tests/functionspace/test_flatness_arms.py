"""Long basins, and arms that few lines meet: the estimate does not know how much it has missed, and says so."""

from __future__ import annotations

import math

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
    assert found.volume.relative_error < 0.03
    assert found.heaviest < 10 / SAMPLES
    assert not caplog.records


def test_where_most_of_a_basin_is_missed_lines_are_heavy_and_the_error_is_said_to_be_a_guess(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An estimate far below the truth: most of the volume is where no line has been."""
    p = 8
    found, ball = estimate(0.2, p), math.pi ** (p / 2) / math.gamma(p / 2 + 1) * 0.5 ** (p / 2)
    assert found.volume.value < 0.5 * ball
    assert found.heaviest > 20 / SAMPLES
    assert found.volume.relative_error > 2 * found.heaviest
    assert any("flatness: the error of volume is a guess" in message for message in caplog.messages)


def ellipse(length: float, radius: float) -> Flatness:
    """y₁² + (y₂/length)² < ½ in y = w."""
    return flatness(
        *(lambda params, x: params["w"][None], None, 0.5, ng.Euclidean()),
        loss=lambda y: y[0, 0].square() + (y[0, 1] / length).square(),
        radius=radius,
        params={"w": torch.zeros(2, dtype=torch.float64)},
        generator=torch.Generator().manual_seed(0),
    )


def test_a_basin_that_is_longer_than_numbers_have_digits() -> None:
    """10³⁰ times as long as wide: coordinates in which it is round have a determinant all the same."""
    found = ellipse(1e30, radius=1e40)
    for volume in (found.volume, found.euclidean):
        assert abs(volume.value - 0.5 * math.pi * 1e30) < 4 * volume.error
        assert volume.relative_error < 0.01


def test_a_basin_that_is_too_long_to_be_fitted() -> None:
    """10⁶⁰ times as long as wide: the coordinates stretch a few times a round, and there are 64 rounds."""
    with pytest.raises(ValueError, match=r"after 64 rounds of 256 random lines: .* It is unbounded, .* or too long"):
        ellipse(1e60, radius=1e80)
