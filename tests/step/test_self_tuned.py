"""The self-tuning step of Martens and Grosse."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.model import Model
from natgrad.pullbacks.pullback import Batch
from natgrad.step.queries import quadratic_forms
from tests import oracle
from tests.optim.tasks import Scalar, half_square, seeded, task
from tests.pulled import close, normal
from tests.zoo import Problem, case


def tuned(of: Any, **options: Any) -> ng.NaturalGradient:
    """SelfTuned on a task, with the structure of the test."""
    rule = ng.SelfTuned(**options.pop("rule", {}))
    opt: ng.NaturalGradient = of.optimizer(step=rule, **options)
    return opt


def best(G: Tensor, ω: Tensor, λ: float, directions: list[Tensor]) -> Tensor:
    """The minimum of ⟨ω, δ⟩ + ½⟨δ, (G + λ)δ⟩ over the span of some directions, by the normal equations."""
    D = torch.stack(directions)
    H = D @ (G @ D.T + λ * D.T)
    return -torch.linalg.solve(H, D @ ω) @ D


@pytest.mark.parametrize("kind", ["regression", "classes", "coins", "counts"])
@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.Diagonal()], ids=["Kronecker", "Diagonal"])
def test_learning_rate_and_momentum_minimise_the_quadratic_model_of_the_exact_metric(
    kind: str, structure: ng.Kronecker | ng.Diagonal
) -> None:
    of = task(kind)
    λ, last = 0.05, None
    opt = tuned(of, structure=structure, damping=λ, lr=7.0, rule={"every": 100})
    for step in range(4):
        θ, ω, G = of.theta(), of.gradient(), of.metric()
        approximate = structure.estimate(ng.pullback(of.model, of.x, of.kind.metric)).dense()
        Δ = -oracle.damped(approximate, ω, λ)
        δ = best(G, ω, λ, [Δ] if last is None else [Δ, last])
        if last is not None:  # a step that is not tried is at most three times as long as the one before
            damped = G + λ * torch.eye(len(G), dtype=G.dtype)
            δ = δ * min(1.0, 3 * float((last @ damped @ last) / (δ @ damped @ δ)) ** 0.5)
        opt.step(of.closure(opt))
        close(of.theta() - θ, δ, 1e-8)
        assert opt.last is not None
        λ, last = opt.last.damping, of.theta() - θ
        assert (opt.last.ratio is None) == (step > 0)


def test_with_several_micro_batches_the_exact_products_are_those_of_the_joint_batch() -> None:
    of, λ = task("classes"), 0.05
    opt = tuned(of, structure=ng.Diagonal(), damping=λ)
    parts = [replace(of, x=of.x[:4], t=of.t[:4]), replace(of, x=of.x[4:], t=of.t[4:])]

    def closure() -> Tensor:
        opt.zero_grad()
        loss = sum((part.loss() * len(part.x) / len(of.x) for part in parts), torch.zeros((), dtype=torch.float64))
        loss.backward()
        return loss

    θ, ω, G = of.theta(), of.gradient(), of.metric()
    Δ = -oracle.damped(oracle.diagonal(G), ω, λ)
    opt.step(closure)
    assert opt.last is not None
    assert not opt.last.reason
    close(of.theta() - θ, best(G, ω, λ, [Δ]), 1e-8)


def test_a_step_that_is_tried_is_as_long_as_the_model_says() -> None:
    of, λ = task("classes"), 0.05
    opt = tuned(of, structure=ng.Diagonal(), damping=λ, rule={"every": 1})
    opt.step(of.closure(opt))
    assert opt.last is not None
    last, λ = opt.last.displacement.flatten(), opt.last.damping
    θ, ω, G = of.theta(), of.gradient(), of.metric()
    Δ = -oracle.damped(oracle.diagonal(G), ω, λ)
    opt.step(of.closure(opt))
    assert not opt.last.reason
    close(of.theta() - θ, best(G, ω, λ, [Δ, last]), 1e-8)


def test_a_step_that_is_not_tried_is_at_most_three_times_as_long_as_the_one_before() -> None:
    """The second batch has a gradient a thousand times larger."""
    model, opt, closure = bowl(1.0, every=5)
    opt.step(closure)
    assert opt.last is not None
    first = float(opt.last.displacement["value"])
    opt.zero_grad()
    with torch.no_grad():
        model.value.fill_(1000.0)
    opt.step(closure)
    assert float(opt.last.displacement["value"]) == pytest.approx(3 * first)


WHOLE: dict[str, dict[str, Any]] = {
    "Dense": {"structure": ng.Dense()},
    "BlockDense": {"structure": ng.BlockDense()},
    "Kernel": {"structure": ng.Kernel()},
    "Implicit": {"structure": ng.Implicit(), "solver": ng.CG()},
    "LowRank": {"structure": ng.LowRank(5)},
    "Diagonal": {"structure": ng.Diagonal()},
}


@pytest.mark.parametrize("kind", WHOLE)
def test_without_kronecker_factors_every_step_is_tried_and_the_loss_never_rises(kind: str) -> None:
    """Also where the damping is far too small for the first steps."""
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()), normal(64, 4)
    t = torch.randint(3, (64,), generator=torch.Generator().manual_seed(0))
    opt = ng.NaturalGradient(model, ng.Fisher(ng.Categorical()), step=ng.SelfTuned(), damping=1e-4, **WHOLE[kind])

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        return loss

    losses = [float(opt.step(closure)) for _ in range(8)]
    assert all(after <= before for before, after in pairwise(losses))
    assert losses[-1] < 0.97 * losses[0]


def test_one_step_lands_at_the_minimum_of_a_quadratic_problem() -> None:
    x, t = normal(20, 3), normal(20, 2, seed=1)
    model = seeded(lambda: nn.Linear(3, 2).double())
    opt = ng.NaturalGradient(
        model, ng.Euclidean(), structure=ng.Dense(), step=ng.SelfTuned(smallest=1e-12), damping=1e-12
    )

    def closure() -> Tensor:
        opt.zero_grad()
        loss = half_square(model(x), t)
        loss.backward()
        return loss

    opt.step(closure)
    ones = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], dim=1)
    solution = torch.linalg.lstsq(ones, t).solution.T
    close(model.weight.detach(), solution[:, :3], 1e-8)
    close(model.bias.detach(), solution[:, 3], 1e-8)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(1.0, abs=1e-6)


def bowl(curvature: float, **rule: Any) -> tuple[Scalar, ng.NaturalGradient, Callable[[], Tensor]]:
    """L = ½c θ² with G = 1: the step is −cθ, the model predicts −½c²θ², the loss changes by ½c(c² − 2c)θ²."""
    model = Scalar()
    step = ng.SelfTuned(**{"smallest": 1e-12, **rule})
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=step, damping=1e-9)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * curvature * model().square().sum()
        loss.backward()
        return loss

    return model, opt, closure


@pytest.mark.parametrize(("curvature", "times"), [(1.0, 1 / 3), (1.2, 1 / 3), (1.5, 1.0), (1.9, 3.0)])
def test_the_damping_falls_stays_or_rises_by_the_factor_with_the_ratio(curvature: float, times: float) -> None:
    _, opt, closure = bowl(curvature, factor=3.0)
    opt.step(closure)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(2 - curvature, abs=1e-6)
    assert opt.param_groups[0]["damping"] == pytest.approx(times * 1e-9)


@pytest.mark.parametrize(("ratio", "times"), [(0.24, 3.0), (0.26, 1.0), (0.74, 1.0), (0.76, 1 / 3)])
def test_the_damping_turns_at_a_quarter_and_at_three_quarters(ratio: float, times: float) -> None:
    """Levenberg and Marquardt's rule: ρ < ¼ and ρ > ¾ (Martens and Grosse 2015, section 6.5)."""
    _, opt, closure = bowl(2 - ratio, factor=3.0)
    opt.step(closure)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(ratio, abs=1e-6)
    assert opt.param_groups[0]["damping"] == pytest.approx(times * 1e-9)


