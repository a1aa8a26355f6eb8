"""Undamped K-FAC from the textbook, and networks on which it is invariant. None of the library's code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pulled import normal
from tests.zoo import mlp


class TextbookKFAC(torch.optim.Optimizer):
    """W̄ ← W̄ − lr·G⁻¹(∇W̄)A⁻¹ with the Euclidean metric on the outputs (Luk and Grosse (2018), eq. 2.10, 4.5, 5.3).

    A is the mean of āāᵀ over examples and uses of the weight, G the sum over uses and the mean over examples of
    Σ_k gᵏ(gᵏ)ᵀ with gᵏ = ∂y_k/∂z: the factor |T| of (4.5) is in that sum.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        self.uses: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self.factors: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for layer in self.layers:
            layer.register_forward_hook(lambda m, args, z: self.uses.setdefault(m, []).append((args[0].detach(), z)))
        model.register_forward_hook(self._after)

    def _after(self, model: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        recorded, self.uses = self.uses, {}
        if not y.requires_grad:
            return
        for layer, uses in recorded.items():
            a = torch.cat([_patches(layer, a) for a, _ in uses])
            A = a.T @ a / len(a)
            outputs = len(cast(nn.Linear, layer).weight)
            G = torch.zeros(outputs, outputs, dtype=y.dtype)
            for y_k in y.flatten(1).sum(0):  # examples do not mix, so the sum over them keeps them apart
                for g in torch.autograd.grad(y_k, [z for _, z in uses], retain_graph=True, materialize_grads=True):
                    rows = g.movedim(1, -1).flatten(0, -2)
                    G += rows.T @ rows / len(y)
            self.factors[layer] = A, G

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            value = closure()
        for layer in self.layers:
            weight, bias = cast(nn.Linear, layer).weight, cast(nn.Linear, layer).bias
            assert weight.grad is not None
            assert bias.grad is not None
            V = torch.cat([weight.grad.flatten(1), bias.grad[:, None]], dim=1)
            A, G = self.factors[layer]
            step = -self.defaults["lr"] * torch.linalg.solve(G, torch.linalg.solve(A, V.T).T)
            weight.add_(step[:, :-1].view_as(weight))
            bias.add_(step[:, -1])
        return value


def _patches(layer: nn.Module, a: Tensor) -> Tensor:
    """ā, one row for every example and position."""
    if isinstance(layer, nn.Conv2d):
        unfolded = F.unfold(a, layer.kernel_size, layer.dilation, 0, layer.stride)
        a = unfolded.mT.flatten(0, 1)
    return torch.cat([a, a.new_ones(len(a), 1)], dim=1)


class Recurrent(nn.Module):
    """A fused recurrent module with a linear layer on its last output."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size * (1 + rnn.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences [n t i] to outputs [n 2]."""
        return self.head(self.rnn(x)[0][:, -1])


class Cells(nn.Module):
    """A recurrent network written with linear layers: a_t = tanh(Wa_{t−1} + b + Vx_t), o_t = Ua_t + c."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.V, self.U = nn.Linear(3, 3), nn.Linear(2, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences [n t i] to outputs [n t 2]."""
        a, outputs = x.new_zeros(len(x), 3), []
        for x_t in x.unbind(1):
            a = torch.tanh(self.W(a) + self.V(x_t))
            outputs.append(self.U(a))
        return torch.stack(outputs, 1)


def convolutional() -> nn.Sequential:
    """Padding, pooling, a stride, and a linear layer after them."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 2, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


@dataclass(frozen=True)
class Task:
    """A network that is made anew at every call, the shape of one input, and a step size that suits it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    lr: float = 0.1

    def model(self) -> nn.Module:
        """The network in float64, its biases not zero."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            return self.build().double()

    def batch(self, n: int = 120) -> tuple[Tensor, Tensor]:
        """Inputs and targets that do not fit the network."""
        x = normal(n, *self.shape, seed=1)
        with torch.no_grad():
            y = self.model()(x)
        return x, y + normal(*y.shape, seed=2)


TASKS = {
    "mlp": Task(lambda: mlp(3, 4, 3, 2), (3,)),
    "convolutional": Task(convolutional, (2, 8, 8)),
    "recurrent": Task(lambda: Recurrent(nn.RNN(2, 3, batch_first=True)), (4, 2)),
}
