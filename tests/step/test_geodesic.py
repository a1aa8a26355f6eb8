"""Geodesics: the acceleration against finite differences of the metric, and curves that are known in closed form."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.step import christoffel
from tests import oracle
from tests.optim.tasks import Rosenbrock, seeded, task


def _rho(y: Tensor, y0: Tensor) -> Tensor:
    """A dissimilarity whose Hessian e^y0 + e^{2 y0} depends on the point."""
    return (y.exp() - y0.exp() * (1 + y - y0) + 0.5 * (y.exp() - y0.exp()).square()).sum()


def _loss(y: Tensor, t: Tensor) -> Tensor:
    return torch.cosh(y - t).sum()


METRICS: dict[str, tuple[ng.OutputMetric, Callable[[Tensor, Tensor], Tensor]]] = {
    "euclidean": (ng.Euclidean(), lambda y, t: oracle.euclidean(y)),
    "categorical": (ng.Fisher(ng.Categorical()), lambda y, t: oracle.categorical(y)),
    "sampled": (ng.Fisher(ng.Categorical(), samples=1), lambda y, t: oracle.categorical(y)),
    "bernoulli": (ng.Fisher(ng.Bernoulli()), lambda y, t: oracle.bernoulli(y)),
    "poisson": (ng.Fisher(ng.Poisson()), lambda y, t: oracle.poisson(y)),
    "gaussian": (ng.Fisher(ng.Gaussian(scale=None)), lambda y, t: oracle.gaussian_learned(y)),
    "bregman": (
        ng.Bregman(lambda y: F.softplus(y).sum() + y.square().square().sum()),
        lambda y, t: oracle.hessian(lambda u: F.softplus(u) + u**4, y),
    ),
    "divergence": (ng.Divergence(_rho), lambda y, t: oracle.divergence_hessian(_rho, y)),
    "loss_hessian": (ng.LossHessian(_loss), lambda y, t: oracle.loss_hessian(_loss, y, t)),
}


@pytest.mark.parametrize("name", METRICS)
def test_christoffel_is_the_derivative_of_the_metric(name: str) -> None:
    """Γ♭_p = v^q v^r (∂_q G_pr − ½ ∂_p G_qr), with central differences of the oracle's G."""
    metric, h = METRICS[name]
    of = task(n=5)
    like = oracle.parameters(of.model)
    θ = of.theta()
    v = torch.randn(len(θ), dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def G(at: Tensor) -> Tensor:
        def f(params: dict[str, Tensor], x: Any) -> Tensor:
            return torch.func.functional_call(of.model, params, (x,))

        params = oracle.unflatten(at, like)
        return oracle.dense(oracle.jacobian(f, params, of.x, 5), h(f(params, of.x), of.t))

    def slope(direction: Tensor) -> Tensor:
        ε = 1e-5
        return (G(θ + ε * direction) - G(θ - ε * direction)) / (2 * ε)

    unit = torch.eye(len(θ), dtype=torch.float64)
    expected = slope(v) @ v - 0.5 * torch.stack([v @ slope(e) @ v for e in unit])
    pb = ng.pullback(of.model, of.x, metric, target=of.t if metric.needs_target else None)
    got = christoffel(pb, ng.Vector(oracle.unflatten(v, like)))
    torch.testing.assert_close(got.flatten(), expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))


