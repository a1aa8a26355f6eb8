"""
K-FAC on CIFAR with the other's settings
========================================

Figures 3 and 4 of Bai, Rosenberg and Xu (2022), from our :doc:`record </cifar>` of VGG16: K-FAC (the paper's baseline)
gets the learning-rate schedule of Sobolev K-FAC, its scaling of the inputs, or both. Mean and standard deviation over
seeds. The paper says that none of them helps. Here the schedule lowers the training loss at the end, and no final test
accuracy is higher. On CIFAR-100 the scaled inputs were not run.
"""

import json
from pathlib import Path

import torch

import natgrad as ng
from examples.gallery import style

ROOT = Path(ng.__file__).resolve().parents[1]
record = json.loads((ROOT / "experiments" / "results" / "sobolev_cifar" / "summary.json").read_text())
runs = {
    "K-FAC": ("tenths", "amari", "-"),
    "its schedule": ("fifths", "amari", "--"),
    "its inputs": ("tenths", "amari_scaled", ":"),
    "both": ("fifths", "amari_scaled", "-."),
}
fig, axes = style.figure(columns=2, rows=2, width=4.6, height=2.8)
for column, (images, name) in enumerate((("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"))):
    for row, (quantity, title) in enumerate((("train_loss", "training loss"), ("test_accuracy", "test accuracy, %"))):
        ax = axes[2 * row + column]
        for label, (schedule, arm, dashes) in runs.items():
            if (found := record[images][schedule].get(arm)) is None:
                continue
            mean, deviation = (torch.tensor(found[quantity][of]) for of in ("mean", "deviation"))
            epochs, colour = torch.arange(1, len(mean) + 1), style.COLOURS["K-FAC" if arm == "amari" else "exact"]
            ax.fill_between(epochs, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
            ax.plot(epochs, mean, color=colour, linestyle=dashes, lw=1.2, label=label)
        ax.set(title=f"{name}: {title}", yscale="linear" if row else "log", xlabel="epoch" if row else "")
        style.name_lines(ax)
