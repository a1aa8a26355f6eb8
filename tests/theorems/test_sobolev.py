"""What the library promises of Sobolev metrics, one theorem each."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.functionspace import FunctionalGradientDescent, KernelSum, SobolevKernel, TangentSpace, functional_gradient
from natgrad.structures import Structure
from tests import oracle
from tests.golden import agrees, golden, golden_mlp, names, tensor
from tests.pulled import close, normal
from tests.structures.test_kronecker import Readout

NAMES = [f"sobolev.kernel.n{n}.s{s}.r{r}" for n, s in ((1, 4), (2, 5), (3, 6), (2, 4), (3, 5)) for r in (0, "0.5", 5)]


def gram(x: Tensor, lengthscale: float = 1.0) -> Tensor:
    """(1 + r)e^{−r} of all pairs."""
    r = (x[:, None] - x[None]).norm(dim=2) / lengthscale
    return (1 + r) * (-r).exp()


def wide(n: int = 5) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network with more parameters than outputs, inputs and targets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double(), normal(n, 2), normal(n, 2, seed=1)


def squares(t: Tensor, share: float = 1.0) -> Callable[[Tensor], Tensor]:
    """½‖y − t‖², times a share."""
    return lambda y: share * (y - t).square().sum() / 2


# The kernel: lemmas 8 and 9 of Bai et al. (2022)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_of_h_s_is_a_matern_kernel_in_every_dimension_and_for_every_real_order(name: str) -> None:
    case = golden(name)
    n, s, r = (case["inputs"][key] for key in ("n", "s", "r"))
    x = torch.zeros(2, n, dtype=torch.float64)
    x[1, 0] = r
    K = SobolevKernel((s - n) / 2, normalised=False)(x)
    agrees(case, K[0, 1], "value")


@pytest.mark.parametrize("name", names("sobolev.C_n."))
def test_the_constant_is_not_the_one_that_is_printed(name: str) -> None:
    """(36)–(39) of Bai et al. (2022) are wrong in every dimension."""
    case = golden(name)
    C = math.exp(SobolevKernel(1.5).log_constant(case["inputs"]["n"]))
    assert math.isclose(C, case["expected"]["C_n"], rel_tol=1e-10)
    assert abs(case["printed_wrong"]["C_n"] / C - 1) > 0.2


def test_the_kernel_does_not_underflow_and_is_differentiable() -> None:
    assert float(SobolevKernel(1.5)(torch.zeros(1, 3072), torch.ones(1, 3072))) > 0
    assert SobolevKernel(1.5).log_constant(3072) / math.log(10) == pytest.approx(-5919.25, abs=0.01)
    x = normal(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(SobolevKernel(1.7), (x,))
    assert torch.autograd.gradgradcheck(SobolevKernel(1.7), (x,))


# Gradients in the space: lemma 4, (11)–(13)


def test_the_gradient_of_an_empirical_loss_represents_its_differential() -> None:
    """d/dε L(f + εh) = ⟨∇ℓ, h⟩, and for ½‖y − t‖² it is K e at the points."""
    kernel, (_, x, t) = SobolevKernel(1.5), wide()
    f = KernelSum(kernel, normal(3, 2, seed=2), normal(3, 2, seed=3))
    h = KernelSum(kernel, normal(4, 2, seed=4), normal(4, 2, seed=5))
    gradient = functional_gradient(kernel, f, x, squares(t))
    close(gradient.inner(h), ((f(x) - t) * h(x)).sum())
    close(gradient(x), gram(x) @ (f(x) - t))


def test_descent_in_the_space_one_point_after_the_other_is_13() -> None:
    case = golden("sobolev.kernel_gd")
    given = case["inputs"]
    descent = FunctionalGradientDescent(
        SobolevKernel(1.5), lambda y, t: (y - t).square().sum() / 2, step=given["eta"], passes=1, batch=1
    )
    descent.fit(tensor(given["X"]), tensor(given["y"]))
    agrees(case, descent.function.coefficients, "coef")
    agrees(case, descent.predict(tensor([[given["x_test"]]]))[0], "f_test")


# Natural gradients: lemma 3, proposition 5, (20)


def test_the_natural_gradient_is_the_projection_of_the_gradient_in_the_space() -> None:
    """dφ(∇F̃) = P(∇F), which is closest to ∇F of all that the model can do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x, t = normal(12, 2), normal(12, 2, seed=1)
    kernel = SobolevKernel(1.5)
    w = TangentSpace.of(model, x, kernel).natural_gradient(squares(t))
    gradient = functional_gradient(kernel, model, x, squares(t))(x)
    left = torch.linalg.solve(gram(x), gradient - ng.pushforward(model, x, w))
    J = oracle.module_jacobian(model, x)
    close(torch.einsum("ndp,nd->p", J, left), torch.zeros(J.shape[2], dtype=J.dtype), 1e-9)


