"""One row for every exponential family: the family, points of its natural chart, and points beside them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad import families as f
from tests.output.table import normal


@dataclass(frozen=True)
class Member:
    """A family with points η and η2 [3 *point]."""

    family: f.ExponentialFamily
    eta: Tensor
    eta2: Tensor

    @property
    def size(self) -> int:
        return self.eta.shape[-1] if self.family.axes else 1

    def dense(self, point: Tensor) -> Tensor:
        """A point or a vector as [3 p], also of one-parameter families."""
        return point if self.family.axes else point.unsqueeze(-1)

    def tangent(self, v: Tensor) -> Tensor:
        """The part of v that F sees, by the pseudo-inverse of the Hessian of log Z."""
        F = hessian(self.family, self.eta)
        projector = torch.linalg.pinv(F, hermitian=True, rtol=1e-9) @ F
        return (projector @ self.dense(v).unsqueeze(-1)).squeeze(-1).view_as(v)


def hessian(family: f.ExponentialFamily, eta: Tensor) -> Tensor:
    """∇²log Z [n p p] by automatic differentiation, point by point."""
    p = eta.shape[-1] if family.axes else 1
    rows = [torch.autograd.functional.hessian(lambda a: family.log_partition(a).sum(), point) for point in eta]
    return torch.stack(rows).reshape(len(eta), p, p)


def definite(*shape: int, d: int, seed: int) -> Tensor:
    """Well-conditioned symmetric positive definite matrices."""
    a = normal(*shape, d, d, seed=seed)
    return a @ a.mT / d + 0.5 * torch.eye(d, dtype=torch.float64)


def precision(d: int, seed: int) -> Tensor:
    return definite(3, d=d, seed=seed).flatten(-2)


def _member(family: f.ExponentialFamily, draw: Callable[[int], Tensor]) -> Member:
    return Member(family, draw(0), draw(1))


def _cat(*parts: Tensor) -> Tensor:
    return torch.cat(parts, -1)


COVARIANCE = definite(d=3, seed=9)
CENTRE = normal(2, seed=8)
MEMBERS: dict[str, Member] = {
    "bernoulli": _member(f.Bernoulli(), lambda s: normal(3, seed=s)),
    "categorical": _member(f.Categorical(), lambda s: normal(3, 4, seed=s)),
    "categorical minimal": _member(f.Categorical(minimal=True), lambda s: normal(3, 3, seed=s)),
    "binomial": _member(f.Binomial(7), lambda s: normal(3, seed=s)),
    "negative binomial": _member(f.NegativeBinomial(2.5), lambda s: -normal(3, seed=s).exp()),
    "poisson": _member(f.Poisson(), lambda s: normal(3, seed=s)),
    "geometric": _member(f.Geometric(), lambda s: -normal(3, seed=s).exp()),
    "exponential": _member(f.Exponential(), lambda s: -normal(3, seed=s).exp()),
    "gamma": _member(f.Gamma(), lambda s: _cat(normal(3, 1, seed=s).exp() - 0.7, -normal(3, 1, seed=s + 5).exp())),
    "beta": _member(f.Beta(), lambda s: normal(3, 2, seed=s).exp() - 0.7),
    "dirichlet": _member(f.Dirichlet(), lambda s: normal(3, 4, seed=s).exp() - 0.7),
    "gaussian known covariance": _member(f.GaussianKnownCovariance(COVARIANCE), lambda s: normal(3, 3, seed=s)),
    "gaussian known mean": _member(f.GaussianKnownMean(CENTRE), lambda s: precision(2, s)),
    "gaussian": _member(f.FullGaussian(), lambda s: _cat(normal(3, 2, seed=s), precision(2, s + 5))),
    "gaussian 3": _member(f.FullGaussian(), lambda s: _cat(normal(3, 3, seed=s), precision(3, s + 5))),
    "gaussian diagonal": _member(
        f.DiagonalGaussian(), lambda s: _cat(normal(3, 2, seed=s), normal(3, 2, seed=s + 5).exp())
    ),
    "gaussian diagonal known mean": _member(f.DiagonalGaussianKnownMean(CENTRE), lambda s: normal(3, 2, seed=s).exp()),
    "log-normal": _member(f.LogNormal(), lambda s: _cat(normal(3, 2, seed=s), normal(3, 2, seed=s + 5).exp() + 1)),
    "laplace": _member(f.Laplace(0.3), lambda s: -normal(3, seed=s).exp()),
    "weibull": _member(f.Weibull(1.7), lambda s: -normal(3, seed=s).exp()),
    "von mises": _member(f.VonMises(), lambda s: normal(3, 2, seed=s)),
    "inverse gaussian": _member(f.InverseGaussian(), lambda s: -normal(3, 2, seed=s).exp()),
    "wishart": _member(f.Wishart(), lambda s: _cat(normal(3, 1, seed=s).exp(), precision(2, s + 5))),
    "product": _member(
        f.Product((f.Gamma(), f.Poisson(), f.FullGaussian()), (2, 2, 6)),
        lambda s: _cat(
            normal(3, 1, seed=s).exp() - 0.7,
            -normal(3, 1, seed=s + 5).exp(),
            normal(3, 2, seed=s + 7),
            normal(3, 2, seed=s),
            precision(2, s + 5),
        ),
    ),
}