@pytest.mark.parametrize(("λ", "times"), [(0.5, 1 / 1.3), (0.99, 1 / 1.3), (1.01, 1 / 4), (100.0, 1 / 4)])
def test_a_damping_that_is_more_than_half_of_the_model_falls_faster(λ: float, times: float) -> None:
    """L = ½θ² with G = 1: the step is −θ/(1 + λ), and the ratio 1 + λ/(1 + λ)."""
    _, opt, closure = bowl(1.0)
    opt.param_groups[0]["damping"] = λ
    opt.step(closure)
    assert opt.last is not None
    assert opt.last.ratio == pytest.approx(1 + λ / (1 + λ))
    assert opt.param_groups[0]["damping"] == pytest.approx(times * λ)


def test_the_damping_adapts_every_so_many_steps_only_and_stays_above_the_smallest() -> None:
    _, opt, closure = bowl(1.2, every=3, factor=10.0, smallest=2e-11)
    dampings = []
    for _ in range(7):
        opt.step(closure)
        dampings.append(opt.param_groups[0]["damping"])
    assert dampings == pytest.approx([1e-10, 1e-10, 1e-10, 2e-11, 2e-11, 2e-11, 2e-11])


@pytest.mark.parametrize(("curvature", "cuts"), [(1.99, 0), (2.1, 1), (7.9, 1), (8.1, 2), (100.0, 3)])
def test_a_step_after_which_the_loss_is_higher_is_cut_to_a_quarter_until_it_is_not(curvature: float, cuts: int) -> None:
    model, opt, closure = bowl(curvature)
    opt.step(closure)
    assert opt.last is not None
    assert opt.last.accepted
    close(model.value.detach(), torch.tensor([1 - curvature / 4**cuts], dtype=torch.float64), 1e-6)
    assert opt.param_groups[0]["damping"] == pytest.approx(1e-9 * (4 if cuts else 1.3))


