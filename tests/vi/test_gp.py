"""Sparse Gaussian processes against dense closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import DomainError, NonFiniteError

pytestmark = pytest.mark.usefixtures("double_precision")

N, M = 24, 5


def _data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=g)
    return x, (6 * x[:, 0]).sin() + 0.1 * torch.randn(N, generator=g)


def _gp(likelihood: ng.vi.Likelihood, inducing: Tensor | None = None, jitter: float = 1e-9) -> ng.vi.SparseGP:
    z = _data()[0][:M] if inducing is None else inducing
    return ng.vi.SparseGP(ng.vi.SquaredExponential(0.5, variance=1.7), likelihood, z, jitter=jitter)


def _k(x: Tensor, y: Tensor) -> Tensor:
    return 1.7 * (-0.5 * (x[:, None] - y[None]).square().sum(-1) / 0.25).exp()


def _collapsed(σ2: float, k: Callable[[Tensor, Tensor], Tensor] = _k) -> Tensor:
    """log N(y | 0, Q + σ²) − tr(K − Q)/2σ² (Titsias 2009, (9)), dense."""
    x, y = _data()
    z = x[:M]
    k_zz = k(z, z)
    Q = k(x, z) @ torch.linalg.solve(k_zz + 1e-9 * k_zz.diagonal().max() * torch.eye(M), k(z, x))
    log_p = torch.distributions.MultivariateNormal(torch.zeros(N), Q + σ2 * torch.eye(N)).log_prob(y)
    return log_p - (k(x, x) - Q).trace() / (2 * σ2)


def test_one_step_of_size_one_is_the_collapsed_bound_for_gaussian_noise() -> None:
    x, y = _data()
    gp = _gp(ng.vi.GaussianNoise(0.04))
    assert gp.step(x, y).reason is None
    assert float((gp.elbo(x, y) - _collapsed(0.04)).detach().abs()) < 1e-7


def test_the_optimum_for_gaussian_noise_does_not_depend_on_where_the_step_starts() -> None:
    x, y = _data()
    gp = _gp(ng.vi.GaussianNoise(0.04))
    gp.step(x, y)
    first = gp.belief
    gp.step(x[:7], y[:7], rate=0.3)
    gp.step(x, y)
    torch.testing.assert_close(gp.shift, first.shift, rtol=0, atol=0)
    torch.testing.assert_close(gp.precision, first.precision, rtol=1e-14, atol=1e-12)


def test_with_an_inducing_point_at_every_datum_the_process_is_exact() -> None:
    x, y = _data()
    gp = _gp(ng.vi.GaussianNoise(0.04), inducing=x, jitter=1e-12)
    gp.step(x, y)
    K, noise = _k(x, x), 0.04 * torch.eye(N)
    log_p = torch.distributions.MultivariateNormal(torch.zeros(N), K + noise).log_prob(y)
    assert float((gp.elbo(x, y) - log_p).detach().abs()) < 1e-6
    at = torch.rand(4, 2, generator=torch.Generator().manual_seed(3))
    mean, variance = (t.detach() for t in gp.predict(at))
    k_ax = _k(at, x)
    torch.testing.assert_close(mean, k_ax @ torch.linalg.solve(K + noise, y), rtol=1e-6, atol=1e-6)
    exact = 1.7 - (k_ax * torch.linalg.solve(K + noise, k_ax.T).T).sum(1)
    torch.testing.assert_close(variance, exact, rtol=1e-6, atol=1e-6)


def test_at_the_optimum_the_gradient_of_the_bound_is_that_of_the_collapsed_one() -> None:
    x, y = _data()
    gp = _gp(ng.vi.GaussianNoise(0.04))
    gp.step(x, y)
    gp.elbo(x, y).backward()
    assert isinstance(gp.kernel, ng.vi.SquaredExponential)
    log_ℓ = torch.tensor(math.log(0.5), requires_grad=True)

    def k(a: Tensor, b: Tensor) -> Tensor:
        return 1.7 * (-0.5 * (a[:, None] - b[None]).square().sum(-1) / (2 * log_ℓ).exp()).exp()

    (slope,) = torch.autograd.grad(_collapsed(0.04, k), log_ℓ)
    torch.testing.assert_close(gp.kernel.log_lengthscale.grad, slope, rtol=1e-5, atol=1e-5)
    assert gp.inducing.grad is not None


LIKELIHOODS: dict[str, Callable[[], tuple[ng.vi.Likelihood, Tensor]]] = {
    "gaussian": lambda: (ng.vi.GaussianNoise(0.3), _data()[1]),
    "logit": lambda: (ng.vi.BernoulliLogit(nodes=80), (_data()[1] > 0).double()),
    "poisson": lambda: (ng.vi.PoissonCounts(), (3 + 2 * _data()[1]).round()),
    "student": lambda: (ng.vi.StudentNoise(3.0, 0.5, nodes=200), _data()[1]),
    "student, few nodes": lambda: (ng.vi.StudentNoise(3.0, 0.1), _data()[1]),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_slopes_are_the_derivatives_of_the_expectation(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]()
    g = torch.Generator().manual_seed(1)
    μ = torch.randn(N, generator=g).requires_grad_()
    v = (0.1 + 0.5 * torch.rand(N, generator=g)).requires_grad_()
    expected = torch.autograd.grad(likelihood.expected(y, μ, v).sum(), (μ, v))
    found = likelihood.slopes(y, μ.detach(), v.detach())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("likelihood", [ng.vi.BernoulliLogit(), ng.vi.PoissonCounts(), ng.vi.GaussianNoise()])
def test_labels_and_counts_of_every_type_have_one_expectation(likelihood: ng.vi.Likelihood, dtype: torch.dtype) -> None:
    y = torch.tensor([0, 1, 1, 0] if isinstance(likelihood, ng.vi.BernoulliLogit) else [0, 1, 3, 250])
    μ, v = torch.tensor([0.3, -0.2, 0.5, 4.0]), torch.tensor([1.0, 0.5, 0.1, 0.2])
    torch.set_default_dtype(torch.float32)  # as it is for most users; the fixture puts it back
    found, exact = likelihood.expected(y.to(dtype), μ, v), likelihood.expected(y.double(), μ, v)
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=0)
    for one, other in zip(likelihood.slopes(y.to(dtype), μ, v), likelihood.slopes(y.double(), μ, v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
def test_data_of_every_type_make_the_same_step(dtype: torch.dtype) -> None:
    x, y = _data()
    labels = (y > 0).float()
    for make in (lambda: _gp(ng.vi.BernoulliLogit()), lambda: ng.vi.BayesianLinear(ng.vi.BernoulliLogit(), 2)):
        one, other = make().float(), make().float()
        one.step(x.float(), labels, rate=0.5)
        other.step(x.float(), labels.to(dtype), rate=0.5)
        assert torch.equal(one.precision, other.precision)
        assert torch.equal(one.shift, other.shift)
        ng.vi.ascend(other, x.float(), labels.to(dtype), steps=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_quadrature_is_exact_for_polynomials_whatever_the_default_precision(dtype: torch.dtype) -> None:
    """E f⁴ = μ⁴ + 6μ²v + 3v² in double precision, with three nodes."""

    class Quartic(ng.vi.Quadrature):
        def check(self, y: Tensor) -> None: ...

        def log_density(self, y: Tensor, f: Tensor) -> Tensor:
            return f**4

    torch.set_default_dtype(dtype)  # the fixture puts it back
    likelihood = Quartic(nodes=3)
    μ, v = torch.tensor([0.7], dtype=torch.float64), torch.tensor([1.3], dtype=torch.float64)
    for each in (likelihood, likelihood.double()):
        torch.testing.assert_close(each.expected(μ, μ, v), μ**4 + 6 * μ**2 * v + 3 * v**2, rtol=1e-13, atol=0)


@pytest.mark.parametrize("variance", [0.0, 1e-17, 1e-15, 1e-12])
def test_the_slope_in_a_variance_of_nearly_zero_is_half_the_second_derivative(variance: float) -> None:
    """ℓ = −2 log(1 + t²/3) for t = (y − f)/s, ν = 3: ℓ″ = −(4/3s²)(1 − t²/3)/(1 + t²/3)²."""
    y, μ = torch.tensor([0.3]), torch.tensor([0.1])
    u = (y - μ).square() / 0.25 / 3
    second = -4 / (3 * 0.25) * (1 - u) / (1 + u).square()
    _, found = ng.vi.StudentNoise(3.0, 0.5).slopes(y, μ, torch.tensor([variance]))
    torch.testing.assert_close(found, 0.5 * second, rtol=1e-7, atol=0)


def test_a_bound_with_too_few_nodes_is_told_and_one_with_enough_is_not(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.linspace(0, 1, 40).unsqueeze(1)
    y = (6 * x[:, 0]).sin() + 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    for nodes, told in ((4, True), (200, False)):
        caplog.clear()
        likelihood = ng.vi.StudentNoise(3.0, 0.02, nodes=nodes)
        gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.3), likelihood, inducing=x[::10].clone())
        ng.vi.ascend(gp, x, y)
        assert ("the quadrature of StudentNoise changes the bound by" in caplog.text) is told
        μ, v = (t.detach() for t in gp.predict(x))
        finer = ng.vi.StudentNoise(3.0, 0.02, nodes=2 * nodes).expected(y, μ, v).sum()
        expected = abs(float(finer - likelihood.expected(y, μ, v).sum()))
        assert likelihood.gap(y, μ, v) == pytest.approx(expected, rel=1e-9)
    assert ng.vi.GaussianNoise().gap(y, μ, v) == 0.0


def test_a_step_with_narrow_noise_and_few_nodes_raises_the_bound() -> None:
    """With ½Σ w ℓ″ for the slope in the variance it fell by 160 nats."""
    x = torch.linspace(0, 1, 40).unsqueeze(1)
    y = (6 * x[:, 0]).sin() + 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    y[::7] += 3
    gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.3), ng.vi.StudentNoise(3.0, 0.1), inducing=x[::5].clone())
    before = float(gp.elbo(x, y).detach())
    assert gp.step(x, y).reason is None
    assert float(gp.elbo(x, y).detach()) > before + 50


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_step_is_the_inverse_fisher_times_the_gradient_of_the_bound(name: str) -> None:
    """Dense oracle in the chart (h, lower triangle of Λ), which is affine in the natural parameters."""
    likelihood, y = LIKELIHOODS[name]()
    x, y = _data()[0][:8], y[:8]
    gp = _gp(likelihood, inducing=x[:2])
    gp.step(x, y, rate=0.5)
    a, r = (t.detach() for t in gp.project(x))
    m = 2
    rows, columns = torch.tril_indices(m, m)

    def unpacked(η: Tensor) -> tuple[Tensor, Tensor]:
        low = torch.zeros(m, m).index_put((rows, columns), η[m:])
        return η[:m], low + low.T - torch.diag(low.diagonal())

    def log_Z(η: Tensor) -> Tensor:
        h, Λ = unpacked(η)
        return 0.5 * h @ torch.linalg.solve(Λ, h) - 0.5 * torch.linalg.slogdet(Λ)[1]

    def bound(η: Tensor) -> Tensor:
        h, Λ = unpacked(η)
        Σ = torch.linalg.inv(Λ)
        μ = Σ @ h
        kl = 0.5 * (Σ.trace() + μ @ μ - m + torch.linalg.slogdet(Λ)[1])
        return likelihood.expected(y, a @ μ, r + ((a @ Σ) * a).sum(1)).sum() - kl

    η = torch.cat([gp.shift, gp.precision[rows, columns]])
    F = torch.func.hessian(log_Z)(η)
    with torch.enable_grad():
        leaf = η.clone().requires_grad_()
        (slope,) = torch.autograd.grad(bound(leaf), leaf)
    expected = η + 0.1 * torch.linalg.solve(F, slope)
    gp.step(x, y, rate=0.1)
    found = torch.cat([gp.shift, gp.precision[rows, columns]])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_targets_of_batches_average_to_the_target_of_all_data() -> None:
    x, y = _data()
    gp = _gp(ng.vi.PoissonCounts())
    y = (3 + 2 * y).round()
    parts = []
    for half in (slice(0, N // 2), slice(N // 2, N)):
        other = _gp(ng.vi.PoissonCounts())
        other.step(x[half], y[half], total=N)
        parts.append(other.precision)
    gp.step(x, y)
    torch.testing.assert_close(sum(parts) / 2, gp.precision, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_ascent_never_lowers_the_bound_and_ends_where_its_gradient_vanishes(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]()
    x = _data()[0]
    gp = _gp(likelihood)
    ascent = ng.vi.ascend(gp, x, y, tolerance=1e-11)
    assert all(b >= a - 1e-9 for a, b in zip(ascent.elbo, ascent.elbo[1:], strict=False))
    at = gp.project(x)
    μ, v, _ = gp.belief.marginals(at)
    target = gp.target(at, y, μ, v)
    torch.testing.assert_close(target.shift.detach(), gp.shift, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(target.precision.detach(), gp.precision, rtol=1e-3, atol=1e-3)


def test_a_step_that_would_leave_the_domain_is_shortened_with_the_reason() -> None:
    x = torch.zeros(3, 1)
    gp = ng.vi.SparseGP(ng.vi.SquaredExponential(), ng.vi.StudentNoise(1.0, 0.2, nodes=60), torch.zeros(1, 1))
    step = gp.step(x, torch.tensor([2.0, 2.0, 2.0]))
    assert step.reason is not None
    assert "shortened from 1 to" in step.reason
    assert "the precision of q(v) must stay positive definite" in step.reason
    assert float(gp.precision) > 0


def test_its_state_is_saved_with_the_module() -> None:
    x, y = _data()
    gp, other = _gp(ng.vi.GaussianNoise(0.1)), _gp(ng.vi.GaussianNoise(0.1))
    gp.step(x, y)
    other.load_state_dict(gp.state_dict())
    assert torch.equal(gp.elbo(x, y), other.elbo(x, y))


def test_matern_covariances_are_those_of_the_literature() -> None:
    x = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    r = torch.cdist(x, x) / 0.7
    found = ng.vi.Matern(1.5, 0.7, variance=2.0)(x, x).detach()
    torch.testing.assert_close(found, 2 * (1 + math.sqrt(3) * r) * (-math.sqrt(3) * r).exp(), rtol=1e-8, atol=1e-8)


class TestBadInput:
    def test_data_outside_the_support_leave_the_belief_as_it_was(self) -> None:
        x, _ = _data()
        gp = _gp(ng.vi.BernoulliLogit())
        y = torch.zeros(N)
        y[3] = -1.0
        with pytest.raises(DomainError, match=r"y\[3\] = -1 is not a label 0 or 1"):
            gp.step(x, y)
        assert torch.equal(gp.precision, torch.eye(M))
        with pytest.raises(DomainError, match=r"y\[0\] = 0.5 is not a count"):
            _gp(ng.vi.PoissonCounts()).step(x, torch.full((N,), 0.5))
        with pytest.raises(DomainError, match="is not a finite number"):
            _gp(ng.vi.GaussianNoise()).step(x, torch.full((N,), math.nan))

    def test_shapes_that_do_not_match_are_refused(self) -> None:
        x, y = _data()
        gp = _gp(ng.vi.GaussianNoise())
        with pytest.raises(ValueError, match=r"inputs x \[n \*shape\] and data y \[n\] are needed"):
            gp.step(x, y[:3])
        with pytest.raises(ValueError, match="do not match inducing points"):
            gp.step(x[:, :1], y)
        with pytest.raises(ValueError, match="total=3 is the number of all data"):
            gp.step(x, y, total=3)
        with pytest.raises(ValueError, match=r"rate=1.5 must lie in \(0, 1\]"):
            gp.step(x, y, rate=1.5)
        with pytest.raises(NonFiniteError, match="the inputs x holds NaN or infinity"):
            gp.step(x * math.inf, y)

    def test_a_batch_without_data_leaves_the_belief_as_it_was(self) -> None:
        x, y = _data()
        gp = _gp(ng.vi.GaussianNoise())
        gp.step(x, y)
        before = gp.precision.clone()
        for total in (None, N):
            with pytest.raises(ValueError, match="the batch is empty"):
                gp.step(x[:0], y[:0], total=total)
        assert torch.equal(gp.precision, before)

    def test_a_step_that_overflows_leaves_the_belief_as_it_was(self) -> None:
        """E e^f = e^(μ + v/2) under a prior with v = 10⁴ is no number."""
        x, y = _data()
        gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.5, variance=1e4), ng.vi.PoissonCounts(), x[:M])
        for move in (gp.step, lambda x, y: ng.vi.ascend(gp, x, y)):
            with pytest.raises(NonFiniteError, match=r"E log p of PoissonCounts has no finite derivatives"):
                move(x, torch.ones_like(y))
        assert torch.equal(gp.precision, torch.eye(M))
        assert torch.equal(gp.shift, torch.zeros(M))

    def test_inputs_of_a_higher_precision_than_the_model_are_refused(self) -> None:
        x, y = _data()
        linear = ng.vi.BayesianLinear(ng.vi.GaussianNoise(), 2)
        for model in (_gp(ng.vi.GaussianNoise()).float(), linear.float()):
            with pytest.raises(TypeError, match=r"the inputs x are torch.float64 and the model is torch.float32"):
                model.step(x, y)
            with pytest.raises(TypeError, match=r"call model.to\(torch.float64\), or convert x"):
                model.predict(x)

    def test_parts_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"inducing points must be \[m \*shape\]"):
            _gp(ng.vi.GaussianNoise(), inducing=torch.zeros(3))
        with pytest.raises(ValueError, match="jitter must be ≥ 0"):
            _gp(ng.vi.GaussianNoise(), jitter=-1.0)
        with pytest.raises(ValueError, match="singular at jitter=0: inducing points coincide"):
            _gp(ng.vi.GaussianNoise(), inducing=torch.zeros(2, 2), jitter=0.0).predict(torch.zeros(1, 2))
        with pytest.raises(ValueError, match="lengthscale must be a positive number"):
            ng.vi.SquaredExponential(-1.0)
        with pytest.raises(ValueError, match="variance must be positive and finite"):
            ng.vi.SquaredExponential(1.0, variance=0.0)
        with pytest.raises(ValueError, match=r"GaussianNoise\(variance\) must be positive"):
            ng.vi.GaussianNoise(0.0)
        with pytest.raises(ValueError, match=r"StudentNoise\(degrees, scale\) must be positive"):
            ng.vi.StudentNoise(0.0)
        with pytest.raises(ValueError, match="a quadrature needs one node or more"):
            ng.vi.BernoulliLogit(nodes=0)


def test_hyperparameters_are_learned_beside_the_natural_steps() -> None:
    x, y = _data()
    gp = _gp(ng.vi.GaussianNoise(1.0))
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
    gp.step(x, y)
    before = float(gp.elbo(x, y).detach())
    for _ in range(30):
        optimizer.zero_grad()
        (-gp.elbo(x, y)).backward()
        optimizer.step()
        gp.step(x, y)
    assert float(gp.elbo(x, y).detach()) > before + 10
    assert all(isinstance(p, nn.Parameter) for p in gp.parameters())
