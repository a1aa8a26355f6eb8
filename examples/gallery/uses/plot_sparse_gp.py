"""
A sparse Gaussian process in one natural step
=============================================

With Gaussian noise, one natural-gradient step of a sparse Gaussian process is its exact solution. With classes, a
dozen suffice. 12 inducing points, 300 labels; the line is the probability of the label 1, the band two standard
deviations of the latent function.
"""

import torch

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
x = torch.rand(300, 1, dtype=torch.float64)
truth = torch.sigmoid(6 * (9 * x[:, 0]).sin())
y = (torch.rand(300, dtype=torch.float64) < truth).double()
inducing = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.15), ng.vi.BernoulliLogit(), inducing=inducing).double()
ascent = ng.vi.ascend(gp, x, y)
line = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
mean, variance = (a.detach() for a in gp.predict(line))
low, high = (torch.sigmoid(mean + s * variance.sqrt()) for s in (-2.0, 2.0))
ax.fill_between(line[:, 0], low, high, color=style.COLOURS["natural gradient"], alpha=0.2, lw=0)
ax.plot(x, y, "|", color=style.GREY, alpha=0.6)
ax.set(title=f"{len(ascent.steps)} natural steps", xlabel="x", ylabel="probability")
lines = {
    "natural gradient": (line[:, 0], torch.sigmoid(mean)),
    "exact": (line[:, 0], torch.sigmoid(6 * (9 * line[:, 0]).sin())),
}
style.curves(ax, lines, {"natural gradient": "posterior", "exact": "truth"})
