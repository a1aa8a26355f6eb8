"""What the library promises of the experiment: VGG16 on both CIFAR sets, at a tiny size where it is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import natgrad as ng
from experiments.cifar import CIFAR10, CIFAR100, write_pieces
from experiments.sobolev_cifar import arms
from experiments.sobolev_cifar.command import main, parsed
from experiments.sobolev_cifar.training import vgg16
from tests.experiments.test_cifar import images


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A run chooses threads and convolutions for its whole process."""
    threads, fastest, tf32 = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = fastest, tf32


def test_the_experiment_has_the_network_and_the_hyper_parameters_of_the_paper() -> None:
    """Bai et al. (2022), §6.3 and App. D. The lengthscale is the kernel's: the input of the network is not scaled."""
    args = parsed([])
    assert (args.epochs, args.batch, args.schedules) == (50, 128, ["tenths", "fifths"])
    assert len(args.seeds) >= 3
    assert arms.Constants() == arms.Constants(0.01, 0.003, 0.03, 0.9, metric_every=10, inverse_every=100)
    sobolev, amari = arms.sobolev().metric, arms.amari().metric
    assert isinstance(sobolev, ng.Sobolev)
    assert (sobolev.nu, sobolev.lengthscale, sobolev.base) == (1.5, 20.0, amari)
    for classes in (10, 100):
        network = vgg16(classes, args.width)
        kinds = [sum(isinstance(m, kind) for m in network) for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Linear)]
        assert kinds == [13, 13, 1]


def test_sobolev_and_amari_run_on_both_sets_and_seeds_have_a_mean_and_a_spread_that_are_drawn(
    tmp_path: Path,
) -> None:
    for what in (CIFAR10, CIFAR100):
        found = images(what, 48)
        for split, part in (("train", found.train), ("test", found.test)):
            write_pieces(tmp_path / "data", f"{what.name}_{split}", part.x.numpy(), part.y.numpy())
    places = ["--data", f"{tmp_path}/data", "--out", f"{tmp_path}/out", "--results", f"{tmp_path}/results"]
    tiny = [
        "--width",
        "2",
        "--batch",
        "24",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--schedules",
        "tenths",
        "--commit",
        "abc",
    ]
    main([*places, *tiny, "--datasets", "cifar10", "cifar100", "--arms", "amari", "sobolev", "--seeds", "0", "1"])
    main([*places, "--report"])
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    for what in (CIFAR10, CIFAR100):
        curves = summary[what.name]["tenths"]
        assert list(curves) == ["amari", "sobolev"]
        for curve in curves.values():
            assert curve["seeds"] == [0, 1]
            assert len(curve["train_loss"]["mean"]) == 2
            assert min(curve["train_loss"]["deviation"]) > 0
        assert (tmp_path / "results" / f"{what.name}-tenths.svg").stat().st_size > 0
