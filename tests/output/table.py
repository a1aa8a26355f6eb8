"""Every exact output metric that treats examples one by one, beside the textbook matrix it must be."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.output import textbook
from tests.output.distributions import Quadratic, beta, dirichlet, gamma, scale_tril
from tests.pulled import normal as normal


def close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    """Assert equality to `tol`."""
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def outer(s: Tensor) -> Tensor:
    """Σ_k s_kn s_knᵀ [n D D] of a root s [k n *out]."""
    s = s.reshape(*s.shape[:2], -1)
    return torch.einsum("knd,kne->nde", s, s)


Build = Callable[[Tensor], D.Distribution]


@dataclass(frozen=True)
class Case:
    """A metric at outputs y [n *out] (and targets), and h [n D D] at any such y by other means."""

    name: str
    metric: ng.OutputMetric
    y: Tensor
    h: Callable[[Tensor], Tensor]
    target: Any = None
    tol: float = 1e-10


def one(fisher: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """h of a distribution with one parameter a term and the Fisher information `fisher`, elementwise."""
    return lambda y: torch.stack([torch.diag(fisher(y_n).reshape(-1)) for y_n in y])


def distribution(
    name: str, build: Callable[[Tensor], D.Distribution], y: Tensor, h: Callable[[Tensor], Tensor]
) -> Case:
    """The Fisher metric of a distribution that torch builds."""
    return Case(f"distribution {name}", ng.Fisher(build), y, h)


def pixels(y: Tensor) -> Tensor:
    """h [n D D] of softmax outputs [n c h w] over the classes c, by the Hessian of torch's cross entropy, summed."""
    t = torch.zeros(1, *y.shape[2:], dtype=torch.long)
    loss = partial(F.cross_entropy, target=t, reduction="sum")
    hessians = [torch.autograd.functional.hessian(loss, y_n[None]) for y_n in y]
    return torch.stack([H.reshape(y[0].numel(), -1) for H in hessians])


def tokens(loss: Callable[..., Tensor], y: Tensor, t: Tensor) -> Tensor:
    """A loss that wants classes on the second axis, of logits [n t c]."""
    return loss(y.transpose(-1, -2), t)


TRIGAMMA = 5e-9  # how well torch knows ψ₁
CLASSES = torch.tensor([0, 2, 1, 2])
SEQUENCES = torch.tensor([[0, 1, 2], [2, 2, 1]])
COUNTS = torch.tensor([[0.0, 3.0], [1.0, 0.0], [5.0, 2.0]], dtype=torch.float64)
POINTS = normal(3, 2, seed=9)
cross_entropy = F.cross_entropy
summed_cross_entropy = partial(F.cross_entropy, reduction="sum")


def itakura_saito(y: Tensor, y0: Tensor) -> Tensor:
    """Σ y/y0 − log(y/y0) − 1: h = 1/y²."""
    return (y / y0 - (y / y0).log() - 1).sum()


def hellinger(y: Tensor, y0: Tensor) -> Tensor:
    """2 Σ (√p − √p0)², p = softmax(y): h is the Fisher metric."""
    return 2 * (y.softmax(-1).sqrt() - y0.softmax(-1).sqrt()).square().sum()


def reverse_kl(y: Tensor, y0: Tensor) -> Tensor:
    """KL(p_y ‖ p_y0) of logits: to second order the same as KL(p_y0 ‖ p_y)."""
    p, p0 = y.log_softmax(-1), y0.log_softmax(-1)
    return (p.exp() * (p - p0)).sum()


FAMILIES = [
    Case("euclidean", ng.Euclidean(), normal(3, 4), oracle.euclidean),
    Case("euclidean scalar", ng.Euclidean(), normal(3), oracle.euclidean),
    Case("euclidean image", ng.Euclidean(), normal(2, 2, 3), oracle.euclidean),
    Case("euclidean mean", ng.Euclidean(reduction="mean"), normal(2, 2, 3), lambda y: oracle.euclidean(y) / 6),
    Case("categorical", ng.Fisher(ng.Categorical()), normal(3, 4), oracle.categorical),
    Case("categorical sequence", ng.Fisher(ng.Categorical(axis=-1)), normal(2, 3, 4), oracle.categorical),
    Case("categorical image", ng.Fisher(ng.Categorical(axis=1)), normal(2, 4, 2, 3), pixels),
    Case(
        "categorical sequence mean",
        ng.Fisher(ng.Categorical(axis=-1), reduction="mean"),
        normal(2, 3, 4),
        lambda y: oracle.categorical(y) / 3,
    ),
    Case("bernoulli", ng.Fisher(ng.Bernoulli()), normal(3, 2), oracle.bernoulli),
    Case("bernoulli scalar", ng.Fisher(ng.Bernoulli()), normal(3), oracle.bernoulli),
    Case("bernoulli image", ng.Fisher(ng.Bernoulli()), normal(2, 2, 2), oracle.bernoulli),
    Case("gaussian", ng.Fisher(ng.Gaussian()), normal(3, 2), oracle.gaussian),
    Case("gaussian scale", ng.Fisher(ng.Gaussian(scale=0.7)), normal(3, 2), lambda y: oracle.gaussian(y, 0.7)),
    Case("gaussian scalar", ng.Fisher(ng.Gaussian(scale=0.7)), normal(3), lambda y: oracle.gaussian(y, 0.7)),
    Case("gaussian learned", ng.Fisher(ng.Gaussian(scale=None)), normal(3, 4), oracle.gaussian_learned),
    Case("gaussian learned sequence", ng.Fisher(ng.Gaussian(scale=None)), normal(2, 3, 4), oracle.gaussian_learned),
    Case("poisson", ng.Fisher(ng.Poisson()), normal(3, 2), oracle.poisson),
    Case("poisson scalar", ng.Fisher(ng.Poisson()), normal(3), oracle.poisson),
]

