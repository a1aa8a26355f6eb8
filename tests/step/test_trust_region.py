"""Fixed steps and trust regions."""

from __future__ import annotations

import itertools
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
from tests.optim.tasks import Scalar, Task, seeded, silent, task
from tests.zoo import mlp

REGULAR = ["regression", "coins", "counts"]


def _one_step(of: Task, **options: Any) -> tuple[Tensor, Tensor, Tensor, ng.NaturalGradient]:
    """δ, ω and G of one step."""
    before, ω, G = of.theta(), of.gradient(), of.metric()
    opt = of.optimizer(**options)
    of.step(opt)
    return of.theta() - before, ω, G, opt


def _kl(before: Tensor, after: Tensor) -> float:
    """KL(p_before ‖ p_after), the mean over the examples, for logits."""
    p = before.exp() / before.exp().sum(1, keepdim=True)
    q = after.exp() / after.exp().sum(1, keepdim=True)
    return float((p * (p.log() - q.log())).sum(1).mean())


@pytest.mark.parametrize("kind", REGULAR)
def test_a_fixed_step_is_minus_lr_times_the_natural_gradient(kind: str) -> None:
    δ, ω, G, opt = _one_step(task(kind), step=ng.Fixed(), lr=0.3, damping=1e-2)
    torch.testing.assert_close(δ, -0.3 * oracle.damped(G, ω, 1e-2), rtol=1e-10, atol=1e-12)
    assert opt.last is not None
    assert opt.last.accepted
    assert opt.last.reason == ""


