"""The generalised inverse: Moore–Penrose, the least weighted norm, and theorem 1 of van Oostrum et al. (2023)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError, SingularMetricError
from natgrad.operators import DenseOperator, DiagonalOperator, Layout
from natgrad.structures import Structure
from natgrad.structures.implicit import HessianOperator
from tests import oracle, zoo
from tests.golden import agrees, golden, names, tensor
from tests.pulled import close, covector, normal, pull, random_roots
from tests.solve import matrices
from tests.solve.matrices import dense, gram, spectral

SINGULAR = [(1, 4), (3, 5), (4, 5), (7, 5)]
every_shape = pytest.mark.parametrize(("rank", "size"), SINGULAR)


def positive(size: int) -> Tensor:
    """A full positive definite weight."""
    return gram(size + 2, size, seed=9) + torch.eye(size, dtype=torch.float64)


@every_shape
def test_solution_has_the_least_norm_of_all(rank: int, size: int) -> None:
    G, w = gram(rank, size), normal(size)
    v = ng.sharp(dense(G), matrices.covector(w), ng.Pinv()).flatten()
    close(v, oracle.pinv(G, w))
    # The four equations of Moore and Penrose, for the matrix of the map.
    P = torch.stack([ng.Pinv().init(dense(G)).solve(e) for e in torch.eye(size, dtype=torch.float64)], dim=1)
    close(G @ P @ G, G)
    close(P @ G @ P, P)
    close((G @ P).T, G @ P)
    close((P @ G).T, P @ G)


@every_shape
@pytest.mark.parametrize("full", [True, False])
def test_solution_has_the_least_weighted_norm(rank: int, size: int, full: bool) -> None:
    """van Oostrum et al. (2023), eq. 33."""
    G, W = gram(rank, size), positive(size)
    w = G @ normal(size)
    weight = W if full else {"w": W.diagonal()}
    v = ng.sharp(dense(G), matrices.covector(w), ng.Pinv(weight=weight)).flatten()
    close(v, oracle.weighted_pinv(G, w, W if full else torch.diag(W.diagonal())))
    close(G @ v, w)


def test_weight_decides_between_solutions_of_a_model() -> None:
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, ng.Euclidean())
    G = ng.Dense().estimate(pb)
    weight = {name: 1 + torch.arange(p.numel()).double().view(p.shape) for name, p in pb.model.params.items()}
    W = torch.diag(torch.cat([t.flatten() for t in weight.values()]))
    w = G.flat(ng.Vector(covector(pb)))
    expected = oracle.weighted_pinv(G.dense(), w.flatten(), W)
    close(ng.sharp(G, w, ng.Pinv(weight=weight)).flatten(), expected, 1e-9)
    close(ng.sharp(G, w, ng.Pinv(weight=W)).flatten(), expected, 1e-9)
    assert not torch.allclose(ng.sharp(G, w, ng.Pinv()).flatten(), expected)
    blocks = ng.BlockDense().estimate(pb)
    w = blocks.flat(ng.Vector(covector(pb)))
    expected = oracle.weighted_pinv(blocks.dense(), w.flatten(), W)
    close(ng.sharp(blocks, w, ng.Pinv(weight=weight)).flatten(), expected, 1e-9)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel()], ids=repr)
@pytest.mark.parametrize("name", ["linear_bias", "mlp_tanh", "sequence", "layer_norm", "tied_weights"])
@pytest.mark.parametrize("k", [1, 9])
def test_pinv_of_every_structure_is_that_of_its_matrix(structure: Structure, name: str, k: int) -> None:
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem, k))
    G = structure.estimate(pb)
    w = G.flat(ng.Vector(covector(pb)))  # in the range: elsewhere rounding is divided by the smallest eigenvalue
    close(G.product(ng.sharp(G, w, ng.Pinv(rtol=1e-12)).flatten()), w.flatten())
    expected = oracle.pinv(G.dense(), w.flatten(), rtol=1e-12)
    close(ng.sharp(G, w, ng.Pinv(rtol=1e-12)).flatten(), expected, 1e-7)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel()], ids=repr)
def test_damping_makes_it_the_inverse(structure: Structure) -> None:
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, random_roots(problem))
    G, w = structure.estimate(pb), covector(pb)
    close(ng.sharp(G, w, ng.Pinv(), damping=0.1).flatten(), oracle.damped(G.dense(), w.flatten(), 0.1))


def test_rtol_is_where_zero_begins() -> None:
    values = torch.tensor([1.0, 1e-3, 1e-6], dtype=torch.float64)
    w = torch.ones(3, dtype=torch.float64)
    diagonal = DiagonalOperator(matrices.layout(3), values)
    for G in (dense(torch.diag(values)), diagonal):
        for rtol, expected in [(None, [1, 1e3, 1e6]), (1e-4, [1, 1e3, 0]), (1e-2, [1, 0, 0]), (1e-3, [1, 0, 0])]:
            v = ng.sharp(G, matrices.covector(w), ng.Pinv(rtol=rtol)).flatten()
            close(v, torch.tensor(expected, dtype=torch.float64))


def test_default_rtol_drops_what_is_rounding() -> None:
    matrix = spectral(torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64))
    v = ng.sharp(dense(matrix), matrices.covector(normal(4)), ng.Pinv()).flatten()
    close(v, oracle.pinv(matrix, normal(4)))
    assert float(v.norm()) < 10


def test_zero_metric_gives_zero() -> None:
    zero = torch.zeros(3, 3, dtype=torch.float64)
    for G in (dense(zero), DiagonalOperator(matrices.layout(3), zero.diagonal())):
        close(ng.sharp(G, matrices.covector(normal(3)), ng.Pinv()).flatten(), zero[0], 0.0)


INDEFINITE = [(1.0, -1.0), (1.0, -1e-6), (-2.0, -1.0), (-1.0, 0.0)]


@pytest.mark.parametrize("values", INDEFINITE)
@pytest.mark.parametrize("weight", [None, {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}])
def test_pinv_of_an_indefinite_metric_is_refused(values: tuple[float, float], weight: dict[str, Tensor] | None) -> None:
    """Its negative part would be dropped in silence, as if it were null."""
    eigenvalues = torch.tensor(values, dtype=torch.float64)
    for G in (dense(torch.diag(eigenvalues)), DiagonalOperator(matrices.layout(2), eigenvalues)):
        with pytest.raises(SingularMetricError, match=r"indefinite at damping 0: smallest eigenvalue -.*Add damping"):
            ng.Pinv(weight=weight).init(G)
        damped = ng.sharp(G, matrices.covector(normal(2)), ng.Pinv(), damping=3.0).flatten()
        close(damped, normal(2) / (eigenvalues + 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rank", "size"), [(1, 200), (20, 300), (100, 120)])
def test_eigenvalues_that_rounding_made_negative_are_null(rank: int, size: int, dtype: torch.dtype) -> None:
    R = normal(rank, size).to(dtype)
    G = R.T @ R
    assert float(torch.linalg.eigvalsh(G)[0]) < 0
    layout = Layout.of({"w": R[0]})
    v = ng.sharp(DenseOperator(layout, G), matrices.covector(G @ R[0]), ng.Pinv()).flatten()
    torch.testing.assert_close(R @ v, R @ R[0], rtol=0, atol=1e4 * torch.finfo(dtype).eps * float((R @ R[0]).norm()))


def test_pinv_of_a_hessian_is_refused() -> None:
    H = HessianOperator.at(lambda u: u["w"][0].square() - u["w"][1].square(), {"w": normal(2)})
    with pytest.raises(IncompatibleError, match=r"Pinv does not work with HessianOperator.*indefinite"):
        ng.Pinv().init(H)


# van Oostrum et al. (2023)


def test_minimum_norm_depends_on_the_parametrisation() -> None:
    """001 A.3: the least norm of one chart is a weighted norm of the other, with W = F⁻¹F⁻ᵀ."""
    case = golden("oostrum.A3")
    expected = case["expected"]
    G, w = dense(tensor(expected["G_xi"])), matrices.covector(tensor(expected["grad_xi"]))
    agrees(case, ng.sharp(G, w, ng.Pinv()).flatten(), "y_Xi")
    inverse = torch.linalg.inv(tensor(expected["F"]))
    W = inverse @ inverse.T
    agrees(case, ng.sharp(G, w, ng.Pinv(weight=W)).flatten(), "y_Theta")
    agrees(case, ng.sharp(G, w, ng.Pinv(weight={"w": W.diagonal()})).flatten(), "y_Theta")
    G, w = dense(tensor(expected["G_theta"])), matrices.covector(tensor(expected["grad_theta"]))
    agrees(case, ng.sharp(G, w, ng.Pinv()).flatten(), "nat_theta")


def test_weight_is_not_transposed() -> None:
    """van Oostrum et al. (2023), eq. 33, at example A.3 with ∂ξ/∂θ = [[1, 2], [1, 1]].

    (48, 30)/13 by hand; the transposed F gives (30, 48)/13.
    """
    G, w = dense(torch.ones(2, 2, dtype=torch.float64)), matrices.covector(tensor([6.0, 6.0]))
    inverse = torch.linalg.inv(tensor([[1.0, 2.0], [1.0, 1.0]]).T)
    close(ng.sharp(G, w, ng.Pinv(weight=inverse @ inverse.T)).flatten(), tensor([48 / 13, 30 / 13]))


def test_all_generalised_inverses_push_forward_alike() -> None:
    """van Oostrum et al. (2023), theorem 1: J y is the same for every y that solves G y = ω."""
    case = golden("oostrum.ginverse")
    G, w = tensor(case["inputs"]["G"]), tensor(case["inputs"]["grad"])
    moore_penrose = ng.sharp(dense(G), matrices.covector(w), ng.Pinv()).flatten()
    agrees(case, moore_penrose, "y_MP")
    other = tensor(case["inputs"]["g_inverse"]) @ w
    agrees(case, other, "y")
    close(moore_penrose.sum(), tensor(case["expected"]["pushforward_x"]))
    skewed = ng.sharp(dense(G), matrices.covector(w), ng.Pinv(weight={"w": tensor([1.0, 5.0])})).flatten()
    close(skewed.sum(), tensor(case["expected"]["pushforward_x"]))


@pytest.mark.parametrize("name", names("oostrum.A2"))
def test_natural_gradient_of_a_curve_that_crosses_itself(name: str) -> None:
    """001 A.2, the whole way: model, metric, differential, ♯, pushforward."""
    case = golden(name)
    dL = tensor(case["inputs"]["grad_L_at_origin"])
    for point, sign in [("xi1", 1.0), ("theta1", -1.0)]:

        def phi(params: dict[str, Tensor], x: Tensor | None, sign: float = sign) -> Tensor:
            return torch.stack([sign * torch.sin(2 * params["t"]), torch.sin(params["t"])], dim=-1)

        params = {"t": tensor([case["inputs"][point]])}
        v = ng.natural_gradient(phi, None, lambda y: (y * dL).sum(), ng.Euclidean(), solver=ng.Pinv(), params=params)
        agrees(case, v["t"][0], f"param_grad_{point}")
        agrees(case, ng.pushforward(phi, None, v, params)[0], f"pushforward_{point}")


# Refusals

BAD: dict[str, tuple[Callable[[], object], str]] = {
    "rtol of one": (lambda: ng.Pinv(rtol=1.0), r"Pinv\(rtol=…\) must be in \[0, 1\), got 1.0"),
    "negative rtol": (lambda: ng.Pinv(rtol=-1e-3), r"Pinv\(rtol=…\) must be in \[0, 1\), got -0.001"),
    "rtol NaN": (lambda: ng.Pinv(rtol=math.nan), r"Pinv\(rtol=…\) must be in \[0, 1\), got nan"),
    "zero weight": (lambda: ng.Pinv(weight={"w": torch.tensor([1.0, 0.0])}), "positive and finite for every"),
    "negative weight": (lambda: ng.Pinv(weight={"w": torch.tensor([1.0, -1.0])}), "positive and finite for every"),
    "weight NaN": (lambda: ng.Pinv(weight={"w": torch.tensor([1.0, math.nan])}), "positive and finite for every"),
    "infinite weight": (lambda: ng.Pinv(weight={"w": torch.tensor([1.0, math.inf])}), "positive and finite for every"),
    "indefinite": (lambda: ng.Pinv(weight=torch.diag(torch.tensor([1.0, -1.0]))), "symmetric positive definite"),
    "singular": (lambda: ng.Pinv(weight=torch.ones(2, 2)), "symmetric positive definite"),
    "asymmetric": (lambda: ng.Pinv(weight=torch.tensor([[2.0, 1.0], [0.0, 2.0]])), "symmetric positive definite"),
    "a vector": (lambda: ng.Pinv(weight=torch.ones(2)), "symmetric positive definite"),
    "not square": (lambda: ng.Pinv(weight=torch.ones(2, 3)), "symmetric positive definite"),
    "matrix NaN": (lambda: ng.Pinv(weight=torch.full((2, 2), math.nan)), "symmetric positive definite"),
    "other size": (lambda: ng.Pinv(weight=torch.eye(5).double()).init(dense(gram(3, 3))), "over 5 .* over 3"),
    "other names": (lambda: ng.Pinv(weight={"v": torch.ones(3)}).init(dense(gram(3, 3))), r"over \['w'\]"),
    "other shapes": (lambda: ng.Pinv(weight={"w": torch.ones(1, 3)}).init(dense(gram(3, 3))), r"has \(1, 3\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_weights_and_tolerances_are_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_pushforward_of_a_model_is_the_projection_of_its_gradient() -> None:
    """van Oostrum et al. (2023), theorem 1: J v is the orthogonal projection of ∇_y L·N on the span of J."""
    model, x = zoo.mlp(2, 6, 2).double(), normal(3, 2)
    assert isinstance(model, nn.Module)
    u = normal(3, 2, seed=3)
    v = ng.natural_gradient(model, x, lambda y: (u * y).sum() / 3, ng.Euclidean(), solver=ng.Pinv(rtol=1e-11))
    J = oracle.module_jacobian(model, x).reshape(6, -1)
    projected = J @ torch.linalg.lstsq(J, u.reshape(-1, 1), driver="gelsd").solution
    close(ng.pushforward(model, x, v).reshape(-1, 1).detach(), projected, 1e-8)
