"""A run, a choice and decoded images are taken again only for what they were made of: settings, limits and pixels."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import natgrad as ng
from experiments.cifar import CIFAR10, CIFAR100, cached
from experiments.files import commit
from experiments.images import Images, Part
from experiments.sobolev_cifar import arms
from experiments.sobolev_cifar.arms import TENTHS, Momentum
from experiments.sobolev_cifar.command import RESULTS, SCHEDULES, TUNED_FILE, arm, main
from experiments.sobolev_cifar.record import Record, load_all
from experiments.sobolev_cifar.scheduler import Place
from experiments.sobolev_cifar.training import Job, Pace, Setup, Training
from experiments.sobolev_cifar.tuning import Choices, Round, Tuning, TuningKey
from tests.experiments.test_cifar import images, same, write_archive, write_strips
from tests.experiments.tiny import SETUP, TINY, Ample

SAMPLED = ng.Fisher(ng.Categorical(), samples=1)
JOB = Job("cifar10", TENTHS, Momentum(0.01, 0.0), seed=0)


def test_a_run_of_fewer_images_or_other_settings_is_not_taken_for_one_that_is_done(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    asked = [*places, *TINY, "--arms", "amari", "--seeds", "0", "--epochs", "1"]
    main([*asked, "--limit", "48"])
    for other in (
        [],
        ["--limit", "40"],
        ["--limit", "48", "--layout", "contiguous"],
        ["--limit", "48", "--width", "3"],
        ["--limit", "48", "--batch", "16"],
        ["--limit", "48", "--epochs", "2"],
    ):
        with pytest.raises(
            SystemExit, match=r"cifar10-tenths-amari-0 was run with .*'limit': 48.*: choose other folder"
        ):
            main([*asked, *other])
    capsys.readouterr()
    main([*asked, "--limit", "48"])
    assert "0 runs, 1 are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [
        {"epochs": 3},
        {"batch": 16},
        {"width": 3},
        {"device": "cuda"},  # another precision
        {"part": Part(limit=48)},
        {"part": Part(held_out=20)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_all_that_changes_a_run_is_in_its_settings_and_its_pace_is_not(other: dict[str, Any]) -> None:
    assert replace(SETUP, **other).settings(JOB, "a") != SETUP.settings(JOB, "a")
    assert SETUP.settings(JOB, "a") != SETUP.settings(JOB, "b")
    assert replace(SETUP, pace=Pace(workers=3, save_every=2)).settings(JOB, "a") == SETUP.settings(JOB, "a")


@pytest.mark.parametrize(
    "other",
    [
        arms.sobolev(),
        replace(arms.sobolev(), metric=ng.Sobolev(SAMPLED, nu=2.5, lengthscale=20.0)),
        replace(arms.sobolev(), metric=ng.Sobolev(SAMPLED, lengthscale=10.0)),
        replace(arms.sobolev(), metric=ng.Sobolev(SAMPLED, lengthscale=20.0, jitter=1e-4)),
        replace(arms.amari(), metric=ng.Fisher(ng.Categorical(), samples=2)),
        replace(arms.amari(), constants=arms.Constants(decay=0.9)),
        arms.amari().exactly_damped(),
        arms.independent(),
        arms.control(),
        arms.without_images(),
        arms.amari_scaled(),
        arms.literal(),
        replace(arms.independent(), metric=arms.Independent(arms.sobolev().metric, matched=False)),  # type: ignore[arg-type]
        arms.Momentum(0.01, 0.003),
        arms.AdamW(0.01, 0.003),
    ],
    ids=lambda config: f"{config.name} {config.numbers()}",
)
def test_all_numbers_of_an_optimizer_are_in_the_settings_of_its_runs(other: arms.Config) -> None:
    def settings(config: arms.Config) -> dict[str, Any]:
        return SETUP.settings(replace(JOB, arm=config), "a")

    assert settings(other) != settings(arms.amari())
    if other.name == "sobolev" and other != arms.sobolev():
        assert settings(other) != settings(arms.sobolev())


def test_a_metric_whose_numbers_nobody_has_named_is_refused() -> None:
    measured = replace(arms.sobolev(), metric=ng.Sobolev(SAMPLED, lengthscale=ng.functionspace.Median()))
    with pytest.raises(TypeError, match=r"Sobolev\(.* is not described by numbers"):
        measured.numbers()


def test_a_run_names_the_commits_that_it_was_begun_and_resumed_with(pictures: Images) -> None:
    first = Training(JOB, replace(SETUP, commit="first"), pictures)
    first.epoch()
    second = Training(JOB, replace(SETUP, commit="second"), pictures)
    second.load(first.state())
    assert first.record().commits == ["first"]
    assert second.record().commits == ["first", "second"]
    assert Record.of(second.record().columns()).commits == ["first", "second"]
    assert {"torch", "device"} <= set(second.record().machine)


def test_without_a_repository_the_commit_must_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("experiments.files.__file__", f"{tmp_path}/files.py")
    with pytest.raises(SystemExit, match="git tells none, so give --commit"):
        commit()


def test_the_runs_that_are_kept_are_those_of_the_command_on_a_gpu_with_all_images_and_of_no_other() -> None:
    setup = Setup(device="cuda")
    records, choices = load_all([RESULTS]), Choices.load(RESULTS / TUNED_FILE)
    assert len(records) >= 34
    for record in records:
        made = arm(TuningKey.of(record), choices, setup)
        job = Job(record.name.dataset, SCHEDULES[record.name.schedule], made, record.name.seed)
        # The first of K-FAC are from before it was written down which images they are of.
        images = record.settings.get("images", "of today")
        assert record.made_with(setup.settings(job, images))
        for other in ({"part": Part(300)}, {"batch": 64}, {"width": 32}, {"epochs": 100}, {"device": "cpu"}):
            assert not record.made_with(replace(setup, **other).settings(job, images))
    digests = {(record.name.dataset, record.settings["images"]) for record in records if "images" in record.settings}
    assert len(digests) == len({record.name.dataset for record in records})
    assert all("images" in record.settings for record in records if arms.ARMS[record.name.arm].tuned)


def test_images_are_decoded_once_and_those_of_other_files_never_taken_for_them(tmp_path: Path) -> None:
    """Known by the contents of their files: a copy in another folder is the same."""
    one, other, copied, store = (tmp_path / name for name in ("one", "other", "copied", "store"))
    first, second = images(CIFAR10, seed=0), images(CIFAR10, seed=1)
    for folder, found in ((one, first), (other, second)):
        folder.mkdir()
        write_strips(folder, found)
    same(cached(one, CIFAR10, store), first)
    (path,) = store.iterdir()
    before = path.stat().st_mtime_ns
    shutil.copytree(one, copied)
    same(cached(copied, CIFAR10, store), first)
    assert [(path, before)] == [(found, found.stat().st_mtime_ns) for found in store.iterdir()]
    same(cached(other, CIFAR10, store), second)
    same(cached(one, CIFAR10, store), first)


def test_a_run_on_other_images_is_not_taken_for_one_that_is_done(tmp_path: Path) -> None:
    hundred = [*TINY, "--datasets", "cifar100", "--epochs", "1", "--arms", "amari", "--seeds", "0"]
    places = ["--out", f"{tmp_path}/out", "--results", f"{tmp_path}/results"]
    for seed in (0, 1):
        (tmp_path / f"{seed}").mkdir()
        write_archive(tmp_path / f"{seed}", images(CIFAR100, 64, seed))
    main(["--data", f"{tmp_path}/0", *places, *hundred])
    with pytest.raises(SystemExit, match=r"cifar100-tenths-amari-0 was run with .*or the same settings and images"):
        main(["--data", f"{tmp_path}/1", *places, *hundred])


def test_the_digest_of_images_is_that_of_every_pixel_label_and_place(pictures: Images) -> None:
    pixel, label = pictures.train.x.clone(), pictures.test.y.clone()
    pixel[3, 2, 1, 0] += 1
    label[5] = (label[5] + 1) % 10
    others = [
        replace(pictures, train=replace(pictures.train, x=pixel)),
        replace(pictures, test=replace(pictures.test, y=label)),
        replace(pictures, train=pictures.train[slice(None, None, 2)]),
        pictures.first(40),
        pictures.held_out(20),
    ]
    assert len({found.digest for found in (pictures, *others)}) == 6
    assert images(CIFAR10, 64).digest == pictures.digest


def tuning(folder: Path, limit: int | None, rounds: tuple[Round, ...] = (Round(1),)) -> Tuning:
    """On so many images."""
    setup = Setup(batch=16, width=2, part=Part(limit, held_out=20))
    place = Place(folder / "data", folder / "out", folder / "tuning")
    return Tuning(rounds, [TENTHS], setup, place, folder / "tuned.json")


def test_trials_and_choices_of_fewer_images_are_not_taken_for_those_of_all(folder: Path) -> None:
    grids = {"sgd": list(arms.ARMS["sgd"].candidates)[:2]}
    tuning(folder, 48).tune(grids, [CIFAR10], Ample())
    path = folder / "tuned.json"
    assert json.loads(path.read_text())["cifar10"]["sgd"]["tenths"]["conditions"]["limit"] == 48
    for refused in (tuning(folder, None), tuning(folder, 40)):
        with pytest.raises(
            SystemExit, match=r"of sgd on cifar10 with tenths that were found with limit 48 and not .* --anew"
        ):
            refused.tune(grids, [CIFAR10], Ample())
    two = Round(1), Round(2, candidates=9)
    for _ in range(2):  # the second time there is nothing left to do
        tuning(folder, 48, two).tune(grids, [CIFAR10], Ample())
    for rounds in ((Round(2), two[1]), (two[0], Round(1, candidates=2)), (two[0], Round(2, candidates=1))):
        with pytest.raises(SystemExit, match=r"found with rounds \(epochs, trials\) \[\(1, 2\), \(2, 2\)\] and not \["):
            tuning(folder, 48, rounds).tune(grids, [CIFAR10], Ample())
    path.unlink()
    tuning(folder, None).tune(grids, [CIFAR10], Ample())
    tried = [record for one in (folder / "tuning" / "round0").iterdir() for record in load_all([one])]
    assert [record.settings["limit"] for record in tried] == [None, None]
    sgd, choices = TuningKey("cifar10", "sgd", "tenths"), Choices.load(path)
    assert choices.chosen(sgd, Setup(batch=16, width=2)) in [one.numbers() for one in grids["sgd"]]
    with pytest.raises(SystemExit, match=r"with tenths was tuned with limit None and not 48: run --tune --anew --data"):
        choices.chosen(sgd, Setup(batch=16, width=2, part=Part(48)))


def test_the_choices_that_are_kept_are_those_of_the_command_without_options() -> None:
    path = RESULTS / "tuned.json"
    for name, schedule in product(("sgd", "adamw"), ("tenths", "fifths")):
        key, choices = TuningKey("cifar10", name, schedule), Choices.load(path)
        assert choices.chosen(key, Setup()) == json.loads(path.read_text())["cifar10"][name][schedule]["chosen"]
        with pytest.raises(SystemExit, match=rf"{key} was tuned with batch 128 and not 64, limit None and not 300"):
            choices.chosen(key, Setup(batch=64, part=Part(300)))
