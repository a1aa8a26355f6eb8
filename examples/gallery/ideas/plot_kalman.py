"""
A Kalman filter is a natural gradient
=====================================

Track a static state by noisy linear measurements. The update of a Kalman filter and the natural-gradient step on
the log density of one measurement, with the metric of all measurements so far, are the same numbers (Ollivier
(2018)). The metric is the information matrix: P⁻¹ ← P⁻¹ + HᵀH/r, μ ← μ − P ∇ℓ.
"""

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
truth, r = torch.tensor([1.0, -0.5], dtype=torch.float64), 0.5
mean, P = torch.zeros(2, dtype=torch.float64), 4 * torch.eye(2, dtype=torch.float64)
natural, information = mean.clone(), torch.linalg.inv(P)
path, errors = [mean], [0.0]
for _ in range(style.size(60, 5)):
    H = torch.randn(1, 2, dtype=torch.float64)
    y = H @ truth + r**0.5 * torch.randn(1, dtype=torch.float64)
    gain = P @ H.T / (H @ P @ H.T + r)  # Kalman
    mean, P = mean + (gain @ (y - H @ mean)), P - gain @ H @ P

    def output(p: dict[str, Tensor], _: None, H: Tensor = H) -> Tensor:
        return (H @ p["θ"])[None]

    pb = ng.pullback(output, None, ng.Fisher(ng.Gaussian(scale=r**0.5)), params={"θ": natural})
    information = information + ng.Dense().estimate(pb).dense()
    gradient = -H.T @ (y - H @ natural) / r
    natural = natural - torch.linalg.solve(information, gradient)
    errors.append(float((natural - mean).abs().max()))
    path.append(natural)
assert max(errors) < 1e-12
xy, k = torch.stack(path), torch.arange(len(path))
ax.axhline(float(truth[0]), color=style.GREY, lw=0.8)
ax.axhline(float(truth[1]), color=style.GREY, lw=0.8)
ax.set(title=f"Kalman and natural gradient differ by {max(errors):.0e}", xlabel="measurement", ylabel="estimate")
style.curves(ax, {"first": (k, xy[:, 0]), "second": (k, xy[:, 1])}, {"first": "x₁", "second": "x₂"})
