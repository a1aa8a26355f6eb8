"""The KL trust region on policies: the scaling is exact, and no accepted step leaves the region."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence

import natgrad as ng
from tests import oracle
from tests.optim.tasks import seeded, silent
from tests.zoo import mlp


@dataclass(frozen=True)
class Kind:
    """A family of policies, the distribution of its actions, and its metric by the oracle."""

    family: ng.families.Family
    actions: Callable[[Tensor], Distribution]
    h: Callable[[Tensor], Tensor]


def _learned(y: Tensor) -> Distribution:
    μ, log_σ = y.chunk(2, dim=-1)
    return Independent(Normal(μ, log_σ.exp()), 1)


KINDS = {
    "categorical": Kind(ng.Categorical(), lambda y: Categorical(logits=y), oracle.categorical),
    "gaussian": Kind(
        ng.Gaussian(scale=0.3), lambda y: Independent(Normal(y, 0.3), 1), lambda y: oracle.gaussian(y, 0.3)
    ),
    "learned scale": Kind(ng.Gaussian(scale=None), _learned, oracle.gaussian_learned),
}
RULES: dict[str, dict[str, Any]] = {
    "dense": {},
    "kernel": {"structure": ng.Kernel()},
    "conjugate gradients": {"structure": ng.Implicit(), "solver": ng.CG(tol=1e-10)},
}


@dataclass(frozen=True)
class Round:
    """A random policy in random states, with random actions and advantages; ``bold`` policies are far from uniform."""

    policy: nn.Module
    x: Tensor
    kind: Kind
    advantages: Tensor
    actions: Tensor

    @staticmethod
    def of(kind: str, seed: int, bold: float = 1.0) -> "Round":
        def build() -> Round:
            policy = mlp(3, 4, 4).double()
            for p in policy.parameters():
                p.data.mul_(bold)
            x = torch.randn(15, 3, dtype=torch.float64)
            actions = KINDS[kind].actions(policy(x).detach()).sample()
            return Round(policy, x, KINDS[kind], torch.randn(15, dtype=torch.float64), actions)

        return seeded(build, seed)

    def loss(self) -> Tensor:
        """−E[A log π(a | s)]: the policy gradient."""
        return -(self.advantages * self.kind.actions(self.policy(self.x)).log_prob(self.actions)).mean()

    def step(self, rule: ng.TrustRegion, **options: Any) -> tuple[Tensor, float, ng.NaturalGradient]:
        """δ, the mean KL(old ‖ new) by torch, and the optimizer after one step."""
        opt = ng.NaturalGradient(self.policy, ng.Fisher(self.kind.family), step=rule, damping=1e-6, **options)
        before = oracle.flatten(self.policy.parameters())
        with torch.no_grad():
            old = self.kind.actions(self.policy(self.x))
        self.loss().backward()
        opt.step()
        with torch.no_grad():
            moved = float(kl_divergence(old, self.kind.actions(self.policy(self.x))).mean())
        return oracle.flatten(self.policy.parameters()) - before, moved, opt


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_of_a_policy_is_scaled_by_the_root_of_2_delta_over_xfx(kind: str, how: str) -> None:
    round_, radius = Round.of(kind, seed=0), 1e-3
    ω = oracle.differential(round_.policy, round_.loss())
    with silent(round_.policy):
        F = oracle.dense(oracle.module_jacobian(round_.policy, round_.x), round_.kind.h(round_.policy(round_.x)))
    x = oracle.damped(F, ω, 1e-6)
    δ, _, _ = round_.step(ng.TrustRegion(radius), **RULES[how])
    torch.testing.assert_close(δ, -x * math.sqrt(2 * radius / float(x @ F @ x)), rtol=1e-6, atol=1e-9)
    assert float(0.5 * δ @ F @ δ) == pytest.approx(radius, rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_small_region_the_divergence_of_the_step_is_the_radius(kind: str) -> None:
    """KL = ½ δᵀFδ to second order: halving the radius ten times leaves an error of the order of its root."""
    gaps = [abs(Round.of(kind, seed=1).step(ng.TrustRegion(r))[1] / r - 1) for r in (1e-3, 1e-7)]
    assert gaps[1] < 0.05 * gaps[0] + 1e-6


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_accepted_step_of_a_random_policy_leaves_the_region(kind: str, how: str) -> None:
    left = 0
    for seed in range(4):
        for radius in (0.01, 1.0):
            bold = (0.5, 2.0)[seed % 2]
            _, free, _ = Round.of(kind, seed, bold).step(ng.TrustRegion(radius), **RULES[how])
            _, moved, opt = Round.of(kind, seed, bold).step(
                ng.TrustRegion(radius, ng.Backtracking(tries=60)), **RULES[how]
            )
            assert opt.last is not None
            assert opt.last.accepted
            assert 0 < moved <= radius
            left += free > radius
            if free <= radius:  # a step that stays inside by itself is not shortened
                assert moved == pytest.approx(free, rel=1e-9)
    assert left >= 2  # back-tracking was needed


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_cannot_be_shortened_into_the_region_is_refused_with_its_divergence(kind: str) -> None:
    refused = 0
    for seed in range(6):
        rule = ng.TrustRegion(1.0, ng.Backtracking(shrink=0.99, tries=1))
        δ, moved, opt = Round.of(kind, seed, 2.0).step(rule)
        assert opt.last is not None
        if opt.last.accepted:
            assert moved <= 1.0
            continue
        refused += 1
        assert bool((δ == 0).all())
        assert opt.last.reason.startswith("divergence ")
        assert opt.last.reason.endswith("over radius 1 after 1 tries")
    assert refused >= 2
