"""What single families promise beyond what all of them do."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from natgrad import families as f
from natgrad.families.special import log1mexp, trigamma
from tests.families.members import definite
from tests.output.table import close, normal

EXTREME: list[tuple[f.ExponentialFamily, list[list[float]]]] = [
    (f.Gamma(), [[-0.999, -1e-3], [1e3, -1e3], [5.0, -1e-6], [0.0, -1e6]]),
    (f.Beta(), [[-0.999, -0.999], [300.0, -0.9], [50.0, 200.0], [-0.99, 3.0]]),
    (f.Dirichlet(), [[-0.99, -0.9, 50.0], [100.0, 200.0, 300.0], [0.0, 0.0, 0.0]]),
    (f.VonMises(), [[0.0, 0.0], [1e-8, 0.0], [0.03, 0.005], [0.04, 0.0], [300.0, -40.0]]),
    (f.Wishart(), [[-0.95, 1.0, 0.0, 0.0, 100.0], [50.0, 1e-3, 0.0, 0.0, 2e-3], [-0.5, 2.0, 0.5, 0.5, 1.0]]),
]


@pytest.mark.parametrize(("family", "points"), EXTREME, ids=[type(family).__name__ for family, _ in EXTREME])
def test_newton_finds_extreme_points(family: f.ExponentialFamily, points: list[list[float]]) -> None:
    η = torch.tensor(points, dtype=torch.float64)
    found = family.natural(family.mean(η))
    assert float(((found - η).abs() / (1 + η.abs())).max()) < 1e-9


def test_the_newton_iteration_can_be_differentiated_twice() -> None:
    gamma = f.Gamma()
    xi = gamma.mean(torch.tensor([[1.0, -2.0], [0.2, -0.3]], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(gamma.natural, (xi,), atol=1e-6)
    assert torch.autograd.gradgradcheck(gamma.natural, (xi,), atol=1e-5)


def test_the_entropy_of_counts_is_the_sum_over_their_support() -> None:
    """To 1e-10, where torch has none."""
    x = torch.arange(0.0, 4000.0, dtype=torch.float64)
    cases: list[tuple[f.ExponentialFamily, list[float]]] = [
        (f.Poisson(), [-3.0, 0.0, 2.0, 6.0]),
        (f.NegativeBinomial(0.4), [-3.0, -0.5, -0.05]),
        (f.NegativeBinomial(30.0), [-3.0, -0.5, -0.2]),
        (f.Geometric(), [-3.0, -0.5, -0.05]),
    ]
    for family, points in cases:
        η = torch.tensor(points, dtype=torch.float64)
        log_p = family.log_prob(η, x.unsqueeze(-1))
        close(log_p.exp().sum(0), torch.ones_like(η), 1e-10)
        close(family.entropy(η), -(log_p.exp() * log_p).sum(0), 1e-10)


def test_the_entropy_of_successes_is_the_sum_over_their_support() -> None:
    family, η = f.Binomial(9), torch.tensor([-4.0, 0.0, 1.0], dtype=torch.float64)
    log_p = family.log_prob(η, torch.arange(0.0, 10.0, dtype=torch.float64).unsqueeze(-1))
    close(family.entropy(η), -(log_p.exp() * log_p).sum(0), 1e-10)


@pytest.mark.parametrize(("μ", "λ"), [(1.0, 1.0), (0.3, 5.0), (4.0, 0.2), (2.0, 300.0)])
def test_inverse_gaussians_are_those_of_scipy(μ: float, λ: float) -> None:
    family = f.InverseGaussian()
    η = torch.tensor([-λ / (2 * μ * μ), -λ / 2], dtype=torch.float64)
    other = stats.invgauss(μ / λ, scale=λ)
    x = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    close(family.log_prob(η, x), torch.as_tensor(other.logpdf(x.numpy())), 1e-9)
    close(family.distribution(η).mean, torch.tensor(other.mean(), dtype=torch.float64), 1e-9)
    close(family.distribution(η).variance, torch.tensor(other.var(), dtype=torch.float64), 1e-9)
    # By the trapezoidal rule over log x
    s = torch.linspace(-14, 12, 20_001, dtype=torch.float64)
    log_p = family.log_prob(η, s.exp())
    close(family.entropy(η), torch.trapezoid(-log_p * log_p.exp() * s.exp(), s), 1e-8)


def test_von_mises_densities_are_those_of_scipy() -> None:
    x = torch.linspace(-3, 3, 5, dtype=torch.float64)
    for κ, μ in ((0.01, 0.3), (2.0, -1.0), (60.0, 2.0)):
        η = κ * torch.tensor([math.cos(μ), math.sin(μ)], dtype=torch.float64)
        close(f.VonMises().log_prob(η, x), torch.as_tensor(stats.vonmises(κ, loc=μ).logpdf(x.numpy())), 1e-9)


def test_both_forms_of_a_gaussian_lead_to_the_same_point() -> None:
    """Covariance form (μ, Σ) and information form (Λμ, Λ), of full and of diagonal Gaussians."""
    μ, S = normal(4, 3), definite(4, d=3, seed=1)
    full = f.FullGaussian()
    η = full.from_covariance(μ, S)
    close(full.from_information(torch.linalg.solve(S, μ), torch.linalg.inv(S)), η, 1e-10)
    close(full.covariance_form(η)[0], μ, 1e-10)
    close(full.covariance_form(η)[1], S, 1e-10)
    close(full.information_form(η)[1] @ S, torch.eye(3, dtype=torch.float64).expand(4, 3, 3), 1e-10)
    diagonal, v = f.DiagonalGaussian(), normal(4, 3, seed=2).exp()
    η = diagonal.from_covariance(μ, v)
    close(diagonal.from_information(μ / v, 1 / v), η, 1e-12)
    close(diagonal.covariance_form(η)[1], v, 1e-12)
    close(diagonal.information_form(η)[0], μ / v, 1e-12)


def test_only_the_symmetric_part_of_a_precision_counts() -> None:
    full = f.FullGaussian()
    η = full.from_covariance(normal(3), definite(d=3, seed=1))
    skew = torch.zeros(3, 3, dtype=torch.float64)
    skew[0, 1], skew[1, 0] = 0.7, -0.7
    moved = η + torch.cat([torch.zeros(3, dtype=torch.float64), skew.flatten()])
    close(full.log_partition(moved), full.log_partition(η), 1e-12)
    close(full.mean(moved), full.mean(η), 1e-12)
    flat = full.fisher(η).flat(moved - η)
    close(flat, torch.zeros_like(flat), 1e-12)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        found = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *(t.numel() for t in found)])
        return out


def test_no_matrix_over_the_entries_of_a_covariance_is_made() -> None:
    """♭ and ♯ of a Gaussian in 40 dimensions make tensors of 40² entries, not of 40⁴."""
    d = 40
    full, v = f.FullGaussian(), normal(d + d * d, seed=2)
    η = full.from_covariance(normal(d), definite(d=d, seed=1))
    with Largest() as made:
        F = full.fisher(η)
        back = F.sharp(F.flat(v))
        full.natural(full.mean(η))
        full.kl(η, η)
    assert made.numel == d + d * d
    close(back[:d], v[:d], 1e-6)


def test_classes_may_be_given_by_their_numbers() -> None:
    for family in (f.Categorical(), f.Categorical(minimal=True)):
        η = normal(5, 3)
        classes = torch.tensor([0, 2, 1, 0, 2])
        hot = torch.nn.functional.one_hot(classes, 3 + family.minimal).double()
        close(family.log_prob(η, classes), family.log_prob(η, hot), 1e-12)


def test_counts_may_be_integers() -> None:
    """They are as precise as the parameters, and not in the default precision of torch."""
    x = torch.tensor([0, 3, 50])
    for family, value in ((f.Poisson(), 1.3), (f.Geometric(), -0.3), (f.NegativeBinomial(2.5), -0.3)):
        η = torch.tensor(value, dtype=torch.float64)
        found = family.log_prob(η, x)
        assert found.dtype == torch.float64
        close(found, family.log_prob(η, x.double()), 1e-14)
        close(family.fit(x), family.fit(x.float()), 1e-6)


def test_reparametrised_draws_have_the_gradient_of_the_mean() -> None:
    """∂ E x/∂η by single draws agrees with the information: E of t = x, five standard errors."""
    family, count = f.GaussianKnownCovariance(definite(d=2, seed=1)), 4000
    η = normal(2).expand(count, 2).clone().requires_grad_()
    (g,) = torch.autograd.grad(family.rsample(η, (), torch.Generator().manual_seed(0))[:, 0].sum(), η)
    close(g.mean(0), family.fisher(η[0].detach()).dense()[0], 1e-9)
    wishart = f.Wishart()
    η = torch.tensor([2.0, 1.0, 0.3, 0.3, 2.0], dtype=torch.float64).expand(count, 5).clone().requires_grad_()
    (g,) = torch.autograd.grad((-0.5 * wishart.rsample(η, (), torch.Generator().manual_seed(0))[:, 0, 0]).sum(), η)
    expected = wishart.fisher(η[0].detach()).dense()[1]
    assert bool(((g.mean(0) - expected).abs() <= 5 * g.std(0) / count**0.5).all())


def test_special_functions_are_precise_at_both_ends() -> None:
    x = torch.tensor([-1e-12, -1e-3, -0.7, -5.0, -800.0], dtype=torch.float64, requires_grad=True)
    expected = [math.log(-math.expm1(float(v))) if v > -1 else math.log1p(-math.exp(float(v))) for v in x.detach()]
    close(log1mexp(x), torch.tensor(expected, dtype=torch.float64), 1e-14)
    (g,) = torch.autograd.grad(log1mexp(x).sum(), x)
    close(g, -1 / torch.expm1(-x.detach()), 1e-12)
    y = torch.tensor([0.5, 1.0], dtype=torch.float64)
    close(trigamma(y), torch.tensor([math.pi**2 / 2, math.pi**2 / 6], dtype=torch.float64), 1e-14)
