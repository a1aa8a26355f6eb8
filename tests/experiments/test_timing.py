"""Seconds are those of the images, batches, network and machine of a run, or there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.cifar import CIFAR100
from experiments.sobolev_cifar import paired_stats, report
from experiments.sobolev_cifar.command import main
from experiments.sobolev_cifar.figures import draw
from experiments.sobolev_cifar.record import Name, Point, Record
from tests.experiments.test_cifar import images, write_archive
from tests.experiments.tiny import MACHINE, SIZES, TINY, write_timing


def run(dataset: str, arm: str, seed: int, **settings: Any) -> Record:
    """A finished run."""
    history = [Point(e + 1, 1.0 / (e + 1), 1.0, 0.3 * (e + 1), 50.0 * (e + 1), 4) for e in range(2)]
    name = Name(dataset, "tenths", arm, seed)
    return Record(name, {**SIZES, **settings}, MACHINE, history, finished=True, diverged=False)


@pytest.mark.parametrize(
    "other",
    [
        {"dataset": "cifar100"},
        {"batch": 64},
        {"width": 3},
        {"layout": "torch.contiguous_format"},
        {"limit": 300},
        {"device": "another"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_seconds_of_other_conditions_are_not_used(other: dict[str, Any], tmp_path: Path) -> None:
    write_timing(tmp_path, {"amari": 3.0}, **other)
    (found,) = report.groups([run("cifar10", "amari", 0)], tmp_path / "timing.json")
    assert found.alone is None
    write_timing(tmp_path, {"amari": 3.0})
    (found,) = report.groups([run("cifar10", "amari", 0)], tmp_path / "timing.json")
    assert found.seconds == [3.0, 6.0]
    mixed = [run("cifar10", "amari", 0), run("cifar10", "amari", 1, batch=16)]
    (found,) = report.groups(mixed, tmp_path / "timing.json")
    assert found.alone is None


def test_images_without_a_measurement_have_no_seconds_in_the_tables(tmp_path: Path) -> None:
    write_timing(tmp_path, {"amari": 3.0, "sobolev": 4.0})
    records = [run(d, arm, s) for d in ("cifar10", "cifar100") for arm in ("amari", "sobolev") for s in (0, 1)]
    found = report.save(records, tmp_path)
    paired_stats.save(found, tmp_path)
    ten, hundred = ([g for g in found if g.dataset == name] for name in ("cifar10", "cifar100"))
    assert [group.row()[-1] for group in ten] == ["3.00", "4.00"]
    assert [group.row()[-1] for group in hundred] == ["–", "–"]
    summary = json.loads((tmp_path / "summary.json").read_text())["cifar100"]["tenths"]["amari"]
    assert summary["seconds_an_epoch_alone"] is None
    reached = (tmp_path / "reached.md").read_text()
    assert "| cifar10 | tenths | K-FAC (Amari): training loss 0.5000 | 2, 6 s | 2, 8 s |" in reached
    assert "| cifar100 | tenths | K-FAC (Amari): training loss 0.5000 | 2, – | 2, – |" in reached
    levels = json.loads((tmp_path / "pairs.json").read_text())["reached"]
    assert [level["seconds"] for level in levels if level["dataset"] == "cifar100"] == [{}, {}]
    assert [path.name for path in draw(found, tmp_path)] == ["cifar10-tenths.svg", "cifar100-tenths.svg"]
    alone, shared = ((tmp_path / f"{name}-tenths.svg").read_text() for name in ("cifar10", "cifar100"))
    assert ">seconds, one run on the device<" in alone
    assert ">seconds, several runs on the device<" in shared
    write_timing(tmp_path, {"amari": 3.0})  # the other one has no curve against seconds
    draw(report.save(records, tmp_path), tmp_path)
    fewer = (tmp_path / "cifar10-tenths.svg").read_text()
    assert ">seconds, one run on the device<" in fewer
    assert fewer.count("PolyCollection") == alone.count("PolyCollection") - 2


def test_a_measurement_of_cifar100_stands_beside_that_of_cifar10(tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    data.mkdir()
    results.mkdir()
    write_archive(data, images(CIFAR100, 64))
    write_timing(results, {"amari": 3.0})
    (before,) = json.loads((results / "timing.json").read_text())
    places = ["--data", f"{data}", "--out", f"{tmp_path}/out", "--results", f"{results}"]
    for batch in ("32", "16", "16"):
        what = ["--datasets", "cifar100", "--arms", "amari", "--batch", batch]
        main([*places, *TINY, "--time", "--rounds", "1", *what])
    first, *others = json.loads((results / "timing.json").read_text())
    assert first == before
    assert [(one["dataset"], one["setup"]["batch"]) for one in others] == [("cifar100", 32), ("cifar100", 16)]
    with pytest.raises(SystemExit, match=r"times of amari on cifar100 .*: name them in --arms, too"):
        main([*places, *TINY, "--time", "--rounds", "1", *what[:3], "sgd", "--batch", "16"])
