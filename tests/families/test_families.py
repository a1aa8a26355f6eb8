"""Output families: information, scores and KL agree with the density, and what does not fit is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from natgrad.families import Family, FromDistribution
from tests.output.distributions import Quadratic, laplace, mixture, weibull
from tests.output.table import close, normal

# Own family, the same in torch.distributions, outputs, the loss it belongs to and targets
Row = tuple[Family, Callable[[Tensor], D.Distribution], Tensor]
FAMILIES: dict[str, Row] = {
    "categorical": (ng.Categorical(), lambda y: D.Categorical(logits=y), normal(3, 4)),
    "categorical sequence": (ng.Categorical(axis=-1), lambda y: D.Categorical(logits=y), normal(2, 3, 4)),
    "bernoulli": (ng.Bernoulli(), lambda y: D.Bernoulli(logits=y), normal(3, 2)),
    "bernoulli scalar": (ng.Bernoulli(), lambda y: D.Bernoulli(logits=y), normal(3)),
    "poisson": (ng.Poisson(), lambda y: D.Poisson(y.exp()), normal(3, 2)),
    "gaussian": (ng.Gaussian(0.7), lambda y: D.Normal(y, torch.full_like(y, 0.7)), normal(3, 2)),
    "gaussian learned": (
        ng.Gaussian(None),
        lambda y: D.Normal(y[..., :2], y[..., 2:].exp()),
        normal(2, 3, 4),
    ),
}
every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_kl_is_that_of_torch_summed_over_the_terms(name: str) -> None:
    family, build, y = FAMILIES[name]
    y2 = y + normal(*y.shape, seed=1)
    expected = D.kl_divergence(build(y), build(y2)).reshape(len(y), -1).sum(1)
    close(family.kl(y, y2), expected, 1e-12)
    close(FromDistribution(build).kl(y, y2), expected, 1e-12)


@every_family
def test_the_number_of_terms_is_that_of_the_batch_of_the_distribution(name: str) -> None:
    family, build, y = FAMILIES[name]
    family.check(y)
    expected = build(y).batch_shape.numel() // len(y)
    assert family.terms(y) == FromDistribution(build).terms(y) == expected


@every_family
def test_every_score_is_the_gradient_of_a_log_density(name: str) -> None:
    """Scores of a discrete family are those of some value; of a Gaussian, of the value they determine."""
    family, build, y = FAMILIES[name]
    s = family.scores(y, 4, torch.Generator().manual_seed(0))
    t = implied_target(name, y, s)
    for k in range(4):
        leaf = y.clone().requires_grad_()
        (expected,) = torch.autograd.grad(build(leaf).log_prob(t[k]).sum(), leaf)
        close(s[k], expected, 1e-10)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_classes_are_drawn_with_their_probabilities(scale: float) -> None:
    """Pearson's χ² over the classes that are expected five times or more is below its quantile at 1e-6."""
    y, count = scale * normal(1, 6), 200_000
    y[0, 2] = -torch.inf
    drawn = (ng.Categorical().scores(y, count, torch.Generator().manual_seed(0)) + y.softmax(-1)).round().sum((0, 1))
    expected = count * y.softmax(-1)[0]
    kept = expected >= 5
    assert float(((drawn - expected)[kept].square() / expected[kept]).sum()) < 38  # of five degrees of freedom
    assert drawn[2] == 0


def test_a_class_without_probability_is_not_drawn_where_the_others_do_not_sum_to_one() -> None:
    y = torch.tensor([[0.0] * 7 + [-torch.inf]], dtype=torch.bfloat16)
    assert float(y.softmax(-1).double().sum()) < 0.999
    s = ng.Categorical().scores(y, 20_000, torch.Generator().manual_seed(0))
    assert s[..., -1].count_nonzero() == 0


def implied_target(name: str, y: Tensor, s: Tensor) -> Tensor:
    """The targets t [k n *terms] that have the score s: in natural parameters the score is t − E t."""
    if "categorical" in name:
        return (s + y.softmax(-1)).argmax(-1)
    if "bernoulli" in name:
        return (s + y.sigmoid()).round()
    if "poisson" in name:
        return (s + y.exp()).round()
    if name == "gaussian":
        return y + 0.7**2 * s
    return y[..., :2] + s[..., :2] * (2 * y[..., 2:]).exp()