@pytest.mark.parametrize("curvature", [200.0, math.inf])
def test_a_step_that_no_cut_helps_is_refused_and_starts_anew(curvature: float) -> None:
    model, opt, closure = bowl(1.2 if math.isinf(curvature) else curvature)
    calls = 0

    def poisoned() -> Tensor:
        nonlocal calls
        calls += 1
        return closure() if calls == 1 or not math.isinf(curvature) else torch.tensor(math.inf)

    opt.step(poisoned)
    assert opt.last is not None
    assert not opt.last.accepted
    assert "the loss is higher even after 3 cuts" in opt.last.reason
    assert float(model.value.detach()) == 1.0
    assert opt.param_groups[0]["damping"] == pytest.approx(4e-9)
    assert not any("momentum" in of_param for of_param in opt.state.values())


def test_where_nothing_is_left_to_gain_the_damping_stays() -> None:
    model, opt, closure = bowl(1.2)
    with torch.no_grad():
        model.value.zero_()
    opt.step(closure)
    assert opt.last is not None
    assert (opt.last.accepted, opt.last.ratio, opt.last.damping) == (True, None, 1e-9)
    assert float(model.value.detach()) == 0.0


def test_the_last_step_survives_a_checkpoint() -> None:
    def run(at: int | None) -> Tensor:
        of = task("coins")
        opt = tuned(of, structure=ng.Kronecker())
        for step in range(6):
            opt.step(of.closure(opt))
            if step == at:
                state = copy.deepcopy(opt.state_dict())
                assert "momentum" in next(iter(state["state"].values()))
                opt = tuned(of, structure=ng.Kronecker())
                opt.load_state_dict(state)
        return of.theta()

    assert torch.equal(run(None), run(3))


def test_it_needs_a_closure() -> None:
    of = task()
    opt = tuned(of)
    of.closure(opt)()
    with pytest.raises(TypeError, match=r"SelfTuned evaluates the loss again: call opt\.step\(closure\)"):
        opt.step()


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"factor": 1.0}, {"fraction": 0.0}, {"fraction": 1.5}, {"smallest": 0}]
)
def test_numbers_that_no_step_can_be_tuned_with_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SelfTuned needs every ≥ 1, factor > 1, 0 < fraction ≤ 1 and smallest > 0"):
        ng.SelfTuned(**options)


def test_kfac_that_tunes_itself_estimates_and_inverts_more_often() -> None:
    opt = ng.KFAC(nn.Linear(2, 2), ng.Euclidean(), step=ng.SelfTuned())
    assert (opt.tracker.schedule.every, opt.tracker.schedule.inverse) == (2, 5)
    opt = ng.KFAC(nn.Linear(2, 2), ng.Euclidean(), step=ng.SelfTuned(), metric_every=3, inverse_every=6)
    assert (opt.tracker.schedule.every, opt.tracker.schedule.inverse) == (3, 6)
    bounded = ng.Constrained(ng.SelfTuned(), ng.Clipping({"bias": (0.0, 1.0)}))
    opt = ng.KFAC(nn.Linear(2, 2), ng.Euclidean(), step=bounded)
    assert (opt.tracker.schedule.every, opt.tracker.schedule.inverse) == (2, 5)


