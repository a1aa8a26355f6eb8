"""Kronecker(fit="kl"): the product that is nearest to the metric in KL divergence."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.operators import KroneckerOperator
from natgrad.pullback.nearest import RootCheck
from tests import kronecker_oracle, zoo
from tests.kronecker_oracle import Layer
from tests.optim.states import whole
from tests.pulled import Rooted, close, normal, pull, random_roots

Pair = tuple[Tensor, Tensor]
Damping = float | ng.Relative


def informed(G: KroneckerOperator, damping: Damping, solver: ng.solve.Solver | None = None) -> KroneckerOperator:
    """As the optimizer leaves a metric after a refresh."""
    return G.informed((solver or ng.Factored()).init(G, damping), damping)


def again(K: ng.Kronecker, pb: ng.Pullback, G: KroneckerOperator, damping: Damping) -> KroneckerOperator:
    """One step of the fixed point."""
    return K.estimate(pb, informed(G, damping))


# The oracle.


def damped(F: Tensor, other: Tensor, damping: Damping) -> Tensor:
    """F with the damping of a factor of F ⊗ other."""
    mean, of_other = F.trace() / len(F), other.trace() / len(other)
    λ = damping.epsilon * mean if isinstance(damping, ng.Relative) else (damping * mean / of_other).sqrt()
    return F + λ * torch.eye(len(F), dtype=F.dtype)


def nearest(layer: Layer, sharing: str, S: Tensor, A: Tensor, damping: Damping) -> Pair:
    """S ← Σ g gᵀ aᵀÃ⁻¹a/tr(AÃ⁻¹), A ← Σ a aᵀ gᵀS̃⁻¹g/tr(SS̃⁻¹), Ã and S̃ damped, position by position."""
    a, g = layer.a, layer.g
    if sharing == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
    S_inv, A_inv = torch.linalg.inv(damped(S, A, damping)), torch.linalg.inv(damped(A, S, damping))
    w = torch.einsum("nri,ij,nrj->nr", a, A_inv, a) / (A * A_inv).sum()
    v = torch.einsum("knro,op,knrp->nr", g, S_inv, g) / (S * S_inv).sum()
    S, A = torch.einsum("nr,knro,knrp->op", w, g, g), torch.einsum("nr,nri,nrj->ij", v, a, a)
    return S, torch.diag(torch.diag(A)) if layer.sparse else A


def grouped() -> zoo.Problem:
    layers = [nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)]
    return zoo.Case("grouped", lambda: zoo.Problem(nn.Sequential(*layers), normal(4, 4, 4, 4))).make()


def embedded() -> zoo.Problem:
    layers = [nn.Embedding(5, 3), nn.Linear(3, 2)]
    return zoo.Case("embedded", lambda: zoo.Problem(nn.Sequential(*layers), torch.randint(5, (6, 3)))).make()


NAMES = ["mlp_tanh", "sequence", "called_twice", "conv", "layer_norm", "grouped", "embedded", "frozen_bias"]


def problem_of(name: str) -> zoo.Problem:
    return {"grouped": grouped, "embedded": embedded}.get(name, lambda: zoo.case(name).make())()


@pytest.mark.parametrize("damping", [0.03, ng.Relative(0.1)], ids=["absolute", "relative"])
@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_the_fixed_point_is_that_of_the_definition(
    name: str, sharing: Any, power: float, damping: Damping
) -> None:
    problem = problem_of(name)
    roots = random_roots(problem)
    K = ng.Kronecker(sharing, fit="kl", power=power)
    pb = pull(problem, roots)
    first = K.estimate(pb)
    close(first.with_power(1.0).dense(), ng.Kronecker(sharing).estimate(pb).dense())  # there is no inverse yet
    if name in ("grouped", "layer_norm") and isinstance(damping, ng.Relative):
        return  # whose mean is over groups; the oracle has each by itself
    second = again(K, pb, first, damping)
    third = again(K, pb, second, damping).with_power(1.0).dense()
    expected = torch.zeros_like(third)
    for layer in kronecker_oracle.layers(problem.module, problem.x, roots.s, problem.output):
        S, A = layer.factors(sharing)
        for _ in range(2):
            S, A = nearest(layer, sharing, S, A, damping)
        at = layer.index.reshape(-1)
        expected[at[:, None], at] = torch.kron(S, A)
    close(third, expected, 1e-9)


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("name", ["sequence", "conv"])
def test_it_does_not_depend_on_the_chunks(name: str, dead: bool) -> None:
    problem = zoo.case(name).make()
    metric = random_roots(problem, k=5)
    K, pb, in_parts = ng.Kronecker(fit="kl"), pull(problem, metric), pull(problem, metric, memory=2**14)
    first = informed(K.estimate(pb), 0.1)
    if dead:  # inverses that are zero do not weigh
        for pair in first.halves:
            assert pair is not None
            torch._foreach_zero_(list(pair))
            first.root_check.look(pair)  # as a refresh does
        close(K.estimate(pb, first).dense(), ng.Kronecker().estimate(pb).dense())
    close(K.estimate(in_parts, first).dense(), K.estimate(pb, first).dense())
    asked = replace(first, root_check=RootCheck())  # nobody knows whether an inverse is zero
    assert torch.equal(K.estimate(pb, asked).dense(), K.estimate(pb, first).dense())


@pytest.mark.parametrize("solver", [ng.Factored(), ng.Cholesky()], ids=["Factored", "Cholesky"])
def test_every_solver_tells_the_next_estimate(solver: ng.solve.Solver) -> None:
    problem = zoo.case("mlp_tanh").make()
    K, pb = ng.Kronecker(fit="kl", power=0.5), pull(problem, random_roots(problem))
    G = K.estimate(pb)
    expected = K.estimate(pb, informed(G, ng.Relative(0.1)))
    close(K.estimate(pb, informed(G, ng.Relative(0.1), solver)).dense(), expected.dense())


# The fixed point.


def fixed_point(K: ng.Kronecker, pb: ng.Pullback, damping: Damping = 0.0, steps: int = 60) -> KroneckerOperator:
    G = K.estimate(pb)
    for _ in range(steps):
        new = K.estimate(pb, informed(G, damping))
        G = G.lerp(new, 0.5)
    return G


def divergence(layer: Layer, S: Tensor, A: Tensor) -> Tensor:
    """KL(N(0, G) ‖ N(0, S ⊗ A)) up to what does not depend on S and A."""
    inverse = torch.linalg.inv(torch.kron(S, A))
    rows = torch.einsum("knro,nri->knroi", layer.g, layer.a).flatten(3).flatten(0, 2)
    G = rows.T @ rows
    return 0.5 * ((inverse * G).sum() + len(A) * S.logdet() + len(S) * A.logdet())


@pytest.mark.parametrize("name", ["mlp_tanh", "sequence"])
def test_the_divergence_is_least_at_the_fixed_point(name: str) -> None:
    problem = zoo.case(name).make()
    assert isinstance(problem.x, Tensor)
    problem = replace(problem, x=normal(40, *problem.x.shape[1:], seed=5))  # enough for regular factors
    roots = Rooted(normal(3, *problem.outputs().shape))
    G = fixed_point(ng.Kronecker(fit="kl"), pull(problem, roots))
    mean = ng.Kronecker().estimate(pull(problem, roots))
    layers = kronecker_oracle.layers(problem.module, problem.x, roots.s, problem.output)
    for b, layer in enumerate(layers):
        S, A = (F[b][0].clone().requires_grad_() for F in (G.left, G.right))
        least = divergence(layer, S, A)
        for gradient, F in zip(torch.autograd.grad(least, (S, A)), (S, A), strict=True):
            close(gradient @ F.detach(), torch.zeros_like(gradient), 1e-8)
        S, A, least = S.detach(), A.detach(), least.detach()
        assert float(least) < float(divergence(layer, mean.left[b][0], mean.right[b][0])) - 1e-6
        for seed in range(4):
            δ = 0.1 * normal(*S.shape, seed=seed)
            assert float(divergence(layer, S + δ @ δ.T, A)) > float(least)


def test_a_kronecker_product_is_found() -> None:
    """Where inputs and cotangents are independent, G is one; from other factors too."""
    s, x = normal(6, 1, 4).expand(6, 30, 4), normal(30, 5, seed=1)
    pb = ng.pullback(nn.Linear(5, 4, bias=False).double(), x, Rooted(s))
    K = ng.Kronecker(fit="kl")
    exact = K.estimate(pb)
    start = replace(exact, left=(exact.left[0] + torch.eye(4),), right=(7 * torch.eye(5)[None].double(),))
    G = start
    for _ in range(80):
        G = G.lerp(K.estimate(pb, informed(G, 0.0)), 0.5)
    close(G.dense(), exact.dense(), 1e-6)
    close(again(K, pb, exact, 0.0).dense(), exact.dense(), 1e-6)


@pytest.mark.parametrize("damping", [1e-3, 10.0, ng.Relative(0.01), ng.Relative(1.0)])
def test_independent_inputs_and_cotangents_have_the_means_whatever_the_damping(damping: Damping) -> None:
    s, x = normal(2, 1, 4).expand(2, 30, 4), normal(30, 2, seed=1) @ normal(2, 5, seed=2)  # of low rank
    pb = ng.pullback(nn.Linear(5, 4, bias=False).double(), x, Rooted(s))
    K = ng.Kronecker(fit="kl")
    mean = K.estimate(pb)
    G = mean
    for _ in range(5):
        G = again(K, pb, G, damping)
    close(G.dense(), mean.dense(), 1e-9)


@pytest.mark.parametrize("kind", ["gradients", "layers", "own"])
def test_the_scale_stays_where_it_is_in_a_long_run(kind: str) -> None:
    """Inputs of rank two in a layer of nine: damping takes another part of A than of S."""
    torch.manual_seed(0)
    model = nn.Linear(9, 3, bias=False).double()
    structure = ng.Refresh(ng.Kronecker(fit="kl", power=0.5), 1, 0.5, inverse=1)
    opt = ng.NaturalGradient(
        model, METRICS[kind](), structure=structure, solver=ng.Factored(), lr=1e-9, damping=ng.Relative(0.1)
    )
    basis, ratios = normal(2, 9, seed=1), []
    for step in range(150):
        opt.zero_grad()
        noise = normal(8, 3, seed=1000 + step)
        (model(normal(8, 2, seed=step) @ basis) - noise).square().mean().backward()
        opt.step()
        G = opt.tracker.average
        assert isinstance(G, KroneckerOperator)
        ratios.append(float(G.left[0].diagonal(dim1=1, dim2=2).mean() / G.right[0].diagonal(dim1=1, dim2=2).mean()))
    assert all(1e-2 < ratio < 1e2 for ratio in ratios[20:])


@pytest.mark.parametrize("scales", [(1e3, 1.0), (1.0, 1e-3), (10.0, 1e2)])
def test_scales_of_inputs_and_of_the_metric_are_those_of_the_product(scales: tuple[float, float]) -> None:
    problem = zoo.case("linear").make()
    roots = random_roots(problem)
    assert isinstance(problem.x, Tensor)
    of_x, of_s = scales
    plain, scaled = pull(problem, roots), pull(replace(problem, x=of_x * problem.x), Rooted(of_s * roots.s))
    K, ε = ng.Kronecker(fit="kl", power=0.5), ng.Relative(0.01)
    G, H = K.estimate(plain), K.estimate(scaled)
    for _ in range(4):
        G, H = G.lerp(again(K, plain, G, ε), 0.3), H.lerp(again(K, scaled, H, ε), 0.3)
    close(H.with_power(1.0).dense() / (of_x * of_s) ** 2, G.with_power(1.0).dense(), 1e-9)


# Training.


def layers_of() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(seed: int) -> Tensor:
    return normal(8, 2, 3, 3, seed=seed)


def trained(
    metric: ng.OutputMetric, steps: int, every: int = 2, power: float = 0.5, **options: Any
) -> tuple[nn.Module, ng.NaturalGradient, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = layers_of().double()
    structure = ng.Refresh(ng.Kronecker(fit="kl", power=power, bias="separate"), 1, 0.9, inverse=every, early=False)
    given: dict[str, Any] = {"lr": 1e-2, "damping": ng.Relative(0.01), "solver": ng.Factored()} | options
    opt = ng.NaturalGradient(model, metric, structure=structure, **given)
    return model, opt, run(model, opt, range(steps))


def run(model: nn.Module, opt: ng.NaturalGradient, seeds: range) -> list[dict[str, Tensor]]:
    seen = []
    for seed in seeds:
        opt.zero_grad()
        model(batch(seed)).square().mean().backward()
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        opt.step()
    return seen


def power_of(F: Tensor, power: float, ε: float) -> Tensor:
    values, vectors = torch.linalg.eigh(F + ε * F.trace() / len(F) * torch.eye(len(F), dtype=F.dtype))
    return (vectors * values**power) @ vectors.T


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("power", [0.5, 0.75])
def test_gradients_have_the_factors_of_kl_shampoo(power: float, every: int) -> None:
    """Against a few lines that know nothing of the library (Lin et al. 2025), offsets k of a kernel as samples."""
    _, opt, gradients = trained(ng.BatchGradient(), 6, every, power)
    found, ε, β = whole(opt)["natgrad"], 0.01, 0.9
    for name in ("0.weight", "3.weight", "5.weight"):
        S = A = S_inv = A_inv = None
        mass = 0.0
        for step, gradient in enumerate(gradients):
            G = gradient[name].flatten(2) if gradient[name].ndim > 2 else gradient[name][..., None]
            o, i, k = G.shape
            if S_inv is None or A_inv is None:
                root = G.square().mean().sqrt()
                S_inv, A_inv = torch.eye(o).double() / root, torch.eye(i).double() / root
            new_S = torch.einsum("oik,ij,pjk->op", G, A_inv, G) / (i * k)
            new_A = torch.einsum("oik,op,pjk->ij", G, S_inv, G) / (o * k)
            mass = β * mass + 1
            S = new_S if S is None else S + (new_S - S) / mass
            A = new_A if A is None else A + (new_A - A) / mass
            if step % every == 0:
                S_inv, A_inv = power_of(S, -1.0, ε), power_of(A, -1.0, ε)
                S_inv, A_inv = S_inv * o / (S_inv * S).sum(), A_inv * i / (A_inv * A).sum()
                roots = power_of(S, -power, ε), power_of(A, -power, ε)
        assert S is not None
        assert A is not None
        for entry, (left, right) in (("operator", (S, A)), ("inverse", roots)):
            s, a = (found[entry][f"{name}/{letter}"][0] for letter in "SA")
            close(torch.kron(s, a), torch.kron(left, right), 1e-8)
            close(s / s.trace(), left / left.trace(), 1e-8)


METRICS: dict[str, Callable[[], ng.OutputMetric]] = {
    "gradients": ng.BatchGradient,
    "own": ng.Empirical,
    "layers": ng.Euclidean,
    "sampled": lambda: ng.Fisher(ng.Gaussian(), samples=1),
}


@pytest.mark.parametrize("solver", [ng.Factored(), ng.Cholesky()], ids=["Factored", "Cholesky"])
@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("kind", METRICS)
def test_a_run_resumes_exactly(kind: str, power: float, solver: ng.solve.Solver) -> None:
    """At a step between two refreshes: the roots that estimates are weighed with are those of the last one."""
    model, opt, _ = trained(METRICS[kind](), 5, every=4, power=power, solver=solver)
    state, saved = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    assert any("^-½" in key for key in whole(opt)["natgrad"]["operator"])
    run(model, opt, range(5, 10))
    other, resumed, _ = trained(METRICS[kind](), 0, every=4, power=power, solver=solver)
    other.load_state_dict(saved)
    resumed.load_state_dict(state)
    run(other, resumed, range(5, 10))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_layers_are_estimated_with_the_roots_of_the_last_refresh() -> None:
    """In place, as an average and an estimate by themselves are."""
    model, opt, _ = trained(ng.Euclidean(), 4, every=2)
    average = opt.tracker.average
    assert isinstance(average, KroneckerOperator)
    before, x = copy.deepcopy(average), batch(9)
    pb = ng.pullback(model, x, ng.Euclidean())
    K = ng.Kronecker(fit="kl", power=0.5, bias="separate")
    expected = before.lerp(K.estimate(pb, before), 0.25)
    close(K.absorb(pb, average, 0.25).dense(), expected.dense())


# Factors that vanish.


@pytest.mark.parametrize("kind", ["gradients", "layers"])
def test_units_that_are_dead_and_come_alive_leave_no_nan_and_no_scale(kind: str) -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2)).double()
    nn.init.constant_(first.bias, -100.0)
    structure = ng.Refresh(ng.Kronecker(fit="kl", power=0.5, bias="separate"), 1, 0.9, inverse=1)
    opt = ng.NaturalGradient(
        model,
        METRICS[kind](),
        structure=structure,
        solver=ng.Factored(),
        lr=1e-3,
        damping=ng.Relative(0.01),
        momentum=0.0,
    )
    for step in range(40):
        if step == 20:
            nn.init.constant_(first.bias, 0.5)
        opt.zero_grad()
        model(normal(8, 3, seed=step)).sub(1.0).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        opt.step()
        if step < 20:
            assert torch.equal(first.weight, before[0])  # no gradient, no metric, no step
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    average = opt.tracker.average
    assert isinstance(average, KroneckerOperator)
    for factor in (*average.left, *average.right):
        assert 1e-6 < float(factor.abs().max()) < 1e6


def test_a_first_batch_of_zeros_is_no_metric_and_no_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    opt = ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Refresh(ng.Kronecker(fit="kl", power=0.5), 1, 0.9),
        solver=ng.Factored(),
        lr=1e-2,
        damping=ng.Relative(0.01),
    )
    for step in range(6):
        opt.zero_grad()
        x = normal(5, 3, seed=step) if step else torch.zeros(5, 3).double()
        before = model.weight.detach().clone()
        model(x).sub(1.0).square().mean().backward()
        opt.step()
        assert bool(model.weight.isfinite().all())
        assert torch.equal(before, model.weight) == (step == 0)


# Bad input.


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r'Kronecker\(fit=…\) is "mean" or "kl", not \'KL\''):
        ng.Kronecker(fit="KL")  # type: ignore[arg-type]
    x = normal(5, 3)
    pb = ng.pullback(nn.Linear(3, 2).double(), x, ng.Sobolev())
    with pytest.raises(IncompatibleError, match=r'fit="kl".*couples them: use fit="mean"'):
        ng.Kronecker(fit="kl").estimate(pb)
    assert math.isfinite(float(ng.Kronecker().estimate(pb).trace()))
    with pytest.raises(ValueError, match=r'1 ⊗ A is its own nearest product in KL divergence: use fit="mean"'):
        ng.Kronecker(fit="kl", sides="inputs")
