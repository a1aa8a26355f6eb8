"""
Fine-tuning by low-rank adapters
================================

A byte model is trained on natgrad's own source code. Then it is frozen, and adapters of rank 4 learn the same code in
capitals. Freeze before you make the optimizer: only what is trainable is stepped. Each optimizer has the best of three
learning rates, by the last loss; lower is better.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import natgrad as ng
from examples.gallery import style

CONTEXT, WIDTH, RATES = 12, 128, (0.003, 0.01, 0.03)
code = "".join(path.read_text(encoding="ascii", errors="ignore") for path in Path(ng.__file__).parent.glob("*.py"))
small, capitals = (torch.tensor(list(text.encode())) for text in (code, code.upper()))


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, rank), nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def train(model: nn.Module, opt: torch.optim.Optimizer, text: Tensor, steps: int) -> Tensor:
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        rows = text[torch.randint(len(text) - CONTEXT, (512, 1), generator=generator) + torch.arange(CONTEXT + 1)]
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses).unfold(0, 10, 1).mean(1)


def tuned(name: str, lr: float) -> Tensor:
    torch.manual_seed(0)
    first, last = nn.Linear(16 * CONTEXT, WIDTH), nn.Linear(WIDTH, 256)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), first, nn.Tanh(), last)
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), small, style.size(300, 12))
    model[0].requires_grad_(False)
    model[2], model[4] = Adapted(first), Adapted(last)
    opt = ng.Natural(model, lr=lr) if name == "ng.Natural" else torch.optim.AdamW(model.parameters(), lr=lr)
    return train(model, opt, capitals, style.size(200, 12))


fig, (ax,) = style.figure(width=6)
ax.set(title="training loss of the adapters, mean of 10 steps", xlabel="step", ylabel="nats a byte")
best = {name: min((tuned(name, lr) for lr in RATES), key=lambda y: float(y[-1])) for name in ("AdamW", "ng.Natural")}
style.curves(ax, {name: (torch.arange(10, len(y) + 10), y) for name, y in best.items()})
