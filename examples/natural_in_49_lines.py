"""The steps of ng.Natural in 49 lines of plain torch, to read, and to take with you.

ng.Natural has the rest: matrices of one shape as one batch, stacks and heads, parameter groups, checkpoints, and errors
that help.

Run it: python -m examples.natural_in_49_lines
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def polar(M: Tensor) -> Tensor:
    """U Vᵀ of M = U Σ Vᵀ, by five quintic steps in bfloat16 that bring all singular values near one (Jordan 2024)."""
    tall = M.shape[0] > M.shape[1]
    X = (M.mT if tall else M).bfloat16()
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(5):
        G = X @ X.mT
        X = torch.addmm(X, torch.addmm(G, G, G, beta=-4.775, alpha=2.0315), X, beta=3.4445)
    return (X.mT if tall else X).to(M.dtype)


class SmallNatural:
    """θ ← (1 − lr·wd)θ − lr·v, v = G^-¼ polar(G^-¼ M) for matrices, with G = S ⊗ A of diagonals; AdamW for the rest."""

    def __init__(self, model: nn.Module, lr: float = 3e-3, weight_decay: float = 0.1) -> None:
        self.model, self.lr, self.weight_decay, self.steps = model, lr, weight_decay, 0
        self.state: dict[Tensor, list[Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """One step with the gradients that are there."""
        self.steps += 1
        for p in self.model.parameters():
            g = p.grad
            if g is not None:
                v = self.adam(p, g) if p.ndim < 2 else self.natural(p, g.flatten(1)).view_as(p)
                p.mul_(1 - self.lr * self.weight_decay).sub_(v, alpha=self.lr)

    def natural(self, p: Tensor, g: Tensor) -> Tensor:
        """Momentum and the two diagonals, each an average over the steps; the polar factor between their powers."""
        o, i = g.shape
        m, S, A = self.state.setdefault(p, [torch.zeros_like(g), g.new_zeros(o, 1), g.new_zeros(1, i)])
        weight = (1 - 0.95) / (1 - 0.95**self.steps)  # of this gradient, in an average that is corrected for its start
        S.lerp_(g.square().mean(1, keepdim=True), weight)
        A.lerp_(g.square().mean(0, keepdim=True), weight)
        M = torch.lerp(m, g, 1 - 0.9**2)  # Nesterov: what the momentum will be, once more towards the gradient
        m.lerp_(g, 1 - 0.9)
        left, right = (S + 0.01 * S.mean()) ** -0.25, (A + 0.01 * A.mean()) ** -0.25
        W = left * M * right
        X = polar(W / W.norm())
        v = left * X * right
        return v.mul(0.4 * max(o, i) ** 0.5 * X.norm() / v.norm())

    def adam(self, p: Tensor, g: Tensor) -> Tensor:
        """m̂/√ŝ of gains and biases."""
        m, s = self.state.setdefault(p, [torch.zeros_like(p), torch.zeros_like(p)])
        m.lerp_(g, 1 - 0.9)
        s.lerp_(g.square(), 1 - 0.95)
        return m / (1 - 0.9**self.steps) / ((s / (1 - 0.95**self.steps)).sqrt() + 1e-8)


def main() -> None:
    """Train a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))
    opt, teacher = SmallNatural(model, lr=0.02), torch.randn(20, 10)
    for step in range(200):
        x = torch.randn(64, 20)
        loss = F.cross_entropy(model(x), (x.sin() @ teacher).argmax(1))
        model.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
