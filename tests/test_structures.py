"""Every structure keeps the part of G that it names, of every model of the zoo."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError, NatgradError
from natgrad.solve import Solver
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.golden import agrees, golden, tensor
from tests.pulled import close, pull, random_roots

every_case = pytest.mark.parametrize("case", zoo.ZOO, ids=zoo.IDS)


def blocks(problem: zoo.Problem) -> list[list[int]]:
    """One block a layer; the parameters of a pure function are all in one."""
    if problem.params is not None:
        return [list(range(sum(p.numel() for p in problem.params.values())))]
    return list(oracle.layer_blocks(problem.module).values())


def kept(structure: Structure, problem: zoo.Problem, G: Tensor) -> Tensor:
    """What the oracle keeps of G."""
    if isinstance(structure, ng.BlockDense):
        return oracle.block_diagonal(G, blocks(problem))
    if isinstance(structure, ng.Diagonal):
        return oracle.diagonal(G)
    if isinstance(structure, ng.LowRank):
        values = torch.linalg.eigvalsh(G).flip(0)
        last, cut = values[: structure.rank + 1][-2:] / values[0]
        if structure.rank < len(G) and last > 1e-8 and last - cut < 1e-8:
            pytest.skip("the eigenvalue at the cut is multiple: any of its vectors will do")
        return oracle.low_rank(G, min(structure.rank, len(G)))
    return G


STRUCTURES = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel(), ng.Implicit(), ng.LowRank(1), ng.LowRank(4)]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=repr)


@every_structure
@every_case
def test_estimate_keeps_its_part_of_a_fisher_metric(case: zoo.Case, structure: Structure) -> None:
    """Poisson: a metric of full rank that differs between examples and outputs, for outputs of any shape.

    ``test_product`` has every other metric, on fewer models.
    """
    problem = case.make()
    G = oracle.dense(problem.jacobian(), oracle.poisson(problem.outputs()))
    close(structure.estimate(pull(problem, ng.Fisher(ng.Poisson()))).dense(), kept(structure, problem, G))


@every_structure
@every_case
def test_estimates_of_one_pullback_see_one_root(case: zoo.Case, structure: Structure) -> None:
    """Two random columns: few rows (P > KN), where LowRank goes through the kernel."""
    problem = case.make()
    metric = random_roots(problem, k=2)
    s = metric.s.reshape(2, len(metric.s[0]), -1)
    G = oracle.dense(problem.jacobian(), torch.einsum("knd,kne->nde", s, s))
    close(structure.estimate(pull(problem, metric)).dense(), kept(structure, problem, G))


def test_low_rank_has_two_paths() -> None:
    """The table above has cases on both sides of P = KN."""
    sides = set()
    for case in zoo.ZOO:
        problem = case.make()
        for k in (2, problem.outputs()[0].numel()):
            sides.add(sum(p.numel() for p in problem.parameters().values()) <= k * problem.n_examples)
    assert sides == {True, False}


@pytest.mark.parametrize("rank", [1, 2, 5, 6, 17, 18, 31, 40])
@pytest.mark.parametrize("columns", [1, 8])
def test_low_rank_is_exact_once_the_rank_suffices(rank: int, columns: int) -> None:
    problem = zoo.case("mlp_tanh").make()
    metric = random_roots(problem, k=columns)
    pb = pull(problem, metric)
    G = ng.Dense().estimate(pb).dense()
    estimate = ng.LowRank(rank).estimate(pb)
    true_rank = 6 * min(columns, 3)  # 6 examples with 3 outputs
    assert estimate.values.numel() == min(rank, true_rank)
    close(estimate.diagonal(), G.diagonal())
    if rank >= true_rank:
        close(estimate.dense(), G)
    top = torch.linalg.eigvalsh(G).flip(0)[: min(rank, true_rank)]
    close(estimate.values, top)
    U = estimate.vectors
    close(U.T @ U, torch.eye(U.shape[1], dtype=torch.float64))


# Metrics that couple the examples


@pytest.mark.parametrize("name", ["mlp_tanh", "sequence", "layer_norm", "tied_weights", "scalar_output"])
def test_empirical_fisher_is_covariance_plus_the_square_of_the_gradient(name: str) -> None:
    """Grosse (2021), eq. 35: F_emp = C + ∇J∇Jᵀ, in every structure."""
    problem = zoo.case(name).make()
    target = torch.ones_like(problem.outputs())

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return ((y - t) ** 4).sum() + y.sum()

    J, y = problem.jacobian(), problem.outputs()
    empirical = oracle.dense(J, oracle.empirical(y, target, loss))
    gradient = oracle.differential(problem.module, loss(y, target)) / len(J)
    covariance = empirical - torch.outer(gradient, gradient)
    assert float(torch.outer(gradient, gradient).norm()) > 0.1 * float(empirical.norm())
    pb = pull(problem, ng.GradientCovariance(loss), target)
    for structure in STRUCTURES:
        close(structure.estimate(pb).dense(), kept(structure, problem, covariance))
    close(ng.Dense().estimate(pull(problem, ng.Empirical(loss), target)).dense(), empirical)


def test_covariance_of_one_example_is_zero() -> None:
    problem = zoo.Problem(zoo.mlp(3, 4, 2).double(), torch.ones(1, 3, dtype=torch.float64))
    pb = pull(problem, ng.GradientCovariance(F.mse_loss), torch.zeros(1, 2, dtype=torch.float64))
    for structure in STRUCTURES:
        close(structure.estimate(pb).dense(), torch.zeros(pb.model.size, pb.model.size, dtype=torch.float64))


# The pullback sampling trick


SAMPLED: dict[str, tuple[ng.OutputMetric, Callable[[Tensor], Tensor]]] = {
    "gaussian": (ng.Sampled(ng.Euclidean(), samples=4000), oracle.euclidean),
    "targets": (ng.Fisher(ng.Categorical(axis=-1), samples=4000), oracle.categorical),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_diagonal_approaches_the_exact_one(name: str) -> None:
    """Grosse (2021), eq. 31: the mean over 4000 roots lies within 6 standard errors of the exact diagonal.

    An entry is a mean of independent terms. The standard error is estimated from 40 groups of 100, so the ratio has
    Student's distribution with 39 degrees of freedom: P(|t| > 6) < 6e-7 an entry, under 2e-5 for all 31 of them.
    """
    metric, h = SAMPLED[name]
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, metric)
    exact = oracle.dense(problem.jacobian(), h(problem.outputs())).diagonal()
    mean = ng.Diagonal().estimate(pb).diagonal()
    squares = [f.rows().square().sum(1) for f in pb.collect()]  # [k p], packed
    packed = torch.empty(4000, pb.model.size, dtype=torch.float64)
    for block, part in zip(pb.blocks, squares, strict=True):
        block.unpack(part, packed)
    groups = packed.view(40, 100, -1).sum(1) * 40
    close(groups.mean(0), mean)
    error = groups.std(0) / 40**0.5
    assert bool(((mean - exact).abs() < 6 * error).all())
    assert bool((error < 0.1 * exact).all())


# The moving average over time


def test_average_is_corrected_for_its_start() -> None:
    case = golden("ema.bias_corrected")
    structure = ng.Refresh(ng.Diagonal(), decay=case["inputs"]["decay"])
    average = torch.zeros(2, dtype=torch.float64)
    corrected = []
    for step, value in enumerate(case["inputs"]["values"], start=1):
        average = torch.lerp(average, tensor(value), structure.weight(step))
        corrected.append(average)
    agrees(case, torch.stack(corrected), "corrected")
    raw = average * (1 - case["inputs"]["decay"] ** 3)
    agrees(case, raw, "raw_final")


anything = cast(Any, ng)  # calls that a type checker would refuse as well
REFUSED = [
    (lambda: ng.Refresh(ng.Dense(), every=0), ValueError, r"Refresh\(every=…\) must be at least 1, got 0"),
    (lambda: ng.Refresh(ng.Dense(), decay=1.5), ValueError, r"Refresh\(decay=…\) must be in \[0, 1\], got 1.5"),
    (lambda: ng.Refresh(ng.Dense(), decay=-0.1), ValueError, r"Refresh\(decay=…\) must be in \[0, 1\], got -0.1"),
    (lambda: anything.Refresh(ng.Dense), TypeError, r"natgrad Structure, got the class Dense: write Dense\("),
    (lambda: anything.Refresh("dense"), TypeError, "structure must be a natgrad Structure, got 'dense'"),
    (lambda: anything.Refresh(ng.CG()), TypeError, r"structure must be a natgrad Structure, got CG\("),
    (lambda: anything.Refresh(None), TypeError, "structure must be a natgrad Structure, got None"),
    (lambda: ng.Refresh(ng.Kernel(), decay=0.9), IncompatibleError, "does not work with Kernel.*Use decay=0"),
    (lambda: ng.Refresh(ng.Implicit(), decay=0.9), IncompatibleError, "does not work with Implicit"),
    (lambda: ng.Refresh(ng.Implicit(), every=2), IncompatibleError, "does not work with Implicit.*Use every=1"),
    (lambda: ng.LowRank(0), ValueError, r"LowRank\(rank\) needs a positive rank, got 0"),
    (lambda: anything.LowRank(2.5), ValueError, r"LowRank\(rank\) needs a positive rank, got 2.5"),
    (lambda: anything.Refresh(ng.Refresh(ng.Dense())), TypeError, r"natgrad Structure, got Refresh\("),
    (lambda: anything.Kronecker(fallback=ng.Refresh(ng.Dense())), TypeError, r"fallback must be a natgrad Structure"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_refusals_say_what_to_do(make: Callable[[], Structure], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


CHANGED = r"^the parameters 0\.weight were written to since pullback\(…\).*: call pullback again"


@pytest.mark.parametrize("structure", [*STRUCTURES, ng.Kronecker(), ng.EigenKronecker(), ng.Nystrom(3)], ids=repr)
def test_a_pullback_is_refused_after_its_parameters_have_changed(structure: Structure) -> None:
    """J there with h here is the metric of neither, also where only products are needed, or an average exists."""
    problem = zoo.case("mlp_tanh").make()
    metric, weight = ng.Fisher(ng.Poisson()), problem.module.get_parameter("0.weight")
    pb = pull(problem, metric)
    like = structure.estimate(pb)
    with torch.no_grad():
        weight.mul_(1.5)
    for average in (None, like):
        with pytest.raises(NatgradError, match=CHANGED):
            structure.estimate(pb, average)
    with pytest.raises(NatgradError, match=CHANGED):
        structure.absorb(pb, like, 0.5)
    G = oracle.dense(problem.jacobian(), oracle.poisson(problem.outputs()))
    close(ng.Dense().estimate(pull(problem, metric)).dense(), G)


def test_products_outlive_a_change_of_the_parameters_and_the_diagonal_does_not() -> None:
    problem = zoo.case("mlp_tanh").make()
    G = oracle.dense(problem.jacobian(), oracle.poisson(problem.outputs()))
    operator = ng.Implicit().estimate(pull(problem, ng.Fisher(ng.Poisson())))
    close(operator.diagonal(), G.diagonal())
    with torch.no_grad():
        problem.module.get_parameter("0.weight").mul_(1.5)
    close(operator.dense(), G)
    with pytest.raises(NatgradError, match=CHANGED):
        operator.diagonal()


class Embedded(nn.Module):
    """A model that writes to its own table in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, max_norm=1.0)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).tanh().mean(1))


