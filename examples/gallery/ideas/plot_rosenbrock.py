"""
Gradient descent on Rosenbrock's function
=========================================

Rosenbrock's function is ‖z‖² of the outputs z = (1 − x₁, 10 (x₂ − x₁²)). Gradient descent on x bounces across a
curved valley. Gradient descent on z goes straight to the minimum. With ‖z‖² and not ½‖z‖² the step that arrives at
once is ½: the step 1 would only change the sign of z (after Grosse (2021), figure 1).
"""

import torch
from torch import Tensor

from examples.gallery import style


def outputs(x: Tensor) -> Tensor:
    return torch.stack([1 - x[..., 0], 10 * (x[..., 1] - x[..., 0] ** 2)], -1)


def inputs(z: Tensor) -> Tensor:
    a = 1 - z[..., 0]
    return torch.stack([a, z[..., 1] / 10 + a**2], -1)


start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
by_inputs, by_outputs = [start], [outputs(start)]
for _ in range(400):
    x = by_inputs[-1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(outputs(x).square().sum(), x)
    by_inputs.append((x - 1.8e-3 * gradient).detach())
for _ in range(12):
    by_outputs.append(by_outputs[-1] - 0.15 * 2 * by_outputs[-1])

fig, axes = style.figure(2)
style.path(axes[0], by_inputs, "first")
style.path(axes[0], [inputs(z) for z in by_outputs], "second")
style.path(axes[1], [outputs(x) for x in by_inputs], "first")
style.path(axes[1], by_outputs, "second")
axes[0].plot(1, 1, "*", color=style.GREY, ms=12)
axes[0].set(title="in the inputs x", xlabel="x₁", ylabel="x₂", xlim=(-1.7, 1.5), ylim=(-0.8, 1.6))
axes[1].plot(0, 0, "*", color=style.GREY, ms=12)
axes[1].set(title="in the outputs z", xlabel="z₁", ylabel="z₂")
axes[0].text(-0.75, 1.2, "descent on x, 400 steps", color=style.COLOURS["first"])
axes[0].text(-0.6, -0.6, "descent on z, 12 steps", color=style.COLOURS["second"])
