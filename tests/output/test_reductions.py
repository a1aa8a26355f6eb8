"""Which sums are means: over the terms of an example on request, over the batch never."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.output.table import CLASSES, COUNTS, POINTS, SEQUENCES, close, normal, outer, tokens

# Metric by its reduction, outputs, number of terms
REDUCTIONS: dict[str, tuple[Callable[..., ng.OutputMetric], Tensor, int]] = {
    "euclidean": (ng.Euclidean, normal(3, 4), 4),
    "euclidean image": (ng.Euclidean, normal(3, 2, 4), 8),
    "euclidean scalar": (ng.Euclidean, normal(3), 1),
    "categorical": (partial(ng.Fisher, ng.Categorical()), normal(3, 4), 1),
    "categorical sequence": (partial(ng.Fisher, ng.Categorical()), normal(3, 5, 4), 5),
    "categorical image": (partial(ng.Fisher, ng.Categorical()), normal(2, 2, 3, 4), 6),
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
    close(outer(metric.root(y, SEQUENCES)), outer(ng.Fisher(ng.Categorical(), reduction="mean").root(y)))
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
