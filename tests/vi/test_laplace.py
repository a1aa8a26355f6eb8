"""The Laplace approximation against dense linear algebra, for every structure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import natgrad as ng
from natgrad.model import Model
from tests import kronecker_oracle, oracle
from tests.optim.tasks import seeded
from tests.pulled import normal
from tests.zoo import case, mlp, opaque

DOUBLE = torch.float64


class Scaled(nn.Module):
    """Two layers, and a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(3, 4, 2)
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        return self.inner(x) * self.scale


def _problem(build: Callable[[], nn.Module] = Scaled) -> tuple[nn.Module, Tensor]:
    return seeded(lambda: (build().double(), torch.randn(7, 3, dtype=DOUBLE)))


def _kfac(model: nn.Module, x: Tensor, G: Tensor) -> Tensor:
    layers = kronecker_oracle.layers(model, x, oracle.hellinger_roots(model(x)))
    return kronecker_oracle.kfac(layers, "expand", G)


def _ekfac(model: nn.Module, x: Tensor, G: Tensor) -> Tensor:
    layers = kronecker_oracle.layers(model, x, oracle.hellinger_roots(model(x)))
    bases = [tuple(torch.linalg.eigh(factor)[1] for factor in layer.factors("expand", None)) for layer in layers]
    return kronecker_oracle.ekfac(layers, bases, G)


def _blocks(model: nn.Module, x: Tensor, G: Tensor) -> Tensor:
    return oracle.block_diagonal(G, oracle.layer_blocks(model).values())


KEPT: dict[str, tuple[ng.structures.Structure, Callable[[nn.Module, Tensor, Tensor], Tensor]]] = {
    "dense": (ng.Dense(), lambda model, x, G: G),
    "kernel": (ng.Kernel(), lambda model, x, G: G),
    "implicit": (ng.Implicit(), lambda model, x, G: G),
    "blocks": (ng.BlockDense(), _blocks),
    "diagonal": (ng.Diagonal(), lambda model, x, G: oracle.diagonal(G)),
    "low rank": (ng.LowRank(3), lambda model, x, G: oracle.low_rank(G, 3)),
    "kronecker": (ng.Kronecker(), _kfac),
    "eigen": (ng.EigenKronecker(), _ekfac),
}
δ = 0.7


def _oracle(kept: str) -> tuple[ng.vi.Laplace, Tensor, nn.Module, Tensor]:
    """The approximation, and its precision N·G + δ [P P] from the oracle."""
    model, x = _problem()
    structure, keep = KEPT[kept]
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.categorical(model(x)))
    precision = len(x) * keep(model, x, G).detach() + δ * torch.eye(len(G), dtype=DOUBLE)
    return ng.vi.Laplace(model, x, ng.Fisher(ng.Categorical()), structure, δ), precision, model, x


