"""Cart-pole by natural policy gradient in a KL trust region (Kakade 2002; Schulman et al. 2015).

The task is that of Barto, Sutton and Anderson (1983) in its usual form: two actions, a reward of 1 for every step in
which the pole stands, at most 500 steps. Every update is the step −x √(2δ/xᵀFx) with x = F⁻¹∇L, shortened until the KL
divergence between the new and the old policy is at most δ.

    python examples/cartpole.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

import natgrad as ng

STEPS = 500  # of an episode that does not fail


@final
@dataclass(frozen=True)
class CartPole:
    """Equations of motion of n carts, states [n 4] = (x, ẋ, θ, θ̇), in Euler steps of 20 ms."""

    gravity: float = 9.8
    cart: float = 1.0  # kg
    pole: float = 0.1  # kg
    half_length: float = 0.5  # m
    force: float = 10.0  # N
    time: float = 0.02  # s

    def start(self, n: int, generator: torch.Generator) -> Tensor:
        """Random states near the upright position."""
        return 0.1 * torch.rand(n, 4, generator=generator) - 0.05

    def move(self, state: Tensor, right: Tensor) -> Tensor:
        """The next states after a push to the right (1) or to the left (0)."""
        x, v, θ, ω = state.unbind(1)
        total = self.cart + self.pole
        push = (2 * right - 1) * self.force
        pull = (push + self.pole * self.half_length * ω.square() * θ.sin()) / total
        inertia = self.half_length * (4 / 3 - self.pole * θ.cos().square() / total)
        α = (self.gravity * θ.sin() - θ.cos() * pull) / inertia
        a = pull - self.pole * self.half_length * α * θ.cos() / total
        return torch.stack([x + self.time * v, v + self.time * a, θ + self.time * ω, ω + self.time * α], dim=1)

    def stands(self, state: Tensor) -> Tensor:
        """Whether a cart is on its track and its pole within 12° of the upright position."""
        return (state[:, 0].abs() <= 2.4) & (state[:, 2].abs() <= math.radians(12))


@final
@dataclass(frozen=True)
class Episodes:
    """n episodes: states [t n 4], actions [t n], and whether the pole still stood [t n]."""

    states: Tensor
    actions: Tensor
    standing: Tensor

    @property
    def returns(self) -> Tensor:
        """The return of every episode [n]: its number of steps."""
        return self.standing.sum(0).float()

    def advantages(self, discount: float = 0.99) -> Tensor:
        """Discounted rewards to go, minus the mean over episodes at the same time, over the standard deviation."""
        active = self.standing.float()
        to_go, after = [], torch.zeros_like(active[0])
        for reward in active.flip(0):
            after = reward + discount * after
            to_go.append(after)
        value = torch.stack(to_go[::-1])
        mean = (value * active).sum(1, keepdim=True) / active.sum(1, keepdim=True).clamp(min=1)
        gap = (value - mean)[self.standing]
        return gap / (gap.std() + 1e-8)


def play(policy: Callable[[Tensor], Tensor], n: int, generator: torch.Generator) -> Episodes:
    """Play n episodes with a policy that maps states [n 4] to logits of the actions [n 2]."""
    world = CartPole()
    state, standing = world.start(n, generator), torch.ones(n, dtype=torch.bool)
    frames: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        while len(frames) < STEPS and bool(standing.any()):
            right = torch.rand(n, generator=generator) < policy(state).softmax(1)[:, 1]
            frames.append((state, right.long(), standing))
            state = world.move(state, right.float())
            standing = standing & world.stands(state)
    return Episodes(*(torch.stack(column) for column in zip(*frames, strict=True)))


@final
@dataclass(frozen=True)
class Training:
    """A trained policy, the mean return before every update, and why steps were refused."""

    policy: nn.Module
    returns: list[float]
    refused: list[str]

    def evaluate(self, n: int = 20, seed: int = 1) -> float:
        """The mean return over n new episodes."""
        return float(play(self.policy, n, torch.Generator().manual_seed(seed)).returns.mean())


def solve(seed: int = 0, episodes: int = 32, updates: int = 80, radius: float = 0.02) -> Training:
    """Update a small network until its episodes last 500 steps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    opt = ng.NaturalGradient(
        policy,
        ng.Fisher(ng.Categorical()),
        step=ng.TrustRegion(radius, ng.Backtracking()),
        damping=1e-3,
    )
    returns: list[float] = []
    refused: list[str] = []
    for _ in range(updates):
        played = play(policy, episodes, generator)
        returns.append(float(played.returns.mean()))
        if len(returns) > 3 and min(returns[-3:]) >= 0.98 * STEPS:
            break
        active = played.standing
        opt.zero_grad()
        log_p = policy(played.states[active]).log_softmax(1)  # [steps 2], every step is an example
        taken = log_p.gather(1, played.actions[active][:, None]).squeeze(1)
        (-taken * played.advantages()).mean().backward()
        opt.step()
        if opt.last is not None and not opt.last.accepted:
            refused.append(opt.last.reason)
    return Training(policy, returns, refused)


if __name__ == "__main__":
    trained = solve()
    for update, mean in enumerate(trained.returns):
        print(f"update {update:3d}   mean return {mean:6.1f}")
    print(f"20 new episodes: mean return {trained.evaluate():.1f} of {STEPS}")
