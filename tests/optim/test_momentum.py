"""Momentum before and after the metric."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.structures import Structure
from tests.optim.states import alike, whole
from tests.optim.tasks import seeded, task

μ = 0.8
RULES = {"plain": ng.Fixed(), "general": ng.Constrained(ng.Fixed(), ng.Clipping({}))}
WHITE = torch.eye(3, dtype=torch.float64) * 3**0.5  # inputs with E[a aᵀ] = 1: the Euclidean metric of a layer is 1

WAVES = torch.arange(24.0, dtype=torch.float64).view(8, 3).sin()


def linear() -> nn.Linear:
    return seeded(lambda: nn.Linear(3, 2, bias=False).double())


def gradients(count: int = 6) -> list[Tensor]:
    return seeded(lambda: [torch.randn(2, 3, dtype=torch.float64) for _ in range(count)], seed=1)


def fed(opt: torch.optim.Optimizer, model: nn.Linear, x: Tensor, ω: Tensor | None) -> None:
    """One step with this gradient, whatever the model says."""
    model(x)
    model.weight.grad = None if ω is None else ω.clone()
    opt.step()


def made(model: nn.Module, **options: Any) -> ng.NaturalGradient:
    numbers: dict[str, Any] = {"lr": 0.1, "damping": 0.0, "momentum": μ, "momentum_on": "gradients"}
    return ng.NaturalGradient(model, ng.Euclidean(), **{**numbers, **options})


@pytest.mark.parametrize("rule", list(RULES))
def test_in_the_identity_metric_it_is_the_nesterov_momentum_of_torch(rule: str) -> None:
    """m = (1 − μ)b for the b ← μb + ω of torch, and μm + (1 − μ)ω = (1 − μ)(μb + ω)."""
    model, other = linear(), linear()
    opt = made(model, step=RULES[rule])
    sgd = torch.optim.SGD(other.parameters(), lr=0.1 * (1 - μ), momentum=μ, nesterov=True)
    for ω in gradients():
        fed(opt, model, WHITE, ω)
        fed(sgd, other, WHITE, ω)
        torch.testing.assert_close(model.weight, other.weight)
        torch.testing.assert_close(
            opt.state[model.weight]["momentum"], (1 - μ) * sgd.state[other.weight]["momentum_buffer"]
        )


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker()], ids=repr)
def test_in_a_constant_metric_the_two_places_of_momentum_differ_by_linear_algebra(
    structure: Structure, rule: str
) -> None:
    """With n = Σ_s μ^(t − s) ω_s♯ the steps are −lr·n after the metric, −lr(1 − μ)(ω♯ + μn) before it."""
    x = seeded(lambda: torch.randn(5, 3, dtype=torch.float64))
    options: dict[str, Any] = {"structure": structure, "damping": 0.1, "step": RULES[rule]}
    before, after, none = (linear() for _ in range(3))
    opts = [
        made(before, **options),
        made(after, **options, momentum_on="steps"),
        made(none, **options, momentum=0.0),
    ]
    for ω in gradients():
        for opt, model in zip(opts, (before, after, none), strict=True):
            fed(opt, model, x, ω)
        δ, n, v = (opt.last.displacement["weight"] for opt in opts if opt.last is not None)
        torch.testing.assert_close(δ, (1 - μ) * (v + μ * n))


def test_groups_have_momenta_of_their_own_and_none_is_the_natural_gradient() -> None:
    def stepped(momentum_on: str, momentum: float) -> list[Tensor]:
        job = task("classes")
        first, *others = job.model.parameters()
        groups = [{"params": first, "momentum": 0.0}, {"params": others, "momentum": momentum}]
        opt = job.optimizer(lr=0.5, groups=groups, momentum_on=momentum_on)
        for _ in range(3):
            job.step(opt)
        return [p.detach() for p in job.model.parameters()]

    expected = stepped("steps", 0.0)
    for p, q in zip(stepped("gradients", 0.0), expected, strict=True):
        assert torch.equal(p, q)
    assert not torch.allclose(stepped("gradients", 0.5)[1], expected[1])


@pytest.mark.parametrize("rule", list(RULES))
def test_a_parameter_without_a_gradient_keeps_its_momentum(rule: str) -> None:
    job = task("regression")
    opt = job.optimizer(lr=0.1, momentum=μ, momentum_on="gradients", step=RULES[rule])
    job.step(opt)
    p, *others = job.model.parameters()
    weight, momentum = p.detach().clone(), opt.state[p]["momentum"].clone()
    moved = [q.detach().clone() for q in others]
    job.closure(opt)()
    p.grad = None
    opt.step()
    assert torch.equal(p, weight)
    assert torch.equal(opt.state[p]["momentum"], momentum)
    assert not any(torch.equal(q, before) for q, before in zip(others, moved, strict=True))


def test_a_step_that_fails_leaves_parameters_and_momentum() -> None:
    model = linear()
    opt = made(model)
    fed(opt, model, WHITE, gradients()[0])
    weight, momentum = model.weight.detach().clone(), opt.state[model.weight]["momentum"].clone()
    with pytest.raises(NonFiniteError, match="the gradient of weight holds NaN"):
        fed(opt, model, WHITE, torch.full((2, 3), torch.nan, dtype=torch.float64))
    assert torch.equal(model.weight, weight)
    assert torch.equal(opt.state[model.weight]["momentum"], momentum)


def test_a_penalty_and_a_line_search_see_the_gradient_and_step_along_the_momentum() -> None:
    """The momentum averages what was stepped along, penalty included."""
    job = task("regression")
    penalised = ng.Constrained(
        ng.Fixed(), ng.Penalty(lambda θ: torch.stack([p.square().sum() for p in θ.values()]).sum(), 0.5)
    )
    opt = job.optimizer(lr=0.1, momentum=μ, momentum_on="gradients", step=penalised)
    ω = job.gradient() + job.theta()
    job.step(opt)
    momenta = torch.cat([opt.state[p]["momentum"].reshape(-1) for p in job.model.parameters()])
    torch.testing.assert_close(momenta, (1 - μ) * ω)

    job = task("regression")
    opt = job.optimizer(damping=1.0, momentum=0.5, momentum_on="gradients", step=ng.LevenbergMarquardt())
    losses = [float(opt.step(job.closure(opt)).detach()) for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def trained(opt: ng.NaturalGradient, model: nn.Module, steps: int, scaler: torch.amp.GradScaler | None = None) -> None:
    for _ in range(steps):
        opt.zero_grad()
        loss = model(WAVES).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()


def test_resume_is_exact_and_a_momentum_of_the_other_kind_is_refused() -> None:
    def new() -> tuple[nn.Module, ng.NaturalGradient]:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
        return model, ng.KFAC(model, ng.Euclidean(), momentum_on="gradients", metric_every=2, inverse_every=3)

    (model, opt), (copy, again) = new(), new()
    trained(opt, model, 4)
    copy.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    for m, o in ((model, opt), (copy, again)):
        trained(o, m, 3)
    assert alike(model.state_dict(), copy.state_dict())
    assert alike(opt.state_dict(), again.state_dict())
    with pytest.raises(ValueError, match="its momentum_on is gradients, here it is steps"):
        ng.KFAC(model, ng.Euclidean()).load_state_dict(opt.state_dict())
    old = whole(opt)
    del old["natgrad"]["momentum_on"]  # saved before there was a choice
    again.load_state_dict(old)


def test_a_scaler_that_skips_a_step_leaves_the_momentum() -> None:
    """Its scale is 2⁶⁰ at first; steps that are made are those without a scaler."""
    model, other = linear(), linear()
    opt, plain = made(model, damping=0.1), made(other, damping=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    for at in range(4):
        trained(plain, other, 1)
        trained(opt, model, 1, scaler)
        if at == 1:
            before = opt.state[model.weight]["momentum"].clone()
            opt.zero_grad()
            scaler.scale(model(WAVES).sum() * torch.inf).backward()
            scaler.step(opt)
            scaler.update()
            assert torch.equal(opt.state[model.weight]["momentum"], before)
    torch.testing.assert_close(model.weight, other.weight)


@pytest.mark.parametrize("make", [ng.NaturalGradient, ng.KFAC, ng.EKFAC, ng.SobolevKFAC])
def test_a_momentum_on_something_else_is_refused(make: Callable[..., ng.NaturalGradient]) -> None:
    with pytest.raises(ValueError, match=r'momentum_on must be "gradients" .* or "steps" \(after\), got \'weights\''):
        make(linear(), ng.Euclidean(), momentum_on="weights")


def test_a_rule_with_a_velocity_of_its_own_is_refused_before_anything_changes() -> None:
    job = task("regression")
    opt = job.optimizer(step=ng.SelfTuned(), momentum_on="gradients")
    before = job.theta()
    with pytest.raises(ValueError, match=r'SelfTuned decides the velocity itself.*use momentum_on="steps"'):
        opt.step(job.closure(opt))
    assert torch.equal(job.theta(), before)


def test_the_plan_says_where_the_momentum_is() -> None:
    words = str(made(linear()).plan())
    assert "momentum 0.8 in the space of covectors (m ← μm + (1 − μ)ω, before the metric)" in words
