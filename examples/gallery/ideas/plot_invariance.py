"""
The same network in other coordinates
=====================================

A network is written in other bases of its activations: the same function, other weights. Trained on the same
batches, SGD and Adam make two different functions of them. K-FAC without damping makes the same, up to rounding.
The picture has the difference of the outputs after every step.
"""

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
x = torch.randn(200, 3, dtype=torch.float64)
t = torch.stack([(x[:, 0] * x[:, 1]).sin(), x[:, 2].tanh()], 1)
STEPS = style.size(12, 3)


def kfac(net: nn.Module) -> torch.optim.Optimizer:
    return ng.NaturalGradient(net, ng.Euclidean(), structure=ng.Kronecker(), lr=0.1, damping=0.0)


makers = {
    "gradient descent": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "K-FAC": kfac,
}
lines = {}
for name, make in makers.items():
    certificate = ng.invariance.certify(make, model, (x, t), steps=STEPS)
    lines[name] = range(STEPS + 1), certificate.differences
ax.set(title="two networks that began as one function", xlabel="step", ylabel="difference", yscale="log")
style.curves(ax, lines)
