"""
K-FAC on digits, beside tuned AdamW
===================================

Full batches, one network, five seeds, median. AdamW has the best of four learning rates (on the test set, which
favours it); K-FAC has its default damping and lr = 0.3. Lower is better. Neither is far ahead on so small a task:
K-FAC is better after some ten steps, and in the end both have learned the data by heart.
"""

from collections.abc import Callable

import torch
from torch import nn

import natgrad as ng
from examples.gallery import style
from natgrad.data import load_digits

train, test = load_digits()
loss = nn.CrossEntropyLoss()
STEPS, SEEDS = style.size(60, 4), style.size(5, 1)


def run(make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> list[float]:
    """The test error after every step, in per cent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))
    opt, errors = make(model), []
    for _ in range(STEPS):
        opt.zero_grad()
        loss(model(train.images), train.labels).backward()
        opt.step()
        with torch.no_grad():
            errors.append(100 * float((model(test.images).argmax(1) != test.labels).float().mean()))
    return errors


def median(make: Callable[[nn.Module], torch.optim.Optimizer]) -> torch.Tensor:
    return torch.tensor([run(make, seed) for seed in range(SEEDS)]).median(0).values


def adamw(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)


fig, (ax,) = style.figure(width=6)
tuned = min((median(adamw(lr)) for lr in (0.01, 0.03, 0.1, 0.3)), key=lambda errors: float(errors[-1]))
steps = torch.arange(1, STEPS + 1)
kfac = median(lambda model: ng.KFAC(model, loss, lr=0.3))
ax.set(title="digits, full batches: test error", xlabel="step", ylabel="per cent", yscale="log")
style.curves(ax, {"AdamW": (steps, tuned), "K-FAC": (steps, kfac)}, {"AdamW": "AdamW, tuned"})
