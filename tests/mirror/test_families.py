"""Steps in either chart: mirror descent is natural gradient, proximal steps are exact, no step leaves the domain."""

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import DomainError
from natgrad.mirror import Forbid, MeanChart, NaturalChart, Shorten, mirror_step, natural_direction, natural_step
from tests.golden import agrees, golden, tensor
from tests.mirror.members import CASES, Case, gradient, objective, t

every = pytest.mark.parametrize("case", CASES, ids=repr)
NATURAL, MEAN = NaturalChart(), MeanChart()
λ = 40.0


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    scale = 1 + float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0.0, atol=tolerance * scale)


def differentials(case: Case) -> tuple[Tensor, Tensor]:
    """∇_ηJ = F∇_ξJ and ∇_ξJ of the textbook formulas."""
    ω_ξ = gradient(objective(case), case.xi)
    return (case.fisher @ ω_ξ.reshape(-1)).view_as(ω_ξ), ω_ξ


def tangent(case: Case, v: Tensor) -> Tensor:
    """The part of a change of η that changes the distribution."""
    return (case.projector @ v.reshape(-1)).view_as(v)


@every
def test_the_natural_gradient_in_one_chart_is_the_plain_gradient_in_the_other(case: Case) -> None:
    """Grosse (2021), (22)–(23)."""
    ω_η, ω_ξ = differentials(case)
    close(natural_direction(case.family, case.eta, ω_η, NATURAL), tangent(case, ω_ξ))
    close(natural_direction(case.family, case.xi, ω_ξ, MEAN), ω_η)


@every
def test_automatic_differentiation_through_the_charts_gives_both_gradients(case: Case) -> None:
    """To the precision of torch: the derivative that it has for the digamma function is good to 5e-10."""
    J = objective(case)
    ω_η, ω_ξ = differentials(case)
    close(gradient(ng.mirror.in_other_chart(J, case.family, MEAN), case.eta), ω_η, 2e-9)
    back = ng.mirror.in_other_chart(ng.mirror.in_other_chart(J, case.family, MEAN), case.family, NATURAL)
    close(tangent(case, gradient(back, case.xi)), tangent(case, ω_ξ), 2e-9)


@every
def test_the_mirror_step_in_the_natural_chart_minimises_its_proximal_objective(case: Case) -> None:
    """Grosse (2021), (20): ⟨∇_ηJ, u⟩ + λ KL(p_η ‖ p_u) is stationary at u, and convex."""
    ω, _ = differentials(case)
    move = mirror_step(case.family, case.eta, ω, 1 / λ, NATURAL)
    assert not bool(move.shortened.any())

    def kl(u: Tensor) -> Tensor:
        return case.log_partition(u) - case.log_partition(case.eta) - (case.xi * (u - case.eta)).sum()

    close(gradient(lambda u: (ω * u).sum() + λ * kl(u), move.point), 0 * ω, 1e-11)


@every
def test_the_mirror_step_in_the_mean_chart_minimises_its_proximal_objective(case: Case) -> None:
    """Grosse (2021), (21): the gradient of KL(p_u ‖ p_ξ) with respect to the mean parameters of p_u is η(u) − η."""
    _, ω = differentials(case)
    move = mirror_step(case.family, case.xi, ω, 1 / λ, MEAN)
    assert not bool(move.shortened.any())
    close(move.point, gradient(case.log_partition, case.eta - ω / λ), 1e-11)


@every
def test_a_mirror_step_is_a_natural_step_in_the_chart_that_moves(case: Case) -> None:
    ω_η, ω_ξ = differentials(case)
    moved = mirror_step(case.family, case.eta, ω_η, 1 / λ, NATURAL).point
    close(case.family.mean(moved), natural_step(case.family, case.xi, ω_ξ, 1 / λ, MEAN).point, 1e-11)
    moved = mirror_step(case.family, case.xi, ω_ξ, 1 / λ, MEAN).point
    close(moved, case.family.mean(natural_step(case.family, case.eta, ω_η, 1 / λ, NATURAL).point), 1e-11)


def test_the_steps_of_a_bernoulli_are_the_golden_ones() -> None:
    case = golden("mirror.bernoulli")
    η, lr = tensor(case["inputs"]["eta"]), 1 / case["inputs"]["lam"]
    b = ng.families.Bernoulli()
    ξ = b.mean(η)
    ω_η = gradient(lambda e: 0.5 * (b.mean(e) - case["inputs"]["target"]) ** 2, η)
    ω_ξ = ξ - case["inputs"]["target"]
    agrees(case, ω_η, "grad_eta")
    agrees(case, mirror_step(b, η, ω_η, lr, NATURAL).point, "eq20_eta_new")
    agrees(case, b.mean(mirror_step(b, η, ω_η, lr, NATURAL).point), "eq20_xi_new")
    agrees(case, mirror_step(b, ξ, ω_ξ, lr, MEAN).point, "eq21_xi_new")
    agrees(case, b.natural(mirror_step(b, ξ, ω_ξ, lr, MEAN).point), "eq21_eta_new")
    agrees(case, natural_direction(b, η, ω_η, NATURAL), "natgrad_eta")
    agrees(case, natural_direction(b, ξ, ω_ξ, MEAN), "natgrad_xi")


