"""What the library promises, one theorem each: metrics (M), over-parametrised models (O), steps (P), invariance (K)."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import SingularMetricError
from natgrad.structures import Structure
from tests import oracle
from tests.golden import agrees, golden, golden_mlp, tensor
from tests.optim.tasks import Scalar, task
from tests.pulled import close, normal
from tests.step.test_geodesic import CURVES

FISHER = ng.Fisher(ng.Categorical())
MANY = 20_000


def _dense(model: nn.Module, x: Tensor, metric: ng.OutputMetric, target: Tensor | None = None) -> Tensor:
    pb = ng.pullback(model, x, metric, target, torch.Generator().manual_seed(0))
    return ng.Dense().estimate(pb).dense()


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("family", "h"),
    [
        (ng.Categorical(), oracle.categorical),
        (ng.Bernoulli(), oracle.bernoulli),
        (ng.Poisson(), oracle.poisson),
        (ng.Gaussian(scale=None), oracle.gaussian_learned),
        (lambda y: torch.distributions.Poisson(y.exp()), oracle.poisson),
    ],
)
def test_the_fisher_metric_of_a_family_is_exact_or_the_mean_over_targets_drawn_from_the_model(
    family: ng.families.Family, h: object
) -> None:
    of = task()
    assert callable(h)
    expected = oracle.dense(oracle.module_jacobian(of.model, of.x), h(of.model(of.x)))
    close(_dense(of.model, of.x, ng.Fisher(family)), expected)
    samples = MANY if isinstance(family, ng.families.Family) else 400
    assert _relative(_dense(of.model, of.x, ng.Fisher(family, samples=samples)), expected) < 5 / math.sqrt(samples)


def test_gauss_newton_is_the_euclidean_pullback_and_its_generalisation_that_of_a_convex_loss() -> None:
    model, x, target = golden_mlp()
    agrees(golden("mlp.gauss_newton"), _dense(model, x, ng.Euclidean()), "GN")
    J = oracle.module_jacobian(model, x)
    loss = oracle.dense(J, oracle.loss_hessian(F.cross_entropy, model(x), target))
    close(_dense(model, x, ng.LossHessian(F.cross_entropy), target), loss)
    φ = lambda y: torch.logsumexp(y, -1)  # noqa: E731
    bregman = _dense(model, x, ng.Bregman(φ))
    close(bregman, oracle.dense(J, oracle.hessian(φ, model(x))))
    agrees(golden("mlp.fisher"), bregman, "F")  # log Z is a Bregman potential of the Fisher metric


def test_any_dissimilarity_is_pulled_back_by_its_hessian() -> None:
    def rho(y: Tensor, y0: Tensor) -> Tensor:
        return ((y0.exp() - y.exp()).square() * (2 + y0.sin()) / 3 + (y - y0) ** 4).sum()

    of = task()
    h = oracle.divergence_hessian(rho, of.model(of.x))
    close(_dense(of.model, of.x, ng.Divergence(rho)), oracle.dense(oracle.module_jacobian(of.model, of.x), h))


def test_the_empirical_fisher_is_the_gradient_covariance_and_the_mean_and_not_the_fisher() -> None:
    model, x, target = golden_mlp()
    rows = tensor(golden("mlp.forward")["expected"]["per_example_grad"])
    mean = rows.mean(0)
    empirical = _dense(model, x, ng.Empirical(F.cross_entropy), target)
    covariance = _dense(model, x, ng.GradientCovariance(F.cross_entropy), target)
    close(empirical, rows.T @ rows / len(x))
    close(covariance, (rows - mean).T @ (rows - mean) / len(x))
    close(empirical, covariance + torch.outer(mean, mean))
    assert _relative(empirical, tensor(golden("mlp.fisher")["expected"]["F"])) > 0.1


def test_one_pseudo_gradient_a_sample_has_mean_zero_and_covariance_G_and_averages_are_unbiased() -> None:
    model, x, _ = golden_mlp()
    G = tensor(golden("mlp.fisher")["expected"]["F"])
    assert ng.pullback(model, x, ng.Sampled(FISHER)).columns == 1
    pb = ng.pullback(model, x, ng.Sampled(FISHER, samples=MANY), generator=torch.Generator().manual_seed(0))
    assert float((pb.root * math.sqrt(MANY)).mean(1).mean(0).abs().max()) < 5 / math.sqrt(MANY)
    assert _relative(ng.Diagonal().estimate(pb).diagonal(), G.diag()) < 5 / math.sqrt(MANY)
    case = golden("ema.bias_corrected")
    schedule = ng.Refresh(ng.Diagonal(), decay=case["inputs"]["decay"])
    layout = ng.operators.Layout.of({"w": torch.ones(2, dtype=torch.float64)})
    values = [ng.operators.DiagonalOperator(layout, tensor(v)) for v in case["inputs"]["values"]]
    averages = [values[0]]
    for t, value in enumerate(values[1:], start=2):
        averages.append(averages[-1].lerp(value, schedule.weight(t)))
    agrees(case, torch.stack([average.diagonal() for average in averages]), "corrected")


def test_matrix_free_products_are_JᵀhJv_and_conjugate_gradients_solve_with_them() -> None:
    model, x, target = golden_mlp()
    pb = ng.pullback(model, x, FISHER)
    G, F_dense = ng.Implicit().estimate(pb), tensor(golden("mlp.fisher")["expected"]["F"])
    v = ng.Vector(oracle.unflatten(normal(21), oracle.parameters(model)))
    close(G.flat(v).flatten(), F_dense @ v.flatten(), 1e-9)
    by_hand = ng.pullback_covector(model, x, FISHER.flat(pb.y, ng.pushforward(model, x, v)) / len(x))
    close(G.flat(v).flatten(), by_hand.flatten())
    case = golden("mlp.natgrad.damped")
    ω = ng.differential(model, F.cross_entropy(model(x), target))
    agrees(case, ng.sharp(G, ω, ng.CG(tol=1e-14), case["inputs"]["damping"]).flatten(), "natgrad")


def test_vectors_and_covectors_differ_in_type_and_a_metric_is_the_only_way_between_them() -> None:
    of = task()
    J, G = oracle.module_jacobian(of.model, of.x), of.metric()
    metric = ng.Dense().estimate(ng.pullback(of.model, of.x, ng.Euclidean()))
    v = ng.Vector(oracle.unflatten(normal(17), oracle.parameters(of.model)))
    u = normal(12, 2, seed=1)
    ω = ng.pullback_covector(of.model, of.x, u)
    close(ng.pushforward(of.model, of.x, v), torch.einsum("ndp,p->nd", J, v.flatten()))
    close(ω.flatten(), torch.einsum("ndp,nd->p", J, u))
    close(ω @ v, (u * ng.pushforward(of.model, of.x, v)).sum())  # ⟨Jᵀu, v⟩ = ⟨u, Jv⟩
    close(metric.flat(v).flatten(), G @ v.flatten())
    close(ng.sharp(metric, metric.flat(v)).flatten(), v.flatten(), 1e-8)
    assert (type(metric.flat(v)), type(ng.sharp(metric, ω))) == (ng.Covector, ng.Vector)
    with pytest.raises(TypeError, match=r"a Covector .* is not a Vector"):
        dict(of.model.named_parameters()) + ω


def test_a_degenerate_metric_is_reported_with_rank_and_null_directions_and_not_inverted() -> None:
    model, x, target = golden_mlp()
    pb = ng.pullback(model, x, FISHER)
    rank, G = golden("mlp.fisher.diag")["expected"]["rank"], tensor(golden("mlp.fisher")["expected"]["F"])
    found = ng.diagnose(pb, directions=21 - rank)
    assert (found.rank, found.size, found.singular) == (rank, 21, True)
    null = torch.stack([v.flatten() for v in found.null_directions])
    close(null @ null.T, torch.eye(21 - rank, dtype=torch.float64))
    close(null @ G, torch.zeros(21 - rank, 21, dtype=torch.float64), 1e-9)
    with pytest.raises(SingularMetricError, match=f"rank {rank} of 21"):
        ng.natural_gradient(model, x, lambda y: F.cross_entropy(y, target), FISHER)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel()], ids=repr)
def test_the_natural_gradient_is_the_solution_of_least_norm_for_a_given_norm(structure: Structure) -> None:
    model, x, target = golden_mlp()
    G = tensor(golden("mlp.fisher")["expected"]["F"])
    ω = ng.differential(model, F.cross_entropy(model(x), target))
    A = normal(21, 21)
    W = A @ A.T / 21 + torch.eye(21, dtype=torch.float64)
    metric = structure.estimate(ng.pullback(model, x, FISHER))
    plain = ng.sharp(metric, ω, ng.Pinv(rtol=1e-10)).flatten()
    weighted = ng.sharp(metric, ω, ng.Pinv(rtol=1e-10, weight=W)).flatten()
    close(plain, oracle.pinv(G, ω.flatten()), 1e-7)
    close(weighted, oracle.weighted_pinv(G, ω.flatten(), W), 1e-7)
    for v in (plain, weighted):
        close(G @ v, ω.flatten(), 1e-9)
    assert _relative(weighted, plain) > 0.01


@pytest.mark.parametrize("constant_rank", [True, False])
def test_the_pushforward_is_the_projection_of_the_gradient_onto_the_span_of_the_coordinate_vectors(
    constant_rank: bool,
) -> None:
    of = task(n=20)
    if not constant_rank:
        of.model.get_parameter("2.weight").data.zero_()  # the first layer is unseen, here and not nearby
    assert ng.diagnose(ng.pullback(of.model, of.x, ng.Euclidean())).constant_rank == constant_rank
    u = normal(20, 2)
    J = oracle.module_jacobian(of.model, of.x).reshape(40, -1)
    v = ng.natural_gradient(of.model, of.x, lambda y: (u * y).sum() / 20, ng.Euclidean(), solver=ng.Pinv(rtol=1e-12))
    projected = J @ torch.linalg.lstsq(J, u.reshape(-1, 1), driver="gelsd").solution
    close(ng.pushforward(of.model, of.x, v).reshape(-1, 1), projected, 1e-8)
    assert _relative(projected, u.reshape(-1, 1)) > 0.1


def test_reparametrisation_changes_the_step_of_the_parameters_and_not_that_of_the_model() -> None:
    of, u = task(n=5), normal(5, 2)  # 10 outputs, 17 parameters

    def f(θ: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: 2 * p + p**3 for name, p in θ.items()}

    gap = ng.invariance.reparametrisation(of.model, f, of.x, lambda y: (u * y).sum() / 5)
    close(gap.on_model[0], u, 1e-7)  # J is onto: the projection is the gradient itself
    close(gap.on_model[1], u, 1e-7)
    assert gap.model_gap < 1e-7
    assert gap.parameter_gap > 1e-2


def test_constraints_keep_the_step_in_the_domain_and_woodbury_solves_large_models() -> None:
    λ = 0.1
    of = task(n=5)
    θ, ω, G = of.theta(), of.gradient(), of.metric()
    free = θ - oracle.damped(G, ω, λ)
    everywhere = dict.fromkeys(oracle.parameters(of.model), (-0.2, 0.2))
    constraints: dict[ng.step.Constraint, Tensor] = {
        ng.BackProjection(lambda p: {n: t / 2 for n, t in p.items()}): free / 2,
        ng.Penalty(lambda p: sum((t**2).sum() / 2 for t in p.values())): θ - oracle.damped(G, ω + θ, λ),  # type: ignore[arg-type, return-value]
    }
    for constraint, expected in [*constraints.items(), (ng.Clipping(everywhere), free.clamp(-0.2, 0.2))]:
        of = task(n=5)
        rule = ng.Constrained(ng.Fixed(), constraint)
        of.step(of.optimizer(structure=ng.Kernel(), step=rule, damping=λ))  # the kernel is 10 × 10, G is 17 × 17
        close(of.theta(), expected)


def test_the_proximal_point_its_linearised_and_its_quadratic_form_on_one_problem() -> None:
    case = golden("prox.quadratic")
    H, b, w = (tensor(case["inputs"][key]) for key in ("H", "b", "w"))
    λ = case["inputs"]["lam"]

    def objective(u: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * u["w"] @ H @ u["w"] + b @ u["w"]

    def rho(u: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (u["w"] - v["w"]).square().sum()

    agrees(case, ng.proximal.point(objective, rho, {"w": w}, λ)["w"], "prox")
    agrees(case, ng.proximal.quadratic(objective, rho, {"w": w}, λ)["w"], "prox")
    close(ng.proximal.linearised(objective, rho, {"w": w}, λ)["w"], w - tensor(case["expected"]["grad"]) / λ)


def test_a_trust_region_step_fills_the_metric_ball_and_back_tracking_holds_the_true_divergence() -> None:
    of, radius = task("coins"), 0.5
    θ, ω, G = of.theta(), of.gradient(), of.metric()
    of.step(of.optimizer(step=ng.TrustRegion(radius), damping=0.0))
    v = torch.linalg.solve(G, ω)
    close(of.theta() - θ, -math.sqrt(2 * radius) * v / (ω @ v).sqrt(), 1e-7)

    def kl(y0: Tensor, y: Tensor) -> float:
        p, log_odds = 1 / (1 + torch.exp(-y0)), y0 - y
        return float((p * log_odds + torch.log1p(y.exp()) - torch.log1p(y0.exp())).sum(1).mean())

    divergences = []
    for rule in (ng.TrustRegion(radius), ng.TrustRegion(radius, ng.Backtracking())):
        of = task("coins")
        before = of.model(of.x).detach()
        of.step(of.optimizer(step=rule, damping=0.0))
        divergences.append(kl(before, of.model(of.x).detach()))
    assert divergences[1] <= radius < divergences[0]


def test_damping_goes_from_the_natural_gradient_to_the_gradient_and_adapts_and_newton_stands_beside() -> None:
    of = task()
    ω, G = of.gradient(), of.metric()
    for λ, limit in ((1e-12, torch.linalg.solve(G, ω)), (1e9, ω / 1e9)):
        v = ng.natural_gradient(of.model, of.x, lambda y: of.kind.loss(y, of.t), ng.Euclidean(), damping=λ)
        assert _relative(v.flatten(), limit) < 1e-4
    case = golden("rosenbrock.point.-1.2x1.0")["expected"]
    H, grad = tensor(case["hessian"]), tensor(case["grad"])

    def objective(u: Mapping[str, Tensor]) -> Tensor:
        return (1 - u["x"][0]) ** 2 + 100 * (u["x"][1] - u["x"][0] ** 2) ** 2

    close(ng.proximal.newton(objective, {"x": tensor([-1.2, 1.0])})["x"], torch.linalg.solve(H, grad), 1e-9)
    for curvature, times in ((1.0, 0.5), (1.5, 1.0), (1.9, 2.0)):  # L = ½cθ², G = 1: the ratio is 2 − c
        model = Scalar()
        opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.LevenbergMarquardt(), damping=1e-9)

        def closure(model: Scalar = model, c: float = curvature) -> Tensor:
            loss = 0.5 * c * model().square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        assert opt.last is not None
        assert opt.last.ratio == pytest.approx(2 - curvature, abs=1e-7)
        assert opt.last.damping == pytest.approx(times * 1e-9)


def test_the_exponential_map_is_the_geodesic_and_the_corrected_step_its_second_order() -> None:
    curve = CURVES["polar"]
    model = curve.model()
    θ, v = oracle.flatten(model.parameters()), tensor(curve.v)
    end = ng.exponential(model, None, curve.metric, ng.Vector({"point": v}), steps=20)
    close(end["point"], curve.exp(θ, v), 1e-6)
    ε = 0.1
    opt = ng.NaturalGradient(model, curve.metric, step=ng.GeodesicCorrected(), lr=ε, damping=0.0)
    model()
    model.get_parameter("point").grad = -(curve.G(θ) @ v)
    opt.step()
    (dr, da), r = (ε * v).tolist(), float(θ[0])  # Γ^r_aa = −r, Γ^a_ra = 1/r
    close(oracle.flatten(model.parameters()) - θ, tensor([dr + 0.5 * r * da**2, da - dr * da / r]), 1e-10)


def test_natural_gradient_steps_are_those_of_any_linear_map_of_the_parameters() -> None:
    of = task()
    like, θ = oracle.parameters(of.model), of.theta()
    A = normal(17, 17) / 4 + torch.eye(17, dtype=torch.float64)

    def mapped(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(of.model, oracle.unflatten(A @ params["w"], like), (x,))

    w = {"w": torch.linalg.solve(A, θ)}
    loss = lambda y: of.kind.loss(y, of.t)  # noqa: E731
    v = ng.natural_gradient(mapped, of.x, loss, ng.Euclidean(), params=w)["w"]
    close(A @ v, torch.linalg.solve(of.metric(), of.gradient()), 1e-7)
