"""The two tasks on which optimizers are compared: data, network, loss, metric of the outputs, search grid."""

from __future__ import annotations

import gzip
import io
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from benchmarks.networks import DEEP, deep, tanh_layers
from natgrad.cli.demo import accuracy
from natgrad.cli.training import Loss
from natgrad.data import load_digits


@final
@dataclass(frozen=True)
class Task:
    """A network with training and test data (inputs [n …], targets [n …]), a loss and a score."""

    name: str
    network: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch_size: int
    loss: Loss
    score_name: str
    score: Loss


@final
@dataclass(frozen=True)
class TrainingTask:
    """A task with its metric, its seeds and the grid that SGD, AdamW and SOAP are tuned on.

    K-FAC has the batch size of the task; the others may choose any of ``batches``.
    """

    task: Task
    metric: ng.OutputMetric
    seeds: tuple[int, ...]
    sgd: tuple[float, ...]  # learning rates of SGD; AdamW and SOAP have the same for all tasks
    batches: tuple[int, ...]


def digits(device: torch.device, widths: tuple[int, ...] = (64, 128, 64, 10)) -> TrainingTask:
    """A classifier of 8 × 8 digits with tanh units, cross-entropy."""
    data = load_digits()
    train, test = ((split.images.to(device), split.labels.to(device)) for split in data)
    task = Task(
        name="digits classifier " + "-".join(map(str, widths)),
        network=lambda: nn.Sequential(*tanh_layers(widths)).to(device),
        train=train,
        test=test,
        batch_size=len(data.train.images),
        loss=F.cross_entropy,
        score_name="test accuracy",
        score=accuracy,
    )
    metric = ng.Fisher(ng.Categorical(), samples=1)
    return TrainingTask(task, metric, (0, 1, 2, 3, 4), (0.03, 0.1, 0.3, 1.0), (256, task.batch_size))


def bernoulli(y: Tensor, t: Tensor) -> Tensor:
    """Cross-entropy of the pixels, summed over them, mean over examples."""
    return F.binary_cross_entropy_with_logits(y, t, reduction="sum") / len(y)


def squared_error(y: Tensor, t: Tensor) -> Tensor:
    """‖σ(y) − t‖², mean over examples."""
    return (y.sigmoid() - t).square().sum(-1).mean()


def mnist(path: Path, device: torch.device, widths: tuple[int, ...] = DEEP) -> TrainingTask:
    """The auto-encoder of Hinton and Salakhutdinov (2006) with tanh and cross-entropy, as Martens and Grosse (2015)."""
    train, test = (images.to(device) for images in load_mnist(path))
    task = Task(
        name="MNIST auto-encoder " + "-".join(map(str, widths)) + "-…",
        network=lambda: _glorot(deep(widths)).to(device),
        train=(train, train),
        test=(test, test),
        batch_size=min(10_000, len(train)),
        loss=bernoulli,
        score_name="squared error",
        score=squared_error,
    )
    metric = ng.Fisher(ng.Bernoulli(), samples=1)
    return TrainingTask(task, metric, (0,), (1e-4, 3e-4, 1e-3, 3e-3), (min(1000, len(train)), task.batch_size))


def _glorot(model: nn.Sequential) -> nn.Sequential:
    """Glorot initialisation, made for tanh: with torch's default SGD, AdamW and SOAP stay on a plateau for long."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


def load_mnist(path: Path) -> tuple[Tensor, Tensor]:
    """Training and test images [n 784] in [0, 1] from a folder of idx files or from one file of arrays."""
    if path.is_dir():
        parts = [_idx(path, f"{part}-images-idx3-ubyte") for part in ("train", "t10k")]
    else:
        import numpy as np

        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        arrays = np.load(io.BytesIO(raw))
        parts = [torch.from_numpy(arrays[name]) for name in ("x_train", "x_test")]
    train, test = (part.flatten(1).float() / 255 for part in parts)
    return train, test


def _idx(folder: Path, name: str) -> Tensor:
    """Four numbers of four bytes (magic, n, height, width), then the pixels."""
    packed, plain = folder / f"{name}.gz", folder / name
    if not packed.exists() and not plain.exists():
        raise SystemExit(f"{folder} holds neither {packed.name} nor {plain.name}: give the folder of MNIST's idx files")
    raw = bytearray(gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes())
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in (4, 8, 12)]
    return torch.frombuffer(raw, dtype=torch.uint8, offset=16).reshape(shape)
