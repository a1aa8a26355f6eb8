"""
One model, two parametrisations
===============================

The model is an ellipse in the plane, the loss a function of the plane. Two parametrisations of the ellipse differ
in speed. Their gradients move the point by different velocities. Their natural gradients move it by the same one:
the projection of the plane's gradient on the tangent (after van Oostrum, Müller and Ay (2023), figures 1 and 2).
"""

import math

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style

LABELS: dict[str, tuple[str, tuple[float, float]]] = {
    "first": ("by ξ", (-12, 6)),
    "second": ("by θ, ξ = 1.4 θ", (4, -14)),
}


def angle(p: dict[str, Tensor], _: None) -> Tensor:
    return torch.stack([2 * p["ξ"].cos(), p["ξ"].sin()])[None]


def scaled(p: dict[str, Tensor], _: None) -> Tensor:
    return angle({"ξ": 1.4 * p["ξ"]}, None)


fig, axes = style.figure(2)
turn = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
ellipse = angle({"ξ": turn}, None)[0]
point, target = torch.tensor(2.2, dtype=torch.float64), torch.tensor([0.6, 1.2], dtype=torch.float64)
for ax, title in zip(axes, ["gradient", "natural gradient"], strict=True):
    ax.plot(*ellipse, color=style.GREY, lw=1)
    ax.plot(*target, "*", color=style.GREY, ms=12)
    ax.set(title=f"velocity of the point by the {title}", aspect="equal", xlim=(-3, 2.6), ylim=(-1.4, 2.2))

velocities = []
for name, model, value in [("first", angle, point), ("second", scaled, point / 1.4)]:
    params = {"ξ": value.clone().requires_grad_()}
    y = model(params, None)[0]
    (gradient,) = torch.autograd.grad(0.5 * (y - target).square().sum(), params["ξ"])
    params = {"ξ": value}
    G = ng.Dense().estimate(ng.pullback(model, None, ng.Euclidean(), params=params))
    v = ng.sharp(G, ng.Covector({"ξ": gradient}))
    J = ng.jacobian(model, None, params=params)
    for ax, step in zip(axes, [ng.Vector({"ξ": gradient}), v], strict=True):
        velocity = -J.push(step)[0]
        style.arrow(ax, y.detach(), 0.28 * velocity, name, *LABELS[name])
        velocities.append(velocity)
assert torch.allclose(velocities[1], velocities[3])
assert not torch.allclose(velocities[0], velocities[2])
