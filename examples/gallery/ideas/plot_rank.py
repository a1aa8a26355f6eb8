"""
The rank of a redundant network
===============================

A network with more hidden units than the task needs: which parameters do the outputs not see? ``ng.diagnose`` has
the spectrum of the metric and its rank. With two copies of the same unit, two directions are lost (the second
copy's weights stay, but a move of one can be undone by the other).
"""

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
x = torch.randn(200, 3, dtype=torch.float64)
for name, copies in [("first", False), ("second", True)]:
    torch.manual_seed(0)
    first = nn.Linear(3, 6)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        if copies:  # the last unit is the first one again
            first.weight[5], first.bias[5] = first.weight[0], first.bias[0]
    report = ng.diagnose(ng.pullback(model, x, ng.Euclidean()))
    spectrum = report.spectrum.clamp(min=1e-18)
    ax.plot(range(1, len(spectrum) + 1), spectrum, "o-", ms=3, lw=0.8, color=style.COLOURS[name])
    text = f"{'two equal units' if copies else 'all units differ'}: rank {report.rank} of {report.size}"
    ax.text(0.02, 0.18 if copies else 0.28, text, color=style.COLOURS[name], transform=ax.transAxes)
ax.set(title="eigenvalues of the metric", xlabel="number", yscale="log", ylim=(1e-19, None))
