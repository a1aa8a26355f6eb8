"""Mirror descent is natural gradient descent in the other chart, in both directions, and has its rates."""

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad import proximal
from natgrad.errors import DomainError, GuaranteeError
from natgrad.mirror import (
    BinaryEntropy,
    BregmanDescent,
    Conjugate,
    Convex,
    Doubling,
    HessianMetric,
    LogBarrier,
    MatrixMetric,
    NegativeEntropy,
    PrimalDescent,
    PulledBack,
    Quadratic,
    Report,
    SimplexEntropy,
    SquaredNorm,
    in_dual_chart,
)
from natgrad.structures import Structure
from tests.golden import agrees, golden, tensor
from tests.mirror.cases import CASES, MATRIX, TARGET, Case, Function, close, gradient, hessian, objective

ALPHA = 9.0


def centred(case: Case, z: Tensor) -> Tensor:
    """The dual chart of a simplex is a quotient: z up to a constant."""
    return z - z.mean() if isinstance(case.potential, SimplexEntropy) else z


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_mirror_descent_subtracts_the_gradient_in_the_dual_chart(case: Case) -> None:
    y = BregmanDescent(case.potential, ALPHA).grad(objective, case.x)
    z = gradient(case.value, case.x) - gradient(objective, case.x) / ALPHA
    close(y, gradient(case.conjugate, z))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_mirror_descent_is_natural_gradient_descent_in_the_dual_chart(case: Case) -> None:
    """Bai, Rosenberg and Xu (2022), (52), Raskutti and Mukherjee 2015: z − (1/α)(∇²ψ*)⁻¹∇F; the step is 1/α."""
    z = case.potential.gradient(case.x)
    F = in_dual_chart(objective, case.potential)
    natural = PrimalDescent(HessianMetric(Conjugate(case.potential), case.solver), lipschitz=ALPHA)
    moved = natural.grad(F, z)
    textbook = z - torch.linalg.pinv(hessian(case.conjugate, z)) @ gradient(_composed(case), z) / ALPHA
    close(centred(case, moved), centred(case, textbook))
    close(case.potential.inverse_gradient(moved), BregmanDescent(case.potential, ALPHA).grad(objective, case.x))


def _composed(case: Case) -> Function:
    """f∘∇ψ*, with ∇ψ* by differentiation of the textbook's conjugate."""

    def composed(z: Tensor) -> Tensor:
        (x,) = torch.autograd.grad(case.conjugate(z), z, create_graph=True)
        return objective(x)

    return composed


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_natural_gradient_descent_is_mirror_descent_of_the_dual_chart(case: Case) -> None:
    """The other direction: x − (1/α)(∇²ψ)⁻¹∇f is what mirror descent with ψ* does to z."""
    natural = PrimalDescent(HessianMetric(case.potential, case.solver), lipschitz=ALPHA).grad(objective, case.x)
    g = case.potential.hessian(case.x).dense()
    close(natural, case.x - torch.linalg.pinv(g) @ gradient(objective, case.x) / ALPHA)
    z = case.potential.gradient(case.x)
    moved = BregmanDescent(Conjugate(case.potential), ALPHA).grad(in_dual_chart(objective, case.potential), z)
    close(case.potential.inverse_gradient(moved), natural)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_whole_descents_in_both_charts_are_one(case: Case) -> None:
    """Twenty steps, not one: points, values and what was promised of the values."""
    mirror = BregmanDescent(case.potential, 30.0, policy=Report()).run(objective, case.x, steps=20)
    metric = HessianMetric(Conjugate(case.potential), case.solver)
    natural = PrimalDescent(metric, 30.0, policy=Report()).run(
        in_dual_chart(objective, case.potential), case.potential.gradient(case.x), steps=20
    )
    close(torch.stack([case.potential.inverse_gradient(z) for z in natural.points]), torch.stack(mirror.points))
    close(natural.values, mirror.values)


