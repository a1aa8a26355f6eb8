"""Levenberg–Marquardt: the damping follows how well the quadratic model predicts the loss."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests import oracle
from tests.optim.tasks import Rosenbrock, Scalar, half_square, seeded, task


def _bowl(curvature: float, **options: Any) -> tuple[Scalar, ng.NaturalGradient, Callable[[], Tensor]]:
    """L = ½c θ² with G = 1: at λ = 0, δ = −cθ, the model predicts −½c²θ², the loss changes by ½c(c² − 2c)θ²."""
    model = Scalar()
    rule = options.pop("step", ng.LevenbergMarquardt())
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=rule, **options)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * curvature * model().square().sum()
        loss.backward()
        return loss

    return model, opt, closure


@pytest.mark.parametrize("damping", [1e-9, 1e-3, 0.1, 10.0])
def test_the_ratio_is_one_where_the_quadratic_model_is_exact_and_the_damping_falls(damping: float) -> None:
    x = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = seeded(lambda: nn.Linear(3, 2).double())
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.LevenbergMarquardt(factor=3.0), damping=damping)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = half_square(model(x), x[:, :2] ** 2)
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(1.0, rel=1e-8)
    assert opt.last.damping == pytest.approx(damping / 3, rel=1e-12)
    assert opt.param_groups[0]["damping"] == opt.last.damping


@pytest.mark.parametrize(
    ("curvature", "times"),
    [(1.0, 1 / 2), (1.2, 1 / 2), (1.26, 1.0), (1.5, 1.0), (1.74, 1.0), (1.76, 2.0), (1.9, 2.0)],
)
def test_the_damping_falls_stays_or_rises_with_the_ratio(curvature: float, times: float) -> None:
    λ = 1e-9
    model, opt, closure = _bowl(curvature, damping=λ)
    opt.step(closure)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(2 - curvature, abs=1e-7)
    assert opt.last.damping == pytest.approx(times * λ, rel=1e-12)
    assert model.value.item() == pytest.approx(1 - curvature / (1 + λ), abs=1e-12)


def test_a_step_that_raises_the_loss_is_tried_again_with_four_times_the_damping() -> None:
    model, opt, closure = _bowl(2.5, damping=0.1)  # δ = −2.5/1.1 overshoots by more than twice, −2.5/1.4 does not
    opt.step(closure)
    s = 2.5 / 1.4
    ratio = 1.25 * ((1 - s) ** 2 - 1) / (0.5 * s**2 - 2.5 * s)
    assert opt.last is not None
    assert model.value.item() == pytest.approx(1 - s, rel=1e-12)
    assert opt.last.ratio == pytest.approx(ratio, rel=1e-12)
    assert ratio < 0.25  # lower than ``poor``: taken, and the damping rises once more
    assert opt.last.damping == pytest.approx(0.8, rel=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_that_raises_the_loss_is_not_taken(weight_decay: float) -> None:
    rule = ng.LevenbergMarquardt(tries=1)
    model, opt, closure = _bowl(2.5, damping=0.1, step=rule, weight_decay=weight_decay, momentum=0.9)
    opt.step(closure)
    assert model.value.item() == 1.0
    assert model.value.grad is not None
    assert float(model.value.grad) == 2.5  # the gradient of the closure, not of the trial
    assert opt.last is not None
    assert not opt.last.accepted
    assert not opt.last.converged
    assert opt.last.reason == "no decrease in 1 tries"
    assert opt.param_groups[0]["damping"] == pytest.approx(0.4)


def test_a_refused_step_starts_the_momentum_anew_so_that_the_next_one_can_succeed() -> None:
    model, opt, closure = _bowl(1.0, damping=1e-9, momentum=0.9)
    opt.step(closure)  # to the minimum, with velocity 1
    values = []
    for _ in range(4):
        opt.step(closure)
        values.append(abs(model.value.item()))
    assert max(values) < 1e-8
    assert opt.last is not None
    assert opt.last.accepted


def test_it_converges_on_rosenbrock_and_the_loss_never_rises() -> None:
    model = Rosenbrock()
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.LevenbergMarquardt(), lr=0.5, damping=1.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model().square().sum()
        loss.backward()
        return loss

    assert not opt.step(closure).requires_grad  # float(…) would warn
    losses = [24.2, *(float(opt.step(closure)) for _ in range(60))]
    assert all(b <= a for a, b in pairwise(losses))
    torch.testing.assert_close(model.point.detach(), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "coins", "counts", "classes"])
def test_the_loss_never_rises(kind: str) -> None:
    of = task(kind)
    opt = of.optimizer(step=ng.LevenbergMarquardt(), damping=1e-4, lr=1.0)
    losses = [float(opt.step(of.closure(opt))) for _ in range(25)]
    assert all(b <= a for a, b in pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", ["regression", "coins", "classes"])
@pytest.mark.parametrize("weight_decay", [0.01, 0.5])
def test_the_loss_never_rises_with_weight_decay(kind: str, weight_decay: float) -> None:
    of = task(kind)
    opt = of.optimizer(step=ng.LevenbergMarquardt(), damping=1e-4, lr=1.0, weight_decay=weight_decay)
    losses, accepted = [], 0
    for _ in range(15):
        losses.append(float(opt.step(of.closure(opt))))
        accepted += opt.last is not None and opt.last.accepted
    assert all(b <= a for a, b in pairwise(losses))
    assert accepted > 0


def test_the_ratio_is_one_for_the_whole_way_to_where_a_decayed_step_lands() -> None:
    """L = ½θ² with G = 1 is its own quadratic model: θ′ = (1 − ½·0.4)·1 − ½/(1 + λ)."""
    model, opt, closure = _bowl(1.0, damping=0.25, lr=0.5, weight_decay=0.4)
    opt.step(closure)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(1.0, rel=1e-12)
    assert model.value.item() == pytest.approx(0.8 - 0.5 / 1.25, rel=1e-12)


def test_a_stationary_point_is_not_left_by_weight_decay() -> None:
    model, opt, closure = _bowl(1.0, damping=0.25, weight_decay=0.5)

    def shifted() -> Tensor:
        return closure() + 1e20  # next to which no change can be seen

    opt.step(shifted)
    assert opt.last is not None
    assert (opt.last.accepted, opt.last.reason) == (False, "stationary")
    assert model.value.item() == 1.0


def test_at_a_minimum_it_rests_with_a_finite_damping() -> None:
    x = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = seeded(lambda: nn.Linear(3, 2).double())
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.LevenbergMarquardt())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = half_square(model(x), x[:, :2] ** 2)
        loss.backward()
        return loss

    for _ in range(10):
        opt.step(closure)
    rest = oracle.flatten(model.parameters())
    for _ in range(150):
        opt.step(closure)
        assert opt.last is not None
        assert (opt.last.accepted, opt.last.reason) in ((True, ""), (True, "ftol"), (False, "stationary"))
    assert opt.last is not None
    assert (opt.last.accepted, opt.last.converged, opt.last.reason) == (False, True, "stationary")
    torch.testing.assert_close(oracle.flatten(model.parameters()), rest, rtol=0, atol=1e-12)
    assert opt.param_groups[0]["damping"] <= 1.0


def test_a_loss_that_is_never_finite_keeps_the_damping_finite() -> None:
    model = Scalar()
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.LevenbergMarquardt())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model().sum()
        loss.backward()
        return loss if float(loss.detach()) == 1.0 else loss * math.nan

    for _ in range(30):
        opt.step(closure)
    assert model.value.item() == 1.0
    assert opt.param_groups[0]["damping"] <= 1e12


def test_a_closure_is_required_and_must_return_the_loss() -> None:
    of = task()
    opt = of.optimizer(step=ng.LevenbergMarquardt())
    assert opt.needs_closure
    before = of.theta()
    of.closure(opt)()
    with pytest.raises(TypeError, match=r"LevenbergMarquardt evaluates the loss again: call opt.step\(closure\)"):
        opt.step()
    with pytest.raises(TypeError, match="closure must return the loss"):
        opt.step(lambda: [of.closure(opt)(), None][1])
    assert torch.equal(of.theta(), before)


@pytest.mark.parametrize(
    "constants", [{"poor": 0.8}, {"good": 1.0}, {"poor": 0.0}, {"factor": 1.0}, {"tries": 0}, {"factor": math.nan}]
)
def test_impossible_constants_are_refused(constants: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="0 < poor < good < 1, factor > 1 and tries ≥ 1"):
        ng.LevenbergMarquardt(**constants)


class Decay(nn.Module):
    """a·exp(−b·x), with b in units of its own."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(2.0 / unit, dtype=torch.float64))
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        return self.a * torch.exp(-self.unit * self.b * x)


