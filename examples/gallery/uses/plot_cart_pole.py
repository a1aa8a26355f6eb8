"""
Cart-pole in a KL trust region
==============================

Natural policy gradient: every update moves the policy by at most 0.02 nats (Kakade (2002); Schulman et al. (2015)).
Beside it Adam on the same loss, with the best of two learning rates. 500 steps is the longest episode. Both see 32
episodes an update; mean of the seeds. A trust region learns faster at first, and needs no rate; tuned Adam ends as
high or higher.
"""

import torch
from torch import nn

import natgrad as ng
from examples.cartpole import play
from examples.gallery import style

UPDATES, SEEDS = style.size(30, 2), style.size(2, 1)


def natural(policy: nn.Module) -> torch.optim.Optimizer:
    region = ng.TrustRegion(0.02, ng.Backtracking())
    return ng.NaturalGradient(policy, ng.Fisher(ng.Categorical()), step=region, damping=1e-3)


def run(seed: int, lr: float | None) -> list[float]:
    """The mean return before every update."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    opt = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0) if lr else natural(policy)
    returns: list[float] = []
    for _ in range(UPDATES):
        played = play(policy, 32, generator)
        returns.append(float(played.returns.mean()))
        opt.zero_grad()
        log_p = policy(played.states[played.standing]).log_softmax(1)
        taken = log_p.gather(1, played.actions[played.standing][:, None])[:, 0]
        (-taken * played.advantages()).mean().backward()
        opt.step()
    return returns


def mean(lr: float | None) -> torch.Tensor:
    return torch.tensor([run(seed, lr) for seed in range(SEEDS)]).mean(0)


fig, (ax,) = style.figure(width=6)
adam = max((mean(lr) for lr in (0.03, 0.1)), key=lambda returns: float(returns.mean()))
updates = torch.arange(UPDATES)
ax.set(title="cart-pole: steps until the pole falls", xlabel="update", ylabel="mean return")
style.curves(ax, {"natural gradient": (updates, mean(None)), "AdamW": (updates, adam)}, {"AdamW": "Adam, tuned"})
