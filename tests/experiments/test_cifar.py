"""The images are those of the files, in whichever form these are, and what a network sees of them is what it should."""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments import cifar
from experiments.cifar import CIFAR10, CIFAR100, Benchmark, pack, read
from experiments.images import Feed, Images, Scale, Split

both = pytest.mark.parametrize("what", [CIFAR10, CIFAR100], ids=lambda what: what.name)


def images(what: Benchmark, n: int = 12, seed: int = 0) -> Images:
    """Smooth ones, as pictures are, with labels of all classes."""
    rng = np.random.default_rng(seed)

    def split(n: int) -> Split:
        x = rng.normal(size=(n, 32, 32, 3)).cumsum(1).cumsum(2) * 4 + 128
        y = torch.from_numpy(rng.integers(what.classes, size=n))
        return Split(torch.from_numpy(x.clip(0, 255).astype(np.uint8)), y)

    return Images(what.name, what.classes, split(n), split(n // 2))


def same(found: Images, expected: Images) -> None:
    """In every pixel and label."""
    for mine, theirs in ((found.train, expected.train), (found.test, expected.test)):
        assert torch.equal(mine.x, theirs.x)
        assert torch.equal(mine.y, theirs.y)


PUBLISHED = {
    "cifar10": (
        "cifar-10-python.tar.gz",
        "cifar-10-batches-py",
        [f"data_batch_{k}" for k in (1, 2, 3, 4, 5)],
        "test_batch",
    ),
    "cifar100": ("cifar-100-python.tar.gz", "cifar-100-python", ["train"], "test"),
}
LABELS: dict[str, Callable[[list[int]], dict[bytes, list[int]]]] = {
    "cifar10": lambda y: {b"labels": y},
    "cifar100": lambda y: {b"coarse_labels": [label // 5 for label in y], b"fine_labels": y},  # 20 and 100 classes
}


def batches(of: Images) -> dict[str, bytes]:
    """The files of the published archive with its own names: planes of colours, keys of bytes."""
    _, folder, train, test = PUBLISHED[of.name]
    files = {}
    for names, split in ((train, of.train), ([test], of.test)):
        parts = np.array_split(np.arange(len(split.y)), len(names))
        for name, part in zip(names, parts, strict=True):
            data = np.ascontiguousarray(split.x.numpy()[part].transpose(0, 3, 1, 2).reshape(len(part), -1))
            label = f"batch {name}".encode()
            content = {b"batch_label": label, b"data": data, b"filenames": [b"a.png"] * len(part)}
            labels = LABELS[of.name](split.y.numpy()[part].tolist())
            files[f"{folder}/{name}"] = pickle.dumps({**content, **labels}, protocol=2)
    return files


def write_folder(folder: Path, of: Images) -> None:
    """The archive that is published, unpacked."""
    for name, content in batches(of).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def write_archive(folder: Path, of: Images) -> None:
    """The archive that is published."""
    with tarfile.open(folder / PUBLISHED[of.name][0], "w:gz") as tar:
        for name, content in batches(of).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_strips(folder: Path, of: Images) -> None:
    """Three files of WebP strips."""
    half = len(of.train.y) // 2
    for name, split in (
        ("train_a", of.train[slice(half)]),
        ("train_b", of.train[slice(half, None)]),
        ("test", of.test),
    ):
        found = []
        for strip in split.x.split(4):
            file = io.BytesIO()
            Image.fromarray(strip.flatten(0, 1).numpy()).save(file, format="WEBP", lossless=True, exact=True)
            found.append(file.getvalue())
        offset = np.cumsum([0, *map(len, found)])
        webp = np.frombuffer(b"".join(found), np.uint8)
        np.savez(folder / f"{of.name}_{name}.npz", webp=webp, offset=offset, y=split.y.numpy().astype(np.uint8))


@both
def test_the_folder_of_the_published_archive_is_read(what: Benchmark, tmp_path: Path) -> None:
    expected = images(what)
    write_folder(tmp_path, expected)
    same(read(tmp_path, what), expected)


@both
def test_the_published_archive_is_read(what: Benchmark, tmp_path: Path) -> None:
    expected = images(what)
    write_archive(tmp_path, expected)
    same(read(tmp_path, what), expected)


@both
def test_strips_of_webp_are_read_and_packed_in_pieces_without_loss(what: Benchmark, tmp_path: Path) -> None:
    expected, pieces = images(what), tmp_path / "pieces"
    write_strips(tmp_path, expected)
    same(read(tmp_path, what), expected)
    assert [path.name for path in pack(tmp_path, what, pieces)] == [
        f"{what.name}_train_00.npz.xz",
        f"{what.name}_test_00.npz.xz",
    ]
    same(read(pieces, what), expected)


def test_several_pieces_are_one_set_and_a_piece_that_is_missing_is_told(tmp_path: Path) -> None:
    expected = images(CIFAR10).train
    paths = cifar.write_pieces(tmp_path, "cifar10_train", expected.x.numpy(), expected.y.numpy(), images=5)
    assert len(paths) == 3
    x, y = cifar.read_pieces(tmp_path, "cifar10_train")
    assert np.array_equal(x, expected.x.numpy())
    assert np.array_equal(y, expected.y.numpy())
    paths[1].unlink()
    with pytest.raises(ValueError, match=r"has 7 of the 12 images of cifar10_train: copy all pieces"):
        cifar.read_pieces(tmp_path, "cifar10_train")


def test_a_folder_without_images_is_told_what_to_put_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no cifar100 in .*: put cifar-100-python.tar.gz there"):
        read(tmp_path, CIFAR100)


def test_a_file_that_could_run_a_program_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / CIFAR100.folder
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps({b"data": Path}, protocol=2))
    with pytest.raises(pickle.UnpicklingError, match=r"has arrays only, this file wants pathlib"):
        read(tmp_path, CIFAR100)


def test_no_module_is_imported_that_an_array_does_not_need(tmp_path: Path) -> None:
    """Importing it may run a program, whatever the name is that is wanted of it."""
    folder = tmp_path / CIFAR100.folder
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).write_bytes(b"cnumpy.f2py.__main__\ndtype\n.")
    with pytest.raises(pickle.UnpicklingError, match=r"arrays only, this file wants numpy.f2py.__main__.dtype"):
        read(tmp_path, CIFAR100)
    assert "numpy.f2py.__main__" not in sys.modules


def test_labels_of_another_set_are_refused(tmp_path: Path) -> None:
    hundred = images(CIFAR100)
    write_strips(tmp_path, Images("cifar10", 10, hundred.train, hundred.test))
    with pytest.raises(ValueError, match=r"cifar10 has 10 classes, the file has a label \d\d: another set"):
        read(tmp_path, CIFAR10)


def test_images_and_labels_that_do_not_match_in_number_are_refused(tmp_path: Path) -> None:
    whole = images(CIFAR10)
    write_strips(tmp_path, Images("cifar10", 10, whole.train, Split(whole.test.x, whole.test.y)))
    path = next(tmp_path.glob("*test*"))
    with np.load(path) as file:
        kept = dict(file)
    with path.open("wb") as damaged:
        np.savez(damaged, **{**kept, "y": kept["y"][:-1]})
    with pytest.raises(ValueError, match=r"cifar10: 6 images with 5 labels: the file is damaged, copy it again"):
        read(tmp_path, CIFAR10)


def test_a_piece_that_is_too_large_for_its_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "LIMIT", 10)
    part = images(CIFAR10).test
    with pytest.raises(ValueError, match=r"20000 images of cifar10_test need \d+ bytes, more than 10: pack fewer"):
        cifar.write_pieces(tmp_path, "cifar10_test", part.x.numpy(), part.y.numpy())


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
            torch.zeros(2, dtype=torch.int64),
            r"uint8 \[n h w 3\], these are",
        ),
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), r"2 images need labels int64"),
    ],
)
def test_a_split_has_pixels_last_and_a_label_an_image(x: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(x, y)


def test_normalised_pixels_have_mean_zero_and_deviation_one_in_every_channel() -> None:
    split = images(CIFAR10).train
    x = Scale.of(split)(split.x)
    assert x.shape == (12, 3, 32, 32)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def feed(split: Split, batch: int, seed: int = 0) -> Feed:
    """Of pixels that are not scaled."""
    return Feed.of(split, Scale(torch.zeros(3), torch.ones(3)), batch, torch.Generator().manual_seed(seed))


def test_every_augmented_image_is_a_crop_of_the_padded_one_or_its_mirror() -> None:
    split = Split(images(CIFAR10).train.x, torch.arange(12))
    padded = torch.nn.functional.pad(split.x, (0, 0, 4, 4, 4, 4)).float()
    mirrored = set()
    for x, t in feed(split, 4).epoch():
        for image, label in zip(x.permute(0, 2, 3, 1), t.tolist(), strict=True):
            crops = {
                (r, c, flip): (crop.flip(1) if flip else crop)
                for r in range(9)
                for c in range(9)
                for crop in [padded[label, r : r + 32, c : c + 32]]
                for flip in (False, True)
            }
            hits = [how for how, crop in crops.items() if torch.equal(crop, image)]
            assert len(hits) == 1
            mirrored.add(hits[0][2])
    assert mirrored == {False, True}


def test_an_epoch_has_every_image_once_and_a_seed_the_same_batches() -> None:
    split = Split(images(CIFAR10).train.x, torch.arange(12))
    one, again, other = (list(feed(split, 4, seed).epoch()) for seed in (0, 0, 1))
    assert sorted(t for _, batch in one for t in batch.tolist()) == list(range(12))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(one, again, strict=True))
    assert not torch.equal(one[0][0], other[0][0])


def test_examples_that_do_not_fill_a_batch_wait_and_too_few_are_refused() -> None:
    split = images(CIFAR10).train
    assert [len(t) for _, t in feed(split, 5).epoch()] == [5, 5]
    with pytest.raises(ValueError, match=r"12 training images do not fill one batch of 13: lower --batch"):
        feed(split, 13)


def test_images_that_are_held_out_are_training_images_and_not_trained_on() -> None:
    every = Images("cifar10", 10, Split(images(CIFAR10).train.x, torch.arange(12)), images(CIFAR10).test)
    held = every.held_out(5)
    assert len(held.test.y) == 5
    assert sorted([*held.test.y.tolist(), *held.train.y.tolist()]) == list(range(12))
    assert torch.equal(held.test.x, every.train.x[held.test.y])
    with pytest.raises(ValueError, match=r"12 of 12 training images cannot be held out"):
        every.held_out(12)
