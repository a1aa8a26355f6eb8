"""Models whose data depend on latent numbers that are linear in Gaussian variables: two slopes a datum make a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from natgrad.linalg import check_finite
from natgrad.vi.likelihoods import Likelihood
from natgrad.vi.step import MARGIN, Step, check_rate


@final
@dataclass(frozen=True)
class Projection:
    """f_n = a_nᵀv + ε_n, ε_n ~ N(0, r_n): latent values given whitened inducing values v; a [n m], r [n]."""

    a: Tensor
    r: Tensor


@final
@dataclass(frozen=True)
class Belief:
    """q(v) = N(μ, Λ⁻¹) in natural parameters: shift Λμ [m] and precision Λ [m m]; C Cᵀ = Λ."""

    shift: Tensor
    precision: Tensor

    @property
    def root(self) -> Tensor:
        """C, lower triangular; Λ is positive definite wherever a step has ended."""
        return torch.linalg.cholesky(self.precision)

    def marginals(self, at: Projection) -> tuple[Tensor, Tensor, Tensor]:
        """Means μ_f and variances v_f [n] of the latent values, and KL(q(v) ‖ N(0, 1)) []; one factorisation."""
        C, m = self.root, self.shift.shape[0]
        inverse = torch.linalg.solve_triangular(C, torch.eye(m, dtype=C.dtype, device=C.device), upper=False)
        half = at.a @ inverse.T  # [n m]: C⁻¹a_n
        white = inverse @ self.shift
        μ = inverse.T @ white
        logdet = 2 * C.diagonal().log().sum()
        kl = 0.5 * (inverse.square().sum() + μ.square().sum() - m + logdet)
        return half @ white, at.r + half.square().sum(1), kl

    def moved(self, target: Belief, ρ: float | Tensor) -> Belief:
        """(1 − ρ) η + ρ η̂ in both natural parameters."""
        weight = torch.as_tensor(ρ, dtype=self.shift.dtype, device=self.shift.device)
        return Belief(self.shift.lerp(target.shift, weight), self.precision.lerp(target.precision, weight))

    def reach(self, target: Belief) -> Tensor:
        """The largest ρ with (1 − ρ) Λ + ρ Λ̂ ⪰ 0: 1/e for the most negative eigenvalue −e of C⁻¹(Λ̂ − Λ)C⁻ᵀ."""
        C = self.root
        left = torch.linalg.solve_triangular(C, target.precision - self.precision, upper=False)
        change = torch.linalg.solve_triangular(C.T, left, upper=True, left=False)
        lowest = torch.linalg.eigvalsh(0.5 * (change + change.T))[0]
        return (-lowest).clamp(min=torch.finfo(C.dtype).tiny).reciprocal()


class LatentGaussian(nn.Module, ABC):
    """y_n ~ p(y | f_n), f_n = a_nᵀv + ε_n, with the prior v ~ N(0, 1) and q(v) = N(μ, Λ⁻¹):

        ELBO = Σ_n E_q log p(y_n | f_n) − KL(q(v) ‖ N(0, 1)).

    The natural gradient in (Λμ, −½Λ) is the plain gradient in the mean parameters (002 (22), (23)), and that needs only
    two numbers a datum, ġ_n = ∂E_n/∂μ_n and v̇_n = ∂E_n/∂v_n (Khan & Lin 2017; Salimbeni et al. 2018):

        Λ  ← (1 − ρ) Λ  + ρ (1 + Σ_n (−2v̇_n) a_n a_nᵀ)
        Λμ ← (1 − ρ) Λμ + ρ Σ_n (ġ_n − 2v̇_n μ_n) a_n

    For Gaussian noise ρ = 1 is the optimum, whatever q was. A step looks at its data and at its factorisations, and so
    waits for the device.
    """

    def __init__(self, likelihood: Likelihood, like: Tensor) -> None:
        """``like`` [m]: the size, precision and device of v."""
        super().__init__()
        self.likelihood = likelihood
        m = like.shape[0]
        self.register_buffer("shift", torch.zeros(m, dtype=like.dtype, device=like.device))
        self.register_buffer("precision", torch.eye(m, dtype=like.dtype, device=like.device))
        self.shift: Tensor
        self.precision: Tensor

    @abstractmethod
    def project(self, x: Tensor) -> Projection:
        """a [n m] and r [n] at inputs x; they depend on the hyperparameters alone, and may be kept while those stay."""

    @property
    def belief(self) -> Belief:
        """q(v)."""
        return Belief(self.shift, self.precision)

    def elbo(self, x: Tensor, y: Tensor, total: int | None = None) -> Tensor:
        """The bound [] on log p(y), differentiable in the hyperparameters; ``total``: the number of all data."""
        self.check(x, y)
        return self.bound(self.project(x), y, _scale(y, total))

    def bound(self, at: Projection, y: Tensor, scale: float = 1.0) -> Tensor:
        """The ELBO at a projection that was kept."""
        μ, v, kl = self.belief.marginals(at)
        return scale * self.likelihood.expected(y, μ, v).sum() - kl

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, rate: float = 1.0, total: int | None = None) -> Step:
        """One natural-gradient step of size ρ = ``rate`` on a batch."""
        check_rate(rate)
        self.check(x, y)
        at, belief = self.project(x), self.belief
        μ, v, _ = belief.marginals(at)
        target = self.target(at, y, μ, v, _scale(y, total))
        step = self.limited(belief, target, rate)
        self.assume(belief.moved(target, step.taken))
        return step

    def target(self, at: Projection, y: Tensor, μ: Tensor, v: Tensor, scale: float = 1.0) -> Belief:
        """η̂: the prior with a Gaussian site for every datum, where a step of size 1 ends."""
        g_mean, g_variance = self.likelihood.slopes(y, μ, v)
        shift = at.a.T @ (scale * (g_mean - 2 * g_variance * μ))
        precision = (at.a * (-2 * scale * g_variance).unsqueeze(1)).T @ at.a
        precision.diagonal().add_(1.0)
        return Belief(shift, precision)

    def limited(self, belief: Belief, target: Belief, rate: float) -> Step:
        """The step with its size bounded where Λ would stop being positive definite."""
        taken = torch.full((), rate, dtype=belief.shift.dtype, device=belief.shift.device)
        if not self.likelihood.concave:
            taken = torch.minimum(taken, MARGIN * belief.reach(target))
        return Step(rate, taken, "the precision of q(v) must stay positive definite")

    @torch.no_grad()
    def assume(self, belief: Belief) -> None:
        """Make this q(v)."""
        self.shift.copy_(belief.shift)
        self.precision.copy_(belief.precision)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [n] of f(x)."""
        μ, v, _ = self.belief.marginals(self.project(x))
        return μ, v

    def check(self, x: Tensor, y: Tensor) -> None:
        """Refuse data that do not fit; q is as it was."""
        if y.ndim != 1 or x.shape[0] != y.shape[0]:
            raise ValueError(f"inputs x [n *shape] and data y [n] are needed, got {tuple(x.shape)}, {tuple(y.shape)}")
        check_finite(x, "the inputs x")
        self.likelihood.check(y)


def _scale(y: Tensor, total: int | None) -> float:
    """N/n: a batch stands for all data."""
    if total is not None and total < y.shape[0]:
        raise ValueError(f"total={total} is the number of all data, and this batch alone has {y.shape[0]}")
    return 1.0 if total is None else total / y.shape[0]
