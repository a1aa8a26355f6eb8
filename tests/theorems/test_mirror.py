"""What the library promises of descents in a geometry, one theorem each; the details stand in tests/mirror."""

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import GuaranteeError
from natgrad.mirror import BregmanDescent, Conjugate, HessianMetric, MatrixMetric, PrimalDescent, Quadratic
from tests.golden import agrees, golden, tensor
from tests.mirror.cases import CASES, Case, close, gradient, objective

X = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def metric(x: Tensor) -> Tensor:
    """1 ≤ g(x) ≤ 2, so that C = 1."""
    u = torch.stack([x[0].sin(), x[0].cos(), 0 * x[1]])
    return torch.eye(3, dtype=torch.float64) + u.outer(u)


def smooth(x: Tensor) -> Tensor:
    """Convex, with L = 2 and its minimum 3 log 2 at 0."""
    return (2 * x).exp().add(1).log().sub(x).sum() + x.square().sum() / 2


def test_grad_and_prog_of_riemannian_primal_descent_are_the_golden_ones() -> None:
    case = golden("sobolev.lemma13")
    ω = tensor(case["inputs"]["grad_E"])
    descent = PrimalDescent(MatrixMetric(lambda _: tensor(case["inputs"]["g"])), case["inputs"]["CL"])
    agrees(case, descent.grad(lambda x: ω @ x, torch.zeros_like(ω)), "step")
    agrees(case, descent.prog(lambda x: ω @ x, torch.zeros_like(ω)), "prog")


def test_every_step_of_primal_descent_falls_by_prog_and_the_sum_meets_2lcr2_over_t() -> None:
    trace = PrimalDescent(MatrixMetric(metric), lipschitz=2.0, C=1.0).run(smooth, X, steps=50)
    x = X
    for k in range(50):
        ω, g = gradient(smooth, x), metric(x)
        y = x - torch.linalg.solve(g, ω) / 2
        assert float(smooth(x) - smooth(y)) >= float(ω @ torch.linalg.solve(g, ω)) / 4 - 1e-13
        close(trace.points[k + 1], y)
        x = y
    R = max(float(x @ metric(x) @ x) ** 0.5 for x in trace.points[:-1])
    assert float(smooth(x) - smooth(0 * x)) <= 2 * 2.0 * 1.0 * R**2 / 50
    close(trace.bound(0 * X), tensor(4 * R**2 / 50))


def test_a_broken_guarantee_is_noticed_while_it_runs() -> None:
    with pytest.raises(GuaranteeError, match=r"step \d+: f fell by .* and Prog promised"):
        PrimalDescent(MatrixMetric(metric), lipschitz=0.2).run(smooth, X, steps=50)


def test_mirror_descent_with_the_norm_of_a_metric_is_its_natural_gradient() -> None:
    """Bai et al. (2022), proposition 17, at the step 1/α."""
    α = 3.0
    expected = X - torch.linalg.solve(metric(X), gradient(objective, X)) / α
    close(BregmanDescent(Quadratic.of(metric(X)), α).grad(objective, X), expected)
    close(PrimalDescent(MatrixMetric(metric), α).grad(objective, X), expected)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_mirror_descent_and_natural_gradient_agree_in_both_directions(case: Case) -> None:
    """Bai et al. (2022), eq. 52: each is the other, seen from the dual chart."""
    ψ, α = case.potential, 9.0
    z, F = ψ.gradient(case.x), ng.mirror.in_dual_chart(objective, ψ)
    mirror = BregmanDescent(ψ, α).grad(objective, case.x)
    close(ψ.inverse_gradient(PrimalDescent(HessianMetric(Conjugate(ψ), case.solver), α).grad(F, z)), mirror)
    natural = PrimalDescent(HessianMetric(ψ, case.solver), α).grad(objective, case.x)
    close(ψ.inverse_gradient(BregmanDescent(Conjugate(ψ), α).grad(F, z)), natural)


def test_the_rates_hold_convex_as_1_over_t_and_strongly_convex_linearly() -> None:
    """``smooth`` is 1-convex and 2-smooth in the Euclidean norm, where mirror and primal descent are one."""
    mirror = BregmanDescent(ng.mirror.SquaredNorm(), 2.0).run(smooth, X, steps=30)
    primal = PrimalDescent(HessianMetric(ng.mirror.SquaredNorm()), 2.0).run(smooth, X, steps=30)
    close(mirror.values, primal.values)
    for T in range(1, 31):
        gap = float(mirror.values[T] - smooth(0 * X))
        assert gap <= 2.0 * float(X @ X) / 2 / T
        assert gap <= 2.0 * float(X @ X) / 2 * 0.5**T + 1e-14
        assert gap <= float(smooth(X) - smooth(0 * X)) * 0.5**T + 1e-14
