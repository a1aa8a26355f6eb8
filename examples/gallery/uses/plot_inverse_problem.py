"""
An inverse problem with error bars
==================================

A rod is heated; its temperature is measured at 20 points with noise. Which conductivity does it have? The
differential equation −c u″ = 1 with u(0) = u(1) = 0 is solved by a network whose conductivity c is one more
parameter. Many noisy copies of the data say how sure the answer is, and one fit of the exact solution says the
same.
"""

import torch
from torch import Tensor, nn

import natgrad as ng
from examples.gallery import style


class Rod(nn.Module):
    """u(x) with zero ends, and log c."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
        self.log_c = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def equation(rod: Rod, x: Tensor) -> Tensor:
    return rod.log_c.exp() * ng.pde.laplacian(rod, x) + 1


fig, (curve, bars) = style.figure(2)
points = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
exact, noise = points * (1 - points) / (2 * 0.4), 0.01
inside, ends = torch.linspace(0.02, 0.98, 30, dtype=torch.float64)[:, None], torch.tensor([[0.0], [1.0]]).double()
found = []
for seed in range(style.size(12, 2)):
    torch.manual_seed(seed)
    rod, data = Rod().double(), exact + noise * torch.randn_like(exact)
    classes = {
        "equation": ng.Residuals(equation, inside),
        "ends": ng.Residuals(lambda rod, x: rod(x), ends, weight=1e2),
        "data": ng.Residuals(lambda rod, x, data=data: rod(x) - data, points),
    }
    ng.LeastSquares(classes, rod).solve(max_steps=style.size(40, 2))
    found.append(float(rod.log_c.exp()))
fit = ng.curve_fit(lambda x, c: x * (1 - x) / (2 * c), points[:, 0], data[:, 0], p0=[1.0])
line = torch.linspace(0, 1, 100, dtype=torch.float64)[:, None]
curve.plot(points, data, "o", ms=4, color=style.GREY)
curve.set(title="temperature, last data set", xlabel="x", ylabel="u")
style.curves(curve, {"second": (line[:, 0], rod(line)[:, 0])}, {"second": "network"})
bars.plot(found, range(len(found)), "o", ms=4, color=style.COLOURS["second"])
bars.axvline(0.4, color=style.GREY, lw=0.8)
bars.errorbar(fit.x, [-2], xerr=fit.standard_errors, color=style.COLOURS["first"], fmt="o", capsize=3)
bars.set(title="conductivity of all fits", xlabel="c", yticks=[], xticks=[0.39, 0.4, 0.41])
bars.text(0.39, -1.6, "exact solution ± 1 s.d.", color=style.COLOURS["first"], fontsize=9)