def test_kfac_with_default_arguments_fits_a_classifier_in_a_few_steps() -> None:
    x, t = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)))
    metric = ng.Fisher(ng.Categorical(axis=-1), samples=1)
    generator = torch.Generator().manual_seed(0)
    opt = ng.KFAC(model, metric, step=ng.SelfTuned(), generator=generator)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        return loss

    for _ in range(40):
        opt.step(closure)
    assert float(closure().detach()) < 0.01  # random labels, log 3 at first


# Exact quadratic forms of the metric, by products with the Jacobian.


def _lstm() -> Problem:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            """The head of the last output."""
            hidden: Tensor = self.lstm(x)[0][:, -1]
            out: Tensor = self.head(hidden)
            return out

    return Problem(seeded(lambda: Last().double()), normal(5, 4, 2))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    **{name: case(name).make for name in ("mlp_tanh", "conv", "layer_norm", "attention", "tied_embedding", "sequence")},
    "lstm": _lstm,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_quadratic_forms_are_those_of_the_dense_metric(name: str) -> None:
    problem = PROBLEMS[name]()
    y = problem.outputs()
    h = oracle.categorical(y.reshape(-1, y.shape[-1]))
    if y.ndim > 2:  # every token is a distribution of its own
        h = torch.stack([torch.block_diag(*h[n * y.shape[1] : (n + 1) * y.shape[1]]) for n in range(len(y))])
    G = oracle.dense(problem.jacobian(), h)
    flat = [normal(len(G), seed=seed) for seed in (1, 2)]
    vectors = [ng.Vector(oracle.unflatten(v, problem.parameters())) for v in flat]
    batch = Batch(Model.of(problem.module, output=problem.output), problem.x)
    V = torch.stack(flat)
    close(quadratic_forms(batch, ng.Fisher(ng.Categorical(axis=-1)), vectors), V @ G @ V.T, 1e-9)


@pytest.mark.parametrize(("n", "m"), [(6, 6), (300, 256), (600, 300), (1000, 500)])
def test_quadratic_forms_of_a_part_of_the_batch_are_those_of_different_examples_256_at_least(n: int, m: int) -> None:
    """⟨v, Gv⟩ of y = wx at v = 1 is the mean of x² over the examples that the model was called with."""
    seen: list[Tensor] = []
    model = nn.Linear(1, 1, bias=False).double()
    model.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    batch = Batch(Model.of(model), torch.arange(n, dtype=torch.float64).unsqueeze(1))
    found = quadratic_forms(batch, ng.Euclidean(), [ng.Vector({"weight": torch.ones(1, 1).double()})], 0.5)
    chosen = seen[-1].flatten()
    assert len(chosen) == len(chosen.unique()) == m
    close(found, chosen.square().mean().view(1, 1))


@pytest.mark.parametrize("order", ["sorted", "in turns"])
@pytest.mark.parametrize("n", [1438, 2000, 4096])
def test_a_part_of_the_batch_has_every_class_as_often_as_the_batch_has(n: int, order: str) -> None:
    """With one-hot inputs the diagonal of the forms is the share of every class; the first quarter has but three."""
    label = torch.arange(n) * 10 // n if order == "sorted" else torch.arange(n) % 10
    model = Model.of(nn.Linear(10, 10, bias=False).double())
    batch = Batch(model, torch.nn.functional.one_hot(label, 10).double())
    of_class = [ng.Vector({"weight": e.expand(10, 10) / 10**0.5}) for e in torch.eye(10, dtype=torch.float64)]
    share = quadratic_forms(batch, ng.Euclidean(), of_class, 0.25).diagonal()
    assert float((share - label.bincount() / n).abs().max()) < 0.01


def test_where_the_first_axis_is_not_that_of_the_examples_all_of_the_batch_is_taken() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            """From [t n 2] to [n 3]."""
            out: Tensor = self.rnn(x)[0][-1]
            return out

    problem = Problem(seeded(lambda: TimeFirst().double()), normal(600, 6, 2))
    model = Model.of(problem.module)
    v = ng.Vector({name: torch.ones_like(p) for name, p in model.params.items()})
    batch = Batch(model, problem.x)
    whole, part = (quadratic_forms(batch, ng.Euclidean(), [v], fraction) for fraction in (1.0, 0.5))
    close(part, whole)
