"""The Fisher metric of any one-dimensional distribution: closed forms, claimed errors, samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

import natgrad as ng
from natgrad.families import FromDistribution
from tests.output.table import close, normal

EULER = 0.5772156649015329
Build = Callable[[Tensor], D.Distribution]


class Own(D.Distribution):
    """The logistic distribution, of which torch learns the density and draws, and nothing else."""

    arg_constraints = {}  # noqa: RUF012 torch declares it so

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(t)."""
        z = (value - self.loc) / self.scale
        return -z - 2 * torch.nn.functional.softplus(-z) - self.scale.log()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws by the inverse of the distribution function."""
        u = torch.rand(*sample_shape, *self.loc.shape, dtype=self.loc.dtype)
        return self.loc + self.scale * (u.log() - (-u).log1p())


class ZeroInflated(D.Distribution):
    """w δ₀ + (1 − w) Poisson(λ): counts without an end, and no icdf."""

    arg_constraints = {}  # noqa: RUF012 torch declares it so
    support = D.constraints.nonnegative_integer

    def __init__(self, logits: Tensor, rate: Tensor) -> None:
        self.logits, self.rate = logits, rate
        super().__init__(logits.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(t)."""
        log_w, log_v = -torch.nn.functional.softplus(-self.logits), -torch.nn.functional.softplus(self.logits)
        counts = log_v + D.Poisson(self.rate).log_prob(value)
        return torch.where(value == 0, torch.logaddexp(log_w, log_v - self.rate), counts)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws, some of them put to zero."""
        counts = D.Poisson(self.rate).sample(sample_shape)
        return counts * D.Bernoulli(logits=-self.logits).sample(sample_shape)


def zero_inflated(a: Tensor, b: Tensor) -> list[Tensor]:
    """The covariance of the scores by hand: one value at t = 0, and −w, t − λ elsewhere."""
    w, rate = a.sigmoid(), b.exp()
    none = w + (1 - w) * (-rate).exp()
    first, second = w * (1 - w) * (1 - (-rate).exp()) / none, -(1 - w) * rate * (-rate).exp() / none
    mixed = none * first * second - w * (1 - w) * rate * (-rate).exp()
    return [none * first**2 + (1 - none) * w**2, mixed, none * second**2 + (1 - w) * (rate - rate**2 * (-rate).exp())]


def von_mises(b: Tensor) -> list[Tensor]:
    kappa = b.exp()
    A = torch.special.i1(kappa) / torch.special.i0(kappa)
    return [kappa * A, 0 * b, kappa**2 * (1 - A**2) - kappa * A]


# Outputs (a, b) to a distribution, F₀₀, F₀₁ and F₁₁ from textbooks, and what the claimed error must stay below
CLOSED: dict[str, tuple[Build, Callable[[Tensor, Tensor], list[Tensor]], float]] = {
    "laplace": (
        lambda y: D.Laplace(y[:, 0], y[:, 1].exp()),
        lambda a, b: [(-2 * b).exp(), 0 * b, 1 + 0 * b],
        1e-9,
    ),
    "student": (
        lambda y: D.StudentT(4.0, y[:, 0], y[:, 1].exp()),
        lambda a, b: [5 / 7 * (-2 * b).exp(), 0 * b, 8 / 7 + 0 * b],
        1e-6,
    ),
    "weibull": (
        lambda y: D.Weibull(y[:, 0].exp(), y[:, 1].exp()),
        lambda a, b: [(2 * b).exp(), -(1 - EULER) * b.exp(), math.pi**2 / 6 + (1 - EULER) ** 2 + 0 * b],
        1e-5,
    ),
    "logistic": (
        lambda y: D.TransformedDistribution(
            D.Uniform(torch.zeros_like(y[:, 0]), 1.0),
            [D.SigmoidTransform().inv, D.AffineTransform(y[:, 0], y[:, 1].exp())],
        ),
        lambda a, b: [(-2 * b).exp() / 3, 0 * b, (3 + math.pi**2) / 9 + 0 * b],
        1e-8,
    ),
    "one's own": (
        lambda y: Own(y[:, 0], y[:, 1].exp()),
        lambda a, b: [(-2 * b).exp() / 3, 0 * b, (3 + math.pi**2) / 9 + 0 * b],
        1e-5,
    ),
    "negative binomial": (
        lambda y: D.NegativeBinomial(3 + 0 * y[:, 0], logits=y[:, 1]),
        lambda a, b: [0 * b, 0 * b, 3 * b.sigmoid()],
        1e-5,
    ),
    "von Mises": (lambda y: D.VonMises(y[:, 0], y[:, 1].exp()), lambda a, b: von_mises(b), 1e-5),
    "relaxed Bernoulli": (
        lambda y: D.RelaxedBernoulli(y.new_tensor(2.0), logits=y[:, 1]),
        lambda a, b: [0 * b, 0 * b, 1 / 3 + 0 * b],
        1e-5,
    ),
    "zero-inflated": (lambda y: ZeroInflated(y[:, 0], y[:, 1].exp()), zero_inflated, 1e-12),
}


@pytest.mark.parametrize("name", CLOSED)
def test_the_metric_is_that_of_the_textbook_within_the_error_that_it_claims(name: str) -> None:
    build, textbook, largest = CLOSED[name]
    y = normal(5, 2)
    family = FromDistribution(build)
    upper = textbook(y[:, 0], y[:, 1])
    F = torch.stack([upper[0], upper[1], upper[1], upper[2]], 1).view(5, 2, 2)
    claimed = family.error(y)
    assert float(claimed.max()) < largest
    root = ng.Fisher(build).root(y)
    tolerance = (claimed + 1e-12).view(-1, 1, 1) * F.abs().amax((1, 2), keepdim=True)
    assert bool(((torch.einsum("kni,knj->nij", root, root) - F).abs() <= tolerance).all())
    u = normal(5, 2, seed=1)
    close(ng.Fisher(build).flat(y, u), torch.einsum("kni,knj,nj->ni", root, root, u), 1e-9)


def distant(y: Tensor) -> D.Distribution:
    """Two peaks at a distance of 200 widths of the narrow one."""
    centres, widths = torch.stack([y[:, 0] - 10, y[:, 0] + 10], 1), torch.stack([y[:, 1], y[:, 1] + 2], 1).exp() / 10
    return D.MixtureSameFamily(D.Categorical(torch.ones_like(centres)), D.Normal(centres, widths))


SAMPLED: dict[str, Build] = {
    "kumaraswamy": lambda y: D.Kumaraswamy(y[:, 0].exp(), y[:, 1].exp()),
    "mixture": distant,
    "fisher-snedecor": lambda y: D.FisherSnedecor(y[:, 0].exp() + 1, y[:, 1].exp() + 1),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_the_metric_is_the_covariance_of_sampled_scores(name: str) -> None:
    """Within five standard errors of the mean of the samples."""
    y, build = 0.5 * normal(4, 2), SAMPLED[name]
    s = FromDistribution(build).scores(y, 4_000, torch.Generator().manual_seed(0))
    products = torch.einsum("kni,knj->knij", s, s)
    root = ng.Fisher(build).root(y)
    F = torch.einsum("kni,knj->nij", root, root)
    assert bool(((products.mean(0) - F).abs() < 5 * products.std(0) / 4_000**0.5).all())


def test_no_mean_of_counts_is_half_out_of_sight() -> None:
    """A Poisson distribution, as a mixture of two equal ones: 1/a for every a, up to rounding that it claims."""
    a = torch.logspace(0, 3, 40, dtype=torch.float64).view(-1, 1)
    twice = FromDistribution(lambda y: D.MixtureSameFamily(D.Categorical(y.new_ones(2)), D.Poisson(y.expand(-1, 2))))
    for y in (a, *a.split(1)):  # the largest of a batch decides how many values are looked at
        assert float(twice.error(y).max()) < 1e-9
        root = ng.Fisher(twice).root(y)
        close(root.square().sum(0), 1 / y, 1e-9)


def test_independent_entries_and_terms_have_the_metric_of_each() -> None:
    y = normal(3, 2)
    expected = torch.diag_embed(torch.full((3, 2), 4.0, dtype=torch.float64))
    for build in (lambda y: D.Laplace(y, 0.5), lambda y: D.Independent(D.Laplace(y, 0.5), 1)):
        root = ng.Fisher(build).root(y)
        close(torch.einsum("kni,knj->nij", root, root), expected, 1e-9)


def test_the_divergence_by_quadrature_is_that_of_gaussians() -> None:
    """A mixture of two equal components is that component, and torch has no formula for it."""

    def twice(y: Tensor) -> D.Distribution:
        centres = torch.stack([y, y], -1)
        return D.MixtureSameFamily(D.Categorical(torch.ones_like(centres)), D.Normal(centres, torch.ones_like(centres)))

    y, y0 = normal(3, 2), normal(3, 2, seed=1)
    close(ng.Fisher(twice).divergence(y, y0), 0.5 * (y - y0).square().sum(1), 1e-9)


def test_quadrature_leaves_the_random_stream_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ng.Fisher(lambda y: D.StudentT(4.0, y)).root(normal(3, 2))
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_no_density_is_refused_with_its_error() -> None:
    class Half(Own):
        def log_prob(self, value: Tensor) -> Tensor:
            return super().log_prob(value) - math.log(2)

    with pytest.raises(ValueError, match=r"Half by quadrature has an error of up to 5.*e-01 at example 0.* no density"):
        ng.Fisher(lambda y: Half(y, torch.ones_like(y))).root(normal(3, 2))


def test_vectors_without_a_closed_form_are_refused() -> None:
    def mixture(y: Tensor) -> D.Distribution:
        centres = torch.stack([y, -y], 1)
        component = D.Independent(D.Normal(centres, torch.ones_like(centres)), 1)
        return D.MixtureSameFamily(D.Categorical(torch.ones_like(centres[..., 0])), component)

    match = r"MixtureSameFamily has neither .* values have shape \(2,\), too many .* Fisher\(family, samples=k\)"
    with pytest.raises(ValueError, match=match):
        ng.Fisher(mixture).root(normal(3, 2))
    with pytest.raises(ValueError, match="has neither"):
        ng.Fisher(mixture, samples=1).divergence(normal(3, 2), normal(3, 2))
