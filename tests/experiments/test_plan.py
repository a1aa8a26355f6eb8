"""The queue runs what the protocol has, in its order, and resumes what time has cut short."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.sobolev_cifar import command
from experiments.sobolev_cifar.arms import ARMS, AdamW
from experiments.sobolev_cifar.command import main
from experiments.sobolev_cifar.plan import BETTER, Planned, plan
from experiments.sobolev_cifar.record import Name, Record, load_all
from experiments.sobolev_cifar.scheduler import Task, perform_all
from experiments.sobolev_cifar.training import Budget
from tests.experiments.tiny import TINY

PROTOCOL = Path(command.__file__).with_name("protocol.md")


def test_the_plan_has_the_runs_of_the_protocol_in_its_order() -> None:
    counts = Counter(run.part for run in plan())
    assert list(counts.values()) == [16, 12, 12, 12, 8, 8, 6, 8, 4, 4]
    text = PROTOCOL.read_text()
    assert all(f"`{run.name.arm}`" in text for run in plan())
    assert all(run.name.arm in ARMS for run in plan())
    assert len({run.name for run in plan()}) == sum(counts.values())
    for run in plan():  # both sides of a pair are planned with the same seeds
        if run.name.arm in ("permuted", "equidistant", "sobolev", "literal"):
            assert Name(run.name.dataset, run.name.schedule, "amari", run.name.seed) in {one.name for one in plan()}


def test_the_queue_goes_on_where_it_stopped_and_tunes_what_has_to_be_tuned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [Name("cifar10", "fifths", "amari", 3), Name("cifar10", BETTER, "sgd", 0)]
    monkeypatch.setattr(command, "plan", lambda: [Planned("all", name) for name in runs])
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    tuning = ["--tune-epochs", "1", "--finalists", "1", "--final-epochs", "1", "--held-out", "20"]
    asked = [*places, *TINY, *tuning, "--queue"]
    main([*asked, "--minutes", "0"])
    assert "2 of 2 runs of the protocol are not done" in capsys.readouterr().out
    main([*asked, "--seconds", "100", "--enough", "200"])  # not enough time to begin one
    assert load_all([folder / "out"]) == []
    main(asked)
    assert "0 of 2 runs of the protocol are not done" in capsys.readouterr().out
    assert set(json.loads((folder / "results" / "tuned.json").read_text())["cifar10"]["sgd"]) == {"tenths", "fifths"}
    kept = (folder / "results" / "runs.json").read_text()
    assert [record.commits for record in load_all([folder / "results"])] == [["abc"], ["abc"]]
    main(asked)
    assert (folder / "results" / "runs.json").read_text() == kept


@pytest.mark.parametrize("done", [False, True])
def test_workers_that_wait_for_a_search_run_what_needs_none_and_searches_of_a_part_are_one(
    done: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``done``: no run is left before the search, so that nobody waits."""
    first, later = (Name("cifar10", "fifths", "amari", seed) for seed in (3, 4))
    tuned = [Name("cifar10", "fifths", arm, 0) for arm in ("sgd", "adamw")]
    parts = {"first": [first], "tuned": tuned, "last": [later]}
    runs: list[list[str]] = []
    trials: list[set[str]] = []

    def performed(tasks: Sequence[Task], workers: int, budget: Budget) -> list[Record]:
        if all(task.setup.part.held_out == 0 for task in tasks):
            runs.append([task.job.key for task in tasks])
        else:
            trials.append({task.job.arm.name for task in tasks})
        return perform_all(tasks, 1, budget)

    monkeypatch.setattr(command, "perform_all", performed)
    monkeypatch.setattr("experiments.sobolev_cifar.tuning.perform_all", performed)
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    tuning = ["--tune-epochs", "1", "--finalists", "1", "--final-epochs", "1", "--held-out", "20"]
    asked = [*places, *TINY, *tuning, "--queue", "--workers", "2"]
    if done:
        monkeypatch.setattr(command, "plan", lambda: [Planned("first", first)])
        main(asked)
    monkeypatch.setattr(command, "plan", lambda: [Planned(part, name) for part in parts for name in parts[part]])
    main(asked)
    last = [name.key for name in (*tuned, later)]
    assert runs == ([[first.key], [], last] if done else [[first.key, later.key], last[:2]])
    assert trials == [{"sgd", "adamw"}, {"sgd", "adamw"}]  # two rounds


def test_a_search_that_fails_stops_no_run_that_needs_none_and_no_other_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW's optimizer raises; SGD is tuned beside it and run, and so is K-FAC, which comes later."""
    runs = {arm: Name("cifar10", "fifths", arm, 0) for arm in ("adamw", "sgd", "amari")}
    parts = [Planned("tuned", runs["adamw"]), Planned("tuned", runs["sgd"]), Planned("last", runs["amari"])]
    monkeypatch.setattr(command, "plan", lambda: parts)
    monkeypatch.setattr(AdamW, "optimizer", lambda *_: 1 / 0)
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    tuning = ["--tune-epochs", "1", "--finalists", "1", "--final-epochs", "1", "--held-out", "20"]
    with pytest.raises(SystemExit, match=r"12 of 28 runs failed\ncifar10-fifths-adamw-1000: (.|\n)*ZeroDivisionError"):
        main([*places, *TINY, *tuning, "--queue"])
    assert [record.name for record in load_all([folder / "results"])] == [runs["amari"], runs["sgd"]]


def test_a_search_whose_images_are_not_there_stops_no_run_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [Name("cifar100", "fifths", "sgd", 0), Name("cifar10", "fifths", "amari", 3)]
    monkeypatch.setattr(command, "plan", lambda: [Planned("all", name) for name in runs])
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    with pytest.raises(SystemExit, match="cifar100"):
        main([*places, *TINY, "--queue"])
    (found,) = load_all([folder / "results"])
    assert found.name == runs[1]


def test_a_trial_needs_its_share_of_the_time_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs are expected to take 200 seconds and there are 150: a trial of one epoch is begun, a run is not."""
    monkeypatch.setattr(command, "plan", lambda: [Planned("all", Name("cifar10", "fifths", "sgd", 0))])
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    tuning = ["--tune-epochs", "1", "--finalists", "1", "--final-epochs", "1", "--held-out", "20"]
    main([*places, *TINY, *tuning, "--queue", "--seconds", "150", "--enough", "200"])
    assert "chosen" in json.loads((folder / "results" / "tuned.json").read_text())["cifar10"]["sgd"]["fifths"]
    assert load_all([folder / "out"]) == []


def test_a_run_whose_images_are_not_there_stops_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Name("cifar100", "fifths", "amari", 0), Name("cifar10", "fifths", "amari", 3)]
    monkeypatch.setattr(command, "plan", lambda: [Planned("all", name) for name in runs])
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    with pytest.raises(SystemExit, match=r"1 of 2 runs failed\ncifar100-fifths-amari-0(.|\n)*cifar100"):
        main([*places, *TINY, "--queue"])
    (found,) = load_all([folder / "results"])
    assert found.name == runs[1]
    monkeypatch.setattr(command, "plan", lambda: [Planned("all", runs[1])])
    for path in (folder / "data").iterdir():
        path.unlink()
    main([*places, *TINY, "--queue"])  # what is done needs no images
