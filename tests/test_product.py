"""THE product: every metric × every structure × every solver × every model solves the system that it says it solves.

Each cell takes a pullback, an estimate and a ♯ with the public functions, and compares the vector with the dense solve
of what the oracle keeps of the oracle's matrix. Pairs that cannot work are asserted to be refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.solve import Solver
from natgrad.structures import Structure
from tests import kronecker_oracle, oracle, zoo
from tests.kronecker_oracle import Layer
from tests.pulled import close, covector, pull

MODELS = ["mlp_tanh", "sequence", "layer_norm", "tied_weights", "attention", "conv", "embedding"]


@dataclass(frozen=True)
class Setting:
    """A problem with its pullback, and what the oracle has for it: G, and a root of h with the coupling."""

    problem: zoo.Problem
    pb: ng.Pullback
    target: Tensor
    G: Tensor
    s: Tensor  # [k n D]
    coupling: Tensor | None = None


@dataclass(frozen=True)
class Cell:
    """A metric of the library and the oracle's h[n D D] for it; `target` where the metric is made from a loss."""

    metric: ng.OutputMetric
    h: Callable[[Tensor, Tensor, Tensor], Tensor]  # of outputs, targets and the root of the pullback
    target: bool = False
    coupled: Callable[[Setting], tuple[Tensor, Tensor]] | None = None  # to the oracle's root s[k n D], and C[n m]


def _loss(y: Tensor, t: Tensor) -> Tensor:
    """Convex, with a Hessian that depends on y and t; one term a number."""
    return (F.softplus(y) + 0.5 * (y - t) ** 2).sum()


def _phi(y: Tensor) -> Tensor:
    return (y.logsumexp(-1) + 0.1 * y.square().sum(-1)).sum()


def _rho(y: Tensor, y0: Tensor) -> Tensor:
    """Not symmetric, with the Hessian diag(2 + y0²)."""
    d = y - y0
    return ((1 + 0.5 * y0.square()) * d.square() + d**3).sum()


def _from_root(y: Tensor, target: Tensor, root: Tensor) -> Tensor:
    """The metric that a sampled root happens to be."""
    s = root.reshape(*root.shape[:2], -1)
    return torch.einsum("knd,kne->nde", s, s)


def _centred(at: Setting) -> tuple[Tensor, Tensor]:
    """The gradients of the loss at the outputs, and the centring of the examples."""
    u = at.pb.y.clone().requires_grad_()
    (slope,) = torch.autograd.grad(_loss(u, at.target), u)
    n = len(u)
    return slope.reshape(1, n, -1), torch.eye(n, dtype=torch.float64) - 1 / n


def _sobolev(at: Setting) -> tuple[Tensor, Tensor]:
    """A column an output, and K⁻¹."""
    return oracle.euclidean_roots(at.pb.y), _inverse_kernel(at)


def _sobolev_sampled(at: Setting) -> tuple[Tensor, Tensor]:
    """Columns that every example shares, and K⁻¹."""
    return at.pb.root.flatten(2), _inverse_kernel(at)


def _inverse_kernel(at: Setting) -> Tensor:
    assert isinstance(at.problem.x, Tensor)
    return oracle.sobolev_coupling(at.problem.x, 2.0, 1e-6)


