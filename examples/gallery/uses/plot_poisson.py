"""
Poisson's equation by Gauss–Newton
==================================

A network solves −Δu = 2π² sin πx sin πy on the unit square. Least squares reaches an error that Adam does not come
near in many more steps: a network is a bad parametrisation, and Gauss–Newton does not see the parametrisation.
"""

import copy
import math

import torch
from torch import Tensor, nn

import natgrad as ng
from examples.gallery import style


def exact(x: Tensor) -> Tensor:
    return (math.pi * x[:, :1]).sin() * (math.pi * x[:, 1:]).sin()


def equation(net: nn.Module, x: Tensor) -> Tensor:
    return ng.pde.laplacian(net, x) + 2 * math.pi**2 * exact(x)


fig, (picture, ax) = style.figure(2)
t = torch.linspace(0.03, 0.97, 16, dtype=torch.float64)
inside, zero = torch.cartesian_prod(t, t), torch.zeros_like(t)
edge = torch.cat([torch.stack(side, 1) for side in [(t, zero), (t, zero + 1), (zero, t), (zero + 1, t)]])
test = torch.rand(1000, 2, dtype=torch.float64)


def error(net: nn.Module) -> float:
    with torch.no_grad():
        return float((net(test) - exact(test)).norm() / exact(test).norm())


net, errors = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double(), []
rival, slow = copy.deepcopy(net), []
fit = ng.LeastSquares([ng.Residuals(equation, inside), ng.Residuals(lambda net, x: net(x), edge)], net)
for _ in range(style.size(60, 2)):
    fit.step()
    errors.append(error(net))
opt = torch.optim.Adam(rival.parameters(), lr=0.01)
for _ in range(style.size(600, 5)):
    opt.zero_grad()
    (equation(rival, inside).square().mean() + rival(edge).square().mean()).backward()
    opt.step()
    slow.append(error(rival))
g = torch.linspace(0, 1, 50, dtype=torch.float64)
u = net(torch.cartesian_prod(g, g)).detach().view(50, 50)
picture.contourf(g, g, u.T, 12, cmap="RdGy_r")
picture.set(title="the network u(x, y)", aspect="equal")
ax.set(title="relative error", xlabel="step", xscale="log", yscale="log")
lines = {"Gauss–Newton": (range(1, len(errors) + 1), errors), "AdamW": (range(1, len(slow) + 1), slow)}
style.curves(ax, lines, {"AdamW": "Adam"})