def _fit(model: nn.Module, x: Tensor, y: Tensor, steps: int, **options: Any) -> ng.NaturalGradient:
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.LevenbergMarquardt(**options), damping=1e-2)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = half_square(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)
    return opt


@pytest.mark.parametrize("unit", [1e-7, 1e7])
def test_steps_do_not_change_with_the_units_of_the_parameters(unit: float) -> None:
    """At b in units of 1e±7, G has a condition number of 1e14 and more, and 1 to 100 at unit diagonal."""
    x = torch.linspace(0, 3, 12, dtype=torch.float64).unsqueeze(1)
    y = torch.exp(-0.5 * x) + 0.05 * torch.sin(20 * x)
    ours, plain = Decay(unit), Decay(1.0)
    for model in (ours, plain):
        opt = _fit(model, x, y, 5, scaled=True)
    assert ours.b.item() * unit == pytest.approx(plain.b.item(), rel=1e-9)
    assert ours.a.item() == pytest.approx(plain.a.item(), rel=1e-9)
    opt = _fit(ours, x, y, 15, scaled=True)
    assert opt.last is not None
    assert opt.last.converged


def test_the_damping_rises_where_the_metric_is_singular() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1.0, 3.0], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.p[0] + self.p[1]) * x

    x = torch.linspace(0, 3, 12, dtype=torch.float64).unsqueeze(1)
    model = Sum()
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.LevenbergMarquardt(), damping=0.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = half_square(model(x), 7 * x)
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.last is not None
    assert opt.last.accepted
    assert model.p.detach().sum().item() == pytest.approx(7, rel=1e-9)
    assert model.p.detach().diff().item() == pytest.approx(2, abs=1e-2)  # nothing moves along the null direction


def test_a_step_that_the_damping_makes_short_is_not_taken_for_the_end() -> None:
    model, opt, closure = _bowl(1.0, damping=1e17)
    opt.step(closure)
    assert opt.last is not None
    assert not opt.last.converged
    assert opt.last.reason == "no decrease in steps that are longer than rounding"
    for _ in range(100):
        opt.step(closure)
    assert abs(model.value.item()) < 1e-6


@pytest.mark.parametrize(("rule", "constants"), [("ftol", {"xtol": 0.0}), ("xtol", {"ftol": 0.0, "xtol": 1e-4})])
def test_a_step_that_converges_is_taken_and_names_its_rule(rule: str, constants: dict[str, Any]) -> None:
    x = torch.linspace(0, 3, 12, dtype=torch.float64).unsqueeze(1)
    model = Decay(1.0)
    seen = []
    for _ in range(14):
        last = _fit(model, x, torch.exp(-0.5 * x) + 0.05 * torch.sin(20 * x), 1, **constants).last
        assert last is not None
        seen.append((last.accepted, last.converged, last.reason))
    assert (True, True, rule) in seen
    assert (True, False, "") in seen
