"""The Sobolev metric in every structure: golden values, what a step does to the function, equal inputs, bad input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.functionspace import FunctionalGradientDescent, Median, SobolevKernel, TangentSpace
from natgrad.model import Arguments
from natgrad.output.metric import DerivedMetric
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.golden import agrees, golden, golden_mlp, names, tensor
from tests.pulled import Rooted, close, normal, pull

STRUCTURES: dict[str, Structure] = {
    "Dense": ng.Dense(),
    "BlockDense": ng.BlockDense(),
    "Diagonal": ng.Diagonal(),
    "Kernel": ng.Kernel(),
    "Implicit": ng.Implicit(),
    "LowRank": ng.LowRank(3),
    "Kronecker": ng.Kronecker(),
    "Kronecker reduce": ng.Kronecker("reduce"),
    "EigenKronecker": ng.EigenKronecker(),
}
every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
BASES: dict[str, ng.OutputMetric] = {
    "Euclidean": ng.Euclidean(),
    "Fisher": ng.Fisher(ng.Categorical()),
    "Bregman": ng.Bregman(lambda y: y.exp().sum()),
}
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def wide(n: int = 5) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network with more parameters than outputs at n points."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    return model, normal(n, 2), normal(n, 2, seed=1)


def mean_squares(t: Tensor) -> Callable[[Tensor], Tensor]:
    """½‖y − t‖², a mean over the examples."""
    return lambda y: (y - t).square().sum() / (2 * len(t))


def dense(model: nn.Module, x: Any, metric: ng.OutputMetric, structure: Structure | None = None) -> Tensor:
    """The matrix of an estimate."""
    return (structure or ng.Dense()).estimate(ng.pullback(model, x, metric)).dense()


# Golden values


@pytest.mark.parametrize("name", names("sobolev.gram."))
def test_the_coupling_is_the_golden_inverse_of_k(name: str) -> None:
    case = golden(name)
    x = tensor(case["inputs"]["X"])
    metric = ng.Sobolev(lengthscale=case["inputs"]["ell"], jitter=0.0)
    agrees(case, metric.gram(x, len(x)), "K")
    C = metric.coupling(x, len(x))
    assert C is not None
    agrees(case, C, "Kinv")


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel()], ids=repr)
def test_the_golden_natural_gradient(structure: Structure) -> None:
    case = golden("sobolev.mlp.natgrad.ell1")
    model, x, t = golden_mlp()
    metric, λ = ng.Sobolev(jitter=0.0), case["inputs"]["damping"]
    v = ng.natural_gradient(model, x, lambda y: F.cross_entropy(y, t), metric, structure=structure, damping=λ)
    agrees(case, v.flatten(), "natgrad")


def test_kronecker_factors_are_the_golden_ones_with_the_scale_that_25_misses() -> None:
    """A ∝ āᵀK⁻¹ā, S ∝ Σ_k Ds_kᵀK⁻¹Ds_k, and the trace is that of the block as far as it is without K."""
    case = golden("sobolev.mlp.kfac.ell1")["expected"]
    model, x, _ = golden_mlp()
    block = slice(0, 9)  # of the first layer, in flattening order: W row by row, then b
    coupled, plain = (
        dense(model, x, m, ng.Kronecker())[block, block] for m in (ng.Sobolev(jitter=0.0), ng.Euclidean())
    )
    A, S = tensor(case["A0"]), tensor(case["S1"])
    order = torch.cat([torch.arange(6).view(3, 2), torch.arange(6, 9)[:, None]], dim=1).flatten()  # o, then i with 1
    product = torch.kron(S.contiguous(), A.contiguous())
    close(coupled[order[:, None], order] / coupled.trace(), product / product.trace())
    exact, exact_plain = (dense(model, x, m)[block, block].trace() for m in (ng.Sobolev(jitter=0.0), ng.Euclidean()))
    close(coupled.trace() / exact, plain.trace() / exact_plain)
    true = dense(model, x, ng.Sobolev(jitter=0.0))[block, block] * len(x)
    printed = (product - true[order[:, None], order]).norm() / true.norm()
    close(printed, tensor(case["rel_err_printed"]), 1e-8)
    assert float((coupled * len(x) - true).norm() / true.norm()) < 0.5 * float(printed)


# K = 1


@every_base
@every_structure
def test_where_k_is_one_the_metric_is_its_base(structure: Structure, base: ng.OutputMetric) -> None:
    problem = zoo.case("mlp_tanh").make()
    apart = ng.Sobolev(base, lengthscale=1e-3)
    close(structure.estimate(pull(problem, apart)).dense(), structure.estimate(pull(problem, base)).dense(), 1e-12)


# The dense oracle, beyond what the table of all products has


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel(), ng.Implicit()], ids=repr)
def test_a_fisher_base_has_the_columns_of_the_hellinger_embedding(structure: Structure) -> None:
    problem = zoo.case("mlp_tanh").make()
    assert isinstance(problem.x, Tensor)
    C = oracle.sobolev_coupling(problem.x, 1.3, 1e-4)
    expected = oracle.dense_coupled(problem.jacobian(), oracle.hellinger_roots(problem.outputs()), C)
    metric = ng.Sobolev(ng.Fisher(ng.Categorical()), lengthscale=1.3, jitter=1e-4)
    close(structure.estimate(pull(problem, metric)).dense(), expected)


def test_a_sampled_base_has_one_probe_for_all_examples() -> None:
    y = torch.zeros(6, 3, dtype=torch.float64)  # the same outputs, hence the same root where the probe is the same
    for base in (ng.Sampled(ng.Euclidean(), 2), ng.Fisher(ng.Categorical(), samples=2)):
        s = ng.Sobolev(base).root(y, None, torch.Generator().manual_seed(0))
        assert s.shape == (2, 6, 3)
        close(s, s[:, :1].expand(2, 6, 3))
        assert not ng.Sobolev(base).exact


def test_the_median_rule_measures_every_batch() -> None:
    x = normal(6, 3)
    ℓ = float(Median(divisor=2.0).of(x))
    close(ng.Sobolev(lengthscale=Median(divisor=2.0)).gram(x, 6), ng.Sobolev(lengthscale=ℓ).gram(x, 6))


def test_more_data_is_never_less_metric() -> None:
    """The norm of the smallest function through more values is not less: (22) on a part of the data is biased low."""
    model, x, _ = wide(8)
    metric = ng.Sobolev(jitter=0.0)
    less, more = 5 * dense(model, x[:5], metric), 8 * dense(model, x, metric)
    assert float(torch.linalg.eigvalsh(more - less)[0]) > -1e-9 * float(more.trace())


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel()], ids=repr)
def test_points_without_targets_may_be_others_than_the_batch(structure: Structure) -> None:
    """θ ← θ − (JᵀK⁻¹J/N + λ)⁻¹∇L with J and K at N points, and the gradient of another batch."""
    model, x, t = wide()
    points, params = normal(9, 2, seed=2), {name: p.detach() for name, p in model.named_parameters()}
    columns = torch.func.jacrev(lambda θ: torch.func.functional_call(model, θ, (points,)))(params)
    J = torch.cat([columns[name].flatten(2) for name in params], 2)  # [9 2 p]
    r = torch.cdist(points, points)
    C = torch.linalg.inv((1 + r) * (-r).exp()) / 9
    opt = ng.NaturalGradient(model, ng.Sobolev(jitter=0.0), structure=structure, lr=1.0, damping=0.1)
    opt.refresh(points)
    mean_squares(t)(model(x)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    before = torch.cat([p.flatten() for p in params.values()]).clone()
    opt.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    G = torch.einsum("nap,nm,maq->pq", J, C, J)
    close(before - after, torch.linalg.solve(G + 0.1 * torch.eye(len(G), dtype=torch.float64), gradient), 1e-9)


# What a step does to the function


@pytest.mark.parametrize("jitter", [0.0, 1e-6])
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel()], ids=repr)
def test_one_undamped_sobolev_step_moves_the_training_outputs_by_minus_k_e(structure: Structure, jitter: float) -> None:
    model, x, t = wide()
    metric = ng.Sobolev(jitter=jitter)
    v = ng.natural_gradient(model, x, mean_squares(t), metric, structure=structure, solver=ng.Pinv(rtol=1e-10))
    e = (model(x) - t).detach()
    close(ng.pushforward(model, x, -v), -metric.gram(x, len(x)) @ e, 1e-8)
    close(metric.gram(x, len(x)), (SobolevKernel(1.5)(x) + jitter * torch.eye(5).double()) / (1 + jitter))


def test_implicit_with_cg_takes_the_same_damped_step() -> None:
    model, x, t = wide()
    options: dict[str, Any] = {"metric": ng.Sobolev(), "damping": 0.1}
    implicit, solver = ng.Implicit(), ng.CG(tol=1e-13, max_steps=500)
    v = ng.natural_gradient(model, x, mean_squares(t), structure=implicit, solver=solver, **options)
    close(v.flatten(), ng.natural_gradient(model, x, mean_squares(t), structure=ng.Dense(), **options).flatten(), 1e-9)


@pytest.mark.parametrize("make", [ng.KFAC, ng.EKFAC, ng.NaturalGradient])
def test_optimizers_take_the_kernel_from_the_models_own_input(make: Callable[..., Any]) -> None:
    """Steps −ηKe need η < 2/λ_max(K), as descent in the space of functions does."""
    model, x, t = wide(16)
    metric = ng.Sobolev(lengthscale=Median())
    opt = make(model, metric, lr=1 / float(torch.linalg.eigvalsh(metric.gram(x, 16))[-1]), damping=0.01)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        loss = mean_squares(t)(model(x))
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    assert losses == sorted(losses, reverse=True)


# Equal inputs, and one input


@every_structure
def test_copies_count_once_and_one_example_has_the_metric_of_the_base(structure: Structure) -> None:
    model, x, _ = wide(1)
    one = dense(model, x, ng.Euclidean(), structure)
    close(dense(model, x, ng.Sobolev(), structure), one, 1e-12)
    copies = dense(model, x.expand(6, 2).contiguous(), ng.Sobolev(), structure)
    assert bool(copies.isfinite().all())
    close(6 * copies, one, 1e-5)


def test_a_copy_adds_nothing() -> None:
    model, x, _ = wide()
    more = 6 * dense(model, torch.cat([x, x[:1]]), ng.Sobolev(jitter=1e-10))
    close(more, 5 * dense(model, x, ng.Sobolev(jitter=0.0)), 1e-6)


@every_structure
def test_close_inputs_do_not_cancel_in_single_precision(structure: Structure) -> None:
    """K has the condition 10⁵ and more: K⁻¹ and its products are never rounded to float32."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), normal(24, 2).float() / 8
    metric = ng.Sobolev(lengthscale=3.0)
    assert float(torch.linalg.cond(metric.gram(x, 24))) > 1e5
    single = dense(model, x, metric, structure).double()
    exact = dense(model.double(), x.double(), metric, structure)
    tolerance = 2e-2 if isinstance(structure, ng.EigenKronecker) else 2e-3
    assert float((single - exact).norm()) < tolerance * float(exact.norm())


