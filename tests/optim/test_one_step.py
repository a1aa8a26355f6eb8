"""One step of the optimizer against the oracle, for every structure with every solver that it has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests import oracle
from tests.golden import golden, names, tensor
from tests.optim.tasks import KINDS, Rosenbrock, half_square, seeded, silent, task
from tests.zoo import ZOO, Case

Kept = Callable[[Tensor, nn.Module], Tensor]

STRUCTURES: dict[str, tuple[ng.structures.Structure, Kept]] = {
    "dense": (ng.Dense(), lambda G, _: G),
    "block_dense": (ng.BlockDense(), lambda G, m: oracle.block_diagonal(G, oracle.layer_blocks(m).values())),
    "diagonal": (ng.Diagonal(), lambda G, _: oracle.diagonal(G)),
    "low_rank": (ng.LowRank(5), lambda G, _: oracle.low_rank(G, 5)),
    "kernel": (ng.Kernel(), lambda G, _: G),
    "implicit": (ng.Implicit(), lambda G, _: G),
}
SOLVERS = {"cholesky": ng.Cholesky(), "pinv": ng.Pinv(), "cg": ng.CG(tol=1e-13, max_steps=500)}
REFUSED = [("low_rank", "pinv"), ("implicit", "pinv"), ("implicit", "cholesky")]
PAIRS = [(a, b) for a in STRUCTURES for b in SOLVERS if (a, b) not in REFUSED]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("structure", "solver"), PAIRS)
def test_a_step_is_minus_lr_times_the_damped_inverse_of_the_metric(kind: str, structure: str, solver: str) -> None:
    of = task(kind, n=5)
    kept, keep = STRUCTURES[structure]
    G = keep(of.metric(), of.model)
    expected = of.theta() - 0.3 * oracle.damped(G, of.gradient(), 0.1)
    of.step(of.optimizer(structure=kept, solver=SOLVERS[solver], lr=0.3, damping=0.1))
    torch.testing.assert_close(of.theta(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", ["dense", "kernel"])
def test_without_damping_pinv_takes_the_step_of_least_norm(structure: str) -> None:
    of = task("classes", n=5)  # 5 examples with one free logit: rank 5 of 17
    expected = of.theta() - 0.3 * oracle.pinv(of.metric(), of.gradient())
    of.step(of.optimizer(structure=STRUCTURES[structure][0], solver=ng.Pinv(rtol=1e-10), lr=0.3, damping=0.0))
    torch.testing.assert_close(of.theta(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("structure", "solver"), REFUSED)
def test_a_structure_without_that_inverse_is_refused_and_nothing_changes(structure: str, solver: str) -> None:
    of = task()
    opt = of.optimizer(structure=STRUCTURES[structure][0], solver=SOLVERS[solver], damping=0.1)
    before = of.theta()
    of.closure(opt)()
    with pytest.raises(ng.errors.IncompatibleError, match="does not work with"):
        opt.step()
    assert torch.equal(of.theta(), before)


MODULES = [case for case in ZOO if isinstance(case.make().model, nn.Module)]


@pytest.mark.parametrize("case", MODULES, ids=[case.name for case in MODULES])
def test_a_step_is_right_for_every_model_of_the_zoo(case: Case) -> None:
    """Tied weights, frozen layers, dicts, several inputs, a root module that is itself a layer."""
    problem = case.make()
    model, output = problem.module, problem.output
    params = oracle.parameters(model)
    options: dict[str, Any] = {} if output is None else {"output": output}
    opt = ng.NaturalGradient(model, ng.Euclidean(), lr=0.5, damping=0.1, **options)
    with silent(model):
        J, y = problem.jacobian(), problem.outputs()
        ω = oracle.differential(model, half_square(y, torch.ones_like(y)))
    expected = oracle.flatten(params.values()) - 0.5 * oracle.damped(oracle.dense(J, oracle.euclidean(y)), ω, 0.1)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    y = problem.outputs()
    half_square(y, torch.ones_like(y)).backward()
    opt.step()
    torch.testing.assert_close(oracle.flatten(params.values()), expected, rtol=1e-9, atol=1e-11)
    assert all(torch.equal(model.get_parameter(name), p) for name, p in frozen.items())


def test_a_pass_seen_by_the_hook_and_one_by_refresh_give_the_same_step() -> None:
    seen, refreshed = task("coins"), task("coins")
    seen.step(seen.optimizer(damping=0.1))
    opt = refreshed.optimizer(damping=0.1)
    opt.refresh(refreshed.x)
    with silent(refreshed.model):
        refreshed.loss().backward()
    opt.step()
    assert torch.equal(seen.theta(), refreshed.theta())


@pytest.mark.parametrize("name", [n for n in names("rosenbrock.ngd.") if "alpha0" in n])
def test_the_iterates_on_rosenbrock_are_the_golden_ones(name: str) -> None:
    """alpha = ½ is Gauss–Newton and reaches the optimum in two steps."""
    case = golden(name)
    first, second = case["inputs"]["x0"]
    model = Rosenbrock((first, second))
    opt = ng.NaturalGradient(model, ng.Euclidean(), lr=case["inputs"]["alpha"], damping=0.0)
    iterates = [model.point.detach().clone()]
    for _ in case["expected"]["iterates"][1:]:
        opt.zero_grad()
        model().square().sum().backward()
        opt.step()
        iterates.append(model.point.detach().clone())
    expected = tensor(case["expected"]["iterates"])
    torch.testing.assert_close(torch.stack(iterates), expected, rtol=max(case["rtol"], 1e-9), atol=1e-9)


def test_the_same_step_with_and_without_a_closure() -> None:
    plain, closed = task(), task()
    plain.step(plain.optimizer())
    opt = closed.optimizer()
    value = opt.step(closed.closure(opt))
    assert torch.equal(plain.theta(), closed.theta())
    assert float(value.detach()) == float(task().loss().detach())


def test_a_closure_need_not_return_the_loss_to_a_rule_that_does_not_look_at_it() -> None:
    plain, of = task(), task()
    plain.step(plain.optimizer())
    opt = of.optimizer()

    def nothing() -> None:
        of.closure(opt)()

    assert opt.step(nothing) is None
    assert torch.equal(plain.theta(), of.theta())


def test_the_last_step_and_the_report_of_the_solver_can_be_read() -> None:
    of = task()
    opt = of.optimizer(structure=ng.Implicit(), solver=ng.CG(tol=1e-8), damping=0.1)
    before = of.theta()
    of.step(opt)
    assert opt.last is not None
    torch.testing.assert_close(of.theta() - before, opt.last.displacement.flatten(), rtol=0, atol=1e-14)
    report: Any = opt.preconditioner.inverse
    assert report.report.converged
    assert 0 < report.report.steps <= 17
    assert report.report.residual <= 1e-7


def test_a_metric_that_couples_examples_trains_too() -> None:
    """GradientCovariance: C = 1 − 11ᵀ/N, G = (1/N) Σ_nm C_nm ∇ℓ_n ∇ℓ_mᵀ."""
    of = task()
    J = oracle.module_jacobian(of.model, of.x)
    roots = (of.model(of.x).detach() - of.t)[None]
    n = len(of.x)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    G = oracle.dense_coupled(J, roots, centring)
    expected = of.theta() - 0.3 * oracle.damped(G, of.gradient(), 0.1)
    metric = ng.GradientCovariance(lambda y, t: 0.5 * (y - t).square().sum())
    opt = of.optimizer(metric=metric, lr=0.3, damping=0.1)
    opt.refresh(of.x, of.t)
    of.loss().backward()
    opt.step()
    torch.testing.assert_close(of.theta(), expected, rtol=1e-9, atol=1e-11)


def test_a_float32_model_keeps_its_dtype() -> None:
    model = seeded(lambda: nn.Linear(2, 2))
    opt = ng.NaturalGradient(model, ng.Euclidean(), momentum=0.9)
    model(torch.ones(3, 2)).square().sum().backward()
    opt.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert opt.state[model.weight]["momentum"].dtype == torch.float32


def test_what_a_step_does_with_the_vector_does_not_reach_the_solver() -> None:
    """Conjugate gradients start from their last solution, not from the velocity that was made of it."""
    of = task()
    solver = ng.CG(tol=1e-12, max_steps=500)
    opt = of.optimizer(structure=ng.Implicit(), solver=solver, step=ng.KLClip(1e-9), momentum=0.9, damping=0.1)
    for _ in range(2):
        of.step(opt)
    expected = of.theta()
    v = oracle.damped(of.metric(), of.gradient(), 0.1)
    of.step(opt)
    assert opt.preconditioner.inverse is not None
    torch.testing.assert_close(opt.preconditioner.inverse.tensors()["guess"], v, rtol=1e-6, atol=1e-9)
    assert not torch.equal(of.theta(), expected)