@pytest.mark.parametrize("kept", KEPT)
def test_samples_have_the_inverse_of_n_g_plus_the_prior_precision_as_covariance(kept: str) -> None:
    posterior, precision, model, _ = _oracle(kept)
    T = posterior.coloured(torch.eye(posterior.inverse.root_size, dtype=DOUBLE)).T  # T of θ = θ* + T ξ
    torch.testing.assert_close(T @ T.T, torch.linalg.inv(precision), rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.covariance(), torch.linalg.inv(precision), rtol=0, atol=1e-10)
    drawn = posterior.sample(5, torch.Generator().manual_seed(3))
    ξ = torch.randn(5, posterior.inverse.root_size, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    flat = torch.cat([t.flatten(1) for t in drawn.values()], dim=1)
    torch.testing.assert_close(flat, oracle.flatten(model.parameters()) + ξ @ T.T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kept", KEPT)
def test_the_linearised_predictive_covariance_is_j_sigma_j(kept: str) -> None:
    posterior, precision, model, x = _oracle(kept)
    points = x[:3] + 0.5
    J = oracle.module_jacobian(model, points)
    found = posterior.predictive(points)
    expected = J @ torch.linalg.inv(precision) @ J.mT
    torch.testing.assert_close(found.covariance, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.variance, expected.diagonal(dim1=1, dim2=2), rtol=0, atol=1e-10)
    torch.testing.assert_close(found.mean, model(points).detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kept", [kept for kept in KEPT if kept != "implicit"])
def test_the_evidence_is_that_of_the_gaussian_integral(kept: str) -> None:
    posterior, precision, model, _ = _oracle(kept)
    θ = oracle.flatten(model.parameters())
    occam = 0.5 * len(θ) * math.log(δ) - 0.5 * δ * θ @ θ - 0.5 * torch.logdet(precision)
    torch.testing.assert_close(posterior.log_marginal_likelihood(-3.0), occam - 3.0, rtol=1e-11, atol=0)


@pytest.mark.parametrize("kept", [kept for kept in KEPT if kept != "implicit"])
def test_the_tuned_prior_precision_maximises_the_evidence(kept: str) -> None:
    posterior, precision, model, _ = _oracle(kept)
    tuned = posterior.tuned()
    curvature = precision - δ * torch.eye(len(precision), dtype=DOUBLE)
    λ, θ = torch.linalg.eigvalsh(curvature), oracle.flatten(model.parameters())
    γ = (λ / (λ + tuned.prior_precision)).sum()  # stationary: δ‖θ‖² = γ, MacKay (1992)
    assert float(tuned.prior_precision * θ @ θ) == pytest.approx(float(γ), rel=1e-6)
    assert float(tuned.log_marginal_likelihood(0.0)) > float(posterior.log_marginal_likelihood(0.0))
    assert posterior.prior_precision == δ


DECOMPOSED = [kept for kept in KEPT if kept not in ("implicit", "low rank")]


@pytest.mark.parametrize("kept", DECOMPOSED)
def test_the_evidence_is_differentiable_in_a_prior_that_requires_a_gradient(kept: str) -> None:
    """∂/∂δ = ½(P/δ − tr (N·G + δ)⁻¹ − ‖θ*‖²)."""
    posterior, precision, model, _ = _oracle(kept)
    prior = torch.tensor(δ, dtype=DOUBLE, requires_grad=True)
    learned = posterior.with_prior(prior)
    evidence = learned.log_marginal_likelihood(-3.0)
    torch.testing.assert_close(evidence.detach(), posterior.log_marginal_likelihood(-3.0), rtol=1e-11, atol=0)
    (slope,) = torch.autograd.grad(evidence, prior)
    θ = oracle.flatten(model.parameters())
    expected = 0.5 * (len(θ) / δ - torch.linalg.inv(precision).trace() - θ @ θ)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-9)
    assert learned.prior_precision == δ  # a number, and no warning of torch


@pytest.mark.parametrize("kept", KEPT)
def test_another_prior_gives_what_a_new_approximation_gives(kept: str) -> None:
    posterior, _, model, x = _oracle(kept)
    again = posterior.with_prior(3.0)
    new = ng.vi.Laplace(model, x, ng.Fisher(ng.Categorical()), KEPT[kept][0], torch.tensor(3.0))
    torch.testing.assert_close(again.covariance(), new.covariance(), rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.covariance(), posterior.with_prior(δ).covariance(), rtol=0, atol=0)


@pytest.mark.parametrize("kept", ["kronecker", "eigen", "blocks", "dense"])
def test_many_priors_cost_one_eigendecomposition(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inverses and determinants of Kronecker factors at another prior factor nothing; the search needs one spectrum."""
    posterior, _, _, x = _oracle(kept)
    count = 0

    def counted(compute: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return compute(*args, **options)

        return inner

    for name in ("eigh", "eigvalsh", "cholesky_ex", "cholesky"):
        monkeypatch.setattr(torch.linalg, name, counted(getattr(torch.linalg, name)))
    posterior.tuned()
    assert count <= 8  # 40 times as many when every prior was factored by itself
    if kept in ("kronecker", "eigen"):
        count = 0
        for prior in (1.0, 2.0, 3.0):
            other = posterior.with_prior(prior)
            other.log_marginal_likelihood(0.0)
            other.predictive(x[:2])
        assert count <= 3  # the parameter without a rule


def _smooth() -> tuple[nn.Module, Tensor]:
    """A network of one input: the metric has eigenvalues of every size, most of them far below rounding."""
    return seeded(lambda: (nn.Sequential(nn.Linear(1, 15), nn.Tanh(), nn.Linear(15, 2)), torch.linspace(-1, 1, 80)))


@pytest.mark.parametrize("kept", [kept for kept in KEPT if kept != "implicit"])
@pytest.mark.parametrize("σ", [0.3, 0.03])
def test_the_evidence_in_single_precision_is_that_in_double_precision(kept: str, σ: float) -> None:
    """Half of the eigenvalues that are zero are negative in single precision, and those of N·G reach 10⁶."""
    model, x = _smooth()
    found = []
    for dtype in (torch.float32, DOUBLE):
        metric = ng.Fisher(ng.Gaussian(scale=σ))
        posterior = ng.vi.Laplace(model.to(dtype), x.to(dtype)[:, None], metric, KEPT[kept][0], prior_precision=0.1)
        found.append(float(posterior.log_marginal_likelihood(0.0)))
    assert found[0] == pytest.approx(found[1], abs=1.0)


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker(), ng.LowRank(40)])
def test_log_determinants_with_damping_below_rounding_are_those_in_double_precision(
    structure: ng.structures.Structure,
) -> None:
    model, x = _smooth()
    found = []
    for dtype in (torch.float32, DOUBLE):
        G = structure.estimate(ng.pullback(model.to(dtype), x.to(dtype)[:, None], ng.Euclidean()))
        found.append(float(G.logdet(1e-7)))
    assert found[0] == pytest.approx(found[1], rel=0.05)


@pytest.mark.parametrize("kept", ["kronecker", "diagonal"])
@pytest.mark.parametrize("seed", range(2))
def test_the_predictive_in_single_precision_is_that_in_double_precision(kept: str, seed: int) -> None:
    """A direction without curvature has the variance 1/δ, which outputs must not see by rounding."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    x, points, found = torch.linspace(-2, 2, 150)[:, None], torch.linspace(-3, 3, 20)[:, None], []
    for dtype in (torch.float32, DOUBLE):
        metric = ng.Fisher(ng.Gaussian(scale=0.03))
        posterior = ng.vi.Laplace(model.to(dtype), x.to(dtype), metric, KEPT[kept][0], prior_precision=0.01)
        found.append(posterior.predictive(points.to(dtype)).variance.double())
    torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=0)


def _regression(n: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """x [n 3], targets [n 2] and the features [n 4] with the homogeneous 1."""
    x, t = seeded(lambda: (torch.randn(n, 3, dtype=DOUBLE), torch.randn(n, 2, dtype=DOUBLE)), seed=5)
    return x, t, torch.cat([x, torch.ones(n, 1, dtype=DOUBLE)], dim=1)


def _at_the_mode(Φ: Tensor, t: Tensor, σ: float) -> tuple[nn.Linear, Tensor]:
    """A linear model at the mean of its posterior, and the posterior covariance of every output's weights [4 4]."""
    covariance = torch.linalg.inv(Φ.T @ Φ / σ**2 + δ * torch.eye(4, dtype=DOUBLE))
    W = (covariance @ Φ.T @ t / σ**2).T  # [2 4]
    model = nn.Linear(3, 2).double()
    model.load_state_dict({"weight": W[:, :3], "bias": W[:, 3]})
    return model, covariance


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Kernel(), ng.Kronecker(), ng.EigenKronecker()])
def test_laplace_is_exact_for_bayesian_linear_regression(structure: ng.structures.Structure) -> None:
    """Posterior, predictive variance and evidence in closed form (Bishop 2006, (3.53), (3.59); (2.115))."""
    σ, (x, t, Φ) = 0.3, _regression()
    model, covariance = _at_the_mode(Φ, t, σ)
    posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=σ)), structure, δ)
    order = [0, 1, 2, 6, 3, 4, 5, 7]  # (weight, bias) by outputs
    exact = torch.block_diag(covariance, covariance)
    torch.testing.assert_close(posterior.covariance()[order][:, order], exact, rtol=0, atol=1e-10)
    var = posterior.predictive(x).variance
    torch.testing.assert_close(var[:, 0], ((Φ @ covariance) * Φ).sum(1), rtol=0, atol=1e-10)
    ll = torch.distributions.Normal(model(x), σ).log_prob(t).sum()
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(len(x), dtype=DOUBLE), σ**2 * torch.eye(len(x), dtype=DOUBLE) + Φ @ Φ.T / δ
    )
    torch.testing.assert_close(
        posterior.log_marginal_likelihood(ll), marginal.log_prob(t.T).sum(), rtol=1e-10, atol=1e-10
    )


