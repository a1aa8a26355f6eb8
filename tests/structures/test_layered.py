"""What the Kronecker structures have in common: couplings, averages, the other parameters, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast, final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError, MemoryBoundError, SingularMetricError, UncoveredError
from natgrad.model import Inputs
from natgrad.operators import EigenKroneckerOperator, KroneckerOperator, Operator
from natgrad.optim import natural_of_outputs
from natgrad.structures import Structure
from natgrad.structures.layered import Layered
from tests import oracle, zoo
from tests.golden import golden
from tests.pulled import Rooted, close, covered, normal, opaque, pull, random_roots

LAYERED: list[Layered] = [
    ng.Kronecker(),
    ng.Kronecker("reduce"),
    ng.EigenKronecker(),
    ng.EigenKronecker("reduce"),
    ng.Kronecker(largest=3),
    ng.EigenKronecker(largest=3),
    ng.EigenKronecker(fallback=ng.BlockDense()),
]
kinds = pytest.mark.parametrize("kind", [ng.Kronecker, ng.EigenKronecker])
every_structure = pytest.mark.parametrize("structure", LAYERED, ids=repr)
MODELS = ["mlp_tanh", "sequence", "layer_norm", "conv", "attention", "tied_weights", "frozen_weight", "called_twice"]
every_model = pytest.mark.parametrize("name", MODELS)


class Mixed(nn.Module):
    """A layer with a rule, and parameters without."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 2)
        self.mix = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] to [n 2]."""
        return opaque(torch.tanh(self.layer(opaque(x, self.scale.diag()))), self.mix)


def mixed() -> zoo.Problem:
    """The same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return zoo.Problem(Mixed().double(), normal(5, 3))


# The operators


@every_structure
@every_model
def test_operator_is_the_matrix_it_says(name: str, structure: Layered) -> None:
    """Products, diagonal, trace, determinant and inverses are those of ``dense()``."""
    problem = zoo.case(name).make()
    operator = structure.estimate(pull(problem, random_roots(problem)))
    G, v = operator.dense(), normal(operator.layout.size)
    close(G, G.T)
    close(operator.product(v), G @ v)
    close(operator.diagonal(), G.diagonal())
    close(operator.trace(), G.trace())
    close(operator.logdet(0.3), torch.logdet(G + 0.3 * torch.eye(len(G), dtype=G.dtype)))
    close(operator.inverse(0.3).solve(v), oracle.damped(G, v, 0.3))
    close(operator.pseudo_inverse(0.0, 1e-11, None).solve(G @ v), oracle.pinv(G, G @ v, 1e-11), 1e-4)


@every_structure
def test_operator_is_restored_from_its_tensors(structure: Layered) -> None:
    problem = mixed()
    pb = pull(problem, random_roots(problem))
    operator = structure.estimate(pb)
    again = structure.restore(pb.model, pb.layers, operator.tensors())
    assert again is not None
    close(again.dense(), operator.dense(), 0.0)
    inverse, v = operator.inverse(0.1), normal(pb.model.size)
    back = again.inverse_from(inverse.tensors())
    assert back is not None
    close(back.solve(v), inverse.solve(v), 0.0)
    assert again.inverse_from({}) is None


@every_structure
@every_model
def test_average_is_that_of_the_factors(name: str, structure: Layered) -> None:
    """Martens and Grosse (2015, section 5): A and S are averaged, each by itself."""
    first, second = two(structure, name)
    average = first.lerp(second, 0.3)
    old, new, mean = (cast(KroneckerOperator | EigenKroneckerOperator, o) for o in (first, second, average))
    for side in ("left", "right"):
        for a, b, c in zip(getattr(old, side), getattr(new, side), getattr(mean, side), strict=True):
            close(c, 0.7 * a + 0.3 * b)


