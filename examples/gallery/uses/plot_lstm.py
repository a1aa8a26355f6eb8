"""
An LSTM with ng.Natural
=======================

One LSTM layer of width 128 learns the bytes of natgrad's own source code. Its four gates share one weight; a group says
that it is four matrices. Both optimizers have the best of three learning rates, the same schedule to zero, and the same
batches. Loss on bytes that were not trained, lower is better.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import natgrad as ng
from examples.gallery import style

STEPS, WIDTH, LENGTH = style.size(200, 2), 128, 48
sources = sorted(Path(ng.__file__).parent.rglob("*.py"))[:60]
text = torch.tensor([byte for path in sources for byte in path.read_bytes()][:400_000])
window, cut = torch.arange(LENGTH + 1), int(0.9 * len(text))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.body = nn.Embedding(256, 64), nn.LSTM(64, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, rows: Tensor) -> Tensor:
        """The loss of every byte from those before it."""
        h, _ = self.body(self.bytes(rows[:, :-1]))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), rows[:, 1:].flatten())


def run(name: str, lr: float) -> list[float]:
    torch.manual_seed(0)
    model, out = Recurrent(), []
    valid, starts = torch.randint(cut, len(text) - LENGTH, (64, 1)), torch.randint(0, cut - LENGTH, (STEPS, 16, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    gates = [{"params": [model.body.weight_ih_l0, model.body.weight_hh_l0], "blocks": 4}]
    opt = ng.Natural(model, lr=lr, groups=gates) if name == "ng.Natural" else adamw
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 - k / STEPS)
    for step in range(STEPS):
        opt.zero_grad()
        model(text[starts[step] + window]).backward()
        opt.step()
        schedule.step()
        if step % 10 == 9 or step == STEPS - 1:
            out.append(float(model(text[valid + window]).detach()))
    return out


fig, (ax,) = style.figure(width=6)
rates = (6e-3, 1.2e-2, 2.4e-2)
best = {name: min((run(name, lr) for lr in rates), key=lambda out: out[-1]) for name in ("AdamW", "ng.Natural")}
ax.set(title="validation loss of an LSTM", xlabel="step", ylabel="nats a byte")
style.curves(ax, {name: (torch.linspace(STEPS / len(out), STEPS, len(out)), out) for name, out in best.items()})
