"""
Maximum likelihood in one pass
==============================

Mirror descent with the rate 1/(k + 1) is the maximum-likelihood estimate of all data seen, from a single pass. Its
error is the Cramér–Rao bound: no unbiased estimator has less. (With the rate 1/k, as in the notes by Grosse (2021),
the first datum would be lost.)
"""

import torch

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=6)
gamma, streams, length = ng.families.Gamma(), style.size(200, 10), style.size(300, 20)
truth = gamma.from_distribution(torch.distributions.Gamma(3.0, 20.0)).double()
xi = gamma.mean(truth)
x = gamma.sample(truth, (length, streams), torch.Generator().manual_seed(0))
t = torch.stack([x.log(), x], -1)  # sufficient statistics
metric = torch.linalg.inv(torch.autograd.functional.jacobian(gamma.mean, truth))  # Fisher metric of ξ


def excess(path: torch.Tensor) -> torch.Tensor:
    """k E‖ξ_k − ξ‖² in the Fisher metric, over the number of parameters."""
    d = path - xi
    return torch.arange(1, length + 1) * torch.einsum("kni,ij,knj->kn", d, metric, d).mean(1) / 2


mirrored = t.cumsum(0) / torch.arange(1, length + 1)[:, None, None]
online = ng.mirror.Online.of(gamma, x[:1, 0])
for datum in x[1:, 0]:
    online = online.update(datum[None])
assert torch.allclose(gamma.mean(online.eta), mirrored[-1, 0])
k = torch.arange(1, length + 1)
ax.axhline(1, color=style.COLOURS["exact"], lw=1)
ax.text(1.2, 0.55, "Cramér–Rao bound", color=style.COLOURS["exact"])
ax.set(title="error over the bound", xlabel="data seen", ylabel="k · error / bound", xscale="log", ylim=(0, 2))
style.curves(ax, {"natural gradient": (k, excess(mirrored))}, {"natural gradient": "mirror descent"})