DISTRIBUTIONS = [
    distribution("exponential", lambda y: D.Exponential(y.exp()), normal(3, 2), oracle.euclidean),
    distribution("exponential scalar", lambda y: D.Exponential(y.exp()), normal(3), oracle.euclidean),
    Case("distribution gamma", ng.Fisher(gamma), normal(3, 2), textbook.by_term(textbook.gamma), tol=TRIGAMMA),
    Case("distribution beta", ng.Fisher(beta), normal(3, 2), textbook.by_term(textbook.dirichlet), tol=TRIGAMMA),
    Case(
        "distribution beta image", ng.Fisher(beta), normal(2, 3, 2), textbook.by_term(textbook.dirichlet), tol=TRIGAMMA
    ),
    Case(
        "distribution dirichlet", ng.Fisher(dirichlet), normal(3, 4), textbook.by_term(textbook.dirichlet), tol=TRIGAMMA
    ),
    distribution("normal", lambda y: D.Normal(y[..., :2], y[..., 2:].exp()), normal(3, 4), oracle.gaussian_learned),
    distribution(
        "independent normal",
        lambda y: D.Independent(D.Normal(y[..., :2], y[..., 2:].exp()), 1),
        normal(3, 4),
        oracle.gaussian_learned,
    ),
    distribution(
        "multivariate normal",
        lambda y: D.MultivariateNormal(y[..., :2], scale_tril=scale_tril(y)),
        normal(3, 5),
        textbook.by_term(textbook.plane_normal),
    ),
    distribution(
        "log-normal", lambda y: D.LogNormal(y[..., :2], y[..., 2:].exp()), normal(3, 4), oracle.gaussian_learned
    ),
    distribution("categorical", lambda y: D.Categorical(logits=y), normal(2, 3, 4), oracle.categorical),
    distribution("bernoulli", lambda y: D.Bernoulli(logits=y), normal(3, 2), oracle.bernoulli),
    distribution("poisson", lambda y: D.Poisson(y.exp()), normal(3, 2), oracle.poisson),
    distribution("binomial", lambda y: D.Binomial(5, logits=y), normal(3, 2), lambda y: 5 * oracle.bernoulli(y)),
    distribution("geometric", lambda y: D.Geometric(logits=y), normal(3, 2), one(lambda y: 1 - y.sigmoid())),
    distribution("cauchy", lambda y: D.Cauchy(y, torch.full_like(y, 0.5)), normal(3, 2), one(lambda y: 2 + 0 * y)),
    distribution("gumbel", lambda y: D.Gumbel(y, torch.full_like(y, 0.5)), normal(3, 2), one(lambda y: 4 + 0 * y)),
    distribution("enumerated", Quadratic, 0.3 * normal(3, 2), textbook.by_term(textbook.quadratic)),
    distribution("enumerated image", Quadratic, 0.3 * normal(2, 3, 2), textbook.by_term(textbook.quadratic)),
]

LOSSES = [
    Case(
        "empirical",
        ng.Empirical(cross_entropy),
        normal(4, 3),
        lambda y: oracle.empirical(y, CLASSES, cross_entropy),
        CLASSES,
    ),
    Case(
        "empirical sequence",
        ng.Empirical(partial(tokens, summed_cross_entropy)),
        normal(2, 3, 3),
        lambda y: oracle.empirical(y, SEQUENCES, summed_cross_entropy),
        SEQUENCES,
    ),
    Case(
        "empirical scalar",
        ng.Empirical(F.mse_loss),
        normal(3),
        lambda y: oracle.empirical(y, POINTS[:, 0], lambda u, t: (u - t) ** 2),
        POINTS[:, 0],
    ),
    Case("bregman", ng.Bregman(lambda y: torch.logsumexp(y, -1)), normal(3, 4), oracle.categorical),
    Case("bregman sequence", ng.Bregman(lambda y: torch.logsumexp(y, -1)), normal(2, 3, 4), oracle.categorical),
    Case("bregman scalar", ng.Bregman(torch.exp), normal(3), oracle.poisson),
    Case(
        "divergence square",
        ng.Divergence(lambda y, y0: 3 * (y - y0) ** 2),
        normal(3, 2),
        lambda y: 6 * oracle.euclidean(y),
    ),
    Case("divergence scalar", ng.Divergence(itakura_saito), 1 + normal(3) ** 2, one(lambda y: y**-2)),
    Case("divergence hellinger", ng.Divergence(hellinger), normal(3, 4), oracle.categorical),
    Case("divergence reverse kl", ng.Divergence(reverse_kl), normal(2, 3, 4), oracle.categorical),
    Case("loss hessian cross-entropy", ng.LossHessian(cross_entropy), normal(4, 3), oracle.categorical, CLASSES),
    Case("loss hessian mean square", ng.LossHessian(F.mse_loss), normal(3, 2), oracle.euclidean, POINTS),
    Case("loss hessian scalar", ng.LossHessian(F.mse_loss), normal(3), lambda y: 2 * oracle.euclidean(y), POINTS[:, 0]),
    Case(
        "loss hessian poisson",
        ng.LossHessian(partial(F.poisson_nll_loss, reduction="sum")),
        normal(3, 2),
        oracle.poisson,
        COUNTS,
    ),
    Case(
        "loss hessian sequence",
        ng.LossHessian(partial(tokens, summed_cross_entropy)),
        normal(2, 3, 3),
        oracle.categorical,
        SEQUENCES,
    ),
]

METRICS = [*FAMILIES, *DISTRIBUTIONS, *LOSSES]
IDS = [case.name for case in METRICS]
