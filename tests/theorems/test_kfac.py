"""What the library promises of K-FAC, one theorem each; its invariance is in test_metrics_and_steps.py."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests import kronecker_oracle, oracle
from tests.golden import agrees, golden, golden_mlp
from tests.invariance.reference import TASKS
from tests.optim.tasks import Task, seeded, silent, task
from tests.pulled import close, covered, normal, oracle_rows, random_roots, rows
from tests.zoo import Problem, mlp


def root(h: Tensor) -> Tensor:
    """s [k n d] with Σ_k s sᵀ = h [n d d]."""
    values, vectors = torch.linalg.eigh(h)
    return (vectors * values.clamp(min=0).sqrt()[:, None]).permute(2, 0, 1)


def textbook(model: nn.Module, x: Tensor, h: Tensor) -> list[kronecker_oracle.Layer]:
    """Every layer's a and g, by the oracle, for a metric h [n d d] on the outputs."""
    with silent(model):
        return kronecker_oracle.layers(model, x, root(h).reshape(-1, *model(x).shape))


def dense(found: list[kronecker_oracle.Layer], size: int) -> Tensor:
    """S ⊗ A in every layer."""
    return kronecker_oracle.kfac(found, "expand", torch.zeros(size, size, dtype=torch.float64))


def test_kfac_of_fully_connected_layers_has_the_golden_factors() -> None:
    model, x, _ = golden_mlp()
    G = ng.Kronecker(strict=True).estimate(ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1))))
    case = golden("mlp.kfac.factors")
    for key, got in zip(("G1", "G2", "A0", "A1"), (*G.left, *G.right), strict=True):
        agrees(case, got[0], key)


def test_kfac_trains_with_averaged_factors_a_cached_inverse_damping_and_momentum() -> None:
    """S and A every second step, averaged; inverses every fourth; m ← μm + (S + √λ/π)⁻¹∇(A + π√λ)⁻¹."""
    of, (lr, λ, μ, β) = task("coins"), (0.2, 0.05, 0.9, 0.8)
    options: dict[str, Any] = {"metric_every": 2, "inverse_every": 4, "decay": β, "step": ng.KLClip(1e9)}
    opt = ng.KFAC(of.model, of.kind.metric, lr=lr, damping=λ, momentum=μ, early=False, **options)
    θ, m = of.theta(), torch.zeros(17, dtype=torch.float64)
    factors: list[tuple[Tensor, Tensor]] = []
    inverse, weight = torch.empty(0), 0.0
    for step in range(9):
        if step % 2 == 0:
            found = _layers(of)
            fresh = [layer.factors("expand") for layer in found]
            weight = β * weight + (1 - β)
            part = (1 - β) / weight
            factors = [
                (S + part * (S_new - S), A + part * (A_new - A))
                for (S, A), (S_new, A_new) in zip(factors or fresh, fresh, strict=True)
            ]
            indices = [layer.index for layer in found]
        if step % 4 == 0:
            inverse = _inverse(factors, indices, λ)
        m = μ * m + inverse @ of.gradient()
        θ = θ - lr * m
        of.step(opt)
        close(of.theta(), θ, 1e-9)


def _layers(of: Task) -> list[kronecker_oracle.Layer]:
    with silent(of.model):
        h = of.kind.h(of.model(of.x))
    return textbook(of.model, of.x, h)


def _inverse(factors: list[tuple[Tensor, Tensor]], indices: list[Tensor], λ: float) -> Tensor:
    out = torch.zeros(17, 17, dtype=torch.float64)
    for (S, A), index in zip(factors, indices, strict=True):
        π = math.sqrt(float(A.diagonal().mean() / S.diagonal().mean()))
        left, right = (F_ + c * math.sqrt(λ) * torch.eye(len(F_), dtype=F_.dtype) for F_, c in ((S, 1 / π), (A, π)))
        at = index.reshape(-1)
        out[at[:, None], at] = torch.kron(torch.linalg.inv(left), torch.linalg.inv(right))
    return out


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"stride": 2, "padding": 1, "groups": 2}],
    ids=str,
)
def test_kfac_of_convolutions_is_that_of_their_patches_with_the_number_of_positions(options: dict[str, Any]) -> None:
    conv = seeded(lambda: nn.Conv2d(2, 4, 2, **options).double())
    x = normal(5, 2, 5, 5)
    T = conv(x).shape[2:].numel()
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(4 * T, 2).double())
    problem = Problem(model, x)
    pb = ng.pullback(model, x, ng.Euclidean())
    assert covered(pb) == set(problem.parameters())
    h = oracle.euclidean(problem.outputs())
    G = ng.Kronecker(strict=True).estimate(pb)
    close(G.dense(), dense(textbook(model, x, h), pb.model.size))
    assert float(G.right[0][0][-1, -1]) == pytest.approx(1.0)  # A is a mean over |T|, and S a sum