@pytest.mark.parametrize("case", [case for case in CASES if not isinstance(case.potential, SimplexEntropy)], ids=repr)
def test_mirror_descent_is_the_minimum_of_its_proximal_form(case: Case) -> None:
    """argmin_y ⟨∇f, y⟩ + αV_x(y), by a solver that knows nothing of the dual chart."""

    def divergence(y: proximal.Params, x: proximal.Params) -> Tensor:
        slope = gradient(case.value, x["x"].detach())
        return case.value(y["x"]) - case.value(x["x"]) - slope @ (y["x"] - x["x"])

    found = proximal.linearised(lambda y: objective(y["x"]), divergence, {"x": case.x}, ALPHA, tol=1e-13)["x"]
    descent = BregmanDescent(case.potential, ALPHA)
    close(descent.grad(objective, case.x), found, 1e-10)
    ω = gradient(objective, case.x)
    depth = -descent.surrogate(found, case.x, ω, ALPHA)
    close(descent.prog(objective, case.x), depth, 1e-10)


def test_on_a_simplex_the_proximal_form_is_minimised_over_the_simplex() -> None:
    """Its slope is constant there, and the entries sum to one: the Lagrange conditions."""
    x, ω = tensor([0.2, 0.5, 0.3]), tensor([1.0, -2.0, 0.5])
    y = BregmanDescent(SimplexEntropy(), 2.0).grad(lambda x: ω @ x, x)
    slope = ω + 2.0 * (y.log() - x.log())
    close(slope, slope.mean().expand(3))
    close(y.sum(), tensor(1.0))
    close(y, x * (-ω / 2).exp() / (x * (-ω / 2).exp()).sum())  # exponentiated gradient


def test_a_bernoulli_moves_by_the_golden_steps_in_both_charts() -> None:
    """Grosse (2021), (20)–(23): log Z = Conjugate(BinaryEntropy()) in η, its conjugate in ξ."""
    case = golden("mirror.bernoulli")
    η, λ, t = tensor([case["inputs"]["eta"]]), case["inputs"]["lam"], case["inputs"]["target"]
    J = lambda ξ: ((ξ - t) ** 2).sum() / 2  # noqa: E731
    entropy = BinaryEntropy()
    ξ, log_Z, J_η = entropy.inverse_gradient(η), Conjugate(entropy), in_dual_chart(J, entropy)
    η_20 = BregmanDescent(log_Z, λ).grad(J_η, η)
    agrees(case, η_20[0], "eq20_eta_new")
    agrees(case, entropy.inverse_gradient(η_20)[0], "eq20_xi_new")
    ξ_21 = BregmanDescent(entropy, λ).grad(J, ξ)
    agrees(case, ξ_21[0], "eq21_xi_new")
    agrees(case, entropy.gradient(ξ_21)[0], "eq21_eta_new")
    agrees(case, HessianMetric(log_Z).at(η).sharp(gradient(J_η, η))[0], "natgrad_eta")
    agrees(case, HessianMetric(entropy).at(ξ).sharp(gradient(J, ξ))[0], "natgrad_xi")


def curved(x: Tensor) -> Tensor:
    return MATRIX + (x @ x) * torch.eye(3, dtype=torch.float64)


def test_with_the_norm_at_every_point_mirror_descent_is_natural_gradient_descent() -> None:
    """Bai, Rosenberg and Xu (2022), proposition 17, with the generating function ½‖y‖²_{g(x_k)} and the step 1/α."""
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    natural = PrimalDescent(MatrixMetric(curved), ALPHA, policy=Report()).run(objective, x, steps=10)
    for k in range(10):
        mirrored = BregmanDescent(Quadratic.of(curved(x)), ALPHA)
        close(mirrored.prog(objective, x), natural.progress[k])
        y = mirrored.grad(objective, x)
        close(y, x - torch.linalg.solve(curved(x), gradient(objective, x)) / ALPHA)
        close(y, natural.points[k + 1])
        x = y


def test_the_dual_metric_of_a_norm_is_its_inverse() -> None:
    """∇²H = g(a)⁻¹ in the pairing of (53); it is g(a) in the pairing ⟨x, z⟩_g."""
    ψ, z = Quadratic.of(MATRIX), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    close(Conjugate(ψ).hessian(z).dense(), torch.linalg.inv(MATRIX))
    close(hessian(lambda z: ψ.conjugate(MATRIX @ z), z), MATRIX)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kronecker(), ng.Diagonal()], ids=lambda s: type(s).__name__)
