"""Optimizers are compared within a seed, and the statistics are those of Student."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from scipy import stats

from experiments.sobolev_cifar import paired_stats, report
from experiments.sobolev_cifar.paired_stats import Paired
from experiments.sobolev_cifar.record import Name, Point, Record
from tests.experiments.tiny import MACHINE, SIZES, write_timing


def run(arm: str, seed: int, losses: Sequence[float], accuracies: Sequence[float], schedule: str = "tenths") -> Record:
    """A finished run with these numbers."""
    history = [
        Point(e + 1, loss, loss, accuracy, 2.0 * (e + 1), 4)
        for e, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True))
    ]
    return Record(Name("cifar10", schedule, arm, seed), SIZES, MACHINE, history, finished=True, diverged=False)


def test_three_differences_have_the_statistics_that_are_computed_by_hand() -> None:
    """1, 2, 6: mean 3, variance (4 + 1 + 9)/2 = 7, t = 3/√(7/3); with two degrees p = 1 − t/√(2 + t²)."""
    found = Paired((1.0, 2.0, 6.0))
    t = 3 / math.sqrt(7 / 3)
    assert (found.mean, found.deviation, found.t) == pytest.approx((3.0, math.sqrt(7), t))
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.p == pytest.approx(0.1885, abs=5e-5)
    assert found.margin == pytest.approx(4.302653 * math.sqrt(7 / 3), rel=1e-6)


def test_the_paired_test_is_that_of_scipy() -> None:
    one, other = [0.31, 0.5, 0.27, 0.44], [0.3, 0.41, 0.29, 0.35]
    found = Paired(tuple(a - b for a, b in zip(one, other, strict=True)))
    expected = stats.ttest_rel(one, other)
    assert (found.t, found.p) == pytest.approx((expected.statistic, expected.pvalue))


def test_differences_that_are_one_number_have_an_infinite_t_unless_it_is_zero() -> None:
    assert Paired((0.0, 0.0)).p == 1.0
    assert Paired((-0.5, -0.5)).t == -math.inf
    assert Paired((-0.5, -0.5)).p == pytest.approx(0.0, abs=1e-15)
    assert Paired((-0.5, -0.5)).columns()["t"] is None


def test_runs_are_paired_by_seed_and_seeds_that_one_has_not_are_left_out(tmp_path: Path) -> None:
    ours = [run("sobolev", seed, [1.0, 0.4 + seed / 10], [0.2, 0.5 + seed / 10]) for seed in (2, 0, 1)]
    theirs = [run("amari", seed, [2.0, 0.5], [0.2, 0.5]) for seed in (1, 2, 3)]
    paired_stats.save(report.save([*ours, *theirs], tmp_path), tmp_path)
    (found,) = json.loads((tmp_path / "pairs.json").read_text())["pairs"]
    assert found["seeds"] == [1, 2]
    assert found["loss_at_end"]["differences"] == pytest.approx([0.0, 0.1])
    assert found["test_accuracy"]["differences"] == pytest.approx([10.0, 20.0])
    assert found["test_accuracy"]["of_second"] == 50.0
    assert found["loss_until_40"]["differences"] == found["loss_at_40"]["differences"] == [-1.0, -1.0]
    assert "| +15.00 [−48.53, +78.53], p 0.2 |" in (tmp_path / "pairs.md").read_text()


def test_one_seed_makes_no_pair(tmp_path: Path) -> None:
    found = report.save([run(arm, 0, [1.0], [0.5]) for arm in ("sobolev", "amari")], tmp_path)
    assert paired_stats.pairs(found) == []


def test_the_papers_own_pair_is_of_two_schedules(tmp_path: Path) -> None:
    records = [run("amari", seed, [1.0], [0.5]) for seed in (0, 1)]
    records += [run("sobolev", seed, [0.9], [0.6], "fifths") for seed in (0, 1)]
    (found,) = paired_stats.pairs(report.save(records, tmp_path))
    assert found.row()[:5] == ["cifar10", "fifths, tenths", "Sobolev K-FAC", "K-FAC (Amari)", "2"]


def test_what_the_schedule_alone_does_is_amaris_kfac_less_itself(tmp_path: Path) -> None:
    records = [run("amari", seed, [1.0], [0.5]) for seed in (0, 1)]
    records += [run("amari", seed, [0.9 - seed / 10], [0.5], "fifths") for seed in (0, 1)]
    (found,) = paired_stats.pairs(report.save(records, tmp_path))
    assert found.row()[:5] == ["cifar10", "fifths, tenths", "K-FAC (Amari)", "K-FAC (Amari)", "2"]
    assert found.columns()["loss_at_end"]["differences"] == pytest.approx([-0.1, -0.2])


def test_the_metrics_part_and_the_schedules_part_are_what_the_paper_compares(tmp_path: Path) -> None:
    records = [
        run(arm, seed, [1.0, 0.1 * k + seed**k / 7], [0.5, 0.6 + seed / 10 / k], schedule)
        for k, (arm, schedule) in enumerate([("amari", "tenths"), ("amari", "fifths"), ("sobolev", "fifths")], 1)
        for seed in (0, 1, 2)
    ]
    found = {
        p.first.arm + p.first.schedule + p.second.schedule: p
        for p in paired_stats.pairs(report.save(records, tmp_path))
    }
    whole, metric, schedule = (found[k] for k in ("sobolevfifthstenths", "sobolevfifthsfifths", "amarififthstenths"))
    for quantity in paired_stats.QUANTITIES:
        parts = zip(metric.paired(quantity).differences, schedule.paired(quantity).differences, strict=True)
        assert [sum(part) for part in parts] == pytest.approx(whole.paired(quantity).differences)


def test_with_both_schedules_a_seed_counts_once_with_the_mean_of_its_differences(tmp_path: Path) -> None:
    """Points 1, 2, 6 in one schedule and 3, 4, 2 in the other: 2, 3, 4, so mean 3, deviation 1 and t = 3√3."""
    points = {"tenths": (1, 2, 6), "fifths": (3, 4, 2)}
    records = [run("amari", seed, [1.0], [0.5], schedule) for schedule in points for seed in (0, 1, 2)]
    records += [
        run("sobolev", seed, [1.0], [0.5 + more / 100], schedule)
        for schedule, gains in points.items()
        for seed, more in enumerate(gains)
    ]
    records.append(run("sobolev", 3, [1.0], [0.9], "fifths"))  # a seed that one schedule has not
    paired_stats.save(report.save(records, tmp_path), tmp_path)
    rows = json.loads((tmp_path / "pairs.json").read_text())["pairs"]
    (found,) = (row for row in rows if row["first"] == ["sobolev", "both"])
    assert (found["second"], found["seeds"]) == (["amari", "both"], [0, 1, 2])
    accuracy = found["test_accuracy"]
    t = 3 * math.sqrt(3)
    assert accuracy["differences"] == pytest.approx([2.0, 3.0, 4.0])
    assert (accuracy["mean"], accuracy["t"]) == pytest.approx((3.0, t), rel=1e-4)
    assert accuracy["p"] == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-4)  # two degrees of freedom
    row = "| cifar10 | both | Sobolev K-FAC | K-FAC (Amari) | 3 |"
    assert row in (tmp_path / "pairs.md").read_text()


def test_in_the_papers_comparison_the_end_of_one_schedule_is_reached_with_the_other(tmp_path: Path) -> None:
    records = [run("amari", seed, [0.5, 0.2, 0.1], [0.4, 0.6, 0.8]) for seed in (0, 1)]
    records += [run("sobolev", seed, [0.4, 0.1, 0.1], [0.5, 0.7, 0.9], "fifths") for seed in (0, 1)]
    paired_stats.save(report.save(records, tmp_path), tmp_path)
    found = json.loads((tmp_path / "pairs.json").read_text())["reached"]
    ends = {level["quantity"]: level["epochs"] for level in found if level["schedule"] == "fifths, tenths"}
    assert ends == {"test accuracy, %": {"sobolev": 3}, "training loss": {"sobolev": 2}}


def test_epochs_saved_are_told_seed_by_seed(tmp_path: Path) -> None:
    """K-FAC is at its end in epoch 3, then 2; Sobolev in 1, then never; K-FAC does not have the third seed."""
    records = [
        run("amari", 0, [3.0, 2.0, 1.0], [0.1, 0.2, 0.3]),
        run("amari", 1, [3.0, 1.0, 1.0], [0.1, 0.3, 0.3]),
        run("sobolev", 0, [1.0, 1.0, 1.0], [0.3, 0.3, 0.3]),
        run("sobolev", 1, [3.0, 2.0, 2.0], [0.1, 0.2, 0.2]),
        run("sobolev", 2, [3.0, 2.0, 1.0], [0.1, 0.2, 0.3]),
    ]
    paired_stats.save(report.save(records, tmp_path), tmp_path)
    found = json.loads((tmp_path / "pairs.json").read_text())["reached"]
    assert {level["quantity"]: level["saved"]["sobolev"] for level in found} == {
        "test accuracy, %": [2, None],
        "training loss": [2, None],
    }
    assert (
        "| cifar10 | tenths | K-FAC (Amari): training loss | 0, 0 | 2, never |" in (tmp_path / "saved.md").read_text()
    )


def test_a_level_is_reached_in_the_first_epoch_whose_mean_over_seeds_has_it(tmp_path: Path) -> None:
    write_timing(tmp_path, {"amari": 3.0, "sgd": 2.0})
    records = [run("amari", seed, [0.5, 0.2, 0.1], [0.4, 0.7 - seed / 10, 0.8]) for seed in (0, 1)]
    records += [run("sgd", seed, [0.9, 0.5, 0.3], [0.2, 0.5, 0.65]) for seed in (0, 1)]
    paired_stats.save(report.save(records, tmp_path), tmp_path)
    found = json.loads((tmp_path / "pairs.json").read_text())["reached"]
    ends = {(level["rival"], level["quantity"]): level for level in found}
    accuracy, loss = ends["sgd", "test accuracy, %"], ends["sgd", "training loss"]
    assert accuracy["epochs"] == {"amari": 2, "sgd": 3}
    assert accuracy["seconds"] == {"amari": 6.0, "sgd": 6.0}
    assert loss["epochs"] == {"amari": 2, "sgd": 3}
    assert ends["amari", "training loss"]["epochs"] == {"amari": 3, "sgd": None}
    assert "| K-FAC (Amari): training loss 0.1000 | 3, 9 s | – |" in (tmp_path / "reached.md").read_text()
