"""Images in small files without loss, read by numpy alone: predicted pixels, and what xz makes of the rest."""

from __future__ import annotations

import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LIMIT = 60 * 2**20  # bytes of one file
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 4, "lp": 0, "pb": 0}]


def predicted(left: NDArray[np.int16], up: NDArray[np.int16], corner: NDArray[np.int16]) -> NDArray[np.int16]:
    """The median of left, up and left + up − corner: the predictor of lossless JPEG (Weinberger et al. 2000).

    >>> at = lambda *values: np.array(values, np.int16)
    >>> predicted(at(1, 5), at(3, 5), at(2, 9)).tolist()
    [2, 5]
    """
    low, high = np.minimum(left, up), np.maximum(left, up)
    return np.clip(left + up - corner, low, high)


def residuals(x: Bytes) -> Bytes:
    """What prediction leaves of images [n h w 3], modulo 256, with red and blue as differences from green: [3 n h w].

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
    """The images [n h w 3] that leave these residuals. A pixel needs those before it, but of all images at once."""
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
    """Images and labels as ``stem_00.npz.xz``, ``stem_01.npz.xz``, …, so many images in each."""
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
    """All images [n h w 3] and labels [n] of ``stem_*.npz.xz``, in their order."""
    found = []
    for path in sorted(folder.glob(f"{stem}_[0-9][0-9].npz.xz")):
        with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as piece:
            found.append((restored(piece["residual"]), piece["y"], int(piece["of"])))
    x, y = (np.concatenate([part[side] for part in found]) for side in (0, 1))
    if len(y) != found[0][2]:
        raise ValueError(
            f"{folder.name} has {len(y)} of the {found[0][2]} images of {stem}: copy all pieces {stem}_*.npz.xz there"
        )
    return x, y