def test_proposition_17_holds_for_the_metric_of_a_model_in_any_structure(structure: Structure) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, t = torch.randn(40, 2).double(), torch.randn(40, 2).double()
    g = PulledBack(model, x, ng.Sobolev(ng.Euclidean(), lengthscale=1.0), structure)
    f = g.objective(lambda y: (y - t).square().sum())
    G = g.at(g.start).operator
    mirrored = BregmanDescent(Quadratic(G), ALPHA, policy=Report())  # α is too small, which does not matter here
    natural = PrimalDescent(g, ALPHA, policy=Report())
    torch.testing.assert_close(mirrored.grad(f, g.start), natural.grad(f, g.start), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(mirrored.prog(f, g.start), natural.prog(f, g.start), rtol=1e-8, atol=1e-8)


# Rates


def poisson() -> tuple[Function, Tensor, float]:
    """KL(b ‖ Ax) for b = Ax*, its minimum x*, and Σb: it is Σb-smooth relative to −Σ log x (Bauschke et al. 2017)."""
    generator = torch.Generator().manual_seed(3)
    A = torch.rand(6, 3, generator=generator, dtype=torch.float64)
    x_star = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    b = A @ x_star
    return lambda x: (b * (b / (A @ x)).log() + A @ x - b).sum(), x_star, float(b.sum())


@pytest.mark.parametrize("smoothness", [1e-1, 1e-2])
def test_one_step_with_a_far_too_small_constant_is_refused_and_does_not_jump_to_a_vertex(smoothness: float) -> None:
    """The step is 1/α: at α = 1/100 it would end at (1e-69, 1e-35, 1), though the minimum is inside."""
    x, target = tensor([0.6, 0.3, 0.1]), tensor([0.2, 0.3, 0.5])

    def f(p: Tensor) -> Tensor:
        return (p - target).square().sum()

    with pytest.raises(GuaranteeError, match=r"the step 1/α too long: raise .* smoothness \(BregmanDescent\)"):
        BregmanDescent(SimplexEntropy(), smoothness).grad(f, x)
    found = BregmanDescent(SimplexEntropy(), smoothness, policy=Doubling()).grad(f, x)
    assert float(f(found)) < float(f(x))
    assert float(found.min()) > 1e-3


def test_mirror_descent_is_one_name_with_one_meaning() -> None:
    assert not hasattr(ng.mirror, "MirrorDescent")
    assert issubclass(ng.MirrorDescent, torch.optim.Optimizer)


def test_mirror_descent_of_a_convex_function_comes_within_alpha_v_over_t() -> None:
    f, x_star, α = poisson()
    x = torch.ones(3, dtype=torch.float64)
    trace = BregmanDescent(LogBarrier(), α).run(f, x, steps=80)
    V = (x_star / x - (x_star / x).log() - 1).sum()
    for T in range(1, 81):
        assert float(trace.values[T]) <= α * float(V) / T
    close(trace.bound(x_star), α * V / 80)
    assert trace.violations == ()


def test_mirror_descent_of_a_strongly_convex_function_converges_linearly() -> None:
    """f = KL(x ‖ q) + ½κ‖x − q‖² on a simplex: 1-convex and (1 + κ)-smooth relative to the entropy, as x ≤ 1."""
    κ, q, x = 1.5, TARGET, torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)
    f = lambda x: (x * (x / q).log()).sum() + κ * (x - q).square().sum() / 2  # noqa: E731
    α, V = 1 + κ, (q * (q / x).log()).sum()
    trace = BregmanDescent(SimplexEntropy(), α).run(f, x, steps=40)
    for T in range(1, 41):
        assert float(trace.values[T]) <= α * float(V) * (1 - 1 / α) ** T + 1e-15
    close(trace.linear_bound(q, 1.0), α * V * (1 - 1 / α) ** 40)
    close(trace.point, q, 1e-5)


