"""Two processes with shards of the parameters take the steps of one process, and its checkpoints are theirs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gradients import shards

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("shards")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gradients.shards", str(where)]
    ranks = [subprocess.Popen(command, cwd=ROOT, env={**shared, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    return where


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[Any, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", shards.MAKES)
@pytest.mark.parametrize("layout", shards.LAYOUTS)
def test_two_processes_take_the_steps_of_one(layout: str, name: str, found: list[dict[Any, Any]]) -> None:
    """With accumulated and clipped gradients, unequal and empty shards, tied and frozen weights, and a stack."""
    model = shards.build(layout, sharded=False)
    expected = shards.train(model, shards.MAKES[name](model), range(shards.STEPS), layout, None)
    bound = 1e-3 if name == "soap" else 1e-12  # rounding chooses the basis of a null space
    for each in found:
        assert float((each[layout, name] - expected).norm() / expected.norm()) < bound


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", shards.MAKES)
def test_a_checkpoint_of_two_processes_goes_on_in_one(name: str, folder: Path, found: list[dict[Any, Any]]) -> None:
    expected = found[0]["after", name]
    assert float((shards.resumed(folder, name) - expected).norm() / expected.norm()) < 1e-12


def test_what_is_not_finite_in_one_process_is_raised_by_all(found: list[dict[Any, Any]]) -> None:
    assert "in another process" in found[0]["nan"]
    assert "holds NaN or infinity. Nothing was changed" in found[1]["nan"]
