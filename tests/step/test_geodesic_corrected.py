"""The geodesic correction: the exponential map to second order."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import natgrad as ng
from tests import oracle
from tests.optim.tasks import task
from tests.step.test_geodesic import CURVES


def _error(name: str, ε: float, rule: ng.step.StepRule) -> float:
    """How far a step of length ε ends from the geodesic that starts with the same velocity."""
    curve = CURVES[name]
    model = curve.model()
    θ = oracle.flatten(model.parameters())
    opt = ng.NaturalGradient(model, curve.metric, step=rule, lr=ε, damping=0.0)
    v = torch.tensor(curve.v, dtype=torch.float64)
    model()
    model.get_parameter("point").grad = -(curve.G(θ) @ v)  # a loss with this differential has the step εv
    opt.step()
    assert opt.last is not None
    assert opt.last.reason == ""
    moved: Tensor = oracle.flatten(model.parameters())
    return float((moved - curve.exp(θ, ε * v)).norm())


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize(("rule", "order"), [(ng.Fixed(), 2), (ng.GeodesicCorrected(), 3)])
def test_the_corrected_step_is_a_geodesic_to_one_more_order(name: str, rule: ng.step.StepRule, order: int) -> None:
    if name == "rosenbrock" and order == 3:  # a parabola: the correction is the whole difference
        assert _error(name, 0.1, rule) < 1e-13
        return
    errors = [_error(name, ε, rule) for ε in (0.04, 0.02, 0.01)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


def test_a_correction_over_the_limit_is_not_applied_and_says_so() -> None:
    steps = {}
    for limit in (0.75, 0.01):
        curve = CURVES["polar"]
        model = curve.model()
        opt = ng.NaturalGradient(model, curve.metric, step=ng.GeodesicCorrected(limit), lr=0.2, damping=0.0)
        model().sum().backward()
        opt.step()
        assert opt.last is not None
        assert opt.last.accepted
        steps[limit] = (opt.last.reason, oracle.flatten(model.parameters()))
    plain = CURVES["polar"].model()
    opt = ng.NaturalGradient(plain, ng.Euclidean(), lr=0.2, damping=0.0)
    plain().sum().backward()
    opt.step()
    assert steps[0.75][0] == ""
    assert steps[0.01][0] == "correction over 0.01 of the step: not applied"
    assert torch.equal(steps[0.01][1], oracle.flatten(plain.parameters()))
    assert not torch.allclose(steps[0.75][1], steps[0.01][1], rtol=0, atol=1e-4)


def test_the_limit_compares_lengths_in_the_metric() -> None:
    """In polar coordinates −½Γ(w, w) = (½ r a², −r' a'/r), with length √(¼r²a⁴ + r'²a'²) against √(r'² + r²a'²)."""
    r, (dr, da), ε = 1.3, (-0.3, 0.7), 0.5
    correction = math.hypot(0.5 * r * (ε * da) ** 2, ε * dr * ε * da)
    length = math.hypot(ε * dr, ε * r * da)
    for limit, applied in ((1.01 * correction / length, True), (0.99 * correction / length, False)):
        curve = CURVES["polar"]
        model = curve.model()
        opt = ng.NaturalGradient(model, curve.metric, step=ng.GeodesicCorrected(limit), lr=ε, damping=0.0)
        model()
        model.get_parameter("point").grad = -torch.tensor([dr, r**2 * da], dtype=torch.float64)
        opt.step()
        assert opt.last is not None
        assert (opt.last.reason == "") == applied


def test_a_limit_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limit=…\) must be positive, got 0"):
        ng.GeodesicCorrected(0.0)


def _sampled_run(rule: ng.step.StepRule, steps: int) -> ng.NaturalGradient:
    of = task("classes")
    metric = ng.Fisher(ng.Categorical(), samples=2)
    generator = torch.Generator().manual_seed(3)
    opt = of.optimizer(metric=metric, step=rule, lr=0.1, damping=0.1, generator=generator)
    for _ in range(steps):
        of.step(opt)
    return opt


def test_the_correction_draws_nothing_from_the_stream_of_a_sampled_metric() -> None:
    corrected, plain = _sampled_run(ng.GeodesicCorrected(), 2), _sampled_run(ng.Fixed(), 2)
    assert torch.equal(corrected.tracker.generator.get_state(), plain.tracker.generator.get_state())
    first = [_sampled_run(rule, 1).tracker.average for rule in (ng.GeodesicCorrected(), ng.Fixed())]
    assert first[0] is not None
    assert first[1] is not None
    assert torch.equal(first[0].dense(), first[1].dense())


def test_the_next_gradient_is_solved_from_the_last_natural_gradient_and_not_from_the_correction() -> None:
    of, λ = task("regression"), 0.1
    opt = of.optimizer(step=ng.GeodesicCorrected(), solver=ng.CG(tol=1e-12), lr=0.5, damping=λ)
    v = oracle.damped(of.metric(), of.gradient(), λ)
    of.step(opt)
    assert opt.last is not None
    assert opt.last.reason == ""
    assert isinstance(opt.preconditioner.inverse, ng.operators.Inverse)
    torch.testing.assert_close(opt.preconditioner.inverse.tensors()["guess"], v, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(opt.last.displacement.flatten(), -0.5 * v, rtol=1e-4)  # it was corrected
