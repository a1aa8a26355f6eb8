"""Models whose latent numbers are linear in Gaussian variables: two derivatives per datum make a step."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.errors import NonFiniteError
from natgrad.families.domains import time_to_singular
from natgrad.linalg import check_finite, cholesky
from natgrad.show import brief
from natgrad.vi.laplace import check_precision
from natgrad.vi.likelihoods import Likelihood
from natgrad.vi.posterior import check_rate

Projection: TypeAlias = tuple[Tensor, Tensor]  # a [n m] and r [n]: given v, f_n = a_nᵀv + ε_n with ε_n ~ N(0, r_n)
MARGIN = 0.9  # how far a step may go towards the boundary of the domain
_HALVINGS = 12
_GAP = 0.1  # nats of a bound that its quadrature may be off before a warning
_log = logging.getLogger("natgrad")


@final
@dataclass(frozen=True)
class Step:
    """The size of a variational step, as it was asked for and as it was taken.

    A step is shorter than asked where it would leave the domain.

    Attributes:
        asked: ρ.
        taken: The size that was taken, [] or [*batch], on the device: nobody has to wait for it.
        bound: The bound that shortened it.

    Example:
        >>> Step(1.0, torch.tensor(0.25), "the precision must be positive definite").reason
        'shortened from 1 to 0.25: the precision must be positive definite'
    """

    asked: float
    taken: Tensor  # [] or [*batch], on the device: nobody has to wait for it
    bound: str  # the bound that shortened it

    __repr__ = brief

    @property
    def shortened(self) -> bool:
        """Whether the step, or one in the batch, is shorter than asked; waits for the device."""
        return bool((self.taken < self.asked).any())

    @property
    def reason(self) -> str | None:
        """Why the step is shorter, or None; waits for the device."""
        if not self.shortened:
            return None
        return f"shortened from {self.asked:g} to {float(self.taken.min()):.3g}: {self.bound}"


@final
@dataclass(frozen=True)
class Belief:
    """q(v) = N(μ, Λ⁻¹) in natural parameters: shift Λμ [m] and precision Λ [m m]; C Cᵀ = Λ."""

    shift: Tensor
    precision: Tensor

    @property
    def root(self) -> Tensor:
        """C, lower triangular; every step keeps Λ positive definite."""
        return cholesky(self.precision, 0.0, "the precision of the latent Gaussian")

    def marginals(self, at: Projection) -> tuple[Tensor, Tensor, Tensor]:
        """Means μ_f and variances v_f [n] of the latent values, and KL(q(v) ‖ N(0, 1)) []; one factorisation."""
        C, m = self.root, self.shift.shape[0]
        inverse = torch.linalg.solve_triangular(C, torch.eye(m, dtype=C.dtype, device=C.device), upper=False)
        half = at[0] @ inverse.T  # [n m]: C⁻¹a_n
        white = inverse @ self.shift
        μ = inverse.T @ white
        logdet = 2 * C.diagonal().log().sum()
        kl = 0.5 * (inverse.square().sum() + μ.square().sum() - m + logdet)
        return half @ white, at[1] + half.square().sum(1), kl

    def moved(self, target: Belief, ρ: float | Tensor) -> Belief:
        """(1 − ρ) η + ρ η̂ in both natural parameters."""
        weight = torch.as_tensor(ρ, dtype=self.shift.dtype, device=self.shift.device)
        return Belief(self.shift.lerp(target.shift, weight), self.precision.lerp(target.precision, weight))

    def reach(self, target: Belief) -> Tensor:
        """The largest ρ with (1 − ρ) Λ + ρ Λ̂ ⪰ 0."""
        return time_to_singular(self.root, target.precision - self.precision)


class LatentGaussian(nn.Module, ABC):
    """The base class of models with a Gaussian latent vector, stepped by natural gradient.

    ``SparseGP`` and ``BayesianLinear`` are such models; ``ascend`` and ``learn`` fit them.

    Args:
        likelihood: How a datum depends on its latent function value.
        like: A tensor [m] with the size, precision and device of the latent vector v.

    Method:
        y_n ~ p(y | f_n), f_n = a_nᵀv + ε_n, with the prior v ~ N(0, 1) and q(v) = N(μ, Λ⁻¹):

            ELBO = Σ_n E_q log p(y_n | f_n) − KL(q(v) ‖ N(0, 1)).

        The natural gradient in (Λμ, −½Λ) is the plain gradient in the mean parameters (Grosse 2021), which needs two
        numbers per datum, ġ_n = ∂E_n/∂μ_n and v̇_n = ∂E_n/∂v_n (Khan & Lin 2017; Salimbeni et al. 2018):

            Λ  ← (1 − ρ) Λ  + ρ (1 + Σ_n (−2v̇_n) a_n a_nᵀ) Λμ ← (1 − ρ) Λμ + ρ Σ_n (ġ_n − 2v̇_n μ_n) a_n

        For Gaussian noise ρ = 1 is the optimum, whatever q was. A step reads its data and its factorisations, and so
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
        """a [n m] and r [n] at inputs x; they change with the hyperparameters alone, and may be reused until then."""

    @property
    def belief(self) -> Belief:
        """q(v)."""
        return Belief(self.shift, self.precision)

    def elbo(self, x: Tensor, y: Tensor, total: int | None = None) -> Tensor:
        """The bound [] on log p(y), differentiable in the hyperparameters; ``total``: the number of all data."""
        y = self.checked(x, y)
        return self.bound(self.project(x), y, _scale(y, total))

    def bound(self, at: Projection, y: Tensor, scale: float = 1.0) -> Tensor:
        """The ELBO at a given projection."""
        μ, v, kl = self.belief.marginals(at)
        return scale * self.likelihood.expected(y, μ, v).sum() - kl

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, rate: float = 1.0, total: int | None = None) -> Step:
        """One natural-gradient step of size ρ = ``rate`` on a batch."""
        check_rate(rate)
        y = self.checked(x, y)
        at, belief = self.project(x), self.belief
        μ, v, _ = belief.marginals(at)
        target = self.target(at, y, μ, v, _scale(y, total))
        step = self.limited(belief, target, rate)
        self.assume(belief.moved(target, step.taken))
        return step

    def target(self, at: Projection, y: Tensor, μ: Tensor, v: Tensor, scale: float = 1.0) -> Belief:
        """η̂: the prior with a Gaussian site for every datum, where a step of size 1 ends."""
        g_mean, g_variance = self.likelihood.slopes(y, μ, v)
        a, _ = at
        shift = a.T @ (scale * (g_mean - 2 * g_variance * μ))
        precision = (a * (-2 * scale * g_variance).unsqueeze(1)).T @ a
        precision.diagonal().add_(1.0)
        if not bool(shift.isfinite().all() & precision.isfinite().all()):
            raise NonFiniteError(
                f"the step is not finite: E log p of {type(self.likelihood).__name__} has no finite derivatives where "
                f"the latent values have variances up to {float(v.max()):.3g}. Nothing was changed: use a smaller "
                "variance of the prior, or data in other units"
            )
        return Belief(shift, precision)

    def limited(self, belief: Belief, target: Belief, rate: float) -> Step:
        """The step, shortened where Λ would stop being positive definite."""
        taken = torch.full((), rate, dtype=belief.shift.dtype, device=belief.shift.device)
        if not self.likelihood.concave:
            taken = torch.minimum(taken, MARGIN * belief.reach(target))
        return Step(rate, taken, "the precision of q(v) must stay positive definite")

    @torch.no_grad()
    def assume(self, belief: Belief) -> None:
        """Set q(v)."""
        self.shift.copy_(belief.shift)
        self.precision.copy_(belief.precision)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [n] of f(x)."""
        μ, v, _ = self.belief.marginals(self.project(x))
        return μ, v

    def check(self, x: Tensor, y: Tensor) -> None:
        """Refuse data that do not fit; q does not change."""
        if y.ndim != 1 or x.shape[0] != y.shape[0]:
            raise ValueError(f"inputs x [n *shape] and data y [n] are needed, got {tuple(x.shape)}, {tuple(y.shape)}")
        if y.shape[0] == 0:
            raise ValueError("the batch is empty: a step without data would forget what q has learned, leave it out")
        check_finite(x, "the inputs x")
        self.likelihood.check(y)

    def checked(self, x: Tensor, y: Tensor) -> Tensor:
        """y in the precision of the model, after ``check``."""
        self.check(x, y)
        return y.to(self.shift.dtype)


def in_precision_of(like: Tensor, x: Tensor) -> Tensor:
    """Inputs x in the precision of the model; those of a higher one are refused, as they would lose digits."""
    if torch.promote_types(x.dtype, like.dtype) != like.dtype:
        raise TypeError(
            f"the inputs x are {x.dtype} and the model is {like.dtype}: call model.to({x.dtype}), or convert x"
        )
    return x.to(like.dtype)


def _scale(y: Tensor, total: int | None) -> float:
    """N/n: a batch of n represents all N data."""
    if total is not None and total < y.shape[0]:
        raise ValueError(f"total={total} is the number of all data, and this batch alone has {y.shape[0]}")
    return 1.0 if total is None else total / y.shape[0]


# Ascent on all data with fixed hyperparameters, until the bound stands still.


@final
@dataclass(frozen=True)
class Ascent:
    """What ``ascend`` returns: the evidence bound after every step, and the steps.

    Attributes:
        elbo: The bound before the first step and after every one, in nats.
        steps: The steps, as they were asked for and taken.
    """

    elbo: tuple[float, ...]
    steps: tuple[Step, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why steps were shortened, if any were."""
        return tuple(step.reason for step in self.steps if step.reason is not None)


