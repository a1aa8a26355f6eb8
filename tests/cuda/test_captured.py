"""On a GPU: the CIFAR experiment with passes as CUDA graphs has the numbers that it has without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.cifar import CIFAR10
from experiments.sobolev_cifar import arms
from experiments.sobolev_cifar.arms import FIFTHS
from experiments.sobolev_cifar.captured import cuda_graph
from experiments.sobolev_cifar.training import Job, Pace, Training
from tests.experiments.test_cifar import images
from tests.experiments.tiny import SETUP


@pytest.mark.parametrize(
    "arm",
    [
        # Steps are short: long ones would enlarge what rounding in another order makes of a loss.
        replace(arms.sobolev(), constants=arms.Constants(lr=1e-3, clip=1e-3, metric_every=3, inverse_every=6)),
        arms.Natural(1e-3, 0.1),
        arms.Momentum(0.01, 0.0),
    ],
    ids=lambda arm: arm.name,
)
def test_captured_passes_train_as_others_do(arm: arms.Config) -> None:
    """Two epochs of sixteen steps; convolutions add in another order from run to run."""
    pictures, setup = images(CIFAR10, 128), replace(SETUP, batch=8, width=8, device="cuda")
    losses = []
    for pace in (Pace(), Pace(capture=cuda_graph)):
        training = Training(Job("cifar10", FIFTHS, arm, seed=0), replace(setup, pace=pace), pictures)
        training.epoch()
        training.epoch()
        losses.append([point.train_loss for point in training.history])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
