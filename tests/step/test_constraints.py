"""Constraints around step rules: parameters that stay in their domain."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import natgrad as ng
from tests import oracle
from tests.optim.tasks import Scalar, Task, task

RULES = {
    "fixed": ng.Fixed(),
    "trust_region": ng.TrustRegion(0.3, ng.Backtracking()),
    "levenberg_marquardt": ng.LevenbergMarquardt(),
}
BOUNDS = {"0.weight": (0.1, 0.7), "2.bias": (-0.3, -0.1)}


def _ball(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first weight on or in the ball of radius 0.7."""
    w = params["0.weight"]
    return {**params, "0.weight": w * (0.7 / w.norm()).clamp(max=1.0)}


def _positive_in_place(params: dict[str, Tensor]) -> dict[str, Tensor]:
    params["0.weight"].clamp_(min=0.1)
    return params


def _inside_box(model: torch.nn.Module) -> bool:
    named = dict(model.named_parameters())
    return all(bool(((named[n] >= low) & (named[n] <= high)).all()) for n, (low, high) in BOUNDS.items())


CONSTRAINTS: dict[str, tuple[ng.step.Constraint, Callable[[torch.nn.Module], bool], str]] = {
    "clipping": (ng.Clipping(BOUNDS), _inside_box, "clipped: 0.weight"),
    "ball": (
        ng.BackProjection(_ball),
        lambda m: float(m.get_parameter("0.weight").detach().norm()) <= 0.7 * (1 + 1e-15),
        "projected back: 0.weight",
    ),
    "in_place": (
        ng.BackProjection(_positive_in_place),
        lambda m: bool((m.get_parameter("0.weight") >= 0.1).all()),
        "projected back: 0.weight",
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.2, "momentum": 0.5}], ids=["plain", "decay"])
def test_iterates_stay_in_the_domain(rule: str, name: str, options: dict[str, Any]) -> None:
    constraint, inside, reason = CONSTRAINTS[name]
    of = task("coins")
    opt = of.optimizer(step=ng.Constrained(RULES[rule], constraint), damping=1e-2, **options)
    reasons = []
    for _ in range(8):
        opt.step(of.closure(opt))
        assert opt.last is not None
        assert inside(of.model) or not opt.last.accepted
        reasons.append(opt.last.reason)
    assert any(reason in r for r in reasons)


def test_clipping_is_the_clamp_of_the_free_step() -> None:
    free, clipped = task(), task()
    free.step(free.optimizer(damping=1e-2, weight_decay=0.1))
    opt = clipped.optimizer(damping=1e-2, weight_decay=0.1, step=ng.Constrained(ng.Fixed(), ng.Clipping(BOUNDS)))
    clipped.step(opt)
    expected = {name: p.detach() for name, p in free.model.named_parameters()}
    for name, (low, high) in BOUNDS.items():
        expected[name] = expected[name].clamp(low, high)
    for name, p in clipped.model.named_parameters():
        assert torch.equal(p.detach(), expected[name])


def test_a_step_inside_the_domain_is_left_alone() -> None:
    free, wide = task(), task()
    free.step(free.optimizer(damping=1e-2))
    opt = wide.optimizer(damping=1e-2, step=ng.Constrained(ng.Fixed(), ng.Clipping({"0.weight": (-1e9, 1e9)})))
    wide.step(opt)
    assert torch.equal(free.theta(), wide.theta())
    assert opt.last is not None
    assert opt.last.reason == ""


def test_two_constraints_hold_together() -> None:
    of = task()
    inner = ng.Constrained(ng.Fixed(), ng.Clipping({"2.bias": (0.1, 0.3)}))
    opt = of.optimizer(step=ng.Constrained(inner, ng.Clipping({"0.weight": (0.1, 0.3)})), weight_decay=0.1)
    for _ in range(5):
        of.step(opt)
        for name in ("2.bias", "0.weight"):
            p = of.model.get_parameter(name).detach()
            assert bool(((p >= 0.1) & (p <= 0.3)).all())
    assert opt.last is not None
    assert opt.last.reason.startswith("clipped: 2.bias; clipped: 0.weight")


def _quartic(params: Mapping[str, Tensor]) -> Tensor:
    return params["0.weight"].pow(4).sum()


@pytest.mark.parametrize("weight", [0.5, 4.0])
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_a_penalty_adds_its_differential_before_the_metric_acts(weight: float, kind: str) -> None:
    """θ − lr (G + λ)⁻¹(ω + w dq)."""
    of = task(kind)
    dq = {name: torch.zeros_like(p) for name, p in of.model.named_parameters()}
    dq["0.weight"] = 4 * of.model.get_parameter("0.weight").detach() ** 3
    expected = of.theta() - 0.3 * oracle.damped(of.metric(), of.gradient() + weight * oracle.flatten(dq.values()), 1e-2)
    of.step(of.optimizer(step=ng.Constrained(ng.Fixed(), ng.Penalty(_quartic, weight)), lr=0.3, damping=1e-2))
    torch.testing.assert_close(of.theta(), expected, rtol=1e-10, atol=1e-12)


