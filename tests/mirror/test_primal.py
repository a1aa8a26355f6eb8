"""Riemannian primal descent: Grad and Prog, the promise of every step, and the two rates with their constants."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import DomainError, GuaranteeError, NonFiniteError, SingularMetricError
from natgrad.mirror import Box, Doubling, HessianMetric, MatrixMetric, PrimalDescent, Report
from tests.golden import tensor
from tests.mirror.cases import MATRIX, close, gradient, objective

EYE = torch.eye(3, dtype=torch.float64)
H = torch.diag(torch.tensor([4.0, 1.0, 0.5], dtype=torch.float64))  # L = 4, m = ½
START = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
MINIMUM = torch.tensor([0.3, -0.1, 0.7], dtype=torch.float64)


def bowl(x: Tensor) -> Tensor:
    return (x - MINIMUM) @ H @ (x - MINIMUM) / 2


def curved(x: Tensor) -> Tensor:
    """1 ≤ g(x) ≤ 3, and it turns from place to place."""
    direction = torch.stack([x[0].cos(), x[0].sin(), x[1].sin()])
    return EYE + direction.outer(direction)


def test_grad_is_the_minimum_of_the_quadratic_model_and_prog_is_its_depth() -> None:
    """Bai, Rosenberg and Xu (2022), definition 12; the slope of the model at y is ∂f + CL g(y − x), without a 2."""
    ω, α = gradient(objective, START), 2.5
    descent = PrimalDescent(MatrixMetric(curved), lipschitz=0.5, C=5.0)
    y = descent.grad(objective, START)
    close(ω + α * curved(START) @ (y - START), torch.zeros_like(ω))
    depth = -(ω @ (y - START) + α / 2 * (y - START) @ curved(START) @ (y - START))
    close(descent.prog(objective, START), depth)
    close(-descent.surrogate(y, START, ω, α), depth)


def test_in_the_euclidean_metric_it_is_gradient_descent() -> None:
    descent = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), lipschitz=4.0)
    ω = gradient(bowl, START)
    close(descent.grad(bowl, START), START - ω / 4)
    close(descent.prog(bowl, START), ω @ ω / 8)


def test_points_have_any_shape() -> None:
    """A matrix of rates is stepped as its entries are."""
    x = torch.tensor([[0.5, 2.0, 1.0], [3.0, 0.1, 0.7]], dtype=torch.float64)
    descent = PrimalDescent(HessianMetric(ng.mirror.NegativeEntropy()), lipschitz=10.0)
    trace = descent.run(lambda x: (x - 1).square().sum() / 2, x, steps=1)
    close(trace.point, x - x * (x - 1) / 10)
    close(trace.progress[0], (x * (x - 1).square()).sum() / 20)


def test_the_decrease_of_a_parabola_is_exactly_prog() -> None:
    """D_k − D_{k+1} = ‖∇f‖²/2CL for f = Lx²/2, half of what the proof in the paper says."""
    trace = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), lipschitz=7.0).run(
        lambda x: 7 * x @ x / 2, START, steps=1
    )
    close(trace.decrease, trace.progress)
    close(trace.progress, (7 * START) @ (7 * START)[:, None] / 14)


def test_a_convex_function_comes_within_2lcr2_over_t() -> None:
    """Bai, Rosenberg and Xu (2022), lemma 16, with R in the metric at x_k, at every T."""
    f = _valley
    trace = PrimalDescent(MatrixMetric(curved), lipschitz=1.0).run(f, START, steps=60)
    distances = [float((x @ curved(x) @ x) ** 0.5) for x in trace.points]
    for T in range(1, 61):
        R = max(distances[:T])
        assert float(f(trace.points[T]) - f(torch.zeros_like(START))) <= 2 * R**2 / T
    close(trace.bound(torch.zeros_like(START)), tensor(2 * max(distances[:60]) ** 2 / 60))


def _valley(x: Tensor) -> Tensor:
    """Σ √(1 + x²): convex, L = 1, its curvature vanishes far out."""
    return (1 + x.square()).sqrt().sum()


def test_the_radius_in_the_metric_of_the_minimum_would_promise_too_much() -> None:
    """g(x) = 1 + 1000x² is 1 at the minimum, but slows the steps down where they are taken."""
    trace = PrimalDescent(MatrixMetric(lambda x: (1 + 1000 * x**2)[:, None]), lipschitz=1.0).run(
        lambda x: (x**2).sum() / 2, torch.ones(1, dtype=torch.float64), steps=100
    )
    reached = float(trace.values[-1])
    assert reached > 2 * 1.0**2 / 100
    assert reached <= float(trace.bound(torch.zeros(1, dtype=torch.float64)))


def test_a_strongly_convex_function_converges_linearly() -> None:
    """D_T ≤ D_0 (1 − μ/CL)^T with μ = m/3: H ≥ m in the Euclidean norm, and g ≤ 3."""
    μ, α = 0.5 / 3, 4.0
    trace = PrimalDescent(MatrixMetric(curved), lipschitz=α).run(bowl, START, steps=80)
    for T in range(1, 81):
        assert float(trace.values[T]) <= float(bowl(START)) * (1 - μ / α) ** T
    close(trace.linear_bound(MINIMUM, μ), bowl(START) * (1 - μ / α) ** 80)


def test_a_constant_that_is_too_small_is_refused_with_the_step_and_the_remedy() -> None:
    descent = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), lipschitz=1.0)
    with pytest.raises(GuaranteeError, match=r"step 0: f fell by .*α = 1 is too small.*raise lipschitz or C"):
        descent.run(bowl, START, steps=5)


def test_a_step_that_leaves_for_infinity_is_refused_too() -> None:
    descent = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), lipschitz=1e-3)
    with pytest.raises(GuaranteeError, match="step 0: f fell by nan"):
        descent.run(lambda x: (x + 4).log().sum(), START, steps=1)


def test_broken_promises_are_reported_by_step() -> None:
    """The steep direction diverges, by a factor of 4/3 a step, until it outweighs the others' decrease."""
    trace = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), 1.7, policy=Report()).run(bowl, START, steps=6)
    expected = [k for k in range(6) if float(trace.decrease[k]) < float(trace.progress[k])]
    assert [violation.step for violation in trace.violations] == expected
    assert expected
    assert "raise lipschitz" in trace.violations[0].message
    assert trace.violations[0].constant == pytest.approx(1.7)


