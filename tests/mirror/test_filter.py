"""Natural gradient as a filter: on linear-Gaussian data it is the Kalman filter, and conditioning of one Gaussian."""

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.mirror import Filter
from tests.output.table import close, normal

A = torch.tensor([[1.0, 0.1], [-0.2, 0.9]], dtype=torch.float64)
H = torch.tensor([[1.0, 0.0], [0.5, 1.0], [0.0, 2.0]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.1], [0.1, 0.3]], dtype=torch.float64)
NOISE = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)  # variances
START = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def measured(belief: Filter, z: Tensor) -> Filter:
    """One measurement z [3] by its log density, with the metric Σ u²/variance."""
    loss = lambda y: 0.5 * ((y - z) ** 2 / NOISE).sum()  # noqa: E731
    return belief.update(lambda s: H @ s, loss, ng.Bregman(lambda y: 0.5 * (y**2 / NOISE).sum()))


def one_by_one(belief: Filter, row: Tensor, target: Tensor) -> Filter:
    return belief.update(lambda s: (row @ s)[None], lambda y: 0.5 * (y - target).square().sum(), ng.Euclidean())


def moved(belief: Filter) -> Filter:
    return belief.predict(lambda s: A @ s + 0.1, Q)


def test_the_iterates_are_those_of_the_kalman_filter() -> None:
    """The gain K = ΣHᵀ(HΣHᵀ + R)⁻¹ of the textbook."""
    μ, Σ = START
    belief = Filter(μ, Σ)
    for z in 3 * normal(50, 3):
        μ, Σ = A @ μ + 0.1, A @ Σ @ A.T + Q
        gain = Σ @ H.T @ torch.linalg.inv(H @ Σ @ H.T + NOISE.diag())
        μ, Σ = μ + gain @ (z - H @ μ), Σ - gain @ H @ Σ
        belief = measured(moved(belief), z)
        close(belief.mean, μ, 1e-12)
        close(belief.covariance, Σ, 1e-12)


def test_the_iterates_are_conditional_means_of_one_gaussian() -> None:
    """All states and measurements have a joint normal distribution; the last state, given all measurements."""
    zs = normal(4, 3)
    belief = Filter(*START)
    states = [(START[0], torch.eye(2, 2 * 5, dtype=torch.float64))]  # mean and map from (s₀, q₁, …, q₄)
    sources = torch.block_diag(START[1], *[Q] * 4)
    for k, z in enumerate(zs, start=1):
        mean, from_sources = states[-1]
        own = torch.zeros(2, 10, dtype=torch.float64)
        own[:, 2 * k : 2 * k + 2] = torch.eye(2)
        states.append((A @ mean + 0.1, A @ from_sources + own))
        belief = measured(moved(belief), z)
    seen = torch.cat([H @ s for _, s in states[1:]])
    expected = torch.cat([H @ mean for mean, _ in states[1:]])
    S = seen @ sources @ seen.T + NOISE.repeat(4).diag()
    mean, last = states[-1]
    gain = last @ sources @ seen.T @ torch.linalg.inv(S)
    close(belief.mean, mean + gain @ (zs.flatten() - expected), 1e-12)
    close(belief.covariance, last @ sources @ last.T - gain @ seen @ sources @ last.T, 1e-12)


def test_products_of_gaussians_agree_in_both_forms() -> None:
    one, other = Filter(*START), Filter(normal(2), Q)
    Λ, Λ2 = torch.linalg.inv(START[1]), torch.linalg.inv(Q)
    Σ = torch.linalg.inv(Λ + Λ2)
    for product in (one.product(other), other.product(one), Filter.of(one.eta + other.eta)):
        close(product.covariance, Σ, 1e-12)
        close(product.mean, Σ @ (Λ @ one.mean + Λ2 @ other.mean), 1e-12)


def test_the_metric_of_all_batches_with_rates_of_one_over_k_is_recursive_least_squares() -> None:
    """After k batches the optimizer is at the least squares of all of them, and (N Ḡ)⁻¹ is their covariance."""
    torch.manual_seed(0)
    line = nn.Linear(3, 1).double()
    opt = ng.NaturalGradient(line, ng.Euclidean(), structure=ng.Refresh(ng.Dense(), decay=1), lr=1.0, damping=0.0)
    x, t = normal(10, 6, 3), normal(10, 6, 1, seed=1)
    for k in range(1, 11):
        opt.param_groups[0]["lr"] = 1 / k
        opt.zero_grad()
        (0.5 * (line(x[k - 1]) - t[k - 1]).square().mean()).backward()
        opt.step()
        design = torch.cat([x[:k].flatten(0, 1), torch.ones(6 * k, 1, dtype=torch.float64)], 1)
        solution = torch.linalg.lstsq(design, t[:k].flatten(0, 1)).solution[:, 0]
        close(torch.cat([line.weight.detach()[0], line.bias.detach()]), solution, 1e-12)
    belief = Filter(torch.zeros(4, dtype=torch.float64), 1e8 * torch.eye(4, dtype=torch.float64))
    for row, target in zip(design, t.flatten(), strict=True):
        belief = one_by_one(belief, row, target)
    close(belief.mean, solution, 1e-6)
    close(belief.covariance, torch.linalg.inv(design.T @ design), 1e-6)


def test_counts_are_filtered_by_their_fisher_metric() -> None:
    """Poisson with log rate h·s: Σ⁻¹ ← Σ⁻¹ + λhhᵀ, μ ← μ + Σ h(z − λ), with λ = e^{h·μ} at the mean before."""
    h, z = torch.tensor([0.5, -1.0], dtype=torch.float64), 4.0
    μ, Σ = START
    rate = (h @ μ).exp()
    after = torch.linalg.inv(torch.linalg.inv(Σ) + rate * torch.outer(h, h))
    belief = Filter(μ, Σ).update(lambda s: (h @ s)[None], lambda y: (y.exp() - z * y).sum(), ng.Fisher(ng.Poisson()))
    close(belief.covariance, after, 1e-12)
    close(belief.mean, μ + after @ h * (z - rate), 1e-12)


def test_what_is_known_exactly_does_not_move() -> None:
    known = Filter(START[0], torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)))
    after = measured(known, normal(3))
    assert float(after.mean[1]) == float(START[0][1])
    assert not bool(after.covariance[1].any())
    assert float(after.covariance[0, 0]) < 1


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a mean \[d\] and a covariance \[d d\], got shapes \(2,\) and \(3, 3\)"):
        Filter(torch.zeros(2), torch.eye(3))
