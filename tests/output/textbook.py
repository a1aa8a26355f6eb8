"""Fisher matrices of distributions that torch builds, from the textbook: no automatic differentiation, no library.

Every function takes outputs y [n *terms c], c parameters of one distribution a term, to h [n D D]; positive parameters
are exp(y), so a Fisher matrix F in the parameters α = exp(y) is diag(α) F diag(α) in y.
"""

from collections.abc import Callable

import torch
from scipy.special import polygamma
from torch import Tensor

from tests import oracle
from tests.output.distributions import scale_tril

_block_diag: Callable[..., Tensor] = torch.block_diag


def trigamma(x: Tensor) -> Tensor:
    """ψ₁(x)."""
    return torch.as_tensor(polygamma(1, x.numpy()), dtype=torch.float64)


def by_term(fisher: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """h [n D D] from the Fisher matrix [c c] of the c outputs of one term: terms are independent."""

    def h(y: Tensor) -> Tensor:
        return torch.stack([_block_diag(*[fisher(row) for row in y_n.reshape(-1, y.shape[-1])]) for y_n in y])

    return h


def gamma(y: Tensor) -> Tensor:
    """Shape α and rate β: F = [[ψ₁(α), −1/β], [−1/β, α/β²]]."""
    α, β = y.exp()
    F = torch.stack([trigamma(α), -1 / β, -1 / β, α / β**2]).reshape(2, 2)
    return torch.diag(y.exp()) @ F @ torch.diag(y.exp())


def dirichlet(y: Tensor) -> Tensor:
    """F = diag ψ₁(α_i) − ψ₁(Σ α_i); for two parameters this is the beta distribution."""
    α = y.exp()
    F = torch.diag(trigamma(α)) - trigamma(α.sum())
    return torch.diag(α) @ F @ torch.diag(α)


def weibull(y: Tensor) -> Tensor:
    """Scale λ and shape k: F = [[k²/λ², −(1 − γ)/λ], [·, ((1 − γ)² + π²/6)/k²]], γ of Euler."""
    λ, k = y.exp()
    gap = torch.tensor(1 - 0.5772156649015329, dtype=torch.float64)
    F = torch.stack([(k / λ) ** 2, -gap / λ, -gap / λ, (gap**2 + torch.pi**2 / 6) / k**2]).reshape(2, 2)
    return torch.diag(y.exp()) @ F @ torch.diag(y.exp())


def plane_normal(y: Tensor) -> Tensor:
    """N(μ, L Lᵀ) in the plane, y = (μ₁, μ₂, log L₁₁, L₂₁, log L₂₂): ∂μᵀ Σ⁻¹ ∂μ + ½ tr(Σ⁻¹ ∂Σ Σ⁻¹ ∂Σ)."""
    L = scale_tril(y)
    P = torch.linalg.inv(L @ L.T)
    by_L = torch.zeros(5, 2, 2, dtype=torch.float64)  # ∂L/∂y
    by_L[2, 0, 0], by_L[3, 1, 0], by_L[4, 1, 1] = L[0, 0], 1.0, L[1, 1]
    F = torch.zeros(5, 5, dtype=torch.float64)
    F[:2, :2] = P
    for i in range(5):
        for j in range(5):
            d_i, d_j = (d @ L.T + L @ d.T for d in (by_L[i], by_L[j]))
            F[i, j] += 0.5 * torch.trace(P @ d_i @ P @ d_j)
    return F


def quadratic(y: Tensor) -> Tensor:
    """p(t) ∝ exp(a t + b t²) on t = 0, 1, 2, 3: F is the covariance of (t, t²)."""
    statistics = [torch.tensor([t, t**2], dtype=torch.float64) for t in range(4)]
    weights = [torch.exp(y @ s) for s in statistics]
    total = sum(weights, torch.zeros((), dtype=torch.float64))
    mean = torch.stack([w / total * s for w, s in zip(weights, statistics, strict=True)]).sum(0)
    outer = [w / total * torch.outer(s - mean, s - mean) for w, s in zip(weights, statistics, strict=True)]
    return torch.stack(outer).sum(0)


def mixture(y: Tensor) -> Tensor:
    """½ N(y − 1, 1) + ½ N(y + 1, 1), the whole h: F = ∫ p'²/p by the trapezoidal rule.

    It is exact to rounding for functions that decay like a Gaussian.
    """
    x = torch.linspace(-14, 14, 4001, dtype=torch.float64)
    left, right = torch.exp(-((x + 1) ** 2) / 2), torch.exp(-((x - 1) ** 2) / 2)
    p = (left + right) / (2 * (2 * torch.pi) ** 0.5)
    slope = ((x + 1) * left + (x - 1) * right) / (2 * (2 * torch.pi) ** 0.5)
    return torch.trapezoid(slope**2 / p, x) * oracle.euclidean(y)