def test_doubling_finds_a_constant_within_twice_the_smallest_that_does() -> None:
    f = lambda x: 2 * x @ x  # noqa: E731 (L = 4 in every direction)
    trace = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), 0.03, policy=Doubling()).run(f, START, steps=10)
    assert trace.violations == ()
    assert trace.constants.tolist() == [0.03 * 2**8] * 10  # 0.03 · 2⁷ < 4 ≤ 0.03 · 2⁸
    assert float(trace.values[-1]) <= float(trace.bound(torch.zeros_like(START)))


def test_the_bound_of_growing_constants_weighs_every_step_by_its_own() -> None:
    """2R²/Σ 1/α_k: f = cosh is flat first."""
    f = lambda x: x.cosh().sum()  # noqa: E731
    trace = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), 0.6, policy=Doubling()).run(f, START / 10, steps=5)
    R2 = max(float(x @ x) for x in trace.points[:-1])
    close(trace.bound(torch.zeros_like(START)), 2 * R2 / (1 / trace.constants).sum())
    assert trace.violations == ()


def test_doubling_comes_back_into_the_domain_of_the_metric() -> None:
    g = HessianMetric(ng.mirror.LogBarrier())
    f, x = (lambda x: 3 * x.sum()), torch.tensor([2.0, 5.0], dtype=torch.float64)  # x − 3x²/α > 0 for α > 15
    trace = PrimalDescent(g, 1.0, policy=Doubling()).run(f, x, steps=1)
    assert trace.constants.tolist() == [16.0]
    with pytest.raises(DomainError, match=r"x\[0\] = -10 must be above 0"):
        PrimalDescent(g, 1.0).run(f, x, steps=1)


def test_a_function_without_smoothness_is_not_doubled_for_ever() -> None:
    cliff = lambda x: torch.where(x < 0, x + 1, x).sum()  # noqa: E731
    descent = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), 1.0, policy=Doubling(20))
    with pytest.raises(
        GuaranteeError, match=r"α was doubled 20 times and no step kept its promise.*step 0: f fell by -"
    ):
        descent.run(cliff, torch.zeros(1, dtype=torch.float64), steps=1)


@pytest.mark.parametrize("unit", [1.0, 1e-10, 1e-30, 1e30])
def test_in_a_box_grad_is_the_best_of_all_faces(unit: float) -> None:
    """Compared with the minimum over every choice of entries that are fixed at a bound, in any unit of length."""
    generator = torch.Generator().manual_seed(0)
    box = Box(-unit * torch.ones(4).double(), unit * torch.ones(4).double())
    for _ in range(20):
        A, ω, x = (torch.randn(*shape, generator=generator).double() for shape in ((4, 4), (4,), (4,)))
        M, x = A @ A.T + 0.1 * torch.eye(4).double(), x.clamp(-0.9, 0.9)
        descent = PrimalDescent(MatrixMetric(partial(_always, M)), 1.5, region=box)
        linear = partial(torch.dot, unit * ω)
        expected, depth = _best_face(1.5 * M, ω, x)
        close(descent.grad(linear, unit * x) / unit, expected, 1e-9)
        close(descent.prog(linear, unit * x) / unit**2, depth, 1e-9)


def _always(M: Tensor, x: Tensor) -> Tensor:
    return M