@torch.no_grad()
def ascend(
    model: LatentGaussian, x: Tensor, y: Tensor, *, rate: float = 1.0, tolerance: float = 1e-3, steps: int = 100
) -> Ascent:
    """Fit the posterior of a Gaussian process or linear model, with fixed hyperparameters.

    The bound never falls: a step that would lower it is halved, and says so. With Gaussian noise the first step is the
    optimum (Titsias 2009), and the second one only confirms it.

    Args:
        model: The ``SparseGP``, ``BayesianLinear``, or other ``LatentGaussian``.
        x: The inputs of all data.
        y: The targets [n].
        rate: The size ρ of the steps, in (0, 1].
        tolerance: Stop when a step gains fewer nats than this.
        steps: The most steps to take.

    Returns:
        The bounds and the steps, an ``Ascent``.

    Example:
        >>> import torch, natgrad as ng
        >>> x = torch.linspace(0, 1, 30).unsqueeze(1)
        >>> gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.3), ng.vi.BernoulliLogit(), inducing=x[::5])
        >>> ascent = ng.vi.ascend(gp, x, (x[:, 0] > 0.5).float())
        >>> ascent.elbo[-1] > ascent.elbo[0] and len(ascent.steps) < 20
        True
    """
    y = model.checked(x, y)
    at = model.project(x)
    ascent = ascend_at(model, at, y, rate=rate, tolerance=tolerance, steps=steps)
    _warn_of_gap(model, at, y)
    return ascent


