"""``LeastSquares`` against J by torch.func: steps in every structure, the solution, its rank and covariance."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks.least_squares import Problem
from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.step import StepRule
from natgrad.structures.base import Structure
from tests.fit.problems import boundary, edges, exact_rows, flat, grid, network, poisson, solution

NIST = [
    Problem(**{**row, "starts": tuple(row["starts"])})
    for row in json.loads(Path(__file__).with_name("nist.json").read_text())
]


def moved(net: nn.Module, **options: object) -> Tensor:
    """The displacement of one step."""
    before = flat(net)
    ng.LeastSquares(poisson(), net, **options).step()  # type: ignore[arg-type]
    return flat(net) - before


@pytest.mark.parametrize(("m", "p"), [(3, 7), (7, 3)])
def test_the_first_damping_is_a_thousandth_of_the_mean_of_the_eigenvalues_that_are_possible(m: int, p: int) -> None:
    A = torch.linspace(-1, 2, m * p, dtype=torch.float64).cos().view(m, p)
    problem = ng.LeastSquares(lambda θ: A @ θ["θ"], {"θ": torch.ones(p, dtype=torch.float64)}, step=ng.Fixed())
    problem.step()
    assert problem.damping == pytest.approx(1e-3 * float(A.square().sum()) / 3, rel=1e-12)


@pytest.mark.parametrize(
    "structure", [ng.Kernel(), ng.Dense(), ng.Implicit(), None], ids=["kernel", "dense", "implicit", "chosen"]
)
@pytest.mark.parametrize("sizes", [(2, 7, 1), (2, 9, 8, 1), (2, 20, 24, 1)], ids=["rows", "parameters", "many"])
def test_a_fixed_step_is_the_damped_least_squares_solution(structure: Structure, sizes: tuple[int, ...]) -> None:
    net = network(*sizes)
    r, J = exact_rows(net)
    λ = 1e-3
    exact = -torch.linalg.lstsq(
        torch.cat([J, math.sqrt(λ) * torch.eye(J.shape[1]).double()]), torch.cat([r, r.new_zeros(J.shape[1])])[:, None]
    ).solution[:, 0]
    solver = ng.CG(tol=1e-13, max_steps=2000) if isinstance(structure, ng.Implicit) else None
    step = moved(net, structure=structure, solver=solver, step=ng.Fixed(), damping=λ)
    assert (step - exact).norm() <= 1e-9 * exact.norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("as_optimizer", [False, True], ids=["problem", "optimizer"])
@pytest.mark.parametrize("kind", ["clipping", "projection"])
def test_a_constrained_step_is_the_clamp_of_the_free_one_by_the_names_of_the_module(
    kind: str, as_optimizer: bool, compiled: bool
) -> None:
    net, λ = network(2, 7, 1), 1e-3
    names = [name for name, _ in net.named_parameters()]
    r, J = exact_rows(net)
    before = flat(net)
    free = before - torch.linalg.solve(J.T @ J + λ * torch.eye(J.shape[1]).double(), J.T @ r)
    exact = dict(zip(names, free.split([p.numel() for p in net.parameters()]), strict=True))
    exact["0.weight"] = exact["0.weight"].clamp(-0.1, 0.1)

    def project(params: dict[str, Tensor]) -> dict[str, Tensor]:
        assert list(params) == names
        return {**params, "0.weight": params["0.weight"].clamp(-0.1, 0.1)}

    constraint = ng.Clipping({"0.weight": (-0.1, 0.1)}) if kind == "clipping" else ng.BackProjection(project)
    rule = ng.Constrained(ng.Fixed(), constraint)
    model: Any = torch.compile(net, backend="eager") if compiled else net
    if as_optimizer:
        opt = ng.GaussNewton(model, poisson(), step=rule, damping=λ)
        opt.step()
        assert opt.last is not None
        reason = opt.last.reason
    else:
        problem = ng.LeastSquares(poisson(), model, step=rule, damping=λ)
        assert list(problem.params) == names
        result = problem.solve(max_steps=1)
        assert list(result.x) == names
        reason = result.history[0].reason
    assert reason.endswith("0.weight")
    torch.testing.assert_close(flat(net), torch.cat(list(exact.values())), rtol=1e-9, atol=1e-9)


def test_the_gram_matrix_is_exact_and_the_loss_is_that_of_the_classes() -> None:
    net = network(2, 9, 8, 1)
    r, J = exact_rows(net)
    problem = ng.LeastSquares(poisson(), net, structure=ng.Kernel())
    result = problem.solve(max_steps=1)
    r, J = exact_rows(net)
    gram = result.jac.gram
    assert (gram - J @ J.T).abs().max() <= 1e-10 * gram.abs().max()
    assert result.cost == pytest.approx(0.5 * float(r @ r), rel=1e-12)
    assert result.history[0].classes.keys() == {"interior", "boundary"}


def test_the_structure_follows_the_sizes_and_the_memory() -> None:
    kinds = [
        ((2, 7, 1), 6, 2**32, "DenseJacobian"),
        ((2, 20, 20, 1), 6, 2**32, "KernelJacobian"),
        ((2, 20, 20, 1), 6, 2**12, "StructuredJacobian"),
        ((2, 7, 1), 30, 2**17, "StructuredJacobian"),
    ]
    for sizes, n, memory, kind in kinds:
        net = network(*sizes)
        r, J = exact_rows(net, n)
        problem = ng.LeastSquares(poisson(n), net, memory=memory, step=ng.Fixed(), damping=1.0)
        before = flat(net)
        assert type(problem.solve(max_steps=1).jac).__name__ == kind
        exact = torch.linalg.solve(J.T @ J + torch.eye(J.shape[1]).double(), J.T @ r)
        assert torch.allclose(before - flat(net), exact, rtol=1e-6, atol=1e-9)


def test_a_gram_matrix_over_the_bound_is_refused_before_it_is_made() -> None:
    problem = ng.LeastSquares(poisson(), network(2, 20, 1), structure=ng.Kernel(), memory=2**14)
    with pytest.raises(MemoryBoundError, match="JJᵀ of 60 residuals"):
        problem.step()


def test_spring_is_the_step_nearest_to_the_last_one() -> None:
    net, λ, μ = network(2, 9, 8, 1), 1e-4, 0.9
    problem = ng.LeastSquares(poisson(), net, step=ng.Spring(decay=μ), damping=λ, lr=0.01)
    problem.step()
    r, J = exact_rows(network(2, 9, 8, 1))
    G = J.T @ J + λ * torch.eye(J.shape[1]).double()
    first = torch.linalg.solve(G, J.T @ r)
    r, J = exact_rows(net)
    before = flat(net)
    problem.step()
    G = J.T @ J + λ * torch.eye(J.shape[1]).double()
    second = torch.linalg.solve(G, J.T @ r + λ * μ * first)  # the minimum of ‖Jφ − r‖² + λ‖φ − μφ'‖²
    step = before - flat(net)
    assert (step - 0.01 * second).norm() <= 1e-7 * step.norm()


@pytest.mark.parametrize(
    "rule",
    [
        ng.GeodesicSearch(),
        ng.LevenbergMarquardt(),
        ng.GridSearch(),
        ng.Armijo(),
        ng.Spring(search=ng.GridSearch()),
        ng.Spring(search=ng.Armijo()),
    ],
    ids=repr,
)
def test_every_searching_rule_lowers_the_loss_in_every_step(rule: StepRule) -> None:
    net = network(2, 12, 1)
    problem = ng.LeastSquares(poisson(), net, step=rule, damping=1e-3)
    losses = [problem.step().cost for _ in range(25)]
    assert all(later <= earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize("structure", [ng.Kernel(), ng.Dense(), ng.Implicit(), ng.Kronecker()], ids=repr)
@pytest.mark.parametrize("λ", [1e-14, 1e-12])
def test_a_singular_jacobian_at_a_tiny_damping_has_a_finite_step(structure: Structure, λ: float) -> None:
    net = network(2, 30, 1)
    x = grid(4).repeat(2, 1)  # every row twice
    residuals = ng.Residuals(lambda net, x: net(x) - solution(x), x)
    problem = ng.LeastSquares(residuals, net, structure=structure, step=ng.GridSearch(), damping=λ)
    records = [problem.step() for _ in range(5)]
    assert flat(net).isfinite().all()
    assert all(record.accepted for record in records)


@pytest.mark.parametrize("rule", [ng.Fixed(), ng.Spring(), ng.GridSearch()], ids=repr)
@pytest.mark.parametrize("structure", [ng.Kernel(), ng.Dense()], ids=["kernel", "dense"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5)], ids=["more unknowns", "more residuals"])
@pytest.mark.parametrize("λ", [0.0, 1e-14])
def test_a_step_at_a_tiny_damping_is_the_solution_of_least_norm(
    rule: StepRule, structure: Structure, shape: tuple[int, int], λ: float
) -> None:
    torch.manual_seed(0)
    A, b = torch.randn(shape).double(), torch.randn(shape[0]).double()
    if shape[0] > shape[1] and isinstance(structure, ng.Kernel):  # J Jᵀ is singular, and b must be in its range
        b = A @ A.T @ b
    θ = {"w": torch.zeros(shape[1]).double()}
    ng.LeastSquares(lambda θ: A @ θ["w"] - b, θ, structure=structure, step=rule, damping=λ).step()
    torch.testing.assert_close(θ["w"], torch.linalg.pinv(A) @ b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sizes", [(2, 24, 1), (2, 8, 8, 1)], ids=["wide", "deep"])
@pytest.mark.parametrize("init", [None, nn.init.xavier_normal_, nn.init.kaiming_normal_, nn.init.orthogonal_])
def test_the_default_converges_from_any_standard_initialisation(
    init: Callable[[Tensor], Tensor] | None, sizes: tuple[int, ...]
) -> None:
    residuals = {
        "interior": ng.Residuals(lambda net, x: ng.pde.laplacian(net, x) + 2 * math.pi**2 * solution(x), grid(7)),
        "boundary": ng.Residuals(boundary, edges(7)),
    }
    for seed in range(5):
        net = network(*sizes, seed=seed)
        for p in net.parameters():
            if init is not None and p.ndim == 2:
                init(p)
        result = ng.LeastSquares(residuals, net).solve(max_steps=30)
        x = grid(9)
        assert (net(x) - solution(x)).norm() < 0.02 * solution(x).norm(), (seed, result.message)


def test_a_slow_start_of_the_default_converges_with_more_steps() -> None:
    """Orthogonal weights in a network of twelve units: the slowest of the seeds that were tried."""
    net = network(2, 12, 1, seed=3)
    for p in net.parameters():
        if p.ndim == 2:
            nn.init.orthogonal_(p)
    ng.LeastSquares(poisson(7, 1.0), net).solve(max_steps=120)
    x = grid(9)
    assert (net(x) - solution(x)).norm() < 0.02 * solution(x).norm()


@pytest.mark.parametrize(
    ("name", "start", "rule", "status"),
    [
        ("Misra1c", 2, ng.LevenbergMarquardt(), -5),  # parameters 500 and 0.0001: their damping is one number
        ("MGH10", 1, ng.LevenbergMarquardt(), -5),
        ("MGH17", 1, None, -5),
        ("Thurber", 2, ng.LevenbergMarquardt(), 2),  # another minimum
        ("Misra1c", 2, None, 1),
        ("BoxBOD", 1, ng.LevenbergMarquardt(), 2),
        ("Lanczos1", 2, None, 3),  # residuals of 1e-13 are rounding, of which a step removes a part
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, StepRule) else str(value),
)
def test_success_is_a_point_from_which_no_undamped_step_lowers_the_loss(
    name: str, start: int, rule: StepRule | None, status: int
) -> None:
    problem = next(each for each in NIST if each.name == name)
    r, θ = problem.residuals(), {"b": torch.tensor(problem.starts[start - 1]).double()}
    first = float(r(θ["b"]).norm())
    result = ng.LeastSquares(lambda θ: r(θ["b"]), θ, step=rule).solve(max_steps=300)
    J = torch.func.jacrev(r)(θ["b"])
    δ = np.linalg.lstsq((J / J.norm(dim=0).clamp(min=1e-200)).numpy(), -r(θ["b"]).numpy(), rcond=1e-14)[0]
    removed = float((J / J.norm(dim=0).clamp(min=1e-200) @ torch.from_numpy(δ)).norm())
    small = removed < max(1e-5 * float(r(θ["b"]).norm()), 1e-10 * first)
    assert (result.status, result.success, small) == (status, small, status != -5)


def test_a_linear_fit_has_the_covariance_of_the_textbook() -> None:
    torch.manual_seed(0)
    x, noise = torch.linspace(-1, 2, 30).double(), torch.randn(30).double()
    A = torch.stack([x, torch.ones_like(x)], 1)
    t = A @ torch.tensor([2.0, -1.0]).double() + 0.1 * noise
    θ = {"slope": torch.zeros(1).double(), "offset": torch.zeros(1).double()}
    result = ng.LeastSquares(lambda θ: θ["slope"] * x + θ["offset"] - t, θ).solve()
    exact = torch.linalg.lstsq(A, t[:, None]).solution[:, 0]
    assert result.success, result.message
    assert torch.allclose(torch.cat(list(result.x.values())), exact, rtol=1e-9)
    σ2 = (A @ exact - t).square().sum() / 28
    assert torch.allclose(result.covariance, σ2 * torch.linalg.inv(A.T @ A), rtol=1e-8)
    assert result.rank == 2
    assert result.standard_errors["slope"].shape == (1,)


def linear_fit(A: Tensor, t: Tensor, structure: Structure | None = None, memory: int = 10**8) -> ng.LeastSquares:
    residuals = ng.Residuals(lambda θ, A, t: A @ θ["b"] - t, (A, t), reduction="sum")
    return ng.LeastSquares(residuals, {"b": A.new_zeros(A.shape[1])}, structure=structure, memory=memory)


@pytest.mark.parametrize("structure", [ng.Kernel(), ng.Dense(), None], ids=["kernel", "dense", "chosen"])
@pytest.mark.parametrize("shape", [(8, 12), (30, 6)], ids=["wide", "tall"])
def test_the_rank_is_that_of_the_jacobian_in_every_structure(
    structure: Structure | None, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    A = torch.randn(shape[0], 3).double() @ torch.randn(3, shape[1]).double()
    result = linear_fit(A, torch.randn(shape[0]).double(), structure).solve(max_steps=2)
    assert result.rank == np.linalg.matrix_rank(A.numpy()) == 3
    assert bool((result.covariance == math.inf).all())


@pytest.mark.parametrize(("structure", "memory"), [(ng.Dense(), 1000), (ng.Kernel(), 6000)], ids=["normal", "gram"])
def test_a_jacobian_that_does_not_fit_into_memory_has_a_rank(structure: Structure, memory: int) -> None:
    torch.manual_seed(0)
    wide = isinstance(structure, ng.Kernel)
    A = torch.randn(8, 3).double() @ torch.randn(3, 60).double() if wide else torch.randn(30, 6).double()
    A = A if wide else torch.cat([A[:, :5], A[:, :1]], 1)
    result = linear_fit(A, torch.randn(len(A)).double(), structure, memory).solve(max_steps=2)
    assert result.rank == np.linalg.matrix_rank(A.numpy())


@pytest.mark.parametrize("structure", [ng.Kernel(), ng.Dense()], ids=["kernel", "dense"])
@pytest.mark.parametrize("small", [1e-4, 1e-7, 1e-9])
def test_the_covariance_of_nearly_dependent_columns_is_that_of_a_qr(structure: Structure, small: float) -> None:
    torch.manual_seed(0)
    A = torch.randn(30, 3).double()
    A[:, 2] = A[:, 0] + small * A[:, 2]
    result = linear_fit(A, torch.randn(30).double(), structure).solve(max_steps=2)
    inverse = np.linalg.inv(np.linalg.qr(A.numpy()).R)
    exact = torch.from_numpy(inverse @ inverse.T) * (2 * result.cost / 27)
    assert (result.covariance - exact).abs().max() <= 1e-6 * exact.abs().max()
    assert (result.covariance_of("b") - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("structure", [ng.Kernel(), ng.Dense()], ids=["kernel", "dense"])
def test_short_steps_in_a_flat_valley_are_no_success(structure: Structure) -> None:
    torch.manual_seed(0)
    A, noise = torch.randn(30, 3).double(), torch.randn(30).double()
    A[:, 2] = A[:, 0] + 1e-9 * A[:, 2]
    t = A.sum(1) + 0.1 * noise
    result = linear_fit(A, t, structure).solve(max_steps=50)
    least = 0.5 * float((torch.linalg.qr(A).Q.T @ t).square().sum().neg() + t.square().sum())
    assert result.success == (result.cost < (1 + 1e-6) * least)


@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_the_covariance_of_a_parameter_does_not_depend_on_the_units_of_others(unit: float) -> None:
    x = torch.linspace(0, 1, 30).double()
    A = torch.stack([x, unit * x.cos()], 1)
    result = linear_fit(A, x.sin()).solve(max_steps=2)
    scaled = A / torch.tensor([1.0, unit]).double()
    exact = torch.linalg.inv(scaled.T @ scaled) / torch.outer(*[torch.tensor([1.0, unit]).double()] * 2)
    assert result.rank == 2
    assert torch.allclose(result.covariance_of("b", variance=1.0) / exact, torch.ones(2, 2).double(), rtol=1e-10)


def test_later_steps_do_not_change_an_earlier_result() -> None:
    x = torch.linspace(0, 1, 20).double()[:, None]
    line = nn.Linear(1, 1).double()
    first = ng.LeastSquares(ng.Residuals(lambda net, x: net(x) - x.exp(), x), line).solve()
    before = {name: t.clone() for name, t in first.x.items()}
    ng.LeastSquares(ng.Residuals(lambda net, x: net(x) - x.sin(), x), line).solve()
    A = torch.cat([x, torch.ones_like(x)], 1)
    assert all(torch.equal(first.x[name], t) for name, t in before.items())
    assert torch.allclose(first.covariance, torch.linalg.inv(A.T @ A) * (2 * first.cost * 20 / 18), rtol=1e-9)


def test_the_scale_of_the_mean_does_not_change_the_covariance() -> None:
    x = torch.linspace(0, 1, 20).double()[:, None]
    t = 3 * x + 0.1 * (40 * x).sin()
    out = []
    for reduction in ("mean", "sum"):
        line = nn.Linear(1, 1).double()
        residuals = ng.Residuals(lambda net, x: net(x) - t, x, reduction=reduction)
        out.append(ng.LeastSquares(residuals, line).solve().covariance)
    assert torch.allclose(out[0], out[1], rtol=1e-7)


@pytest.mark.parametrize("as_module", [False, True], ids=["dict", "module"])
def test_a_class_without_points_may_be_one_number(as_module: bool) -> None:
    """The mean of a network, say. Here: a = 1, 2, 3 and Σ a = 0, by the normal equations."""
    a, data = torch.zeros(3, 1).double(), torch.tensor([[1.0], [2.0], [3.0]]).double()
    model = nn.Linear(1, 3, bias=False).double() if as_module else {"weight": a}
    weight: Callable[[Any], Tensor] = (lambda m: m.weight) if as_module else (lambda m: m["weight"])
    total = ng.Residuals(lambda m: weight(m).sum())
    result = ng.LeastSquares([ng.Residuals(lambda m: weight(m) - data, reduction="sum"), total], model).solve()
    normal = torch.eye(3).double() + torch.ones(3, 3).double()
    torch.testing.assert_close(result.x["weight"], torch.linalg.solve(normal, data), rtol=1e-8, atol=1e-8)
    assert result.shape == (4, 3)


def test_points_may_be_drawn_anew_for_every_step() -> None:
    net, generator = network(2, 16, 1), torch.Generator().manual_seed(0)
    residuals = ng.Residuals(
        lambda net, x: net(x) - solution(x), lambda: torch.rand(60, 2, generator=generator, dtype=torch.float64)
    )
    problem = ng.LeastSquares(residuals, net, step=ng.Spring(search=ng.GridSearch()), damping=1e-6)
    result = problem.solve(max_steps=40, ftol=1.0, xtol=1.0)  # which are for points that stay
    assert len(result.history) == 40
    assert result.status == 0
    assert result.cost < 1e-3


def test_stopping_rules_are_named() -> None:
    def solved(**rules: float) -> ng.FitResult:
        return ng.LeastSquares(poisson(4), network(2, 5, 1)).solve(**rules)  # type: ignore[arg-type]

    assert solved(cost=1.0).status == 5
    assert solved(gtol=1e3).status == 1
    assert solved(ftol=0.5).status == 2
    assert solved(xtol=0.5).status == 3
    assert "max_steps" in solved(max_steps=2).message
    assert len(solved(seconds=0.0).history) == 1
    stopped = ng.LeastSquares(poisson(4), network(2, 5, 1)).solve(callback=lambda record: record.step == 3)
    assert (stopped.status, len(stopped.history), stopped.success) == (-2, 3, False)


def test_a_loss_that_rises_has_not_converged() -> None:
    """Whole Gauss–Newton steps with little damping, far from the minimum."""
    problem = ng.LeastSquares(poisson(4), network(2, 12, 12, 1), step=ng.Fixed(), damping=1e-10)
    result = problem.solve(max_steps=4)
    assert any(after.cost > before.cost for before, after in pairwise(result.history))
    assert (result.status, result.success) == (0, False)


def test_kronecker_factors_precondition_the_step() -> None:
    net = network(2, 16, 1)
    residuals = ng.Residuals(lambda net, x: net(x) - solution(x), grid(8))
    problem = ng.LeastSquares(residuals, net, structure=ng.Kronecker(), step=ng.GridSearch(), damping=1e-4)
    losses = [problem.step().cost for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]


def test_kronecker_factors_of_one_layer_are_the_metric_of_all_classes() -> None:
    """Of a linear layer with one output S is a number, so that A ⊗ S is G, whatever the weights of the classes."""
    net, λ = network(2, 1), 1e-3
    residuals = [
        ng.Residuals(lambda net, x: net(x) - solution(x), grid(4), weight=0.3),
        ng.Residuals(lambda net, x: net(x) - 1, edges(3), weight=5.0, reduction="sum"),
    ]
    gradient = torch.zeros(3).double()
    G = λ * torch.eye(3).double()
    for each, x, weight in zip(residuals, (grid(4), edges(3)), (0.3 / 16, 5.0), strict=True):
        rows = torch.cat([x, torch.ones(len(x), 1).double()], 1)
        G += weight * rows.T @ rows
        gradient += weight * rows.T @ each.function(net, x)[:, 0].detach()
    before = flat(net)
    ng.LeastSquares(residuals, net, structure=ng.Kronecker(), step=ng.Fixed(), damping=λ).step()
    torch.testing.assert_close(before - flat(net), torch.linalg.solve(G, gradient), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", [ng.Kernel(), ng.Dense()], ids=["kernel", "dense"])
@pytest.mark.parametrize("rule", [ng.GeodesicSearch(), ng.GeodesicCorrected(limit=9.0)], ids=repr)
def test_the_step_bends_with_the_second_derivative_of_the_residuals(rule: StepRule, structure: Structure) -> None:
    """δ = w − ½(JᵀJ + λ)⁻¹Jᵀr″ with r″ along w, which is exact where the residuals are quadratic."""
    generator, λ = torch.Generator().manual_seed(0), 1e-2
    A, Q, b = (torch.randn(*shape, generator=generator).double() for shape in ((6, 4), (6, 4, 4), (6,)))
    θ = {"x": torch.zeros(4).double()}
    problem = ng.LeastSquares(
        lambda θ: A @ θ["x"] + 0.01 * (Q @ θ["x"]) @ θ["x"] - b, θ, structure=structure, step=rule, damping=λ
    )
    assert problem.step().accepted
    inverse = torch.linalg.inv(A.T @ A + λ * torch.eye(4).double())
    w = inverse @ A.T @ b
    bend = -inverse @ A.T @ (0.01 * ((Q + Q.mT) @ w) @ w)
    torch.testing.assert_close(θ["x"], w + 0.5 * bend, rtol=1e-9, atol=1e-9)


def test_the_optimizer_makes_the_steps_of_the_problem_and_resumes() -> None:
    nets = [network(2, 9, 1) for _ in range(3)]
    rule = ng.Spring(decay=0.5, search=ng.GridSearch())
    problem = ng.LeastSquares(poisson(4), nets[0], step=rule, damping=1e-4)
    opt = ng.GaussNewton(nets[1], poisson(4), step=rule, damping=1e-4)
    for _ in range(4):
        assert float(opt.step()) == problem.step().cost
    nets[2].load_state_dict(nets[1].state_dict())
    again = ng.GaussNewton(nets[2], poisson(4), step=rule)
    again.load_state_dict(opt.state_dict())
    assert float(opt.step()) == float(again.step())
    assert torch.equal(flat(nets[1]), flat(nets[2]))


def test_a_problem_resumes_with_the_momentum_of_the_same_parameters() -> None:
    nets = [network(2, 9, 1) for _ in range(2)]
    rule = ng.Spring(decay=0.5, search=ng.GridSearch())
    first, again = (ng.LeastSquares(poisson(4), net, step=rule, damping=1e-4) for net in nets)
    first.step()
    nets[1].load_state_dict(nets[0].state_dict())
    state = first.state_dict()
    assert list(state["velocity"]) == [name for name, _ in nets[0].named_parameters()]
    other = {**state, "velocity": {f"net.{name}": t for name, t in state["velocity"].items()}}
    with pytest.raises(ValueError, match=r"of the parameters net\.0\.weight.*here they are 0\.weight.*rename those in"):
        again.load_state_dict(other)
    again.load_state_dict(state)
    assert first.step().cost == again.step().cost
    assert torch.equal(flat(nets[0]), flat(nets[1]))


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "damping": ({"damping": -1.0}, "damping must be a finite number"),
    "steps": ({"steps": -3}, '"steps" of the state is -3'),
    "shape": ({"velocity": {"x": torch.zeros(2)}}, r"the momentum of x in the state has the shape \[2\]"),
    "numbers": ({"velocity": {"x": torch.full((4,), math.nan)}}, "the momentum of x in the state holds NaN"),
    "names": ({"velocity": {"z": torch.zeros(4)}}, "of the parameters z, and here they are x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_of_a_problem_is_refused(damage: str) -> None:
    θ = {"x": torch.ones(4).double()}
    problem = ng.LeastSquares(lambda θ: θ["x"] ** 2 - 2, θ, step=ng.Spring(decay=0.5), damping=1e-2)
    problem.step()
    state, (entry, message) = problem.state_dict(), DAMAGE[damage]
    with pytest.raises((ValueError, NonFiniteError), match=message):
        problem.load_state_dict(state | entry)
    with pytest.raises(ValueError, match="the state has no steps: it is incomplete"):
        problem.load_state_dict({key: value for key, value in state.items() if key != "steps"})
    assert problem.state_dict()["steps"] == 1
    assert problem.damping == state["damping"]


def test_a_parameter_has_a_covariance_where_others_have_none() -> None:
    x = torch.linspace(0, 1, 30).double()
    t = 2 * x + 0.1 * (30 * x).sin()
    θ = {"slope": torch.ones(1).double(), "a": torch.ones(1).double(), "b": torch.ones(1).double()}
    result = ng.LeastSquares(lambda θ: θ["slope"] * x + θ["a"] + θ["b"] - t, θ).solve()
    A = torch.stack([x, torch.ones_like(x)], 1)
    fit = torch.linalg.lstsq(A, t[:, None]).solution[:, 0]
    inverse = torch.linalg.inv(A.T @ A)[0, 0]
    assert result.rank == 2
    assert float(result.covariance_of("slope")) == pytest.approx(float((A @ fit - t).square().sum() / 28 * inverse))
    assert float(result.covariance_of("slope", variance=4.0)) == pytest.approx(4 * float(inverse))
    assert float(result.covariance_of("a")) == math.inf
    finite = result.covariance.isfinite()
    assert finite.tolist() == [[True, False, False], [False, False, False], [False, False, False]]
    torch.testing.assert_close(result.covariance[0, 0], result.covariance_of("slope")[0, 0])
    with pytest.raises(ValueError, match="no parameter 'c': there are slope, a, b"):
        result.covariance_of("c")
