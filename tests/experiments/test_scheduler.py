"""Many runs: one that fails stops no other, and is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
from torch import nn
from torch.optim import Optimizer

from experiments.cifar import CIFAR10
from experiments.sobolev_cifar.arms import TENTHS, Config, Momentum
from experiments.sobolev_cifar.record import load_all
from experiments.sobolev_cifar.scheduler import Place, Task, perform_all
from experiments.sobolev_cifar.training import Job, Setup
from tests.experiments.tiny import Ample


@final
@dataclass(frozen=True)
class Broken(Config):
    """An optimizer that there is not, or one whose process is killed, as by a machine without memory."""

    name: str
    killed: bool = False

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        if self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such optimizer")

    def numbers(self) -> dict[str, float]:
        return {}

    def looks(self, step: int) -> bool:
        return False

    def at(self, numbers: Mapping[str, float]) -> Config:
        return self


def test_a_run_that_fails_stops_no_other_and_is_told_in_the_end(folder: Path) -> None:
    setup, place = Setup(epochs=1, batch=24, width=2), Place(folder / "data", folder, folder / "out")
    arms: list[Config] = [Broken("broken"), Momentum(0.01, 0.0)]
    tasks = [Task(Job("cifar10", TENTHS, arm, 0), setup, CIFAR10, place) for arm in arms]
    with pytest.raises(SystemExit, match=r"1 of 2 runs failed\ncifar10-tenths-broken-0: (.|\n)*no such optimizer"):
        perform_all(tasks, 1, Ample())
    (other,) = load_all([folder / "out"])
    assert other.finished
    assert other.name.arm == "sgd"


def test_a_process_that_is_killed_loses_its_own_run_only(folder: Path) -> None:
    setup, place = Setup(epochs=1, batch=24, width=2), Place(folder / "data", folder, folder / "out")
    killed, sgd = Broken("killed", killed=True), Momentum(0.01, 0.0)
    arms: list[tuple[Config, int]] = [(killed, 0), (sgd, 0), (killed, 1), (sgd, 1)]
    tasks = [Task(Job("cifar10", TENTHS, arm, seed), setup, CIFAR10, place) for arm, seed in arms]
    with pytest.raises(SystemExit, match=r"2 of 4 runs failed(.|\n)*-killed-0: (.|\n)*-killed-1: "):
        perform_all(tasks, 2, Ample())
    assert [(run.name.arm, run.name.seed, run.finished) for run in load_all([folder / "out"])] == [
        ("sgd", 0, True),
        ("sgd", 1, True),
    ]