@every_structure
def test_passes_trial_steps_and_gradients_do_not_change_the_parameters(structure: Structure) -> None:
    torch.manual_seed(0)
    model, x = Embedded().double(), torch.randint(5, (6, 4))
    model(x)  # shortens the rows of the table
    J, h = oracle.module_jacobian(model, x), oracle.euclidean(model(x))
    pb = ng.pullback(model, x, ng.Euclidean())
    first = structure.estimate(pb)
    trial = {name: 2 * p.detach() for name, p in model.named_parameters()}
    torch.func.functional_call(model, trial, (x,))
    model(x).sum().backward()
    model.zero_grad()
    close(structure.estimate(pb).dense(), first.dense(), 0.0)
    close(ng.Dense().estimate(pb).dense(), oracle.dense(J, h))


# Two types


class Doubled(nn.Module):
    """A layer with a rule, and a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.bend = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + (self.bend * y).sin()


INVERTED: dict[str, tuple[Structure, Solver]] = {
    "Dense": (ng.Dense(), ng.Cholesky()),
    "Dense, power": (ng.Dense(power=0.5), ng.Cholesky()),
    "Dense, range": (ng.Dense(), ng.Pinv()),
    "BlockDense": (ng.BlockDense(), ng.Cholesky()),
    "Diagonal": (ng.Diagonal(), ng.Cholesky()),
    "LowRank": (ng.LowRank(3), ng.Cholesky()),
    "Kernel": (ng.Kernel(), ng.Cholesky()),
    "Implicit": (ng.Implicit(), ng.CG()),
    "Kronecker": (ng.Kronecker(), ng.Cholesky()),
    "Kronecker, factors": (ng.Kronecker(), ng.Factored()),
    "EigenKronecker": (ng.EigenKronecker(), ng.Cholesky()),
    "the identity": (ng.Kronecker(power=0.0), ng.Cholesky()),
}


@pytest.mark.parametrize("name", INVERTED)
def test_flat_takes_vectors_and_sharp_takes_covectors(name: str) -> None:
    """And neither takes the other, a mapping, or an element over other parameters."""
    structure, solver = INVERTED[name]
    torch.manual_seed(0)
    model, x = Doubled().double(), torch.randn(7, 3, dtype=torch.float64)
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
    inverse = solver.init(G, 0.5)
    values = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    v, ω = ng.Vector(values), ng.Covector(values)
    assert type(G.flat(v)) is ng.Covector
    assert type(inverse.sharp(ω)) is ng.Vector
    flat, sharp, pairing = cast(Any, G.flat), cast(Any, inverse.sharp), cast(Any, inverse.sharp_with_pairing)
    with pytest.raises(
        TypeError, match=r"G.flat\(v\) takes a Vector \(a step\), not a Covector .*: natgrad.sharp\(G, ω\)"
    ):
        flat(ω)
    with pytest.raises(TypeError, match=r"takes a Vector \(a step\), not a dict: natgrad.Vector\(tensors\) makes one"):
        flat(values)
    for call in (sharp, pairing):
        with pytest.raises(TypeError, match=r"takes a Covector \(a gradient\), not a Vector .*: G.flat\(v\) makes"):
            call(v)
        with pytest.raises(TypeError, match=r"takes a Covector .*, not a Tensor: natgrad.Covector\(tensors\)"):
            call(values["bend"])
        with pytest.raises(ValueError, match=r"the metric is over \['bend', .*, and this is over \['bend'\]"):
            call(ng.Covector({"bend": values["bend"]}))
        with pytest.raises(ValueError, match=r"over bend of shape \(2,\), and this has \(1,\)"):
            call(ng.Covector({**values, "bend": values["bend"][:1]}))


def test_a_diagnosis_takes_a_covector() -> None:
    pb = pull(zoo.case("mlp_tanh").make(), ng.Euclidean())
    with pytest.raises(TypeError, match=r"diagnose\(pullback, ω\) takes a Covector .*, not a Vector"):
        ng.diagnose(pb, cast(Any, pb.template))
