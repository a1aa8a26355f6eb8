"""Sparse Gaussian processes: the Gaussian over inducing values is stepped by natural gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from natgrad.kernels.distances import points, squared_distances
from natgrad.kernels.matern import matern
from natgrad.kernels.sobolev import check_smoothness
from natgrad.linalg import check_finite, check_positive
from natgrad.vi.latent import LatentGaussian, Projection, in_precision_of
from natgrad.vi.likelihoods import Likelihood


class Covariance(nn.Module, ABC):
    """k(x, y) of a Gaussian process; its parameters are the hyperparameters of the model."""

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """k [n m] between points x [n *shape] and y [m *shape]."""

    @abstractmethod
    def variance(self, x: Tensor) -> Tensor:
        """k(x_n, x_n) [n]."""


class Stationary(Covariance):
    """σ² k(‖x − y‖²/ℓ²) with a variance σ² and a lengthscale ℓ, or one per coordinate; both as logarithms."""

    def __init__(self, lengthscale: float | Tensor = 1.0, variance: float = 1.0) -> None:
        super().__init__()
        scale = torch.as_tensor(lengthscale, dtype=torch.get_default_dtype())
        if scale.ndim > 1 or not bool((scale > 0).all() & scale.isfinite().all()):
            raise ValueError(f"lengthscale must be a positive number, or one per coordinate [d], got {lengthscale}")
        check_positive(variance, "variance")
        self.log_lengthscale: nn.Parameter = nn.Parameter(scale.log())
        self.log_variance: nn.Parameter = nn.Parameter(torch.tensor(math.log(variance)))

    @abstractmethod
    def profile(self, u: Tensor) -> Tensor:
        """k at squared distances u; k(0) = 1."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.log_lengthscale.ndim == 0:  # one scale: its gradient does not need the coordinates
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
    """The squared-exponential covariance of a Gaussian process, for very smooth functions.

    Args:
        lengthscale: The first ℓ, one number or one per coordinate; it is a parameter.
        variance: The first σ²; it is a parameter.

    Method:
        σ² exp(−‖x − y‖²/2ℓ²).

    Example:
        >>> k = SquaredExponential(lengthscale=2.0)
        >>> k(torch.tensor([[0.0]]), torch.tensor([[0.0], [2.0]])).detach()
        tensor([[1.0000, 0.6065]])
    """

    def profile(self, u: Tensor) -> Tensor:
        return (-0.5 * u).exp()

    def scaled(self, u: Tensor, factor: Tensor) -> Tensor:
        return (u * (-0.5 * factor)).add_(self.log_variance).exp_()  # in place: one buffer


@final
class Matern(Stationary):
    """The Matérn covariance of a Gaussian process, for functions of any smoothness.

    Args:
        nu: The smoothness ν > 0: ½ for rough functions, 3/2 and 5/2 for smoother ones, or any other number.
        lengthscale: The first ℓ, one number or one per coordinate; it is a parameter.
        variance: The first σ²; it is a parameter.

    Method:
        σ² times the Sobolev kernel of smoothness ν (``functionspace.SobolevKernel``) at √(2ν)‖x − y‖/ℓ.

    Example:
        >>> Matern(0.5, lengthscale=2.0)(torch.tensor([[0.0]]), torch.tensor([[2.0]])).detach()  # e^{−1}
        tensor([[0.3679]])
    """

    def __init__(self, nu: float, lengthscale: float | Tensor = 1.0, variance: float = 1.0) -> None:
        check_smoothness(nu)
        super().__init__(lengthscale, variance)
        self.nu = nu

    def profile(self, u: Tensor) -> Tensor:
        return matern(self.nu, 2 * self.nu * u)


@final
class SparseGP(LatentGaussian):
    """A Gaussian process with inducing points, for regression and classification of many data.

    Hyperparameters (of the kernel, the likelihood, and the inducing points) are parameters of the module: ``learn``
    them, or descend ``-elbo`` in them with any optimizer between the steps.

    Args:
        kernel: The covariance function, such as ``SquaredExponential()`` or ``Matern(2.5)``.
        likelihood: How a datum depends on the function, such as ``GaussianNoise()`` or ``BernoulliLogit()``.
        inducing: The m points [m *shape] that summarise the function.
        jitter: This number times the largest entry of the diagonal of k(z, z) is added to that diagonal.

    Method:
        f ~ GP(0, k) summarised by its values u at m inducing points, y_n ~ p(y | f(x_n)).

        See Titsias (2009) and Hensman et al. (2015). With u = L v, L Lᵀ = k(z, z), the prior of v is N(0, 1), a_n =
        L⁻¹k(z, x_n), and r_n = k(x_n, x_n) − ‖a_n‖². The steps are those of ``LatentGaussian``.

    Example:
        >>> import torch, natgrad as ng
        >>> x = torch.linspace(0, 1, 20).unsqueeze(1)
        >>> gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.3), ng.vi.GaussianNoise(0.01), inducing=x[::4])
        >>> before = gp.elbo(x, x[:, 0].sin())
        >>> gp.step(x, x[:, 0].sin()).reason is None and bool(gp.elbo(x, x[:, 0].sin()) > before)
        True
    """

    def __init__(self, kernel: Covariance, likelihood: Likelihood, inducing: Tensor, jitter: float = 1e-6) -> None:
        if inducing.ndim < 2 or inducing.shape[0] < 1:
            raise ValueError(f"inducing points must be [m *shape] with m ≥ 1, got shape {tuple(inducing.shape)}")
        if not jitter >= 0:
            raise ValueError(f"jitter must be ≥ 0, got {jitter}")
        check_finite(inducing, "SparseGP: the inducing points")
        super().__init__(likelihood, inducing.flatten(1)[:, 0])
        self.kernel: Covariance = kernel
        self.jitter: float = jitter
        self.inducing: nn.Parameter = nn.Parameter(inducing.detach().clone())

    def project(self, x: Tensor) -> Projection:
        """a [n m] and r [n] at inputs x."""
        if x.shape[1:] != self.inducing.shape[1:]:
            raise ValueError(
                f"inputs x of shape {tuple(x.shape)} do not match inducing points of shape "
                f"{tuple(self.inducing.shape)}: all axes but the first must agree"
            )
        x = in_precision_of(self.inducing, x)
        k_zz, k_zx = self.kernel(self.inducing, self.inducing), self.kernel(self.inducing, x)
        jitter = self.jitter * k_zz.diagonal().max()
        L, info = torch.linalg.cholesky_ex(k_zz + jitter * torch.eye(len(k_zz), dtype=k_zz.dtype, device=k_zz.device))
        if bool(info > 0):
            raise ValueError(
                f"k(z, z) is singular at jitter={self.jitter:g}: inducing points coincide, or lie much closer together "
                "than the lengthscale. Use fewer, or more jitter"
            )
        a = torch.linalg.solve_triangular(L, k_zx, upper=False).T
        return a, (self.kernel.variance(x) - a.square().sum(1)).clamp(min=0)  # rounding may be below zero
