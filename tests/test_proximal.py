"""Proximal point, its linearised and its quadratic form, on the same problems; the Newton direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError, NatgradError, SingularMetricError
from natgrad.structures.implicit import HessianOperator
from tests.golden import agrees, golden, tensor
from tests.optim.tasks import seeded
from tests.pulled import normal

Params = Mapping[str, Tensor]


def euclidean(u: Params, w: Params) -> Tensor:
    return 0.5 * torch.stack([(u[n] - w[n]).square().sum() for n in u]).sum()


def rosenbrock(p: Params, x: object = None) -> Tensor:
    a, b = p["x"][0], p["x"][1]
    return torch.stack([1 - a, 10 * (b - a * a)]).view(1, 2)


@pytest.mark.parametrize("form", [ng.proximal.point, ng.proximal.quadratic])
def test_on_a_quadratic_the_exact_and_the_quadratic_form_are_the_implicit_step(
    form: Callable[..., dict[str, Tensor]],
) -> None:
    case = golden("prox.quadratic")
    H, b, w = (tensor(case["inputs"][key]) for key in ("H", "b", "w"))
    J = lambda u: 0.5 * u["w"] @ H @ u["w"] + b @ u["w"]  # noqa: E731
    got = form(J, euclidean, {"w": w}, case["inputs"]["lam"])["w"]
    agrees(case, got, "prox")
    # (3): the gradient is taken at the new point
    torch.testing.assert_close(got, w - (H @ got + b) / case["inputs"]["lam"])


def test_linearised_with_euclidean_dissimilarity_is_gradient_descent() -> None:
    case = golden("prox.quadratic")
    H, b, w = (tensor(case["inputs"][key]) for key in ("H", "b", "w"))
    J = lambda u: 0.5 * u["w"] @ H @ u["w"] + b @ u["w"]  # noqa: E731
    got = ng.proximal.linearised(J, euclidean, {"w": w}, 0.7)["w"]
    torch.testing.assert_close(got, w - tensor(case["expected"]["grad"]) / 0.7)


def test_linearised_with_a_bregman_divergence_is_mirror_descent() -> None:
    """∇φ(u) = ∇φ(w) − ∇J(w)/λ; on the simplex (φ negative entropy) a multiplicative update."""
    w = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    c = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    rho = lambda u, v: (u["w"] * (u["w"] / v["w"]).log() - u["w"] + v["w"]).sum()  # noqa: E731
    got = ng.proximal.linearised(lambda u: c @ u["w"], rho, {"w": w}, 4.0)["w"]
    torch.testing.assert_close(got, w * (-c / 4.0).exp(), rtol=1e-8, atol=1e-10)


def test_golden_mirror_step_of_a_bernoulli() -> None:
    """(20): with ρ = KL(p_u ‖ p_w) in the moments, η_new = η − ∇_ξJ/λ; its golden values are those of (20) and (21)."""
    case = golden("mirror.bernoulli")
    inputs = case["inputs"]
    J = lambda u: 0.5 * (u["ξ"] - inputs["target"]) ** 2  # noqa: E731

    def kl(u: Params, w: Params) -> Tensor:
        p, q = u["ξ"], w["ξ"]
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    ξ = torch.tensor(inputs["eta"], dtype=torch.float64).sigmoid()
    got = ng.proximal.linearised(J, kl, {"ξ": ξ}, inputs["lam"])["ξ"]
    expected = torch.logit(ξ) - (ξ - inputs["target"]) / inputs["lam"]
    torch.testing.assert_close(torch.logit(got), expected, rtol=1e-8, atol=1e-9)
    keys = {key: tensor(case["expected"][key]) for key in ("eq20_eta_new", "eq21_eta_new")}
    assert any(torch.allclose(expected, value, rtol=1e-10) for value in keys.values())


def test_proximal_point_in_output_space_is_implicit_descent_on_the_outputs() -> None:
    case = golden("rosenbrock.prox_outputs")
    x0, λ = tensor(case["inputs"]["x0"]), case["inputs"]["lam"]
    rho = ng.proximal.pulled_back(rosenbrock, None, ng.Euclidean(), params={"x": x0})
    got = ng.proximal.point(lambda u: rosenbrock(u).square().sum(), rho, {"x": x0}, λ)
    torch.testing.assert_close(got["x"], tensor(case["expected"]["x1"]), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rosenbrock(got).flatten(), tensor(case["expected"]["z1"]), rtol=1e-8, atol=1e-8)


def test_all_three_forms_agree_with_the_natural_gradient_when_the_proximity_is_strong() -> None:
    """As λ → ∞ each moves by −G⁻¹∇J/λ (Grosse (2021), (4)); the error of the three is of the next order, 1/λ²."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(2, 1).double()
    x, t = torch.randn(2, 6, 2, generator=generator, dtype=torch.float64)
    params = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}
    t = (t[:, :1] > 0).double()
    metric = ng.Fisher(ng.Bernoulli())
    J = lambda u: F.binary_cross_entropy_with_logits(torch.func.functional_call(model, dict(u), (x,)), t)  # noqa: E731
    f = lambda u, x: torch.func.functional_call(model, dict(u), (x,))  # noqa: E731
    rho = ng.proximal.pulled_back(f, x, metric, params=params)
    v = ng.natural_gradient(f, x, lambda y: F.binary_cross_entropy_with_logits(y, t), metric, params=params)
    for form in (ng.proximal.point, ng.proximal.linearised, ng.proximal.quadratic):
        gaps = []
        for λ in (1e2, 1e3):
            moved = form(J, rho, params, λ)
            gap = torch.cat([(moved[n] - params[n] + v[n] / λ).flatten() for n in v])
            gaps.append(float(gap.norm()))
        assert gaps[1] < gaps[0] / 50, form.__name__
        assert gaps[0] > 0