# σ of Gaussian noise.


ONE = torch.ones((), requires_grad=True)

NOISES: dict[str, tuple[Any, float]] = {
    "family": (ng.Fisher(ng.Gaussian(scale=0.4)), 0.4),
    "euclidean": (ng.Euclidean(), 1.0),
    "loss": (nn.MSELoss(), 0.5**0.5),
    "sampled": (ng.Sampled(ng.Fisher(ng.Gaussian(scale=0.4)), 5), 0.4),
}


def _noisy() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, x and residuals."""
    model, x = _problem()
    return model, x, seeded(lambda: torch.randn(7, 2, dtype=DOUBLE), seed=4)


@pytest.mark.parametrize("kept", KEPT)
def test_another_noise_gives_what_a_new_approximation_gives(kept: str) -> None:
    model, x, _ = _noisy()
    structure = KEPT[kept][0]
    new = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=0.2)), structure, δ)
    for name in ("family",) if kept == "implicit" else ("family", "euclidean", "loss"):
        metric, scale = NOISES[name]
        posterior = ng.vi.Laplace(model, x, metric, structure, δ)
        again = posterior.with_noise(0.2)
        torch.testing.assert_close(again.covariance(), new.covariance(), rtol=0, atol=1e-9)
        torch.testing.assert_close(again.predictive(x).covariance, new.predictive(x).covariance, rtol=0, atol=1e-9)
        assert posterior.noise_scale == pytest.approx(scale)
        assert again.noise_scale == 0.2
        if kept != "implicit":
            found, expected = (q.log_marginal_likelihood(-3.0) for q in (again, new))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    drawn = [q.sample(3, torch.Generator().manual_seed(1)) for q in (again, new)]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("kept", DECOMPOSED)
def test_the_evidence_is_differentiable_in_the_noise_and_the_prior(kept: str, name: str) -> None:
    """Against torch's derivative of the dense formula."""
    model, x, r = _noisy()
    metric, scale = NOISES[name]
    posterior = ng.vi.Laplace(model, x, metric, KEPT[kept][0], δ, generator=torch.Generator().manual_seed(0))
    H, θ = 7 * scale**2 * posterior.operator.dense(), oracle.flatten(model.parameters()).detach()

    def dense(σ: Tensor, prior: Tensor) -> Tensor:
        precision = H / σ**2 + prior * torch.eye(len(θ), dtype=DOUBLE)
        ll = torch.distributions.Normal(0.0, σ).log_prob(r).sum()
        return ll + 0.5 * (len(θ) * prior.log() - prior * θ @ θ - torch.logdet(precision))

    σ, prior = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True), torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
    ll = torch.distributions.Normal(0.0, σ).log_prob(r).sum()
    found = posterior.with_noise(σ).with_prior(prior).log_marginal_likelihood(ll)
    expected = dense(σ, prior)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    slopes = [torch.autograd.grad(value, (σ, prior), retain_graph=True) for value in (found, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-8, atol=1e-9)


def test_the_slope_of_the_evidence_is_that_of_the_exact_marginal_likelihood() -> None:
    """At the mode of a linear model: where θ* goes does not matter to first order."""
    σ = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    prior = torch.tensor(δ, dtype=DOUBLE, requires_grad=True)
    x, t, Φ = _regression()
    model, _ = _at_the_mode(Φ, t, 0.3)
    posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=1.0)), ng.Kronecker()).with_noise(σ)
    ll = torch.distributions.Normal(model(x).detach(), σ).log_prob(t).sum()
    evidence = posterior.with_prior(prior).log_marginal_likelihood(ll)
    one = torch.eye(len(x), dtype=DOUBLE)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=DOUBLE), σ**2 * one + Φ @ Φ.T / prior)
    exact = marginal.log_prob(t.T).sum()
    torch.testing.assert_close(evidence, exact, rtol=1e-10, atol=0)
    slopes = [torch.autograd.grad(value, (σ, prior)) for value in (evidence, exact)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shrink", [1.0, 1e-3], ids=["large residuals", "small residuals"])
@pytest.mark.parametrize("kept", [kept for kept in KEPT if kept != "implicit"])
def test_the_tuned_noise_and_prior_maximise_the_evidence_together(kept: str, shrink: float) -> None:
    """Both slopes of the dense formula are zero, and it is lower on a circle around."""
    model, x, r = _noisy()
    r = shrink * r
    posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=0.4)), KEPT[kept][0], δ)
    tuned = posterior.tuned(r)
    H, θ = 7 * 0.4**2 * posterior.operator.dense(), oracle.flatten(model.parameters()).detach()

    def dense(logs: Tensor) -> Tensor:
        σ, prior = logs.exp()
        precision = H / σ**2 + prior * torch.eye(len(θ), dtype=DOUBLE)
        ll = torch.distributions.Normal(0.0, σ).log_prob(r).sum()
        return ll + 0.5 * (len(θ) * prior.log() - prior * θ @ θ - torch.logdet(precision))

    assert tuned.noise_scale is not None
    best = torch.tensor([tuned.noise_scale, tuned.prior_precision], dtype=DOUBLE).log()
    slope = torch.func.grad(dense)(best)
    assert float(slope.abs().max()) < 1e-4
    for angle in torch.linspace(0, 2 * torch.pi, 9, dtype=DOUBLE):
        assert float(dense(best + 0.1 * torch.stack([angle.cos(), angle.sin()]))) < float(dense(best))
    # The prior alone, at this noise, has the same best value.
    assert tuned.tuned().prior_precision == pytest.approx(tuned.prior_precision, rel=1e-4)


