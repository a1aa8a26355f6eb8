"""Gradient flow in function space: lemma 1 of Bai, Rosenberg and Xu (2022)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.functionspace import gradient_flow
from tests.pulled import close, normal


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def half_mean(t: Tensor, y: Tensor) -> Tensor:
    return (y - t).square().sum() / (2 * len(y))


def test_a_model_that_can_move_every_output_goes_straight_to_the_targets() -> None:
    """P = 1: y(s) = t + e^−s (y(0) − t), whatever the network; the module itself stays."""
    model, x, t = wide(), normal(4, 2), normal(4, 1, seed=1)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    flow = gradient_flow(model, x, lambda y: half_mean(t, y), ng.Euclidean(), 1.5, points=2)
    decay = torch.exp(-flow.times)[:, None, None]
    close(flow.outputs, t + decay * (flow.outputs[0] - t), 1e-5)
    close(flow.losses, flow.losses[0] * torch.exp(-2 * flow.times), 1e-5)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    close(torch.func.functional_call(model, flow.params, (x,)), flow.outputs[-1])


def test_a_linear_model_follows_the_projection_of_the_gradient() -> None:
    """y(s) = y(0) − (1 − e^−s) P(y(0) − t), with P the projection onto the span of the inputs and 1."""
    model, x, t = nn.Linear(2, 1).double(), normal(9, 2), normal(9, 1, seed=1)
    flow = gradient_flow(model, x, lambda y: half_mean(t, y), ng.Euclidean(), 2.0, points=3)
    J = torch.cat([x, x.new_ones(9, 1)], 1)
    P = J @ torch.linalg.pinv(J)
    shares = (1 - torch.exp(-flow.times))[:, None, None]
    close(flow.outputs, flow.outputs[0] - shares * (P @ (flow.outputs[0] - t)), 1e-5)


@pytest.mark.parametrize("metric", [ng.Euclidean(), ng.Fisher(ng.Bernoulli())], ids=repr)
def test_the_path_of_functions_does_not_depend_on_the_parametrisation(metric: ng.OutputMetric) -> None:
    """Remark 2: the flow of the plain gradient does."""

    def f(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (p["w"] * x + p["b"]).tanh()

    def g(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return f({"w": p["w"] ** 3 + p["w"], "b": 5 * p["b"] + p["w"]}, x)

    other = {"w": torch.tensor([0.5], dtype=torch.float64), "b": torch.tensor([-0.1], dtype=torch.float64)}
    one = {"w": other["w"] ** 3 + other["w"], "b": 5 * other["b"] + other["w"]}
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    loss = lambda y: half_mean(x.square() / 2, y)  # noqa: E731
    flows = [gradient_flow(h, x, loss, metric, 0.4, points=2, params=p) for h, p in ((f, one), (g, other))]
    close(flows[0].outputs, flows[1].outputs, 1e-5)
    assert bool((flows[0].losses.diff() < 0).all())
    identity = [
        gradient_flow(h, x, loss, metric, 0.4, points=2, params=p, structure=ng.Diagonal(power=0.0))
        for h, p in ((f, one), (g, other))
    ]
    assert float((identity[0].outputs - identity[1].outputs).abs().max()) > 1e-3


def test_the_precision_follows_rtol() -> None:
    """θ = ln y with L = y on the line of positive y: y′ = −1, θ(s) = ln(y(0) − s), which ends at s = y(0)."""
    f = lambda p, x: p["θ"].exp()  # noqa: E731
    start = {"θ": torch.tensor([math.log(2.0)], dtype=torch.float64)}
    errors = []
    for rtol in (1e-3, 1e-7):
        flow = gradient_flow(f, None, lambda y: y.sum(), ng.Euclidean(), 1.5, points=2, rtol=rtol, params=start)
        errors.append(abs(float(flow.outputs[-1]) - 0.5))
    assert errors[0] < 1e-2
    assert errors[1] < 1e-6 < errors[0]
    with pytest.raises(ng.errors.NatgradError, match=r"has reached the time 0\..* of 1.5 after max_steps=1 steps"):
        gradient_flow(f, None, lambda y: y.sum(), ng.Euclidean(), 1.5, points=2, max_steps=1, params=start)


def test_a_loss_stands_for_its_metric() -> None:
    model, x, t = nn.Linear(2, 1).double(), normal(4, 2), normal(4, 1, seed=1)
    paths = [
        gradient_flow(model, x, lambda y: half_mean(t, y), metric, 0.5, points=2)
        for metric in (nn.MSELoss(), ng.Fisher(ng.Gaussian(scale=0.5**0.5)))
    ]
    close(paths[0].outputs, paths[1].outputs)


@pytest.mark.parametrize("time", [0.0, math.inf, math.nan])
def test_wrong_arguments_are_named(time: float) -> None:
    with pytest.raises(ValueError, match="needs a finite time > 0, points ≥ 2"):
        gradient_flow(nn.Linear(1, 1), torch.ones(1, 1), lambda y: y.sum(), ng.Euclidean(), time)
