"""Exponential families against golden values, and against what the paper prints wrong."""

import pytest
import torch
from torch import Tensor

from natgrad import families as f
from tests.golden import agrees, golden, tensor

Σ = tensor(golden("expfam.gaussian_fixed_cov")["expected"]["Sigma"])
FAMILIES: dict[str, f.ExponentialFamily] = {
    "expfam.bernoulli": f.Bernoulli(),
    "expfam.categorical": f.Categorical(),
    "expfam.poisson": f.Poisson(),
    "expfam.exponential": f.Exponential(),
    "expfam.beta": f.Beta(),
    "expfam.von_mises": f.VonMises(),
    "expfam.gaussian_fixed_cov": f.GaussianKnownCovariance(Σ),
    "expfam.gaussian_zero_mean": f.GaussianKnownMean(torch.zeros(2, dtype=torch.float64)),
}
each = pytest.mark.parametrize(("name", "family"), FAMILIES.items(), ids=FAMILIES.keys())


def point(family: f.ExponentialFamily, value: list[float]) -> Tensor:
    """η as the family has it: a number of a one-parameter family."""
    return tensor(value) if family.axes else tensor(value)[0]


@each
def test_log_z_moments_and_information(name: str, family: f.ExponentialFamily) -> None:
    case = golden(name)
    η = point(family, case["inputs"]["eta"])
    agrees(case, family.log_partition(η), "log_Z")
    agrees(case, family.mean(η).reshape(-1), "moments")
    agrees(case, family.fisher(η).dense(), "fisher")


@each
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
    family, Λ = FAMILIES["expfam.gaussian_zero_mean"], tensor(case["inputs"]["eta"])
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


def test_kl_of_coins_in_the_order_of_erratum_35() -> None:
    η, η2 = tensor(0.3), tensor(-1.1)
    coin = f.Bernoulli()
    assert abs(float(coin.bregman(η, η2)) - 0.217384) < 1e-6
    assert abs(float(coin.kl(η, η2)) - 0.237200) < 1e-6