def _no_gradient() -> None:
    model, x, _ = _noisy()
    posterior = ng.vi.Laplace(model, x, ng.Euclidean())
    posterior.with_noise(torch.tensor(0.3, requires_grad=True)).log_marginal_likelihood(-3.0)


def _with(metric: Any, use: Callable[[ng.vi.Laplace], Any], structure: Any = None) -> Callable[[], Any]:
    return lambda: use(ng.vi.Laplace(*_problem(), metric, structure))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_no_gradient, ValueError, "requires a gradient, and log_likelihood has none"),
        (
            _with(ng.Fisher(ng.Categorical()), lambda q: q.with_noise(0.1)),
            ng.errors.IncompatibleError,
            r"there is no σ to choose with Fisher\(.*Use Fisher\(Gaussian\(scale=σ\)\)",
        ),
        (
            _with(nn.L1Loss(), lambda q: q.tuned(torch.ones(7, 2))),
            ng.errors.IncompatibleError,
            "there is no σ to choose with .*L1Loss",
        ),
        (_with(ng.Euclidean(), lambda q: q.with_noise(-1.0)), ValueError, r"with_noise\(scale\) must be positive"),
        (
            _with(ng.Euclidean(), lambda q: q.with_noise(torch.ones(2))),
            TypeError,
            r"must be one number, σ of the noise",
        ),
        (
            _with(ng.Euclidean(), lambda q: q.tuned(torch.ones(3, 2))),
            ValueError,
            r"residuals must be t − y of all 7 examples, .*got shape \(3, 2\)",
        ),
        (
            _with(ng.Euclidean(), lambda q: q.tuned(torch.ones(7, 7))),
            ValueError,
            r"all 7 examples, with 2 each, got shape \(7, 7\): give t and y one shape before they are subtracted",
        ),
        (
            _with(ng.Euclidean(), lambda q: q.tuned(torch.full((7, 2), torch.nan))),
            ng.errors.NonFiniteError,
            "the tensor of residuals t − y holds NaN",
        ),
        (
            _with(ng.Euclidean(), lambda q: q.tuned([0.1] * 7)),  # type: ignore[arg-type]
            TypeError,
            "residuals must be a tensor, t − y, got",
        ),
        (
            _with(ng.Euclidean(), lambda q: q.tuned(torch.zeros(7, 2))),
            ng.errors.SingularMetricError,
            "the residuals are zero: the evidence has no maximum over σ",
        ),
        (
            _with(
                ng.Euclidean(),
                lambda q: q.with_noise(ONE).log_marginal_likelihood(ONE),
                ng.LowRank(2),
            ),
            ng.errors.IncompatibleError,
            "a scale of the noise that requires a gradient does not work with LowRankOperator",
        ),
        (
            lambda: ng.Gaussian(scale=ONE),  # type: ignore[arg-type]
            TypeError,
            r"got a tensor that requires a gradient: .*with_noise\(σ\) or .tuned\(residuals\)",
        ),
        (
            lambda: ng.Gaussian(scale=torch.ones(2)),  # type: ignore[arg-type]
            TypeError,
            r"is one number, and got a tensor of shape \(2,\)",
        ),
    ],
)
def test_a_noise_that_cannot_be_chosen_is_refused_with_the_reason(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


SCALINGS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[float, int], float]]] = {
    "sum": (lambda y, t: (y - t).square().sum() / (2 * 0.3**2), lambda c, N: c),
    "mean": (lambda y, t: (y - t).square().sum(1).mean() / (2 * 0.3**2), lambda c, N: N * c),
    "MSELoss": (F.mse_loss, lambda c, N: N * c * 2 / (2 * 0.3**2)),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_prior_precision_of_a_regularised_loss_is_as_documented(kind: str) -> None:
    """With that δ the minimum of loss + (c/2)‖θ‖² is the mean of the exact posterior."""
    (loss, precision), c, (x, t, Φ) = SCALINGS[kind], 0.05, _regression()

    def regularised(θ: Tensor) -> Tensor:
        return loss(Φ @ θ.view(2, 4).T, t) + 0.5 * c * θ.square().sum()

    zero = torch.zeros(8, dtype=DOUBLE)
    H, g = torch.func.hessian(regularised)(zero), torch.func.grad(regularised)(zero)
    W = -torch.linalg.solve(H, g).view(2, 4)  # a quadratic: one Newton step
    prior = precision(c, len(x))
    exact = torch.linalg.inv(Φ.T @ Φ / 0.3**2 + prior * torch.eye(4, dtype=DOUBLE))
    torch.testing.assert_close(W, (exact @ Φ.T @ t / 0.3**2).T, rtol=0, atol=1e-10)
    model = nn.Linear(3, 2).double()
    posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=0.3)), prior_precision=prior)
    found = posterior.covariance()[[0, 1, 2, 6]][:, [0, 1, 2, 6]]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


