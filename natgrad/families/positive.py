"""Positive numbers: exponential, Laplace, Weibull, gamma and inverse Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.base import ExponentialFamily, expect, expect_constant, natural_by_newton
from natgrad.families.domains import Concave, Domain, OpenBox
from natgrad.families.information import Information
from natgrad.families.special import expected_log, trigamma, trigamma_excess
from natgrad.linalg import check_positive

_EULER = 0.5772156649015329


@dataclass(frozen=True)
class Exponential(ExponentialFamily):
    """The exponential distributions of a waiting time.

    Method:
        −η e^{ηx}, x > 0: t = x, log Z = −log(−η), ξ = −1/η, F = 1/η², η = −rate.

    Example:
        >>> Exponential().mean(torch.tensor(-2.0))
        tensor(0.5000)
    """

    axes = 0
    natural_domain: ClassVar[Domain] = OpenBox(upper=0.0, axes=0)
    mean_domain: ClassVar[Domain] = OpenBox(0.0, axes=0)
    support: ClassVar[C.Constraint] = C.nonnegative

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Exponential(-eta)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        return -expect(self, d, D.Exponential).rate

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -(-eta).log()

    def _mean(self, eta: Tensor) -> Tensor:
        return -1 / eta

    def _natural(self, xi: Tensor) -> Tensor:
        return -1 / xi


@final
@dataclass(frozen=True)
class Laplace(Exponential):
    """Laplace distributions with a known centre and unknown scale.

    Args:
        centre: The known centre c.

    Method:
        ½(−η) e^{η|x − c|} with known ``centre`` c: t = |x − c| is exponential, log Z = log 2 − log(−η), η = −1/scale.

    Example:
        >>> Laplace(1.0).log_prob(torch.tensor(-2.0), torch.tensor(1.0))
        tensor(0.)
    """

    centre: float = 0.0

    support: ClassVar[C.Constraint] = C.real

    def __post_init__(self) -> None:
        if not math.isfinite(self.centre):
            raise ValueError(f"Laplace(centre=…) must be finite, got {self.centre}")

    def statistics(self, x: Tensor) -> Tensor:
        return (x - self.centre).abs()

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.Laplace(torch.full_like(eta, self.centre), -1 / eta)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.Laplace)
        expect_constant(self, "centre", self.centre, d.loc)
        return -1 / d.scale

    def _log_partition(self, eta: Tensor) -> Tensor:
        return math.log(2) + super()._log_partition(eta)


@final
@dataclass(frozen=True)
class Weibull(Exponential):
    """Weibull distributions with a known shape and unknown scale.

    Args:
        shape: The known exponent k > 0.

    Method:
        t = xᵏ is exponential, h = k xᵏ⁻¹, log Z = −log(−η), η = −scale⁻ᵏ.

    Example:
        >>> Weibull(2.0).mean(torch.tensor(-0.25))
        tensor(4.)
    """

    shape: float

    support: ClassVar[C.Constraint] = C.positive

    def __post_init__(self) -> None:
        check_positive(self.shape, "Weibull(shape=…)")

    def statistics(self, x: Tensor) -> Tensor:
        return x.pow(self.shape)

    def log_base(self, x: Tensor) -> Tensor:
        return math.log(self.shape) + (self.shape - 1) * x.log()

    def _distribution(self, eta: Tensor) -> D.Distribution:
        scale = (-eta).pow(-1 / self.shape)
        return D.Weibull(scale, torch.full_like(scale, self.shape))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.Weibull)
        expect_constant(self, "shape", self.shape, d.concentration)
        return -d.scale.pow(-self.shape)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        log_x = -((-eta).log() + _EULER) / self.shape
        return math.log(self.shape) + (self.shape - 1) * log_x


@final
@dataclass(frozen=True)
class Gamma(ExponentialFamily):
    """The gamma distributions of a positive number.

    Method:
        βᵅ/Γ(α) xᵅ⁻¹ e^{−βx}: t = (log x, x), η = (α − 1, −β), log Z = log Γ(α) − α log β; points [*batch 2].

    Example:
        >>> gamma = Gamma()
        >>> eta = torch.tensor([1.0, -3.0], dtype=torch.float64)
        >>> gamma.natural(gamma.mean(eta))
        tensor([ 1.0000, -3.0000], dtype=torch.float64)
    """

    natural_domain: ClassVar[Domain] = OpenBox((-1.0, -math.inf), (math.inf, 0.0))
    mean_domain: ClassVar[Domain] = Concave(
        lambda xi: torch.stack([xi[..., 1], xi[..., 1].log() - xi[..., 0]], -1),
        ("E x above 0", "E log x below log E x (Jensen; equal if all data are the same)"),
    )
    support: ClassVar[C.Constraint] = C.positive

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack([x.log(), x], -1)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        α, β = _shape_and_rate(eta)
        return D.Gamma(α, β)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, D.Gamma)
        return torch.stack([d.concentration - 1, -d.rate], -1)

    def _wrong_size(self, p: int) -> str:
        return "" if p == 2 else "(α − 1, −β), 2 entries,"

    def _log_partition(self, eta: Tensor) -> Tensor:
        α, β = _shape_and_rate(eta)
        return torch.lgamma(α) - α * β.log()

    def _mean(self, eta: Tensor) -> Tensor:
        α, β = _shape_and_rate(eta)
        return torch.stack([torch.digamma(α) - β.log(), α / β], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        s = xi[..., 1].log() - xi[..., 0]  # log α − ψ(α), with 1/(2α) < s < 1/α
        α = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
        return natural_by_newton(self, xi, torch.stack([α - 1, -α / xi[..., 1]], -1))

    def _fisher(self, eta: Tensor) -> Information:
        """[[ψ'(α), 1/β], [1/β, α/β²]]; in closed form, since ``natural`` has none."""
        α, β = _shape_and_rate(eta)
        f = trigamma(α)
        determinant = trigamma_excess(α).to(α)  # times β²

        def flat(v: Tensor) -> Tensor:
            a, b = v[..., 0], v[..., 1] / β
            return torch.stack([f * a + b, (a + α * b) / β], -1)

        def sharp(w: Tensor) -> Tensor:
            a, b = w[..., 0], w[..., 1] * β
            return torch.stack([(α * a - b) / determinant, β * (f * b - a) / determinant], -1)

        return Information(eta, 1, flat, sharp)


def _shape_and_rate(eta: Tensor) -> tuple[Tensor, Tensor]:
    return eta[..., 0] + 1, -eta[..., 1]


# The inverse Gaussian family: first passage times of a Brownian motion with drift


@final
class InverseGaussianDistribution(D.Distribution):
    """√(λ/(2πx³)) exp(−λ(x − μ)²/(2μ²x)) as a ``torch.distributions`` object; torch has none.

    >>> InverseGaussianDistribution(torch.tensor(2.0), torch.tensor(3.0)).mean
    tensor(2.)
    """

    arg_constraints: Any = {"loc": C.positive, "concentration": C.positive}  # noqa: RUF012 (torch's convention)
    support: ClassVar[C.Constraint] = C.positive

    def __init__(self, loc: Tensor, concentration: Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.concentration = torch.broadcast_tensors(loc, concentration)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.loc**3 / self.concentration

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's signature)
        """By Michael, Schucany and Haas (1976): a root of λ(x − μ)²/(μ²x) = χ²₁, the smaller with odds μ : x."""
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            μ, λ = self.loc.expand(shape), self.concentration.expand(shape)
            z = torch.randn(shape, dtype=μ.dtype, device=μ.device).square()
            half = μ * z / (2 * λ)
            x = μ / (1 + half + (half * (half + 2)).sqrt())  # the smaller root, without cancellation
            u = torch.rand(shape, dtype=μ.dtype, device=μ.device)
            return torch.where(u * (μ + x) <= μ, x, μ.square() / x)

    def log_prob(self, value: Tensor) -> Tensor:
        μ, λ = self.loc, self.concentration
        return 0.5 * (λ / (2 * math.pi * value**3)).log() - λ * (value - μ).square() / (2 * μ.square() * value)


@final
@dataclass(frozen=True)
class InverseGaussian(ExponentialFamily):
    """The inverse Gaussian distributions of a positive number, such as a first-passage time.

    Method:
        t = (x, 1/x), η = (−λ/(2μ²), −λ/2), h = x^(−3/2)/√(2π), log Z = −2√(η₁η₂) − ½ log(−2η₂); points [*batch 2].

    Example:
        >>> InverseGaussian().mean(torch.tensor([-0.5, -0.5]))  # μ = 1, λ = 1: E x = μ, E 1/x = 1/μ + 1/λ
        tensor([1., 2.])
    """

    natural_domain: ClassVar[Domain] = OpenBox(upper=0.0)
    mean_domain: ClassVar[Domain] = Concave(
        lambda xi: torch.stack([xi[..., 0], xi[..., 1], 1 - xi.prod(-1).reciprocal()], -1),
        ("E x above 0", "E 1/x above 0", "E 1/x above 1/E x (Jensen; equal if all data are the same)"),
    )
    support: ClassVar[C.Constraint] = C.positive

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.reciprocal()], -1)

    def log_base(self, x: Tensor) -> Tensor:
        return -1.5 * x.log() - 0.5 * math.log(2 * math.pi)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        μ, λ = _mean_and_shape(eta)
        return InverseGaussianDistribution(μ, λ)

    def from_distribution(self, d: D.Distribution) -> Tensor:
        d = expect(self, d, InverseGaussianDistribution)
        return torch.stack([-d.concentration / (2 * d.loc.square()), -0.5 * d.concentration], -1)

    def _wrong_size(self, p: int) -> str:
        return "" if p == 2 else "(−λ/(2μ²), −λ/2), 2 entries,"

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -2 * eta.prod(-1).sqrt() - 0.5 * (-2 * eta[..., 1]).log()

    def _mean(self, eta: Tensor) -> Tensor:
        μ, λ = _mean_and_shape(eta)
        return torch.stack([μ, 1 / μ + 1 / λ], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        μ = xi[..., 0]
        λ = 1 / (xi[..., 1] - 1 / μ)
        return -0.5 * torch.stack([λ / μ.square(), λ], -1)

    def _fisher(self, eta: Tensor) -> Information:
        """[[μ³/λ, −μ/λ], [−μ/λ, 1/(μλ) + 2/λ²]].

        In closed form: the derivative of ``natural`` at ξ would subtract 1/μ from E 1/x.
        """
        μ, λ = _mean_and_shape(eta)

        def flat(v: Tensor) -> Tensor:
            δμ = μ / λ * (μ.square() * v[..., 0] - v[..., 1])
            return torch.stack([δμ, 2 * v[..., 1] / λ.square() - δμ / μ.square()], -1)

        def sharp(w: Tensor) -> Tensor:
            scaled = w[..., 0] / μ.square()
            second = 0.5 * λ.square() * (w[..., 1] + scaled)  # −½δλ
            return torch.stack([second / μ.square() + λ / μ * scaled, second], -1)

        return Information(eta, 1, flat, sharp)

    def entropy(self, eta: Tensor) -> Tensor:
        """As for every family, with log Z − ⟨η, ξ⟩ = ½ − ½ log λ, where terms of the size of λ/μ have cancelled."""
        η = self._inside(eta, self.natural_domain, "eta").double()
        _, λ = _mean_and_shape(η)
        return (0.5 - 0.5 * λ.log() - self._expected_log_base(η)).to(eta.dtype)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        μ, λ = _mean_and_shape(eta)
        φ = (λ / μ).unsqueeze(-1)
        # E e^{−sx} = exp φ(1 − √(1 + 2s/φ)) of x with mean 1 and shape φ, written without cancellation
        log_x = μ.log() + expected_log(lambda s: -2 * s / (1 + (1 + 2 * s / φ).sqrt()), φ)
        return -1.5 * log_x - 0.5 * math.log(2 * math.pi)


def _mean_and_shape(eta: Tensor) -> tuple[Tensor, Tensor]:
    return (eta[..., 1] / eta[..., 0]).sqrt(), -2 * eta[..., 1]
