"""The Sobolev metric in every structure: golden values, what a step does to the function, equal inputs, bad input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.functionspace import Median, SobolevKernel
from natgrad.model import Arguments
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.golden import agrees, golden, golden_mlp, names, tensor
from tests.pulled import close, normal, pull

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
def test_s4_the_golden_natural_gradient(structure: Structure) -> None:
    case = golden("sobolev.mlp.natgrad.ell1")
    model, x, t = golden_mlp()
    metric, λ = ng.Sobolev(jitter=0.0), case["inputs"]["damping"]
    v = ng.natural_gradient(model, x, lambda y: F.cross_entropy(y, t), metric, structure=structure, damping=λ)
    agrees(case, v.flatten(), "natgrad")


def test_s5_kronecker_factors_are_the_golden_ones_with_the_scale_that_25_misses() -> None:
    """A ∝ āᵀK⁻¹ā, S ∝ Σ_k Ds_kᵀK⁻¹Ds_k, and the trace is that of the block as far as it is without K (ERRATA 8)."""
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
def test_s4_where_k_is_one_the_metric_is_its_base(structure: Structure, base: ng.OutputMetric) -> None:
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


# What a step does to the function


@pytest.mark.parametrize("jitter", [0.0, 1e-6])
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel()], ids=repr)
def test_s3_one_undamped_sobolev_step_moves_the_training_outputs_by_minus_k_e(
    structure: Structure, jitter: float
) -> None:
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