BATCHED: dict[str, tuple[str, ng.structures.Structure]] = {
    **{kept: (kept, structure) for kept, (structure, _) in KEPT.items() if kept != "low rank"},
}


@pytest.mark.parametrize("shuffle", [False, True], ids=["ordered", "shuffled"])
@pytest.mark.parametrize("name", BATCHED)
def test_a_loader_gives_the_posterior_of_all_its_examples(name: str, shuffle: bool) -> None:
    kept, structure = BATCHED[name]
    _, precision, model, x = _oracle(kept)
    loader = DataLoader(TensorDataset(x), batch_size=3, shuffle=shuffle, generator=torch.Generator().manual_seed(1))
    batched = ng.vi.Laplace(model, loader, ng.Fisher(ng.Categorical()), structure, δ)  # 3, 3 and 1
    assert batched.examples == len(x)
    torch.testing.assert_close(batched.covariance(), torch.linalg.inv(precision), rtol=0, atol=1e-10)


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker()])
def test_the_posterior_of_a_linear_model_is_exact_however_its_data_are_batched(
    structure: ng.structures.Structure,
) -> None:
    """The first batch has other eigenvectors than the data, whose inputs have very different variances."""
    σ, (x, t, Φ) = 0.3, _regression()
    scale = torch.tensor([3.0, 1.0, 0.3, 1.0], dtype=DOUBLE)
    model, covariance = _at_the_mode(Φ * scale, t, σ)
    loader = DataLoader(TensorDataset(x * scale[:3]), batch_size=2)
    posterior = ng.vi.Laplace(model, loader, ng.Fisher(ng.Gaussian(scale=σ)), structure, δ)
    order = [0, 1, 2, 6, 3, 4, 5, 7]  # (weight, bias) by outputs
    exact = torch.block_diag(covariance, covariance)
    torch.testing.assert_close(posterior.covariance()[order][:, order], exact, rtol=0, atol=1e-10)