class Last(nn.Module):
    """Two recurrent layers, both directions, and a linear layer on the last output."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.body, self.head = kind(2, 3, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 2] to [n 2]."""
        out: Tensor = self.head(self.body(x)[0][:, -1])
        return out


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_kfac_of_recurrent_networks_averages_inputs_and_sums_cotangents_over_time(
    kind: Callable[..., nn.RNNBase],
) -> None:
    problem = Problem(seeded(lambda: Last(kind).double()), normal(4, 5, 2))
    metric = random_roots(problem)
    pb = ng.pullback(problem.module, problem.x, metric)
    assert covered(pb) == set(problem.parameters())
    factors = list(pb.collect())
    close(rows(pb, factors), oracle_rows(problem, metric.s))  # so a and g are those of every time step
    G = ng.Kronecker(strict=True).estimate(pb)
    for block, f, S, A in zip(G.blocks, factors, G.left, G.right, strict=True):
        T = 1 if "head.weight" in block.names else 5
        assert f.a.shape[:2] == (4, T)
        counted = (f.g != 0).any(0).flatten(2).any(-1).double()  # [n r]: no cotangent comes to the others
        close(A, torch.einsum("nr,nrci,nrcj->cij", counted, f.a, f.a) / counted.sum())
        close(S, torch.einsum("knrco,knrcp->cop", f.g, f.g))


def rho(y: Tensor, y0: Tensor) -> Tensor:
    """A divergence with the Hessian 2 + y0²."""
    return ((1 + 0.5 * y0.square()) * (y - y0).square() + (y - y0) ** 3).sum()


def phi(y: Tensor) -> Tensor:
    """Convex."""
    return y.logsumexp(-1) + 0.1 * y.square().sum(-1)


METRICS: dict[str, tuple[ng.OutputMetric, Callable[[Tensor], Tensor]]] = {
    "Euclidean": (ng.Euclidean(), oracle.euclidean),
    "categorical": (ng.Fisher(ng.Categorical(axis=-1)), oracle.categorical),
    "Poisson": (ng.Fisher(ng.Poisson()), oracle.poisson),
    "Bregman": (ng.Bregman(phi), lambda y: oracle.hessian(phi, y)),
    "divergence": (ng.Divergence(rho), lambda y: oracle.divergence_hessian(rho, y)),
    "sampled": (ng.Sampled(ng.Divergence(rho), samples=20_000), lambda y: oracle.divergence_hessian(rho, y)),
    "sampled Fisher": (ng.Fisher(ng.Categorical(axis=-1), samples=20_000), oracle.categorical),
}


@pytest.mark.parametrize("name", METRICS)
def test_kfac_of_any_metric_on_the_outputs_exactly_or_by_covectors_whose_covariance_is_the_metric(name: str) -> None:
    metric, h = METRICS[name]
    model, x = seeded(lambda: mlp(3, 4, 3).double()), normal(6, 3)
    pb = ng.pullback(model, x, metric, generator=torch.Generator().manual_seed(0))
    G = ng.Kronecker(strict=True).estimate(pb).dense()
    expected = dense(textbook(model, x, h(model(x).detach())), pb.model.size)
    if "ampled" in name:
        assert float((G - expected).norm() / expected.norm()) < 5 / math.sqrt(20_000)
    else:
        close(G, expected)


@pytest.mark.parametrize("kind", TASKS)
def test_undamped_kfac_is_invariant_to_affine_bases_of_the_activations_and_damping_breaks_it(kind: str) -> None:
    of = TASKS[kind]

    def largest(damping: float) -> ng.invariance.Certificate:
        make = lambda model: ng.KFAC(model, ng.Euclidean(), lr=0.1, damping=damping)  # noqa: E731
        return ng.invariance.certify(make, of.model(), of.batch(), steps=3)

    exact, damped = largest(0.0), largest(0.1)
    assert exact.invariant, str(exact)
    assert exact.moved > 1e-2
    assert not damped.invariant


def test_gradient_descent_is_not_invariant() -> None:
    of = TASKS["mlp"]
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    assert not ng.invariance.certify(make, of.model(), of.batch(), steps=3, loss=F.mse_loss).invariant
