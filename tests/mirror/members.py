"""A member of every family, with the textbook formula of its log Z in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from natgrad import families as f
from natgrad.families import ExponentialFamily

Function = Callable[[Tensor], Tensor]
hessian: Callable[..., Tensor] = torch.autograd.functional.hessian


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(function: Function, x: Tensor) -> Tensor:
    """Of a number, by automatic differentiation."""
    leaf = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return g


class _Digamma(torch.autograd.Function):
    """ψ(x), with ψ' = ζ(2, x): ``torch.polygamma`` is good to 5e-10 only."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.digamma(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * torch.special.zeta(torch.full_like(x, 2.0), x)


class _LogGamma(torch.autograd.Function):
    """log Γ(x)."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.lgamma(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * cast(Tensor, _Digamma.apply(x))  # type: ignore[no-untyped-call]


def log_gamma(x: Tensor) -> Tensor:
    """log Γ(x), with first and second derivatives to rounding."""
    return cast(Tensor, _LogGamma.apply(x))  # type: ignore[no-untyped-call]


def symmetric(vec: Tensor) -> Tensor:
    """A matrix from its entries, as a function of its symmetric part."""
    d = round(vec.numel() ** 0.5)
    return 0.5 * (vec.view(d, d) + vec.view(d, d).T)


@dataclass(frozen=True)
class Case:
    """A family, two of its members by natural parameters, and log Z up to a constant."""

    family: ExponentialFamily
    eta: Tensor
    eta2: Tensor
    log_partition: Function

    def __repr__(self) -> str:
        return repr(self.family)[:40]

    @property
    def xi(self) -> Tensor:
        """∇log Z, of the textbook."""
        return gradient(self.log_partition, self.eta)

    @property
    def fisher(self) -> Tensor:
        """∇²log Z [p q]; of one number [1 1]."""
        p = self.eta.numel()
        return hessian(self.log_partition, self.eta).reshape(p, p)

    @property
    def projector(self) -> Tensor:
        """On the directions of η that change the distribution [p q]: two natural gradients agree if they do there."""
        return torch.linalg.pinv(self.fisher, rtol=1e-12, hermitian=True) @ self.fisher


def _beta(eta: Tensor) -> Tensor:
    return log_gamma(eta + 1).sum() - log_gamma((eta + 1).sum())


def _full(eta: Tensor) -> Tensor:
    h, Λ = eta[:2], symmetric(eta[2:])
    return 0.5 * h @ torch.linalg.solve(Λ, h) - 0.5 * torch.logdet(Λ)


def _diagonal(eta: Tensor) -> Tensor:
    h, λ = eta.chunk(2)
    return (0.5 * h**2 / λ - 0.5 * λ.log()).sum()


def _wishart(eta: Tensor) -> Tensor:
    ν = 2 * eta[0] + 3
    return (
        ν * torch.log(t(2.0))[0] - ν / 2 * torch.logdet(symmetric(eta[1:])) + log_gamma(ν / 2) + log_gamma(ν / 2 - 0.5)
    )


SIGMA, MU = t(2.0, 0.6, 0.6, 1.0).view(2, 2), t(0.3, -0.4)
LAMBDA, LAMBDA2 = (1.4, -0.3, -0.3, 0.8), (0.9, 0.2, 0.2, 1.1)

CASES = [
    Case(f.Bernoulli(), t(0.7)[0], t(-0.4)[0], lambda η: (1 + η.exp()).log()),
    Case(f.Binomial(5), t(0.7)[0], t(-0.4)[0], lambda η: 5 * (1 + η.exp()).log()),
    Case(f.NegativeBinomial(3.0), t(-0.7)[0], t(-0.4)[0], lambda η: -3 * (1 - η.exp()).log()),
    Case(f.Poisson(), t(0.7)[0], t(-0.4)[0], lambda η: η.exp()),
    Case(f.Geometric(), t(-0.7)[0], t(-0.4)[0], lambda η: -(1 - η.exp()).log()),
    Case(f.Exponential(), t(-1.7)[0], t(-0.6)[0], lambda η: -(-η).log()),
    Case(f.Laplace(0.5), t(-1.7)[0], t(-0.6)[0], lambda η: -(-η).log()),
    Case(f.Weibull(1.5), t(-1.7)[0], t(-0.6)[0], lambda η: -(-η).log()),
    Case(f.Categorical(), t(0.2, -0.5, 1.0), t(0.0, 0.3, -0.2), lambda η: η.exp().sum().log()),
    Case(f.Categorical(minimal=True), t(0.2, -0.5), t(0.0, 0.3), lambda η: (1 + η.exp().sum()).log()),
    Case(
        f.Gamma(),
        t(1.2, -2.1),
        t(0.5, -0.5),
        lambda η: log_gamma(η[0] + 1) - (η[0] + 1) * (-η[1]).log(),
    ),
    Case(f.Beta(), t(1.2, 2.1), t(0.5, 0.5), _beta),
    Case(f.Dirichlet(), t(1.2, 2.1, 0.4), t(0.5, 0.5, 1.0), _beta),
    Case(
        f.InverseGaussian(),
        t(-0.8, -1.3),
        t(-0.5, -0.5),
        lambda η: -0.5 * (-2 * η[1]).log() - 2 * (η[0] * η[1]).sqrt(),
    ),
    Case(f.VonMises(), t(1.84, 0.78), t(0.3, -0.5), lambda η: torch.special.i0(η.norm()).log()),
    Case(f.Wishart(), t(1.5, *LAMBDA), t(1.0, *LAMBDA2), _wishart),
    Case(f.GaussianKnownCovariance(SIGMA), t(0.3, -0.6), t(0.1, 0.2), lambda η: 0.5 * η @ SIGMA @ η),
    Case(f.GaussianKnownMean(MU), t(*LAMBDA), t(*LAMBDA2), lambda η: -0.5 * torch.logdet(symmetric(η))),
    Case(f.FullGaussian(), t(0.5, -0.2, *LAMBDA), t(0.1, 0.4, *LAMBDA2), _full),
    Case(f.DiagonalGaussian(), t(0.5, -0.2, 1.4, 0.8), t(0.1, 0.4, 0.9, 1.1), _diagonal),
    Case(f.DiagonalGaussianKnownMean(MU), t(1.4, 0.8), t(0.9, 1.1), lambda η: -0.5 * η.log().sum()),
    Case(f.LogNormal(), t(0.5, 1.4), t(0.1, 0.9), _diagonal),
    Case(
        f.Product((f.Gamma(), f.Dirichlet()), (2, 3)),
        t(1.2, -2.1, 1.2, 2.1, 0.4),
        t(0.5, -0.5, 0.5, 0.5, 1.0),
        lambda η: log_gamma(η[0] + 1) - (η[0] + 1) * (-η[1]).log() + _beta(η[2:]),
    ),
]


def target(case: Case) -> Tensor:
    """ξ of the other member."""
    return gradient(case.log_partition, case.eta2)


def objective(case: Case) -> Function:
    """J(ξ) [], smooth, with its minimum at the other member."""
    goal = target(case)
    return lambda xi: 0.5 * (xi - goal).square().sum() + 0.1 * (xi - goal).sin().square().sum()
