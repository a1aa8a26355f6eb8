"""Derivatives in ``torch.inference_mode()`` are those outside of it, in every version of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, Uniform

import natgrad as ng
from natgrad.families import FromDistribution
from natgrad.step import christoffel
from tests.pulled import normal


def _cosh(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).cosh().sum(-1)


def _softmax_metric(y: Tensor, u: Tensor) -> Tensor:
    p = y.softmax(-1)
    return p * u - p * (p * u).sum(-1, keepdim=True)


def _gaussian(y: Tensor) -> Normal:
    return Normal(y[:, 0], y[:, 1].exp())


METRICS: dict[str, tuple[ng.OutputMetric, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "loss": (ng.LossHessian(_cosh), lambda y, u, t: (y - t).cosh() * u),
    "divergence": (ng.Divergence(lambda y, y0: _cosh(y, y0) - y.shape[-1]), lambda y, u, t: u),
    "convex function": (ng.Bregman(lambda y: y.logsumexp(-1)), lambda y, u, t: _softmax_metric(y, u)),
    "distribution": (
        ng.Fisher(FromDistribution(_gaussian)),
        lambda y, u, t: torch.stack([u[:, 0] * torch.exp(-2 * y[:, 1]), 2 * u[:, 1]], -1),
    ),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_are_derivatives(name: str, inside: bool) -> None:
    metric, expected = METRICS[name]
    y, u, t = (normal(5, 2, seed=seed) for seed in range(3))
    with torch.inference_mode():
        given = [z.clone() if inside else z for z in (y, u, t)]
        found = metric.flat(given[0], given[1], given[2] if metric.needs_target else None)
    torch.testing.assert_close(found.clone(), expected(y, u, t))


def test_the_root_of_a_hessian() -> None:
    y, t = normal(5, 2), normal(5, 2, seed=1)
    with torch.inference_mode():
        s = ng.LossHessian(_cosh).root(y, t)
    torch.testing.assert_close(torch.einsum("kna,knb->nab", s, s).clone(), torch.diag_embed((y - t).cosh()))


def test_the_hessian_of_a_loss_of_the_whole_batch() -> None:
    y, u, t = (normal(5, 2, seed=seed) for seed in range(3))
    metric = ng.metric_of(lambda y, t: _cosh(y, t).mean())
    with torch.inference_mode():
        found = metric.flat(y, u, t)
    torch.testing.assert_close(found.clone(), (y - t).cosh() * u)


def test_a_support_that_moves_is_refused() -> None:
    family = FromDistribution(lambda y: Uniform(torch.zeros(len(y)).double(), y[:, 0].exp()))
    with torch.inference_mode(), pytest.raises(ValueError, match="support of Uniform moves"):
        family.check(normal(4, 1))


class Squared(nn.Module):
    """y = θ²x, whose metric of one parameter is G = 4θ²·mean x², so Γ♭(v, v) = 4θv²·mean x²."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.square() * x


def _dense(model: nn.Module, x: Tensor, v: ng.Vector) -> Any:
    return ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).flat(v)


def _force(model: nn.Module, x: Tensor, v: ng.Vector) -> Any:
    return christoffel(ng.pullback(model, x, ng.Euclidean()), v)


@pytest.mark.parametrize(("of", "times"), [(_dense, 4 * 0.7**2 * 3), (_force, 4 * 0.7 * 9)])
def test_the_metric_and_the_force_of_a_model(of: Callable[..., Any], times: float) -> None:
    x = normal(6, 1)
    with torch.inference_mode():
        found = of(Squared(), x, ng.Vector({"theta": torch.tensor([3.0], dtype=torch.float64)}))["theta"]
    torch.testing.assert_close(found.clone(), times * x.square().mean().reshape(1))


def test_the_exact_products_of_a_step_rule() -> None:
    x, model = normal(6, 1), Squared()
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.SelfTuned(), damping=1.0)
    model(x).square().mean().backward()
    v = ng.Vector({"theta": torch.tensor([3.0], dtype=torch.float64)})
    with torch.inference_mode():
        found = opt.source.batch_queries.curvature([v], 1.0)
    torch.testing.assert_close(found.clone(), (4 * 0.7**2 * 9 * x.square().mean()).reshape(1, 1))


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker(), ng.Implicit()], ids=repr)
def test_what_needs_the_graph_of_a_pass_is_refused(structure: ng.structures.Structure) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), normal(5, 3)
    with (
        torch.inference_mode(),
        pytest.raises(ng.errors.IncompatibleError, match="the graph of a forward pass"),
    ):
        structure.estimate(ng.pullback(model, x, ng.Euclidean())).dense()
