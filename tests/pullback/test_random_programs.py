"""Random programs of matrix products, offsets, gains and views have the metric of brute force.

Sizes are drawn from two or three numbers, so that positions, inputs, outputs and examples often agree in number: what
belongs together must not be told by sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests.pulled import close

Layer = Callable[[Tensor], Tensor]


class Program(nn.Module):
    """One to three layers on h [n t d]; a parameter is sometimes used again."""

    def __init__(self, draw: random.Random, sizes: list[int]) -> None:
        super().__init__()
        self.draw, self.sizes, self.numbers = draw, sizes, nn.ParameterList()
        self.t, self.d = draw.choice(sizes), draw.choice(sizes)
        self.shape = self.t, self.d
        kinds = [self.product, self.product, self.product, self.expanded, self.gain, self.norm, self.view]
        self.layers = [draw.choice(kinds)() for _ in range(draw.choice([1, 2, 3]))]

    def parameter(self, *shape: int) -> Callable[[], Tensor]:
        """It is read from the module in every pass."""
        alike = [at for at, p in enumerate(self.numbers) if p.shape == shape]
        if not alike or self.draw.random() > 0.3:
            self.numbers.append(nn.Parameter(0.6 * torch.randn(shape, dtype=torch.float64)))
            alike = [len(self.numbers) - 1]
        number = self.draw.choice(alike)
        return lambda: self.numbers[number]

    def offset(self) -> Layer:
        """Of outputs, of positions, of both, one number; or none."""
        shapes = [(self.d,), (1, self.d), (self.t, 1), (self.t, self.d), (1,), None, None]
        shape = self.draw.choice(shapes)
        if shape is None:
            return lambda h: h
        b = self.parameter(*shape)
        return lambda h: h + b()

    def product(self) -> Layer:
        """h W in many spellings, an offset and an activation."""
        t, d, o = self.t, self.d, self.draw.choice(self.sizes)
        spellings: dict[tuple[int, ...], list[Callable[[Tensor, Tensor], Tensor]]] = {
            (d, o): [lambda h, w: h @ w, lambda h, w: F.linear(h, w.T), lambda h, w: torch.einsum("ntd,do->nto", h, w)],
            (o, d): [F.linear, lambda h, w: (w @ h.mT).mT, lambda h, w: torch.einsum("ntd,od->nto", h, w)],
            (o + 1, d): [lambda h, w: F.linear(h, w[1:])],
            (o * d + 1,): [lambda h, w: F.linear(h, w[1:].view(o, d))],
            (t, d, o): [
                lambda h, w: torch.einsum("ntd,tdo->nto", h, w),
                lambda h, w: torch.bmm(h.transpose(0, 1), w).transpose(0, 1),
                lambda h, w: (h[:, :, None] @ w)[:, :, 0],
                lambda h, w: (w.mT @ h[..., None])[..., 0],
                lambda h, w: (h[:, None] @ w).diagonal(dim1=1, dim2=2).mT,
            ],
            (o, d, 2): [lambda h, w: F.conv1d(F.pad(h.mT, (1, 0)), w).mT],
        }
        shape = self.draw.choice(list(spellings))
        w, run = self.parameter(*shape), self.draw.choice(spellings[shape])
        self.d = o
        activations: list[Layer] = [torch.tanh, torch.sin, F.relu, lambda h: h]
        add, act = self.offset(), self.draw.choice(activations)
        return lambda h: act(add(run(h, w())))

    def expanded(self) -> Layer:
        """One row for all outputs, or one number for all inputs."""
        o = self.draw.choice(self.sizes)
        d, self.d = self.d, o
        w = self.parameter(*self.draw.choice([(1, d), (o, 1)]))
        return lambda h: F.linear(h, w().expand(o, d)).tanh()

    def gain(self) -> Layer:
        g = self.parameter(*self.draw.choice([(self.d,), (self.t, 1), (self.t, self.d), (1,)]))
        ways: list[Callable[[Tensor, Tensor], Tensor]] = [
            *(torch.mul, torch.sub, lambda h, g: h / (g * g + 1), lambda h, g: (1 - g) * h + g),
        ]
        way = self.draw.choice(ways)
        return lambda h: way(h, g())

    def norm(self) -> Layer:
        w, b, shape = self.parameter(self.d), self.parameter(self.d), (self.d,)
        return lambda h: F.layer_norm(h + 0.3 * h.sin(), shape, w(), b())

    def view(self) -> Layer:
        if self.draw.random() < 0.4:
            self.t, self.d = self.d, self.t
            return lambda h: h.mT
        others: list[Layer] = [
            lambda h: torch.softmax(h @ h.mT, -1) @ h,
            lambda h: h.flip(1),
            lambda h: h.cumsum(1),
            lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
        ]
        return self.draw.choice(others)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def brute_force(model: nn.Module, x: Tensor) -> Tensor:
    """(1/n) Σ JᵀJ, one backward pass an example and an output."""
    params, G = list(model.parameters()), torch.zeros(())
    for n in range(len(x)):
        for y in model(x[n : n + 1]).flatten():
            grads = torch.autograd.grad(y, params, retain_graph=True, materialize_grads=True)
            j = torch.cat([g.flatten() for g in grads])
            G = G + torch.outer(j, j) / len(x)
    return G


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_metrics_of_random_programs_are_those_of_brute_force(start: int) -> None:
    for seed in range(start, start + 50):
        torch.manual_seed(seed)
        draw = random.Random(seed)
        model = Program(draw, draw.choice([[2, 3], [2, 3, 4], [3], [2]]))
        if not len(model.numbers):
            continue
        x = torch.randn(draw.choice([1, 2, 3, 4]), *model.shape, dtype=torch.float64)
        G = brute_force(model, x)
        close(ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense(), G)
        close(ng.Diagonal().estimate(ng.pullback(model, x, ng.Euclidean())).diagonal(), G.diagonal())
        ng.Kronecker().estimate(ng.pullback(model, x, ng.Euclidean()))