# Loss whose gradient is minus the score, so that the metric belongs to the loss
LOSSES: dict[str, tuple[Family, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    "cross-entropy": (ng.Categorical(), F.cross_entropy, normal(3, 4), torch.tensor([0, 3, 1])),
    "log-odds": (ng.Bernoulli(), F.binary_cross_entropy_with_logits, normal(3, 1), torch.tensor([[0.0], [1.0], [1.0]])),
    "poisson": (ng.Poisson(), F.poisson_nll_loss, normal(3, 1), torch.tensor([[0.0], [2.0], [5.0]])),
    "half square": (
        ng.Gaussian(),
        lambda y, t: 0.5 * F.mse_loss(y, t),
        normal(3, 1),
        torch.tensor([[0.0], [2.0], [5.0]]),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_fisher_metric_is_the_hessian_of_the_loss_that_belongs_to_the_family(name: str) -> None:
    family, loss, y, target = LOSSES[name]
    target = target.double() if target.is_floating_point() else target
    u = normal(*y.shape, seed=1)
    close(ng.Fisher(family).flat(y, u), ng.LossHessian(loss).flat(y, u, target))


# Distributions of torch


UNKNOWN: dict[str, Callable[[Tensor], D.Distribution]] = {
    "mixture": mixture,
    "weibull": weibull,
    "laplace": laplace,
    "independent laplace": lambda y: D.Independent(laplace(y), 1),
    "negative binomial": lambda y: D.NegativeBinomial(3, logits=y),
    "student": lambda y: D.StudentT(torch.full_like(y, 3.0), y),
    "moved by a transform": lambda y: D.TransformedDistribution(
        D.Normal(torch.zeros_like(y), 1.0), [D.AffineTransform(y, 1.0)]
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_distributions_without_a_closed_form_can_be_sampled(name: str) -> None:
    s = ng.Fisher(UNKNOWN[name], samples=2).root(normal(3, 2))
    assert s.shape == (2, 3, 2)
    assert bool(s.isfinite().all())
    assert float(s.abs().min()) > 0


MOVING: dict[str, Callable[[Tensor], D.Distribution]] = {
    "uniform": lambda y: D.Uniform(-y.exp(), y.exp()),
    "pareto": lambda y: D.Pareto(y.exp(), torch.ones_like(y)),
    "independent": lambda y: D.Independent(D.Uniform(y, y + 1), 1),
    "of the base": lambda y: D.TransformedDistribution(D.Uniform(y, y + 1), [D.ExpTransform()]),
    "shifted": lambda y: D.TransformedDistribution(D.Exponential(torch.ones_like(y)), [D.AffineTransform(y, 1.0)]),
}
STANDING: dict[str, Callable[[Tensor], D.Distribution]] = {
    "gamma": lambda y: D.Gamma(y.exp(), y.exp()),
    "beta": lambda y: D.Beta(y.exp(), y.exp()),
    "binomial": lambda y: D.Binomial(5, logits=y),
    "von Mises": lambda y: D.VonMises(y, y.exp()),
    "gumbel": lambda y: D.Gumbel(y, y.exp()),
    "kumaraswamy": lambda y: D.Kumaraswamy(y.exp(), y.exp()),
    "half-normal": lambda y: D.HalfNormal(y.exp()),
    "log-normal": lambda y: D.LogNormal(y, y.exp()),
    "dirichlet": lambda y: D.Dirichlet(y.exp()),
    "shape of a pareto": lambda y: D.Pareto(torch.ones_like(y), y.exp()),
    "scaled": lambda y: D.TransformedDistribution(D.Exponential(torch.ones_like(y)), [D.AffineTransform(0.0, y.exp())]),
}


@pytest.mark.parametrize("samples", [None, 1])
@pytest.mark.parametrize("name", MOVING)
def test_a_distribution_whose_support_moves_has_no_fisher_metric(name: str, samples: int | None) -> None:
    with pytest.raises(ValueError, match=r"the support of \w+ moves with the outputs, so it has no Fisher metric"):
        ng.Fisher(MOVING[name], samples=samples).root(normal(3, 2))


@pytest.mark.parametrize("name", STANDING)
def test_a_distribution_whose_support_stands_has_one(name: str) -> None:
    root = ng.Fisher(STANDING[name], samples=1).root(normal(3, 2), None, torch.Generator().manual_seed(0))
    assert bool(root.isfinite().all())


class Unread(TorchDispatchMode):
    """Inside, numbers of tensors are not read, for which a GPU would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), "read"
        return func(*args, **(kwargs or {}))


UNCHECKED: dict[str, Callable[[Tensor], D.Distribution]] = {
    "exponential": lambda y: D.Exponential(y.exp(), validate_args=False),
    "poisson": lambda y: D.Poisson(y.exp(), validate_args=False),
    "gamma": lambda y: D.Gamma(y.exp(), y.exp(), validate_args=False),
    "bernoulli": lambda y: D.Bernoulli(logits=y, validate_args=False),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_sampling_a_distribution_that_torch_does_not_check_reads_no_number(name: str) -> None:
    y, generator = normal(3, 2), torch.Generator().manual_seed(0)
    with Unread():  # type: ignore[no-untyped-call]
        s = ng.Fisher(UNCHECKED[name], samples=2).root(y, generator=generator)
    assert bool(s.isfinite().all())
    with pytest.raises(AssertionError, match="read"), Unread():  # type: ignore[no-untyped-call]
        bool(y.sum())


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that was computed."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_scores_of_many_samples_take_memory_in_proportion() -> None:
    def largest(samples: int) -> int:
        with Largest() as mode:  # type: ignore[no-untyped-call]
            FromDistribution(mixture).scores(normal(50, 2), samples, torch.Generator().manual_seed(0))
        return mode.numel

    assert largest(256) <= 4 * largest(64)


@pytest.mark.parametrize("samples", [1, 8, 9, 20])
def test_every_score_of_a_distribution_is_that_of_its_sample(samples: int) -> None:
    """In natural parameters t − E t, so that t is a whole number."""
    y = normal(3, 2)
    t = FromDistribution(lambda y: D.Poisson(y.exp())).scores(y, samples, torch.Generator().manual_seed(0)) + y.exp()
    assert t.shape == (samples, 3, 2)
    close(t, t.round(), 1e-12)
    assert float(t.var()) > 0


def test_a_kl_with_a_kink_is_still_a_divergence() -> None:
    y, y2 = normal(3, 2), normal(3, 2, seed=1)
    expected = D.kl_divergence(laplace(y2), laplace(y)).sum(1)
    close(ng.Fisher(laplace, samples=1).divergence(y, y2), expected, 1e-12)


def test_kl_of_an_enumerable_distribution_is_the_sum_over_its_support() -> None:
    y, y2 = 0.3 * normal(2, 3, 2), 0.3 * normal(2, 3, 2, seed=1)
    t = torch.arange(4, dtype=torch.float64)
    log_p, log_q = ((z[..., :1] * t + z[..., 1:] * t**2).log_softmax(-1) for z in (y, y2))
    close(FromDistribution(Quadratic).kl(y, y2), (log_p.exp() * (log_p - log_q)).sum((1, 2)), 1e-12)


def _wishart(y: Tensor) -> D.Distribution:
    return D.Wishart(y[..., 0].exp() + 3, covariance_matrix=torch.diag_embed(y[..., 1:].exp()))


@pytest.mark.parametrize(
    "build", [_wishart, lambda y: D.Independent(_wishart(y), 1), lambda y: D.Independent(_wishart(y), 0)]
)
def test_kl_of_wishart_distributions_is_that_of_the_family(build: Callable[[Tensor], D.Distribution]) -> None:
    """That of torch is wrong for batches, and needs gradients."""
    y, y2, family = normal(2, 3, 3), normal(2, 3, 3, seed=1), ng.families.Wishart()
    η, η2 = (family.from_distribution(_wishart(z)) for z in (y, y2))
    with torch.no_grad():
        close(FromDistribution(build).kl(y, y2), family.kl(η, η2), 1e-12)
    u = normal(2, 3, 3, seed=2)
    velocity = torch.func.jvp(lambda z: family.from_distribution(_wishart(z)), (y,), (u,))[1]
    length = (velocity * family.fisher(η).flat(velocity)).sum()
    close((u * ng.Fisher(build).flat(y, u)).sum(), length, 1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_is_positive(scale: float) -> None:
    with pytest.raises(ValueError, match=r"Gaussian\(scale=…\) must be positive, or None to learn it, got"):
        ng.Gaussian(scale=scale)


def test_families_compare_by_value() -> None:
    pairs: list[tuple[Any, Any]] = [(ng.Categorical(), ng.Categorical()), (ng.Gaussian(2.0), ng.Gaussian(scale=2.0))]
    for one, other in pairs:
        assert one == other
    assert ng.Gaussian(2.0) != ng.Gaussian(1.0)


def test_the_kl_divergence_of_classes_without_probability() -> None:
    never = -torch.inf
    y = torch.tensor([[0.0, 1.0, never], [0.0, 1.0, never], [0.0, 1.0, 2.0], [0.0, never, never]], dtype=torch.float64)
    y2 = torch.tensor([[0.3, 2.0, never], [0.3, 2.0, 0.5], [0.0, 1.0, never], [5.0, never, 1.0]], dtype=torch.float64)
    expected = D.kl_divergence(D.Categorical(logits=y), D.Categorical(logits=y2))
    close(ng.Categorical().kl(y, y2), expected, 1e-12)
    slope = torch.func.grad(lambda y2: ng.Categorical().kl(y[:2], y2).sum())(y2[:2])
    close(slope, (y2.softmax(1) - y.softmax(1))[:2], 1e-12)
