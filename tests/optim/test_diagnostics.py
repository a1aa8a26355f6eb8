"""Diagnostics: conditions, damping, staleness and the last step are what a dense computation says."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NatgradError
from natgrad.operators import KroneckerOperator
from tests.optim.tasks import seeded, task
from tests.pulled import normal

λ = 0.03


def condition(matrix: Tensor) -> float:
    """Largest over smallest eigenvalue."""
    values = torch.linalg.eigvalsh(matrix)
    return float(values[-1] / values[0])


def after_a_step(**options: Any) -> tuple[ng.NaturalGradient, Any]:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, damping=λ, **options)
    of.step(opt)
    return opt, of


@pytest.mark.parametrize("solver", [ng.Factored(), ng.Cholesky()], ids=["factored", "exact"])
def test_conditions_and_the_share_of_the_damping_are_those_of_the_dense_factors(solver: Any) -> None:
    opt, _ = after_a_step(solver=solver)
    G = opt.tracker.average
    assert isinstance(G, KroneckerOperator)
    for layer, left, right in zip(opt.diagnostics().layers, G.left, G.right, strict=True):
        S, A = left[0], right[0]
        mean = S.diagonal().mean() * A.diagonal().mean()
        π = (A.diagonal().mean() / S.diagonal().mean()).sqrt()
        shifted = S + λ**0.5 / π * torch.eye(len(S)), A + λ**0.5 * π * torch.eye(len(A))
        for side, factor, damped in zip("SA", (S, A), shifted, strict=True):
            assert layer.factors[side].condition == pytest.approx(condition(factor), rel=1e-6)
            assert layer.factors[side].damped == pytest.approx(condition(damped), rel=1e-6)
        dense = torch.kron(S, A)
        inverted = torch.kron(*shifted) if isinstance(solver, ng.Factored) else dense + λ * torch.eye(len(dense))
        assert layer.damped == pytest.approx(condition(inverted), rel=1e-6)
        assert layer.share == pytest.approx(float(λ / (λ + mean)), rel=1e-9)


def test_in_double_precision_a_factor_of_condition_ten_to_the_ten_has_full_rank() -> None:
    """Its small eigenvalues are noise in single precision only."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), normal(20, 3) * torch.tensor([1.0, 1e-3, 1e-5], dtype=torch.float64)
    opt = ng.KFAC(model, ng.Fisher(ng.Gaussian()), damping=λ)
    model(x).square().sum().backward()
    opt.step()
    A = opt.diagnostics().layers[0].factors["A"]
    extended = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    assert A.deficit == 0
    assert A.condition == pytest.approx(condition(extended.T @ extended), rel=1e-4)


def test_the_step_is_measured_in_the_metric_layer_by_layer_and_whole() -> None:
    opt, _ = after_a_step()
    assert opt.tracker.average is not None
    assert opt.last is not None
    G, δ = opt.tracker.average.dense(), opt.last.displacement.flatten()
    found = opt.diagnostics()
    spans = {"0.weight": slice(0, 9), "2.weight": slice(9, 17)}
    for layer in found.layers:
        own = spans[layer.names[0]]
        assert layer.step == pytest.approx(float((δ[own] @ G[own, own] @ δ[own]).sqrt()), rel=1e-9)
    assert found.step == pytest.approx(float((δ @ G @ δ).sqrt()), rel=1e-9)
    assert found.accepted


def test_eigen_kronecker_is_judged_by_its_own_eigenvalues() -> None:
    of = task("coins")
    opt = ng.EKFAC(of.model, of.kind.metric, damping=λ)
    of.step(opt)
    G = opt.tracker.average
    assert isinstance(G, ng.operators.EigenKroneckerOperator)
    for layer, D in zip(opt.diagnostics().layers, G.scales, strict=True):
        assert layer.damped == pytest.approx(float((D.max() + λ) / (D.min() + λ)), rel=1e-9)
        assert layer.share == pytest.approx(λ / (λ + float(D.mean())), rel=1e-9)


def test_ages_count_the_steps_since_the_metric_was_estimated_and_inverted() -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, metric_every=2, inverse_every=4, early=False)
    ages = []
    for _ in range(6):
        of.step(opt)
        found = opt.diagnostics()
        ages.append((found.metric_age, found.inverse_age))
    assert ages == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 0), (1, 1)]
    resumed = ng.KFAC(of.model, of.kind.metric, metric_every=2, inverse_every=4, early=False)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert (
        (resumed.tracker.estimated, resumed.preconditioner.inverted)
        == (opt.tracker.estimated, opt.preconditioner.inverted)
        == (4, 4)
    )


def test_an_estimate_out_of_turn_is_new() -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, metric_every=10, early=False)
    for _ in range(3):
        of.step(opt)
    assert opt.diagnostics().metric_age == 2
    opt.refresh(of.x)
    of.step(opt)
    assert opt.diagnostics().metric_age == 0


def test_layers_that_stand_still_are_told() -> None:
    """With relative damping, where gradients are rounding beside the largest: here 10⁻¹⁵ of them."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    with torch.no_grad():
        model[2].weight.mul_(1e-15)  # type: ignore[operator]
    for damping, still in ((ng.Relative(1e-2), 1), (1e-2, 0)):
        opt = ng.KFAC(copy.deepcopy(model), ng.Euclidean(), damping=damping)
        opt.tracker.module(normal(9, 3)).square().sum().backward()
        before = [p.detach().clone() for p in opt.tracker.module.parameters()]
        opt.step()
        found = opt.diagnostics()
        moved = [not torch.equal(p, q) for p, q in zip(opt.tracker.module.parameters(), before, strict=True)]
        assert [layer.still for layer in found.layers] == [still, 0]
        assert moved == [not still, not still, True, True]
        assert ("rounding beside the largest: 0.weight" in str(found)) == bool(still)


class Keys(nn.Module):
    """Attention written out, whose bias of the keys is rounding, beside an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.angle = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)
        return self.head(torch.tanh(seen).mean(1)) + 1e-20 * torch.atan2(
            x.sum((1, 2), keepdim=True)[..., 0], self.angle
        )


