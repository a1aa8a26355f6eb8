"""CIFAR-10 and CIFAR-100 in any of these forms:

- the published archives, ``cifar-10-python.tar.gz`` and ``cifar-100-python.tar.gz``, or their folders;
- ``cifar10_train_a.npz``, ``cifar10_train_b.npz``, ``cifar10_test.npz`` (``cifar100_…``): WebP, read by Pillow;
- ``cifar10_train_00.npz.xz``, …, ``cifar10_test_00.npz.xz``, …: what ``pack`` writes, read by numpy alone.

Decoded images are cached under a digest of the source files: other files are decoded anew, the same files in another
folder are not.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import pickle
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.files import replaced
from experiments.images import Images, Split

Bytes = NDArray[np.uint8]
LIMIT = 60 * 2**20  # bytes of one file
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 4, "lp": 0, "pb": 0}]


@final
@dataclass(frozen=True)
class Benchmark:
    """A set of images: its classes and the names in its archive."""

    name: str
    classes: int
    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: bytes


CIFAR10 = Benchmark(
    name="cifar10",
    classes=10,
    archive="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{k}" for k in range(1, 6)),
    test=("test_batch",),
    labels=b"labels",
)
CIFAR100 = Benchmark(
    name="cifar100",
    classes=100,
    archive="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    train=("train",),
    test=("test",),
    labels=b"fine_labels",
)
Labelled = tuple[Bytes, NDArray[Any]]  # pixels [n h w 3], labels [n]
# What Python and numpy raise for truncated or damaged files.
_DAMAGE = (
    *(EOFError, KeyError, TypeError, ValueError, OSError),
    *(pickle.UnpicklingError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


class Source(ABC):
    """A file format of the images."""

    @abstractmethod
    def holds(self, folder: Path, what: Benchmark) -> bool:
        """Whether the folder has the images in this format."""

    @abstractmethod
    def files(self, folder: Path, what: Benchmark) -> list[Path]:
        """The files that are read."""

    @abstractmethod
    def read(self, folder: Path, what: Benchmark) -> tuple[Labelled, Labelled]:
        """The training and the test images."""


@final
class Batches(Source):
    """The folder of the published archive: pickled dictionaries with pixels [n 3072], one plane per colour."""

    def holds(self, folder: Path, what: Benchmark) -> bool:
        return (folder / what.folder).is_dir()

    def files(self, folder: Path, what: Benchmark) -> list[Path]:
        return [folder / what.folder / name for name in (*what.train, *what.test)]

    def read(self, folder: Path, what: Benchmark) -> tuple[Labelled, Labelled]:
        def joined(names: tuple[str, ...]) -> Labelled:
            return _joined([_unpickled((folder / what.folder / name).read_bytes(), what) for name in names])

        return joined(what.train), joined(what.test)


@final
class Archive(Source):
    """The published archive itself."""

    def holds(self, folder: Path, what: Benchmark) -> bool:
        return (folder / what.archive).is_file()

    def files(self, folder: Path, what: Benchmark) -> list[Path]:
        return [folder / what.archive]

    def read(self, folder: Path, what: Benchmark) -> tuple[Labelled, Labelled]:
        with tarfile.open(folder / what.archive) as tar:

            def joined(names: tuple[str, ...]) -> Labelled:
                found = []
                for name in names:
                    file = tar.extractfile(f"{what.folder}/{name}")
                    assert file is not None  # a member that is there and not a file: the archive is not CIFAR
                    found.append(_unpickled(file.read(), what))
                return _joined(found)

            return joined(what.train), joined(what.test)


@final
class Strips(Source):
    """Three .npz files with concatenated strips of images in lossless WebP, split at ``offset``."""

    def holds(self, folder: Path, what: Benchmark) -> bool:
        return all(path.is_file() for path in self.files(folder, what))

    def files(self, folder: Path, what: Benchmark) -> list[Path]:
        return [folder / f"{what.name}_{part}.npz" for part in ("train_a", "train_b", "test")]

    def read(self, folder: Path, what: Benchmark) -> tuple[Labelled, Labelled]:
        a, b, test = map(_strips, self.files(folder, what))
        return _joined([a, b]), test


@final
class Pieces(Source):
    """The files that ``pack`` writes."""

    def holds(self, folder: Path, what: Benchmark) -> bool:
        return all((folder / f"{what.name}_{split}_00.npz.xz").is_file() for split in ("train", "test"))

    def files(self, folder: Path, what: Benchmark) -> list[Path]:
        return sorted(folder.glob(f"{what.name}_t[er]*_[0-9][0-9].npz.xz"))

    def read(self, folder: Path, what: Benchmark) -> tuple[Labelled, Labelled]:
        return read_pieces(folder, f"{what.name}_train"), read_pieces(folder, f"{what.name}_test")


def _source(folder: Path, what: Benchmark) -> Source:
    """The format of the images in a folder, which must be complete."""
    sources: tuple[Source, ...] = (Batches(), Archive(), Strips(), Pieces())
    source = next((source for source in sources if source.holds(folder, what)), None)
    if source is None:
        raise FileNotFoundError(
            f"no {what.name} in {folder}: put {what.archive} there, its folder {what.folder}/, the three files "
            f"{what.name}_train_a.npz, {what.name}_train_b.npz and {what.name}_test.npz, or all of {what.name}_*.npz.xz"
        )
    missing = [path for path in source.files(folder, what) if not path.is_file()]
    if missing:
        names = ", ".join(path.name for path in missing)
        raise FileNotFoundError(f"{missing[0].parent} has no {names}: unpack {what.archive} there again, all of it")
    return source


def read(folder: Path, what: Benchmark) -> Images:
    """The images in a folder, in any format."""
    source = _source(folder, what)
    try:
        splits = source.read(folder, what)
    except (_Foreign, PermissionError):
        raise
    except _DAMAGE as error:
        names = ", ".join(path.name for path in source.files(folder, what))
        raise ValueError(
            f"{what.name} in {folder} cannot be read ({type(error).__name__}: {error}): a file is damaged or not "
            f"complete, copy {names} there again"
        ) from error
    return _images(what, *splits)


def cached(folder: Path, what: Benchmark, store: Path) -> Images:
    """The images, decoded once and then read from a file in ``store``."""
    digest = hashlib.sha256()
    for file in _source(folder, what).files(folder, what):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    path = store / f"{what.name}-{digest.hexdigest()[:16]}.npz"
    if not path.exists():
        images = read(folder, what)
        with replaced(path) as new:
            (_, train), (_, test) = _splits(images)
            x, y = ((train[side].numpy(), test[side].numpy()) for side in "xy")
            np.savez(new, xtrain=x[0], ytrain=y[0], xtest=x[1], ytest=y[1])
        return images
    with np.load(path) as file:
        return _images(what, (file["xtrain"], file["ytrain"]), (file["xtest"], file["ytest"]))


def pack(folder: Path, what: Benchmark, target: Path) -> list[Path]:
    """Write the images losslessly in pieces of at most 60 MiB that are read without Pillow."""
    images = read(folder, what)
    return [
        path
        for split, tensors in _splits(images)
        for path in write_pieces(target, f"{what.name}_{split}", tensors["x"].numpy(), tensors["y"].numpy())
    ]


def _splits(images: Images) -> list[tuple[str, dict[str, torch.Tensor]]]:
    return [("train", vars(images.train)), ("test", vars(images.test))]


def _images(what: Benchmark, train: Labelled, test: Labelled) -> Images:
    for x, y in (train, test):
        if len(y) and int(y.max()) >= what.classes:
            raise ValueError(
                f"{what.name} has {what.classes} classes, the file has a label {int(y.max())}: another set?"
            )
        if len(x) != len(y):
            raise ValueError(f"{what.name}: {len(x)} images with {len(y)} labels: the file is damaged, copy it again")
    splits = (
        Split(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64))) for x, y in (train, test)
    )
    return Images(what.name, what.classes, *splits)


def _joined(parts: list[Labelled]) -> Labelled:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _strips(path: Path) -> Labelled:
    try:
        from PIL import Image
    except ImportError as missing:
        raise ImportError(
            f"{path.name} is WebP, which Pillow reads: install natgrad[experiments], or --pack the images elsewhere"
        ) from missing
    with path.open("rb") as opened, np.load(opened) as file:
        webp, cuts, y = file["webp"], file["offset"], file["y"]
    strips = [Image.open(io.BytesIO(webp[a:b].tobytes())).convert("RGB") for a, b in pairwise(cuts)]
    x = np.concatenate([np.asarray(strip) for strip in strips])
    return x.reshape(-1, x.shape[1], x.shape[1], 3), y


def _unpickled(content: bytes, what: Benchmark) -> Labelled:
    batch = _Arrays(io.BytesIO(content), encoding="bytes").load()
    side = int((batch[b"data"].shape[1] // 3) ** 0.5)
    x = batch[b"data"].reshape(-1, 3, side, side).transpose(0, 2, 3, 1)
    return x, np.asarray(batch[what.labels])


@final
class _Foreign(pickle.UnpicklingError):
    """The file is no batch of images."""


# What a pickled array is made of. A module beside these could run code when it is imported.
_PARTS = frozenset(
    {
        *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
        *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    }
)


@final
class _Arrays(pickle.Unpickler):
    """Unpickles arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PARTS:
            return super().find_class(module, name)
        raise _Foreign(f"a batch of CIFAR has arrays only, this file wants {module}.{name}: do not use it")