def test_over_parametrised_one_sobolev_step_moves_the_outputs_by_minus_k_e_and_gauss_newton_by_minus_e() -> None:
    model, x, t = wide()
    e = (model(x) - t).detach()
    pinv: dict[str, Any] = {"structure": ng.Kernel(), "solver": ng.Pinv(rtol=1e-10)}
    for metric, moved in ((ng.Sobolev(jitter=0.0), -gram(x) @ e), (ng.Euclidean(), -e)):
        v = ng.natural_gradient(model, x, squares(t, 1 / len(x)), metric, **pinv)
        close(ng.pushforward(model, x, -v), moved, 1e-8)


# The metric: (22)


def test_the_sobolev_metric_is_j_times_the_inverse_kernel_times_j_and_not_the_printed_expectation() -> None:
    """A sum over outputs and pairs of examples; E_K read literally is another, indefinite matrix."""
    model, x, _ = golden_mlp()
    G = len(x) * ng.Dense().estimate(ng.pullback(model, x, ng.Sobolev(jitter=0.0))).dense()
    agrees(golden("sobolev.mlp.metric.ell1"), G, "g")
    expected = golden("sobolev.mlp.kfac.ell1")["expected"]
    columns = torch.tensor([0, 2, 4, 1, 3, 5, 6, 7, 8])  # of the first layer W̄ = [W b], column by column
    block = G[columns[:, None], columns]
    close(block, tensor(expected["block11"]), 1e-9)
    literal = tensor(expected["literal_E_K_block11_wrong"])
    assert float((block - literal).norm() / block.norm()) > 0.5
    assert float(torch.linalg.eigvalsh(block)[0]) > 0 > float(torch.linalg.eigvalsh(literal)[0])


@pytest.mark.parametrize("base", [ng.Euclidean(), ng.Fisher(ng.Categorical())], ids=repr)
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel(), ng.Implicit(), ng.Kronecker()], ids=repr)
def test_where_k_is_one_it_is_gauss_newton_or_exactly_the_fisher(structure: Structure, base: ng.OutputMetric) -> None:
    model, x, _ = golden_mlp()
    apart = ng.pullback(model, x, ng.Sobolev(base, lengthscale=1e-3))
    close(structure.estimate(apart).dense(), structure.estimate(ng.pullback(model, x, base)).dense(), 1e-12)


def test_with_a_fisher_base_it_is_the_norm_of_twice_the_root_of_the_probabilities() -> None:
    model, x, _ = golden_mlp()
    pb = ng.pullback(model, x, ng.Sobolev(ng.Fisher(ng.Categorical()), jitter=0.0))
    agrees(golden("sobolev.mlp.fisher_hellinger.ell1"), len(x) * ng.Dense().estimate(pb).dense(), "g")


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel()], ids=repr)
def test_duplicates_are_harmless_as_it_is_solved_without_the_inverse_of_k(structure: Structure) -> None:
    """Jᵀ(λNK + JJᵀ)⁻¹N K e with a K of rank 5 of 8, and no jitter."""
    model, x, t = wide()
    x, t = x[[0, 1, 2, 3, 4, 0, 0, 3]], normal(8, 2, seed=1)
    λ, loss = 0.1, squares(t, 1 / 8)
    v = ng.natural_gradient(model, x, loss, ng.Sobolev(jitter=0.0), structure=structure, damping=λ)
    R, e = oracle.module_jacobian(model, x).flatten(0, 1), ((model(x) - t) / 8).detach().flatten()
    K = torch.kron(gram(x), torch.eye(2, dtype=x.dtype))
    least = torch.linalg.pinv(8 * λ * K + R @ R.T, rtol=1e-13, hermitian=True)
    close(v.flatten(), R.T @ (least @ (8 * K @ e)), 1e-10)


