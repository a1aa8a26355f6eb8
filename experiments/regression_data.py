"""Regression problems: real data with published splits, and smooth and discontinuous functions on a square."""

from __future__ import annotations

import io
import lzma
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

Pair: TypeAlias = tuple[Tensor, Tensor]  # inputs [n d], targets [n 1]


@final
@dataclass(frozen=True)
class Split:
    """Three sets in standardised units; an error of 1 is ``unit`` in the units of the targets."""

    train: Pair
    validation: Pair
    test: Pair
    unit: float


class Problem(ABC):
    """A data set with several splits."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in the tables."""

    @abstractmethod
    def split(self, number: int) -> Split:
        """Split ``number``, the same in every run of the script."""


@final
@dataclass(frozen=True)
class Table(Problem):
    """Rows x [n d] and y [n], and the test rows of every split, test [splits n].

    A fifth of the other rows is for validation, and at most ``rows`` are for training. Gaussian noise of ``noise``
    times the standard deviation of the targets is added to training and validation targets, not to test targets.
    """

    title: str
    x: Tensor
    y: Tensor
    test: Tensor
    rows: int = 2000
    noise: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.title}, noise {self.noise:g}" if self.noise else self.title

    def split(self, number: int) -> Split:
        rest = (~self.test[number]).nonzero().squeeze(1)
        generator = torch.Generator().manual_seed(number)
        order = rest[torch.randperm(len(rest), generator=generator)]
        cut = len(order) // 5
        train = order[cut : cut + self.rows]
        y = self.y[:, None]
        # A column that is constant in the training set becomes zero.
        centre, scale = self.x[train].mean(0), self.x[train].std(0)
        x = (self.x - centre) / torch.where(scale > 0, scale, 1.0)
        mean, unit = y[train].mean(), y[train].std()
        y = (y - mean) / unit
        y[order] += self.noise * torch.randn(len(order), 1, generator=generator, dtype=y.dtype)
        validation, test = order[:cut], self.test[number].nonzero().squeeze(1)
        return Split((x[train], y[train]), (x[validation], y[validation]), (x[test], y[test]), float(unit))


class Surface(ABC):
    """A function on the square [−1, 1]², of unit size."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in the tables."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The values [n 1] at points [n 2]."""


@final
@dataclass(frozen=True)
class Sines(Surface):
    """sin 3x₁ + sin(3x₂ + 2x₁): analytic, in every Sobolev space of the square."""

    @property
    def name(self) -> str:
        return "sines"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x[:, :1]) + torch.sin(3 * x[:, 1:] + 2 * x[:, :1])


@final
@dataclass(frozen=True)
class Checks(Surface):
    """A board of two by two squares, turned by 30°, 1 or −1: its jumps are in no space that has a kernel."""

    @property
    def name(self) -> str:
        return "checks"

    def __call__(self, x: Tensor) -> Tensor:
        c, s = math.cos(math.pi / 6), math.sin(math.pi / 6)
        return torch.sign((c * x[:, :1] - s * x[:, 1:]) * (s * x[:, :1] + c * x[:, 1:]))


@final
@dataclass(frozen=True)
class Sampled(Problem):
    """Values of a surface at ``n`` random points, with Gaussian noise of deviation ``noise``; tested without noise.

    A quarter as many more points, with noise, are for validation. The unit of the errors is that of the surface.

    >>> Sampled(Sines(), 0.3).name
    'sines, noise 0.3'
    """

    surface: Surface
    noise: float
    n: int = 256

    @property
    def name(self) -> str:
        return f"{self.surface.name}, noise {self.noise:g}"

    def split(self, number: int) -> Split:
        generator = torch.Generator().manual_seed(1000 + number)

        def part(n: int, noise: float) -> Pair:
            x = 2 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1
            return x, self.surface(x) + noise * torch.randn(n, 1, generator=generator, dtype=torch.float64)

        return Split(part(self.n, self.noise), part(self.n // 4, self.noise), part(2000, 0.0), unit=1.0)


def real(path: Path, names: tuple[str, ...]) -> tuple[Table, ...]:
    """The sets ``names`` of an ``.npz`` (or ``.npz.xz``) with arrays name_x [n d], name_y [n], name_test [splits n]."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    with np.load(io.BytesIO(raw)) as arrays:
        if missing := [name for name in names if f"{name}_x" not in arrays]:
            there = sorted(key[:-2] for key in arrays if key.endswith("_x"))
            raise ValueError(f"{path.name} holds no set {', '.join(missing)}: it has {', '.join(there)}")
        parts = [[torch.from_numpy(arrays[f"{name}_{part}"]) for part in ("x", "y", "test")] for name in names]
    return tuple(Table(name, x, y, test) for name, (x, y, test) in zip(names, parts, strict=True))