@pytest.mark.parametrize("structure", LAYERED[:3], ids=repr)
def test_averages_over_time_are_corrected_for_their_start(structure: Layered) -> None:
    """With the golden decay every estimate has the weight β^{t−s}/Σ, the first one too."""
    case = golden("ema.bias_corrected")
    β = case["inputs"]["decay"]
    schedule = ng.Refresh(structure, decay=β)
    problem = zoo.case("mlp_tanh").make()
    estimates = []
    for seed in range(3):
        other = zoo.Problem(problem.model, normal(6, 3, seed=seed))
        estimates.append(cast(KroneckerOperator, structure.estimate(pull(other, random_roots(problem)))))
    average: Operator = estimates[0]
    for t, estimate in enumerate(estimates[1:], start=2):
        average = average.lerp(estimate, schedule.weight(t))
    weights = [β**2, β, 1.0]
    for b, got in enumerate(cast(KroneckerOperator, average).left):
        expected = sum(w * e.left[b] for w, e in zip(weights, estimates, strict=True)) / sum(weights)
        close(got, cast(Tensor, expected))


def two(structure: Layered, name: str) -> tuple[Operator, Operator]:
    """Estimates of one model at two batches."""
    problem = zoo.case(name).make()
    assert isinstance(problem.x, Tensor)
    other = zoo.Problem(problem.model, normal(*problem.x.shape, seed=5))
    s = random_roots(problem, 2)
    return structure.estimate(pull(problem, s)), structure.estimate(pull(other, s))


# Couplings


@final
@dataclass(frozen=True)
class Coupled(ng.OutputMetric):
    """A metric given by its root, with a coupling C."""

    base: Rooted
    C: Tensor

    @property
    def exact(self) -> bool:
        return False

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return self.base.flat(y, u, target)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.base.root(y, target, generator)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return self.base.divergence(y, y0, target)

    def coupling(self, x: Inputs, n: int) -> Tensor:
        return self.C


@every_structure
@every_model
def test_a_coupling_by_the_identity_is_no_coupling(name: str, structure: Layered) -> None:
    problem = zoo.case(name).make()
    metric = random_roots(problem)
    one = torch.eye(problem.n_examples, dtype=torch.float64)
    plain = structure.estimate(pull(problem, metric))
    # In one basis: the reduced cotangents of keys are zero, and eigenvectors of zero are any.
    coupled = structure.estimate(pull(problem, Coupled(metric, one)), plain)
    for key, t in plain.tensors().items():
        close(coupled.tensors()[key], t, 1e-12)


@every_structure
@every_model
def test_a_coupled_product_has_the_trace_as_far_as_an_uncoupled_one_has(name: str, structure: Layered) -> None:
    """Relative to C = 1, layer by layer. The corrected one has it exactly."""
    problem = zoo.case(name).make()
    metric = random_roots(problem)
    mix = normal(problem.n_examples, problem.n_examples, seed=4)
    C = mix @ mix.T
    coupled, plain = (structure.estimate(pull(problem, m)) for m in (Coupled(metric, C), metric))
    exact, exact_plain = (ng.Diagonal().estimate(pull(problem, m)).diagonal() for m in (Coupled(metric, C), metric))
    assert covered(pull(problem, metric))
    for block in cast(KroneckerOperator, plain).blocks:
        own = block.index.view(block.shape[0], -1)
        kept, kept_plain = coupled.diagonal()[own].sum(1), plain.diagonal()[own].sum(1)
        close(kept / exact[own].sum(1), kept_plain / exact_plain[own].sum(1), 1e-8)


@every_structure
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_a_bias_alone_keeps_its_covariance(n: int, structure: Layered) -> None:
    """Centred, its input 1 is zero, exactly or up to rounding: the metric is that of the cotangents all the same."""
    problem = zoo.Problem(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), normal(n, 3))
    problem.module.get_parameter("0.weight").requires_grad_(False)
    target = torch.zeros_like(problem.outputs())
    metric = ng.GradientCovariance(nn.functional.mse_loss)
    G = structure.estimate(pull(problem, metric, target)).dense()
    assert bool(G.isfinite().all())
    exact = ng.Dense().estimate(pull(problem, metric, target)).dense()
    close(G[:4, :4].trace(), exact[:4, :4].trace())
    if n == 1:
        close(G, torch.zeros_like(G))


# The parameters without a rule


