"""Members of families as parameters of an optimizer."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import DomainError, NonFiniteError
from natgrad.mirror import Forbid, MeanChart, Member, NaturalChart, mirror_step, natural_step
from tests.mirror.members import CASES, Case, objective, t

every = pytest.mark.parametrize("case", CASES, ids=repr)
CHARTS = [NaturalChart(), MeanChart()]


def gamma(chart: ng.mirror.Chart = CHARTS[0]) -> Member:
    eta = t(1.2, -2.1)
    return Member(ng.families.Gamma(), eta if chart == CHARTS[0] else ng.families.Gamma().mean(eta), chart)


def loss(member: Member) -> Tensor:
    """KL(p ‖ ·), up to a constant, for another gamma distribution p."""
    g, eta = ng.families.Gamma(), member.natural()
    return g.log_partition(eta) - g.pair(eta, g.mean(t(0.5, -1.5)))


def trained(members: list[Member], opt: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    for _ in range(steps):
        opt.zero_grad()
        torch.stack([loss(member) for member in members]).sum().backward()
        opt.step()
    return [member.point.detach().clone() for member in members]


@every
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: type(chart).__name__)
def test_a_step_of_the_optimizer_is_the_function_for_both_descents(case: Case, chart: ng.mirror.Chart) -> None:
    start = case.eta if chart == CHARTS[0] else case.xi
    for descent in (mirror_step, natural_step):
        member = Member(case.family, start, chart)
        opt = ng.MirrorDescent([member], lr=0.02, descent=descent)
        objective(case)(member.mean()).backward()
        assert member.point.grad is not None
        expected = descent(case.family, start, member.point.grad, 0.02, chart)
        opt.step()
        torch.testing.assert_close(member.point.detach(), expected.point, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("descent", [mirror_step, natural_step])
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: type(chart).__name__)
def test_training_reaches_the_minimum_with_and_without_momentum(
    descent: Callable[..., ng.mirror.Move], chart: Any
) -> None:
    for momentum in (0.0, 0.5):
        member = gamma(chart)
        trained([member], ng.MirrorDescent(member, lr=0.3, momentum=momentum, descent=descent), 60)
        torch.testing.assert_close(member.natural().detach(), t(0.5, -1.5), rtol=1e-5, atol=1e-5)


def test_momentum_adds_velocities_in_the_chart_that_moves() -> None:
    member, lr, μ = gamma(), 0.1, 0.9
    g, ξ, m = member.family, member.mean().detach(), torch.zeros(2, dtype=torch.float64)
    opt = ng.MirrorDescent([member], lr=lr, momentum=μ)
    for _ in range(4):
        trial = Member(g, g.natural(ξ))
        loss(trial).backward()
        assert trial.point.grad is not None
        m = μ * m + trial.point.grad
        ξ = ξ - lr * m
        trained([member], opt, 1)
        torch.testing.assert_close(member.mean().detach(), ξ, rtol=1e-9, atol=1e-9)


def test_several_families_are_trained_at_once_each_group_with_its_own_rate() -> None:
    a, b, alone = gamma(), gamma(CHARTS[1]), [gamma(), gamma(CHARTS[1])]
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": b, "lr": 0.01}]
    opt = ng.MirrorDescent(groups, lr=0.05)
    together = trained([a, b], opt, 3)
    apart = [
        trained([alone[0]], ng.MirrorDescent([alone[0]], lr=0.05), 3)[0],
        trained([alone[1]], ng.MirrorDescent([alone[1]], lr=0.01), 3)[0],
    ]
    for got, expected in zip(together, apart, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0)


def test_members_inside_a_model_train_beside_its_other_parameters() -> None:
    model = nn.ModuleDict({"rate": gamma(), "layer": nn.Linear(1, 1)})
    opt = ng.MirrorDescent([m for m in model.modules() if isinstance(m, Member)], lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rate = model["rate"]
    assert isinstance(rate, Member)
    trained([rate], opt, 1)
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert moved == ["rate.point"]
    assert "Gamma(), η (2,)" in repr(model)
    assert isinstance(rate(), torch.distributions.Gamma)


def test_a_run_that_is_saved_and_loaded_goes_on_bit_for_bit() -> None:
    whole, half = gamma(), gamma()
    expected = trained([whole], ng.MirrorDescent([whole], lr=0.1, momentum=0.9), 6)[0]
    opt = ng.MirrorDescent([half], lr=0.1, momentum=0.9)
    trained([half], opt, 3)
    saved = copy.deepcopy((half.state_dict(), opt.state_dict()))
    other = gamma()
    other.load_state_dict(saved[0])
    resumed = ng.MirrorDescent([other], lr=7.0)
    resumed.load_state_dict(saved[1])
    assert torch.equal(trained([other], resumed, 3)[0], expected)


def test_schedulers_and_closures_work_as_in_torch() -> None:
    member = gamma()
    opt = ng.MirrorDescent([member], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(member)
        value.backward()
        return value

    first = opt.step(closure)
    assert not first.requires_grad  # float(first) would warn
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.05
    assert bool(loss(member) < first)


def test_a_member_without_a_gradient_stays() -> None:
    a, b = gamma(), gamma()
    opt = ng.MirrorDescent([a, b], lr=0.1)
    loss(a).backward()
    opt.step()
    assert torch.equal(b.point, t(1.2, -2.1))
    assert not torch.equal(a.point, t(1.2, -2.1))
    opt.zero_grad()
    opt.step()
    assert opt.last == ()


def test_a_step_too_long_is_shortened_told_once_and_its_velocity_with_it(caplog: pytest.LogCaptureFixture) -> None:
    member = gamma(CHARTS[1])
    opt = ng.MirrorDescent([member], lr=1.0, momentum=0.5)
    with caplog.at_level(logging.WARNING, "natgrad"):
        for _ in range(2):
            member.point.grad = t(0.0, -10.0)
            opt.step()
            assert bool(member.family.contains(member.natural()))
    (reason,) = opt.reasons()
    assert reason.startswith("member 0 of group 0 (Gamma): ")
    assert "of the step was taken" in reason
    assert len([r for r in caplog.records if "of the step was taken" in r.getMessage()]) == 1
    first = 0.9 * 2.1 / 10  # of the way to the boundary, and of the velocity
    second = 0.9 * 0.21 / (10 + 0.5 * 10 * first)
    velocity = opt.state[member.point]["velocity"]
    torch.testing.assert_close(velocity, second * t(0.0, -10 - 0.5 * 10 * first), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    a, b = gamma(), gamma()
    opt = ng.MirrorDescent([a, b], lr=0.1, momentum=0.9)
    trained([a, b], opt, 1)
    before = copy.deepcopy((a.state_dict(), b.state_dict(), opt.state_dict()))
    loss(a).backward()
    b.point.grad = t(bad, 0.0)
    with pytest.raises(NonFiniteError, match=r"the gradient of member 1 of group 0 \(Gamma\) holds NaN or infinity"):
        opt.step()
    _same(before, (a.state_dict(), b.state_dict(), opt.state_dict()))


def test_a_first_step_that_fails_leaves_no_trace_and_an_optimizer_is_not_copied() -> None:
    member = gamma()
    opt = ng.MirrorDescent([member], momentum=0.9)
    before = copy.deepcopy(opt.state_dict())
    member.point.grad = t(float("nan"), 0.0)
    with pytest.raises(NonFiniteError):
        opt.step()
    _same(before, opt.state_dict())
    with pytest.raises(TypeError, match="an optimizer is not copied: copy the members"):
        copy.deepcopy(opt)


def test_a_forbidden_step_changes_nothing() -> None:
    a, b = gamma(CHARTS[1]), gamma(CHARTS[1])
    opt = ng.MirrorDescent([a, b], lr=1.0, boundary=Forbid())
    before = copy.deepcopy((a.state_dict(), b.state_dict()))
    a.point.grad, b.point.grad = t(0.01, 0.01), t(0.0, -10.0)
    with pytest.raises(DomainError, match=r"η of Gamma.*must be below 0"):
        opt.step()
    _same(before, (a.state_dict(), b.state_dict()))


def test_bad_arguments_are_refused_by_name() -> None:
    for wrong in (-0.1, float("nan"), "fast"):
        with pytest.raises(ValueError, match=r"lr=.* must be a finite number, at least 0"):
            ng.MirrorDescent([gamma()], lr=wrong)  # type: ignore[arg-type]
    for wrong in (1.0, -0.1, True):
        with pytest.raises(ValueError, match=r"momentum=.* must be at least 0 and below 1"):
            ng.MirrorDescent([gamma()], momentum=wrong)
    with pytest.raises(TypeError, match=r"trains members of families, got a tensor of shape \(2,\): wrap it"):
        ng.MirrorDescent([gamma().point])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"trains members of families, got Linear"):
        ng.MirrorDescent([{"params": [nn.Linear(1, 1)]}])
    with pytest.raises(
        TypeError, match="descent must be mirror_step, natural_step, or a function as they are, got None"
    ):
        ng.MirrorDescent([gamma()], descent=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="boundary must be a natgrad Boundary"):
        ng.MirrorDescent([gamma()], boundary=0.9)  # type: ignore[arg-type]
    opt = ng.MirrorDescent([gamma()])
    opt.param_groups[0]["lr"] = float("inf")
    with pytest.raises(ValueError, match="lr=inf must be a finite number"):
        opt.step()


def test_a_member_outside_its_family_is_not_made() -> None:
    with pytest.raises(DomainError, match=r"η of Gamma.*must be below 0"):
        Member(ng.families.Gamma(), t(1.2, 2.1))
    with pytest.raises(DomainError, match=r"ξ of Bernoulli.*must be below 1"):
        Member(ng.families.Bernoulli(), t(1.5)[0], MeanChart())
    with pytest.raises(TypeError, match="family must be a natgrad ExponentialFamily"):
        Member(ng.Gaussian(), t(0.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="chart must be a natgrad Chart, got the class MeanChart"):
        Member(ng.families.Gamma(), t(1.2, -2.1), MeanChart)  # type: ignore[arg-type]


def _same(before: Any, after: Any) -> None:
    """Equal in every number, through nested containers."""
    if isinstance(before, Tensor):
        assert torch.equal(before, after)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            _same(before[key], after[key])
    elif isinstance(before, (tuple, list)):
        for one, other in zip(before, after, strict=True):
            _same(one, other)
    else:
        assert before == after
