"""Every output metric is its textbook matrix: as a root, as ♭, and as the Hessian of its divergence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import SingularMetricError
from natgrad.families import FromDistribution
from natgrad.log import OnceLogger
from natgrad.output import hessian
from tests import oracle
from tests.output import textbook
from tests.output.distributions import Quadratic, beta, dirichlet, gamma, laplace, mixture, weibull
from tests.output.table import CLASSES, COUNTS, METRICS, POINTS, SEQUENCES, Case, close, normal, outer, tokens

_hessian: Callable[..., Tensor] = torch.autograd.functional.hessian
_block_diag: Callable[..., Tensor] = torch.block_diag

every_metric = pytest.mark.parametrize("case", METRICS, ids=lambda case: case.name)


@every_metric
def test_the_outer_products_of_the_root_sum_to_the_textbook_matrix(case: Case) -> None:
    s = case.metric.root(case.y, case.target)
    assert case.metric.exact
    assert s.shape[1:] == case.y.shape
    close(outer(s), case.h(case.y), case.tol)


@every_metric
def test_flat_multiplies_by_the_textbook_matrix(case: Case) -> None:
    u = normal(*case.y.shape, seed=1)
    hu = case.metric.flat(case.y, u, case.target)
    assert hu.shape == case.y.shape
    close(hu.reshape(len(u), -1), torch.einsum("nde,ne->nd", case.h(case.y), u.reshape(len(u), -1)), case.tol)


@every_metric
def test_the_metric_is_the_hessian_of_its_divergence(case: Case) -> None:
    """All examples at once: the blocks between different examples vanish."""
    D = case.y.numel()
    H = _hessian(lambda y: case.metric.divergence(y, case.y, case.target).sum(), case.y)
    close(H.reshape(D, D), _block_diag(*case.h(case.y)), case.tol)


@every_metric
def test_the_divergence_is_zero_with_zero_gradient_and_positive_nearby(case: Case) -> None:
    leaf = case.y.clone().requires_grad_()
    ρ = case.metric.divergence(leaf, case.y, case.target)
    (slope,) = torch.autograd.grad(ρ.sum(), leaf)
    close(ρ.detach(), torch.zeros(len(leaf), dtype=torch.float64), 1e-12)
    close(slope, torch.zeros_like(slope), 1e-12)
    for seed in range(5):
        for size in (0.3, 0.03):
            away = case.metric.divergence(case.y + size * normal(*case.y.shape, seed=seed), case.y, case.target)
            assert away.shape == (len(case.y),)
            assert bool((away > -1e-14).all())
            assert float(away.sum()) > 0


@every_metric
def test_the_metric_keeps_the_dtype_and_leaves_no_graph(case: Case) -> None:
    y = case.y.float()
    floating = isinstance(case.target, Tensor) and case.target.is_floating_point()
    target = case.target.float() if floating else case.target
    s = case.metric.root(y, target)
    assert s.dtype == torch.float32
    assert not s.requires_grad
    assert case.metric.flat(y, torch.ones_like(y), target).dtype == torch.float32
    assert case.metric.divergence(y, y, target).dtype == torch.float32
    close(outer(s).double(), case.h(case.y), 1e-4)


@every_metric
def test_flat_is_differentiable_in_the_point(case: Case) -> None:
    """Geodesics differentiate h(y): central differences along w, with their error of order ε²."""
    u, w, ε = normal(*case.y.shape, seed=1), 0.3 * normal(*case.y.shape, seed=2), 1e-4

    def along(y: Tensor) -> Tensor:
        return torch.einsum("nd,nde,ne->", u.reshape(len(u), -1), case.h(y), u.reshape(len(u), -1))

    leaf = case.y.clone().requires_grad_()
    energy = (case.metric.flat(leaf, u, case.target) * u).sum()
    slope = torch.autograd.grad(energy, leaf, materialize_grads=True)[0] if energy.requires_grad else 0 * leaf
    close((slope * w).sum().detach(), (along(case.y + ε * w) - along(case.y - ε * w)) / (2 * ε), 1e-5)


def test_the_categorical_metric_is_singular_along_the_constant_vector() -> None:
    y = normal(3, 4)
    close(ng.Fisher(ng.Categorical()).flat(y, torch.ones_like(y)), torch.zeros_like(y), 1e-15)
    s = ng.Fisher(ng.Categorical()).root(y)
    close(s.sum(-1), torch.zeros(4, 3, dtype=torch.float64), 1e-15)
    assert torch.linalg.matrix_rank(outer(s), rtol=1e-12).tolist() == [3, 3, 3]


def test_the_columns_of_the_categorical_root_are_the_hellinger_embedding() -> None:
    y = normal(3, 4)
    close(ng.Fisher(ng.Categorical()).root(y), oracle.hellinger_roots(y), 1e-12)
    close(ng.Euclidean().root(y), oracle.euclidean_roots(y), 0.0)


def test_roots_of_extreme_outputs_are_finite() -> None:
    y = torch.tensor([[800.0, -800.0], [0.0, 800.0]], dtype=torch.float64)
    for family in (ng.Categorical(), ng.Bernoulli()):
        metric = ng.Fisher(family)
        assert bool(metric.root(y).isfinite().all())
        assert bool(metric.flat(y, torch.ones_like(y)).isfinite().all())
        assert bool(metric.divergence(y + 1, y).isfinite().all())


# The covariance of the training gradients couples the examples

covariance = ng.GradientCovariance(F.cross_entropy)
Y, U = normal(4, 3), normal(4, 3, seed=1)


def gradients() -> Tensor:
    """∇ℓ_n [n D] = softmax(y_n) − e_t."""
    return torch.softmax(Y, 1) - torch.eye(3, dtype=torch.float64)[CLASSES]


def coupled() -> Tensor:
    """h [n D m E] = g_n (1 − 11ᵀ/N)_nm g_mᵀ."""
    C = torch.eye(4, dtype=torch.float64) - 0.25
    return torch.einsum("nd,nm,me->ndme", gradients(), C, gradients())


def test_the_gradient_covariance_is_the_empirical_metric_with_the_centring_matrix() -> None:
    C = covariance.coupling(None, 4)
    assert C is not None
    close(C, torch.eye(4, dtype=torch.float64) - 0.25, 1e-15)
    close(torch.einsum("knd,nm,kme->ndme", covariance.root(Y, CLASSES), C, covariance.root(Y, CLASSES)), coupled())
    close(covariance.flat(Y, U, CLASSES), torch.einsum("ndme,me->nd", coupled(), U))


def test_the_gradient_covariance_is_the_hessian_of_its_divergence_summed_over_the_batch() -> None:
    H = _hessian(lambda y: covariance.divergence(y, Y, CLASSES).sum(), Y)
    close(H.reshape(4, 3, 4, 3), coupled())
    close(covariance.divergence(Y, Y, CLASSES), torch.zeros(4, dtype=torch.float64), 0.0)
    for seed in range(20):
        assert float(covariance.divergence(Y + normal(4, 3, seed=seed), Y, CLASSES).sum()) >= 0


def test_the_empirical_metric_is_the_gradient_covariance_plus_the_outer_product_of_the_mean() -> None:
    """Grosse (2021), eq. 35, with the covariance that divides by N: F_emp = C + ∇J ∇Jᵀ at J = 1."""
    C = covariance.coupling(None, 4)
    assert C is not None
    s = covariance.root(Y, CLASSES)[0]
    close(torch.einsum("nd,nm,me->de", s, C, s) / 4, torch.cov(gradients().T, correction=0))
    mean = gradients().mean(0)
    second = outer(ng.Empirical(F.cross_entropy).root(Y, CLASSES)).mean(0)
    close(second, torch.cov(gradients().T, correction=0) + torch.outer(mean, mean))


@pytest.mark.parametrize("n", [1, 3, 7])
def test_the_centring_matrix_is_a_projection_in_double_precision(n: int) -> None:
    C = covariance.coupling(None, n)
    assert C is not None
    close(C @ C, C, 1e-15)
    close(C.sum(0), torch.zeros(n, dtype=torch.float64), 1e-15)


# Which sums are means: over the terms of an example on request, over the batch never.


# Metric by its reduction, outputs, number of terms
REDUCTIONS: dict[str, tuple[Callable[..., ng.OutputMetric], Tensor, int]] = {
    "euclidean": (ng.Euclidean, normal(3, 4), 4),
    "euclidean image": (ng.Euclidean, normal(3, 2, 4), 8),
    "euclidean scalar": (ng.Euclidean, normal(3), 1),
    "categorical": (partial(ng.Fisher, ng.Categorical()), normal(3, 4), 1),
    "categorical sequence": (partial(ng.Fisher, ng.Categorical(axis=-1)), normal(3, 5, 4), 5),
    "categorical image": (partial(ng.Fisher, ng.Categorical(axis=1)), normal(2, 4, 2, 3), 6),
    "bernoulli": (partial(ng.Fisher, ng.Bernoulli()), normal(3, 2, 2), 4),
    "poisson": (partial(ng.Fisher, ng.Poisson()), normal(3, 2), 2),
    "gaussian": (partial(ng.Fisher, ng.Gaussian(scale=0.5)), normal(3, 2), 2),
    "gaussian learned": (partial(ng.Fisher, ng.Gaussian(scale=None)), normal(3, 5, 4), 10),
    "normal": (partial(ng.Fisher, lambda y: D.Normal(y, torch.ones_like(y))), normal(3, 4), 4),
    "independent": (partial(ng.Fisher, lambda y: D.Independent(D.Normal(y, torch.ones_like(y)), 1)), normal(3, 4), 1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_mean_divides_by_the_number_of_terms(name: str) -> None:
    make, y, terms = REDUCTIONS[name]
    whole, mean = make(), make(reduction="mean")
    u = normal(*y.shape, seed=1)
    assert whole == make(reduction="sum")
    close(outer(mean.root(y)), outer(whole.root(y)) / terms, 1e-12)
    close(mean.flat(y, u), whole.flat(y, u) / terms, 1e-12)
    close(mean.divergence(y + u, y), whole.divergence(y + u, y) / terms, 1e-12)


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if "euclidean" not in name])
def test_reduction_mean_divides_sampled_roots_too(name: str) -> None:
    make, y, terms = REDUCTIONS[name]
    roots = [
        make(samples=3, reduction=reduction).root(y, generator=torch.Generator().manual_seed(0))
        for reduction in ("sum", "mean")
    ]
    close(roots[1], roots[0] / terms**0.5, 1e-12)


def test_the_mean_metric_is_the_gauss_newton_matrix_of_the_mean_loss() -> None:
    y = normal(2, 3, 3)
    metric = ng.LossHessian(partial(tokens, F.cross_entropy))  # the mean over the tokens of one example
    close(outer(metric.root(y, SEQUENCES)), outer(ng.Fisher(ng.Categorical(axis=-1), reduction="mean").root(y)))
    metric = ng.LossHessian(lambda y, t: 0.5 * F.mse_loss(y, t))
    close(outer(metric.root(y, 0 * y)), outer(ng.Euclidean(reduction="mean").root(y)))


# Loss, outputs with one term an example, targets
LOSSES: dict[str, tuple[Callable[..., Tensor], Tensor, Tensor]] = {
    "cross-entropy": (F.cross_entropy, normal(4, 3), CLASSES),
    "mean square": (F.mse_loss, normal(3, 1), POINTS[:, :1]),
    "mean square scalar": (F.mse_loss, normal(3), POINTS[:, 0]),
    "poisson": (F.poisson_nll_loss, normal(3, 1), COUNTS[:, :1]),
    "log-odds": (F.binary_cross_entropy_with_logits, normal(3, 1), (COUNTS[:, :1] > 0).double()),
}


@pytest.mark.parametrize("metric", [ng.Empirical, ng.LossHessian, ng.GradientCovariance])
@pytest.mark.parametrize("name", LOSSES)
def test_the_metric_does_not_depend_on_the_reduction_of_the_loss(
    name: str, metric: Callable[..., ng.OutputMetric]
) -> None:
    loss, y, target = LOSSES[name]
    u = normal(*y.shape, seed=1)
    first, *others = [metric(partial(loss, reduction=reduction)) for reduction in ("mean", "sum", "none")]
    for other in others:
        close(other.root(y, target), first.root(y, target), 1e-12)
        close(other.flat(y, u, target), first.flat(y, u, target), 1e-12)
        close(other.divergence(y + u, y, target), first.divergence(y + u, y, target), 1e-12)


@pytest.mark.parametrize("make", [ng.Empirical, ng.LossHessian])
@pytest.mark.parametrize("name", LOSSES)
def test_the_metric_of_an_example_does_not_depend_on_the_batch(name: str, make: Callable[..., ng.OutputMetric]) -> None:
    loss, y, target = LOSSES[name]
    metric = make(loss)
    alone = torch.cat([metric.root(y[n : n + 1], target[n : n + 1]) for n in range(len(y))], dim=1)
    close(outer(metric.root(y, target)), outer(alone), 1e-12)


def test_a_mean_over_the_outputs_of_an_example_is_part_of_the_loss() -> None:
    """F.mse_loss divides by the D outputs of an example as well, and its metric therefore too."""
    y = normal(3, 2)
    mean, whole = ng.LossHessian(F.mse_loss), ng.LossHessian(partial(F.mse_loss, reduction="sum"))
    close(outer(whole.root(y, POINTS)), 2 * oracle.euclidean(y), 1e-12)
    close(outer(mean.root(y, POINTS)), 2 * oracle.euclidean(y) / 2, 1e-12)
    grads = ng.Empirical(F.mse_loss).root(y, POINTS)[0]
    close(grads, y - POINTS, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_ignored_target_contributes_nothing(reduction: str) -> None:
    y, target = normal(4, 3), torch.tensor([0, -100, 1, 2])
    loss = partial(F.cross_entropy, reduction=reduction)
    for metric in (ng.Empirical(loss), ng.LossHessian(loss)):
        h = outer(metric.root(y, target))
        close(h[1], torch.zeros(3, 3, dtype=torch.float64), 0.0)
        close(h[[0, 2, 3]], outer(metric.root(y[[0, 2, 3]], target[[0, 2, 3]])), 1e-12)


def test_class_weights_scale_the_metric_of_a_summed_loss_and_cancel_in_a_mean() -> None:
    y, weight = normal(4, 3), torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    factors = {"sum": weight[CLASSES], "mean": torch.ones(4, dtype=torch.float64)}
    for reduction, factor in factors.items():
        metric = ng.LossHessian(partial(F.cross_entropy, weight=weight, reduction=reduction))
        close(outer(metric.root(y, CLASSES)), factor[:, None, None] * oracle.categorical(y))


def test_targets_may_be_structured() -> None:
    y, weight = normal(3, 2), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def weighted(y: Tensor, target: dict[str, Tensor]) -> Tensor:
        return target["weight"] * (y - target["t"]).square().sum(-1)

    metric = ng.LossHessian(weighted)
    close(
        outer(metric.root(y, {"t": POINTS, "weight": weight})), 2 * weight[:, None, None] * oracle.euclidean(y), 1e-12
    )


# Sampled roots: unbiased, reproducible, and without a trace in the user's random stream.


ERROR = 1e-6
COPIES = 20_000


def fisher(family: Any, samples: int = 2) -> ng.OutputMetric:
    """A sampled Fisher metric."""
    return ng.Fisher(family, samples=samples)


# Metric, outputs of one example with a leading axis, h [1 D D]
Row = tuple[ng.OutputMetric, Tensor, Callable[[Tensor], Tensor]]
SAMPLED: dict[str, Row] = {
    "categorical": (fisher(ng.Categorical()), normal(1, 3), oracle.categorical),
    "categorical sequence": (fisher(ng.Categorical(axis=-1), 1), normal(1, 2, 3), oracle.categorical),
    "bernoulli": (fisher(ng.Bernoulli()), normal(1, 3), oracle.bernoulli),
    "bernoulli scalar": (fisher(ng.Bernoulli()), normal(1), oracle.bernoulli),
    "poisson": (fisher(ng.Poisson(), 3), normal(1, 3), oracle.poisson),
    "gaussian": (fisher(ng.Gaussian(scale=0.5)), normal(1, 3), lambda y: oracle.gaussian(y, 0.5)),
    "gaussian learned": (fisher(ng.Gaussian(scale=None)), normal(1, 4), oracle.gaussian_learned),
    "gamma": (fisher(gamma), normal(1, 2), textbook.by_term(textbook.gamma)),
    "beta": (fisher(beta), normal(1, 2), textbook.by_term(textbook.dirichlet)),
    "dirichlet": (fisher(dirichlet), 1 + normal(1, 3), textbook.by_term(textbook.dirichlet)),
    "exponential": (fisher(lambda y: D.Exponential(y.exp())), normal(1, 2), oracle.euclidean),
    "geometric": (fisher(lambda y: D.Geometric(logits=y)), normal(1, 1), lambda y: (1 - y.sigmoid())[:, None]),
    "binomial": (fisher(lambda y: D.Binomial(5, logits=y)), normal(1, 2), lambda y: 5 * oracle.bernoulli(y)),
    "distribution categorical": (fisher(lambda y: D.Categorical(logits=y)), normal(1, 2, 3), oracle.categorical),
    "normal": (fisher(lambda y: D.Normal(y[:, :1], y[:, 1:].exp())), normal(1, 2), oracle.gaussian_learned),
    "laplace": (fisher(laplace), normal(1, 2), lambda y: 4 * oracle.euclidean(y)),
    "weibull": (fisher(weibull), normal(1, 2), textbook.by_term(textbook.weibull)),
    "mixture": (fisher(mixture), normal(1, 2), textbook.mixture),
    "enumerable": (fisher(Quadratic), 0.3 * normal(1, 2), textbook.by_term(textbook.quadratic)),
    "sampled euclidean": (ng.Sampled(ng.Euclidean(), 2), normal(1, 3), oracle.euclidean),
    "sampled categorical": (ng.Sampled(ng.Fisher(ng.Categorical()), 3), normal(1, 3), oracle.categorical),
    "sampled bregman": (ng.Sampled(ng.Bregman(lambda y: y.exp().sum())), normal(1, 2, 2), oracle.poisson),
    "sampled mean": (ng.Sampled(ng.Euclidean("mean"), 2), normal(1, 2, 2), lambda y: oracle.euclidean(y) / 4),
}
every_sampler = pytest.mark.parametrize("name", SAMPLED)


def z_scores(draws: Tensor, expected: Tensor) -> Tensor:
    """(mean − expected) / its standard error, for draws [n *]; what does not vary must be right."""
    error = draws.std(0) / len(draws) ** 0.5
    gap = draws.mean(0) - expected
    return torch.where(error > 1e-12, gap / error.clamp(min=1e-12), gap * 1e12)


@every_sampler
def test_the_samples_have_mean_zero_and_covariance_h(name: str) -> None:
    """All entries of the mean and of Σ_k s sᵀ, tested together on 20 000 copies of one example.

    By the central limit theorem each z-score is standard normal; the bound is that of a union over all entries at
    error probability 1e-6. The seed is fixed: the test does not flicker. A factor of 1.2 too much gives z > 9.
    """
    metric, y, h = SAMPLED[name]
    copies = y.expand(COPIES, *y.shape[1:])
    s = metric.root(copies, generator=torch.Generator().manual_seed(1))
    assert s.shape[1:] == copies.shape
    assert not metric.exact
    s = s.reshape(*s.shape[:2], -1)
    scores = torch.cat(
        [
            z_scores(s.sum(0), torch.zeros(s.shape[2], dtype=torch.float64)).flatten(),
            z_scores(torch.einsum("knd,kne->nde", s, s), h(y)[0]).flatten(),
        ]
    )
    bound = NormalDist().inv_cdf(1 - ERROR / (2 * len(scores)))
    assert scores.abs().max() < bound


@pytest.mark.parametrize("name", [name for name in SAMPLED if name not in ("categorical sequence", "sampled bregman")])
def test_samples_of_one_example_are_independent(name: str) -> None:
    """E[s_1 s_2ᵀ] = 0 for two columns of one example, by the test above."""
    metric, y, _ = SAMPLED[name]
    s = metric.root(y.expand(COPIES, *y.shape[1:]), generator=torch.Generator().manual_seed(2))
    s = s.reshape(*s.shape[:2], -1)
    products = torch.einsum("nd,ne->nde", s[0], s[1])
    scores = z_scores(products, torch.zeros_like(products[0])).flatten()
    assert scores.abs().max() < NormalDist().inv_cdf(1 - ERROR / (2 * len(scores)))


@every_sampler
@pytest.mark.parametrize("given", [True, False])
def test_sampling_does_not_move_the_global_random_stream(name: str, given: bool) -> None:
    metric, y, _ = SAMPLED[name]
    before = torch.get_rng_state()
    metric.root(y, generator=torch.Generator().manual_seed(0) if given else None)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_a_distribution_does_not_seed_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would: the user's stream on a GPU must not move because outputs on the CPU were sampled."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
    assert len(seeded) == 1  # this is what the next line must not do
    SAMPLED["gamma"][0].root(normal(3, 2))
    assert len(seeded) == 1


@every_sampler
def test_the_same_seed_gives_the_same_root_and_another_seed_another(name: str) -> None:
    metric, y, _ = SAMPLED[name]
    copies = y.expand(16, *y.shape[1:])
    first, again, other = (metric.root(copies, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    close(again, first, 0.0)
    assert not torch.equal(other, first)


@every_sampler
def test_a_generator_moves_on_and_without_one_the_samples_are_fresh(name: str) -> None:
    metric, y, _ = SAMPLED[name]
    copies, generator = y.expand(16, *y.shape[1:]), torch.Generator().manual_seed(0)
    roots = [metric.root(copies, generator=g) for g in (generator, generator, None, None)]
    assert not torch.equal(roots[0], roots[1])
    assert not torch.equal(roots[2], roots[3])


def test_a_sampled_metric_keeps_flat_and_divergence_of_the_exact_one() -> None:
    y, u, t = normal(4, 3), normal(4, 3, seed=1), torch.tensor([0, 1, 2, 0])
    pairs = [
        (ng.Sampled(ng.LossHessian(F.cross_entropy), 2), ng.LossHessian(F.cross_entropy)),
        (ng.Fisher(ng.Categorical(), samples=2), ng.Fisher(ng.Categorical())),
    ]
    for sampled, exact in pairs:
        assert sampled.needs_target == exact.needs_target
        assert sampled.coupling(None, 4) is None
        close(sampled.flat(y, u, t), exact.flat(y, u, t), 0.0)
        close(sampled.divergence(y + u, y, t), exact.divergence(y + u, y, t), 0.0)


FAMILIES = [
    ng.Categorical(axis=1),
    ng.Categorical(axis=-1),
    ng.Bernoulli(),
    ng.Poisson(),
    ng.Gaussian(),
    ng.Gaussian(None),
]


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("shape", [(4, 6), (3, 5, 2)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_samples_that_the_examples_share_are_combinations_of_the_columns_of_the_root(
    family: Any, shape: tuple[int, ...], reduction: Any
) -> None:
    """Without the root, whose columns are as many as the outputs, and with the same draws."""
    y, exact = normal(*shape), ng.Fisher(family, reduction=reduction)
    got = ng.Fisher(family, 3, reduction).shared_root(y, None, torch.Generator().manual_seed(1))
    close(got, ng.Sampled(exact, 3).shared_root(y, None, torch.Generator().manual_seed(1)), 1e-14)


# What is no metric is refused: at construction where that is possible, and with the reason.


anything = cast(Any, ng)  # calls that a type checker would refuse as well

CONSTRUCTED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a class": (lambda: anything.Fisher(ng.Categorical), TypeError, r"an instance: write Fisher\(Categorical\(\)\)"),
    "a string": (
        lambda: anything.Fisher("categorical"),
        TypeError,
        "a family or a function to a distribution, got str",
    ),
    "no samples": (lambda: ng.Fisher(ng.Poisson(), samples=0), ValueError, "samples must be None .* got 0"),
    "negative samples": (lambda: ng.Fisher(ng.Poisson(), samples=-1), ValueError, "a positive integer, got -1"),
    "half a sample": (lambda: anything.Fisher(ng.Poisson(), samples=0.5), ValueError, "positive integer, got 0.5"),
    "fisher reduction": (
        lambda: anything.Fisher(ng.Poisson(), reduction="none"),
        ValueError,
        'reduction must be "sum" or "mean" .* got \'none\'',
    ),
    "euclidean reduction": (lambda: anything.Euclidean("max"), ValueError, 'must be "sum" or "mean" .* got \'max\''),
    "sampled without samples": (lambda: ng.Sampled(ng.Euclidean(), 0), ValueError, "samples must be .* got 0"),
    "sampled None times": (lambda: anything.Sampled(ng.Euclidean(), None), ValueError, "needs a number of samples"),
    "sampled twice": (
        lambda: ng.Sampled(ng.Sampled(ng.Euclidean())),
        ValueError,
        "is sampled already: raise its own samples=",
    ),
    "sampled fisher": (
        lambda: ng.Sampled(ng.Fisher(ng.Poisson(), samples=2)),
        ValueError,
        "samples=2.* is sampled already",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_a_wrong_argument_is_refused_at_construction(name: str) -> None:
    make, error, match = CONSTRUCTED[name]
    with pytest.raises(error, match=match):
        make()


def test_only_fisher_of_a_family_class_is_a_mistake() -> None:
    """A class of torch is a function from the outputs to a distribution."""
    y = normal(3, 2).exp()
    u = normal(3, 2, seed=1)
    torch.testing.assert_close(ng.Fisher(D.Exponential).flat(y, u), u / y**2)


# Every method of a metric refuses

Method = Callable[[ng.OutputMetric, Tensor, Any], Tensor]
METHODS: dict[str, Method] = {
    "flat": lambda metric, y, target: metric.flat(y, y, target),
    "root": lambda metric, y, target: metric.root(y, target),
    "divergence": lambda metric, y, target: metric.divergence(y, y, target),
}
SHAPES: dict[str, tuple[ng.OutputMetric, tuple[int, ...], str]] = {
    "logits without classes": (ng.Fisher(ng.Categorical()), (3,), r"Categorical needs the logits .* shape \(3,\)"),
    "one class": (ng.Fisher(ng.Categorical()), (3, 1), r"2 or more\], got outputs of shape \(3, 1\)"),
    "classes of an image": (ng.Fisher(ng.Categorical()), (2, 3, 4, 4), r"which axis of .* \(2, 3, 4, 4\) has the cl"),
    "no such axis": (
        ng.Fisher(ng.Categorical(axis=2)),
        (2, 3),
        r"axis=2\): outputs of shape \(2, 3\) have no such axis",
    ),
    "odd outputs": (ng.Fisher(ng.Gaussian(None)), (3, 5), r"as many log-scales as means .* got .* shape \(3, 5\)"),
    "scalar outputs": (ng.Fisher(ng.Gaussian(None)), (4,), r"as many log-scales as means .* got .* shape \(4,\)"),
    "no example": (
        ng.Fisher(lambda y: D.Independent(D.Exponential(y.exp()), 2)),
        (3, 2),
        r"outputs of shape \(3, 2\) has batch shape \(\): the examples must be its first batch axis",
    ),
    "other examples": (ng.Fisher(lambda y: D.Exponential(y.exp().T)), (3, 2), r"has batch shape \(2, 3\)"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_that_do_not_fit_the_family_are_refused_with_their_shape(name: str, method: str) -> None:
    metric, shape, match = SHAPES[name]
    with pytest.raises(ValueError, match=match):
        METHODS[method](metric, normal(*shape), None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [ng.Empirical, ng.GradientCovariance, ng.LossHessian])
def test_metrics_of_the_training_loss_refuse_missing_targets(make: Callable[..., ng.OutputMetric], method: str) -> None:
    metric = make(F.cross_entropy)
    assert metric.needs_target
    for refused in (metric, ng.Sampled(metric)):
        with pytest.raises(ValueError, match=f"{make.__name__} is made from the training loss .* pass target="):
            METHODS[method](refused, normal(4, 3), None)


def test_metrics_of_the_outputs_alone_need_no_target() -> None:
    for metric in (ng.Euclidean(), ng.Fisher(ng.Poisson()), ng.Bregman(torch.exp), ng.Divergence(F.mse_loss)):
        assert not metric.needs_target
        assert metric.coupling(None, 3) is None
        metric.check_target(None)


def test_independent_samples_would_erase_a_coupling() -> None:
    metric = ng.Sampled(ng.GradientCovariance(F.cross_entropy))
    with pytest.raises(ValueError, match="couples the examples: independent samples would erase the coupling"):
        metric.coupling(None, 4)


# Functions that are not convex: φ = y₀² − ¾ y₁² at the examples past the first, whose eigenvalues are 2 and −3/2


def saddle(y: Tensor) -> Tensor:
    """Convex where y₀ < 0, a saddle elsewhere."""
    return torch.where(y[..., 0] < 0, y.square().sum(-1), y[..., 0] ** 2 - 0.75 * y[..., 1] ** 2)


INDEFINITE: dict[str, tuple[ng.OutputMetric, str]] = {
    "bregman": (ng.Bregman(saddle), r"Bregman\(phi\): phi is not convex"),
    "divergence": (
        ng.Divergence(lambda y, y0: torch.where(y0[..., 0] < 0, 1.0, -0.75) * (y - y0).square().sum(-1)),
        r"Divergence\(rho\): rho has no minimum at y = y0",
    ),
    "loss": (ng.LossHessian(lambda y, t: saddle(y)), r"LossHessian\(loss\): the loss is not convex"),
}


@pytest.mark.parametrize("name", INDEFINITE)
def test_an_indefinite_hessian_is_refused_with_example_and_eigenvalue(name: str) -> None:
    metric, what = INDEFINITE[name]
    y = torch.tensor([[-1.0, 0.5], [-2.0, 1.0], [1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    with pytest.raises(SingularMetricError, match=what + r" at example 2: .* the eigenvalue -1\.5, .* Use a convex"):
        metric.root(y, CLASSES)
    assert bool(metric.root(y[:2], CLASSES[:2]).isfinite().all())


@pytest.mark.parametrize("margin", [5.0, 10.0, 15.0, 20.0, 30.0])
def test_the_rounding_of_a_certain_softmax_is_not_taken_for_a_saddle(margin: float) -> None:
    y = normal(100, 10).float()
    y[:, 0] += margin
    labels = torch.zeros(100, dtype=torch.long)
    metrics = ng.Bregman(lambda y: y.logsumexp(-1)), ng.LossHessian(torch.nn.functional.cross_entropy)
    p = y.double().softmax(-1)
    exact = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    for metric in metrics:
        s = metric.root(y, labels).double()
        torch.testing.assert_close(torch.einsum("kni,knj->nij", s, s), exact, rtol=1e-4, atol=1e-6)


def test_a_divergence_flatter_than_quadratic_has_the_metric_zero() -> None:
    """(y − y0)⁴ is a dissimilarity, and no Riemannian metric comes from it."""
    metric = ng.Divergence(lambda y, y0: ((y - y0) ** 4).sum())
    y = normal(3, 2)
    torch.testing.assert_close(metric.root(y), torch.zeros(2, 3, 2, dtype=torch.float64))
    torch.testing.assert_close(metric.flat(y, y), torch.zeros_like(y))


def distance(y: Tensor, y0: Tensor) -> Tensor:
    return (y - y0).abs().sum()


WITHOUT_CURVATURE: dict[str, ng.OutputMetric] = {
    "Divergence": ng.Divergence(distance),
    "Bregman": ng.Bregman(lambda y: y.abs().sum()),
    "LossHessian": ng.LossHessian(F.l1_loss),
}


@pytest.mark.parametrize("name", WITHOUT_CURVATURE)
def test_a_hessian_that_is_zero_in_all_examples_is_said_once(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hessian, "_once", OnceLogger())
    metric, y = WITHOUT_CURVATURE[name], normal(3, 2)
    model = torch.nn.Linear(2, 2).double()
    with caplog.at_level(logging.WARNING, "natgrad"):
        assert not bool(metric.root(y, 0 * y).any())
        assert not bool(ng.Kronecker().estimate(ng.pullback(model, y, metric, target=0 * y)).dense().any())
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name}(")
    assert "exactly zero in all examples of a batch, so the damping alone decides the step" in record.getMessage()


def test_a_hessian_that_is_zero_in_some_examples_is_not_remarked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hessian, "_once", OnceLogger())
    with caplog.at_level(logging.WARNING, "natgrad"):
        ng.LossHessian(F.huber_loss).root(torch.tensor([[0.5], [3.0]]), torch.zeros(2, 1))
    assert not caplog.records


def test_an_improper_fisher_metric_is_refused() -> None:
    """Pareto with a learned scale and shape: the support moves with the scale, and the Hessian of KL is indefinite."""

    def pareto(y: Tensor) -> D.Distribution:
        return D.Pareto(y[..., 0].exp(), y[..., 1].exp())

    with pytest.raises(ValueError, match="support of Pareto moves with the outputs"):
        ng.Fisher(pareto).root(normal(3, 2))
    with pytest.raises(SingularMetricError, match="Fisher metric of the distribution is indefinite at example 0"):
        FromDistribution(pareto).root(normal(3, 2))  # unchecked
