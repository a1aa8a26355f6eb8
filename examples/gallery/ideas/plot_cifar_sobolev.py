"""
Sobolev K-FAC on CIFAR
======================

Figures 1 and 2 of Bai, Rosenberg and Xu (2022), from our :doc:`record </cifar>` of VGG16: K-FAC (the paper's baseline)
with its schedule, and Sobolev K-FAC with that of the paper. Mean and standard deviation over seeds. The paper shows "a
clear advantage regarding convergence speed". Here the advantage is small, and final accuracies are alike.
"""

import json
from pathlib import Path

import torch

import natgrad as ng
from examples.gallery import style

ROOT = Path(ng.__file__).resolve().parents[1]
record = json.loads((ROOT / "experiments" / "results" / "sobolev_cifar" / "summary.json").read_text())
fig, axes = style.figure(columns=2, rows=2, width=4.6, height=2.8)
for column, (images, name) in enumerate((("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"))):
    for row, (quantity, title) in enumerate((("train_loss", "training loss"), ("test_accuracy", "test accuracy, %"))):
        ax = axes[2 * row + column]
        for method, arm, schedule in (("K-FAC", "amari", "tenths"), ("Sobolev", "sobolev", "fifths")):
            found = record[images][schedule][arm]
            mean, deviation = (torch.tensor(found[quantity][of]) for of in ("mean", "deviation"))
            epochs = torch.arange(1, len(mean) + 1)
            colour = style.COLOURS[method]
            ax.fill_between(epochs, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
            ax.plot(epochs, mean, color=colour, label=method)
        seeds = len(found["seeds"])
        ax.set(
            title=f"{name}, {seeds} seeds: {title}", yscale="linear" if row else "log", xlabel="epoch" if row else ""
        )
        style.name_lines(ax)
