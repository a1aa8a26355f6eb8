"""A step rule of your own: Polyak's length, for losses whose minimum is known.

A rule turns the natural gradient into a step. It looks at a ``StepContext`` only, so that it works with every metric,
structure and solver.

    python examples/extend/step_rule.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.step import Step, StepContext, StepRule


@final
@dataclass(frozen=True)
class Polyak(StepRule):
    """δ = −lr·(L − L*)/⟨ω, v⟩·v with v = (G + λ)⁻¹ω: where the linear model of the loss reaches its minimum L*.

    Polyak (1969) has it with the gradient for v.
    """

    needs_closure: ClassVar[bool] = True

    minimum: float = 0.0

    def take(self, context: StepContext) -> Step:
        v = context.sharp(context.differential, context.damping)
        slope = float(context.differential @ v)
        if slope <= 0:
            return Step(v * 0.0, context.damping, accepted=False, converged=True, reason="the gradient is zero")
        length = (context.loss(None) - self.minimum) / slope
        return Step(context.move(v * length), context.damping, reason=f"length {length:.3g}")


def train(steps: int = 15) -> list[float]:
    """The losses of a network that can fit its data exactly: L* = 0."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)).double(), torch.randn(40, 3).double()
    t = x.sin().sum(1, keepdim=True)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kernel(), step=Polyak(), damping=1e-6)

    def closure() -> Tensor:
        opt.zero_grad()
        loss: Tensor = 0.5 * (model(x) - t).square().mean()
        loss.backward()
        return loss

    return [opt.step(closure).item() for _ in range(steps)]


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.2g}")
