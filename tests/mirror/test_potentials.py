"""Potentials: two charts, two metrics and one divergence, against their textbook formulas."""

import math

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import DomainError, NatgradError
from natgrad.mirror import Conjugate, Convex, OpenBox, Potential, Simplex
from tests.mirror.cases import CASES, MATRIX, Case, close, gradient, hessian

REGULAR = [case for case in CASES if not isinstance(case.potential, ng.mirror.SimplexEntropy)]


def tangent(case: Case, u: Tensor) -> Tensor:
    """What a gradient says on the tangent space: on a simplex, all but its mean."""
    return u - u.mean() if isinstance(case.potential, ng.mirror.SimplexEntropy) else u


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_value_and_the_conjugate_are_those_of_the_textbook(case: Case) -> None:
    z = case.potential.gradient(case.x)
    close(case.potential.value(case.x), case.value(case.x))
    close(case.potential.conjugate(z), case.conjugate(z))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_charts_are_the_gradients_of_the_potential_and_of_its_conjugate(case: Case) -> None:
    z = case.potential.gradient(case.x)
    close(tangent(case, z), tangent(case, gradient(case.value, case.x)))
    close(case.potential.inverse_gradient(z), gradient(case.conjugate, z))
    close(case.potential.inverse_gradient(z), case.x)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_value_and_conjugate_meet_in_youngs_inequality_exactly_at_dual_points(case: Case) -> None:
    z = case.potential.gradient(case.x)
    at_pair = case.potential.value(case.x) + case.potential.conjugate(z) - (case.x * z).sum()
    elsewhere = case.potential.value(case.y) + case.potential.conjugate(z) - (case.y * z).sum()
    close(at_pair, torch.zeros_like(at_pair))
    close(elsewhere, case.potential.bregman(case.y, case.x))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_divergence_is_the_gap_above_the_tangent_plane(case: Case) -> None:
    gap = case.value(case.y) - case.value(case.x) - gradient(case.value, case.x) @ (case.y - case.x)
    close(case.potential.bregman(case.y, case.x), gap)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_divergence_keeps_its_digits_where_the_points_nearly_meet(case: Case) -> None:
    """V_x(x + εv) = ½ε²vᵀ∇²ψ v to relative accuracy ε, though the values differ by 1e-15 only."""
    v = tangent(case, torch.tensor([1.0, -0.5, -0.2], dtype=torch.float64))
    expected = 0.5e-14 * v @ hessian(case.value, case.x) @ v
    for potential in (case.potential, Convex(case.value, within=case.potential.domain)):
        if potential is case.potential or case in REGULAR:
            got = potential.bregman(case.x + 1e-7 * v, case.x)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", REGULAR, ids=repr)
def test_the_metrics_of_both_charts_are_hessians_and_inverse_to_each_other(case: Case) -> None:
    z = case.potential.gradient(case.x)
    g, dual = case.potential.hessian(case.x).dense(), case.potential.conjugate_hessian(z).dense()
    close(g, hessian(case.value, case.x))
    close(dual, hessian(case.conjugate, z))
    close(g @ dual, torch.eye(3, dtype=torch.float64))


def test_the_metrics_of_a_simplex_are_inverse_on_its_tangent_space() -> None:
    """Both are singular along the constants, and each is the pseudo-inverse of the other."""
    (case,) = [case for case in CASES if case not in REGULAR]
    z = case.potential.gradient(case.x)
    g, dual = case.potential.hessian(case.x).dense(), case.potential.conjugate_hessian(z).dense()
    close(dual, hessian(case.conjugate, z))
    close(g, torch.linalg.pinv(dual))
    v = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
    close(v @ g @ v, v @ hessian(case.value, case.x) @ v)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_conjugate_is_the_same_geometry_seen_from_the_other_chart(case: Case) -> None:
    dual = Conjugate(case.potential)
    z, w = case.potential.gradient(case.x), case.potential.gradient(case.y)
    close(dual.value(z), case.conjugate(z))
    close(dual.gradient(z), case.x)
    close(dual.inverse_gradient(case.x), z)
    close(dual.bregman(w, z), case.potential.bregman(case.x, case.y))
    close(dual.hessian(z).dense(), case.potential.conjugate_hessian(z).dense())
    close(dual.conjugate_hessian(case.x).dense(), case.potential.hessian(case.x).dense())