@kinds
@pytest.mark.parametrize("fallback", [ng.Diagonal(), ng.BlockDense(), ng.Dense()], ids=repr)
def test_parameters_without_a_rule_are_kept_by_the_fallback(kind: Any, fallback: Structure) -> None:
    problem = mixed()
    pb = pull(problem, random_roots(problem))
    assert covered(pb) == {"layer.weight", "layer.bias"}
    G = kind(fallback=fallback).estimate(pb).dense()
    assert list(problem.parameters()) == ["scale", "mix", "layer.weight", "layer.bias"]
    expected = ng.Dense().estimate(pb).dense()[:7, :7]
    if isinstance(fallback, ng.Diagonal):
        expected = expected.diagonal().diag()
    close(G[:7, :7], expected)
    close(G[:7, 7:], torch.zeros(7, 8, dtype=torch.float64), 0.0)


@kinds
def test_a_large_factor_keeps_its_diagonal(kind: Any) -> None:
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, random_roots(problem))
    whole, cut = kind().estimate(pb), kind(largest=3).estimate(pb)
    assert [t.ndim for t in (*cut.left, *cut.right)] == [2, 3, 3, 2]
    close(cut.right[1], whole.right[1].diagonal(dim1=-2, dim2=-1))
    assert kind(largest=3).elements(pb) < kind().elements(pb)
    assert kind().elements(pb) == sum(t.numel() for t in whole.tensors().values())
    assert kind(largest=3).elements(pb) == sum(t.numel() for t in cut.tensors().values())


@kinds
def test_the_row_of_the_bias_does_not_make_a_factor_too_large(kind: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 4).double()
    pb = ng.pullback(model, x, ng.Euclidean())
    close(kind(largest=4).estimate(pb).dense(), kind().estimate(pb).dense(), 0.0)
    cut = kind(largest=3).estimate(pb)
    assert [t.ndim for t in (*cut.left, *cut.right)] == [2, 3, 2, 2]


@pytest.mark.parametrize(
    "preset",
    [
        lambda model: ng.KFAC(model, ng.Euclidean(), largest=3),
        lambda model: ng.EKFAC(model, ng.Euclidean(), largest=3),
        lambda model: ng.SobolevKFAC(model, ng.Euclidean(), largest=3),
        lambda model: natural_of_outputs(model, ng.Euclidean(), factors="whole", largest=3),
    ],
    ids=["KFAC", "EKFAC", "SobolevKFAC", "Natural"],
)
def test_the_limit_is_an_argument_of_every_preset(preset: Callable[[nn.Module], ng.NaturalGradient]) -> None:
    diagonals = preset(nn.Linear(4, 3)).plan().diagonals
    assert [of.removesuffix(" + bias") for of in diagonals] == ["A of weight"]


def test_a_plan_does_not_list_diagonals_where_there_is_nothing_else() -> None:
    assert "only the diagonal is kept of all factors" in str(natural_of_outputs(nn.Linear(4, 3), ng.Euclidean()).plan())
    some = ng.KFAC(nn.Linear(4, 3), ng.Euclidean(), largest=3)
    assert "only the diagonal is kept of A of weight" in str(some.plan())


# What is refused


