"""Bayesian generalised linear models against dense optimisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import natgrad as ng

pytestmark = pytest.mark.usefixtures("double_precision")


def _data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g)
    return x, (x @ torch.tensor([1.0, -2.0, 0.5]) + torch.randn(40, generator=g) > 0).double()


def test_bayesian_linear_regression_is_exact_in_one_step() -> None:
    x, _ = _data()
    y = x @ torch.tensor([1.0, 2.0, 3.0]) + 0.1
    model = ng.vi.BayesianLinear(ng.vi.GaussianNoise(0.25), 3, prior_precision=2.0)
    model.step(x, y)
    mean, covariance = model.posterior()
    Λ = x.T @ x / 0.25 + 2.0 * torch.eye(3)
    torch.testing.assert_close(covariance, torch.linalg.inv(Λ), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mean, torch.linalg.solve(Λ, x.T @ y / 0.25), rtol=1e-10, atol=1e-12)


def test_bayesian_logistic_regression_has_the_largest_bound_of_all_gaussians() -> None:
    """L-BFGS over the mean and the Cholesky factor of the covariance, with expectations on a fine grid."""
    x, y = _data()
    model = ng.vi.BayesianLinear(ng.vi.BernoulliLogit(nodes=40), 3, prior_precision=0.5)
    ascent = ng.vi.ascend(model, x, y, tolerance=1e-12)
    grid = torch.linspace(-9, 9, 401)
    weight = torch.softmax(-0.5 * grid.square(), 0)
    μ, L = torch.zeros(3).requires_grad_(), torch.eye(3).requires_grad_()

    def bound() -> Tensor:
        factor = L.tril()
        f = (x @ μ) + grid[:, None] * (x @ factor).norm(dim=1)
        kl = 0.5 * (0.5 * (factor.square().sum() + μ @ μ) - 3 - 3 * torch.tensor(0.5).log())
        kl = kl - factor.diagonal().abs().log().sum()
        return (weight @ torch.nn.functional.logsigmoid((2 * y - 1) * f)).sum() - kl

    optimizer = torch.optim.LBFGS([μ, L], max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = -bound()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    mean, covariance = model.posterior()
    assert abs(ascent.elbo[-1] - float(bound().detach())) < 1e-6
    torch.testing.assert_close(mean, μ.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(covariance, (L.tril() @ L.tril().T).detach(), rtol=1e-3, atol=1e-4)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="features ≥ 1"):
        ng.vi.BayesianLinear(ng.vi.GaussianNoise(), 0)
    with pytest.raises(ValueError, match="prior_precision must be positive"):
        ng.vi.BayesianLinear(ng.vi.GaussianNoise(), 1, prior_precision=0.0)
    with pytest.raises(ValueError, match=r"inputs must be \[n 2\], one column per weight"):
        ng.vi.BayesianLinear(ng.vi.GaussianNoise(), 2).step(torch.zeros(3, 1), torch.zeros(3))
    for wrong in (True, torch.ones(2)):
        with pytest.raises(TypeError, match="prior_precision must be one number"):
            ng.vi.BayesianLinear(ng.vi.BernoulliLogit(), 2, prior_precision=wrong)  # type: ignore[arg-type]
    learned = torch.ones((), requires_grad=True)
    with pytest.raises(TypeError, match="prior_precision requires a gradient, and only its value is used here"):
        ng.vi.BayesianLinear(ng.vi.BernoulliLogit(), 2, prior_precision=learned)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Prior\(precision=…\) requires a gradient"):
        ng.vi.Prior(precision=learned, examples=3)  # type: ignore[arg-type]