class HalfOpaque(nn.Module):
    """Two products with x, of which one has a layer and the other, v, has not."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.layer = nn.Parameter(torch.randn(2, 3)), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        y: Tensor = self.layer(x) + opaque(x, self.v)
        return y


def test_the_fallback_of_a_loader_is_that_of_all_its_examples() -> None:
    model, x = _problem(HalfOpaque)
    one = torch.eye(6, dtype=DOUBLE)
    block = torch.linalg.inv(torch.block_diag(x.T @ x, x.T @ x) + δ * one)  # of either
    structure = ng.EigenKronecker(fallback=ng.BlockDense())
    posterior = ng.vi.Laplace(model, DataLoader(TensorDataset(x), batch_size=3), ng.Euclidean(), structure, δ)
    torch.testing.assert_close(posterior.covariance(), torch.block_diag(block, block), rtol=0, atol=1e-10)


def test_a_sampled_metric_of_a_loader_has_the_trace_of_its_samples() -> None:
    """EK-FAC keeps the trace of G, here of the rows s xᵀ that were drawn in the second pass over the loader."""
    model, x = seeded(lambda: nn.Linear(3, 2, bias=False).double()), normal(6, 3)
    metric, generator = ng.Fisher(ng.Gaussian(), samples=1), torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x), batch_size=2)
    posterior = ng.vi.Laplace(model, loader, metric, ng.EigenKronecker(), δ, generator=generator)
    again = torch.Generator().manual_seed(3)
    drawn = [torch.randn(2, 2, generator=again, dtype=DOUBLE) for _ in range(6)]  # s [n o] of 3 batches, twice
    expected = (torch.cat(drawn[3:]).square().sum(1) * x.square().sum(1)).sum() / 6
    torch.testing.assert_close(posterior.operator.trace(), expected, rtol=1e-10, atol=0)


class Consumed(IterableDataset[Tensor]):
    """Examples that can be read once."""

    def __init__(self, x: Tensor) -> None:
        self.rest = iter(x)

    def __iter__(self) -> Iterator[Tensor]:
        return self.rest


def _consumed(structure: ng.structures.Structure, batch_size: int) -> ng.vi.Laplace:
    loader: DataLoader[Any] = DataLoader(Consumed(_regression()[0]), batch_size=batch_size)
    return ng.vi.Laplace(nn.Linear(3, 2).double(), loader, ng.Euclidean(), structure, δ)


def test_a_loader_that_can_be_read_once_is_read_once_where_that_is_enough() -> None:
    """Other structures have no basis, and that of one batch is the basis of all examples."""
    assert _consumed(ng.Kronecker(), 4).examples == 12
    assert _consumed(ng.EigenKronecker(), 12).examples == 12
    with pytest.raises(ValueError, match=r"12 examples in a first pass, and 0 in a second one, which EigenKronecker\("):
        _consumed(ng.EigenKronecker(), 4)


def test_a_loader_of_pairs_brings_the_targets_of_a_metric_that_needs_them() -> None:
    model, x = _problem()
    t = torch.arange(7) % 2
    metric = ng.Empirical(F.cross_entropy)
    whole = ng.vi.Laplace(model, x, metric, target=t)
    pairs: DataLoader[Any] = DataLoader(TensorDataset(x, t), batch_size=4)
    torch.testing.assert_close(ng.vi.Laplace(model, pairs, metric).covariance(), whole.covariance(), rtol=0, atol=1e-10)


def test_examples_that_influence_each_other_are_predicted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few Jacobians are to be made at a time."""

    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y - y.mean(0).tanh()

    model, x = seeded(lambda: Centred(3, 2).double()), normal(5, 3)
    q = ng.vi.Laplace(model, x, ng.Euclidean(), structure=ng.Dense())
    whole = q.predictive(x)
    monkeypatch.setattr("natgrad.vi.laplace.at_once", lambda size: 1)
    torch.testing.assert_close(q.predictive(x).covariance, whole.covariance)


def test_the_predictive_covariance_is_symmetric_to_the_last_digit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
    posterior = ng.vi.Laplace(model, torch.randn(50, 20), nn.CrossEntropyLoss(), ng.Kronecker())
    found = posterior.predictive(torch.randn(300, 20)).covariance
    assert torch.equal(found, found.mT)


