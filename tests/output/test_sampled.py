"""Sampled roots: unbiased, reproducible, and without a trace in the user's random stream."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.output import textbook
from tests.output.distributions import Quadratic, beta, dirichlet, gamma, laplace, mixture, weibull
from tests.output.table import close, normal

ERROR = 1e-6
COPIES = 20_000


def fisher(family: Any, samples: int = 2) -> ng.OutputMetric:
    """A sampled Fisher metric."""
    return ng.Fisher(family, samples=samples)


# Metric, outputs of one example with a leading axis, h [1 D D]
Row = tuple[ng.OutputMetric, Tensor, Callable[[Tensor], Tensor]]
SAMPLED: dict[str, Row] = {
    "categorical": (fisher(ng.Categorical()), normal(1, 3), oracle.categorical),
    "categorical sequence": (fisher(ng.Categorical(), 1), normal(1, 2, 3), oracle.categorical),
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


@pytest.mark.parametrize("family", [ng.Categorical(), ng.Bernoulli(), ng.Poisson(), ng.Gaussian(), ng.Gaussian(None)])
@pytest.mark.parametrize("shape", [(4, 6), (3, 5, 2)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_samples_that_the_examples_share_are_combinations_of_the_columns_of_the_root(
    family: Any, shape: tuple[int, ...], reduction: Any
) -> None:
    """Without the root, whose columns are as many as the outputs, and with the same draws."""
    y, exact = normal(*shape), ng.Fisher(family, reduction=reduction)
    got = ng.Fisher(family, 3, reduction).shared_root(y, None, torch.Generator().manual_seed(1))
    close(got, ng.Sampled(exact, 3).shared_root(y, None, torch.Generator().manual_seed(1)), 1e-14)
