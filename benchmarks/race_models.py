"""The tasks of the races: networks of usual sizes on real data, all of it on the device.

Data are read from one folder: texts ``wikitext2.train.txt``, ``wikitext2.valid.txt``, ``tinyshakespeare.txt`` (or the
same with ``.xz``); ``cifar10.npz`` with x_train uint8 [n 32 32 3], y_train, x_test, y_test, or any form that
``experiments.cifar`` reads; ``mnist.npz`` (or ``.npz.xz``) with x_train uint8 [n 28 28], y_train, x_test, y_test;
``uci_regression.npz`` (or ``.npz.xz``) with protein_x [n d], protein_y [n] and protein_test bool [splits n].

Every task has two splits. Learning rates are tuned on ``TUNE``, which holds nothing that ``REPORT`` validates on: texts
are tiny-shakespeare and the first half of the training text, both without their last tenth, which validates; of images
and rows a tenth of the training set validates. ``REPORT`` trains on everything and validates on the validation text or
the test set.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from benchmarks.networks import BasicBlock, Block, cross_entropy, deep
from benchmarks.tasks import bernoulli, squared_error
from experiments import cifar
from experiments.images import Scale, Split

TUNE, REPORT = "tune", "report"
Batch = tuple[Tensor, Tensor]


# Data: a training set from which batches are drawn on the device, and fixed validation batches.


@final
@dataclass(frozen=True)
class Data:
    """``draw(generator)`` is a training batch; ``size`` counts examples, or bytes of text."""

    draw: Callable[[torch.Generator], Batch]
    validation: list[Batch]
    size: int


Load = Callable[[Path, str, torch.device], Data]  # from a folder, for TUNE or REPORT


@final
@dataclass(frozen=True)
class Task:
    """A network, its data, and the length of its schedule.

    ``head`` begins the names of parameters that matrix methods leave to AdamW, beside embeddings; ``score`` is the
    validation score beside the loss, higher is better where ``accuracy`` is its name.
    """

    name: str
    kind: str  # text, image or table
    network: Callable[[], nn.Module]
    data: Load
    family: Callable[[], ng.families.Family]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    score: Callable[[Tensor, Tensor], Tensor] | None = None
    score_name: str = ""
    head: tuple[str, ...] = ("head.",)
    autocast: bool = True
    steps: int = 600
    screen: int = 150  # steps of a run that only compares learning rates


def read_text(folder: Path, name: str) -> Tensor:
    """The bytes of ``name.txt`` or ``name.txt.xz``, uint8 [n]."""
    plain, packed = folder / f"{name}.txt", folder / f"{name}.txt.xz"
    if not plain.exists() and not packed.exists():
        raise SystemExit(f"{folder} has neither {plain.name} nor {packed.name}: give the folder of the texts by --data")
    raw = plain.read_bytes() if plain.exists() else lzma.decompress(packed.read_bytes())
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def read_arrays(folder: Path, name: str) -> dict[str, Tensor]:
    """The arrays of ``name.npz`` or ``name.npz.xz``."""
    plain, packed = folder / f"{name}.npz", folder / f"{name}.npz.xz"
    if not plain.exists() and not packed.exists():
        raise SystemExit(f"{folder} has neither {plain.name} nor {packed.name}: give the folder of the data by --data")
    raw = plain.read_bytes() if plain.exists() else lzma.decompress(packed.read_bytes())
    with np.load(io.BytesIO(raw)) as file:
        arrays = {key: file[key] for key in file.files}
    return {key: torch.from_numpy(a) for key, a in arrays.items() if a.dtype.kind in "buif"}


def texts(n: int, length: int, windows: int = 1024) -> Load:
    """n random windows of ``length`` bytes and the byte after each; validation on evenly spaced windows."""

    def load(folder: Path, split: str, device: torch.device) -> Data:
        train = [read_text(folder, "wikitext2.train")]
        if split == TUNE:
            sources = [read_text(folder, "tinyshakespeare"), train[0][: len(train[0]) // 2]]
            cuts = [len(text) * 9 // 10 for text in sources]
            train = [text[:cut] for text, cut in zip(sources, cuts, strict=True)]
            valid = torch.cat([text[cut:] for text, cut in zip(sources, cuts, strict=True)]).to(device)
        else:
            valid = read_text(folder, "wikitext2.valid").to(device)
        text = torch.cat(train).to(device)
        offsets = torch.arange(length + 1, device=device)

        def cut_out(source: Tensor, starts: Tensor) -> Batch:
            tokens = source[starts[:, None] + offsets].long()
            return tokens[:, :-1], tokens[:, 1:]

        def draw(generator: torch.Generator) -> Batch:
            return cut_out(text, torch.randint(len(text) - length, (n,), generator=generator, device=device))

        starts = torch.linspace(0, len(valid) - length - 1, windows, dtype=torch.float64, device=device).long()
        return Data(draw, [cut_out(valid, some) for some in starts.split(4 * n)], len(text))

    return load


@cache
def _cifar(folder: Path) -> tuple[Split, Split]:
    """CIFAR-10 in any of its forms; the first training file alone will do where the second did not fit."""
    if (folder / "cifar10.npz").exists() or (folder / "cifar10.npz.xz").exists():
        z = read_arrays(folder, "cifar10")
        return Split(z["x_train"], z["y_train"].long()), Split(z["x_test"], z["y_test"].long())
    strips = [folder / f"cifar10_{split}.npz" for split in ("train_a", "test", "train_b")]
    if strips[0].exists() and strips[1].exists() and not strips[2].exists():
        images = cifar._images(cifar.CIFAR10, cifar._strips(strips[0]), cifar._strips(strips[1]))
    else:
        images = cifar.read(folder, cifar.CIFAR10)
    return images.train, images.test


def pictures(n: int, limit: int | None = None) -> Load:
    """CIFAR-10 with random crops, four black pixels around the image, and mirror images."""

    def load(folder: Path, split: str, device: torch.device) -> Data:
        train, test = _cifar(folder)
        train, test = train[slice(limit)], test[slice(limit)]
        if split == TUNE:
            cut = len(train.y) * 9 // 10
            train, test = train[slice(cut)], train[slice(cut, None)]
        train, test = train.to(device), test.to(device)
        scale = Scale.of(train)
        padded = F.pad(train.x, (0, 0, 4, 4, 4, 4))
        side = train.x.shape[1]
        pixels = torch.arange(side, device=device)

        def draw(generator: torch.Generator) -> Batch:
            def random(high: int) -> Tensor:
                return torch.randint(high, (n,), generator=generator, device=device)

            rows = random(len(train.y))
            down = random(9)[:, None] + pixels
            flipped = torch.where(random(2)[:, None].bool(), pixels, side - 1 - pixels)
            right = random(9)[:, None] + flipped
            return scale(padded[rows[:, None, None], down[:, :, None], right[:, None, :]]), train.y[rows]

        batches = [(scale(x), y) for x, y in zip(test.x.split(1000), test.y.split(1000), strict=True)]
        return Data(draw, batches, len(train.y))

    return load


def _table(n: int, train: Batch, test: Batch, split: str, device: torch.device) -> Data:
    """Rows on the device; in ``TUNE`` the last tenth of the training rows validates."""
    if split == TUNE:
        cut = len(train[0]) * 9 // 10
        train, test = (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])
    (x, t), (xv, tv) = ((x.to(device), t.to(device)) for x, t in (train, test))

    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randint(len(x), (n,), generator=generator, device=device)
        return x[rows].float(), t[rows].float()

    batches = [(a.float(), b.float()) for a, b in zip(xv.split(10_000), tv.split(10_000), strict=True)]
    return Data(draw, batches, len(x))


def digits(n: int, every: int = 1) -> Load:
    """MNIST's images in [0, 1], inputs and targets at once; one pixel in ``every`` of both sides."""

    def load(folder: Path, split: str, device: torch.device) -> Data:
        z = read_arrays(folder, "mnist")
        train, test = (z[name][:, ::every, ::every].flatten(1).half() / 255 for name in ("x_train", "x_test"))
        return _table(n, (train, train), (test, test), split, device)

    return load


