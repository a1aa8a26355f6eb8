"""
A Bregman divergence is a gap
=============================

The Bregman divergence of a convex function is the gap between it and its tangent (after Grosse (2021), figure 4).
For the log-partition function of a Bernoulli distribution the gap is a KL divergence, with exchanged arguments:
D(η, η′) = KL(p(η′) ‖ p(η)).
"""

import torch

import natgrad as ng
from examples.gallery import style

bernoulli = ng.families.Bernoulli()
at, to = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
eta = torch.linspace(-4, 4, 200, dtype=torch.float64)
phi = torch.nn.functional.softplus(eta)
tangent = torch.nn.functional.softplus(at) + at.sigmoid() * (eta - at)
gap = float(torch.nn.functional.softplus(to) - torch.nn.functional.softplus(at) - at.sigmoid() * (to - at))
divergence = float(bernoulli.kl(at, to))
assert abs(gap - divergence) < 1e-12

fig, (ax,) = style.figure(width=6)
style.curves(ax, {"exact": (eta, phi), "second": (eta, tangent)}, {"exact": "log Z", "second": "tangent at η′"})
foot = float(torch.nn.functional.softplus(at) + at.sigmoid() * (to - at))
ax.plot([2, 2], [foot, foot + gap], color=style.COLOURS["natural gradient"], lw=4, solid_capstyle="butt")
ax.annotate(f"{gap:.3f} = KL(p(η′) ‖ p(η))", (2, foot + gap / 2), (-0.9, 2.6), color=style.COLOURS["natural gradient"])
ax.plot(at, torch.nn.functional.softplus(at), "o", color=style.GREY)
ax.set(title="the gap between a convex function and its tangent", xlabel="log-odds η", ylabel="log Z(η)")