@torch.no_grad()
def ascend_at(
    model: LatentGaussian, at: Projection, y: Tensor, *, rate: float, tolerance: float, steps: int = 100
) -> Ascent:
    """``ascend`` at a given projection."""
    check_rate(rate)

    def evaluate(belief: Belief) -> tuple[Tensor, Tensor, float]:
        μ, v, kl = belief.marginals(at)
        return μ, v, float(model.likelihood.expected(y, μ, v).sum() - kl)

    belief = model.belief
    μ, v, bound = evaluate(belief)
    bounds, taken = [bound], []
    for _ in range(steps):
        target, asked = model.target(at, y, μ, v), rate
        rounding = 64 * torch.finfo(μ.dtype).eps * abs(bound)
        for _ in range(_HALVINGS):
            step = model.limited(belief, target, asked)
            new = belief.moved(target, step.taken)
            new_μ, new_v, new_bound = evaluate(new)
            if new_bound >= bound - rounding:
                reason = step.bound if asked == rate else "a longer step would lower the bound"
                taken.append(Step(rate, step.taken, reason))
                belief, μ, v, bound = new, new_μ, new_v, new_bound
                break
            asked /= 2
        else:
            reason = "the bound is at its maximum, to the accuracy of the quadrature"
            taken.append(Step(rate, torch.zeros_like(step.taken), reason))
        bounds.append(bound)
        if bounds[-1] - bounds[-2] < tolerance:
            break
    model.assume(belief)
    return Ascent(tuple(bounds), tuple(taken))


