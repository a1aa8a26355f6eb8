"""What the library promises of flatness and of the exact metric of functions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D

import natgrad as ng
from natgrad.functionspace import Flatness, Quadrature, flatness
from tests import oracle
from tests.golden import golden, tensor
from tests.pulled import close, normal
from tests.test_rosenbrock import Params, Rosenbrock

CASE = golden("flatness.rosenbrock")


def _flatness(model: Any, params: Params, samples: int = 4096) -> Flatness:
    """In z the basin is the disc ‖z‖² < ε; in x it is a thin banana around (1, 1), that is not star-shaped."""
    return flatness(
        model,
        None,
        CASE["inputs"]["eps"],
        ng.Euclidean(),
        loss=lambda z: z.square().sum(),
        samples=samples,
        generator=torch.Generator().manual_seed(0),
        params=params,
    )


def _agree(got: ng.functionspace.Volume, expected: float) -> None:
    assert abs(got.value - expected) < 4 * got.error
    assert got.relative_error < 0.025


def test_flatness_of_rosenbrock_is_pi_epsilon_and_the_euclidean_volume_is_another() -> None:
    found = _flatness(Rosenbrock(CASE), {"x": tensor([1.0, 1.0])})
    _agree(found.volume, CASE["expected"]["pullback"])
    _agree(found.euclidean, CASE["expected"]["euclidean"])


def test_twice_the_coordinates_leave_flatness_and_quadruple_the_euclidean_volume() -> None:
    f = Rosenbrock(CASE)
    found = _flatness(lambda p, x: f({"x": p["x"] / 2}), {"x": tensor([2.0, 2.0])})
    _agree(found.volume, CASE["expected"]["pullback"])
    _agree(found.euclidean, CASE["expected"]["euclidean_after_y_eq_2x"])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_flatness_is_the_same_after_a_random_linear_reparametrisation(seed: int) -> None:
    """x = M y: the Euclidean volume is divided by |det M|, the pullback one is not."""
    f, M = Rosenbrock(CASE), normal(2, 2, seed=seed)
    found = _flatness(lambda p, x: f({"x": M @ p["x"]}), {"x": torch.linalg.solve(M, tensor([1.0, 1.0]))})
    _agree(found.volume, CASE["expected"]["pullback"])
    _agree(found.euclidean, CASE["expected"]["euclidean"] / abs(float(M.det())))


def test_flatness_is_the_same_after_a_nonlinear_reparametrisation() -> None:
    """x = (sinh y₁, y₂ + y₁²): √det G is no constant in y, and the basin another."""
    f = Rosenbrock(CASE)

    def bent(p: Params, x: Any) -> Tensor:
        y1, y2 = p["x"]
        return f({"x": torch.stack([y1.sinh(), y2 + y1**2])})

    start = torch.asinh(tensor(1.0))
    found = _flatness(bent, {"x": torch.stack([start, 1 - start**2])})
    _agree(found.volume, CASE["expected"]["pullback"])
    assert abs(found.euclidean.value / CASE["expected"]["euclidean"] - 1) > 0.15


def test_flatness_of_a_network_does_not_depend_on_its_coordinates_in_the_fisher_metric() -> None:
    """w tanh(vx) as a logit, in (v, w), in (log v, w/v), and scaled: one volume of functions, three of parameters."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]

    def net(v: Tensor, w: Tensor) -> Tensor:
        return w * torch.tanh(v * x)

    charts = [
        (lambda p, _: net(p["a"], p["b"]), {"a": tensor(0.8), "b": tensor(1.5)}),
        (lambda p, _: net(p["a"].exp(), p["b"] * p["a"].exp()), {"a": tensor(math.log(0.8)), "b": tensor(1.875)}),
        (lambda p, _: net(p["a"] / 5, p["b"]), {"a": tensor(4.0), "b": tensor(1.5)}),
    ]
    found = [
        flatness(
            model, None, 3e-4, ng.Fisher(ng.Bernoulli()), params=params, generator=torch.Generator().manual_seed(1)
        )
        for model, params in charts
    ]
    first, *others = found
    assert first.volume.relative_error < 0.01
    for other in others:
        assert abs(other.volume.value - first.volume.value) < 4 * math.hypot(other.volume.error, first.volume.error)
        assert abs(other.euclidean.value / first.euclidean.value - 1) > 0.3
    assert abs(others[1].euclidean.value / first.euclidean.value - 5) < 0.2