# Packed images: the residuals of predicted pixels, compressed by xz. Lossless, and read by numpy alone.


def predicted(left: NDArray[np.int16], up: NDArray[np.int16], corner: NDArray[np.int16]) -> NDArray[np.int16]:
    """The median of left, up and left + up − corner: the predictor of lossless JPEG (Weinberger et al. 2000).

    >>> at = lambda *values: np.array(values, np.int16)
    >>> predicted(at(1, 5), at(3, 5), at(2, 9)).tolist()
    [2, 5]
    """
    low, high = np.minimum(left, up), np.maximum(left, up)
    return np.clip(left + up - corner, low, high)


def residuals(x: Bytes) -> Bytes:
    """Prediction residuals [3 n h w] of images [n h w 3] modulo 256, with red and blue relative to green.

    >>> x = np.random.default_rng(0).integers(256, size=(2, 5, 4, 3), dtype=np.uint8)
    >>> bool((restored(residuals(x)) == x).all())
    True
    """
    green = x[..., 1]
    planes = np.stack([green, x[..., 0] - green, x[..., 2] - green]).astype(np.int16)
    padded = np.pad(planes, ((0, 0), (0, 0), (1, 0), (1, 0)))
    guess = predicted(padded[..., 1:, :-1], padded[..., :-1, 1:], padded[..., :-1, :-1])
    return (planes - guess).astype(np.uint8)


