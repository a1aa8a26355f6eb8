"""Handwritten digits, 8 × 8 pixels: 1,797 examples in 43 KiB (source and licence: README.md in this folder)."""

from __future__ import annotations

import gzip
import random
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.show import brief

COUNT, PIXELS, LEVELS = 1797, 64, 16


class Examples(NamedTuple):
    """Images of digits and their labels.

    Attributes:
        images: x [n i] in [0, 1]; i runs over the 64 pixels, row by row.
        labels: t [n] in 0 … 9.
    """

    images: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        return brief(self)


class Digits(NamedTuple):
    """A training and a test set of digits, without a common example.

    Attributes:
        train: The training examples.
        test: The test examples.
    """

    train: Examples
    test: Examples


def load_digits(test_fraction: float = 0.2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Digits:
    """The UCI digits, shuffled and split.

    Args:
        test_fraction: The share of the 1,797 examples that are kept for testing.
        seed: The seed of the shuffle.
        dtype: The precision of the images.

    Returns:
        ``Digits``: ``(x, t), (x_test, t_test) = load_digits()``.

    Method:
        The file is not in random order (it has long runs of 0, 1, … 9 in turn), so a split by position would be unfair
        to some digits. The shuffle is the standard library's, which gives the same split with every version of torch.

    Example:
        >>> train, test = load_digits()
        >>> train.images.shape, test.images.shape
        (torch.Size([1438, 64]), torch.Size([359, 64]))
        >>> train.images.min().item(), train.images.max().item(), test.labels.unique().tolist()
        (0.0, 1.0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"load_digits: test_fraction is {test_fraction}, but must lie strictly between 0 and 1")
    raw = gzip.decompress((files("natgrad.data") / "digits.bin.gz").read_bytes())
    # bytearray: torch warns about tensors on read-only memory.
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    images = pixels[: COUNT * PIXELS].reshape(COUNT, PIXELS).to(dtype) / LEVELS
    labels = pixels[COUNT * PIXELS :].long()

    order = list(range(COUNT))
    random.Random(seed).shuffle(order)
    index = torch.tensor(order)
    test, train = index.tensor_split([round(test_fraction * COUNT)])
    if not len(test) or not len(train):
        raise ValueError(f"load_digits: test_fraction {test_fraction} leaves one side of {COUNT} examples empty")
    return Digits(Examples(images[train], labels[train]), Examples(images[test], labels[test]))
