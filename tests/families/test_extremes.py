"""Far points and both ends of the precision: numbers by mpmath with 40 digits, or by theory."""

import math
from typing import Any

import pytest
import torch

import natgrad as ng
from natgrad import families as f
from tests.output.table import close

DOUBLE = torch.float64
# κ, and A'(κ) = 1 − A² − A/κ
SLOPES = [(1e-9, 0.5), (0.03, 0.4998312921783656), (0.0317, 0.49981163570623929), (30.0, 0.00056531304166817765)]
SLOPES += [(300.0, 5.5648614354286154e-06), (1e4, 5.0002500375078146e-09), (1e6, 5.00000250000375e-13)]


@pytest.mark.parametrize(("κ", "slope"), SLOPES)
def test_the_information_of_angles_is_precise_and_positive_however_concentrated(κ: float, slope: float) -> None:
    for dtype, tol in ((DOUBLE, 1e-9), (torch.float32, 1e-5)):
        F = f.VonMises().fisher(torch.tensor([0.6 * κ, -0.8 * κ], dtype=dtype))
        u = torch.tensor([0.6, -0.8], dtype=dtype)
        assert float(u @ F.flat(u)) == pytest.approx(slope, rel=tol * max(1, κ / 1e3))
        assert float(u @ F.sharp(u)) == pytest.approx(1 / slope, rel=tol)


def test_the_gradient_of_log_z_of_concentrated_angles_is_finite_in_single_precision() -> None:
    η = torch.tensor([3e7, 0.0], requires_grad=True)
    (g,) = torch.autograd.grad(f.VonMises().log_partition(η), η)
    close(g, torch.tensor([1.0, 0.0]), 1e-6)


# Rate of Poisson, and its entropy
RATES = [
    (1e-6, 1.4815510904537816e-5),
    (100.0, 3.7206860722602589),
    (1e6, 8.3266937288534348),
    (1e8, 10.629278904347522),
]


@pytest.mark.parametrize(("rate", "entropy"), RATES)
def test_the_entropy_of_many_counts_does_not_cancel(rate: float, entropy: float) -> None:
    for dtype, tol in ((DOUBLE, 1e-8), (torch.float32, 1e-5)):
        found = f.Poisson().entropy(torch.tensor(math.log(rate), dtype=dtype))
        assert float(found) == pytest.approx(entropy, rel=tol)


def test_the_entropy_of_counts_has_no_step_where_the_series_begins() -> None:
    η = torch.tensor([math.log(1e4) - 1e-9, math.log(1e4) + 1e-9], dtype=DOUBLE, requires_grad=True)
    H = f.Poisson().entropy(η)
    assert float(H.detach().diff()) == pytest.approx(1e-9, abs=1e-9)
    (g,) = torch.autograd.grad(H.sum(), η)
    assert g.tolist() == pytest.approx([0.5, 0.5], abs=1e-4)


@pytest.mark.parametrize("r", [0.001, 0.1, 0.9])
def test_the_entropy_of_rare_successes_is_the_sum_over_their_support(r: float) -> None:
    η = torch.tensor([-5.0, -0.1], dtype=DOUBLE)
    log_p = f.NegativeBinomial(r).log_prob(η, torch.arange(0.0, 4000.0, dtype=DOUBLE).unsqueeze(-1))
    close(f.NegativeBinomial(r).entropy(η), -(log_p.exp() * log_p).sum(0), 1e-10)


def test_a_density_at_the_end_of_its_support_is_that_of_torch() -> None:
    """x⁰ = 1 at x = 0, where log x is not finite."""
    x, η = torch.tensor([0.0, 1.0, 0.3], dtype=DOUBLE), torch.tensor([0.0, 1.5], dtype=DOUBLE)
    close(f.Beta().log_prob(η, x), f.Beta().distribution(η).log_prob(x))
    corner, α = torch.tensor([0.0, 0.4, 0.6], dtype=DOUBLE), torch.tensor([0.0, 1.5, 0.0], dtype=DOUBLE)
    close(f.Dirichlet().log_prob(α, corner), f.Dirichlet().distribution(α).log_prob(corner))
    assert float(f.Beta().log_prob(torch.tensor([1.0, 0.0]), torch.tensor(0.0))) == -math.inf


