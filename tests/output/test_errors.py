"""What is no metric is refused: at construction where that is possible, and with the reason."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import SingularMetricError
from natgrad.families import FromDistribution
from tests.output.table import CLASSES, normal

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


def test_a_divergence_flatter_than_quadratic_has_the_metric_zero() -> None:
    """ERRATA 54: (y − y0)⁴ is a dissimilarity, and no Riemannian metric comes from it."""
    metric = ng.Divergence(lambda y, y0: ((y - y0) ** 4).sum())
    y = normal(3, 2)
    torch.testing.assert_close(metric.root(y), torch.zeros(2, 3, 2, dtype=torch.float64))
    torch.testing.assert_close(metric.flat(y, y), torch.zeros_like(y))


def test_an_improper_fisher_metric_is_refused() -> None:
    """Pareto with a learned scale and shape: the support moves with the scale, and the Hessian of KL is indefinite."""

    def pareto(y: Tensor) -> D.Distribution:
        return D.Pareto(y[..., 0].exp(), y[..., 1].exp())

    with pytest.raises(ValueError, match="support of Pareto moves with the outputs"):
        ng.Fisher(pareto).root(normal(3, 2))
    with pytest.raises(SingularMetricError, match="Fisher metric of the distribution is indefinite at example 0"):
        FromDistribution(pareto).root(normal(3, 2))  # unchecked