# Inputs that are not points


def test_features_are_called_as_the_model_is() -> None:
    class Words(nn.Module):
        """A table of words, and one number an example beside them."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 3), nn.Linear(4, 2)

        def forward(self, words: Tensor, *, side: Tensor) -> Tensor:
            return self.head(torch.cat([self.table(words).mean(1), side], 1))

    torch.manual_seed(0)
    model, words, side = Words().double(), torch.randint(7, (5, 4)), normal(5, 1)
    metric = ng.Sobolev(features=lambda words, side: torch.cat([model.table(words).flatten(1), side], 1))
    expected = ng.Sobolev().gram(torch.cat([model.table(words).flatten(1), side], 1), 5)
    close(metric.gram(Arguments((words,), {"side": side}), 5), expected)
    assert not expected.requires_grad
    opt = ng.NaturalGradient(model, metric, damping=0.1)
    model(words, side=side).square().mean().backward()
    opt.step()
    tokens = ng.Sobolev(features=lambda w: F.one_hot(w, 7).double())
    close(tokens.gram(words, 5), ng.Sobolev().gram(F.one_hot(words, 7).double(), 5))


def test_one_keyword_input_is_the_point() -> None:
    x = normal(4, 3)
    close(ng.Sobolev().gram({"x": x}, 4), ng.Sobolev().gram(x, 4))
    close(ng.Sobolev().gram((x,), 4), ng.Sobolev().gram(x, 4))


# Equal inputs under the Sobolev metric: however many copies of a point there are, they count as one.


EXACT = ("Dense", "BlockDense", "Diagonal", "Kernel", "Implicit")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
types = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def estimated(name: str, x: Tensor, metric: ng.OutputMetric) -> Tensor:
    """The matrix of an estimate of the network, times the number of examples."""
    return len(x) * STRUCTURES[name].estimate(ng.pullback(network(x.dtype), x, metric)).dense().double()


def alike(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((got - expected).norm()) < tolerance * float(expected.norm())


def check_copies(name: str, n: int, jitter: float, dtype: torch.dtype) -> None:
    """n copies of a point have the metric of the point, and of two clusters that of two points; up to the jitter."""
    x = normal(2, 5).to(dtype)
    metric, exact = ng.Sobolev(jitter=jitter), ng.Sobolev(jitter=0.0)
    # A trace of pairs has nearly λ_max/λ of rounding, and that of n copies is n/jitter, where that is not cut.
    lost = 16 * n / jitter * torch.finfo(torch.float64).eps if jitter > n * 1e-12 and "Kronecker" in name else 0.0
    tolerance = TOLERANCE[dtype] + 2 * jitter + lost
    alike(estimated(name, x[:1].repeat(n, 1), metric), estimated(name, x[:1], ng.Euclidean()), tolerance)
    if name in EXACT:
        alike(estimated(name, x[torch.arange(n) % 2], metric), estimated(name, x, exact), tolerance)


# The coupling itself


@pytest.mark.parametrize("n", [2, 513, 1024])
def test_the_inverse_of_the_matrix_of_equal_points_is_one_over_n_squared(n: int) -> None:
    C = ng.Sobolev(jitter=0.0).coupling(normal(1, 5).repeat(n, 1), n)
    assert float((C * n**2 - 1).abs().max()) < 1e-10


@pytest.mark.parametrize("n", [513, 1024])
def test_the_inverse_of_the_matrix_of_clusters_spreads_that_of_their_points(n: int) -> None:
    """K = E K' Eᵀ for E [n c] of copies has K⁺ = E D⁻¹ K'⁻¹ D⁻¹ Eᵀ, with their numbers in D."""
    x, cluster = normal(3, 3), torch.arange(n).square() % 7 % 4  # 0, 1 and 2, of different sizes
    inverse = torch.linalg.inv(ng.Sobolev(jitter=0.0).gram(x, 3))
    counts = torch.bincount(cluster).double()
    expected = (inverse / counts / counts[:, None])[cluster][:, cluster]
    alike(ng.Sobolev(jitter=0.0).coupling(x[cluster], n), expected, 1e-11)


@pytest.mark.parametrize("jitter", [1e-10, 1e-8, 1e-6])
@pytest.mark.parametrize("n", [2, 256, 1024])
def test_constants_have_the_norm_of_one_point_at_every_jitter(n: int, jitter: float) -> None:
    coupled = ng.Sobolev(jitter=jitter).coupled(normal(1, 5).repeat(n, 1), n)
    assert coupled.L is not None
    assert abs(float(coupled.L.sum(0).square().sum()) - 1) < 1e-10 + 2 * jitter


# The metric of a network


@types
@pytest.mark.parametrize("jitter", [0.0, 1e-12, 1e-10, 1e-8, 1e-6])
@pytest.mark.parametrize("n", [2, 64])
@pytest.mark.parametrize("name", STRUCTURES)
def test_copies_count_once(name: str, n: int, jitter: float, dtype: torch.dtype) -> None:
    check_copies(name, n, jitter, dtype)


@pytest.mark.parametrize(
    ("name", "n", "jitter", "dtype"),
    [
        ("Dense", 1024, 0.0, torch.float32),
        ("Dense", 1024, 1e-8, torch.float32),
        ("Diagonal", 768, 1e-6, torch.float32),
        ("Kernel", 513, 0.0, torch.float32),
        ("Kernel", 768, 1e-8, torch.float64),
        ("Implicit", 1024, 1e-10, torch.float64),
        ("Implicit", 768, 1e-8, torch.float32),
        ("Kronecker", 1024, 0.0, torch.float32),
        ("Kronecker", 1024, 1e-10, torch.float64),
        ("Kronecker reduce", 2048, 1e-6, torch.float32),
        ("EigenKronecker", 768, 1e-10, torch.float32),
        ("EigenKronecker", 1024, 0.0, torch.float64),
    ],
)
def test_many_copies_count_once(name: str, n: int, jitter: float, dtype: torch.dtype) -> None:
    check_copies(name, n, jitter, dtype)


@types
def test_a_step_on_copies_is_that_on_one_point(dtype: torch.dtype) -> None:
    """Of a mean loss, and a metric that is 1/n of that of the point; so is the damping."""
    x, model = normal(1, 5).to(dtype), network(dtype)

    def step(x: Tensor, metric: ng.OutputMetric, structure: Structure) -> Tensor:
        def loss(y: Tensor) -> Tensor:
            return y.square().sum() / len(x) ** 2

        v = ng.natural_gradient(model, x, loss, metric, structure=structure, damping=0.1 / len(x))
        return v.flatten().double()

    for structure in (ng.Dense(), ng.Kernel(), ng.Kronecker()):
        copies = step(x.repeat(600, 1), ng.Sobolev(jitter=0.0), structure)
        alike(copies, step(x, ng.Euclidean(), structure), TOLERANCE[dtype])


# What becomes of the metric where the kernel is multiplied by a number.


@final
@dataclass(frozen=True)
class Scaled(DerivedMetric):
    """The Sobolev metric of the kernel c·k."""

    c: float
    base: ng.OutputMetric = field(default_factory=ng.Euclidean)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.base.shared_root(y, target, generator)

    def coupling(self, x: Any, n: int) -> Tensor:
        return ng.Sobolev(jitter=0.0).coupling(x, n) / self.c


def rescaled(structure: Structure, c: float) -> Tensor:
    model, x, _ = golden_mlp()
    return structure.estimate(ng.pullback(model, x, Scaled(c))).dense()


def printed(c: float) -> Tensor:
    """(Σ C a aᵀ) ⊗ (Σ C Ds Dsᵀ) of the first layer, as (25) has it."""
    model, x, _ = golden_mlp()
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    C = Scaled(c).coupling(x, len(x))
    a = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)[:, None]
    s = (last.weight * (1 - first(x).tanh().square())[:, None]).detach()  # ∂y/∂z [n o d]
    A, S = (torch.einsum("nm,nki,mkj->ij", C, rows, rows) for rows in (a, s))
    return torch.kron(A.contiguous(), S.contiguous())


def test_a_kernel_times_c_divides_the_metric_by_c_and_the_printed_product_by_its_square() -> None:
    """(22) and its factors, scaled by traces, follow the kernel; A ⊗ S as (25) prints it is off by one more 1/c."""
    case = golden("sobolev.kernel_scale_law")
    c, factor = case["inputs"]["c"], case["expected"]["metric_factor"]
    for structure in (ng.Dense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker()):
        close(rescaled(structure, c), factor * rescaled(structure, 1.0))
        agrees(
            case,
            rescaled(structure, c).trace() / rescaled(structure, 1.0).trace(),
            "metric_factor",
        )
    agrees(case, printed(c).trace() / printed(1.0).trace(), "printed_kfac_factor")


# What the Sobolev metric refuses: each by name, with what to do.


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nu": (lambda: ng.Sobolev(nu=0.0), ValueError, r"nu=0.0 must be positive and finite"),
    "nu not a number": (lambda: ng.Sobolev(nu="3/2"), TypeError, r"smoothness is a real number"),  # type: ignore[arg-type]
    "lengthscale": (lambda: ng.Sobolev(lengthscale=-1.0), ValueError, r"lengthscale=-1 must be positive"),
    "jitter": (lambda: ng.Sobolev(jitter=-1e-6), ValueError, r"jitter=-1e-06 must be finite and not negative"),
    "jitter nan": (lambda: ng.Sobolev(jitter=float("nan")), ValueError, r"jitter=nan must be finite"),
    "jitter bool": (lambda: ng.Sobolev(jitter=True), TypeError, r"jitter=True: give a number"),
    "no metric": (lambda: ng.Sobolev(1.5), TypeError, r"base is a metric on the outputs"),  # type: ignore[arg-type]
    "twice": (lambda: ng.Sobolev(ng.Sobolev()), ValueError, r"would couple the examples twice"),
    "coupled base": (
        lambda: ng.Sobolev(ng.GradientCovariance(F.mse_loss)).coupling(normal(3, 2), 3),
        ValueError,
        r"GradientCovariance.* couples the examples itself",
    ),
    "sampled outside": (
        lambda: ng.pullback(nn.Linear(2, 1), torch.ones(3, 2), ng.Sampled(ng.Sobolev())),
        ValueError,
        r"independent samples would erase the coupling",
    ),
    "tokens": (
        lambda: ng.pullback(nn.Embedding(5, 2), torch.tensor([1, 3]), ng.Sobolev()),
        TypeError,
        r"the inputs are torch.int64, which are no points in R\^d.*Pass features=",
    ),
    "several inputs": (
        lambda: ng.pullback(nn.Bilinear(2, 2, 1), (torch.ones(3, 2), torch.ones(3, 2)), ng.Sobolev()),
        TypeError,
        r"the inputs are tuple, which are no points.*Pass features=",
    ),
    "features of tokens": (
        lambda: ng.Sobolev(features=lambda x: x).coupling(torch.tensor([1, 3]), 2),
        TypeError,
        r"features= returned torch.int64, which are no points",
    ),
    "points": (
        lambda: ng.Sobolev(features=lambda x: x[:2]).coupling(normal(3, 2), 3),
        ValueError,
        r"found 2 points in the inputs of 3 examples.*Pass features=",
    ),
    "not finite": (
        lambda: ng.Sobolev().coupling(torch.tensor([[0.0], [torch.nan]]), 2),
        NonFiniteError,
        r"the tensor of points of the Sobolev metric holds NaN",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_and_what_to_do(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


def test_samples_of_a_metric_that_shares_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)Rooted.* is sampled, an example at a time.*Sampled\(metric, samples\)"):
        ng.Sobolev(Rooted(normal(1, 3, 2))).root(normal(3, 2))


# Bad input to kernels, metrics, tangent spaces and descent in spaces of functions: an error, or the exact answer.


KERNEL = SobolevKernel(1.5)
TOKENS = torch.tensor([[1, 2], [0, 3]])
Make = Callable[[], Any]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1).double()


def squares(y: Tensor, t: Tensor) -> Tensor:
    """½‖y − t‖²."""
    return (y - t).square().sum() / 2


def total(y: Tensor) -> Tensor:
    """½‖y‖²."""
    return y.square().sum() / 2


def descent(kernel: Any = KERNEL, **options: Any) -> FunctionalGradientDescent:
    return FunctionalGradientDescent(kernel, squares, **{"step": 0.1, "passes": 3, **options})


def users(kernel: Any, x: Any) -> dict[str, Make]:
    """All that a kernel of inputs is used for, two targets given."""
    t = torch.zeros(2, 1, dtype=torch.float64)
    return {
        "kernel": lambda: kernel(x),
        "tangent space": lambda: TangentSpace.of(lambda p, x: p["w"] * torch.ones(len(x), 1), x, kernel, {"w": t[0]}),
        "fit": lambda: descent(kernel).fit(x, t),
        "fit by batches": lambda: descent(kernel, batch=1).fit(x, t),
        "partial_fit": lambda: descent(kernel).partial_fit(x, t),
    }


# Smoothness, lengthscale, features


@pytest.mark.parametrize("make", [SobolevKernel, lambda nu: ng.Sobolev(nu=nu)], ids=["kernel", "metric"])
@pytest.mark.parametrize("nu", [0.0, -1.5, float("nan"), float("inf")])
def test_a_smoothness_that_is_not_positive_is_refused(make: Callable[[float], Any], nu: float) -> None:
    with pytest.raises(ValueError, match=r"nu=.* must be positive and finite: .* only for ν > 0"):
        make(nu)


def scales(value: Any) -> dict[str, Make]:
    return {
        "kernel": lambda: SobolevKernel(1.5, value),
        "metric": lambda: ng.Sobolev(lengthscale=value),
        "optimizer": lambda: ng.SobolevKFAC(linear(), ng.Euclidean(), lengthscale=value),
    }


@pytest.mark.parametrize("make", ["kernel", "metric", "optimizer"])
@pytest.mark.parametrize("value", [0.0, -20.0, float("nan"), torch.tensor(-1.0)], ids=repr)
def test_a_lengthscale_that_is_not_positive_is_refused(make: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"lengthscale=.* must be positive and finite: distances are divided by it"):
        scales(value)[make]()
    with pytest.raises(TypeError, match=r"lengthscale='20': give a positive number, or a rule such as Median\(\)"):
        scales("20")[make]()


@pytest.mark.parametrize("make", [lambda f: SobolevKernel(1.5, features=f), lambda f: ng.Sobolev(features=f)])
def test_features_that_are_no_function_are_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"features=3: give a function that maps the inputs to points"):
        make(3)


@pytest.mark.parametrize("make", [descent, lambda k: TangentSpace.of(linear(), normal(2, 2), k)])
def test_what_is_no_kernel_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"kernel must be a natgrad ReproducingKernel, got 1.5"):
        make(1.5)


# Inputs that are not points


@pytest.mark.parametrize("name", users(KERNEL, TOKENS))
def test_tokens_are_no_points_and_features_are_asked_for(name: str) -> None:
    with pytest.raises(TypeError, match=r"the inputs are torch.int64, which are no points in R\^d.*Pass features="):
        users(KERNEL, TOKENS)[name]()
    words = SobolevKernel(1.5, features=lambda token: torch.eye(4, dtype=torch.float64)[token])
    users(words, TOKENS)[name]()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["tangent space", "fit", "fit by batches", "partial_fit"])
def test_points_that_are_not_finite_are_refused(name: str, value: float) -> None:
    x = torch.tensor([[0.0, 1.0], [value, 0.0]], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match=r"(the tensor of inputs|Gram matrix of the kernel) holds NaN"):
        users(KERNEL, x)[name]()


@pytest.mark.parametrize("name", ["fit", "fit by batches", "partial_fit"])
def test_targets_that_are_not_finite_are_refused(name: str) -> None:
    x, t = normal(2, 2), torch.tensor([0.0, torch.nan], dtype=torch.float64)
    step = descent(batch=1 if "batches" in name else None)
    with pytest.raises(NonFiniteError, match="the tensor of targets holds NaN"):
        (step.partial_fit if name == "partial_fit" else step.fit)(x, t)


def test_a_kernel_is_nan_at_a_point_that_is() -> None:
    """It is a function of numbers: what uses it looks at them."""
    K = KERNEL(torch.tensor([[0.0], [torch.nan]]))
    assert K.isnan().tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("metric", [ng.Sobolev(), ng.Sobolev(jitter=0.0), ng.Sobolev(lengthscale=Median())], ids=repr)
def test_a_batch_that_is_not_finite_has_no_metric(metric: ng.Sobolev) -> None:
    x = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="the tensor of points of the Sobolev metric holds NaN"):
        metric.coupling(x, 2)


# Numbers of examples


def test_numbers_of_examples_that_do_not_match_are_refused() -> None:
    x, t = normal(3, 2), normal(2)
    for fit in (descent().fit, descent().partial_fit):
        with pytest.raises(ValueError, match=r"inputs \(3, 2\) and targets \(2,\): they need the same number"):
            fit(x, t)
        with pytest.raises(ValueError, match=r"inputs \(0, 2\) and targets \(0,\): .* at least one"):
            fit(x[:0], t[:0])
    twice = lambda x: torch.cat([x, x])  # noqa: E731
    with pytest.raises(ValueError, match=r"the kernel sees 6 inputs and the model has 3 outputs"):
        TangentSpace.of(linear(), x, SobolevKernel(1.5, features=twice))
    with pytest.raises(ValueError, match=r"found 6 points in the inputs of 3 examples.*Pass features="):
        ng.pullback(linear(), x, ng.Sobolev(features=twice))
    with pytest.raises(ValueError, match=r"points in R\^2 and in R\^3"):
        KERNEL(normal(3, 2), normal(3, 3))


# One input, equal inputs, inputs that K cannot tell apart: the exact answer


@pytest.mark.parametrize("jitter", [0.0, 1e-6])
def test_one_example_has_kernel_one_and_the_step_of_gauss_and_newton(jitter: float) -> None:
    model, x = linear(), normal(1, 2)
    metric = ng.Sobolev(jitter=jitter, lengthscale=Median())
    close(metric.coupling(x, 1), torch.ones(1, 1, dtype=torch.float64))
    for structure in (ng.Dense(), ng.Kernel()):
        v = ng.natural_gradient(model, x, total, metric, structure=structure, damping=0.1)
        gauss_newton = ng.natural_gradient(model, x, total, ng.Euclidean(), structure=structure, damping=0.1)
        close(v.flatten(), gauss_newton.flatten(), 1e-12)
    close(TangentSpace.of(model, x, KERNEL).natural_gradient(total, 0.1).flatten(), gauss_newton.flatten(), 1e-12)
    once = descent(step=0.25, passes=1).fit(x, torch.ones(1, dtype=torch.float64))
    close(once.predict(x), torch.tensor([0.25], dtype=torch.float64))


def test_a_batch_of_copies_is_one_example() -> None:
    model, x = linear(), normal(1, 2)
    copies = x.expand(6, 2).contiguous()
    alone = ng.natural_gradient(model, x, total, ng.Euclidean(), structure=ng.Dense(), damping=0.6).flatten()
    metric = ng.Sobolev(jitter=0.0, lengthscale=Median())
    close(6 * ng.Dense().estimate(ng.pullback(model, copies, metric)).dense(), outer(model, x))
    for structure in (ng.Dense(), ng.Kernel()):  # a mean metric and a mean loss: 1/6 of both, and of the damping
        v = ng.natural_gradient(model, copies, lambda y: total(y) / 36, metric, structure=structure, damping=0.1)
        close(v.flatten(), alone, 1e-10)
    w = TangentSpace.of(model, copies, KERNEL).natural_gradient(lambda y: total(y) / 6, 0.6)
    close(w.flatten(), alone, 1e-10)
    fitted = descent(passes=400).fit(copies, torch.arange(6.0, dtype=torch.float64))
    close(fitted.predict(x), torch.tensor([2.5], dtype=torch.float64))  # the mean is all that one point can have


def outer(model: nn.Linear, x: Tensor) -> Tensor:
    """J Jᵀ of a linear model with one output at one point."""
    row = torch.cat([x[0], torch.ones(1, dtype=x.dtype)])
    return torch.outer(row, row)


@pytest.mark.parametrize(("nu", "lengthscale"), [(1.5, 1e5), (4.5, 1e3), (40.0, 30.0)])
def test_what_is_too_rough_for_a_singular_k_hardly_moves(nu: float, lengthscale: float) -> None:
    """Inputs so close beside ℓ that K is singular in float64, though no two are equal: the limit of small jitters.

    A smaller jitter is nearer to it, until it is below the rounding of K, and none.
    """
    torch.manual_seed(0)
    x, model = normal(12, 1), nn.Sequential(nn.Linear(1, 60), nn.Tanh(), nn.Linear(60, 1)).double()
    metrics = [ng.Sobolev(nu=nu, lengthscale=lengthscale, jitter=jitter) for jitter in (1e-9, 1e-10, 1e-14, 0.0)]
    values = torch.linalg.eigvalsh(metrics[-1].gram(x, 12))
    assert 1 < int((values > 4096 * torch.finfo(torch.float64).eps * values[-1]).sum()) < 12
    for structure in (ng.Kernel(), ng.Dense()):
        small, smaller, less, none = (
            ng.natural_gradient(model, x, lambda y: total(y) / 12, metric, structure=structure, damping=1e-3).flatten()
            for metric in metrics
        )
        assert torch.equal(less, none)
        far, near = (float((v - none).norm() / none.norm()) for v in (small, smaller))
        assert near < far < 0.1


def test_the_coupling_of_a_singular_k_is_its_inverse_up_to_rounding_and_no_less_beyond() -> None:
    x, metric = normal(8, 1), ng.Sobolev(nu=4.5, lengthscale=1e3, jitter=0.0)
    values, vectors = torch.linalg.eigh(metric.gram(x, 8))
    rounding = 4096 * torch.finfo(torch.float64).eps * values[-1]
    C = vectors.T @ metric.coupling(x, 8) @ vectors
    seen = values > 10 * rounding
    close(
        C[seen][:, seen] * values[seen].sqrt() * values[seen].sqrt()[:, None],
        torch.eye(int(seen.sum()), dtype=torch.float64),
        1e-2,
    )
    assert float(torch.linalg.eigvalsh(C[~seen][:, ~seen])[0]) > 0.05 / float(rounding)


def test_the_jitter_makes_any_k_regular() -> None:
    x = torch.ones(5, 2, dtype=torch.float64)
    K = ng.Sobolev(jitter=1e-6).gram(x, 5)
    close(ng.Sobolev(jitter=1e-6).coupling(x, 5) @ K, torch.eye(5, dtype=torch.float64), 1e-8)
