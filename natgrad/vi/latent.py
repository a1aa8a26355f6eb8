"""Models whose data depend on latent numbers that are linear in Gaussian variables: two slopes a datum make a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.errors import DomainError
from natgrad.linalg import check_finite
from natgrad.vi.posterior import MARGIN, Step, check_rate

# Likelihoods of one latent number f: E log p(y | f) under a Gaussian f, and its slopes.


class Likelihood(nn.Module, ABC):
    """p(y | f) for data y [n] and latent values f ~ N(μ, v), μ and v [n]."""

    @abstractmethod
    def check(self, y: Tensor) -> None:
        """Refuse data outside the support, by entry and bound."""

    @abstractmethod
    def expected(self, y: Tensor, μ: Tensor, v: Tensor) -> Tensor:
        """E log p(y | f) [n], differentiable in μ, v and the parameters of the likelihood."""

    @abstractmethod
    def slopes(self, y: Tensor, μ: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """∂E/∂μ = E ∂log p/∂f and ∂E/∂v = ½ E ∂²log p/∂f² (Bonnet 1964; Price 1958) [n]."""

    @property
    def concave(self) -> bool:
        """Whether log p is concave in f: then ∂E/∂v ≤ 0, and no step of size ≤ 1 can leave the domain."""
        return True


@final
class GaussianNoise(Likelihood):
    """y = f + ε, ε ~ N(0, σ²): conjugate, so that one step of size 1 is exact. σ² is a parameter, in logarithms.

    >>> noise = GaussianNoise(variance=0.5)
    >>> noise.slopes(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]))
    (tensor([2.]), tensor([-1.]))
    """

    def __init__(self, variance: float = 1.0) -> None:
        super().__init__()
        if not (variance > 0 and math.isfinite(variance)):
            raise ValueError(f"GaussianNoise(variance) must be positive and finite, got {variance}")
        self.log_variance = nn.Parameter(torch.tensor(math.log(variance)))

    def check(self, y: Tensor) -> None:
        refuse(y, y.isfinite(), "is not a finite number: drop the example, or impute it")

    def expected(self, y: Tensor, μ: Tensor, v: Tensor) -> Tensor:
        precision = (-self.log_variance).exp()
        return -0.5 * (precision * ((y - μ).square() + v) + self.log_variance + math.log(2 * math.pi))

    def slopes(self, y: Tensor, μ: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        precision = (-self.log_variance.detach()).exp()
        return precision * (y - μ), (-0.5 * precision).expand_as(v)


@final
class PoissonCounts(Likelihood):
    """Counts with rate e^f: E log p = yμ − e^{μ + v/2} − log y!, in closed form."""

    def check(self, y: Tensor) -> None:
        refuse(y, (y >= 0) & (y == y.round()) & y.isfinite(), "is not a count 0, 1, 2, …")

    def expected(self, y: Tensor, μ: Tensor, v: Tensor) -> Tensor:
        return y * μ - (μ + 0.5 * v).exp() - torch.lgamma(y + 1)

    def slopes(self, y: Tensor, μ: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rate = (μ + 0.5 * v).exp()
        return y - rate, -0.5 * rate


class Quadrature(Likelihood):
    """Any log p(y | f), by Gauss–Hermite quadrature with ``nodes`` points: exact for polynomials of degree 2·nodes − 1.

    Subclasses give ``log_density``; its two derivatives are taken by autograd where ``derivatives`` is not overridden.
    """

    def __init__(self, nodes: int = 20) -> None:
        super().__init__()
        if nodes < 1:
            raise ValueError(f"nodes={nodes}: a quadrature needs one node or more")
        x, w = hermite(nodes)
        self.register_buffer("nodes", x.to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("weights", w.to(torch.get_default_dtype()), persistent=False)
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
        first, second = self.derivatives(y, self._latent(μ, v))
        w = self.weights.to(μ.dtype)
        return w @ first, 0.5 * (w @ second)

    def _latent(self, μ: Tensor, v: Tensor) -> Tensor:
        return torch.addcmul(μ, self.nodes.to(μ.dtype).unsqueeze(1), v.sqrt())


@final
class BernoulliLogit(Quadrature):
    """Labels 0 and 1 with P(1 | f) = 1/(1 + e^{−f}): Gaussian-process classification, logistic regression.

    >>> BernoulliLogit().expected(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]))
    tensor([-0.6931])
    """

    def check(self, y: Tensor) -> None:
        refuse(y, (y == 0) | (y == 1), "is not a label 0 or 1: for labels ±1 pass (y + 1)/2")

    def log_density(self, y: Tensor, f: Tensor) -> Tensor:
        return functional.logsigmoid((2 * y - 1) * f)

    def derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        p = f.sigmoid()
        return y - p, p * (p - 1)


@final
class StudentNoise(Quadrature):
    """y = f + ε with heavy tails, ε/s from Student's t with ν degrees of freedom: regression with outliers.

    log p is not concave: the precision of an example far from f is negative, and steps may have to be shortened.
    """

    def __init__(self, degrees: float, scale: float = 1.0, nodes: int = 20) -> None:
        super().__init__(nodes)
        if not (degrees > 0 and scale > 0 and math.isfinite(degrees) and math.isfinite(scale)):
            raise ValueError(f"StudentNoise(degrees, scale) must be positive and finite, got {degrees} and {scale}")
        self.degrees, self.scale = degrees, scale

    @property
    def concave(self) -> bool:
        return False

    def check(self, y: Tensor) -> None:
        refuse(y, y.isfinite(), "is not a finite number: drop the example, or impute it")

    def log_density(self, y: Tensor, f: Tensor) -> Tensor:
        half = 0.5 * (self.degrees + 1)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.degrees) - 0.5 * math.log(self.degrees * math.pi)
        tail = ((y - f) / self.scale).square() / self.degrees
        return constant - math.log(self.scale) - half * torch.log1p(tail)


def hermite(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes x and weights w [q] with Σ w f(x) = E f(ε), ε ~ N(0, 1) (Golub & Welsch 1969).

    >>> x, w = hermite(3)
    >>> (w @ x**4).round(decimals=6)
    tensor(3., dtype=torch.float64)
    """
    beside = torch.arange(1.0, nodes, dtype=torch.float64).sqrt()
    x, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return x, vectors[0].square()