@pytest.mark.parametrize(
    ("structure", "still"),
    [
        (ng.Diagonal(), ["k.bias", "angle"]),
        (ng.BlockDense(), ["angle"]),  # a block has weight and bias
        (ng.Kronecker(bias="separate"), ["angle"]),  # position by position the keys do not cancel
        (ng.Kronecker(fallback=ng.BlockDense()), ["angle"]),
        (ng.Dense(), []),  # one λ for all
    ],
    ids=repr,
)
def test_parameters_that_stand_still_are_told_in_every_structure(structure: Any, still: list[str]) -> None:
    model, x = seeded(lambda: Keys().double()), normal(8, 5, 3)
    for damping, expected in ((ng.Relative(1e-2), still), (1e-2, [])):
        net = copy.deepcopy(model)
        opt = ng.NaturalGradient(net, ng.Fisher(ng.Categorical()), structure=structure, damping=damping, lr=0.1)
        nn.functional.cross_entropy(net(x), torch.arange(8) % 2).backward()
        opt.step()
        found, numbers = opt.diagnostics(), opt.metrics(layers=True)
        names = sorted(name for layer in found.layers if layer.still for name in layer.names)
        assert (
            names
            == sorted(
                key.split("/")[-2] for key, n in numbers.items() if key.endswith("_still") and n and "/layer/" in key
            )
            == sorted(expected)
        )
        assert ("rounding beside the largest: angle" in str(found)) == bool(expected)
        pairs = zip(model.named_parameters(), net.parameters(), strict=True)
        assert {name for (name, p), q in pairs if torch.equal(p, q)} >= set(expected)


def test_dead_units_and_missing_ranks_are_counted() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double())
    with torch.no_grad():
        model[0].bias[:] = torch.tensor([-100.0, -100.0, 0.5, 0.5, 0.5])  # type: ignore[operator]
    opt = ng.KFAC(model, ng.Euclidean())
    x = torch.cat([normal(40, 2), torch.zeros(40, 1, dtype=torch.float64)], dim=1)  # an input that is always zero
    model(x).square().sum().backward()
    opt.step()
    first, second = opt.diagnostics().layers
    assert (first.factors["S"].dead, first.factors["S"].deficit) == (2, 2)
    assert (first.factors["A"].dead, first.factors["A"].deficit) == (1, 1)
    assert (second.factors["S"].dead, second.factors["A"].dead, second.factors["A"].deficit) == (0, 2, 2)
    assert first.factors["S"].condition == math.inf
    assert math.isfinite(first.damped or math.inf)


def test_a_layer_without_any_gradient_is_all_damping() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x) + 0 * self.unused(x)
            return out

    model = seeded(lambda: Half().double())
    opt = ng.KFAC(model, ng.Euclidean())
    model(normal(5, 2)).square().sum().backward()
    opt.step()
    shares = {layer.names[0]: layer.share for layer in opt.diagnostics().layers}
    assert shares["unused.weight"] == 1.0
    assert 0 < (shares["used.weight"] or 0) < 1


def test_parameters_without_factors_have_a_step_and_every_structure_can_be_diagnosed() -> None:
    for structure in (ng.Dense(), ng.Diagonal(), ng.Kernel()):
        of = task("coins")
        opt = of.optimizer(structure=structure)
        of.step(opt)
        found = opt.diagnostics()
        assert [layer.factors for layer in found.layers] == [{}, {}]
        assert opt.tracker.average is not None
        assert opt.last is not None
        δ = opt.last.displacement.flatten()
        assert found.step == pytest.approx(float((δ @ opt.tracker.average.dense() @ δ).sqrt()), rel=1e-9)
        assert "√(δᵀGδ)" in str(found)


def test_the_table_has_a_line_a_layer_and_says_how_old_everything_is() -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, damping=λ, early=False)
    for _ in range(3):
        of.step(opt)
    lines = str(opt.diagnostics()).splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["parameters", "0.weight + 0.bias", "2.weight + 2.bias"]
    assert "damping λ = 0.03" in lines[3]
    assert lines[4] == "the metric was estimated 2 steps before it, and inverted 2 steps before it"


def test_before_the_first_step_there_is_nothing_to_diagnose() -> None:
    of = task()
    opt = of.optimizer()
    with pytest.raises(NatgradError, match=r"nothing to diagnose before the first step: opt\.plan\(\)"):
        opt.diagnostics()


def test_the_identity_metric_has_no_age() -> None:
    of = task("coins")
    opt = ng.NaturalGradient(
        of.model, ng.BatchGradient(), structure=ng.Diagonal(power=0.0), step=ng.Polar(), fallback="adamw"
    )
    for _ in range(3):
        of.step(opt)
    found = opt.diagnostics()
    assert found.metric_age is None
    assert found.inverse_age is None
    assert opt.last is not None
    δ = torch.cat([t.flatten() for t in opt.last.displacement.values()])
    assert found.step == pytest.approx(float(δ.norm()))
    assert str(found).endswith("metric: the identity (power 0): nothing is estimated, inverted or damped")
