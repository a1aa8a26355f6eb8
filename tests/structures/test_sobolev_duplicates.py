"""Equal inputs in a batch under a Sobolev metric without jitter: they count once, in every structure."""

from typing import Any

import mpmath  # type: ignore[import-untyped]  # sympy has it, and torch has sympy
import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import MemoryBoundError
from natgrad.functionspace import SobolevKernel, TangentSpace
from natgrad.pullbacks.pullback import layers_of
from natgrad.solve import Solver
from natgrad.structures import Structure
from tests import oracle
from tests.pulled import close, normal

COPIES = [0, 1, 2, 3, 4, 1, 0, 1]
DISTINCT = 5
ELL = 1.3
λ = 0.1

BASES: dict[str, ng.OutputMetric] = {
    "Euclidean": ng.Euclidean(),
    "Euclidean mean": ng.Euclidean(reduction="mean"),
    "Fisher": ng.Fisher(ng.Categorical()),
    "Fisher sampled": ng.Fisher(ng.Categorical(), samples=3),
    "Sampled": ng.Sampled(ng.Euclidean(), samples=3),
    "Bregman": ng.Bregman(lambda y: y.exp().sum()),
}
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)

EXACT: dict[str, Structure] = {
    "Dense": ng.Dense(),
    "BlockDense": ng.BlockDense(),
    "Diagonal": ng.Diagonal(),
    "Kernel": ng.Kernel(),
    "Implicit": ng.Implicit(),
    "LowRank": ng.LowRank(60),
}
SOLVERS: dict[str, Solver] = {"Implicit": ng.CG(tol=1e-14, max_steps=2000)}
every_exact = pytest.mark.parametrize("name", EXACT)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    """Inputs of which some are equal, with targets that are not."""
    return normal(DISTINCT, 2)[COPIES], normal(len(COPIES), 3, seed=1)


def pulled(model: nn.Module, x: Tensor, base: ng.OutputMetric, jitter: float = 0.0) -> ng.Pullback:
    metric = ng.Sobolev(base, lengthscale=ELL, jitter=jitter)
    return ng.pullback(model, x, metric, generator=torch.Generator().manual_seed(0))


def gram(x: Tensor) -> Tensor:
    """(1 + r)e^{−r} of all pairs."""
    r = (x[:, None] - x[None]).norm(dim=2) / ELL
    return (1 + r) * (-r).exp()


def expected(model: nn.Module, x: Tensor, s: Tensor) -> Tensor:
    """(1/N) Σ_k R_kᵀ K⁺ R_k of roots s [k n d], with a pseudo-inverse of its own."""
    C = torch.linalg.pinv(gram(x), rtol=1e-12, hermitian=True)
    return oracle.dense_coupled(oracle.module_jacobian(model, x), s, C)


def part(G: Tensor, name: str, model: nn.Module) -> Tensor:
    """What a structure keeps of G."""
    if name == "BlockDense":
        return oracle.block_diagonal(G, oracle.layer_blocks(model).values())
    return oracle.diagonal(G) if name == "Diagonal" else G


# The metric


@every_base
@every_exact
def test_the_metric_with_equal_inputs_is_that_of_the_pseudo_inverse(name: str, base: ng.OutputMetric) -> None:
    model, (x, _) = network(), batch()
    pb = pulled(model, x, base)
    close(EXACT[name].estimate(pb).dense(), part(expected(model, x, pb.root), name, model), 1e-9)


@pytest.mark.parametrize("base", [name for name, base in BASES.items() if base.exact])
def test_a_copy_adds_nothing_to_the_sum_over_the_batch(base: str) -> None:
    model, (x, _) = network(), batch()
    for structure in (*EXACT.values(), ng.EigenKronecker()):
        with_copies = structure.estimate(pulled(model, x, BASES[base])).dense()
        alone = structure.estimate(pulled(model, x[:DISTINCT], BASES[base])).dense()
        close(len(COPIES) * with_copies, DISTINCT * alone, 1e-8)


@pytest.mark.parametrize("base", [name for name, base in BASES.items() if not base.exact])
def test_a_copy_adds_nothing_where_the_batch_shares_its_samples(base: str) -> None:
    """The same seed draws the same ones, however many examples there are."""
    model, (x, _) = network(), batch()
    with_copies, alone = pulled(model, x, BASES[base]), pulled(model, x[:DISTINCT], BASES[base])
    close(with_copies.root[:, :DISTINCT], alone.root)
    close(len(COPIES) * ng.Dense().estimate(with_copies).dense(), DISTINCT * ng.Dense().estimate(alone).dense(), 1e-8)


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.Kronecker("reduce")], ids=repr)
def test_a_copy_adds_nothing_to_the_factors_of_kfac_but_for_their_scale(structure: ng.Kronecker) -> None:
    """The scale is matched by traces, relative to K-FAC without K, which counts a copy twice."""
    model, (x, _) = network(), batch()
    found = [structure.estimate(pulled(model, given, ng.Euclidean())) for given in (x, x[:DISTINCT])]
    for with_copies, alone in zip(*[(*G.left, *G.right) for G in found], strict=True):
        close(with_copies / with_copies.diagonal(dim1=1, dim2=2).sum(), alone / alone.diagonal(dim1=1, dim2=2).sum())


# The step


@every_base
@every_exact
def test_the_damped_step_is_the_solution_with_that_metric(name: str, base: ng.OutputMetric) -> None:
    model, (x, t) = network(), batch()
    pb = pulled(model, x, base)
    ω = ng.differential(model, (model(x) - t).square().sum() / (2 * len(x)))
    v = ng.sharp(EXACT[name].estimate(pb), ω, SOLVERS.get(name, ng.Cholesky()), λ)
    G = part(expected(model, x, pb.root), name, model)
    close(v.flatten(), oracle.damped(G, ω.flatten(), λ), 1e-9)