def learn(
    model: LatentGaussian, x: Tensor, y: Tensor, *, steps: int = 50, tolerance: float = 1e-2, rate: float = 1.0
) -> tuple[float, ...]:
    """Learn the hyperparameters of a Gaussian process or linear model from data.

    Args:
        model: The model; its parameters that require a gradient are learned.
        x: The inputs of all data.
        y: The targets [n].
        steps: About how many evaluations of the bound to spend.
        tolerance: Stop when no entry of the gradient exceeds this; also the nats at which steps of q end.
        rate: The size ρ of the steps of q.

    Returns:
        The bound after every evaluation, in nats.

    Method:
        It maximises max_q ELBO. At the maximum over q the gradient of max_q ELBO is that of the ELBO with q fixed. So q
        is stepped by natural gradient until a step gains less than ``tolerance`` nats (one step, with Gaussian noise),
        and L-BFGS moves the hyperparameters.

    Example:
        >>> import torch, natgrad as ng
        >>> x = torch.linspace(0, 1, 20).unsqueeze(1)
        >>> gp = ng.vi.SparseGP(ng.vi.SquaredExponential(1.0), ng.vi.GaussianNoise(1.0), inducing=x[::4])
        >>> bounds = ng.vi.learn(gp, x, (6 * x[:, 0]).sin(), steps=20)
        >>> bounds[-1] > bounds[0] + 20
        True
    """
    y = model.checked(x, y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to learn, use ascend")
    bounds: list[float] = []

    def evaluate() -> float:
        at = a, r = model.project(x)
        ascend_at(model, (a.detach(), r.detach()), y, rate=rate, tolerance=tolerance)
        loss = -model.bound(at, y)
        for p, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = slope
        bounds.append(-float(loss.detach()))
        return -bounds[-1]

    gradients = [p.grad for p in parameters]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=steps, max_eval=steps, tolerance_grad=tolerance, line_search_fn="strong_wolfe"
    )
    optimizer.step(evaluate)
    for p, slope in zip(parameters, gradients, strict=True):
        p.grad = slope
    with torch.no_grad():  # q where the search ended, which need not be its last evaluation
        at = model.project(x)
        ascend_at(model, at, y, rate=rate, tolerance=tolerance)
        _warn_of_gap(model, at, y)
    return tuple(bounds)


def _warn_of_gap(model: LatentGaussian, at: Projection, y: Tensor) -> None:
    μ, v, _ = model.belief.marginals(at)
    gap = model.likelihood.gap(y, μ, v)
    if not gap <= _GAP:
        _log.warning(
            "the quadrature of %s changes the bound by %.2g nats with twice the nodes: give it nodes=…",
            type(model.likelihood).__name__,
            gap,
        )


@final
class BayesianLinear(LatentGaussian):
    """Bayesian linear and logistic regression: a posterior over the weights of a linear model.

    Bayesian logistic regression is the likelihood ``BernoulliLogit()``. There is no bias: append a column of ones to x.

    Args:
        likelihood: How a target depends on the linear function, such as ``GaussianNoise()``.
        features: The number d of columns of x.
        prior_precision: δ of the prior w ~ N(0, 1/δ).

    Method:
        y_n ~ p(y | f_n), f_n = x_nᵀw, with the prior w ~ N(0, 1/δ): v = √δ w, a_n = x_n/√δ, r_n = 0.

    Example:
        >>> import torch, natgrad as ng
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
        check_precision(prior_precision)
        super().__init__(likelihood, torch.empty(features))
        self.prior_precision: float = float(prior_precision)

    def project(self, x: Tensor) -> Projection:
        if x.ndim != 2 or x.shape[1] != len(self.shift):
            raise ValueError(f"inputs must be [n {len(self.shift)}], one column per weight, got shape {tuple(x.shape)}")
        x = in_precision_of(self.shift, x)
        return x / math.sqrt(self.prior_precision), x.new_zeros(x.shape[0])

    def posterior(self) -> tuple[Tensor, Tensor]:
        """Mean [d] and covariance [d d] of the weights w."""
        covariance = torch.cholesky_inverse(self.belief.root)
        return covariance @ self.shift / math.sqrt(self.prior_precision), covariance / self.prior_precision
