"""Processes with parts of a model take the steps of one process, and its checkpoints are theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from natgrad.sharding import owners
from tests.gradients import shards

ROOT = Path(__file__).parents[2]
RANKS = [(world, rank) for world in shards.LAYOUTS for rank in range(world)]
Found = dict[tuple[int, int], dict[Any, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("shards")
    command = [sys.executable, "-W", "ignore", "-m", "tests.gradients.shards", str(where)]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=shared, capture_output=True, text=True, timeout=600, check=False)
    assert not ended.returncode, ended.stderr
    return where


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return {(world, rank): torch.load(folder / f"{world}.{rank}.pt") for world, rank in RANKS}


CASES = [(world, layout, name) for world in shards.LAYOUTS for layout in shards.LAYOUTS[world] for name in shards.MAKES]
RESUMED = [(world, layout, name) for world, layout in ((2, "fsdp"), (4, "fsdp"), (4, "hsdp")) for name in shards.MAKES]


@pytest.mark.parametrize(("world", "layout", "name"), CASES)
def test_processes_take_the_steps_of_one(world: int, layout: str, name: str, found: Found) -> None:
    """With accumulated and clipped gradients, unequal and empty shards, tied and frozen weights, and stacks."""
    model = shards.build(layout, divided=False)
    opt = shards.MAKES[name](model)
    expected, metrics = shards.train(model, opt, range(shards.STEPS), layout), opt.metrics(layers=True)
    for rank in range(world):
        assert float((found[world, rank][layout, name] - expected).norm() / expected.norm()) < 1e-12
        for key, told in found[world, rank]["metrics", layout, name].items():
            if "step_rms" in key:
                torch.testing.assert_close(told, metrics[key], rtol=1e-10 if name == "soap" else 1e-11, atol=0)


@pytest.mark.parametrize(("world", "layout", "name"), CASES)
def test_matrices_travel_to_their_owners_and_back(world: int, layout: str, name: str, found: Found) -> None:
    each = [found[world, rank]["measured", layout, name] for rank in range(world)]
    models = 2 if layout == "halves" else 1
    assert 0 < sum(one["sent"] for one in each) <= 2 * models  # of the bytes of all matrices
    assert all(one["reduced"] <= 3 for one in each)  # numbers for every matrix
    assert all(one["kept"] <= one["allowed"] for one in each)
    if layout == "experts":  # of two matrices and a stack, the stack does not travel
        assert sum(one["sent"] for one in each) == pytest.approx(156 / 300)
    if layout != "ddp":
        assert sum(one["kept"] for one in each) == each[0]["state"] * models  # once


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", shards.MAKES)
def test_a_checkpoint_of_two_processes_is_that_of_one(name: str, folder: Path, found: Found) -> None:
    saved, after = (found[2, 0][what, name] for what in ("state", "after"))
    model, opt = shards.resumed(folder, "fsdp", name)
    loaded = shards.state_of(opt)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    went_on = shards.train(model, opt, range(shards.STEPS, shards.STEPS + shards.AFTER), "fsdp")
    assert float((went_on - after).norm() / after.norm()) < 1e-12


@pytest.mark.parametrize(("world", "layout", "name"), RESUMED)
def test_a_checkpoint_goes_on_in_any_mesh(world: int, layout: str, name: str, found: Found) -> None:
    """Bit for bit with as many processes; others add up gradients in another order."""
    saved, after = (found[2, 0][what, name] for what in ("state", "after"))
    for rank in range(world):
        loaded, went_on = (found[world, rank][what, layout, name] for what in ("resumed", "went on"))
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
        assert float((went_on - after).norm() / after.norm()) <= (0 if world == 2 else 1e-12)


def test_a_framework_may_divide_the_model_after_the_optimizer_was_made(found: Found) -> None:
    assert torch.equal(found[2, 0]["divided later"], found[2, 0]["fsdp", "natural"])


@pytest.mark.parametrize("name", shards.MAKES)
def test_a_state_of_one_process_is_divided_where_it_is_loaded(name: str, found: Found) -> None:
    for rank in range(2):
        alone, loaded = found[2, rank]["of one", name]
        assert alone.keys() == loaded.keys()
        assert all(torch.equal(alone[key], loaded[key]) for key in alone)


@pytest.mark.parametrize("name", shards.MAKES)
def test_every_process_of_ddp_has_the_whole_state(name: str, found: Found) -> None:
    """So that one of them may write a checkpoint, which loads anywhere."""
    model = shards.build("ddp", divided=False)
    opt = shards.MAKES[name](model)
    shards.train(model, opt, range(shards.STEPS), "ddp")
    expected = shards.state_of(opt)
    one, other = (found[2, rank]["state", "ddp", name] for rank in range(2))
    assert one.keys() == other.keys() == expected.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    share = 1e-8 if name == "soap" else 1e-10  # bases turn by the rounding of factors, over 10⁻⁶
    for key in one:
        assert float((one[key] - expected[key]).norm()) <= share * float(expected[key].norm() + 1e-9)


def test_owners_are_equally_busy_and_none_keeps_more_than_its_share() -> None:
    """Largest first is at most 4/3 of the least possible (Graham 1969), which is found here by trying all."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        costs, sizes = torch.rand(2, 7, generator=generator, dtype=torch.float64).pow(4)
        every = torch.cartesian_prod(*[torch.arange(3)] * 7)
        work = torch.stack([((every == rank) * costs).sum(1) for rank in range(3)]).amax(0)
        found = torch.tensor(owners(costs.tolist(), 3))
        most = max(float(costs[found == rank].sum()) for rank in range(3))
        assert most <= 4 / 3 * float(work.min()) * (1 + 1e-12)
        kept = torch.tensor(owners(costs.tolist(), 3, sizes=sizes.tolist()))
        share = float(sizes.sum()) / 3
        assert all(float(sizes[kept == rank].sum()) <= 1.2 * share + float(sizes.max()) for rank in range(3))


def test_what_fails_in_one_process_is_raised_by_the_others(folder: Path) -> None:
    here, there = (torch.load(folder / f"2.{rank}.faults.pt") for rank in range(2))
    assert "in another process" in here["nan"][0]
    assert "holds NaN or infinity. Nothing was changed" in there["nan"][0]
    assert [here["nan"][1], there["nan"][1]] == [True, True]  # nothing has moved
    assert here["death"] < shards.TIMEOUT + 5  # of a process between its backward pass and its step


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own
@pytest.mark.parametrize("name", shards.MAKES)
def test_a_mesh_of_one_process_takes_the_steps_of_no_mesh(name: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = shards.build("fsdp", divided=True)
        opt = shards.MAKES[name](model)
        end, state = shards.train(model, opt, range(shards.STEPS), "fsdp"), shards.state_of(opt)
    finally:
        dist.destroy_process_group()
    alone = shards.build("fsdp", divided=False)
    opt = shards.MAKES[name](alone)
    expected = shards.train(alone, opt, range(shards.STEPS), "fsdp")
    assert float((end - expected).norm() / expected.norm()) < 1e-12
    assert state.keys() == shards.state_of(opt).keys()
