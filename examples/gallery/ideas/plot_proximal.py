"""
Natural gradient as an approximate proximal step
================================================

A proximal step minimises the loss plus a distance of outputs from where it starts. The natural gradient replaces
this distance by its second order, a quadratic in the parameters. Left: both distances from (−1.2, 1), as contours.
Right: the steps on Rosenbrock's function ‖z‖² (after Grosse (2021), figure 2; there, the loss without ½ needs the
step ½ for the full step, not 1).
"""

import torch
from torch import Tensor

import natgrad as ng
from examples.gallery import style


def outputs(x: Tensor) -> Tensor:
    return torch.stack([1 - x[..., 0], 10 * (x[..., 1] - x[..., 0] ** 2)], -1)


def natural(x: Tensor, rate: float) -> Tensor:
    """One step along the natural gradient of ‖z‖² with the Euclidean metric on z."""
    params = {"x": x}
    G = ng.Dense().estimate(ng.pullback(lambda p, _: outputs(p["x"])[None], None, ng.Euclidean(), params=params))
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(outputs(x).square().sum(), x)
    return (x - rate * ng.sharp(G, ng.Covector({"x": gradient}))["x"]).detach()


start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
natural_path, proximal_path = [start], [outputs(start)]
for _ in range(14):
    natural_path.append(natural(natural_path[-1], rate=0.15))
    proximal_path.append(proximal_path[-1] / (1 + 2 * 0.18))  # argmin ‖z‖² + ‖z − z_k‖²/(2·0.18): implicit descent

u, v = torch.meshgrid(torch.linspace(-2, 1.4, 200), torch.linspace(-1.5, 2.5, 200), indexing="xy")
grid = torch.stack([u, v], -1).double()
exact = (outputs(grid) - outputs(start)).square().sum(-1)
J = torch.autograd.functional.jacobian(outputs, start)
second = ((grid - start) @ J.T).square().sum(-1)

fig, (distance, steps) = style.figure(2)
levels = [4, 36, 100]
distance.contour(u, v, exact, levels, colors=style.COLOURS["exact"])
distance.contour(u, v, second, levels, colors=style.COLOURS["natural gradient"], linestyles="dashed")
distance.text(-0.25, 2.2, "exact", color=style.COLOURS["exact"])
distance.text(-1.95, -1.2, "second order", color=style.COLOURS["natural gradient"])
distance.set(title="distance of outputs from the start", xlabel="x₁", ylabel="x₂")
proximal = [torch.stack([1 - z[0], z[1] / 10 + (1 - z[0]) ** 2]) for z in proximal_path]
style.path(steps, proximal, "exact", (-0.25, 0.25))
style.path(steps, natural_path, "natural gradient", (0.05, -0.95))
steps.plot(1, 1, "*", color=style.GREY, ms=12)
steps.set(title="steps on Rosenbrock's function", xlabel="x₁", ylabel="x₂", ylim=(-1.5, 1.8))