def test_with_levenberg_marquardt_the_penalised_loss_never_rises() -> None:
    of = task()
    rule = ng.Constrained(ng.LevenbergMarquardt(), ng.Penalty(_quartic, 3.0))
    opt = of.optimizer(step=rule, damping=1e-3)

    def penalised() -> float:
        with torch.no_grad():
            return float(of.loss() + 3.0 * _quartic(dict(of.model.named_parameters())))

    plain, totals = [], [penalised()]
    for _ in range(15):
        plain.append(float(opt.step(of.closure(opt)).detach()))
        totals.append(penalised())
    assert all(b <= a for a, b in pairwise(totals))
    assert any(b > a for a, b in pairwise(plain))  # it is the sum that descends


def test_the_ratio_is_of_the_penalised_loss() -> None:
    """L = θ²/2 and q = θ²/2 with G = 1: δ = −(1 + w)θ, actual/predicted = 2 − (1 + w)."""
    model = Scalar()
    rule = ng.Constrained(ng.LevenbergMarquardt(), ng.Penalty(lambda p: 0.5 * p["value"].square().sum(), 0.25))
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=rule, damping=1e-9)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * model().square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(0.75, abs=1e-7)
    assert model.value.item() == pytest.approx(-0.25, abs=1e-7)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_bounds_that_hold_nothing_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"the bounds of w must satisfy low < high"):
        ng.Clipping({"w": bounds})


def _not_one_number(params: Mapping[str, Tensor]) -> Tensor:
    return params["0.weight"]


REFUSED: list[tuple[ng.step.Constraint, str]] = [
    (ng.Clipping({"wieght": (0.0, 1.0)}), "Clipping names wieght, and the parameters are"),
    (ng.BackProjection(lambda p: {"0.weight": p["0.weight"]}), "BackProjection must return all parameters"),
    (ng.BackProjection(lambda p: {**p, "more": p["0.weight"]}), "BackProjection must return all parameters"),
    (ng.Penalty(_not_one_number), "one number"),
]


@pytest.mark.parametrize(("constraint", "message"), REFUSED)
@pytest.mark.parametrize("rule", RULES)
def test_wrong_constraints_are_refused_and_change_nothing(
    constraint: ng.step.Constraint, message: str, rule: str
) -> None:
    of: Task = task()
    opt = of.optimizer(step=ng.Constrained(RULES[rule], constraint), momentum=0.9, weight_decay=0.1)
    before = of.theta()
    with pytest.raises(ValueError, match=message):
        opt.step(of.closure(opt))
    assert torch.equal(of.theta(), before)
    assert not any("momentum" in of_param for of_param in opt.state.values())
    assert opt.tracker.step == 0


def test_a_penalised_loss_never_rises_where_a_decayed_step_lands() -> None:
    of = task("coins")

    def penalty(params: Mapping[str, Tensor]) -> Tensor:
        return (params["0.weight"] - 3.0).square().sum()  # the decay pulls the other way

    rule = ng.Constrained(ng.LevenbergMarquardt(), ng.Penalty(penalty, weight=0.5))
    opt = of.optimizer(step=rule, damping=1e-2, weight_decay=0.5)
    values, accepted = [], 0
    for _ in range(10):
        with torch.no_grad():
            values.append(float(of.loss() + 0.5 * penalty(dict(of.model.named_parameters()))))
        opt.step(of.closure(opt))
        accepted += opt.last is not None and opt.last.accepted
    assert all(b <= a for a, b in pairwise(values))
    assert accepted > 0


@pytest.mark.parametrize("rule", [ng.Spring(), ng.LevenbergMarquardt(), ng.GeodesicSearch(), ng.GridSearch()])
def test_least_squares_does_not_leave_a_penalty_out(rule: ng.step.StepRule) -> None:
    """Its steps are made of residuals: a penalty that they ignore is refused, and nothing changes."""
    x = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]
    model = torch.nn.Linear(1, 1).double()
    before = [p.detach().clone() for p in model.parameters()]
    penalty = ng.Penalty(lambda params: torch.stack([p.square().sum() for p in params.values()]).sum(), 3.0)
    residuals = ng.Residuals(lambda net, x: net(x) - 2 * x - 1, x)
    fit = ng.LeastSquares(residuals, model, step=ng.Constrained(rule, penalty))
    with pytest.raises(ng.errors.IncompatibleError, match="Penalty does not work with LeastSquares"):
        fit.solve(max_steps=20)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
