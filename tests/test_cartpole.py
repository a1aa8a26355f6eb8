"""The example that balances a pole: its physics, its advantages, and that it solves the task."""

import math

import pytest
import torch

from examples.cartpole import STEPS, CartPole, Episodes, play, solve

DOUBLE = torch.float64


def test_a_push_from_rest_moves_the_cart_and_tips_the_pole_the_other_way() -> None:
    """By hand: F/(m + M) = 10/1.1, θ̈ = −(10/1.1)/(½(4/3 − 0.1/1.1)), ẍ = 10/1.1 − 0.05 θ̈/1.1."""
    state = torch.zeros(2, 4, dtype=DOUBLE)
    right, left = CartPole().move(state, torch.tensor([1.0, 0.0], dtype=DOUBLE))
    α = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    expected = torch.tensor([0, 0.02 * (10 / 1.1 - 0.05 * α / 1.1), 0, 0.02 * α], dtype=DOUBLE)
    torch.testing.assert_close(right, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(left, -expected, rtol=0, atol=1e-14)


def test_the_equations_of_motion_conserve_energy_where_nobody_pushes() -> None:
    """T + V of a cart and a uniform rod, with steps so small that Euler's error is below the tolerance."""
    world = CartPole(force=0.0, time=1e-5)
    m, M, half = world.pole, world.cart, world.half_length

    def energy(state: torch.Tensor) -> float:
        _, v, θ, ω = state[0].tolist()
        kinetic = 0.5 * (M + m) * v**2 + m * half * v * ω * math.cos(θ) + 0.5 * m * (4 / 3) * half**2 * ω**2
        return kinetic + m * world.gravity * half * math.cos(θ)

    state = torch.tensor([[0.0, 0.5, 0.3, 1.0]], dtype=DOUBLE)
    start = energy(state)
    for _ in range(2000):
        state = world.move(state, torch.ones(1, dtype=DOUBLE))
    assert abs(float(state[0, 2]) - 0.3) > 0.01  # it has moved
    assert energy(state) == pytest.approx(start, abs=2e-6)


def test_an_episode_ends_where_the_pole_falls_or_the_track_ends() -> None:
    state = torch.zeros(4, 4)
    state[1, 0], state[2, 2], state[3, 2] = -2.5, 0.21, 0.2
    assert CartPole().stands(state).tolist() == [True, False, False, True]
    played = play(lambda s: torch.zeros(len(s), 2), 6, torch.Generator().manual_seed(0))
    steps = played.standing.long()
    assert bool((steps[1:] <= steps[:-1]).all())  # once down, it stays down
    assert 8 < float(played.returns.mean()) < 60  # of a policy that pushes at random


def test_advantages_are_centred_discounted_returns_of_the_steps_that_are_there() -> None:
    standing = torch.tensor([[True, True], [True, False]])
    played = Episodes(torch.zeros(2, 2, 4), torch.zeros(2, 2), standing)
    gap = torch.tensor([0.25, -0.25, 0.0])  # 1 + ½ and 1 at first, then 1 alone
    torch.testing.assert_close(played.advantages(discount=0.5), gap / gap.std(), rtol=1e-5, atol=1e-6)


def test_the_natural_policy_gradient_solves_cartpole() -> None:
    trained = solve(seed=11)
    assert trained.returns[0] < 50
    assert trained.evaluate(n=20) >= 0.95 * STEPS
    assert not trained.refused
