"""Conjugate gradients: the same vector from products only, and an honest report of how it was found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError, NonFiniteError, SingularMetricError
from natgrad.solve.cg import CGInverse
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.optim.tasks import seeded
from tests.pulled import close, covector, normal, pull, random_roots
from tests.solve.matrices import dense, gram, spectral

EXACT = ng.CG(tol=1e-13, max_steps=2000)
STRUCTURES = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(3), ng.Kernel(), ng.Implicit()]


def steps(inverse: CGInverse) -> int:
    assert inverse.report is not None
    return inverse.report.steps


def true_residual(matrix: Tensor, v: Tensor, w: Tensor) -> float:
    return float((w - matrix @ v).norm() / w.norm())


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("name", ["linear_bias", "mlp_tanh", "sequence", "layer_norm", "conv"])
def test_conjugate_gradients_find_what_cholesky_finds(structure: Structure, name: str) -> None:
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem))
    G, w = structure.estimate(pb), covector(pb)
    close(ng.sharp(G, w, EXACT, damping=0.05).flatten(), oracle.damped(G.dense(), w.flatten(), 0.05))


def test_as_many_steps_as_there_are_different_eigenvalues() -> None:
    values = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0, 7.0], dtype=torch.float64)
    matrix, w = spectral(values), normal(6)
    inverse = EXACT.init(dense(matrix))
    close(inverse.solve(w), torch.linalg.solve(matrix, w))
    assert steps(inverse) == 3


# Preconditioning


def scaled_problem() -> zoo.Problem:
    """Inputs of very different scales: an ill-conditioned metric with a telling diagonal."""
    x = normal(40, 12) * torch.logspace(0, -3, 12, dtype=torch.float64)
    return zoo.Problem(zoo.mlp(12, 3).double(), x)


@pytest.mark.parametrize("preconditioner", [ng.Diagonal(), ng.BlockDense(), ng.Dense()], ids=repr)
def test_preconditioned_solve_takes_fewer_steps(preconditioner: Structure) -> None:
    pb = pull(scaled_problem(), ng.Euclidean())
    G, w = ng.Implicit().estimate(pb), covector(pb)
    plain = ng.CG(tol=1e-10, max_steps=2000).init(G, damping=1e-6)
    fast = ng.CG(tol=1e-10, max_steps=2000, preconditioner=preconditioner).init(G, damping=1e-6)
    expected = oracle.damped(G.dense(), w.flatten(), 1e-6)
    plain.sharp(w)
    v = fast.sharp(w).flatten()
    assert steps(fast) < 0.7 * steps(plain)
    assert true_residual(G.dense() + 1e-6 * torch.eye(len(v), dtype=torch.float64), v, w.flatten()) < 1e-9
    close(v, expected, 1e-5)


def test_exact_preconditioner_needs_one_step() -> None:
    pb = pull(scaled_problem(), ng.Euclidean())
    inverse = ng.CG(tol=1e-6, preconditioner=ng.Dense()).init(ng.Implicit().estimate(pb), damping=1e-3)
    inverse.sharp(covector(pb))
    assert steps(inverse) == 1


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_diagonal_preconditions_every_structure(structure: Structure) -> None:
    pb = pull(scaled_problem(), ng.Euclidean())
    G, w = structure.estimate(pb), covector(pb)
    plain, fast = (ng.CG(tol=1e-8, max_steps=3000, preconditioner=p).init(G, 1e-5) for p in (None, ng.Diagonal()))
    plain.sharp(w)
    v = fast.sharp(w).flatten()
    assert steps(fast) <= steps(plain)
    assert true_residual(G.dense() + 1e-5 * torch.eye(len(v), dtype=torch.float64), v, w.flatten()) < 1e-7


def test_preconditioner_that_needs_the_pullback_is_refused_without_one() -> None:
    pb = pull(scaled_problem(), ng.Euclidean())
    G = ng.Dense().estimate(pb)
    with pytest.raises(IncompatibleError, match=r"BlockDense\(\)\) does not work with DenseOperator.*=Diagonal\(\)"):
        ng.CG(preconditioner=ng.BlockDense()).init(G)
    with pytest.raises(IncompatibleError, match="Cholesky does not work with ImplicitOperator"):
        ng.CG(preconditioner=ng.Implicit()).init(ng.Implicit().estimate(pb), 0.1)


def test_singular_preconditioner_asks_for_damping() -> None:
    problem = zoo.case("mlp_tanh").make()
    G = ng.Implicit().estimate(pull(problem, random_roots(problem, 1)))
    with pytest.raises(SingularMetricError, match="Add damping"):
        ng.CG(preconditioner=ng.BlockDense()).init(G)


# Warm start


def test_second_solve_starts_from_the_first() -> None:
    matrix = spectral(torch.logspace(0, -3, 30, dtype=torch.float64))
    w = normal(30)
    inverse = ng.CG(tol=1e-8).init(dense(matrix))
    first = inverse.solve(w)
    cold = steps(inverse)
    assert torch.equal(inverse.solve(w), first)
    assert steps(inverse) == 0
    nearby = w + 1e-3 * normal(30, seed=1)
    v = inverse.solve(nearby)
    assert 0 < steps(inverse) < cold
    assert true_residual(matrix, v, nearby) < 1e-7


def test_solution_is_handed_to_the_next_inverse() -> None:
    matrix = spectral(torch.logspace(0, -3, 30, dtype=torch.float64))
    w = normal(30)
    old = ng.CG(tol=1e-8).init(dense(matrix))
    old.solve(w)
    moved = matrix + 1e-6 * gram(30, 30, seed=3)
    cold, warm = (ng.CG(tol=1e-8).init(dense(moved), warm=tensors) for tensors in (None, old.tensors()))
    close(warm.solve(w), cold.solve(w), 1e-4)
    assert steps(warm) < steps(cold)
    assert ng.CG().init(dense(matrix)).tensors() == {}


def test_guess_that_is_worse_than_nothing_is_dropped() -> None:
    matrix, w = spectral(torch.logspace(0, -2, 10, dtype=torch.float64)), normal(10)
    cold, misled = (ng.CG().init(dense(matrix), warm=t) for t in (None, {"guess": 1e6 * normal(10, seed=1)}))
    assert torch.equal(cold.solve(w), misled.solve(w))
    assert cold.report == misled.report


# Honest reports


def test_report_of_a_solve_that_was_cut_short_tells_the_true_residual() -> None:
    matrix, w = spectral(torch.logspace(0, -6, 50, dtype=torch.float64)), normal(50)
    inverse = ng.CG(tol=1e-10, max_steps=5).init(dense(matrix), damping=1e-7)
    v = inverse.solve(w)
    report = inverse.report
    assert report is not None
    assert (report.converged, report.steps) == (False, 5)
    assert "max_steps=5" in report.reason
    residual = true_residual(matrix + 1e-7 * torch.eye(50, dtype=torch.float64), v, w)
    assert report.residual == pytest.approx(residual, rel=1e-12)
    assert residual > 1e-3


def test_report_of_a_solve_that_converged() -> None:
    matrix, w = spectral(torch.logspace(0, -2, 20, dtype=torch.float64)), normal(20)
    inverse = ng.CG(tol=1e-9).init(dense(matrix))
    v = inverse.solve(w)
    assert inverse.report is not None
    assert inverse.report.converged
    assert inverse.report.residual == pytest.approx(true_residual(matrix, v, w), rel=1e-12)
    assert inverse.report.residual < 1e-8
    assert inverse.report.reason == "converged"


INCONSISTENT: dict[str, Tensor] = {
    "diagonal": torch.diag(torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64)),
    "graded": spectral(torch.cat([torch.logspace(0, -4, 12), torch.zeros(8)]).double()),
    "few rows": gram(5, 30),
    "zero": torch.zeros(3, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_system_without_solution_is_reported_and_not_mistaken_for_an_indefinite_one(name: str) -> None:
    matrix = INCONSISTENT[name]
    w = normal(len(matrix))
    inverse = ng.CG(tol=1e-8).init(dense(matrix))
    v = inverse.solve(w)
    report = inverse.report
    assert report is not None
    assert not report.converged
    assert bool(v.isfinite().all())
    assert report.residual == pytest.approx(true_residual(matrix, v, w), rel=1e-9)
    assert report.residual <= 1.0
    assert "not in the range" in report.reason


@pytest.mark.parametrize("name", ["diagonal", "graded", "few rows"])
def test_solution_of_a_singular_consistent_system_has_the_least_norm(name: str) -> None:
    matrix = INCONSISTENT[name]
    w = matrix @ normal(len(matrix))
    inverse = ng.CG(tol=1e-12, max_steps=500).init(dense(matrix))
    v = inverse.solve(w)
    close(v, oracle.pinv(matrix, w), 1e-7)
    assert inverse.report is not None
    assert inverse.report.converged


@pytest.mark.parametrize("structure", [ng.Implicit(), ng.Kernel()], ids=repr)
def test_undamped_natural_gradient_of_an_overparametrised_model_has_the_least_norm(structure: Structure) -> None:
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, random_roots(problem, 1))
    G = structure.estimate(pb)
    w = G.flat(ng.Vector(covector(pb)))
    close(ng.sharp(G, w, EXACT).flatten(), oracle.pinv(G.dense(), w.flatten(), 1e-12), 1e-8)


def _outside(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor, ng.Covector]:
    """A network with more parameters than rows, and a differential at other inputs, which is not in the range."""
    model = seeded(lambda: zoo.mlp(4, 8, 2)).to(dtype)
    x, other = normal(5, 4).to(dtype), normal(5, 4, seed=1).to(dtype)
    return model, x, other, ng.differential(model, model(other).square().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel(), ng.Implicit()], ids=repr)
def test_a_covector_outside_the_range_of_an_undamped_metric_raises_as_with_cholesky(
    structure: Structure, dtype: torch.dtype
) -> None:
    model, x, _, ω = _outside(dtype)
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
    with pytest.raises(SingularMetricError, match=r"not in the range of the metric.*residual 0\..*: raise the damping"):
        ng.sharp(G, ω, ng.CG())
    with pytest.raises(SingularMetricError, match=r"stopped after max_steps=3, residual .*: raise the damping"):
        ng.sharp(G, ω, ng.CG(max_steps=3))
    ng.sharp(G, ω, ng.CG(), damping=0.1)


def test_natural_gradient_and_the_optimizer_raise_and_leave_the_parameters() -> None:
    model, x, other, _ = _outside()
    with pytest.raises(SingularMetricError, match="not in the range of the metric"):
        ng.natural_gradient(
            model, x, model(other).square().mean(), ng.Euclidean(), structure=ng.Implicit(), solver=ng.CG()
        )
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Implicit(), solver=ng.CG(), damping=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    with pytest.raises(SingularMetricError, match="not in the range of the metric"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_damped_solve_that_is_cut_short_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x, _, ω = _outside()
    G, solver = ng.Implicit().estimate(ng.pullback(model, x, ng.Euclidean())), ng.CG(max_steps=2)
    for _ in range(3):
        ng.sharp(G, ω, solver, damping=1e-6)
    assert [record.message for record in caplog.records if "max_steps=2" in record.message] == [caplog.messages[0]]
    assert "Raise max_steps, tol or the damping" in caplog.messages[0]


def test_indefinite_metric_raises() -> None:
    matrix = spectral(torch.tensor([3.0, 1.0, -1.0, 2.0], dtype=torch.float64))
    with pytest.raises(SingularMetricError, match=r"negative curvature -.* at damping 0.5.*indefinite.*damping > 0"):
        ng.CG().init(dense(matrix), 0.5).solve(normal(4))
    close(EXACT.init(dense(matrix), 1.5).solve(normal(4)), oracle.damped(matrix, normal(4), 1.5))


def test_zero_covector_has_the_zero_vector() -> None:
    inverse = ng.CG().init(dense(gram(3, 5)))
    close(inverse.solve(torch.zeros(5, dtype=torch.float64)), torch.zeros(5, dtype=torch.float64), 0.0)
    assert inverse.report is not None
    assert (inverse.report.steps, inverse.report.residual, inverse.report.converged) == (0, 0.0, True)


def test_spoilt_covector_raises() -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        ng.CG().init(dense(gram(5, 3))).solve(torch.tensor([1.0, torch.nan, 0.0], dtype=torch.float64))


BAD: dict[str, tuple[Callable[[], ng.CG], str]] = {
    "tol": (lambda: ng.CG(tol=0.0), r"CG\(tol=…\) must be positive, got 0.0"),
    "tol NaN": (lambda: ng.CG(tol=float("nan")), r"CG\(tol=…\) must be positive, got nan"),
    "max_steps": (lambda: ng.CG(max_steps=0), r"CG\(max_steps=…\) must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_settings_are_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("preconditioner", [ng.Diagonal, "diagonal", ng.Cholesky()])
def test_a_preconditioner_is_a_structure(preconditioner: Any) -> None:
    with pytest.raises(TypeError, match="preconditioner must be a natgrad Structure, got"):
        ng.CG(preconditioner=preconditioner)


def test_scale_of_the_problem_does_not_matter() -> None:
    """Tolerances are relative: metric and covector in other units take the same steps."""
    matrix, w = spectral(torch.logspace(0, -4, 20, dtype=torch.float64)), normal(20)
    reference = ng.CG().init(dense(matrix))
    v = reference.solve(w)
    for a, b in [(1e-8, 1.0), (1e8, 1.0), (1.0, 1e-8), (1e6, 1e6)]:
        inverse = ng.CG().init(dense(a * matrix))
        close(inverse.solve(b * w) * a / b, v, 1e-5)
        assert abs(steps(inverse) - steps(reference)) <= 1  # the last one is decided by rounding
