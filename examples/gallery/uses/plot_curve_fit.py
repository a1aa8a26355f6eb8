"""
A curve with error bars and an outlier
======================================

``ng.curve_fit`` has SciPy's interface, with exact derivatives and a confidence band. One spoilt measurement moves a
fit by least squares. With ``loss="soft_l1"`` it does not.
"""

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
t = torch.linspace(0, 4, 30, dtype=torch.float64)
y = 3 * torch.exp(-0.7 * t) + 0.5 + 0.1 * torch.randn(30, dtype=torch.float64)
y[12] += 3


def model(t: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * torch.exp(-b * t) + c


fine = torch.linspace(0, 4, 200, dtype=torch.float64)
plain = ng.curve_fit(model, t, y)
robust = ng.curve_fit(model, t, y, loss="soft_l1", f_scale=0.1)
keep = torch.arange(30) != 12
clean = ng.curve_fit(model, t[keep], y[keep])
low, high = clean.band(fine, level=0.95)
ax.fill_between(fine, low, high, color=style.COLOURS["exact"], alpha=0.25, lw=0)
ax.plot(t, y, "o", ms=4, color=style.GREY)
lines = {"first": (fine, model(fine, *plain.x)), "second": (fine, model(fine, *robust.x))}
ax.set(title="one outlier", xlabel="t", ylabel="y", ylim=(0, 5))
style.curves(ax, lines, {"first": "least squares", "second": 'loss="soft_l1"'})
ax.text(0.3, 0.15, "grey band: 95 %, without the outlier", color=style.GREY, fontsize=9)
