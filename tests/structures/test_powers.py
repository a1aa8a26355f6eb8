"""Powers of the metric: G^p is the dense power of G in every structure, and the points G^p form one geodesic."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError, SingularMetricError
from natgrad.structures import Structure
from tests import zoo
from tests.oracle import damped_power
from tests.pulled import POWERED, close, covector, normal, pull

POWERS = [1.0, 0.75, 0.5, 0.3, 0.25]


def pullback(model: str = "mlp_tanh") -> ng.Pullback:
    return pull(zoo.case(model).make(), ng.Fisher(ng.Gaussian()))


def oracle_power(matrix: Tensor, power: float) -> Tensor:
    """By eigenvalues, those within rounding as zero; the power 0 is the identity."""
    if power == 0:
        return torch.eye(len(matrix), dtype=matrix.dtype)
    values, vectors = torch.linalg.eigh(matrix)
    values = torch.where(values > 1e-13 * values[-1], values, 0.0)
    return (vectors * values.pow(power)) @ vectors.T


@pytest.mark.parametrize("power", [*POWERS, 0.0])
@pytest.mark.parametrize("structure", POWERED)
@pytest.mark.parametrize("model", ["mlp_tanh", "conv", "layer_norm", "tied_weights"])
def test_an_operator_with_a_power_is_the_dense_power(model: str, structure: str, power: float) -> None:
    pb = pullback(model)
    G = POWERED[structure](power=power).estimate(pb)
    matrix = G.with_power(1.0).dense()
    expected = oracle_power(matrix, power)
    close(G.dense(), expected, 1e-7)  # (10⁻³²)^¼: squares that are zero up to rounding
    v = normal(len(matrix))
    close(G.product(v), expected @ v, 1e-7)
    close(G.diagonal(), expected.diagonal(), 1e-7)
    close(G.trace(), expected.trace(), 1e-7)
    close(G.logdet(0.1), power * torch.linalg.slogdet(matrix + 0.1 * torch.eye(len(v), dtype=v.dtype)).logabsdet)
    ω = covector(pb)
    close(ng.sharp(G, ω, damping=0.1).flatten(), damped_power(matrix, 0.1, power) @ ω.flatten(), 1e-9)


@pytest.mark.parametrize("structure", [name for name in POWERED if name != "LowRank"])
def test_the_power_one_is_the_metric_as_it_always_was(structure: str) -> None:
    pb, kind = pullback(), POWERED[structure]
    close(kind(power=1.0).estimate(pb).dense(), kind().estimate(pb).dense(), 0.0)
    close(kind(power=0.5).estimate(pb).with_power(1.0).dense(), kind().estimate(pb).dense(), 0.0)


@pytest.mark.parametrize("power", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("rank", [2, 3, 9])
def test_a_low_rank_metric_of_enough_rank_has_the_dense_power(rank: int, power: float) -> None:
    """G of rank 2: what its diagonal has beside the eigenpairs is rounding, of which the fourth root is 10⁻⁴."""
    model, x = nn.Linear(5, 1, bias=False).double(), normal(2, 5)
    G = ng.LowRank(rank, power=power).estimate(ng.pullback(model, x, ng.Euclidean()))
    close(G.dense(), oracle_power(x.T @ x / 2, power), 1e-12)


def test_powers_of_a_low_rank_metric_have_a_level_floor_and_its_trace() -> None:
    G = ng.LowRank(3).estimate(pullback())
    level = G.with_power(0.5).with_power(1.0)
    close(level.trace(), G.trace())
    close(level.floor, G.floor.mean().expand_as(G.floor))
    assert G.with_power(1.0) is G


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.5), (0.25, 0.5), (0.3, 0.0)])
@pytest.mark.parametrize("structure", POWERED)
def test_powers_add(structure: str, p: float, q: float) -> None:
    """G^p G^q = G^(p+q)."""
    G = POWERED[structure](power=p).estimate(pullback())
    v = normal(G.layout.size)
    close(G.product(G.with_power(q).product(v)), G.with_power(p + q).product(v), 1e-9)


@pytest.mark.parametrize("structure", POWERED)
def test_small_powers_tend_to_the_identity(structure: str) -> None:
    """G^p → 1 on regular matrices: (G + λ)^-p = 1 − p log(G + λ) + O(p²)."""
    pb, p = pullback(), 1e-4
    ω = covector(pb)
    G = POWERED[structure](power=p).estimate(pb)
    values, vectors = torch.linalg.eigh(G.with_power(1.0).dense())
    log = vectors @ ((values + 0.1).log() * (vectors.T @ ω.flatten()))
    v = ng.sharp(G, ω, damping=0.1).flatten()
    close(v, ω.flatten() - p * log, 100 * p**2)


@pytest.mark.parametrize("structure", POWERED)
def test_the_power_zero_is_the_gradient_whatever_the_metric_is(structure: str) -> None:
    """No estimate is looked at: this one holds NaN, and another one is zero and undamped."""
    pb = pullback()
    ω = covector(pb)
    for solver in (ng.Cholesky(), *([ng.Factored()] if structure == "Kronecker" else [])):
        for scale in (torch.nan, 0.0):
            spoilt = pull(zoo.case("mlp_tanh").make(), ng.Euclidean())
            G = POWERED[structure]().estimate(spoilt).with_power(0.0)
            for t in G.tensors().values():
                t.mul_(scale)
            v = ng.sharp(G, ω, solver)
            assert isinstance(v, ng.Vector)
            close(v.flatten(), ω.flatten(), 0.0)
            assert all(v[name].data_ptr() != ω[name].data_ptr() for name in v)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("structure", POWERED)
def test_sharp_inverts_flat(structure: str, power: float) -> None:
    """(G^p)♯ (G^p)♭ = 1, for a regular metric and no damping; Kernel needs fewer rows than parameters."""
    if structure == "Kernel":
        pytest.skip("Woodbury has no inverse without damping")
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    pb = ng.pullback(model, normal(40, 3), ng.Fisher(ng.Gaussian()))
    v = ng.Vector(dict(covector(pb)))
    G = (ng.LowRank(8, power=power) if structure == "LowRank" else POWERED[structure](power=power)).estimate(pb)
    close(ng.sharp(G, G.flat(v)).flatten(), v.flatten(), 1e-9)
    if structure == "Kronecker":
        close(ng.sharp(G, G.flat(v), ng.Factored()).flatten(), v.flatten(), 1e-9)


@pytest.mark.parametrize("structure", POWERED)
def test_pseudo_inverses_have_powers(structure: str) -> None:
    """((G⁺)^p)² = G⁺ at p = ½, on the range."""
    if structure == "LowRank":
        pytest.skip("it has no pseudo-inverse")
    pb = pullback()
    G = POWERED[structure](power=0.5).estimate(pb)
    inverse = ng.Pinv(rtol=1e-10).init(G)
    ω = G.with_power(1.0).product(covector(pb).flatten())
    close(inverse.solve(inverse.solve(ω)), ng.Pinv(rtol=1e-10).init(G.with_power(1.0)).solve(ω), 1e-6)


def test_a_power_of_a_kronecker_product_is_the_product_of_the_powers() -> None:
    """(S ⊗ A)^p = S^p ⊗ A^p, and with factored damping each factor has its own."""
    model = nn.Linear(3, 2).double()
    pb = ng.pullback(model, normal(20, 3), ng.Fisher(ng.Categorical(axis=-1)))
    G = ng.Kronecker(power=0.3).estimate(pb)
    S, A = G.left[0][0], G.right[0][0]
    order = G.blocks[0].index
    close(G.dense()[order[:, None], order], torch.kron(oracle_power(S, 0.3), oracle_power(A, 0.3)))
    λ, π = 0.2, ((A.trace() / len(A)) / (S.trace() / len(S))).sqrt()
    left, right = damped_power(S, float(λ**0.5 / π), 0.3), damped_power(A, float(λ**0.5 * π), 0.3)
    ω = covector(pb)
    v = ng.sharp(G, ω, ng.Factored(), damping=λ).flatten()
    close(v[order], torch.kron(left, right) @ ω.flatten()[order])


@pytest.mark.parametrize("structure", ["Diagonal", "Dense", "BlockDense", "Kronecker", "EigenKronecker", "LowRank"])
def test_averages_and_checkpoints_are_those_of_the_metric_itself(structure: str) -> None:
    kind = POWERED[structure]
    first, second = pullback(), pull(zoo.case("mlp_tanh").make(), ng.Euclidean(reduction="mean"))
    G = kind(power=0.5).estimate(first)
    mean = G.lerp(kind(power=0.5).estimate(second, G), 0.25)
    assert mean.power == 0.5
    if structure not in ("LowRank", "EigenKronecker"):  # which cut it back, or have a basis
        plain = 0.75 * G.with_power(1.0).dense() + 0.25 * kind().estimate(second).dense()
        if structure != "Kronecker":
            close(mean.with_power(1.0).dense(), plain)
        close(mean.dense(), oracle_power(mean.with_power(1.0).dense(), 0.5), 1e-9)
    restored = kind(power=0.5).restore(first.model, first.layers, mean.tensors())
    assert restored is not None
    close(restored.dense(), mean.dense(), 0.0)


def test_averages_join_operators_of_one_power() -> None:
    G = ng.Dense().estimate(pullback())
    with pytest.raises(ValueError, match=r"operators of one power, not 1 and 0\.5"):
        G.lerp(G.with_power(0.5), 0.5)


@pytest.mark.parametrize("structure", POWERED)
@pytest.mark.parametrize("power", [-0.1, 1.5, float("nan"), "half", True, False])
def test_powers_outside_the_geodesic_are_refused(structure: str, power: Any) -> None:
    with pytest.raises(ValueError, match=rf"{structure}\(power=…\) must have a power between 0 and 1, got"):
        POWERED[structure](power=power)
    with pytest.raises(ValueError, match=r"Operator\.with_power\(power\) must have a power between 0 and 1"):
        POWERED[structure]().estimate(pullback()).with_power(power)


def test_what_has_no_powers_says_so() -> None:
    pb = pullback()
    with pytest.raises(IncompatibleError, match=r"the power 0\.5 does not work with ImplicitOperator: only G itself"):
        ng.Implicit().estimate(pb).with_power(0.5)
    with pytest.raises(IncompatibleError, match=r"CG at the power 0\.5 does not work with DenseOperator: products"):
        ng.CG().init(ng.Dense(power=0.5).estimate(pb), 0.1)
    with pytest.raises(IncompatibleError, match=r"Pinv\(weight=…\) at the power 0\.5 does not work with DenseOp"):
        ng.Pinv(weight=torch.eye(pb.model.size)).init(ng.Dense(power=0.5).estimate(pb))
    with pytest.raises(ValueError, match=r"has two powers: the fallback takes that of the layers, so give it none"):
        ng.Kronecker(power=0.5, fallback=ng.Diagonal(power=0.25))


@pytest.mark.parametrize("structure", ["Dense", "BlockDense", "Kronecker", "EigenKronecker", "Kernel", "Diagonal"])
def test_a_singular_metric_without_damping_is_refused_at_every_power(structure: str) -> None:
    pb = ng.pullback(nn.Linear(3, 2).double(), torch.zeros(4, 3, dtype=torch.float64), ng.Euclidean())
    for power in (1.0, 0.5):
        with pytest.raises(SingularMetricError, match=r"is singular at damping 0: rank [12] of"):
            ng.sharp(POWERED[structure](power=power).estimate(pb), covector(pb))


def test_indefinite_matrices_have_no_powers() -> None:
    layout = ng.operators.Layout.of({"w": torch.ones(2, dtype=torch.float64)})
    G = ng.operators.DenseOperator(layout, torch.diag(torch.tensor([-1.0, 2.0], dtype=torch.float64)), power=0.5)
    with pytest.raises(SingularMetricError, match=r"indefinite, smallest eigenvalue -1, and has no power 0\.5"):
        G.dense()
    with pytest.raises(SingularMetricError, match=r"indefinite at damping 0\.5"):
        G.inverse(0.5)


def test_a_fallback_has_the_power_of_the_layers() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.shift.exp()

    pb = ng.pullback(Shifted().double(), normal(12, 3), ng.Euclidean())
    G = ng.Kronecker(power=0.5).estimate(pb)
    close(G.dense(), oracle_power(G.with_power(1.0).dense(), 0.5), 1e-9)
    if G.fallback is not None:
        assert G.fallback.power == 0.5


def test_structures_say_their_power() -> None:
    assert repr(ng.Diagonal()) == "Diagonal()"
    assert repr(ng.Refresh(ng.Dense(power=0.5))).startswith("Refresh(structure=Dense(power=0.5), every=1")
    structure: Structure = replace(ng.Kronecker(), power=0.75)
    assert structure.power == 0.75
    assert repr(structure).endswith("power=0.75)")


def test_a_plan_says_the_power() -> None:
    model = nn.Linear(3, 2)
    assert "to the power 0.75, estimated" in str(
        ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Dense(power=0.75)).plan()
    )
    assert "to the power" not in str(ng.NaturalGradient(model, ng.Euclidean()).plan())


def test_where_the_metric_is_a_curvature_powers_are_refused() -> None:
    model, half, x = nn.Linear(3, 2).double(), ng.Dense(power=0.5), normal(5, 3)
    with pytest.raises(IncompatibleError, match=r"Laplace does not work with Dense\(power=0\.5\): its curvature is G"):
        ng.vi.Laplace(model, x, ng.Euclidean(), half)
    with pytest.raises(IncompatibleError, match=r"InnerProduct\(damping=0\.1\) at the power 0\.5 does not work with"):
        ng.mirror.InnerProduct(half.estimate(ng.pullback(model, x, ng.Euclidean())), damping=0.1)


@pytest.mark.parametrize("structure", [ng.Dense(power=0.5), ng.BlockDense(power=0.5)], ids=["Dense", "BlockDense"])
def test_powers_of_sparse_metrics_in_single_precision_are_those_in_double(structure: Structure) -> None:
    """LAPACK's eigenvalues of such matrices fail in single precision in half of these cases."""
    metric = ng.Fisher(ng.Categorical())
    for seed in range(12):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 5), nn.ReLU(), nn.Linear(5, 3))
        x = torch.randn(8, 20) * (torch.rand(20) > 0.8)
        roots = []
        for of in (model, copy.deepcopy(model).double()):
            like = x.to(next(of.parameters()).dtype)
            G = structure.estimate(ng.pullback(of, like, metric))
            ω = ng.Covector({name: torch.ones_like(p) for name, p in of.named_parameters()})
            v = ng.sharp(G, ω, damping=ng.Relative(1e-1))
            roots.append(torch.cat([v[name].detach().double().flatten() for name, _ in of.named_parameters()]))
        assert (roots[0] - roots[1]).norm() < 1e-3 * roots[1].norm()


