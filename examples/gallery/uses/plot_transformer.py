"""
A byte transformer with ng.Natural
==================================

Two layers of width 64 learn the bytes of natgrad's own source code. Both optimizers have the best of three learning
rates, the same schedule to zero, and the same batches. Loss on bytes that were not trained, lower is better.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import natgrad as ng
from examples.gallery import style

STEPS, WIDTH, LENGTH = style.size(150, 2), 64, 64
sources = sorted(Path(ng.__file__).parent.rglob("*.py"))[:60]
text = torch.tensor([byte for path in sources for byte in path.read_bytes()][:400_000])
window, cut = torch.arange(LENGTH + 1), int(0.9 * len(text))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, rows: Tensor) -> Tensor:
        """The loss of every byte from those before it."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        h = self.body(self.bytes(rows[:, :-1]) + self.places.weight, mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), rows[:, 1:].flatten())


def run(name: str, lr: float) -> list[float]:
    torch.manual_seed(0)
    model, out = Decoder(), []
    valid, starts = torch.randint(cut, len(text) - LENGTH, (64, 1)), torch.randint(0, cut - LENGTH, (STEPS, 16, 1))
    head = [{"params": model.head.parameters(), "fallback": "adamw"}]
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    opt = ng.Natural(model, lr=lr, groups=head) if name == "ng.Natural" else adamw
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
rates = (3e-3, 6e-3, 1.2e-2)
best = {name: min((run(name, lr) for lr in rates), key=lambda out: out[-1]) for name in ("AdamW", "ng.Natural")}
ax.set(title="validation loss of a byte transformer", xlabel="step", ylabel="nats a byte")
style.curves(ax, {name: (torch.linspace(STEPS / len(out), STEPS, len(out)), out) for name, out in best.items()})