def test_scores_of_draws_that_round_to_one_have_no_mean() -> None:
    """log(1 − x) is not that of the rounded x: five standard errors, which log1p(−x) misses by far."""
    y, family, count = torch.full((1, 2), -0.9), f.Beta(), 20_000
    scores = family.scores(y, count, torch.Generator().manual_seed(0)).double()
    assert bool((scores.mean(0).abs() <= 5 * scores.std(0) / count**0.5).all())
    rounded = (family.statistics(family.sample(y, (count,))) - family.mean(y)).double()
    assert not bool((rounded.mean(0).abs() <= 5 * rounded.std(0) / count**0.5).all())


def test_a_probability_that_rounds_to_one_leads_back() -> None:
    """p = (1, e⁻⁴⁰) in both precisions: the logarithms know what the sum does not."""
    for dtype in (torch.float32, DOUBLE):
        η = torch.tensor([20.0, -20.0], dtype=dtype)
        close(f.Categorical().natural(f.Categorical().mean(η)), η, 1e-6)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("family", [f.Bernoulli(), f.Binomial(3)], ids=repr)
def test_coins_that_nearly_always_fall_on_one_side_keep_their_digits_on_both(family: Any, sign: int) -> None:
    m, η = family.coins, torch.tensor([15.0, 20.5, 30.0, 80.0], dtype=DOUBLE)
    q, q2 = 1 / (1 + η.exp()), 1 / (1 + (η + 2).exp())  # of the side that nearly never falls
    kl = m * (q2 * (q2 / q).log() + (1 - q2) * (torch.log1p(-q2) - torch.log1p(-q)))
    near = η > 60  # there 1 − q₂ = 1 cancels in the oracle itself: its first terms in q and q₂
    kl = torch.where(near, m * (q2 * (q2 / q).log() - q2 + q), kl)
    torch.testing.assert_close(family.kl(sign * (η + 2)[:, None], sign * η[:, None]), kl, rtol=1e-6, atol=0.0)
    slope = torch.func.grad(lambda one: family.log_partition(one))
    for order, derivative in ((slope, 1 - q), (torch.func.grad(slope), q * (1 - q))):
        torch.testing.assert_close(torch.func.vmap(order)(η), m * derivative, rtol=1e-12, atol=0.0)
        mirrored = q if order is slope else derivative
        torch.testing.assert_close(torch.func.vmap(order)(-η), m * mirrored, rtol=1e-12, atol=0.0)
    often, never = (torch.full_like(η, m), torch.zeros_like(η))[::sign]
    rounding = 0.0 if m == 1 else 1e-14  # of log h
    torch.testing.assert_close(family.log_prob(sign * η, often), m * torch.log1p(-q), rtol=1e-12, atol=rounding)
    torch.testing.assert_close(family.log_prob(sign * η, never), m * q.log(), rtol=1e-12, atol=0.0)
    x = torch.arange(m + 1.0, dtype=DOUBLE)[:, None]
    log_p = family.log_prob(-η, x)
    torch.testing.assert_close(family.entropy(sign * η), -(log_p.exp() * log_p).sum(0), rtol=1e-9, atol=rounding)


@pytest.mark.parametrize("family", [f.Bernoulli(), f.Poisson(), f.Gamma(), f.FullGaussian()])
def test_kl_of_near_points_in_single_precision_is_half_the_squared_length(family: f.ExponentialFamily) -> None:
    """Of outputs [n *point]: a trust region asks for it."""
    η = torch.tensor([[2.0]]) if family.axes == 0 else torch.tensor([[5.0, -2.0]])
    η = torch.tensor([[5.0, 2.0]]) if isinstance(family, f.FullGaussian) else η
    v = 1e-4 * torch.ones_like(η)
    length = family.pair(v.double(), family.fisher(η.double()).flat(v.double()))
    assert float(family.kl(η, η + v)) == pytest.approx(0.5 * float(length.sum()), rel=1e-2)