def rows(n: int, name: str = "protein", bins: int = 32) -> Load:
    """A UCI regression with sparse features: which of ``bins`` quantile bins each column is in. Targets have unit size.

    The first of the published splits; rows are shuffled once.
    """

    def load(folder: Path, split: str, device: torch.device) -> Data:
        z = read_arrays(folder, "uci_regression")
        x, y, test = z[f"{name}_x"].double(), z[f"{name}_y"].double(), z[f"{name}_test"][0]
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        x, y, test = x[order], y[order, None], test[order]
        edges = torch.quantile(x[~test], torch.linspace(0, 1, bins + 1, dtype=x.dtype)[1:-1], dim=0)
        columns = [torch.bucketize(a.contiguous(), b.contiguous()) for a, b in zip(x.T, edges.T, strict=True)]
        features = F.one_hot(torch.stack(columns, 1), bins).flatten(1).to(torch.uint8)
        y = ((y - y[~test].mean()) / y[~test].std()).float()
        return _table(n, (features[~test], y[~test]), (features[test], y[test]), split, device)

    return load


# Networks.


@final
class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021); all weights in Linear layers without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[n r i] to [n r i]."""
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of x [n h r 2d] as complex numbers, turned by the angle of their position [r d]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


@final
class Layer(nn.Module):
    """x + attention(norm x), then x + W₃(silu(W₁ norm x)·W₂ norm x), SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner = -(-8 * width // 3 // 64) * 64 if width >= 64 else 2 * width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[n r i] to [n r i]."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@final
class Decoder(nn.Module):
    """A language model of bytes: RMSNorm, SwiGLU, rotary positions, untied head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        half = width // heads // 2
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:  # what writes to the residual stream starts smaller, as in GPT-2
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if last else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes [n r] to logits [n r 256]."""
        y = self.tokens(x)
        for layer in self.layers:
            y = layer(y, self.cos, self.sin)
        return self.head(self.norm(y))


@final
class ByteLSTM(nn.Module):
    """A recurrent language model of bytes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes [n r] to logits [n r 256]."""
        return self.head(self.lstm(self.tokens(x))[0])


@final
class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021): patches, learned positions, the mean over positions."""

    def __init__(self, layers: int, width: int, heads: int, patch: int, pixels: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Embedding((pixels // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n 3 h w] to logits [n 10]."""
        y = self.patches(x).flatten(2).transpose(1, 2)
        r = torch.arange(y.shape[1], device=y.device).expand(len(y), -1)
        return self.head(self.norm(self.blocks(y + self.positions(r))).mean(1))