METRICS: dict[str, Cell] = {
    "Euclidean": Cell(ng.Euclidean(), lambda y, t, s: oracle.euclidean(y)),
    "Euclidean mean": Cell(ng.Euclidean(reduction="mean"), lambda y, t, s: oracle.euclidean(y) / y[0].numel()),
    "Fisher categorical": Cell(ng.Fisher(ng.Categorical(axis=-1)), lambda y, t, s: oracle.categorical(y)),
    "Fisher learned scale": Cell(ng.Fisher(ng.Gaussian(scale=None)), lambda y, t, s: oracle.gaussian_learned(y)),
    "Fisher sampled": Cell(ng.Fisher(ng.Categorical(axis=-1), samples=2), _from_root),
    "Sampled": Cell(ng.Sampled(ng.Euclidean(), samples=2), _from_root),
    "Empirical": Cell(ng.Empirical(_loss), lambda y, t, s: oracle.empirical(y, t, _loss), target=True),
    "GradientCovariance": Cell(
        ng.GradientCovariance(_loss), lambda y, t, s: oracle.empirical(y, t, _loss), target=True, coupled=_centred
    ),
    "Sum": Cell(
        0.5 * ng.Euclidean() + 2.0 * ng.Fisher(ng.Categorical(axis=-1)),
        lambda y, t, s: 0.5 * oracle.euclidean(y) + 2 * oracle.categorical(y),
    ),
    "Bregman": Cell(ng.Bregman(_phi), lambda y, t, s: oracle.hessian(_phi, y)),
    "Divergence": Cell(ng.Divergence(_rho), lambda y, t, s: oracle.divergence_hessian(_rho, y)),
    "LossHessian": Cell(ng.LossHessian(_loss), lambda y, t, s: oracle.loss_hessian(_loss, y, t), target=True),
    "Sobolev": Cell(
        ng.Sobolev(lengthscale=2.0, features=Tensor.double), lambda y, t, s: oracle.euclidean(y), coupled=_sobolev
    ),
    "Sobolev sampled": Cell(
        ng.Sobolev(ng.Fisher(ng.Categorical(axis=-1), samples=2), lengthscale=2.0, features=Tensor.double),
        _from_root,
        coupled=_sobolev_sampled,
    ),
}

STRUCTURES: dict[str, Structure] = {
    "Dense": ng.Dense(),
    "BlockDense": ng.BlockDense(),
    "Diagonal": ng.Diagonal(),
    "LowRank": ng.LowRank(3),
    "Kernel": ng.Kernel(),
    "Implicit": ng.Implicit(),
    "Kronecker expand": ng.Kronecker("expand"),
    "Kronecker reduce": ng.Kronecker("reduce"),
    "EigenKronecker": ng.EigenKronecker(),
}

SOLVERS: dict[str, tuple[Solver, float]] = {
    "Cholesky": (ng.Cholesky(), 0.2),
    "Pinv": (ng.Pinv(rtol=1e-12), 0.0),
    "Pinv damped": (ng.Pinv(), 0.2),
    "CG": (ng.CG(tol=1e-13, max_steps=1000), 0.2),
    "CG preconditioned": (ng.CG(tol=1e-13, max_steps=1000, preconditioner=ng.Diagonal()), 0.2),
    "Factored": (ng.Factored(), 0.2),
}

REFUSED = {
    ("Implicit", "Cholesky"): r"Cholesky does not work with ImplicitOperator",
    ("Implicit", "Pinv"): r"Pinv does not work with ImplicitOperator",
    ("Implicit", "Pinv damped"): r"Pinv does not work with ImplicitOperator",
    ("LowRank", "Pinv"): r"Pinv does not work with LowRankOperator",
    ("LowRank", "Pinv damped"): r"Pinv does not work with LowRankOperator",
    ("EigenKronecker", "Factored"): r"Factored does not work with EigenKroneckerOperator: its eigenvalues are no",
    **{
        (name, "Factored"): rf"Factored does not work with {name}Operator: it has no Kronecker factors"
        for name in ("Dense", "BlockDense", "Diagonal", "LowRank", "Kernel", "Implicit")
    },
}


class Words(nn.Module):
    """An embedding, and a linear layer on every word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Words [n t] to outputs [n t 2]."""
        return self.head(torch.tanh(self.table(words)))


def problem_of(model: str) -> zoo.Problem:
    """A model of the zoo, or the one with words."""
    if model == "embedding":
        return zoo.Case(model, lambda: zoo.Problem(Words(), torch.randint(5, (4, 3)))).make()
    return zoo.case(model).make()