# Sobolev K-FAC: (24)–(25)


def test_sobolev_kfac_of_fully_connected_layers_has_the_scale_that_25_misses() -> None:
    """The printed product is off by more than the block itself; matched by traces it is not."""
    case = golden("sobolev.mlp.kfac.ell1")["expected"]
    model, x, _ = golden_mlp()
    G = ng.Kronecker().estimate(ng.pullback(model, x, ng.Sobolev(jitter=0.0)))
    A, S, true = (tensor(case[key]) for key in ("A0", "S1", "block11"))
    close(G.right[0][0] / G.right[0][0].trace(), A / A.trace())
    close(G.left[0][0] / G.left[0][0].trace(), S / S.trace())
    columns = torch.tensor([0, 2, 4, 1, 3, 5, 6, 7, 8])
    ours = len(x) * G.dense()[columns[:, None], columns]
    assert float((torch.kron(A.contiguous(), S.contiguous()) - true).norm() / true.norm()) > 1.8
    assert float((ours - true).norm() / true.norm()) < 0.7


@pytest.mark.parametrize("kind", ["convolution", "unfolded"])
def test_sobolev_kfac_of_a_convolution_couples_images_at_one_location(kind: str) -> None:
    case = golden("conv.valid.sobolev")
    given, expected = case["inputs"], case["expected"]
    model, x = Readout(kind).double(), tensor(given["X"])
    with torch.no_grad():
        for p, key in zip(model.parameters(), ["W", "b", "readout_U", "readout_c"], strict=True):
            p.copy_(tensor(given[key]).view_as(p))
    metric = ng.Sobolev(lengthscale=given["ell"], jitter=0.0)
    agrees(case, metric.gram(x, len(x)), "K")
    pb = ng.pullback(model, x, metric)
    G = ng.Kronecker().estimate(pb)
    for got, key in ((G.right[0][0], "A"), (G.left[0][0], "S")):
        close(got / got.trace(), tensor(expected[key]) / tensor(expected[key]).trace())
    columns = torch.cat([torch.arange(16).view(2, 8), torch.arange(16, 18).view(2, 1)], dim=1).T.reshape(-1)
    exact = len(x) * ng.BlockDense().estimate(pb).dense()[columns[:, None], columns]
    agrees(case, exact, "g_exact")


def test_sobolev_kfac_is_a_drop_in_optimizer_and_kfac_where_k_is_one() -> None:
    steps, presets = [], (partial(ng.SobolevKFAC, lengthscale=1e-3), ng.KFAC)
    for make in presets:
        model, x, t = wide(16)
        opt = make(model, ng.Euclidean(), lr=0.1, damping=0.1)
        for _ in range(3):
            opt.zero_grad()
            F.mse_loss(model(x), t).backward()
            opt.step()
        steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(steps[0], steps[1], 1e-9)


def test_samples_that_examples_do_not_share_would_leave_the_diagonal_of_the_inverse_kernel() -> None:
    """One random output vector for the whole batch has the exact S in expectation."""
    case = golden("sobolev.sampling")
    x, D = tensor(case["inputs"]["X"]), tensor(case["inputs"]["D_dlogit_ds"])
    base = ng.Sampled(ng.Euclidean(), samples=400_000)
    C = ng.Sobolev(jitter=0.0).coupling(x, 3)
    y, generator = torch.zeros(3, 2, dtype=torch.float64), torch.Generator().manual_seed(0)
    for metric, key in ((ng.Sobolev(base), "S_exact"), (base, "S_expected_if_probes_independent_wrong")):
        Ds = torch.einsum("knd,nds->kns", metric.root(y, None, generator), D)
        close(torch.einsum("kns,nm,kmt->st", Ds, C, Ds), tensor(case["expected"][key]), 0.02)
