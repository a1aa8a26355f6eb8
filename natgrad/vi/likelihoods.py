"""Likelihoods p(y | f) of one latent number f: E log p(y | f) under a Gaussian f, and its two derivatives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.errors import DomainError
from natgrad.linalg import check_positive, gauss_rule


class Likelihood(nn.Module, ABC):
    """p(y | f) for data y [n] and latent values f ~ N(μ, v), μ and v [n]."""

    @abstractmethod
    def check(self, y: Tensor) -> None:
        """Refuse data outside the support; the message names the entry and the bound."""

    @abstractmethod
    def expected(self, y: Tensor, μ: Tensor, v: Tensor) -> Tensor:
        """E log p(y | f) [n], differentiable in μ, v and the parameters of the likelihood."""

    @abstractmethod
    def slopes(self, y: Tensor, μ: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives ∂E/∂μ and ∂E/∂v of ``expected`` [n].

        They are E ∂log p/∂f and ½ E ∂²log p/∂f² (Bonnet 1964; Price 1958).
        """

    def gap(self, y: Tensor, μ: Tensor, v: Tensor) -> float:
        """By how many nats Σ_n E log p(y_n | f_n) changes with twice the nodes; 0 for a closed form."""
        return 0.0

    @property
    def concave(self) -> bool:
        """Whether log p is concave in f: then ∂E/∂v ≤ 0, and no step of size ≤ 1 can leave the domain."""
        return True


