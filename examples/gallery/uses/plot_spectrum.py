"""
The spectrum of a Hessian
=========================

The eigenvalues of the Hessian of a trained network, from products with it alone: a few large ones, as many as
classes, a bulk near zero, and negative ones. The Fisher metric has no negative ones and shares the large ones.
"""

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style
from natgrad.data import load_digits

fig, (ax,) = style.figure(width=6.5)
digits = load_digits().train
x, t = digits.images[:400].double(), digits.labels[:400]
model, loss = nn.Sequential(nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10)).double(), nn.CrossEntropyLoss()
opt = ng.KFAC(model, loss, lr=0.3)
for _ in range(style.size(6, 2)):
    opt.zero_grad()
    loss(model(x), t).backward()
    opt.step()
hessian = ng.hessian(model, x, lambda y: loss(y, t))
fisher = ng.Implicit().estimate(ng.pullback(model, x, ng.Fisher(ng.Categorical())))
for row, (name, operator) in enumerate([("first", hessian), ("second", fisher)]):
    density = ng.spectral_density(operator, generator=torch.Generator().manual_seed(0))
    weights = density.counts.flatten() / len(density.values)
    ax.hist(
        density.values.flatten(), bins=80, range=(-0.4, 3), weights=weights, histtype="step", color=style.COLOURS[name]
    )
    word = ["Hessian", "Fisher"][row]
    ax.text(
        0.7,
        0.9 - 0.1 * row,
        f"{word}, largest {density.largest:.3f}",
        color=style.COLOURS[name],
        transform=ax.transAxes,
    )
ax.set(title="eigenvalues, and how many there are", xlabel="eigenvalue", ylabel="count", yscale="log", ylim=(0.1, None))
