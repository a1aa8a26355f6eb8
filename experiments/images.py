"""Images as bytes on one device, and augmented batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

_PADDING = 4


@final
@dataclass(frozen=True)
class Split:
    """Pixels x uint8 [n h w 3] and labels y int64 [n]."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.ndim != 4 or self.x.shape[3] != 3:
            raise ValueError(f"pixels are uint8 [n h w 3], these are {self.x.dtype} {list(self.x.shape)}: convert them")
        if self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]:
            raise ValueError(
                f"{len(self.x)} images need labels int64 [{len(self.x)}], these are {self.y.dtype} "
                f"{list(self.y.shape)}: give one an image"
            )

    def __getitem__(self, part: Tensor | slice) -> Split:
        return Split(self.x[part], self.y[part])

    def to(self, device: torch.device) -> Split:
        """The same on another device."""
        return Split(self.x.to(device), self.y.to(device))


@final
@dataclass(frozen=True)
class Images:
    """A training and a test split of images of some classes."""

    name: str
    classes: int
    train: Split
    test: Split

    @property
    def digest(self) -> str:
        """A digest of all pixels and labels in order."""
        digest = hashlib.sha256()
        for tensor in (self.train.x, self.train.y, self.test.x, self.test.y):
            digest.update(f"{list(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def to(self, device: torch.device) -> Images:
        """The same on another device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def first(self, n: int) -> Images:
        """The first n of both splits."""
        return replace(self, train=self.train[slice(n)], test=self.test[slice(n)])

    def held_out(self, n: int) -> Images:
        """Always the same n training images as test split: settings are tuned without the test images."""
        total = len(self.train.y)
        if not 0 < n < total:
            raise ValueError(f"{n} of {total} training images cannot be held out: take between 1 and {total - 1}")
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).to(self.train.y.device)
        return replace(self, train=self.train[order[n:]], test=self.train[order[:n]])


@final
@dataclass(frozen=True)
class Part:
    """The first ``limit`` images of both splits (None: all), with ``held_out`` training images as test split.

    >>> pixels, labels = torch.zeros(6, 1, 1, 3, dtype=torch.uint8), torch.arange(6)
    >>> found = Part(limit=5, held_out=2).of(Images("cifar10", 10, *2 * [Split(pixels, labels)]))
    >>> len(found.train.y), len(found.test.y)
    (3, 2)
    """

    limit: int | None = None
    held_out: int = 0

    def of(self, images: Images) -> Images:
        """The chosen images."""
        chosen = images if self.limit is None else images.first(self.limit)
        return chosen.held_out(self.held_out) if self.held_out else chosen


@final
@dataclass(frozen=True)
class Scale:
    """x ↦ (x − mean)/deviation per channel, the inputs of a network."""

    mean: Tensor  # [3]
    deviation: Tensor  # [3]

    @staticmethod
    def of(split: Split) -> Scale:
        """The moments of all pixels, counted without rounding.

        >>> Scale.of(Split(torch.tensor([[[[0, 0, 2]], [[4, 0, 2]]]], dtype=torch.uint8), torch.tensor([0]))).mean
        tensor([2., 0., 2.])
        """
        levels = torch.arange(256, dtype=torch.float64, device=split.x.device)
        counts = torch.stack([torch.bincount(split.x[..., c].flatten().int(), minlength=256) for c in range(3)])
        share = counts.double() / counts.sum(1, keepdim=True)
        mean = share @ levels
        deviation = (share @ levels.square() - mean.square()).clamp(min=0).sqrt()
        # A constant channel has no scale.
        return Scale(mean.float(), torch.where(deviation > 0, deviation, 1.0).float())

    def divided_by(self, divisor: float) -> Scale:
        """Inputs that are so many times smaller."""
        return replace(self, deviation=self.deviation * divisor)

    def __call__(self, x: Tensor) -> Tensor:
        """Pixels [n h w 3] to inputs [n 3 h w], in the memory that they have: channels last."""
        return ((x.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)


@final
@dataclass(frozen=True)
class Feed:
    """Shuffled and augmented batches: random crops of the image with four black pixels around it, and mirror images.

    A batch is made at once on the device; every random number comes from ``generator``. An incomplete last batch is
    dropped.
    """

    padded: Tensor  # uint8 [n (h + 8) (w + 8) 3]
    y: Tensor
    scale: Scale
    batch: int
    generator: torch.Generator

    @staticmethod
    def of(split: Split, scale: Scale, batch: int, generator: torch.Generator) -> Feed:
        """The batches of a split, on its device."""
        if len(split.y) < batch:
            raise ValueError(f"{len(split.y)} training images do not fill one batch of {batch}: lower --batch")
        return Feed(F.pad(split.x, (0, 0) + 2 * (_PADDING, _PADDING)), split.y, scale, batch, generator)

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return len(self.y) // self.batch

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs [n 3 h w] and labels [n], batch by batch, every image at most once."""
        device = self.y.device
        order = torch.randperm(len(self.y), generator=self.generator, device=device)
        for index in order[: self.steps * self.batch].split(self.batch):
            yield self.scale(self._cropped(index)), self.y[index]

    def _cropped(self, index: Tensor) -> Tensor:
        device, n = index.device, len(index)
        h, w = (side - 2 * _PADDING for side in self.padded.shape[1:3])
        shift = torch.randint(2 * _PADDING + 1, (2, n, 1), generator=self.generator, device=device)
        flip = torch.randint(2, (n, 1), generator=self.generator, device=device).bool()
        column = torch.arange(w, device=device)
        rows = shift[0] + torch.arange(h, device=device)  # [n h]
        columns = shift[1] + torch.where(flip, column.flip(0), column)  # [n w]
        return self.padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]
