"""
Error bars of a network
=======================

A network is fitted to 60 points; a Laplace approximation at its minimum gives the variance of its outputs. The band
is two standard deviations of the function, with noise and prior chosen by the marginal likelihood. It is narrow
where data are.
"""

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
x = torch.cat([torch.rand(30, 1) * 1.2 - 2, torch.rand(30, 1) * 1.2 + 0.6]).double()
y = (2 * x).sin() + 0.15 * torch.randn_like(x)
net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
ng.LeastSquares(ng.Residuals(lambda net, x: net(x) - y, x), net).solve(max_steps=style.size(15, 3))
posterior = ng.vi.Laplace(net, x, ng.Fisher(ng.Gaussian(scale=1.0))).tuned((y - net(x)).detach())
line = torch.linspace(-2.4, 2.2, 200, dtype=torch.float64)[:, None]
predicted = posterior.predictive(line)
mean, sd = predicted.mean[:, 0].detach(), predicted.variance[:, 0].detach().sqrt()
ax.fill_between(line[:, 0], mean - 2 * sd, mean + 2 * sd, color=style.COLOURS["second"], alpha=0.2, lw=0)
ax.plot(x, y, "o", ms=3, color=style.GREY)
lines = {"second": (line[:, 0], mean), "exact": (line[:, 0], (2 * line[:, 0]).sin())}
ax.set(title="a band of two standard deviations", xlabel="x", ylabel="y", ylim=(-3, 3))
style.curves(ax, lines, {"second": "network", "exact": "truth"})