def test_sampled_outputs_approach_the_linearised_predictive() -> None:
    """A linear model is its own linearisation: 4000 samples, four standard errors."""
    x, t, Φ = _regression()
    model, _ = _at_the_mode(Φ, t, 0.3)
    posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=0.3)), ng.Kronecker(), δ)
    y = posterior.outputs(x, 4000, torch.Generator().manual_seed(0))
    exact = posterior.predictive(x)
    assert y.shape == (4000, 12, 2)
    error = (y.mean(0) - exact.mean).abs() / (exact.variance / 4000).sqrt()
    assert float(error.max()) < 4
    torch.testing.assert_close(y.var(0), exact.variance, rtol=4 * math.sqrt(2 / 4000), atol=0)


def test_samples_leave_the_global_random_stream_and_the_model_alone() -> None:
    posterior, _, model, x = _oracle("dense")
    state, before = torch.random.get_rng_state(), oracle.flatten(model.parameters())
    posterior.sample(2)
    posterior.outputs(x, 2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(oracle.flatten(model.parameters()), before)


def test_a_prior_can_be_exchanged_without_estimating_again() -> None:
    posterior, precision, *_ = _oracle("dense")
    other = posterior.with_prior(3.0)
    exact = torch.linalg.inv(precision + (3.0 - δ) * torch.eye(len(precision), dtype=DOUBLE))
    torch.testing.assert_close(other.covariance(), exact, rtol=0, atol=1e-10)
    assert other.operator is posterior.operator


def test_single_precision_is_single_precision() -> None:
    model, x = _problem()
    model.float()
    posterior = ng.vi.Laplace(model, x.float(), ng.Fisher(ng.Categorical()), ng.Kronecker(), δ)
    assert {t.dtype for t in posterior.sample(2).values()} == {torch.float32}
    assert posterior.predictive(x.float()).covariance.dtype is torch.float32


SHARED = ["conv", "tied_weights", "layer_norm", "attention", "tied_embedding", "sequence", "frozen_bias", "dict_output"]


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker(), ng.Kernel()])
def test_layers_of_every_kind_are_drawn_and_predicted(name: str, structure: ng.structures.Structure) -> None:
    problem = case(name).make()
    model = Model.of(problem.model, problem.params, problem.output)
    posterior = ng.vi.Laplace(model, problem.x, ng.Euclidean(), structure, δ)
    G = posterior.operator.dense()  # the tests of the structures compare it with the oracle
    Σ = torch.linalg.inv(problem.n_examples * G + δ * torch.eye(len(G), dtype=DOUBLE))
    T = posterior.coloured(torch.eye(posterior.inverse.root_size, dtype=DOUBLE)).T
    torch.testing.assert_close(T @ T.T, Σ, rtol=0, atol=1e-9)
    J = problem.jacobian()
    torch.testing.assert_close(posterior.predictive(problem.x).covariance, J @ Σ @ J.mT, rtol=0, atol=1e-8)