def restored(residual: Bytes) -> Bytes:
    """The inverse of ``residuals``, pixel by pixel for all images at once."""
    _, n, h, w = residual.shape
    planes = np.zeros((h + 1, w + 1, 3, n), np.int16)
    waiting = np.ascontiguousarray(residual.transpose(2, 3, 0, 1))
    for r in range(h):
        for c in range(w):
            guess = predicted(planes[r + 1, c], planes[r, c + 1], planes[r, c])
            planes[r + 1, c + 1] = (guess + waiting[r, c]).astype(np.uint8)
    green, red, blue = planes[1:, 1:].astype(np.uint8).transpose(2, 3, 0, 1)
    return np.stack([red + green, green, blue + green], axis=-1)


def write_pieces(folder: Path, stem: str, x: Bytes, y: NDArray[Any], images: int = 20_000) -> list[Path]:
    """Write images and labels as ``stem_00.npz.xz``, ``stem_01.npz.xz``, …, with so many images each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, start in enumerate(range(0, len(y), images)):
        part = slice(start, start + images)
        content = io.BytesIO()
        np.savez(content, residual=residuals(x[part]), y=y[part].astype(np.uint8), of=np.array(len(y)))
        packed = lzma.compress(content.getvalue(), filters=_FILTERS)
        if len(packed) > LIMIT:
            raise ValueError(f"{images} images of {stem} need {len(packed)} bytes, more than {LIMIT}: pack fewer")
        paths.append(folder / f"{stem}_{number:02d}.npz.xz")
        paths[-1].write_bytes(packed)
    return paths


def read_pieces(folder: Path, stem: str) -> tuple[Bytes, Bytes]:
    """All images [n h w 3] and labels [n] of ``stem_*.npz.xz``, in order."""
    pieces = []
    for path in sorted(folder.glob(f"{stem}_[0-9][0-9].npz.xz")):
        with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as piece:
            pieces.append((restored(piece["residual"]), piece["y"], int(piece["of"])))
    x, y = (np.concatenate([piece[side] for piece in pieces]) for side in (0, 1))
    if len(y) != pieces[0][2]:
        raise ValueError(
            f"{folder.name} has {len(y)} of the {pieces[0][2]} images of {stem}: copy all pieces {stem}_*.npz.xz there"
        )
    return x, y
