"""
Training in a fixed tangent space
=================================

A network, and its linearisation at the start, under gradient descent on 20 noisy values. The wider the network, the
less its tangent space moves, and the longer the two stay together (Jacot, Gabriel and Hongler (2018)).
``TangentModel`` is a module: every optimizer here and in torch trains it.
"""

import torch
from torch import nn

from examples.gallery import style
from natgrad.functionspace import TangentModel

fig, axes = style.figure(3, width=3.4)
x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
t = (2 * x).sin() + 0.1 * torch.randn_like(x)
steps, size = style.size(400, 5), 0.3
for ax, width in zip(axes, (4, 32, 512), strict=True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    lines = {}
    for name, model in {"first": TangentModel(net), "second": net}.items():
        opt = torch.optim.SGD(model.parameters(), lr=size * min(1, 16 / width))
        losses = []
        for _ in range(steps):
            opt.zero_grad()
            loss = 0.5 * (model(x) - t).square().mean()
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        lines[name] = (range(1, steps + 1), losses)
    ax.set(title=f"{width} units", xlabel="step", yscale="log")
    style.curves(ax, lines, {"first": "linearised", "second": "network"})
axes[0].set(ylabel="loss")