@pytest.mark.parametrize("kind", REGULAR)
@pytest.mark.parametrize("radius", [1e-4, 0.05, 3.0])
@pytest.mark.parametrize("lr", [1e-3, 7.0])
def test_a_trust_region_step_reaches_the_boundary_along_the_natural_gradient(
    kind: str, radius: float, lr: float
) -> None:
    δ, ω, G, _ = _one_step(task(kind), step=ng.TrustRegion(radius), lr=lr, damping=1e-3)
    v = oracle.damped(G, ω, 1e-3)
    assert float(0.5 * δ @ G @ δ) == pytest.approx(radius, rel=1e-11)
    torch.testing.assert_close(δ / δ.norm(), -v / v.norm(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", REGULAR)
def test_a_trust_region_step_minimises_the_linear_loss_in_the_ball(kind: str) -> None:
    δ, ω, G, _ = _one_step(task(kind), step=ng.TrustRegion(0.01), damping=0.0)
    sharp = torch.linalg.solve(G, ω)
    torch.testing.assert_close(δ, -math.sqrt(0.02) * sharp / (ω @ sharp).sqrt(), rtol=1e-7, atol=1e-9)
    others = torch.randn(500, len(δ), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    others = torch.cat([others, δ + 0.01 * others])
    others *= (0.02 / (others @ G * others).sum(1)).sqrt()[:, None]  # on the boundary, where a linear function is least
    assert float((others @ ω).min()) > float(δ @ ω)


@pytest.mark.parametrize(("radius", "longest", "clipped"), [(1e6, 0.5, True), (1e6, 1.0, True), (1e-6, 0.5, False)])
def test_longest_limits_the_step_to_a_multiple_of_lr_v(radius: float, longest: float, clipped: bool) -> None:
    δ, ω, G, _ = _one_step(task(), step=ng.TrustRegion(radius, longest=longest), lr=0.2, damping=1e-3)
    natural = -0.2 * oracle.damped(G, ω, 1e-3)
    expected = longest * natural if clipped else natural * (2 * radius / (natural @ G @ natural)).sqrt()
    torch.testing.assert_close(δ, expected, rtol=1e-9, atol=1e-13)


def test_a_zero_gradient_moves_nothing() -> None:
    of = task()
    before = of.theta()
    opt = of.optimizer(step=ng.TrustRegion(1.0))
    (0 * of.model(of.x)).sum().backward()
    opt.step()
    assert torch.equal(of.theta(), before)
    assert opt.last is not None
    assert opt.last.reason == "no length in the metric"


class _Idle(nn.Module):
    """The outputs do not change with ``idle``: its directions have no length."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + 0 * self.idle


@pytest.mark.parametrize(("longest", "times"), [(math.inf, 1.0), (0.25, 0.25), (4.0, 1.0)])
def test_a_null_direction_is_not_limited_by_the_ball(longest: float, times: float) -> None:
    model = _Idle()
    rule = ng.TrustRegion(1e-9, ng.Backtracking(), longest=longest)
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=rule, lr=0.1, damping=0.5)
    y = model(torch.ones(3, 2, dtype=torch.float64))
    (0 * y.sum() + model.idle.square().sum()).backward()
    opt.step()
    # ω = 2, v = ω/λ = 4, δ = −0.1·4
    torch.testing.assert_close(model.idle.detach(), torch.full_like(model.idle, 1 - 0.4 * times), rtol=0, atol=1e-14)
    assert torch.equal(model.scale.detach(), torch.ones(2, dtype=torch.float64))


def _divergences(rule: ng.TrustRegion, steps: int = 12, **options: Any) -> list[float]:
    of = task("classes", n=20)
    opt = of.optimizer(step=rule, damping=1e-6, **options)
    found = []
    for _ in range(steps):
        with torch.no_grad():
            before = of.model(of.x)
        of.step(opt)
        assert opt.last is not None
        assert opt.last.accepted
        with torch.no_grad():
            found.append(_kl(before, of.model(of.x)))
    return found


@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_with_backtracking_every_accepted_step_has_a_true_divergence_within_the_radius(radius: float) -> None:
    assert max(_divergences(ng.TrustRegion(radius))) > radius  # the quadratic model alone does not hold it
    held = _divergences(ng.TrustRegion(radius, ng.Backtracking()))
    assert all(0 < divergence <= radius for divergence in held)


@pytest.mark.parametrize(("radius", "weight_decay"), [(0.3, 0.1), (2.0, 0.5)])
def test_with_backtracking_the_true_divergence_is_held_where_a_decayed_step_lands(
    radius: float, weight_decay: float
) -> None:
    held = _divergences(ng.TrustRegion(radius, ng.Backtracking()), lr=1.0, weight_decay=weight_decay)
    assert all(0 < divergence <= radius for divergence in held)


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_decay_that_leaves_the_radius_by_itself_is_refused(gradient: float) -> None:
    """y = θ = 1, decayed to ½: ρ = ⅛, whatever the step."""
    model = Scalar()
    rule = ng.TrustRegion(0.1, ng.Backtracking())
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=rule, lr=1.0, weight_decay=0.5)
    (gradient * model()).sum().backward()
    opt.step()
    assert opt.last is not None
    assert not opt.last.accepted
    assert model.value.item() == 1.0


@pytest.mark.parametrize("radius", [0.5, 2.0])
@pytest.mark.parametrize("shrink", [0.1, 0.5, 0.8])
def test_backtracking_takes_the_first_scale_within_the_radius(shrink: float, radius: float) -> None:
    """Of those that would be nine tenths of the radius if the divergence were quadratic, bounded by ``shrink``."""
    δ, *_ = _one_step(task("classes"), step=ng.TrustRegion(radius), damping=1e-6)
    of = task("classes")
    start, origin, scale, tries = of.model(of.x).detach(), of.theta(), 1.0, 1

    def divergence(scale: float) -> float:
        params = oracle.unflatten(origin + scale * δ, oracle.parameters(of.model))
        return float(_kl(start, torch.func.functional_call(of.model, params, (of.x,)).detach()))

    while (moved := divergence(scale)) > radius:
        scale, tries = scale * max(shrink, math.sqrt(0.9 * radius / moved)), tries + 1
    assert tries > 1
    rule = ng.TrustRegion(radius, ng.Backtracking(shrink, tries=80))
    short, *_, opt = _one_step(of, step=rule, damping=1e-6)
    torch.testing.assert_close(short, scale * δ, rtol=1e-9, atol=1e-12)
    assert 0.6 * radius < moved <= radius
    assert opt.last is not None
    assert opt.last.reason == f"shortened to {scale:.3g} in {tries} tries: divergence {moved:.3g} of radius {radius:g}"


def test_a_step_within_the_radius_is_not_lengthened() -> None:
    rule = ng.TrustRegion(1e4, ng.Backtracking(), longest=0.5)
    δ, *_, opt = _one_step(task(), step=rule, damping=1e-3)
    free, *_ = _one_step(task(), step=ng.TrustRegion(1e4, longest=0.5), damping=1e-3)
    torch.testing.assert_close(δ, free, rtol=0, atol=0)
    assert opt.last is not None
    assert opt.last.reason == ""


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_refused_step_leaves_the_parameters_and_says_why(weight_decay: float) -> None:
    of = task("classes")
    rule = ng.TrustRegion(2.0, ng.Backtracking(shrink=0.999, tries=2))
    opt = of.optimizer(step=rule, damping=1e-6, momentum=0.9, weight_decay=weight_decay)
    before = of.theta()
    of.step(opt)
    assert torch.equal(of.theta(), before)
    assert opt.last is not None
    assert not opt.last.accepted
    assert "over radius 2 after 2 tries" in opt.last.reason


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ng.TrustRegion(0.0), "positive radius"),
        (lambda: ng.TrustRegion(math.nan), "positive radius"),
        (lambda: ng.TrustRegion(1.0, longest=-1.0), "positive radius and longest"),
        (lambda: ng.Backtracking(shrink=1.0), "0 < shrink < 1"),
        (lambda: ng.Backtracking(tries=0), "tries ≥ 1"),
    ],
)
def test_impossible_trust_regions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# The KL trust region on policies: the scaling is exact, and no accepted step leaves the region.


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
    def of(kind: str, seed: int, bold: float = 1.0) -> Round:
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
    for seed in range(2):
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


def test_the_reverse_divergence_is_held_in_its_own_direction() -> None:
    """KL(new‖old) within the radius, where KL(old‖new) of the same steps is not."""
    of, radius = task("classes", n=20), 0.3
    opt = of.optimizer(step=ng.TrustRegion(radius, ng.Backtracking(shrink=0.9, tries=60, reverse=True)), damping=1e-6)
    pairs = []
    for _ in range(2):
        with torch.no_grad():
            before = of.model(of.x)
        of.step(opt)
        with torch.no_grad():
            pairs.append((_kl(of.model(of.x), before), _kl(before, of.model(of.x))))
    assert all(0 < reverse <= radius for reverse, _ in pairs)
    assert max(forward for _, forward in pairs) > radius


def test_with_improve_no_step_raises_the_loss() -> None:
    """The exact loss is looked at, and not its linearisation."""

    def losses(look: ng.Backtracking) -> list[float]:
        of = task("regression")
        opt = of.optimizer(step=ng.TrustRegion(30.0, look), damping=1e-3)
        found = [of.loss().item()]
        for _ in range(5):
            opt.step(of.closure(opt))
            found.append(of.loss().item())
        return found

    free = losses(ng.Backtracking())
    held = losses(ng.Backtracking(improve=True))
    assert any(after > before for before, after in itertools.pairwise(free))
    assert all(after <= before for before, after in itertools.pairwise(held))
    assert held[-1] < held[0]


def test_improve_needs_a_closure() -> None:
    of = task()
    opt = of.optimizer(step=ng.TrustRegion(0.1, ng.Backtracking(improve=True)))
    of.loss().backward()
    with pytest.raises(TypeError, match="closure"):
        opt.step()
