"""Kronecker(fit="kl"): the product that is nearest in KL divergence to the second moment of gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.operators import KroneckerOperator
from tests.optim.states import whole
from tests.pulled import close, normal

Pair = tuple[Tensor, Tensor]
Damping = float | ng.Relative


def test_the_scale_stays_where_it_is_in_a_long_run() -> None:
    """Inputs of rank two in a layer of nine: damping takes another part of A than of S."""
    torch.manual_seed(0)
    model = nn.Linear(9, 3, bias=False).double()
    structure = ng.Refresh(ng.Kronecker(fit="kl", power=0.5), 1, 0.5, inverse=1)
    opt = ng.NaturalGradient(
        model, ng.BatchGradient(), structure=structure, solver=ng.Factored(), lr=1e-9, damping=ng.Relative(0.1)
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


# Training.


def layers_of() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(seed: int) -> Tensor:
    return normal(8, 2, 3, 3, seed=seed)


def trained(
    steps: int, every: int = 2, power: float = 0.5, **options: Any
) -> tuple[nn.Module, ng.NaturalGradient, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = layers_of().double()
    structure = ng.Refresh(ng.Kronecker(fit="kl", power=power, bias="separate"), 1, 0.9, inverse=every, early=False)
    given: dict[str, Any] = {"lr": 1e-2, "damping": ng.Relative(0.01), "solver": ng.Factored()} | options
    opt = ng.NaturalGradient(model, ng.BatchGradient(), structure=structure, **given)
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
    _, opt, gradients = trained(6, every, power)
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


@pytest.mark.parametrize("solver", [ng.Factored(), ng.Cholesky()], ids=["Factored", "Cholesky"])
@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
def test_a_run_resumes_exactly(power: float, solver: ng.solve.Solver) -> None:
    """At a step between two refreshes: the roots that estimates are weighed with are those of the last one."""
    model, opt, _ = trained(5, every=4, power=power, solver=solver)
    state, saved = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    assert any("^-½" in key for key in whole(opt)["natgrad"]["operator"])
    run(model, opt, range(5, 10))
    other, resumed, _ = trained(0, every=4, power=power, solver=solver)
    other.load_state_dict(saved)
    resumed.load_state_dict(state)
    run(other, resumed, range(5, 10))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# Factors that vanish.


def test_units_that_are_dead_and_come_alive_leave_no_nan_and_no_scale() -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2)).double()
    nn.init.constant_(first.bias, -100.0)
    structure = ng.Refresh(ng.Kronecker(fit="kl", power=0.5, bias="separate"), 1, 0.9, inverse=1)
    opt = ng.NaturalGradient(
        model,
        ng.BatchGradient(),
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
    with pytest.raises(ValueError, match=r'1 ⊗ A is its own nearest product in KL divergence: use fit="mean"'):
        ng.Kronecker(fit="kl", sides="inputs")


def test_a_metric_on_the_outputs_is_refused() -> None:
    model, K = nn.Linear(3, 2).double(), ng.Kronecker(fit="kl")
    with pytest.raises(IncompatibleError, match=r"is fitted to the gradients .*: use it with BatchGradient"):
        K.estimate(ng.pullback(model, normal(5, 3), ng.Euclidean()))
    for metric in (ng.Euclidean(), ng.Empirical()):
        with pytest.raises(IncompatibleError, match="does not work with a metric on the outputs"):
            ng.NaturalGradient(model, metric, structure=ng.Refresh(K), lr=0.1, damping=0.1)
