"""K-FAC: where S ⊗ A is the metric itself, what the two factors are, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate.inverses import two_sided
from natgrad.structures import Structure
from tests import kronecker_oracle, oracle, zoo
from tests.golden import agrees, golden, golden_mlp, tensor
from tests.optim.tasks import seeded
from tests.pulled import Rooted, close, covered, normal, pull, random_roots

SHARINGS = [ng.Kronecker("expand"), ng.Kronecker("reduce")]
both = pytest.mark.parametrize("structure", SHARINGS, ids=["expand", "reduce"])


def loss(y: Tensor, t: Tensor) -> Tensor:
    """Convex, with a Hessian that depends on y and t."""
    return (nn.functional.softplus(y) + 0.5 * (y - t) ** 2).sum()


def rho(y: Tensor, y0: Tensor) -> Tensor:
    """A divergence with the Hessian diag(2 + y0²)."""
    return ((1 + 0.5 * y0.square()) * (y - y0).square() + (y - y0) ** 3).sum()


def phi(y: Tensor) -> Tensor:
    """Convex."""
    return (y.logsumexp(-1) + 0.1 * y.square().sum(-1)).sum()


METRICS: dict[str, ng.OutputMetric] = {
    "Euclidean": ng.Euclidean(),
    "Fisher": ng.Fisher(ng.Categorical(axis=-1)),
    "sampled": ng.Fisher(ng.Categorical(axis=-1), samples=2),
    "Empirical": ng.Empirical(loss),
    "Bregman": ng.Bregman(phi),
    "Divergence": ng.Divergence(rho),
    "LossHessian": ng.LossHessian(loss),
}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))


def blocks(problem: zoo.Problem, s: Tensor) -> Tensor:
    """The oracle's G for a root s[k n *out], cut to its layers."""
    flat = s.reshape(*s.shape[:2], -1)
    G = oracle.dense(problem.jacobian(), torch.einsum("knd,kne->nde", flat, flat))
    found = kronecker_oracle.layers(problem.module, problem.x, s, problem.output)
    return oracle.block_diagonal(G, [layer.index.reshape(-1).tolist() for layer in found])


def exact(structure: Structure, problem: zoo.Problem, metric: ng.OutputMetric, target: Tensor | None = None) -> None:
    """Assert that what the structure keeps is G itself, cut to the layers."""
    pb = pull(problem, metric, target)
    assert covered(pb) == set(problem.parameters())
    close(structure.estimate(pb).dense(), blocks(problem, pb.root))


# Where the product is exact


@both
@every_metric
@pytest.mark.parametrize("name", ["mlp_tanh", "relu_inplace", "layer_norm", "frozen_bias", "two_inputs"])
def test_kfac_is_exact_for_one_datum(name: str, metric: ng.OutputMetric, structure: Structure) -> None:
    whole = zoo.case(name).make()
    problem = replace(whole, x=oracle.example(whole.x, 1))
    target = torch.linspace(-1, 1, problem.outputs().numel(), dtype=torch.float64).view_as(problem.outputs())
    exact(structure, problem, metric, target if metric.needs_target else None)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_is_not_exact_for_one_datum_whose_positions_share_the_weight(sharing: Any) -> None:
    """W's row of G is a sum over positions, R = Σ_r g_r a_rᵀ, and RRᵀ is no product: the docstring says so."""
    model, x = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()), normal(1, 3, 3)
    J = oracle.module_jacobian(model, x).reshape(-1, sum(p.numel() for p in model.parameters()))
    first = slice(0, 16)
    found = ng.Kronecker(sharing).estimate(ng.pullback(model, x, ng.Euclidean())).dense()[first, first]
    expected = (J.T @ J)[first, first]
    assert float((found - expected).norm()) > 0.05 * float(expected.norm())
    assert "no positions share a weight" in " ".join(str(ng.Kronecker.__doc__).split())


