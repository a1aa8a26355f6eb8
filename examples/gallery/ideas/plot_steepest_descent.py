"""
Steepest descent in two metrics
===============================

The parameters are mean and standard deviation of a Gaussian, and the loss is −log likelihood of data around (2,
0.6). Steepest descent in a metric goes to the lowest point of a small ball around a parameter. In the Euclidean
metric all balls are alike. In the Fisher metric a ball holds distributions that are about as hard to tell apart: it
is small where σ is small (after Johnson (2017), figure 1).
"""

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style


def loss(θ: Tensor) -> Tensor:
    """Cross entropy of N(2, 0.6²) and N(μ, σ²), up to a constant."""
    return θ[..., 1].log() + ((θ[..., 0] - 2) ** 2 + 0.36) / (2 * θ[..., 1] ** 2)


def fisher(θ: Tensor) -> ng.OutputMetric:
    """The Fisher metric of (μ, σ) by its divergence: KL of two Gaussians."""

    def kl(y: Tensor, to: Tensor) -> Tensor:
        a, b = (torch.distributions.Normal(z[..., 0], z[..., 1]) for z in (y, to))
        return torch.distributions.kl_divergence(a, b)

    return ng.Divergence(kl)


fig, axes = style.figure(2)
u, v = torch.meshgrid(torch.linspace(-0.5, 3, 100), torch.linspace(0.25, 2.2, 100), indexing="xy")
circle = torch.linspace(0, 6.2832, 100, dtype=torch.float64)
ball = torch.stack([circle.cos(), circle.sin()])
for ax, name in zip(axes, ["gradient descent", "natural gradient"], strict=True):
    ax.contour(u, v, loss(torch.stack([u, v], -1)), torch.linspace(-0.01, 4, 16), colors=style.GREY, linewidths=0.5)
    for at in [(0.2, 1.7), (0.2, 1.0), (1.3, 0.5), (2.6, 1.4)]:
        θ = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(θ), θ)
        params = {"θ": θ.detach()}
        pb = ng.pullback(lambda p, _: p["θ"][None], None, fisher(θ), params=params)
        G = ng.Dense().estimate(pb).dense() if name == "natural gradient" else torch.eye(2, dtype=torch.float64)
        root = torch.linalg.cholesky(G)
        edge = params["θ"][:, None] + 0.22 * torch.linalg.solve_triangular(root.T, ball, upper=True)
        step = torch.linalg.solve(G, gradient)
        ax.plot(*edge, color=style.COLOURS[name], lw=1)
        style.arrow(ax, params["θ"], -0.22 * step / (gradient @ step).sqrt(), name, " ")
    ax.plot(2, 0.6, "*", color=style.GREY, ms=12)
    ax.set(title=f"{'Euclidean' if name != 'natural gradient' else 'Fisher'} balls and steps", xlabel="μ", ylabel="σ")
    ax.set(xlim=(-0.5, 3), ylim=(0.25, 2.2), aspect="equal")