# Flatness of a network with seven parameters, v·tanh(wx + b) + c with two hidden units, at 40 inputs.

X = torch.linspace(-3, 3, 40, dtype=torch.float64)[:, None]
SEVEN = {
    "w": tensor([1.5, 1.0]),
    "b": tensor([2.0, -1.5]),
    "v": tensor([1.2, -0.8]),
    "c": tensor(0.3),
}


def _seven(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(x * p["w"] + p["b"]) @ p["v"] + p["c"]


def _seven_in_other_units(p: Params, x: Tensor) -> Tensor:
    """The slopes as logarithms, the places of the units in place of their biases, v in other units."""
    w = p["w"].exp()
    return _seven({"w": w, "b": -w * p["b"], "v": p["v"] / 7, "c": p["c"]}, x)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-4])
def test_flatness_of_a_network_of_seven_parameters_is_that_of_a_ball_in_any_coordinates(
    epsilon: float, caplog: pytest.LogCaptureFixture
) -> None:
    """½‖f − f0‖² < ε is a ball of functions, where ε is so small that they are about linear in the parameters."""
    ball = math.pi**3.5 / math.gamma(4.5) * (2 * epsilon) ** 3.5
    other = {"w": SEVEN["w"].log(), "b": -SEVEN["b"] / SEVEN["w"], "v": 7 * SEVEN["v"], "c": SEVEN["c"]}
    volumes = []
    for model, params in ((_seven, SEVEN), (_seven_in_other_units, other)):
        generator = torch.Generator().manual_seed(0)
        found = flatness(model, X, epsilon, ng.Euclidean(), samples=512, params=params, generator=generator)
        assert abs(found.volume.value - ball) < 4 * found.volume.error
        assert found.volume.relative_error < 0.03
        volumes.append(found.euclidean)
    assert abs(math.log(volumes[1].value / volumes[0].value)) > 1
    assert not caplog.records


