"""
The distance of two functions
=============================

Two networks with other weights may be the same function, and two that are near in weights may differ. So we compare
outputs: the distance of two functions is the mean of ½(f − g)² over the examples, and the metric G of the
parameters is its second order (after Grosse (2021), figure 3). The title has the distance, and what G says of it.
"""

import torch

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
first = torch.nn.Linear(1, 30)
model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(30, 1)).double()
with torch.no_grad():
    first.weight.mul_(3)
x = torch.tensor([[-1.5], [-0.6], [0.5], [1.4]], dtype=torch.float64)
line = torch.linspace(-2, 2, 200, dtype=torch.float64)[:, None]

G = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean()))
before, curve = model(x).detach(), model(line).detach()
move = ng.Vector({name: 0.06 * torch.randn_like(p) for name, p in model.named_parameters()})
with torch.no_grad():
    for name, p in model.named_parameters():
        p.add_(move[name])
after, moved = model(x).detach(), model(line).detach()

distance = float(0.5 * (after - before).square().mean())
second_order = float(0.5 * (G.flat(move) @ move))
for a, b, c in zip(x[:, 0], before[:, 0], after[:, 0], strict=True):
    ax.plot([a, a], [b, c], color=style.GREY, lw=4, alpha=0.5, solid_capstyle="butt")
ax.set(title=f"distance {distance:.4f}; second order ½ vᵀGv = {second_order:.4f}", xlabel="input", ylabel="output")
style.curves(
    ax,
    {"first": (line[:, 0], curve[:, 0]), "second": (line[:, 0], moved[:, 0])},
    {"first": "before", "second": "after"},
)
