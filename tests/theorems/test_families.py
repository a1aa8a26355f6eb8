"""What the library promises of exponential families in motion, one theorem each."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.mirror import Conjugate, MeanChart, NaturalChart, Online, Potential, mirror_step, natural_direction
from tests.golden import agrees, golden, tensor
from tests.mirror.members import CASES, Case, gradient, objective, t

every = pytest.mark.parametrize("case", CASES, ids=repr)
NATURAL, MEAN = NaturalChart(), MeanChart()
# Without redundant parameters, where u would not be unique.
MINIMAL = [case for case in CASES if int(torch.linalg.matrix_rank(case.fisher, hermitian=True)) == case.eta.numel()]


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@every
def test_mirror_descent_in_either_chart_is_natural_gradient_in_the_other(case: Case) -> None:
    """Grosse (2021), eq. 20–23, with F = ∇²log Z of the textbook and its pseudo-inverse."""
    family, lr = case.family, 0.02
    ω_ξ = gradient(objective(case), case.xi)
    ω_η = (case.fisher @ ω_ξ.reshape(-1)).view_as(ω_ξ)
    close(family.mean(mirror_step(family, case.eta, ω_η, lr, NATURAL).point), case.xi - lr * ω_η)
    close(mirror_step(family, case.xi, ω_ξ, lr, MEAN).point, gradient(case.log_partition, case.eta - lr * ω_ξ))
    inverse = torch.linalg.pinv(case.fisher, rtol=1e-12, hermitian=True)
    close(natural_direction(family, case.eta, ω_η, NATURAL), (inverse @ ω_η.reshape(-1)).view_as(ω_η))
    close(natural_direction(family, case.xi, ω_ξ, MEAN), ω_η)


def test_online_maximum_likelihood_is_the_batch_estimate_with_one_over_k_plus_one() -> None:
    case = golden("mirror.online_mle")
    x = tensor(case["inputs"]["t"])
    estimates = [Online.of(ng.families.Poisson(), x[:1])]
    for k in range(1, len(x)):
        estimates.append(estimates[-1].update(x[k : k + 1]))
    agrees(case, torch.stack([estimate.xi for estimate in estimates]), "iterates")


def test_the_online_estimate_is_fisher_efficient() -> None:
    """k E‖ξ_k − ξ‖² = p in the Fisher metric at ξ, the Cramér–Rao bound, to four standard errors of 4000 streams."""
    family, eta, streams = ng.families.Gamma(), t(1.2, -2.1), 4000
    x = family.sample(eta, (64, streams), torch.Generator().manual_seed(0))
    estimate = Online.of(family, x[:1])
    for k in range(1, 64):
        estimate = estimate.update(x[k : k + 1])
    xi = gradient(lambda e: torch.lgamma(e[0] + 1) - (e[0] + 1) * (-e[1]).log(), eta)
    hessian = torch.autograd.functional.hessian(lambda e: torch.lgamma(e[0] + 1) - (e[0] + 1) * (-e[1]).log(), eta)
    δ = estimate.xi - xi
    lengths = 64 * torch.einsum("np,pq,nq->n", δ, torch.linalg.inv(hessian), δ)
    assert abs(float(lengths.mean()) - 2) < 4 * float(lengths.std()) / streams**0.5


@pytest.mark.parametrize("case", MINIMAL, ids=repr)
def test_the_linearised_proximal_step_with_kl_is_mirror_descent(case: Case) -> None:
    """The general minimiser of ⟨∇J, u⟩ + λ KL(p_η ‖ p_u), which knows nothing of charts, finds (20)."""
    λ, J, ξ = 50.0, ng.mirror.in_other_chart(objective(case), case.family, MEAN), case.xi

    def kl(u: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> Tensor:
        return case.log_partition(u["w"]) - case.log_partition(w["w"]) - (ξ * (u["w"] - w["w"])).sum()

    found = ng.proximal.linearised(lambda u: J(u["w"]), kl, {"w": case.eta}, λ)["w"]
    close(mirror_step(case.family, case.eta, gradient(J, case.eta), 1 / λ, NATURAL).point, found, 1e-8)


def test_the_exact_proximal_point_is_implicit_mirror_descent_and_all_three_agree_for_short_steps() -> None:
    """ξ(u) = ξ − ∇J(u)/λ, the gradient at the new point; what the three forms differ by falls as 1/λ²."""
    g, eta, goal = ng.families.Gamma(), t(1.2, -2.1), ng.families.Gamma().mean(t(0.5, -1.5))

    def J(u: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (g.mean(u["w"]) - goal).square().sum()

    def kl(u: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> Tensor:
        return g.bregman(u["w"], w["w"])

    def slope(x: Tensor) -> Tensor:
        return gradient(lambda u: J({"w": u}), x)

    apart = []
    for λ in (1e2, 1e3):
        point = ng.proximal.point(J, kl, {"w": eta}, λ)["w"]
        close(g.mean(point), g.mean(eta) - slope(point) / λ, 1e-8)
        linear = mirror_step(g, eta, slope(eta), 1 / λ, NATURAL).point
        quadratic = ng.proximal.quadratic(J, kl, {"w": eta}, λ)["w"]
        apart.append(max(float((point - linear).norm()), float((point - quadratic).norm())))
    assert apart[1] < apart[0] / 50


@pytest.mark.parametrize(
    ("family", "entropy", "eta"),
    [
        (ng.families.Bernoulli(), ng.mirror.BinaryEntropy(), t(0.7)[0]),
        (ng.families.Poisson(), ng.mirror.NegativeEntropy(), t(0.7)[0]),
        (ng.families.Exponential(), ng.mirror.LogBarrier(), t(-1.7)[0]),
        (ng.families.Categorical(), ng.mirror.SimplexEntropy(), t(0.2, -0.5, 1.0).log_softmax(0)),
    ],
    ids=repr,
)
def test_mirror_descent_of_families_is_that_of_their_entropies(
    family: ng.families.ExponentialFamily, entropy: Potential, eta: Tensor
) -> None:
    """ψ = −H in the chart ξ makes the step (21), ψ* = log Z in the chart η the step (20), α = 1/lr."""
    ξ, α = family.mean(eta), 9.0

    def J(xi: Tensor) -> Tensor:
        return 0.5 * (xi - 0.4).square().sum()

    dual = ng.mirror.in_other_chart(J, family, MEAN)
    expected = ng.mirror.BregmanDescent(entropy, α).grad(J, ξ)
    close(mirror_step(family, ξ, gradient(J, ξ), 1 / α, MEAN).point, expected)
    expected = ng.mirror.BregmanDescent(Conjugate(entropy), α).grad(dual, eta)
    got = mirror_step(family, eta, gradient(dual, eta), 1 / α, NATURAL).point
    close(family.mean(got), family.mean(expected))


@every
def test_the_rate_of_mirror_descent_holds_for_the_likelihood_of_every_family(case: Case) -> None:
    """f = log Z − ⟨·, ξ'⟩ is 1-smooth relative to log Z: at lr = 1/2, f(η_T) − f* ≤ 2 KL(p_η_0 ‖ p*)/T, and faster."""
    family, x, goal = case.family, case.eta, gradient(case.log_partition, case.eta2)

    def f(eta: Tensor) -> Tensor:
        return case.log_partition(eta) - (eta * goal).sum()

    start = f(case.eta2) + (case.eta2 * goal).sum() - case.log_partition(x) - (case.xi * (case.eta2 - x)).sum()
    for T in range(1, 9):
        x = mirror_step(family, x, gradient(case.log_partition, x) - goal, 0.5, NATURAL).point
        assert float(f(x) - f(case.eta2)) <= 2 * float(start) / T + 1e-12
