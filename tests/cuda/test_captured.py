"""On a GPU: the CIFAR experiment with passes as CUDA graphs has the numbers that it has without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn
from torch.nn import functional

from experiments.cifar import CIFAR10
from experiments.sobolev_cifar import arms
from experiments.sobolev_cifar.arms import FIFTHS
from experiments.sobolev_cifar.captured import cuda_graph
from experiments.sobolev_cifar.training import Job, Pace, Training
from tests.experiments.test_cifar import images
from tests.experiments.tiny import SETUP


@pytest.mark.gpu("torch.compile")
@pytest.mark.parametrize(
    "arm",
    [
        replace(arms.sobolev(), constants=arms.Constants(lr=1e-3, clip=1e-3, metric_every=3, inverse_every=6)),
        arms.Natural(1e-3, 0.1),
        arms.Momentum(1e-3, 0.0),
    ],
    ids=lambda arm: arm.name,
)
@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
@pytest.mark.filterwarnings("default")  # torch.compile warns about its own code and about the precision of products
def test_captured_passes_train_as_others_do(arm: arms.Config, fuse: bool) -> None:
    """The parameters go the same way, where other batches lead elsewhere.

    Not to the same place: convolutions add in another order from run to run, and training enlarges that.
    """
    pictures, setup = images(CIFAR10, 128), replace(SETUP, batch=8, width=8, device="cuda")
    ways = []
    for pace in (Pace(), Pace(capture=cuda_graph, fuse=fuse)):
        training = Training(Job("cifar10", FIFTHS, arm, seed=0), replace(setup, pace=pace), pictures)
        start = nn.utils.parameters_to_vector(training.model.parameters()).detach().clone()
        training.epoch()
        training.epoch()
        ways.append((nn.utils.parameters_to_vector(training.model.parameters()).detach() - start).cpu())
    plain, captured = ways
    assert float(captured.norm()) == pytest.approx(float(plain.norm()), rel=0.1)
    assert functional.cosine_similarity(plain, captured, dim=0) > 0.6
