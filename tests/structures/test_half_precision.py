"""Models in half precision: their metrics are kept in single, and their vectors come back in half."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.operators import DenseOperator, Layout
from natgrad.solve import Solver
from natgrad.structures import Structure
from natgrad.structures.implicit import HessianOperator
from tests.pulled import normal

HALF = [torch.bfloat16, torch.float16]
PAIRS: list[tuple[Structure, Solver]] = [
    (ng.Dense(), ng.Cholesky()),
    (ng.Dense(), ng.Pinv()),
    (ng.Dense(), ng.CG()),
    (ng.BlockDense(), ng.Cholesky()),
    (ng.Kernel(), ng.Cholesky()),
    (ng.Diagonal(), ng.Cholesky()),
    (ng.LowRank(5), ng.Cholesky()),
    (ng.Implicit(), ng.CG()),
    (ng.Implicit(), ng.CG(preconditioner=ng.Diagonal())),
]
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)
every_pair = pytest.mark.parametrize(("structure", "solver"), PAIRS, ids=repr)


def problem(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and a batch whose numbers are the same in every precision."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        x, target = torch.randn(20, 4), torch.randint(3, (20,))
    return model.bfloat16().to(dtype), x.bfloat16().to(dtype), target


def natural(dtype: torch.dtype, structure: Structure, solver: Solver) -> ng.Vector:
    model, x, target = problem(dtype)
    fisher = ng.Fisher(ng.Categorical(axis=-1))
    return ng.natural_gradient(
        model, x, lambda y: F.cross_entropy(y, target), fisher, structure=structure, solver=solver, damping=0.1
    )


@every_half
@every_pair
def test_natural_gradient_in_half_precision_is_that_in_double(
    structure: Structure, solver: Solver, dtype: torch.dtype
) -> None:
    v = natural(dtype, structure, solver)
    assert {t.dtype for t in v.values()} == {dtype}
    expected = natural(torch.float64, structure, solver).flatten()
    error = (v.flatten().double() - expected).norm() / expected.norm()
    assert float(error) < 4 * torch.finfo(dtype).eps


@every_half
@every_pair
def test_flat_undoes_sharp_in_half_precision(structure: Structure, solver: Solver, dtype: torch.dtype) -> None:
    model, x, target = problem(dtype)
    G = structure.estimate(ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1))))
    ω = ng.differential(model, F.cross_entropy(model(x), target))
    v = ng.sharp(G, ω, solver, damping=0.1)
    back = G.flat(v)
    assert {t.dtype for t in back.values()} == {dtype}
    residual = back.flatten().float() + 0.1 * v.flatten().float() - ω.flatten().float()
    assert float(residual.norm() / ω.flatten().float().norm()) < 8 * torch.finfo(dtype).eps


@every_half
@every_pair
def test_a_model_in_half_precision_is_trained(structure: Structure, solver: Solver, dtype: torch.dtype) -> None:
    """θ' = θ − lr·v to the rounding of θ, with the v of ``natural_gradient``."""
    model, x, target = problem(dtype)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    fisher = ng.Fisher(ng.Categorical(axis=-1))
    opt = ng.NaturalGradient(model, fisher, structure=structure, solver=solver, lr=0.5, damping=0.1)
    F.cross_entropy(model(x), target).backward()
    opt.step()
    v = natural(torch.float64, structure, solver)
    for name, p in model.named_parameters():
        assert p.dtype == dtype
        expected = before[name] - 0.5 * v[name]
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-7, 1e-30])
def test_conjugate_gradients_of_a_tiny_covector_do_not_underflow(size: float, dtype: torch.dtype) -> None:
    w = torch.tensor([1.0, 2.0]).to(dtype) * size
    G = DenseOperator(Layout.of({"w": w}), torch.diag(torch.tensor([1.0, 4.0])))
    v = ng.sharp(G, ng.Covector({"w": w}), ng.CG())["w"]
    torch.testing.assert_close(v, (w.double() / torch.tensor([1.0, 4.0])).to(dtype), rtol=1e-2, atol=0)


def test_a_metric_of_double_outputs_applies_to_single_parameters() -> None:
    model, x, _ = problem(torch.float32)
    pb = ng.pullback(model, x, ng.Euclidean(), output=lambda y: y.double())
    ω = ng.Covector({name: torch.ones_like(p) for name, p in model.named_parameters()})
    for structure, solver in PAIRS:
        v = ng.sharp(structure.estimate(pb), ω, solver, damping=0.1)
        assert {t.dtype for t in v.values()} == {torch.float32}


@every_half
def test_hessian_in_half_precision_is_applied_in_single(dtype: torch.dtype) -> None:
    w = {"w": torch.tensor([1.0, 2.0], dtype=dtype)}
    H = HessianOperator.at(lambda u: u["w"].pow(3).sum() / 6, w)
    assert H.dense().dtype == torch.float32
    torch.testing.assert_close(H.dense(), torch.diag(torch.tensor([1.0, 2.0])))
    v = ng.sharp(H, ng.Covector({"w": torch.tensor([3.0, 4.0], dtype=dtype)}))
    torch.testing.assert_close(v["w"], torch.tensor([3.0, 2.0], dtype=dtype))


def test_a_step_that_leaves_the_range_of_float16_says_what_to_use() -> None:
    """S and A of gradients of 10⁻⁶ are 10⁻¹², and S^-½ ω A^-½ is 10⁶ before it is brought to its length."""
    model = nn.Linear(6, 4, bias=False).half()
    model.weight.grad = 1e-6 * normal(4, 6).half()
    with pytest.raises(NonFiniteError, match=r"the step of weight .*Nothing was changed: float16 ends .*use bfloat16"):
        ng.NaturalGradient(
            model,
            ng.BatchGradient(),
            structure=ng.Kronecker(power=0.5),
            step=ng.Normalised(0.2),
            damping=ng.Relative(1e-4),
        ).step()
