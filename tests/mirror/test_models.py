"""Riemannian primal descent of a model, in the metric of its outputs, pulled back to its parameters."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.mirror import Doubling, PrimalDescent, PulledBack, Report
from natgrad.model import Model
from natgrad.structures import Structure
from tests.golden import tensor
from tests.mirror.cases import close

STRUCTURES = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker(), ng.Kernel()]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
def test_a_step_of_a_model_is_its_natural_gradient_in_every_structure(structure: Structure) -> None:
    model, x, t = _classifier()
    g = PulledBack(model, x, ng.Fisher(ng.Categorical()), structure, damping=0.1)
    loss = partial(_cross_entropy, t)
    v = ng.natural_gradient(model, x, loss, ng.Fisher(ng.Categorical()), structure=structure, damping=0.1)
    before = [p.clone() for p in model.parameters()]
    descent = PrimalDescent(g, lipschitz=4.0)
    close(descent.grad(g.objective(loss), g.start), g.start - v.flatten() / 4)
    ω = ng.differential(model, loss(model(x)))
    close(descent.prog(g.objective(loss), g.start), ω @ v / 8)
    close(g.at(g.start).flat(v.flatten()), ω.flatten())  # λ is part of the metric
    close(g.at(g.start).dense() @ v.flatten(), ω.flatten())
    trace = descent.run(g.objective(loss), g.start, steps=3)
    assert trace.violations == ()
    assert all(bool((p == q).all()) for p, q in zip(before, model.parameters(), strict=True))
    close(g.parameters(trace.point)["0.weight"].reshape(-1), trace.point[:8])


def _cross_entropy(t: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, t)


def _classifier() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, torch.randn(12, 2).double(), torch.randint(3, (12,))


def test_logistic_regression_meets_lemma_16_in_the_fisher_metric() -> None:
    """Linear logits: the Hessian of the loss is the Fisher metric; with damping it is at most 2G + λ along a step."""
    torch.manual_seed(1)
    model, x, t = nn.Linear(2, 3).double(), torch.randn(30, 2).double(), torch.randint(3, (30,))
    g = PulledBack(model, x, ng.Fisher(ng.Categorical()), damping=0.05)
    f = g.objective(lambda y: nn.functional.cross_entropy(y, t))
    x_star = PrimalDescent(g, 1.0, policy=Doubling()).run(f, g.start, steps=100).point
    trace = PrimalDescent(g, 1.0, policy=Doubling()).run(f, g.start, steps=10)
    assert float(trace.values[-1] - f(x_star)) <= float(trace.bound(x_star))
    assert trace.violations == ()


def test_a_pure_function_is_descended_like_a_module() -> None:
    """Grosse (2021), section 1: Gauss–Newton on Rosenbrock's z, with CL = 1 for ½‖z‖², arrives in exactly two steps."""
    z = lambda θ, _: torch.stack([1 - θ["x"][0], 10 * (θ["x"][1] - θ["x"][0] ** 2)])[None]  # noqa: E731
    model = Model.of(z, {"x": torch.tensor([-1.2, 1.0], dtype=torch.float64)})
    g = PulledBack(model, None, ng.Euclidean())
    trace = PrimalDescent(g, 1.0, policy=Report()).run(g.objective(lambda y: (y**2).sum() / 2), g.start, steps=2)
    close(torch.stack(trace.points), tensor([[-1.2, 1.0], [1.0, -3.84], [1.0, 1.0]]), 1e-9)
    assert [violation.step for violation in trace.violations] == [0]  # the valley is crossed first


def test_a_point_of_a_model_is_its_flattened_parameters() -> None:
    model, x, _ = _classifier()
    descent = PrimalDescent(PulledBack(model, x, ng.Euclidean()), 1.0)
    with pytest.raises(ValueError, match=r"a point of this model is θ flattened, \[27\], got shape \(3,\)"):
        descent.grad(torch.sum, torch.zeros(3))
    with pytest.raises(TypeError, match="metric must be a natgrad OutputMetric"):
        PulledBack(model, x, ng.Categorical())  # type: ignore[arg-type]
