"""The oracle can be trusted: golden values, finite differences and a few theorems."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F

from tests import oracle, zoo
from tests.golden import agrees, golden, golden_mlp, names, tensor
from tests.pulled import normal

every_case = pytest.mark.parametrize("case", zoo.ZOO, ids=zoo.IDS)
modules = [case for case in zoo.ZOO if case.name != "pure_function"]
every_module = pytest.mark.parametrize("case", modules, ids=lambda case: case.name)


def close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


# Golden network


def test_outputs_and_differential_of_the_golden_mlp() -> None:
    model, x, target = golden_mlp()
    y = model(x)
    agrees(golden("mlp.forward"), y.detach(), "logits")
    agrees(golden("mlp.forward"), oracle.differential(model, F.cross_entropy(y, target)), "grad")


def test_jacobian_of_the_golden_mlp() -> None:
    model, x, _ = golden_mlp()
    agrees(golden("mlp.jacobian"), oracle.module_jacobian(model, x), "J")


def test_fisher_of_the_golden_mlp() -> None:
    model, x, _ = golden_mlp()
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.categorical(model(x)))
    agrees(golden("mlp.fisher"), G, "F")
    case = golden("mlp.fisher.diag")
    agrees(case, oracle.diagonal(G).sum(dim=0), "diag")
    assert torch.linalg.matrix_rank(G, hermitian=True) == case["expected"]["rank"]


def test_gauss_newton_of_the_golden_mlp() -> None:
    model, x, _ = golden_mlp()
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.euclidean(model(x)))
    agrees(golden("mlp.gauss_newton"), G, "GN")


def test_damped_natural_gradient_of_the_golden_mlp() -> None:
    model, x, target = golden_mlp()
    case = golden("mlp.natgrad.damped")
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.categorical(model(x)))
    w = oracle.differential(model, F.cross_entropy(model(x), target))
    v = oracle.damped(G, w, case["inputs"]["damping"])
    agrees(case, v, "natgrad")
    agrees(case, w @ v, "quad")


def test_empirical_fisher_is_the_second_moment_of_the_golden_per_example_gradients() -> None:
    model, x, target = golden_mlp()
    rows = tensor(golden("mlp.forward")["expected"]["per_example_grad"])
    h = oracle.empirical(model(x), target, F.cross_entropy)
    close(oracle.dense(oracle.module_jacobian(model, x), h), rows.T @ rows / len(x))


def test_coupled_metrics_of_the_golden_mlp() -> None:
    model, x, _ = golden_mlp()
    y, J, case = model(x), oracle.module_jacobian(model, x), golden("sobolev.mlp.metric.ell1")
    coupling = tensor(case["expected"]["Kinv"])
    # The golden values are sums over examples, ours are means.
    agrees(case, len(x) * oracle.dense_coupled(J, oracle.euclidean_roots(y), coupling), "g")
    fisher = len(x) * oracle.dense_coupled(J, oracle.hellinger_roots(y), coupling)
    agrees(golden("sobolev.mlp.fisher_hellinger.ell1"), fisher, "g")


def test_uncoupled_roots_give_the_dense_metric() -> None:
    model, x, _ = golden_mlp()
    y, J, identity = model(x), oracle.module_jacobian(model, x), torch.eye(len(x), dtype=torch.float64)
    close(oracle.dense_coupled(J, oracle.euclidean_roots(y), identity), oracle.dense(J, oracle.euclidean(y)))
    close(oracle.dense_coupled(J, oracle.hellinger_roots(y), identity), oracle.dense(J, oracle.categorical(y)))


# Golden textbook examples


@pytest.mark.parametrize("name", names("rosenbrock.point"))
def test_metric_and_natural_gradient_of_rosenbrock(name: str) -> None:
    case = golden(name)
    root_b = math.sqrt(case["inputs"]["b"])

    def z(params: dict[str, Tensor], _: Tensor) -> Tensor:
        x1, x2 = params["x"]
        return torch.stack([case["inputs"]["a"] - x1, root_b * (x2 - x1**2)])[None]

    J = oracle.jacobian(z, {"x": tensor(case["inputs"]["x"])}, torch.zeros(1), 1)
    agrees(case, J[0], "J")
    G = oracle.dense(J, torch.eye(2, dtype=torch.float64)[None])
    agrees(case, G, "G")
    agrees(case, oracle.damped(G, tensor(case["expected"]["grad"]), 0.0), "natgrad")


@pytest.mark.parametrize("name", names("oostrum.A2"))
def test_pushforward_depends_on_the_point_where_the_model_crosses_itself(name: str) -> None:
    case = golden(name)
    dL = tensor(case["inputs"]["grad_L_at_origin"])
    for point, sign in [("xi1", 1.0), ("theta1", -1.0)]:

        def phi(params: dict[str, Tensor], _: Tensor, sign: float = sign) -> Tensor:
            return torch.stack([sign * torch.sin(2 * params["t"]), torch.sin(params["t"])], dim=-1)

        J = oracle.jacobian(phi, {"t": tensor([case["inputs"][point]])}, torch.zeros(1), 1)[0]
        v = oracle.pinv(J.T @ J, J.T @ dL)
        agrees(case, v[0], f"param_grad_{point}")
        agrees(case, J @ v, f"pushforward_{point}")


def test_minimum_norm_depends_on_the_parametrisation() -> None:
    """van Oostrum et al. (2023), eq. 33: the least norm of one chart is a weighted norm of the other."""
    case = golden("oostrum.A3")
    G, w = tensor(case["expected"]["G_xi"]), tensor(case["expected"]["grad_xi"])
    inverse = torch.linalg.inv(tensor(case["expected"]["F"]))
    agrees(case, oracle.pinv(G, w), "y_Xi")
    agrees(case, oracle.weighted_pinv(G, w, inverse @ inverse.T), "y_Theta")
    theta = oracle.pinv(tensor(case["expected"]["G_theta"]), tensor(case["expected"]["grad_theta"]))
    agrees(case, theta, "nat_theta")


def test_minimum_norm_takes_the_transposed_jacobian_of_the_chart() -> None:
    """van Oostrum et al. (2023), eq. 33 at example A.3 with ∂ξ/∂θ = [[1, 2], [1, 1]].

    By hand, u = F(1, 1) = (2, 3) and y = 6 Fᵀu/|u|² = (48, 30)/13. A.3 itself has a diagonal F, for
    which F and Fᵀ cannot be told apart; the wrong one gives (30, 48)/13 here.
    """
    G, w = torch.ones(2, 2, dtype=torch.float64), tensor([6.0, 6.0])
    jacobian = tensor([[1.0, 2.0], [1.0, 1.0]])
    expected = tensor([48 / 13, 30 / 13])
    inverse = torch.linalg.inv(jacobian.T)
    close(oracle.weighted_pinv(G, w, inverse @ inverse.T), expected)
    close(jacobian @ oracle.pinv(jacobian.T @ G @ jacobian, jacobian.T @ w), expected)
    wrong = torch.linalg.inv(jacobian)
    close(oracle.weighted_pinv(G, w, wrong @ wrong.T), expected.flip(0))


def test_moore_penrose_is_one_of_many_generalised_inverses() -> None:
    case = golden("oostrum.ginverse")
    agrees(case, oracle.pinv(tensor(case["inputs"]["G"]), tensor(case["inputs"]["grad"])), "y_MP")


def test_damped_newton_is_the_proximal_point_of_a_quadratic() -> None:
    case = golden("prox.quadratic")
    H, b, w = (tensor(case["inputs"][key]) for key in ["H", "b", "w"])
    agrees(case, w - oracle.damped(H, H @ w + b, case["inputs"]["lam"]), "prox")


def test_fisher_of_the_golden_families() -> None:
    for metric in [oracle.bernoulli, oracle.categorical, oracle.poisson]:
        case = golden(f"expfam.{metric.__name__}")
        agrees(case, metric(tensor([case["inputs"]["eta"]]))[0], "fisher")
    case = golden("fisher.gaussian_mu_sigma")
    mu, sigma = case["inputs"]["mu"], case["inputs"]["sigma"]
    agrees(case, oracle.gaussian_learned(tensor([[mu, math.log(sigma)]]))[0], "mu_logsigma")
    close(oracle.gaussian(tensor([[mu]]), sigma)[0, 0, 0], tensor(case["expected"]["mu_logsigma"][0][0]))


# Theorems


def test_fisher_is_the_hessian_of_the_log_partition_function() -> None:
    y = normal(3, 2, 4)
    close(oracle.categorical(y), oracle.hessian(lambda u: u.logsumexp(-1), y))
    close(oracle.bernoulli(y), oracle.hessian(F.softplus, y))
    close(oracle.poisson(y), oracle.hessian(torch.exp, y))
    close(oracle.euclidean(y), oracle.hessian(lambda u: u.square() / 2, y))


def test_fisher_is_the_hessian_of_the_divergence() -> None:
    y = normal(3, 2, 4)

    def gaussian(u: Tensor) -> Normal:
        return Normal(u[..., :2], u[..., 2:].exp(), validate_args=False)

    def gaussian_kl(u: Tensor, v: Tensor) -> Tensor:
        return kl_divergence(gaussian(v), gaussian(u))

    def categorical_kl(u: Tensor, v: Tensor) -> Tensor:
        return kl_divergence(Categorical(logits=u), Categorical(logits=v))

    close(oracle.gaussian_learned(y), oracle.divergence_hessian(gaussian_kl, y))
    close(oracle.categorical(y), oracle.divergence_hessian(categorical_kl, y))
    close(oracle.gaussian(y, 0.5), oracle.divergence_hessian(lambda u, v: 2 * (u - v).square(), y))


def test_fisher_is_the_expected_empirical_metric() -> None:
    y = normal(3, 4)
    p = torch.softmax(y, dim=1)
    h = torch.zeros(3, 4, 4, dtype=torch.float64)
    for c in range(4):
        h += p[:, c, None, None] * oracle.empirical(y, torch.full((3,), c), F.cross_entropy)
    close(oracle.categorical(y), h)


def test_hessian_of_a_canonical_loss_is_the_fisher() -> None:
    y, target = normal(3, 2, 4), torch.tensor([[0, 1], [3, 2], [1, 1]])
    loss = oracle.loss_hessian(lambda u, t: F.cross_entropy(u, t, reduction="sum"), y, target)
    close(oracle.categorical(y), loss)


def test_structures_keep_what_they_say() -> None:
    model, x, _ = golden_mlp()
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.categorical(model(x)))
    blocks = oracle.layer_blocks(model)
    assert {name: (block[0], block[-1]) for name, block in blocks.items()} == {"0": (0, 8), "2": (9, 20)}
    kept = oracle.block_diagonal(G, blocks.values())
    close(kept[:9, :9], G[:9, :9])
    close(kept[9:, 9:], G[9:, 9:])
    assert kept[:9, 9:].count_nonzero() == kept[9:, :9].count_nonzero() == 0
    close(oracle.block_diagonal(G, [[p] for p in range(len(G))]), oracle.diagonal(G))
    close(oracle.low_rank(G, 0), oracle.diagonal(G))
    close(oracle.low_rank(G, len(G)), G)
    kept = oracle.low_rank(G, 3)
    close(oracle.diagonal(kept), oracle.diagonal(G))
    values, vectors = torch.linalg.eigh(G)
    off = kept - vectors[:, -3:] @ torch.diag(values[-3:]) @ vectors[:, -3:].T
    close(off, oracle.diagonal(off))


def test_weighted_pinv_solves_and_is_orthogonal_to_the_null_space() -> None:
    R, A = normal(2, 5), normal(5, 5, seed=1)
    G, W = R.T @ R, A.T @ A + torch.eye(5, dtype=torch.float64)
    w = G @ normal(5, seed=2)
    y = oracle.weighted_pinv(G, w, W)
    close(G @ y, w)
    null = torch.linalg.eigh(G).eigenvectors[:, :3]
    close(null.T @ W @ y, torch.zeros(3, dtype=torch.float64))
    close(oracle.weighted_pinv(G, w, torch.eye(5, dtype=torch.float64)), oracle.pinv(G, w))


def test_damping_goes_from_the_pseudo_inverse_to_the_gradient() -> None:
    R = normal(2, 5)
    G = R.T @ R
    w = G @ normal(5, seed=2)
    close(oracle.damped(G, w, 1e-8), oracle.pinv(G, w), 1e-6)
    close(1e8 * oracle.damped(G, w, 1e8), w, 1e-6)


# The zoo


@every_case
def test_zoo_is_small_deterministic_and_leaves_the_random_stream_alone(case: zoo.Case) -> None:
    before = torch.get_rng_state()
    first, second = case.make(), case.make()
    assert torch.equal(torch.get_rng_state(), before)
    close(oracle.flatten(first.parameters().values()), oracle.flatten(second.parameters().values()), 0.0)
    close(first.outputs(), second.outputs(), 0.0)
    assert first.outputs().dtype == torch.float64
    assert first.n_examples <= 8
    assert sum(p.numel() for p in first.parameters().values()) <= 150


@every_case
def test_jacobian_is_the_derivative_of_the_outputs_of_the_batch(case: zoo.Case) -> None:
    """Central differences along one direction: the error is O(ε²), and ε is far from every kink of the ReLU model."""
    problem, eps = case.make(), 1e-5
    J, params = problem.jacobian(), problem.parameters()
    v = normal(J.shape[2])
    shifts = oracle.unflatten(v, params)
    ends = []
    with torch.no_grad():
        for move in [eps, -2 * eps]:
            for name, p in params.items():
                p.add_(move * shifts[name])
            ends.append(problem.outputs())
    slope = (ends[0] - ends[1]) / (2 * eps)
    close(J @ v, slope.reshape(len(J), -1), 1e-7)


@every_module
def test_differential_is_the_pullback_of_the_differential_on_outputs(case: zoo.Case) -> None:
    problem = case.make()
    y = problem.outputs()
    u = normal(*y.shape)
    w = oracle.differential(problem.module, (u * y).sum())
    close(w, torch.einsum("ndp,nd->p", problem.jacobian(), u.reshape(len(y), -1)))


@every_module
def test_layer_blocks_cover_every_parameter_once(case: zoo.Case) -> None:
    model = case.make().module
    indices = [p for block in oracle.layer_blocks(model).values() for p in block]
    assert sorted(indices) == list(range(sum(p.numel() for p in oracle.parameters(model).values())))
