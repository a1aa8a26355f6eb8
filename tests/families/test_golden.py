"""The output families against golden values: Fisher matrices in several charts, and KL in both directions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import distributions as D

import natgrad as ng
from natgrad import families as f
from natgrad.families import Family, FromDistribution
from tests.golden import agrees, golden, tensor
from tests.output.table import outer


def matrix(family: Family, y: Tensor) -> Tensor:
    """F [c c] of one example y [c], column by column through ♭."""
    eye = torch.eye(len(y), dtype=torch.float64)
    return torch.stack([family.flat(y[None], e[None])[0] for e in eye], dim=1)


COVARIANCE = tensor(golden("expfam.gaussian_fixed_cov")["expected"]["Sigma"])
FAMILIES: dict[str, list[tuple[str, Family]]] = {
    "expfam.bernoulli": [
        ("own", ng.Bernoulli()),
        ("torch", FromDistribution(lambda y: D.Bernoulli(logits=y))),
    ],
    "expfam.categorical": [
        ("own", ng.Categorical()),
        ("torch", FromDistribution(lambda y: D.Categorical(logits=y))),
    ],
    "expfam.poisson": [
        ("own", ng.Poisson()),
        ("torch", FromDistribution(lambda y: D.Poisson(y.exp()))),
    ],
    "expfam.gaussian_fixed_cov": [
        ("torch", FromDistribution(lambda h: D.MultivariateNormal(h @ COVARIANCE, COVARIANCE))),
    ],
}
CASES = [(name, family) for name, families in FAMILIES.items() for _, family in families]
each = pytest.mark.parametrize(
    ("name", "family"), CASES, ids=[f"{name} {which}" for name, families in FAMILIES.items() for which, _ in families]
)


@each
def test_the_fisher_matrix_in_natural_parameters(name: str, family: Family) -> None:
    case = golden(name)
    η = tensor(case["inputs"]["eta"])
    agrees(case, matrix(family, η), "fisher")
    agrees(case, outer(family.root(η[None]))[0], "fisher")


@each
def test_kl_goes_from_the_first_to_the_second_argument(name: str, family: Family) -> None:
    case = golden(name)
    η, η2 = tensor(case["inputs"]["eta"])[None], tensor(case["inputs"]["eta2"])[None]
    agrees(case, family.kl(η, η2)[0], "kl_eta_to_eta2")
    agrees(case, family.kl(η2, η)[0], "kl_eta2_to_eta")


@each
def test_the_divergence_of_fisher_is_kl_from_the_old_to_the_new_distribution(name: str, family: Family) -> None:
    """ρ(y, y0) = KL(p_y0 ‖ p_y), which is the Bregman divergence D_logZ(y, y0)."""
    case = golden(name)
    η, η2 = tensor(case["inputs"]["eta"])[None], tensor(case["inputs"]["eta2"])[None]
    agrees(case, ng.Fisher(family).divergence(η2, η)[0], "kl_eta_to_eta2")
    agrees(case, ng.Fisher(family).divergence(η2, η)[0], "bregman_logZ_of_eta2_eta")


def test_the_categorical_metric_has_one_null_direction_and_this_pseudo_inverse() -> None:
    case = golden("expfam.categorical")
    F = matrix(ng.Categorical(), tensor(case["inputs"]["eta"]))
    assert int(torch.linalg.matrix_rank(F)) == case["expected"]["fisher_rank"]
    agrees(case, torch.linalg.pinv(F, hermitian=True, rtol=1e-10), "fisher_pinv")


CHARTS: dict[str, tuple[Family, Callable[[float, float], list[float]]]] = {
    "mu_logsigma": (ng.Gaussian(scale=None), lambda μ, σ: [μ, float(torch.tensor(σ, dtype=torch.float64).log())]),
    "mu_sigma": (FromDistribution(lambda y: D.Normal(y[:, 0], y[:, 1])), lambda μ, σ: [μ, σ]),
    "mu_var": (FromDistribution(lambda y: D.Normal(y[:, 0], y[:, 1].sqrt())), lambda μ, σ: [μ, σ**2]),
}


@pytest.mark.parametrize("chart", CHARTS)
def test_the_fisher_metric_of_a_gaussian_in_three_charts(chart: str) -> None:
    case = golden("fisher.gaussian_mu_sigma")
    family, coordinates = CHARTS[chart]
    agrees(case, matrix(family, tensor(coordinates(case["inputs"]["mu"], case["inputs"]["sigma"]))), chart)


def test_the_fisher_metric_of_a_coin_in_its_mean_is_the_inverse_of_that_in_its_log_odds() -> None:
    case = golden("fisher.bernoulli_mean_param")
    θ = tensor([case["inputs"]["theta"]])
    F_θ = matrix(FromDistribution(lambda y: D.Bernoulli(probs=y)), θ)
    F_η = matrix(ng.Bernoulli(), θ.logit())
    agrees(case, F_θ[0, 0], "F_theta")
    agrees(case, F_η[0, 0], "F_eta")
    torch.testing.assert_close(F_θ * F_η, torch.ones(1, 1, dtype=torch.float64), rtol=1e-12, atol=0.0)


def test_the_bregman_divergence_takes_the_gradient_at_its_second_argument() -> None:
    case = golden("bregman.logsumexp")
    y, y2 = tensor(case["inputs"]["y"])[None], tensor(case["inputs"]["y_prime"])[None]
    value = ng.Bregman(lambda y: torch.logsumexp(y, -1)).divergence(y, y2)
    agrees(case, value[0], "value")
    assert abs(value.item() - case["printed_wrong"]["value"]) > 0.1
    torch.testing.assert_close(value, ng.Categorical().kl(y2, y), rtol=1e-12, atol=1e-12)


# Exponential families against golden values, and against what the paper prints wrong.


Σ = tensor(golden("expfam.gaussian_fixed_cov")["expected"]["Sigma"])
EXPONENTIAL: dict[str, f.ExponentialFamily] = {
    "expfam.bernoulli": f.Bernoulli(),
    "expfam.categorical": f.Categorical(),
    "expfam.poisson": f.Poisson(),
    "expfam.exponential": f.Exponential(),
    "expfam.beta": f.Beta(),
    "expfam.von_mises": f.VonMises(),
    "expfam.gaussian_fixed_cov": f.GaussianKnownCovariance(Σ),
    "expfam.gaussian_zero_mean": f.GaussianKnownMean(torch.zeros(2, dtype=torch.float64)),
}
each_exponential = pytest.mark.parametrize(("name", "family"), EXPONENTIAL.items(), ids=EXPONENTIAL.keys())


def point(family: f.ExponentialFamily, value: list[float]) -> Tensor:
    """η as the family has it: a number of a one-parameter family."""
    return tensor(value) if family.axes else tensor(value)[0]


@each_exponential
def test_log_z_moments_and_information(name: str, family: f.ExponentialFamily) -> None:
    case = golden(name)
    η = point(family, case["inputs"]["eta"])
    agrees(case, family.log_partition(η), "log_Z")
    agrees(case, family.mean(η).reshape(-1), "moments")
    agrees(case, family.fisher(η).dense(), "fisher")


@each_exponential
def test_kl_and_the_bregman_divergence_of_log_z(name: str, family: f.ExponentialFamily) -> None:
    case = golden(name)
    η, η2 = point(family, case["inputs"]["eta"]), point(family, case["inputs"]["eta2"])
    agrees(case, family.kl(η, η2), "kl_eta_to_eta2")
    agrees(case, family.kl(η2, η), "kl_eta2_to_eta")
    agrees(case, family.bregman(η2, η), "bregman_logZ_of_eta2_eta")


def test_log_z_of_a_known_covariance_has_a_plus_where_the_paper_prints_a_minus() -> None:
    case = golden("expfam.gaussian_fixed_cov")
    family, h = f.GaussianKnownCovariance(Σ), tensor(case["inputs"]["eta"])
    printed = case["expected"]["printed_wrong_log_Z"]
    assert abs(float(family.log_partition(h)) - printed) > 0.3
    agrees(case, family.mean(h), "mu")


def test_the_information_of_a_precision_is_not_the_naive_second_derivative() -> None:
    """∇²(−½ log|Λ|) without symmetrisation is indefinite, and not Cov t."""
    case = golden("expfam.gaussian_zero_mean")
    family, Λ = EXPONENTIAL["expfam.gaussian_zero_mean"], tensor(case["inputs"]["eta"])
    naive = torch.autograd.functional.hessian(lambda v: -0.5 * torch.logdet(v.view(2, 2)), Λ)
    agrees(case, naive, "naive_double_grad_of_minus_half_logdet_unsymmetrised")
    F = family.fisher(Λ).dense()
    assert float(torch.linalg.eigvalsh(naive)[0]) < -0.1
    assert float(torch.linalg.eigvalsh(F)[0]) > -1e-12
    assert float((F - naive).abs().max()) > 0.4
    v = torch.tensor([0.3, -0.2, -0.2, 0.9], dtype=torch.float64)  # symmetric: here the two agree
    torch.testing.assert_close(F @ v, naive @ v, rtol=1e-12, atol=1e-12)


def test_the_information_of_a_precision_is_a_quarter_of_one_plus_k_times_sigma_by_sigma() -> None:
    case = golden("expfam.gaussian_zero_mean")
    S = tensor(case["expected"]["Sigma"])
    K = torch.eye(4, dtype=torch.float64)[[0, 2, 1, 3]]
    agrees(case, 0.25 * (torch.eye(4, dtype=torch.float64) + K) @ torch.kron(S, S), "fisher")


def test_the_redundant_information_of_classes_has_this_pseudo_inverse() -> None:
    case = golden("expfam.categorical")
    F = f.Categorical().fisher(tensor(case["inputs"]["eta"]))
    eye = torch.eye(3, dtype=torch.float64)
    agrees(case, F.sharp(eye), "fisher_pinv")


def test_the_minimal_categorical_chart_is_the_redundant_one_against_the_last_class() -> None:
    case = golden("expfam.categorical")
    η = tensor(case["inputs"]["eta"])
    redundant, minimal = f.Categorical(), f.Categorical(minimal=True)
    odds = η[:-1] - η[-1]
    torch.testing.assert_close(minimal.mean(odds), redundant.mean(η)[:-1], rtol=1e-12, atol=0)
    F = redundant.fisher(η).dense()[:-1, :-1]
    torch.testing.assert_close(minimal.fisher(odds).dense(), F, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(minimal.fisher(odds).inverse().dense(), torch.linalg.inv(F), rtol=1e-10, atol=1e-12)


def test_bregman_and_kl_of_coins_take_their_arguments_in_opposite_orders() -> None:
    η, η2 = tensor(0.3), tensor(-1.1)
    coin = f.Bernoulli()
    assert abs(float(coin.bregman(η, η2)) - 0.217384) < 1e-6
    assert abs(float(coin.kl(η, η2)) - 0.237200) < 1e-6
