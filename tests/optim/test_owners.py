"""Processes that keep the metric of their layers alone take the steps of one process that keeps all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optim import owners

ROOT = Path(__file__).parents[2]
Found = dict[tuple[int, int], dict[Any, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("owners")
    command = [sys.executable, "-W", "ignore", "-m", "tests.optim.owners", str(where)]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=shared, capture_output=True, text=True, timeout=900, check=False)
    assert not ended.returncode, ended.stderr
    return where


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    ranks = [(world, rank) for world in owners.CASES for rank in range(world)]
    return {(world, rank): torch.load(folder / f"{world}.{rank}.pt") for world, rank in ranks}


CASES = [(world, layout, name) for world, of in owners.CASES.items() for layout, names in of.items() for name in names]


@pytest.mark.parametrize(("world", "layout", "name"), CASES)
def test_processes_take_the_steps_of_one_on_the_joint_batch(world: int, layout: str, name: str, found: Found) -> None:
    """With accumulated and clipped gradients, unequal batches, shards of unequal size and without rows."""
    model, opt, parts = owners.joint(name, world)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = owners.train(model, opt, range(owners.STEPS), parts)
    for rank in range(world):
        assert float((found[world, rank][layout, name] - expected).norm() / (expected - start).norm()) < 1e-12


@pytest.mark.parametrize(("world", "layout"), [(world, layout) for world, of in owners.CASES.items() for layout in of])
def test_a_process_keeps_and_sends_its_share(world: int, layout: str, found: Found) -> None:
    """F: the bytes of all factors; an owner keeps them and their inverses, and gets their triangles."""
    model, opt, parts = owners.joint("kfac", world)
    owners.train(model, opt, range(owners.STEPS), parts)
    F = sum(t.numel() for t in opt.tracker.average.tensors().values())
    largest = max(t.numel() for t in opt.tracker.average.tensors().values())
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    teams = 2 if layout == "half" else world
    for rank in range(world):
        told = found[world, rank]["measured", layout]
        plain = told["step"]["all_to_all_single"]
        assert told["kept"] <= 1.2 * 2 * F / teams + 2 * largest
        assert told["estimate"]["all_to_all_single"] - plain <= 0.55 * 8 * F * world / teams
        assert told["estimate and inverse"]["all_to_all_single"] == told["estimate"]["all_to_all_single"]
        assert plain <= 2 * 8 * parameters  # 8 bytes where a number has 4
        assert sum(told["step"].values()) - plain <= 64  # sums that all share
    share, each = opt.plan(world=teams).share, [found[world, rank]["measured", layout] for rank in range(world)]
    assert share.bytes == 8 * max(told["kept"] for told in each)  # as the plan says
    estimates = [told["estimate"]["all_to_all_single"] - told["step"]["all_to_all_single"] for told in each]
    assert teams < world or share.estimate == max(estimates)


GOES_ON = [(2, "fsdp"), (2, "ddp"), (4, "fsdp"), (4, "hsdp")]


@pytest.mark.parametrize("name", owners.SAVED)
@pytest.mark.parametrize(("world", "layout"), GOES_ON)
def test_a_checkpoint_of_two_processes_goes_on_in_any_mesh(world: int, layout: str, name: str, found: Found) -> None:
    """From a fresh optimizer."""
    after = found[2, 0]["after", "fsdp", name]
    for rank in range(world):
        assert float((found[world, rank]["went on", layout, name] - after).norm() / after.norm()) < 1e-12


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", owners.SAVED)
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_a_checkpoint_of_two_processes_is_that_of_one(layout: str, name: str, folder: Path, found: Found) -> None:
    saved, after = (found[2, 0][what, layout, name] for what in ("state", "after"))
    model, opt = owners.resumed(folder, layout, "", name)
    loaded = {key: owners.whole(t) for key, t in owners.flat(opt.state_dict()).items()}
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    went_on = owners.train(model, opt, range(owners.HALF, owners.STEPS), [(0, owners.N)])
    assert float((went_on - after).norm() / after.norm()) < 1e-12


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_what_fails_in_one_process_is_raised_by_all_and_changes_nothing(layout: str, found: Found) -> None:
    first, second = (found[2, rank]["faults", layout] for rank in range(2))
    for what in ("input", "refresh"):
        assert second[what].startswith("NonFiniteError: at step 2: the outputs are not finite")
    assert second["empty"].startswith("ValueError: the batch is empty")
    for what in ("input", "empty", "refresh"):
        assert re.match("[A-Za-z]*Error: in process 1: ", first[what]), first[what]
    assert sum("SingularMetricError: in process" in each["singular"] for each in (first, second)) == 1
    for each in (first, second):
        assert "NonFiniteError: at step 2: " in each["gradient"]
        assert "SingularMetricError: " in each["singular"]
        assert "the factor A of first.weight + first.bias" in each["singular"]
        assert all(each[what, "same"] for what in ("input", "empty", "refresh", "gradient", "singular"))
        assert torch.equal(*each["end"])  # the steps after it are those of a run without


def test_where_a_process_dies_before_its_step_the_others_raise(folder: Path) -> None:
    """Within the timeout of the group; a restart goes on exactly from a checkpoint, as above."""
    said, seconds = torch.load(folder / "death.pt")
    assert said
    assert seconds < owners.TIMEOUT + 5
