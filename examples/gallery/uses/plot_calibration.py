"""
Calibrated probabilities
========================

A small network that has learned 200 digits by heart is too sure of itself. A Laplace approximation averages over
the networks that fit the data as well; 300 other digits choose its prior. Left: how often a prediction is right,
against the probability that it claims. Right: the test loss (lower is better).
"""

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style
from natgrad.data import load_digits

fig, (reliability, bars) = style.figure(2)
train, test = load_digits()
x, t = train.images[:200], train.labels[:200]
model, loss = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10)), nn.CrossEntropyLoss()
opt = ng.KFAC(model, loss, lr=0.3)
for _ in range(style.size(100, 3)):
    opt.zero_grad()
    loss(model(x), t).backward()
    opt.step()
held_out, labels_of = train.images[200:500], train.labels[200:500]
with torch.no_grad():
    laplaces = [ng.vi.Laplace(model, x, loss, ng.Kronecker(), prior_precision=10.0**k) for k in range(-2, 4)]
    laplace = min(laplaces, key=lambda q: float(nn.functional.nll_loss(q.probabilities(held_out).log(), labels_of)))
    claims = {"first": model(test.images).softmax(1), "second": laplace.probabilities(test.images)}
labels = {"first": "network", "second": "Laplace"}
reliability.plot([0, 1], [0, 1], color=style.GREY, lw=0.8)
for place, (name, p) in enumerate(claims.items()):
    sure, guess = p.max(1)
    right = (guess == test.labels).float()
    bins = (sure * 8).long().clamp(max=7)
    rows = [(float(sure[bins == b].mean()), float(right[bins == b].mean())) for b in range(8) if (bins == b).sum() > 4]
    reliability.plot(*zip(*rows, strict=True), "o-", ms=4, color=style.COLOURS[name])
    nll = float(-p.gather(1, test.labels[:, None]).log().mean())
    bars.barh(place, nll, color=style.COLOURS[name], height=0.5)
    bars.text(nll, place + 0.32, f"{labels[name]}: {nll:.3f}", color=style.COLOURS[name], ha="right")
reliability.set(title="claimed and true accuracy", xlabel="claimed probability", ylabel="share that is right")
bars.set(title="test loss", yticks=[], ylim=(-0.5, 1.6))
