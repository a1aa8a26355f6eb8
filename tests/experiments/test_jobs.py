"""Many runs: one that fails stops no other, and is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from experiments.arms import TENTHS, Arm, Momentum
from experiments.cifar import CIFAR10
from experiments.jobs import Place, Task, perform_all
from experiments.packing import write_pieces
from experiments.record import load_all
from experiments.training import Budget, Job, Setup
from tests.experiments.test_cifar import images


@final
@dataclass(frozen=True)
class Broken(Arm):
    """An optimizer that there is not."""

    name: str = "broken"

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        raise ValueError("no such optimizer")

    def numbers(self) -> dict[str, float]:
        return {}


@final
@dataclass(frozen=True)
class Ample(Budget):
    """Time for everything."""

    def allows(self, seconds: float) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A run chooses threads and convolutions for its whole process."""
    threads, fastest = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = fastest


def test_a_run_that_fails_stops_no_other_and_is_told_in_the_end(tmp_path: Path) -> None:
    found = images(CIFAR10, 48)
    for split, part in (("train", found.train), ("test", found.test)):
        write_pieces(tmp_path / "data", f"cifar10_{split}", part.x.numpy(), part.y.numpy())
    setup, place = Setup(epochs=1, batch=24, width=2), Place(tmp_path / "data", tmp_path, tmp_path / "out")
    tasks = [Task(Job("cifar10", TENTHS, arm, 0), setup, CIFAR10, place) for arm in (Broken(), Momentum(0.01, 0.0))]
    with pytest.raises(SystemExit, match=r"1 of 2 runs failed\ncifar10-tenths-broken-0: (.|\n)*no such optimizer"):
        perform_all(tasks, 1, Ample())
    (other,) = load_all([tmp_path / "out"])
    assert other.finished
    assert other.name.arm == "sgd"