@pytest.mark.parametrize("name", ["Dense", "Kernel", "Implicit"])
def test_the_step_is_the_push_through_form_that_inverts_no_k(name: str) -> None:
    """Jᵀ(λNK + JJᵀ)⁻¹N K e, to 1e-10, from the definition and from ``TangentSpace``."""
    model, (x, t) = network(), batch()
    loss = lambda y: (y - t).square().sum() / (2 * len(x))  # noqa: E731
    metric = ng.Sobolev(lengthscale=ELL, jitter=0.0)
    solver = SOLVERS.get(name, ng.Cholesky())
    v = ng.natural_gradient(model, x, loss, metric, structure=EXACT[name], solver=solver, damping=λ).flatten()
    R = oracle.module_jacobian(model, x).flatten(0, 1)  # [(n d) p]
    K, e = torch.kron(gram(x), torch.eye(3, dtype=x.dtype)), ((model(x) - t) / len(x)).detach().flatten()
    least = torch.linalg.pinv(λ * len(x) * K + R @ R.T, rtol=1e-13, hermitian=True)
    close(v, R.T @ (least @ (len(x) * K @ e)), 1e-10)
    space = TangentSpace.of(model, x, SobolevKernel(1.5, ELL))
    total = lambda y: (y - t).square().sum() / 2  # noqa: E731
    close(v, space.natural_gradient(total, λ * len(x)).flatten(), 1e-10)


@pytest.mark.parametrize("damping", [1e-3, 0.1])
@pytest.mark.parametrize("lengthscale", [1.0, 20.0, 100.0])
def test_the_kernel_structure_keeps_its_digits_where_k_is_ill_conditioned(lengthscale: float, damping: float) -> None:
    """Against 40 digits; cond(K) is 10² to 10⁸, and a metric that is formed with K⁻¹ loses as many digits."""
    model, x, t = network(), normal(6, 2), normal(6, 3, seed=1)
    metric = ng.Sobolev(lengthscale=lengthscale, jitter=0.0)
    loss = lambda y: (y - t).square().sum() / 12  # noqa: E731
    v = ng.natural_gradient(model, x, loss, metric, structure=ng.Kernel(), damping=damping).flatten()
    R, e = oracle.module_jacobian(model, x).flatten(0, 1), ((model(x) - t) / 6).detach().flatten()
    K = torch.kron(metric.gram(x, 6), torch.eye(3, dtype=x.dtype))
    with mpmath.workdps(40):
        rows, kernel, slope = (mpmath.matrix(m.tolist()) for m in (R, K, e))
        right = 6 * (kernel * slope)
        exact = rows.T * mpmath.lu_solve(damping * 6 * kernel + rows * rows.T, right)
    close(v, torch.tensor([float(entry) for entry in exact], dtype=x.dtype), 1e-10)


def test_undamped_and_over_parametrised_the_step_moves_equal_inputs_alike_by_minus_k_e() -> None:
    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    x, t = batch()
    e = (model(x) - t).detach()
    metric = ng.Sobolev(lengthscale=ELL, jitter=0.0)
    loss = lambda y: (y - t).square().sum() / (2 * len(x))  # noqa: E731
    options: dict[str, Any] = {"structure": ng.Kernel(), "solver": ng.Pinv(rtol=1e-10)}
    moved = ng.pushforward(model, x, -ng.natural_gradient(model, x, loss, metric, **options))
    close(moved, -gram(x) @ e, 1e-8)


# Precision, memory, state


@pytest.mark.parametrize("jitter", [0.0, 1e-6])
def test_single_precision_takes_the_same_step(jitter: float) -> None:
    x, t = batch()
    steps = []
    for dtype in (torch.float32, torch.float64):
        model, given, target = network(torch.float32).to(dtype), x.float().to(dtype), t.to(dtype)
        loss = lambda y: (y - target).square().sum() / (2 * len(x))  # noqa: B023, E731
        metric = ng.Sobolev(lengthscale=20.0, jitter=jitter)
        v = ng.natural_gradient(model, given, loss, metric, structure=ng.Kernel(), damping=1e-2).flatten()
        assert v.dtype == dtype
        steps.append(v.double())
    assert float((steps[0] - steps[1]).norm()) < 2e-3 * float(steps[1].norm())


def test_the_kernel_structure_mixes_no_rows() -> None:
    """Its factors are those of the model, and need less than the rows."""
    model = nn.Sequential(nn.Linear(2, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1)).double()
    x, _ = batch()
    pb = ng.pullback(model, x, ng.Sobolev(jitter=0.0), memory=2_000_000)
    G = ng.Kernel().estimate(pb)
    assert [f.a.shape[3] for f in G.factors] == [3, 301, 301]
    with pytest.raises(MemoryBoundError, match=r"coupled rows of 8 examples"):
        ng.Diagonal().estimate(pb)


@every_base
def test_a_kernel_is_restored_from_its_tensors(base: ng.OutputMetric) -> None:
    model, (x, _) = network(), batch()
    pb = pulled(model, x, base)
    G = ng.Kernel().estimate(pb)
    again = ng.Kernel().restore(pb.model, layers_of(pb.model), G.tensors())
    close(again.dense(), G.dense(), 1e-14)
    close(again.inverse(λ).solve(normal(45)), G.inverse(λ).solve(normal(45)), 1e-12)
