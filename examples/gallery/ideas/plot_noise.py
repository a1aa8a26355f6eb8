"""
Noise and the power of the metric
=================================

A quadratic with eigenvalues from 0.001 to 1, gradients with noise whose covariance is the metric, as at the end of
training. Steps (G + λ)⁻ᵖω with p = 0 (gradient), ½ and 1 (natural gradient), each with the best of 12 learning
rates. With little noise the whole metric is fastest. With much noise, p = ½ is as good or better: the natural
gradient amplifies the noise.
"""

import torch

from examples.gallery import style

fig, axes = style.figure(2)
g = torch.logspace(-3, 0, 60, dtype=torch.float64)
STEPS = 200


def losses(power: float, rate: float, noise: float) -> torch.Tensor:
    """The expected loss ½ Σ g E θ² after every step, exactly: E θ² ← (1 − ηg^(1−p))² E θ² + η² noise g^(1−2p)."""
    second, out = torch.ones_like(g), []
    for _ in range(STEPS):
        out.append(0.5 * (g * second).sum())
        second = (1 - rate * g ** (1 - power)) ** 2 * second + rate**2 * noise * g ** (1 - 2 * power)
    return torch.stack(out)


names = {0.0: "gradient descent", 0.5: "AdamW", 1.0: "natural gradient"}
words = {"gradient descent": "p = 0", "AdamW": "p = ½", "natural gradient": "p = 1"}
for ax, noise in zip(axes, (1e-4, 1.0), strict=True):
    best = {}
    for power, name in names.items():
        runs = [losses(power, rate, noise) for rate in torch.logspace(-3, 0.2, 12)]
        best[name] = range(STEPS), min(runs, key=lambda run: float(run[-1]))
    ax.set(title=f"noise {noise:g}", xlabel="step", ylabel="expected loss", yscale="log")
    style.curves(ax, best, words)
