"""
Sobolev against Gauss–Newton on noisy data
==========================================

40 noisy values of a smooth function, and a network that could learn all the noise. A Gauss–Newton step removes all
of the residuals at once, noise included. A Sobolev step removes the smooth ones first. The distance to the true
function, per step; with early stopping both reach about the same.
"""

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style

fig, (curve, ax) = style.figure(2)
x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
y = (2 * x).sin() + 0.4 * torch.randn_like(x)
line = torch.linspace(-2, 2, 200, dtype=torch.float64)[:, None]
curve.plot(x, y, "o", ms=3, color=style.GREY)
metrics = {"Gauss–Newton": ng.Euclidean(), "Sobolev": ng.Sobolev(nu=1.5, lengthscale=0.5)}
errors, final = {}, {}
for name, metric in metrics.items():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    opt = ng.NaturalGradient(net, metric, structure=ng.Kernel(), step=ng.SelfTuned(), damping=1e-3)

    def closure(net: nn.Module = net, opt: torch.optim.Optimizer = opt) -> torch.Tensor:
        opt.zero_grad()
        loss = 0.5 * (net(x) - y).square().mean()
        loss.backward()
        return loss

    distance = []
    for _ in range(style.size(40, 3)):
        opt.step(closure)
        with torch.no_grad():
            distance.append(float((net(line) - (2 * line).sin()).square().mean().sqrt()))
    errors[name], final[name] = (range(1, len(distance) + 1), distance), (line[:, 0], net(line)[:, 0])
curve.set(title="after all steps", xlabel="x", ylabel="y")
style.curves(curve, final)
ax.set(title="distance to the true function", xlabel="step", ylabel="root mean square", yscale="log")
style.curves(ax, errors)