def test_a_low_rank_metric_may_be_loaded_at_another_power() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double(), torch.randn(40, 3).double()

    def of(model: nn.Module, power: float) -> ng.NaturalGradient:
        structure = ng.Refresh(ng.LowRank(4, power=power), every=100, decay=0.9)
        return ng.NaturalGradient(model, ng.Euclidean(), structure=structure, damping=1e-3, lr=0.1)

    opt, other = of(model, 1.0), copy.deepcopy(model)
    model(x).square().mean().backward()
    opt.step()
    again = of(other, 0.5)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.tracker.average is not None
    assert again.tracker.average is not None
    expected = opt.tracker.average.with_power(0.5).dense()
    torch.testing.assert_close(again.tracker.average.dense(), expected)


@pytest.mark.parametrize("damping", [0.01, ng.Relative(0.01)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [ng.Normalised(), ng.Polar()], ids=["Normalised", "Polar"])
@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("structure", POWERED)
def test_a_layer_that_nothing_depends_on_does_not_move(
    structure: str, power: float, rule: ng.Normalised | ng.Polar, dtype: torch.dtype, damping: ng.Relative | float
) -> None:
    """Every layer's step has a given length, but for those whose step is rounding only."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.dead, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.used(x)) + torch.relu(self.dead(x) - 100))

    torch.manual_seed(0)
    model, x, t = Half().to(dtype), torch.randn(32, 4, dtype=dtype), torch.arange(32) % 3
    before, other = model.dead.weight.detach().clone(), model.used.weight.detach().clone()
    opt = ng.NaturalGradient(
        model,
        nn.CrossEntropyLoss(),
        structure=POWERED[structure](power=power),
        step=rule,
        lr=1e-3,
        damping=damping,
        fallback="adamw" if isinstance(rule, ng.Polar) else None,
    )
    for _ in range(3):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), t).backward()
        opt.step()
    assert torch.equal(model.dead.weight, before)
    assert not torch.equal(model.used.weight, other)


# On a GPU, in single precision, powers of whole blocks are products of matrices.


@pytest.mark.parametrize("structure", ["Dense", "BlockDense"])
def test_what_has_no_power_is_refused_by_its_eigenvalues(structure: str) -> None:
    """Zero, what is singular, and a condition number above that of single precision."""
    zero = ng.pullback(nn.Linear(3, 2), torch.zeros(4, 3), ng.Euclidean())
    G, ω = POWERED[structure](power=0.5).estimate(zero), torch.ones(8)
    with pytest.raises(SingularMetricError, match=r"is singular at damping 0: rank 2 of"):
        G.inverse(0.0)
    for t in G.tensors().values():
        t.zero_()
    assert not G.inverse(ng.Relative(0.1)).solve(ω).any()
    v = (1 + torch.arange(8) % 3).float()
    for t in G.tensors().values():
        t.copy_(700001 * torch.outer(v, v) + 0.5 * torch.eye(8))
    with pytest.raises(SingularMetricError, match=r"is singular at damping 1e-09: rank 1 of 8"):
        G.inverse(1e-9)
    regular = 1000 * torch.eye(8)
    regular[0, 0] = 1e-5
    for t in G.tensors().values():  # below rounding of the largest eigenvalue, on a processor and on a GPU
        t.copy_(regular)
    with pytest.raises(SingularMetricError, match=r"is singular at damping 0: rank 7 of 8"):
        G.inverse(0.0)


def test_powers_of_blocks_in_half_precision_and_of_nothing() -> None:
    matrix = (2 * torch.eye(4)).bfloat16()
    G = ng.operators.DenseOperator(ng.operators.Layout.of({"w": matrix[0]}), matrix, power=0.5)
    v = G.inverse(0.25).solve(torch.ones(4).bfloat16())
    torch.testing.assert_close(v, torch.full((4,), 2.25**-0.5).bfloat16())
    model = nn.Linear(3, 2)
    model.empty = nn.Parameter(torch.zeros(0))
    pb = ng.pullback(model, torch.randn(20, 3), ng.Euclidean())
    blocks, ω = ng.BlockDense(power=0.5).estimate(pb), torch.ones(pb.model.size)
    expected = damped_power(blocks.with_power(1.0).dense().double(), 0.1, 0.5) @ ω.double()
    close(blocks.inverse(0.1).solve(ω).double(), expected, 1e-4)
