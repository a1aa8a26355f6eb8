"""
Mirror descent on the simplex
=============================

A distribution over three outcomes, and a loss of its probabilities: the distance to a target near a corner. In
natural parameters (log-odds) the gradient is a step in probabilities: mirror descent, which is natural gradient
descent without a metric to invert. It does not slow down near the edge, as gradient descent on log-odds does. No
step leaves the simplex.
"""

import torch
from torch import Tensor

from examples.gallery import style

fig, (ax,) = style.figure(width=5.2, height=4.2)
corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.866]], dtype=torch.float64)
target = torch.tensor([0.02, 0.08, 0.9], dtype=torch.float64)
start = torch.tensor([0.9, 0.08, 0.02], dtype=torch.float64)


def kl(eta: Tensor) -> Tensor:
    """KL of the target and the distribution with the log-odds η, up to a constant."""
    return -(target * eta.log_softmax(-1)).sum()


def descend(mirror: bool, rate: float, steps: int) -> list[Tensor]:
    eta, path = start.log(), [start]
    for _ in range(steps):
        p = eta.softmax(-1)
        in_eta = torch.func.grad(kl)(eta)
        eta = (p - rate * in_eta).log() if mirror else eta - rate * in_eta  # the gradient in η is a step in p
        path.append(eta.softmax(-1))
    return path


triangle = corners[[0, 1, 2, 0]]
ax.plot(triangle[:, 0], triangle[:, 1], color=style.GREY, lw=1)
style.path(ax, [p @ corners for p in descend(False, 0.15, 25)], "gradient descent", (0.02, 0.55))
style.path(ax, [p @ corners for p in descend(True, 0.15, 25)], "natural gradient", (0.52, 0.12))
ax.plot(*(target @ corners), "*", color=style.GREY, ms=12)
ax.set(title="25 steps at the same rate", aspect="equal", xlim=(-0.1, 1.1))
ax.set_axis_off()