@final
class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) for small images: a 3 × 3 stem, four stages of two blocks, BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        i = width
        for stage in range(4):
            o = width * 2**stage
            blocks += [BasicBlock(i, o, 1 if stage == 0 else 2), BasicBlock(o, o, 1)]
            i = o
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(i, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n 3 h w] to logits [n 10]."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def autoencoder(widths: tuple[int, ...]) -> nn.Module:
    """Hinton and Salakhutdinov's (2006) with tanh units, Glorot's initialisation."""
    model = deep(widths)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


@final
class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths[:-1]))
        self.head = nn.Linear(widths[-2], widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        """[n i] to [n o]."""
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.head(x)


# Tasks.


def accuracy(y: Tensor, t: Tensor) -> Tensor:
    """The share of right answers."""
    return (y.argmax(-1) == t).float().mean()


def half_square(y: Tensor, t: Tensor) -> Tensor:
    """½‖y − t‖², mean over examples."""
    return 0.5 * (y - t).square().sum(-1).mean()


def mean_square(y: Tensor, t: Tensor) -> Tensor:
    """The mean squared error, in variances of the targets."""
    return (y - t).square().mean()


def tokens() -> ng.Categorical:
    """The family of logits [n t c]."""
    return ng.Categorical(axis=-1)


def tasks(*, tiny: bool = False) -> dict[str, Task]:
    """The seven tasks by name; ``tiny``: the same networks and data at a size for a CPU, a few steps long."""
    large: list[Task] = [
        Task("decoder", "text", lambda: Decoder(6, 384, 6, 256), texts(32, 256), tokens),
        Task("decoder-large", "text", lambda: Decoder(12, 768, 12, 256), texts(32, 256), tokens),
        Task("lstm", "text", lambda: ByteLSTM(2, 512), texts(64, 128), tokens, steps=800, screen=200),
        Task(
            "vit",
            "image",
            lambda: ViT(12, 384, 6, 4),
            pictures(256),
            ng.Categorical,
            loss=F.cross_entropy,
            score=accuracy,
            score_name="accuracy",
            steps=1200,
            screen=300,
        ),
        Task(
            "resnet18",
            "image",
            lambda: ResNet18(64),
            pictures(256),
            ng.Categorical,
            loss=F.cross_entropy,
            score=accuracy,
            score_name="accuracy",
            steps=1200,
            screen=300,
        ),
        Task(
            "autoencoder",
            "table",
            lambda: autoencoder((784, 1000, 500, 250, 30)),
            digits(512),
            ng.Bernoulli,
            loss=bernoulli,
            score=squared_error,
            score_name="squared error",
            head=(),
            autocast=False,
            steps=1500,
            screen=400,
        ),
        Task(
            "uci",
            "table",
            lambda: MLP(288, 512, 512, 512, 1),
            rows(512),
            ng.Gaussian,
            loss=half_square,
            score=mean_square,
            score_name="squared error",
            autocast=False,
            steps=1500,
            screen=400,
        ),
    ]
    small: list[tuple[Callable[[], nn.Module], Load]] = [
        (lambda: Decoder(2, 16, 2, 16), texts(4, 16, 8)),
        (lambda: Decoder(3, 24, 2, 16), texts(4, 16, 8)),
        (lambda: ByteLSTM(2, 8), texts(4, 12, 8)),
        (lambda: ViT(2, 16, 2, 8), pictures(8, 40)),
        (lambda: ResNet18(4), pictures(8, 40)),
        (lambda: autoencoder((49, 16, 8)), digits(16, every=4)),
        (lambda: MLP(288, 16, 16, 1), rows(16)),
    ]
    if not tiny:
        return {task.name: task for task in large}
    return {
        task.name: replace(task, name=f"tiny-{task.name}", network=network, data=data, steps=8, screen=4)
        for task, (network, data) in zip(large, small, strict=True)
    }
