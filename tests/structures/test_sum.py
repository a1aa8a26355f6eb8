"""Sums of metrics: of the outputs in every structure, of operators in any, and of outputs and parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import DiagonalOperator, Operator, SumOperator
from natgrad.output import Sum
from natgrad.structures import Structure
from tests import oracle
from tests.output.table import close, normal

STRUCTURES: dict[str, Structure] = {
    "Dense": ng.Dense(),
    "BlockDense": ng.BlockDense(),
    "Diagonal": ng.Diagonal(),
    "Kernel": ng.Kernel(),
    "Implicit": ng.Implicit(),
    "Kronecker": ng.Kronecker(),
    "EigenKronecker": ng.EigenKronecker(),
    "LowRank": ng.LowRank(4),
}


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double(), normal(9, 2)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """[n o p], by torch."""
    θ = {name: p.detach() for name, p in model.named_parameters()}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(θ)
    return torch.cat([J[name].flatten(2) for name in θ], 2)


@pytest.mark.parametrize("damping", [0.2, ng.Relative(0.3)], ids=["number", "relative"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_sum_of_operators_is_the_sum_of_their_matrices(name: str, damping: float | ng.Relative) -> None:
    """With a metric on the parameters beside that of the outputs; λ is a number, or ε times the mean eigenvalue."""
    model, x = network()
    G = STRUCTURES[name].estimate(ng.pullback(model, x, ng.Fisher(ng.Categorical())))
    old = DiagonalOperator(G.layout, normal(G.layout.size).square())
    total = SumOperator((G, old), (1.0, 3.0))
    matrix = G.dense() + 3 * old.values.diag()
    close(total.dense(), matrix)
    close(total.diagonal(), matrix.diagonal())
    ω = G.layout.covector(normal(G.layout.size, seed=1))
    close(total.flat(G.layout.vector(ω.flatten())).flatten(), matrix @ ω.flatten())
    λ = damping if isinstance(damping, float) else 0.3 * float(matrix.trace()) / len(matrix)
    for solver in (ng.Cholesky(), ng.CG(tol=1e-13, max_steps=500), ng.Pinv()):
        close(ng.sharp(total, ω, solver, damping).flatten(), oracle.damped(matrix, ω.flatten(), λ), 1e-9)
    close(total.logdet(damping), torch.logdet(matrix + λ * torch.eye(len(matrix)).double()), 1e-9)


def test_a_step_of_elastic_weight_consolidation_minimises_its_quadratic_model() -> None:
    """½vᵀGv + (c/2)(θ + v − θ*)ᵀ diag(F)(θ + v − θ*) + ⟨ω, v⟩ has a slope of zero, by differentiation."""
    model, x = network()
    seen, metric, c, λ = normal(20, 2, seed=5), ng.Fisher(ng.Categorical()), 2.0, 1e-6
    G = ng.Dense().estimate(ng.pullback(model, x, metric))
    old = ng.Diagonal().estimate(ng.pullback(model, seen, metric))
    apart, slope = normal(G.layout.size, seed=2), normal(G.layout.size, seed=3)

    def textbook(inputs: Tensor) -> Tensor:
        J, p = jacobian(model, inputs), model(inputs).softmax(1).detach()
        h = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        return torch.einsum("nip,nij,njq->pq", J, h, J) / len(inputs)

    F = textbook(seen).diagonal()
    ω = G.layout.covector(slope + c * F * apart)
    v = -ng.sharp(SumOperator((G, old), (1.0, c)), ω, damping=λ).flatten()
    leaf = v.clone().requires_grad_()
    quadratic = 0.5 * leaf @ textbook(x) @ leaf + 0.5 * λ * leaf @ leaf + slope @ leaf
    (gradient,) = torch.autograd.grad(quadratic + 0.5 * c * (F * (apart + leaf).square()).sum(), leaf)
    close(gradient, torch.zeros_like(v), 1e-9)


def test_a_prior_is_a_head_that_returns_the_parameters() -> None:
    """J ⊕ √m·1: the metric of the loss plus m, inside an optimizer and in every structure that heads work in."""
    model, x = network()

    class Regularised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            θ = torch.cat([p.reshape(-1) for p in self.net.parameters()])
            return {"y": self.net(x), "prior": θ.expand(len(x), -1)}

    metric = ng.Heads({"y": ng.Euclidean(), "prior": ng.Euclidean()}, weights={"prior": 0.25})
    G = ng.Dense().estimate(ng.pullback(Regularised(), x, metric)).dense()
    J = jacobian(model, x)
    close(G, torch.einsum("nop,noq->pq", J, J) / len(x) + 0.25 * torch.eye(J.shape[2]).double())


SUMS: dict[str, tuple[Callable[[], ng.OutputMetric], list[float]]] = {
    "a + b": (lambda: ng.Euclidean() + ng.Fisher(ng.Bernoulli()), [1, 1]),
    "2a + b/2": (lambda: 2 * ng.Euclidean() + ng.Fisher(ng.Bernoulli()) * 0.5, [2, 0.5]),
    "b + (a + a)": (lambda: ng.Fisher(ng.Bernoulli()) + (ng.Euclidean() + ng.Euclidean()), [2, 1]),
    "3(a + b)": (lambda: 3.0 * (ng.Euclidean() + ng.Fisher(ng.Bernoulli())), [3, 3]),
    "sum()": (lambda: Sum((ng.Euclidean(), ng.Fisher(ng.Bernoulli())), (1.0, 4.0)), [1, 4]),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_sum_of_output_metrics_is_that_of_their_matrices(name: str) -> None:
    build, (a, b) = SUMS[name]
    metric, y, y0, u = build(), normal(4, 3), normal(4, 3, seed=1), normal(4, 3, seed=2)
    p = y.sigmoid()
    close(metric.flat(y, u), (a + b * p * (1 - p)) * u)
    root = metric.root(y).flatten(2)
    close(torch.einsum("kni,knj->nij", root, root), torch.diag_embed(a + b * p * (1 - p)))
    p0 = y0.sigmoid()
    kl = (p0 * (p0 / p).log() + (1 - p0) * ((1 - p0) / (1 - p)).log()).sum(1)
    close(metric.divergence(y, y0), a * 0.5 * (y - y0).square().sum(1) + b * kl)


def test_a_sampled_term_makes_a_sampled_sum() -> None:
    metric = 2 * ng.Euclidean() + ng.Fisher(ng.Bernoulli(), samples=3)
    assert not metric.exact
    assert metric.root(normal(4, 2)).shape == (5, 4, 2)
    assert metric.unsampled().exact
    coupled = ng.Sobolev(ng.Euclidean() + 2 * ng.Euclidean(), lengthscale=2.0)
    model, x = network()
    three = 3 * ng.Dense().estimate(ng.pullback(model, x, ng.Sobolev(lengthscale=2.0))).dense()
    close(ng.Dense().estimate(ng.pullback(model, x, coupled)).dense(), three)


def test_an_optimizer_takes_a_sum() -> None:
    model, x = network()
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()) + 0.1 * ng.Euclidean(), lr=0.1)
    before = model(x).detach()
    nn.functional.cross_entropy(model(x), torch.arange(9) % 2).backward()
    opt.step()
    assert bool((model(x) != before).all())


def test_what_cannot_be_added_is_refused() -> None:
    with pytest.raises(ValueError, match="the factor of a metric must be positive and finite, got -1"):
        -1 * ng.Euclidean()
    with pytest.raises(TypeError, match="cannot be added: a term is a metric of every pass on one output"):
        ng.Euclidean() + ng.metric_of(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"couples the examples, each its own way: add inside, Sobolev\(2 \* a \+ b\)"):
        (2 * ng.Sobolev()).coupling(torch.ones(2, 1), 2)
    model, x = network()
    G: Operator = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean()))
    other = ng.Dense().estimate(ng.pullback(nn.Linear(2, 2).double(), x, ng.Euclidean()))
    with pytest.raises(ValueError, match="metrics on the same parameters"):
        SumOperator((G, other))
    with pytest.raises(ValueError, match="2 parts and 1 weights"):
        SumOperator((G, G), (1.0,))
