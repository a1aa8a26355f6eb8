"""There is a choice for each schedule; one that is made again replaces runs with the one before, and loses nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.cifar import CIFAR10
from experiments.images import Part
from experiments.sobolev_cifar import arms
from experiments.sobolev_cifar.arms import FIFTHS, TENTHS, Config, Momentum
from experiments.sobolev_cifar.command import RESULTS, SCHEDULES, is_done, main
from experiments.sobolev_cifar.record import Name, Point, Record, load_all
from experiments.sobolev_cifar.scheduler import Place
from experiments.sobolev_cifar.training import Job, Setup
from experiments.sobolev_cifar.tuning import Choice, Choices, Round, Search, Tuning, TuningKey
from tests.experiments.tiny import MACHINE, SIZES, TINY, Ample

SGD = TuningKey("cifar10", "sgd", "tenths")
GRID: dict[str, list[Config]] = {"sgd": [Momentum(0.01, 1e-3), Momentum(0.03, 1e-3)]}
WIDER: dict[str, list[Config]] = {"sgd": [*GRID["sgd"], Momentum(0.003, 1e-3)]}


def tuning(folder: Path, *schedules: arms.Schedule) -> Tuning:
    """In one round."""
    setup = Setup(batch=32, width=2, part=Part(held_out=20))
    place = Place(folder / "data", folder / "out", folder / "tuning")
    return Tuning([Round(1)], schedules, setup, place, folder / "results" / "tuned.json")


def places(folder: Path) -> list[str]:
    return ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]


def test_the_grids_have_what_was_chosen_before_not_at_their_edge() -> None:
    for name in ("sgd", "adamw"):
        candidates = arms.ARMS[name].candidates
        choice = Choices.load(RESULTS / "tuned.json").of(replace(SGD, arm=name))
        assert len({tuple(one.numbers().values()) for one in candidates}) == len(choice.rounds[0]["tried"])
        (before,) = choice.before
        assert before.chosen is not None
        assert Search(CIFAR10, "", TENTHS, name, candidates).edges(before.chosen) == ""


def test_the_table_has_what_was_tuned_and_the_two_best_of_the_last_round() -> None:
    def tried(lr: float, accuracy: float | None) -> dict[str, float | None]:
        return {"lr": lr, "momentum": 0.9, "accuracy": accuracy}

    first = {"tried": [tried(0.1, 0.2), tried(0.2, 0.3), tried(0.3, 0.1)]}
    rounds = first, {"tried": [tried(0.1, 0.5), tried(0.2, None)]}
    done, open_one = Choice(rounds, chosen={"lr": 0.1, "momentum": 0.9}), Choice(rounds[:1])
    found = Choices({SGD: done, replace(SGD, schedule="fifths"): open_one}).table({"sgd": "SGD"})
    assert found.splitlines()[2:] == ["| cifar10 | SGD | tenths | lr 0.1 | 50.0 | lr 0.2 | – |"]
    titles = {name: arm.title for name, arm in arms.ARMS.items()}
    assert (RESULTS / "tuned.md").read_text().strip() == Choices.load(RESULTS / "tuned.json").table(titles)


def test_a_choice_at_the_edge_of_its_grid_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = Search(CIFAR10, "", TENTHS, "sgd", list(arms.ARMS["sgd"].candidates))
    found = search.edges({"lr": 0.06, "weight_decay": 1e-3})
    assert found == "lr 0.06 is the largest and weight_decay 0.001 is the smallest"
    assert search.edges({"lr": 0.03, "weight_decay": 3e-2}) == "weight_decay 0.03 is the largest"
    tuning(folder, TENTHS).tune(GRID, [CIFAR10], Ample())
    told = [line for line in capsys.readouterr().out.splitlines() if "beyond" in line]
    assert len(told) == 1  # one of two rates is at an edge; of one weight decay there is none
    assert told[0].startswith("sgd on cifar10 with tenths: lr 0.0")
    assert told[0].endswith("est that was tried, the best may lie beyond")


def test_every_schedule_has_its_own_choice_and_a_run_takes_that_of_its_schedule(folder: Path) -> None:
    quick = ["--arms", "sgd", "--tune", "--tune-epochs", "1", "--finalists", "1", "--final-epochs", "1"]
    main([*places(folder), *TINY, *quick, "--held-out", "20"])
    path = folder / "results" / "tuned.json"
    tenths = json.loads(path.read_text())["cifar10"]["sgd"]["tenths"]
    asked = [*places(folder), *TINY, "--arms", "sgd", "--seeds", "0", "--schedules", "tenths", "fifths"]
    with pytest.raises(
        SystemExit, match=r"sgd has not been tuned on cifar10 with the schedule fifths: run --tune .*--schedules fifths"
    ):
        main(asked)
    main([*places(folder), *TINY, *quick, "--held-out", "20", "--schedules", "tenths", "fifths"])
    found = json.loads(path.read_text())["cifar10"]["sgd"]
    assert list(found) == ["tenths", "fifths"]
    assert found["tenths"] == tenths
    found["fifths"]["chosen"] = Momentum(0.02, 0.5).numbers()
    path.write_text(json.dumps({"cifar10": {"sgd": found}}))
    main(asked)
    made = {record.name.schedule: record.settings["arm"] for record in load_all([folder / "results"])}
    assert made == {schedule: entry["chosen"] for schedule, entry in found.items()}


def test_a_choice_of_another_grid_is_refused_and_made_anew_beside_the_one_before(folder: Path) -> None:
    path = folder / "results" / "tuned.json"
    tuning(folder, TENTHS, FIFTHS).tune(GRID, [CIFAR10], Ample())
    old = Choices.load(path)
    wider = tuning(folder, TENTHS)
    with pytest.raises(SystemExit, match=r"sgd on cifar10 with tenths .*candidates .* and not .*: run --tune --anew"):
        wider.tune(WIDER, [CIFAR10], Ample())
    wider.set_aside(WIDER, [CIFAR10])
    with pytest.raises(SystemExit, match="sgd has not been tuned on cifar10 with the schedule tenths"):
        Choices.load(path).chosen(SGD, wider.setup)
    for _ in range(2):  # what is chosen as it is asked for is not put aside again
        wider.set_aside(WIDER, [CIFAR10])
        wider.tune(WIDER, [CIFAR10], Ample())
        new = Choices.load(path)
        assert new.of(SGD).before == (old.of(SGD),)
        assert len(new.of(SGD).rounds[0]["tried"]) == 3
        assert new.of(SGD).chosen is not None
    fifths = replace(SGD, schedule="fifths")
    assert new.of(fifths) == old.of(fifths)
    wider.set_aside(GRID, [CIFAR10])
    assert Choices.load(path).of(SGD).before == (old.of(SGD), replace(new.of(SGD), before=()))


def test_the_choices_that_are_kept_are_put_aside_with_all_their_numbers(folder: Path) -> None:
    """On this machine, with few images and another grid: refused, and only where it is asked for made again."""
    results = folder / "results"
    results.mkdir()
    shutil.copy(RESULTS / "tuned.json", results)
    kept = json.loads((results / "tuned.json").read_text())
    quick = ["--tune", "--tune-epochs", "1", "--finalists", "1", "--final-epochs", "1", "--held-out", "20"]
    asked = [*places(folder), *TINY, *quick, "--arms", "sgd", "--seconds", "0"]
    with pytest.raises(SystemExit, match=r"with tenths .*batch 128 and not 32.*rounds .*\[\(4, 16\), \(15, 5\)\] and"):
        main(asked)
    main([*asked, "--schedules", "cosine"])  # of which there is none
    assert json.loads((results / "tuned.json").read_text()) == kept
    main([*asked, "--anew"])
    found, was = (Choices.load(folder / "tuned.json") for folder in (results, RESULTS))
    old = was.of(SGD)
    assert found.of(SGD) == Choice(before=(*old.before, replace(old, before=())))
    others = [TuningKey("cifar10", "adamw", schedule) for schedule in ("tenths", "fifths")]
    assert [found.of(key) for key in others] == [was.of(key) for key in others]


def test_anew_without_tune_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"--anew puts choices of SGD and AdamW aside .*: give it with --tune"):
        main([*TINY, "--anew"])


def test_settings_that_were_not_found_in_rounds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    for entry in ({"lr": 0.1}, {"tenths": {"chosen": {"lr": 0.1}}}):
        path.write_text(json.dumps({"cifar10": {"sgd": entry}}))
        with pytest.raises(SystemExit, match="settings of sgd on cifar10 that were not found in rounds: move it away"):
            Choices.load(path)


def choose(folder: Path, schedule: str, lr: float) -> None:
    """As if ``--tune`` had."""
    path = folder / "results" / "tuned.json"
    conditions = Setup(batch=32, width=2).conditions("")
    choice = Choice(rounds=({"epochs": 1, "tried": []},), conditions=conditions, chosen=Momentum(lr, 0.0).numbers())
    Choices.load(path).with_choice(replace(SGD, schedule=schedule), choice).save(path)


def rates(folder: Path) -> dict[str, float]:
    """Of the runs that the report has."""
    return {record.name.key: record.settings["arm"]["lr"] for record in load_all([folder / "results"])}


def test_runs_of_an_arm_whose_choice_has_changed_are_run_again_and_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*places(folder), *TINY, "--epochs", "1", "--schedules", "tenths", "fifths", "--arms", "sgd", "amari"]
    choose(folder, "tenths", 0.01)
    choose(folder, "fifths", 0.01)
    main([*asked, "--seeds", "0", "1"])
    choose(folder, "fifths", 0.02)
    main([*places(folder), "--report"])
    assert rates(folder) == dict.fromkeys(rates(folder), 0.01)  # there are no others yet
    assert len(rates(folder)) == 8
    capsys.readouterr()
    main([*asked, "--seeds", "0"])
    told = capsys.readouterr().out
    assert (
        "cifar10-fifths-sgd-0 was run with {'lr': 0.01, 'weight_decay': 0.0, 'momentum': 0.9}, and {'lr': 0.02" in told
    )
    assert "1 runs, 7 are done" in told
    # The other seed had the old choice: of two kinds of runs there is no mean.
    expected = {key: 0.01 for key in rates(folder) if "fifths-sgd" not in key} | {"cifar10-fifths-sgd-0": 0.02}
    assert rates(folder) == expected
    assert len(expected) == 7
    main([*asked, "--seeds", "0", "1"])
    main([*places(folder), "--report"])
    assert rates(folder) == {**expected, "cifar10-fifths-sgd-1": 0.02}
    summary = json.loads((folder / "results" / "summary.json").read_text())["cifar10"]
    assert summary["fifths"]["sgd"]["settings"]["arm"]["lr"] == 0.02
    assert summary["fifths"]["sgd"]["seeds"] == [0, 1]
    with pytest.raises(SystemExit, match=r"cifar10-tenths-amari-0 was run with .*: choose other folders"):
        main([*asked, "--arms", "amari", "--epochs", "2"])


def test_the_runs_that_are_kept_are_run_again_where_their_choice_changes_and_not_where_it_does_not() -> None:
    setup = Setup(device="cuda")
    for record in load_all([RESULTS]):
        if record.name.arm == "sgd":
            was = record.settings["arm"]
            for arm, done in ((Momentum(**was), True), (Momentum(0.1, 0.01), False)):
                job = Job("cifar10", SCHEDULES[record.name.schedule], arm, record.name.seed)
                assert is_done(setup.settings(job, record.settings["images"]), record) == done
                for other, images in ((replace(setup, batch=64), record.settings["images"]), (setup, "others")):
                    with pytest.raises(SystemExit, match=rf"{record.name.key} was run with .*: choose other folders"):
                        is_done(other.settings(job, images), record)


def run(lr: float, epochs: int, **other: Any) -> Record:
    """Of SGD, with such a rate."""
    history = [Point(epoch + 1, 1.0, 1.0, 0.5, 1.0, 1) for epoch in range(epochs)]
    settings, name = {**SIZES, "arm": {"lr": lr, "weight_decay": 0.0}}, Name("cifar10", "tenths", "sgd", 0)
    return replace(Record(name, settings, MACHINE, history, finished=True, diverged=False), **other)


def test_a_run_with_a_newer_choice_replaces_a_longer_one_wherever_it_is() -> None:
    old, new = run(0.1, 5), run(0.2, 5)
    choices = Choices({SGD: Choice(chosen={"lr": 0.2, "weight_decay": 0.0})})
    for pair in ([old, new], [new, old]):
        assert choices.current(pair) == [new]
    diverged, begun = run(0.2, 2, diverged=True), run(0.2, 2, finished=False)
    assert choices.current([old, diverged]) == [diverged]
    assert choices.current([old, begun]) == [old]
    second = replace(old, name=replace(old.name, seed=1))
    assert choices.current([old, second, begun]) == [old, second]
    assert choices.current([second, new]) == [new]
    assert Choices({}).current([new, second, old]) == [old, second]
