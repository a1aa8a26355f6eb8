"""Covariance functions of Gaussian processes, with hyperparameters that are learned."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from natgrad.functionspace.distances import points, squared_distances
from natgrad.functionspace.kernels import check_smoothness
from natgrad.functionspace.profile import matern


class Covariance(nn.Module, ABC):
    """k(x, y) of a Gaussian process; its parameters are the hyperparameters of the model."""

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """k [n m] between points x [n *shape] and y [m *shape]."""

    @abstractmethod
    def variance(self, x: Tensor) -> Tensor:
        """k(x_n, x_n) [n]."""


class Stationary(Covariance):
    """σ² k(‖x − y‖²/ℓ²) with a variance σ² and a lengthscale ℓ, or one for every coordinate; both in logarithms."""

    def __init__(self, lengthscale: float | Tensor = 1.0, variance: float = 1.0) -> None:
        super().__init__()
        scale = torch.as_tensor(lengthscale, dtype=torch.get_default_dtype())
        if scale.ndim > 1 or not bool((scale > 0).all() & scale.isfinite().all()):
            raise ValueError(f"lengthscale must be a positive number, or one a coordinate [d], got {lengthscale}")
        if not (variance > 0 and math.isfinite(variance)):
            raise ValueError(f"variance must be positive and finite, got {variance}")
        self.log_lengthscale = nn.Parameter(scale.log())
        self.log_variance = nn.Parameter(torch.tensor(math.log(variance)))

    @abstractmethod
    def profile(self, u: Tensor) -> Tensor:
        """k at squared distances u; k(0) = 1."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.log_lengthscale.ndim == 0:  # one scale for all: its gradient needs none of the coordinates
            return self.scaled(squared_distances(points(x), points(y)), (-2 * self.log_lengthscale).exp())
        scale = self.log_lengthscale.exp()
        return self.scaled(squared_distances(points(x) / scale, points(y) / scale), torch.ones_like(self.log_variance))

    def scaled(self, u: Tensor, factor: Tensor) -> Tensor:
        """σ² k(factor·u) at squared distances u."""
        return self.log_variance.exp() * self.profile(factor * u)

    def variance(self, x: Tensor) -> Tensor:
        return self.log_variance.exp().expand(x.shape[0])


@final
class SquaredExponential(Stationary):
    """σ² exp(−‖x − y‖²/2ℓ²).

    >>> k = SquaredExponential(lengthscale=2.0)
    >>> k(torch.tensor([[0.0]]), torch.tensor([[0.0], [2.0]])).detach()
    tensor([[1.0000, 0.6065]])
    """

    def profile(self, u: Tensor) -> Tensor:
        return (-0.5 * u).exp()

    def scaled(self, u: Tensor, factor: Tensor) -> Tensor:
        return (u * (-0.5 * factor)).add_(self.log_variance).exp_()  # in one piece of memory


@final
class Matern(Stationary):
    """σ² times the Sobolev kernel of smoothness ν (``functionspace.SobolevKernel``) at √(2ν)‖x − y‖/ℓ (ERRATA 7).

    >>> Matern(0.5, lengthscale=2.0)(torch.tensor([[0.0]]), torch.tensor([[2.0]])).detach()  # e^{−1}
    tensor([[0.3679]])
    """

    def __init__(self, nu: float, lengthscale: float | Tensor = 1.0, variance: float = 1.0) -> None:
        check_smoothness(nu)
        super().__init__(lengthscale, variance)
        self.nu = nu

    def profile(self, u: Tensor) -> Tensor:
        return matern(self.nu, 2 * self.nu * u)