def refuse(y: Tensor, inside: Tensor, bound: str) -> None:
    """Raise for the first datum that is not inside the support."""
    if not bool(inside.all()):
        n = int((~inside).nonzero()[0, 0])
        raise DomainError(f"datum y[{n}] = {float(y[n]):g} {bound}")


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


# Natural-gradient ascent of a Gaussian over latent variables on all of its data, until the bound stands still.


_HALVINGS = 12


@final
@dataclass(frozen=True)
class Ascent:
    """The bound before the first step and after every one, and the steps."""

    elbo: tuple[float, ...]
    steps: tuple[Step, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why steps were shortened, if any were."""
        return tuple(step.reason for step in self.steps if step.reason is not None)


@torch.no_grad()
def ascend(
    model: LatentGaussian, x: Tensor, y: Tensor, rate: float = 1.0, tolerance: float = 1e-3, steps: int = 100
) -> Ascent:
    """Step q(v) with fixed hyperparameters until a step gains less than ``tolerance`` nats. The bound never falls.

    A step that would lower the bound is halved; the reason is reported. With Gaussian noise the first step is the
    optimum (Titsias 2009), and the second one only shows it.

    >>> import natgrad as ng
    >>> x = torch.linspace(0, 1, 30).unsqueeze(1)
    >>> gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.3), ng.vi.BernoulliLogit(), inducing=x[::5])
    >>> ascent = ng.vi.ascend(gp, x, (x[:, 0] > 0.5).float())
    >>> ascent.elbo[-1] > ascent.elbo[0] and len(ascent.steps) < 20
    True
    """
    model.check(x, y)
    return ascend_at(model, model.project(x), y, rate, tolerance, steps)


@torch.no_grad()
def ascend_at(
    model: LatentGaussian, at: Projection, y: Tensor, rate: float = 1.0, tolerance: float = 1e-3, steps: int = 100
) -> Ascent:
    """As ``ascend``, at a projection that was kept."""
    check_rate(rate)
    search, belief = _Search(model, at, y, rate), model.belief
    here = search.state(belief)
    bounds, taken = [here.bound], []
    for _ in range(steps):
        belief, here, step = search.climb(belief, here)
        bounds.append(here.bound)
        taken.append(step)
        if bounds[-1] - bounds[-2] < tolerance:
            break
    model.assume(belief)
    return Ascent(tuple(bounds), tuple(taken))


@final
@dataclass(frozen=True)
class _State:
    μ: Tensor
    v: Tensor
    bound: float


@final
@dataclass(frozen=True)
class _Search:
    """A step, halved until the bound does not fall."""

    model: LatentGaussian
    at: Projection
    y: Tensor
    rate: float

    def state(self, belief: Belief) -> _State:
        μ, v, kl = belief.marginals(self.at)
        return _State(μ, v, float(self.model.likelihood.expected(self.y, μ, v).sum() - kl))

    def climb(self, belief: Belief, here: _State) -> tuple[Belief, _State, Step]:
        target, asked = self.model.target(self.at, self.y, here.μ, here.v), self.rate
        rounding = 64 * torch.finfo(here.μ.dtype).eps * abs(here.bound)
        for _ in range(_HALVINGS):
            step = self.model.limited(belief, target, asked)
            moved = belief.moved(target, step.taken)
            there = self.state(moved)
            if there.bound >= here.bound - rounding:
                bound = step.bound if asked == self.rate else "a longer step would lower the bound"
                return moved, there, Step(self.rate, step.taken, bound)
            asked /= 2
        still = "the bound is at its maximum, to the accuracy of the quadrature"
        return belief, here, Step(self.rate, torch.zeros_like(step.taken), still)


# Hyperparameters by the bound at its maximum over q: the envelope theorem makes its gradient free.


def learn(
    model: LatentGaussian, x: Tensor, y: Tensor, steps: int = 50, tolerance: float = 1e-2, rate: float = 1.0
) -> tuple[float, ...]:
    """Maximise max_q ELBO over the parameters of the model that require a gradient; the bound after every evaluation.

    At the maximum over q the gradient of max_q ELBO is that of the ELBO with q fixed. So q is stepped by natural
    gradient until a step gains less than ``tolerance`` nats (one step, with Gaussian noise), and L-BFGS moves the
    hyperparameters. It ends after about ``steps`` evaluations, or when no entry of the gradient exceeds ``tolerance``.

    >>> import natgrad as ng
    >>> x = torch.linspace(0, 1, 20).unsqueeze(1)
    >>> gp = ng.vi.SparseGP(ng.vi.SquaredExponential(1.0), ng.vi.GaussianNoise(1.0), inducing=x[::4])
    >>> bounds = ng.vi.learn(gp, x, (6 * x[:, 0]).sin(), steps=20)
    >>> bounds[-1] > bounds[0] + 20
    True
    """
    model.check(x, y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to learn, use ascend")
    bounds: list[float] = []

    def evaluate() -> float:
        at = model.project(x)
        ascend_at(model, Projection(at.a.detach(), at.r.detach()), y, rate, tolerance)
        loss = -model.bound(at, y)
        for p, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = slope
        bounds.append(-float(loss.detach()))
        return -bounds[-1]

    kept = [p.grad for p in parameters]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=steps, max_eval=steps, tolerance_grad=tolerance, line_search_fn="strong_wolfe"
    )
    optimizer.step(evaluate)
    for p, slope in zip(parameters, kept, strict=True):
        p.grad = slope
    with torch.no_grad():  # q at the parameters where the search ended, which need not be the last it looked at
        ascend_at(model, model.project(x), y, rate, tolerance)
    return tuple(bounds)


# Bayesian generalised linear models: logistic, Poisson, robust and ordinary regression.


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
