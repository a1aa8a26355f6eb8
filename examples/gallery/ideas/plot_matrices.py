"""
A map of the matrices
=====================

Which curvature matrices are the same, and when (after Grosse (2021), figure 5). Every arrow is checked here on a
small classifier: the number is the largest difference of the two matrices, as a share of the larger one.
"""

import torch
from torch import Tensor, nn

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=7, height=3.6)
model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(40, 3).double()
loss, p = nn.functional.cross_entropy, model(x).softmax(1).detach()
draws = style.size(1000, 20)
t = torch.multinomial(p, draws, replacement=True)  # targets that the model itself has drawn [n draws]


def metric(of: ng.OutputMetric, x: Tensor = x, target: Tensor | None = None) -> Tensor:
    return ng.Dense().estimate(ng.pullback(model, x, of, target=target)).dense()


def differ(a: Tensor, b: Tensor) -> str:
    share = float((a - b).abs().max() / torch.maximum(a.abs(), b.abs()).max())
    return "equal" if share < 1e-12 else f"differ by {share:.1%}"


J = ng.jacobian(model, x).dense()
pulled = torch.einsum("nkp,nkl,nlq->pq", J, p.diag_embed() - p[:, :, None] * p[:, None], J) / len(x)
fisher, newton = metric(ng.Fisher(ng.Categorical())), metric(ng.LossHessian(loss), target=t[:, 0])
once = metric(ng.Empirical(loss), target=t[:, 0])
often = metric(ng.Empirical(loss), x.repeat(draws, 1), t.T.reshape(-1))
hessian, mean = (ng.hessian(model, x, lambda y, q=q: loss(y, q)).dense() for q in (t[:, 0], p))  # mean: over targets

places = {"Jᵀ h J": (0, 1), "Fisher": (1, 1), "Gauss–Newton": (1, 0), "empirical Fisher": (2, 1), "Hessian": (2, 0)}
arrows = [
    ("Jᵀ h J", "Fisher", f"h: Fisher of the outputs\n{differ(pulled, fisher)}"),
    ("Fisher", "Gauss–Newton", f"outputs are natural\nparameters: {differ(fisher, newton)}"),
    ("Fisher", "empirical Fisher", f"one draw: {differ(fisher, once)}\nmean of {draws}: {differ(fisher, often)}"),
    ("Gauss–Newton", "Hessian", f"targets: {differ(newton, hessian)}\nmean over targets: {differ(newton, mean)}"),
]
for name, (u, v) in places.items():
    ax.text(u, v, name, ha="center", va="center", color=style.COLOURS.get(name, style.GREY))
for start, end, text in arrows:
    (a, b), (c, d) = places[start], places[end]
    gap = 0.3 * (c - a), 0.12 * (d - b)
    props = {"arrowstyle": "<->", "color": style.GREY}
    ax.annotate("", (c - gap[0], d - gap[1]), (a + gap[0], b + gap[1]), arrowprops=props)
    flat = b == d
    at = ((a + c) / 2, b + 0.07) if flat else (a + 0.03, (b + d) / 2)
    ax.text(*at, text, ha="center" if flat else "left", va="bottom" if flat else "center", fontsize=8)
ax.set(title="matrices, and where they are the same", xlim=(-0.4, 2.4), ylim=(-0.2, 1.5))
ax.set_axis_off()
