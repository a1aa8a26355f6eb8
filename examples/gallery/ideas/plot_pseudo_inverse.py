"""
More parameters than dimensions
===============================

The model is y = ξ₁ + ξ₂: only the sum matters, G is singular, and many steps have the same effect on y. The pseudo-
inverse takes the shortest, and "shortest" depends on the coordinates: with ξ₁ = 2θ₁ it is another step. The effect
on the model is the same (after van Oostrum, Müller and Ay (2023), figure 6; their numbers are (3, 3) and (4.8,
1.2)).
"""

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style

SCALE = torch.tensor([2.0, 1.0], dtype=torch.float64)  # ξ = SCALE·θ


def total(p: dict[str, Tensor], _: None) -> Tensor:
    return p["ξ"].sum()[None, None]


def scaled(p: dict[str, Tensor], _: None) -> Tensor:
    return total({"ξ": SCALE * p["ξ"]}, None)


def natural(model: object, at: Tensor) -> Tensor:
    """G⁺∇L for L = y²."""
    assert callable(model)
    params = {"ξ": at}
    G = ng.Dense().estimate(ng.pullback(model, None, ng.Euclidean(), params=params))
    y = model(params, None)
    ω = ng.Covector(ng.jacobian(model, None, params=params).pull(2 * y))
    return ng.sharp(G, ω, solver=ng.Pinv())["ξ"]


at = torch.tensor([2.0, 1.0], dtype=torch.float64)
by_xi, by_theta = natural(total, at), SCALE * natural(scaled, at / SCALE)
assert torch.allclose(by_xi, torch.tensor([3.0, 3.0], dtype=torch.float64))
assert torch.allclose(by_theta, torch.tensor([4.8, 1.2], dtype=torch.float64))

fig, (ax,) = style.figure(width=5)
for level in range(-6, 10, 3):
    ax.plot([-4, 4], [level + 4, level - 4], color=style.GREY, lw=0.6, alpha=0.7)
style.arrow(ax, at, -by_xi, "first", "shortest in ξ", (14, -2))
style.arrow(ax, at, -by_theta, "second", "shortest in θ", (-10, 14))
ax.plot([-4, 2], [1, -5], color=style.COLOURS["exact"], lw=1.6)
ax.text(1.1, -3.9, "y = −3: both end here", color=style.COLOURS["exact"])
ax.plot(*at, "o", color=style.GREY)
ax.set(
    title="two steps that the model cannot tell apart",
    xlabel="ξ₁",
    ylabel="ξ₂",
    xlim=(-4, 3.5),
    ylim=(-5, 3),
    aspect="equal",
)