@pytest.mark.parametrize("case", REGULAR, ids=repr)
def test_newtons_method_finds_the_dual_point_of_any_convex_function(case: Case) -> None:
    found = Convex(case.value, within=case.potential.domain, image=case.potential.dual_domain)
    z = case.potential.gradient(case.x)
    close(found.gradient(case.x), z)
    close(found.inverse_gradient(z), case.x)
    close(found.bregman(case.y, case.x), case.potential.bregman(case.y, case.x))
    close(found.conjugate_hessian(z).dense(), hessian(case.conjugate, z), 1e-11)


def test_the_dual_point_of_newtons_method_is_differentiable() -> None:
    """∂x/∂z = (∇²ψ)⁻¹, by the implicit function theorem."""
    ψ = Convex(lambda x: x.exp().sum() + (x @ MATRIX @ x) / 2)
    z = torch.tensor([2.0, -1.0, 40.0], dtype=torch.float64)
    jacobian: Tensor = torch.autograd.functional.jacobian(ψ.inverse_gradient, z)
    x = ψ.inverse_gradient(z)
    close(jacobian, torch.linalg.inv(MATRIX + x.exp().diag()))
    close(x.exp() + MATRIX @ x, z)


def test_newtons_method_finds_the_dual_point_of_one_number() -> None:
    z = torch.tensor(0.5, dtype=torch.float64)
    close(Convex(torch.cosh).inverse_gradient(z), z.asinh())


def test_a_far_dual_point_is_found_within_the_domain() -> None:
    """Full Newton steps from the centre would leave the orthant."""
    ψ = Convex(lambda x: -x.log().sum(), within=OpenBox(lower=0.0), image=OpenBox(upper=0.0))
    z = torch.tensor([-1e4, -1e-4], dtype=torch.float64)
    torch.testing.assert_close(ψ.inverse_gradient(z), -1 / z, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("potential", "logits"),
    [(ng.mirror.BinaryEntropy(), nn.functional.softplus), (ng.mirror.NegativeEntropy(), torch.exp)],
)
def test_log_partition_functions_are_conjugates_of_entropies(potential: Potential, logits: nn.Module) -> None:
    η, η2 = torch.tensor([0.3], dtype=torch.float64), torch.tensor([-1.1], dtype=torch.float64)
    close(Conjugate(potential).value(η), logits(η).sum())
    family = ng.Bernoulli() if isinstance(potential, ng.mirror.BinaryEntropy) else ng.Poisson()
    # D_logZ(η, η′) = KL(p_η′ ‖ p_η).
    close(Conjugate(potential).bregman(η, η2), family.kl(η2, η).squeeze())


def test_a_divergence_is_finite_from_the_boundary() -> None:
    vertex, x = torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.5, 0.25, 0.25]).double()
    close(ng.mirror.SimplexEntropy().bregman(vertex, x), torch.tensor(2.0).double().log())
    close(
        ng.mirror.BinaryEntropy().bregman(vertex, x),
        -2 * torch.tensor(0.75).double().log() + torch.tensor(2.0).double().log(),
    )
    close(ng.mirror.NegativeEntropy().bregman(vertex, x), torch.tensor(2.0).double().log())


def test_several_simplices_are_stepped_side_by_side() -> None:
    ψ = ng.mirror.SimplexEntropy()
    x = torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64)
    whole = ψ.conjugate_hessian(x.log()).dense()
    close(whole[:2, :2], x[0].diag() - x[0].outer(x[0]))
    assert bool((whole[:2, 2:] == 0).all())


@pytest.mark.parametrize(
    ("potential", "x", "message"),
    [
        (ng.mirror.NegativeEntropy(), [1.0, -0.5], r"x\[1\] = -0.5 must be above 0: start inside, or take shorter"),
        (ng.mirror.LogBarrier(), [0.0, 1.0], r"x\[0\] = 0 must be above 0"),
        (ng.mirror.BinaryEntropy(), [0.5, 1.0], r"x\[1\] = 1 must be below 1"),
        (ng.mirror.SimplexEntropy(), [0.5, 0.6], r"x sums to 1 \+ 0.1 over its last axis.*divide it by its sum"),
        (ng.mirror.SimplexEntropy(), [1.5, -0.5], r"x\[1\] = -0.5 must be above 0"),
        (ng.mirror.NegativeEntropy(), [1.0, float("nan")], r"x\[1\] = nan must be finite"),
    ],
)
def test_a_point_outside_the_domain_is_refused_by_entry_and_bound(
    potential: Potential, x: list[float], message: str
) -> None:
    with pytest.raises(DomainError, match=message):
        potential.gradient(torch.tensor(x))


