"""The networks of the benchmarks, each with a random batch, a loss and the family of its outputs.

What a step costs does not depend on the values of inputs and targets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.cli.demo import half_squared_error

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: a pooling layer
DEEP = (784, 1000, 500, 250, 30)


def cross_entropy(y: Tensor, t: Tensor) -> Tensor:
    """The mean over all terms, for y [n … c] and t [n …]."""
    return F.cross_entropy(y.flatten(0, -2), t.flatten())


@dataclass(frozen=True)
class Problem:
    """A model with a batch, by default a classifier. Its parameters require gradients, as in training."""

    name: str
    model: nn.Module
    x: Tensor
    t: Tensor
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    family: ng.families.Family = field(default_factory=lambda: ng.Categorical(axis=-1))

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def copy(self) -> Problem:
        """A copy that a library may change: one that asks for the gradient of x would do so for everybody."""
        return replace(self, model=copy.deepcopy(self.model), x=self.x.detach().clone(), t=self.t.clone())

    def first(self, n: int) -> Problem:
        """The first n examples."""
        return replace(self, x=self.x[:n], t=self.t[:n])


def mlp(widths: tuple[int, ...], n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Problem:
    """Linear layers of these widths with ReLU between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(device, dtype)
    return classification("MLP " + "-".join(map(str, widths)), model, (n, widths[0]), widths[-1])


def resnet(
    width: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32, blocks: int = 1, pixels: int = 32
) -> Problem:
    """6·blocks + 2 layers of convolutions in residual blocks without normalisation, ten classes."""
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    for i, o, stride in ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
        stages += [Residual(i, o, stride), *(Residual(o, o, 1) for _ in range(blocks - 1))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *stages, *head).to(device, dtype)
    return classification(f"ResNet-{6 * blocks + 2} of width {width}", model, (n, 3, pixels, pixels), 10)


@final
class Residual(nn.Module):
    """relu(skip(x) + conv(relu(conv(x))))."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(i, o, 3, stride, padding=1)
        self.second = nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Identity() if i == o and stride == 1 else nn.Conv2d(i, o, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[n i h w] to [n o h/stride w/stride]."""
        return torch.relu(self.skip(x) + self.second(torch.relu(self.first(x))))


def classification(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> Problem:
    """A random batch and random classes."""
    p = next(model.parameters())
    x = torch.randn(shape, dtype=p.dtype).to(p.device)
    return Problem(f"{name}, batch {shape[0]}", model, x, torch.randint(classes, shape[:1]).to(p.device))


def tanh_layers(widths: tuple[int, ...]) -> list[nn.Module]:
    """Linear layers with tanh between them; the last is linear."""
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return layers[:-1]


def deep(widths: tuple[int, ...]) -> nn.Sequential:
    """An encoder with a linear code, and the mirrored decoder."""
    return nn.Sequential(*tanh_layers(widths), *tanh_layers(widths[::-1]))


def autoencoder(n: int, device: torch.device, widths: tuple[int, ...] = DEEP) -> Problem:
    """The deep auto-encoder of Hinton and Salakhutdinov (2006), ½‖y − x‖²."""
    torch.manual_seed(0)
    model = deep(widths).to(device)
    x = torch.rand(n, widths[0]).to(device)
    name = "auto-encoder " + "-".join(map(str, widths)) + f"-…, batch {n}"
    return Problem(name, model, x, x, half_squared_error, ng.Gaussian())


def lenet(n: int, device: torch.device, pixels: int = 28) -> Problem:
    """LeNet-5 with ReLU and max-pooling: two convolutions 5 × 5, three linear layers."""
    torch.manual_seed(0)
    side = (pixels // 2 - 4) // 2
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * side * side, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    return classification(f"LeNet {pixels} × {pixels}", model.to(device), (n, 1, pixels, pixels), 10)


def vgg(
    n: int,
    device: torch.device,
    norm: Callable[[int], nn.Module] | None = None,
    plan: tuple[int, ...] = VGG16,
    pixels: int = 32,
) -> Problem:
    """VGG16 for CIFAR: thirteen convolutions 3 × 3 and one linear layer; with or without normalisation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    i = 3
    for o in plan:
        if o == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(i, o, 3, padding=1), *((norm(o),) if norm else ()), nn.ReLU()]
        i = o
    side = pixels // 2 ** plan.count(0)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(i * side * side, 10)).to(device)
    name = f"VGG16 with {norm(1)._get_name()}" if norm else "VGG16"
    return classification(name, model, (n, 3, pixels, pixels), 10)


@final
class BasicBlock(nn.Module):
    """relu(skip(x) + norm(conv(relu(norm(conv(x))))))."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, stride, padding=1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)
        changes = i != o or stride != 1
        self.skip = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """[n i h w] to [n o h/stride w/stride]."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + (x if self.skip is None else self.skip(x)))


def resnet18(n: int, device: torch.device, width: int = 64, pixels: int = 32) -> Problem:
    """ResNet-18 of He et al. (2016) for CIFAR: a 3 × 3 stem, four stages of two blocks, BatchNorm, ten classes."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    i = width
    for stage in range(4):
        o = width * 2**stage
        blocks += [BasicBlock(i, o, 1 if stage == 0 else 2), BasicBlock(o, o, 1)]
        i = o
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10)).to(device)
    return classification(f"ResNet-18 of width {width}", model, (n, 3, pixels, pixels), 10)