def test_newton_and_damped_newton() -> None:
    point = golden("rosenbrock.point.-1.2x1.0")
    x = {"x": tensor(point["inputs"]["x"])}
    J = lambda u: rosenbrock(u).square().sum()  # noqa: E731
    H, g = tensor(point["expected"]["hessian"]), tensor(point["expected"]["grad"])
    torch.testing.assert_close(HessianOperator.at(J, x).dense(), H)
    torch.testing.assert_close(ng.proximal.newton(J, x)["x"], torch.linalg.solve(H, g))
    eye = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(ng.proximal.newton(J, x, damping=3.0)["x"], torch.linalg.solve(H + 3 * eye, g))
    with_cg = ng.proximal.newton(J, x, solver=ng.CG(tol=1e-13))
    torch.testing.assert_close(with_cg["x"], torch.linalg.solve(H, g), rtol=1e-8, atol=1e-8)


def test_damping_interpolates_between_the_gradient_and_the_natural_gradient() -> None:
    """(F + β)⁻¹∇L: parallel to ∇L as β → ∞, the natural gradient at β = 0 (Johnson (2017), section 4)."""
    point = golden("rosenbrock.point.-1.2x1.0")
    G, g = tensor(point["expected"]["G"]), tensor(point["expected"]["grad"])
    operator = ng.operators.DenseOperator(ng.operators.Layout.of({"x": g}), G)
    ω = ng.Covector({"x": g})
    torch.testing.assert_close(ng.sharp(operator, ω)["x"], tensor(point["expected"]["natgrad"]), rtol=1e-8, atol=1e-8)
    β = 1e10
    torch.testing.assert_close(β * ng.sharp(operator, ω, damping=β)["x"], g, rtol=1e-6, atol=1e-6)


def test_newton_refuses_a_saddle() -> None:
    saddle = lambda u: u["w"][0] ** 2 - u["w"][1] ** 2  # noqa: E731
    with pytest.raises(SingularMetricError, match="indefinite"):
        ng.proximal.newton(saddle, {"w": torch.ones(2, dtype=torch.float64)})


def test_errors_of_the_proximal_steps() -> None:
    w = {"w": torch.ones(2, dtype=torch.float64)}
    J = lambda u: u["w"].square().sum()  # noqa: E731
    for form in (ng.proximal.point, ng.proximal.linearised, ng.proximal.quadratic):
        with pytest.raises(ValueError, match="strength λ of the proximity must be positive, got 0"):
            form(J, euclidean, w, 0.0)
    with pytest.raises(NatgradError, match="inner solver stopped after at most 1 steps"):
        ng.proximal.point(lambda u: u["w"].pow(4).sum(), euclidean, w, 1e-6, max_steps=1)
    with pytest.raises(IncompatibleError, match="Pinv does not work with HessianOperator"):
        ng.Pinv().init(HessianOperator.at(J, w))


