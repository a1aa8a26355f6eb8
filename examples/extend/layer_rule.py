"""A rule for a layer of your own: a product of two inputs, so that K-FAC has its factors.

A rule says how one call of the layer is W acting on inputs a. Here y = x Q zᵀ + b, one matrix Q for each output, is a
linear function of all products xᵢzⱼ.

    python examples/extend/layer_rule.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import Call, Rule


class Interaction(nn.Module):
    """y_o = Σ_ij Q_oij x_i z_j + b_o for two inputs x [n i] and z [n j]."""

    def __init__(self, i: int, j: int, o: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i, j) / (i * j) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.einsum("ni,oij,nj->no", x, self.weight, z) + self.bias


class InteractionRule(Rule):
    """Its inputs are the products a_n = vec(x_n z_nᵀ), and a 1 for the bias."""

    def covers(self, module: nn.Module) -> bool:
        return type(module) is Interaction

    def inputs(self, module: nn.Module, keys: tuple[str, ...], call: Call) -> Tensor:
        x, z = call.args
        columns = {"weight": (x[:, :, None] * z[:, None]).flatten(1), "bias": torch.ones_like(x[:, :1])}
        a = torch.cat([columns[key] for key in keys], dim=1)  # ``keys``: the parameters that are trained
        return a[:, None, None]  # [n r c i]: one position r, one group c

    def cotangents(self, module: nn.Module, keys: tuple[str, ...], g: Tensor) -> Tensor:
        return g[:, :, None, None]  # [k n o] → [k n r c o]


class Recommender(nn.Module):
    """How a person likes a thing, from what is known of both."""

    def __init__(self) -> None:
        super().__init__()
        self.person, self.thing, self.match = nn.Linear(6, 4), nn.Linear(5, 3), Interaction(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.match(self.person(x[:, :6]).tanh(), self.thing(x[:, 6:]).tanh())
        return y


def train(steps: int = 30) -> list[float]:
    """The loss of K-FAC, which needs no other code for the new layer."""
    torch.manual_seed(0)
    model, x = Recommender(), torch.randn(256, 11)
    t = (x[:, :2] * x[:, 6:8]).tanh()
    opt = ng.KFAC(model, nn.MSELoss(), lr=0.3, rules=[InteractionRule()], strict=True)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), t)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
