"""Probabilities of classes under Gaussian logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests import oracle
from tests.optim.tasks import seeded
from tests.pulled import normal

DOUBLE = torch.float64


def test_the_bridge_returns_the_dirichlet_whose_laplace_approximation_it_is_given() -> None:
    """MacKay (1998): μ_k = log α_k − mean log α, Σ = C diag(1/α) Cᵀ with the centring C."""
    α = torch.tensor([[0.3, 2.0, 5.0, 40.0], [1e-3, 1.0, 300.0, 2.0]], dtype=DOUBLE)
    C = torch.eye(4, dtype=DOUBLE) - 0.25
    mean, covariance = α.log() @ C, C @ torch.diag_embed(1 / α) @ C
    expected = α / α.sum(1, keepdim=True)
    torch.testing.assert_close(ng.vi.Bridge().softmax(mean, covariance), expected, rtol=1e-10, atol=0)
    shifted = ng.vi.Bridge().softmax(mean + 3.0, covariance + 2.0)  # what all logits share does not matter
    torch.testing.assert_close(shifted, expected, rtol=1e-10, atol=0)


def test_the_bridge_of_sure_logits_does_not_overflow() -> None:
    mean = torch.tensor([[1000.0, 0.0, -1000.0]])
    p = ng.vi.Bridge().softmax(mean, torch.eye(3)[None])
    torch.testing.assert_close(p, torch.tensor([[1.0, 0.0, 0.0]]))
    even = ng.vi.Bridge().softmax(torch.zeros(1, 3), torch.zeros(1, 3, 3))
    torch.testing.assert_close(even, torch.full((1, 3), 1 / 3))


def _mean_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """E σ(y) by the trapezoid rule."""
    z = torch.linspace(-9, 9, 4001, dtype=DOUBLE)
    density = (-0.5 * z.square()).exp() / (2 * torch.pi) ** 0.5
    return torch.trapezoid((mean[:, None] + variance.sqrt()[:, None] * z).sigmoid() * density, z)


@pytest.mark.parametrize(("link", "error"), [(ng.vi.Probit(), 0.02), (ng.vi.MonteCarlo(20000), 0.015)])
def test_two_classes_have_the_probability_of_the_gaussian_integral(link: ng.vi.Link, error: float) -> None:
    """20000 samples have a standard error below 0.0036; the error of the probit approximation is known."""
    mean, variance = (
        torch.tensor([-3.0, 0.0, 1.0, 4.0], dtype=DOUBLE),
        torch.tensor([0.1, 4.0, 9.0, 25.0], dtype=DOUBLE),
    )
    exact = _mean_sigmoid(mean, variance)
    torch.testing.assert_close(link.sigmoid(mean, variance), exact, rtol=0, atol=error)
    if isinstance(link, ng.vi.MonteCarlo):  # of the difference of two logits, one of which is certain
        two = torch.stack([mean, torch.zeros_like(mean)], dim=1)
        covariance = torch.zeros(4, 2, 2, dtype=DOUBLE)
        covariance[:, 0, 0] = variance
        torch.testing.assert_close(link.softmax(two, covariance)[:, 0], exact, rtol=0, atol=error)


def test_samples_follow_their_generator_and_leave_the_global_stream_alone() -> None:
    mean, covariance = torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3)
    state = torch.random.get_rng_state()
    first, again = (ng.vi.MonteCarlo(5, torch.Generator().manual_seed(1)).softmax(mean, covariance) for _ in range(2))
    ng.vi.MonteCarlo(5).softmax(mean, covariance)
    assert torch.equal(first, again)
    assert torch.equal(torch.random.get_rng_state(), state)


def _classifier(out: int) -> tuple[nn.Module, Tensor]:
    return seeded(lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out)).double(), normal(6, 3)))


def _covariance(model: nn.Module, x: Tensor, hessian: Tensor, δ: float) -> Tensor:
    """J (Σ_n Jᵀ h J + δ)⁻¹ Jᵀ [n d d]."""
    J = oracle.module_jacobian(model, x)
    precision = torch.einsum("ndp,nde,neq->pq", J, hessian, J)
    return J @ torch.linalg.inv(precision + δ * torch.eye(len(precision), dtype=DOUBLE)) @ J.mT


CLASSIFIERS: dict[str, Any] = {
    "cross entropy": nn.CrossEntropyLoss(),
    "categorical": ng.Fisher(ng.Categorical()),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_probabilities_of_classes_are_those_of_the_linearised_predictive(name: str) -> None:
    model, x = _classifier(3)
    y = model(x).detach()
    p = y.softmax(1)
    Σ = _covariance(model, x, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], 0.5)
    posterior = ng.vi.Laplace(model, x, CLASSIFIERS[name], prior_precision=0.5)
    probit = (y / (1 + torch.pi / 8 * Σ.diagonal(dim1=1, dim2=2)).sqrt()).softmax(1)
    torch.testing.assert_close(posterior.probabilities(x), probit, rtol=0, atol=1e-9)
    bridged = posterior.probabilities(x, ng.vi.Bridge())
    torch.testing.assert_close(bridged, ng.vi.Bridge().softmax(y, Σ), rtol=0, atol=1e-9)
    sampled = posterior.probabilities(x, ng.vi.MonteCarlo(20000))
    drawn = torch.distributions.MultivariateNormal(y, Σ).sample((20000,)).softmax(-1).mean(0)
    torch.testing.assert_close(sampled, drawn, rtol=0, atol=0.02)
    assert bool((sampled.sum(1) - 1).abs().max() < 1e-12)


@pytest.mark.parametrize("metric", [nn.BCEWithLogitsLoss(), ng.Fisher(ng.Bernoulli())])
def test_log_odds_have_probabilities_of_their_own(metric: Any) -> None:
    model, x = _classifier(2)
    y = model(x).detach()
    p = y.sigmoid()
    v = _covariance(model, x, torch.diag_embed(p * (1 - p)), 0.5).diagonal(dim1=1, dim2=2)
    posterior = ng.vi.Laplace(model, x, metric, prior_precision=0.5)
    probit = (y / (1 + torch.pi / 8 * v).sqrt()).sigmoid()
    torch.testing.assert_close(posterior.probabilities(x), probit, rtol=0, atol=1e-9)


@pytest.mark.parametrize("axis", [1, -1])
def test_pixels_have_the_probabilities_of_their_own_logits(axis: int) -> None:
    """A linear model is its own linearisation, so that its outputs at drawn parameters have the same distribution."""
    layer, x = seeded(lambda: (nn.Conv2d(2, 3, 1).double(), normal(4, 2, 3, 2)))
    model = layer if axis == 1 else nn.Sequential(layer, _Last())
    posterior = ng.vi.Laplace(model, x, ng.metric_of(nn.CrossEntropyLoss(), axis=axis))
    found = posterior.probabilities(x).movedim(axis, -1)
    q = posterior.predictive(x)
    variance = q.variance.movedim(axis, -1)
    expected = (q.mean.movedim(axis, -1) / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    sampled = posterior.probabilities(x, ng.vi.MonteCarlo(20000)).movedim(axis, -1)
    drawn = posterior.outputs(x, 2000).softmax(axis if axis < 0 else axis + 1).mean(0).movedim(axis, -1)
    torch.testing.assert_close(sampled, drawn, rtol=0, atol=0.04)


class _Last(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        """[n h w c] of [n c h w]."""
        return y.movedim(1, -1)


def _of(metric: Any, out: int = 3, link: Any = None) -> Callable[[], Tensor]:
    def make() -> Tensor:
        model, x = _classifier(out)
        return ng.vi.Laplace(model, x, metric).probabilities(x, link)

    return make


def _axis_unknown() -> Tensor:
    model, x = nn.Conv2d(2, 3, 1), torch.ones(1, 2, 2, 2)
    return ng.vi.Laplace(model, x, nn.CrossEntropyLoss()).probabilities(x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            _of(ng.Euclidean()),
            ng.errors.IncompatibleError,
            r"probabilities\(x\) does not work with Euclidean\(.*classes",
        ),
        (
            _of(ng.Fisher(ng.Categorical(minimal=True))),
            ng.errors.IncompatibleError,
            r"probabilities\(x\) does not work with .*minimal=True",
        ),
        (_of(ng.Fisher(ng.Bernoulli()), 1, ng.vi.Bridge()), ng.errors.IncompatibleError, r"Bridge\(\) does not work"),
        (_of(ng.Fisher(ng.Categorical()), 3, "probit"), TypeError, "link"),
        (_axis_unknown, ValueError, r"does not say which axis .*metric_of\(loss, axis=1\)"),
        (lambda: ng.vi.MonteCarlo(0), ValueError, r"MonteCarlo\(samples\) is a number of samples, 1 or more, got 0"),
    ],
)
def test_what_has_no_probabilities_is_refused_with_the_reason(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
