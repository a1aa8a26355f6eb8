"""
Two natural gradients at one point
==================================

Both maps cover the whole plane, but at the origin each has a derivative of rank one: (ξ₁, ξ₂³), and the same turned
by 90 degrees. Natural gradients are projections of the plane's gradient on the spans of the derivatives. The spans
differ, and so do they: this is possible because no smooth change of parameters leads from one map to the other
(after van Oostrum, Müller and Ay (2023), figures 3 and 4).
"""

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style


def straight(p: dict[str, Tensor], _: None) -> Tensor:
    return torch.stack([p["ξ"][0], p["ξ"][1] ** 3])[None]


def turned(p: dict[str, Tensor], _: None) -> Tensor:
    return torch.stack([-(p["ξ"][1] ** 3), p["ξ"][0]])[None]


fig, axes = style.figure(3, width=3.6)
line = torch.linspace(-1, 1, 60, dtype=torch.float64)
origin, gradient = torch.zeros(2, dtype=torch.float64), torch.tensor([0.8, 0.5], dtype=torch.float64)
style.arrow(axes[2], origin, gradient, "exact", "of the plane")
for ax, model, name in [(axes[0], straight, "first"), (axes[1], turned, "second")]:
    for k in torch.linspace(-1, 1, 9, dtype=torch.float64):
        for xi in (torch.stack([line, k.expand(60)]), torch.stack([k.expand(60), line])):
            ax.plot(*model({"ξ": xi}, None)[0], color=style.COLOURS[name], lw=0.6, alpha=0.6)
    params = {"ξ": origin}
    J = ng.jacobian(model, None, params=params)
    G = ng.Dense().estimate(ng.pullback(model, None, ng.Euclidean(), params=params))
    ω = ng.Covector(J.pull(gradient[None]))
    v = ng.sharp(G, ω, solver=ng.Pinv())  # G has rank one
    style.arrow(axes[2], origin, J.push(v)[0], name, f"of the {name} map")
    ax.set(title=f"the {name} map", aspect="equal", xticks=[], yticks=[])
    span = J.push(ng.Vector({"ξ": torch.tensor([0.6, 0.0], dtype=torch.float64)}))[0]
    style.arrow(ax, origin, span, "exact", "span")
axes[2].set(title="gradients at the origin", aspect="equal", xlim=(-0.5, 1.3), ylim=(-0.4, 0.9))
