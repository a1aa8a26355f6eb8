"""
A model that crosses itself
===========================

The curve (sin 2ξ, sin ξ) passes through the origin at ξ = 0 and at ξ = π, in two directions. There the model is
singular, and its natural gradient depends on which of the two parameters one asks (after van Oostrum, Müller and Ay
(2023), figure 5). In the paper's example the interval ends before π, and the curve would not meet itself: it has to
reach 9π/8.
"""

import math

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style


def curve(p: dict[str, Tensor], _: None) -> Tensor:
    return torch.stack([(2 * p["ξ"]).sin(), p["ξ"].sin()])[None]


fig, (ax,) = style.figure(width=5.5, height=3.6)
xi = torch.linspace(-math.pi / 8, 9 * math.pi / 8, 300, dtype=torch.float64)
ax.plot(*curve({"ξ": xi}, None)[0], color=style.GREY, lw=1)
origin, gradient = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)  # the loss is x
steps = []
for name, at, text in [("first", 0.0, "natural gradient at ξ = 0"), ("second", math.pi, "natural gradient at ξ = π")]:
    params = {"ξ": torch.tensor(at, dtype=torch.float64)}
    J = ng.jacobian(curve, None, params=params)
    G = ng.Dense().estimate(ng.pullback(curve, None, ng.Euclidean(), params=params))
    v = ng.sharp(G, ng.Covector(J.pull(gradient[None])))
    steps.append(J.push(v)[0])
    style.arrow(ax, origin, steps[-1], name, text)
style.arrow(ax, origin, gradient, "exact", "gradient of the plane, loss x")
assert torch.allclose(steps[0], torch.tensor([0.8, 0.4], dtype=torch.float64))  # by hand: (2, 1)·2/5
assert torch.allclose(steps[1], torch.tensor([0.8, -0.4], dtype=torch.float64))
ax.set(title="one point, two tangents, two natural gradients", aspect="equal", xlim=(-1.2, 2.4), ylim=(-0.7, 1.2))