@final
class Attention(nn.Module):
    """Multi-head self-attention whose weights are all in Linear layers."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n r i] to [n r i]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


@final
class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[n r i] to [n r i]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def transformer(n: int, r: int, device: torch.device, width: int = 256, classes: int = 65) -> Problem:
    """One block with a class for every position."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(width, 4, causal=False), nn.LayerNorm(width), nn.Linear(width, classes)).to(device)
    x, t = torch.randn(n, r, width).to(device), torch.randint(classes, (n, r)).to(device)
    return Problem(f"transformer block d {width}, {n} × {r}", model, x, t)


@final
class GPT(nn.Module):
    """A causal language model with learned positions and an untied head."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n r c]. Positions are looked up per example, so that every input has a batch axis."""
        r = torch.arange(x.shape[1], device=x.device).expand_as(x)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(r))))


def gpt(n: int, r: int, device: torch.device, layers: int = 6, width: int = 384, vocabulary: int = 65) -> Problem:
    """A character-level language model."""
    torch.manual_seed(0)
    model = GPT(layers, width, 6, vocabulary, r).to(device)
    x, t = torch.randint(vocabulary, (2, n, r)).to(device)
    return Problem(f"GPT {layers} × {width}, {n} × {r} tokens", model, x, t)


@final
class RNN(nn.Module):
    """h ← tanh(V x_r + W h), both Linear layers shared by all positions; a class from the last h."""

    def __init__(self, i: int, width: int, classes: int) -> None:
        super().__init__()
        self.input, self.recurrent = nn.Linear(i, width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n r i] to [n c]."""
        h = x.new_zeros(len(x), self.recurrent.in_features)
        for step in x.unbind(1):
            h = torch.tanh(self.input(step) + self.recurrent(h))
        return self.head(h)


def rnn(n: int, r: int, device: torch.device, i: int = 64, width: int = 256) -> Problem:
    """A classifier of sequences."""
    torch.manual_seed(0)
    return classification(f"RNN of Linear cells, width {width}, {r} steps", RNN(i, width, 10).to(device), (n, r, i), 10)


def gradient(problem: Problem) -> Callable[[], Tensor]:
    """A forward and a backward pass, the unit of time."""

    def contestant() -> Tensor:
        problem.model.zero_grad(set_to_none=True)
        loss = problem.loss(problem.model(problem.x), problem.t)
        loss.backward()
        return loss.detach()

    return contestant
