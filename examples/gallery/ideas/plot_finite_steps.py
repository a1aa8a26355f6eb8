"""
Finite steps in other coordinates
=================================

A network is written with parameters θ, and with ξ = 2θ + θ³/3. After one step in either, the two functions differ: in
proportion to lr for the gradient, to lr² for the natural gradient, which agrees to first order, and to lr³ with the
geodesic correction (van Oostrum, Müller and Ay (2023), Luk and Grosse (2018)). ``ng.invariance.certify`` halves the
learning rate and reports the order.
"""

import torch
from torch import Tensor, nn

import natgrad as ng
from examples.gallery import style

fig, (ax,) = style.figure(width=5)
model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
batch = torch.randn(64, 2, dtype=torch.float64), torch.randn(64, 2, dtype=torch.float64)


def cubic(θ: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 2 * p + p**3 / 3 for name, p in θ.items()}


def natural(model: nn.Module, step: ng.step.StepRule) -> torch.optim.Optimizer:
    return ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Dense(), step=step, lr=0.03, damping=0.0)


optimizers = {
    "gradient descent": lambda model: torch.optim.SGD(model.parameters(), lr=0.03),
    "natural gradient": lambda model: natural(model, ng.Fixed()),
    "exact": lambda model: natural(model, ng.GeodesicCorrected()),
}
lines, labels = {}, {}
for name, make in optimizers.items():
    found = ng.invariance.certify(make, model, batch, steps=1, map=cubic)
    lines[name] = [0.03 / 2**k for k in range(5)][::-1], found.shorter[::-1]
    labels[name] = f"{name.replace('exact', 'geodesic correction')}: lr^{found.order:.1f}"
ax.set(xscale="log", yscale="log", xlabel="learning rate", title="difference of the functions after a step")
ax.set_xticks([0.003, 0.01, 0.03], ["0.003", "0.01", "0.03"])
ax.set_xticks([], minor=True)
style.curves(ax, lines, labels)
