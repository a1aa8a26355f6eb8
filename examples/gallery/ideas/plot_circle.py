"""
A Sobolev metric on a circle
============================

Gradient of one residual, at an angle of 3 radians, as a function: the kernel there. The kernel of the line does not
know that 3 and −3 are neighbours, that of the circle does (Bai, Rosenberg and Xu (2022)). On the right the norm of one
change of a network, √(N·vᵀGv), with K on more and more angles. Few underestimate it. On the line it converges. On the
circle the change jumps at ±π, since the network is not periodic, and its norm is infinite: every angle more shows it.
"""

import math

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style
from natgrad.functionspace import SobolevKernel, TorusKernel

fig, (left, right) = style.figure(2)
line = torch.linspace(-math.pi, math.pi, 200, dtype=torch.float64)
at = torch.tensor([3.0], dtype=torch.float64)
kernels = {"first": SobolevKernel(0.5), "second": TorusKernel(0.5)}
names = {"first": "line", "second": "circle"}
style.curves(left, {name: (line, kernel(at, line)[0]) for name, kernel in kernels.items()}, names)
left.set(title="the gradient at 3", xlabel="angle")
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
v = ng.Vector({name: torch.randn_like(p) for name, p in net.named_parameters()})
sizes = [2**k for k in range(2, style.size(9, 4))]
norms: dict[str, list[float]] = {"first": [], "second": []}
for n in sizes:
    x = torch.linspace(-math.pi, math.pi, n + 1, dtype=torch.float64)[1:, None]
    for name, kernel in kernels.items():
        metric = ng.Sobolev(kernel=kernel, jitter=0.0)
        G = ng.Dense().estimate(ng.pullback(net, x, metric))
        norms[name].append(float((n * (G.flat(v) @ v)).sqrt()))
right.set(title="the norm of one change", xlabel="angles", xscale="log")
style.curves(right, {name: (sizes, values) for name, values in norms.items()}, names)