def test_a_hessian_is_a_matrix_with_a_differential_and_is_not_averaged() -> None:
    w = {"w": torch.tensor([0.5, -1.0], dtype=torch.float64)}
    A = HessianOperator.at(lambda u: u["w"].pow(4).sum() + u["w"].square().sum(), w)
    dense, v = torch.diag(12 * w["w"] ** 2 + 2), torch.tensor([2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(A.product(v), dense @ v)
    torch.testing.assert_close(A.diagonal(), dense.diagonal())
    torch.testing.assert_close(A.logdet(), torch.logdet(dense))
    with pytest.raises(IncompatibleError, match="a moving average does not work with HessianOperator"):
        A.lerp(A, 0.5)
    torch.testing.assert_close(A.differential["w"], 4 * w["w"] ** 3 + 2 * w["w"])


# Networks


class Attentive(nn.Module):
    """A transformer layer, smooth, with torch's fused attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 4] to [n 3]."""
        return self.head(self.layer(x).mean(1))


def _network(build: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, Tensor, Params, Callable[..., Tensor]]:
    """The model, inputs, its parameters, and the cross-entropy as a function of them."""
    model = seeded(lambda: build().double())
    x, t = normal(*shape), torch.arange(shape[0]) % 3
    w = {name: p.detach() for name, p in model.named_parameters()}
    return model, x, w, lambda u: F.cross_entropy(torch.func.functional_call(model, dict(u), (x,)), t)


def test_the_proximal_point_of_a_transformer_is_an_implicit_step() -> None:
    """u = w − ∇J(u)/λ; fused attention has no second derivative, and the solver needs one."""
    _, _, w, J = _network(Attentive, 5, 4, 4)
    found = {name: t.detach().requires_grad_() for name, t in ng.proximal.point(J, euclidean, w, 2.0).items()}
    slopes = torch.autograd.grad(J(found), list(found.values()))
    for (name, u), slope in zip(found.items(), slopes, strict=True):
        torch.testing.assert_close(u.detach(), w[name] - slope / 2.0, rtol=0, atol=1e-9)


def test_newton_and_the_quadratic_form_of_a_transformer_solve_with_its_hessian() -> None:
    _, _, w, J = _network(Attentive, 5, 4, 4)
    sizes = [t.numel() for t in w.values()]

    def flat(θ: Tensor) -> Tensor:
        pieces = zip(w.items(), θ.split(sizes), strict=True)
        return J({name: piece.view_as(t) for (name, t), piece in pieces})

    θ = torch.cat([t.flatten() for t in w.values()])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        H = torch.autograd.functional.hessian(flat, θ)
        g = torch.func.grad(flat)(θ)
    step = torch.linalg.solve(H + 2 * torch.eye(len(θ), dtype=H.dtype), g)
    torch.testing.assert_close(ng.proximal.newton(J, w, damping=2.0).flatten(), step, rtol=1e-7, atol=1e-9)
    moved = ng.proximal.quadratic(J, euclidean, w, 2.0)
    torch.testing.assert_close(torch.cat([t.flatten() for t in moved.values()]), θ - step, rtol=1e-7, atol=1e-9)


def test_the_inner_solver_needs_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems far from the minimum are not solved to the last digit."""
    model, x, w, J = _network(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), 12, 4)
    rho = ng.proximal.pulled_back(model, x, ng.Fisher(ng.Categorical()))
    count, product = 0, HessianOperator.product

    def counted(self: HessianOperator, v: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return product(self, v)

    monkeypatch.setattr(HessianOperator, "product", counted)
    ng.proximal.point(J, euclidean, w, 0.1)
    assert count < 150  # 750 when they were
    count = 0
    ng.proximal.point(J, rho, w, 1.0)
    assert count < 300  # 1,930


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_tolerance_is_that_of_the_precision(dtype: torch.dtype) -> None:
    w = {"w": torch.tensor([1.0, -2.0], dtype=dtype)}
    found = ng.proximal.point(lambda u: (u["w"] - 1).cosh().sum(), euclidean, w, 1.0)["w"]
    torch.testing.assert_close((found - 1).sinh() + found - w["w"], torch.zeros(2, dtype=dtype), rtol=0, atol=3e-4)


def test_a_minimum_at_a_kink_is_told() -> None:
    w = {"w": torch.tensor([0.3, 0.1], dtype=torch.float64)}
    with pytest.raises(NatgradError, match=r"gradient of norm .*may also lie at a kink \(ReLU\)"):
        ng.proximal.point(lambda u: u["w"].abs().sum(), euclidean, w, 1.0)


@pytest.mark.parametrize("radius", [1e-3, 0.1, 1.0])
def test_a_trust_region_on_a_quadratic_solves_the_secular_equation(radius: float) -> None:
    """(H + λ)δ = −g with ½‖δ‖² = η; the multiplier by the eigenvalues, with none of our code."""
    case = golden("prox.quadratic")
    H, b, w = (tensor(case["inputs"][key]) for key in ("H", "b", "w"))
    values, vectors = torch.linalg.eigh(H)
    g = vectors.T @ (H @ w + b)
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float((g / (values + middle)).square().sum()) > 2 * radius else (low, middle)
    expected = w - vectors @ (g / (values + high))
    J = lambda u: 0.5 * u["w"] @ H @ u["w"] + b @ u["w"]  # noqa: E731
    got = ng.proximal.trust_region(J, euclidean, {"w": w}, radius, tol=1e-10)["w"]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-8)
    far = ng.proximal.trust_region(J, euclidean, {"w": w}, 1e4)["w"]  # the minimum is inside
    torch.testing.assert_close(far, -torch.linalg.solve(H, b), rtol=0, atol=1e-8)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_trust_region_in_either_kl_divergence_has_the_least_loss_of_all_points_in_it(reverse: bool) -> None:
    """(6) and (9) of Grosse (2021) against a grid: two logits less the third, a strongly curved region."""

    def f(p: Params, x: object) -> Tensor:
        return torch.cat([p["w"], p["w"].new_zeros(1)])[None]

    def J(u: Params) -> Tensor:
        return -(target * f(u, None).log_softmax(1)[0]).sum() + 0.1 * u["w"][0] ** 2

    w = {"w": torch.tensor([0.5, -1.0], dtype=torch.float64)}
    target = torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)
    metric, radius = ng.Fisher(ng.Categorical()), 0.3
    rho = ng.proximal.pulled_back(f, None, metric, params=w, reverse=reverse)
    got = ng.proximal.trust_region(J, rho, w, radius)
    axis = torch.linspace(-4, 4, 401, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
    new = torch.cat([grid, grid.new_zeros(len(grid), 1)], 1).log_softmax(1)
    old = f(w, None).log_softmax(1)
    first, second = (new, old) if reverse else (old, new)
    kl = (first.exp() * (first - second)).sum(1)
    losses = -(target * new).sum(1) + 0.1 * grid[:, 0] ** 2
    best = float(losses[kl <= radius].min())
    assert best - 0.01 < float(J(got)) <= best
    assert float(rho(got, w)) == pytest.approx(radius, rel=1e-7)
    other = ng.proximal.pulled_back(f, None, metric, params=w, reverse=not reverse)
    assert abs(float(other(got, w)) / radius - 1) > 0.05


def test_a_trust_region_needs_a_radius() -> None:
    with pytest.raises(ValueError, match="radius η of the region must be positive, got 0"):
        ng.proximal.trust_region(lambda u: u["w"].sum(), euclidean, {"w": torch.ones(1)}, 0.0)


@pytest.mark.parametrize("through", ["null direction", "level set"])
def test_a_linearised_problem_with_null_directions_is_unbounded_and_says_so(through: str) -> None:
    """ρ = ½(ab − 2)² keeps the hyperbola ab = 2, on which ⟨∇J, u⟩ falls without end, whatever ∇J is at (1, 2)."""
    w = {"a": torch.tensor(1.0, dtype=torch.float64), "b": torch.tensor(2.0, dtype=torch.float64)}

    def model(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return p["a"] * p["b"] * x

    def loss(u: Mapping[str, Tensor]) -> Tensor:
        product: Tensor = (u["a"] * u["b"] - 1) ** 2
        return product + (u["a"] - 3) ** 2 if through == "null direction" else product

    x = torch.ones(1, 1, dtype=torch.float64)
    rho = ng.proximal.pulled_back(model, x, ng.Euclidean(), params=w)
    with pytest.raises(ng.errors.SingularMetricError, match=r"unbounded: ρ has 1 null directions at w"):
        ng.proximal.linearised(loss, rho, w, 1.0)

    def ridged(u: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        return rho(u, v) + 0.5 * torch.stack([(u[name] - v[name]) ** 2 for name in u]).sum()

    bounded = ng.proximal.linearised(loss, ridged, w, 1.0)
    assert all(bool(t.isfinite()) for t in bounded.values())