@every
@pytest.mark.parametrize("chart", [NATURAL, MEAN], ids=lambda chart: type(chart).__name__)
def test_no_step_leaves_the_domain_however_long_it_is(case: Case, chart: ng.mirror.Chart) -> None:
    """Random tangent vectors of the chart, a thousand times its size; every iterate has both of its coordinates."""
    family, generator = case.family, torch.Generator().manual_seed(0)
    start = case.eta if chart == NATURAL else case.xi
    points = start.expand(16, *start.shape).clone()
    noise = torch.randn(points.reshape(16, -1).shape, dtype=points.dtype, generator=generator)
    v = 1e3 * (noise @ (case.projector if chart == NATURAL else case.fisher)).view_as(points)
    domain = chart.domain(family)
    share, inside = Shorten().share(domain, points, v, "x"), domain.contains(points + v)
    assert torch.equal(share == 1, inside)
    assert bool(domain.contains(points + share.reshape(-1, *[1] * (points.ndim - 1)) * v).all())
    assert bool(((share > 0) & (share <= 1)).all())
    short = ~inside
    beyond = points + (share / 0.9 * 1.001).reshape(-1, *[1] * (points.ndim - 1)) * v
    assert not bool(domain.contains(beyond)[short].any())


@every
def test_descent_with_steps_that_are_too_long_ends_at_the_minimum_all_the_same(case: Case) -> None:
    """Mirror descent (20) of −⟨η, ξ'⟩ + log Z, the likelihood of data with the moments ξ': lr = 1 is exact."""
    goal, x = gradient(case.log_partition, case.eta2), case.eta
    move = mirror_step(case.family, x, case.family.mean(x) - goal, 1.0, NATURAL)
    close(case.family.mean(move.point), goal, 1e-9)
    for _ in range(3):
        move = mirror_step(case.family, x, case.family.mean(x) - goal, 1.9, NATURAL)
        x = move.point
        assert bool(case.family.contains(x).all())


def test_a_shortened_step_says_which_member_why_and_what_to_do() -> None:
    g = ng.families.Gamma()
    xi = g.mean(t(1.2, -2.1)).expand(3, 2)
    ω = torch.zeros(3, 2, dtype=torch.float64)
    ω[1, 1] = -10.0  # −rate ← −2.1 + 10
    move = mirror_step(g, xi, ω, 1.0, MEAN)
    assert move.shortened.tolist() == [False, True, False]
    close(move.share, t(1.0, 0.9 * 0.21, 1.0))
    (reason,) = move.reasons
    assert "0.189 of the step was taken" in reason
    assert "η of Gamma[1]" in reason
    assert "must be below 0" in reason
    assert "smaller lr" in reason
    close(g.natural(move.point)[:, 1], t(-2.1, -0.21, -2.1))


def test_forbid_refuses_a_step_that_leaves_and_takes_the_others() -> None:
    g = ng.families.FullGaussian()
    eta = t(0.5, -0.2, 1.4, -0.3, -0.3, 0.8)
    xi, ω = g.mean(eta), t(0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    close(mirror_step(g, xi, ω, 0.1, MEAN, Forbid()).point, g.mean(eta - 0.1 * ω))
    with pytest.raises(DomainError, match=r"η of FullGaussian.*positive definite.*eigenvalue"):
        mirror_step(g, xi, ω, 10.0, MEAN, Forbid())


def test_so_close_to_the_boundary_that_no_step_fits_it_stays_and_says_so() -> None:
    p = ng.families.Exponential()
    eta = t(-5e-324)[0]
    assert float(Shorten().share(p.natural_domain, eta, t(1.0)[0], "η")) == 0.0


def test_bad_arguments_are_refused_by_name() -> None:
    b = ng.families.Bernoulli()
    with pytest.raises(ValueError, match=r"the gradient has shape \(2,\) and η \(\)"):
        natural_direction(b, t(0.0)[0], t(0.0, 1.0), NATURAL)
    with pytest.raises(ValueError, match=r"the gradient has shape \(2,\) and ξ \(\)"):
        mirror_step(b, t(0.5)[0], t(0.0, 1.0), 0.1, MEAN)
    for wrong in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            Shorten(wrong)