@pytest.mark.parametrize("family", [ng.Categorical(), ng.Categorical(minimal=True), ng.Gaussian(scale=None)], ids=repr)
def test_kl_of_short_and_long_steps_of_outputs_is_precise(family: f.Family) -> None:
    """In single precision, against double precision at the same outputs."""
    generator = torch.Generator().manual_seed(0)
    y, v = (torch.randn(6, 10, generator=generator) for _ in range(2))
    for length in (1e-3, 1e-2, 0.1, 1.0, 10.0):
        y2 = 2 * y + length * v
        torch.testing.assert_close(
            family.kl(2 * y, y2).double(), family.kl(2 * y.double(), y2.double()), rtol=2e-3, atol=0.0
        )


@pytest.mark.parametrize("backtracking", [ng.Backtracking(), ng.Backtracking(tries=1)])
def test_a_trial_step_whose_outputs_leave_the_family_is_shortened_or_refused(backtracking: ng.Backtracking) -> None:
    """Rates −η of exponential waiting times become negative at a full step; no step with KL > δ is taken."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, -1.0)
    x, radius = torch.ones(3, 1, dtype=DOUBLE), 4.0
    opt = ng.NaturalGradient(model, ng.Fisher(f.Exponential()), step=ng.TrustRegion(radius, backtracking))
    (-model(x).mean()).backward()  # towards 0, the boundary
    opt.step()
    after = model(x).detach()
    assert opt.last is not None
    assert bool((after < 0).all())
    assert opt.last.accepted == (backtracking.tries > 1)
    assert float(f.Exponential().kl(-torch.ones_like(after), after).mean()) <= radius
    if not opt.last.accepted:
        assert opt.last.reason == "divergence inf over radius 4 after 1 tries"


# η and η2 of Gamma, and KL(p_η ‖ p_η2)
STEPS = [
    ([1.0, -3.0], [1.0002, -2.9999], 2.06760561348e-8),
    ([-0.75, -5.0], [-0.74, -4.9], 0.0010916370693),
    ([-0.75, -5.0], [-0.7, -4.5], 0.0257563014862),
    ([63.0, -0.5], [64.0, -0.51], 0.000662070303754),
]


@pytest.mark.parametrize(("here", "there", "kl"), STEPS)
def test_kl_of_short_and_long_steps_is_precise(here: list[float], there: list[float], kl: float) -> None:
    """Neither the difference of log Z, which is lost in rounding, nor half the squared length alone would be."""
    for dtype, tol in ((DOUBLE, 1e-7), (torch.float32, 5e-3)):
        found = f.Gamma().kl(torch.tensor(here, dtype=dtype), torch.tensor(there, dtype=dtype))
        assert float(found) == pytest.approx(kl, rel=tol)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
@pytest.mark.parametrize("family", [f.DiagonalGaussian(), f.FullGaussian()], ids=repr)
def test_a_fit_in_single_precision_finds_the_spread_of_data_far_from_zero(
    family: f.DiagonalGaussian | f.FullGaussian, offset: float
) -> None:
    """Var x is in the last digits of E x²: the float32 data themselves have it to four digits."""
    x = offset + torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    mean, covariance = family.covariance_form(family.fit(x))
    exact = torch.cov(x.double().T, correction=0)
    close(mean.double(), x.double().mean(0), 1e-5)
    close(covariance.double(), exact if covariance.ndim == 2 else exact.diagonal(), 1e-5)


def test_a_fit_of_concentrated_waiting_times_in_single_precision_is_that_of_double_precision() -> None:
    x = 1e4 + 100 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    for family in (f.Gamma(), f.InverseGaussian()):
        torch.testing.assert_close(family.fit(x), family.fit(x.double()).float(), rtol=1e-6, atol=0.0)


# η of two near distributions, in single precision: log Z is near 0, and of larger terms
NEAR: list[tuple[f.ExponentialFamily, list[float], list[float]]] = [
    (f.Gamma(), [0.0, -1.0], [1e-4, -1.0]),
    (f.Dirichlet(), [-0.999, 9999.0], [-0.99899, 9999.0]),
    (f.Beta(), [3e4, 5e4], [3.001e4, 5e4]),
    (f.Wishart(), [2e4, 1.0, 0.0, 0.0, 1.0], [2.0001e4, 1.0, 0.0, 0.0, 1.0]),
]


@pytest.mark.parametrize(("family", "here", "there"), NEAR)
def test_kl_of_near_points_does_not_depend_on_the_precision(
    family: f.ExponentialFamily, here: list[float], there: list[float]
) -> None:
    η, η2 = torch.tensor(here), torch.tensor(there)
    v = η2.double() - η.double()
    length = family.pair(v, family.fisher(η.double()).flat(v))
    assert float(family.kl(η, η2)) == pytest.approx(0.5 * float(length), rel=2e-2)


@pytest.mark.parametrize("α", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_the_inverse_information_is_precise_however_concentrated(α: float, dtype: torch.dtype) -> None:
    """Leading terms: 2α² of Gamma, α² of three equal classes, ⅔α² of Wishart with d = 2, and λ²/2μ⁴ + λ/μ³."""

    def first(family: f.ExponentialFamily, η: list[float]) -> float:
        point = torch.tensor(η, dtype=dtype)
        return float(family.fisher(point).sharp(torch.eye(len(η), dtype=dtype)[0])[0])

    assert first(f.Gamma(), [α - 1, -3.0]) == pytest.approx(2 * α**2, rel=1e-3)
    assert first(f.Dirichlet(), [α - 1] * 3) == pytest.approx(α**2, rel=1e-3)
    assert first(f.Wishart(), [α, 1.0, 0.0, 0.0, 1.0]) == pytest.approx(2 * α**2 / 3, rel=1e-3)
    assert first(f.InverseGaussian(), [-α / 8, -α / 2]) == pytest.approx(α**2 / 32 + α / 8, rel=1e-5)


def test_the_inverse_information_of_a_rare_and_a_frequent_class_is_that_of_double_precision() -> None:
    η = torch.tensor([-0.999, 9999.0])
    exact = torch.linalg.inv(f.Dirichlet().fisher(η.double()).dense())
    found = f.Dirichlet().fisher(η).sharp(torch.eye(2))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_density_has_the_higher_precision_of_point_and_datum(shape: tuple[int, ...]) -> None:
    """log x! of 30,000 is 279,000: in single precision log p would be wrong by 0.006."""
    η, x = torch.full(shape, 10.0, dtype=DOUBLE), torch.tensor([30000.0])
    exact = torch.distributions.Poisson(η.exp()).log_prob(x.double())
    for point, datum in ((η, x), (η.float(), x.double()), (η, x.int())):
        close(f.Poisson().log_prob(point, datum), exact, 1e-9)


@pytest.mark.parametrize("φ", [1e6, 1e12, 1e16])
def test_the_entropy_of_concentrated_passage_times_is_that_of_a_gaussian(φ: float) -> None:
    """Of variance μ³/λ, up to O(1/φ) with φ = λ/μ."""
    μ = 1e-8
    η = torch.tensor([-φ / (2 * μ), -φ * μ / 2], dtype=DOUBLE)
    found = f.InverseGaussian().entropy(η)
    assert float(found) == pytest.approx(0.5 * math.log(2 * math.pi * math.e * μ**2 / φ), abs=3 / φ + 1e-11)


def test_a_covariance_in_single_precision_serves_points_in_double_precision() -> None:
    """The numbers of Σ are exact in both; its Cholesky factor is not."""
    A = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    Σ = A @ A.T + 0.01 * torch.eye(3)
    Σ = 0.5 * (Σ + Σ.T)
    family, μ, x = f.GaussianKnownCovariance(Σ), torch.ones(3, dtype=DOUBLE), torch.tensor([3.0, -4.0, 5.0]).double()
    normal = torch.distributions.MultivariateNormal(μ, Σ.double())
    η = family.natural(μ)
    close(family.mean(η), μ, 1e-9)
    close(family.log_prob(η, x), normal.log_prob(x), 1e-9)
    close(family.entropy(η), normal.entropy(), 1e-9)