def _best_face(M: Tensor, ω: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    best, where = math.inf, x
    for face in itertools.product([-1.0, 0.0, 1.0], repeat=4):
        side = torch.tensor(face, dtype=torch.float64)
        free = side == 0
        d = torch.where(free, 0, side - x)
        d[free] = -torch.linalg.solve(M[free][:, free], ω[free] + M[free][:, ~free] @ d[~free])
        value = float(ω @ d + d @ M @ d / 2)
        if bool(((x + d).abs() <= 1 + 1e-12).all()) and value < best:
            best, where = value, x + d
    return where, torch.tensor(-best, dtype=torch.float64)


def test_in_a_box_every_step_keeps_its_promise_and_both_rates_hold() -> None:
    """The minimum of the bowl is outside: x* is on a face."""
    box = Box(torch.full((3,), 0.5).double(), torch.full((3,), 3.0).double())
    x_star = MINIMUM.clamp(0.5, 3.0)  # H is diagonal
    trace = PrimalDescent(MatrixMetric(curved), 4.0, region=box).run(bowl, START.clamp(0.5, 3.0), steps=60)
    assert trace.violations == ()
    gap = float(trace.values[-1] - bowl(x_star))
    assert gap <= float(trace.bound(x_star))
    assert gap <= float(trace.linear_bound(x_star, 0.5 / 3)) + 1e-14
    close(trace.point, x_star, 1e-2)


def test_c_is_the_worst_of_the_smallest_eigenvalues() -> None:
    points = torch.stack([START, MINIMUM])
    expected = max(1 / float(torch.linalg.eigvalsh(curved(x))[0]) for x in points)
    close(ng.mirror.compatibility(MatrixMetric(curved), points), tensor(expected))
    with pytest.raises(ValueError, match=r"the metric at point 0 has the eigenvalue 0: no constant C.*Add damping"):
        ng.mirror.compatibility(MatrixMetric(lambda x: 0 * MATRIX), points)


def test_constants_are_positive_numbers() -> None:
    with pytest.raises(ValueError, match=r"lipschitz must be positive and finite, got 0\.0"):
        PrimalDescent(MatrixMetric(curved), lipschitz=0.0)
    with pytest.raises(ValueError, match="C must be positive and finite, got inf"):
        PrimalDescent(MatrixMetric(curved), lipschitz=1.0, C=math.inf)


def test_bad_input_is_refused_by_name() -> None:
    descent = PrimalDescent(MatrixMetric(curved), 4.0)
    with pytest.raises(TypeError, match="metric must be a natgrad RiemannianMetric"):
        PrimalDescent(curved, 4.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"policy must be Refuse\(\), Report\(\), Doubling\(\), or a function"):
        PrimalDescent(MatrixMetric(curved), 4.0, policy=Doubling)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the objective returned shape \(3,\): it must be one number"):
        descent.grad(lambda x: x, START)
    with pytest.raises(ValueError, match="the objective does not depend on x"):
        descent.grad(lambda x: torch.ones(()), START)
    with pytest.raises(NonFiniteError, match="the objective, or its differential, at the start holds NaN"):
        descent.run(lambda x: x.sum().log(), -START.abs(), steps=1)
    with pytest.raises(ValueError, match="steps=0 must be a positive integer"):
        descent.run(bowl, START, steps=0)
    with pytest.raises(ValueError, match="the matrix of the metric has 3 rows, and x has 2 entries"):
        descent.grad(lambda x: x @ x, START[:2])
    with pytest.raises(ValueError, match=r"convexity=9.0 must be positive and at most α = 4"):
        descent.run(bowl, START, steps=1).linear_bound(MINIMUM, 9.0)
    with pytest.raises(NonFiniteError, match=r"the objective on the way \(α is too small\) holds NaN"):
        PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), 1e-3, policy=Report()).run(
            lambda x: (x + 4).log().sum(), START, steps=1
        )
    with pytest.raises(ValueError, match=r"Doubling\(most=0\) must be a positive integer"):
        Doubling(0)


def test_a_box_names_what_is_outside() -> None:
    box = Box(torch.zeros(3), torch.ones(3))
    with pytest.raises(DomainError, match=r"x\[1\] = -2 is outside \[0, 1\]: start inside the box"):
        PrimalDescent(MatrixMetric(curved), 4.0, region=box).grad(bowl, START)
    with pytest.raises(ValueError, match=r"lower must be below upper in every entry"):
        Box(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"x has shape \(2,\) and the box \(3,\)"):
        box.check(torch.zeros(2))


@pytest.mark.parametrize(("last", "what"), [(-1.0, "indefinite"), (0.0, "singular")])
def test_a_metric_that_is_not_positive_has_no_step_in_a_box(last: float, what: str) -> None:
    metric = MatrixMetric(lambda x: torch.diag(tensor([1.0, 1.0, last])))
    with pytest.raises(SingularMetricError, match=rf"the metric in a box is {what} at damping 0: rank 2 of 3"):
        PrimalDescent(metric, 4.0, region=Box(START - 1, START + 1)).grad(bowl, START)
