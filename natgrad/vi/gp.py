"""Sparse Gaussian processes: the Gaussian over inducing values is stepped by natural gradient."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from natgrad.linalg import check_finite
from natgrad.vi.covariance import Covariance
from natgrad.vi.latent import LatentGaussian, Projection
from natgrad.vi.likelihoods import Likelihood


@final
class SparseGP(LatentGaussian):
    """f ~ GP(0, k) summarised by its values u at m inducing points, y_n ~ p(y | f(x_n)) (Titsias 2009; Hensman 2015).

    With u = L v, L Lᵀ = k(z, z), the prior of v is N(0, 1), a_n = L⁻¹k(z, x_n), and r_n = k(x_n, x_n) − ‖a_n‖². The
    steps are those of ``LatentGaussian``. Hyperparameters (of the kernel, the likelihood, and the inducing points) are
    parameters of the module: descend ``-elbo`` in them with any optimizer between the steps.

    ``jitter`` is added to the diagonal of k(z, z), as a part of its largest entry.

    >>> import natgrad as ng
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
        self.kernel, self.jitter = kernel, jitter
        self.inducing = nn.Parameter(inducing.detach().clone())

    def project(self, x: Tensor) -> Projection:
        """a [n m] and r [n] at inputs x; they depend on the hyperparameters alone, and may be kept while those stay."""
        if x.shape[1:] != self.inducing.shape[1:]:
            raise ValueError(
                f"inputs x of shape {tuple(x.shape)} do not match inducing points of shape "
                f"{tuple(self.inducing.shape)}: all axes but the first must agree"
            )
        k_zz, k_zx = self.kernel(self.inducing, self.inducing), self.kernel(self.inducing, x)
        jitter = self.jitter * k_zz.diagonal().max()
        L, info = torch.linalg.cholesky_ex(k_zz + jitter * torch.eye(len(k_zz), dtype=k_zz.dtype, device=k_zz.device))
        if bool(info > 0):
            raise ValueError(
                f"k(z, z) is singular at jitter={self.jitter:g}: inducing points coincide, or lie much closer together "
                "than the lengthscale. Use fewer, or more jitter"
            )
        a = torch.linalg.solve_triangular(L, k_zx, upper=False).T
        return Projection(a, (self.kernel.variance(x) - a.square().sum(1)).clamp(min=0))  # below zero is rounding
