"""
Ten thousand fits in one call
=============================

``batch=True`` fits one curve to many data sets at once. If the standard errors are right, the estimates divided by
them are normal: the histogram is that of 10,000 fits of a decay, the line the normal density.
"""

import math
import time

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
fits, truth = style.size(10_000, 200), torch.tensor([3.0, 0.7, 0.5], dtype=torch.float64)
t = torch.linspace(0, 6, 40, dtype=torch.float64)


def decay(x: Tensor, y: Tensor) -> Tensor:
    return x[0] * torch.exp(-x[1] * t) + x[2] - y


clean = truth[0] * torch.exp(-truth[1] * t) + truth[2]
data = clean + 0.05 * torch.randn(fits, 40, dtype=torch.float64)
began = time.perf_counter()
result = ng.least_squares(decay, torch.ones(fits, 3, dtype=torch.float64), (data,), batch=True)
seconds = time.perf_counter() - began
z = ((result.x - truth) / result.standard_errors)[:, 1]
ax.hist(z, bins=60, range=(-4, 4), density=True, color=style.COLOURS["Gauss–Newton"], alpha=0.35)
u = torch.linspace(-4, 4, 200)
ax.plot(u, torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi), color=style.COLOURS["exact"])
ax.text(1.9, 0.3, "normal density", color=style.COLOURS["exact"])
ax.set(
    title=f"{fits:,} fits in {seconds:.1f} s",
    xlabel="(estimate − truth) / standard error of the rate",
    ylabel="density",
)
