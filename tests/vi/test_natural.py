"""Natural-gradient variational inference of models that are not conjugate, and its bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import DomainError, NonFiniteError

ESTIMATORS = [ng.vi.Regression(200_000), ng.vi.Score(200_000), ng.vi.Reparametrised(200_000)]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _softplus(z: Tensor) -> Tensor:
    """A log-density that is not conjugate to a Gaussian."""
    return -3 * torch.nn.functional.softplus(1.5 * z.squeeze(-1))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_every_estimator_has_the_gradient_in_the_mean_parameters(estimator: ng.vi.Estimator) -> None:
    """Dense oracle: E ℓ by quadrature as a function of ξ = (E z, −½E z²), differentiated."""
    eta = ng.families.DiagonalGaussian().from_covariance(_double(0.3), _double(0.5))
    grid = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    weight = torch.softmax(-0.5 * grid.square(), 0)
    xi = ng.families.DiagonalGaussian().mean(eta).requires_grad_()
    variance = -2 * xi[1] - xi[0] ** 2
    value = weight @ _softplus((xi[0] + variance.sqrt() * grid).unsqueeze(-1))
    (expected,) = torch.autograd.grad(value, xi)
    found = estimator(ng.families.DiagonalGaussian(), eta, _softplus, torch.zeros_like(eta), _generator())
    torch.testing.assert_close(found.gradient, expected, rtol=0.03, atol=0.03)
    torch.testing.assert_close(found.value, value.detach(), rtol=0.02, atol=0.02)


def _logistic() -> tuple[Tensor, Tensor]:
    g = _generator()
    x = torch.randn(30, 2, generator=g, dtype=torch.float64)
    return x, (x[:, 0] > 0.3 * torch.randn(30, generator=g)).double()


@pytest.mark.parametrize(
    "estimator", [ng.vi.Regression(200), ng.vi.Score(400), ng.vi.Reparametrised(40)], ids=lambda e: type(e).__name__
)
def test_logistic_regression_by_samples_agrees_with_the_one_by_quadrature(estimator: ng.vi.Estimator) -> None:
    x, y = _logistic()
    gaussian = ng.families.FullGaussian()
    prior = gaussian.from_information(_double(0, 0), torch.eye(2, dtype=torch.float64))
    log_p = lambda z: torch.nn.functional.logsigmoid((z @ x.T) * (2 * y - 1)).sum(-1)  # noqa: E731
    posterior = ng.vi.Posterior(gaussian, log_p, prior)
    found = ng.vi.fit(posterior, prior, steps=300, estimator=estimator, generator=_generator())
    mean, covariance = gaussian.covariance_form(found.eta)
    exact = ng.vi.BayesianLinear(ng.vi.BernoulliLogit(40), 2).double()
    ng.vi.ascend(exact, x, y, tolerance=1e-10)
    for one, other in zip((mean, covariance), exact.posterior(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)
    assert float(found.elbo[-20:].mean()) > float(found.elbo[0]) + 5


def test_a_prior_of_the_family_is_never_sampled() -> None:
    """A prior in closed form and the same prior inside the log-density have the same target."""
    gamma = ng.families.Gamma()
    prior, eta = _double(1.0, -2.0), _double(2.0, -1.0)
    parted = ng.vi.Posterior(gamma, lambda z: -z.sqrt(), prior)
    whole = ng.vi.Posterior(gamma, lambda z: -z.sqrt() + torch.distributions.Gamma(*_double(2.0, 2.0)).log_prob(z))
    for one, other in zip(parted.target(eta, None, _generator()), whole.target(eta, None, _generator()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_batches_are_independent_problems() -> None:
    gamma, data = ng.families.Gamma(), torch.tensor([[2.0, 5.0], [0.0, 1.0]], dtype=torch.float64)
    prior = _double(0.0, -1.0).expand(2, 2)
    move = ng.vi.Posterior(gamma, prior=prior, sites=ng.vi.PoissonRate().sites(data)).step(prior)
    torch.testing.assert_close(move.point, torch.tensor([[2.0, -3.0], [6.0, -3.0]], dtype=torch.float64))


def test_a_step_that_would_leave_the_domain_is_shortened_and_every_iterate_is_valid() -> None:
    """A log-density that is convex along z: its target has a negative precision."""
    gaussian = ng.families.DiagonalGaussian()
    posterior = ng.vi.Posterior(gaussian, lambda z: (2 * z.square() - z**4 / 4).sum(-1))
    eta = gaussian.from_covariance(_double(0.0), _double(0.04))
    move = posterior.step(eta, generator=_generator())
    assert bool(gaussian.contains(move.point))
    assert bool(move.shortened)
    assert "the whole would leave the domain" in move.reasons[0]
    found = ng.vi.fit(posterior, eta, steps=30, generator=_generator())
    assert bool(gaussian.contains(found.eta))
    assert 0 in found.reasons


def test_the_advice_of_a_shortened_step_names_an_argument_of_its_caller() -> None:
    gaussian = ng.families.DiagonalGaussian()
    posterior = ng.vi.Posterior(gaussian, lambda z: 2 * z.square().sum(-1))
    eta = gaussian.from_covariance(_double(0.0), _double(0.04))
    found = ng.vi.fit(posterior, eta, steps=1, generator=_generator())
    assert found.reasons[0][0].endswith("take shorter steps (a schedule= with smaller rates, such as 0.1)")
    move = posterior.step(eta, generator=_generator())
    assert move.reasons[0].endswith("take shorter steps (a smaller rate)")
    with pytest.raises(DomainError, match="a smaller lr or rate"):
        posterior.step(eta, generator=_generator(), boundary=ng.mirror.Forbid())


def test_the_reason_of_a_shortened_step_names_the_precision_matrix() -> None:
    gaussian = ng.families.FullGaussian()
    posterior = ng.vi.Posterior(gaussian, lambda z: 2 * z.square().sum(-1))
    move = posterior.step(gaussian.from_covariance(_double(0.0, 0.0), 0.04 * torch.eye(2).double()))
    assert "(η of FullGaussian: the precision matrix must be positive definite" in move.reasons[0]


def test_fit_finds_the_member_of_least_divergence() -> None:
    """q = Gamma for a log-normal posterior: the bound at the end is above that of all members around it."""
    gamma = ng.families.Gamma()
    target = torch.distributions.LogNormal(*_double(0.5, 0.4))
    posterior = ng.vi.Posterior(gamma, target.log_prob)
    found = ng.vi.fit(posterior, _double(3.0, -2.0), steps=200, generator=_generator())
    here = float(posterior.elbo(found.eta, 100_000, _generator()))
    for direction in (_double(0.5, 0.0), _double(-0.5, 0.0), _double(0.0, 0.3), _double(0.0, -0.3)):
        assert float(posterior.elbo(found.eta + direction, 100_000, _generator())) < here
    assert -0.05 < here < 0  # −KL(q ‖ p), as p is normalised


def test_what_the_samples_do_not_show_stays_as_it_is() -> None:
    """A class that is never drawn keeps its logit; the others move."""
    categorical = ng.families.Categorical(minimal=True)
    posterior = ng.vi.Posterior(categorical, lambda z: z @ _double(1.0, 2.0, 0.0))
    eta = _double(0.5, -60.0)
    torch.testing.assert_close(posterior.step(eta, generator=_generator()).point, _double(1.0, -60.0))


def test_the_random_stream_of_the_user_is_not_moved() -> None:
    posterior = ng.vi.Posterior(ng.families.Gamma(), lambda z: -z)
    before = torch.random.get_rng_state()
    posterior.step(_double(1.0, -1.0), generator=_generator())
    assert torch.equal(torch.random.get_rng_state(), before)


class TestBadInput:
    def test_a_posterior_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="a Posterior needs a log_density"):
            ng.vi.Posterior(ng.families.Gamma())

    def test_a_class_of_families_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"family must be .* got the class Gamma: write Gamma\(…\)"):
            ng.vi.Posterior(ng.families.Gamma, lambda z: -z)  # type: ignore[arg-type]

    def test_parameters_outside_the_domain_are_refused_by_entry(self) -> None:
        with pytest.raises(DomainError, match=r"Gamma: eta\[1\] = 1 must be below 0"):
            ng.vi.Posterior(ng.families.Gamma(), prior=_double(1.0, 1.0))
        with pytest.raises(DomainError, match=r"Gamma: eta\[0\] = -2 must be above -1"):
            ng.vi.Posterior(ng.families.Gamma(), lambda z: -z).step(_double(-2.0, -1.0))

    def test_batches_that_do_not_match_are_refused(self) -> None:
        posterior = ng.vi.Posterior(ng.families.Gamma(), prior=_double(1.0, -1.0).expand(3, 2))
        with pytest.raises(ValueError, match="eta must have the batch of both"):
            posterior.step(_double(1.0, -1.0))

    @pytest.mark.parametrize("size", [1, 3])
    def test_points_of_another_size_are_refused(self, size: int) -> None:
        """One entry would broadcast to every parameter."""
        eta, wrong = _double(1.0, -1.0), torch.full((size,), 0.5, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"the sites have shape \(\d,\) and eta \(2,\)"):
            ng.vi.Posterior(ng.families.Gamma(), prior=eta, sites=wrong).step(eta)
        with pytest.raises(ValueError, match=r"the prior has shape \(2,\) and eta \(3,\)"):
            ng.vi.Posterior(ng.families.Gamma(), prior=eta).step(_double(1.0, -1.0, 0.0))

    def test_a_bound_without_samples_and_a_fit_without_steps_are_refused(self) -> None:
        posterior = ng.vi.Posterior(ng.families.Gamma(), lambda z: -z, _double(1.0, -1.0))
        with pytest.raises(ValueError, match=r"elbo\(samples=0\) needs one sample or more"):
            posterior.elbo(_double(1.0, -1.0), samples=0)
        with pytest.raises(ValueError, match=r"fit\(steps=0\) needs one step or more"):
            ng.vi.fit(posterior, _double(1.0, -1.0), steps=0)

    def test_log_densities_of_the_wrong_shape_or_without_a_value_are_refused(self) -> None:
        gamma, eta = ng.families.Gamma(), _double(1.0, -1.0)
        with pytest.raises(ValueError, match="one number for every sample"):
            ng.vi.Posterior(gamma, lambda z: z.sum()).step(eta)
        with pytest.raises(NonFiniteError, match="the log-density is not finite at sample 0 of q"):
            ng.vi.Posterior(gamma, lambda z: z * math.nan).step(eta)

    def test_too_few_samples_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Regression\(samples=2\) cannot determine the 2 natural parameters"):
            ng.vi.Posterior(ng.families.Gamma(), lambda z: -z).step(_double(1.0, -1.0), estimator=ng.vi.Regression(2))
        with pytest.raises(ValueError, match=r"Score\(samples=1\) needs 2 or more"):
            ng.vi.Score(1)
        with pytest.raises(ValueError, match=r"Reparametrised\(samples=0\) needs 1 or more"):
            ng.vi.Reparametrised(0)

    def test_draws_that_cannot_be_differentiated_are_refused(self) -> None:
        posterior = ng.vi.Posterior(ng.families.Poisson(), lambda z: -z)
        with pytest.raises(TypeError, match="draws of Poisson cannot be differentiated"):
            posterior.step(_double(0.0)[0], estimator=ng.vi.Reparametrised(4))

    def test_step_sizes_outside_the_unit_interval_are_refused(self) -> None:
        posterior = ng.vi.Posterior(ng.families.Gamma(), prior=_double(1.0, -1.0))
        with pytest.raises(ValueError, match=r"rate=0 must lie in \(0, 1\]"):
            posterior.step(_double(1.0, -1.0), rate=0)
        with pytest.raises(ValueError, match="Decaying needs ½ < power ≤ 1"):
            ng.vi.Decaying(power=2.0)
        with pytest.raises(ValueError, match=r"rate=2.0 must lie in \(0, 1\]"):
            ng.vi.fit(posterior, _double(1.0, -1.0), schedule=2.0)
