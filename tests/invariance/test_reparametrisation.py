"""The natural gradient of over-parametrised models, on the model and on parameters: van Oostrum et al. (2023)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.linalg import Damping
from natgrad.operators import Inverse, Layout, Operator
from natgrad.solve import Solver
from tests.golden import agrees, golden, tensor
from tests.zoo import mlp

Point = dict[str, Tensor]


class Generalised(Solver):
    """Any generalised inverse G⁻ = G⁺ + (1 − G⁺G)U + V(1 − GG⁺), U and V random: G G⁻ G = G and nothing more."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        matrix = G.dense()
        plus = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-11)
        eye = torch.eye(len(matrix), dtype=matrix.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        u, v = torch.randn(2, *matrix.shape, generator=generator, dtype=matrix.dtype)
        return Matrix(G.layout, plus + (eye - plus @ matrix) @ u + v @ (eye - matrix @ plus))


class Matrix(Inverse):
    def __init__(self, layout: Layout, matrix: Tensor) -> None:
        self.layout, self.matrix = layout, matrix

    def solve(self, ω: Tensor) -> Tensor:
        return self.matrix @ ω


def problem(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """An over-parametrised model (its metric is singular) with inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp(3, 6, 2).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    x, t = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    return model, x, t[:, :2]


def weights(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: 0.5 + torch.rand(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """∂y/∂θ of the whole batch [(n d) p], one output at a time."""
    params = list(model.parameters())
    rows = [torch.autograd.grad(y, params, retain_graph=True) for y in model(x).flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


SOLVERS: dict[str, Callable[[nn.Module], Solver]] = {
    "Moore-Penrose": lambda model: ng.Pinv(rtol=1e-11),
    "minimum norm for a weight": lambda model: ng.Pinv(rtol=1e-11, weight=weights(model)),
    "generalised inverse 1": lambda model: Generalised(1),
    "generalised inverse 2": lambda model: Generalised(2),
    "conjugate gradients": lambda model: ng.CG(tol=1e-13, max_steps=400),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("point", ["random", "rank not constant"])
def test_theorem_1_the_pushforward_is_the_projection_of_the_gradient(solver: str, seed: int, point: str) -> None:
    """dφ G⁻∇L = Π(grad L), the projection onto the span of the coordinate vectors, for every generalised inverse."""
    model, x, t = problem(seed)
    if point == "rank not constant":  # the incoming weights of a dead hidden layer do nothing to first order
        with torch.no_grad():
            model.get_parameter("2.weight").zero_()
    h = torch.tensor([1.7, 0.4], dtype=torch.float64)  # a metric on the outputs, not Euclidean
    metric = ng.Divergence(lambda y, y0: 0.5 * (h * (y - y0) ** 2).sum())

    def loss(y: Tensor) -> Tensor:
        return (y - t).pow(3).sum()

    v = ng.natural_gradient(model, x, loss, metric, solver=SOLVERS[solver](model))
    pushed = ng.pushforward(model, x, v).flatten()

    root = (h / 5).sqrt().repeat(5)  # the metric of the batch is a mean over its five examples
    span, values, _ = torch.linalg.svd(root[:, None] * jacobian(model, x), full_matrices=False)
    span = span[:, values > 1e-9 * values[0]]
    y = model(x).detach().requires_grad_()
    (dL,) = torch.autograd.grad(loss(y), y)
    gradient = dL.flatten() / root**2
    projected = (span @ (span.T @ (root * gradient))) / root
    torch.testing.assert_close(pushed, projected, rtol=1e-7, atol=1e-7 * float(projected.norm()))


DIFFEOMORPHISMS: dict[str, Callable[[Point], Point]] = {
    "linear": lambda θ: {n: 3 * p for n, p in θ.items()},
    "curved": lambda θ: {n: p + p.pow(3) for n, p in θ.items()},
    "mixing": lambda θ: {n: p + 0.5 * torch.roll(p.flatten(), 1).view_as(p).sin() for n, p in θ.items()},
    "across parameters": lambda θ: {**θ, "2.bias": θ["2.bias"] + 0.3 * θ["0.weight"].sum().tanh()},
}


@pytest.mark.parametrize("name", DIFFEOMORPHISMS)
@pytest.mark.parametrize("solver", ["Moore-Penrose", "generalised inverse 1"])
def test_theorem_2_invariant_on_the_model_and_not_on_the_parameters(name: str, solver: str) -> None:
    model, x, t = problem(3)
    gap = ng.invariance.reparametrisation(
        model, DIFFEOMORPHISMS[name], x, lambda y: (y - t).square().sum(), solver=SOLVERS[solver](model)
    )
    assert gap.model_gap < 1e-6
    # a linear map of all parameters by one factor keeps the minimum norm; every other one does not
    same_norm = name == "linear" and solver == "Moore-Penrose"
    assert (gap.parameter_gap < 1e-6) == same_norm
    assert "gap on the model" in str(gap)


def test_without_over_parametrisation_the_parameters_are_invariant_too() -> None:
    model = nn.Linear(2, 1).double()
    x = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gap = ng.invariance.reparametrisation(model, DIFFEOMORPHISMS["curved"], x, lambda y: y.square().sum())
    assert max(gap.model_gap, gap.parameter_gap) < 1e-10


def test_damping_breaks_the_invariance_and_by_how_much_is_reported() -> None:
    model, x, _ = problem(4)
    gaps = [
        ng.invariance.reparametrisation(
            model, DIFFEOMORPHISMS["curved"], x, lambda y: y.square().sum(), damping=damping
        ).model_gap
        for damping in (0.0, 1e-3, 1e-1)
    ]
    assert gaps[0] < 1e-6 < gaps[1] < gaps[2]


def test_a_map_that_is_no_diffeomorphism_is_refused() -> None:
    """θ ↦ θ³ at 0 is the construction of proposition 2: every pushforward vanishes there."""
    params = {"w": torch.zeros(2, dtype=torch.float64)}
    f = lambda θ, x: θ["w"].sum().view(1, 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"not a diffeomorphism at the parameters: its derivative has rank 0 of 2"):
        ng.invariance.reparametrisation(f, lambda θ: {"w": θ["w"] ** 3}, None, torch.sum, params=params)


def test_a_map_to_other_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"same names and shapes, and does not for weight, bias, w: return a tensor"):
        ng.invariance.reparametrisation(
            nn.Linear(2, 1), lambda θ: {"w": θ["weight"]}, torch.ones(1, 2), lambda y: y.sum()
        )


@pytest.mark.parametrize("name", ["oostrum.A2.L=x", "oostrum.A2.L=y", "oostrum.A2.L=x+2y"])
def test_example_A2_corrected_depends_on_the_parametrisation_at_a_singular_point(name: str) -> None:
    """φ(ξ) = (sin 2ξ, sin ξ) passes the origin twice; f(θ) = π − θ takes θ = 0 to the other passage."""
    case = golden(name)
    slope = tensor(case["inputs"]["grad_L_at_origin"])

    def curve(ξ: Tensor) -> Tensor:
        return torch.stack([(2 * ξ).sin(), ξ.sin()]).view(1, 2)

    def at(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        model, point = (lambda p, x: curve(f(p["ξ"]))), {"ξ": torch.zeros((), dtype=torch.float64)}
        v = ng.natural_gradient(model, None, lambda y: (y * slope).sum(), ng.Euclidean(), params=point)
        return v["ξ"], ng.pushforward(model, None, v, params=point).flatten()

    for where, f in (("xi1", lambda ξ: ξ), ("theta1", lambda θ: math.pi - θ)):
        parameter, pushed = at(f)
        agrees(case, parameter, f"param_grad_{where}")
        agrees(case, pushed, f"pushforward_{where}")


@pytest.mark.parametrize(("f", "expected"), [([[2.0, 0.0], [0.0, 1.0]], "A3"), ([[1.0, 2.0], [1.0, 1.0]], None)])
def test_example_A3_the_parameter_gradients_differ_and_their_pushforwards_do_not(
    f: list[list[float]], expected: str | None
) -> None:
    """The second map is not symmetric: it tells ∂ξ/∂θ from its transpose, y_Θ = (48/13, 30/13)."""
    matrix = tensor(f)
    model = lambda p, x: torch.stack([p["ξ"].sum(), torch.zeros((), dtype=torch.float64)]).view(1, 2)  # noqa: E731
    θ = torch.linalg.solve(matrix, tensor([2.0, 1.0]))
    gap = ng.invariance.reparametrisation(
        model, lambda p: {"ξ": matrix @ p["ξ"]}, None, lambda y: y[0, 0] ** 2, params={"ξ": θ}
    )
    v_ξ, v_θ = (v["ξ"] for v in gap.on_parameters)
    case = golden("oostrum.A3")
    agrees(case, v_ξ, "y_Xi")
    if expected:
        agrees(case, v_θ, "y_Theta")
        agrees(case, gap.on_model[1].flatten(), "pushforward_Theta")
    else:
        torch.testing.assert_close(v_θ, tensor([48 / 13, 30 / 13]))
    assert gap.model_gap < 1e-12
    # (33): y_Θ is the solution of least norm ‖(∂ξ/∂θ)⁻¹y‖ in the coordinates ξ
    inverse = torch.linalg.inv(matrix)
    ξ = {"ξ": tensor([2.0, 1.0])}
    weighted = ng.natural_gradient(
        model, None, lambda y: y[0, 0] ** 2, ng.Euclidean(), solver=ng.Pinv(weight=inverse.T @ inverse), params=ξ
    )
    torch.testing.assert_close(weighted["ξ"], v_θ)


def test_natural_gradient_steps_are_invariant_to_linear_maps_of_the_parameters() -> None:
    """θ = Aθ′: the steps agree, A(θ′ − αv′) = θ − αv (Johnson (2017), eq. 52); those of the gradient do not."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3, 3, generator=generator, dtype=torch.float64) + 2 * torch.eye(3, dtype=torch.float64)
    x, t = torch.randn(2, 10, generator=generator, dtype=torch.float64)

    def network(w: Tensor) -> Tensor:
        return (w[0] * (w[1] * x + w[2]).tanh()).view(-1, 1)

    def iterate(natural: bool, mapped: bool) -> Tensor:
        w = torch.tensor([0.5, -0.8, 0.3], dtype=torch.float64)
        w = torch.linalg.solve(A, w) if mapped else w
        model = (lambda p, _: network(A @ p["w"])) if mapped else (lambda p, _: network(p["w"]))
        for _ in range(3):
            loss = lambda y: 0.5 * (y[:, 0] - t).square().mean()  # noqa: E731
            solver: Solver = ng.Cholesky() if natural else Identity()
            v = ng.natural_gradient(model, None, loss, ng.Euclidean(), solver=solver, params={"w": w})
            w = w - 0.2 * v["w"]
        return A @ w if mapped else w

    torch.testing.assert_close(iterate(True, True), iterate(True, False), rtol=1e-9, atol=1e-9)
    assert float((iterate(False, True) - iterate(False, False)).norm()) > 1e-2


class Identity(Solver):
    """Gradient descent: the covector taken for a vector."""

    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        return Matrix(G.layout, torch.eye(G.layout.size, dtype=torch.float64))


def test_it_says_where_the_theorem_does_not_apply() -> None:
    """φ = (a, b³) has rank 1 at b = 0 and 2 nearby; damping, parts and samples of a metric are no theorem's."""

    def model(p: dict[str, Tensor], x: None) -> Tensor:
        return torch.stack([p["a"], p["b"] ** 3])[None]

    def f(θ: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": 2 * θ["a"], "b": θ["b"] + θ["b"] ** 2 / 5}

    def caveats(b: float, **options: Any) -> tuple[str, ...]:
        params = {"a": torch.tensor(1.0, dtype=torch.float64), "b": torch.tensor(b, dtype=torch.float64)}
        found = ng.invariance.reparametrisation(model, f, None, lambda y: y.sum(), params=params, **options)
        assert "\n".join(found.caveats) in str(found)
        return found.caveats

    assert caveats(1.0) == ()
    (rank,) = caveats(0.0)
    assert rank.startswith("no constant rank: it is 1 here and 2 nearby")
    (damped,) = caveats(1.0, damping=0.1)
    assert damped.startswith("theorem 2 does not apply: damping 0.1")
    (part,) = caveats(1.0, structure=ng.Diagonal())
    assert part.startswith("theorem 2 does not apply: Diagonal keeps a part")
    (sampled,) = caveats(1.0, metric=ng.Sampled(ng.Euclidean()))
    assert sampled.startswith("theorem 2 does not apply: two samples")