@cache
def skipped(metric: str, model: str) -> str | None:
    """Why there is no such cell."""
    if metric == "Fisher learned scale" and problem_of(model).outputs().shape[-1] % 2:
        return "a mean and a log-scale each need an even number of outputs"
    return None


@cache
def setting(metric: str, model: str) -> Setting:
    """All that is needed of a metric and a model."""
    cell, problem = METRICS[metric], problem_of(model)
    y = problem.outputs().detach()
    target = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    pb = pull(problem, cell.metric, target if cell.target else None)
    J, h = problem.jacobian(), cell.h(y, target, pb.root)
    G = oracle.dense(J, h)
    values, vectors = torch.linalg.eigh(h)
    plain = Setting(problem, pb, target, G, (vectors * values.clamp(min=0).sqrt()[:, None]).permute(2, 0, 1))
    if cell.coupled is None:
        return plain
    s, coupling = cell.coupled(plain)
    return replace(plain, G=oracle.dense_coupled(J, s, coupling), s=s, coupling=coupling)


@cache
def estimate(metric: str, model: str, structure: str) -> ng.operators.Operator:
    """One estimate for all solvers of a row."""
    return STRUCTURES[structure].estimate(setting(metric, model).pb)


@cache
def layers(metric: str, model: str) -> list[Layer]:
    """Inputs and cotangents of the oracle, in the order of the library's groups."""
    at = setting(metric, model)
    twin, places = kronecker_oracle.taken_apart(at.problem.module)
    found = kronecker_oracle.layers(twin, at.problem.x, at.s, at.problem.output)
    return [Layer(places[layer.index], layer.a, layer.g, layer.sparse) for layer in found]


@cache
def kept(metric: str, model: str, structure: str) -> Tensor:
    """What the oracle keeps of G."""
    at = setting(metric, model)
    if structure == "BlockDense":
        return oracle.block_diagonal(at.G, oracle.layer_blocks(at.problem.module).values())
    if structure == "Diagonal":
        return oracle.diagonal(at.G)
    if structure.startswith("Kronecker"):
        sharing = structure.removeprefix("Kronecker ")
        return kronecker_oracle.kfac(layers(metric, model), sharing, at.G, at.coupling)
    if structure == "EigenKronecker":
        return kronecker_oracle.ekfac(layers(metric, model), bases(metric, model), at.G)
    return oracle.low_rank(at.G, 3) if structure == "LowRank" else at.G


def bases(metric: str, model: str) -> list[tuple[Tensor, Tensor]]:
    """The operator's own, which are checked: eigenvectors of multiple eigenvalues are not unique."""
    operator = estimate(metric, model, "EigenKronecker")
    assert isinstance(operator, ng.operators.EigenKroneckerOperator)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for block, q, p in zip(operator.blocks, operator.basis.left, operator.basis.right, strict=True):
        c, o, i = block.shape
        eyes = (torch.eye(d, dtype=torch.float64).expand(c, d, d) for d in (o, i))
        sides = [eye if side is None else side for side, eye in zip((q, p), eyes, strict=True)]
        for index, *pair in zip(block.index.view(c, -1), *sides, strict=True):
            found[_first(index)] = (pair[0], pair[1])
    out = []
    for layer in layers(metric, model):
        out.append(found[_first(layer.index)])
        for side, factor in zip(out[-1], layer.factors("expand", setting(metric, model).coupling), strict=True):
            close(side.T @ side, torch.eye(len(side), dtype=torch.float64))
            rotated = side.T @ factor @ side
            close(rotated, rotated.diagonal().diag())
    assert len(out) == len(found)
    return out


def _first(index: Tensor) -> int:
    """What names a layer: the smallest position of its parameters."""
    return int(index.min())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("model", MODELS)