def test_a_dual_point_outside_its_domain_is_refused() -> None:
    with pytest.raises(DomainError, match=r"z\[1\] = 0.5 must be below 0"):
        ng.mirror.LogBarrier().inverse_gradient(torch.tensor([-1.0, 0.5]))
    with pytest.raises(DomainError, match=r"z\[0\] = inf must be finite"):
        ng.mirror.NegativeEntropy().inverse_gradient(torch.tensor([torch.inf]))


def test_a_dual_point_that_does_not_exist_is_not_invented() -> None:
    """∇ψ = e^x is positive."""
    with pytest.raises(NatgradError, match=r"no x with ∇ψ\(x\) = z was found.*give the image= of"):
        Convex(lambda x: x.exp().sum(), max_steps=20).inverse_gradient(torch.tensor([-1.0]).double())


def test_what_is_no_metric_is_no_quadratic_potential() -> None:
    with pytest.raises(ValueError, match=r"must be a square matrix \[p q\], got shape \(2, 3\)"):
        ng.mirror.Quadratic.of(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"differs from its transpose by 1: a metric is symmetric"):
        ng.mirror.Quadratic.of(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    with pytest.raises(TypeError, match="base must be a natgrad Potential, got the class SquaredNorm"):
        Conjugate(ng.mirror.SquaredNorm)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"OpenBox\(lower=1.0, upper=1.0\) is empty"):
        OpenBox(1.0, 1.0)
    with pytest.raises(DomainError, match="is one number"):
        Simplex().check(torch.tensor(1.0), "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [20.0, 80.0, 800.0])
def test_a_divergence_of_far_logits_is_that_of_their_log_partition(far: float, dtype: torch.dtype) -> None:
    """Their probabilities round to 0 and 1, on the boundary of the other chart; the logits themselves do not."""
    z, origin = torch.tensor([far, 0.0], dtype=dtype), torch.zeros(2, dtype=dtype)
    exact = torch.nn.functional.softplus(torch.tensor(far, dtype=torch.float64)) - math.log(2) - 0.5 * far
    for potential in (ng.mirror.BinaryEntropy(), ng.mirror.SimplexEntropy()):
        found = Conjugate(potential).bregman(z, origin)
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ratio", [1e-12, 1e-20, 1e-38, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_divergence_keeps_its_digits_where_the_points_are_far_apart(ratio: float, dtype: torch.dtype) -> None:
    x, y = torch.tensor([3.0], dtype=dtype), torch.tensor([3.0 * ratio], dtype=dtype)
    a, b = float(x), float(y)
    for here, there, found in (
        (b / a - 1 - math.log(b / a), a / b - 1 + math.log(b / a), ng.mirror.LogBarrier()),
        (b * math.log(b / a) - b + a, a * math.log(a / b) - a + b, ng.mirror.NegativeEntropy()),
    ):
        for exact, pair in ((here, (y, x)), (there, (x, y))):
            torch.testing.assert_close(float(found.bregman(*pair)), exact, rtol=1e-6, atol=0)
    coin = torch.tensor([1e-40], dtype=dtype)
    exact = 0.5 * math.log(0.25 / float(coin))
    torch.testing.assert_close(
        float(ng.mirror.BinaryEntropy().bregman(torch.full_like(coin, 0.5), coin)), exact, rtol=1e-6, atol=0
    )


def test_the_divergence_has_a_slope_where_the_points_are_far_apart() -> None:
    x, y = torch.tensor([1e-20, 0.5], requires_grad=True), torch.tensor([1.0, 0.25], requires_grad=True)
    slopes = torch.autograd.grad(ng.mirror.NegativeEntropy().bregman(y, x), (x, y))
    a, b = x.detach().double(), y.detach().double()
    for found, exact in zip(slopes, (1 - b / a, (b / a).log()), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 3])
def test_a_point_of_another_size_than_the_metric_is_refused(size: int) -> None:
    x = torch.ones(size, dtype=torch.float64)
    quadratic = ng.mirror.Quadratic.of(torch.eye(2, dtype=torch.float64))
    g = ng.mirror.MatrixMetric(lambda _: torch.eye(2, dtype=torch.float64)).at(torch.zeros(2, dtype=torch.float64))
    for function in (quadratic.value, quadratic.gradient, quadratic.inverse_gradient, g.flat, g.sharp, g.squared):
        with pytest.raises(ValueError, match=rf"has {size} entries, and the metric is over 2"):
            function(x)
