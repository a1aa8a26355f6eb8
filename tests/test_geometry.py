"""Vectors, covectors, the pairing, and the two ways a model carries them: against explicit sums and the oracle."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import natgrad as ng
from natgrad.geometry import NamedTensors
from natgrad.model import Model
from tests import oracle, zoo
from tests.golden import golden
from tests.pulled import normal

every_case = pytest.mark.parametrize("case", zoo.ZOO, ids=zoo.IDS)
both_types = pytest.mark.parametrize("kind", [ng.Vector, ng.Covector])
SHAPES = {"w": (2, 3), "b": (2,), "s": ()}


def close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def tensors(seed: int) -> dict[str, Tensor]:
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(SHAPES.items())}


def vector(seed: int = 10) -> ng.Vector:
    return ng.Vector(tensors(seed))


def covector(seed: int = 20) -> ng.Covector:
    return ng.Covector(tensors(seed))


class Matrix:
    """The metric of a positive definite matrix G [P P], by explicit products."""

    def __init__(self, G: Tensor) -> None:
        self.G = G

    def flat(self, v: ng.Vector) -> ng.Covector:
        return ng.Covector(oracle.unflatten(self.G @ oracle.flatten(v.values()), v))

    def sharp(self, ω: ng.Covector) -> ng.Vector:
        return ng.Vector(oracle.unflatten(torch.linalg.solve(self.G, oracle.flatten(ω.values())), ω))


def metric() -> Matrix:
    A = normal(9, 9, seed=3)
    return Matrix(A @ A.T + torch.eye(9, dtype=torch.float64))


# Arithmetic within one type


@both_types
def test_arithmetic_is_that_of_the_flat_tensors(kind: type[ng.Vector | ng.Covector]) -> None:
    a, b = kind(tensors(1)), kind(tensors(5))
    x, y = oracle.flatten(a.values()), oracle.flatten(b.values())
    results = {a + b: x + y, a - b: x - y, -a: -x, 2.5 * a: 2.5 * x, a * 2.5: 2.5 * x, a / 4: x / 4}
    results[torch.tensor(0.5, dtype=torch.float64) * a] = x / 2
    for got, expected in results.items():
        assert type(got) is kind
        assert list(got) == list(SHAPES)
        close(got.flatten(), expected)


@both_types
def test_equality_is_identity_and_the_repr_shows_shapes(kind: type[ng.Vector | ng.Covector]) -> None:
    a = kind(tensors(1))
    same = a
    assert a == same
    assert a != kind(tensors(1))
    assert len({a, kind(tensors(1))}) == 2
    assert repr(a) == f"{kind.__name__}(w: (2, 3), b: (2,), s: ())"
    assert len(a) == 3


# Pairing and norms


def test_the_pairing_is_the_sum_of_products() -> None:
    ω, v = covector(), vector()
    close(ω @ v, torch.dot(oracle.flatten(ω.values()), oracle.flatten(v.values())))


def test_the_norm_of_a_vector_is_that_of_the_metric() -> None:
    v, G = vector(), metric()
    x = oracle.flatten(v.values())
    close(v.norm(G), (x @ G.G @ x).sqrt())
    close(v.norm(ng.Identity()), x.norm())


def test_the_norm_of_a_covector_is_the_dual_norm() -> None:
    """‖ω‖ = sup ⟨ω, w⟩ over ‖w‖ = 1: no direction exceeds it, and ω♯ attains it."""
    ω, G = covector(), metric()
    flat = oracle.flatten(ω.values())
    close(ω.norm(G), (flat @ torch.linalg.inv(G.G) @ flat).sqrt())
    close(ω.norm(ng.Identity()), flat.norm())
    attained = ω @ G.sharp(ω) / G.sharp(ω).norm(G)
    close(ω.norm(G), attained)
    for seed in range(100, 120):
        assert ω @ vector(seed) / vector(seed).norm(G) <= attained


def test_cauchy_schwarz_holds_with_equality_for_the_flat_of_a_vector() -> None:
    v, G = vector(), metric()
    close(G.flat(v).norm(G), v.norm(G))
    close(G.flat(v) @ v, G.flat(v).norm(G) * v.norm(G))
    for seed in range(100, 120):
        assert abs(covector(seed) @ v) < covector(seed).norm(G) * v.norm(G)


def test_the_identity_metric_changes_the_type_only() -> None:
    ω = ng.Identity().flat(vector())
    v = ng.Identity().sharp(covector())
    assert type(ω) is ng.Covector
    assert type(v) is ng.Vector
    close(ω.flatten(), vector().flatten())
    close(v.flatten(), covector().flatten())


# Points, and what cannot be added


def test_parameters_move_along_a_vector() -> None:
    θ, v = tensors(1), vector()
    for moved, sign in [(θ + v, 1), (θ - v, -1), (dict(reversed(θ.items())) + v, 1)]:
        assert type(moved) is dict
        for name in SHAPES:
            close(moved[name], θ[name] + sign * v[name])


WHY = "a Covector \\(a gradient\\) is not a Vector \\(a step\\). A metric turns one into the other"
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "vector + covector": (lambda: vector() + covector(), TypeError, f"Vector \\+ Covector: {WHY}"),
    "covector + vector": (lambda: covector() + vector(), TypeError, f"Covector \\+ Vector: {WHY}"),
    "covector - vector": (lambda: covector() - vector(), TypeError, WHY),
    "vector - covector": (lambda: vector() - covector(), TypeError, WHY),
    "parameters + covector": (lambda: tensors(1) + covector(), TypeError, f"parameters \\+ Covector: {WHY}"),
    "parameters - covector": (lambda: tensors(1) - 0.1 * covector(), TypeError, f"parameters \\+ Covector: {WHY}"),
    "covector + parameters": (lambda: covector() + tensors(1), TypeError, f"Covector \\+ parameters: {WHY}"),
    "tensor + covector": (lambda: normal(2) + covector(), TypeError, f"parameters \\+ Covector: {WHY}"),
    "tensor - covector": (lambda: normal(2) - covector(), TypeError, f"parameters \\+ Covector: {WHY}"),
    "tensor + vector": (
        lambda: normal(2) + vector(),
        TypeError,
        "\\(a mapping of tensors\\) move along a Vector",
    ),
    "vector + parameters": (lambda: vector() + tensors(1), TypeError, "Vector \\+ parameters: vectors add to vectors"),
    "1 + vector": (lambda: 1 + vector(), TypeError, "int \\+ Vector: vectors add to vectors"),
    "vector * vector": (lambda: vector() * cast(Any, vector()), TypeError, "pair a covector with a vector by ω @ v"),
    "covector * vector": (
        lambda: covector() * cast(Any, vector()),
        TypeError,
        "pair a covector with a vector by ω @ v",
    ),
    "covector @ covector": (
        lambda: covector() @ covector(),
        TypeError,
        "pairs a Covector with a Vector, not with a Covector",
    ),
    "covector @ tensor": (lambda: covector() @ normal(2), TypeError, "not with a Tensor"),
    "vector @ covector": (lambda: cast(Any, vector()) @ covector(), TypeError, "'Vector' and 'Covector'"),
    "other names": (lambda: vector() + ng.Vector({"w": normal(2, 3)}), ValueError, "two Vectors .* differ in b, s"),
    "another order": (lambda: vector() + ng.Vector(dict(reversed(tensors(1).items()))), ValueError, "order of their"),
    "pairing other names": (lambda: covector() @ ng.Vector({"w": normal(2, 3)}), ValueError, "ω and v .* b, s"),
    "a shape that broadcasts": (lambda: vector() + vector().map(torch.sum), ValueError, "w: shapes .2, 3. and .."),
    "pairing shapes": (lambda: covector() @ vector().map(torch.sum), ValueError, "ω and v differ in w"),
    "other parameters": (lambda: {"w": normal(2, 3)} + vector(), ValueError, "θ and v .* differ in b, s"),
    "abstract": (lambda: NamedTensors({}), TypeError, "abstract: make a Vector or a Covector"),
    "not a tensor": (lambda: ng.Vector({"w": 1.0}), TypeError, "Vector\\['w'\\] must be a tensor, got float"),  # type: ignore[dict-item]
    "flat of another size": (lambda: vector().unflatten(normal(8)), ValueError, "of 9 entries, got shape \\(8,\\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_with_the_reason(name: str) -> None:
    attempt, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        attempt()


# Flattening


@every_case
def test_flatten_has_the_order_of_torch_and_unflatten_inverts_it(case: zoo.Case) -> None:
    params = case.make().parameters()
    v = ng.Vector(params)
    close(v.flatten(), parameters_to_vector(params.values()), 0.0)
    moved = v.unflatten(v.flatten() + 1)
    assert type(moved) is ng.Vector
    for name, p in params.items():
        close(moved[name], p + 1, 0.0)


# Differentials


@every_case
def test_the_differential_is_what_backward_writes_to_grad(case: zoo.Case) -> None:
    problem = case.make()
    params = {name: p.requires_grad_() for name, p in problem.parameters().items()}
    loss = problem.outputs().square().sum()
    ω = ng.differential(params if problem.params is not None else problem.module, loss)
    assert all(p.grad is None for p in params.values())
    loss.backward()  # the graph is still there
    assert list(ω) == list(params)
    for name, p in params.items():
        assert p.grad is not None
        close(ω[name], p.grad)


def test_the_differential_leaves_an_existing_grad_alone() -> None:
    model = nn.Linear(2, 1).double()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    ng.differential(model, model(normal(3, 2)).sum().reshape(1))
    for p in model.parameters():
        assert p.grad is not None
        close(p.grad, torch.full_like(p, 7.0), 0.0)


def test_the_differential_refuses_what_is_no_loss_of_the_model() -> None:
    model = nn.Linear(2, 2).double()
    y = model(normal(3, 2))
    with pytest.raises(ValueError, match=r"must be one number, got shape \(3, 2\): reduce it by \.mean"):
        ng.differential(model, y)
    with pytest.raises(ValueError, match="the loss has no graph"):
        ng.differential(model, y.sum().detach())
    with pytest.raises(ValueError, match="does not depend on bias: freeze what is not trained"):
        ng.differential(model, (normal(3, 2) @ model.weight.T).sum())


# Pushforward and pullback


@every_case
def test_pushforward_and_pullback_are_the_jacobian_and_its_transpose(case: zoo.Case) -> None:
    problem = case.make()
    J, params, y = problem.jacobian(), problem.parameters(), problem.outputs()
    model = Model.of(problem.model, problem.params, problem.output)
    v, u = normal(J.shape[2]), normal(*y.shape, seed=1)
    Jv = ng.pushforward(model, problem.x, ng.Vector(oracle.unflatten(v, params)))
    JTu = ng.pullback_covector(model, problem.x, u)
    assert Jv.shape == y.shape
    assert type(JTu) is ng.Covector
    close(Jv.reshape(len(y), -1), torch.einsum("ndp,p->nd", J, v), 1e-10)
    close(JTu.flatten(), torch.einsum("ndp,nd->p", J, u.reshape(len(y), -1)), 1e-10)
    close(JTu @ ng.Vector(oracle.unflatten(v, params)), (u * Jv).sum(), 1e-10)  # adjointness


def test_pushforward_takes_a_pure_function_and_vectors_only() -> None:
    problem = zoo.case("pure_function").make()
    v = ng.Vector(problem.parameters())
    close(
        ng.pushforward(problem.model, problem.x, v, problem.params).reshape(5, -1),
        torch.einsum("ndp,p->nd", problem.jacobian(), v.flatten()),
    )
    with pytest.raises(TypeError, match="only a Vector can be pushed forward, not a Covector"):
        ng.pushforward(problem.model, problem.x, ng.Covector(v), problem.params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the model and v .* differ in b, v"):
        ng.pushforward(problem.model, problem.x, ng.Vector({"w": v["w"]}), problem.params)


def test_a_norm_names_the_map_that_its_metric_must_have() -> None:
    G = ng.operators.DenseOperator(ng.operators.Layout.of({"w": normal(2)}), torch.eye(2, dtype=torch.float64))
    inverse, w = ng.Cholesky().init(G), {"w": normal(2)}
    close(ng.Vector(w).norm(G), ng.Covector(w).norm(inverse))
    with pytest.raises(TypeError, match=r"a metric with a sharp, such as .*, not a DenseOperator"):
        ng.Covector(w).norm(G)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a metric with a flat, such as G, not a CholeskyInverse"):
        ng.Vector(w).norm(inverse)  # type: ignore[arg-type]


def test_outputs_without_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="do not depend on any trainable parameter"):
        ng.pullback_covector(lambda params, x: x, normal(3, 2), normal(3, 2), {"w": normal(2)})


# Units (Grosse (2021), section 6)


def test_gradient_descent_depends_on_the_units_and_the_natural_gradient_does_not() -> None:
    """h(w) = dh/dw · w with w in minutes, or in seconds w̃ = w/60: steps compared in minutes."""
    case = golden("invariance.units")
    slope, lr, factor = (case["inputs"][key] for key in ("dh_dw", "lr", "factor"))
    x = torch.tensor([[slope]], dtype=torch.float64)
    descent, natural = [], []
    for unit in (1.0, factor):
        params = {"w": torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)}
        step = lr * ng.differential(params, (unit * x * params["w"]).sum())["w"].item()
        descent.append(unit * step)
        v = ng.natural_gradient(
            lambda p, x, unit=unit: unit * x * p["w"], x, lambda y: y.sum(), ng.Euclidean(), params=params
        )
        natural.append(unit * v["w"].item())
        assert step == pytest.approx(case["expected"]["step_minutes" if unit == 1 else "step_seconds"], rel=1e-12)
    assert descent[1] == pytest.approx(case["expected"]["step_in_minutes_units"], rel=1e-12)
    assert descent[1] / descent[0] == pytest.approx(case["expected"]["ratio"], rel=1e-12)
    assert natural == pytest.approx([1 / slope, 1 / slope], rel=1e-12)


@pytest.mark.parametrize("name", ["linear_bias", "mlp_tanh", "conv", "attention", "two_inputs", "pure_function"])
def test_jacobian_is_that_of_the_outputs(name: str) -> None:
    """J [n *out p] from the oracle, by pushes and by pulls; J and Jᵀ are adjoint."""
    problem = zoo.case(name).make()
    J = ng.jacobian(problem.model, problem.x, params=problem.params, output=problem.output)
    params = problem.params if problem.params is not None else oracle.parameters(problem.module)
    n = oracle.examples(problem.x)
    expected = (
        oracle.module_jacobian(problem.module, problem.x, problem.output)
        if problem.params is None
        else oracle.jacobian(problem.model, params, problem.x, n)
    )
    close(J.dense().flatten(1, -2), expected)
    v = normal(expected.shape[2])
    u = normal(*J.y.shape)
    pushed = J.push(ng.Vector(oracle.unflatten(v, params)))
    close(pushed.flatten(1), expected @ v)
    close(J.pull(u).flatten() @ v, (u * pushed).sum())


def test_jacobian_of_few_parameters_is_made_by_pushes() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    x = normal(5, 1)
    close(ng.jacobian(model, x).dense(), x[:, :, None])


def test_jacobian_is_a_snapshot_and_checks_its_arguments() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
    J = ng.jacobian(model, normal(3, 2))
    before = J.dense()
    model.get_parameter("0.weight").data.zero_()
    close(J.dense(), before)
    with pytest.raises(TypeError, match="only a Vector can be pushed forward, not a Covector"):
        J.push(cast(Any, ng.Covector({"0.weight": normal(2, 2), "0.bias": normal(2)})))
    with pytest.raises(ValueError, match=r"u has the shape \(2, 3\), and the outputs have \(3, 2\)"):
        J.pull(normal(2, 3))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a tensor for tensors by name": (
        lambda: ng.Vector(cast(Any, torch.ones(2))),
        TypeError,
        r"Vector\(tensors\) takes tensors by name, not a Tensor",
    ),
    "a factor for every entry": (
        lambda: vector() * torch.ones(3),
        TypeError,
        r"a Vector is multiplied and divided by numbers, not by a tensor of shape \(3,\)",
    ),
    "a divisor in words": (lambda: covector() / cast(Any, "2"), TypeError, "divided by numbers, not by a str"),
    "two devices": (
        lambda: covector() @ vector().map(lambda t: t.to("meta")),
        ValueError,
        "ω and v lie on cpu and meta: move one of them",
    ),
    "a sum over two devices": (
        lambda: vector() + vector().map(lambda t: t.to("meta")),
        ValueError,
        "two Vectors lie on cpu and meta",
    ),
    "a loss that is a number": (
        lambda: ng.differential(nn.Linear(2, 1), cast(Any, 0.5)),
        TypeError,
        "the loss must be a tensor with one number, computed from the model, not a float",
    ),
    "parameters without names": (
        lambda: ng.differential(cast(Any, [torch.ones(1)]), torch.ones(())),
        TypeError,
        "the model is a module, or the parameters by name of a function, not a list",
    ),
    "a list of covectors": (
        lambda: ng.jacobian(nn.Linear(2, 1), torch.ones(3, 2)).pull(cast(Any, [1.0])),
        TypeError,
        "u must be a tensor of torch.float32, as the outputs, and is a list",
    ),
    "a complex covector": (
        lambda: ng.jacobian(nn.Linear(2, 1), torch.ones(3, 2)).pull(torch.ones(3, 1) + 0j),
        TypeError,
        "and is of torch.complex64",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_elements_are_refused_by_name(name: str) -> None:
    call, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        call()