class _Point(nn.Module):
    """One example whose outputs are a function of one parameter tensor."""

    def __init__(self, start: list[float], chart: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.point, self.chart = nn.Parameter(torch.tensor(start, dtype=torch.float64)), chart

    def forward(self) -> Tensor:
        return self.chart(self.point)[None]


def _polar(θ: Tensor) -> Tensor:
    return torch.stack([θ[0] * θ[1].cos(), θ[0] * θ[1].sin()])


def _softmax(θ: Tensor) -> Tensor:
    return torch.cat([θ, θ.new_zeros(1)])


def _line_from_polar(θ: Tensor, v: Tensor) -> Tensor:
    end = _polar(θ) + torch.autograd.functional.jvp(_polar, θ, v)[1]
    return torch.stack([end.norm(), torch.atan2(end[1], end[0])])


def _line_from_rosenbrock(θ: Tensor, v: Tensor) -> Tensor:
    """Flat in z: θ₁ moves linearly, and so does w = θ₂ − θ₁²."""
    first = θ[0] + v[0]
    w = θ[1] - θ[0] ** 2 + v[1] - 2 * θ[0] * v[0]
    return torch.stack([first, w + first**2])


def _coin_circle(θ: Tensor, v: Tensor) -> Tensor:
    """p = sin²(φ/2), and φ = 2 arcsin √p has unit speed: dφ = √(p(1 − p)) dθ."""
    p = torch.sigmoid(θ)
    φ = 2 * p.sqrt().asin() + (p * (1 - p)).sqrt() * v
    return torch.logit((φ / 2).sin().square())


def _great_circle(θ: Tensor, v: Tensor) -> Tensor:
    """On the sphere 2√p of radius 2."""
    root = torch.softmax(_softmax(θ), 0).sqrt()
    u = torch.autograd.functional.jvp(lambda a: 2 * torch.softmax(_softmax(a), 0).sqrt(), θ, v)[1]
    angle = u.norm() / 2
    end = angle.cos() * root + angle.sin() * u / u.norm()
    log_p = end.square().log()
    return (log_p - log_p[-1])[:-1]


def _rate_line(θ: Tensor, v: Tensor) -> Tensor:
    """2 e^{θ/2} has unit speed, so θ goes to θ + 2 log(1 + v/2)."""
    return θ + 2 * torch.log1p(v / 2)


@dataclass(frozen=True)
class Curve:
    """A model with a metric whose exponential map is known."""

    model: Callable[[], nn.Module]
    metric: ng.OutputMetric
    exp: Callable[[Tensor, Tensor], Tensor]
    v: list[float]
    h: Callable[[Tensor], Tensor]

    def G(self, θ: Tensor) -> Tensor:
        """The metric at θ, by the oracle."""
        model = self.model()

        def f(params: dict[str, Tensor], x: Any) -> Tensor:
            return torch.func.functional_call(model, params, ())

        return oracle.dense(oracle.jacobian(f, {"point": θ}, (), 1), self.h(f({"point": θ}, None)))


CURVES = {
    "rosenbrock": Curve(Rosenbrock, ng.Euclidean(), _line_from_rosenbrock, [0.4, -0.3], oracle.euclidean),
    "polar": Curve(lambda: _Point([1.3, 0.4], _polar), ng.Euclidean(), _line_from_polar, [-0.3, 0.7], oracle.euclidean),
    "coin": Curve(lambda: _Point([0.4], lambda θ: θ), ng.Fisher(ng.Bernoulli()), _coin_circle, [1.1], oracle.bernoulli),
    "softmax": Curve(
        lambda: _Point([0.4, -0.3], _softmax),
        ng.Fisher(ng.Categorical()),
        _great_circle,
        [0.8, -0.5],
        oracle.categorical,
    ),
    "rate": Curve(
        lambda: _Point([0.2, -0.5], lambda θ: θ), ng.Fisher(ng.Poisson()), _rate_line, [0.9, -0.4], oracle.poisson
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_exponential_map_follows_the_geodesic_that_is_known_in_closed_form(name: str) -> None:
    curve = CURVES[name]
    model, v = curve.model(), torch.tensor(curve.v, dtype=torch.float64)
    θ = oracle.flatten(model.parameters())
    end = ng.exponential(model, None, curve.metric, ng.Vector({"point": v}), steps=24)
    torch.testing.assert_close(end["point"], curve.exp(θ, v), rtol=0, atol=1e-6)
    assert torch.equal(oracle.flatten(model.parameters()), θ)  # nothing moved


def test_where_the_metric_is_flat_outputs_move_on_a_straight_line() -> None:
    """f(Exp(v)) = f(x) + Jv."""
    model = Rosenbrock()
    J = oracle.jacobian(lambda p, _: torch.func.functional_call(model, p, ()), dict(model.named_parameters()), (), 1)
    for v in torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        end = ng.exponential(model, None, ng.Euclidean(), ng.Vector({"point": v}), steps=5)
        moved = torch.func.functional_call(model, end, ())
        torch.testing.assert_close(moved[0], model()[0].detach() + J[0] @ v, rtol=1e-12, atol=1e-11)


def test_the_integrator_is_of_fourth_order() -> None:
    curve = CURVES["polar"]
    model, v = curve.model(), torch.tensor(curve.v, dtype=torch.float64)
    exact = curve.exp(oracle.flatten(model.parameters()), v)
    errors = []
    for steps in (4, 8):
        end = ng.exponential(model, None, curve.metric, ng.Vector({"point": v}), steps=steps)
        errors.append(float((end["point"] - exact).norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(4.0, abs=0.3)


@pytest.mark.parametrize("name", ["categorical", "poisson", "gaussian"])
def test_the_speed_is_conserved_along_a_geodesic(name: str) -> None:
    """θ′ᵀG(θ)θ′ is the same at every time, θ′ by central differences."""
    metric, h = METRICS[name]
    model = seeded(lambda: nn.Linear(2, 2).double())
    x = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    like, solver = oracle.parameters(model), ng.Pinv(rtol=1e-10)  # softmax has null directions
    start = oracle.flatten(like.values())
    v = 0.3 * torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def at(t: float) -> Tensor:
        vector = ng.Vector(oracle.unflatten(t * v, like))
        return oracle.flatten(ng.exponential(model, x, metric, vector, steps=6, solver=solver).values())

    def energy(θ: Tensor, velocity: Tensor) -> float:
        def f(params: dict[str, Tensor], x: Any) -> Tensor:
            return torch.func.functional_call(model, params, (x,))

        params = oracle.unflatten(θ, like)
        G = oracle.dense(oracle.jacobian(f, params, x, 6), h(f(params, x), x))
        return float(velocity @ G @ velocity)

    there = at(1.0)
    end = energy(there, (at(1.001) - at(0.999)) / 2e-3)
    assert end == pytest.approx(energy(start, v), rel=1e-4)
    assert abs(energy(there, v) / end - 1) > 1e-3  # a straight line in the parameters does not keep it


def test_a_pure_function_has_geodesics_too() -> None:
    θ = {"r": torch.tensor(1.0, dtype=torch.float64), "a": torch.tensor(0.0, dtype=torch.float64)}
    v = ng.Vector({"r": torch.tensor(0.5, dtype=torch.float64), "a": torch.tensor(1.0, dtype=torch.float64)})
    f: Callable[..., Tensor] = lambda p, x: _polar(torch.stack([p["r"], p["a"]]))[None]  # noqa: E731
    end = ng.exponential(f, None, ng.Euclidean(), v, params=θ)
    assert float(end["r"]) == pytest.approx(math.hypot(1.5, 1.0), abs=1e-5)
    assert float(end["a"]) == pytest.approx(math.atan2(1.0, 1.5), abs=1e-5)


def test_what_has_no_geodesic_is_refused() -> None:
    model = _Point([0.4, -0.3, 0.1], lambda θ: θ)
    v = ng.Vector({"point": torch.ones(3, dtype=torch.float64)})
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        ng.exponential(model, None, ng.Euclidean(), v, steps=0)
    with pytest.raises(ng.errors.SingularMetricError, match="rank 2 of 3"):
        ng.exponential(model, None, ng.Fisher(ng.Categorical()), v)
    covariance = ng.GradientCovariance(F.cross_entropy)
    with pytest.raises(ValueError, match=r"couples the examples, .* or a step rule without a geodesic"):
        ng.exponential(model, None, covariance, v, target=torch.tensor([0]))
    rate = _Point([0.0], lambda θ: θ)
    # e^θ has underflowed, and the metric with it
    with pytest.raises(ng.errors.SingularMetricError, match="rank 0 of 1"):
        ng.exponential(rate, None, ng.Fisher(ng.Poisson()), ng.Vector({"point": -1e4 * v["point"][:1]}))


def test_an_operation_without_a_second_derivative_in_forward_mode_is_named() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh()).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.GeodesicCorrected(), damping=0.1)
    model(x).square().mean().backward()
    with pytest.raises(IncompatibleError, match=r"_weight_norm_interface.*use a step rule without a geodesic"):
        opt.step()


def test_only_a_vector_of_the_parameters_has_a_geodesic() -> None:
    """A gradient is no velocity, and a shape that would broadcast is another vector."""
    model = _Point([0.4, -0.3, 0.1], lambda θ: θ)
    pb = ng.pullback(model, None, ng.Euclidean())
    ω = ng.Covector({"point": torch.ones(3, dtype=torch.float64)})
    other = ng.Vector({"line": torch.ones(3, dtype=torch.float64)})
    column = ng.Vector({"point": torch.ones(3, 1, dtype=torch.float64)})
    for follow in (lambda v: ng.exponential(model, None, ng.Euclidean(), v), lambda v: christoffel(pb, v)):
        with pytest.raises(TypeError, match=r"a Covector .* is not a Vector"):
            follow(ω)
        with pytest.raises(ValueError, match="θ and v are over different parameters: they differ in line, point"):
            follow(other)
        with pytest.raises(ValueError, match=r"θ and v differ in point: shapes \(3,\) and \(3, 1\)"):
            follow(column)


CURVED: list[tuple[ng.families.ExponentialFamily, list[float]]] = [
    (ng.families.Gamma(), [1.5, -2.0]),
    (ng.families.Beta(), [0.5, 2.0]),
    (ng.families.Dirichlet(), [0.5, 2.0, 1.0]),
    (ng.families.Wishart(), [1.0, 2.0, 0.5, 0.5, 1.0]),
    (ng.families.InverseGaussian(), [-1.0, -2.0]),
    (ng.families.VonMises(), [1.0, -0.5]),
    (ng.families.FullGaussian(), [0.5, -1.0, 2.0, 0.5, 0.5, 1.0]),
    (ng.families.GaussianKnownMean(torch.zeros(2, dtype=torch.float64)), [2.0, 0.5, 0.5, 1.0]),
]


@pytest.mark.parametrize(("family", "η"), CURVED, ids=[type(family).__name__ for family, _ in CURVED])
def test_the_christoffel_force_of_natural_parameters_is_half_the_third_cumulant(
    family: ng.families.ExponentialFamily, η: list[float]
) -> None:
    """G = ∇²log Z, so that Γ♭(v, v) = ½ ∇³log Z(v, v, ·)."""
    v = torch.linspace(-0.5, 0.8, len(η), dtype=torch.float64)
    pb = ng.pullback(_Point(η, lambda θ: θ), None, ng.Fisher(family))
    point = torch.tensor(η, dtype=torch.float64, requires_grad=True)
    (ξ,) = torch.autograd.grad(family.log_partition(point), point, create_graph=True)
    (second,) = torch.autograd.grad(ξ @ v, point, create_graph=True)
    (third,) = torch.autograd.grad(second @ v, point)
    found = christoffel(pb, ng.Vector({"point": v}))["point"]
    torch.testing.assert_close(found, 0.5 * third, rtol=1e-7, atol=1e-7)
    pushed = torch.func.jvp(family.mean, (point.detach(),), (v,))[1]  # F v, in forward mode
    torch.testing.assert_close(pushed, second.detach(), rtol=1e-7, atol=1e-7)