@both
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_kfac_is_exact_for_deep_linear_networks_with_squared_loss(structure: Structure, reduction: Any) -> None:
    """The cotangents do not depend on the example, whatever the inputs are."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 2)).double()
    exact(structure, zoo.Problem(model, normal(7, 3).exp()), ng.Euclidean(reduction))


def test_kfac_is_not_exact_behind_a_nonlinearity() -> None:
    """The hypothesis of the theorem above is needed."""
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, ng.Euclidean())
    assert float((ng.Kronecker().estimate(pb).dense() - blocks(problem, pb.root)).norm()) > 0.1


def test_kfac_is_exact_where_inputs_and_cotangents_are_independent() -> None:
    """A full factorial design: every input with every cotangent, so that the sums factorise."""
    x, s = normal(3, 4), normal(2, 5, 3, seed=1)
    pairs = [(a, g) for a in range(3) for g in range(5)]
    problem = zoo.Problem(nn.Linear(4, 3).double(), torch.stack([x[a] for a, _ in pairs]))
    exact(ng.Kronecker(), problem, Rooted(torch.stack([s[:, g] for _, g in pairs], dim=1)))


# Weight sharing (Eschenhagen et al. 2023)


class Pooled(nn.Module):
    """A deep linear network that averages over the positions before its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n r 3] to [n 2]."""
        return self.head(self.second(self.first(x)).mean(1))


def test_expand_is_exact_for_deep_linear_networks_with_an_output_at_every_position() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    exact(ng.Kronecker("expand"), zoo.Problem(model, normal(4, 3, 3)), ng.Euclidean())


def test_reduce_is_exact_for_deep_linear_networks_that_average_over_positions() -> None:
    exact(ng.Kronecker("reduce"), zoo.Problem(Pooled().double(), normal(4, 3, 3)), ng.Euclidean())


def test_each_sharing_is_exact_only_in_its_own_setting() -> None:
    deep = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())
    positions, pooled = (zoo.Problem(model, normal(4, 3, 3)) for model in (deep, seeded(Pooled).double()))
    for structure, problem in ((ng.Kronecker("reduce"), positions), (ng.Kronecker("expand"), pooled)):
        pb = pull(problem, ng.Euclidean())
        expected = blocks(problem, pb.root)
        assert float((structure.estimate(pb).dense() - expected).norm()) > 0.1 * float(expected.norm())


@pytest.mark.parametrize("name", [case.name for case in zoo.ZOO if case.linear and "sequence" not in case.name])
def test_reduce_is_expand_for_one_position(name: str) -> None:
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem))
    if any(positions > 1 for positions in pb.positions.values()):
        assert name in ("called_twice", "tied_weights")
        return
    expand, reduce = (structure.estimate(pb).dense() for structure in SHARINGS)
    close(expand, reduce, 1e-13)


# What the factors are


@pytest.mark.parametrize("name", ["mlp_tanh", "sequence", "conv", "called_twice"])
def test_inputs_are_averaged_over_examples_and_positions_and_cotangents_summed_over_positions(name: str) -> None:
    """K-FAC-expand: A = Σ_nr a aᵀ/(N R) and S = Σ_kn Σ_r g gᵀ/N. The homogeneous coordinate is 1, so A_11 = 1."""
    problem = zoo.case(name).make()
    metric = random_roots(problem)
    operator = ng.Kronecker().estimate(pull(problem, metric))
    for layer, S, A in zip(
        kronecker_oracle.layers(problem.module, problem.x, metric.s), operator.left, operator.right, strict=True
    ):
        flat = layer.a.flatten(0, 1)
        close(A[0], flat.T @ flat / len(flat))
        close(S[0], torch.einsum("knro,knrp->op", layer.g, layer.g))
        assert float(A[0, -1, -1]) == pytest.approx(1, abs=1e-14)


@both
@pytest.mark.parametrize("name", ["mlp_tanh", "layer_norm", "conv", "sequence"])
def test_the_trace_of_the_product_is_the_product_of_the_traces(name: str, structure: ng.Kronecker) -> None:
    problem = zoo.case(name).make()
    operator = structure.estimate(pull(problem, random_roots(problem)))
    traces = [t.diagonal(dim1=-2, dim2=-1).sum(-1) for t in (*operator.left, *operator.right)]
    half = len(operator.left)
    expected = sum(float((s * a).sum()) for s, a in zip(traces[:half], traces[half:], strict=True))
    assert float(operator.trace()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "structure"), [("mlp_tanh", ng.Kronecker()), ("sequence", ng.Kronecker("reduce"))])
def test_the_block_of_a_bias_is_exact(name: str, structure: ng.Kronecker) -> None:
    """Its input is 1: S is the metric of the bias. With several positions that is so if cotangents are summed first."""
    problem = zoo.case(name).make()
    metric = random_roots(problem)
    G = structure.estimate(pull(problem, metric)).dense()
    expected = blocks(problem, metric.s)
    start = 0
    for key, p in problem.parameters().items():
        if key.endswith("bias"):
            own = slice(start, start + p.numel())
            close(G[own, own], expected[own, own])
        start += p.numel()


def test_mlp_has_the_golden_factors_and_blocks() -> None:
    """Luk and Grosse (2018), (2.8), Johnson (2017), (37); blocks in column-stacking order are A ⊗ S."""
    case, exact_case = golden("mlp.kfac.factors"), golden("mlp.kfac.exact_blocks")
    model, x, _ = golden_mlp()
    pb = ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1)))
    operator = ng.Kronecker().estimate(pb)
    for key, got in zip(("G1", "G2", "A0", "A1"), (*operator.left, *operator.right), strict=True):
        agrees(case, got[0], key)
    G, F = operator.dense(), ng.BlockDense().estimate(pb).dense()
    first, second = _columns(0, 3, 3), _columns(9, 3, 4)
    for key, metric, columns in (("kron_A0_G1", G, first), ("F11", F, first), ("F22", F, second)):
        agrees(exact_case, metric[columns[:, None], columns], key)


def _columns(start: int, o: int, i: int) -> Tensor:
    """Where the entries of W̄ [o i], column after column, lie in θ = (W row-major, b)."""
    W = torch.arange(start, start + o * (i - 1)).view(o, i - 1)
    b = torch.arange(start + o * (i - 1), start + o * i).view(o, 1)
    return torch.cat([W, b], dim=1).T.reshape(-1)


def test_the_product_with_a_vector_is_row_major() -> None:
    """(A ⊗ B) vec(C) = vec(A C Bᵀ) for row-major vec, and vec(B C Aᵀ) for columns."""
    case = golden("kron.vec")
    A, B, C_row, C_col = (tensor(case["inputs"][key]).unsqueeze(0) for key in ("A", "B", "C_row", "C_col"))
    agrees(case, two_sided(A, C_row, B).reshape(-1), "row_major")
    agrees(case, two_sided(B, C_col, A).mT.reshape(-1), "col_major")


@pytest.mark.parametrize("kind", ["convolution", "unfolded"])
def test_convolution_has_the_golden_factors_block_and_step(kind: str) -> None:
    """Luk and Grosse (2018), (4.5): the golden G is a mean over positions too, and the product has their number |T|."""
    case = golden("conv.valid.kfc")
    given, expected = case["inputs"], case["expected"]
    model = Readout(kind).double()
    with torch.no_grad():
        for p, key in zip(model.parameters(), ["W", "b", "readout_U", "readout_c"], strict=True):
            p.copy_(tensor(given[key]).view_as(p))
    x = tensor(given["X"])
    agrees(case, model(x), "logits")
    pb = ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1)))
    operator = ng.Kronecker().estimate(pb)
    agrees(case, operator.right[0][0], "A")
    agrees(case, operator.left[0][0] / expected["T"], "G")
    columns = _columns(0, 2, 9)
    block = operator.dense()[columns[:, None], columns]
    assert float(block[0, 0]) == pytest.approx(expected["F_hat_00"], rel=1e-10)
    assert float(block.trace()) == pytest.approx(expected["F_hat_trace"], rel=1e-10)
    agrees(case, ng.BlockDense().estimate(pb).dense()[columns[:, None], columns], "F_exact")
    slope = ng.differential(model, nn.functional.cross_entropy(model(x), torch.tensor(given["y"])))
    v = ng.sharp(operator, slope, ng.Cholesky(), given["damping"])
    agrees(case, slope.flatten()[columns].view(9, 2).T, "V")
    agrees(case, v.flatten()[columns].view(9, 2).T, "natgrad_damped")


class Readout(nn.Module):
    """logits = U tanh(conv(x)) + c, with the convolution as one, or as a linear layer on unfolded patches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Conv2d(2, 2, 2) if kind == "convolution" else nn.Linear(8, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n 2 3 3] to logits [n 3]."""
        z = self.inner(nn.functional.unfold(x, 2).mT).mT if isinstance(self.inner, nn.Linear) else self.inner(x)
        return self.head(torch.tanh(z).flatten(1))
