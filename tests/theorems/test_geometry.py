"""What the library promises about the geometry of function space, one theorem each."""

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.functionspace import (
    NTKMap,
    NTKOperator,
    PushforwardMetric,
    SobolevKernel,
    TangentFrame,
    TangentKernel,
    TangentSpace,
    layer_ntks,
    ntk,
)
from natgrad.invariance import reparametrise
from tests import oracle
from tests.pulled import close, normal

KERNEL = SobolevKernel(1.5)


def _small() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 2)).double(), normal(9, 2), normal(4, 2, seed=1)


def test_the_ntk_is_the_dual_of_the_pushforward_metric_in_which_the_parameters_are_orthonormal() -> None:
    """Θ = J Jᵀ, whole, by layers and as a product; XᵀΘ⁺Y is (φ_*g)(X, Y) (Bai et al. (2022), lemma 6)."""
    model, x, y = _small()
    J, L = (oracle.module_jacobian(model, at) for at in (x, y))
    expected = torch.einsum("nkp,mlp->nmkl", J, L)
    close(ntk(model, x, y), expected)
    close(torch.stack([*layer_ntks(model, x, y, batch=2).values()]).sum(0), expected)
    close(NTKOperator.of(model, x, y).dense(), expected)
    plane = nn.Sequential(nn.Linear(2, 1), nn.Tanh()).double()  # an immersion
    J = oracle.module_jacobian(plane, x)
    metric = PushforwardMetric.of(ntk(plane, x))
    v, w = normal(3, seed=2), normal(3, seed=3)
    close(metric.inner(J @ v, J @ w), v @ w, 1e-9)


def test_the_kernel_of_the_tangent_space_reproduces_under_any_metric_and_does_not_see_the_parametrisation() -> None:
    model, x, y = _small()
    other = reparametrise(model, seed=3)
    for metric in (ng.Euclidean(), ng.Sobolev(jitter=0.0)):
        K_f = TangentKernel(TangentFrame.of(ng.pullback(model, x, metric)))
        g = ng.Dense().estimate(ng.pullback(model, x, metric)).dense()
        w = torch.linalg.pinv(g, rtol=1e-11, hermitian=True) @ g @ normal(len(g), seed=5)
        u = normal(4, 2, seed=6)
        # ⟨Σ_m K_f(y_m, ·)u_m, J w⟩ = Σ_m u_m·(J w)(y_m), with the inner product of functions of the parameters.
        representer = torch.linalg.pinv(g, rtol=1e-11, hermitian=True) @ _pulled(model, y, u)
        close(torch.einsum("nmkl,ml->nk", K_f(x, y), u), _moved(model, x, representer), 1e-7)
        close(representer @ g @ w, (u * _moved(model, y, w)).sum(), 1e-8)
        close(TangentKernel(TangentFrame.of(ng.pullback(other, x, metric)))(y), K_f(y), 1e-6)
    assert (ntk(other, y) - ntk(model, y)).norm() > 0.1 * ntk(model, y).norm()


def test_the_map_s_is_a_projection_where_the_ntk_is_the_kernel_of_the_tangent_space_and_only_there() -> None:
    model, x, _ = _small()
    v = normal(9, 2, seed=4)
    frame = TangentFrame.within(model, x, KERNEL)
    S, P = NTKMap(frame), TangentSpace.of(model, x, KERNEL)
    once = ng.pushforward(model, x, S(v))
    assert S.projection_defect() > 0.1
    assert (ng.pushforward(model, x, S(once)) - once).norm() > 0.1 * once.norm()
    close(ng.pushforward(model, x, S(v - ng.pushforward(model, x, P.project(v)))), torch.zeros_like(v), 1e-8)
    # In orthonormal coordinates θ', θ = g^{−1/2}θ', the two kernels agree, and S is the projection.
    plane, A = nn.Linear(2, 1).double(), torch.cat([x, torch.ones(9, 1, dtype=x.dtype)], 1)
    g = A.T @ torch.linalg.solve(KERNEL(x), A)
    values, vectors = torch.linalg.eigh(g)
    root = (vectors / values.sqrt()) @ vectors.T
    f = lambda p, x: (torch.cat([x, torch.ones_like(x[:, :1])], 1) @ root @ p["w"])[:, None]  # noqa: E731
    params = {"w": normal(3)}
    good = TangentFrame.within(f, x, KERNEL, params=params)
    assert NTKMap(good).projection_defect() < 1e-9
    close(TangentKernel(good)(x), ntk(f, x, params=params), 1e-9)
    close(TangentKernel(good)(x), TangentKernel(TangentFrame.within(plane, x, KERNEL))(x), 1e-9)


def _pulled(model: nn.Module, x: Tensor, u: Tensor) -> Tensor:
    return torch.einsum("nkp,nk->p", oracle.module_jacobian(model, x), u)


def _moved(model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    return oracle.module_jacobian(model, x) @ w