def test_any_metric_in_any_structure_with_any_solver(model: str, metric: str, structure: str) -> None:
    reason = skipped(metric, model)
    if reason:
        pytest.skip(reason)
    for solver in SOLVERS:  # not a parameter: four thousand tests more would cost more than what they compute
        with _named(solver):
            _solves(model, metric, structure, solver)


@contextmanager
def _named(solver: str) -> Iterator[None]:
    """What fails says with which solver."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"with the solver {solver}: {error}") from error


def _solves(model: str, metric: str, structure: str, solver: str) -> None:
    """A cell of the table."""
    at, operator = setting(metric, model), estimate(metric, model, structure)
    method, damping = SOLVERS[solver]
    w = covector(at.pb)
    if (structure, solver) in REFUSED:
        with pytest.raises(IncompatibleError, match=REFUSED[structure, solver]):
            ng.sharp(operator, w, method, damping)
        return
    matrix = kept(metric, model, structure)
    if solver == "Factored":
        sharing = structure.removeprefix("Kronecker ")
        damped = kronecker_oracle.factored(layers(metric, model), sharing, at.G, damping, at.coupling)
        close(ng.sharp(operator, w, method, damping).flatten(), torch.linalg.solve(damped, w.flatten()))
    elif damping > 0:
        close(ng.sharp(operator, w, method, damping).flatten(), oracle.damped(matrix, w.flatten(), damping))
    else:
        w = w.unflatten(matrix @ w.flatten())  # in the range: what is outside is dropped at the noise
        v = ng.sharp(operator, w, method).flatten()
        close(matrix @ v, w.flatten(), 1e-8)
        close(v, oracle.pinv(matrix, w.flatten(), 1e-12), 1e-5)


@pytest.mark.parametrize("power", [0.5, 0.3])
@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "Implicit"])
@pytest.mark.parametrize("metric", ["Fisher categorical", "Fisher sampled", "GradientCovariance", "Sobolev"])
@pytest.mark.parametrize("model", MODELS)
def test_any_metric_in_any_structure_has_powers(model: str, metric: str, structure: str, power: float) -> None:
    """(G + λ)^-p and, relative to it, p log det."""
    at, operator, λ = setting(metric, model), estimate(metric, model, structure).with_power(power), 0.2
    matrix = _level(at.G, 3) if structure == "LowRank" else kept(metric, model, structure)
    values, vectors = torch.linalg.eigh(matrix)
    w = covector(at.pb)
    expected = vectors @ ((values + λ).pow(-power) * (vectors.T @ w.flatten()))
    close(ng.sharp(operator, w, ng.Cholesky(), λ).flatten(), expected, 1e-9)
    close(operator.logdet(λ), power * (values + λ).log().sum(), 1e-9)


def _level(G: Tensor, rank: int) -> Tensor:
    """The leading eigenpairs, and what is left of the trace spread evenly."""
    values, vectors = torch.linalg.eigh(G)
    lead = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
    return lead + (G - lead).trace() / len(G) * torch.eye(len(G), dtype=G.dtype)


@pytest.mark.parametrize("structure", ["Kronecker expand", "Kronecker reduce", "EigenKronecker"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("model", MODELS)
def test_kronecker_structures_keep_what_the_textbook_keeps(model: str, metric: str, structure: str) -> None:
    """The matrices themselves, from inputs and cotangents of hooks: S ⊗ A, or the diagonal of G in its eigenbasis."""
    if skipped(metric, model):
        pytest.skip(str(skipped(metric, model)))
    close(estimate(metric, model, structure).dense(), kept(metric, model, structure))


def test_every_cell_is_in_the_table_once() -> None:
    """Nothing is skipped without a reason: of all pairs of metric and model, only the odd outputs are."""
    absent = {(metric, model) for metric in METRICS for model in MODELS if skipped(metric, model)}
    assert absent == {("Fisher learned scale", "mlp_tanh"), ("Fisher learned scale", "conv")}
