"""The command says what is wrong, where, and what to do, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.cifar import CIFAR10, CIFAR100, Benchmark
from experiments.sobolev_cifar.command import main
from tests.experiments.test_cifar import PUBLISHED, both, images, write_archive, write_folder, write_strips
from tests.experiments.tiny import TINY


@pytest.mark.parametrize(
    ("option", "of"),
    [
        ("--epochs", "epochs of a run"),
        ("--batch", "images of a step"),
        ("--width", "channels of the first layer"),
        ("--limit", "images of each split"),
        ("--workers", "runs at once"),
        ("--save-every", "epochs between two states"),
        ("--rounds", "rounds of --time"),
        ("--tune-epochs", "epochs of all candidates"),
        ("--finalists", "candidates of the last round"),
        ("--final-epochs", "epochs of these"),
        ("--held-out", "training images that --tune chooses by"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_number_with_which_there_is_nothing_to_do_is_refused(option: str, of: str, value: str) -> None:
    with pytest.raises(SystemExit, match=rf"{option} is {value}, the number of {of}: give 1 or more"):
        main([*TINY, f"{option}={value}"])


def test_graphs_on_a_cpu_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"--capture makes CUDA graphs, and --device is cpu: leave one of them out"):
        main([*TINY, "--capture"])


def test_fused_kernels_of_passes_that_are_not_captured_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"--fuse compiles the passes that are captured, and none is: give it with"):
        main([*TINY, "--fuse"])


def run(folder: Path, what: Benchmark) -> None:
    """One run on images of a folder."""
    places = ["--data", f"{folder}", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    main([*places, *TINY, "--datasets", what.name, "--arms", "amari", "--seeds", "0"])


@both
def test_an_archive_that_ends_too_early_is_told(what: Benchmark, tmp_path: Path) -> None:
    write_archive(tmp_path, images(what))
    path = tmp_path / PUBLISHED[what.name][0]
    whole = path.read_bytes()
    for part in (len(whole) // 2, 5):
        path.write_bytes(whole[:part])
        message = rf"{what.name} in .* cannot be read \(.*\): a file is damaged or not complete, copy {path.name} there"
        with pytest.raises(ValueError, match=message):
            run(tmp_path, what)


def test_a_batch_or_a_strip_that_ends_too_early_is_told(tmp_path: Path) -> None:
    write_strips(tmp_path, images(CIFAR10))
    write_folder(tmp_path, images(CIFAR100))
    for name, what in (("cifar10_train_b.npz", CIFAR10), ("cifar-100-python/test", CIFAR100)):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match=rf"a file is damaged or not complete, copy .*{path.name}.* there again"):
            run(tmp_path, what)


@both
def test_a_folder_without_its_test_images_is_told(what: Benchmark, tmp_path: Path) -> None:
    write_folder(tmp_path, images(what))
    archive, folder, _, test = PUBLISHED[what.name]
    (tmp_path / folder / test).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{folder} has no {test}: unpack {archive} there again, all of it"):
        run(tmp_path, what)