@pytest.mark.parametrize("seed", [1, 2])
def test_flatness_of_a_network_with_units_that_hardly_matter_has_no_error_bar(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As they are initialised: hidden units are nearly linear, and arms of the basin go on where one may vanish.

    What the lines find is up to chance, over several powers of e. The error says so, whatever the generator.
    """
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
        x = torch.randn(40, 1).double()
    found = flatness(model, x, 1e-4, ng.Euclidean(), samples=256, generator=torch.Generator().manual_seed(seed))
    assert found.volume.relative_error == found.volume.error == math.inf
    assert str(found.volume).endswith(" ± inf")
    (message,) = [m for m in caplog.messages if "the error of volume is a guess, inf of its value" in m]
    assert "the basin has long arms that few lines meet. Lower epsilon=, raise samples=, or freeze" in message


# The metric of functions, with the two-layer network f2(B f1(A x)) of appendix E, both activation functions tanh.


class TwoLayer(nn.Module):
    """tanh(B tanh(A x))."""

    def __init__(self, n: int, d: int, m: int) -> None:
        super().__init__()
        self.A, self.B = nn.Linear(n, d, bias=False), nn.Linear(d, m, bias=False)
        with torch.no_grad():
            self.A.weight.copy_(normal(d, n, seed=1))
            self.B.weight.copy_(normal(m, d, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.B(torch.tanh(self.A(x))))


def _closed_form(A: Tensor, B: Tensor, x: Tensor) -> Tensor:
    """(43) and (44) of Bai et al. (2022), corrected, J [n m (A, B)]: no x in the first, and the matrix B in the second.

    ∂φ/∂B_sr = f2'_s f1(Ax)_r e_s; ∂φ/∂A_dc = f2' ⊙ B_{:,d} f1'((Ax)_d) x_c.
    """
    hidden = torch.tanh(x @ A.T)
    slope1, slope2 = 1 - hidden**2, 1 - torch.tanh(hidden @ B.T) ** 2
    by_A = torch.einsum("nm,md,nd,nc->nmdc", slope2, B, slope1, x)
    by_B = torch.einsum("nm,ms,nr->nmsr", slope2, torch.eye(len(B), dtype=B.dtype), hidden)
    return torch.cat([by_A.flatten(2), by_B.flatten(2)], dim=2)


def test_derivatives_of_a_two_layer_network_are_the_corrected_ones_and_not_those_printed() -> None:
    a, b, x = tensor([[0.7]]), tensor([[1.3]]), tensor([[0.9]])
    by_a, by_b = _closed_form(a, b, x)[0, 0]
    assert abs(float(by_a) - 0.495665) < 1e-6
    assert abs(float(by_b) - 0.343340) < 1e-6
    f1 = torch.tanh(a * x)
    slope2 = 1 - torch.tanh(b * f1) ** 2
    printed = (slope2 * b * f1 * (1 - f1**2), slope2 * f1 * x)
    assert abs(float(printed[0]) - 0.307341) < 1e-6
    assert abs(float(printed[1]) - 0.309006) < 1e-6
    model = TwoLayer(2, 3, 2).double()
    x = normal(5, 2)
    close(_closed_form(model.A.weight, model.B.weight, x).detach(), oracle.module_jacobian(model, x), 1e-12)


@pytest.mark.parametrize("measure", [D.Uniform(tensor([-1.0, 0.0]), tensor([1.0, 2.0]))])
def test_the_pullback_metric_is_the_integral_of_the_closed_form(measure: D.Distribution) -> None:
    """Against a midpoint rule with a million points and no code of the library; A and B are coupled."""
    model = TwoLayer(2, 2, 1).double()
    rule = Quadrature.of(measure, order=32)
    G = ng.Dense().estimate(ng.pullback(model, rule.nodes, rule.metric())).dense()
    axis = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    x = torch.cartesian_prod(2 * axis - 1, 2 * axis)
    J = _closed_form(model.A.weight.detach(), model.B.weight.detach(), x)[:, 0]
    close(G, J.T @ J / len(x), 1e-5)
    assert float(G[:4, 4:].abs().max()) > 1e-2  # no block structure, as appendix E says


def test_under_a_gaussian_measure_the_rule_agrees_with_a_trapezoid() -> None:
    """The trapezoid rule converges fast for analytic functions on the line; Gauss–Hermite slowly, as tanh has poles."""
    model = TwoLayer(1, 1, 1).double()
    x = torch.linspace(-9, 9, 2001, dtype=torch.float64)[:, None]
    w = torch.softmax(-(x[:, 0] ** 2) / 2, dim=0)
    J = _closed_form(model.A.weight.detach(), model.B.weight.detach(), x)[:, 0]
    rule = Quadrature.of(D.Normal(tensor(0.0), tensor(1.0)), order=512)
    G = ng.Dense().estimate(ng.pullback(model, rule.nodes, rule.metric())).dense()
    close(G, (w[:, None] * J).T @ J, 1e-8)


@pytest.mark.parametrize(("half", "integral"), [(10.0, 1.43), (100.0, 13.4), (1000.0, 132.7)])
def test_under_lebesgue_measure_the_metric_grows_without_bound(half: float, integral: float) -> None:
    """∫_{−L}^{L} (∂φ/∂b)² dx at a = 0.7, b = 1.3: hence a probability measure."""
    params = {"a": tensor(0.7), "b": tensor(1.3)}
    rule = Quadrature.of(D.Uniform(tensor(-half), tensor(half)), order=1024)
    pb = ng.pullback(lambda p, x: torch.tanh(p["b"] * torch.tanh(p["a"] * x)), rule.nodes, rule.metric(), params=params)
    assert abs(float(ng.Dense().estimate(pb).dense()[1, 1]) * 2 * half / integral - 1) < 4e-3
