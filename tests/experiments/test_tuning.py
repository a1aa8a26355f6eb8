"""Settings are chosen in rounds, on images that are held out, and a choice that was stopped goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest

from experiments.cifar import CIFAR10
from experiments.images import Part
from experiments.sobolev_cifar import arms
from experiments.sobolev_cifar.command import main
from experiments.sobolev_cifar.record import load_all
from experiments.sobolev_cifar.scheduler import Place
from experiments.sobolev_cifar.training import Budget, Setup
from experiments.sobolev_cifar.tuning import Round, Tuning
from tests.experiments.tiny import TINY, Ample


def key(settings: dict[str, float]) -> tuple[float, float]:
    return settings["lr"], settings["weight_decay"]


def test_sgd_and_adamw_are_tuned_on_images_that_are_held_out_before_they_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    with pytest.raises(SystemExit, match="sgd has not been tuned on cifar10 with the schedule tenths: run --tune"):
        main([*places, *TINY, "--arms", "sgd"])
    tuning = ["--arms", "sgd", "--tune", "--tune-epochs", "1", "--finalists", "2", "--final-epochs", "2"]
    main([*places, *TINY, *tuning, "--held-out", "20", "--seconds", "0"])
    assert "sgd on cifar10 with tenths: 0 of 16 trials are done, run --tune again" in capsys.readouterr().out
    main([*places, *TINY, *tuning, "--held-out", "20"])
    main([*places, *TINY, *tuning, "--held-out", "20"])  # there is nothing left to do
    best = json.loads((folder / "results" / "tuned.json").read_text())["cifar10"]["sgd"]["tenths"]
    every, finals = ({key(one): one["accuracy"] for one in done["tried"]} for done in best["rounds"])
    assert [done["epochs"] for done in best["rounds"]] == [1, 2]
    assert len(every) == 16
    assert sorted(every[one] for one in finals) == sorted(every.values())[-2:]
    assert finals[key(best["chosen"])] == max(finals.values())
    main([*places, *TINY, "--arms", "sgd", "--seeds", "0"])
    (record,) = load_all([folder / "results"])
    assert record.settings["arm"] == best["chosen"]


@final
@dataclass(frozen=True)
class Trials(Budget):
    """Time for so many of them."""

    out: Path
    count: int

    def allows(self, seconds: float) -> bool:
        return len(list(self.out.rglob("runs/*.json"))) < self.count


def test_a_tuning_that_was_stopped_goes_on_with_the_trials_that_are_left(folder: Path) -> None:
    place = Place(folder / "data", folder / "out", folder / "tuning")
    path = folder / "results" / "tuned.json"
    setup = Setup(batch=32, width=2, device="cpu", part=Part(held_out=20))
    tuning = Tuning((Round(1), Round(2, candidates=2)), [arms.TENTHS], setup, place, path)
    grids = {"sgd": list(arms.ARMS["sgd"].candidates)}
    tuning.tune(grids, [CIFAR10], Trials(place.out, 6))
    first = {p: p.stat().st_mtime_ns for p in place.out.rglob("runs/*.json")}
    assert len(first) == 6
    assert not path.exists()
    tuning.tune(grids, [CIFAR10], Trials(place.out, 16))
    assert first.items() <= {p: p.stat().st_mtime_ns for p in place.out.rglob("runs/*.json")}.items()
    assert len(json.loads(path.read_text())["cifar10"]["sgd"]["tenths"]["rounds"]) == 1
    with pytest.raises(
        SystemExit, match="sgd has not been tuned on cifar10"
    ):  # there is no choice before the last round
        main(["--data", f"{folder}/data", "--results", f"{folder}/results", *TINY, "--arms", "sgd"])
    tuning.tune(grids, [CIFAR10], Ample())
    assert "chosen" in json.loads(path.read_text())["cifar10"]["sgd"]["tenths"]