@pytest.mark.parametrize("potential", [SquaredNorm(), NegativeEntropy(), BinaryEntropy(), LogBarrier()], ids=repr)
def test_a_divergence_is_minimised_in_one_step_by_its_own_mirror(potential: ng.mirror.Potential) -> None:
    """f = V_q(·) is 1-smooth and 1-convex relative to ψ; for log Z this is maximum likelihood, by moment matching."""
    x = torch.tensor([0.2, 0.9, 0.4], dtype=torch.float64)
    trace = BregmanDescent(potential, smoothness=1.0).run(lambda y: potential.bregman(y, TARGET), x, steps=1)
    close(trace.point, TARGET)
    close(trace.progress[0], potential.bregman(x, TARGET))


def test_a_promise_is_exact_where_the_function_is_as_smooth_as_the_potential() -> None:
    """Prog(x) = αV_y(x): no more can be promised."""
    ψ, x = NegativeEntropy(), torch.tensor([0.2, 0.9, 0.4], dtype=torch.float64)
    f = lambda y: 2 * ψ.bregman(y, TARGET)  # noqa: E731
    trace = BregmanDescent(ψ, smoothness=2.0).run(f, x, steps=1)
    close(trace.decrease, trace.progress)


def test_mirror_descent_needs_no_closed_form_of_the_dual_chart() -> None:
    """ψ = Σ cosh x: Newton's method against z = sinh x."""
    ψ, x = Convex(lambda x: x.cosh().sum()), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    close(
        BregmanDescent(ψ, ALPHA).grad(objective, x),
        torch.asinh(x.sinh() - gradient(objective, x) / ALPHA),
    )
    z = ψ.gradient(x)
    natural = PrimalDescent(HessianMetric(Conjugate(ψ)), ALPHA).grad(in_dual_chart(objective, ψ), z)
    close(natural.asinh(), BregmanDescent(ψ, ALPHA).grad(objective, x))
    trace = BregmanDescent(ψ, 4.0).run(lambda x: (x * x).sum() / 2, x, steps=60)
    assert trace.violations == ()


def test_a_constant_that_is_too_small_is_refused_and_doubling_finds_one() -> None:
    f, x_star, α = poisson()
    x = torch.ones(3, dtype=torch.float64) * 20
    with pytest.raises((GuaranteeError, DomainError)):
        BregmanDescent(LogBarrier(), 1e-3).run(f, x, steps=5)
    trace = BregmanDescent(LogBarrier(), 1e-3, policy=Doubling()).run(f, x, steps=30)
    assert trace.violations == ()
    assert float(trace.constants.max()) < 2 * α
    assert float(trace.values[-1]) <= float(trace.bound(x_star))


def test_a_step_out_of_the_dual_domain_is_refused_by_entry() -> None:
    x = torch.tensor([1.0, 4.0])
    with pytest.raises(
        DomainError, match=r"z\[1\] = 0.75 must be below 0: .*\(a smaller lr or rate, or a larger smoothness"
    ):
        BregmanDescent(LogBarrier(), 1.0).grad(lambda x: -x[1], x)
    with pytest.raises(DomainError, match=r"x\[0\] = -1 must be above 0"):
        BregmanDescent(LogBarrier(), 1.0).run(lambda x: x.sum(), -x, steps=1)


def test_the_constants_of_mirror_descent_are_checked() -> None:
    with pytest.raises(ValueError, match="smoothness must be positive and finite, got -1"):
        BregmanDescent(SquaredNorm(), -1)
    with pytest.raises(TypeError, match="potential must be a natgrad Potential"):
        BregmanDescent(torch.exp, 1.0)  # type: ignore[arg-type]


def test_single_precision_keeps_its_promises_until_it_has_converged() -> None:
    """Steps that are below rounding are no violations."""
    f, _, α = poisson()
    trace = BregmanDescent(LogBarrier(), α).run(lambda x: f(x.double()).float(), torch.ones(3), steps=300)
    assert trace.violations == ()
    assert trace.point.dtype == torch.float32