class Grouped(nn.Module):
    """A convolution in groups, one of three positions, a normalisation, and a tensor in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 6, 2, groups=2, padding=1), nn.GroupNorm(3, 6)
        self.head, self.gain = nn.Linear(6, 3), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        y: Tensor = self.head(self.norm(self.conv(x)).tanh().mean(2)) + opaque(x[:, :3, 0], self.gain)
        return y


LAYERED: dict[str, ng.structures.Structure] = {
    "kronecker": ng.Kronecker(),
    "eigen": ng.EigenKronecker(),
    "apart": ng.Kronecker(bias="separate"),
    "eigen, apart": ng.EigenKronecker(bias="separate", fallback=ng.BlockDense()),
    "only diagonals": ng.Kronecker(largest=2),
    "diagonal": ng.Diagonal(),
}


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("build", [Grouped, *["conv", "tied_weights", "tied_embedding", "attention", "weight_outside"]])
def test_the_predictive_of_layers_is_that_of_the_jacobian(name: str, build: Callable[[], nn.Module] | str) -> None:
    if isinstance(build, str):
        problem = case(build).make()
        model, x, J = Model.of(problem.model, problem.params, problem.output), problem.x, problem.jacobian()
    else:
        module, x = seeded(lambda: (build().double(), torch.randn(5, 4, 3, dtype=DOUBLE)))
        model, J = Model.of(module), oracle.module_jacobian(module, x)
    posterior = ng.vi.Laplace(model, x, ng.Euclidean(), LAYERED[name], δ)
    G = posterior.operator.dense()
    Σ = torch.linalg.inv(len(J) * G + δ * torch.eye(len(G), dtype=DOUBLE))
    torch.testing.assert_close(posterior.predictive(x).covariance, J @ Σ @ J.mT, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["kronecker", "eigen", "diagonal"])
def test_the_predictive_of_layers_needs_few_passes_whatever_the_number_of_parameters(name: str) -> None:
    """The Jacobian of one example has 9 million numbers here, its factors 60 000."""
    model = seeded(lambda: nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 100)))
    x, passes = torch.randn(40, 300), list[int]()
    posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(), samples=1), LAYERED[name])
    model.register_forward_hook(lambda module, args, output: passes.append(len(output)))
    posterior.predictive(x)
    assert len(passes) < 10


# What a Laplace approximation refuses.


def _posterior() -> tuple[ng.vi.Laplace, nn.Linear, Tensor]:
    model, x = nn.Linear(3, 2).double(), torch.ones(4, 3, dtype=DOUBLE)
    return ng.vi.Laplace(model, x, ng.Euclidean()), model, x


def _moved() -> None:
    posterior, model, x = _posterior()
    with torch.no_grad():
        model.bias.add_(1.0)
    posterior.predictive(x)


def _silent() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    for p in model.parameters():
        nn.init.zeros_(p)
    ng.vi.Laplace(model, x, ng.Euclidean()).tuned()


def _of(**options: Any) -> Callable[[], ng.vi.Laplace]:
    def make() -> ng.vi.Laplace:
        given: dict[str, Any] = {"x": torch.ones(7, 3, dtype=DOUBLE), "metric": ng.Euclidean()}
        return ng.vi.Laplace(nn.Linear(3, 2).double(), **(given | options))

    return make


def _lost(dtype: torch.dtype) -> Callable[[], Any]:
    x = torch.full((7, 3), 1e5, dtype=dtype)
    return lambda: ng.vi.Laplace(nn.Linear(3, 2).to(dtype), x, ng.Euclidean(), prior_precision=1e-9).sample(1)


def _loader(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=2)


ONES = torch.ones(2, 3, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_of(prior_precision=0.0), ValueError, "prior_precision must be positive and finite, got 0.0"),
        (_of(prior_precision=math.nan), ValueError, "prior_precision must be positive and finite, got nan"),
        (lambda: _of()().with_prior(-1.0), ValueError, "prior_precision must be positive"),
        (_of(prior_precision=True), TypeError, "prior_precision must be one number, .*got True"),
        (_of(prior_precision=torch.tensor(True)), TypeError, r"one number, .*of shape \(\) and type torch.bool"),
        (_of(prior_precision=torch.ones(8)), TypeError, r"must be one number, .*got a tensor of shape \(8,\)"),
        (
            lambda: _of(structure=ng.LowRank(2), prior_precision=ONE)().log_marginal_likelihood(0.0),
            ng.errors.IncompatibleError,
            "a prior precision that requires a gradient does not work with LowRankOperator",
        ),
        (
            _lost(torch.float32),
            ng.errors.SingularMetricError,
            r"1e-09 is lost in .* give model.double\(\) and inputs in",
        ),
        (
            _lost(DOUBLE),
            ng.errors.SingularMetricError,
            r"1e-09 is lost in the rounding of N·G: give a larger prior_prec",
        ),
        (lambda: _of()().sample(0), ValueError, r"needs a count ≥ 1, got 0"),
        (_of(metric=ng.Sobolev()), ng.errors.IncompatibleError, "it couples the examples, so it is not the Hessian"),
        (_of(structure=ng.Euclidean()), TypeError, "structure"),
        (_of(x=_loader(ONES), target=1), TypeError, "a loader brings its targets"),
        (_of(x=_loader(ONES, ONES, ONES)), TypeError, "a loader must give tensors x or pairs"),
        (_of(x=_loader(ONES[:0])), ValueError, "the loader has no batch"),
        (_moved, ng.errors.NatgradError, "the parameters bias have changed since the approximation was made"),
        (_silent, ng.errors.SingularMetricError, "the mode is zero: the evidence has no maximum"),
        (
            lambda: _of()().log_marginal_likelihood(torch.ones(3)),
            ValueError,
            r"must be one number, .* got shape \(3,\)",
        ),
        (
            lambda: _of(structure=ng.Implicit())().log_marginal_likelihood(0.0),
            ng.errors.IncompatibleError,
            "logdet does not work with ImplicitOperator: it has products only",
        ),
        (
            lambda: _of(structure=ng.Implicit())().with_solver(ng.CG(max_steps=1)).sample(1),
            ng.errors.SingularMetricError,
            "conjugate gradients did not reach tol=1e-06",
        ),
        (
            lambda: _of()().with_solver(ng.Pinv()).sample(1),
            ng.errors.IncompatibleError,
            "PseudoInverse has no root to draw Gaussian samples with: use Cholesky",
        ),
        (
            lambda: _of()().with_solver(ng.CG()).covariance(),
            ng.errors.IncompatibleError,
            "CGInverse has no root to draw Gaussian samples with",
        ),
    ],
)
def test_what_cannot_be_approximated_is_refused_with_the_reason(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