@final
class GaussianNoise(Likelihood):
    """The likelihood of real data with normal noise, for regression.

    Args:
        variance: The first σ² of the noise; the parameter that ``learn`` moves is log σ².

    Method:
        y = f + ε, ε ~ N(0, σ²): conjugate, so that one step of size 1 is exact.

    Example:
        >>> noise = GaussianNoise(variance=0.5)
        >>> noise.slopes(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]))
        (tensor([2.]), tensor([-1.]))
    """

    def __init__(self, variance: float = 1.0) -> None:
        super().__init__()
        check_positive(variance, "GaussianNoise(variance)")
        self.log_variance: nn.Parameter = nn.Parameter(torch.tensor(math.log(variance)))

    def check(self, y: Tensor) -> None:
        _check_support(y, y.isfinite(), "is not a finite number: drop the example, or impute it")

    def expected(self, y: Tensor, μ: Tensor, v: Tensor) -> Tensor:
        precision = (-self.log_variance).exp()
        return -0.5 * (precision * ((y - μ).square() + v) + self.log_variance + math.log(2 * math.pi))

    def slopes(self, y: Tensor, μ: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        precision = (-self.log_variance.detach()).exp()
        return precision * (y - μ), (-0.5 * precision).expand_as(v)


@final
class PoissonCounts(Likelihood):
    """The likelihood of counts whose log-rate is the latent function.

    Method:
        Rate e^f: E log p = yμ − e^{μ + v/2} − log y!, in closed form.
    """

    def check(self, y: Tensor) -> None:
        _check_support(y, (y >= 0) & (y == y.round()) & y.isfinite(), "is not a count 0, 1, 2, …")

    def expected(self, y: Tensor, μ: Tensor, v: Tensor) -> Tensor:
        y = y.to(μ.dtype)  # the factorial of an integer would be in single precision
        return y * μ - (μ + 0.5 * v).exp() - torch.lgamma(y + 1)

    def slopes(self, y: Tensor, μ: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rate = (μ + 0.5 * v).exp()
        return y - rate, -0.5 * rate


class Quadrature(Likelihood):
    """The base class of likelihoods whose expectations are sums over a few points.

    Subclasses define ``log_density``; ``derivatives`` are taken by autograd unless they are overridden. A log p that
    bends within √v (Student's t with a small scale) needs more nodes: ``gap`` compares with twice as many, and
    ``ascend`` and ``learn`` warn of a large one.

    Args:
        nodes: The number of points: exact for polynomials of degree 2·nodes − 1.

    Method:
        Gauss–Hermite quadrature. With any number of nodes the slopes are the derivatives of the sum that ``expected``
        is, so that a step ascends the bound that is reported.
    """

    def __init__(self, nodes: int = 20) -> None:
        super().__init__()
        if nodes < 1:
            raise ValueError(f"nodes={nodes}: a quadrature needs one node or more")
        x, w = _hermite(nodes)  # in double precision: rounded once, they would not regain their digits there
        self.register_buffer("nodes", x, persistent=False)
        self.register_buffer("weights", w, persistent=False)
        self.nodes: Tensor
        self.weights: Tensor

    @abstractmethod
    def log_density(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f) [q n] for y [n] and f [q n]."""

    def derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """The first and second derivative of log p in f [q n]."""
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            (first,) = torch.autograd.grad(self.log_density(y, f).sum(), f, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), f)
        return first.detach(), second

    def expected(self, y: Tensor, μ: Tensor, v: Tensor) -> Tensor:
        return self.weights.to(μ.dtype) @ self.log_density(y, self._latent(μ, v))

    def slopes(self, y: Tensor, μ: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_q w_q ℓ′(f_q) and Σ_q w_q x_q ℓ′(f_q)/2√v, whose limit is ½ℓ″ at v = 0.

        Σ_q w_q ℓ″(f_q)/2 has the same integral, but is another sum: it is not the derivative of ``expected``.
        """
        first, second = self.derivatives(y, self._latent(μ, v))
        w = self.weights.to(μ.dtype)
        by_variance = (w * self.nodes.to(μ.dtype)) @ first / (2 * v.sqrt())
        # At v ≤ ε the nodes are one point to half the digits, and the division would lose the others.
        return w @ first, torch.where(v > torch.finfo(v.dtype).eps, by_variance, 0.5 * (w @ second))

    @torch.no_grad()
    def gap(self, y: Tensor, μ: Tensor, v: Tensor) -> float:
        x, w = (t.to(μ) for t in _hermite(2 * len(self.nodes)))
        finer = w @ self.log_density(y, torch.addcmul(μ, x.unsqueeze(1), v.sqrt()))
        return abs(float((finer - self.expected(y, μ, v)).sum()))

    def _latent(self, μ: Tensor, v: Tensor) -> Tensor:
        return torch.addcmul(μ, self.nodes.to(μ.dtype).unsqueeze(1), v.sqrt())


@final
class BernoulliLogit(Quadrature):
    """The likelihood of labels 0 and 1, for classification.

    Args:
        nodes: The number of points of the quadrature.

    Method:
        P(1 | f) = 1/(1 + e^{−f}), as in logistic regression.

    Example:
        >>> BernoulliLogit().expected(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([-0.6931])
    """

    def check(self, y: Tensor) -> None:
        _check_support(y, (y == 0) | (y == 1), "is not a label 0 or 1: for labels ±1 pass (y + 1)/2")

    def log_density(self, y: Tensor, f: Tensor) -> Tensor:
        return functional.logsigmoid((2 * y.to(f.dtype) - 1) * f)  # −1 would wrap around in uint8

    def derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        p = f.sigmoid()
        return y - p, p * (p - 1)


@final
class StudentNoise(Quadrature):
    """The likelihood of real data with heavy-tailed noise, for regression with outliers.

    Args:
        degrees: ν, the degrees of freedom; small numbers have heavy tails.
        scale: s, the scale of the noise.
        nodes: The number of points of the quadrature.

    Method:
        y = f + ε, with ε/s from Student's t with ν degrees of freedom. log p is not concave: the precision of an
        example far from f is negative, and steps may have to be shortened.
    """

    def __init__(self, degrees: float, scale: float = 1.0, nodes: int = 20) -> None:
        super().__init__(nodes)
        check_positive(torch.tensor([degrees, scale]), "StudentNoise(degrees, scale)")
        self.degrees: float = degrees
        self.scale: float = scale

    @property
    def concave(self) -> bool:
        return False

    def check(self, y: Tensor) -> None:
        _check_support(y, y.isfinite(), "is not a finite number: drop the example, or impute it")

    def log_density(self, y: Tensor, f: Tensor) -> Tensor:
        half = 0.5 * (self.degrees + 1)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.degrees) - 0.5 * math.log(self.degrees * math.pi)
        tail = ((y - f) / self.scale).square() / self.degrees
        return constant - math.log(self.scale) - half * torch.log1p(tail)


def _hermite(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights [q] of N(0, 1), whose orthonormal polynomials are Hermite's."""
    beside = torch.arange(1, nodes, dtype=torch.float64).sqrt()
    return gauss_rule(torch.zeros(nodes, dtype=torch.float64), beside)


def _check_support(y: Tensor, inside: Tensor, bound: str) -> None:
    """Refuse the first datum outside the support."""
    if not bool(inside.all()):
        n = int((~inside).nonzero()[0, 0])
        raise DomainError(f"datum y[{n}] = {float(y[n]):g} {bound}")