anything = cast(Any, ng)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: anything.Kronecker("both"), ValueError, r'Kronecker\(sharing=…\) is "expand" or "reduce", not \'both\''),
    (lambda: anything.EigenKronecker("both"), ValueError, r'EigenKronecker\(sharing=…\) is "expand" or "reduce"'),
    (lambda: ng.Kronecker(fallback=ng.Kernel()), ValueError, r"cannot be averaged over time: use Diagonal\(\)"),
    (lambda: ng.EigenKronecker(fallback=ng.Implicit()), ValueError, r"EigenKronecker\(fallback=Implicit\(\)\) cannot"),
    (lambda: anything.Kronecker(fallback=None), TypeError, "fallback must be a natgrad Structure, got None"),
    (lambda: ng.EigenKronecker(largest=0), ValueError, r"EigenKronecker\(largest=…\) must be at least 1, got 0"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_wrong_choices_say_what_to_do(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@kinds
def test_refusals_name_the_parameters(kind: Any) -> None:
    pb = pull(mixed(), ng.Euclidean())
    with pytest.raises(
        UncoveredError,
        match=r"no layer rule covers scale, mix, and strict=True: they are read by .*\. Pass rules=\[…\]",
    ):
        kind(strict=True).estimate(pb)
    with pytest.raises(UncoveredError, match=r"no layer rule covers .*, and strict=True"):
        kind(strict=True).estimate(pull(zoo.opaque_parameters(), ng.Euclidean()))
    with pytest.raises(MemoryBoundError, match=rf"{kind.__name__} of 15 parameters needs \d+ bytes, over the bound"):
        kind().estimate(pull(mixed(), ng.Euclidean(), memory=8))
    weight = torch.eye(pb.model.size, dtype=torch.float64)
    with pytest.raises(IncompatibleError, match=r"Pinv\(weight=…\) does not work with \w+: .* no product of two"):
        kind().estimate(pb).pseudo_inverse(0.0, None, weight)
    with pytest.raises(IncompatibleError, match="a moving average joins operators of one kind"):
        kind().estimate(pb).lerp(ng.Dense().estimate(pb), 0.5)


@kinds
def test_averages_of_different_layers_are_refused_by_name(kind: Any) -> None:
    """A layer that is called past its module in one batch, and by it in another."""
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, ng.Euclidean())
    bare = [layer.without_rule() if "2.weight" in layer.names else layer for layer in pb.layers]
    old, new = kind().estimate(pb), kind().estimate(replace(pb, layers=bare))
    with pytest.raises(IncompatibleError, match=r"the layers of 2.bias, 2.weight were seen by their rule in one batch"):
        old.lerp(new, 0.5)


class Product(nn.Module):
    """x @ W without a layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Turned(nn.Module):
    """A layer that is called in one pass, and whose weights are read past it in another."""

    def __init__(self, layer: nn.Module, past: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.past, self.turned = layer, past, False

    def forward(self, x: Tensor) -> Tensor:
        if self.turned:
            return self.past(self.layer, x)
        return self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)


@kinds
@pytest.mark.parametrize(
    ("layer", "past"),
    [
        (nn.Linear(3, 3), lambda layer, x: x @ layer.weight + layer.bias),
        (Product(), lambda layer, x: x @ layer.weight.T),
        (nn.MultiheadAttention(3, 1, batch_first=True), lambda layer, x: (layer(x, x, x)[0].mul_(2) @ x.mT) @ x),
    ],
    ids=["product", "operations", "attention"],
)
def test_averages_of_layers_that_are_packed_otherwise_are_refused_by_name(kind: Any, layer: Any, past: Any) -> None:
    model, x = Turned(layer, past).double(), normal(4, 2, 3)
    old = kind().estimate(ng.pullback(model, x, ng.Euclidean()))
    model.turned = True
    new = kind().estimate(ng.pullback(model, x, ng.Euclidean()), old)
    with pytest.raises(IncompatibleError, match=r"the layers of layer.* were seen by their rule in one batch"):
        old.lerp(new, 0.5)


@kinds
def test_singular_metrics_are_refused_by_the_name_of_the_layer(kind: Any) -> None:
    problem = zoo.case("mlp_tanh").make()
    operator = kind().estimate(pull(problem, ng.Fisher(ng.Categorical(axis=-1))))
    with pytest.raises(SingularMetricError, match=r"2.weight \+ 2.bias"):
        operator.inverse(0.0)
    with pytest.raises(SingularMetricError, match=r"the block 2.weight \+ 2.bias of the metric is singular"):
        operator.logdet()


def test_many_parameters_without_a_rule_are_a_short_error() -> None:
    """Contrastive logits mix all examples: no parameter below has a rule, and a page of names helps nobody."""
    body = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))

    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            z = self.body(x)
            return z @ z.T

    match = r"covers body\.0\.weight, body\.0\.bias, body\.1\.weight and 7 more, and strict=True: behind them"
    with pytest.raises(UncoveredError, match=match):
        ng.Kronecker(strict=True).estimate(ng.pullback(Contrastive(), torch.randn(4, 3), ng.Euclidean()))
