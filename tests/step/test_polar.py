"""Steepest descent in the spectral norm of a metric: Muon, and what it is in other metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests import kronecker_oracle as kron
from tests import oracle
from tests.optim.states import alike
from tests.optim.tasks import seeded
from tests.pulled import POWERED, normal

EXACT = ng.Polar(iteration="minimax")
IDENTITY = ng.Diagonal(power=0)


def matrices(double: bool = True) -> nn.Sequential:
    """Wide, tall, square, and a kernel."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 3, 2, bias=False),
        nn.Flatten(),
        nn.Linear(12, 5, bias=False),
        nn.Tanh(),
        nn.Linear(5, 12, bias=False),
        nn.Tanh(),
        nn.Linear(12, 12, bias=False),
    )
    model = seeded(layers)
    return model.double() if double else model


def fed(opt: torch.optim.Optimizer, model: nn.Module, seed: int) -> None:
    """A step with random gradients, without a forward pass."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)
    opt.step()


def polar(M: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(M.reshape(len(M), -1), full_matrices=False)
    return (U @ Vh).reshape(M.shape)


@pytest.mark.parametrize("rule", [EXACT, ng.Constrained(EXACT, ng.Clipping({}))], ids=["plain", "general"])
def test_in_the_identity_metric_a_step_is_the_polar_factor_at_its_root_mean_square(rule: Any) -> None:
    model = matrices()
    before = [p.detach().clone() for p in model.parameters()]
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=IDENTITY, lr=0.5, step=rule)
    fed(opt, model, 0)
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        longer = max(len(p), p[0].numel())
        torch.testing.assert_close(old - p.detach(), 0.5 * 0.2 * longer**0.5 * polar(p.grad))
        torch.testing.assert_close((old - p.detach()).square().mean().sqrt(), torch.tensor(0.1, dtype=torch.float64))


def test_it_is_muon_step_by_step() -> None:
    """torch.optim.Muon takes matrices only."""
    model, other = (matrices(double=False)[2:] for _ in range(2))
    opt = ng.NaturalGradient(
        model,
        ng.Euclidean(),
        structure=IDENTITY,
        lr=0.1,
        momentum=0.9,
        momentum_on="gradients",
        weight_decay=0.1,
        step=ng.Polar(),
    )
    muon = torch.optim.Muon(other.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(6):
        fed(opt, model, step)
        fed(muon, other, step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0.0, atol=2e-3 * 0.1 * (step + 1))  # bfloat16 in other stacks


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_in_a_metric_it_is_the_polar_factor_between_its_half_powers(power: float) -> None:
    """With G = S ⊗ A: v = S^-p/2 polar(S^-p/2 ω A^-p/2) A^-p/2, as long as the polar factor. A and S by the oracle."""
    model = seeded(lambda: nn.Linear(4, 3, bias=False).double())
    x, λ = seeded(lambda: torch.randn(7, 4, dtype=torch.float64)), 0.0
    structure = ng.Kronecker(power=power)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=structure, lr=1.0, damping=λ, step=EXACT)
    before = model.weight.detach().clone()
    opt.zero_grad()
    model(x).square().sum().backward()
    ω = model.weight.grad
    assert ω is not None
    opt.step()
    A = x.T @ x / len(x)  # and S = 1, as the metric is Euclidean
    values, vectors = torch.linalg.eigh(A)
    root = (vectors * values.pow(-power / 2)) @ vectors.T
    v = polar(ω @ root) @ root
    torch.testing.assert_close(before - model.weight.detach(), 0.2 * 2.0 * 3**0.5 * v / v.norm())


def level(G: Tensor, rank: int) -> Tensor:
    """The leading eigenpairs, and what is left of the trace spread evenly: what powers of LowRank are powers of."""
    values, vectors = torch.linalg.eigh(G)
    lead = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
    return lead + (G - lead).trace() / len(G) * torch.eye(len(G), dtype=G.dtype)


def damped_metric(structure: str, layers: Sequence[kron.Layer], G: Tensor, λ: float) -> Tensor:
    """What a structure keeps of G + λ, by the oracles."""
    eye = torch.eye(len(G), dtype=G.dtype)
    if structure == "Factored":
        return kron.factored(layers, "expand", G, λ)
    if structure == "EigenKronecker":
        factors = [layer.factors("expand") for layer in layers]
        bases = [(torch.linalg.eigh(S).eigenvectors, torch.linalg.eigh(A).eigenvectors) for S, A in factors]
        return kron.ekfac(layers, bases, G) + λ * eye
    blocks = [layer.index.reshape(-1).tolist() for layer in layers]
    kept: dict[str, Callable[[], Tensor]] = {
        "Dense": lambda: G,
        "Kernel": lambda: G,
        "BlockDense": lambda: oracle.block_diagonal(G, blocks),
        "Diagonal": lambda: oracle.diagonal(G),
        "LowRank": lambda: level(G, 3),
        "Kronecker": lambda: kron.kfac(layers, "expand", G),
    }
    return kept[structure]() + λ * eye


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("structure", [*POWERED, "Factored"])
def test_in_any_structure_it_is_the_polar_factor_between_its_half_powers(structure: str, power: float) -> None:
    """v = G^-q P with q = p/2, where P has the polar factors of the matrices in G^-q ω; each as long as its factor.

    Dense, LowRank and Kernel couple the two layers; no factor of the Kronecker product is the identity.
    """
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False)).double())
    x, t, λ = normal(30, 4), normal(30, 2, seed=1), 0.1

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum()

    s = 2 * (model(x) - t).detach()[None]  # the cotangents of the loss, the root of the metric
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.empirical(model(x), t, loss))
    root = oracle.damped_power(damped_metric(structure, kron.layers(model, x, s), G, λ), 0.0, 0.5 * power)
    kind = POWERED["Kronecker" if structure == "Factored" else structure](power=power)
    solver = ng.Factored() if structure == "Factored" else ng.Cholesky()
    metric = ng.Empirical(loss)
    opt = ng.NaturalGradient(model, metric, structure=kind, solver=solver, lr=1.0, damping=λ, step=EXACT)
    opt.refresh(x, t)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).sin().sum().backward()  # any gradient
    ω = oracle.flatten(p.grad for p in model.parameters() if p.grad is not None)
    opt.step()
    P = {name: polar(M) for name, M in oracle.unflatten(root @ ω, before).items()}
    v = oracle.unflatten(root @ oracle.flatten(P.values()), before)
    for name, p in model.named_parameters():
        expected = 0.2 * max(p.shape) ** 0.5 * P[name].norm() * v[name] / v[name].norm()
        torch.testing.assert_close(before[name] - p.detach(), expected, rtol=0.0, atol=1e-10)


def test_no_step_of_that_norm_descends_more() -> None:
    """Among all v with ‖G^p/2 v‖ = ‖G^p/2 v*‖ in the spectral norm, ⟨ω, v⟩ is largest for the step v*."""
    model = seeded(lambda: nn.Linear(4, 3, bias=False).double())
    x = seeded(lambda: torch.randn(7, 4, dtype=torch.float64))
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(), lr=1.0, damping=0.0, step=EXACT)
    model(x).square().sum().backward()
    ω = model.weight.grad
    assert ω is not None
    opt.step()
    assert opt.last is not None
    step = -opt.last.displacement["weight"]
    root = torch.linalg.cholesky(x.T @ x / len(x))  # another root than the symmetric one: the norm is the same
    length, descent = torch.linalg.matrix_norm(step @ root, 2), (ω * step).sum()
    for seed in range(200):
        v = step + 0.3 * seeded(lambda: torch.randn(3, 4, dtype=torch.float64), seed=seed) * step.norm()
        v = v * length / torch.linalg.matrix_norm(v @ root, 2)
        assert (ω * v).sum() <= descent * (1 + 1e-9)


def test_a_zero_gradient_is_a_zero_step_and_the_others_move() -> None:
    model = matrices()
    opt = ng.NaturalGradient(
        model, ng.Euclidean(), structure=IDENTITY, step=EXACT, momentum=0.9, momentum_on="gradients"
    )
    first, *others = model.parameters()
    before = first.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    first.grad = torch.zeros_like(first)
    opt.step()
    assert torch.equal(first, before)
    assert all(p.isfinite().all() for p in others)


def test_the_identity_metric_looks_at_no_pass_and_resumes_exactly() -> None:
    """No hook on the model, no forward pass, no estimate."""

    def new() -> tuple[nn.Module, ng.NaturalGradient]:
        model = matrices()
        options: dict[str, Any] = {"structure": ng.Kronecker(power=0), "momentum": 0.9, "momentum_on": "gradients"}
        return model, ng.NaturalGradient(model, ng.Fisher(ng.Categorical()), step=ng.Polar(), lr=0.1, **options)

    (model, opt), (copy, again) = new(), new()
    assert not model._forward_pre_hooks
    opt.refresh(torch.ones(1, 2, 3, 3))  # there is nothing to estimate
    for step in range(3):
        fed(opt, model, step)
    copy.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    for step in range(3):
        fed(opt, model, step)
        fed(again, copy, step)
    assert alike(model.state_dict(), copy.state_dict())
    assert alike(opt.state_dict(), again.state_dict())


def test_the_identity_metric_is_gradient_descent_in_every_structure() -> None:
    for structure in (ng.Dense(power=0), ng.BlockDense(power=0), ng.Diagonal(power=0), ng.Kronecker(power=0)):
        model, other = matrices(), matrices()
        opt = ng.NaturalGradient(model, ng.Euclidean(), structure=structure, lr=0.1, damping=3.0, momentum=0.5)
        sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
        for step in range(3):
            fed(opt, model, step)
            fed(sgd, other, step)
        torch.testing.assert_close(oracle.flatten(model.parameters()), oracle.flatten(other.parameters()))


def test_a_rule_that_asks_for_the_batch_has_none_in_the_identity_metric() -> None:
    model = matrices()
    rule = ng.TrustRegion(0.1, backtracking=ng.Backtracking())
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=IDENTITY, step=rule)
    with pytest.raises(ng.errors.NatgradError, match="asks for the batch, and a structure with power=0 looks at none"):
        fed(opt, model, 0)


def test_parameters_that_are_no_matrices_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    match = (
        r"Polar is for matrices, and these have fewer than two axes: 0\.bias, 1\.weight, 1\.bias\. "
        r'NaturalGradient\(fallback="adamw"\) gives them to AdamW'
    )
    for rule in (ng.Polar(), ng.Constrained(ng.Polar(), ng.Clipping({}))):
        with pytest.raises(ng.errors.IncompatibleError, match=match):
            ng.NaturalGradient(model, ng.Euclidean(), step=rule)
    with pytest.raises(ValueError, match=r'Polar\(iteration=…\) is "muon" or "minimax", not \'svd\''):
        ng.Polar(iteration="svd")  # type: ignore[arg-type]


def test_the_plan_of_the_identity_metric_is_free_and_its_diagnostics_are_steps() -> None:
    model = matrices()
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(power=0), step=ng.Polar())
    plan = opt.plan()
    assert plan.bytes == 0
    assert "metric: the identity (power 0): nothing is estimated, inverted or damped" in str(plan)
    fed(opt, model, 0)
    assert opt.last is not None
    length = torch.cat([δ.flatten() for δ in opt.last.displacement.values()]).norm()
    assert opt.diagnostics().step == pytest.approx(float(length))


@pytest.mark.parametrize("unit", [2.0**-24, 2.0**-8], ids=["small", "large"])
def test_steps_in_float16_are_those_of_exact_numbers_for_gradients_near_its_smallest(unit: float) -> None:
    """Gradients k·unit with whole numbers k, exact in float16; the sides of the smaller ones are beyond its range."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 4, bias=False)).half())
    opt = ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Kronecker(largest=1, power=0.5),
        solver=ng.Factored(),
        step=ng.Polar(rms=0.4, iteration="minimax"),
        damping=ng.Relative(1e-2),
        lr=1.0,
    )
    before, random = [p.detach().double() for p in model.parameters()], torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = (torch.randint(-100, 100, p.shape, generator=random) * unit).half()
    opt.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        g = p.grad.double()
        s, a = g.square().sum(1, keepdim=True), g.square().sum(0, keepdim=True)
        sides = ((s + 1e-2 * s.mean()) * (a + 1e-2 * a.mean())) ** -0.25
        v = sides * polar(sides * g)
        v *= 0.4 * p.numel() ** 0.5 / v.norm()
        torch.testing.assert_close(old - p.detach().double(), v, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("factor", [3.0, 1 / 7])
@pytest.mark.parametrize("examples", [4, 200], ids=["low rank", "full rank"])
@pytest.mark.parametrize(
    "structure",
    [ng.Kronecker(largest=1, power=0.5), ng.Kronecker(power=0.5), ng.Diagonal(power=0.5), ng.Kernel(power=0.5)],
    ids=["sides", "Kronecker", "Diagonal", "Kernel"],
)
def test_the_unit_of_the_loss_leaves_a_step_in_bfloat16_as_it_was(structure: Any, examples: int, factor: float) -> None:
    """Five steps of Muon multiply rounding by up to 500: what is rounded must not depend on the unit."""
    x, t = normal(examples, 30).float(), normal(examples, 40, seed=1).float()

    def step(k: float) -> Tensor:
        model = seeded(lambda: nn.Sequential(nn.Linear(30, 60, bias=False), nn.Tanh(), nn.Linear(60, 40, bias=False)))
        before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])

        def loss(y: Tensor, target: Tensor) -> Tensor:
            return k * 0.5 * (y - target).square().sum()

        opt = ng.NaturalGradient(
            model, ng.Empirical(loss), structure=structure, lr=1.0, damping=k**2 * 1e-2, step=ng.Polar()
        )
        opt.zero_grad()
        (loss(model(x), t) / examples).backward()
        opt.refresh(x, t)
        opt.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before

    one, other = step(1.0), step(factor)
    assert (other - one).norm() < (0.2 if examples < 30 else 0.03) * one.norm()
