"""Bayesian generalised linear models: logistic, Poisson, robust and ordinary regression."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from natgrad.vi.latent import LatentGaussian, Projection
from natgrad.vi.likelihoods import Likelihood


@final
class BayesianLinear(LatentGaussian):
    """y_n ~ p(y | f_n), f_n = x_nᵀw, with the prior w ~ N(0, 1/δ): v = √δ w, a_n = x_n/√δ, r_n = 0.

    Bayesian logistic regression is the likelihood ``BernoulliLogit()``. There is no bias: append a column of ones to x.

    >>> import natgrad as ng
    >>> x = torch.tensor([[1.0, -2.0], [1.0, -1.0], [1.0, 1.0], [1.0, 2.0]])
    >>> model = ng.vi.BayesianLinear(ng.vi.BernoulliLogit(), features=2, prior_precision=1.0)
    >>> ascent = ng.vi.ascend(model, x, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    >>> mean, covariance = model.posterior()
    >>> mean.shape, bool(mean[1] > 0.5)
    (torch.Size([2]), True)
    """

    def __init__(self, likelihood: Likelihood, features: int, prior_precision: float = 1.0) -> None:
        if features < 1:
            raise ValueError(f"BayesianLinear needs features ≥ 1, got {features}")
        if not (prior_precision > 0 and math.isfinite(prior_precision)):
            raise ValueError(f"prior_precision must be positive and finite, got {prior_precision}")
        super().__init__(likelihood, torch.empty(features))
        self.prior_precision = float(prior_precision)

    def project(self, x: Tensor) -> Projection:
        if x.ndim != 2 or x.shape[1] != len(self.shift):
            raise ValueError(f"inputs must be [n {len(self.shift)}], one column a weight, got shape {tuple(x.shape)}")
        return Projection(x / math.sqrt(self.prior_precision), x.new_zeros(x.shape[0]))

    def posterior(self) -> tuple[Tensor, Tensor]:
        """Mean [d] and covariance [d d] of the weights w."""
        covariance = torch.cholesky_inverse(self.belief.root)
        return covariance @ self.shift / math.sqrt(self.prior_precision), covariance / self.prior_precision
