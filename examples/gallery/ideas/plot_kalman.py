"""
A Kalman filter is a natural gradient
=====================================

Track a position and a velocity by noisy positions. Every measurement is one natural-gradient step on its log density,
in the metric of all measurements so far: P⁻¹ ← P⁻¹ + HᵀH/r, μ ← μ − P ∇ℓ (Ollivier (2018)). The bands are two standard
deviations. In the middle nothing is measured. A plain Kalman recursion has the same means, to rounding.
"""

from functools import partial

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=7)
steps, r, dt = style.size(120, 12), 0.3, 0.1
F = torch.tensor([[1.0, dt], [0.0, 1.0]], dtype=torch.float64)
Q = 0.2 * torch.tensor([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]], dtype=torch.float64)
H = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
time = dt * torch.arange(steps, dtype=torch.float64)
truth = (0.8 * time).sin() + 0.1 * time
z = truth + r**0.5 * torch.randn_like(truth)
seen = (time < 0.4 * time[-1]) | (time > 0.6 * time[-1])


def loss(y: Tensor, z: Tensor) -> Tensor:
    return (y - z).square().sum() / (2 * r)


metric = ng.Fisher(ng.Gaussian(scale=r**0.5))
belief = ng.mirror.Filter(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
μ, P = belief.mean, belief.covariance
means, widths, error = [], [], 0.0
for k in range(steps):
    belief = belief.predict(lambda s: F @ s, Q)
    μ, P = F @ μ, F @ P @ F.T + Q
    if seen[k]:
        belief = belief.update(lambda s: H @ s, partial(loss, z=z[k]), metric)
        gain = P @ H.T / (H @ P @ H.T + r)
        μ, P = μ + (gain * (z[k] - H @ μ)).sum(1), P - gain @ H @ P
    error = max(error, float((belief.mean - μ).abs().max()))
    means.append(float(belief.mean[0]))
    widths.append(2 * float(belief.covariance[0, 0].sqrt()))
assert error < 1e-12
m, w = torch.tensor(means), torch.tensor(widths)
ax.plot(time[seen], z[seen], "o", ms=3, color=style.GREY)
ax.fill_between(time, m - w, m + w, color=style.COLOURS["natural gradient"], alpha=0.2, lw=0)
ax.set(title=f"Kalman and natural gradient differ by {error:.0e}", xlabel="time", ylabel="position")
style.curves(ax, {"exact": (time, truth), "natural gradient": (time, m)}, {"exact": "truth"})
